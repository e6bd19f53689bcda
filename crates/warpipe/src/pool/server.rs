//! The owner's side of its peers: sessions, grants, and the return of blocks when a peer closes or
//! dies.

use std::sync::Arc;

use super::allocator::block::{BlockUsers, Borrower, LentBlock};
use super::allocator::{AllocOutcome, PoolAllocator, PoolState};
use super::{AllocReply, AllocRequest, BlockGrant, Hello, HelloReply, PAGE_BYTES, cleared_at};
use crate::backend::Access;
use crate::fork::CloseOnForkFd;
use crate::ipc::{
    ClientInfo, Disconnected, OutgoingReply, Rejection, RequestHandler, ServerCore, decode,
};
use crate::memory::arena::SlotId;
use crate::runtime::fence::Fence;
use crate::shm::page::SharedPage;

/// A block that is granted to a peer and not sent yet.
struct PendingGrant {
    answer: OutgoingReply,
    /// The peer's page, which holds the block's pair of words.
    page: Arc<SharedPage>,
    pair: u32,
    value: u64,
}

impl RequestHandler for PoolAllocator {
    fn on_connect(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        body: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        let Hello { incarnation } = decode(body, server_core.name())?;
        let owner = self.device.info().id;
        if incarnation.is_some_and(|wanted| wanted != server_core.generation()) {
            return OutgoingReply::new(&HelloReply::Expired, vec![]);
        }
        if let Some(device) = client.device.filter(|device| device.kind != owner.kind) {
            return Err(Rejection::new(format!(
                "its memory is on {owner}, which {device} cannot reach"
            )));
        }
        let known = server_core
            .process_of(client.id)
            .zip(server_core.permit_of(client.id));
        let (process, permit) = known.ok_or_else(|| Rejection::new("it is there no more"))?;
        let (page, fd) = SharedPage::create(Some(&self.device), PAGE_BYTES)?;
        let welcome = HelloReply::Welcome {
            owner,
            page_bytes: page.bytes() as u64,
        };
        let mut state = self.lock();
        state
            .borrowers
            .insert(client.id, Borrower::new(page, process));
        state.permits.insert(client.id, permit);
        drop(state);
        OutgoingReply::new(&welcome, vec![fd])
    }

    fn on_request(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        body: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        match decode(body, server_core.name())? {
            AllocRequest::Lent(number) => self.grant_lent(client, number),
            AllocRequest::Block { bytes } => self.grant_new(client, bytes),
        }
    }

    fn holds_anything(&self, client: &ClientInfo) -> bool {
        self.lock()
            .borrowers
            .get(&client.id)
            .is_some_and(Borrower::has_blocks)
    }

    fn on_disconnect(&self, _: &ServerCore, client: &ClientInfo, disconnected: Disconnected) {
        self.regions.forget(client.id);
        let mut state = self.lock();
        match disconnected {
            // The peer's device work may still run. Its words report each release, and the peer
            // closes behind them.
            Disconnected::Closed => {
                state
                    .borrowers
                    .get_mut(&client.id)
                    .into_iter()
                    .for_each(|borrower| borrower.is_leaving = true);
                self.reclaim(&mut state);
            }
            Disconnected::ProcessDied => {
                self.reclaim(&mut state);
                let borrower = state.borrowers.remove(&client.id);
                let permits = state.ended_permits();
                drop(state);
                drop(permits);
                borrower
                    .into_iter()
                    .for_each(|borrower| self.free_deferred(borrower));
            }
        }
    }

    /// The peer has not learned of the block.
    fn take_back(&self, client: &ClientInfo, body: &[u8]) -> bool {
        let Ok(AllocReply::Block(BlockGrant { pair, .. })) = decode(body, self.name.as_str())
        else {
            return false;
        };
        let mut state = self.lock();
        let borrower = state.borrowers.get_mut(&client.id);
        let slot = borrower.and_then(|borrower| borrower.take_back(pair));
        slot.into_iter()
            .for_each(|slot| state.release_borrower(slot));
        true
    }

    /// Runs on the reactor's thread, so it does not wait: the lock's holder may be in a driver call
    /// that waits for a stream which only the reactor can release. The next tick tries again.
    fn on_server_tick(&self, server_core: &ServerCore, _: u64) {
        self.tell_removed(server_core);
        if let Some(mut state) = self.try_lock() {
            self.reclaim(&mut state);
            let dead: Vec<Borrower> = state
                .borrowers
                .extract_if(|_, borrower| borrower.has_left_and_died())
                .map(|(_, dead)| dead)
                .collect();
            let permits = state.ended_permits();
            drop(state);
            drop(permits);
            dead.into_iter()
                .for_each(|borrower| self.free_deferred(borrower));
        }
    }
}

