//! This process's own proof that its streams are past the work that they were given.
//!
//! The words of a link segment cannot be that proof: the peer maps them writable, and a hostile
//! peer could have memory unmapped or reused under a stream that still has to touch it. No other
//! process signals an event of this process. So before memory is released, an event is recorded
//! behind each stream that worked on it, and waited for. This costs nothing per sample.
//!
//! A stream must not be queried while a capture begins: the driver would invalidate the capture. So
//! where a thread of the library fences a stream ([`StreamSet::fence`]), it queries only its own
//! event.

use std::ptr;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicPtr, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard};

use crate::backend::RawEvent;
use crate::error::{Error, Result, StateFault};
use crate::fork::per_process::PerProcess;
use crate::mutex::LockUnpoisoned;
use crate::stream::Stream;

/// From this many streams on, the list is searched for streams that no other owner holds.
const PRUNE_FROM: usize = 8;

static UNANSWERED: PerProcess<AtomicU64> = PerProcess::new();

/// How often the query of a stream or an event of this process failed.
pub(crate) fn unanswered() -> u64 {
    UNANSWERED.get().load(Relaxed)
}

/// Whether the driver's answer proves that the work is done.
///
/// A stream or an event with a failed query is *not* idle: memory that waits for it stays, and the
/// query is repeated. Each such answer is counted ([`unanswered`]).
///
/// | answer of `cuStreamQuery`, `cuEventQuery` | what it means here |
/// | --- | --- |
/// | success | past |
/// | `NOT_READY` | not past |
/// | the context was reset ([`Error::Device`]) | past: a reset ends the context's work before it returns. Not believed of a code like `CONTEXT_IS_DESTROYED` alone: the backend asks for the primary context's state and number |
/// | a stream that captures ([`Error::State`]), `CAPTURED_EVENT`, `STREAM_CAPTURE_...` | unknown: what it was given before the capture may still run. It is asked again, by a new event once the capture is over |
/// | `ILLEGAL_ADDRESS`, `LAUNCH_FAILED` and the other sticky errors | unknown, for good. The kernel at fault is over, but nothing says so of a copy on another engine of the GPU; and the driver refuses to take memory back in that context anyway. The process has to be started anew |
/// | `INVALID_HANDLE` | unknown, for good: a stream of the user's that was destroyed too early. `cuStreamDestroy` does not wait, so its work may still run |
/// | `DEINITIALIZED` | unknown: the process is ending, and takes all memory with it |
/// | `NOT_INITIALIZED` in a forked child | unknown: the memory is the parent's |
/// | anything else (an operating system's or MPS server's failure) | unknown |
fn is_proof(answer: Result<bool>) -> bool {
    match answer {
        Ok(is_done) => is_done,
        Err(error) if error.is_reset() => true,
        Err(_) => {
            UNANSWERED.get().fetch_add(1, Relaxed);
            false
        }
    }
}

/// The streams that have worked on some memory.
#[derive(Debug, Default)]
pub(crate) struct StreamSet {
    list: Mutex<Vec<Stream>>,
    /// The identity of the last recorded stream, while it is in the list. Mostly the next use is of
    /// the same stream, and a lock for each sample would cost more than the sample's signals.
    last: AtomicPtr<()>,
}

impl StreamSet {
    /// Records `stream`. Call it before the stream's work is enqueued.
    #[inline]
    pub(crate) fn record_use(&self, stream: &Stream) {
        // Acquire: any thread that is ordered behind this caller finds the stream in the list.
        if !ptr::eq(self.last.load(Acquire), stream.identity()) {
            self.record_another(stream);
        }
    }

    #[cold]
    fn record_another(&self, stream: &Stream) {
        let mut list = self.lock();
        let is_new = !list.iter().any(|known| known.is_same(stream));
        if is_new {
            list.push(stream.clone());
        }
        self.last.store(stream.identity().cast_mut(), Release);
        if is_new && list.len() > PRUNE_FROM {
            // A stream that only the list holds gets no new work, and an idle one has none left.
            let unused: Vec<Stream> = list
                .iter()
                .filter(|known| known.clones() == 1)
                .cloned()
                .collect();
            drop(list);
            self.drop_idle(unused);
        }
    }

