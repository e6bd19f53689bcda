//! The layout of shared events: pages of 256, each event with its last recording and eight lanes.
//! **This module is marked for unsafe**: it lays out shared memory.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::backend::IPC_EVENTS_MAX;
use crate::device::Device;
use crate::error::Result;
use crate::runtime::closer::PeerFd;
use crate::shm::counter::{COUNTER_BYTES, SharedCounter};
use crate::shm::page::{AtomicsOnly, SharedPage};
use crate::shm::signaller::Signaller;

/// The recorders of one event: its exporter (lane 0), and seven of its openings.
pub(super) const LANES_PER_EVENT: usize = 8;

/// Events in a page.
pub(super) const EVENTS_PER_PAGE: usize = 256;

/// The most pages of one exporter: for all events that a process may have, and as many dropped ones
/// that importers still have open.
pub(super) const PAGES_MAX: usize = 2 * IPC_EVENTS_MAX as usize / EVENTS_PER_PAGE;

/// A page's length.
pub(super) const PAGE_BYTES: usize = EVENTS_PER_PAGE * EVENT_BYTES;

/// The length of an event in its page.
const EVENT_BYTES: usize = LANES_AT + LANES_PER_EVENT * COUNTER_BYTES;

/// The offset of an event's lanes.
const LANES_AT: usize = 64;

/// The bits of a recording's count; the others hold its lane.
const COUNT_BITS: u32 = 56;

/// The largest count that a new recorder continues from: no process records an event 2^55 times, so
/// a larger count is corrupt.
pub(super) const FROM_MAX: u64 = 1 << (COUNT_BITS - 1);

/// One recording of an event, for which a stream can wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Recording {
    pub(super) lane: usize,
    pub(super) count: u64,
}

/// A last recording, with one writer. The recording is written before its time, so a reader that
/// loads the time first and then the recording gets one that is at least as late.
#[repr(C)]
#[derive(Debug)]
pub(super) struct LastRecording {
    /// Its lane in the upper 8 bits, its count in the others. 0 for none.
    packed: AtomicU64,
    at_ns: AtomicU64,
}

/// The words before an event's lanes.
#[repr(C, align(64))]
#[derive(Debug)]
struct EventHead {
    /// Written by the exporter: the last recording of all but this page's importer.
    latest: LastRecording,
    /// Written by the importer: its own.
    importer_latest: LastRecording,
    /// The lower half of the serial number of the event in this slot: its exporter resets a slot
    /// that has another one's words.
    serial: AtomicU32,
    /// Written by the exporter: 1 while a third process has the event open and needs the
    /// recordings.
    has_other_importers: AtomicU32,
    _reserved: [AtomicU64; 3],
}

const _: () =
    assert!(size_of::<EventHead>() == LANES_AT && EVENT_BYTES == 320 && PAGE_BYTES == 81_920);
const _: () = assert!(
    std::mem::offset_of!(EventHead, importer_latest) == 16
        && std::mem::offset_of!(EventHead, serial) == 32
);

// SAFETY: it has only atomics.
unsafe impl AtomicsOnly for EventHead {}

/// A page of events: the exporter's own, or one that an importer shares with it.
#[derive(Debug, Clone)]
pub(super) struct EventPage {
    page: Arc<SharedPage>,
    /// A page of the importer's process alone, with the same layout: the lanes that it signals
    /// itself. The exporter's page is its own.
    own: Option<Arc<SharedPage>>,
}

impl EventPage {
    /// Creates the exporter's own page.
    pub(super) fn create(device: &Device) -> Result<EventPage> {
        Ok(EventPage {
            page: Arc::new(SharedPage::private(device, PAGE_BYTES)?),
            own: None,
        })
    }

    /// Opens and seals the exporter's end of a page that an importer has made.
    pub(super) fn seal(device: &Device, fd: PeerFd, name: &str) -> Result<EventPage> {
        Ok(EventPage {
            page: Arc::new(SharedPage::seal(device, fd, PAGE_BYTES, name)?),
            own: None,
        })
    }

    /// An importer's end of a page that its exporter has sealed.
    pub(super) fn of_importer(device: &Device, page: SharedPage) -> Result<EventPage> {
        Ok(EventPage {
            page: Arc::new(page),
            own: Some(Arc::new(SharedPage::private(device, PAGE_BYTES)?)),
        })
    }

    /// Whether this is the last use of the shared page in this process.
    pub(super) fn is_last(&self) -> bool {
        Arc::strong_count(&self.page) == 1
    }

    /// Ends every ended lane once more: a device may have written a lower value after the end.
    pub(super) fn end_again(&self) {
        for index in 0..EVENTS_PER_PAGE as u32 {
            let event_words = self.event_words(index);
            event_words.lanes().for_each(|lane| lane.end_again());
        }
    }

    pub(super) fn event_words(&self, index: u32) -> EventWords {
        EventWords {
            page: self.page.clone(),
            at: index as usize % EVENTS_PER_PAGE,
        }
    }

