//! What streams may still touch: let go only behind a proof of our own that they are past it.

use std::ops::Deref;
use std::sync::Arc;

use crate::error::Result;
use crate::fork::OwnerProcess;
use crate::runtime::fence::StreamSet;
use crate::runtime::reactor::Reactor;

/// A value tied to the streams that work on it. Dropped, it goes to the reaper once they are past what they were given.
#[derive(Debug)]
pub(crate) struct DropAfterFence<T: Send + 'static> {
    /// `None` only while dropping.
    value: Option<T>,
    streams: Arc<StreamSet>,
    reactor: Arc<Reactor>,
    owner_process: OwnerProcess,
}

impl<T: Send + 'static> DropAfterFence<T> {
    /// Of `streams`, which others may note, too.
    pub(crate) fn new(streams: Arc<StreamSet>, value: T) -> Result<DropAfterFence<T>> {
        Ok(DropAfterFence {
            value: Some(value),
            streams,
            reactor: Reactor::of_process()?,
            owner_process: OwnerProcess::current(),
        })
    }

    /// The streams to note before they are given work on it.
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
            // A forked child: nothing of it is ours to close.
            return std::mem::forget(value);
        }
        let (streams, mut fence) = (self.streams.clone(), None);
        self.reactor.drop_after(move || {
            let _held = &value;
            fence.get_or_insert_with(|| streams.fence()).is_reached()
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

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
}
