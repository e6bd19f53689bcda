//! Queues: delivery, results, failures, timeouts and the death of workers.

mod deaths;
mod order;

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use warpipe::{
    Error, JobEnd, JobHandle, JobResult, LimitFault, NameFault, Queue, QueueOptions, QueueState,
    ResultOrder, StateFault, Stream,
};
use warpipe_testkit::eventually;

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::payload::{fill_input, input_layout, result_of, work};
use crate::peer::{Answer, Batch, Order, Peer, Reply, Task};

pub(super) const CASES: &[Case] = &[
    Case::new(
        "every job is done once, and results come in the order of submission",
        in_order_of_submission,
    ),
    Case::new(
        "results come in completion order if the queue's options say so",
        as_completed,
    ),
    Case::new(
        "a job is done by another worker after its worker is killed, as its second attempt",
        deaths::killed_holder,
    )
    .ends_clients(),
    Case::new(
        "a job delivered and not leased when its worker is killed costs no attempt",
        deaths::killed_before_leasing,
    )
    .ends_clients(),
    Case::new(
        "a result that was ready when its worker was killed is accepted, and stays readable",
        deaths::result_survives,
    )
    .ends_clients(),
    Case::new(
        "a result that was not ready when its worker was killed is computed again",
        deaths::unready_result_is_lost,
    )
    .ends_clients(),
    Case::new(
        "a job that kills its workers is dead-lettered with all reasons, and the next job is done",
        deaths::dead_lettered,
    )
    .ends_clients(),
    Case::new(
        "a failure costs an attempt, a return costs none, and a rejection ends the job",
        answers,
    ),
    Case::new(
        "a queue at its limit accepts no more jobs, and returns the input",
        back_pressure,
    ),
    Case::new(
        "a stopped worker's job is done by another, and its late result is discarded",
        lease_timeout,
    ),
    Case::new("workers attach and leave while jobs are done", come_and_go),
    Case::new(
        "a queue is drained, and accepts nothing after it is shut",
        drain_and_shutdown,
    ),
    Case::new(
        "a queue that grows and closes while its worker is stopped, with no room for a message, ends its loop",
        close_without_room,
    ),
    Case::new(
        "a worker gets an error when its queue's owner is killed",
        deaths::killed_owner,
    )
    .ends_clients(),
    Case::new(
        "an abandoned result stays mapped until its kernels are done",
        result_after_owner_death,
    )
    .ends_clients(),
    Case::new(
        "a job that waits for a worker is ordered behind the work that fills it",
        order::redispatch_is_ordered,
    ),
    Case::new(
        "a result is ordered behind the work that computes it",
        order::result_is_ordered,
    ),
    Case::new(
        "a plain subscriber of a queue is refused, and no job is lost to it",
        plain_subscriber,
    ),
    Case::new(
        "jobs survive a storm of kills, and each result comes once",
        deaths::storm,
    )
    .ends_clients()
    .long(900),
];

const WORDS: u64 = 512;
const SLOW: Duration = Duration::from_secs(5);

/// Submits a job with an input that is written after `slow`.
fn submit(queue: &Queue, stream: &Stream, seed: u64, slow: Duration) -> Result<JobHandle> {
    let input = fill_input(queue.loan(&input_layout(WORDS)?)?, seed, slow, stream)?;
    Ok(queue.submit(input, stream).map_err(Error::from)?)
}

/// That a result is right and which attempt it is.
fn expect(result: &JobResult, seed: u64, attempt: u32) -> Result<()> {
    ensure!(
        result.metadata() == seed.to_le_bytes(),
        "the metadata of job {}",
        result.job
    );
    ensure!(
        result.to_vec(PATIENCE)? == result_of(WORDS, seed),
        "the result of job {} is right",
        result.job
    );
    ensure!(
        result.attempt == attempt,
        "job {}: attempt {}, not {attempt}",
        result.job,
        result.attempt
    );
    Ok(())
}

