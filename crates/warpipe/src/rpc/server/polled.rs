//! How a server sleeps and is woken: in a call of its own, or in a caller's event loop.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime,
};

use super::{SCAN_INTERVAL, Server};
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::os::timespec;
use crate::pubsub::Subscriber;

/// A timer for the directory scans of a server, which is not started.
pub(super) fn scan_timer() -> Result<CloseOnForkFd> {
    let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
    let timer = CloseOnForkFd::open(|| timerfd_create(TimerfdClockId::Monotonic, flags));
    timer.map_err(|e| Error::os("timerfd_create", "a server", e))
}

impl Server {
    /// Sets whether the clients are asked to ring. The clients of a polled server always are.
    pub(super) fn set_asleep(&self, asleep: bool) {
        if asleep || !self.is_polled.load(Relaxed) {
            self.requests()
                .for_each(|requests| requests.set_asleep(asleep));
        }
    }

    /// Has the timer ring for a scan so often; with zero, no more.
    pub(in crate::rpc) fn set_scans_every(&self, interval: Duration) {
        let times = Itimerspec {
            it_interval: timespec(interval),
            it_value: timespec(interval),
        };
        // A valid timer and valid times: this does not fail.
        let _ = timerfd_settime(&self.scan_timer, TimerfdTimerFlags::empty(), &times);
    }

    /// Drains the events that come within `limit`.
    pub(super) fn wait_events(&mut self, limit: Duration) {
        for tag in self.readable.wait(limit) {
            self.handle_event(tag);
        }
    }
}

impl Server {
    /// Makes the descriptor of [`AsFd`] readable once: for a caller that keeps a request aside for
    /// an event loop.
    #[doc(hidden)] // For the Python package.
    pub fn ring(&self) {
        self.doorbell.ring();
    }
}

impl AsFd for Server {
    /// A descriptor that is readable when an [`accept`](Server::accept) without a wait is worth a
    /// call (an epoll descriptor; it nests). Accept until it says `Error::Timeout` before waiting
    /// on it. Once a second it is readable for a scan of the directory, which reconnects to clients
    /// after their links have failed.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use warpipe::{Client, Device, Domain, Layout, Server};
    /// # let folder = std::env::temp_dir().join(format!("warpipe-polled-{}", std::process::id()));
    /// # let (domain, device) = (Domain::at(&folder)?, Device::host());
    /// # let (stream, soon) = (device.stream()?, Duration::from_secs(10));
    /// # let client = Client::new("embed", domain.on(&device))?;
    /// # let mut input = client.loan(&Layout::bytes_only(8)?)?;
    /// # input.write(&stream, b"question")?;
    /// # let pending = client.request(input, &stream, soon)?;
    /// # let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
    /// # runtime.block_on(async {
    /// use tokio::io::unix::AsyncFd;
    ///
    /// let server = Server::new("embed", domain.on(&device))?;
    /// let mut readable = AsyncFd::new(server).unwrap();
    /// let request = loop {
    ///     let mut guard = readable.readable_mut().await.unwrap();
    ///     match guard.get_inner_mut().accept(&stream, Duration::ZERO) {
    ///         Err(warpipe::Error::Timeout { .. }) => guard.clear_ready(),
    ///         accepted => break accepted?,
    ///     }
    /// };
    /// request.complete(None, &stream)?;
    /// # Ok::<(), warpipe::Error>(())
    /// # })?;
    /// # drop(pending.wait(&stream, soon)?); drop(client); std::fs::remove_dir_all(folder).ok();
    /// # Ok::<(), warpipe::Error>(())
    /// ```
    fn as_fd(&self) -> BorrowedFd<'_> {
        // In a forked child the timer's number may be another file's.
        if self.scan_timer.is_own() && !self.is_polled.swap(true, Relaxed) {
            self.set_scans_every(SCAN_INTERVAL);
        }
        self.set_asleep(true);
        if self.last_scan.is_none() || self.requests().any(Subscriber::may_have_news) {
            self.doorbell.ring();
        }
        self.readable.as_fd()
    }
}

impl std::os::fd::AsRawFd for Server {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.as_fd().as_raw_fd()
    }
}
