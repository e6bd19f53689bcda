//! The process at the other end, and the proof of its death.
//!
//! A death has three degrees of evidence ([`DeathEvidence`]). *Suspect*: the end of its socket
//! (which each link sees itself) or of its [alarm](crate::fork::lifeline), or its pidfd. The
//! process does no more, but its GPU may still write. *Proven*: the end of its lifeline; nothing of
//! that process touches memory any more. A pidfd proves less: a forked child that holds the
//! driver's files keeps the parent's device work running. *Orphaned*: proven, or suspect for an
//! orphan timeout with its lifeline still open; streams that wait for it are rescued then, but
//! memory waits on. A process has one [`Process`] here, however many links lead to it. After `exec`
//! it is another one: the pidfd is the same, the lifeline is not.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

use crate::debug::opaque_debug;
use crate::error::{Error, HandshakeFault, Result};
use crate::fork::lifeline::Lifeline;
use crate::fork::per_process::PerProcess;
use crate::fork::{self, CloseOnForkFd};
use crate::mutex::LockUnpoisoned;
use crate::os;
use crate::runtime::closer::PeerFd;
use crate::runtime::heartbeat::Uptime;
use crate::runtime::reactor::{EventSource, Next, Reactor, Registration, Watch};

/// How long streams wait for a suspect process with an open lifeline, unless the caller says
/// otherwise. Counted while this process runs, since it observes nothing while it is stopped.
pub(crate) const ORPHAN_TIMEOUT: Duration = Duration::from_secs(30);

/// Identifies a process.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ProcessId {
    /// The inode of its pidfd (Linux 6.9): never used again, and the same in every PID namespace.
    Inode(u64),
    /// The number of the process in this PID namespace, on older kernels; 0 for a process that the
    /// namespace does not see.
    Number(i32),
}

impl PartialEq for ProcessId {
    /// A process that this PID namespace does not see equals no other.
    fn eq(&self, other: &ProcessId) -> bool {
        match (self, other) {
            (ProcessId::Inode(one), ProcessId::Inode(other)) => one == other,
            (ProcessId::Number(one), ProcessId::Number(other)) => one == other && *one != 0,
            _ => false,
        }
    }
}

impl ProcessId {
    /// This process.
    pub(crate) fn own() -> ProcessId {
        static OWN: PerProcess<OnceLock<ProcessId>> = PerProcess::new();
        if let Some(&id) = OWN.get().get() {
            return id;
        }
        let pid = rustix::process::getpid();
        let number = pid.as_raw_nonzero().get();
        // Without a descriptor the number is used for now, and the next call tries again.
        let pidfd = CloseOnForkFd::open(|| rustix::process::pidfd_open(pid, PidfdFlags::empty()));
        pidfd.map_or(ProcessId::Number(number), |pidfd| {
            *OWN.get()
                .get_or_init(|| ProcessId::of(pidfd.as_fd(), number))
        })
    }

    fn of(pidfd: BorrowedFd<'_>, pid: i32) -> ProcessId {
        /// `linux/magic.h`
        const PID_FS_MAGIC: u64 = 0x5049_4446;
        let is_own_file =
            rustix::fs::fstatfs(pidfd).is_ok_and(|system| system.f_type as u64 == PID_FS_MAGIC);
        match rustix::fs::fstat(pidfd) {
            Ok(stat) if is_own_file => ProcessId::Inode(stat.st_ino),
            _ => ProcessId::Number(pid),
        }
    }
}

/// Whether a user and its group may connect to an endpoint of this process: its own user, or one on
/// the lists. A user that this user namespace does not map is never admitted, whatever its number.
pub(crate) fn is_admitted((uid, gid): (u32, u32), uids: &[u32], gids: &[u32]) -> bool {
    let is_own = uid == rustix::process::geteuid().as_raw();
    uid != os::UNMAPPED
        && (is_own || uids.contains(&uid) || gid != os::UNMAPPED && gids.contains(&gid))
}

/// The process at the other end of a connected socket.
#[derive(Debug)]
pub(crate) struct Peer {
    /// As this PID namespace sees it; 0 when it does not.
    pub(crate) pid: i32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) id: ProcessId,
    /// Present until the peer's lifeline has come.
    pidfd: Mutex<Option<CloseOnForkFd>>,
    process: OnceLock<Arc<Process>>,
}

