//! Kernel rings: kernels of two processes hand items over without a CPU
//! (`docs/design/kernel-rings.md`).
//!
//! * [`layout`]: the table of the parameter block, from which the header's is written;
//! * [`host_ring`]: one side on the CPU; `include/warpipe/device.cuh` on a GPU;
//! * [`steps`]: the two kernels of a ring on a stream;
//! * [`server`]: the producer's memory, and its consumers; [`consumer`]: theirs.

mod consumer;
mod host_ring;
#[cfg_attr(not(test), allow(dead_code, reason = "the header is written by xtask"))]
mod layout;
#[cfg(all(loom, not(miri)))]
#[path = "../../../../verify/src/models/kernel_ring.rs"]
pub mod model;
mod server;
mod steps;
#[cfg(test)]
mod tests;

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use self::consumer::ConsumerMemory;
pub use self::host_ring::{HostRing, RingEnd};
use self::layout::{CONSUMERS_MAX, DEPTH_MAX, block, peer};
use self::server::{OwnedPlaces, ProducerMemory, RingServer};
pub use self::steps::RING_STEPS;
use crate::backend::{DeviceId, DeviceKind, DevicePtr};
use crate::debug::opaque_debug;
use crate::device::Device;
use crate::error::{Error, Result, StateFault};
use crate::fork::OwnerProcess;
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::{AccessPolicy, Kind};
use crate::memory::region::Region;
use crate::options::{Attachment, OpenOptions, chosen_device, in_domain, serve};
use crate::runtime::drop_after_fence::DropAfterFence;
use crate::runtime::fence::StreamSet;
use crate::shm::page::SharedPage;
use crate::stream::Stream;
use crate::wait::Wait;

/// A slot's length is a multiple of this.
const SLOT_UNIT: u64 = 128;
/// The most bytes of a ring's slots.
const SLOTS_BYTES_MAX: u64 = 1 << 40;
/// Looks at a word between two at the words that the reactor writes, which lie in host memory.
const LOOK_EVERY: u64 = 1024;
/// Looks at a word after which a wait ends, by default.
const SPIN_LIMIT: u64 = 1 << 26;
/// How long the copy of a parameter block may take.
const UPLOAD_TIMEOUT: Duration = Duration::from_secs(10);

/// The producer's description of the ring. Descriptors: the slots, and the words on which the
/// producer spins for this consumer.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct RingGrant {
    depth: u64,
    slot_bytes: u64,
    slots_bytes: u64,
    words_bytes: u64,
    spins_max: u64,
    device: DeviceId,
    /// Whether the producer's kernels run beside those of other processes on its device.
    runs_beside: bool,
    allows_time_slices: bool,
}

/// A consumer's words, on which it spins. Descriptor: their memory.
#[derive(Debug, Serialize, Deserialize)]
struct WordsOffer {
    bytes: u64,
    /// Whether the consumer's kernels run beside those of other processes on its device.
    runs_beside: bool,
}

crate::ipc::messages!(RingGrant, WordsOffer);

/// The device of one side's kernels, and whether they run there beside those of other processes.
type Seat = (DeviceId, bool);

/// Whether the kernels of two processes would run in time slices.
fn take_turns((device, runs_beside): Seat, (other, beside): Seat) -> bool {
    device.kind == DeviceKind::Cuda && device == other && !(runs_beside && beside)
}

/// The options of a [`KernelRing`].
#[derive(Debug, Clone)]
pub struct KernelRingOptions {
    /// The domain of its name; the environment's by default.
    pub domain: Option<Domain>,
    /// The device of the producer's kernels, on which the slots lie; [`Device::preferred`] by
    /// default.
    pub device: Option<Device>,
    /// The number of slots, a power of two up to 1024; 8 by default.
    pub depth: u32,
    /// The bytes of a slot, rounded up to a multiple of 128; 4096 by default.
    pub slot_bytes: u64,
    /// The number of consumers, 1 to 8, each of which gets every item; 1 by default.
    pub consumers: u32,
    /// How often a kernel looks at a word before its wait ends, 2^26 by default: a bound on every
    /// wait, also where a peer is stopped and not dead. A number of looks, not a time.
    pub spin_limit: u64,
    /// Lets two of the ring's processes use one GPU without MPS. Their kernels then take turns in
    /// time slices, and a kernel that waits uses up its slice. Not by default.
    pub allow_time_slices: bool,
    /// Admits these users beside this process's own. The domain directory must admit them, too.
    pub allow_uids: Vec<u32>,
    /// Admits processes with one of these as their effective group. The kernel reports no
    /// supplementary groups of a peer, so those do not count.
    pub allow_gids: Vec<u32>,
}

