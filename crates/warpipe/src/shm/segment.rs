//! The link segment: the memory that both ends of a link map. **This module is marked for unsafe.**
//!
//! A sealed memfd with one ring, or two: a header page, then `depth` entries. The publisher makes
//! and maps it, the subscriber maps and seals it, and each registers its mapping behind the [seal]
//! alone. The second ring, of a link with *replies*, goes the other way, from the subscriber to the
//! publisher. The rings hold only atomics, because the other process may write any byte at any
//! time. A value read from here is *untrusted*: it proves nothing until it has been copied once and
//! the copy has been checked (see [`entry`](crate::pubsub::entry)).
//!
//! `docs/design/protocol.md` draws it byte by byte; the offsets are asserted below.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use std::arch::asm;
use std::mem::offset_of;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, OnceLock};

use super::page::{PAGES_BYTES_MAX, SharedPage};
use super::seal;
use crate::atomic::{AtomicU32, AtomicU64};
use crate::backend::{DevicePtr, TimelineWord};
use crate::device::Device;
use crate::error::{Error, HandshakeFault, Result};
use crate::fork::CloseOnForkFd;

/// `WARPLINK`, little endian.
const MAGIC: u64 = u64::from_le_bytes(*b"WARPLINK");

/// The version of the layout, and of the handshake.
pub(crate) const VERSION: u16 = 13;

/// The most entries a ring may have.
pub(crate) const DEPTH_MAX: u32 = 4096;

/// The most bytes of metadata that travel with a sample.
pub(crate) const META_BYTES_MAX: usize = 4096;

/// The most of them that travel in its entry. More lie in the entry's [cell](MetaCell).
pub(crate) const ENTRY_META_BYTES_MAX: usize = 256;

/// The long metadata of one entry: entry `i` has cell `i` of the link's *metadata page*, which its
/// publisher makes for the first sample that needs it.
pub(crate) type MetaCell = [AtomicU64; META_BYTES_MAX / 8];

const _: () = assert!(DEPTH_MAX as usize * META_BYTES_MAX <= PAGES_BYTES_MAX);

/// The first page of the segment. Each group has one writer and a pair of cache lines of its own.
#[repr(C)]
pub(crate) struct Header {
    magic: AtomicU64,
    version: AtomicU32,
    depth: AtomicU32,
    generation: [AtomicU64; 2],
    _identity: [AtomicU64; 12],
    /// Written by the sender.
    pub(crate) sender: SenderWords,
    /// Written by the receiver.
    pub(crate) receiver: ReceiverWords,
    _reserved: [AtomicU64; 432],
}

/// Words that only the sender writes.
#[repr(C)]
pub(crate) struct SenderWords {
    /// `CLOCK_MONOTONIC` nanoseconds of the sender's last heartbeat.
    pub(crate) heartbeat_ns: AtomicU64,
    /// Samples that this receiver did not get because of its policy.
    pub(crate) dropped: AtomicU64,
    _reserved: [AtomicU64; 30],
}

/// Words that only the receiver writes.
#[repr(C)]
pub(crate) struct ReceiverWords {
    /// `CLOCK_MONOTONIC` nanoseconds of the receiver's last heartbeat.
    pub(crate) heartbeat_ns: AtomicU64,
    _reserved: [AtomicU64; 15],
    /// 1 while the receiver sleeps and wants to be woken by a sample.
    pub(crate) asleep: AtomicU32,
    _pad: AtomicU32,
    _line: [AtomicU64; 15],
}

