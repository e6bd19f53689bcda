//! A receiver's session with a process that shares allocations: what it has open, and the mapped
//! runs. **This module is marked for unsafe**: it makes slices of mapped memory.

use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::{
    AllocationNotice, AllocationReply, AllocationRequest, CLAIMS_BYTES, CLAIMS_MAX, Grant,
    HelloReply, Place, READY_BYTES, READY_MAX, RETURNED, word_at,
};
use crate::backend::{Access, DeviceId, TimelineWord};
use crate::backoff::Backoff;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::fork::OwnerProcess;
use crate::fork::leak_on_fork::LeakOnFork;
use crate::ipc::{ClientSession, IncomingReply, Kind, SessionObserver, decode, encode};
use crate::memory::DeviceSlice;
use crate::memory::legacy::{LegacyHandle, LegacyMemory};
use crate::memory::mapped_region::{ImportKey, MappedRegion};
use crate::memory::pieces::RUN_PIECES_MAX;
use crate::memory::region::Region;
use crate::memory::slice::{Mapping, check_range};
use crate::memory::weak_cache::WeakCache;
use crate::options::{Attachment, Opener};
use crate::runtime::closer::PeerFd;
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::runtime::fence::StreamSet;
use crate::runtime::reactor::Reactor;
use crate::shm::page::SharedPage;
use crate::wait::Wait;

/// The sessions of this process, so that a run is mapped once however often its server is opened.
static SESSIONS: WeakCache<ImportKey, AllocationSession> = WeakCache::new();

impl Opener<AllocationClient> {
    /// Connects to the server of this name, to open its shares on the opener's device.
    ///
    /// # Errors
    /// [`Error::NotFound`] when no process serves it; [`Error::OtherKind`],
    /// [`Error::AccessDenied`], [`Error::Refused`] for a device that cannot reach its memory;
    /// [`Error::Name`].
    pub fn open(self) -> Result<AllocationClient> {
        self.open_with(Kind::Allocations, &[], AllocationClient::connect)
    }
}

impl AllocationClient {
    fn connect(attachment: Attachment) -> Result<AllocationClient> {
        let Attachment {
            device,
            session,
            reply,
            ..
        } = attachment;
        let key = ImportKey::new(session.uid(), session.generation(), 0, &device);
        // If this process has a session with the server, this one ends here.
        let session = SESSIONS.get_or(&key, AllocationSession::is_connected, || {
            AllocationSession::of(session, reply, &device).map(Arc::new)
        })?;
        Ok(AllocationClient { session })
    }
}

/// Opens what an [`AllocationServer`](crate::AllocationServer) of another process shares.
#[derive(Debug, Clone)]
pub struct AllocationClient {
    session: Arc<AllocationSession>,
}

impl AllocationClient {
    /// The options with which the server of this name is connected to.
    pub fn opener(name: &str) -> Opener<AllocationClient> {
        Opener::new(name)
    }

    /// The server's name.
    pub fn name(&self) -> &str {
        self.session.name()
    }

    /// The server's process.
    pub fn owner_pid(&self) -> i32 {
        self.session.ipc.pid()
    }

    /// Whether the server has closed, or its process has died.
    pub fn is_owner_gone(&self) -> bool {
        self.session.ipc.is_over()
    }

    /// Opens a share, which is this process's from then on, and waits until its
    /// contents are complete. A share that is not opened in time can be opened again.
    ///
    /// # Errors
    /// [`Error::NotFound`] for a share that was opened already, or withdrawn; [`Error::Timeout`];
    /// [`Error::PeerGone`]; [`Error::Argument`] beyond 16,384 shares at once;
    /// [`Error::PeerAccess`], [`Error::LegacyHandle`], [`Error::NotDeviceMemory`],
    /// [`Error::DescriptorLimit`], [`Error::Driver`].
    pub fn open_share<'w>(&self, number: u64, wait: impl Into<Wait<'w>>) -> Result<OpenAllocation> {
        let wait = wait.into();
        let request = AllocationRequest::Open(number);
        let reply = self.session.ask(request, &wait)?;
        let grant = match decode(&reply.body, self.name())? {
            AllocationReply::Opened(grant) => grant,
            AllocationReply::TooMany => return Err(self.session.too_many()),
            AllocationReply::Gone => {
                return Err(Error::NotFound {
                    name: format!("{}, share {number}", self.name()),
                    kind: Kind::Allocations,
                    domain: Default::default(),
                    was_there: true,
                });
            }
            AllocationReply::Pieces => {
                return Err(self.session.wrong("reply", "pieces".into(), "a share"));
            }
        };
        self.session.open_grant(grant, &wait)
    }
}