in_domain!(KernelRingOptions, device);

impl Default for KernelRingOptions {
    fn default() -> KernelRingOptions {
        KernelRingOptions {
            domain: None,
            device: None,
            depth: 8,
            slot_bytes: 4096,
            consumers: 1,
            spin_limit: SPIN_LIMIT,
            allow_time_slices: false,
            allow_uids: Vec::new(),
            allow_gids: Vec::new(),
        }
    }
}

impl KernelRingOptions {
    /// The bytes of a slot, once all options are in range.
    fn checked_slot_bytes(&self) -> Result<u64> {
        let wrong =
            |argument, found: u64, allowed: &str| Err(Error::argument(argument, found, allowed));
        let depth = u64::from(self.depth);
        if !depth.is_power_of_two() || depth > DEPTH_MAX {
            return wrong("depth", depth, "a power of two, 1 to 1024");
        }
        if !(1..=CONSUMERS_MAX).contains(&self.consumers.into()) {
            return wrong("consumers", self.consumers.into(), "1 to 8");
        }
        if self.spin_limit == 0 {
            return wrong("spin_limit", 0, "at least 1");
        }
        let slot_bytes = self.slot_bytes.checked_next_multiple_of(SLOT_UNIT);
        match slot_bytes {
            Some(bytes) if bytes > 0 && bytes.saturating_mul(depth) <= SLOTS_BYTES_MAX => Ok(bytes),
            _ => wrong("slot_bytes", self.slot_bytes, "1 to 2^40 in all slots"),
        }
    }
}

impl KernelRing {
    fn consume(attachment: Attachment<'_>) -> Result<KernelRing> {
        let (name, device) = (attachment.name.clone(), attachment.device.clone());
        let side = Side::new(&device)?;
        let (grant, memory) = ConsumerMemory::attach(attachment, &side)?;
        let words = [
            (block::ROLE, layout::CONSUMER),
            (block::PEERS, 1),
            (block::SLOTS, memory.slots()),
            (block::PEER + peer::MINE, memory.mine()),
            (block::PEER + peer::THEIRS, memory.theirs()),
        ];
        let ring = KernelRing::of_memory(
            &name,
            device,
            side,
            &grant,
            RingMemory::Consumer(memory.into()),
        )?;
        ring.write_block(&words)?;
        Ok(ring)
    }
}

/// The part of a ring's memory that both sides have: the parameter block, and words of this process
/// in host memory, which its reactor writes without the driver.
struct Side {
    device: Device,
    block: Region,
    page: Arc<SharedPage>,
}

/// Offsets in the host page, a line each.
const STOP: usize = 0;
const STATUS: usize = 128;
const GONE: usize = 256;

fn gone_offset(peer: usize) -> usize {
    GONE + 128 * peer
}

impl Side {
    fn new(device: &Device) -> Result<Side> {
        device.backend().preload(&steps::WAIT)?;
        device.backend().preload(&steps::PASS)?;
        let bytes = gone_offset(CONSUMERS_MAX as usize);
        Ok(Side {
            device: device.clone(),
            block: allocate(device, block::BYTES)?,
            page: Arc::new(SharedPage::private(device, bytes)?),
        })
    }

    fn allocate(&self, bytes: u64) -> Result<Region> {
        allocate(&self.device, bytes)
    }

    fn device_ptr(&self, offset: usize) -> u64 {
        self.page.device_ptr(offset).unwrap_or_default()
    }
}

/// A region of whole units.
fn allocate(device: &Device, bytes: u64) -> Result<Region> {
    let unit = device.backend().granularity();
    let whole = bytes.checked_next_multiple_of(unit);
    let whole =
        whole.ok_or_else(|| Error::argument("slot_bytes", bytes, "what an address can count"))?;
    Region::allocate(device, whole)
}

/// What [`KernelRing::info`] reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RingInfo {
    /// The number of slots.
    pub depth: u64,
    /// The bytes of a slot.
    pub slot_bytes: u64,
    /// Whether this side writes the items.
    pub is_producer: bool,
}