/// One entry of the ring.
#[repr(C)]
pub(crate) struct Entry {
    /// Owner and state: `position << 2 | state`. The one word with two writers, by
    /// compare-and-swap.
    pub(crate) state_word: AtomicU64,
    /// The publisher's sequence number.
    pub(crate) sequence: AtomicU64,
    /// Reaches the position when the sample's data is complete. Written by the sender's stream (or,
    /// after the sender's proven death, by the receiver's reactor).
    pub(crate) ready: TimelineWord,
    /// The rest of the description, as [`entry`](crate::pubsub::entry) packs it.
    pub(crate) words: [AtomicU64; 58],
    /// The positions of this entry that the sender gave up, as far back as the word reaches: see
    /// [`was_given_up`](crate::pubsub::ring::was_given_up). Written before `aborted`.
    pub(crate) given_up: AtomicU64,
    /// The last position that the sender will never complete the data of, although it lives.
    /// Written before `ready`.
    pub(crate) aborted: AtomicU64,
    /// Reaches the position when the receiver's work on the sample is done. Written by the
    /// receiver's stream.
    pub(crate) released: TimelineWord,
    /// The last position that the receiver [set aside](crate::pubsub::ring::set_aside). Written
    /// before `released`.
    pub(crate) set_aside: AtomicU64,
    _reserved: [AtomicU64; 13],
}

/// The length of a segment, in bytes; `replies` is 0 for one without a second ring.
fn bytes_of_rings(depth: u32, replies: u32) -> u64 {
    let second = if replies > 0 { bytes_for(replies) } else { 0 };
    bytes_for(depth) + second
}

/// The header's size.
const HEADER_BYTES: usize = 4096;

const _: () = {
    assert!(size_of::<Header>() == HEADER_BYTES);
    assert!(offset_of!(Header, generation) == 16);
    assert!(offset_of!(Header, sender) == 128 && offset_of!(Header, receiver) == 384);
    assert!(offset_of!(SenderWords, dropped) == 8 && offset_of!(ReceiverWords, asleep) == 128);
    assert!(size_of::<Entry>() == 640);
    assert!(offset_of!(Entry, sequence) == 8 && offset_of!(Entry, ready) == 16);
    assert!(
        offset_of!(Entry, words) == 32
            && offset_of!(Entry, given_up) == 496
            && offset_of!(Entry, aborted) == 504
    );
    assert!(offset_of!(Entry, released) == 512 && offset_of!(Entry, set_aside) == 528);
};

/// The length of a ring with `depth` entries, in bytes: whole pages.
pub(crate) fn bytes_for(depth: u32) -> u64 {
    (HEADER_BYTES + depth as usize * size_of::<Entry>()).next_multiple_of(4096) as u64
}

/// One ring of a mapped link segment, which is registered with the device once it is sealed. The
/// last ring that is dropped unregisters and unmaps it.
///
/// In this order in memory: what a send reads of each link lies together.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Segment {
    /// Where the ring begins: in this process, and, from the first use of a word there on, on the
    /// device.
    base: *mut u8,
    device_base: OnceLock<DevicePtr>,
    depth: u32,
    page: Arc<SharedPage>,
    device: Device,
}

// SAFETY: `base` points into the page, shared memory made of atomics only, at a fixed address for
// as long as self.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

/// The rings of a link: that of its samples, and that of the replies if it has one.
pub(crate) type Rings = (Segment, Option<Segment>);

impl Segment {
    /// Makes a segment with one ring: see [`create_rings`](Self::create_rings).
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn create(
        device: &Device,
        depth: u32,
        generation: [u8; 16],
    ) -> Result<(Segment, CloseOnForkFd)> {
        let ((samples, _), fd) = Segment::create_rings(device, depth, 0, generation)?;
        Ok((samples, fd))
    }

    /// Makes a segment: `memfd_create`, `ftruncate`, the seals of its size, `mmap`. Returns its
    /// rings and the descriptor for the peer, which seals it. No stream may use it before
    /// [`register`](Self::register).
    pub(crate) fn create_rings(
        device: &Device,
        depth: u32,
        replies: u32,
        generation: [u8; 16],
    ) -> Result<(Rings, CloseOnForkFd)> {
        let bytes = bytes_of_rings(depth, replies);
        let fd = seal::memfd(c"warpipe-link", bytes)?;
        let page = SharedPage::map(fd.as_fd(), bytes as usize)?;
        let rings = Segment::rings(page, device, depth, replies);
        for ring in [Some(&rings.0), rings.1.as_ref()].into_iter().flatten() {
            write_identity(ring.header(), ring.depth, generation);
        }
        Ok((rings, fd))
    }

