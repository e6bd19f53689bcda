//! `warpipe run --mps`: a program with a private MPS daemon.
//!
//! Three processes: this one, which waits for the program and passes signals on; the program, which
//! dies with this one; and the daemon's supervisor ([`daemon`]), which starts the MPS daemon, and
//! quits it and removes its folder when this process's end closes its standard input, however this
//! process ends.

mod daemon;
mod signals;

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, ErrorKind};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail};
use rustix::process::Signal;

pub use self::daemon::{ChildArgs, run as run_daemon};
use self::signals::Signals;
use crate::args::RunArgs;
use crate::doctor::system::mps_answers_at;
use crate::exit::{Exit, UsageError};
use crate::process::{following, private_folder, this_program};

/// The longest that the supervisor takes to quit the daemon, and some.
const QUIT_LIMIT: Duration = Duration::from_secs(60);

/// The beginning of the name of a daemon's folder.
const FOLDER_PREFIX: &str = "warpipe-mps-";

/// The variable by which a client, and a daemon, is given some of the GPUs.
const VISIBLE_DEVICES: &str = "CUDA_VISIBLE_DEVICES";

/// The longest path of a Unix socket.
const SOCKET_PATH_MAX: usize = 107;

/// The daemon's longest file name in its folder of pipes.
const LONGEST_PIPE: &str = "/pipe/control_privileged";

/// As of a shell: a program that cannot be run, or is not there.
const NOT_RUN: u8 = 126;
const NOT_FOUND: u8 = 127;

const WARNING: &str = "\
warpipe: this program shares its GPU through a private MPS daemon. With MPS
  - a fault of one client (an illegal address), or the kill of one in the middle of a kernel, ends all
    clients of the daemon;
  - clients have their own addresses, and no other isolation from each other;
  - only processes that this program starts are clients; end them by a request, not by SIGKILL.";

/// Runs the program, and returns its exit code, or 128 and the number of the signal that ended it.
pub fn run(args: &RunArgs) -> anyhow::Result<u8> {
    if !args.mps {
        let text = "`warpipe run` is for programs that need a private MPS daemon: say `warpipe run --mps -- PROGRAM`, or run the program itself";
        return Err(UsageError(text.into()).into());
    }
    let signals = Signals::catch().context("signals cannot be caught")?;
    let started = refuse_nesting()
        .and_then(|()| folder())
        .and_then(|folder| Ok((Supervisor::start(&folder, &signals)?, folder)));
    let (mut supervisor, folder) = match started {
        Ok((Ok(supervisor), folder)) => (supervisor, folder),
        // Nothing of the program is there that could be asked to end.
        Ok((Err(signal), _)) => return Ok(code_of(signal.as_raw())),
        Err(error) => {
            crate::note(&format!("{error:#}"));
            return Ok(Exit::Failed as u8);
        }
    };
    // The supervisor removes it from here on.
    let folder = folder.keep();
    if !args.quiet {
        eprintln!("{WARNING}");
    }
    let status = run_program(args, &folder, &signals);
    supervisor.end()?;
    status
}

/// A daemon inside another one's program would take turns with it: no hand-over between their
/// clients would be fast.
fn refuse_nesting() -> anyhow::Result<()> {
    let pipes = std::env::var_os(PIPES).map(PathBuf::from);
    let is_ours = |pipes: &&PathBuf| {
        let folder = pipes.parent().and_then(Path::file_name);
        folder.is_some_and(|name| name.as_bytes().starts_with(FOLDER_PREFIX.as_bytes()))
    };
    match pipes.as_ref().filter(is_ours) {
        Some(pipes) if mps_answers_at(pipes) => bail!(
            "this command runs under `warpipe run --mps`, and so does the program: run it without a \
             daemon of its own"
        ),
        _ => Ok(()),
    }
}

/// A new folder for the daemon's pipes and logs, for this user alone.
fn folder() -> anyhow::Result<tempfile::TempDir> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let runtime = runtime.filter(|path| path.is_absolute() && path.is_dir());
    let parent = runtime.unwrap_or_else(std::env::temp_dir);
    let folder = private_folder(&parent, FOLDER_PREFIX)?;
    let length = folder.path().as_os_str().as_bytes().len() + LONGEST_PIPE.len();
    if length > SOCKET_PATH_MAX {
        bail!(
            "{} is too long for the daemon's sockets ({length} bytes, at most {SOCKET_PATH_MAX}); set TMPDIR to a shorter one and unset XDG_RUNTIME_DIR",
            folder.path().display()
        );
    }
    Ok(folder)
}

