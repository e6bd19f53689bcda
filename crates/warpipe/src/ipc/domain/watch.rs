//! Notifies waiters of new files in a directory: one inotify instance for a directory, however many
//! wait.
//!
//! The release of an inotify instance takes the kernel tens of milliseconds (it waits for an RCU
//! grace period). So the [closer's](crate::runtime::closer) threads release it. In a process that
//! ends, its release must come behind that of the lifeline: a copy of the instance lies in flight
//! in a socket of its own, as the lifeline's pipe does, so it is released in a later pass of the
//! dying task than the files, and after the lifeline: its socket has a lower number. Where this
//! user may have no more descriptors in flight, the instance is an ordinary descriptor, and the
//! proof of this process's death comes later by that time.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, Weak};

use rustix::fs::inotify::{self, WatchFlags};
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::fork::per_process::PerProcess;
use crate::fork::{CloseOnForkFd, lifeline};
use crate::mutex::LockUnpoisoned;
use crate::runtime::closer::close_later;
use crate::runtime::doorbell::LocalDoorbell;
use crate::runtime::reactor::{EventSource, Next, Reactor, Registration, Watch};

/// Reports new files in a directory: readable from then on until it is [drained](Arrivals::drain).
#[derive(Debug)]
pub(crate) struct Arrivals {
    doorbell: Arc<LocalDoorbell>,
    #[cfg_attr(
        not(test),
        expect(dead_code, reason = "held, not used: it rings the bell")
    )]
    watch: Arc<DirectoryWatch>,
}

impl Arrivals {
    /// Consumes the notifications so far, so that the next arrival wakes again.
    pub(crate) fn drain(&self) {
        self.doorbell.drain();
    }
}

impl AsFd for Arrivals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.doorbell.as_fd()
    }
}

/// An inotify instance, and the socket in which a copy is in flight. When dropped, a closer's
/// thread releases them.
#[derive(Debug)]
pub(crate) struct Inotify(Vec<CloseOnForkFd>);

impl Inotify {
    /// `None` where this user has reached its limit of instances (`fs.inotify.max_user_instances`)
    /// or watches (`max_user_watches`), over all its processes, or may not read the directory (a
    /// domain of another user's lets it pass alone), or where a sandbox refuses the calls. Then the
    /// directory has to be polled.
    pub(crate) fn new(
        directory: &Path,
        wanted: WatchFlags,
        what: impl Into<String>,
    ) -> Result<Option<Inotify>> {
        match Inotify::make(directory, wanted) {
            Ok(made) => Ok(Some(made)),
            Err((_, Errno::MFILE | Errno::NFILE | Errno::NOSPC)) => Ok(None),
            Err((_, Errno::ACCESS | Errno::PERM | Errno::NOSYS)) => Ok(None),
            Err((call, error)) => Err(Error::os(call, what, error)),
        }
    }

    fn make(
        directory: &Path,
        wanted: WatchFlags,
    ) -> std::result::Result<Inotify, (&'static str, Errno)> {
        #[cfg(test)]
        tests::count()?;
        let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
        let instance = CloseOnForkFd::open(|| inotify::init(flags))
            .map_err(|error| ("inotify_init", error))?;
        let copy = CloseOnForkFd::open(|| lifeline::in_flight(instance.as_fd()));
        let inotify = Inotify([instance].into_iter().chain(copy).collect());
        inotify::add_watch(&inotify, directory, wanted)
            .map_err(|error| ("inotify_add_watch", error))?;
        Ok(inotify)
    }

    /// Consumes the pending events.
    pub(crate) fn drain(&self) {
        let mut events = [0u8; 4096];
        while matches!(rustix::io::read(self, &mut events), Ok(1..)) {}
    }
}

impl AsFd for Inotify {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0[0].as_fd()
    }
}

impl Drop for Inotify {
    fn drop(&mut self) {
        self.0.drain(..).for_each(close_later);
    }
}

/// A directory, and the doorbells that wait for it.
#[derive(Debug)]
struct DirectoryWatch {
    /// Declared first: the registration ends before its descriptor is closed. A forked child does
    /// not call the parent's reactor: its lock may be held by a thread that the child does not
    /// have.
    watch: LeakOnFork<OnceLock<Registration>>,
    /// Without an instance the listeners are notified at each tick.
    inotify: Option<Inotify>,
    listeners: Mutex<Vec<Weak<LocalDoorbell>>>,
}

/// A directory, by its device and inode.
pub(super) type Identity = (u64, u64);

/// The watched directories of this process.
static WATCHES: PerProcess<Mutex<Watches>> = PerProcess::new();

type Watches = HashMap<Identity, Weak<DirectoryWatch>>;

fn with_watches<R>(work: impl FnOnce(&mut Watches) -> R) -> R {
    let mut watches = WATCHES.lock();
    watches.retain(|_, watch| watch.strong_count() > 0);
    work(&mut watches)
}

impl DirectoryWatch {
    fn of_process(identity: Identity, path: &Path) -> Result<Arc<DirectoryWatch>> {
        let known = || with_watches(|watches| watches.get(&identity).and_then(Weak::upgrade));
        if let Some(known) = known() {
            return Ok(known);
        }
        let inotify = Inotify::new(path, WatchFlags::MOVED_TO, "watching the domain")?;
        let made = Arc::new(DirectoryWatch {
            watch: LeakOnFork::new(OnceLock::new()),
            inotify,
            listeners: Mutex::default(),
        });
        let reactor = Reactor::of_process()?;
        let me = Arc::downgrade(&made) as Weak<dyn EventSource>;
        match &made.inotify {
            Some(inotify) => {
                let watch = reactor.register(Watch::Readable(inotify.as_fd()), &me, 0)?;
                let _ = made.watch.set(watch);
            }
            None => reactor.register_ticks(me),
        }
        // Another thread may have been first.
        Ok(with_watches(|watches| {
            let first = watches.get(&identity).and_then(Weak::upgrade);
            first.unwrap_or_else(|| {
                watches.insert(identity, Arc::downgrade(&made));
                made.clone()
            })
        }))
    }
}

