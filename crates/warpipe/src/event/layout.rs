//! The bytes of events that processes share: pages of 256, each with its last recording and eight lanes.
//! **This module is marked for unsafe**: it lays out shared memory.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU32, AtomicU64};

use super::Recording;
use crate::backend::IPC_EVENTS_MAX;
use crate::device::Device;
use crate::error::Result;
use crate::fork::PrivateFd;
use crate::link::closer::PeerFd;
use crate::memory::lane::{LANE_BYTES, Lane, Raiser};
use crate::memory::page::{Page, Shared};

/// Who may record one event: its maker (lane 0), and seven openings of it.
pub(super) const LANES: usize = 8;

/// Events in a page.
pub(super) const EVENTS: usize = 256;

/// Pages of one keeper: for all events that a process may have, and as many dropped ones that guests still have open.
pub(super) const PAGES_MAX: usize = 2 * IPC_EVENTS_MAX as usize / EVENTS;

/// A page's length.
pub(super) const BYTES: usize = EVENTS * EVENT_BYTES;

/// The length of an event in its page.
const EVENT_BYTES: usize = LANES_AT + LANES * LANE_BYTES;

/// Where an event's lanes begin.
const LANES_AT: usize = 64;

/// How many bits of a recording count; the others name its lane.
const COUNT_BITS: u32 = 56;

/// The largest count from which somebody may go on: nobody records an event 2^55 times, so above it a lane was
/// scribbled on.
pub(super) const FROM_MAX: u64 = 1 << (COUNT_BITS - 1);

/// What stands before an event's lanes.
#[repr(C, align(64))]
#[derive(Debug)]
struct Head {
    /// The recording that was enqueued last: its lane in the upper 8 bits, its count in the others. 0 for none.
    latest: AtomicU64,
    /// How many events have lain here before, for people.
    serial: AtomicU32,
    _reserved: [AtomicU32; 13],
}

const _: () = assert!(size_of::<Head>() == LANES_AT && EVENT_BYTES == 320 && BYTES == 81_920);
const _: () = assert!(std::mem::offset_of!(Head, serial) == 8);

// SAFETY: atomics alone.
unsafe impl Shared for Head {}

/// A page of events, and the words of our own that follow the lanes in it.
#[derive(Debug, Clone)]
pub(super) struct Words {
    page: Arc<Page>,
    /// Of this process alone, laid out alike: the lanes that it raises itself.
    own: Arc<Page>,
}

impl Words {
    pub(super) fn create(device: &Device) -> Result<(Words, PrivateFd)> {
        let own = Arc::new(Page::private(device, BYTES)?);
        let (page, fd) = Page::create(Some(device), BYTES)?;
        Ok((Words { page: Arc::new(page), own }, fd))
    }

    pub(super) fn open(device: &Device, fd: PeerFd, name: &str) -> Result<Words> {
        let own = Arc::new(Page::private(device, BYTES)?);
        Ok(Words { page: Arc::new(Page::open(Some(device), fd, BYTES, name)?), own })
    }

    /// Whether nobody else here holds it.
    pub(super) fn is_last(&self) -> bool {
        Arc::strong_count(&self.page) == 1 && Arc::strong_count(&self.own) == 1
    }

    pub(super) fn spot(&self, index: u32) -> Spot {
        Spot { page: self.page.clone(), at: index as usize % EVENTS }
    }

    /// Who records on a lane that stands at `from`.
    pub(super) fn raiser(&self, index: u32, lane: usize, from: u64) -> Raiser {
        let spot = self.spot(index);
        let raiser = Raiser::new(Spot { page: self.own.clone(), at: spot.at }.lane(lane), from);
        raiser.add(0, &spot.lane(lane));
        raiser
    }
}

/// One event's place in its page.
#[derive(Debug, Clone)]
pub(super) struct Spot {
    page: Arc<Page>,
    at: usize,
}

impl Spot {
    fn head(&self) -> &Head {
        self.page.at(self.at * EVENT_BYTES)
    }

    pub(super) fn lane(&self, lane: usize) -> Lane {
        Lane::new(&self.page, self.at * EVENT_BYTES + LANES_AT + lane * LANE_BYTES)
    }

    pub(super) fn lanes(&self) -> impl Iterator<Item = Lane> + '_ {
        (0..LANES).map(|lane| self.lane(lane))
    }

    /// The last recording, if there is one, and if it can be one.
    pub(super) fn latest(&self) -> Option<Recording> {
        let word = self.head().latest.load(SeqCst);
        let (lane, count) = ((word >> COUNT_BITS) as usize, word & ((1 << COUNT_BITS) - 1));
        (count > 0 && lane < LANES).then_some(Recording { lane, count })
    }

    pub(super) fn set_latest(&self, recording: Recording) {
        self.head().latest.store((recording.lane as u64) << COUNT_BITS | recording.count, SeqCst);
    }

    /// Makes it an event that nobody has recorded.
    pub(super) fn forget_latest(&self, serial: u64) {
        self.head().latest.store(0, SeqCst);
        self.head().serial.store(serial as u32, SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_stands_in_a_page_is_a_recording_of_a_lane_or_none() {
        let (words, _fd) = Words::create(&Device::host()).unwrap();
        let spot = words.spot(255);
        for word in [0, 1, u64::MAX, 1 << 56, 8 << 56 | 1, 7 << 56 | 5] {
            spot.head().latest.store(word, SeqCst);
            let latest = spot.latest();
            assert_eq!(latest.is_some(), word == 1 || word == 7 << 56 | 5, "{word:#x}: {latest:?}");
        }
        spot.set_latest(Recording { lane: 3, count: 9 });
        assert_eq!(spot.latest(), Some(Recording { lane: 3, count: 9 }));
        assert_eq!(words.spot(254).latest(), None, "the neighbour is untouched");
    }
}