    /// Maps a segment that a peer made, once it has been checked to be a memfd of the right length
    /// with the right identity. Seals it against holes, and registers it.
    pub(crate) fn open(
        device: &Device,
        fd: BorrowedFd<'_>,
        depth: u32,
        replies: u32,
        generation: [u8; 16],
    ) -> Result<Rings, OpenError> {
        let fault = |found| OpenError::Fault(HandshakeFault::Segment(found));
        for depth in [depth, replies.max(1)] {
            if depth == 0 || depth > DEPTH_MAX {
                return Err(fault(format!("a depth of {depth}")));
            }
        }
        let bytes = bytes_of_rings(depth, replies);
        seal::check(fd, bytes).map_err(fault)?;
        let page = SharedPage::map(fd, bytes as usize).map_err(OpenError::Local)?;
        seal::close(fd).map_err(fault)?;
        let rings = Segment::rings(page, device, depth, replies);
        for ring in [Some(&rings.0), rings.1.as_ref()].into_iter().flatten() {
            check_identity(ring.header(), ring.depth, generation).map_err(OpenError::Fault)?;
        }
        rings.0.register(fd)?;
        Ok(rings)
    }

    /// The rings of a page that is long enough for them.
    fn rings(page: SharedPage, device: &Device, depth: u32, replies: u32) -> Rings {
        let page = Arc::new(page);
        let ring = |offset, depth| Segment {
            base: page.address(offset),
            device_base: OnceLock::new(),
            depth,
            page: page.clone(),
            device: device.clone(),
        };
        let second = (replies > 0).then(|| ring(bytes_for(depth) as usize, replies));
        (ring(0, depth), second)
    }

    /// Registers the mapping with the device, once its file `fd` is seen to be sealed against
    /// holes. From then on the device and the CPUs use the same pages. The driver's call may take a
    /// moment.
    pub(crate) fn register(&self, fd: BorrowedFd<'_>) -> Result<(), OpenError> {
        seal::check_closed(fd).map_err(|found| OpenError::Fault(HandshakeFault::Segment(found)))?;
        self.page.register(&self.device).map_err(OpenError::Local)
    }

    pub(crate) fn depth(&self) -> u32 {
        self.depth
    }

    #[inline]
    pub(crate) fn header(&self) -> &Header {
        // SAFETY: the mapping is long enough for the ring (checked before it is made), the ring is
        // page-aligned, and the mapping lives as long as self; `Header` is atomics only, for which
        // every bit pattern is valid.
        unsafe { &*self.base.cast::<Header>() }
    }

    /// The entry that `position` (from 1) falls on.
    #[inline]
    pub(crate) fn entry(&self, position: u64) -> &Entry {
        self.entry_at(self.index(position))
    }

    /// The length of the link's metadata page, in bytes.
    pub(crate) fn cells_bytes(&self) -> usize {
        self.depth as usize * size_of::<MetaCell>()
    }

