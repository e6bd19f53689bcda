//! The next step for a person, in the words of each language.

use std::borrow::Cow;
use std::fmt;
use std::io::{self, ErrorKind};

use super::{
    DeviceFault, Error, HandleFault, HandshakeFault, JobEnd, LimitFault, Loss, NameFault,
    PointerKind, StateFault, WeightsFault,
};
use crate::kind::Kind;

const ONE_VERSION: &str = "run one version of warpipe on both sides";
const FILE_SIZE: &str =
    "raise the limit of file sizes (`ulimit -f`), which holds for shared memory, too";

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.hint() {
            Some(hint) => write!(f, "{self}; {hint}"),
            None => write!(f, "{self}"),
        }
    }
}

impl Error {
    /// The next step for a person, in the words of this crate; `None` if the error's own text is
    /// all there is to say. A sentence without a full stop, to print behind the error.
    ///
    /// ```
    /// let error = warpipe::EndpointName::new("camera//front").unwrap_err();
    /// eprintln!("{error}");
    /// if let Some(hint) = error.hint() {
    ///     eprintln!("  next: {hint}");
    /// }
    /// ```
    pub fn hint(&self) -> Option<Cow<'static, str>> {
        self.hint_in(Language::Rust)
    }

    /// [`hint`](Error::hint) in the words of another interface of this library.
    #[doc(hidden)] // For bindings.
    pub fn hint_in(&self, language: Language) -> Option<Cow<'static, str>> {
        match self.fixed_hint() {
            "" => None,
            hint if !hint.contains('{') => Some(hint.into()),
            hint => Some(language.put_into(hint).into()),
        }
    }

    fn fixed_hint(&self) -> &'static str {
        match self {
            Error::Device { fault, .. } => of_device(*fault),
            Error::Driver { next, .. } => next,
            Error::Limit(fault) => of_limit(fault),
            Error::Os { call, source, .. } => of_system(call, source),
            Error::Name(fault) => of_name(fault),
            Error::NotFound { kind, .. } => of_absent(*kind),
            Error::Handle { fault, .. } => of_handle(fault),
            Error::Refused { denied: true, .. } => {
                "ask its owner to allow the uid or gid (`allow_uids`, `allow_gids`), and to let others pass the folder of its domain (chmod 711)"
            }
            Error::Handshake { fault, .. } => of_handshake(fault),
            Error::Protocol { .. } => "the link is closed: reconnect, and report the peer",
            Error::PeerGone { kind, .. } => of_gone(*kind),
            Error::Lost(Loss::Sample { .. }) => "discard what was computed from it",
            Error::Lost(Loss::Event { .. }) => "discard what depends on it",
            Error::Timeout { .. } => {
                "wait longer, or see `warpipe ls -v`, which shows what is there and what waits"
            }
            Error::Weights(fault) => of_weights(fault),
            Error::Job { end, .. } => match end {
                JobEnd::DeadLettered { .. } => "see to the cause and submit it again",
                JobEnd::Rejected { .. } => "change it before it is submitted again",
                JobEnd::Expired => "allow more time, or add servers",
                JobEnd::Taken => "wait for it in one place only",
            },
            Error::State(fault) => of_state(fault),
            Error::Argument { .. } | Error::Refused { .. } => "",
        }
    }
}

/// The words of a hint that differ between the interfaces of this library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Language {
    /// This crate.
    Rust,
    /// The C interface.
    C,
    /// The Python package.
    Python,
    /// The command line.
    CommandLine,
}

impl Language {
    /// A hint with this language's words in their places.
    fn put_into(self, hint: &str) -> String {
        let names = [
            "{host}",
            "{wait_for_publisher}",
            "{or_wait}",
            "{keep}",
            "{of_user}",
            "{reconnect}",
            "{uncaptured}",
            "{spawn}",
        ];
        let words = self.words();
        let pairs = names.iter().zip(words);
        pairs.fold(hint.to_owned(), |hint, (name, word)| {
            hint.replace(name, word)
        })
    }