impl PoolAllocator {
    fn grant_lent(&self, client: &ClientInfo, number: u64) -> Result<OutgoingReply, Rejection> {
        let mut state = self.lock();
        let Some(&LentBlock {
            slot,
            bytes,
            access,
        }) = state.lent_blocks.get(&number)
        else {
            return OutgoingReply::new(&AllocReply::Returned, vec![]);
        };
        // A region is the unit of mapping: a process that opens this block could write every block
        // beside it.
        let user = state.user_of(slot);
        if user != client.uid {
            return OutgoingReply::new(&AllocReply::OtherUser(user), vec![]);
        }
        self.reclaim(&mut state);
        // A rejection, or no room for the block, has changed nothing.
        let Some(pending) = self.grant_block(&mut state, client, slot, bytes, access, false)?
        else {
            return OutgoingReply::new(&AllocReply::TooMany, vec![]);
        };
        state.borrow(slot);
        if client.uid != self.uid {
            state.set_several_writers(slot);
        }
        Ok(pending.answer)
    }

    fn grant_new(&self, client: &ClientInfo, bytes: u64) -> Result<OutgoingReply, Rejection> {
        super::allocator::check_bytes(bytes)?;
        let mut state = self.lock();
        self.reclaim(&mut state);
        let is_full = state
            .borrowers
            .get(&client.id)
            .is_none_or(Borrower::is_full);
        drop(state);
        if is_full {
            return OutgoingReply::new(&AllocReply::TooMany, vec![]);
        }
        let (slot, is_being_cleared) = match self.take(bytes, client.uid, BlockUsers::borrowed())? {
            AllocOutcome::Block { slot, cleared_at } => (slot, cleared_at.is_some()),
            AllocOutcome::Full { used, limit } => {
                return OutgoingReply::new(&AllocReply::Full { used, limit }, vec![]);
            }
            AllocOutcome::OverQuota(over) => {
                return OutgoingReply::new(&AllocReply::OverQuota(over), vec![]);
            }
        };
        let mut state = self.lock();
        let PendingGrant {
            answer,
            page,
            pair,
            value,
        } = match self.grant_block(
            &mut state,
            client,
            slot,
            bytes,
            Access::ReadWrite,
            is_being_cleared,
        ) {
            Ok(Some(pending)) => pending,
            nothing => {
                state.release_borrower(slot);
                return nothing.and_then(|_| OutgoingReply::new(&AllocReply::TooMany, vec![]));
            }
        };
        drop(state);
        if is_being_cleared && let Err(error) = self.signal_cleared(&page, cleared_at(pair), value)
        {
            let mut state = self.lock();
            // If the peer's session has ended meanwhile, that has taken care of its blocks.
            if state
                .borrowers
                .get_mut(&client.id)
                .is_some_and(|borrower| borrower.close(pair))
            {
                state.release_borrower(slot);
            }
            return Err(error.into());
        }
        Ok(answer)
    }

    /// Grants a block to a peer, with a pair of words of its own. `None` if all its pairs are in
    /// use, or the peer is gone. On `None` and on an error nothing has changed.
    fn grant_block(
        &self,
        state: &mut PoolState,
        client: &ClientInfo,
        slot: SlotId,
        bytes: u64,
        access: Access,
        is_being_cleared: bool,
    ) -> Result<Option<PendingGrant>, Rejection> {
        let PoolState {
            arena, borrowers, ..
        } = state;
        let chunk_slot = *arena.slot(slot);
        let chunk = &arena.chunks()[chunk_slot.region as usize];
        let fd = CloseOnForkFd::duplicate(&chunk.export)?;
        let Some(borrower) = borrowers.get_mut(&client.id) else {
            return Ok(None);
        };
        let Some((pair, value)) = borrower.open(slot) else {
            return Ok(None);
        };
        let grant = BlockGrant {
            region: chunk.id,
            mapped: chunk.region.bytes(),
            offset: chunk_slot.offset,
            bytes,
            access,
            pair,
            value,
            is_being_cleared,
        };
        let answer = OutgoingReply::new(&AllocReply::Block(grant), vec![fd]).inspect_err(|_| {
            borrower.close(pair);
        })?;
        self.regions.give(client.id, grant.region);
        Ok(Some(PendingGrant {
            answer,
            page: borrower.page.clone(),
            pair,
            value,
        }))
    }

    /// Frees a dead peer's blocks once this process's streams are past them, whatever its words
    /// say.
    fn free_deferred(&self, borrower: Borrower) {
        let (page, slots) = borrower.into_slots();
        self.drop_page_deferred(page);
        let (allocator, fence) = (self.me.clone(), Fence::later(self.streams().clone()));
        self.reactor().call_after(fence, move || {
            if let Some(allocator) = allocator.upgrade() {
                let mut state = allocator.lock();
                slots.iter().for_each(|&slot| state.release_borrower(slot));
            }
        });
    }
}
