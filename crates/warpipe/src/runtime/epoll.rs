//! The descriptors that a thread sleeps on, in one: an epoll descriptor, which nests.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::event::epoll;
pub(crate) use rustix::event::epoll::EventFlags;

use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::os::timespec;

/// The most events that one sleep returns. The next one returns the others.
const EVENTS_MAX: usize = 16;

/// No sleep is longer: some kernels take only so much.
const SLEEP_MAX: Duration = Duration::from_secs(3600);

/// A set of watched descriptors, each with a tag.
#[derive(Debug)]
pub(crate) struct EpollSet(CloseOnForkFd);

impl EpollSet {
    /// An empty set, for `what`.
    pub(crate) fn new(what: &str) -> Result<EpollSet> {
        let epoll = CloseOnForkFd::open(|| epoll::create(epoll::CreateFlags::CLOEXEC));
        Ok(EpollSet(epoll.map_err(|error| {
            Error::os("epoll_create1", what, error)
        })?))
    }

    /// Watches a descriptor.
    pub(crate) fn add(&self, fd: impl AsFd, tag: u64, events: EventFlags) -> Result<()> {
        epoll::add(&self.0, fd, epoll::EventData::new_u64(tag), events)
            .map_err(|error| Error::os("epoll_ctl", "a watched descriptor", error))
    }

    /// Watches a descriptor again after an event with [`EventFlags::ONESHOT`].
    pub(crate) fn rearm(&self, fd: impl AsFd, tag: u64, events: EventFlags) {
        let _ = epoll::modify(&self.0, fd, epoll::EventData::new_u64(tag), events);
    }

    /// Watches a descriptor no more. False if it was not in the set.
    pub(crate) fn remove(&self, fd: impl AsFd) -> bool {
        epoll::delete(&self.0, fd).is_ok()
    }

    /// Sleeps until there are events, at most `limit`. Returns their tags; none also after a
    /// signal's handler.
    pub(crate) fn wait(&self, limit: Duration) -> impl Iterator<Item = u64> + use<> {
        let none = epoll::Event {
            flags: EventFlags::empty(),
            data: epoll::EventData::new_u64(0),
        };
        let mut events = [none; EVENTS_MAX];
        let limit = timespec(limit.min(SLEEP_MAX));
        let count = epoll::wait(&self.0, &mut events, Some(&limit)).unwrap_or(0);
        events.into_iter().take(count).map(|event| event.data.u64())
    }
}

impl AsFd for EpollSet {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
