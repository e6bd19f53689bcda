//! Forks while other threads open and close endpoints: a child keeps none of this library's
//! descriptors.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering, Ordering::SeqCst};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use warpipe::{Device, Domain, Event, Publisher, Semaphore, Subscriber, Timeline};

const WAIT: Duration = Duration::from_secs(20);

/// The number of forked children. Before the `fork` hook covered the making of descriptors, about
/// one child in two had strays.
const CHILDREN: usize = 400;

/// Prefixes in `/proc/self/fd` of descriptors that this library makes and a child must not have.
/// Regions (`/memfd:warpipe-region`) stay in a child with their mapping.
const STRAYS: [&str; 6] = [
    "socket:",
    "anon_inode:",
    "pidfd:",
    "/memfd:warpipe-link",
    "/memfd:warpipe-words",
    "/memfd:warpipe-process",
];

/// Serializes the tests of this file, which count and fork the descriptors of the whole process.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn a_child_forked_under_constant_opening_keeps_no_descriptor_of_its_parent() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = std::env::temp_dir().join(format!("warpipe-forks-{}", std::process::id()));
    let before = descriptors();
    let found = while_opening(&folder, || fork_children(&before, &folder));
    assert!(
        found.is_empty(),
        "strays in {CHILDREN} children, by kind: {found:#?}"
    );
}

#[test]
fn a_child_forked_under_constant_opening_opens_endpoints_of_its_own() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = std::env::temp_dir().join(format!("warpipe-forks-own-{}", std::process::id()));
    let statuses = while_opening(&folder, || {
        (0..CHILDREN / 8)
            .map(|_| open_in_a_child(&folder))
            .collect::<Vec<_>>()
    });
    // SIGALRM is the status of a child that hangs.
    assert!(statuses.iter().all(|&status| status == 0), "{statuses:?}");
}

#[test]
fn a_child_forked_while_a_thread_of_the_program_begins_opens_endpoints_of_its_own() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = std::env::temp_dir().join(format!("warpipe-forks-begin-{}", std::process::id()));
    let _domain = Domain::at(&folder).unwrap();
    // The standard library keeps a table of its threads. One that begins may be held up while it has
    // the table's lock, since the table grows now and then.
    let (gate, started) = (Mutex::new(()), AtomicUsize::new(0));
    let status = std::thread::scope(|scope| {
        let closed = gate.lock().unwrap();
        HELD_UP.store(rustix::thread::gettid().as_raw_nonzero().get(), SeqCst);
        for count in 1..=64 {
            scope.spawn(|| {
                started.fetch_add(1, SeqCst);
                drop(gate.lock());
            });
            while IS_HELD_UP.load(SeqCst) == 0 && started.load(SeqCst) < count {
                std::thread::yield_now();
            }
            if IS_HELD_UP.load(SeqCst) != 0 {
                break;
            }
        }
        let status = open_in_a_child(&folder);
        HELD_UP.store(0, SeqCst);
        drop(closed);
        status
    });
    std::fs::remove_dir_all(folder).unwrap();
    assert_eq!(status, 0);
}

/// Holds up the next thread to allocate that is not this one, while it is not 0. In a child nothing.
static HELD_UP: AtomicI32 = AtomicI32::new(0);

/// The thread that is held up.
static IS_HELD_UP: AtomicI32 = AtomicI32::new(0);

struct Holding;

#[global_allocator]
static ALLOCATOR: Holding = Holding;

// SAFETY: the system's allocator, later.
unsafe impl GlobalAlloc for Holding {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let but = HELD_UP.load(SeqCst);
        if but != 0 {
            let own = rustix::thread::gettid().as_raw_nonzero().get();
            let is_other = own != but && rustix::process::getpid().as_raw_nonzero().get() != own;
            if is_other && IS_HELD_UP.compare_exchange(0, own, SeqCst, SeqCst).is_ok() {
                while HELD_UP.load(SeqCst) != 0 {
                    std::hint::spin_loop();
                }
            }
        }
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[test]
fn children_that_several_threads_fork_at_once_have_nothing_of_the_lifeline() {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = std::env::temp_dir().join(format!("warpipe-forks-many-{}", std::process::id()));
    let (domain, device) = (Domain::at(&folder).unwrap(), Device::host());
    let before = descriptors();
    let publisher = Publisher::new("many", domain.on(&device)).unwrap();
    let subscriber = Subscriber::open("many", domain.on(&device), Duration::ZERO).unwrap();
    publisher.wait_for_subscribers(1, WAIT).unwrap();
    let is_ours = |path: &&String| path.starts_with("socket:") || path.starts_with("pipe:");
    let has_kept = || {
        descriptors()
            .iter()
            .any(|(fd, path)| before.get(fd) != Some(path) && is_ours(&path))
    };
    let kept = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let (kept, has_kept) = (&kept, &has_kept);
            let fork_some = move || {
                (0..CHILDREN / 4)
                    .filter(|_| status_of_a_child(|| !has_kept()) != 0)
                    .count()
            };
            scope.spawn(move || kept.fetch_add(fork_some(), Ordering::Relaxed));
        }
    });
    assert_eq!(
        kept.into_inner(),
        0,
        "children of {CHILDREN} with descriptors of the parent's lifeline"
    );
    assert!(
        warpipe::process_stats().is_proof_prompt,
        "the parent knows its own"
    );
    drop((subscriber, publisher));
    std::fs::remove_dir_all(folder).unwrap();
}

