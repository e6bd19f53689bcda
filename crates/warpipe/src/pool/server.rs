//! The owner's side of its peers: blocks as claims, and their return.

use super::allocator::{LentBlock, PoolAllocator, PoolState};
use super::{PoolRefusal, PoolRequest};
use crate::backend::Access;
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::ipc::{ClientInfo, Rejection, ServerCore};
use crate::lend::claims::Claimant;
use crate::lend::server::{Lender, Lending};
use crate::lend::{LendReply, Offer};
use crate::memory::arena::SlotId;
use crate::runtime::fence::Fence;

impl Lender for PoolAllocator {
    type Request = PoolRequest;
    type Refusal = PoolRefusal;

    fn lending(&self) -> &Lending {
        &self.lending
    }

    fn admit(&self, client: &ClientInfo, mut claimant: Claimant) {
        claimant.claims_by_words = self.is_offered_to(client);
        self.lock().borrowers.add(client.id, claimant);
    }

    fn is_offered_to(&self, client: &ClientInfo) -> bool {
        client.uid == self.uid
    }

    fn has_any(&self, client: u64) -> bool {
        let state = self.lock();
        state.borrowers.has_any(client) || state.has_claim_in(client, |_| true)
    }

    fn has_claim_in(&self, client: u64, run: u32) -> bool {
        let state = self.lock();
        let region = |slot| state.arena.slot(slot).region as usize;
        state.has_claim_in(client, |slot| state.arena.chunks()[region(slot)].id == run)
    }

    fn leave(&self, client: u64, is_dead: bool) {
        self.lock().borrowers.leave(client, is_dead);
    }

    fn lend(
        &self,
        client: &ClientInfo,
        request: PoolRequest,
    ) -> Result<LendReply<PoolRefusal>, Rejection> {
        match request {
            PoolRequest::Lent(number) => Ok(self.grant_lent(client, number)),
            PoolRequest::Block { bytes } => self.grant_new(client, bytes),
        }
    }

    fn export(&self, region: u32, first: u32) -> Result<Vec<CloseOnForkFd>> {
        let state = self.lock();
        let chunk = state.arena.chunks().iter().find(|chunk| chunk.id == region);
        let export = chunk.filter(|_| first == 0).map(|chunk| &chunk.export);
        let copy = export.map(CloseOnForkFd::duplicate).transpose();
        let copy = copy.map_err(|e| Error::os("fcntl(F_DUPFD)", "a region's descriptor", e))?;
        Ok(copy.into_iter().collect())
    }

    fn take_back(&self, client: u64, claim: (u32, u64)) {
        let mut state = self.lock();
        if let Some(slot) = state.borrowers.take_back(client, claim) {
            state.arena.release(slot);
        }
    }

    fn collect(&self, _: &ServerCore) {
        self.reclaim(&mut self.lock());
    }

    /// The lock's holder may be in a driver call that waits for a stream which only the reactor can
    /// release. The next tick tries again.
    fn on_tick(&self, _: &ServerCore) {
        if let Some(mut state) = self.try_lock() {
            self.reclaim(&mut state);
        }
    }
}

impl PoolAllocator {
    fn grant_lent(&self, client: &ClientInfo, number: u64) -> LendReply<PoolRefusal> {
        let mut state = self.lock();
        let Some(&LentBlock {
            slot,
            bytes,
            access,
        }) = state.lent_blocks.get(&number)
        else {
            return LendReply::Gone;
        };
        // A region is the unit of mapping: a process that opens this block could write every block
        // beside it.
        let user = state.user_of(slot);
        if user != client.uid {
            return LendReply::Refused(PoolRefusal::OtherUser(user));
        }
        self.reclaim(&mut state);
        let reply = self.grant(&mut state, client, slot, (bytes, access), None);
        if let Some(reply) = reply {
            state.arena.hold(slot);
            if client.uid != self.uid {
                state.set_several_writers(slot);
            }
            return reply;
        }
        LendReply::TooMany
    }

    fn grant_new(
        &self,
        client: &ClientInfo,
        bytes: u64,
    ) -> Result<LendReply<PoolRefusal>, Rejection> {
        super::allocator::check_bytes(bytes)?;
        let mut state = self.lock();
        self.reclaim(&mut state);
        let is_full = state.borrowers.is_full(client.id);
        drop(state);
        if is_full {
            return Ok(LendReply::TooMany);
        }
        let (slot, cleared_at) = match self.take(bytes, client.uid, false)? {
            Ok(taken) => taken,
            Err(refusal) => return Ok(LendReply::Refused(refusal)),
        };
        let mut state = self.lock();
        let whole = (bytes, Access::ReadWrite);
        let reply = self.grant(&mut state, client, slot, whole, cleared_at);
        Ok(reply.unwrap_or_else(|| {
            state.arena.release(slot);
            LendReply::TooMany
        }))
    }

    /// A claim on a block. `None` if the peer has the most that it may have, or is gone.
    fn grant(
        &self,
        state: &mut PoolState,
        client: &ClientInfo,
        slot: SlotId,
        (bytes, access): (u64, Access),
        cleared_at: Option<u64>,
    ) -> Option<LendReply<PoolRefusal>> {
        let offer = Offer {
            ready: cleared_at.map(|value| (slot, value)),
            ..state.offer(slot, bytes, access)
        };
        let borrowers = &mut state.borrowers;
        self.lending.lend(borrowers, client, slot, offer).ok()
    }

    /// Frees a dead peer's blocks once this process's streams are past them, whatever its words
    /// say.
    pub(super) fn free_deferred(&self, slots: Vec<SlotId>) {
        let (allocator, fence) = (self.me.clone(), Fence::later(self.streams().clone()));
        self.reactor().call_after(fence, move || {
            if let Some(allocator) = allocator.upgrade() {
                let mut state = allocator.lock();
                slots.iter().for_each(|&slot| state.arena.release(slot));
            }
        });
    }
}
