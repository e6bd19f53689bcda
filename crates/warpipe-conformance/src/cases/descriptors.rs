//! Descriptors that a hostile peer sends: some block in `close`, some are unknown to every device.
//! **This module is marked for unsafe**: it mounts a file system.

use std::fs::File;
use std::io::{IoSlice, Write as _};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use rustix::fs::{CWD, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketType,
};
use warpipe::{
    Access, DeviceFault, Error, Loss, Memory, MemoryInfo, Sample, Stream, Subscriber,
    SubscriberOptions, Timeline,
};
use warpipe_testkit::eventually;

use super::{Case, skip};
use crate::PATIENCE;
use crate::context::Context;
use crate::payload::Payload;
use crate::peer::{Batch, Order, Peer, PublisherPlan, SignalOrder};

pub(super) const CASES: &[Case] = &[
    Case::new(
        "a close of the next case's sockets does not return (negative control)",
        control,
    ),
    Case::new(
        "a socket close that does not return delays no rescue, no heartbeat and no new peer",
        lingering,
    )
    .ends_clients(),
    Case::new(
        "a file of a file system that does not answer delays no rescue and no new peer",
        silent,
    )
    .ends_clients(),
    Case::new(
        "a descriptor that is no memory of the device is refused, and the next valid one opens",
        no_memory,
    ),
];

const WORDS: u64 = 1024;

/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(10);

/// A TCP socket with `SO_LINGER` and unread data: its last `close` returns when the other end is
/// dropped.
struct Lingering {
    socket: OwnedFd,
    reader: TcpStream,
}

impl Lingering {
    fn new() -> Result<Lingering> {
        let listener = TcpListener::bind("127.0.0.1:0").context("a TCP socket")?;
        rustix::net::sockopt::set_socket_recv_buffer_size(&listener, 1024)?;
        let mut socket = TcpStream::connect(listener.local_addr()?)?;
        let (reader, _) = listener.accept()?;
        socket.set_nonblocking(true)?;
        while socket.write(&[0; 1 << 16]).is_ok() {}
        rustix::net::sockopt::set_socket_linger(&socket, Some(Duration::from_secs(3600)))?;
        Ok(Lingering {
            socket: socket.into(),
            reader,
        })
    }
}

fn control(_: &Context) -> Result<()> {
    let Lingering { socket, reader } = Lingering::new()?;
    let (returned, returns) = channel();
    std::thread::spawn(move || {
        drop(socket);
        let _ = returned.send(());
    });
    let ended = returns.recv_timeout(Duration::from_secs(1));
    ensure!(
        ended == Err(RecvTimeoutError::Timeout),
        "its close returned"
    );
    drop(reader);
    returns
        .recv_timeout(PATIENCE)
        .context("it returns when the other end is closed")
}

/// A socket of the kind that endpoints have.
fn endpoint() -> Result<OwnedFd> {
    Ok(rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )?)
}

fn address(context: &Context, name: &str) -> Result<SocketAddrUnix> {
    Ok(SocketAddrUnix::new(
        context.domain.path().join(format!("{name}.sock")),
    )?)
}

/// The descriptors that were sent, and those that arrived: a kernel may refuse one, and the other
/// end may have closed.
#[derive(Default)]
struct Counts {
    due: u64,
    thrown: AtomicU64,
    came: AtomicU64,
    failed: AtomicU64,
}

impl Counts {
    fn all_thrown(&self) -> Result<u64> {
        ensure!(
            eventually(PATIENCE, || self.thrown.load(SeqCst) == self.due),
            "a send does not return"
        );
        ensure!(
            self.failed.load(SeqCst) == 0,
            "{} sends failed",
            self.failed.load(SeqCst)
        );
        Ok(self.came.load(SeqCst))
    }

    /// Sends a packet that makes no sense with a descriptor, and closes the copy here at once: the
    /// receiver shall have the last one. On a thread, for this one may be the last.
    fn throw(self: &Arc<Self>, socket: OwnedFd, fd: OwnedFd) {
        let counts = self.clone();
        std::thread::spawn(move || {
            match send(&socket, fd.as_fd()) {
                Ok(()) => counts.came.fetch_add(1, SeqCst),
                Err(Errno::PERM | Errno::PIPE | Errno::CONNRESET) => 0,
                Err(_) => counts.failed.fetch_add(1, SeqCst),
            };
            counts.thrown.fetch_add(1, SeqCst);
            drop(fd);
        });
    }
}

fn send(socket: &OwnedFd, fd: BorrowedFd<'_>) -> Result<(), Errno> {
    let fds = [fd];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ancillary.push(SendAncillaryMessage::ScmRights(&fds));
    rustix::net::sendmsg(
        socket,
        &[IoSlice::new(b"nonsense")],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )
    .map(drop)
}

/// Work that must go on whatever this process is sent: everything that its peers need of it.
struct Scene {
    victim: Peer,
    newcomer: Peer,
    unfinished: Option<Sample>,
    /// Waits for it.
    stream: Stream,
}

