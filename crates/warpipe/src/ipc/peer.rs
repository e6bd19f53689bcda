//! The process at the other end, and the proof of its death.
//!
//! A peer's death has three signs, in the order of what they say ([`DeathEvidence`]). *Suspect*: the end of its socket (which
//! each link sees itself), the end of its [alarm](crate::fork::lifeline), or its pidfd. It does no more, but its GPU
//! may still be writing. *Proven*: the end of its lifeline; nothing of that process touches memory any more, and
//! nothing will. A pidfd is no such proof: a forked child that holds the driver's files keeps the parent's device work
//! going. *Over*: proven, or its lifeline is still open an orphan timeout after the process was seen to be suspect;
//! streams that wait for it are rescued then, and memory waits on.
//!
//! A process has one [`Process`] here, however many links lead to it. One that has called `exec` since is another: its
//! pidfd is the same, its lifeline is not.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::atomic::{AtomicU8, Ordering::SeqCst};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

use crate::error::{Error, HandshakeFault, Result};
use crate::fork::lifeline::Lifeline;
use crate::fork::per_process::PerProcess;
use crate::fork::{self, CloseOnForkFd, OwnerProcess};
use crate::os;
use crate::runtime::closer::PeerFd;
use crate::runtime::heartbeat::Uptime;
use crate::runtime::reactor::{EventSource, Next, Reactor, Registration};

/// How long a suspect process whose lifeline is open keeps the streams that wait for it waiting, where nobody says
/// otherwise: in time in which this process ran, since it sees nothing of the other while both stand still.
pub(crate) const ORPHAN_TIMEOUT: Duration = Duration::from_secs(30);

/// What tells one process from every other.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ProcessId {
    /// The inode of its pidfd (Linux 6.9): never used again, and the same in every PID namespace.
    Inode(u64),
    /// Its number as this PID namespace sees it, on older kernels; 0 for a process that it does not see.
    Number(i32),
}

impl PartialEq for ProcessId {
    /// A process that is not seen is nobody's equal.
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
        // Without a descriptor it is this number for now, and asked again.
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

/// Whether a user and its group may come to an endpoint of this process: its own user's, or one on the lists. A user
/// that this user namespace does not map is none of them, whatever its number.
pub(crate) fn is_admitted((uid, gid): (u32, u32), uids: &[u32], gids: &[u32]) -> bool {
    let is_own = uid == rustix::process::geteuid().as_raw();
    uid != os::UNMAPPED
        && (is_own || uids.contains(&uid) || gid != os::UNMAPPED && gids.contains(&gid))
}

/// Where a connected socket leads to.
#[derive(Debug)]
pub(crate) struct Peer {
    /// As this PID namespace sees it; 0 when it does not.
    pub(crate) pid: i32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) id: ProcessId,
    /// Until its lifeline has come.
    pidfd: Mutex<Option<CloseOnForkFd>>,
    process: OnceLock<Arc<Process>>,
}

