//! A peer's orders for timelines and events. **This module is marked for unsafe**: a hostile peer
//! removes pages.

use std::time::Duration;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};
use warpipe::{Event, EventHandle, OpenOptions, Recording, Stream, Timeline};

use super::order::Answer;
use crate::PATIENCE;
use crate::context::Context;
use crate::payload::ErrorCounters;
use crate::shared::Shared;

/// Orders about timelines and events. The peer has one stream for them.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum SignalOrder {
    /// Map the shared memory at this path.
    Map(String),
    /// Enqueue a kernel that writes all of it, late.
    Write {
        /// The value that it writes.
        seed: u64,
        /// How late.
        slow_us: u64,
    },
    /// Keep the stream, for longer than any case takes.
    Hold,
    /// Check all of it behind the stream's work. Answers with the number of wrong words.
    Read {
        /// The value that it should read.
        seed: u64,
    },
    /// Make a timeline.
    CreateTimeline(String),
    /// Open a timeline, or wait for it.
    OpenTimeline(String),
    /// Signal it behind the stream's work.
    Signal(u64),
    /// Signal it now.
    SignalNow(u64),
    /// Let the stream wait for it.
    Wait(u64),
    /// Wait for it on the CPU.
    WaitHost(u64),
    /// Whether a value was reached. Answers with 0 or 1, or the fault.
    Check(u64),
    /// Its value. Answers with a number.
    Value,
    /// Make so many events. Answers with the handle of the last, as text.
    CreateEvents(usize),
    /// Open an event.
    OpenEvent(String),
    /// Record the last one made or opened.
    Record,
    /// Let the stream wait for it.
    WaitEvent,
    /// Whether what was waited for is complete. Answers with 0 or 1, or the fault.
    CheckEvent,
    /// Whether the last recording is complete. Answers with 0 or 1, or the fault.
    Query,
    /// Wait until the stream is done.
    Synchronize,
    /// Remove every page of what is shared with others, through all mappings that there are
    /// (`MADV_REMOVE`). Answers with how many pages could be removed.
    RemovePages,
    /// Drop timelines and events; the stream and what it waits for stay.
    Close,
}

/// Fields are dropped in this order: what streams wait for before the memory that their kernels
/// touch.
pub(super) struct Signals {
    timeline: Option<Timeline>,
    events: Vec<Event>,
    awaited: Option<Recording>,
    stream: Stream,
    error_counters: ErrorCounters,
    memory: Option<Shared>,
}

impl Signals {
    pub(super) fn new(context: &Context) -> Result<Signals> {
        let (stream, error_counters) = (context.stream()?, context.error_counters()?);
        Ok(Signals {
            timeline: None,
            events: Vec::new(),
            awaited: None,
            stream,
            error_counters,
            memory: None,
        })
    }

    pub(super) fn carry_out(&mut self, context: &Context, order: SignalOrder) -> Result<Answer> {
        let (domain, device) = (&context.domain, &context.device);
        match order {
            SignalOrder::Map(path) => self.memory = Some(Shared::open(device, &path)?),
            SignalOrder::Write { seed, slow_us } => {
                self.memory()?
                    .write(&self.stream, seed, Duration::from_micros(slow_us))?;
            }
            SignalOrder::Hold => hold(&self.stream)?,
            SignalOrder::Read { seed } => {
                let memory = self.memory.as_ref().context("it has mapped nothing")?;
                return Ok(Answer::Number(memory.wrong(
                    &mut self.error_counters,
                    &self.stream,
                    seed,
                )?));
            }
            SignalOrder::CreateTimeline(name) => {
                self.timeline = Some(Timeline::new(&name, domain.on(device))?)
            }
            SignalOrder::OpenTimeline(name) => {
                self.timeline = Some(Timeline::open(&name, domain.on(device), PATIENCE)?);
            }
            SignalOrder::Signal(value) => self.timeline()?.signal(&self.stream, value, PATIENCE)?,
            SignalOrder::SignalNow(value) => self.timeline()?.signal_now(value, PATIENCE)?,
            SignalOrder::Wait(value) => self.timeline()?.wait(&self.stream, value)?,
            SignalOrder::WaitHost(value) => self.timeline()?.wait_host(value, PATIENCE)?,
            SignalOrder::Check(value) => {
                return Ok(Answer::Number(self.timeline()?.check(value)?.into()));
            }
            SignalOrder::Value => return Ok(Answer::Number(self.timeline()?.value())),
            SignalOrder::CreateEvents(count) => {
                for _ in 0..count {
                    self.events.push(Event::new(domain.on(device))?);
                }
                return Ok(Answer::Text(self.event()?.handle()?.to_string()));
            }
            SignalOrder::OpenEvent(text) => {
                let (handle, device) = (text.parse::<EventHandle>()?, Some(device.clone()));
                // In the handle's domain.
                let options = OpenOptions {
                    device,
                    ..OpenOptions::default()
                };
                self.events
                    .push(Event::open(&handle, options, Duration::ZERO)?);
            }
            SignalOrder::Record => drop(self.event()?.record(&self.stream, PATIENCE)?),
            SignalOrder::WaitEvent => self.awaited = Some(self.event()?.wait(&self.stream)?),
            SignalOrder::CheckEvent => {
                let awaited = self.awaited.context("it has waited for nothing")?;
                return Ok(Answer::Number(self.event()?.check(awaited)?.into()));
            }
            SignalOrder::Query => return Ok(Answer::Number(self.event()?.query()?.into())),
            SignalOrder::RemovePages => return Ok(Answer::Number(remove_pages()?)),
            SignalOrder::Synchronize => self.stream.synchronize(PATIENCE)?,
            SignalOrder::Close => {
                self.timeline = None;
                self.events.clear();
            }
        }
        Ok(Answer::Done)
    }

    /// Lets everything go, once nothing is enqueued that uses the memory.
    pub(super) fn end(self) -> Result<()> {
        Ok(self.stream.synchronize(PATIENCE)?)
    }

    fn memory(&self) -> Result<&Shared> {
        self.memory.as_ref().context("it has mapped nothing")
    }

    fn timeline(&self) -> Result<&Timeline> {
        self.timeline.as_ref().context("it has no timeline")
    }

    fn event(&self) -> Result<&Event> {
        self.events.last().context("it has no event")
    }
}

/// Keeps a stream until the process ends. A kernel cannot: one that waits for ever is a GPU's end.
pub(super) fn hold(stream: &Stream) -> warpipe::Result<()> {
    stream.call(|| std::thread::sleep(100 * PATIENCE))
}

/// The pages of segments and shared words that this process can remove from the files that others
/// share.
fn remove_pages() -> Result<u64> {
    const PAGE: usize = 4096;
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let is_shared = |line: &&str| {
        ["/memfd:warpipe-link", "/memfd:warpipe-words"]
            .iter()
            .any(|name| line.contains(name))
    };
    let mut removed = 0;
    for line in maps.lines().filter(is_shared) {
        let (start, end) = line
            .split_once(' ')
            .and_then(|(range, _)| range.split_once('-'))
            .context("a mapping")?;
        let (start, end) = (
            usize::from_str_radix(start, 16)?,
            usize::from_str_radix(end, 16)?,
        );
        for page in (start..end).step_by(PAGE) {
            let page = std::ptr::with_exposed_provenance_mut(page);
            // SAFETY: a shared mapping of words that the library reads as atomics alone; a page
            // that is removed reads as zeros from then on.
            let result =
                unsafe { rustix::mm::madvise(page, PAGE, rustix::mm::Advice::LinuxRemove) };
            removed += u64::from(result.is_ok());
        }
    }
    Ok(removed)
}