impl Scene {
    /// Begun before anything is thrown: a child has copies of all that is open, until its `exec`.
    fn begin(context: &Context) -> Result<Scene> {
        let (mut victim, newcomer) = (context.peer()?, context.peer()?);
        victim.publish(PublisherPlan::of("mortal"))?;
        let mut subscriber = context.subscriber("mortal")?;
        victim.ask(&Order::Send(Batch::of(1, WORDS, 1).slow(LONG)))?;
        let stream = context.stream()?;
        let unfinished = Some(subscriber.receive(&stream, PATIENCE)?);
        Ok(Scene {
            victim,
            newcomer,
            unfinished,
            stream,
        })
    }

    /// A rescue, a heartbeat, and a new peer of a publisher and of a timeline of this process.
    fn goes_on(
        mut self,
        context: &Context,
        publisher: &warpipe::Publisher,
        timeline: &Timeline,
    ) -> Result<()> {
        self.newcomer.subscribe(publisher.name())?;
        let sequence = Payload::of(WORDS, 7).send(publisher, &context.stream()?)?;
        let items = self.newcomer.receive(1)?;
        super::all_whole(&items, [sequence])?;
        self.newcomer
            .signals(SignalOrder::OpenTimeline("values".into()))?;
        timeline.signal_now(1, PATIENCE)?;
        self.newcomer.signals(SignalOrder::WaitHost(1))?;
        let beat = || {
            publisher
                .subscribers()
                .iter()
                .map(|one| one.silent_for)
                .min()
        };
        let beats = eventually(PATIENCE, || {
            beat().is_some_and(|silent| silent < Duration::from_millis(500))
        });
        ensure!(beats, "the last heartbeat seen was {:?} ago", beat());
        self.victim.kill()?;
        let unfinished = self.unfinished.take().context("held since the beginning")?;
        match unfinished.finish(LONG / 2) {
            Err(Error::Lost(Loss::Sample { sequence: 1, .. })) => {}
            other => bail!("a killed publisher's sample gave {other:?}"),
        }
        self.stream.synchronize(PATIENCE)?;
        self.newcomer.dismiss()
    }
}

/// Throws descriptors at a publisher, a timeline, a subscriber and an open timeline of this
/// process. Returns how many came through.
fn throw_at_all(context: &Context, mut next: impl FnMut() -> Result<OwnedFd>) -> Result<u64> {
    const EACH: u64 = 4;
    let counts = Arc::new(Counts {
        due: 4 * EACH,
        ..Counts::default()
    });
    for name in ["good", "values"] {
        for _ in 0..EACH {
            let socket = endpoint()?;
            rustix::net::connect(&socket, &address(context, name)?)?;
            counts.throw(socket, next()?);
        }
    }
    let listener = endpoint()?;
    rustix::net::bind(&listener, &address(context, "evil")?)?;
    rustix::net::listen(&listener, 4)?;
    let fds = (0..2 * EACH).map(|_| next()).collect::<Result<Vec<_>>>()?;
    std::thread::scope(|scope| {
        let thrower = scope.spawn(|| -> Result<()> {
            for fd in fds {
                counts.throw(rustix::net::accept(&listener)?, fd);
            }
            Ok(())
        });
        for _ in 0..EACH {
            let options = SubscriberOptions {
                handshake_timeout: PATIENCE,
                ..context.domain.on(&context.device)
            };
            let met = Subscriber::open("evil", options, Duration::ZERO);
            ensure!(met.is_err(), "a hostile socket was taken for a publisher");
            let met = Timeline::open("evil", context.domain.on(&context.device), Duration::ZERO);
            ensure!(
                met.is_err(),
                "a hostile socket was taken for a timeline's owner"
            );
        }
        thrower.join().map_err(|_| anyhow!("a panic"))?
    })?;
    std::fs::remove_file(context.domain.path().join("evil.sock"))?;
    counts.all_thrown()
}

fn lingering(context: &Context) -> Result<()> {
    let publisher = context.publisher("good")?;
    let timeline = Timeline::new("values", context.domain.on(&context.device))?;
    let scene = Scene::begin(context)?;
    let mut readers = Vec::new();
    let came = throw_at_all(context, || {
        let Lingering { socket, reader } = Lingering::new()?;
        readers.push(reader);
        Ok(socket)
    });
    let went_on = came.and_then(|came| {
        context.figure("came_through", came);
        scene.goes_on(context, &publisher, &timeline)
    });
    // Also after a failure: the end of a process waits for its sockets, too.
    drop(readers);
    went_on
}

/// A FUSE file system with a server that does not answer. It ends with the descriptor of
/// `/dev/fuse`.
struct Mounted {
    device: Option<File>,
    path: PathBuf,
}

impl Mounted {
    fn new(context: &Context) -> Result<Mounted> {
        let path = context.domain.path().with_extension("silent");
        let device = File::options().read(true).write(true).open("/dev/fuse");
        let mounted = device.and_then(|device| {
            File::create(&path)?;
            mount(&device, &path).map(|()| device)
        });
        match mounted {
            Ok(device) => Ok(Mounted {
                device: Some(device),
                path,
            }),
            Err(error) => {
                let _ = std::fs::remove_file(&path);
                skip(format!("no FUSE file system can be mounted here: {error}"))
            }
        }
    }