    fn words(self) -> [&'static str; 8] {
        const UNCAPTURED: &str =
            "before the capture begins or after it has ended (cuStreamEndCapture)";
        match self {
            Language::Rust => [
                "use Device::host()",
                "give `Subscriber::open` a timeout",
                ", or wait for it with a timeout",
                "`weights::Keeper` or `warpipe weights serve`",
                "; `Domain::of_user` opens another user's",
                "turn `reconnect` on",
                UNCAPTURED,
                "spawn or exec",
            ],
            Language::C => [
                "open the device \"host\"",
                "set wait_ns to wait for it",
                ", or set a timeout, or wait_ns, to wait for it",
                "`warpipe weights serve`",
                "; `warpipe_domain_open_of_user` opens another user's",
                "set reconnect",
                UNCAPTURED,
                "exec",
            ],
            Language::Python => [
                "use device=\"host\"",
                "wait for it with `wait=`",
                ", or wait for it with `wait=`",
                "`weights.keep` or `warpipe weights serve`",
                "; `Domain(path, owner=UID)` opens another user's",
                "pass `reconnect=True`",
                "outside of `torch.cuda.graph`",
                "`multiprocessing` with \"spawn\"",
            ],
            Language::CommandLine => [
                "use --device host",
                "wait longer with --timeout",
                "",
                "`warpipe weights serve`",
                "",
                "use --reconnect",
                UNCAPTURED,
                "exec",
            ],
        }
    }
}

fn of_device(fault: DeviceFault) -> &'static str {
    match fault {
        DeviceFault::NoDriver => "install the NVIDIA driver, or {host}",
        DeviceFault::OldDriver => "update the driver (R525 or newer), or {host}",
        DeviceFault::NoGpu => {
            "check CUDA_VISIBLE_DEVICES and the container's device list, or {host}"
        }
        DeviceFault::NoPermission => "add this user to the group that owns it, or {host}",
        DeviceFault::NoSuchDevice => "take one of these",
        DeviceFault::Reset => "give the device up, and open it again",
        DeviceFault::NotShareable => "the peer runs another backend or is broken",
        DeviceFault::OutOfReach => {
            "put both ends on one GPU or on GPUs joined by NVLink or PCIe peer access"
        }
    }
}

/// The next step after a call that the system refused, or empty.
fn of_system(call: &str, error: &io::Error) -> &'static str {
    match (error.raw_os_error(), error.kind()) {
        (Some(libc::EMFILE | libc::ENFILE), _) => {
            "raise the limit with `ulimit -n`, or close something"
        }
        (Some(libc::ETOOMANYREFS), _) => "raise it with `ulimit -n`, or end some of the processes",
        (_, ErrorKind::FileTooLarge) => FILE_SIZE,
        (_, ErrorKind::StorageFull) => "remove files there, or choose a directory elsewhere",
        (_, ErrorKind::ReadOnlyFilesystem) => "choose a directory that can be written to",
        (_, ErrorKind::PermissionDenied) if call.starts_with("open") => {
            "see the permissions of it, and of the folders above it"
        }
        _ if call == "dlopen" => {
            "correct NVTX_INJECTION64_PATH or WARPIPE_NVTX, or set WARPIPE_NVTX=0"
        }
        (_, ErrorKind::OutOfMemory) if call == "mmap" => {
            "raise the limit of addresses (`ulimit -v`) or of mappings (`vm.max_map_count`)"
        }
        (_, ErrorKind::WouldBlock) if call == "clone" => {
            "raise the limit of processes and threads (`ulimit -u`, or a container's limit of pids)"
        }
        _ => "",
    }
}

fn of_limit(fault: &LimitFault) -> &'static str {
    match fault {
        LimitFault::Device { .. } => "free memory or lower the publisher's memory limit",
        LimitFault::Depth { .. } => {
            "receive and release faster, raise the depth, or choose another policy"
        }
        LimitFault::Memory {
            bytes, used, limit, ..
        } if used.saturating_add(*bytes) <= *limit => {
            "release some: it has as many blocks or loans as it may (8,192 blocks of a pool), or what is left lies in pieces that are too short"
        }
        LimitFault::Memory { bytes, limit, .. } if bytes > limit => "raise the memory limit",
        LimitFault::Memory { .. } => "release some, or raise the memory limit",
        LimitFault::Quota { .. } => {
            "release blocks of that user, in all of its processes, or have the pool's owner raise its quota"
        }
        LimitFault::Events(_) => "give some of them up",
        LimitFault::Jobs { .. } => "take results, add workers, or raise the limit",
    }
}

fn of_name(fault: &NameFault) -> &'static str {
    match fault {
        NameFault::Invalid { reason, .. } if reason.starts_with("it is longer than") => {
            "take a shorter name"
        }
        NameFault::Invalid { .. } => {
            "use a-z A-Z 0-9 _ - . in parts joined by /, no part empty or starting with a dot"
        }
        NameFault::Taken { .. } => "stop it or take another name",
        NameFault::OtherKind { .. } => "take the right name, or open it as what it is",
        NameFault::Foreign { .. } => "it is left alone: move it away, or take another name",
        NameFault::Domain { .. } => {
            "use a directory that you own with mode 0700, or set WARPIPE_DOMAIN{of_user}"
        }
    }
}