    /// The signaller of a lane with the count `from`.
    pub(super) fn signaller(&self, index: u32, lane: usize, from: u64) -> Signaller {
        let shared = self.event_words(index);
        let Some(own) = self.own.clone() else {
            return Signaller::new(shared.lane(lane), from);
        };
        let own = EventWords {
            page: own,
            ..shared
        };
        let signaller = Signaller::new(own.lane(lane), from);
        signaller.add(0, &shared.lane(lane));
        signaller
    }
}

/// One event's words in its page.
#[derive(Debug, Clone)]
pub(super) struct EventWords {
    page: Arc<SharedPage>,
    at: usize,
}

impl EventWords {
    fn head(&self) -> &EventHead {
        self.page.at(self.at * EVENT_BYTES)
    }

    pub(super) fn lane(&self, lane: usize) -> SharedCounter {
        SharedCounter::new(
            &self.page,
            self.at * EVENT_BYTES + LANES_AT + lane * COUNTER_BYTES,
        )
    }

    pub(super) fn lanes(&self) -> impl Iterator<Item = SharedCounter> + '_ {
        (0..LANES_PER_EVENT).map(|lane| self.lane(lane))
    }

    /// The last recording that the exporter reports.
    pub(super) fn latest(&self) -> &LastRecording {
        &self.head().latest
    }

    /// The last recording of the page's importer.
    pub(super) fn importer_latest(&self) -> &LastRecording {
        &self.head().importer_latest
    }

    #[cfg(test)]
    pub(super) fn page(&self) -> &Arc<SharedPage> {
        &self.page
    }

    /// Whether the slot holds the event with this serial number.
    pub(super) fn is_of(&self, serial: u64) -> bool {
        self.head().serial.load(SeqCst) == serial as u32
    }

    pub(super) fn has_other_importers(&self) -> bool {
        self.head().has_other_importers.load(SeqCst) != 0
    }

    pub(super) fn set_other_importers(&self, has_other_importers: bool) {
        self.head()
            .has_other_importers
            .store(has_other_importers.into(), SeqCst);
    }

    /// Resets the slot to an event that was never recorded.
    pub(super) fn forget_latest(&self, serial: u64) {
        for recording in [self.latest(), self.importer_latest()] {
            recording.packed.store(0, SeqCst);
            recording.at_ns.store(0, SeqCst);
        }
        self.set_other_importers(false);
        self.head().serial.store(serial as u32, SeqCst);
    }
}

impl LastRecording {
    /// The recording and its time; `None` if there is none or its words are invalid.
    pub(super) fn load(&self) -> Option<(u64, Recording)> {
        let at_ns = self.at_ns.load(SeqCst);
        let recording = Recording::from_bits(self.packed.load(SeqCst))?;
        Some((at_ns, recording))
    }

    /// Writes a recording, unless a later one is there.
    pub(super) fn store(&self, at_ns: u64, recording: Recording) {
        if at_ns >= self.at_ns.load(SeqCst) {
            self.packed.store(recording.to_bits(), SeqCst);
            self.at_ns.store(at_ns, SeqCst);
        }
    }
}

/// The latest of recordings with their times.
pub(super) fn max_by_time(
    all: impl IntoIterator<Item = Option<(u64, Recording)>>,
) -> Option<(u64, Recording)> {
    all.into_iter().flatten().max_by_key(|(time, _)| *time)
}

impl Recording {
    /// The recording as a number that is not 0, as C has it.
    #[doc(hidden)]
    pub fn to_bits(self) -> u64 {
        (self.lane as u64) << COUNT_BITS | self.count
    }

    /// The recording of [`to_bits`](Self::to_bits); `None` for a number that no recording has.
    #[doc(hidden)]
    pub fn from_bits(bits: u64) -> Option<Recording> {
        let lane = (bits >> COUNT_BITS) as usize;
        let count = bits & ((1 << COUNT_BITS) - 1);
        (count > 0 && lane < LANES_PER_EVENT).then_some(Recording { lane, count })
    }
}

impl fmt::Display for Recording {
    /// Its number among those of its recorder, and the recorder's place at the event.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of recorder {}", self.count, self.lane)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_words_of_a_page_read_as_a_recording_of_a_lane_or_as_none() {
        let event_page = EventPage::create(&Device::host()).unwrap();
        let event_words = event_page.event_words(255);
        for raw in [0, 1, u64::MAX, 1 << 56, 8 << 56 | 1, 7 << 56 | 5] {
            event_words.latest().packed.store(raw, SeqCst);
            let latest = event_words.latest().load();
            assert_eq!(
                latest.is_some(),
                raw == 1 || raw == 7 << 56 | 5,
                "{raw:#x}: {latest:?}"
            );
        }
        event_words
            .latest()
            .store(5, Recording { lane: 3, count: 9 });
        event_words
            .latest()
            .store(4, Recording { lane: 2, count: 9 });
        assert_eq!(
            event_words.latest().load(),
            Some((5, Recording { lane: 3, count: 9 })),
            "the later one stays"
        );
        assert_eq!(
            event_page.event_words(254).latest().load(),
            None,
            "the neighbour is untouched"
        );
    }
}
