//! The `warpipe` command.

mod args;
mod attach;
mod bench;
mod demo;
mod device_arg;
mod doctor;
mod exit;
mod image;
mod interrupt;
mod list;
mod members;
mod npy;
mod output;
mod process;
mod publish;
mod registered;
mod save;
mod source;
mod statistics;
mod subscribe;

use std::process::ExitCode;

use clap::Parser;

use args::{Arguments, Command};
use exit::Exit;

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments.command) {
        Ok(exit) => exit.into(),
        Err(error) if exit::is_closed_pipe(&error) => Exit::Done.into(),
        Err(error) => {
            complain(&format!("{error:#}"));
            Exit::of(&error).into()
        }
    }
}

fn run(command: &Command) -> anyhow::Result<Exit> {
    match command {
        Command::Demo(args) => demo::run(args),
        Command::Pub(args) => publish::run(args),
        Command::Sub(args) => subscribe::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Ls(args) => list::run(args),
        Command::Members(args) => members::run(args),
        Command::Bench(args) => bench::run(args).map(|()| Exit::Done),
        Command::DemoPublisher(args) => demo::run_publisher(args),
        Command::DemoSubscriber(args) => demo::run_subscriber(args),
        Command::DemoCleaner(args) => demo::run_cleaner(args),
        Command::DoctorChild(args) => doctor::run_child(args),
    }
}

/// What went wrong, and on a line of its own what to do.
fn complain(message: &str) {
    let (happened, next) = exit::split_next(message);
    eprintln!("warpipe: {}", output::printable(&happened));
    if let Some(next) = next {
        eprintln!("  next: {}", output::printable(&next));
    }
}
