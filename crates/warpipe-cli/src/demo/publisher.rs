//! The demo's publisher: fills tensors on the device and sends them as fast as they are taken,
//! between orders.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use warpipe::{
    Device, DevicePtr, Domain, Error, Layout, Policy, Publisher, SampleMut, SlotReturn, Stream,
    clock,
};

use super::leftovers::Before;
use super::orders::{Next, Orders, send_event};
use super::protocol::{Event, Order};
use super::round_trips::{End, RoundTrips};
use super::watch::Watch;
use super::{ChildArgs, DEPTH, ENDPOINT, ITEM_PATIENCE, Plant, START_PATIENCE};
use crate::exit::Exit;
use crate::process;

/// Slots for the items that are in flight, lent, or held by a dead subscriber. Without a
/// subscriber, they bound how far the device may lag behind.
const SLOTS: u64 = 4 * DEPTH as u64;
/// Items with slots that are remembered: more than can be in flight to any subscriber.
const RECENT_MAX: usize = 4 * DEPTH as usize;
/// How long a send waits for room between two looks at the orders.
const SEND_SLICE: Duration = Duration::from_millis(5);
/// How often a name is asked for that a dead process still holds.
const NAME_RETRY: Duration = Duration::from_millis(1);
/// The length of the rest of a write that never ends.
const WRITE: Duration = Duration::from_secs(9);

/// In the child.
pub fn run(args: &ChildArgs) -> anyhow::Result<Exit> {
    process::follow_parent(args.parent)?;
    let device = args.device.open()?.device;
    warpipe_kernels::preload(&device)?;
    let domain = Domain::from_environment()?;
    let before = Before::count(&device, &domain)?;
    let publisher = publisher(args, &domain, &device)?;
    let stream = device.stream()?;
    publisher.wait_for_subscribers(args.subscribers as usize, START_PATIENCE)?;
    send_event(&Event::Ready)?;
    let mut publishing = Publishing {
        publisher: Arc::new(publisher),
        layout: Layout::bytes_only(args.item_bytes)?,
        plant: args.plant,
        stream,
        number: 0,
        filled: None,
        recent: VecDeque::new(),
        watch: None,
    };
    publishing.run(&domain)?;
    // A subscriber that is late still reads what this process's device wrote.
    publishing.stream.synchronize(ITEM_PATIENCE)?;
    drop(publishing);
    send_event(&Event::Left {
        extra: before.extra()?,
    })?;
    Ok(Exit::Done)
}

/// Takes the name, from a dead process if need be.
fn publisher(args: &ChildArgs, domain: &Domain, device: &Device) -> anyhow::Result<Publisher> {
    let deadline = Instant::now() + START_PATIENCE;
    loop {
        let builder = Publisher::builder(ENDPOINT)
            .domain(domain)
            .device(device)
            .depth(DEPTH)
            .memory_limit(args.item_bytes * SLOTS)
            .loan_timeout(ITEM_PATIENCE)
            .policy(Policy::Block {
                timeout: ITEM_PATIENCE,
            });
        match builder.build() {
            Err(Error::NameTaken { .. }) if Instant::now() < deadline => {
                std::thread::sleep(NAME_RETRY)
            }
            built => return Ok(built?),
        }
    }
}

/// The end of the publishing, and the report then.
struct Stretch {
    first_ns: u64,
    deadline: Option<Instant>,
    last: Option<u64>,
}

/// A tensor that is filled and not sent yet: a subscriber has no room for it.
struct Filled {
    sample: Box<SampleMut>,
    ptr: DevicePtr,
    returned: SlotReturn,
    since: Instant,
}

/// An item's slot.
pub struct Recent {
    pub number: u64,
    pub ptr: DevicePtr,
    pub returned: SlotReturn,
}

struct Publishing {
    publisher: Arc<Publisher>,
    stream: Stream,
    layout: Layout,
    plant: Option<Plant>,
    /// The last item's number.
    number: u64,
    filled: Option<Filled>,
    recent: VecDeque<Recent>,
    watch: Option<Arc<Watch>>,
}

impl Publishing {
    /// Follows orders until they end.
    fn run(&mut self, domain: &Domain) -> anyhow::Result<()> {
        let (mut orders, mut stretch) = (Orders::default(), None::<Stretch>);
        let mut round_trips = None;
        loop {
            let limit = if stretch.is_some() {
                Duration::ZERO
            } else {
                ITEM_PATIENCE
            };
            match orders.next(limit)? {
                Next::End => return Ok(()),
                Next::Order(Order::RoundTrips { trips, floor }) => {
                    if round_trips.is_none() {
                        round_trips = Some(RoundTrips::open(
                            End::Asking,
                            domain,
                            self.stream.device(),
                            floor,
                        )?);
                    }
                    round_trips
                        .as_mut()
                        .map_or(Ok(()), |ends| ends.ask(trips))?;
                }
                Next::Order(Order::Publish {
                    milliseconds,
                    items,
                }) => {
                    round_trips = None;
                    stretch = Some(Stretch {
                        first_ns: clock::now_ns(),
                        deadline: milliseconds
                            .map(|limit| Instant::now() + Duration::from_millis(limit)),
                        last: items.map(|items| self.number + items),
                    });
                }
                Next::Order(Order::Watch { pid, numbers }) => self.watch(pid, &numbers)?,
                Next::Order(Order::Pause) => self.end_stretch(stretch.take())?,
                Next::Order(Order::StopInWrite { busy }) => {
                    stretch = None;
                    self.stop_in_write(busy)?;
                }
                Next::Order(order) => anyhow::bail!("no order for a publisher: {order:?}"),
                Next::Nothing => {}
            }
            if let Some(now) = &stretch {
                let is_over = now
                    .deadline
                    .is_some_and(|deadline| Instant::now() >= deadline)
                    || now.last.is_some_and(|last| self.number >= last);
                if is_over {
                    self.end_stretch(stretch.take())?
                } else {
                    self.publish()?
                }
            }
        }
    }