/// The variable that names the folder of a daemon's pipes.
const PIPES: &str = "CUDA_MPS_PIPE_DIRECTORY";

/// The variables by which a client finds the daemon of this folder.
fn variables(folder: &Path) -> [(&'static str, PathBuf); 2] {
    [
        (PIPES, folder.join("pipe")),
        ("CUDA_MPS_LOG_DIRECTORY", folder.join("log")),
    ]
}

/// The process that starts the daemon and quits it.
struct Supervisor {
    child: Child,
    folder: PathBuf,
}

impl Supervisor {
    /// Returns when the daemon answers, or with the signal that came before.
    fn start(
        folder: &tempfile::TempDir,
        signals: &Signals,
    ) -> anyhow::Result<Result<Supervisor, Signal>> {
        let mut command = this_program();
        command.arg("mps-daemon").arg("--folder").arg(folder.path());
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command
            .spawn()
            .context("cannot start the MPS daemon's supervisor")?;
        let output = child
            .stdout
            .take()
            .context("the supervisor has no output")?;
        let asked_to_end = signals.wait_unless_asked_to_end(&output)?;
        let mut said = String::new();
        if asked_to_end.is_none() {
            // It says one line, or ends: it limits its own waits.
            let read = BufReader::new(output).read_line(&mut said);
            read.context("the supervisor's answer")?;
        }
        if said.trim_end() == daemon::READY {
            let folder = folder.path().to_owned();
            return Ok(Ok(Supervisor { child, folder }));
        }
        drop(child.stdin.take());
        child.wait().context("the supervisor")?;
        match (asked_to_end, said.trim_end()) {
            (Some(signal), _) => Ok(Err(signal)),
            (None, "") => Err(anyhow!(
                "the MPS daemon's supervisor ended before the daemon answered"
            )),
            (None, reason) => Err(anyhow!("{reason}")),
        }
    }

    fn end(&mut self) -> anyhow::Result<()> {
        drop(self.child.stdin.take());
        let ended = crate::process::end(&mut self.child, QUIT_LIMIT)
            .context("the MPS daemon's supervisor")?;
        if let Some(signal) = ended.signal() {
            // The daemon died with it. Its servers and its folder are left to this process.
            crate::note(&format!(
                "signal {signal} ended the MPS daemon's supervisor, and so the daemon"
            ));
            daemon::end_servers_of(&self.folder)?;
            std::fs::remove_dir_all(&self.folder)
                .with_context(|| format!("{} is left", self.folder.display()))?;
        }
        Ok(())
    }
}

/// The program's exit code, or that of a shell for one that did not run or that a signal ended.
fn run_program(args: &RunArgs, folder: &Path, signals: &Signals) -> anyhow::Result<u8> {
    let [program, arguments @ ..] = &args.program[..] else {
        return Ok(NOT_RUN);
    };
    let mut command = following(program, Signal::TERM);
    command.args(arguments).envs(variables(folder));
    if std::env::var_os(VISIBLE_DEVICES).is_some_and(|devices| lists_numbers(&devices)) {
        // The daemon has the variable, and its clients number the GPUs that it names from 0 on.
        command.env_remove(VISIBLE_DEVICES);
    }
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            let name = program.to_string_lossy();
            crate::note(&format!("{name} cannot be run: {error}"));
            return Ok(match error.kind() {
                ErrorKind::NotFound => NOT_FOUND,
                _ => NOT_RUN,
            });
        }
    };
    let status = signals.pass_on_until_end(&mut child);
    let status = status.context("the wait for the program")?;
    Ok(match (status.code(), status.signal()) {
        (None, Some(signal)) => code_of(signal),
        (code, _) => code.map_or(u8::MAX, |code| u8::try_from(code).unwrap_or(u8::MAX)),
    })
}

/// Whether the variable names GPUs by their numbers. Their UUIDs mean the same to any process.
fn lists_numbers(devices: &OsStr) -> bool {
    let first = devices
        .to_str()
        .and_then(|devices| devices.split(',').next());
    first.is_some_and(|first| first.trim().parse::<u32>().is_ok())
}

/// As of a shell, for a program that a signal ended.
fn code_of(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}
