//! A master and its workers: square roots for 200 tasks, and a worker that is killed half-way.
//!
//! The master puts the tasks into a queue, each a tensor in its own memory. Three workers lease
//! them, compute on their devices, and answer with tensors in theirs. After half of the results the
//! master kills a worker (`SIGKILL`): its unfinished tasks go to the others, and are counted as
//! redone. Every result is verified.
//!
//! **This module is marked for unsafe**: it launches kernels on device memory.
//!
//! ```text
//! cargo run -p warpipe --example workers                   # all processes
//! cargo run -p warpipe --example workers -- --role master  # or: one terminal each, in any order; as many workers as
//! cargo run -p warpipe --example workers -- --role worker  # you like, kill -9 and start them whenever you like
//! ```
//!
//! It ends with `ok: 200 of 200 tasks right; 1 worker was killed, and N tasks were redone`, N
//! mostly above 0.

mod stage;

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::Duration;

use stage::{Actor, Outcome, PATIENCE, Stage, ensure, play};
use warpipe::{
    DType, Error, JobResult, Layout, Loan, Queue, QueueOptions, Stream, Worker, WorkerOptions,
};

const NAME: &str = "roots";
const TASKS: u64 = 200;
const FLOATS: u64 = 1024;
const WORKERS: usize = 3;
/// Tasks that a worker may hold at once: a death costs at most these.
const PREFETCH: u32 = 4;

fn main() -> ExitCode {
    play(&[], |stage| match stage.role() {
        "worker" => work(stage),
        "master" => master(stage, Vec::new()),
        _ => {
            let workers: Outcome<Vec<Actor>> =
                (0..WORKERS).map(|_| stage.start("worker")).collect();
            master(stage, workers?)
        }
    })
}

/// Takes tasks as long as the queue exists.
fn work(stage: &Stage) -> Outcome<String> {
    let options = WorkerOptions {
        answer_timeout: PATIENCE,
        ..stage.domain.on(&stage.device)
    };
    let mut worker = Worker::open(NAME, options, PATIENCE)?;
    let stream = stage.device.stream()?;
    let mut tasks = 0;
    loop {
        let task = match worker.lease(&stream, PATIENCE) {
            Ok(task) => task,
            Err(Error::PeerGone { .. }) => {
                return Ok(format!("process {} took {tasks} tasks", std::process::id()));
            }
            Err(error) => return Err(error.into()),
        };
        let roots = task.output(task.layout())?;
        // Simulates more work.
        warpipe_kernels::spin(&stream, Duration::from_millis(5))?;
        // SAFETY: the task was checked to have its layout's bytes, the output has as many, and this
        // process owns both until this stream has passed the kernel: they are sent and released
        // behind it.
        unsafe {
            warpipe_kernels::square_root(
                &stream,
                roots.ptr(),
                task.ptr(),
                task.layout().elements(),
            )?
        };
        // At once: the answer takes effect when the device is done. So the stream always has a next
        // task.
        task.complete(roots, &stream)?;
        tasks += 1;
    }
}

/// Submits the tasks and verifies the results. With workers of its own, kills one half-way.
fn master(stage: &Stage, mut workers: Vec<Actor>) -> Outcome<String> {
    let queue = Queue::new(
        NAME,
        QueueOptions {
            prefetch: PREFETCH,
            ..stage.domain.on(&stage.device)
        },
    )?;
    let stream = stage.device.stream()?;
    for number in 0..TASKS {
        queue.submit(task(&queue, &stream, number)?, &stream)?;
    }
    queue.wait_for_workers(workers.len().max(1), PATIENCE)?;
    let (mut redone, mut killed, mut by_process) = (0, 0, BTreeMap::new());
    for number in 0..TASKS {
        // In the order in which the tasks were submitted; `ResultOrder::Completion` is the alternative.
        let result = queue.next_result(&stream, PATIENCE)?;
        if number == TASKS / 2
            && let Some(worker) = workers.pop()
        {
            println!(
                "killing a worker, process {}, after {number} results",
                worker.pid()
            );
            worker.kill()?;
            killed += 1;
        }
        verify(number, &result)?;
        redone += u64::from(result.attempt > 1);
        *by_process.entry(result.worker_pid).or_insert(0) += 1;
    }
    by_process
        .iter()
        .for_each(|(process, tasks)| println!("process {process} did {tasks} tasks"));
    ensure(killed == 0 || redone <= PREFETCH.into(), || {
        format!("{redone} tasks were redone for {killed} deaths")
    })?;
    // The workers see the queue's end, and end.
    drop(queue);
    workers.into_iter().try_for_each(Actor::finish)?;
    Ok(format!(
        "{TASKS} of {TASKS} tasks right; {killed} worker was killed, and {redone} tasks were redone"
    ))
}

/// Task `number`: the floats from `number * FLOATS` on.
fn task(queue: &Queue, stream: &Stream, number: u64) -> Outcome<Loan> {
    let mut input = queue.loan(&Layout::contiguous(DType::F32, &[FLOATS])?)?;
    let bytes: Vec<u8> = floats(number).flat_map(f32::to_ne_bytes).collect();
    input.write(stream, &bytes)?;
    Ok(input)
}

fn floats(number: u64) -> impl Iterator<Item = f32> {
    (number * FLOATS..(number + 1) * FLOATS).map(|value| value as f32)
}

fn verify(number: u64, result: &JobResult) -> Outcome {
    ensure(result.job == number + 1, || {
        format!("the result of task {} came in its place", result.job - 1)
    })?;
    let bytes = result.to_vec(PATIENCE)?;
    let right: Vec<u8> = floats(number)
        .flat_map(|value| value.sqrt().to_ne_bytes())
        .collect();
    ensure(bytes == right, || format!("task {number} has a wrong root"))
}