/// Memory of another process's library, open in this process: for reading and writing, as in the
/// process that shared it, or for reading alone, as that process said. The drop releases it there,
/// once the recorded streams are past it. Its methods to read and write are those of
/// [`DeviceSlice`].
#[derive(Debug)]
pub struct OpenAllocation {
    hold: LeakOnFork<Hold>,
    slice: DeviceSlice,
}

/// What ends the claim.
#[derive(Debug)]
enum Hold {
    /// The memory is mapped by descriptors, which need nothing of the server.
    Run(ClaimGuard),
    /// The mapping of a legacy handle has the claim: the server's library may free the memory once
    /// it is released, and is not to while it is open here.
    Legacy(Arc<AllocationSession>),
}

impl Deref for OpenAllocation {
    type Target = DeviceSlice;

    fn deref(&self) -> &DeviceSlice {
        &self.slice
    }
}

impl OpenAllocation {
    /// Whether the contents can still be used: memory of a legacy handle is gone when its owner
    /// is, and memory that came as descriptors stays.
    ///
    /// # Errors
    /// [`Error::PeerGone`].
    pub fn check(&self) -> Result<()> {
        match &*self.hold {
            Hold::Legacy(session) if session.ipc.is_dead() => Err(session.ipc.owner_gone()),
            _ => Ok(()),
        }
    }
}

impl Drop for OpenAllocation {
    fn drop(&mut self) {
        if self.hold.get().is_err() {
            return;
        }
        let Hold::Run(guard) = &mut *self.hold else {
            // The mapping's end releases the share.
            return;
        };
        let mut fence = self.slice.streams().fence_busy();
        if fence.is_reached() {
            // The guard releases the share.
            return;
        }
        let guard = guard.hand_over();
        let reactor = guard.session.reactor.clone();
        reactor.drop_value_after(fence, guard);
    }
}

/// A share that the server counts as this process's, until its word says that it is over.
struct ClaimGuard {
    session: Arc<AllocationSession>,
    word: u32,
    value: u64,
    is_over: bool,
}

impl fmt::Debug for ClaimGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClaimGuard")
            .field("word", &self.word)
            .finish_non_exhaustive()
    }
}

impl ClaimGuard {
    /// Another guard in this one's place.
    fn hand_over(&mut self) -> ClaimGuard {
        self.is_over = true;
        ClaimGuard {
            session: self.session.clone(),
            word: self.word,
            value: self.value,
            is_over: false,
        }
    }

    fn end(&mut self, value: u64) {
        if !std::mem::replace(&mut self.is_over, true) {
            self.session
                .claims
                .at::<TimelineWord>(word_at(self.word))
                .store(value);
        }
    }

    /// Gives the share back, unused.
    fn give_back(mut self) {
        self.end(self.value | RETURNED);
    }
}

impl Drop for ClaimGuard {
    fn drop(&mut self) {
        self.end(self.value);
    }
}

/// This process's session with a server.
struct AllocationSession {
    device: Device,
    owner: DeviceId,
    claims: Arc<SharedPage>,
    ready: SharedPage,
    runs: Arc<MappedRuns>,
    reactor: Arc<Reactor>,
    ipc: ClientSession,
}

impl fmt::Debug for AllocationSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AllocationSession")
            .field("name", &self.name())
            .finish_non_exhaustive()
    }
}

/// The runs that a session has mapped. Never locked on the reactor's thread: the lock is held
/// during driver calls.
#[derive(Debug, Default)]
struct MappedRuns {
    state: Mutex<RunTable>,
}

