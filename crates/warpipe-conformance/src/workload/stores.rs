//! Memory that other processes open, blocks of a pool, and legacy handles.

use std::time::Duration;

use anyhow::{Result, ensure};
use warpipe::{
    Access, DeviceSlice, LentBuffer, Memory, Pool, PoolClient, PoolOptions, PublishOptions, Stream,
};

use super::{Site, Workload};
use crate::device_malloc::{self, DeviceMalloc};
use crate::device_words::{fill, wrong_words};
use crate::payload::ErrorCounters;

const MIB: u64 = 1 << 20;

/// Fills a place and sees that another of the same memory reads it.
fn cross(
    site: &Site,
    error_counters: &mut ErrorCounters,
    stream: &Stream,
    from: &DeviceSlice,
    to: &DeviceSlice,
    seed: u64,
) -> Result<()> {
    let wrong = site.apart(|| {
        fill(from, stream, seed, Duration::ZERO, true)?;
        wrong_words(to, stream, error_counters, seed)
    })?;
    ensure!(wrong == 0, "{wrong} wrong words");
    Ok(())
}

struct Blocks {
    client: PoolClient,
    pool: Pool,
    stream: Stream,
    error_counters: ErrorCounters,
    site: Site,
}

const BLOCK: u64 = 2 * MIB;
const LIMIT: u64 = 2 * BLOCK;

pub(super) fn pool(site: Site) -> Result<Box<dyn Workload>> {
    let context = &site.context;
    let (stream, error_counters) = (
        context.stream()?,
        site.apart(|| Ok(context.error_counters()?))?,
    );
    let options = PoolOptions {
        memory_limit: LIMIT,
        reserve: LIMIT,
        ..context.domain.on(&context.device)
    };
    let pool = Pool::new(&site.name_of("pool"), options)?;
    let client = PoolClient::open(
        &site.name_of("pool"),
        context.domain.on(&context.device),
        Duration::ZERO,
    )?;
    Ok(Box::new(Blocks {
        client,
        pool,
        stream,
        error_counters,
        site,
    }))
}

impl Workload for Blocks {
    fn turn(&mut self, seed: u64) -> Result<()> {
        let Blocks {
            client,
            pool,
            stream,
            error_counters,
            site,
        } = self;
        let block = pool.allocate(BLOCK, site.patience)?;
        let lent = LentBuffer::open(
            &block.lend(Access::ReadWrite)?,
            &site.context.device,
            Duration::ZERO,
        )?;
        cross(site, error_counters, stream, &lent, &block, seed)?;
        lent.free(stream)?;
        block.free(stream)?;
        let granted = client.allocate(BLOCK, site.patience)?;
        cross(
            site,
            error_counters,
            stream,
            &granted,
            &granted,
            seed + (1 << 32),
        )?;
        Ok(granted.free(stream)?)
    }

    fn audit(&mut self) -> Result<()> {
        drop(self.pool.allocate(LIMIT, self.site.patience)?);
        let stats = self.pool.stats();
        ensure!(stats.lent_bytes == 0, "blocks are lent still: {stats:?}");
        Ok(())
    }
}

struct Published {
    stream: Stream,
    error_counters: ErrorCounters,
    site: Site,
}

pub(super) fn memory(site: Site) -> Result<Box<dyn Workload>> {
    let (stream, error_counters) = (
        site.context.stream()?,
        site.apart(|| Ok(site.context.error_counters()?))?,
    );
    Ok(Box::new(Published {
        stream,
        error_counters,
        site,
    }))
}

impl Workload for Published {
    fn turn(&mut self, seed: u64) -> Result<()> {
        let Published {
            stream,
            error_counters,
            site,
        } = self;
        let context = &site.context;
        let memory = Memory::allocate(&context.device, MIB)?;
        let options = PublishOptions {
            access: Access::ReadWrite,
            ..context.domain.options()
        };
        let published = memory.publish(&site.name_of("memory"), options)?;
        let opened = published
            .ticket(..)?
            .open(&context.device, Duration::ZERO)?;
        cross(site, error_counters, stream, &opened, &memory, seed)?;
        let (fd, info) = (memory.export_fd()?, memory.info());
        let imported = Memory::import_fd(&context.device, &fd, &info, Access::ReadWrite)?;
        cross(
            site,
            error_counters,
            stream,
            &imported,
            &opened,
            seed + (1 << 32),
        )?;
        opened.write(stream, 0, &seed.to_le_bytes())?;
        let bytes = memory.to_vec(site.patience)?;
        ensure!(bytes[..8] == seed.to_le_bytes(), "what was written is read");
        Ok(())
    }
}

struct Handles {
    stream: Stream,
    error_counters: ErrorCounters,
    site: Site,
}

pub(super) fn legacy(site: Site) -> Result<Box<dyn Workload>> {
    let (stream, error_counters) = (
        site.context.stream()?,
        site.apart(|| Ok(site.context.error_counters()?))?,
    );
    Ok(Box::new(Handles {
        stream,
        error_counters,
        site,
    }))
}

impl Workload for Handles {
    fn turn(&mut self, seed: u64) -> Result<()> {
        const WORDS: u64 = 4096;
        let Handles {
            stream,
            error_counters,
            site,
        } = self;
        let device = &site.context.device;
        let memory = site.apart(|| DeviceMalloc::new(device, WORDS, seed))?;
        let opened = memory.export()?.open(device)?;
        opened.used_on(stream);
        site.apart(|| device_malloc::check(&opened, seed, error_counters))?;
        let closed = opened.close(site.patience);
        site.apart(|| {
            drop(memory);
            Ok(())
        })?;
        Ok(closed?)
    }
}
