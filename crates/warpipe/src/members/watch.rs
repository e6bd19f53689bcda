//! The public handle of a watch and its options.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::mpsc::channel;

use super::changes::Callback;
use super::monitor::{DirectoryMonitor, WatchShared};
use super::table::with_endpoints;
use super::{Change, MemberInfo, endpoint};
use crate::debug::opaque_debug;
use crate::error::{Error, Result};
use crate::fork::leak_on_fork::LeakOnFork;
use crate::fork::thread::Thread;
use crate::ipc::domain::Domain;
use crate::options::chosen_domain;
use crate::options::in_domain;
use crate::runtime::reactor::STALLED_AFTER;
use crate::wait::Wait;

/// The members of a domain, followed until this is dropped. The drop does not wait for a callback
/// that is running.
///
/// Costs two threads and, for each member, a socket, a pidfd and a page. A watch is not a member:
/// no other watch sees it.
///
/// ```
/// use std::time::Duration;
/// use warpipe::{Change, Domain, Member, MemberOptions, Members, MembersOptions};
/// # let folder = std::env::temp_dir().join(format!("warpipe-members-{}", std::process::id()));
/// let domain = Domain::at(&folder)?; // Domain::from_environment() in a program
/// let members = Members::new(domain.options())?;
/// let options = MemberOptions { role: "worker".into(), ..domain.options() };
/// let member = Member::new("worker-1", options)?;
///
/// let joined = members.changes(Duration::from_secs(10))?;
/// let Some(Change::Joined(joined)) = joined else { panic!("{joined:?}") };
/// assert_eq!((&*joined.name, &*joined.role), ("worker-1", "worker"));
/// assert_eq!(members.list()?.len(), 1);
///
/// drop(member);
/// assert!(matches!(members.changes(Duration::from_secs(10))?, Some(Change::Left(_))));
/// # drop(members); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
///
/// # Clean-up when a member dies
///
/// * Its names: a watch removes the sockets and lock files that the dead process left anywhere in
///   the domain (see [`MembersOptions::keep_files`]), so that a successor can take them.
/// * The clean-ups that are registered for it with [`Members::on_death_of`].
/// * Its samples, memory, permits and jobs come back without this module: each process that shares
///   them sees the same proof, and reclaims them then.
pub struct Members {
    watch: LeakOnFork<Watch>,
    calls_back: bool,
}

/// The threads that watch, until this is dropped.
struct Watch {
    shared: Arc<WatchShared>,
    monitor: Option<Thread>,
}

/// The options of a watch, [`Members`].
#[derive(Debug, Clone, Default)]
pub struct MembersOptions {
    /// The domain to watch; the environment's by default.
    pub domain: Option<Domain>,
    /// Whether the endpoints of dead members stay in the domain. By default the watch removes them:
    /// a file only under its lock, so no living process loses one, also when several watches clean.
    pub keep_files: bool,
}

in_domain!(MembersOptions);

opaque_debug!(Members { calls_back });

impl Members {
    /// Starts to watch a domain (`inotify_init(2)`). Waits until the present members have answered,
    /// at most a second for those that do not. [`changes`](Self::changes) returns the changes.
    ///
    /// # Errors
    /// [`Error::Os`] when there is no watch, thread or descriptor left.
    pub fn new(options: MembersOptions) -> Result<Members> {
        Members::start(options, None)
    }

    /// As [`new`](Self::new), and calls `callback` with each change, one after the other, on a
    /// thread of this watch. The callback may be slow (see [`merged`](Self::merged)) and may panic.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    ///
    /// ```
    /// use std::sync::mpsc::channel;
    /// use std::time::Duration;
    /// # use warpipe::{Change, Domain, Member, Members};
    /// # let folder = std::env::temp_dir().join(format!("warpipe-on-{}", std::process::id()));
    /// # let domain = Domain::at(&folder)?;
    /// let (sender, told) = channel();
    /// let tell = move |change: &Change| drop(sender.send(change.clone()));
    /// let members = Members::with_callback(domain.options(), tell)?;
    /// let member = Member::new("sampler", domain.options())?;
    /// assert!(matches!(told.recv_timeout(Duration::from_secs(10)), Ok(Change::Joined(_))));
    /// # drop((member, members)); std::fs::remove_dir_all(folder).ok();
    /// # Ok::<(), warpipe::Error>(())
    /// ```
    pub fn with_callback(
        options: MembersOptions,
        callback: impl FnMut(&Change) + Send + 'static,
    ) -> Result<Members> {
        Members::start(options, Some(Box::new(callback)))
    }