fn of_handshake(fault: &HandshakeFault) -> &'static str {
    match fault {
        HandshakeFault::Version { .. } | HandshakeFault::Lifeline(_) => ONE_VERSION,
        HandshakeFault::Device { .. } => "choose the same backend on both sides",
        HandshakeFault::Full { .. } => "close a link, or raise the limit in the endpoint's options",
        HandshakeFault::NoRoom(_) => "close something there, or raise its limits",
        HandshakeFault::Closed => "it may be shutting down: try again",
        HandshakeFault::Silent(_) => "it may be stopped: see its state",
        HandshakeFault::Unwatchable(_) => "both must live under one kernel, 5.4 or newer",
        _ => "",
    }
}

/// The next step where the owner of an endpoint of this kind has gone.
fn of_gone(kind: Kind) -> &'static str {
    match kind {
        Kind::Publisher => "subscribe again, or {reconnect}",
        Kind::Queue => "its jobs have ended with it: attach to the next queue of this name",
        Kind::LegacyMemory => {
            "a legacy handle dies with its exporter: export again, or use a channel, with memory that outlives its sender"
        }
        _ => "open it again when it is back",
    }
}

fn of_link(kind: Kind) -> &'static str {
    match kind {
        Kind::KernelRing => {
            "close the ring; its producer makes it again, and its consumers open it again"
        }
        Kind::Queue => "attach to the queue again",
        _ => "subscribe again",
    }
}

fn of_weights(fault: &WeightsFault) -> &'static str {
    match fault {
        WeightsFault::File { fault, .. } => fault.next,
        WeightsFault::Unverified { tensors, .. } if !tensors.is_empty() => {
            "end the process that wrote to their memory, then publish the weights again \
             (`warpipe weights drop`, then `serve`)"
        }
        WeightsFault::Unverified { .. } => {
            "publish the weights with hashes (`hash` is `device` or `later`; a publisher that \
             hashes later has to live until it is done), or `warpipe weights serve` their files"
        }
        WeightsFault::Mismatch { .. } => {
            "publish the same tensors in the same order, or open the version anew"
        }
    }
}

fn of_state(fault: &StateFault) -> &'static str {
    match fault {
        StateFault::Capturing(_) => "call it {uncaptured}, or on another stream",
        StateFault::NotRecorded(_) => "record it first, then tell others to wait for it",
        StateFault::LinkClosed { kind, .. } => of_link(*kind),
        StateFault::QueueClosed(_) => "make a new one to submit more jobs",
        StateFault::Forked => {
            "open a new one in the child (CUDA cannot follow a fork at all: use {spawn})"
        }
    }
}

/// The next step where no process has the name.
fn of_absent(kind: Kind) -> &'static str {
    match kind {
        Kind::Publisher => "start the publisher, or {wait_for_publisher}",
        Kind::Weights => {
            "start one with {keep} (`warpipe weights ls` shows which there are){or_wait}"
        }
        _ => "start its owner{or_wait}",
    }
}

/// The next step after a ticket or handle that cannot be used.
fn of_handle(fault: &HandleFault) -> &'static str {
    match fault {
        HandleFault::Version { .. } => ONE_VERSION,
        HandleFault::OtherKind { .. } => "open it as what it is",
        HandleFault::NoHandle(_) | HandleFault::Oversized(_) | HandleFault::Damaged(_) => {
            "pass it on whole, as it was exported"
        }
        HandleFault::Expired { .. } => "get a new ticket from its owner",
        HandleFault::NotExportable { kind, .. } => of_pointer(*kind),
        HandleFault::ForeignHost => "memory is shared within one machine: export it again there",
        HandleFault::Device { .. } => "open it with the device that owns it, or one of its kind",
        HandleFault::Dropped => "ask for a handle of a new one",
        HandleFault::Range { .. } => "export a range that does",
        HandleFault::Refused(_) | HandleFault::Stale { .. } => "export it again",
        HandleFault::NotOpen(_) => "close what was opened, once",
    }
}

