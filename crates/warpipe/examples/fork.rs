//! A child made by `fork(2)` opens its parent's memory and doubles its numbers in place.
//!
//! CUDA does not survive a fork. Once a process has initialised the driver, a child that it forks
//! has a copy of the driver's memory but not its threads, and the driver does not support calls
//! there: `Device::cuda` returns `StateFault::Forked`. So the order matters: **fork first, open
//! devices afterwards, each process for itself.** This program forks before anything else; the
//! child then waits, on a pair of sockets, for the ticket of memory that its parent allocates
//! later. (A process that has a device already starts children by `exec`, as the other examples do.
//! A handle of this library that a forked child has inherited returns `StateFault::Forked`.)
//!
//! **This module is marked for unsafe**: it forks, and launches a kernel on device memory.
//!
//! ```text
//! cargo run -p warpipe --example fork
//! ```
//!
//! It ends with `ok: 65536 numbers of the parent, doubled in place by its forked child`.

mod stage;

use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, kill_process, pidfd_open,
    set_parent_process_death_signal, waitpid,
};
use stage::talk::Talk;
use stage::{Outcome, PATIENCE, Stage, ensure, play_after};
use warpipe::{Access, Memory, PublishOptions, Ticket};

/// Small enough that a 32-bit float represents each integer up to twice this.
const COUNT: u64 = 1 << 16;

fn main() -> ExitCode {
    // `fork` is called before the device is opened; both processes run the code after it.
    play_after(&[], fork, |stage, side| match side {
        Side::Parent(child, talk) => parent(stage, child, talk),
        Side::Child(talk) => child(stage, talk),
    })
}

/// The side of the fork that this process is.
enum Side {
    Parent(Forked, Talk),
    Child(Talk),
}

fn fork(stage: &mut Stage) -> Outcome<Side> {
    let (ours, theirs) = UnixStream::pair()?;
    // SAFETY: this process has one thread so far, so no operation is half done, or locked, in the
    // child's copy.
    match unsafe { libc::fork() } {
        0 => {
            stage.recast("child");
            set_parent_process_death_signal(Some(Signal::KILL))?;
            drop(ours); // or the parent's end would never end
            Ok(Side::Child(Talk::over(theirs)))
        }
        pid => {
            let pid = Pid::from_raw(pid.max(0)).ok_or_else(std::io::Error::last_os_error)?;
            Ok(Side::Parent(Forked(Some(pid)), Talk::over(ours)))
        }
    }
}

fn parent(stage: &Stage, child: Forked, mut talk: Talk) -> Outcome<String> {
    let memory = Memory::allocate(&stage.device, COUNT * 4)?;
    let stream = stage.device.stream()?;
    let numbers: Vec<u8> = (0..COUNT)
        .flat_map(|number| (number as f32).to_ne_bytes())
        .collect();
    memory.write(&stream, 0, &numbers)?;
    stream.synchronize(PATIENCE)?; // a ticket orders no work: the numbers are there before the child hears of them

    let published = memory.publish(
        "numbers",
        PublishOptions {
            access: Access::ReadWrite,
            ..stage.domain.options()
        },
    )?;
    talk.tell(published.ticket(..)?)?;
    talk.expect("doubled")?;
    child.finish()?;

    let bytes = memory.to_vec(PATIENCE)?;
    let found = bytes
        .chunks_exact(4)
        .map(|float| f32::from_ne_bytes(float.try_into().expect("chunks of 4 bytes")));
    let wrong = found
        .zip(0..)
        .filter(|&(found, number)| found != (2 * number) as f32)
        .count();
    ensure(wrong == 0, || format!("{wrong} numbers are not doubled"))?;
    Ok(format!(
        "{COUNT} numbers of the parent, doubled in place by its forked child"
    ))
}

fn child(stage: &Stage, mut talk: Talk) -> Outcome<String> {
    let ticket: Ticket = talk.hear()?.parse()?;
    let memory = ticket.open(&stage.device, Duration::ZERO)?;
    let stream = stage.device.stream()?;
    memory.used_on(&stream);
    // SAFETY: the memory has COUNT floats, which the parent does not touch until it hears that they
    // are doubled.
    unsafe { warpipe_kernels::scale(&stream, memory.ptr(), memory.ptr(), COUNT, 2.0)? };
    stream.synchronize(PATIENCE)?;
    talk.tell("doubled")?;
    Ok(format!(
        "process {} doubled {COUNT} numbers of process {}",
        std::process::id(),
        parent_id()
    ))
}

fn parent_id() -> i32 {
    rustix::process::getppid().map_or(0, Pid::as_raw_pid)
}

/// The parent's handle of the child. Dropped before the child's end, it kills the child.
struct Forked(Option<Pid>);

impl Forked {
    /// Waits for the child's end, which must be a success.
    fn finish(mut self) -> Outcome {
        let pid = self.0.ok_or("the child has ended already")?;
        let limit = Timespec {
            tv_sec: PATIENCE.as_secs() as i64,
            tv_nsec: 0,
        };
        let pidfd = pidfd_open(pid, PidfdFlags::empty())?;
        let ended = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&limit))?;
        ensure(ended > 0, || {
            format!("the child did not end within {PATIENCE:?}")
        })?;
        self.0 = None;
        let status =
            waitpid(Some(pid), WaitOptions::empty())?.and_then(|(_, status)| status.exit_status());
        ensure(status == Some(0), || {
            format!("the child ended with {status:?}")
        })
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        if let Some(pid) = self.0.take() {
            let _ = kill_process(pid, Signal::KILL);
            let _ = waitpid(Some(pid), WaitOptions::empty());
        }
    }
}
