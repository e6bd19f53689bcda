//! The base of the tests: scratch domains, raw packets, processes of their own, seeded numbers.

use std::io::{IoSlice, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use rustix::process::{Signal, WaitId, WaitIdOptions, waitid};
use warpipe_testkit::{ChildProcess, LineReader, Rng, TempDir, temporary_folder, this_program};

use crate::fork::lifeline::Lifeline;
use crate::fork::per_process::PerProcess;
use crate::ipc::message::{self, Received};
use crate::{Device, Domain, EndpointName, Publisher, Stream, Subscriber, SubscriberOptions};

/// The limit for every wait; only a hang reaches it.
pub(super) const LONG: Duration = Duration::from_secs(20);

/// A domain in a directory of its own, removed with it.
pub(super) struct Scratch {
    pub(super) path: PathBuf,
    pub(super) domain: Domain,
    /// `None` in a [`TestProcess`], which leaves the folder to its test.
    _folder: Option<TempDir>,
}

impl Scratch {
    pub(super) fn new() -> Scratch {
        let folder = temporary_folder().unwrap();
        let path = folder.path().to_owned();
        let domain = Domain::at(&path).unwrap();
        Scratch {
            path,
            domain,
            _folder: Some(folder),
        }
    }

    /// In a [`TestProcess`]: the domain of its test.
    pub(super) fn of_test() -> Scratch {
        let domain = domain_of_test();
        Scratch {
            path: domain.path().to_owned(),
            domain,
            _folder: None,
        }
    }

    /// A publisher of `a`, with a depth of 4 unless `edit` says otherwise.
    pub(super) fn publisher(
        &self,
        edit: impl FnOnce(crate::PublisherOptions) -> crate::PublisherOptions,
    ) -> Publisher {
        let options = crate::PublisherOptions {
            depth: 4,
            ..self.domain.on(&Device::host())
        };
        Publisher::new("a", edit(options)).unwrap()
    }

    pub(super) fn subscriber(&self) -> Subscriber {
        self.subscriber_within(LONG).unwrap()
    }

    /// For an answer that may not come.
    pub(super) fn try_subscriber(&self) -> crate::Result<Subscriber> {
        self.subscriber_within(Duration::from_secs(2))
    }

    fn subscriber_within(&self, handshake_timeout: Duration) -> crate::Result<Subscriber> {
        let options = SubscriberOptions {
            handshake_timeout,
            ..self.domain.on(&Device::host())
        };
        Subscriber::open("a", options, Duration::ZERO)
    }

    /// A connection to `a` that has sent nothing yet.
    pub(super) fn connection(&self) -> OwnedFd {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .unwrap();
        let address = SocketAddrUnix::new(self.path.join("a.sock")).unwrap();
        eventually("the backlog has room", || {
            match rustix::net::connect(&socket, &address) {
                Err(Errno::AGAIN) => false,
                connected => connected.is_ok_and(|()| true),
            }
        });
        socket
    }
}

pub(super) fn name() -> EndpointName {
    EndpointName::new("a").unwrap()
}

pub(super) fn stream() -> Stream {
    Device::host().stream().unwrap()
}

/// Sends one sample and sees it arrive unchanged.
pub(super) fn assert_delivers(publisher: &Publisher, subscriber: &mut Subscriber, payload: &[u8]) {
    let stream = stream();
    publisher.send_bytes(&stream, payload).unwrap();
    let sample = subscriber.receive(&stream, LONG).unwrap();
    assert_eq!(sample.to_vec(LONG).unwrap(), payload);
    sample.finish(LONG).unwrap();
}

/// How often this process has a file mapped.
pub(super) fn mappings(inode: u64) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines()
        .filter(|line| line.split_whitespace().nth(4) == Some(&inode.to_string()))
        .count()
}

/// Waits until `holds`; a timeout reports `what`.
pub(super) fn eventually(what: &str, holds: impl FnMut() -> bool) {
    let is_so = warpipe_testkit::eventually(LONG, holds);
    assert!(is_so, "{what} did not come true");
}

