//! Descriptors that are not polled before the next tick, because this process has no room for their
//! messages.
//!
//! An unread socket stays readable: if epoll still reported it, the reactor would do nothing else.

use std::os::fd::RawFd;

use rustix::event::epoll;

use super::{Reactor, watched};

impl Reactor {
    /// Stops polling a registration until the next tick.
    pub(super) fn pause_until_tick(&self, id: u64) {
        let mut state = self.lock();
        let Some(entry) = state.registrations.get(&id) else {
            return;
        };
        if let Some(fd) = entry.fd {
            // An empty interest mask is not enough: epoll reports EPOLLHUP even then.
            let _ = epoll::delete(&self.epoll, watched(fd));
        }
        state.paused.push(id);
        drop(state);
        // The control thread may have called this: the reactor has to learn that a tick is due.
        self.doorbell.ring();
    }

    /// Polls all paused registrations again.
    pub(super) fn resume(&self) {
        let mut state = self.lock();
        let fence_polls = std::mem::take(&mut state.paused);
        let (mut still, mut triggered) = (Vec::new(), Vec::new());
        for id in fence_polls {
            match state
                .registrations
                .get(&id)
                .map(|entry| (entry.fd, entry.events))
            {
                Some((Some(fd), events)) if !self.listen_again_to(id, fd, events) => still.push(id),
                Some((None, _)) => triggered.push(id),
                _ => {}
            }
        }
        state.paused.append(&mut still);
        drop(state);
        triggered.into_iter().for_each(|id| self.trigger(id));
    }

    /// False if the kernel has no memory for the registration now.
    fn listen_again_to(&self, id: u64, fd: RawFd, events: epoll::EventFlags) -> bool {
        use rustix::io::Errno;
        let added = epoll::add(
            &self.epoll,
            watched(fd),
            epoll::EventData::new_u64(id),
            events,
        );
        matches!(added, Ok(()) | Err(Errno::EXIST))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::{Arc, Mutex, Weak};
    use std::time::{Duration, Instant};

    use super::super::{EventSource, Next, OVERDUE_AFTER};
    use super::*;
    use crate::runtime::doorbell::LocalDoorbell;

    /// Has no room for its doorbell's message until its third call.
    struct Short {
        doorbell: LocalDoorbell,
        runs_on_control_thread: bool,
        ticks: AtomicU32,
        /// How many ticks had passed at each call.
        calls: Mutex<Vec<u32>>,
    }

    impl EventSource for Short {
        fn on_ready(&self, _: u64) -> Next {
            let mut calls = self.calls.lock().unwrap();
            calls.push(self.ticks.load(Ordering::SeqCst));
            if calls.len() < 3 {
                return Next::RetryAtTick;
            }
            self.doorbell.drain();
            Next::Keep
        }

        fn on_tick(&self, _: u64) {
            self.ticks.fetch_add(1, Ordering::SeqCst);
        }

        fn runs_on_control_thread(&self) -> bool {
            self.runs_on_control_thread
        }
    }

    fn calls_of(runs_on_control_thread: bool, has_descriptor: bool) -> Vec<u32> {
        let reactor = Reactor::start(OVERDUE_AFTER).unwrap();
        let (doorbell, ticks, calls) = (
            LocalDoorbell::new().unwrap(),
            AtomicU32::new(0),
            Mutex::default(),
        );
        let short = Arc::new(Short {
            doorbell,
            runs_on_control_thread,
            ticks,
            calls,
        });
        let me: Weak<dyn EventSource> = Arc::downgrade(&short) as Weak<dyn EventSource>;
        reactor.register_ticks(me.clone());
        let watch = if has_descriptor {
            reactor.register(short.doorbell.as_fd(), &me, 0).unwrap()
        } else {
            reactor.register_trigger(&me, 0)
        };
        short.doorbell.ring();
        if !has_descriptor {
            reactor.trigger(watch.id());
        }
        let start = Instant::now();
        let (mut told, mut count) = (0, 0);
        while count < 4 {
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "{:?}",
                short.calls.lock().unwrap()
            );
            std::thread::yield_now();
            count = short.calls.lock().unwrap().len();
            if count == 3 && told == 0 {
                told = 1;
                // Once it has room, it is polled as before.
                short.doorbell.ring();
                (!has_descriptor).then(|| reactor.trigger(watch.id()));
            }
        }
        drop(watch);
        short.calls.lock().unwrap().clone()
    }

    #[test]
    fn a_message_without_room_is_retried_once_at_each_tick() {
        for (runs_on_control_thread, has_descriptor) in
            [(false, true), (true, true), (false, false), (true, false)]
        {
            let calls = calls_of(runs_on_control_thread, has_descriptor);
            assert!(
                calls[0] < calls[1] && calls[1] < calls[2],
                "{runs_on_control_thread} {has_descriptor} {calls:?}"
            );
        }
    }
}
