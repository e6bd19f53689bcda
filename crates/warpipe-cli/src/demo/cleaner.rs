//! The demo's cleaner: a process that removes the demo's folder if the demo was killed and cannot
//! do it.
//!
//! It waits for the end of a pipe that the demo and all its children hold, and so for the last of
//! them.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use rustix::io::{FdFlags, fcntl_setfd};
use rustix::pipe::{PipeFlags, pipe_with};

use super::FOLDER_PREFIX;
use crate::exit::Exit;
use crate::process;

/// It has a folder to remove, which is gone already.
const END_PATIENCE: Duration = Duration::from_secs(10);

/// The cleaner's arguments.
#[derive(Debug, Args)]
pub struct CleanerArgs {
    #[arg(long)]
    folder: PathBuf,
}

/// In the child. It outlives its parent on purpose.
pub fn run(args: &CleanerArgs) -> anyhow::Result<Exit> {
    let name = args
        .folder
        .file_name()
        .unwrap_or_default()
        .to_string_lossy();
    anyhow::ensure!(
        name.starts_with(FOLDER_PREFIX),
        "{} is no folder of a demo",
        args.folder.display()
    );
    // Nothing is ever written: this ends with the last process that holds the other end.
    let _ = std::io::stdin().read(&mut [0; 1]);
    match std::fs::remove_dir_all(&args.folder) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
        _ => Ok(Exit::Done),
    }
}

/// The cleaner as its parent sees it.
#[derive(Debug)]
pub struct Cleaner {
    child: Child,
    /// The end of the pipe that children inherit.
    alive: Option<OwnedFd>,
}

impl Cleaner {
    /// Starts it. Every process that is started from now on is one that it waits for.
    pub fn start(folder: &Path) -> anyhow::Result<Cleaner> {
        let (wait, alive) = pipe_with(PipeFlags::CLOEXEC)?;
        let mut command = process::this_program();
        command.arg("demo-cleaner").arg("--folder").arg(folder);
        command
            .stdin(Stdio::from(wait))
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let child = command.spawn().context("cannot start the cleaner")?;
        let cleaner = Cleaner {
            child,
            alive: Some(alive),
        };
        // Not before: the cleaner would wait for itself.
        cleaner
            .alive
            .as_ref()
            .map_or(Ok(()), |alive| fcntl_setfd(alive, FdFlags::empty()))?;
        Ok(cleaner)
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Cleaner {
    fn drop(&mut self) {
        self.alive = None;
        let _ = process::end(&mut self.child, END_PATIENCE);
    }
}
