//! The supervisor of a private MPS daemon: starts it, and quits it when its standard input ends.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail, ensure};
use clap::Args;
use rustix::event::{PollFd, PollFlags};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, getpid, kill_process, pidfd_open, pidfd_send_signal,
    set_child_subreaper,
};

use super::variables;
use crate::doctor::system::mps_answers_at;
use crate::exit::Exit;
use crate::interrupt::Interrupt;
use crate::job::Job;
use crate::output::printable;
use crate::poll::poll;
use crate::process::{ending, following, wait};

/// The daemon's control program, found in PATH.
const CONTROL: &str = "nvidia-cuda-mps-control";

/// The kernel's name of `nvidia-cuda-mps-server`: 15 bytes of it.
const SERVER_COMM: &[u8] = b"nvidia-cuda-mps";

/// The line that says that the daemon answers.
pub const READY: &str = "ready";

const START_LIMIT: Duration = Duration::from_secs(20);
/// For one command to the daemon, and for its end.
const QUIT_LIMIT: Duration = Duration::from_secs(10);
/// For the servers' own end, after the daemon's.
const SERVER_LIMIT: Duration = Duration::from_secs(5);
const LOOK: Duration = Duration::from_millis(50);

/// The most of a log that an error shows, from its end.
const LOG_SHOWN: usize = 600;

#[derive(Debug, Args)]
pub struct ChildArgs {
    #[arg(long)]
    folder: PathBuf,
}

/// Says one line on standard output: that the daemon answers, or why not.
pub fn run(args: &ChildArgs) -> anyhow::Result<Exit> {
    // A signal ends it like the end of its standard input.
    let interrupt = Interrupt::install()?;
    // The servers that the daemon forks become this process's children when the daemon ends.
    set_child_subreaper(Some(getpid()))?;
    // Not before it is known to be a new one: it is removed with all that is in it.
    let failed = make_folders(&args.folder).and_then(|()| {
        let outcome = supervise(&args.folder, &interrupt);
        let removed = fs::remove_dir_all(&args.folder);
        outcome.and_then(|()| removed.with_context(|| format!("{} is left", args.folder.display())))
    });
    match failed {
        Ok(()) => Ok(Exit::Done),
        Err(error) => {
            // Read if the daemon has not answered; on standard error otherwise.
            let said = format!("{error:#}").replace('\n', "; ");
            if writeln!(io::stdout(), "{said}").is_err() {
                crate::note(&said);
            }
            Ok(Exit::Failed)
        }
    }
}

fn make_folders(folder: &Path) -> anyhow::Result<()> {
    let is_empty = fs::read_dir(folder).is_ok_and(|mut files| files.next().is_none());
    ensure!(is_empty, "{} is no empty folder", folder.display());
    for (_, made) in variables(folder) {
        fs::create_dir(&made).with_context(|| format!("{} cannot be made", made.display()))?;
    }
    Ok(())
}

fn supervise(folder: &Path, interrupt: &Interrupt) -> anyhow::Result<()> {
    let mut daemon = Daemon::start(folder)?;
    let started = daemon.wait_until_it_answers(interrupt);
    if started.is_err() {
        // It takes no request, and has no servers yet: no client could connect.
        let _ = daemon.child.kill();
        let _ = daemon.child.wait();
    } else if writeln!(io::stdout(), "{READY}").is_ok() {
        daemon.wait_for_the_end_of_input(interrupt);
    }
    daemon.quit();
    started
}

/// A daemon in the foreground of this process.
struct Daemon {
    folder: PathBuf,
    child: Child,
}

impl Daemon {
    fn start(folder: &Path) -> anyhow::Result<Daemon> {
        let output = File::create(folder.join("output"))?;
        // It may ignore SIGTERM. When this process is killed, nothing else quits it.
        let spawned = following(CONTROL.as_ref(), Signal::KILL)
            .arg("-f")
            .process_group(0)
            .envs(variables(folder))
            .stdin(Stdio::null())
            .stdout(output.try_clone()?)
            .stderr(output)
            .spawn();
        let child = spawned.map_err(|error| match error.kind() {
            ErrorKind::NotFound => anyhow!(
                "{CONTROL} is not in PATH; it comes with NVIDIA's driver, and needs a GPU on this \
                 machine"
            ),
            _ => anyhow!("{CONTROL} cannot be started: {error}"),
        })?;
        let folder = folder.to_owned();
        Ok(Daemon { folder, child })
    }

    fn wait_until_it_answers(&mut self, interrupt: &Interrupt) -> anyhow::Result<()> {
        let start = Instant::now();
        while !mps_answers_at(&self.folder.join("pipe")) {
            if let Some(status) = self.child.try_wait()? {
                bail!("{CONTROL} {}{}", ending(status), self.log());
            }
            if start.elapsed() > START_LIMIT {
                let limit = START_LIMIT.as_secs();
                bail!("{CONTROL} does not answer after {limit} s{}", self.log());
            }
            if interrupt.came() || input_ends_within(LOOK) {
                bail!("interrupted");
            }
        }
        Ok(())
    }

