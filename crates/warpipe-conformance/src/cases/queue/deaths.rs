//! Workers and owners of a queue that are killed.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use warpipe::{Error, JobEnd, Queue, QueueOptions, ResultOrder};
use warpipe_testkit::{Rng, eventually};

use super::{SLOW, WORDS, complete, expect, leased_lines, submit, wait, worker};
use crate::PATIENCE;
use crate::context::Context;
use crate::payload::result_of;
use crate::peer::{Batch, Order, Peer, Reply, Task};

pub(super) fn killed_holder(context: &Context) -> Result<()> {
    context.warm_up()?;
    let guard = context.guard();
    let stream = context.stream()?;
    let queue = context.queue("jobs")?;
    for round in 0..3 {
        let mut victim = worker(context, "jobs")?;
        queue.wait_for_workers(1, PATIENCE)?;
        let job = submit(&queue, &stream, round, Duration::ZERO)?;
        ensure!(
            victim.lease(Task::Lease)? == (job.id(), 1),
            "the first attempt"
        );
        victim.kill()?;
        let mut heir = worker(context, "jobs")?;
        ensure!(
            heir.lease(Task::Lease)? == (job.id(), 2),
            "the second attempt"
        );
        heir.task(complete())?;
        let result = wait(&job, &stream, round, 2)?;
        ensure!(result.worker_pid == heir.id() as i32, "the heir did it");
        drop(result);
        heir.dismiss()?;
        ensure!(
            eventually(PATIENCE, || queue
                .state()
                .is_ok_and(|state| state.workers.is_empty())),
            "nobody is left"
        );
    }
    drop(queue);
    stream.synchronize(PATIENCE)?;
    drop(stream);
    guard.settles()
}

pub(super) fn killed_before_leasing(context: &Context) -> Result<()> {
    let stream = context.stream()?;
    let options = QueueOptions {
        prefetch: 4,
        ..context.queue_options()
    };
    let queue = Queue::new("jobs", options)?;
    let mut victim = worker(context, "jobs")?;
    queue.wait_for_workers(1, PATIENCE)?;
    let jobs = (0..3)
        .map(|seed| submit(&queue, &stream, seed, Duration::ZERO))
        .collect::<Result<Vec<_>>>()?;
    ensure!(queue.state()?.leased == 3, "the only worker has them all");
    ensure!(
        victim.lease(Task::Lease)?.0 == 1,
        "it begins with the first"
    );
    victim.kill()?;
    let mut heir = worker(context, "jobs")?;
    for _ in 0..3 {
        heir.lease(Task::Lease)?;
        heir.task(complete())?;
    }
    for ((job, seed), attempt) in jobs.iter().zip(0..).zip([2, 1, 1]) {
        drop(wait(job, &stream, seed, attempt)?);
    }
    heir.dismiss()
}

pub(super) fn result_survives(context: &Context) -> Result<()> {
    let stream = context.stream()?;
    let queue = context.queue("jobs")?;
    let mut victim = worker(context, "jobs")?;
    queue.wait_for_workers(1, PATIENCE)?;
    let jobs = (0..2)
        .map(|seed| submit(&queue, &stream, seed, Duration::ZERO))
        .collect::<Result<Vec<_>>>()?;
    for _ in 0..2 {
        victim.lease(Task::Lease)?;
        victim.task(complete())?;
    }
    victim.task(Task::Synchronize)?;
    let before = wait(&jobs[0], &stream, 0, 1)?;
    victim.kill()?;
    ensure!(
        eventually(PATIENCE, || queue
            .state()
            .is_ok_and(|state| state.workers.is_empty())),
        "the dead are forgotten"
    );
    let after = wait(&jobs[1], &stream, 1, 1)?;
    expect(&before, 0, 1)?;
    expect(&after, 1, 1)
}

pub(super) fn unready_result_is_lost(context: &Context) -> Result<()> {
    let stream = context.stream()?;
    let queue = context.queue("jobs")?;
    let mut victim = worker(context, "jobs")?;
    queue.wait_for_workers(1, PATIENCE)?;
    let job = submit(&queue, &stream, 5, Duration::ZERO)?;
    victim.lease(Task::Lease)?;
    victim.task(Task::Answer(Reply::Complete {
        slow_us: SLOW.as_micros() as u64,
    }))?;
    ensure!(
        matches!(
            job.wait(&stream, Duration::ZERO),
            Err(Error::Timeout { .. })
        ),
        "it is not done yet"
    );
    victim.kill()?;
    let mut heir = worker(context, "jobs")?;
    ensure!(heir.lease(Task::Lease)?.1 == 2, "it is done again");
    heir.task(complete())?;
    wait(&job, &stream, 5, 2).map(drop)
}