impl EventSource for DirectoryWatch {
    fn on_ready(&self, _: u64) -> Next {
        self.inotify.iter().for_each(Inotify::drain);
        self.ring();
        Next::Keep
    }

    fn on_tick(&self, _: u64) {
        if self.inotify.is_none() {
            self.ring();
        }
    }
}

impl DirectoryWatch {
    fn ring(&self) {
        let mut listeners = self.listeners.locked();
        listeners.retain(|doorbell| {
            doorbell
                .upgrade()
                .inspect(|doorbell| doorbell.ring())
                .is_some()
        });
    }
}

/// Rings the doorbell for files that appear from now on in the directory at `path`.
pub(super) fn arrivals(
    identity: Identity,
    path: &Path,
    doorbell: Arc<LocalDoorbell>,
) -> Result<Arrivals> {
    let watch = DirectoryWatch::of_process(identity, path)?;
    let mut listeners = watch.listeners.locked();
    listeners.retain(|doorbell| doorbell.strong_count() > 0);
    listeners.push(Arc::downgrade(&doorbell));
    drop(listeners);
    Ok(Arrivals { doorbell, watch })
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::fd::AsRawFd;
    use std::time::Duration;

    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    use super::*;
    use crate::hostile::alone;
    use crate::ipc::domain::Domain;
    use crate::ipc::message::wait_readable;

    /// Inotify instances that this process has made.
    pub(crate) static MADE: AtomicUsize = AtomicUsize::new(0);

    /// Simulates a user that has reached its limit of instances.
    pub(super) static IS_REFUSED: AtomicBool = AtomicBool::new(false);

    pub(super) fn count() -> std::result::Result<(), (&'static str, Errno)> {
        if IS_REFUSED.load(Ordering::SeqCst) {
            return Err(("inotify_init", Errno::MFILE));
        }
        MADE.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    #[test]
    fn without_an_instance_a_directory_is_looked_at_with_each_tick() {
        alone(
            module_path!(),
            "without_an_instance_a_directory_is_looked_at_with_each_tick",
            || {
                let folder = std::env::temp_dir()
                    .join(format!("warpipe-no-instance-{}", std::process::id()));
                IS_REFUSED.store(true, Ordering::SeqCst);
                let domain = Domain::at(&folder).unwrap();
                let arrivals = domain.arrivals().unwrap();
                for _ in 0..2 {
                    assert!(wait_readable(arrivals.as_fd(), Duration::from_secs(60)));
                    arrivals.drain();
                }
                let ticket = crate::Ticket::to(&domain, "memory").unwrap();
                let path = folder.join("ticket");
                std::thread::scope(|scope| {
                    let reading =
                        scope.spawn(|| crate::Ticket::read_file(&path, Duration::from_secs(60)));
                    ticket.write_file(&path).unwrap();
                    assert_eq!(reading.join().unwrap().unwrap(), ticket);
                });
                std::fs::remove_dir_all(folder).unwrap();
            },
        );
    }

    #[test]
    fn all_waiters_for_a_directory_share_one_instance_in_flight_and_each_is_notified() {
        let folder =
            std::env::temp_dir().join(format!("warpipe-domain-watch-{}", std::process::id()));
        let all: Vec<Arrivals> = (0..3)
            .map(|_| Domain::at(&folder).unwrap().arrivals().unwrap())
            .collect();
        assert!(
            all.iter()
                .all(|arrivals| Arc::ptr_eq(&arrivals.watch, &all[0].watch))
        );
        if let Some(copy) = (all[0].watch.inotify.as_ref()).and_then(|inotify| inotify.0.get(1)) {
            let info =
                std::fs::read_to_string(format!("/proc/self/fdinfo/{}", copy.as_fd().as_raw_fd()))
                    .unwrap();
            // Linux 5.9.
            assert!(
                info.contains("scm_fds:\t1")
                    || info.contains("scm_fds: 1")
                    || !info.contains("scm_fds"),
                "{info}"
            );
        }
        for name in ["one", "two"] {
            std::fs::write(folder.join(".new"), name).unwrap();
            std::fs::rename(folder.join(".new"), folder.join(name)).unwrap();
            for arrivals in &all {
                assert!(
                    wait_readable(arrivals.as_fd(), Duration::from_secs(20)),
                    "{name}"
                );
                arrivals.drain();
            }
        }
        let watch = Arc::downgrade(&all[0].watch);
        drop(all);
        // The reactor may hold it for a moment.
        let start = std::time::Instant::now();
        while watch.strong_count() > 0 {
            assert!(start.elapsed() < Duration::from_secs(20), "nobody keeps it");
            std::thread::yield_now();
        }
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn a_child_forked_while_another_thread_looks_up_a_directory_waits_for_it_on_its_own() {
        let folder =
            std::env::temp_dir().join(format!("warpipe-domain-fork-{}", std::process::id()));
        let domain = Domain::at(&folder).unwrap();
        let _ours = domain.arrivals().unwrap();
        let waits = || {
            let theirs = domain.arrivals().unwrap();
            std::fs::write(folder.join(".new"), "one").unwrap();
            std::fs::rename(folder.join(".new"), folder.join("one")).unwrap();
            wait_readable(theirs.as_fd(), Duration::from_secs(20))
        };
        crate::hostile::while_locked(&WATCHES, || crate::hostile::in_a_forked_child(waits));
        std::fs::remove_dir_all(folder).unwrap();
    }
}