/// A ring that kernels of two processes use from inside: the producer's kernel writes a slot and
/// publishes it, the consumers' kernels wait for it and release it, with no launch, no stream
/// operation and no CPU between items.
///
/// Kernels include [`warpipe/device.cuh`](Self::HEADER) and get [`params`](Self::params) as an
/// argument; [`HostRing`] is the same for kernels on the CPU. Or two tiny kernels on a stream do
/// it: [`wait_on`](Self::wait_on), and [`publish_on`](Self::publish_on) or
/// [`release_on`](Self::release_on). Their position advances in device memory.
///
/// A wait of a kernel ends when the peer has closed the ring or is proven dead, when this side
/// [stops](Self::stop), and after [a number of looks](KernelRingOptions::spin_limit).
///
/// Both kernels must run at the same time: on two GPUs, or on one under MPS, where a client that is
/// killed in the middle of a kernel ends all clients. Without MPS the processes of one GPU take
/// turns in time slices, and [`open`](Self::open) refuses that.
///
/// ```
/// use std::time::Duration;
/// use warpipe::{Device, Domain, KernelRing, KernelRingOptions};
/// # let folder = std::env::temp_dir().join(format!("warpipe-ring-{}", std::process::id()));
/// # let (domain, device) = (Domain::at(&folder)?, Device::host());
/// let limit = Duration::from_secs(10);
/// let producer = KernelRing::new("frames", domain.on(&device))?;
/// // In another process, as a rule:
/// let consumer = KernelRing::open("frames", domain.on(&device), Duration::ZERO)?;
/// producer.wait_for_consumers(limit)?;
///
/// let (writing, reading) = (device.stream()?, device.stream()?);
/// producer.wait_on(&writing)?; // until the next slot is free
/// producer.publish_on(&writing)?; // behind the work that writes it
/// consumer.wait_on(&reading)?; // until the next item is there
/// consumer.release_on(&reading)?; // behind the work that reads it
/// reading.synchronize(limit)?;
/// consumer.check()?; // an error if a wait ended without its item
/// # drop((consumer, producer)); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
pub struct KernelRing {
    name: String,
    device: Device,
    depth: u64,
    slot_bytes: u64,
    spins_max: u64,
    slots: DevicePtr,
    owner_process: OwnerProcess,
    page: Arc<SharedPage>,
    held: DropAfterFence<Held>,
}

/// All that the ring's kernels use, and the session, which says to the peer that they are done.
/// Dropped when they are.
struct Held {
    memory: RingMemory,
    side: Side,
}

enum RingMemory {
    Producer(ProducerMemory),
    Consumer(Box<ConsumerMemory>),
}

impl RingMemory {
    fn close(&self) {
        match self {
            RingMemory::Producer(memory) => memory.close(),
            RingMemory::Consumer(memory) => memory.close(),
        }
    }
}

impl KernelRing {
    /// The text of `warpipe/device.cuh`, for NVRTC; the file lies in this crate's `include/`.
    pub const HEADER: &str = include_str!("../../include/warpipe/device.cuh");

    /// Creates the ring, takes its name (free again when the ring was dropped and its kernels are
    /// done), and allocates its memory on the device: the slots, and one unit of the device's memory
    /// (2 MiB on CUDA) for the parameters and for each consumer.
    ///
    /// # Errors
    /// [`Error::Argument`], [`Error::Name`], or an error of the device or the
    /// system. An error leaves nothing behind.
    pub fn new(name: &str, options: KernelRingOptions) -> Result<KernelRing> {
        let name = EndpointName::new(name)?;
        let slot_bytes = options.checked_slot_bytes()?;
        let device = chosen_device(&options.device);
        let side = Side::new(&device)?;
        let depth = options.depth.into();
        let slots = side.allocate(depth * slot_bytes)?;
        let grant = RingGrant {
            depth,
            slot_bytes,
            slots_bytes: slots.bytes(),
            words_bytes: 0,
            spins_max: options.spin_limit,
            device: device.info().id,
            runs_beside: device.backend().runs_beside_other_processes(),
            allows_time_slices: options.allow_time_slices,
        };
        let ring_server = Arc::new(RingServer::new(
            &device,
            side.page.clone(),
            grant.clone(),
            &slots,
            options.consumers,
        )?);
        let access = AccessPolicy::of(options.allow_uids, options.allow_gids);
        let served = ring_server.clone();
        let ends = serve(&options.domain, &name, Kind::KernelRing, access, served)?;
        let memory = RingMemory::Producer(ProducerMemory {
            server: Mutex::new(Some(ends)),
            ring_server: OwnedPlaces(ring_server),
            slots,
        });
        KernelRing::of_memory(&name, device, side, &grant, memory)
    }