impl Peer {
    /// Queries the kernel, not the peer: `SO_PEERCRED` and `SO_PEERPIDFD` (or `pidfd_open` before
    /// Linux 6.5).
    pub(crate) fn of(socket: BorrowedFd<'_>, name: &str) -> Result<Peer> {
        let credentials = os::peer_credentials(socket)
            .map_err(|e| Error::os("getsockopt(SO_PEERCRED)", name.to_string(), e))?;
        Peer::with_credentials(socket, credentials, name)
    }

    /// As [`of`](Self::of), with the credentials that the kernel has given for this socket.
    ///
    /// # Errors
    /// [`Error::Os`] if there is no room for the pidfd: it can be called again.
    pub(crate) fn with_credentials(
        socket: BorrowedFd<'_>,
        credentials: libc::ucred,
        name: &str,
    ) -> Result<Peer> {
        let pidfd = CloseOnForkFd::open(|| os::peer_pidfd(socket)).or_else(|error| match error {
            // Only where the kernel lacks the option: if the peer is dead already, another process
            // may have its number by now.
            Errno::NOPROTOOPT => open_pidfd(credentials.pid),
            other => Err(other),
        });
        let pidfd = pidfd.map_err(|error| match os::is_shortage(error) {
            true => Error::os("pidfd_open", name.to_string(), error),
            false => Error::handshake(name, HandshakeFault::Unwatchable(error.to_string())),
        })?;
        let id = ProcessId::of(pidfd.as_fd(), credentials.pid);
        let (pid, uid, gid) = (credentials.pid, credentials.uid, credentials.gid);
        Ok(Peer {
            pid,
            uid,
            gid,
            id,
            pidfd: Mutex::new(Some(pidfd)),
            process: OnceLock::new(),
        })
    }

    /// Takes the lifeline that came with the peer's first message. From here on the peer's death is
    /// watched for.
    pub(crate) fn adopt(&self, lifeline: [PeerFd; 2]) -> Result<(), HandshakeFault> {
        let pidfd = self.pidfd.locked().take();
        let Some(pidfd) = pidfd else {
            return Err(HandshakeFault::Lifeline("a second one".into()));
        };
        let process = Process::known_or(self.id, pidfd, lifeline)?;
        if process.shows(DeathEvidence::Suspect) {
            return Err(HandshakeFault::Closed);
        }
        let _ = self.process.set(process);
        Ok(())
    }

    /// The process, once its lifeline has come.
    pub(crate) fn process(&self) -> Option<&Arc<Process>> {
        self.process.get()
    }

    /// Calls `target` with `tag` once, when there is such evidence; at once if there is already.
    pub(crate) fn watch(
        &self,
        evidence: DeathEvidence,
        target: &Weak<dyn EventSource>,
        tag: u64,
    ) -> Result<Registration> {
        let process = self
            .process()
            .ok_or_else(|| Error::os("poll", "a peer without a lifeline", Errno::BADF))?;
        process.watch(evidence, target, tag)
    }

    /// Whether there is such evidence, as the kernel reports now.
    pub(crate) fn shows(&self, evidence: DeathEvidence) -> bool {
        self.process()
            .is_some_and(|process| process.shows(evidence))
    }

    pub(crate) fn is_proven_dead(&self) -> bool {
        self.shows(DeathEvidence::Proven)
    }

    /// Whether the peer is this process.
    pub(crate) fn is_own(&self) -> bool {
        self.id == ProcessId::own()
    }
}

/// Falls back to the number. If a process dies and its number is reused between the two calls, this
/// opens the wrong process. So the caller's socket must still be open afterwards; the caller reads
/// from it right after this.
fn open_pidfd(pid: i32) -> std::result::Result<CloseOnForkFd, Errno> {
    let pid = Pid::from_raw(pid).ok_or(Errno::SRCH)?;
    CloseOnForkFd::open(|| rustix::process::pidfd_open(pid, PidfdFlags::empty()))
}

/// How much is known of a process's death.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum DeathEvidence {
    /// The process does no more, as far as the kernel shows; its GPU may. Reported where the
    /// socket's end is reported as well.
    Suspect,
    /// Streams that wait for the process are to be rescued: it is proven dead, or has been suspect
    /// for this long with its lifeline open: a child that it forked may hold the driver's files.
    /// (A process that calls `exec` never exits, as far as its pidfd shows.)
    Orphaned(Duration),
    /// Nothing of the process touches memory any more.
    Proven,
}

