//! The command `warpipe` as a library: the program of this crate and the Python package run the
//! same [`main`].
//!
//! This crate is the command line alone: it promises no stable Rust interface. Programs use the
//! crate `warpipe`.
#![deny(missing_docs)]

#[doc(hidden)]
pub mod cpus;
#[doc(hidden)]
pub mod device_arg;

mod announcer;
mod args;
#[cfg(feature = "bridge")]
mod bridge;
mod demo;
mod doctor;
mod exit;
mod gc;
mod image;
mod interrupt;
mod job;
mod list;
mod manual;
mod members;
mod metrics;
mod npy;
mod observe;
mod output;
mod poll;
mod process;
mod publish;
mod registered;
mod run;
mod save;
mod source;
mod subscribe;
mod top;
mod weights;

use std::ffi::OsString;
use std::io::Write;
use std::os::fd::AsFd;

use clap::Parser;

use args::{Arguments, Command};
use exit::Exit;

#[doc(hidden)]
pub use doctor::system::mps_answers;
pub use process::Program;

/// Runs one command line, beginning with the program's name, and returns its exit code.
/// `program` starts the same command in a child process: `demo`, `doctor` and
/// `weights serve` have children.
///
/// The first SIGINT or SIGTERM ends a command in order. This needs the default action of SIGINT:
/// a runtime with a handler of its own (Python) restores that first.
pub fn main(arguments: impl IntoIterator<Item = OsString>, program: Program) -> u8 {
    process::set_program(program);
    interrupt::take_signals();
    let exit = match Arguments::try_parse_from(arguments) {
        Ok(arguments) => match run(&arguments.command) {
            Ok(code) => code,
            Err(error) if exit::is_closed_pipe(&error) && only_shows(&arguments.command) => {
                Exit::Done as u8
            }
            // Nobody reads what it says.
            Err(error) if exit::is_interrupted(&error) => Exit::Interrupted as u8,
            Err(error) => {
                let (happened, next) = exit::fact_and_hint(&error);
                complain(&happened, next.as_deref());
                Exit::of(&error) as u8
            }
        },
        // Also help and the version. A reader of them that went away is no error.
        Err(said) => {
            let printed = said.print().and_then(|()| std::io::stdout().flush());
            match printed {
                Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => {
                    note(&format!("this cannot be printed: {error}"));
                    Exit::System as u8
                }
                _ if said.use_stderr() => Exit::Usage as u8,
                _ => Exit::Done as u8,
            }
        }
    };
    // A caller in another language ends without Rust's own flush.
    let _ = std::io::stdout().flush();
    exit
}

/// Whether a command has done its work when the reader of its output wants no more of it.
fn only_shows(command: &Command) -> bool {
    match command {
        Command::Pub(_) => false,
        Command::Sub(args) => args.save.is_none(),
        _ => true,
    }
}

#[cfg(not(feature = "bridge"))]
const NO_BRIDGE: &str = "this command was built without the bridge; build it in a checkout with \
    `cargo install --path crates/warpipe-cli --features bridge`, or take the one of the Python \
    package's wheel";

/// Its exit code.
fn run(command: &Command) -> anyhow::Result<u8> {
    let exit = match command {
        Command::Demo(args) => demo::run(args),
        Command::Pub(args) => publish::run(args),
        Command::Sub(args) => subscribe::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Ls(args) => list::run(args),
        Command::Gc(args) => gc::run(args),
        Command::Metrics(args) => metrics::run(args),
        Command::Top(args) => top::run(args),
        Command::Members(args) => members::run(args),
        Command::Weights(args) => weights::run(args),
        #[cfg(feature = "bridge")]
        Command::Bridge(args) => bridge::run(args),
        #[cfg(not(feature = "bridge"))]
        Command::Bridge(_) => Err(exit::UsageError(NO_BRIDGE.into()).into()),
        Command::Completions(args) => manual::complete(args),
        Command::Man(args) => manual::man(args),
        Command::DemoPublisher(args) => demo::run_publisher(args),
        Command::DemoSubscriber(args) => demo::run_subscriber(args),
        Command::DoctorChild(args) => doctor::run_child(args),
        Command::WeightsChild(args) => Ok(weights::run_child(args)),
        Command::MpsDaemon(args) => run::run_daemon(args),
        // The program's own code.
        Command::Run(args) => return run::run(args),
    };
    Ok(exit? as u8)
}

/// Says what went wrong, if anybody reads it: `eprintln` would panic.
fn complain(happened: &str, next: Option<&str>) {
    let text = complaint(happened, next);
    let _ = output::write_unless(interrupt::came, std::io::stderr().as_fd(), text.as_bytes());
}

/// What went wrong, and on a line of its own what to do.
fn complaint(happened: &str, next: Option<&str>) -> String {
    let mut text = format!("warpipe: {}\n", output::printable(happened));
    if let Some(next) = next {
        text += &format!("  next: {}\n", output::printable(next));
    }
    text
}

/// Says a line on standard error.
fn note(said: &str) {
    complain(said, None);
}