    fn start(options: MembersOptions, callback: Option<Callback>) -> Result<Members> {
        let domain = chosen_domain(&options.domain)?;
        let shared = Arc::new(WatchShared::new(domain, !options.keep_files)?);
        let (unsettled, settled) = channel();
        let monitor = DirectoryMonitor::new(shared.clone(), unsettled)?;
        let calls_back = callback.is_some();
        let queue = shared.queue.clone();
        let mut watch = LeakOnFork::new(Watch {
            shared,
            monitor: None,
        });
        let serve = move || queue.serve(callback);
        match calls_back {
            true => Thread::start_for_users("warpipe-notify", serve)?,
            false => Thread::start("warpipe-notify", serve)?,
        };
        watch.monitor = Some(Thread::start("warpipe-members", move || monitor.run())?);
        // The monitor bounds this wait. The limit covers a machine on which it does not run at all.
        let _ = settled.recv_timeout(10 * STALLED_AFTER);
        Ok(Members { watch, calls_back })
    }

    /// All present members, sorted by name, with the endpoints that each member's process holds.
    ///
    /// A process that has a member's name and does not answer (it was stopped before this watch
    /// began) is listed as [`Stalled`](crate::PeerState::Stalled), with an empty role. A listener
    /// under the name that does not hold its lock is not listed. The name is listed twice while a
    /// dead member's proof is awaited and its successor is present already.
    ///
    /// # Errors
    /// [`Error::Os`] when the directory cannot be read; [`Error::State`].
    pub fn list(&self) -> Result<Vec<MemberInfo>> {
        let shared = &self.watch.get()?.shared;
        let list = shared.table().list();
        with_endpoints(list, &shared.domain)
    }

    /// The next change; `None` if there was none before the wait was over. The members that were
    /// present when the watch began come first, as [`Joined`](Change::Joined).
    ///
    /// # Errors
    /// [`Error::Argument`] if this watch has a callback, which gets the changes; [`Error::State`].
    pub fn changes<'w>(&self, wait: impl Into<Wait<'w>>) -> Result<Option<Change>> {
        let shared = &self.watch.get()?.shared;
        if self.calls_back {
            let found = "asked of a watch with a callback";
            let allowed = "either the one or the other";
            return Err(Error::argument("changes", found, allowed));
        }
        Ok(shared.queue.take(&wait.into()))
    }

    /// Calls `cleanup` once, when a member of this name has died (not when it leaves): the present
    /// one, or the next that dies. The call runs on the callback thread, after the member's
    /// endpoints are removed. The drop of the watch drops it uncalled.
    ///
    /// # Errors
    /// [`Error::Name`] for a name that no member can have; [`Error::Argument`] beyond 4096 at a
    /// time; [`Error::State`].
    pub fn on_death_of(
        &self,
        name: &str,
        cleanup: impl FnOnce(&MemberInfo) + Send + 'static,
    ) -> Result<()> {
        let shared = &self.watch.get()?.shared;
        endpoint(name)?;
        shared.table().register(name, Box::new(cleanup))
    }

    /// The states of all members, also of those that hold no lock in the domain.
    #[cfg(test)]
    pub(super) fn states(&self) -> Vec<crate::ipc::PeerState> {
        let list = self.watch.shared.table().list();
        list.into_iter().map(|(member, _)| member.state).collect()
    }

    /// How many changes were dropped because more than 4096 waited: first
    /// [`Stalled`](Change::Stalled) and [`Recovered`](Change::Recovered), then members that joined
    /// and left meanwhile. [`list`](Self::list) stays right, and clean-ups still run.
    pub fn merged(&self) -> u64 {
        self.watch.shared.queue.merged()
    }

    /// How many names under `members/` the last scan could not follow: they answer as another kind
    /// or in an unknown way, or 1024 are followed already, or this process has no
    /// descriptor left.
    pub fn overlooked(&self) -> usize {
        self.watch.shared.table().overlooked
    }
}

impl AsFd for Members {
    /// A descriptor that is readable while [`changes`](Members::changes) has a change (an eventfd;
    /// only for polling).
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.watch.shared.queue.doorbell.as_fd()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.close();
        self.shared.queue.close();
        // Bounded: the monitor waits only, for a moment, for an endpoint that it is clearing.
        if let Some(monitor) = self.monitor.take() {
            monitor.join();
        }
    }
}
