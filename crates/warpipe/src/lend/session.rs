//! The borrower's side: a session with a lender, what is mapped of it, and the end of each claim.
//! **This module is marked for unsafe**: it enqueues stores of words by address, and makes slices
//! of legacy memory.

use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::share_words::{ShareWords, is_closed, slot};
use super::{
    Grant, HelloReply, LendNotice, LendReply, LendRequest, Offer, OfferPlace, RETURNED, Terms,
};
use crate::backend::{Access, DeviceId, StreamOp, TimelineWord};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::ipc::{ClientSession, IncomingReply, SessionObserver, decode, encode};
use crate::memory::DeviceSlice;
use crate::memory::legacy::LegacyHandle;
use crate::memory::mapped_region::{ImportKey, MappedRegion};
use crate::memory::pieces::RUN_PIECES_MAX;
use crate::memory::region::Region;
use crate::memory::slice::{MappedMemory, check_range, deref_to_slice};
use crate::memory::weak_cache::WeakCache;
use crate::mutex::LockUnpoisoned;
use crate::options::Attachment;
use crate::runtime::closer::PeerFd;
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::shm::page::{SharedPage, words_bytes};
use crate::stream::Stream;
use crate::wait::Wait;

/// The sessions of this process: all that it borrows of one lender shares one page of words, and
/// one mapping of each run.
static SESSIONS: WeakCache<ImportKey, LendSession> = WeakCache::new();

/// How long released memory of a legacy handle stays open, and claimed, so that the next share of
/// the same allocation need not open it: the driver takes some 100 us for each open and close.
const LINGER: Duration = Duration::from_millis(5);

/// This process's session with a lender.
#[derive(Debug)]
pub(crate) struct LendSession {
    device: Device,
    owner: DeviceId,
    terms: &'static Terms,
    ready: SharedPage,
    /// Goes when this process's streams have stored their words.
    shared: DropAfterFence<SessionParts>,
}

#[derive(Debug)]
struct SessionParts {
    state: Arc<BorrowerState>,
    ipc: ClientSession,
}

/// A lender's answer to a request for memory.
pub(crate) enum Answer<R> {
    Lent(LentBuffer),
    Gone,
    Refused(R),
}

/// A run's number, which is the lender's, and its mapping's access.
type RunKey = (u32, Access);

/// The part of a session that its observer has, too.
#[derive(Debug)]
struct BorrowerState {
    terms: &'static Terms,
    words: SharedPage,
    /// Claims that are open, by answers and by words.
    open: AtomicU32,
    /// Never locked during a driver call.
    runs: Mutex<RunTable>,
    shares: Option<ShareWords>,
}

/// The runs that a session has mapped.
#[derive(Debug, Default)]
struct RunTable {
    mapped: HashMap<RunKey, Arc<MappedRegion>>,
    /// The lender has ended, and tells of no run's end any more: none is kept beyond its claims.
    is_over: bool,
}

impl BorrowerState {
    fn word(&self, word: u32) -> &TimelineWord {
        self.words.word(word as usize)
    }
}

/// Gives back what comes after its requester has given up, and forgets runs that have ended. Runs
/// on the reactor's thread: CPU stores, and locks that are not held during driver calls.
impl SessionObserver for BorrowerState {
    fn on_closed(&self, _: bool) {
        let mut runs = self.runs.locked();
        runs.is_over = true;
        runs.mapped.clear();
    }

    /// Nothing has been enqueued on such memory.
    fn on_stale_reply(&self, _: &[u8], incoming: IncomingReply) {
        if let Ok(LendReply::<()>::Lent(grant)) = decode(&incoming.body, "a lender")
            && grant.word < self.terms.words
        {
            self.word(grant.word).store(grant.value | RETURNED);
        }
    }

    /// What is borrowed of a run keeps it mapped, and the reaper unmaps it.
    fn on_notification(&self, incoming: IncomingReply) {
        if let Ok(LendNotice::RunEnded(number)) = decode(&incoming.body, "a lender") {
            self.runs.locked().mapped.retain(|key, _| key.0 != number);
        }
    }
}

