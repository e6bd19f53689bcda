//! A number that only grows, and that streams of several processes signal and wait for.
//!
//! One process owns a timeline and signals it; any other opens it by name and has its streams wait. The value lies in
//! a [page](crate::memory::page) that all of them map and register, in one [lane](crate::memory::lane). Nothing else
//! passes between them but the page itself, once, and each other's end.
//!
//! **Who can do what to whom.** All who open a timeline can write its page: any survivor must be able to let waiting
//! streams go. So a process that scribbles there can release the others' streams too early, or hold them up until
//! the owner ends, and can make [`Timeline::check`] say what is not so. It cannot make anybody read out of bounds, and
//! it cannot hold up the owner's own streams. Open a timeline to those that you would let crash your pipeline.
//!
//! The owner's end: at its proven death each survivor's watcher writes down the last value and raises the word above
//! all others, with CPU stores alone. An owner that closes does the same itself when its streams have signalled what
//! they were given.

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::device::Device;
use crate::domain::{Domain, EndpointName};
use crate::error::{Error, Result};
use crate::fork::{Home, PrivateFd};
use crate::link::proof::{Proof, Streams};
use crate::link::watcher::Watcher;
use crate::memory::board::Board;
use crate::memory::lane::{LANE_BYTES, Lane, Raiser, VALUE_MAX, Verdict};
use crate::memory::page::Page;
use crate::rendezvous::{
    Address, Admission, Answer, Caller, Desk, Ending, Keep, Keeper, Kind, Refusal, Visit, Visitor,
};
use crate::stream::Stream;

/// Where the lane lies in the page.
const LANE: usize = 0;

/// What an owner says of its page.
#[derive(Debug, Serialize, Deserialize)]
struct Grant {
    bytes: u64,
}

/// A named 64-bit value that only grows, across processes (Vulkan's timeline semaphore; on CUDA
/// `cuStreamWriteValue64` and `cuStreamWaitValue64`).
///
/// ```
/// use std::time::Duration;
/// use warpipe::{Device, Domain, Timeline};
/// # let folder = std::env::temp_dir().join(format!("warpipe-timeline-{}", std::process::id()));
/// # let domain = Domain::at(&folder)?;
/// let device = Device::host();
/// let owner = Timeline::create(&domain, "frames", &device)?;
/// let frames = Timeline::open(&domain, "frames", &device)?; // in another process, as a rule
///
/// let (writing, reading) = (device.stream()?, device.stream()?);
/// owner.signal(&writing, 1)?; // behind the work that is on `writing` so far
/// frames.wait(&reading, 1)?; // what is enqueued on `reading` from here on comes after it; the CPU does not wait
/// reading.synchronize(Duration::from_secs(1))?;
/// assert!(frames.check(1)?); // an error if the owner died, and the stream was let go without it
/// # drop((owner, frames)); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
pub struct Timeline {
    name: String,
    device: Device,
    home: Home,
    watcher: Arc<Watcher>,
    lane: Lane,
    page: Arc<Page>,
    /// Those that signal it.
    signalling: Arc<Streams>,
    /// Those that wait for it.
    waiting: Arc<Streams>,
    role: Role,
}

enum Role {
    Owner { keeper: Option<Keeper>, raiser: Raiser, board: Arc<Board> },
    Guest { visitor: Option<Visitor>, mourner: Arc<Mourner>, pid: i32 },
}

impl Timeline {
    /// The largest value that can be signalled or waited for, 2^63 - 2.
    pub const VALUE_MAX: u64 = VALUE_MAX;

