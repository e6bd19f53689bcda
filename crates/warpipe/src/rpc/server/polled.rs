//! A server in an event loop.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::epoll;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};

use super::{Request, SCAN_INTERVAL, Server};
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::os::timespec;
use crate::stream::Stream;

/// The timer for the directory scan of a server that is polled and so sleeps in no call of its own.
#[derive(Debug)]
pub(in crate::rpc) struct ScanTimer {
    timer: CloseOnForkFd,
    /// Whether an event loop polls the descriptor: then clients are asked to ring for as long as
    /// the server lives.
    is_on: AtomicBool,
}

impl ScanTimer {
    pub(super) fn new() -> Result<ScanTimer> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer =
            CloseOnForkFd::open(|| rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags));
        let timer = timer.map_err(|e| Error::os("timerfd_create", "a server", e))?;
        Ok(ScanTimer {
            timer,
            is_on: AtomicBool::new(false),
        })
    }

    pub(super) fn is_on(&self) -> bool {
        self.is_on.load(Ordering::Relaxed)
    }

    fn start(&self) {
        if !self.is_on.swap(true, Ordering::Relaxed) {
            let every = timespec(SCAN_INTERVAL);
            let each = Itimerspec {
                it_interval: every,
                it_value: every,
            };
            // It cannot fail: the descriptor and the times are valid.
            let _ = rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &each);
        }
    }

    #[cfg(test)]
    pub(in crate::rpc) fn stop(&self) {
        let never = timespec(Duration::ZERO);
        let each = Itimerspec {
            it_interval: never,
            it_value: never,
        };
        rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &each).unwrap();
    }

    pub(super) fn quiet(&self) {
        let _ = rustix::io::read(&self.timer, &mut [0u8; 8]);
    }
}

impl AsFd for ScanTimer {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }
}

impl Server {
    /// The next request, if there is one: [`accept`](Self::accept) without waiting. It attaches to
    /// new clients in the same way.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use warpipe::{Client, Device, Domain, Layout, Server};
    /// # let folder = std::env::temp_dir().join(format!("warpipe-polled-{}", std::process::id()));
    /// # let (domain, device) = (Domain::at(&folder)?, Device::host());
    /// # let (stream, soon) = (device.stream()?, Duration::from_secs(10));
    /// # let client = Client::builder("embed").domain(&domain).device(&device).build()?;
    /// # let mut input = client.loan(&Layout::bytes_only(8)?)?;
    /// # input.write(&stream, b"question")?;
    /// # let pending = client.request(input, &stream, soon)?;
    /// # let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
    /// # runtime.block_on(async {
    /// use tokio::io::unix::AsyncFd;
    ///
    /// let server = Server::builder("embed").domain(&domain).device(&device).build()?;
    /// let mut readable = AsyncFd::new(server).unwrap();
    /// let request = loop {
    ///     let mut guard = readable.readable_mut().await.unwrap();
    ///     match guard.get_inner_mut().try_accept(&stream)? {
    ///         Some(request) => break request,
    ///         None => guard.clear_ready(),
    ///     }
    /// };
    /// request.reply(&stream)?;
    /// # Ok::<(), warpipe::Error>(())
    /// # })?;
    /// # drop(pending.wait(&stream)?); drop(client); std::fs::remove_dir_all(folder).ok();
    /// # Ok::<(), warpipe::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`accept`](Self::accept), without the timeout.
    pub fn try_accept(&mut self, stream: &Stream) -> Result<Option<Request>> {
        self.owner_process.check()?;
        let is_polled = self.scan_timer.is_on();
        if is_polled {
            // Drained before the poll: a later ring is about later events.
            self.wait_events(Duration::ZERO);
        }
        self.scan_directory()?;
        if let Some(request) = self.poll(stream)? {
            return Ok(Some(request));
        }
        if let Some(error) = self.attach_error.take() {
            return Err(error);
        }
        if !is_polled {
            return Ok(None);
        }
        self.set_asleep(true);
        // Requests that came before the clients were asked to ring did not ring.
        self.poll(stream)
    }

    /// Sets whether the clients are asked to ring. The clients of a polled server always are.
    pub(super) fn set_asleep(&self, asleep: bool) {
        if asleep || !self.scan_timer.is_on() {
            self.clients
                .iter()
                .for_each(|link| link.worker.set_asleep(asleep));
        }
    }

    /// Drains the events that come within `limit`.
    pub(super) fn wait_events(&mut self, limit: Duration) {
        let mut room = [const { MaybeUninit::uninit() }; 16];
        if let Ok((events, _)) = epoll::wait(&self.readable, &mut room, Some(&timespec(limit))) {
            for event in events {
                self.handle_event(event.data.u64());
            }
        }
    }
}

impl Server {
    /// Makes the descriptor of [`AsFd`] readable once: for a caller that keeps a request aside for
    /// an event loop.
    pub fn ring(&self) {
        self.doorbell.ring();
    }
}

impl AsFd for Server {
    /// A descriptor that is readable when [`try_accept`](Server::try_accept) is worth a call (an
    /// epoll descriptor; it nests). Accept until it gives `None` before waiting on it. Once a
    /// second it is readable for a scan of the directory, which reconnects to clients after their
    /// links have failed.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.scan_timer.start();
        self.set_asleep(true);
        if self.last_scan.is_none() || self.clients.iter().any(|link| link.worker.may_have_news()) {
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
