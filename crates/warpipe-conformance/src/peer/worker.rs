//! A peer as a worker of a queue, a server, a client, or the owner of a queue.

use std::collections::VecDeque;
use std::time::Duration;

use anyhow::{Context as _, Result};
use warpipe::{Error, Lease, Queue, Server, Stream, Worker};

use super::actor::say;
use super::order::{Answer, Batch, Reply, Task};
use crate::PATIENCE;
use crate::context::Context;
use crate::payload::{fill_input, input_layout, result_of, work};

/// The resources: fields are dropped in this order.
#[derive(Default)]
pub(super) struct WorkerActor {
    held: VecDeque<Lease>,
    worker: Option<Worker>,
    server: Option<Server>,
    queue: Option<Queue>,
    stream: Option<Stream>,
}

fn complete(lease: Lease, slow: Duration) -> warpipe::Result<()> {
    let (output, stream) = (work(&lease, slow)?, lease.stream().clone());
    lease.complete(output, &stream)
}

fn answer(lease: Lease, reply: &Reply) -> warpipe::Result<()> {
    match reply {
        Reply::Complete { slow_us } => complete(lease, Duration::from_micros(*slow_us)),
        Reply::Fail(reason) => lease.fail(reason),
        Reply::Requeue => lease.requeue(),
        Reply::Reject(reason) => lease.reject(reason),
        Reply::Drop => {
            drop(lease);
            Ok(())
        }
    }
}

impl WorkerActor {
    fn stream(&mut self, context: &Context) -> Result<Stream> {
        if self.stream.is_none() {
            self.stream = Some(context.stream()?);
        }
        self.stream.clone().context("made above")
    }

    pub(super) fn carry_out(&mut self, task: Task, context: &Context) -> Result<Answer> {
        let stream = self.stream(context)?;
        match task {
            Task::Attach(queue) => self.worker = Some(context.worker(&queue)?),
            Task::Serve(service) => self.server = Some(context.server(&service)?),
            Task::Lease => {
                let lease = self
                    .worker
                    .as_mut()
                    .context("it is no worker")?
                    .lease(&stream, PATIENCE)?;
                return Ok(self.hold(lease));
            }
            Task::Accept => {
                let lease = self
                    .server
                    .as_mut()
                    .context("it is no server")?
                    .accept(&stream, PATIENCE)?;
                return Ok(self.hold(lease));
            }
            Task::Answer(reply) => {
                let lease = self.held.pop_front().context("it holds nothing")?;
                answer(lease, &reply)?;
            }
            Task::Synchronize => stream.synchronize(PATIENCE)?,
            Task::Work { slow_us } => return Ok(Answer::Number(self.work(slow_us, &stream)?)),
            Task::ServeOn { slow_us, idle_ms } => {
                return Ok(Answer::Number(self.serve(slow_us, idle_ms, &stream)?));
            }
            Task::Leave => (self.worker, self.server) = (None, None),
            Task::Own(queue) => self.queue = Some(context.queue(&queue)?),
            Task::Submit { queue, batch } => self.submit(&queue, batch, context, &stream)?,
            Task::Call { service, batch } => {
                return Ok(Answer::Number(call(&service, batch, context, &stream)?));
            }
        }
        Ok(Answer::Done)
    }

    fn hold(&mut self, lease: Lease) -> Answer {
        let (job, attempt) = (lease.job, lease.attempt);
        self.held.push_back(lease);
        Answer::Leased { job, attempt }
    }

    fn work(&mut self, slow_us: u64, stream: &Stream) -> Result<u64> {
        let worker = self.worker.as_mut().context("it is no worker")?;
        let mut done = 0;
        loop {
            match worker.lease(stream, PATIENCE) {
                Ok(lease) => {
                    say(&format!("leased {} {}", lease.job, lease.attempt));
                    complete(lease, Duration::from_micros(slow_us))?;
                    done += 1;
                }
                Err(Error::PeerGone { graceful: true, .. }) => return Ok(done),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn serve(&mut self, slow_us: u64, idle_ms: u64, stream: &Stream) -> Result<u64> {
        let server = self.server.as_mut().context("it is no server")?;
        let mut done = 0;
        loop {
            match server.accept(stream, Duration::from_millis(idle_ms)) {
                Ok(lease) => match complete(lease, Duration::from_micros(slow_us)) {
                    // A client that has its reply, or that is tired of waiting, may go.
                    Ok(()) | Err(Error::PeerGone { .. }) => done += 1,
                    Err(error) => return Err(error.into()),
                },
                Err(Error::Timeout { .. }) => return Ok(done),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn submit(
        &mut self,
        name: &str,
        batch: Batch,
        context: &Context,
        stream: &Stream,
    ) -> Result<()> {
        if self.queue.is_none() {
            self.queue = Some(context.queue(name)?);
        }
        let queue = self.queue.as_ref().context("made above")?;
        for index in 0..batch.count {
            let loan = queue.loan(&input_layout(batch.words)?)?;
            let slow = Duration::from_micros(batch.slow_us);
            queue
                .submit(fill_input(loan, batch.seed + index, slow, stream)?, stream)
                .map_err(Error::from)?;
        }
        Ok(())
    }

    /// Drops everything.
    pub(super) fn end(&mut self) -> Result<()> {
        let stream = self.stream.take();
        *self = WorkerActor::default();
        if let Some(stream) = stream {
            stream.synchronize(PATIENCE)?;
        }
        Ok(())
    }
}

fn call(service: &str, batch: Batch, context: &Context, stream: &Stream) -> Result<u64> {
    let client = context.client(service)?;
    let mut right = 0;
    for seed in (batch.seed..).take(batch.count as usize) {
        let input = fill_input(
            client.loan(&input_layout(batch.words)?)?,
            seed,
            Duration::ZERO,
            stream,
        )?;
        let reply = client.call(input, stream, PATIENCE)?;
        right += u64::from(reply.to_vec(PATIENCE)? == result_of(batch.words, seed));
    }
    Ok(right)
}