    /// Makes a timeline at 0 and takes its name (`memfd_create`, `cuMemHostRegister`). Up to 256 others may open it,
    /// of the same user.
    ///
    /// # Errors
    /// [`Error::Name`], [`Error::NameTaken`], [`Error::ForeignFile`], [`Error::Domain`], or what the device or the
    /// system says. Nothing is left behind.
    pub fn create(domain: &Domain, name: &str, device: &Device) -> Result<Timeline> {
        let name = EndpointName::new(name)?;
        let watcher = Watcher::of_process()?;
        let board = Arc::new(Board::new(device, 1)?);
        let (page, fd) = Page::create(Some(device), LANE_BYTES)?;
        let page = Arc::new(page);
        let lane = Lane::new(&page, LANE);
        let raiser = Raiser::new(lane.clone(), &board, 0, 0);
        let at = Address { domain, name: &name, kind: Kind::Timeline };
        let keeper = Keeper::open(&at, Admission::default(), Arc::new(Door { fd, bytes: page.bytes() }))?;
        let role = Role::Owner { keeper: Some(keeper), raiser, board };
        Ok(Timeline::assemble(name.to_string(), device, watcher, lane, page, role))
    }

    /// Opens a timeline that is there, in any process, this one among them.
    ///
    /// # Errors
    /// [`Error::NoOwner`], [`Error::OtherKind`], [`Error::AccessDenied`], [`Error::Handshake`], [`Error::Protocol`],
    /// or what the device or the system says.
    pub fn open(domain: &Domain, name: &str, device: &Device) -> Result<Timeline> {
        Timeline::open_timeout(domain, name, device, Duration::ZERO)
    }

    /// Opens a timeline, and waits up to `timeout` for it to be made.
    ///
    /// # Errors
    /// As for [`open`](Self::open).
    pub fn open_timeout(domain: &Domain, name: &str, device: &Device, timeout: Duration) -> Result<Timeline> {
        let name = EndpointName::new(name)?;
        let at = Address { domain, name: &name, kind: Kind::Timeline };
        let (visitor, gift) = Visitor::attach(&at, Some(device.info().id), &[], timeout)?;
        let (grant, [fd]) = gift.open::<Grant, 1>(name.as_str())?;
        let bytes = usize::try_from(grant.bytes).unwrap_or(usize::MAX);
        let page = Arc::new(Page::open(Some(device), fd, bytes, name.as_str())?);
        let lane = Lane::new(&page, LANE);
        let mourner = Arc::new(Mourner { lane: lane.clone(), is_over: AtomicBool::new(false) });
        visitor.listen(mourner.clone())?;
        let (watcher, pid) = (visitor.watcher().clone(), visitor.pid());
        let role = Role::Guest { visitor: Some(visitor), mourner, pid };
        Ok(Timeline::assemble(name.to_string(), device, watcher, lane, page, role))
    }

    fn assemble(
        name: String,
        device: &Device,
        watcher: Arc<Watcher>,
        lane: Lane,
        page: Arc<Page>,
        role: Role,
    ) -> Timeline {
        let (signalling, waiting) = Default::default();
        Timeline { name, device: device.clone(), home: Home::here(), watcher, lane, page, signalling, waiting, role }
    }

    /// The endpoint's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The device whose streams signal and wait.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Whether this handle may signal.
    pub fn is_owner(&self) -> bool {
        matches!(self.role, Role::Owner { .. })
    }

    /// Signals `value` behind the stream's work so far (`cuStreamWriteValue64`), and returns at once. On several
    /// streams the values are reached in the order of the calls: a stream waits, on the device, for the one before.
    ///
    /// # Errors
    /// [`Error::NotOwner`]; [`Error::Backwards`] unless it is above the last value; [`Error::Argument`] above
    /// [`VALUE_MAX`](Self::VALUE_MAX), or for a stream of another device; [`Error::Driver`].
    pub fn signal(&self, stream: &Stream, value: u64) -> Result<()> {
        self.home.check()?;
        let raiser = self.raiser()?;
        stream.check_of(&self.device)?;
        raiser.raise(stream, &self.signalling, |last| self.above(value, last)).map(drop)
    }