/// A run's number, which is the server's, and its mapping's access.
type RunKey = (u32, Access);

#[derive(Debug, Default)]
struct RunTable {
    mapped: HashMap<RunKey, Arc<MappedRegion>>,
    /// The server has ended, and tells of no run's end any more: none is kept beyond its shares.
    is_over: bool,
}

impl MappedRuns {
    fn lock(&self) -> MutexGuard<'_, RunTable> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Dropped by the reaper, it forgets a run that the server holds no longer, or all of them.
struct EndedRuns {
    runs: Arc<MappedRuns>,
    number: Option<u32>,
}

impl Drop for EndedRuns {
    fn drop(&mut self) {
        let mut runs = self.runs.lock();
        runs.is_over |= self.number.is_none();
        let is_ended = |&(number, _): &RunKey| self.number.is_none_or(|ended| ended == number);
        let ended: Vec<_> = runs.mapped.extract_if(|key, _| is_ended(key)).collect();
        drop(runs);
        drop(ended);
    }
}

/// Runs on the reactor's thread: CPU stores, and work that is left to the reaper.
struct AllocationObserver {
    claims: Arc<SharedPage>,
    runs: Arc<MappedRuns>,
    reactor: Arc<Reactor>,
}

impl AllocationObserver {
    fn end_runs(&self, number: Option<u32>) {
        let runs = self.runs.clone();
        self.reactor
            .defer_drop(Box::new(EndedRuns { runs, number }));
    }
}

impl SessionObserver for AllocationObserver {
    fn on_closed(&self, _: bool) {
        self.end_runs(None);
    }

    fn on_stale_reply(&self, _: &[u8], incoming: IncomingReply) {
        if let Ok(AllocationReply::Opened(Grant { word, value, .. })) = decode(&incoming.body, "")
            && word < CLAIMS_MAX
        {
            let word: &TimelineWord = self.claims.at(word_at(word));
            word.store(value | RETURNED);
        }
    }

    fn on_notification(&self, incoming: IncomingReply) {
        if let Ok(AllocationNotice::RunEnded(number)) = decode(&incoming.body, "") {
            self.end_runs(Some(number));
        }
    }
}

impl AllocationSession {
    fn of(
        ipc: ClientSession,
        incoming: IncomingReply,
        device: &Device,
    ) -> Result<AllocationSession> {
        let name = ipc.name().to_string();
        let (hello, [claims, ready]): (HelloReply, _) = incoming.open(&name)?;
        let lengths = (hello.claims_bytes, hello.ready_bytes);
        if lengths != (CLAIMS_BYTES as u64, READY_BYTES as u64) {
            return Err(Error::Protocol {
                name,
                field: "pages",
                found: format!("{lengths:?} bytes"),
                allowed: format!("{:?}", (CLAIMS_BYTES, READY_BYTES)),
            });
        }
        let claims = Arc::new(SharedPage::open(None, claims, CLAIMS_BYTES, &name)?);
        let ready = SharedPage::read(ready, READY_BYTES, &name)?;
        let (runs, reactor) = (Arc::<MappedRuns>::default(), Reactor::of_process()?);
        ipc.observe(Arc::new(AllocationObserver {
            claims: claims.clone(),
            runs: runs.clone(),
            reactor: reactor.clone(),
        }))?;
        Ok(AllocationSession {
            device: device.clone(),
            owner: hello.owner,
            claims,
            ready,
            runs,
            reactor,
            ipc,
        })
    }

    fn is_connected(&self) -> bool {
        !self.ipc.is_over()
    }

    fn name(&self) -> &str {
        self.ipc.name()
    }

    fn wrong(&self, field: &'static str, found: String, allowed: impl Into<String>) -> Error {
        Error::Protocol {
            name: self.name().to_string(),
            field,
            found,
            allowed: allowed.into(),
        }
    }

    fn too_many(&self) -> Error {
        let allowed = format!("up to {CLAIMS_MAX} of {:?}; drop some", self.name());
        Error::argument(
            "shares",
            format!("{} in one process", CLAIMS_MAX + 1),
            allowed,
        )
    }