impl LendSession {
    /// The session with the lender that was attached to. If this process has one already, the new
    /// one ends here.
    pub(crate) fn of(
        attachment: Attachment<'_>,
        terms: &'static Terms,
    ) -> Result<Arc<LendSession>> {
        let Attachment {
            device,
            session,
            reply,
            ..
        } = attachment;
        let key = terms.key(session.uid(), session.generation(), &device);
        LendSession::at(&key, || LendSession::open(session, reply, &device, terms))
    }

    /// The session of this key, made if there is none.
    pub(crate) fn at(
        key: &ImportKey,
        open: impl FnOnce() -> Result<LendSession>,
    ) -> Result<Arc<LendSession>> {
        let is_connected = |session: &LendSession| !session.ipc().is_over();
        SESSIONS.get_or(key, is_connected, || open().map(Arc::new))
    }

    /// Opens a session from the lender's first reply.
    pub(crate) fn open(
        ipc: ClientSession,
        reply: IncomingReply,
        device: &Device,
        terms: &'static Terms,
    ) -> Result<LendSession> {
        let name = ipc.name().to_string();
        let (hello, words, ready, shares): (HelloReply, _, _, _) = match terms.has_shares {
            true => {
                let (hello, [words, ready, states, offers]) = reply.open(&name)?;
                (hello, words, ready, Some((Some(states), offers)))
            }
            // Of a borrower of another user.
            false if reply.fds.len() == 2 => {
                let (hello, [words, ready]) = reply.open(&name)?;
                (hello, words, ready, None)
            }
            false => {
                let (hello, [words, ready, offers]) = reply.open(&name)?;
                (hello, words, ready, Some((None, offers)))
            }
        };
        let open = |(states, offers)| ShareWords::open(terms.words, states, offers, &name);
        let claims_bytes = words_bytes(terms.words as usize);
        if hello.claims_bytes != claims_bytes as u64 {
            let found = format!("{} bytes", hello.claims_bytes);
            let allowed = format!("{claims_bytes} bytes");
            return Err(Error::protocol(name, "page", found, allowed));
        }
        let of_streams = (!terms.has_shares).then_some(device);
        let state = Arc::new(BorrowerState {
            terms,
            words: SharedPage::open(of_streams, words, claims_bytes, &name)?,
            open: AtomicU32::default(),
            runs: Mutex::default(),
            shares: shares.map(open).transpose()?,
        });
        let ready = SharedPage::read(ready, hello.ready_bytes as usize, &name)?;
        ipc.observe(state.clone())?;
        Ok(LendSession {
            device: device.clone(),
            owner: hello.owner,
            terms,
            ready,
            shared: DropAfterFence::new(Arc::default(), SessionParts { state, ipc })?,
        })
    }

    pub(crate) fn ipc(&self) -> &ClientSession {
        &self.shared.ipc
    }

    pub(crate) fn name(&self) -> &str {
        self.ipc().name()
    }

    pub(crate) fn wrong(
        &self,
        field: &'static str,
        found: impl ToString,
        allowed: impl ToString,
    ) -> Error {
        Error::protocol(self.name(), field, found, allowed)
    }

    /// Asks for memory, and waits for the answers, and then for the contents. Memory that is not
    /// ready in time goes back.
    pub(crate) fn ask<R: DeserializeOwned>(
        self: &Arc<Self>,
        request: impl Serialize,
        answers: &Wait<'_>,
        contents: &Wait<'_>,
    ) -> Result<Answer<R>> {
        self.check_room()?;
        let request = encode(&LendRequest::Memory(request))?;
        let reply = self.ipc().request(&request, answers)?;
        match decode(&reply.body, self.name())? {
            LendReply::Lent(grant) => {
                let borrowed = self.open_grant(grant, answers, contents)?;
                Ok(Answer::Lent(borrowed))
            }
            LendReply::Gone => Ok(Answer::Gone),
            LendReply::Refused(refusal) => Ok(Answer::Refused(refusal)),
            LendReply::TooMany => Err(self.too_many()),
            LendReply::Pieces => Err(self.wrong("reply", "pieces", "memory")),
        }
    }