pub(super) fn dead_lettered(context: &Context) -> Result<()> {
    let stream = context.stream()?;
    let queue = Queue::new(
        "jobs",
        QueueOptions {
            max_attempts: 2,
            ..context.queue_options()
        },
    )?;
    let job = submit(&queue, &stream, 1, Duration::ZERO)?;
    let mut victims = Vec::new();
    for attempt in 1..=2 {
        let mut victim = worker(context, "jobs")?;
        ensure!(
            victim.lease(Task::Lease)? == (job.id(), attempt),
            "attempt {attempt}"
        );
        victim.kill()?;
        victims.push(victim.id().to_string());
    }
    match job.wait(&stream, PATIENCE) {
        Err(Error::Job {
            end: JobEnd::DeadLettered { reasons },
            ..
        }) => {
            ensure!(reasons.len() == 2, "a reason for each attempt: {reasons:?}");
            ensure!(
                reasons
                    .iter()
                    .zip(&victims)
                    .all(|(reason, pid)| reason.contains(pid)),
                "reasons: {reasons:?}"
            );
        }
        other => bail!("a job that killed its workers gave {other:?}"),
    }
    ensure!(
        matches!(
            job.wait(&stream, Duration::ZERO),
            Err(Error::Job {
                end: JobEnd::Taken,
                ..
            })
        ),
        "it is reported once"
    );
    let mut heir = worker(context, "jobs")?;
    let next = submit(&queue, &stream, 2, Duration::ZERO)?;
    heir.lease(Task::Lease)?;
    heir.task(complete())?;
    wait(&next, &stream, 2, 1).map(drop)
}

pub(super) fn killed_owner(context: &Context) -> Result<()> {
    context.warm_up()?;
    let mut owner = context.peer()?;
    owner.task(Task::Submit {
        queue: "jobs".into(),
        batch: Batch::of(2, WORDS, 1),
    })?;
    let guard = context.guard();
    let stream = context.stream()?;
    let mut worker = context.worker("jobs")?;
    let held = worker.lease(&stream, PATIENCE)?;
    ensure!(
        held.to_vec(PATIENCE)?.len() as u64 == 8 * WORDS,
        "its input is there"
    );
    owner.kill()?;
    // Another job may have been on its way.
    let end = loop {
        match worker.lease(&stream, PATIENCE) {
            Ok(lease) => drop(lease),
            Err(error) => break error,
        }
    };
    ensure!(
        matches!(end, Error::PeerGone { .. }),
        "a worker of a dead queue got {end:?}"
    );
    let input = held.to_vec(PATIENCE)?;
    ensure!(
        input[..8] == warpipe_kernels::pattern(1, 0).to_le_bytes(),
        "the input outlives its owner"
    );
    // Whether its death is seen on this link by now or not: an answer to a dead peer does no harm.
    let answered = held.complete(None, &stream);
    ensure!(
        matches!(answered, Ok(()) | Err(Error::PeerGone { .. })),
        "an answer to the dead gave {answered:?}"
    );
    drop(worker);
    stream.synchronize(PATIENCE)?;
    drop(stream);
    guard.settles()?;
    Ok(())
}

pub(super) fn storm(context: &Context) -> Result<()> {
    context.warm_up()?;
    let guard = context.guard();
    let stream = context.stream()?;
    let options = QueueOptions {
        max_attempts: 1000,
        order: ResultOrder::Completion,
        ..context.queue_options()
    };
    let queue = Queue::new("jobs", options)?;
    let mut rng = context.rng();
    let spawn = |rng: &mut Rng| -> Result<Peer> {
        let mut peer = context.mortal(rng)?;
        peer.task(Task::Attach("jobs".into()))?;
        peer.send(&Order::Task(Task::Work { slow_us: 1000 }))?;
        Ok(peer)
    };
    let mut workers = (0..3)
        .map(|_| spawn(&mut rng))
        .collect::<Result<Vec<_>>>()?;
    let kills = context.kills(6, 150, 60);
    let (mut submitted, mut seen) = (0u64, std::collections::BTreeSet::new());
    for _ in 0..kills {
        for _ in 0..10 {
            submit(&queue, &stream, submitted, Duration::ZERO)?;
            submitted += 1;
        }
        let victim = rng.u64(..workers.len() as u64) as usize;
        std::thread::park_timeout(Duration::from_micros(rng.u64(..4000)));
        workers.swap_remove(victim).kill()?;
        workers.push(spawn(&mut rng)?);
        while let Ok(result) = queue.next_result(&stream, Duration::ZERO) {
            ensure!(
                result.to_vec(PATIENCE)? == result_of(WORDS, result.job - 1),
                "the result of job {}",
                result.job
            );
            ensure!(seen.insert(result.job), "job {} came twice", result.job);
        }
    }
    while seen.len() < submitted as usize {
        let result = queue.next_result(&stream, PATIENCE)?;
        ensure!(
            result.to_vec(PATIENCE)? == result_of(WORDS, result.job - 1),
            "the result of job {}",
            result.job
        );
        ensure!(seen.insert(result.job), "job {} came twice", result.job);
    }
    context.figure("jobs", submitted);
    drop(queue);
    for mut peer in workers {
        leased_lines(&mut peer)?;
        peer.dismiss()?;
    }
    context.figure_storm(kills)?;
    stream.synchronize(PATIENCE)?;
    drop(stream);
    guard.settles()
}