    /// Signals `value` now, from the CPU.
    ///
    /// # Errors
    /// As for [`signal`](Self::signal), and [`Error::SignalPending`] while a stream has yet to signal an earlier value.
    pub fn signal_now(&self, value: u64) -> Result<()> {
        self.home.check()?;
        self.raiser()?.raise_now(|last, reached| {
            if reached < last {
                return Err(Error::SignalPending { name: self.name.clone(), value, last, reached });
            }
            self.above(value, last)
        })
    }

    /// Has `stream` wait for `value` (`cuStreamWaitValue64`), and returns at once. What the stream did afterwards
    /// counts when [`check`](Self::check) says so: a stream whose owner died is let go, too.
    ///
    /// The owner's own streams can wait for what has been signalled, or given to a stream to be signalled. On one
    /// GPU, a wait that stands before its own signal in the same process could hold that signal up.
    ///
    /// # Errors
    /// [`Error::OwnerGone`] at once, if the owner is gone and left the value unreached; [`Error::Argument`] above
    /// [`VALUE_MAX`](Self::VALUE_MAX), of an owner above its last value, or for a stream of another device;
    /// [`Error::Driver`].
    pub fn wait(&self, stream: &Stream, value: u64) -> Result<()> {
        self.home.check()?;
        stream.check_of(&self.device)?;
        let limit = if let Role::Owner { raiser, .. } = &self.role { raiser.last() } else { VALUE_MAX };
        if value > limit {
            return Err(Error::argument("value", value, format!("up to {limit}")));
        }
        // Work that is launched after the CPU has seen the value is behind it without a wait on the device.
        if self.check(value)? {
            return Ok(());
        }
        self.lane.wait(stream, value, &self.waiting)
    }

    /// Waits on the CPU until `value` is reached.
    ///
    /// # Errors
    /// [`Error::OwnerGone`], [`Error::Timeout`], [`Error::Argument`] above [`VALUE_MAX`](Self::VALUE_MAX).
    pub fn wait_host(&self, value: u64, timeout: Duration) -> Result<()> {
        self.home.check()?;
        if value > VALUE_MAX {
            return Err(Error::argument("value", value, format!("up to {VALUE_MAX}")));
        }
        if self.check(value)? {
            return Ok(());
        }
        self.lane.wait_host(&self.device, value, timeout)?;
        if self.check(value)? {
            return Ok(());
        }
        Err(Error::Timeout { what: format!("value {value} of timeline {:?}", self.name), waited: timeout })
    }

    /// Whether `value` has been reached: true, or false if it may still be.
    ///
    /// # Errors
    /// [`Error::OwnerGone`]: it has not been, and never will be. What a stream did behind its wait does not count.
    pub fn check(&self, value: u64) -> Result<bool> {
        self.home.check()?;
        match self.verdict(value) {
            Verdict::Reached => Ok(true),
            Verdict::Due => Ok(false),
            Verdict::Never => Err(self.gone()),
        }
    }

    /// The value now; the last one, when the owner is gone.
    pub fn value(&self) -> u64 {
        self.lane.value()
    }

    fn verdict(&self, value: u64) -> Verdict {
        let verdict = self.lane.verdict(value);
        if let (Verdict::Due, Role::Guest { visitor: Some(visitor), mourner, .. }) = (verdict, &self.role)
            && mourner.is_over.load(SeqCst)
            && visitor.is_dead()
        {
            // Before the watcher has come to it, perhaps.
            self.lane.end();
            return self.lane.verdict(value);
        }
        verdict
    }

    fn raiser(&self) -> Result<&Raiser> {
        match &self.role {
            Role::Owner { raiser, .. } => Ok(raiser),
            Role::Guest { pid, .. } => Err(Error::NotOwner { name: self.name.clone(), pid: *pid }),
        }
    }

    fn above(&self, value: u64, last: u64) -> Result<u64> {
        match value {
            _ if value > VALUE_MAX => Err(Error::argument("value", value, format!("up to {VALUE_MAX}"))),
            _ if value <= last => Err(Error::Backwards { name: self.name.clone(), value, last }),
            _ => Ok(value),
        }
    }

