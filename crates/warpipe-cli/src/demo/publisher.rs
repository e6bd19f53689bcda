//! The demo's publisher: fills tensors on the device and sends them as fast as they are taken, from
//! the order `publish` until the next one.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Duration;

use serde_json::json;
use warpipe::{
    Domain, Error, Layout, PeerState, Policy, Publisher, PublisherOptions, SampleMut, Stream,
    SubscriberInfo, clock,
};

use super::child::{Child, ChildArgs, tell};
use super::{DEPTH, ENDPOINT, MEASURED, PATIENCE, SMALL_BYTES, WARM_UP, WORK};
use crate::args::DemoArgs;
use crate::exit::Exit;

/// Slots for the items that are in flight or held by a dead subscriber.
const SLOTS: u64 = 4 * DEPTH as u64;
/// How often the library is asked about its subscribers.
const ASK_EVERY: Duration = Duration::from_micros(50);

/// In the child.
pub fn run(args: &ChildArgs) -> anyhow::Result<Exit> {
    let child = Child::begin(args)?;
    let options = PublisherOptions {
        depth: DEPTH,
        memory_limit: args.demo.item_bytes() * SLOTS,
        loan_timeout: PATIENCE,
        policy: Policy::Block { timeout: PATIENCE },
        ..Domain::from_environment()?.on(&child.device)
    };
    let publisher = Publisher::new(ENDPOINT, options)?;
    publisher.wait_for_subscribers(args.demo.subscribers as usize, PATIENCE)?;
    tell(json!({ "ready": 1 }))?;
    let mut publishing = Publishing {
        publisher: Arc::new(publisher),
        stream: child.device.stream()?,
        args: &args.demo,
        number: 0,
    };
    publishing.follow(&child.orders)?;
    // A subscriber that is late still reads what this process's device wrote.
    publishing.stream.synchronize(PATIENCE)?;
    Ok(Exit::Done)
}

struct Publishing<'a> {
    publisher: Arc<Publisher>,
    stream: Stream,
    args: &'a DemoArgs,
    /// The last item's.
    number: u64,
}

impl Publishing<'_> {
    /// Follows orders until they end.
    fn follow(&mut self, orders: &Receiver<String>) -> anyhow::Result<()> {
        let mut is_publishing = false;
        loop {
            let order = match is_publishing {
                true => orders.try_recv(),
                false => orders.recv().map_err(TryRecvError::from),
            };
            is_publishing &= order.is_err();
            match order.as_deref() {
                Err(TryRecvError::Empty) => self.publish(self.args.item_bytes())?,
                Err(TryRecvError::Disconnected) => return Ok(()),
                Ok("one at a time") => self.publish_one_at_a_time()?,
                Ok("watch") => self.watch(),
                Ok("publish") => is_publishing = true,
                Ok(order) => self.stop(order == "stop in a write")?,
            }
        }
    }

    /// Small items: each is sent when all subscribers have released the one before.
    fn publish_one_at_a_time(&mut self) -> anyhow::Result<()> {
        let are_free = |all: &[SubscriberInfo]| all.iter().all(|it| it.in_flight == 0);
        for _ in 0..WARM_UP + MEASURED {
            self.publish(SMALL_BYTES)?;
            until(&self.publisher, are_free);
        }
        Ok(())
    }

    /// Fills and sends an item. The pattern depends on its number, which goes along as metadata.
    fn publish(&mut self, bytes: u64) -> anyhow::Result<()> {
        let sample = self.loan(bytes)?;
        let is_wrong = self.number == 3 && self.args.has_plant("wrong-word");
        let seed = if is_wrong { 0 } else { self.number };
        // SAFETY: the slot is this sample's until it is sent, and what is sent is ordered behind
        // the stream's work.
        unsafe { warpipe_kernels::fill(&self.stream, sample.ptr(), bytes / 8, seed) }?;
        sample.send(&self.stream).map_err(Error::from)?;
        Ok(())
    }

    /// A slot for the next item, with its number and the time.
    fn loan(&mut self, bytes: u64) -> anyhow::Result<SampleMut> {
        let mut sample = self.publisher.loan(&Layout::bytes_only(bytes)?)?;
        let is_left_out = self.number == WARM_UP + MEASURED && self.args.has_plant("gap");
        self.number += 1 + u64::from(is_left_out);
        let words = [self.number, clock::now_ns()];
        sample.set_metadata(words.map(u64::to_le_bytes).as_flattened())?;
        Ok(sample)
    }

    /// Reports, from another thread, when a subscriber is seen to be gone, and when the slots that
    /// it held are free.
    fn watch(&self) {
        let (publisher, subscribers) = (self.publisher.clone(), self.args.subscribers as usize);
        let is_there =
            |it: &&SubscriberInfo| !matches!(it.state, PeerState::Suspect | PeerState::Dead);
        std::thread::spawn(move || {
            let is_one_gone = |all: &[_]| all.iter().filter(is_there).count() < subscribers;
            until(&publisher, is_one_gone);
            tell(json!({ "gone_ns": clock::now_ns() }))?;
            let are_free = |all: &[_]| all.iter().all(|it| is_there(&it) || it.in_flight == 0);
            until(&publisher, are_free);
            tell(json!({ "released_ns": clock::now_ns() }))
        });
    }

    /// Everything before is complete; then half of an item is written, and the rest does not come.
    fn stop(&mut self, in_a_write: bool) -> anyhow::Result<()> {
        self.stream.synchronize(PATIENCE)?;
        let complete = self.number + u64::from(self.args.has_plant("lost"));
        if in_a_write {
            let sample = self.loan(self.args.item_bytes())?;
            let half = self.args.item_bytes() / 16;
            // SAFETY: as in `publish`.
            unsafe { warpipe_kernels::fill(&self.stream, sample.ptr(), half, self.number) }?;
            self.stream.synchronize(PATIENCE)?;
            warpipe_kernels::spin(&self.stream, WORK)?;
            sample.send(&self.stream).map_err(Error::from)?;
        }
        let writing = in_a_write.then_some(self.number);
        tell(json!({ "complete": complete, "writing": writing }))
    }
}

/// Waits until this is so of the subscribers.
fn until(publisher: &Publisher, is_so: impl Fn(&[SubscriberInfo]) -> bool) {
    while !is_so(&publisher.subscribers()) {
        std::thread::sleep(ASK_EVERY);
    }
}