    /// Forgets those of `unused` that are idle. They are queried without the lock, since a full
    /// launch queue holds a query up.
    fn drop_idle(&self, mut unused: Vec<Stream>) {
        unused.retain(|stream| is_proof(stream.is_idle()));
        if unused.is_empty() {
            return;
        }
        let mut list = self.lock();
        // Before any stream is forgotten: a new stream may be allocated at a forgotten one's
        // address. Its owner got that address from the allocator after the forgotten one was freed,
        // and so after this store.
        self.last.store(ptr::null_mut(), Relaxed);
        // The list's clone, and the one here. If a thread has taken another clone meanwhile, the
        // stream stays for the next time.
        list.retain(|known| known.clones() > 2 || !unused.iter().any(|idle| idle.is_same(known)));
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Stream>> {
        self.list.locked()
    }

    /// Calls `call` while a thread has the set locked.
    #[cfg(test)]
    pub(crate) fn while_locked<T>(&self, call: impl FnOnce() -> T) -> T {
        let _locked = self.lock();
        call()
    }

    /// All streams now, for driver calls that are made without the lock.
    fn all(&self) -> Vec<Stream> {
        self.lock().clone()
    }

    /// Makes `stream` wait, on the device, for all work that the others have been given so far.
    pub(crate) fn join(&self, stream: &Stream) -> Result<()> {
        stream.check_not_capturing()?;
        let busy = |other: &Stream| !other.is_same(stream) && !is_proof(other.is_idle());
        self.all()
            .iter()
            .filter(|other| busy(other))
            .try_for_each(|other| wait_behind(stream, other))
    }

    /// Records an event behind all work that the streams have been given so far. Queries no stream,
    /// so it may be called at any time.
    pub(crate) fn fence(&self) -> Fence {
        Fence::recorded(self.all().iter().map(FencePoint::behind).collect())
    }

    /// As [`fence`](Self::fence), without the idle streams: for a user's own thread, in a call
    /// about this memory.
    pub(crate) fn fence_busy(&self) -> Fence {
        let all = self.all();
        let busy = all.iter().filter(|stream| !is_proof(stream.is_idle()));
        Fence::recorded(busy.map(FencePoint::behind).collect())
    }
}

/// Makes `stream` wait for all work that `other` has been given so far.
fn wait_behind(stream: &Stream, other: &Stream) -> Result<()> {
    if other.device().info().id.kind != stream.device().info().id.kind {
        // An event of one driver is no event of another.
        let allowed = format!(
            "one of the backend of {}, which works on it, too",
            other.device()
        );
        let found = format!("one of {}", stream.device());
        return Err(Error::argument("stream", found, allowed));
    }
    let event = RecordedEvent::behind(other)?;
    // SAFETY: both handles are live. The event may be destroyed while it is waited for: the driver
    // keeps it.
    unsafe { stream.backend().wait_event(stream.raw(), event.raw) }
}

/// An event behind the work that a stream had.
#[derive(Debug)]
struct RecordedEvent {
    stream: Stream,
    raw: RawEvent,
}

impl RecordedEvent {
    /// A new event behind the work of a stream that does not capture.
    fn behind(stream: &Stream) -> Result<RecordedEvent> {
        // First: `create_event` detects a reset, after which the stream's handle is invalid.
        let event = RecordedEvent {
            raw: stream.backend().create_event()?,
            stream: stream.clone(),
        };
        stream.check_not_capturing()?;
        // SAFETY: both handles are live: the event was made above, and `stream` is borrowed.
        unsafe { stream.backend().record_event(event.raw, stream.raw())? };
        // If a capture began in between, the event belongs to the capture, and a query of the event
        // would invalidate it.
        stream.check_not_capturing()?;
        Ok(event)
    }
}

impl Drop for RecordedEvent {
    fn drop(&mut self) {
        // SAFETY: the event was made with this backend, and is given up here.
        let _ = unsafe { self.stream.backend().destroy_event(self.raw) };
    }
}

/// Events that are still due. The fence is reached when all are complete.
#[derive(Debug)]
pub(crate) struct Fence {
    /// The streams of a fence that is not recorded yet.
    later: Option<Arc<StreamSet>>,
    points: Vec<FencePoint>,
}

impl Fence {
    /// The fence behind all work that one stream has been given so far, whether or not it captures
    /// now.
    pub(crate) fn behind(stream: &Stream) -> Fence {
        Fence::recorded(vec![FencePoint::behind(stream)])
    }

    /// A fence that is recorded when it is first asked about, behind all work that its streams have
    /// been given by then: recording may be held up by a full launch queue, so it is left to the
    /// fence thread.
    pub(crate) fn later(streams: Arc<StreamSet>) -> Fence {
        Fence {
            later: Some(streams),
            points: Vec::new(),
        }
    }

    fn recorded(points: Vec<FencePoint>) -> Fence {
        Fence {
            later: None,
            points,
        }
    }

