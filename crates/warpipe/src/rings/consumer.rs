//! A consumer's memory: the producer's slots and words as mapped here, and its own words.

use std::os::fd::AsFd;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire};
use std::sync::{Arc, Mutex, PoisonError};

use super::layout::{DEPTH_MAX, WORDS_BYTES};
use super::{
    RingEnd, RingGrant, SLOT_UNIT, SLOTS_BYTES_MAX, Side, WordsOffer, gone_offset, take_turns,
};
use crate::backend::{Access, DeviceId, DevicePtr};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::ipc::{ClientSession, SessionObserver, encode};
use crate::memory::region::Region;
use crate::options::Attachment;
use crate::runtime::closer::PeerFd;
use crate::shm::page::SharedPage;

pub(super) struct ConsumerMemory {
    /// Dropped first: that tells the producer that no kernel of this side reads its slots. `None`
    /// once it has been told.
    session: Mutex<Option<ClientSession>>,
    producer: i32,
    slots: Region,
    /// Where the producer spins.
    theirs: Region,
    /// Where this side spins.
    mine: Region,
}

impl ConsumerMemory {
    /// Maps what the producer gives, and brings the words of this side.
    pub(super) fn attach(
        attachment: Attachment<'_>,
        side: &Side,
    ) -> Result<(RingGrant, ConsumerMemory)> {
        let Attachment {
            name,
            device,
            session,
            reply,
            wait,
        } = attachment;
        let name = name.as_str();
        let (grant, [slots, words]) = reply.open::<RingGrant, 2>(name)?;
        check(&grant, &device, name)?;
        check_turns(&grant, &device, session.pid())?;
        let slots = import(&device, slots, grant.slots_bytes, Access::Read, &grant)?;
        let theirs = import(&device, words, grant.words_bytes, Access::ReadWrite, &grant)?;
        let mine = side.allocate(WORDS_BYTES)?;
        session.observe(Arc::new(ProducerEnd {
            page: side.page.clone(),
        }))?;
        let offer = encode(&WordsOffer {
            bytes: mine.bytes(),
            runs_beside: device.backend().runs_beside_other_processes(),
        })?;
        session.request_with(&offer, Some(mine.export()?.as_fd()), wait)?;
        let memory = ConsumerMemory {
            producer: session.pid(),
            session: Mutex::new(Some(session)),
            slots,
            theirs,
            mine,
        };
        Ok((grant, memory))
    }

    pub(super) fn slots(&self) -> DevicePtr {
        self.slots.ptr()
    }

    pub(super) fn theirs(&self) -> DevicePtr {
        self.theirs.ptr()
    }

    pub(super) fn mine(&self) -> DevicePtr {
        self.mine.ptr()
    }

    /// The producer's process.
    pub(super) fn pid(&self) -> i32 {
        self.producer
    }

    /// Tells the producer that the kernels of this side are done.
    pub(super) fn close(&self) {
        let session = self
            .session
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        drop(session);
    }
}

fn import(
    device: &Device,
    fd: PeerFd,
    bytes: u64,
    access: Access,
    grant: &RingGrant,
) -> Result<Region> {
    let region = Region::import(device, &[fd.as_fd()], bytes, access, grant.device)?;
    fd.approve();
    Ok(region)
}

/// Refuses a description that is not of a ring: the kernels of this side index by it.
pub(super) fn check(grant: &RingGrant, device: &Device, name: &str) -> Result<()> {
    let wrong = |field, found, allowed| Err(Error::protocol(name, field, found, allowed));
    let unit = device.backend().granularity();
    if !grant.depth.is_power_of_two() || grant.depth > DEPTH_MAX {
        let allowed = format!("a power of two up to {DEPTH_MAX}");
        return wrong("depth", grant.depth, allowed);
    }
    if grant.slot_bytes == 0 || !grant.slot_bytes.is_multiple_of(SLOT_UNIT) {
        let allowed = format!("a multiple of {SLOT_UNIT}");
        return wrong("bytes of a slot", grant.slot_bytes, allowed);
    }
    let used = grant.depth.saturating_mul(grant.slot_bytes);
    let is_sound = |bytes: u64| bytes.is_multiple_of(unit) && bytes <= 2 * SLOTS_BYTES_MAX;
    if grant.slots_bytes < used || !is_sound(grant.slots_bytes) {
        let allowed = format!("at least {used}, in units of {unit}");
        return wrong("bytes of the slots", grant.slots_bytes, allowed);
    }
    if grant.words_bytes < WORDS_BYTES || !is_sound(grant.words_bytes) {
        let allowed = format!("at least {WORDS_BYTES}, in units of {unit}");
        return wrong("bytes of the words", grant.words_bytes, allowed);
    }
    if grant.spins_max == 0 {
        return wrong("spin limit", 0, "at least 1".into());
    }
    Ok(())
}

/// Whether a consumer on this device, in another process, would take turns with the producer, and
/// the producer has not allowed that.
pub(super) fn takes_turns(grant: &RingGrant, device: DeviceId, runs_beside: bool) -> bool {
    let producer = (grant.device, grant.runs_beside);
    take_turns(producer, (device, runs_beside)) && !grant.allows_time_slices
}

/// Refuses a GPU on which the two processes would take turns.
fn check_turns(grant: &RingGrant, device: &Device, producer: i32) -> Result<()> {
    let is_another = producer as u32 != std::process::id();
    let runs_beside = device.backend().runs_beside_other_processes();
    if !is_another || !takes_turns(grant, device.info().id, runs_beside) {
        return Ok(());
    }
    Err(Error::argument(
        "device",
        format!(
            "{device}, on which this process and the producer (process {producer}) run in time slices"
        ),
        "another GPU, or this one under MPS with both processes its clients, or a ring of \
         a producer that allows time slices, where a kernel that waits uses up its slice",
    ))
}

/// Says to the kernels of this side that the producer has ended. Runs on the reactor's thread: CPU
/// stores alone.
struct ProducerEnd {
    page: Arc<SharedPage>,
}

impl ProducerEnd {
    fn set(&self, end: RingEnd) {
        let gone: &AtomicU64 = self.page.at(gone_offset(0));
        // A graceful close stays one.
        let _ = gone.compare_exchange(0, end as u64, AcqRel, Acquire);
    }
}

impl SessionObserver for ProducerEnd {
    fn on_closed(&self, is_graceful: bool) {
        if is_graceful {
            self.set(RingEnd::Closed);
        }
    }

    fn on_orphaned(&self) {
        self.set(RingEnd::Died);
    }
}