fn wait(job: &JobHandle, stream: &Stream, seed: u64, attempt: u32) -> Result<JobResult> {
    let result = job
        .wait(stream, PATIENCE)
        .with_context(|| format!("job {}", job.id()))?;
    expect(&result, seed, attempt)?;
    Ok(result)
}

fn worker(context: &Context, queue: &str) -> Result<Peer> {
    let mut peer = context.peer()?;
    peer.task(Task::Attach(queue.into()))?;
    Ok(peer)
}

fn complete() -> Task {
    Task::Answer(Reply::Complete { slow_us: 0 })
}

fn in_order_of_submission(context: &Context) -> Result<()> {
    context.warm_up()?;
    let guard = context.guard();
    let stream = context.stream()?;
    let queue = context.queue("jobs")?;
    let mut workers = vec![
        worker(context, "jobs")?,
        worker(context, "jobs")?,
        worker(context, "jobs")?,
    ];
    queue.wait_for_workers(3, PATIENCE)?;
    for (peer, slow_us) in workers.iter_mut().zip([0, 300, 2000]) {
        peer.send(&Order::Task(Task::Work { slow_us }))?;
    }
    for seed in 0..60 {
        submit(&queue, &stream, seed, Duration::ZERO)?;
    }
    for seed in 0..60 {
        let result = queue.next_result(&stream, PATIENCE)?;
        ensure!(
            result.job == seed + 1,
            "job {} where {} is due",
            result.job,
            seed + 1
        );
        expect(&result, seed, 1)?;
    }
    ensure!(
        matches!(
            queue.next_result(&stream, Duration::ZERO),
            Err(Error::Timeout { .. })
        ),
        "each result came once"
    );
    drop(queue);
    let mut done = 0;
    for mut peer in workers {
        let lines = leased_lines(&mut peer)?;
        done += lines;
        peer.dismiss()?;
    }
    ensure!(done == 60, "{done} jobs were done");
    stream.synchronize(PATIENCE)?;
    drop(stream);
    guard.settles()
}

/// How many jobs a peer that [works](Task::Work) says that it has done, when its queue has ended.
fn leased_lines(peer: &mut Peer) -> Result<u64> {
    loop {
        let line = peer.line(PATIENCE)?.context("the worker's last word")?;
        if !line.starts_with("leased ") {
            return match serde_json::from_str(&line)? {
                Answer::Number(done) => Ok(done),
                other => bail!("{other:?} instead of a number"),
            };
        }
    }
}

fn as_completed(context: &Context) -> Result<()> {
    let stream = context.stream()?;
    let options = QueueOptions {
        prefetch: 1,
        order: ResultOrder::Completion,
        ..context.queue_options()
    };
    let queue = Queue::new("jobs", options)?;
    let (mut first, mut second) = (worker(context, "jobs")?, worker(context, "jobs")?);
    queue.wait_for_workers(2, PATIENCE)?;
    (0..2).try_for_each(|seed| submit(&queue, &stream, seed, Duration::ZERO).map(drop))?;
    let held = [first.lease(Task::Lease)?.0, second.lease(Task::Lease)?.0];
    let (late, early) = if held[0] == 1 {
        (&mut first, &mut second)
    } else {
        (&mut second, &mut first)
    };
    early.task(complete())?;
    expect(&queue.next_result(&stream, PATIENCE)?, 1, 1)?;
    late.task(complete())?;
    expect(&queue.next_result(&stream, PATIENCE)?, 0, 1)
}