/// Runs `body` in a process with no other test in it, so that limits and counts are its own.
pub(crate) fn alone(module: &str, test: &str, body: impl FnOnce()) {
    if role().as_deref() == Some("alone") {
        return body();
    }
    let output = command(module, test, "alone").output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{}\n{text}",
        output.status
    );
}

/// The role of this process in its test; `None` in the process that the test runner started.
pub(super) fn role() -> Option<String> {
    std::env::var("WARPIPE_HOSTILE_ROLE").ok()
}

/// This test in another process, with another role.
pub(super) fn command(module: &str, test: &str, role: &str) -> Command {
    let path = format!("{}::{test}", module.split_once("::").unwrap().1);
    let mut command = this_program();
    command
        .args(["--exact", &path, "--nocapture", "--test-threads=1"])
        .env("WARPIPE_HOSTILE_ROLE", role);
    command.stdin(Stdio::null());
    command
}

/// Kills the process that a test started, whatever happens to the test.
pub(super) struct Guarded(pub(super) Child);

impl Drop for Guarded {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A test in another process and another role: it gets orders and writes lines.
pub(super) struct TestProcess {
    pub(super) process: ChildProcess,
    orders: ChildStdin,
    lines: LineReader,
}

impl TestProcess {
    /// Starts it, with the domain of `scratch` for [`domain_of_test`].
    pub(super) fn start(module: &str, test: &str, role: &str, scratch: &Scratch) -> TestProcess {
        TestProcess::run(command(module, test, role).env(DOMAIN, &scratch.path))
    }

    /// Starts the [`command`] of a test.
    pub(super) fn run(command: &mut Command) -> TestProcess {
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = ChildProcess::start(command).unwrap();
        TestProcess {
            orders: process.take_stdin().unwrap(),
            lines: LineReader::new(process.take_stdout().unwrap()),
            process,
        }
    }

    /// Writes a line for [`next_order`].
    pub(super) fn order(&mut self, order: &str) {
        writeln!(self.orders, "{order}").unwrap();
    }

    /// The part behind `word` of its next line with it.
    pub(super) fn hear(&mut self, word: &str) -> String {
        loop {
            let line = self.lines.next(3 * LONG).unwrap();
            let line = line.unwrap_or_else(|| panic!("it ended before it wrote {word:?}"));
            if let Some((_, rest)) = line.split_once(word) {
                return rest.trim().to_owned();
            }
        }
    }

    /// Kills it, and waits for its end. Takes no descriptor, of which a test may have none left.
    pub(super) fn kill(&mut self) {
        self.process.signal(Signal::KILL).unwrap();
        let end = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(self.process.pid()), end).unwrap();
    }
}

/// Names the domain of a test to its other processes.
const DOMAIN: &str = "WARPIPE_HOSTILE_PATH";

/// In a [`TestProcess`]: the domain of its test.
pub(super) fn domain_of_test() -> Domain {
    Domain::at(std::env::var(DOMAIN).unwrap()).unwrap()
}

/// In a [`TestProcess`]: waits for an order; `None` when its test is over.
pub(super) fn next_order() -> Option<String> {
    std::io::stdin().lines().next().map(Result::unwrap)
}

/// Forks, and checks that the child finishes `work` with true. The child has no other thread.
pub(crate) fn in_a_forked_child(work: impl FnOnce() -> bool) {
    // SAFETY: glibc keeps its allocator usable in the child of a process with threads. The child
    // ends by `_exit`, or by its own alarm if it waits for a lock that is never released.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above.
        unsafe {
            libc::alarm(2 * LONG.as_secs() as u32);
            libc::_exit(i32::from(!is_true_in_child(work)));
        }
    }
    let mut status = 0;
    // SAFETY: waits for our own child, and writes one `int`.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert_eq!(status, 0, "the child hangs, or finds something else");
}