    /// A descriptor that was located and not opened: no server answers an `open`.
    fn locate(&self) -> Result<OwnedFd> {
        Ok(rustix::fs::openat(
            CWD,
            &self.path,
            OFlags::PATH | OFlags::CLOEXEC,
            Mode::empty(),
        )?)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // From here on, a wait for an answer gets an error.
        self.device = None;
        let path =
            std::ffi::CString::new(self.path.as_os_str().as_encoded_bytes()).unwrap_or_default();
        // SAFETY: reads the path, which lives across the call.
        unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
        let _ = std::fs::remove_file(&self.path);
    }
}

fn mount(device: &File, path: &std::path::Path) -> std::io::Result<()> {
    let options = format!(
        "fd={},rootmode=100000,user_id=0,group_id=0,allow_other",
        device.as_raw_fd()
    );
    let text = |bytes: &[u8]| std::ffi::CString::new(bytes).map_err(std::io::Error::other);
    let (path, options) = (
        text(path.as_os_str().as_encoded_bytes())?,
        text(options.as_bytes())?,
    );
    // SAFETY: reads four strings, which live across the call.
    let code = unsafe {
        libc::mount(
            c"silent".as_ptr(),
            path.as_ptr(),
            c"fuse".as_ptr(),
            0,
            options.as_ptr().cast(),
        )
    };
    if code == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}

fn silent(context: &Context) -> Result<()> {
    let publisher = context.publisher("good")?;
    let timeline = Timeline::new("values", context.domain.on(&context.device))?;
    let scene = Scene::begin(context)?;
    let mounted = Mounted::new(context)?;
    let came = throw_at_all(context, || mounted.locate())?;
    context.figure("came_through", came);
    // As a bare descriptor, too, on a thread: what fails here hangs.
    let (info, device, file) = (example(context)?, context.device.clone(), mounted.locate()?);
    let (answer, answers) = channel();
    std::thread::spawn(move || {
        answer.send(Memory::import_fd(&device, &file, &info, Access::Read).is_err())
    });
    ensure!(
        answers.recv_timeout(PATIENCE).context("it is asked")?,
        "it is taken for memory"
    );
    scene.goes_on(context, &publisher, &timeline)
}

/// The description of valid memory.
fn example(context: &Context) -> Result<MemoryInfo> {
    Ok(Memory::allocate(&context.device, 8 * WORDS)?.info())
}

fn memfd(bytes: u64, flags: MemfdFlags) -> Result<OwnedFd> {
    let fd = rustix::fs::memfd_create(
        c"hostile",
        flags | MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING,
    )?;
    rustix::fs::ftruncate(&fd, bytes)?;
    Ok(fd)
}

fn no_memory(context: &Context) -> Result<()> {
    let memory = Memory::allocate(&context.device, 8 * WORDS)?;
    let (info, stream) = (memory.info(), context.stream()?);
    memory.write(&stream, 0, &vec![7; 8 * WORDS as usize])?;
    stream.synchronize(PATIENCE)?;
    let file = |path: &str| -> Result<OwnedFd> {
        Ok(File::options().read(true).write(true).open(path)?.into())
    };
    let short = memfd(info.mapped_bytes / 2, MemfdFlags::empty())?;
    let size = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&short, size)?;
    let huge = memfd(
        info.mapped_bytes,
        MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB,
    );
    let folder = std::env::temp_dir().join(format!("warpipe-no-memory-{}", std::process::id()));
    std::fs::write(&folder, [0; 64])?;
    let mut bad = vec![
        ("a pipe", rustix::pipe::pipe()?.0),
        ("a socket", endpoint()?),
        ("/dev/null", file("/dev/null")?),
        ("/dev/zero", file("/dev/zero")?),
        ("a file", File::open(&folder)?.into()),
        (
            "a memfd that can shrink",
            memfd(info.mapped_bytes, MemfdFlags::empty())?,
        ),
        ("a memfd that is too short", short),
    ];
    std::fs::remove_file(folder)?;
    // Whether there are such pages does not matter: none is to be asked for.
    match huge {
        Ok(huge) => bad.push(("a memfd of huge pages", huge)),
        Err(error) => context.figure("without_huge_pages", format!("{error:#}")),
    }
    for (what, fd) in bad {
        match Memory::import_fd(&context.device, &fd, &info, Access::Read) {
            Err(
                Error::Device {
                    fault: DeviceFault::NotShareable,
                    ..
                }
                | Error::Driver { .. },
            ) => {}
            other => bail!("{what} gave {other:?}"),
        }
        let good = memory.export_fd()?;
        let shared = Memory::import_fd(&context.device, &good, &info, Access::Read)?;
        ensure!(
            shared.to_vec(PATIENCE)?.iter().all(|&byte| byte == 7),
            "behind {what} the good memory is wrong"
        );
    }
    Ok(())
}