fn answers(context: &Context) -> Result<()> {
    let stream = context.stream()?;
    let queue = Queue::new(
        "jobs",
        QueueOptions {
            max_attempts: 3,
            ..context.queue_options()
        },
    )?;
    let mut peer = worker(context, "jobs")?;
    let job = submit(&queue, &stream, 1, Duration::ZERO)?;
    for (attempt, reply) in [
        (1, Reply::Requeue),
        (1, Reply::Fail("no power".into())),
        (2, Reply::Requeue),
    ] {
        ensure!(
            peer.lease(Task::Lease)?.1 == attempt,
            "attempt {attempt} before {reply:?}"
        );
        peer.task(Task::Answer(reply))?;
    }
    ensure!(peer.lease(Task::Lease)?.1 == 2, "the return cost nothing");
    peer.task(Task::Answer(Reply::Drop))?;
    ensure!(
        peer.lease(Task::Lease)?.1 == 3,
        "a dropped lease is a failed one"
    );
    peer.task(Task::Answer(Reply::Fail("still none".into())))?;
    match job.wait(&stream, PATIENCE) {
        Err(Error::Job {
            end: JobEnd::DeadLettered { reasons },
            ..
        }) => {
            let expected: Vec<_> = ["no power", "without an answer", "still none"]
                .into_iter()
                .zip(&reasons)
                .collect();
            ensure!(
                expected.len() == 3 && expected.iter().all(|(part, all)| all.contains(part)),
                "reasons: {reasons:?}"
            );
        }
        other => bail!("three failures gave {other:?}"),
    }
    let unwanted = submit(&queue, &stream, 2, Duration::ZERO)?;
    peer.lease(Task::Lease)?;
    peer.task(Task::Answer(Reply::Reject("not a question".into())))?;
    match unwanted.wait(&stream, PATIENCE) {
        Err(Error::Job {
            end: JobEnd::Rejected { reason },
            ..
        }) => ensure!(reason == "not a question", "{reason}"),
        other => bail!("a rejection gave {other:?}"),
    }
    peer.dismiss()
}

fn back_pressure(context: &Context) -> Result<()> {
    let stream = context.stream()?;
    let queue = Queue::new(
        "jobs",
        QueueOptions {
            limit: 2,
            submit_timeout: Duration::from_millis(20),
            ..context.queue_options()
        },
    )?;
    let jobs = (0..2)
        .map(|seed| submit(&queue, &stream, seed, Duration::ZERO))
        .collect::<Result<Vec<_>>>()?;
    let input = fill_input(
        queue.loan(&input_layout(WORDS)?)?,
        2,
        Duration::ZERO,
        &stream,
    )?;
    let refused = queue.submit(input, &stream);
    let Err(warpipe::SubmitError {
        error: Error::Limit(LimitFault::Jobs { limit: 2, .. }),
        returned: Some(input),
    }) = refused
    else {
        bail!("a full queue gave {refused:?}")
    };
    let mut peer = worker(context, "jobs")?;
    peer.send(&Order::Task(Task::Work { slow_us: 0 }))?;
    drop(wait(&jobs[0], &stream, 0, 1)?);
    let third = queue.submit(*input, &stream)?;
    drop(wait(&third, &stream, 2, 1)?);
    drop(wait(&jobs[1], &stream, 1, 1)?);
    drop(queue);
    ensure!(leased_lines(&mut peer)? == 3, "three jobs were done");
    peer.dismiss()
}

fn lease_timeout(context: &Context) -> Result<()> {
    let stream = context.stream()?;
    let options = QueueOptions {
        prefetch: 1,
        max_attempts: HEIRS + 2,
        lease_timeout: Some(Duration::from_millis(300)),
        ..context.queue_options()
    };
    let queue = Queue::new("jobs", options)?;
    let mut hung = worker(context, "jobs")?;
    queue.wait_for_workers(1, PATIENCE)?;
    let job = submit(&queue, &stream, 1, Duration::ZERO)?;
    ensure!(hung.lease(Task::Lease)? == (job.id(), 1), "it has the job");
    hung.stop()?;
    let (result, attempt) = inherit(context, &queue, &job, &stream)?;
    // While it has not answered it gets nothing, though it is the only one.
    let next = submit(&queue, &stream, 2, Duration::ZERO)?;
    ensure!(
        matches!(
            next.wait(&stream, Duration::from_millis(50)),
            Err(Error::Timeout { .. })
        ),
        "nobody does it"
    );
    ensure!(queue.state()?.waiting == 1, "it waits");
    hung.go_on()?;
    hung.task(complete())?;
    ensure!(
        hung.lease(Task::Lease)? == (next.id(), 1),
        "it has answered, and gets the next"
    );
    hung.task(complete())?;
    // On a busy machine that may have been late, too: then it does it once more.
    hung.send(&Order::Task(Task::Work { slow_us: 0 }))?;
    let done = next.wait(&stream, PATIENCE)?;
    expect(&done, 2, done.attempt)?;
    expect(&result, 1, attempt)?;
    ensure!(
        queue.state()?.finished == 0,
        "the late result was discarded"
    );
    drop((done, queue));
    leased_lines(&mut hung)?;
    hung.dismiss()
}