    /// Claims a share, and waits for its contents. One that is not ready in time goes back. `None`
    /// if it is gone, or claimed.
    pub(crate) fn claim(
        self: &Arc<Self>,
        number: u64,
        wait: &Wait<'_>,
    ) -> Result<Option<LentBuffer>> {
        self.check_room()?;
        let BorrowerState { words, shares, .. } = &*self.shared.state;
        let claimed = match shares {
            _ if self.ipc().is_over() => return Err(self.ipc().owner_gone()),
            Some(shares) => shares.claim(words, number, self.name())?,
            None => None,
        };
        let Some(offer) = claimed else {
            // An owner that ends closes its sockets, and then gives up what it shares.
            let is_over = is_closed(words) || self.ipc().has_hung_up();
            return if is_over {
                Err(self.ipc().owner_gone())
            } else {
                Ok(None)
            };
        };
        let (word, value) = (slot(number), number);
        self.open_grant(Grant { word, value, offer }, wait, wait)
            .map(Some)
    }

    fn check_room(&self) -> Result<()> {
        self.shared.owner_process().check()?;
        match self.shared.state.open.load(Relaxed) < self.terms.claims_max {
            true => Ok(()),
            false => Err(self.too_many()),
        }
    }

    fn too_many(&self) -> Error {
        let Terms {
            lent, claims_max, ..
        } = self.terms;
        let found = format!("{} in one process", claims_max + 1);
        let allowed = format!("up to {claims_max} of {:?}; drop some", self.name());
        Error::argument(lent, found, allowed)
    }

    fn open_grant(
        self: &Arc<Self>,
        Grant { word, value, offer }: Grant,
        answers: &Wait<'_>,
        contents: &Wait<'_>,
    ) -> Result<LentBuffer> {
        let words = self.terms.words;
        if word >= words || value >= RETURNED {
            let found = format!("{word} and {value}");
            return Err(self.wrong("word and value", found, format!("below {words}")));
        }
        // From here on its drop ends the claim, also on an error.
        self.shared.state.open.fetch_add(1, Relaxed);
        let mut claim = Claim {
            session: self.clone(),
            word,
            value,
            at_end: Some(value | RETURNED),
        };
        let (slice, claim) = match offer.place {
            OfferPlace::Legacy(ref bytes) => {
                (self.open_legacy(bytes, &offer, claim, contents)?, None)
            }
            OfferPlace::Run { .. } => {
                let slice = self.open_run(&offer, answers, contents)?;
                claim.at_end = Some(value);
                (slice, Some(claim))
            }
        };
        Ok(LentBuffer {
            session: self.clone(),
            claim: LeakOnFork::new(claim),
            slice,
        })
    }

    /// Opens the memory of a legacy handle, whose mapping has the claim.
    fn open_legacy(
        &self,
        bytes: &[u8],
        offer: &Offer,
        mut claim: Claim,
        contents: &Wait<'_>,
    ) -> Result<DeviceSlice> {
        let handle = LegacyHandle::from_bytes(bytes)?;
        let info = handle.info();
        if info.bytes != offer.bytes {
            let allowed = format!("{} bytes", offer.bytes);
            return Err(self.wrong("handle", format!("{} bytes", info.bytes), allowed));
        }
        // Opened last: it would be closed behind the claim's end, and its owner may free it then.
        self.wait_until_ready(offer, contents)?;
        let (ptr, import) = handle.import(&self.device)?;
        claim.at_end = Some(claim.value);
        // The import is dropped first: the owner may free the memory when the claim has ended,
        // which is undefined for memory that is open elsewhere.
        let kept = DropAfterFence::new(Arc::default(), (import, claim))?;
        let kept = Arc::new(kept.lingering(LINGER));
        let mapped = MappedMemory::new((&self.device, info.device), &kept, kept.clone());
        let label = self.name().into();
        // SAFETY: the handle's range, which is open for writing as long as `kept`.
        Ok(unsafe { DeviceSlice::new(mapped, ptr, offer.bytes, Access::ReadWrite, &label) })
    }

