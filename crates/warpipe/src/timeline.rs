//! A number that only grows, and that streams of several processes signal and wait for.
//!
//! One process owns a timeline and signals it; any other opens it by name and has its streams wait. The owner shares a
//! [page](crate::memory::page) with each guest, and with nobody else: its streams signal a [lane](crate::memory::lane)
//! in every one of them, behind which stands a lane in the owner's own memory.
//!
//! **Who can do what to whom.** A guest can write the page that it shares with the owner, and so deceive itself. It
//! cannot write or see the others' pages, cannot hold up the owner's streams, and cannot remove a page under a stream:
//! the page is sealed against that before anybody registers it.
//!
//! The owner's end: at its proven death each guest's watcher writes down the last value and raises the word in its own
//! page above all others, with CPU stores alone. An owner that closes does the same itself when its streams have
//! signalled what they were given.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::device::Device;
use crate::domain::{Domain, EndpointName};
use crate::error::{Error, Result};
use crate::fork::{Home, PrivateFd};
use crate::link::proof::{Proof, Streams};
use crate::link::watcher::{Usage, Watcher};
use crate::memory::lane::{LANE_BYTES, Lane, VALUE_MAX, Verdict};
use crate::memory::page::{Draft, Page};
use crate::memory::raiser::Raiser;
use crate::rendezvous::{
    ANSWER_TIMEOUT, Address, Admission, Answer, Caller, Desk, Ending, Gift, Keep, Keeper, Kind, Refusal, Visit,
    Visitor, decode, encode,
};
use crate::stream::Stream;

/// Where the lane lies in the page.
const LANE: usize = 0;

/// What an owner says of the page that it shares with a guest.
#[derive(Debug, Serialize, Deserialize)]
struct Grant {
    bytes: u64,
}

/// What a guest says, once: it has mapped and sealed that page. The answer comes when the page has the value so far.
#[derive(Debug, Serialize, Deserialize)]
struct Sealed;

crate::rendezvous::messages!(Grant, Sealed);

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
    /// The owner's own, or the copy of it that a guest shares with the owner.
    lane: Lane,
    /// Those that signal it.
    signalling: Arc<Streams>,
    /// Those that wait for it.
    waiting: Arc<Streams>,
    role: Role,
}

enum Role {
    Owner { keeper: Option<Keeper>, raiser: Arc<Raiser> },
    Guest { visitor: Option<Visitor>, mourner: Arc<Mourner>, pid: i32 },
}

impl Timeline {
    /// The largest value that can be signalled or waited for, 2^63 - 2.
    pub const VALUE_MAX: u64 = VALUE_MAX;

    /// Makes a timeline at 0 and takes its name (`cuMemHostRegister`). Up to 256 others may open it, of the same user;
    /// each costs a page of shared memory, and for each signal one store more by the device.
    ///
    /// # Errors
    /// [`Error::Name`], [`Error::NameTaken`], [`Error::ForeignFile`], [`Error::Domain`], or what the device or the
    /// system says. Nothing is left behind.
    pub fn create(domain: &Domain, name: &str, device: &Device) -> Result<Timeline> {
        let name = EndpointName::new(name)?;
        let watcher = Watcher::of_process()?;
        let lane = Lane::new(&Arc::new(Page::private(device, LANE_BYTES)?), LANE);
        let (published, fd) = Page::publish(Some(device), LANE_BYTES)?;
        let raiser = Arc::new(Raiser::new(lane.clone(), 0).publishing(Lane::new(&Arc::new(published), LANE)));
        let signalling = Arc::new(Streams::default());
        let door = Door {
            device: device.clone(),
            raiser: raiser.clone(),
            signalling: signalling.clone(),
            drafts: Mutex::default(),
            published: fd,
        };
        let at = Address { domain, name: &name, kind: Kind::Timeline };
        let keeper = Keeper::open(&at, Admission::default(), Arc::new(door))?;
        let role = Role::Owner { keeper: Some(keeper), raiser };
        Ok(Timeline::assemble(name.to_string(), device, watcher, lane, signalling, role))
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
        let (watcher, pid) = (visitor.watcher().clone(), visitor.pid());
        let [lane, published] = share_pages(gift, device, name.as_str())?;
        let mourner = Arc::new(Mourner { lane: lane.clone(), published, is_over: AtomicBool::new(false) });
        let settled = visitor.listen(mourner.clone()).and_then(|()| visitor.ask(&encode(&Sealed)?, ANSWER_TIMEOUT));
        if let Err(error) = settled {
            // Not dropped here: to unregister memory, a driver may wait for a stream that waits for a peer.
            watcher.bury(Box::new((visitor, mourner, lane)));
            return Err(error);
        }
        let role = Role::Guest { visitor: Some(visitor), mourner, pid };
        Ok(Timeline::assemble(name.to_string(), device, watcher, lane, Arc::default(), role))
    }