/// Calls `work`; false if it panics. Says why past the harness and its locks: what a test's child
/// gives to those is lost with it, and another thread of the parent may have had them.
pub(super) fn is_true_in_child(work: impl FnOnce() -> bool) -> bool {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or(panic.downcast_ref::<&str>().copied());
        let line = format!("in a child: {}\n", text.unwrap_or("a panic"));
        // SAFETY: reads the text, which lives.
        unsafe { libc::write(2, line.as_ptr().cast(), line.len()) };
        false
    })
}

/// Runs `work` while another thread holds the lock.
pub(crate) fn while_locked<T: Default + Send>(
    lock: &'static PerProcess<Mutex<T>>,
    work: impl FnOnce(),
) {
    let (holds, is_held) = std::sync::mpsc::channel();
    let (go, gone) = std::sync::mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let _guard = lock.lock();
            holds.send(()).unwrap();
            let _ = gone.recv();
        });
        is_held.recv().unwrap();
        // The lock is released even if `work` panics.
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        drop(go);
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    });
}

pub(super) fn random_bytes(random: &mut Rng, length: usize) -> Vec<u8> {
    std::iter::repeat_with(|| random.u8(..))
        .take(length)
        .collect()
}

/// A number typical of wrong input: small, huge, a border, or random.
pub(super) fn random_edge(random: &mut Rng) -> u64 {
    match random.u32(..6) {
        0 => random.u64(..4),
        1 => u64::MAX - random.u64(..4),
        2 => (i64::MAX as u64 - 2) + random.u64(..5),
        3 => 1 << random.u32(..64),
        4 => random.u64(..1 << 22),
        _ => random.u64(..),
    }
}

pub(super) use crate::fuzzing::packet;

/// Sends any bytes with up to 128 descriptors. If they lack only the lifeline, it adds this
/// process's own.
pub(crate) fn send_raw(
    socket: impl AsFd,
    bytes: &[u8],
    fds: &[BorrowedFd<'_>],
) -> Result<(), Errno> {
    let lacks_lifeline = message::decode(bytes)
        .is_ok_and(|it| it.is_first() && it.descriptors() == fds.len() + message::LIFELINE);
    let lifeline = lacks_lifeline.then(|| Lifeline::of_process().unwrap());
    let ends = lifeline
        .iter()
        .flat_map(|lifeline| [lifeline.end.as_fd(), lifeline.alarm.as_fd()]);
    let own = fds.len();
    let fds: Vec<BorrowedFd<'_>> = fds.iter().copied().chain(ends).collect();
    match send_exactly(&socket, bytes, &fds) {
        // The descriptors are not accepted by now.
        Err(Errno::PERM) if lacks_lifeline => send_exactly(&socket, bytes, &fds[..own]),
        sent => sent,
    }
}

fn send_exactly(socket: &impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(128))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        assert!(ancillary.push(SendAncillaryMessage::ScmRights(fds)));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg(
        socket.as_fd(),
        &[IoSlice::new(bytes)],
        &mut ancillary,
        flags,
    )
    .map(drop)
}

/// The next message of a peer.
pub(super) fn hear(socket: impl AsFd) -> Received {
    let start = Instant::now();
    loop {
        match message::receive(socket.as_fd(), "a").unwrap() {
            Received::Nothing if start.elapsed() < LONG => {
                message::wait_readable(socket.as_fd(), LONG);
            }
            other => return other,
        }
    }
}

pub(super) fn pipe() -> OwnedFd {
    rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .unwrap()
        .0
}

pub(super) fn memfd(bytes: u64, seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create(c"hostile", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .unwrap();
    rustix::fs::ftruncate(&fd, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

/// A sealed memfd of huge pages (2 MiB each): a mapping of it kills a process that touches a page
/// that the machine does not have.
pub(super) fn hugetlb_memfd(bytes: u64) -> Option<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    let fd = rustix::fs::memfd_create(c"hostile-huge", flags).ok()?;
    rustix::fs::ftruncate(&fd, bytes).ok()?;
    rustix::fs::fcntl_add_seals(&fd, SIZE_SEALS).unwrap();
    Some(fd)
}

pub(super) const SIZE_SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);