/// The next step for memory that cannot be exported.
fn of_pointer(kind: PointerKind) -> &'static str {
    match kind {
        PointerKind::Device => "try again",
        PointerKind::Null => "allocate it first",
        PointerKind::Host | PointerKind::Pinned => {
            "send it through a channel, or copy it to memory of cudaMalloc"
        }
        PointerKind::Managed => "copy it to memory of cudaMalloc",
        PointerKind::Pool => {
            "copy it to memory of cudaMalloc (PyTorch: leave `backend:cudaMallocAsync` out of PYTORCH_CUDA_ALLOC_CONF)"
        }
        PointerKind::Vmm => {
            "export its descriptor instead (PyTorch: leave `expandable_segments` out of PYTORCH_CUDA_ALLOC_CONF)"
        }
        PointerKind::VmmPrivate => {
            "share it from the process that allocated it, or copy it to memory of cudaMalloc"
        }
        PointerKind::Import => "pass on the handle with which it was opened",
        PointerKind::Unknown => {
            "it was freed, or never was device memory: export it while it lives"
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_states_the_fact_and_its_hint_the_next_step() {
        let error = Error::device(DeviceFault::OldDriver, "the CUDA driver lacks cuMemCreate");
        assert_eq!(error.to_string(), "the CUDA driver lacks cuMemCreate");
        assert_eq!(
            error.hint().as_deref(),
            Some("update the driver (R525 or newer), or use Device::host()")
        );
    }

    #[test]
    fn a_name_of_weights_without_a_keeper_says_how_to_start_one() {
        let error = Error::NotFound {
            kind: Kind::Weights,
            name: "llama".into(),
            domain: "/tmp".into(),
            was_there: false,
        };
        for (language, start, wait) in [
            (Language::Rust, "`weights::Keeper`", "timeout"),
            (Language::Python, "`weights.keep`", "`wait=`"),
            // Its commands do not wait for one.
            (
                Language::CommandLine,
                "`warpipe weights serve`",
                "shows which there are)",
            ),
        ] {
            let hint = error.hint_in(language).unwrap_or_default();
            assert!(hint.contains(start) && hint.contains(wait), "{hint}");
        }
        let told = error.hint_in(Language::CommandLine).unwrap_or_default();
        assert!(!told.contains("wait"), "{told}");
    }

    #[test]
    fn a_domain_that_cannot_be_used_says_how_another_users_is_opened() {
        let error = Error::Name(NameFault::Domain {
            path: "/tmp/warpipe-1".into(),
            reason: "it cannot be opened: Permission denied".into(),
        });
        for (language, call) in [
            (Language::Rust, "`Domain::of_user`"),
            (Language::C, "`warpipe_domain_open_of_user`"),
            (Language::Python, "`Domain(path, owner=UID)`"),
        ] {
            let hint = error.hint_in(language).unwrap_or_default();
            assert!(hint.contains(call), "{hint}");
        }
    }

    #[test]
    fn a_full_or_locked_file_system_and_a_limit_of_the_system_have_a_next_step() {
        let hint = |call, code| {
            let error = Error::os(call, "x", io::Error::from_raw_os_error(code));
            error.hint().map(String::from)
        };
        for (call, code, word) in [
            ("clone", libc::EAGAIN, "ulimit -u"),
            ("mmap", libc::ENOMEM, "max_map_count"),
            ("bind", libc::ENOSPC, "remove files"),
            ("openat", libc::EROFS, "written"),
            ("openat", libc::EACCES, "permissions"),
            ("pwrite", libc::EFBIG, "ulimit -f"),
            ("pipe2", libc::EMFILE, "close something"),
            ("sendmsg", libc::ETOOMANYREFS, "end some of the processes"),
        ] {
            let hint = hint(call, code).unwrap_or_default();
            assert!(hint.contains(word), "{call}: {hint}");
        }
        assert_eq!(hint("read", libc::EIO), None);
    }

    #[test]
    fn a_limit_that_leaves_room_is_not_to_be_raised() {
        let hint = |bytes, used| {
            let (name, limit) = ("p".into(), 1 << 30);
            let fault = LimitFault::Memory {
                name,
                bytes,
                used,
                limit,
            };
            Error::Limit(fault).hint().unwrap().into_owned()
        };
        let short = hint(64, 4 << 20);
        assert!(short.contains("as many blocks"), "{short}");
        let full = hint(64, (1 << 30) - 8);
        assert_eq!(full, "release some, or raise the memory limit");
        assert_eq!(hint(2 << 30, 0), "raise the memory limit");
    }

    #[test]
    fn debug_of_an_error_which_a_main_prints_says_what_happened_and_the_next_step() {
        let error = Error::Name(NameFault::Invalid {
            name: "a//b".into(),
            reason: "it has an empty part",
        });
        assert_eq!(
            format!("{error:?}"),
            format!("{error}; {}", error.hint().unwrap())
        );
        let text = format!("{error:?}");
        assert!(
            text.starts_with("\"a//b\" is not an endpoint name: "),
            "{text}"
        );
    }
}
