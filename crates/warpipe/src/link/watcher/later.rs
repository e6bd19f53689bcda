//! Descriptors that are not listened to before the next tick, because this process has no room for what they bring.
//!
//! A socket that is left unread stays readable: to listen on would have the watcher do nothing else.

use super::*;

impl Watcher {
    /// Listens to a watch no more, until the next tick.
    pub(super) fn put_off(&self, id: u64) {
        let mut tables = self.lock();
        let Some(entry) = tables.watches.get(&id) else { return };
        if let Some(fd) = entry.fd {
            // Not only masked: an end is told of whatever is asked for.
            let _ = epoll::delete(&self.epoll, watched(fd));
        }
        tables.later.push(id);
        drop(tables);
        // The attendant may have come here: the watcher is to know that a tick is due.
        self.bell.ring();
    }

    /// Listens again to all that were put off.
    pub(super) fn resume(&self) {
        let mut tables = self.lock();
        let due = std::mem::take(&mut tables.later);
        let (mut still, mut raised) = (Vec::new(), Vec::new());
        for id in due {
            match tables.watches.get(&id).map(|entry| (entry.fd, entry.events)) {
                Some((Some(fd), events)) if !self.takes_up(id, fd, events) => still.push(id),
                Some((None, _)) => raised.push(id),
                _ => {}
            }
        }
        tables.later.append(&mut still);
        drop(tables);
        raised.into_iter().for_each(|id| self.raise(id));
    }

    /// False if the kernel has no memory for it just now.
    fn takes_up(&self, id: u64, fd: RawFd, events: epoll::EventFlags) -> bool {
        use rustix::io::Errno;
        let added = epoll::add(&self.epoll, watched(fd), epoll::EventData::new_u64(id), events);
        matches!(added, Ok(()) | Err(Errno::EXIST))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    /// Has no room for what its bell says until it has been asked three times.
    struct Short {
        bell: Bell,
        is_attended: bool,
        ticks: AtomicU32,
        /// How many ticks had passed at each call.
        calls: Mutex<Vec<u32>>,
    }

    impl Watched for Short {
        fn on_ready(&self, _: u64) -> Next {
            let mut calls = self.calls.lock().unwrap();
            calls.push(self.ticks.load(Ordering::SeqCst));
            if calls.len() < 3 {
                return Next::Later;
            }
            self.bell.drain();
            Next::Keep
        }

        fn on_tick(&self, _: u64) {
            self.ticks.fetch_add(1, Ordering::SeqCst);
        }

        fn is_attended(&self) -> bool {
            self.is_attended
        }
    }

    fn calls_of(is_attended: bool, has_descriptor: bool) -> Vec<u32> {
        let watcher = Watcher::start(OVERDUE_AFTER).unwrap();
        let (bell, ticks, calls) = (Bell::new().unwrap(), AtomicU32::new(0), Mutex::default());
        let short = Arc::new(Short { bell, is_attended, ticks, calls });
        let me: Weak<dyn Watched> = Arc::downgrade(&short) as Weak<dyn Watched>;
        watcher.tick(me.clone());
        let watch =
            if has_descriptor { watcher.watch(short.bell.as_fd(), &me, 0).unwrap() } else { watcher.signal(&me, 0) };
        short.bell.ring();
        if !has_descriptor {
            watcher.raise(watch.id());
        }
        let start = Instant::now();
        let (mut told, mut count) = (0, 0);
        while count < 4 {
            assert!(start.elapsed() < Duration::from_secs(60), "{:?}", short.calls.lock().unwrap());
            std::thread::yield_now();
            count = short.calls.lock().unwrap().len();
            if count == 3 && told == 0 {
                told = 1;
                // Once it has room, it is listened to as before.
                short.bell.ring();
                (!has_descriptor).then(|| watcher.raise(watch.id()));
            }
        }
        drop(watch);
        short.calls.lock().unwrap().clone()
    }

    #[test]
    fn what_there_is_no_room_for_is_looked_at_once_with_each_tick() {
        for (is_attended, has_descriptor) in [(false, true), (true, true), (false, false), (true, false)] {
            let calls = calls_of(is_attended, has_descriptor);
            assert!(calls[0] < calls[1] && calls[1] < calls[2], "{is_attended} {has_descriptor} {calls:?}");
        }
    }
}
