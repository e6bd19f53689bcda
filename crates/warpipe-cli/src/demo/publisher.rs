//! The demo's publisher: fills tensors on the device and sends them as fast as they are taken, from
//! the order `publish` until the next one.

use std::collections::VecDeque;
use std::sync::mpsc::TryRecvError;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde_json::json;
use warpipe::{
    Error, Layout, PeerState, Policy, Publisher, PublisherOptions, SampleMut, SlotReturn, Stream,
    clock,
};

use super::child::{Child, ChildArgs, tell};
use super::{DEPTH, ENDPOINT, PATIENCE, Plant, WORK, latency};
use crate::exit::Exit;

/// Slots for the items that are in flight or held by a dead subscriber.
const SLOTS: u64 = 4 * DEPTH as u64;
/// How often the library is asked about a subscriber that is to die.
const ASK_EVERY: Duration = Duration::from_micros(50);

/// In the child.
pub fn run(args: &ChildArgs) -> anyhow::Result<Exit> {
    let child = Child::begin(args)?;
    let options = PublisherOptions {
        depth: DEPTH,
        memory_limit: args.item_bytes * SLOTS,
        loan_timeout: PATIENCE,
        policy: Policy::Block { timeout: PATIENCE },
        ..PublisherOptions::at(&child.domain, &child.device)
    };
    let publisher = Publisher::new(ENDPOINT, options)?;
    publisher.wait_for_subscribers(args.subscribers, PATIENCE)?;
    tell(json!({ "event": "ready" }))?;
    let mut publishing = Publishing {
        publisher: Arc::new(publisher),
        stream: child.device.stream()?,
        layout: Layout::bytes_only(args.item_bytes)?,
        plant: args.plant,
        number: 0,
        recent: Arc::default(),
    };
    publishing.follow(&child)?;
    // A subscriber that is late still reads what this process's device wrote.
    publishing.stream.synchronize(PATIENCE)?;
    drop(publishing);
    child.tell_leftovers()?;
    Ok(Exit::Done)
}

struct Publishing {
    publisher: Arc<Publisher>,
    stream: Stream,
    layout: Layout,
    plant: Option<Plant>,
    /// The last item's.
    number: u64,
    /// The last items' slots: more than can be in flight.
    recent: Arc<Mutex<VecDeque<SlotReturn>>>,
}

impl Publishing {
    /// Follows orders until they end.
    fn follow(&mut self, child: &Child) -> anyhow::Result<()> {
        let mut is_publishing = false;
        loop {
            let order = match is_publishing {
                true => child.orders.try_recv(),
                false => child.orders.recv().map_err(|_| TryRecvError::Disconnected),
            };
            let order = match order {
                Ok(order) => order,
                Err(TryRecvError::Disconnected) => return Ok(()),
                Err(TryRecvError::Empty) => {
                    self.publish()?;
                    continue;
                }
            };
            is_publishing = order == "publish" || (is_publishing && order.starts_with("watch"));
            match order.split_once(' ') {
                Some(("watch", pid)) => self.watch(pid.parse()?)?,
                _ if order == "ask" => latency::ask(child)?,
                _ if order == "pause" => tell(json!({ "event": "paused", "items": self.number }))?,
                _ if order.starts_with("stop") => self.stop(order == "stop in a write")?,
                _ => {}
            }
        }
    }

    /// Fills and sends an item. The pattern depends on its number, which goes along as metadata.
    fn publish(&mut self) -> anyhow::Result<()> {
        let sample = self.loan(false)?;
        let number = self.number + 1;
        let is_wrong = self.plant == Some(Plant::WrongWord) && number == 3;
        let seed = if is_wrong { !number } else { number };
        // SAFETY: the slot is this sample's until it is sent, and what is sent is ordered behind
        // the stream's work.
        unsafe {
            warpipe_kernels::fill(&self.stream, sample.ptr(), self.layout.bytes() / 8, seed)
        }?;
        self.send(sample)
    }

    fn loan(&mut self, is_last: bool) -> anyhow::Result<SampleMut> {
        let mut sample = self.publisher.loan(&self.layout)?;
        let mut metadata = (self.number + 1).to_le_bytes().to_vec();
        metadata.push(u8::from(is_last));
        sample.set_metadata(&metadata)?;
        Ok(sample)
    }

    fn send(&mut self, sample: SampleMut) -> anyhow::Result<()> {
        let returned = sample.returned();
        sample.send(&self.stream).map_err(Error::from)?;
        self.number += 1;
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.push_back(returned);
        if recent.len() as u64 > SLOTS {
            recent.pop_front();
        }
        Ok(())
    }

    /// Reports, from another thread, when this subscriber is seen to be gone, and when the slots of
    /// all items that were sent until then are back.
    fn watch(&mut self, pid: i32) -> anyhow::Result<()> {
        let (publisher, recent) = (self.publisher.clone(), self.recent.clone());
        let is_gone = |state| matches!(state, PeerState::Suspect | PeerState::Dead);
        let is_there = move || {
            let mut all = publisher.subscribers().into_iter();
            all.any(|other| other.pid == pid && !is_gone(other.state))
        };
        let watch = move || -> anyhow::Result<()> {
            while is_there() {
                std::thread::sleep(ASK_EVERY);
            }
            tell(json!({ "event": "gone", "at_ns": clock::now_ns() }))?;
            let sent = recent
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone();
            for slot in sent {
                while !slot.is_back()? {
                    std::thread::sleep(ASK_EVERY);
                }
            }
            tell(json!({ "event": "released", "at_ns": clock::now_ns() }))
        };
        tell(json!({ "event": "watching" }))?;
        std::thread::spawn(move || watch().unwrap_or_else(|error| eprintln!("error: {error:#}")));
        self.number += u64::from(self.plant.take_if(|plant| *plant == Plant::Gap).is_some());
        Ok(())
    }

    /// Everything before is complete; then half of an item is written, and the rest does not come.
    fn stop(&mut self, in_a_write: bool) -> anyhow::Result<()> {
        self.stream.synchronize(PATIENCE)?;
        let complete = self.number;
        if in_a_write {
            let sample = self.loan(true)?;
            let (words, number) = (self.layout.bytes() / 8, self.number + 1);
            let (first, rest) = (words / 2, words - words / 2);
            // SAFETY: as in `publish`; both halves lie in the slot.
            unsafe { warpipe_kernels::fill(&self.stream, sample.ptr(), first, number) }?;
            self.stream.synchronize(PATIENCE)?;
            let second = sample.ptr() + first * 8;
            // SAFETY: as above.
            unsafe { warpipe_kernels::slow_fill(&self.stream, second, rest, number, WORK) }?;
            self.send(sample)?;
        }
        tell(json!({
            "event": "stopped",
            "complete": complete + u64::from(self.plant == Some(Plant::Lost)),
            "writing": in_a_write.then_some(self.number),
        }))
    }
}
