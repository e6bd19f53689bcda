//! What a server says, on a thread of its own: a reader that is slow, stopped or gone, and a disk
//! that is full, neither end the server nor hold it up.

use std::io;
use std::os::fd::AsFd;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use serde::Serialize;

use crate::output::write_unless;

/// The lines that may wait for their reader. Further ones are left out.
const WAITING_MAX: usize = 256;

/// How long the end of a server waits for the reader of its last lines.
const LAST_LINES: Duration = Duration::from_secs(1);

/// Says lines in the order of the calls, none of which waits. Dropping it waits for the last lines
/// up to [`LAST_LINES`]; the thread that writes them may stay behind, without any lock.
#[derive(Debug)]
pub struct Announcer {
    json: bool,
    /// Taken by `drop`.
    lines: Option<SyncSender<Text>>,
    /// Disconnected when the thread has ended.
    end: Receiver<()>,
}

enum Text {
    Output(String),
    Errors(String),
}

impl Announcer {
    /// For people, or as JSON.
    pub fn start(json: bool) -> io::Result<Announcer> {
        let (lines, waiting) = sync_channel(WAITING_MAX);
        let (ended, end) = sync_channel(0);
        let thread = std::thread::Builder::new().name("warpipe-output".into());
        let started = thread.spawn(move || {
            let _ended: SyncSender<()> = ended;
            write_all(&waiting);
        });
        started.map_err(|error| {
            let next = "raise the limit of processes and threads (`ulimit -u`)";
            io::Error::new(
                error.kind(),
                format!("a thread cannot be started: {error}; {next}"),
            )
        })?;
        Ok(Announcer {
            json,
            lines: Some(lines),
            end,
        })
    }

    /// One thing to say on standard output, in whichever form was asked for.
    pub fn say(&self, human: impl FnOnce() -> String, json: &impl Serialize) {
        let line = match self.json {
            true => serde_json::to_string(json).unwrap_or_default(),
            false => human(),
        };
        self.send(Text::Output(line + "\n"));
    }

    /// A line that only people want.
    pub fn human(&self, text: impl FnOnce() -> String) {
        if !self.json {
            self.send(Text::Output(text() + "\n"));
        }
    }

    /// A text for standard error, as it is.
    pub fn errors(&self, text: String) {
        self.send(Text::Errors(text));
    }

    fn send(&self, text: Text) {
        if let Some(lines) = &self.lines {
            // Nobody reads what waits already.
            let _ = lines.try_send(text);
        }
    }
}

impl Drop for Announcer {
    fn drop(&mut self) {
        drop(self.lines.take());
        let _ = self.end.recv_timeout(LAST_LINES);
    }
}

fn write_all(waiting: &Receiver<Text>) {
    let (out, errors) = (io::stdout(), io::stderr());
    let write = |to, text: String| write_unless(|| false, to, text.as_bytes());
    let mut is_told = false;
    for text in waiting {
        match text {
            Text::Errors(text) => drop(write(errors.as_fd(), text)),
            Text::Output(line) => match write(out.as_fd(), line) {
                Err(error) if !is_told && error.kind() != io::ErrorKind::BrokenPipe => {
                    is_told = true;
                    let fact = format!("standard output cannot be written: {error}");
                    let text = crate::complaint(&fact, Some("it goes on without it"));
                    drop(write(errors.as_fd(), text));
                }
                _ => {}
            },
        }
    }
}
