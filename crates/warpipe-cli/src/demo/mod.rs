//! `warpipe demo`: one publisher and several subscribers, real processes, every word checked.

mod crew;
mod event;
mod publisher;
mod subscriber;
mod tally;
mod view;

use std::os::unix::fs::PermissionsExt;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use serde::Serialize;
use tempfile::TempDir;

use crate::args::DemoArgs;
use crate::choice::DeviceChoice;
use crate::exit::Exit;
use crate::interrupt::{Interrupt, LOOK};
use crate::output::{Output, Style, bytes, styled};

pub use publisher::run as run_publisher;
pub use subscriber::run as run_subscriber;

use crew::{AllClosed, Crew, News, Note};
use tally::{PUBLISHER, Tally};
use view::View;

const ENDPOINT: &str = "demo/stream";
/// Samples that a subscriber may have in flight.
const DEPTH: u32 = 4;
/// How long processes may take to find each other, devices to open, and kernels to load.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// How long an item may take; a debug build on a busy core is slow.
const ITEM_PATIENCE: Duration = Duration::from_secs(60);
/// How long processes may take to end when asked to.
const STOP_PATIENCE: Duration = Duration::from_secs(15);
/// How often a child tells of its counts.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// What both kinds of child are told.
#[derive(Debug, Args)]
pub struct ChildArgs {
    #[arg(long)]
    parent: i32,
    #[arg(long)]
    device: DeviceChoice,
    #[arg(long)]
    subscribers: u32,
    #[arg(long)]
    item_bytes: u64,
    #[arg(long)]
    milliseconds: u64,
    #[arg(long)]
    items: Option<u64>,
    #[arg(long)]
    sabotage: Option<u64>,
}

#[derive(Serialize)]
struct Started<'a> {
    event: &'static str,
    role: &'a str,
    pid: u32,
}

/// Runs the demo.
pub fn run(args: &DemoArgs) -> anyhow::Result<Exit> {
    let output = Output::new(args.json);
    let interrupt = Interrupt::install()?;
    let (device, choice, why) = choose(args.device)?;
    let domain = private_domain()?;
    output.human(|| headline(args, &device))?;
    let mut crew = start(args, choice, &domain)?;
    for member in &crew.members {
        let started = Started { event: "started", role: &member.role, pid: member.pid };
        output.say(|| styled(Style::Dim, &format!("  {}, process {}", member.role, member.pid)), &started)?;
    }
    let mut tally = Tally::new(args.subscribers as usize, args.megabytes << 20);
    follow(&mut crew, &mut tally, &interrupt, args)?;
    drop(crew);
    domain.close().context("cannot remove the demo's domain")?;
    let interrupted = interrupt.came();
    output.say(|| tally.table(&device, &why, interrupted), &tally.summary(&device, &why, interrupted))?;
    Ok(match (interrupted, tally.is_good()) {
        (true, _) => Exit::Interrupted,
        (false, true) => Exit::Done,
        (false, false) => Exit::Failed,
    })
}

/// Opens the device to see that it is there, and leaves it to the children.
fn choose(choice: DeviceChoice) -> anyhow::Result<(String, DeviceChoice, String)> {
    let chosen = choice.open()?;
    Ok((chosen.device.to_string(), DeviceChoice::of(&chosen.device), chosen.why))
}

fn private_domain() -> anyhow::Result<TempDir> {
    let private = std::fs::Permissions::from_mode(0o700);
    let made = tempfile::Builder::new().prefix("warpipe-demo-").permissions(private).tempdir();
    made.with_context(|| format!("cannot make a directory in {} (TMPDIR says where)", std::env::temp_dir().display()))
}

fn headline(args: &DemoArgs, device: &str) -> String {
    let (subscribers, size) = (args.subscribers, bytes(args.megabytes << 20));
    styled(Style::Bold, &format!("warpipe demo on {device}: 1 publisher, {subscribers} subscribers, tensors of {size}"))
}

fn start(args: &DemoArgs, device: DeviceChoice, domain: &TempDir) -> anyhow::Result<Crew> {
    let mut crew = Crew::new();
    crew.start("publisher".into(), domain.path(), &child_arguments("demo-publisher", args, device))?;
    for index in 1..=args.subscribers {
        let arguments = child_arguments("demo-subscriber", args, device);
        crew.start(format!("subscriber {index}"), domain.path(), &arguments)?;
    }
    crew.complete();
    Ok(crew)
}

fn child_arguments(role: &str, args: &DemoArgs, device: DeviceChoice) -> Vec<String> {
    let mut arguments = vec![
        role.to_owned(),
        format!("--parent={}", std::process::id()),
        format!("--device={device}"),
        format!("--subscribers={}", args.subscribers),
        format!("--item-bytes={}", args.megabytes << 20),
        format!("--milliseconds={}", args.seconds.as_millis()),
    ];
    arguments.extend(args.items.map(|items| format!("--items={items}")));
    arguments.extend(args.sabotage.map(|sequence| format!("--sabotage={sequence}")));
    arguments
}

/// Listens until every process has ended; ends them in order on Ctrl-C, and the hard way when time is up.
fn follow(crew: &mut Crew, tally: &mut Tally, interrupt: &Interrupt, args: &DemoArgs) -> anyhow::Result<()> {
    let mut view = View::new(args.seconds, args.json);
    let mut deadline = Instant::now() + args.seconds + START_PATIENCE + ITEM_PATIENCE;
    let (mut asked, mut killed) = (false, false);
    loop {
        match crew.next(LOOK) {
            Ok(Some(note)) => take(crew, tally, note)?,
            Ok(None) => {}
            Err(AllClosed) => break,
        }
        view.show(tally);
        if interrupt.came() && !asked {
            asked = true;
            crew.terminate();
            deadline = deadline.min(Instant::now() + STOP_PATIENCE);
        }
        if Instant::now() > deadline && !killed {
            killed = true;
            tally.fail("the processes did not end in time and were killed".into());
            crew.kill();
        }
    }
    view.clear();
    Ok(())
}

fn take(crew: &mut Crew, tally: &mut Tally, note: Note) -> anyhow::Result<()> {
    match note.news {
        News::Event(event) => tally.note(note.member, event),
        News::Garbled(line) => tally.fail(format!("process {} said {line:?}", note.member)),
        News::Closed => {
            let ending = crew.reap(note.member)?;
            tally.ended(&crew.members[note.member], &ending);
            if note.member == PUBLISHER && tally.published.items == 0 {
                // Subscribers would wait for it until their patience ends.
                crew.terminate();
            }
        }
    }
    Ok(())
}