fn close_without_room(context: &Context) -> Result<()> {
    let stream = context.stream()?;
    let queue = context.queue("jobs")?;
    let mut peer = worker(context, "jobs")?;
    peer.send(&Order::Task(Task::Work { slow_us: 0 }))?;
    let mut results = Vec::new();
    for seed in 0..KEPT {
        let job = submit(&queue, &stream, seed, Duration::ZERO)?;
        results.push(wait(&job, &stream, seed, 1)?);
    }
    peer.stop()?;
    // Each returns its memory by a message, until one alone is tried again.
    drop(results);
    ensure!(
        eventually(PATIENCE, || warpipe::process_stats().dropping <= 1),
        "they are back, but for what is tried again"
    );
    // This announces a region.
    drop(queue.loan(&input_layout(1 << 20)?)?);
    drop(queue);
    peer.go_on()?;
    ensure!(
        leased_lines(&mut peer)? == KEPT,
        "it did all, and has seen a graceful close"
    );
    peer.dismiss()
}

/// More messages than a socket has room for.
const KEPT: u64 = 600;

/// The most that are tried as heirs of a job, one after the other.
const HEIRS: u32 = 20;

/// Has another worker do the job of the late one, and returns its result and the attempt. An heir
/// may itself be late on a busy machine; then the next one is.
fn inherit(
    context: &Context,
    queue: &Queue,
    job: &JobHandle,
    stream: &Stream,
) -> Result<(JobResult, u32)> {
    for _ in 0..HEIRS {
        let mut heir = worker(context, "jobs")?;
        let (id, attempt) = heir.lease(Task::Lease)?;
        ensure!(
            id == job.id() && attempt > 1,
            "another one gets the job, as another attempt"
        );
        heir.task(complete())?;
        let pid = heir.id() as i32;
        heir.dismiss()?;
        // It has left, and the job is done or another worker's to do.
        let is_over = |state: QueueState| {
            !state.workers.contains(&pid) && state.waiting + state.finished == 1
        };
        ensure!(
            eventually(PATIENCE, || queue.state().is_ok_and(is_over)),
            "its answer is dealt with"
        );
        match job.wait(stream, Duration::ZERO) {
            Ok(result) => {
                expect(&result, 1, attempt)?;
                ensure!(result.worker_pid == pid, "the other one did it");
                return Ok((result, attempt));
            }
            Err(Error::Timeout { .. }) => {}
            Err(error) => bail!(error),
        }
    }
    bail!("{HEIRS} in turn were late")
}

fn come_and_go(context: &Context) -> Result<()> {
    context.warm_up()?;
    let guard = context.guard();
    let stream = context.stream()?;
    let queue = Queue::new(
        "jobs",
        QueueOptions {
            prefetch: 4,
            ..context.queue_options()
        },
    )?;
    let mut leaver = worker(context, "jobs")?;
    queue.wait_for_workers(1, PATIENCE)?;
    let jobs = (0..4)
        .map(|seed| submit(&queue, &stream, seed, Duration::ZERO))
        .collect::<Result<Vec<_>>>()?;
    leaver.lease(Task::Lease)?;
    leaver.lease(Task::Lease)?;
    leaver.task(Task::Leave)?;
    // It has left, and finishes one and returns the other.
    leaver.task(complete())?;
    drop(wait(&jobs[0], &stream, 0, 1)?);
    leaver.task(Task::Answer(Reply::Requeue))?;
    let mut comer = worker(context, "jobs")?;
    for _ in 1..4 {
        comer.lease(Task::Lease)?;
        comer.task(complete())?;
    }
    for (job, seed) in jobs.iter().zip(0..).skip(1) {
        drop(wait(job, &stream, seed, 1)?);
    }
    leaver.dismiss()?;
    comer.dismiss()?;
    ensure!(
        eventually(PATIENCE, || queue
            .state()
            .is_ok_and(|state| state.workers.is_empty())),
        "nobody is left"
    );
    drop(queue);
    stream.synchronize(PATIENCE)?;
    drop(stream);
    guard.settles()
}

