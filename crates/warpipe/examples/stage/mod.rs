//! The common set-up of the examples: the requested device, a domain, and the other processes.
//!
//! An example started without `--role` makes a domain of its own, starts itself once more for each
//! other role, and removes the domain at the end. Started with `--role NAME` (as in two terminals)
//! it plays that role only, in the environment's domain. `--device` says where memory lies: `auto`
//! (a GPU if there is one), `host`, `cuda`, `cuda:1`.
#![allow(dead_code, reason = "no example needs everything")]

pub mod talk;

use std::error::Error;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, set_parent_process_death_signal};
use warpipe::{Device, Domain};

use self::talk::Talk;

/// Any error ends the example.
pub type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// Longer than any step of an example takes: a wait that reaches it is an error.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Set for the processes that an example starts itself.
const STARTED_BY_US: &str = "WARPIPE_EXAMPLE_STARTED";

/// The device, the domain and the options of an example.
pub struct Stage {
    pub device: Device,
    pub domain: Domain,
    arguments: Vec<(String, String)>,
    /// The domain's folder, if the example made it.
    folder: Option<PathBuf>,
}

/// Runs an example that knows these options. Its result is the last line, behind `ok:` or its
/// role's name; an error is printed to stderr, and the exit code is 1.
pub fn play(options: &[&str], example: impl FnOnce(&Stage) -> Outcome<String>) -> ExitCode {
    play_after(options, |_| Ok(()), |stage, ()| example(stage))
}

/// [`play`], for an example that runs `before` first, until its device is opened. The example gets
/// the result of `before`.
pub fn play_after<T>(
    options: &[&str],
    before: impl FnOnce(&mut Stage) -> Outcome<T>,
    example: impl FnOnce(&Stage, T) -> Outcome<String>,
) -> ExitCode {
    let played = Stage::enter(options).and_then(|mut stage| {
        let prepared = before(&mut stage)?;
        stage.open_device()?;
        let line = example(&stage, prepared)?;
        // If the output is a pipe, its reader may have closed it.
        let _ = writeln!(
            std::io::stdout(),
            "{}: {line}",
            if stage.role().is_empty() {
                "ok"
            } else {
                stage.role()
            }
        );
        Ok(())
    });
    match played {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// An error with this text, unless the condition holds.
pub fn ensure(holds: bool, otherwise: impl FnOnce() -> String) -> Outcome {
    if holds {
        Ok(())
    } else {
        Err(otherwise().into())
    }
}

impl Stage {
    fn enter(options: &[&str]) -> Outcome<Stage> {
        let arguments = arguments(options)?;
        let is_first = !arguments.iter().any(|(name, _)| name == "--role");
        if std::env::var_os(STARTED_BY_US).is_some() {
            set_parent_process_death_signal(Some(Signal::KILL))?;
        }
        let folder = std::env::temp_dir().join(format!("warpipe-example-{}", std::process::id()));
        let domain = if is_first {
            Domain::at(&folder)?
        } else {
            Domain::from_environment()?
        };
        Ok(Stage {
            device: Device::host(),
            domain,
            arguments,
            folder: is_first.then_some(folder),
        })
    }

    fn open_device(&mut self) -> Outcome {
        self.device = match self.option("--device").unwrap_or("auto") {
            "auto" => Device::preferred().device,
            "host" => Device::host(),
            "cuda" => Device::cuda(0)?,
            other => Device::cuda(
                other
                    .strip_prefix("cuda:")
                    .ok_or("--device is auto, host, cuda or cuda:N")?
                    .parse()?,
            )?,
        };
        Ok(())
    }

    /// Plays `role` from here on, as a forked child does. The parent removes the domain.
    pub fn recast(&mut self, role: &str) {
        self.arguments.retain(|(name, _)| name != "--role");
        self.arguments.push(("--role".to_owned(), role.to_owned()));
        self.folder = None;
    }

    /// The role to play; empty for the first process.
    pub fn role(&self) -> &str {
        self.option("--role").unwrap_or_default()
    }

    /// The value of an option, empty for an option without value; `None` if it was not given.
    pub fn option(&self, name: &str) -> Option<&str> {
        self.arguments
            .iter()
            .find(|(given, _)| given == name)
            .map(|(_, value)| value.as_str())
    }

    /// The value of an option that is a number.
    pub fn number(&self, name: &str, otherwise: u64) -> Outcome<u64> {
        let number = self.option(name).map(str::parse);
        Ok(number
            .transpose()
            .map_err(|error| format!("{name}: {error}"))?
            .unwrap_or(otherwise))
    }

    /// Starts this example once more, to play `role` with the same options.
    pub fn start(&self, role: &str) -> Outcome<Actor> {
        Actor::start(role, self.command(role)?.stdin(Stdio::null()))
    }

    /// [`start`](Self::start), with a pair of sockets to this process as its standard input
    /// ([`Talk::with_parent`]).
    pub fn start_talking(&self, role: &str) -> Outcome<(Actor, Talk)> {
        let (ours, theirs) = UnixStream::pair()?;
        Ok((
            Actor::start(role, self.command(role)?.stdin(OwnedFd::from(theirs)))?,
            Talk::over(ours),
        ))
    }

    /// The command that starts this example once more, for callers that connect its pipes
    /// themselves.
    pub fn command(&self, role: &str) -> Outcome<Command> {
        let mut command = Command::new(std::env::current_exe()?);
        for (name, value) in &self.arguments {
            command
                .arg(name)
                .args(Some(value).filter(|value| !value.is_empty()));
        }
        command
            .args(["--role", role])
            .env("WARPIPE_DOMAIN", self.domain.path())
            .env(STARTED_BY_US, "1");
        Ok(command)
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if let Some(folder) = &self.folder {
            let _ = std::fs::remove_dir_all(folder);
        }
    }
}

/// A process that this example started. Dropped before its end, it is killed.
pub struct Actor {
    role: String,
    child: Child,
}

impl Actor {
    /// Starts the process that plays `role`.
    pub fn start(role: &str, command: &mut Command) -> Outcome<Actor> {
        Ok(Actor {
            role: role.to_owned(),
            child: command.spawn()?,
        })
    }

    /// The process, for its pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// `kill -9`: no destructor runs.
    pub fn kill(mut self) -> Outcome {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Waits for its end, which must be a success.
    pub fn finish(mut self) -> Outcome {
        let status = self.end()?;
        ensure(status.success(), || {
            format!("the {} ended with {status}", self.role)
        })
    }

    fn end(&mut self) -> Outcome<ExitStatus> {
        let pidfd = pidfd_open(Pid::from_child(&self.child), PidfdFlags::empty())?;
        let limit = Timespec {
            tv_sec: PATIENCE.as_secs() as i64,
            tv_nsec: 0,
        };
        let ended = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&limit))?;
        ensure(ended > 0, || {
            format!("the {} did not end within {PATIENCE:?}", self.role)
        })?;
        Ok(self.child.wait()?)
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `--name value` and `--name`, if they are known.
fn arguments(options: &[&str]) -> Outcome<Vec<(String, String)>> {
    let mut arguments = Vec::new();
    let mut words = std::env::args().skip(1).peekable();
    while let Some(name) = words.next() {
        let known = ["--device", "--role"]
            .iter()
            .chain(options)
            .any(|known| *known == name);
        ensure(known, || {
            format!(
                "{name:?} is no option here; there are --device, --role, {}",
                options.join(", ")
            )
        })?;
        arguments.push((
            name,
            words
                .next_if(|word| !word.starts_with("--"))
                .unwrap_or_default(),
        ));
    }
    Ok(arguments)
}
