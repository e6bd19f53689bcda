//! This process's own proof that its streams are past what they were given.
//!
//! The words of a link segment cannot be that proof: the peer maps them writable, and one that stores what it likes
//! would have memory unmapped, or used again, under a stream that still has to touch it. An event of this
//! process can: nobody else signals it. So who lets memory go records one behind each stream that ever worked on
//! it, and waits for those. It costs nothing per sample.

use std::ptr;
use std::sync::atomic::AtomicPtr;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::backend::RawEvent;
use crate::error::{Error, Result};
use crate::stream::Stream;

/// More streams than this are looked through for such as nobody can use any more.
const PRUNE_FROM: usize = 8;

/// The streams that have worked on some memory.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    list: Mutex<Vec<Stream>>,
    /// What the stream noted last is known by, while it is in the list: mostly it is the next one's, too, and a
    /// lock for each sample would be dearer than its signals.
    last: AtomicPtr<()>,
}

impl Streams {
    /// Remembers `stream`. To be called before its work is enqueued.
    #[inline]
    pub(crate) fn note(&self, stream: &Stream) {
        // Acquire: whoever is ordered behind this caller finds the stream in the list.
        if !ptr::eq(self.last.load(Acquire), stream.identity()) {
            self.note_another(stream);
        }
    }

    #[cold]
    fn note_another(&self, stream: &Stream) {
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        if list.len() >= PRUNE_FROM && !list.iter().any(|known| known.is_same(stream)) {
            // Before any is forgotten: a new stream may come to lie where a forgotten one lay, and whoever holds it
            // got it from the allocator after that, and so behind this store.
            self.last.store(ptr::null_mut(), Relaxed);
            // A stream that is ours alone gets no new work, and an idle one has none left. One that cannot be asked
            // has a device that does nothing any more.
            list.retain(|known| known.is_shared() || !known.is_idle().unwrap_or(true));
        }
        if !list.iter().any(|known| known.is_same(stream)) {
            list.push(stream.clone());
        }
        self.last.store(stream.identity().cast_mut(), Release);
    }

    /// Makes `stream` wait, on the device, for everything that the others have been given so far.
    pub(crate) fn join(&self, stream: &Stream) -> Result<()> {
        let list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let busy = |other: &&Stream| !other.is_same(stream) && !other.is_idle().unwrap_or(false);
        list.iter().filter(busy).try_for_each(|other| Mark::behind(other).hold(stream))
    }

    /// Records an event behind everything that the streams have been given so far.
    pub(crate) fn mark(&self) -> Proof {
        let list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let busy = list.iter().filter(|stream| !stream.is_idle().unwrap_or(false));
        Proof { open: busy.map(Mark::behind).collect() }
    }
}

/// Events that are still due. Passed when all are complete.
#[derive(Debug)]
pub(crate) struct Proof {
    open: Vec<Mark>,
}

impl Proof {
    /// Whether the streams have done what they had been given when the mark was made.
    pub(crate) fn is_passed(&mut self) -> bool {
        self.open.retain(|mark| !mark.is_passed());
        self.open.is_empty()
    }
}

/// An event behind one stream's work.
#[derive(Debug)]
struct Mark {
    stream: Stream,
    /// `None` if it could not be recorded; then only an idle stream is proof.
    event: Option<RawEvent>,
}

impl Mark {
    fn behind(stream: &Stream) -> Mark {
        let backend = stream.backend();
        let event = backend.create_event().ok().and_then(|event| {
            // SAFETY: both handles are live: the event was made above, and `stream` is borrowed.
            match unsafe { backend.record_event(event, stream.raw()) } {
                Ok(()) => Some(event),
                Err(_) => {
                    // SAFETY: made above, and given up here.
                    let _ = unsafe { backend.destroy_event(event) };
                    None
                }
            }
        });
        Mark { stream: stream.clone(), event }
    }