    /// Opens the ring of this name as a consumer. Its memory on the consumer's device is two units
    /// (2 MiB each on CUDA), for the words on which the consumer's kernels spin and for the
    /// parameters.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Name`], [`Error::Refused`], [`Error::Handshake`],
    /// [`Error::Timeout`], [`Error::Protocol`]; [`Error::Refused`] by a ring that has its
    /// consumers, has started, or has one of another process on this GPU without MPS;
    /// [`Error::Argument`] for the producer's GPU without MPS, where the two would take turns in
    /// time slices; or an error of the device or the system.
    pub fn open<'w>(
        name: &str,
        options: OpenOptions,
        wait: impl Into<Wait<'w>>,
    ) -> Result<KernelRing> {
        options.open(name, Kind::KernelRing, wait, KernelRing::consume)
    }

    fn of_memory(
        name: &EndpointName,
        device: Device,
        side: Side,
        grant: &RingGrant,
        memory: RingMemory,
    ) -> Result<KernelRing> {
        let slots = match &memory {
            RingMemory::Producer(memory) => memory.slots.ptr(),
            RingMemory::Consumer(memory) => memory.slots(),
        };
        let page = side.page.clone();
        Ok(KernelRing {
            name: name.to_string(),
            device,
            depth: grant.depth,
            slot_bytes: grant.slot_bytes,
            spins_max: grant.spins_max,
            slots,
            owner_process: OwnerProcess::current(),
            page,
            held: DropAfterFence::new(Arc::<StreamSet>::default(), Held { memory, side })?,
        })
    }

    /// What both sides agree on.
    pub fn info(&self) -> RingInfo {
        RingInfo {
            depth: self.depth,
            slot_bytes: self.slot_bytes,
            is_producer: matches!(self.held.memory, RingMemory::Producer(_)),
        }
    }

    /// The address of the slot in which the items `index`, `index + depth` and so on lie, for work
    /// behind [`wait_on`](Self::wait_on). A consumer may only read it.
    ///
    /// # Errors
    /// [`Error::Argument`] from [`depth`](RingInfo::depth) on.
    pub fn slot(&self, index: u64) -> Result<DevicePtr> {
        if index >= self.depth {
            let allowed = format!("below {}", self.depth);
            return Err(Error::argument("slot", index, allowed));
        }
        Ok(self.slots + index * self.slot_bytes)
    }

    /// The producer: waits on the CPU until every consumer has opened the ring, which then starts.
    /// No other consumer is admitted from then on, also in place of one that ends. A consumer need
    /// not call it.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::State`], [`Error::Driver`].
    pub fn wait_for_consumers<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<()> {
        self.owner_process.check()?;
        let RingMemory::Producer(memory) = &self.held.memory else {
            return Ok(());
        };
        memory
            .ring_server
            .0
            .start(&wait.into(), &self.name, |consumers| {
                let mut words = vec![
                    (block::ROLE, layout::PRODUCER),
                    (block::PEERS, consumers.len() as u64),
                    (block::SLOTS, self.slots),
                ];
                for (index, &(mine, theirs)) in (0..).zip(consumers) {
                    let at = block::PEER + index * peer::BYTES;
                    words.push((at + peer::MINE, mine));
                    words.push((at + peer::THEIRS, theirs));
                }
                self.write_block(&words)
            })
    }

    /// Writes the parameter block, the words of all rings and `words`.
    fn write_block(&self, words: &[(u64, u64)]) -> Result<()> {
        let side = &self.held.side;
        let common = [
            (block::LAYOUT, layout::LAYOUT),
            (block::DEPTH, self.depth),
            (block::SLOT_BYTES, self.slot_bytes),
            (block::SPINS_MAX, self.spins_max),
            (block::LOOK_EVERY, LOOK_EVERY),
            (block::STOP, side.device_ptr(STOP)),
            (block::STATUS, side.device_ptr(STATUS)),
        ];
        let gone = (0..CONSUMERS_MAX).map(|index| {
            let offset = block::PEER + index * peer::BYTES + peer::GONE;
            (offset, side.device_ptr(gone_offset(index as usize)))
        });
        let mut bytes = [0; block::CURSOR as usize];
        for (offset, value) in common.into_iter().chain(gone).chain(words.iter().copied()) {
            bytes[offset as usize..][..8].copy_from_slice(&value.to_ne_bytes());
        }
        let stream = self.device.stream()?;
        self.held.streams().record_use(&stream);
        // SAFETY: the block is longer, lives until this stream is past the copy, and no kernel has
        // its address yet.
        unsafe { stream.upload(side.block.ptr(), &bytes)? };
        stream.synchronize(UPLOAD_TIMEOUT)
    }

    /// The address of the parameter block, which kernels on `stream` give to `warpipe_ring_open`.
    /// The ring's memory lives until `stream` is past the work that it has when the ring is
    /// dropped; a kernel of the ring on any other stream needs a call of its own. A stream that
    /// launches a graph with the ring's steps needs one, too.
    ///
    /// # Errors
    /// [`Error::Argument`] for a stream of another device, and for a producer before
    /// [`wait_for_consumers`](Self::wait_for_consumers); [`Error::State`].
    pub fn params(&self, stream: &Stream) -> Result<DevicePtr> {
        self.owner_process.check()?;
        stream.check_of(&self.device)?;
        if let RingMemory::Producer(memory) = &self.held.memory
            && !memory.ring_server.0.has_started()
        {
            let allowed = "one with consumers that wait_for_consumers has waited for";
            return Err(Error::argument("ring", &self.name, allowed));
        }
        self.held.streams().record_use(stream);
        Ok(self.held.side.block.ptr())
    }

    /// Whether every wait of a [`wait_on`](Self::wait_on) that the device has finished was given
    /// its item. Synchronize the stream first.
    ///
    /// # Errors
    /// [`Error::PeerGone`] for a consumer of a producer that has ended; [`StateFault::LinkClosed`]
    /// for a producer without consumers, after [`stop`](Self::stop), and after the limit of looks.
    pub fn check(&self) -> Result<()> {
        self.owner_process.check()?;
        match RingEnd::of_status(self.page.at::<AtomicU64>(STATUS).load(Acquire)) {
            None => Ok(()),
            Some(end) => Err(self.ended(end)),
        }
    }

    fn ended(&self, end: RingEnd) -> Error {
        let closed = |reason: String| {
            let (kind, name) = (Kind::KernelRing, self.name.clone());
            Error::State(StateFault::LinkClosed { kind, name, reason })
        };
        let is_graceful = end == RingEnd::Closed;
        match (end, &self.held.memory) {
            (RingEnd::Closed | RingEnd::Died | RingEnd::Orphaned, RingMemory::Consumer(memory)) => {
                Error::peer_gone(Kind::KernelRing, &*self.name, memory.pid(), is_graceful)
            }
            (RingEnd::Closed | RingEnd::Died | RingEnd::Orphaned, RingMemory::Producer(_)) => {
                closed(format!("its consumers have ended ({end:?})"))
            }
            (RingEnd::Stopped, _) => closed("this side has stopped it".into()),
            (RingEnd::SpinLimit, _) => closed(format!(
                "a wait took more than {} looks, the spin_limit of its producer",
                self.spins_max
            )),
            (RingEnd::WrongLayout, _) => closed("its kernels are of another version".into()),
        }
    }

    /// Has the kernels of this side return from their waits, from now on: at once where they wait,
    /// else within 256 items for each block. The drop of the ring does so, too, and tells the peer
    /// when they are done.
    pub fn stop(&self) {
        if self.owner_process.is_current() {
            self.page.at::<AtomicU64>(STOP).store(1, Release);
        }
    }
}

impl Drop for KernelRing {
    fn drop(&mut self) {
        self.stop();
        // Where its kernels are done, the peer is told here: the process may end right behind this,
        // which would look like a death. Otherwise the reaper tells it.
        if self.owner_process.is_current() && self.held.streams().fence_busy().is_reached() {
            self.held.memory.close();
        }
    }
}

opaque_debug!(KernelRing { name; info });