/// A process that something in this process depends on.
pub(crate) struct Process {
    /// Declared first: the registrations end before their descriptors are closed.
    registrations: Mutex<Vec<Registration>>,
    reactor: Arc<Reactor>,
    me: Weak<Process>,
    pidfd: CloseOnForkFd,
    end: CloseOnForkFd,
    alarm: CloseOnForkFd,
    /// 0, [`SUSPECT`] or [`PROVEN`]: the evidence so far, which only grows.
    level: AtomicU8,
    state: Mutex<ProcessState>,
}

#[derive(Default)]
struct ProcessState {
    /// How long the process has been suspect, with its lifeline open, while this process ran.
    suspect_for: Option<Uptime>,
    /// The evidence that each registration at the reactor waits for.
    listeners: Vec<(DeathEvidence, u64)>,
}

const SUSPECT: u8 = 1;
const PROVEN: u8 = 2;

/// The processes that the kernel vouches for: their lifelines came over their own sockets.
static KNOWN: PerProcess<Mutex<Known>> = PerProcess::new();

type Known = Vec<(ProcessId, Weak<Process>)>;

fn with_known<R>(work: impl FnOnce(&mut Known) -> R) -> R {
    let mut known = KNOWN.lock();
    known.retain(|(_, process)| process.strong_count() > 0);
    work(&mut known)
}

opaque_debug!(Process { level });

impl Process {
    /// The [`Process`] that is known already, or a new one of these descriptors.
    fn known_or(
        id: ProcessId,
        pidfd: CloseOnForkFd,
        lifeline: [PeerFd; 2],
    ) -> Result<Arc<Process>, HandshakeFault> {
        let lifeline = pipes(lifeline)?;
        if let Some(process) = Process::known(id, &lifeline[0]) {
            return Ok(process);
        }
        let process = Process::new(pidfd, lifeline)?;
        with_known(|known| known.push((id, Arc::downgrade(&process))));
        Ok(process)
    }

    /// The known process of that pidfd, if it has that lifeline. A program that called `exec` has
    /// the pidfd of the program before. That one's lifeline may still be open (in a child), and its
    /// death is another.
    fn known(id: ProcessId, end: &CloseOnForkFd) -> Option<Arc<Process>> {
        let found: Vec<Arc<Process>> = with_known(|known| {
            let same = known
                .iter()
                .filter(|(other, _)| matches!(id, ProcessId::Inode(_)) && *other == id);
            same.filter_map(|(_, process)| process.upgrade()).collect()
        });
        // A process that has just sent over its socket has an open lifeline, unless it sent a false
        // one.
        let pipe = fork::identity(end.as_fd());
        let is_it = |process: &Arc<Process>| {
            fork::identity(process.end.as_fd()) == pipe && !process.shows(DeathEvidence::Suspect)
        };
        found.into_iter().find(is_it).filter(|_| pipe.is_some())
    }

    /// A process that a third process describes with the descriptors of [`relay`](Self::relay). The
    /// kernel does not vouch for its lifeline, so it is not added to the known processes.
    pub(crate) fn relayed(fds: [PeerFd; 3]) -> Result<Arc<Process>, HandshakeFault> {
        let [pidfd, end, alarm] = fds;
        check_pidfd(&pidfd).map_err(HandshakeFault::Lifeline)?;
        let (pidfd, lifeline) = (pidfd.accept(), pipes([end, alarm])?);
        let known = Process::known(ProcessId::of(pidfd.as_fd(), 0), &lifeline[0]);
        known.map_or_else(|| Process::new(pidfd, lifeline), Ok)
    }