    fn assemble(
        name: String,
        device: &Device,
        watcher: Arc<Watcher>,
        lane: Lane,
        signalling: Arc<Streams>,
        role: Role,
    ) -> Timeline {
        let (device, waiting) = (device.clone(), Arc::default());
        Timeline { name, device, home: Home::here(), watcher, lane, signalling, waiting, role }
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
    /// [`VALUE_MAX`](Self::VALUE_MAX), or for a stream of another device; [`Error::Capturing`] for one that is being
    /// captured; [`Error::Timeout`] after 10 s in which the driver holds up another thread's signal (its stream's launch
    /// queue is full); [`Error::Driver`].
    pub fn signal(&self, stream: &Stream, value: u64) -> Result<()> {
        self.home.check()?;
        let raiser = self.raiser()?;
        stream.check_usable(&self.device)?;
        raiser.raise(stream, &self.signalling, |last| self.above(value, last)).map(drop)
    }

    /// Signals `value` now, from the CPU.
    ///
    /// # Errors
    /// As for [`signal`](Self::signal), and [`Error::SignalPending`] while a stream has yet to signal an earlier value.
    pub fn signal_now(&self, value: u64) -> Result<()> {
        self.home.check()?;
        self.raiser()?.raise_now(|last, reached| self.above_reached(value, last, reached))
    }

    /// [`signal`](Self::signal), or without a stream [`signal_now`](Self::signal_now), unless another thread's signal is
    /// under way: then false, and nothing was done. See [`wait_for_turn`](Self::wait_for_turn).
    ///
    /// # Errors
    /// As for these, without the timeout.
    pub fn try_signal(&self, stream: Option<&Stream>, value: u64) -> Result<bool> {
        self.home.check()?;
        let raiser = self.raiser()?;
        let raised = match stream {
            Some(stream) => {
                stream.check_usable(&self.device)?;
                raiser.try_raise(stream, &self.signalling, |last| self.above(value, last))?.map(drop)
            }
            None => raiser.try_raise_now(|last, reached| self.above_reached(value, last, reached))?,
        };
        Ok(raised.is_some())
    }

    /// Waits until no other thread's signal is under way, at most `timeout`, and says whether that is so.
    ///
    /// # Errors
    /// [`Error::NotOwner`], [`Error::Forked`].
    pub fn wait_for_turn(&self, timeout: Duration) -> Result<bool> {
        self.home.check()?;
        Ok(self.raiser()?.wait_for_turn(timeout))
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
    /// [`Error::Capturing`] for one that is being captured; [`Error::Driver`].
    pub fn wait(&self, stream: &Stream, value: u64) -> Result<()> {
        self.home.check()?;
        stream.check_usable(&self.device)?;
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
            mourner.end();
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

    fn above_reached(&self, value: u64, last: u64, reached: u64) -> Result<u64> {
        if reached < last {
            return Err(Error::SignalPending { name: self.name.clone(), value, last, reached });
        }
        self.above(value, last)
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
            if let Role::Owner { keeper, raiser } = &mut self.role {
                std::mem::forget((keeper.take(), raiser.clone()));
            }
            if let Role::Guest { visitor, .. } = &mut self.role {
                std::mem::forget(visitor.take());
            }
            return std::mem::forget(self.lane.clone());
        }
        let (signalling, waiting) = (self.signalling.clone(), self.waiting.clone());
        match &mut self.role {
            Role::Owner { keeper, raiser } => {
                drop(keeper.take());
                close(&self.watcher, raiser.clone(), signalling, waiting);
            }
            Role::Guest { visitor, .. } => leave(&self.watcher, self.lane.clone(), visitor.take(), waiting),
        }
    }
}

/// An owner's end: first what its streams have yet to signal, then the word of its end, then the memory.
fn close(watcher: &Watcher, raiser: Arc<Raiser>, signalling: Arc<Streams>, waiting: Arc<Streams>) {
    let (mut signalled, mut waited, mut has_ended) = (None, None, false);
    watcher.retire(move || {
        let is_caught_up = raiser.catch_up();
        if !passed(&mut signalled, &signalling) || !is_caught_up {
            return Usage::Busy;
        }
        if !std::mem::replace(&mut has_ended, true) {
            raiser.end();
        }
        if !passed(&mut waited, &waiting) {
            return Usage::Busy;
        }
        if Arc::strong_count(&raiser) > 1 { Usage::Held } else { Usage::Over }
    });
}

/// A guest's end. The visit goes on for as long as a stream of ours may wait: its watcher is who lets it go.
fn leave(watcher: &Watcher, lane: Lane, mut visitor: Option<Visitor>, waiting: Arc<Streams>) {
    let mut waited = None;
    watcher.retire(move || {
        if !passed(&mut waited, &waiting) {
            return Usage::Busy;
        }
        drop(visitor.take());
        if Arc::strong_count(lane.page()) > 1 { Usage::Held } else { Usage::Over }
    });
}

fn passed(proof: &mut Option<Proof>, streams: &Streams) -> bool {
    proof.get_or_insert_with(|| streams.mark()).is_passed()
}

/// Maps the page that the owner made for this process alone, and seals it, so that no other process maps it; and the one
/// that the owner publishes.
fn share_pages(gift: Gift, device: &Device, name: &str) -> Result<[Lane; 2]> {
    let (grant, [fd, published]) = gift.open::<Grant, 2>(name)?;
    let bytes = usize::try_from(grant.bytes).unwrap_or(usize::MAX);
    let published = Page::read(published, bytes, name)?;
    let own = Draft::open(fd, bytes, name)?.close(device, name)?;
    Ok([own, published].map(|page| Lane::new(&Arc::new(page), LANE)))
}

/// Gives a page of its own to each guest.
struct Door {
    device: Device,
    raiser: Arc<Raiser>,
    signalling: Arc<Streams>,
    published: PrivateFd,
    /// Pages that their guests have not sealed.
    drafts: Mutex<HashMap<u64, Draft>>,
}

impl Door {
    fn drafts(&self) -> MutexGuard<'_, HashMap<u64, Draft>> {
        self.drafts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Signals a guest no more, and lets its page go behind what was enqueued for it. Should the guest live, its streams
    /// are let go.
    fn show_out(&self, desk: &Desk, caller: &Caller) {
        self.drafts().remove(&caller.id);
        let Some(copy) = self.raiser.remove(caller.id) else { return };
        let (raiser, streams, mut proof) = (self.raiser.clone(), self.signalling.clone(), None);
        desk.watcher().retire(move || {
            // Before the proof: a signal that is on its way to a stream holds it.
            if Arc::strong_count(copy.page()) > 1 {
                return Usage::Held;
            }
            if !passed(&mut proof, &streams) {
                return Usage::Busy;
            }
            copy.end_at(raiser.own().value());
            Usage::Over
        });
    }
}

impl Keep for Door {
    fn admit(&self, _: &Desk, caller: &Caller, _: &[u8]) -> Result<Answer, Refusal> {
        let draft = Draft::create(LANE_BYTES)?;
        let fds = vec![draft.descriptor()?, PrivateFd::duplicate(&self.published)?];
        let answer = Answer::new(&Grant { bytes: draft.bytes() as u64 }, fds)?;
        self.drafts().insert(caller.id, draft);
        Ok(answer)
    }

    fn answer(&self, desk: &Desk, caller: &Caller, body: &[u8]) -> Result<Answer, Refusal> {
        let Sealed = decode(body, desk.name())?;
        let draft = self.drafts().remove(&caller.id).ok_or_else(|| Refusal("it has its page".into()))?;
        let copy = Lane::new(&Arc::new(draft.confirm(&self.device, desk.name())?), LANE);
        if !self.raiser.add(caller.id, &copy) {
            let raiser = self.raiser.clone();
            desk.watcher().retire(move || raiser.catch_up());
        }
        Ok(Answer::default())
    }

    fn suspect(&self, desk: &Desk, caller: &Caller) {
        self.show_out(desk, caller);
    }

    fn holds(&self, _: &Caller) -> bool {
        false
    }

    fn gone(&self, desk: &Desk, caller: &Caller, _: Ending) {
        self.show_out(desk, caller);
    }

    /// On the watcher's thread, which no driver holds up: CPU stores alone.
    fn tick(&self, _: &Desk, _: u64) {
        self.raiser.catch_up();
    }
}

/// Sees the owner's end. On the watcher's thread: CPU stores alone.
struct Mourner {
    lane: Lane,
    published: Lane,
    is_over: AtomicBool,
}

impl Mourner {
    /// The owner is proven dead. Its streams may have come to the guests one after the other: what it published last
    /// counts for all of them.
    fn end(&self) {
        self.lane.end_at(self.published.value());
    }
}

impl Visit for Mourner {
    fn ended(&self, _graceful: bool) {
        self.is_over.store(true, SeqCst);
    }

    fn orphaned(&self) {
        self.proven_dead();
    }

    fn proven_dead(&self) {
        self.is_over.store(true, SeqCst);
        self.end();
    }
}