    fn end_stretch(&mut self, stretch: Option<Stretch>) -> anyhow::Result<()> {
        self.send_filled()?;
        let first_ns = stretch.map_or(0, |stretch| stretch.first_ns);
        Ok(send_event(&Event::Published {
            items: self.number,
            first_ns,
        })?)
    }

    /// Fills an item, or tries again to send one that is filled.
    fn publish(&mut self) -> anyhow::Result<()> {
        let filled = match self.filled.take() {
            Some(filled) => filled,
            None => self.fill()?,
        };
        let Filled {
            sample,
            ptr,
            returned,
            since,
        } = filled;
        match sample.send_timeout(&self.stream, SEND_SLICE) {
            Ok(_) => self.sent(ptr, returned),
            Err(failed) => match (failed.error, failed.sample) {
                (Error::Timeout { .. }, Some(sample)) if since.elapsed() < ITEM_PATIENCE => {
                    self.filled = Some(Filled {
                        sample,
                        ptr,
                        returned,
                        since,
                    });
                }
                (error, _) => return Err(error.into()),
            },
        }
        Ok(())
    }

    fn send_filled(&mut self) -> anyhow::Result<()> {
        while self.filled.is_some() {
            self.publish()?;
        }
        Ok(())
    }

    /// The pattern depends on the item's number, which goes along as metadata.
    fn fill(&mut self) -> anyhow::Result<Filled> {
        let sample = self.loan()?;
        let number = self.number + 1;
        let seed = if self.plant == Some(Plant::WrongWord) && number == 3 {
            !number
        } else {
            number
        };
        // SAFETY: the slot is this sample's until it is sent, and what is sent is ordered behind
        // the stream's work.
        unsafe {
            warpipe_kernels::fill(&self.stream, sample.ptr(), self.layout.bytes() / 8, seed)
        }?;
        let (ptr, returned) = (sample.ptr(), sample.returned());
        Ok(Filled {
            sample: Box::new(sample),
            ptr,
            returned,
            since: Instant::now(),
        })
    }

    /// A loan that knows its number.
    fn loan(&mut self) -> anyhow::Result<SampleMut> {
        if self.plant == Some(Plant::Gap) && self.watch.is_some() {
            self.plant = None;
            self.number += 1;
        }
        let mut sample = self.publisher.loan(&self.layout)?;
        if let Some(watch) = &self.watch {
            watch.lent(sample.ptr());
        }
        sample.set_metadata(&(self.number + 1).to_le_bytes())?;
        Ok(sample)
    }

    fn sent(&mut self, ptr: DevicePtr, returned: SlotReturn) {
        self.number += 1;
        if self.recent.len() == RECENT_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back(Recent {
            number: self.number,
            ptr,
            returned,
        });
    }

    fn watch(&mut self, pid: i32, numbers: &[u64]) -> anyhow::Result<()> {
        let held: Vec<_> = self
            .recent
            .iter()
            .filter(|recent| numbers.contains(&recent.number))
            .collect();
        anyhow::ensure!(
            held.len() == numbers.len(),
            "items {numbers:?} are not among those sent last"
        );
        let watch = Watch::start(&self.publisher, pid, &held, self.layout)?;
        self.watch = Some(watch);
        Ok(send_event(&Event::Watching)?)
    }

    /// Everything before is complete; then half of an item is written, and the rest does not come.
    fn stop_in_write(&mut self, busy: bool) -> anyhow::Result<()> {
        self.send_filled()?;
        self.stream.synchronize(ITEM_PATIENCE)?;
        let complete = self.number + u64::from(self.plant == Some(Plant::Lost));
        let mut writing = None;
        if busy {
            let sample = self.loan()?;
            let (words, number) = (self.layout.bytes() / 8, self.number + 1);
            let (first, rest) = (words / 2, words - words / 2);
            // SAFETY: as in `fill`; both halves lie in the slot.
            unsafe { warpipe_kernels::fill(&self.stream, sample.ptr(), first, number) }?;
            self.stream.synchronize(ITEM_PATIENCE)?;
            let second = sample.ptr() + first * 8;
            // SAFETY: as above.
            unsafe { warpipe_kernels::slow_fill(&self.stream, second, rest, number, WRITE) }?;
            sample.send(&self.stream).map_err(Error::from)?;
            writing = Some(number);
        }
        Ok(send_event(&Event::Stopped { complete, writing })?)
    }
}
