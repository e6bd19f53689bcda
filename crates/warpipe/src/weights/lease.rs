//! The lease of memory that a version shares with its publisher's allocator: as long as any process
//! has the version, the publisher keeps what owns the memory.
//!
//! It is a pipe. Its writing end goes with the version's descriptors to each process that has it,
//! and nothing is written. The publisher watches the reading end, which hangs up when the last copy of
//! the other one is closed: by a process that gave the version up, or by the system at its death.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, Weak};

use rustix::fs::FileType;
use rustix::pipe::PipeFlags;

use crate::debug::opaque_debug;
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::fork::NoForkSection;
use crate::mutex::LockUnpoisoned;
use crate::os;
use crate::runtime::closer::PeerFd;
use crate::runtime::reactor::{EventSource, Next, Reactor, Registration, Watch};

/// Makes a lease of what `owner` owns, and returns the end that goes with the version.
pub(super) fn grant(owner: impl Send + 'static) -> Result<Arc<PeerFd>> {
    let context = "a lease of weights";
    let section = NoForkSection::enter();
    let pipe = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK);
    let (reader, writer) = pipe.map_err(|e| Error::os("pipe2", context, e))?;
    let adopt = |fd| {
        section
            .adopt(fd)
            .map_err(|e| Error::os("fcntl(F_DUPFD_CLOEXEC)", context, e))
    };
    let (reader, writer) = (adopt(reader)?, PeerFd::from(adopt(writer)?));
    drop(section);
    writer.approve();
    let reactor = Reactor::of_process()?;
    let watch = Arc::new(LeaseWatch {
        reactor: reactor.clone(),
        granted: Mutex::default(),
    });
    let target = Arc::downgrade(&watch) as Weak<dyn EventSource>;
    let registration = reactor.register(Watch::Hangup(reader.as_fd()), &target, 0)?;
    *watch.granted.locked() = Some(Granted {
        _registration: registration,
        _reader: reader,
        _owner: Box::new(owner),
        _watch: watch.clone(),
    });
    Ok(Arc::new(writer))
}

/// The reason, if any, why a peer's descriptor is no lease.
pub(super) fn check(fd: BorrowedFd<'_>) -> Result<(), String> {
    match os::kind_of(fd) {
        Ok(kind) if kind.file == FileType::Fifo => Ok(()),
        Ok(kind) => Err(format!("{:?}", kind.file)),
        Err(error) => Err(error.to_string()),
    }
}

/// Waits for the end of a lease. It holds itself until then.
struct LeaseWatch {
    reactor: Arc<Reactor>,
    granted: Mutex<Option<Granted>>,
}

/// What ends with the lease: dropped in this order.
struct Granted {
    _registration: Registration,
    _reader: CloseOnForkFd,
    _owner: Box<dyn Send>,
    _watch: Arc<LeaseWatch>,
}

opaque_debug!(LeaseWatch {});

impl EventSource for LeaseWatch {
    fn on_ready(&self, _: u64) -> Next {
        let ended = self.granted.locked().take();
        if let Some(ended) = ended {
            // What owns the memory is foreign code, and its drop may call the driver.
            self.reactor.defer_drop(Box::new(ended));
        }
        Next::Stop
    }
}