    fn wait_for_the_end_of_input(&mut self, interrupt: &Interrupt) {
        let mut is_told = false;
        while !interrupt.came() && !input_ends_within(LOOK) {
            if !is_told && let Ok(Some(status)) = self.child.try_wait() {
                is_told = true;
                let log = self.log();
                let how = ending(status);
                crate::note(&format!(
                    "the MPS daemon {how}: its clients lose the GPU{log}"
                ));
            }
        }
    }

    /// Ends the daemon and its servers: by request, and those that do not heed it by force.
    fn quit(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.request_quit();
            if !matches!(wait(&mut self.child, QUIT_LIMIT), Ok(Some(_))) {
                let _ = self.child.kill();
                let _ = self.child.wait();
            }
        }
        // What the daemon has left is this process's, and nothing else is.
        if let Err(error) = end_children(SERVER_LIMIT) {
            crate::note(&format!("servers of the MPS daemon may be left: {error}"));
        }
    }

    fn request_quit(&self) -> io::Result<()> {
        let mut control = Command::new(CONTROL)
            .envs(variables(&self.folder))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        if let Some(mut input) = control.stdin.take() {
            let _ = writeln!(input, "quit");
        }
        crate::process::end(&mut control, QUIT_LIMIT).map(drop)
    }

    /// The end of what the daemon has written, for an error.
    fn log(&self) -> String {
        let files = ["output", "log/control.log"].map(|file| self.folder.join(file));
        let text = files.map(|file| fs::read_to_string(file).unwrap_or_default());
        let text = text.concat();
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        let text = printable(&lines.collect::<Vec<_>>().join("; "));
        let from = text.char_indices().rev().nth(LOG_SHOWN);
        match text.is_empty() {
            true => text,
            false => format!(": {}", &text[from.map_or(0, |(at, _)| at)..]),
        }
    }
}

/// Waits for this process's children to end, and kills those that have not after `limit`.
fn end_children(limit: Duration) -> io::Result<()> {
    let start = Instant::now();
    loop {
        // Reaps those that have ended, so their numbers are not used again before this look.
        match rustix::process::wait(WaitOptions::NOHANG) {
            Ok(Some(_)) => continue,
            Err(rustix::io::Errno::CHILD) => return Ok(()),
            Ok(None) => {}
            Err(error) => return Err(error.into()),
        }
        if start.elapsed() > limit {
            children()?.into_iter().for_each(|child| {
                let _ = kill_process(child, Signal::KILL);
            });
        }
        std::thread::park_timeout(LOOK);
    }
}

/// The children of this process, which alone reaps them.
fn children() -> io::Result<Vec<Pid>> {
    let own = std::process::id().cast_signed();
    let is_child = |pid: &Pid| {
        let job = Job::of(pid.as_raw_pid());
        job.is_some_and(|job| job.parent == own)
    };
    Ok(processes()?.filter(is_child).collect())
}

/// The processes that this one sees.
fn processes() -> io::Result<impl Iterator<Item = Pid>> {
    let names = fs::read_dir("/proc")?.filter_map(Result::ok);
    Ok(names.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)))
}

/// Ends the servers of a daemon that was killed: processes with a server's name and this folder's
/// variables. The daemon's clients have the variables too, and other daemons' servers the name.
pub fn end_servers_of(folder: &Path) -> io::Result<()> {
    let (name, pipes) = variables(folder)[0].clone();
    let variable = [name.as_bytes(), b"=", pipes.as_os_str().as_bytes()].concat();
    for pid in processes()? {
        // Opened before it is looked at, so that the number is still its own when it is killed.
        let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else {
            continue;
        };
        let read = |file: &str| fs::read(format!("/proc/{}/{file}", pid.as_raw_nonzero()));
        let is_server = read("comm").is_ok_and(|comm| comm.trim_ascii_end() == SERVER_COMM);
        let is_of_folder = || {
            let environment = read("environ").unwrap_or_default();
            let mut variables = environment.split(|&byte| byte == 0);
            variables.any(|it| it == variable)
        };
        if is_server && is_of_folder() {
            let _ = pidfd_send_signal(&process, Signal::KILL);
        }
    }
    Ok(())
}

/// Whether standard input ends within this time. Nothing is written to it.
fn input_ends_within(limit: Duration) -> bool {
    let stdin = io::stdin();
    poll(&mut [PollFd::new(&stdin, PollFlags::IN)], Some(limit)).unwrap_or(false)
}