    /// Whether the streams have done the work that they had been given when the fence was recorded.
    pub(crate) fn is_reached(&mut self) -> bool {
        if let Some(streams) = self.later.take() {
            self.points = streams.fence().points;
        }
        self.points.retain_mut(|point| !point.is_reached());
        self.points.is_empty()
    }
}

/// An event behind one stream's work.
#[derive(Debug)]
struct FencePoint {
    stream: Stream,
    /// `None` until the event could be recorded. A retry records it behind all work that the stream
    /// has by then.
    event: Option<RecordedEvent>,
}

impl FencePoint {
    fn behind(stream: &Stream) -> FencePoint {
        FencePoint {
            stream: stream.clone(),
            event: RecordedEvent::behind(stream).ok(),
        }
    }

    fn is_reached(&mut self) -> bool {
        let Some(event) = &self.event else {
            self.event = RecordedEvent::behind(&self.stream).ok();
            // If no event can be made, the stream is queried instead. An event made in this call is
            // queried in the next one.
            return self.event.is_none() && is_proof(self.stream.is_idle());
        };
        // SAFETY: the event is live until drop.
        let answer = unsafe { self.stream.backend().query_event(event.raw) };
        if matches!(answer, Err(Error::State(StateFault::Capturing(_)))) {
            // A capture began and ended while the event was recorded: the event proves nothing.
            self.event = None;
        }
        is_proof(answer)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::backend::testing::{Counting, Hook, Wrapped};
    use crate::backend::{DeviceId, DeviceKind, RawStream};
    use crate::device::Device;

    /// A device with queries that fail, or streams that capture, on demand.
    #[derive(Debug, Default)]
    struct UnanswerableStreams {
        is_mute: AtomicBool,
        is_capturing: AtomicBool,
    }

    impl Hook for UnanswerableStreams {
        fn before(&self, method: &'static str) -> Result<()> {
            if self.is_mute.load(Relaxed)
                && matches!(method, "query" | "query_event" | "record_event")
            {
                return Err(Error::injected(method, 1));
            }
            let is_captured = self.is_capturing.load(Relaxed);
            assert!(
                !is_captured || !matches!(method, "query" | "record_event"),
                "{method} of a stream that captures"
            );
            Ok(())
        }

        fn is_capturing(&self, _stream: RawStream) -> bool {
            self.is_capturing.load(Relaxed)
        }
    }

    fn unanswerable() -> (Arc<Wrapped<UnanswerableStreams>>, Device) {
        let wrapped = Wrapped::new(
            Device::host().backend().clone(),
            UnanswerableStreams::default(),
        );
        (wrapped.clone(), Device::from_backend(wrapped))
    }

    fn is_passed_soon(fence: &mut Fence) -> bool {
        let start = std::time::Instant::now();
        while !fence.is_reached() && start.elapsed() < Duration::from_secs(5) {
            std::thread::yield_now();
        }
        fence.is_reached()
    }

    #[test]
    fn a_stream_that_cannot_be_asked_is_not_idle() {
        let (wrapped, device) = unanswerable();
        let streams = StreamSet::default();
        streams.record_use(&device.stream().unwrap());
        let mut early = streams.fence();
        wrapped.hook().is_mute.store(true, Relaxed);
        let before = unanswered();
        (0..3 * PRUNE_FROM).for_each(|_| streams.record_use(&device.stream().unwrap()));
        assert_eq!(
            streams.lock().len(),
            3 * PRUNE_FROM + 1,
            "none of them is known to be idle"
        );
        let mut late = streams.fence_busy();
        assert!(!early.is_reached() && !late.is_reached());
        assert!(unanswered() > before);
        wrapped.hook().is_mute.store(false, Relaxed);
        assert!(is_passed_soon(&mut early) && is_passed_soon(&mut late));
        streams.record_use(&device.stream().unwrap());
        assert!(
            streams.lock().len() <= PRUNE_FROM + 1,
            "and are forgotten once they can be asked"
        );
    }

    #[test]
    fn a_stream_that_captures_is_neither_asked_nor_marked_until_the_capture_is_over() {
        let (wrapped, device) = unanswerable();
        let stream = device.stream().unwrap();
        let other = device.stream().unwrap();
        let streams = StreamSet::default();
        let (go, wait) = mpsc::channel::<()>();
        stream.call(move || assert!(wait.recv().is_err())).unwrap();
        streams.record_use(&stream);
        wrapped.hook().is_capturing.store(true, Relaxed);
        let mut proofs = [
            streams.fence(),
            streams.fence_busy(),
            Fence::behind(&stream),
        ];
        assert!(proofs.iter_mut().all(|fence| !fence.is_reached()));
        assert!(matches!(
            streams.join(&other),
            Err(Error::State(StateFault::Capturing(_)))
        ));
        assert!(matches!(
            stream.is_idle(),
            Err(Error::State(StateFault::Capturing(_)))
        ));
        wrapped.hook().is_capturing.store(false, Relaxed);
        assert!(
            proofs.iter_mut().all(|fence| !fence.is_reached()),
            "the work before the capture still runs"
        );
        drop(go);
        assert!(proofs.iter_mut().all(is_passed_soon));
    }

    #[test]
    fn a_proof_is_passed_only_when_every_stream_is_past_its_mark() {
        let device = Device::host();
        let (busy, idle) = (device.stream().unwrap(), device.stream().unwrap());
        let (go, wait) = mpsc::channel::<()>();
        let streams = StreamSet::default();
        streams.record_use(&busy);
        streams.record_use(&idle);
        busy.call(move || assert!(wait.recv().is_err())).unwrap();
        let mut fence = streams.fence();
        idle.synchronize(Duration::from_secs(5)).unwrap();
        assert!(!fence.is_reached());
        drop(go);
        busy.synchronize(Duration::from_secs(5)).unwrap();
        assert!(fence.is_reached());
    }

    #[test]
    fn a_lazy_fence_covers_the_work_given_before_it_is_first_asked_and_none_after() {
        let device = Device::host();
        let (stream, streams) = (device.stream().unwrap(), Arc::new(StreamSet::default()));
        let mut fence = Fence::later(streams.clone());
        streams.record_use(&stream);
        let (go, wait) = mpsc::channel::<()>();
        stream.call(move || assert!(wait.recv().is_err())).unwrap();
        assert!(!fence.is_reached(), "the work is enqueued before the call");
        let (later, wait) = mpsc::channel::<()>();
        stream.call(move || assert!(wait.recv().is_err())).unwrap();
        drop(go);
        let start = std::time::Instant::now();
        while !fence.is_reached() {
            assert!(
                start.elapsed() < Duration::from_secs(5),
                "it waits for later work"
            );
            std::thread::yield_now();
        }
        drop(later);
    }

    #[test]
    fn a_stream_that_joins_the_others_is_behind_their_work() {
        let device = Device::host();
        let (busy, joining) = (device.stream().unwrap(), device.stream().unwrap());
        let (go, wait) = mpsc::channel::<()>();
        let done = Arc::new(AtomicBool::new(false));
        let streams = StreamSet::default();
        streams.record_use(&busy);
        let work = done.clone();
        busy.call(move || {
            assert!(wait.recv().is_err());
            work.store(true, Relaxed);
        })
        .unwrap();
        streams.join(&joining).unwrap();
        assert!(
            joining.synchronize(Duration::from_millis(20)).is_err(),
            "it waits"
        );
        drop(go);
        joining.synchronize(Duration::from_secs(5)).unwrap();
        // The work itself, not the stream's own count of it, which falls a moment after the event
        // is complete.
        assert!(done.load(Relaxed));
    }

    #[test]
    fn a_stream_never_waits_for_an_event_of_another_backend() {
        let device = Device::host();
        let id = DeviceId {
            kind: DeviceKind::Cuda,
            uuid: [1; 16],
        };
        let other = Device::from_backend(Wrapped::posing_as(
            device.backend().clone(),
            Counting::default(),
            id,
        ));
        let busy = other.stream().unwrap();
        let joining = device.stream().unwrap();
        let streams = StreamSet::default();
        let (go, wait) = mpsc::channel::<()>();
        busy.call(move || assert!(wait.recv().is_err())).unwrap();
        streams.record_use(&busy);
        let refused = streams.join(&joining);
        assert!(
            matches!(
                refused,
                Err(Error::Argument {
                    argument: "stream",
                    ..
                })
            ),
            "{refused:?}"
        );
        drop(go);
        busy.synchronize(Duration::from_secs(5)).unwrap();
        streams.join(&joining).unwrap();
    }

    #[test]
    fn streams_without_another_owner_are_forgotten() {
        let device = Device::host();
        let streams = StreamSet::default();
        let kept = device.stream().unwrap();
        streams.record_use(&kept);
        for _ in 0..10 * PRUNE_FROM {
            streams.record_use(&device.stream().unwrap());
        }
        let list = streams.lock();
        assert!(list.len() <= PRUNE_FROM + 1, "{}", list.len());
        assert!(list.iter().any(|stream| stream.is_same(&kept)));
    }
}
