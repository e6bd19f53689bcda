//! The owner's acts, and the device's progress.

use super::super::allocator::LentBlock;
use super::{Fault, Lent, OWNER, Play, Work};
use crate::backend::Access;

impl Play {
    /// As `PoolAllocator::allocate`: the owner waits until it is clear.
    pub(super) fn own(&mut self, bytes: u64) -> Result<Option<Lent>, String> {
        let Some((lent, cleared_at)) = self.take(bytes, OWNER, true)? else {
            return Ok(None);
        };
        if cleared_at.is_some() {
            while !self.scrubber.is_empty() {
                self.work(false)?;
            }
        }
        if let Some(other) = self
            .memory
            .foreign(lent.place, |tag| tag == 0 || tag == OWNER)
        {
            return Err(format!("the owner sees what user {other} left in {lent:?}"));
        }
        self.owned.push(lent);
        self.stream.push_back(Work::Use(lent));
        Ok(Some(lent))
    }

    pub(super) fn lend(&mut self, which: usize) {
        if let Some(&Lent { slot, place, .. }) = self.owned.get(which % self.owned.len().max(1)) {
            let lend = LentBlock {
                slot,
                bytes: place.bytes,
                access: Access::ReadWrite,
            };
            self.state.lent_blocks.insert(slot.into(), lend);
            self.state.owned.insert(slot, vec![slot.into()]);
        }
    }

    pub(super) fn use_own(&mut self, which: usize) {
        if let Some(&lent) = self.owned.get(which % self.owned.len().max(1)) {
            self.stream.push_back(Work::Use(lent));
        }
    }

    /// As `PoolAllocator::release_behind`.
    pub(super) fn let_go(&mut self, which: usize) {
        if self.owned.is_empty() {
            return;
        }
        let Lent { slot, .. } = self.owned.swap_remove(which % self.owned.len());
        self.fences += 1;
        self.stream.push_back(Work::Signal {
            slot,
            value: self.fences,
        });
        if self.fault != Fault::ForgetsFence {
            self.state.arena.fence(slot, self.fences);
        }
        self.state.release_owner(slot);
    }

    /// The owner's stream, or the clearing stream, makes its next step.
    pub(super) fn work(&mut self, is_stream: bool) -> Result<(), String> {
        let queue = if is_stream {
            &mut self.stream
        } else {
            &mut self.scrubber
        };
        match queue.pop_front() {
            // Others may have had what the owner had.
            Some(Work::Use(lent)) => self.touch(lent, OWNER, true)?,
            Some(Work::Zero(lent)) => {
                self.memory.fill(lent.place, 0);
            }
            Some(Work::Signal { slot, value }) => self.words[slot as usize].store(value),
            None => {}
        }
        Ok(())
    }

    /// As `PoolAllocator::on_server_tick`, and what waits for the owner's streams.
    pub(super) fn tick(&mut self) {
        self.reclaim();
        if self.stream.is_empty() && self.scrubber.is_empty() {
            std::mem::take(&mut self.pending)
                .into_iter()
                .for_each(|slot| self.state.arena.release(slot));
        }
        for peer in &mut self.peers {
            peer.take_if(|peer| peer.is_leaving && !peer.is_dead && peer.device.is_empty());
        }
    }

    /// As `PoolAllocator::reclaim`.
    pub(super) fn reclaim(&mut self) {
        let dead = self.state.collect_released();
        self.pending.extend(dead);
        let words = &self.words;
        self.state
            .arena
            .collect(|slot, value| words[slot as usize].reached(value));
    }
}