/// Runs `work` while other threads open and close endpoints in a domain of that folder.
fn while_opening<T>(folder: &Path, work: impl FnOnce() -> T) -> T {
    let domain = Domain::at(folder).unwrap();
    let is_over = AtomicBool::new(false);
    let found = std::thread::scope(|scope| {
        for number in 0..3 {
            let (domain, is_over) = (&domain, &is_over);
            scope.spawn(move || {
                while !is_over.load(Ordering::Relaxed) {
                    open_and_close(domain, number);
                }
            });
        }
        let found = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        is_over.store(true, Ordering::Relaxed);
        found
    });
    std::fs::remove_dir_all(folder).unwrap();
    found.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// The exit status of a child that opens endpoints of its own.
fn open_in_a_child(folder: &Path) -> i32 {
    let path = folder.join("child");
    status_of_a_child(|| {
        let work = || open_and_close(&Domain::at(&path).unwrap(), 0);
        let panicked = std::panic::catch_unwind(work).err();
        // Past the harness, to which what a child says is lost.
        if let Some(text) = panicked.as_ref().and_then(|it| it.downcast_ref::<String>()) {
            // SAFETY: reads the text, which lives.
            unsafe { libc::write(2, text.as_ptr().cast(), text.len()) };
        }
        panicked.is_none()
    })
}

/// The exit status of a child that runs `work`: 0 if `work` returns true.
fn status_of_a_child(work: impl FnOnce() -> bool) -> i32 {
    // SAFETY: as in `fork_children`; a child that hangs ends by its own alarm.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above.
        unsafe {
            libc::alarm(60);
            libc::_exit(i32::from(!work()));
        }
    }
    let mut status = 0;
    // SAFETY: reaps our own child, and writes one `int`.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    status
}

fn open_and_close(domain: &Domain, number: usize) {
    let (device, name) = (Device::host(), |kind: &str| format!("{kind}-{number}"));
    let publisher = Publisher::new(&name("publisher"), domain.on(&device)).unwrap();
    let mut subscriber =
        Subscriber::open(&name("publisher"), domain.on(&device), Duration::ZERO).unwrap();
    let stream = device.stream().unwrap();
    publisher.wait_for_subscribers(1, WAIT).unwrap();
    publisher.send_bytes(&stream, b"x").unwrap();
    subscriber
        .receive(&stream, WAIT)
        .unwrap()
        .finish(WAIT)
        .unwrap();
    let timeline = Timeline::new(&name("timeline"), domain.on(&device)).unwrap();
    drop(Timeline::open(&name("timeline"), domain.on(&device), Duration::ZERO).unwrap());
    let semaphore = Semaphore::new(&name("semaphore"), 1, domain.on(&device)).unwrap();
    drop(Semaphore::open(&name("semaphore"), domain.on(&device), Duration::ZERO).unwrap());
    drop(Event::new(domain.on(&device)).unwrap());
    let _ = domain.endpoints().unwrap();
    drop((publisher, subscriber, timeline, semaphore));
}

/// The kinds of strays that children had, and the number of each.
fn fork_children(before: &BTreeMap<i32, String>, folder: &Path) -> BTreeMap<String, usize> {
    let mut found = BTreeMap::new();
    for _ in 0..CHILDREN {
        let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).unwrap();
        // SAFETY: glibc keeps its allocator usable in the child of a process with threads; the
        // child uses that and system calls, and ends by `_exit`.
        match unsafe { libc::fork() } {
            -1 => panic!("{}", std::io::Error::last_os_error()),
            0 => {
                let text = strays(before, folder).join("\n");
                let _ = rustix::io::write(&writer, text.as_bytes());
                // SAFETY: ends the process at once.
                unsafe { libc::_exit(0) }
            }
            child => {
                drop(writer);
                read(reader)
                    .lines()
                    .for_each(|kind| *found.entry(kind.to_string()).or_default() += 1);
                // SAFETY: reaps our own child, which has closed its pipe and ends.
                let answer = unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) };
                assert_eq!(answer, child);
            }
        }
    }
    found
}

fn read(reader: OwnedFd) -> String {
    let mut text = String::new();
    std::fs::File::from(reader)
        .read_to_string(&mut text)
        .unwrap();
    text
}

fn strays(before: &BTreeMap<i32, String>, folder: &Path) -> Vec<String> {
    let is_ours = |path: &String| {
        STRAYS.iter().any(|stray| path.starts_with(stray))
            || Path::new(path).parent() == Some(folder)
    };
    let new = descriptors()
        .into_iter()
        .filter(|(fd, path)| before.get(fd) != Some(path))
        .map(|(_, path)| path);
    new.filter(is_ours)
        .map(|path| path.split('[').next().unwrap_or_default().to_string())
        .collect()
}

/// The open descriptors, except the one that reads them.
fn descriptors() -> BTreeMap<i32, String> {
    let folder = std::fs::File::open("/proc/self/fd").unwrap();
    let directory = rustix::fs::Dir::read_from(&folder).unwrap();
    let numbers: Vec<i32> = directory
        .filter_map(|entry| entry.unwrap().file_name().to_str().ok()?.parse().ok())
        .collect();
    let path = |fd: i32| {
        Some((
            fd,
            std::fs::read_link(format!("/proc/self/fd/{fd}"))
                .ok()?
                .display()
                .to_string(),
        ))
    };
    numbers
        .into_iter()
        .filter(|&fd| fd != folder.as_raw_fd())
        .filter_map(path)
        .collect()
}
