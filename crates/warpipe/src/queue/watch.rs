//! Notifies an event loop that a queue has changed.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use crate::runtime::doorbell::LocalDoorbell;

/// A descriptor of one event loop (`eventfd`), readable when the state of a queue's jobs has
/// changed: then [`quiet`](Self::quiet) it and poll, in this order. It may ring without a change.
/// It rings as long as it lives, and once more when the queue ends.
///
/// ```
/// use std::os::fd::AsFd;
/// use std::time::Duration;
/// use warpipe::{Device, Domain, OptionalExtension, Queue, Worker};
/// # let folder = std::env::temp_dir().join(format!("warpipe-watch-{}", std::process::id()));
/// # let (domain, device) = (Domain::at(&folder)?, Device::host());
/// let queue = Queue::new("jobs", domain.on(&device))?;
/// let watch = queue.watch()?;
/// let stream = device.stream()?;
/// let job = queue.submit_bytes(b"input", &stream)?;
/// let mut worker = Worker::open("jobs", domain.on(&device), Duration::ZERO)?;
/// worker.lease(&stream, Duration::from_secs(1))?.complete(None, &stream)?;
/// while !job.is_done()? {
///     // An event loop usually sleeps here, on many descriptors.
///     rustix::event::poll(&mut [rustix::event::PollFd::new(&watch, rustix::event::PollFlags::IN)], None).unwrap();
///     watch.quiet();
/// }
/// assert!(job.wait(&stream, Duration::ZERO).optional()?.is_some());
/// # drop((worker, queue)); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
#[derive(Debug)]
pub struct QueueWatch {
    doorbell: Arc<LocalDoorbell>,
}

impl QueueWatch {
    pub(super) fn new(doorbell: Arc<LocalDoorbell>) -> QueueWatch {
        QueueWatch { doorbell }
    }

    /// Drains the rings so far.
    pub fn quiet(&self) {
        self.doorbell.drain();
    }
}

impl AsFd for QueueWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.doorbell.as_fd()
    }
}