    fn gone(&self) -> Error {
        match &self.role {
            Role::Guest { visitor: Some(visitor), .. } => visitor.owner_gone(),
            _ => {
                let (name, pid) = (self.name.clone(), std::process::id() as i32);
                Error::OwnerGone { kind: Kind::Timeline, name, pid, graceful: false }
            }
        }
    }
}

impl fmt::Debug for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timeline")
            .field("name", &self.name)
            .field("is_owner", &self.is_owner())
            .field("value", &self.value())
            .finish_non_exhaustive()
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        if !self.home.is_here() {
            // What the parent has is not ours to end, and its memory may be used by it.
            if let Role::Owner { keeper, board, .. } = &mut self.role {
                std::mem::forget((keeper.take(), board.clone()));
            }
            if let Role::Guest { visitor, .. } = &mut self.role {
                std::mem::forget(visitor.take());
            }
            return std::mem::forget(self.page.clone());
        }
        let (page, lane) = (self.page.clone(), self.lane.clone());
        let (signalling, waiting) = (self.signalling.clone(), self.waiting.clone());
        match &mut self.role {
            Role::Owner { keeper, raiser, board } => {
                drop(keeper.take());
                let end = (lane, raiser.last());
                close(&self.watcher, end, (page, board.clone()), signalling, waiting);
            }
            Role::Guest { visitor, .. } => leave(&self.watcher, page, visitor.take(), waiting),
        }
    }
}

/// An owner's end: first what its streams have yet to signal, then the word of its end, then the memory.
fn close(
    watcher: &Watcher,
    (lane, last): (Lane, u64),
    (page, board): (Arc<Page>, Arc<Board>),
    signalling: Arc<Streams>,
    waiting: Arc<Streams>,
) {
    let (mut signalled, mut waited, mut lane) = (None, None, Some(lane));
    watcher.retire_patiently(move || {
        if !passed(&mut signalled, &signalling) {
            return false;
        }
        if let Some(lane) = lane.take() {
            lane.end_at(last);
        }
        passed(&mut waited, &waiting) && Arc::strong_count(&page) == 1 && Arc::strong_count(&board) == 1
    });
}

/// A guest's end. The visit goes on for as long as a stream of ours may wait: its watcher is who lets it go.
fn leave(watcher: &Watcher, page: Arc<Page>, mut visitor: Option<Visitor>, waiting: Arc<Streams>) {
    let mut waited = None;
    watcher.retire_patiently(move || {
        if !passed(&mut waited, &waiting) {
            return false;
        }
        drop(visitor.take());
        Arc::strong_count(&page) == 1
    });
}

fn passed(proof: &mut Option<Proof>, streams: &Streams) -> bool {
    proof.get_or_insert_with(|| streams.mark()).is_passed()
}

/// Gives the page to who comes.
struct Door {
    fd: PrivateFd,
    bytes: usize,
}

impl Keep for Door {
    fn admit(&self, _: &Desk, _: &Caller, _: &[u8]) -> Result<Answer, Refusal> {
        Answer::new(&Grant { bytes: self.bytes as u64 }, vec![PrivateFd::duplicate(&self.fd)?])
    }

    fn answer(&self, _: &Desk, _: &Caller, _: &[u8]) -> Result<Answer, Refusal> {
        Err(Refusal("a timeline answers no questions".into()))
    }

    fn gone(&self, _: &Desk, _: &Caller, _: Ending) {}
}

/// Sees the owner's end. On the watcher's thread: CPU stores alone.
struct Mourner {
    lane: Lane,
    is_over: AtomicBool,
}

impl Visit for Mourner {
    fn ended(&self, _graceful: bool) {
        self.is_over.store(true, SeqCst);
    }

    fn proven_dead(&self) {
        self.is_over.store(true, SeqCst);
        self.lane.end();
    }
}