    fn open_run(
        &self,
        offer: &Offer,
        answers: &Wait<'_>,
        contents: &Wait<'_>,
    ) -> Result<DeviceSlice> {
        let OfferPlace::Run {
            run,
            pieces,
            piece,
            offset,
            access,
        } = offer.place
        else {
            return Err(self.wrong("place", "a legacy handle", "a run"));
        };
        let total = piece
            .checked_mul(u64::from(pieces))
            .filter(|&total| total > 0 && pieces as usize <= RUN_PIECES_MAX);
        let total = total.ok_or_else(|| {
            let found = format!("{pieces} of {piece} bytes");
            self.wrong("pieces", found, format!("1 to {RUN_PIECES_MAX}"))
        })?;
        check_range(self.name(), offset, offer.bytes, total)?;
        // Mapped first: it stays readable if its lender ends meanwhile.
        let mapping = self.run((run, access), (pieces, piece), answers)?;
        let slice = mapping.slice(offset, offer.bytes, access, &self.name().into())?;
        self.wait_until_ready(offer, contents)?;
        Ok(slice)
    }

    /// The mapping of a run, made at its first claim. Of two threads that make it at the same time,
    /// the later one takes the other's.
    fn run(
        &self,
        key: RunKey,
        (pieces, piece): (u32, u64),
        wait: &Wait<'_>,
    ) -> Result<Arc<MappedRegion>> {
        let bytes = piece * u64::from(pieces);
        let known = self.shared.state.runs.locked().mapped.get(&key).cloned();
        let run = match known {
            Some(known) => known,
            None => {
                let made = Arc::new(self.map(key, (pieces, piece), wait)?);
                let mut runs = self.shared.state.runs.locked();
                // A lender that never ends its runs has no more of them mapped than it could lend.
                match runs.is_over || runs.mapped.len() >= self.terms.claims_max as usize {
                    true => made,
                    false => runs.mapped.entry(key).or_insert(made).clone(),
                }
            }
        };
        if run.bytes != bytes {
            let allowed = format!("{} bytes", run.bytes);
            return Err(self.wrong("run", format!("{bytes} bytes"), allowed));
        }
        Ok(run)
    }

    fn map(
        &self,
        (run, access): RunKey,
        (pieces, piece): (u32, u64),
        wait: &Wait<'_>,
    ) -> Result<MappedRegion> {
        let fds = self.descriptors(run, pieces, wait)?;
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let (device, owner) = (&self.device, self.owner);
        let region = Region::import(device, &borrowed, piece, access, owner)?;
        fds.iter().for_each(PeerFd::approve);
        region.identify(self.ipc().generation(), run.into());
        MappedRegion::of(region, device, owner, access, piece * u64::from(pieces))
    }

    fn descriptors(&self, run: u32, pieces: u32, wait: &Wait<'_>) -> Result<Vec<PeerFd>> {
        let mut fds: Vec<PeerFd> = vec![];
        while fds.len() < pieces as usize {
            let first = fds.len() as u32;
            let request = encode(&LendRequest::<()>::Pieces { run, first })?;
            let reply = self.ipc().request(&request, wait)?;
            let count = reply.fds.len();
            let is_right = matches!(decode(&reply.body, self.name())?, LendReply::<()>::Pieces);
            if !is_right || count == 0 || fds.len() + count > pieces as usize {
                let allowed = format!("descriptors of {pieces} pieces");
                return Err(self.wrong("pieces", format!("{count} descriptors"), allowed));
            }
            fds.extend(reply.fds);
        }
        Ok(fds)
    }

    fn wait_until_ready(&self, offer: &Offer, wait: &Wait<'_>) -> Result<()> {
        let Some((index, value)) = offer.ready else {
            return Ok(());
        };
        let words = self.ready.words();
        if index as usize >= words {
            return Err(self.wrong("ready word", index.to_string(), format!("below {words}")));
        }
        let word = self.ready.word(index as usize);
        let what = || format!("the contents of memory of {:?}", self.name());
        wait.poll(what, || {
            let is_ready = word.reached(value);
            // The word may have been stored just before the end.
            if !is_ready && self.ipc().is_dead() && !word.reached(value) {
                return Err(self.ipc().owner_gone());
            }
            Ok(is_ready || word.reached(value))
        })
    }

