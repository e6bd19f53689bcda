//! The bytes of events that processes share: pages of 256, each with its last recording and eight lanes.
//! **This module is marked for unsafe**: it lays out shared memory.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU32, AtomicU64};

use super::Recording;
use crate::backend::IPC_EVENTS_MAX;
use crate::device::Device;
use crate::error::Result;
use crate::link::closer::PeerFd;
use crate::memory::lane::{LANE_BYTES, Lane};
use crate::memory::page::{Draft, Page, Shared};
use crate::memory::raiser::Raiser;

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

/// What stands before an event's lanes. A recording is written before the time that it was made at, so whoever reads the
/// time first and the recording then finds one that is at least as late.
#[repr(C, align(64))]
#[derive(Debug)]
struct Head {
    /// By the maker: the last recording of all but this page's guest; its lane in the upper 8 bits, its count in the
    /// others. 0 for none.
    latest: AtomicU64,
    /// How many events have lain here before, for people.
    serial: AtomicU32,
    /// By the maker: 1 while a third process has the event open, and must be told of recordings.
    has_others: AtomicU32,
    latest_ns: AtomicU64,
    /// By the guest: its own last recording.
    guests: AtomicU64,
    guests_ns: AtomicU64,
    _reserved: [AtomicU64; 3],
}

const _: () = assert!(size_of::<Head>() == LANES_AT && EVENT_BYTES == 320 && BYTES == 81_920);
const _: () = assert!(std::mem::offset_of!(Head, serial) == 8 && std::mem::offset_of!(Head, latest_ns) == 16);
const _: () = assert!(std::mem::offset_of!(Head, guests) == 24 && std::mem::offset_of!(Head, guests_ns) == 32);

// SAFETY: atomics alone.
unsafe impl Shared for Head {}

/// A page of events: the maker's own, or one that a guest shares with it.
#[derive(Debug, Clone)]
pub(super) struct Words {
    page: Arc<Page>,
    /// Of a guest's process alone, laid out alike: the lanes that it raises itself. The maker's page is its own.
    own: Option<Arc<Page>>,
}

impl Words {
    /// The maker's own.
    pub(super) fn create(device: &Device) -> Result<Words> {
        Ok(Words { page: Arc::new(Page::private(device, BYTES)?), own: None })
    }

    /// The maker's end of a page that a guest has sealed.
    pub(super) fn confirm(device: &Device, draft: Draft, name: &str) -> Result<Words> {
        Ok(Words { page: Arc::new(draft.confirm(device, name)?), own: None })
    }

    /// A guest's end of a page that its maker has made for it: seals it.
    pub(super) fn share(device: &Device, fd: PeerFd, name: &str) -> Result<Words> {
        let draft = Draft::open(fd, BYTES, name)?;
        let own = Some(Arc::new(Page::private(device, BYTES)?));
        Ok(Words { page: Arc::new(draft.close(device, name)?), own })
    }

    /// Whether nobody else here holds it.
    pub(super) fn is_last(&self) -> bool {
        Arc::strong_count(&self.page) == 1 && self.own.as_ref().is_none_or(|own| Arc::strong_count(own) == 1)
    }

    /// Ends every lane that has ended, once more: what a device wrote after the end stands below it.
    pub(super) fn end_again(&self) {
        let lanes = (0..EVENTS).flat_map(|at| (0..LANES).map(move |lane| (at, lane)));
        for (at, lane) in lanes {
            let lane = Lane::new(&self.page, at * EVENT_BYTES + LANES_AT + lane * LANE_BYTES);
            if lane.has_ended() {
                lane.end();
            }
        }
    }

    pub(super) fn spot(&self, index: u32) -> Spot {
        Spot { page: self.page.clone(), at: index as usize % EVENTS }
    }

    /// Who records on a lane that stands at `from`.
    pub(super) fn raiser(&self, index: u32, lane: usize, from: u64) -> Raiser {
        let spot = self.spot(index);
        match &self.own {
            None => Raiser::new(spot.lane(lane), from),
            Some(own) => {
                let raiser = Raiser::new(Spot { page: own.clone(), at: spot.at }.lane(lane), from);
                raiser.add(0, &spot.lane(lane));
                raiser
            }
        }
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

    /// What the maker says was recorded last, and when.
    pub(super) fn latest(&self) -> Option<(u64, Recording)> {
        read(&self.head().latest_ns, &self.head().latest)
    }

    /// What the page's guest has recorded last.
    pub(super) fn guests(&self) -> Option<(u64, Recording)> {
        read(&self.head().guests_ns, &self.head().guests)
    }

    /// As the maker, unless something later stands there.
    pub(super) fn set_latest(&self, now_ns: u64, recording: Recording) {
        if now_ns >= self.head().latest_ns.load(SeqCst) {
            self.head().latest.store(word(recording), SeqCst);
            self.head().latest_ns.store(now_ns, SeqCst);
        }
    }

    /// As the guest.
    pub(super) fn set_guests(&self, now_ns: u64, recording: Recording) {
        self.head().guests.store(word(recording), SeqCst);
        self.head().guests_ns.fetch_max(now_ns, SeqCst);
    }

    #[cfg(test)]
    pub(super) fn page(&self) -> &Arc<Page> {
        &self.page
    }

    /// Whether the event of this serial number is what lies here.
    pub(super) fn is_of(&self, serial: u64) -> bool {
        self.head().serial.load(SeqCst) == serial as u32
    }

    pub(super) fn has_others(&self) -> bool {
        self.head().has_others.load(SeqCst) != 0
    }

    pub(super) fn set_others(&self, has_others: bool) {
        self.head().has_others.store(has_others.into(), SeqCst);
    }

    /// Makes it an event that nobody has recorded.
    pub(super) fn forget_latest(&self, serial: u64) {
        let Head { latest, latest_ns, guests, guests_ns, .. } = self.head();
        [latest, latest_ns, guests, guests_ns].iter().for_each(|word| word.store(0, SeqCst));
        self.set_others(false);
        self.head().serial.store(serial as u32, SeqCst);
    }
}

/// A recording, if there is one, and if it can be one.
fn read(time: &AtomicU64, word: &AtomicU64) -> Option<(u64, Recording)> {
    let time = time.load(SeqCst);
    let word = word.load(SeqCst);
    let (lane, count) = ((word >> COUNT_BITS) as usize, word & ((1 << COUNT_BITS) - 1));
    (count > 0 && lane < LANES).then_some((time, Recording { lane, count }))
}

fn word(recording: Recording) -> u64 {
    (recording.lane as u64) << COUNT_BITS | recording.count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_stands_in_a_page_is_a_recording_of_a_lane_or_none() {
        let words = Words::create(&Device::host()).unwrap();
        let spot = words.spot(255);
        for word in [0, 1, u64::MAX, 1 << 56, 8 << 56 | 1, 7 << 56 | 5] {
            spot.head().latest.store(word, SeqCst);
            let latest = spot.latest();
            assert_eq!(latest.is_some(), word == 1 || word == 7 << 56 | 5, "{word:#x}: {latest:?}");
        }
        spot.set_latest(5, Recording { lane: 3, count: 9 });
        spot.set_latest(4, Recording { lane: 2, count: 9 });
        assert_eq!(spot.latest(), Some((5, Recording { lane: 3, count: 9 })), "the later one stays");
        assert_eq!(words.spot(254).latest(), None, "the neighbour is untouched");
    }
}