    fn ask(&self, request: AllocationRequest, wait: &Wait<'_>) -> Result<IncomingReply> {
        self.ipc.request(&encode(&request)?, wait)
    }

    fn open_grant(self: &Arc<Self>, grant: Grant, wait: &Wait<'_>) -> Result<OpenAllocation> {
        if grant.word >= CLAIMS_MAX || grant.value >= RETURNED {
            let found = format!("{} and {}", grant.word, grant.value);
            return Err(self.wrong("word and value", found, format!("below {CLAIMS_MAX}")));
        }
        // From here on the guard ends the claim, also on an error.
        let guard = ClaimGuard {
            session: self.clone(),
            word: grant.word,
            value: grant.value,
            is_over: false,
        };
        let opened = self.open_place(&grant, wait);
        let opened = opened.and_then(|opened| {
            self.wait_until_ready(&grant, wait)?;
            Ok(opened)
        });
        match opened {
            Ok(Opened::Run(slice)) => Ok(OpenAllocation {
                hold: LeakOnFork::new(Hold::Run(guard)),
                slice,
            }),
            Ok(Opened::Legacy(memory, owner)) => {
                let slice = self.legacy_slice(memory, owner, guard)?;
                Ok(OpenAllocation {
                    hold: LeakOnFork::new(Hold::Legacy(self.clone())),
                    slice,
                })
            }
            Err(error) => {
                guard.give_back();
                Err(error)
            }
        }
    }

    fn open_place(&self, grant: &Grant, wait: &Wait<'_>) -> Result<Opened> {
        match &grant.place {
            Place::Legacy(bytes) => {
                let handle = LegacyHandle::from_bytes(bytes)?;
                if handle.bytes() != grant.bytes {
                    let allowed = format!("{} bytes", grant.bytes);
                    return Err(self.wrong("handle", format!("{} bytes", handle.bytes()), allowed));
                }
                Ok(Opened::Legacy(handle.open(&self.device)?, handle.device()))
            }
            &Place::Run {
                run,
                pieces,
                piece,
                offset,
                access,
            } => {
                let total = piece
                    .checked_mul(u64::from(pieces))
                    .filter(|&total| total > 0);
                let total = total
                    .filter(|_| pieces as usize <= RUN_PIECES_MAX)
                    .ok_or_else(|| {
                        let found = format!("{pieces} of {piece} bytes");
                        self.wrong("pieces", found, format!("1 to {RUN_PIECES_MAX}"))
                    })?;
                check_range(self.name(), offset, grant.bytes, total)?;
                let mapping = self.run((run, access), (pieces, piece), wait)?;
                let label: Arc<str> = self.name().into();
                let slice = mapping.slice(offset, grant.bytes, access, &label)?;
                Ok(Opened::Run(slice))
            }
        }
    }

    fn legacy_slice(
        &self,
        memory: LegacyMemory,
        owner: DeviceId,
        claim: ClaimGuard,
    ) -> Result<DeviceSlice> {
        let (ptr, bytes, label) = (memory.ptr(), memory.bytes(), self.name().into());
        let claimed = ClaimedLegacy {
            memory: Some(memory),
            _claim: claim,
        };
        let mapping = Arc::new(LegacyMapping {
            owner,
            device: self.device.clone(),
            memory: DropAfterFence::new(Arc::default(), claimed)?,
        });
        // SAFETY: the handle's range, which stays open as long as `mapping`.
        Ok(unsafe { DeviceSlice::new(mapping, ptr, bytes, Access::ReadWrite, &label) })
    }

