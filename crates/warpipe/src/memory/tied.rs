//! What streams may still touch: let go only behind a proof of our own that they are past it.

use std::ops::Deref;
use std::sync::Arc;

use crate::error::Result;
use crate::fork::Home;
use crate::link::proof::Streams;
use crate::link::watcher::Watcher;

/// A value tied to the streams that work on it. Dropped, it goes to the reaper once they are past what they were given.
#[derive(Debug)]
pub(crate) struct Tied<T: Send + 'static> {
    /// `None` only while dropping.
    value: Option<T>,
    streams: Arc<Streams>,
    watcher: Arc<Watcher>,
    home: Home,
}

impl<T: Send + 'static> Tied<T> {
    /// Of `streams`, which others may note, too.
    pub(crate) fn to(streams: Arc<Streams>, value: T) -> Result<Tied<T>> {
        Ok(Tied { value: Some(value), streams, watcher: Watcher::of_process()?, home: Home::here() })
    }

    /// The streams to note before they are given work on it.
    pub(crate) fn streams(&self) -> &Arc<Streams> {
        &self.streams
    }

    pub(crate) fn watcher(&self) -> &Arc<Watcher> {
        &self.watcher
    }

    pub(crate) fn home(&self) -> Home {
        self.home
    }
}

impl<T: Send + 'static> Deref for Tied<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("present until dropped")
    }
}

impl<T: Send + 'static> Drop for Tied<T> {
    fn drop(&mut self) {
        let Some(value) = self.value.take() else { return };
        if !self.home.is_here() {
            // A forked child: nothing of it is ours to close.
            return std::mem::forget(value);
        }
        let (streams, mut proof) = (self.streams.clone(), None);
        self.watcher.retire(move || {
            let _held = &value;
            proof.get_or_insert_with(|| streams.mark()).is_passed()
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

    fn tied(stream: &crate::Stream) -> (Tied<Told>, mpsc::Receiver<()>) {
        let (tell, told) = mpsc::channel();
        let tied = Tied::to(Arc::default(), Told(tell)).unwrap();
        tied.streams().note(stream);
        (tied, told)
    }

    #[test]
    fn a_value_lives_until_its_stream_is_past_it() {
        let stream = Device::host().stream().unwrap();
        let (tied, told) = tied(&stream);
        let (go, wait) = mpsc::channel::<()>();
        stream.call(move || assert!(wait.recv().is_err())).unwrap();
        drop(tied);
        assert!(told.recv_timeout(Duration::from_millis(50)).is_err(), "it lives");
        drop(go);
        told.recv_timeout(Duration::from_secs(10)).expect("it is dropped");
    }

    #[test]
    fn a_value_whose_streams_are_idle_is_dropped_soon() {
        let (tied, told) = tied(&Device::host().stream().unwrap());
        drop(tied);
        told.recv_timeout(Duration::from_secs(10)).expect("it is dropped");
    }
}