    /// Lets `stream` go on only behind the mark.
    fn hold(&self, stream: &Stream) -> Result<()> {
        let Some(event) = self.event else {
            let what = "an event behind a stream's work".to_string();
            return Err(Error::Timeout { what, waited: Duration::ZERO });
        };
        if self.stream.device().info().id.kind != stream.device().info().id.kind {
            // An event of one driver is no event of another.
            let allowed = format!("one of the backend of {}, which works on it, too", self.stream.device());
            return Err(Error::argument("stream", format!("one of {}", stream.device()), allowed));
        }
        // SAFETY: both handles are live. The event may be destroyed while it is waited for: the driver keeps it.
        unsafe { stream.backend().wait_event(stream.raw(), event) }
    }

    fn is_passed(&self) -> bool {
        match self.event {
            // SAFETY: the event is live until drop.
            Some(event) => unsafe { self.stream.backend().query_event(event) }.unwrap_or(false),
            None => self.stream.is_idle().unwrap_or(false),
        }
    }
}

impl Drop for Mark {
    fn drop(&mut self) {
        if let Some(event) = self.event {
            // SAFETY: made in `behind`, destroyed here only.
            let _ = unsafe { self.stream.backend().destroy_event(event) };
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::{Arc, mpsc};
    use std::time::Duration;

    use super::*;
    use crate::backend::testing::{Counting, Wrapped};
    use crate::backend::{DeviceId, DeviceKind};
    use crate::device::Device;

    #[test]
    fn a_proof_is_passed_only_when_every_stream_is_past_its_mark() {
        let device = Device::host();
        let (busy, idle) = (device.stream().unwrap(), device.stream().unwrap());
        let (go, wait) = mpsc::channel::<()>();
        let streams = Streams::default();
        streams.note(&busy);
        streams.note(&idle);
        busy.call(move || assert!(wait.recv().is_err())).unwrap();
        let mut proof = streams.mark();
        idle.synchronize(Duration::from_secs(5)).unwrap();
        assert!(!proof.is_passed());
        drop(go);
        busy.synchronize(Duration::from_secs(5)).unwrap();
        assert!(proof.is_passed());
    }

    #[test]
    fn a_stream_that_joins_the_others_is_behind_their_work() {
        let device = Device::host();
        let (busy, joining) = (device.stream().unwrap(), device.stream().unwrap());
        let (go, wait) = mpsc::channel::<()>();
        let done = Arc::new(AtomicBool::new(false));
        let streams = Streams::default();
        streams.note(&busy);
        let work = done.clone();
        busy.call(move || {
            assert!(wait.recv().is_err());
            work.store(true, Relaxed);
        })
        .unwrap();
        streams.join(&joining).unwrap();
        assert!(joining.synchronize(Duration::from_millis(20)).is_err(), "it waits");
        drop(go);
        joining.synchronize(Duration::from_secs(5)).unwrap();
        // The work, not the stream's own count of it: that falls a moment after the event is complete.
        assert!(done.load(Relaxed));
    }

    #[test]
    fn a_stream_never_waits_for_an_event_of_another_backend() {
        let device = Device::host();
        let id = DeviceId { kind: DeviceKind::Cuda, uuid: [1; 16] };
        let other = Device::from_backend(Wrapped::posing_as(device.backend().clone(), Counting::default(), id));
        let (busy, joining, streams) = (other.stream().unwrap(), device.stream().unwrap(), Streams::default());
        let (go, wait) = mpsc::channel::<()>();
        busy.call(move || assert!(wait.recv().is_err())).unwrap();
        streams.note(&busy);
        let refused = streams.join(&joining);
        assert!(matches!(refused, Err(Error::Argument { argument: "stream", .. })), "{refused:?}");
        drop(go);
        busy.synchronize(Duration::from_secs(5)).unwrap();
        streams.join(&joining).unwrap();
    }

    #[test]
    fn streams_that_nobody_can_use_any_more_are_forgotten() {
        let device = Device::host();
        let streams = Streams::default();
        let kept = device.stream().unwrap();
        streams.note(&kept);
        for _ in 0..10 * PRUNE_FROM {
            streams.note(&device.stream().unwrap());
        }
        let list = streams.list.lock().unwrap();
        assert!(list.len() <= PRUNE_FROM + 1, "{}", list.len());
        assert!(list.iter().any(|stream| stream.is_same(&kept)));
    }
}