fn drain_and_shutdown(context: &Context) -> Result<()> {
    let stream = context.stream()?;
    let queue = context.queue("jobs")?;
    let mut peer = worker(context, "jobs")?;
    let jobs = (0..6)
        .map(|seed| submit(&queue, &stream, seed, Duration::ZERO))
        .collect::<Result<Vec<_>>>()?;
    ensure!(
        matches!(queue.drain(Duration::ZERO), Err(Error::Timeout { .. })),
        "there is work to do"
    );
    peer.send(&Order::Task(Task::Work { slow_us: 500 }))?;
    queue.drain(PATIENCE)?;
    ensure!(
        queue.state()?.finished == 6,
        "all are done and none was taken"
    );
    queue.shutdown(PATIENCE)?;
    let late =
        submit(&queue, &stream, 9, Duration::ZERO).map_err(|error| error.downcast::<Error>());
    ensure!(
        matches!(late, Err(Ok(Error::State(StateFault::QueueClosed(_))))),
        "a shut queue gave {late:?}"
    );
    for (job, seed) in jobs.iter().zip(0..) {
        drop(wait(job, &stream, seed, 1)?);
    }
    drop(queue);
    ensure!(
        matches!(
            jobs[0].wait(&stream, PATIENCE),
            Err(Error::State(StateFault::QueueClosed(_)))
        ),
        "the queue is gone"
    );
    ensure!(leased_lines(&mut peer)? == 6, "the worker gets an error");
    peer.dismiss()
}

fn result_after_owner_death(context: &Context) -> Result<()> {
    context.warm_up()?;
    let guard = context.guard();
    let mut owner = context.peer()?;
    owner.task(Task::Submit {
        queue: "jobs".into(),
        batch: Batch::of(1, WORDS, 1),
    })?;
    let stream = context.stream()?;
    let mut worker = context.worker("jobs")?;
    let held = worker.lease(&stream, PATIENCE)?;
    held.to_vec(PATIENCE)?;
    owner.kill()?;
    let end = worker.lease(&stream, PATIENCE).map(drop);
    ensure!(
        matches!(end, Err(Error::PeerGone { .. })),
        "a worker of a dead queue got {end:?}"
    );
    drop(worker);
    let output = work(&held, Duration::from_millis(300))?;
    let answered = held.complete(output, &stream);
    ensure!(
        matches!(answered, Ok(()) | Err(Error::PeerGone { .. })),
        "an answer to the dead gave {answered:?}"
    );
    stream
        .synchronize(PATIENCE)
        .context("the kernels of a result that nobody takes")?;
    drop((stream, owner));
    context.domain.clean()?;
    guard.settles()
}

fn plain_subscriber(context: &Context) -> Result<()> {
    let stream = context.stream()?;
    let queue = context.queue("jobs")?;
    let built = context.subscriber("jobs");
    ensure!(
        matches!(built, Err(Error::Name(NameFault::OtherKind { .. }))),
        "a subscriber of a queue got {built:?}"
    );
    let job = submit(&queue, &stream, 1, Duration::ZERO)?;
    let mut peer = worker(context, "jobs")?;
    peer.lease(Task::Lease)?;
    peer.task(complete())?;
    drop(wait(&job, &stream, 1, 1)?);
    peer.dismiss()
}
