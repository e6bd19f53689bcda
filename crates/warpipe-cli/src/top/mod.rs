//! `warpipe top`: the endpoints of a domain, the processes and their memory, kept up to date.

mod draw;
mod keys;
mod stop;
mod table;
mod terminal;
#[cfg(test)]
pub mod tests;
mod view;

use std::io::{self, IsTerminal};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::event::{PollFd, PollFlags};
use serde_json::json;
use signal_hook::consts::SIGWINCH;
use warpipe::Domain;

use crate::args::TopArgs;
use crate::exit::{Exit, UsageError};
use crate::interrupt::{self, Interrupt};
use crate::observe::{Meter, Snapshot, Source, text};
use crate::output::Output;
use crate::poll::poll;
use crate::top::stop::Stops;
use crate::top::terminal::Screen;
use crate::top::view::{View, Wish};

/// Shows the domain until the user quits; with `--once` for one interval.
pub fn run(args: &TopArgs) -> anyhow::Result<Exit> {
    let interrupt = Interrupt::install_for_terminal()?;
    // A path that does not exist is a mistake. The one of the environment may not exist yet.
    if let Some(path) = &args.domain.path {
        Domain::of_user(path, rustix::process::geteuid().as_raw())?;
    }
    let mut source = Source::new(args.domain.or_environment()?)?;
    if args.once {
        return once(args, &mut source, &interrupt);
    }
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        return Err(UsageError(
            "top needs a terminal for its input and output; use `warpipe top --once`".into(),
        )
        .into());
    }
    let wakers = Wakers {
        interrupted: interrupt.readable()?,
        resized: interrupt::stream_of(&[SIGWINCH])?,
        stops: Stops::catch()?,
    };
    let shown = {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            // Before the report, which would go to the other screen.
            terminal::restore();
            before(panic);
        }));
        let mut screen = Screen::enter().context("the terminal cannot be set up")?;
        show(args, &mut source, &interrupt, &wakers, &mut screen)
    };
    match shown {
        Ok(()) if interrupt.came() => Ok(Exit::Interrupted),
        Ok(()) => Ok(Exit::Done),
        Err(error) => Err(error),
    }
}

/// What wakes the loop, beside keys.
struct Wakers {
    interrupted: UnixStream,
    resized: UnixStream,
    stops: Stops,
}

/// How long the rest of a key's bytes may take. A lone Escape is such a beginning.
const KEY_REST: Duration = Duration::from_millis(25);

/// Draws, waits for a key, a new size or the next look, and begins again.
fn show(
    args: &TopArgs,
    source: &mut Source,
    interrupt: &Interrupt,
    wakers: &Wakers,
    screen: &mut Screen,
) -> anyhow::Result<()> {
    let (mut view, mut meter) = (View::default(), Meter::default());
    let (mut bytes, mut due) = (Vec::new(), Instant::now());
    while !interrupt.came() {
        if due <= Instant::now() {
            let look = look(source, &mut meter);
            view.update(look.map_err(|error| format!("{error:#}")));
            // A look that takes long leaves time for others.
            due = Instant::now() + args.interval;
        }
        let size = screen.size();
        screen.show(&draw::draw(&mut view, size.0, size.1), size)?;
        assert!(!args.plant_panic, "planted");
        let left = due.saturating_duration_since(Instant::now());
        let limit = if bytes.is_empty() {
            left
        } else {
            KEY_REST.min(left)
        };
        let has_input = wait(wakers, limit)?;
        let is_over = has_input && !read_input(&mut bytes)?;
        let keys = keys::take(&mut bytes, !has_input);
        let wishes: Vec<Wish> = keys.into_iter().map(|key| view.press(key)).collect();
        if is_over || wishes.contains(&Wish::Quit) {
            return Ok(());
        }
        if wishes.contains(&Wish::Suspend) {
            wakers.stops.ask()?;
        }
        wakers.stops.obey(screen)?;
    }
    Ok(())
}

fn look(source: &mut Source, meter: &mut Meter) -> anyhow::Result<Snapshot> {
    let mut snapshot = source.look()?;
    meter.rate(&mut snapshot);
    Ok(snapshot)
}

/// Waits, and returns whether standard input is readable, or at its end.
fn wait(wakers: &Wakers, limit: Duration) -> io::Result<bool> {
    let input = io::stdin();
    let mut fds = [
        PollFd::new(&input, PollFlags::IN),
        PollFd::new(&wakers.resized, PollFlags::IN),
        PollFd::new(&wakers.interrupted, PollFlags::IN),
        PollFd::new(&wakers.stops.asked, PollFlags::IN),
        PollFd::new(&wakers.stops.continued, PollFlags::IN),
    ];
    poll(&mut fds, Some(limit))?;
    let has_input = !fds[0].revents().is_empty();
    interrupt::take(&wakers.resized);
    Ok(has_input)
}

/// Adds what the terminal has sent. False at its end: the terminal is gone.
fn read_input(bytes: &mut Vec<u8>) -> io::Result<bool> {
    let mut some = [0; 256];
    match rustix::io::read(io::stdin(), &mut some) {
        Ok(0) | Err(rustix::io::Errno::IO) => Ok(false),
        Ok(count) => {
            bytes.extend_from_slice(&some[..count]);
            Ok(true)
        }
        Err(rustix::io::Errno::INTR | rustix::io::Errno::AGAIN) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

fn once(args: &TopArgs, source: &mut Source, interrupt: &Interrupt) -> anyhow::Result<Exit> {
    let mut meter = Meter::default();
    look(source, &mut meter)?;
    if !interrupt.sleep(args.interval) {
        return Ok(Exit::Interrupted);
    }
    let snapshot = look(source, &mut meter)?;
    let mut report = json!(snapshot);
    report["interval_seconds"] = args.interval.as_secs_f64().into();
    Output::new(args.json).say(|| text::all(&snapshot), &report)?;
    Ok(Exit::Done)
}