impl Peer {
    /// Asks the kernel, not the peer: `SO_PEERCRED` and `SO_PEERPIDFD` (or `pidfd_open` before Linux 6.5).
    pub(crate) fn of(socket: BorrowedFd<'_>, name: &str) -> Result<Peer> {
        let credentials = os::peer_credentials(socket)
            .map_err(|e| Error::os("getsockopt(SO_PEERCRED)", name.to_string(), e))?;
        let pidfd = CloseOnForkFd::open(|| os::peer_pidfd(socket)).or_else(|error| match error {
            // Only where the kernel does not know the option: of a peer that is dead already the number may by now
            // be somebody else's.
            Errno::NOPROTOOPT => open_pidfd(credentials.pid),
            other => Err(other),
        });
        let pidfd = pidfd.map_err(|error| match error.raw_os_error() {
            libc::EMFILE | libc::ENFILE => Error::os("pidfd_open", name.to_string(), error),
            _ => Error::Handshake {
                name: name.to_string(),
                fault: HandshakeFault::Unwatchable(error.to_string()),
            },
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

    /// Takes the lifeline that came with the peer's first message: from here on its death is watched for.
    pub(crate) fn adopt(&self, lifeline: [PeerFd; 2]) -> Result<(), HandshakeFault> {
        let pidfd = self
            .pidfd
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
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

    /// Calls `target` with `tag` once, when the evidence is there; at once if it is already.
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

    /// Whether the evidence is there, asked of the kernel now.
    pub(crate) fn shows(&self, evidence: DeathEvidence) -> bool {
        self.process()
            .is_some_and(|process| process.shows(evidence))
    }

    pub(crate) fn is_proven_dead(&self) -> bool {
        self.shows(DeathEvidence::Proven)
    }

    /// Whether it is this process.
    pub(crate) fn is_own(&self) -> bool {
        self.id == ProcessId::own()
    }
}

/// The fallback: a process that dies and is replaced between the two calls would be mistaken, so the caller's
/// socket must still be open afterwards; it is read from right after this.
fn open_pidfd(pid: i32) -> std::result::Result<CloseOnForkFd, Errno> {
    let pid = Pid::from_raw(pid).ok_or(Errno::SRCH)?;
    CloseOnForkFd::open(|| rustix::process::pidfd_open(pid, PidfdFlags::empty()))
}

/// What is known of a process's death.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum DeathEvidence {
    /// It does no more, as far as can be seen; its GPU may. Told where the socket's end tells as well.
    Suspect,
    /// Streams that wait for it are to be rescued: proven, or it has been suspect, and perhaps an orphan's parent, for so
    /// long. (One that calls `exec` and left an orphan never exits, as far as its pidfd tells.)
    Orphaned(Duration),
    /// Nothing of it touches memory any more.
    Proven,
}

/// What the kernel says now.
#[derive(Debug, Clone, Copy)]
struct KernelView {
    exited: bool,
    end: bool,
    alarm: bool,
}

impl KernelView {
    /// The rule: memory follows the lifeline. A process that calls `exec` never shows a readable pidfd, and that of one
    /// with a forked child is readable too early.
    fn is_proof(self) -> bool {
        self.end
    }

    fn is_suspicion(self) -> bool {
        self.exited || self.end || self.alarm
    }
}

/// A process that something here depends on.
pub(crate) struct Process {
    /// Declared first: they end before their descriptors are closed.
    registrations: Mutex<Vec<Registration>>,
    owner_process: OwnerProcess,
    reactor: Arc<Reactor>,
    me: Weak<Process>,
    pidfd: CloseOnForkFd,
    end: CloseOnForkFd,
    alarm: CloseOnForkFd,
    /// [`SUSPECT`] and above: what has been seen, which only grows.
    level: AtomicU8,
    state: Mutex<ProcessState>,
}

#[derive(Default)]
struct ProcessState {
    /// For how long it has been suspect, and its lifeline open, while this process ran.
    orphaned: Option<Uptime>,
    /// Who is to be told of what, by its number at the reactor.
    listeners: Vec<(DeathEvidence, u64)>,
}

const SUSPECT: u8 = 1;
const PROVEN: u8 = 2;

/// Those of this process that the kernel vouches for: whose lifeline came over a socket of theirs.
static KNOWN: PerProcess<Mutex<Known>> = PerProcess::new();

type Known = Vec<(ProcessId, Weak<Process>)>;

fn with_known<R>(work: impl FnOnce(&mut Known) -> R) -> R {
    let mut known = KNOWN.lock();
    known.retain(|(_, process)| process.strong_count() > 0);
    work(&mut known)
}

impl std::fmt::Debug for Process {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Process")
            .field("level", &self.level.load(SeqCst))
            .finish_non_exhaustive()
    }
}

impl Process {
    /// The process as it is known already; else by what it sent.
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

    /// The process of that pidfd, as long as it has that lifeline: a program that called `exec` has the pidfd of the one
    /// before, whose lifeline may be open still (in a child), and whose death is not its own.
    fn known(id: ProcessId, end: &CloseOnForkFd) -> Option<Arc<Process>> {
        let found: Vec<Arc<Process>> = with_known(|known| {
            let same = known
                .iter()
                .filter(|(other, _)| matches!(id, ProcessId::Inode(_)) && *other == id);
            same.filter_map(|(_, process)| process.upgrade()).collect()
        });
        // The lifeline of a process whose socket has just spoken has not ended, but for one that was sent to deceive.
        let pipe = fork::identity(end.as_fd());
        let is_it = |process: &Arc<Process>| {
            fork::identity(process.end.as_fd()) == pipe && !process.shows(DeathEvidence::Suspect)
        };
        found.into_iter().find(is_it).filter(|_| pipe.is_some())
    }

    /// One that somebody else tells of: the descriptors of [`relay`](Self::relay). It is taken at his word for its
    /// lifeline, so nobody else gets to know it.
    pub(crate) fn relayed(fds: [PeerFd; 3]) -> Result<Arc<Process>, HandshakeFault> {
        let [pidfd, end, alarm] = fds;
        check_pidfd(&pidfd).map_err(HandshakeFault::Lifeline)?;
        let (pidfd, lifeline) = (pidfd.accept(), pipes([end, alarm])?);
        let known = Process::known(ProcessId::of(pidfd.as_fd(), 0), &lifeline[0]);
        known.map_or_else(|| Process::new(pidfd, lifeline), Ok)
    }

    /// One whose lifeline is that pipe.
    #[cfg(test)]
    pub(crate) fn of_pipe(end: std::os::fd::OwnedFd) -> Arc<Process> {
        let pidfd =
            rustix::process::pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).unwrap();
        let alarm = end.try_clone().unwrap();
        Process::of_parts([pidfd, end, alarm])
    }

    /// One that these descriptors tell of.
    #[cfg(test)]
    pub(crate) fn of_parts([pidfd, end, alarm]: [std::os::fd::OwnedFd; 3]) -> Arc<Process> {
        let [pidfd, end, alarm] = [pidfd, end, alarm].map(|fd| CloseOnForkFd::new(fd).unwrap());
        Process::new(pidfd, [end, alarm]).unwrap()
    }

    /// For a third process that is to see the same death.
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
            owner_process: OwnerProcess::current(),
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
            reactor
                .register_hangup(process.end.as_fd(), &me, 0)
                .map_err(failed)?,
            reactor
                .register_hangup(process.alarm.as_fd(), &me, 0)
                .map_err(failed)?,
            reactor
                .register(process.pidfd.as_fd(), &me, 0)
                .map_err(failed)?,
        ];
        process
            .registrations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(registrations);
        Ok(process)
    }

    /// Calls `target` with `tag` once, when the evidence is there; at once if it is already.
    pub(crate) fn watch(
        self: &Arc<Self>,
        evidence: DeathEvidence,
        target: &Weak<dyn EventSource>,
        tag: u64,
    ) -> Result<Registration> {
        let watch = self.reactor.register_trigger(target, tag);
        let mut state = self.lock();
        state.listeners.retain(|&(_, id)| self.reactor.has(id));
        state.listeners.push((evidence, watch.id()));
        drop(state);
        self.update();
        Ok(watch)
    }

    /// Whether the evidence is there, asked of the kernel now.
    pub(crate) fn shows(&self, evidence: DeathEvidence) -> bool {
        self.update();
        self.has(evidence, &self.lock())
    }

    fn has(&self, evidence: DeathEvidence, state: &ProcessState) -> bool {
        let level = self.level.load(SeqCst);
        match evidence {
            DeathEvidence::Suspect => level >= SUSPECT,
            DeathEvidence::Orphaned(after) => {
                level >= PROVEN
                    || state
                        .orphaned
                        .as_ref()
                        .is_some_and(|clock| clock.ran() >= after)
            }
            DeathEvidence::Proven => level >= PROVEN,
        }
    }

    fn lock(&self) -> MutexGuard<'_, ProcessState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn seen(&self) -> KernelView {
        let mut fds = [
            PollFd::new(&self.pidfd, PollFlags::IN),
            PollFd::new(&self.end, PollFlags::empty()),
            PollFd::new(&self.alarm, PollFlags::empty()),
        ];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        if poll(&mut fds, Some(&now)).is_err() {
            return KernelView {
                exited: false,
                end: false,
                alarm: false,
            };
        }
        let has = |index: usize, flag| fds[index].revents().intersects(flag);
        KernelView {
            exited: has(0, PollFlags::IN),
            end: has(1, PollFlags::HUP),
            alarm: has(2, PollFlags::HUP),
        }
    }

    /// Takes in what the kernel says, and tells those who wait for it.
    fn update(&self) {
        if self.level.load(SeqCst) < PROVEN {
            let seen = self.seen();
            let level = if seen.is_proof() {
                PROVEN
            } else {
                u8::from(seen.is_suspicion()) * SUSPECT
            };
            let before = self.level.fetch_max(level, SeqCst);
            if before < SUSPECT && level == SUSPECT {
                // Nothing but time tells that it is an orphan's parent.
                self.reactor.register_ticks(self.me.clone());
            }
            if level == SUSPECT {
                // Looked at with each tick, whether anybody waits for it or not.
                self.lock().orphaned.get_or_insert_default().ran();
            }
        }
        if self.level.load(SeqCst) >= SUSPECT {
            let mut state = self.lock();
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
        if !self.owner_process.is_current() {
            return Next::Stop;
        }
        let before = self.level.load(SeqCst);
        self.update();
        // Each of the three speaks for ever once it has spoken.
        if before == self.level.load(SeqCst) && before == 0 {
            Next::Keep
        } else {
            Next::Stop
        }
    }

    fn on_tick(&self, _: u64) {
        if self.owner_process.is_current() {
            self.update();
        }
    }
}

/// How many of the processes with links to this one are suspect while somebody holds their lifeline.
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

/// A lifeline that a peer sent, if that is what it is.
fn pipes(lifeline: [PeerFd; 2]) -> Result<[CloseOnForkFd; 2], HandshakeFault> {
    lifeline
        .iter()
        .try_for_each(check_pipe)
        .map_err(HandshakeFault::Lifeline)?;
    Ok(lifeline.map(PeerFd::accept))
}

/// Our own lifeline's pipes say where pipes live.
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

/// Anything else could be readable while the process lives.
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
            .lock()
            .orphaned
            .as_ref()
            .expect("it is suspect")
            .freeze(2 * LONG);
        assert!(!process.shows(DeathEvidence::Orphaned(LONG)));
    }
}
