//! How a server sleeps and is woken: in a call of its own, or in a caller's event loop.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::time::Duration;

use rustix::event::epoll;

use super::{ClientLink, SCAN_INTERVAL, Server};
use crate::error::Result;
use crate::os::timespec;
use crate::runtime::doorbell::LocalDoorbell;
use crate::runtime::reactor::{EventSource, Next, Reactor, TICK};

/// How many ticks of the reactor pass between two scans.
const TICKS_PER_SCAN: u64 = (SCAN_INTERVAL.as_millis() / TICK.as_millis()) as u64;

/// Rings for the directory scan of a server that is polled and so sleeps in no call of its own.
#[derive(Debug)]
pub(in crate::rpc) struct ScanTimer {
    doorbell: Arc<LocalDoorbell>,
    pub(in crate::rpc) is_on: AtomicBool,
    ticks: AtomicU64,
}

impl ScanTimer {
    pub(super) fn start(doorbell: &Arc<LocalDoorbell>) -> Result<Arc<ScanTimer>> {
        let timer = Arc::new(ScanTimer {
            doorbell: doorbell.clone(),
            is_on: AtomicBool::new(false),
            ticks: AtomicU64::new(0),
        });
        let me = Arc::downgrade(&timer);
        Reactor::of_process()?.register_ticks(me);
        Ok(timer)
    }
}

impl EventSource for ScanTimer {
    fn on_ready(&self, _: u64) -> Next {
        Next::Stop
    }

    fn on_tick(&self, _: u64) {
        let ticks = self.ticks.fetch_add(1, Relaxed);
        if self.is_on.load(Relaxed) && ticks.is_multiple_of(TICKS_PER_SCAN) {
            self.doorbell.ring();
        }
    }
}

impl Server {
    /// Sets whether the clients are asked to ring. The clients of a polled server always are.
    pub(super) fn set_asleep(&self, asleep: bool) {
        if asleep || !self.is_polled.load(Relaxed) {
            for ClientLink { worker, .. } in &self.clients {
                match asleep {
                    true => worker.jobs.fall_asleep(),
                    false => worker.jobs.wake_up(),
                }
            }
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
    ///     match guard.get_inner_mut().accept(&stream, Duration::ZERO) {
    ///         Err(warpipe::Error::Timeout { .. }) => guard.clear_ready(),
    ///         accepted => break accepted?,
    ///     }
    /// };
    /// request.complete(&stream)?;
    /// # Ok::<(), warpipe::Error>(())
    /// # })?;
    /// # drop(pending.wait(&stream, soon)?); drop(client); std::fs::remove_dir_all(folder).ok();
    /// # Ok::<(), warpipe::Error>(())
    /// ```
    fn as_fd(&self) -> BorrowedFd<'_> {
        if !self.is_polled.swap(true, Relaxed) {
            self.scan_timer.is_on.store(true, Relaxed);
        }
        self.set_asleep(true);
        if self.last_scan.is_none() || self.has_news() {
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
