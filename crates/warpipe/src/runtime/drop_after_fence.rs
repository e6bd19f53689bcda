//! Values that streams may still touch: dropped only with this process's own proof that the streams
//! are past them.
//!
//! Each deferral waits for a [`Fence`] on the fence thread, and is dropped by the reaper: never
//! on the caller's thread, even if every stream is idle, because a driver that unregisters memory
//! may wait for a stream that waits for a peer.

use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::fork::OwnerProcess;
use crate::runtime::fence::{Fence, StreamSet};
use crate::runtime::reactor::{DropReadiness, Reactor};

/// A value tied to the streams that work on it. When dropped, the value goes to the reaper once the
/// streams are past the work that they were given.
#[derive(Debug)]
pub(crate) struct DropAfterFence<T: Send + 'static> {
    /// `None` only while dropping.
    value: Option<T>,
    streams: Arc<StreamSet>,
    reactor: Arc<Reactor>,
    owner_process: OwnerProcess,
    linger: Duration,
}

impl<T: Send + 'static> DropAfterFence<T> {
    /// Ties `value` to `streams`, in which other owners may record uses, too.
    pub(crate) fn new(streams: Arc<StreamSet>, value: T) -> Result<DropAfterFence<T>> {
        Ok(DropAfterFence {
            value: Some(value),
            streams,
            reactor: Reactor::of_process()?,
            owner_process: OwnerProcess::current(),
            linger: Duration::ZERO,
        })
    }

    /// Keeps the value that much longer than its streams need it.
    pub(crate) fn lingering(mut self, linger: Duration) -> DropAfterFence<T> {
        self.linger = linger;
        self
    }

    /// The set in which a stream is recorded before it is given work on the value.
    pub(crate) fn streams(&self) -> &Arc<StreamSet> {
        &self.streams
    }

    pub(crate) fn reactor(&self) -> &Arc<Reactor> {
        &self.reactor
    }

    pub(crate) fn owner_process(&self) -> OwnerProcess {
        self.owner_process
    }
}

impl<T: Send + 'static> Deref for DropAfterFence<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("present until dropped")
    }
}

impl<T: Send + 'static> Drop for DropAfterFence<T> {
    fn drop(&mut self) {
        let Some(value) = self.value.take() else {
            return;
        };
        if !self.owner_process.is_current() {
            // In a forked child the value is the parent's.
            return std::mem::forget(value);
        }
        let mut fence = Fence::later(self.streams.clone());
        let end = Instant::now() + self.linger;
        self.reactor.drop_after(move || {
            let _owned = &value;
            match fence.is_reached() {
                true if Instant::now() < end => DropReadiness::Held,
                is_reached => is_reached.into(),
            }
        });
    }
}

impl Reactor {
    /// Has the reaper drop `value` once `fence` is reached.
    pub(crate) fn drop_value_after<T: Send + 'static>(&self, fence: Fence, value: T) {
        self.call_after(fence, move || {
            let _owned = &value;
        });
    }

    /// Has the fence thread call `then` once, when `fence` is reached. The reaper drops `then`
    /// afterwards. There is no time limit.
    pub(crate) fn call_after(&self, mut fence: Fence, mut then: impl FnMut() + Send + 'static) {
        self.drop_after(move || {
            let is_reached = fence.is_reached();
            if is_reached {
                then();
            }
            is_reached
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::device::Device;

    struct Told(mpsc::Sender<()>);

    impl Drop for Told {
        fn drop(&mut self) {
            let _ = self.0.send(());
        }
    }

    fn tied(stream: &crate::Stream) -> (DropAfterFence<Told>, mpsc::Receiver<()>) {
        let (tell, told) = mpsc::channel();
        let tied = DropAfterFence::new(Arc::default(), Told(tell)).unwrap();
        tied.streams().record_use(stream);
        (tied, told)
    }

    #[test]
    fn a_value_lives_until_its_stream_is_past_it() {
        let stream = Device::host().stream().unwrap();
        let (tied, told) = tied(&stream);
        let (go, wait) = mpsc::channel::<()>();
        stream.call(move || assert!(wait.recv().is_err())).unwrap();
        drop(tied);
        assert!(
            told.recv_timeout(Duration::from_millis(50)).is_err(),
            "it lives"
        );
        drop(go);
        told.recv_timeout(Duration::from_secs(10))
            .expect("it is dropped");
    }

    #[test]
    fn a_value_whose_streams_are_idle_is_dropped_soon() {
        let (tied, told) = tied(&Device::host().stream().unwrap());
        drop(tied);
        told.recv_timeout(Duration::from_secs(10))
            .expect("it is dropped");
    }

    #[test]
    fn a_value_that_lingers_lives_on_behind_idle_streams_and_is_dropped_then() {
        let stream = Device::host().stream().unwrap();
        let (hour, told_then) = tied(&stream);
        drop(hour.lingering(Duration::from_secs(3600)));
        let (moment, told) = tied(&stream);
        drop(moment.lingering(Duration::from_millis(5)));
        told.recv_timeout(Duration::from_secs(10))
            .expect("it is dropped");
        told_then.try_recv().expect_err("it lives");
    }
}