    /// The runs that are mapped now.
    #[cfg(test)]
    pub(crate) fn mapped_runs(&self) -> Vec<Arc<MappedRegion>> {
        let runs = self.shared.state.runs.locked();
        runs.mapped.values().cloned().collect()
    }

    #[cfg(test)]
    pub(crate) fn share_words(&self) -> &ShareWords {
        self.shared.state.shares.as_ref().unwrap()
    }

    #[cfg(test)]
    pub(crate) fn words(&self) -> &SharedPage {
        &self.shared.state.words
    }
}

/// A claim that the lender counts as this process's, until its word says that it is over.
#[derive(Debug)]
struct Claim {
    session: Arc<LendSession>,
    word: u32,
    value: u64,
    /// The value that its drop stores: at first, that the memory goes back unused. `None` once the
    /// claim is over.
    at_end: Option<u64>,
}

impl Claim {
    /// Has `stream` release the memory.
    fn release_behind(&mut self, stream: &Stream) -> Result<()> {
        let shared = &self.session.shared;
        shared.streams().record_use(stream);
        let Some(word) = shared.state.words.device_word(self.word as usize) else {
            return Ok(());
        };
        let value = self.value;
        // SAFETY: the page is dropped only when this stream, recorded above, is past its stores.
        unsafe { stream.batch(&[StreamOp::Signal { word, value }]) }?;
        self.at_end = None;
        Ok(())
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let state = &self.session.shared.state;
        state.open.fetch_sub(1, Relaxed);
        let Some(value) = self.at_end else {
            return;
        };
        let word = state.word(self.word);
        match &state.shares {
            Some(shares) if value & RETURNED != 0 => shares.give_back(word, self.value),
            _ => word.store(value),
        }
    }
}

/// Memory that another process lends: a block of its [`Pool`](crate::Pool), or what its
/// [`AllocationServer`](crate::AllocationServer) shares. The drop releases it: its owner reuses or
/// frees it when the recorded streams are past it. Its methods to read and write are those of
/// [`DeviceSlice`].
///
/// A block stays valid when its owner closes the pool, or dies, and so does shared memory that came
/// as descriptors.
#[derive(Debug)]
pub struct LentBuffer {
    session: Arc<LendSession>,
    /// What is mapped by descriptors needs nothing of the lender. `None` for a legacy handle, whose
    /// mapping has the claim: the memory may be freed once it is released, and is not to while it
    /// is open here.
    claim: LeakOnFork<Option<Claim>>,
    slice: DeviceSlice,
}

deref_to_slice!(LentBuffer);

impl LentBuffer {
    /// Releases the memory behind the work enqueued on `stream` so far, and on the other recorded
    /// streams (`cuStreamWriteValue64`). Does not wait: the owner reuses it when that work is done.
    ///
    /// # Errors
    /// [`Error::Driver`], [`Error::Argument`] for a stream of another device, and the memory is
    /// released as if it were dropped; [`Error::State`].
    pub fn free(mut self, stream: &Stream) -> Result<()> {
        self.slice.gather_on(stream)?;
        let claim = self.claim.as_mut();
        claim.map_or(Ok(()), |claim| claim.release_behind(stream))
    }

    /// Whether the contents can still be used: memory of a legacy handle is gone when its owner is,
    /// and memory that came as descriptors stays.
    ///
    /// # Errors
    /// [`Error::PeerGone`].
    pub fn check(&self) -> Result<()> {
        match self.claim.is_none() && self.session.ipc().is_dead() {
            true => Err(self.session.ipc().owner_gone()),
            false => Ok(()),
        }
    }
}

impl Drop for LentBuffer {
    fn drop(&mut self) {
        if self.claim.get().is_err() {
            return;
        }
        let Some(claim) = self.claim.take_if(|claim| claim.at_end.is_some()) else {
            return;
        };
        let mut fence = self.slice.streams().fence_busy();
        // The claim's drop releases it.
        if !fence.is_reached() {
            let reactor = self.session.shared.reactor();
            reactor.drop_value_after(fence, claim);
        }
    }
}
