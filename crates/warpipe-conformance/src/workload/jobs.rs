//! A queue with its worker, and a service with its client and its server.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use warpipe::{
    Client, ClientOptions, Error, JobResult, Lease, Loan, Pending, Queue, QueueOptions, Server,
    StateFault, Stream, Worker, WorkerOptions,
};

use super::{Site, Workload};
use crate::PATIENCE;
use crate::payload::{fill_input, input_layout, result_of, work};
use warpipe::OptionalExtension;

const WORDS: u64 = 256;
/// A job is tried again as often as a call is refused.
const ATTEMPTS: u32 = 1000;

struct Jobs {
    /// None once its link was over, and it said so.
    worker: Option<Worker>,
    queue: Queue,
    submitting: Stream,
    working: Stream,
    /// The seeds of the jobs without a result yet, by number.
    due: BTreeMap<u64, u64>,
    site: Site,
}

pub(super) fn queue(site: Site) -> Result<Box<dyn Workload>> {
    let context = &site.context;
    let (submitting, working) = (context.stream()?, context.stream()?);
    let options = QueueOptions {
        max_attempts: ATTEMPTS,
        submit_timeout: site.patience,
        // Calls of the driver that it makes to let a worker in may hang for as long.
        handshake_timeout: site.patience,
        ..context.queue_options()
    };
    let queue = Queue::new(&site.name_of("queue"), options)?;
    let worker = Some(attach(&site)?);
    Ok(Box::new(Jobs {
        worker,
        queue,
        submitting,
        working,
        due: BTreeMap::new(),
        site,
    }))
}

fn attach(site: &Site) -> Result<Worker> {
    let options = WorkerOptions {
        answer_timeout: site.patience,
        ..site.context.worker_options()
    };
    Ok(Worker::open(
        &site.name_of("queue"),
        options,
        Duration::ZERO,
    )?)
}

fn input(site: &Site, loan: Loan, seed: u64, stream: &Stream) -> Result<Loan> {
    site.apart(|| Ok(fill_input(loan, seed, Duration::ZERO, stream)?))
}

fn check(result: &JobResult, seed: u64) -> Result<()> {
    ensure!(
        result.metadata() == seed.to_le_bytes(),
        "the result of job {} is another's",
        result.job
    );
    ensure!(
        result.to_vec(PATIENCE)? == result_of(WORDS, seed),
        "the result of job {} is wrong",
        result.job
    );
    Ok(())
}

fn complete(lease: Lease, stream: &Stream) -> Result<()> {
    let output = work(&lease, Duration::ZERO)?;
    Ok(lease.complete(output, stream)?)
}

impl Jobs {
    /// Does what is there to be done, and takes a result if there is one.
    fn step(&mut self) -> Result<Option<()>> {
        let leased = self
            .worker
            .as_mut()
            .context("a worker")?
            .lease(&self.working, Duration::ZERO)
            .optional();
        if matches!(
            leased,
            Err(Error::PeerGone { .. } | Error::State(StateFault::LinkClosed { .. }))
        ) {
            self.worker = None;
        }
        if let Some(lease) = leased? {
            complete(lease, &self.working)?;
        }
        match self.queue.next_result(&self.submitting, Duration::ZERO) {
            Ok(result) => {
                let seed = self
                    .due
                    .remove(&result.job)
                    .context("a result that was not due: doubled")?;
                check(&result, seed)?;
            }
            Err(Error::Timeout { .. }) => {}
            Err(error) => bail!(error),
        }
        Ok(self.due.is_empty().then_some(()))
    }
}

impl Workload for Jobs {
    fn turn(&mut self, seed: u64) -> Result<()> {
        if self.worker.is_none() {
            self.worker = Some(attach(&self.site)?);
        }
        let loan = self.queue.loan(&input_layout(WORDS)?)?;
        let input = input(&self.site, loan, seed, &self.submitting)?;
        let job = self
            .queue
            .submit(input, &self.submitting)
            .map_err(Error::from)?;
        self.due.insert(job.id(), seed);
        let site = self.site.clone();
        site.until("the result of a job", || self.step())
    }

    fn audit(&mut self) -> Result<()> {
        let state = self.queue.state()?;
        ensure!(
            (state.leased, state.waiting) == (0, 0),
            "jobs are left: {state:?}"
        );
        Ok(())
    }
}

struct Service {
    server: Server,
    client: Client,
    asking: Stream,
    serving: Stream,
    due: Vec<(Pending, u64)>,
    site: Site,
}

pub(super) fn service(site: Site) -> Result<Box<dyn Workload>> {
    let context = &site.context;
    let (asking, serving) = (context.stream()?, context.stream()?);
    let options = ClientOptions {
        max_attempts: ATTEMPTS,
        loan_timeout: site.patience,
        ..context.domain.on(&context.device)
    };
    let client = Client::new(&site.name_of("service"), options)?;
    let server = context.server(&site.name_of("service"))?;
    Ok(Box::new(Service {
        server,
        client,
        asking,
        serving,
        due: Vec::new(),
        site,
    }))
}

impl Service {
    fn step(&mut self) -> Result<Option<()>> {
        match self.server.accept(&self.serving, Duration::ZERO) {
            Ok(lease) => complete(lease, &self.serving)?,
            Err(Error::Timeout { .. }) => {}
            Err(error) => bail!(error),
        }
        while let Some((pending, seed)) = self.due.last() {
            let Some(reply) = pending.wait(&self.asking, Duration::ZERO).optional()? else {
                return Ok(None);
            };
            let seed = *seed;
            self.due.pop();
            check(&reply, seed)?;
        }
        Ok(Some(()))
    }
}

impl Workload for Service {
    fn turn(&mut self, seed: u64) -> Result<()> {
        let input = input(
            &self.site,
            self.client.loan(&input_layout(WORDS)?)?,
            seed,
            &self.asking,
        )?;
        let pending = self
            .client
            .request(input, &self.asking, self.site.patience)
            .map_err(Error::from)?;
        self.due.push((pending, seed));
        let site = self.site.clone();
        site.until("a reply", || self.step())
    }
}
