//! A timeline, an event and a semaphore, each with its creator and one that has opened it.

use anyhow::{Result, ensure};
use std::time::Duration;
use warpipe::OptionalExtension;
use warpipe::{Event, Semaphore, Stream, Timeline};

use super::{Site, Workload};

struct Streams {
    near: Stream,
    far: Stream,
}

impl Streams {
    fn new(site: &Site) -> Result<Streams> {
        Ok(Streams {
            near: site.context.stream()?,
            far: site.context.stream()?,
        })
    }

    /// No stream stays blocked, whatever call was refused.
    fn settle(&self, site: &Site) -> Result<()> {
        for stream in [&self.near, &self.far] {
            site.until("the end of a stream's work", || {
                Ok(stream.is_idle()?.then_some(()))
            })?;
        }
        Ok(())
    }
}

struct Steps {
    opened: Timeline,
    owner: Timeline,
    streams: Streams,
    site: Site,
}

pub(super) fn timeline(site: Site) -> Result<Box<dyn Workload>> {
    let (context, streams) = (&site.context, Streams::new(&site)?);
    let owner = Timeline::new(
        &site.name_of("timeline"),
        context.domain.on(&context.device),
    )?;
    let opened = Timeline::open(
        &site.name_of("timeline"),
        context.domain.on(&context.device),
        Duration::ZERO,
    )?;
    Ok(Box::new(Steps {
        opened,
        owner,
        streams,
        site,
    }))
}

impl Workload for Steps {
    fn turn(&mut self, seed: u64) -> Result<()> {
        self.owner
            .signal(&self.streams.near, seed, Duration::from_secs(10))?;
        self.opened.wait(&self.streams.far, seed)?;
        self.opened.wait_host(seed, self.site.patience)?;
        self.streams.settle(&self.site)?;
        ensure!(
            self.opened.check(seed)? && self.opened.value() == seed,
            "{:?} after {seed}",
            self.opened
        );
        Ok(())
    }
}

struct Recorded {
    opened: Event,
    created: Event,
    streams: Streams,
    site: Site,
}

pub(super) fn event(site: Site) -> Result<Box<dyn Workload>> {
    let (context, streams) = (&site.context, Streams::new(&site)?);
    let created = Event::new(context.domain.on(&context.device))?;
    let opened = Event::open(
        &created.handle()?,
        context.domain.on(&context.device),
        Duration::ZERO,
    )?;
    Ok(Box::new(Recorded {
        opened,
        created,
        streams,
        site,
    }))
}

impl Workload for Recorded {
    fn turn(&mut self, seed: u64) -> Result<()> {
        let (recorder, waiter) = if seed.is_multiple_of(2) {
            (&self.created, &self.opened)
        } else {
            (&self.opened, &self.created)
        };
        recorder.record(&self.streams.near, Duration::from_secs(10))?;
        let recording = waiter.wait(&self.streams.far)?;
        waiter.synchronize(self.site.patience)?;
        self.streams.settle(&self.site)?;
        ensure!(
            waiter.check(recording)? && recorder.query()?,
            "what was recorded is complete"
        );
        Ok(())
    }
}

struct Permits {
    member: Semaphore,
    creator: Semaphore,
    streams: Streams,
    site: Site,
}

/// How many may be inside.
const PERMITS: u32 = 2;

pub(super) fn semaphore(site: Site) -> Result<Box<dyn Workload>> {
    let (context, streams) = (&site.context, Streams::new(&site)?);
    let creator = Semaphore::new(
        &site.name_of("semaphore"),
        PERMITS,
        context.domain.on(&context.device),
    )?;
    let member = Semaphore::open(
        &site.name_of("semaphore"),
        context.domain.on(&context.device),
        Duration::ZERO,
    )?;
    Ok(Box::new(Permits {
        member,
        creator,
        streams,
        site,
    }))
}

impl Workload for Permits {
    fn turn(&mut self, _seed: u64) -> Result<()> {
        let patience = self.site.patience;
        let Streams { near, far } = &self.streams;
        let (first, second) = (
            self.creator.acquire(near, patience)?,
            self.member.acquire(far, patience)?,
        );
        ensure!(
            self.member
                .acquire_host(Duration::ZERO)
                .optional()?
                .is_none(),
            "a third permit of two"
        );
        first.release(near)?;
        second.release(far)?;
        let (first, second) = (
            self.member.acquire_host(patience)?,
            self.member.acquire(near, patience)?,
        );
        second.release(near)?;
        first.release_now();
        self.streams.settle(&self.site)
    }

    fn audit(&mut self) -> Result<()> {
        let creator = &self.creator;
        self.site.until("every permit", || {
            Ok((creator.state().available == PERMITS).then_some(()))
        })?;
        let held = (0..PERMITS)
            .map(|_| creator.acquire_host(self.site.patience))
            .collect::<warpipe::Result<Vec<_>>>()?;
        ensure!(
            creator.acquire_host(Duration::ZERO).optional()?.is_none(),
            "more permits than there are"
        );
        held.into_iter().for_each(warpipe::Permit::release_now);
        Ok(())
    }
}