    /// The cell of the entry that `position` falls on, in the link's metadata page.
    pub(crate) fn cell<'p>(&self, cells: &'p SharedPage, position: u64) -> &'p MetaCell {
        cells.at(self.index(position) as usize * size_of::<MetaCell>())
    }

    /// The index of the entry that `position` falls on.
    #[inline]
    pub(crate) fn index(&self, position: u64) -> u32 {
        let depth = u64::from(self.depth);
        // Called ten times for each sample: a division each time would be a tenth of the hand-over.
        let index = if depth.is_power_of_two() {
            position & (depth - 1)
        } else {
            position % depth
        };
        index as u32
    }

    #[inline]
    fn entry_at(&self, index: u32) -> &Entry {
        debug_assert!(index < self.depth);
        // SAFETY: index < depth and the mapping holds `depth` entries behind the header,
        // 128-aligned in a page-aligned mapping that lives as long as self; `Entry` is atomics
        // only.
        unsafe {
            &*self
                .base
                .add(HEADER_BYTES)
                .cast::<Entry>()
                .add(index as usize)
        }
    }

    /// Asks this CPU to fetch the lines of `position`'s entry that others have written: the first
    /// one to be written next, and that of `released` to be read. A device's store takes a line out
    /// of the CPU's caches, and the next sender would wait for both, once for each subscriber.
    #[inline]
    pub(crate) fn fetch_early(&self, position: u64) {
        let entry = self.entry(position);
        fetch_to_write(std::ptr::from_ref(entry).cast());
        fetch_to_read(std::ptr::from_ref(&entry.released).cast());
    }

    /// The device address of the `ready` word of `position`'s entry.
    #[inline]
    pub(crate) fn ready_word(&self, position: u64) -> DevicePtr {
        self.word(position, offset_of!(Entry, ready))
    }

    /// The device address of the `released` word of `position`'s entry.
    #[inline]
    pub(crate) fn released_word(&self, position: u64) -> DevicePtr {
        self.word(position, offset_of!(Entry, released))
    }

    #[inline]
    fn word(&self, position: u64, field: usize) -> DevicePtr {
        let entry = HEADER_BYTES + self.index(position) as usize * size_of::<Entry>();
        let device_base = self.device_base.get_or_init(|| {
            let offset = self.base.addr() - self.page.address(0).addr();
            let registered = self.page.device_ptr(offset);
            registered.expect("a link is live only behind the registration of its segment")
        });
        device_base + (entry + field) as u64
    }
}

/// Asks for a line for this CPU alone. A hint, without an effect on what the program computes.
#[inline]
fn fetch_to_write(_line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint that reads and writes nothing, and faults at no address; a CPU without this
    // instruction does nothing.
    unsafe {
        asm!("prefetchw [{}]", in(reg) _line, options(nostack, preserves_flags, readonly));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        asm!("prfm pstl1keep, [{}]", in(reg) _line, options(nostack, preserves_flags, readonly));
    }
}

/// Asks for a line that others may have, too. A hint, as above.
#[inline]
fn fetch_to_read(_line: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint that reads and writes nothing, and faults at no address.
    unsafe {
        asm!("prefetcht0 [{}]", in(reg) _line, options(nostack, preserves_flags, readonly));
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        asm!("prfm pldl1keep, [{}]", in(reg) _line, options(nostack, preserves_flags, readonly));
    }
}

/// Why a peer's segment could not be opened: the peer's fault, or this process's.
#[derive(Debug)]
pub(crate) enum OpenError {
    Fault(HandshakeFault),
    Local(Error),
}

fn write_identity(header: &Header, depth: u32, generation: [u8; 16]) {
    use std::sync::atomic::Ordering::{Relaxed, Release};
    for (word, half) in header.generation.iter().zip(halves(generation)) {
        word.store(half, Relaxed);
    }
    header.version.store(u32::from(VERSION), Relaxed);
    header.depth.store(depth, Relaxed);
    header.magic.store(MAGIC, Release);
}

fn check_identity(header: &Header, depth: u32, generation: [u8; 16]) -> Result<(), HandshakeFault> {
    use std::sync::atomic::Ordering::{Acquire, Relaxed};
    let found = if header.magic.load(Acquire) != MAGIC {
        "magic"
    } else if header.version.load(Relaxed) != u32::from(VERSION) {
        "version"
    } else if header.depth.load(Relaxed) != depth {
        "depth"
    } else if header.generation.each_ref().map(|it| it.load(Relaxed)) != halves(generation) {
        "generation"
    } else {
        return Ok(());
    };
    let found = format!("its header has another {found}");
    Err(HandshakeFault::Segment(found))
}

/// Sixteen bytes as two words.
pub(crate) fn halves(bytes: [u8; 16]) -> [u64; 2] {
    let value = u128::from_le_bytes(bytes);
    [value as u64, (value >> 64) as u64]
}