    /// A process with that pipe as its lifeline.
    #[cfg(any(test, loom))]
    pub(crate) fn of_pipe(end: std::os::fd::OwnedFd) -> Arc<Process> {
        let pidfd =
            rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).unwrap();
        let alarm = end.try_clone().unwrap();
        Process::of_parts([pidfd, end, alarm])
    }

    /// A process with these descriptors.
    #[cfg(any(test, loom))]
    pub(crate) fn of_parts([pidfd, end, alarm]: [std::os::fd::OwnedFd; 3]) -> Arc<Process> {
        let [pidfd, end, alarm] = [pidfd, end, alarm].map(|fd| CloseOnForkFd::new(fd).unwrap());
        Process::new(pidfd, [end, alarm]).unwrap()
    }

    /// The descriptors for a third process that is to see the same death.
    pub(crate) fn relay(&self) -> std::result::Result<[CloseOnForkFd; 3], Errno> {
        let [pidfd, end, alarm] =
            [&self.pidfd, &self.end, &self.alarm].map(CloseOnForkFd::duplicate);
        Ok([pidfd?, end?, alarm?])
    }

    fn new(
        pidfd: CloseOnForkFd,
        [end, alarm]: [CloseOnForkFd; 2],
    ) -> Result<Arc<Process>, HandshakeFault> {
        let failed = |error: Error| HandshakeFault::Unwatchable(error.to_string());
        let reactor = Reactor::of_process().map_err(failed)?;
        let process = Arc::new_cyclic(|me: &Weak<Process>| Process {
            registrations: Mutex::default(),
            reactor: reactor.clone(),
            me: me.clone(),
            pidfd,
            end,
            alarm,
            level: AtomicU8::new(0),
            state: Mutex::default(),
        });
        let me: Weak<dyn EventSource> = process.me.clone();
        let registrations = [
            reactor.register(Watch::Hangup(process.end.as_fd()), &me, 0),
            reactor.register(Watch::Hangup(process.alarm.as_fd()), &me, 0),
            reactor.register(Watch::Readable(process.pidfd.as_fd()), &me, 0),
        ];
        for registration in registrations {
            let registration = registration.map_err(failed)?;
            process.registrations.locked().push(registration);
        }
        Ok(process)
    }

    /// Calls `target` with `tag` once, when there is such evidence; at once if there is already.
    pub(crate) fn watch(
        self: &Arc<Self>,
        evidence: DeathEvidence,
        target: &Weak<dyn EventSource>,
        tag: u64,
    ) -> Result<Registration> {
        let watch = self.reactor.register(Watch::Trigger, target, tag)?;
        let mut state = self.state.locked();
        // Not each time: a process may have thousands of endpoints here.
        if state.listeners.len() == state.listeners.capacity() {
            state.listeners.retain(|&(_, id)| self.reactor.has(id));
            let living = state.listeners.len();
            state.listeners.reserve(living + 1);
        }
        state.listeners.push((evidence, watch.id()));
        drop(state);
        self.update();
        Ok(watch)
    }

    /// Whether there is such evidence, as the kernel reports now.
    pub(crate) fn shows(&self, evidence: DeathEvidence) -> bool {
        self.update();
        self.has(evidence, &self.state.locked())
    }

    fn has(&self, evidence: DeathEvidence, state: &ProcessState) -> bool {
        let level = self.level.load(SeqCst);
        match evidence {
            DeathEvidence::Suspect => level >= SUSPECT,
            DeathEvidence::Orphaned(after) => {
                level >= PROVEN
                    || state
                        .suspect_for
                        .as_ref()
                        .is_some_and(|clock| clock.ran() >= after)
            }
            DeathEvidence::Proven => level >= PROVEN,
        }
    }

    /// The evidence that the kernel reports now.
    ///
    /// Memory follows the lifeline: a process that calls `exec` never shows a readable pidfd, and
    /// that of a process with a forked child is readable too early.
    fn seen(&self) -> u8 {
        let mut fds = [
            PollFd::new(&self.end, PollFlags::empty()),
            PollFd::new(&self.alarm, PollFlags::empty()),
            PollFd::new(&self.pidfd, PollFlags::IN),
        ];
        let now = os::timespec(Duration::ZERO);
        // A poll that fails shows nothing.
        let _ = poll(&mut fds, Some(&now));
        let [end, alarm, exited] = fds.map(|fd| fd.revents());
        if end.contains(PollFlags::HUP) {
            PROVEN
        } else if alarm.contains(PollFlags::HUP) || exited.contains(PollFlags::IN) {
            SUSPECT
        } else {
            0
        }
    }

    /// Records what the kernel reports, and triggers the registrations that wait for it.
    fn update(&self) {
        if self.level.load(SeqCst) < PROVEN {
            let level = self.seen();
            let before = self.level.fetch_max(level, SeqCst);
            if before < SUSPECT && level == SUSPECT {
                // Only time shows that it has been orphaned.
                self.reactor.register_ticks(self.me.clone());
            }
            if level == SUSPECT {
                // Measured at each tick, whether anything waits for it or not.
                self.state
                    .locked()
                    .suspect_for
                    .get_or_insert_default()
                    .ran();
            }
        }
        if self.level.load(SeqCst) >= SUSPECT {
            let mut state = self.state.locked();
            let all = std::mem::take(&mut state.listeners);
            let (due, waiting): (Vec<_>, Vec<_>) = all
                .into_iter()
                .partition(|(evidence, _)| self.has(*evidence, &state));
            state.listeners = waiting;
            drop(state);
            due.iter().for_each(|&(_, id)| self.reactor.trigger(id));
        }
    }
}

