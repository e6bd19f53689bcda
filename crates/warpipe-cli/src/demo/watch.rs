//! The publisher's watch over one subscriber: when its end is reported, when its slots are free and
//! lent again.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use warpipe::{DevicePtr, Layout, PeerState, Publisher, SlotReturn, clock};

use super::ITEM_PATIENCE;
use super::orders::send_event;
use super::protocol::Event;
use super::publisher::Recent;

/// How often the library is asked.
const ASK_EVERY: Duration = Duration::from_micros(50);

/// Slots that the subscriber holds, until they are lent again.
#[derive(Debug)]
pub struct Watch {
    awaited: Mutex<Awaited>,
}

#[derive(Debug)]
struct Awaited {
    slots: Vec<DevicePtr>,
    is_released: bool,
    /// When the last of them was lent.
    lent_ns: u64,
}

impl Watch {
    /// Watches on a thread of its own.
    pub fn start(
        publisher: &Arc<Publisher>,
        pid: i32,
        held: &[&Recent],
        layout: Layout,
    ) -> anyhow::Result<Arc<Watch>> {
        let slots = held.iter().map(|recent| recent.ptr).collect();
        let watch = Arc::new(Watch {
            awaited: Mutex::new(Awaited {
                slots,
                is_released: false,
                lent_ns: 0,
            }),
        });
        let returned: Vec<_> = held.iter().map(|recent| recent.returned.clone()).collect();
        let (publisher, ours) = (publisher.clone(), watch.clone());
        let body = move || {
            if let Err(error) = ours.follow(&publisher, pid, &returned, &layout) {
                eprintln!("the watch over process {pid}: {error:#}");
            }
        };
        std::thread::Builder::new()
            .name("demo-watch".into())
            .spawn(body)?;
        Ok(watch)
    }

    /// Notes a loan of the slot at `ptr`. Before the release it is another slot of that address.
    pub fn lent(&self, ptr: DevicePtr) {
        let mut awaited = self.awaited.lock().unwrap_or_else(PoisonError::into_inner);
        if awaited.is_released
            && let Some(index) = awaited.slots.iter().position(|&slot| slot == ptr)
        {
            awaited.slots.remove(index);
            awaited.lent_ns = clock::now_ns();
        }
    }

    fn follow(
        &self,
        publisher: &Publisher,
        pid: i32,
        returned: &[SlotReturn],
        layout: &Layout,
    ) -> anyhow::Result<()> {
        let deadline = Instant::now() + ITEM_PATIENCE;
        let is_well = |state| {
            matches!(
                state,
                PeerState::Alive | PeerState::Stalled | PeerState::Leaving
            )
        };
        let is_there = || {
            publisher
                .subscribers()
                .iter()
                .any(|other| other.pid == pid && is_well(other.state))
        };
        ask(deadline, || Ok(!is_there()))?;
        send_event(&Event::SubscriberGone {
            at_ns: clock::now_ns(),
        })?;
        ask(deadline, || {
            returned
                .iter()
                .try_fold(true, |all, slot| Ok(all && slot.is_back()?))
        })?;
        let at_ns = clock::now_ns();
        self.awaited
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .is_released = true;
        send_event(&Event::Released { at_ns })?;
        self.lend_all(publisher, layout)
    }

    /// Takes loans until each slot has been lent, here or by the publisher's own loop.
    fn lend_all(&self, publisher: &Publisher, layout: &Layout) -> anyhow::Result<()> {
        let mut loans = Vec::new();
        loop {
            let awaited = self.awaited.lock().unwrap_or_else(PoisonError::into_inner);
            if awaited.slots.is_empty() {
                return Ok(send_event(&Event::LentAgain {
                    at_ns: awaited.lent_ns,
                })?);
            }
            drop(awaited);
            let loan = publisher.loan(layout)?;
            self.lent(loan.ptr());
            loans.push(loan);
        }
    }
}

fn ask(deadline: Instant, mut is_so: impl FnMut() -> anyhow::Result<bool>) -> anyhow::Result<()> {
    while !is_so()? {
        anyhow::ensure!(
            Instant::now() < deadline,
            "nothing within {ITEM_PATIENCE:?}"
        );
        std::thread::sleep(ASK_EVERY);
    }
    Ok(())
}
