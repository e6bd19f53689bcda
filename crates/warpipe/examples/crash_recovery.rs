//! A coordinator with workers that fail: one is stopped and continues, one is killed, cleaned up after,
//! and replaced.
//!
//! Three workers join the domain as members and publish frames, which the coordinator verifies. It
//! stops one (`SIGSTOP`) and is notified that it is *stalled*: none of its resources may be taken,
//! and it continues later where it was. It kills another (`SIGKILL`) and is notified that it has
//! *died*, by the kernel's proof: its endpoints are removed, its scratch file is deleted by a
//! registered cleanup, the frames that it had completed are still received, and a successor takes
//! its name.
//!
//! **This module is marked for unsafe**: it launches kernels on device memory.
//!
//! ```text
//! cargo run --example crash_recovery
//! ```
//!
//! It ends with `ok: N frames of 4 workers verified; one stalled and recovered, one died and was
//! replaced, 3 left`. `warpipe members --follow`, with `WARPIPE_DOMAIN` set to the folder that it
//! prints first, shows the same events.

mod stage;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc::channel;

use rustix::process::{Pid, Signal, kill_process};
use stage::{Actor, Outcome, PATIENCE, Stage, ensure, play};
use warpipe::{
    Change, DType, Error, Layout, Loss, Member, MemberInfo, MemberOptions, Members, Policy,
    Publisher, PublisherOptions, Stream, Subscriber,
};

const WORKERS: usize = 3;
const WORDS: u64 = 4096;
/// Frames that each worker must deliver between two steps of the coordinator.
const FRAMES: u64 = 20;

fn main() -> ExitCode {
    play(&[], |stage| match stage.role() {
        "" => coordinate(stage),
        name => work(stage, name),
    })
}

/// Publishes frames as long as it has a subscriber.
fn work(stage: &Stage, name: &str) -> Outcome<String> {
    std::fs::write(scratch(stage, name), "half of a thought")?;
    let policy = Policy::Block { timeout: PATIENCE };
    let publisher = Publisher::new(
        frames_of(name).as_str(),
        PublisherOptions {
            depth: 4,
            policy,
            ..stage.domain.on(&stage.device)
        },
    )?;
    // Last, so that a process that sees the member finds all of it.
    let options = MemberOptions {
        role: "worker".into(),
        ..stage.domain.options()
    };
    let _member = Member::new(name, options)?;
    publisher.wait_for_subscribers(1, PATIENCE)?;
    let stream = stage.device.stream()?;
    let layout = Layout::contiguous(DType::U64, &[WORDS])?;
    let mut number = 0;
    while !publisher.subscribers().is_empty() {
        number += 1;
        let frame = publisher.loan(&layout)?;
        // SAFETY: the loan has WORDS words, and is ours alone until the stream has passed the
        // kernel.
        unsafe { warpipe_kernels::fill(&stream, frame.ptr(), WORDS, number)? };
        frame.send(&stream)?;
    }
    stream.synchronize(PATIENCE)?;
    std::fs::remove_file(scratch(stage, name))?;
    Ok(format!("{name} has sent {number} frames"))
}

fn frames_of(name: &str) -> String {
    format!("frames/{name}")
}

fn scratch(stage: &Stage, name: &str) -> PathBuf {
    stage.domain.path().join(format!("{name}.scratch"))
}

fn coordinate(stage: &Stage) -> Outcome<String> {
    println!("domain {}", stage.domain.path().display());
    let members = Members::new(stage.domain.options())?;
    let stream = stage.device.stream()?;
    let mut verified = 0;
    let mut workers = Vec::new();
    for index in 0..WORKERS {
        workers.push(Worker::start(stage, &members, &format!("worker-{index}"))?);
    }
    for worker in &mut workers {
        verified += worker.verify(&stream, FRAMES)?;
    }
    // Stops one worker. It lives, and keeps its resources.
    workers[1].signal(Signal::STOP)?;
    expect(&members, "stalled", "worker-1", |change| {
        matches!(change, Change::Stalled(_))
    })?;
    ensure(members.list()?.len() == WORKERS, || {
        "a stopped worker is no member any more".into()
    })?;
    verified += workers[0].verify(&stream, FRAMES)?;
    workers[1].signal(Signal::CONT)?;
    expect(&members, "recovered", "worker-1", |change| {
        matches!(change, Change::Recovered(_))
    })?;
    verified += workers[1].verify(&stream, FRAMES)?;
    // Kills one worker, and replaces it under its name.
    let killed = workers.pop().ok_or("three workers were started")?;
    verified += kill_and_clean_up(stage, &members, killed, &stream)?;
    workers.push(Worker::start(stage, &members, "worker-2")?);
    for worker in &mut workers {
        verified += worker.verify(&stream, FRAMES)?;
    }
    for worker in workers {
        let Worker {
            name,
            actor,
            frames,
            ..
        } = worker;
        drop(frames);
        expect(&members, "left", &name, |change| {
            matches!(change, Change::Left(_))
        })?;
        actor.finish()?;
    }
    let left = std::fs::read_dir(stage.domain.path())?.count();
    ensure(left == 0, || format!("{left} files are left"))?;
    let count = WORKERS + 1;
    Ok(format!(
        "{verified} frames of {count} workers verified; one stalled and recovered, one died and was replaced, 3 left"
    ))
}