impl EventSource for Process {
    fn on_ready(&self, _: u64) -> Next {
        let before = self.level.load(SeqCst);
        self.update();
        // Each of the three descriptors stays ready for ever once it is ready.
        if before == self.level.load(SeqCst) && before == 0 {
            Next::Keep
        } else {
            Next::Stop
        }
    }

    fn on_tick(&self, _: u64) {
        self.update();
    }
}

/// How many of the processes with links to this one are suspect while their lifeline is open.
pub(crate) fn orphaned() -> usize {
    let all: Vec<Arc<Process>> = with_known(|known| {
        known
            .iter()
            .filter_map(|(_, process)| process.upgrade())
            .collect()
    });
    all.iter()
        .filter(|process| {
            process.shows(DeathEvidence::Orphaned(Duration::ZERO))
                && !process.shows(DeathEvidence::Proven)
        })
        .count()
}

/// Checks that a lifeline that a peer sent is one.
fn pipes(lifeline: [PeerFd; 2]) -> Result<[CloseOnForkFd; 2], HandshakeFault> {
    lifeline
        .iter()
        .try_for_each(check_pipe)
        .map_err(HandshakeFault::Lifeline)?;
    Ok(lifeline.map(PeerFd::accept))
}

/// This process's own lifeline shows which device pipes live on.
fn check_pipe(fd: &PeerFd) -> Result<(), String> {
    let kind = os::kind_of(fd.as_fd()).map_err(|error| error.to_string())?;
    let own = Lifeline::of_process()
        .map_err(|e| Error::os("sendmsg", "this end's lifeline", e).to_string())?;
    let own = os::kind_of(own.end.as_fd()).map_err(|error| error.to_string())?;
    if kind.file != FileType::Fifo || kind.device != own.device {
        return Err("no pipe".into());
    }
    if kind.flags & OFlags::ACCMODE != OFlags::RDONLY || kind.flags.contains(OFlags::PATH) {
        return Err("not the read end of a pipe".into());
    }
    Ok(())
}

/// Any other descriptor could be readable while the process lives.
fn check_pidfd(fd: &PeerFd) -> Result<(), String> {
    let path = format!("/proc/self/fdinfo/{}", fd.as_fd().as_raw_fd());
    let info = fork::excluded(|| std::fs::read_to_string(&path))
        .map_err(|error| format!("{path}: {error}"))?;
    if info.lines().any(|line| line.starts_with("Pid:")) {
        Ok(())
    } else {
        Err("no pidfd".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_not_over_because_this_one_stood_still() {
        const LONG: Duration = Duration::from_secs(3600);
        let (end, _held_by_a_child) = rustix::pipe::pipe().unwrap();
        let (alarm, _) = rustix::pipe::pipe().unwrap();
        let pidfd =
            rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).unwrap();
        let process = Process::of_parts([pidfd, end, alarm]);
        assert!(
            process.shows(DeathEvidence::Suspect)
                && process.shows(DeathEvidence::Orphaned(Duration::ZERO))
        );
        process
            .state
            .locked()
            .suspect_for
            .as_ref()
            .expect("it is suspect")
            .freeze(2 * LONG);
        assert!(!process.shows(DeathEvidence::Orphaned(LONG)));
    }

    #[test]
    fn those_that_no_longer_watch_a_process_are_not_kept() {
        struct Nobody;
        impl EventSource for Nobody {
            fn on_ready(&self, _: u64) -> Next {
                Next::Stop
            }
        }
        let [(end, _lives), (alarm, _too)] = [(); 2].map(|()| rustix::pipe::pipe().unwrap());
        let pidfd =
            rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).unwrap();
        let process = Process::of_parts([pidfd, end, alarm]);
        let nobody: Arc<dyn EventSource> = Arc::new(Nobody);
        let watch = || process.watch(DeathEvidence::Proven, &Arc::downgrade(&nobody), 0);
        let kept = [(); 7].map(|()| watch().unwrap());
        for _ in 0..1_000 {
            drop(watch().unwrap());
        }
        let state = process.state.locked();
        let (listeners, room) = (state.listeners.len(), state.listeners.capacity());
        drop(state);
        assert!((kept.len()..=32).contains(&listeners), "{listeners}");
        assert!(room >= 2 * kept.len(), "all are looked through each time");
    }
}
