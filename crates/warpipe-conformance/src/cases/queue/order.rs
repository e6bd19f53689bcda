//! The order of a job's input and result after the device work that writes them.

use std::time::Duration;

use anyhow::{Result, ensure};
use warpipe::backend::testing::{Delaying, Wrapped};
use warpipe::{Device, DeviceKind, Queue, QueueOptions, Worker, WorkerOptions};

use super::WORDS;
use crate::PATIENCE;
use crate::context::Context;
use crate::payload::{fill_input, input_layout, result_of, work};

/// Whether the result of a job that was filled late is right, with these devices of the owner and
/// the worker, which is there before the job or comes after it.
fn late_fill(
    context: &Context,
    owner: &Device,
    worker: &Device,
    is_there_before: bool,
) -> Result<bool> {
    let (out, back) = (owner.stream()?, worker.stream()?);
    let options = QueueOptions {
        device: Some(owner.clone()),
        ..context.queue_options()
    };
    let queue = Queue::new("late", options)?;
    let attach = || {
        Worker::open(
            "late",
            WorkerOptions {
                device: Some(worker.clone()),
                ..context.worker_options()
            },
            Duration::ZERO,
        )
    };
    let before = is_there_before.then(attach).transpose()?;
    queue.wait_for_workers(usize::from(is_there_before), PATIENCE)?;
    let input = fill_input(
        queue.loan(&input_layout(WORDS)?)?,
        3,
        Duration::from_millis(300),
        &out,
    )?;
    let job = queue.submit(input, &out)?;
    let mut worker = before.map_or_else(attach, Ok)?;
    let lease = worker.lease(&back, PATIENCE)?;
    let output = work(&lease, Duration::ZERO)?;
    lease.complete(output, &back)?;
    let result = job.wait(&out, PATIENCE)?;
    let is_right = result.to_vec(PATIENCE)? == result_of(WORDS, 3);
    drop((result, worker, queue));
    out.synchronize(PATIENCE)?;
    back.synchronize(PATIENCE)?;
    Ok(is_right)
}

fn without_waits(context: &Context) -> Device {
    let hook = Delaying {
        signal_late: Duration::ZERO,
        waits: false,
    };
    Device::from_backend(Wrapped::new(context.device.backend().clone(), hook))
}

pub(super) fn redispatch_is_ordered(context: &Context) -> Result<()> {
    ensure!(
        late_fill(context, &context.device, &context.device, false)?,
        "the job waits for its input"
    );
    // A job that is there before its data is ordered by its worker's wait: the negative control of
    // the test of order. Where streams are threads: those of one GPU context share hardware queues,
    // which may order the work by themselves.
    if context.device.info().id.kind != DeviceKind::Host {
        return Ok(());
    }
    ensure!(
        !late_fill(context, &context.device, &without_waits(context), true)?,
        "without its wait a worker reads what is not filled, and this case sees it"
    );
    ensure!(
        late_fill(context, &context.device, &without_waits(context), false)?,
        "a job that waited is given out once it is filled, and needs no wait"
    );
    Ok(())
}

pub(super) fn result_is_ordered(context: &Context) -> Result<()> {
    let hook = Delaying {
        signal_late: Duration::from_millis(100),
        waits: true,
    };
    let late = Device::from_backend(Wrapped::new(context.device.backend().clone(), hook));
    ensure!(
        late_fill(context, &late, &late, false)?,
        "late signals are waited for on both ways"
    );
    // A worker that does not wait for its input computes from what is not there.
    let (owner, blind) = (&context.device, without_waits(context));
    let (out, back) = (owner.stream()?, blind.stream()?);
    let queue = Queue::new(
        "blind",
        QueueOptions {
            device: Some(owner.clone()),
            ..context.queue_options()
        },
    )?;
    let mut worker = Worker::open(
        "blind",
        WorkerOptions {
            device: Some(blind.clone()),
            ..context.worker_options()
        },
        Duration::ZERO,
    )?;
    queue.wait_for_workers(1, PATIENCE)?;
    let input = fill_input(
        queue.loan(&input_layout(WORDS)?)?,
        3,
        Duration::from_millis(300),
        &out,
    )?;
    let job = queue.submit(input, &out)?;
    let lease = worker.lease(&back, PATIENCE)?;
    let output = work(&lease, Duration::ZERO)?;
    lease.complete(output, &back)?;
    let result = job.wait(&out, PATIENCE)?;
    ensure!(
        result.to_vec(PATIENCE)? != result_of(WORDS, 3),
        "without its wait the worker is early, and this case sees it"
    );
    drop((result, worker, queue));
    out.synchronize(PATIENCE)?;
    back.synchronize(PATIENCE)?;
    Ok(())
}