/// Kills a worker and cleans up after it. Returns how many whole frames it had still sent.
fn kill_and_clean_up(
    stage: &Stage,
    members: &Members,
    worker: Worker,
    stream: &Stream,
) -> Outcome<u64> {
    let (error_sender, errors) = channel();
    let file = scratch(stage, &worker.name);
    members.on_death_of(&worker.name, move |_| {
        drop(error_sender.send(std::fs::remove_file(&file)))
    })?;
    let Worker {
        name,
        actor,
        mut frames,
        ..
    } = worker;
    actor.kill()?;
    let dead = expect(members, "died", &name, |change| {
        matches!(change, Change::Died(_))
    })?;
    let endpoints: Vec<&str> = dead
        .endpoints
        .iter()
        .map(|endpoint| endpoint.as_str())
        .collect();
    println!("{name}: died, and left {}", endpoints.join(" and "));
    ensure(endpoints == ["frames/worker-2", "members/worker-2"], || {
        format!("it left {endpoints:?}")
    })?;
    errors.recv_timeout(PATIENCE)??;
    let (mut whole, mut lost) = (0, 0);
    loop {
        match frames.receive(stream, PATIENCE) {
            Ok(frame) => match frame.finish(PATIENCE) {
                Ok(()) => whole += 1,
                Err(Error::Lost(Loss::Sample { .. })) => lost += 1,
                Err(error) => return Err(error.into()),
            },
            Err(Error::PeerGone {
                graceful: false, ..
            }) => break,
            Err(error) => return Err(error.into()),
        }
    }
    println!("{name}: {whole} frames were finished before, {lost} were not and are lost");
    Ok(whole)
}

/// The coordinator's handle of a worker.
struct Worker {
    name: String,
    actor: Actor,
    frames: Subscriber,
    received: u64,
}

impl Worker {
    fn start(stage: &Stage, members: &Members, name: &str) -> Outcome<Worker> {
        let actor = stage.start(name)?;
        let joined = expect(members, "joined", name, |change| {
            matches!(change, Change::Joined(_))
        })?;
        ensure(joined.pid == actor.pid() as i32, || {
            format!("process {} is {name}", joined.pid)
        })?;
        let frames = Subscriber::open(
            frames_of(name).as_str(),
            stage.domain.on(&stage.device),
            std::time::Duration::ZERO,
        )?;
        Ok(Worker {
            name: name.to_owned(),
            actor,
            frames,
            received: 0,
        })
    }

    /// Receives `count` frames, and checks the number of each and every word.
    fn verify(&mut self, stream: &Stream, count: u64) -> Outcome<u64> {
        for _ in 0..count {
            let frame = self.frames.receive(stream, PATIENCE)?;
            self.received += 1;
            let number = self.received;
            ensure(frame.sequence() == number, || {
                format!("frame {} where {number} was due", frame.sequence())
            })?;
            let bytes = frame.to_vec(PATIENCE)?;
            let words = bytes
                .chunks_exact(8)
                .map(|word| u64::from_ne_bytes(word.try_into().expect("chunks of 8 bytes")));
            let is_right = words
                .zip(0..)
                .all(|(word, index)| word == warpipe_kernels::pattern(number, index));
            ensure(is_right, || {
                format!("frame {number} of {} has a wrong word", self.name)
            })?;
            frame.finish(PATIENCE)?;
        }
        Ok(count)
    }

    fn signal(&self, signal: Signal) -> Outcome {
        let pid = Pid::from_raw(self.actor.pid() as i32).ok_or("a process id is above 0")?;
        Ok(kill_process(pid, signal)?)
    }
}

/// Waits for the event that concerns `name`. Other events meanwhile may only be heartbeats that
/// pause for a moment, as on a busy machine.
fn expect(
    members: &Members,
    what: &str,
    name: &str,
    is_it: impl Fn(&Change) -> bool,
) -> Outcome<MemberInfo> {
    while let Some(change) = members.changes(PATIENCE)? {
        if is_it(&change) && change.member().name == name {
            println!("{name}: {what}");
            return Ok(change.member().clone());
        }
        let is_heartbeat = matches!(change, Change::Stalled(_) | Change::Recovered(_));
        ensure(is_heartbeat, || {
            format!("{change:?} came where {name} {what} was due")
        })?;
    }
    Err(format!("no change reported that {name} {what}").into())
}