    /// The mapping of a run, made at its first share.
    fn run(
        &self,
        key: RunKey,
        (pieces, piece): (u32, u64),
        wait: &Wait<'_>,
    ) -> Result<Arc<MappedRegion>> {
        let bytes = piece * u64::from(pieces);
        if let Some(known) = self.known_run(&self.runs.lock(), key, bytes)? {
            return Ok(known);
        }
        // Without the lock: the server may take its time, and the reaper takes the lock.
        let fds = self.descriptors(key.0, pieces, wait)?;
        let mut runs = self.runs.lock();
        if let Some(known) = self.known_run(&runs, key, bytes)? {
            // Another thread has mapped it meanwhile.
            return Ok(known);
        }
        let borrowed: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let (access, owner) = (key.1, self.owner);
        let region = Region::import_pieces(&self.device, &borrowed, piece, access, owner)?;
        fds.iter().for_each(PeerFd::approve);
        let mapping = MappedRegion::of(region, &self.device, owner, access, bytes)?;
        let mapping = Arc::new(mapping);
        if !runs.is_over {
            runs.mapped.insert(key, mapping.clone());
        }
        Ok(mapping)
    }

    fn known_run(
        &self,
        runs: &RunTable,
        key: RunKey,
        bytes: u64,
    ) -> Result<Option<Arc<MappedRegion>>> {
        match runs.mapped.get(&key) {
            Some(known) if known.bytes != bytes => {
                let found = format!("{bytes} bytes");
                Err(self.wrong("run", found, format!("{} bytes", known.bytes)))
            }
            known => Ok(known.cloned()),
        }
    }

    fn descriptors(&self, run: u32, pieces: u32, wait: &Wait<'_>) -> Result<Vec<PeerFd>> {
        let mut fds: Vec<PeerFd> = vec![];
        while fds.len() < pieces as usize {
            let first = fds.len() as u32;
            let request = AllocationRequest::Pieces { run, first };
            let reply = self.ask(request, wait)?;
            let count = reply.fds.len();
            let is_right = matches!(decode(&reply.body, self.name())?, AllocationReply::Pieces);
            if !is_right || count == 0 || fds.len() + count > pieces as usize {
                let allowed = format!("descriptors of {pieces} pieces");
                return Err(self.wrong("pieces", format!("{count} descriptors"), allowed));
            }
            fds.extend(reply.fds);
        }
        Ok(fds)
    }

    fn wait_until_ready(&self, grant: &Grant, wait: &Wait<'_>) -> Result<()> {
        let Some((index, value)) = grant.ready else {
            return Ok(());
        };
        if index >= READY_MAX {
            return Err(self.wrong(
                "ready word",
                index.to_string(),
                format!("below {READY_MAX}"),
            ));
        }
        let word: &TimelineWord = self.ready.at(word_at(index));
        let mut backoff = Backoff::default();
        while !word.reached(value) {
            // The word may have been stored just before the end.
            if self.ipc.is_dead() && !word.reached(value) {
                return Err(self.ipc.owner_gone());
            }
            if wait.is_over() {
                return Err(Error::Timeout {
                    what: format!("the contents of a share of {:?}", self.name()),
                    waited: wait.limit(),
                });
            }
            backoff.pause();
        }
        Ok(())
    }
}

/// A share's memory in this process.
enum Opened {
    Run(DeviceSlice),
    Legacy(LegacyMemory, DeviceId),
}

/// A legacy handle's memory, with the streams that it stays open for.
#[derive(Debug)]
struct LegacyMapping {
    device: Device,
    owner: DeviceId,
    memory: DropAfterFence<ClaimedLegacy>,
}

/// An open legacy handle and the claim that keeps its memory allocated. Dropped by the reaper: the
/// drop calls the driver.
#[derive(Debug)]
struct ClaimedLegacy {
    /// `None` only while dropping.
    memory: Option<LegacyMemory>,
    _claim: ClaimGuard,
}

impl Drop for ClaimedLegacy {
    /// Closes the handle, and then releases the share: its memory may be freed from then on, which
    /// is undefined for memory that is open elsewhere.
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            // Nobody is left to be told. No stream is recorded here: the mapping's are past it.
            let _ = memory.close(Duration::ZERO);
        }
    }
}

impl Mapping for LegacyMapping {
    fn device(&self) -> &Device {
        &self.device
    }

    fn owner(&self) -> DeviceId {
        self.owner
    }

    fn streams(&self) -> &Arc<StreamSet> {
        self.memory.streams()
    }

    fn owner_process(&self) -> OwnerProcess {
        self.memory.owner_process()
    }
}
