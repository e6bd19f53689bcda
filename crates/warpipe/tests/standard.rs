//! A program that is started without standard input, output and error: none of their numbers
//! becomes this library's.

use std::any::Any;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use warpipe::{
    Access, Device, Domain, Event, Member, MemberOptions, Members, Memory, Pool, Publisher, Queue,
    Semaphore, Subscriber, Ticket, Timeline, Worker,
};

const WAIT: Duration = Duration::from_secs(40);

/// The file in which the program writes its result: it has no other output.
const OUTCOME: &str = "WARPIPE_STANDARD_OUTCOME";

#[test]
fn a_program_started_without_standard_descriptors_gets_none_of_the_librarys_in_their_places() {
    let test =
        "a_program_started_without_standard_descriptors_gets_none_of_the_librarys_in_their_places";
    if let Some(path) = std::env::var_os(OUTCOME) {
        let outcome = std::panic::catch_unwind(program);
        let words = |panic: Box<dyn Any + Send>| format!("{:?}", panic.downcast_ref::<String>());
        return std::fs::write(path, outcome.map_or_else(words, |()| "none".into())).unwrap();
    }
    let path = std::env::temp_dir().join(format!("warpipe-standard-{}", std::process::id()));
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", test, "--nocapture"])
        .env(OUTCOME, &path);
    // SAFETY: system calls alone, in a child that is about to call `exec`.
    unsafe {
        command.pre_exec(|| {
            close_standard();
            Ok(())
        })
    };
    let status = command.status().unwrap();
    let outcome = std::fs::read_to_string(&path);
    let _ = std::fs::remove_file(&path);
    assert_eq!(outcome.unwrap_or_else(|_| status.to_string()), "none");
}

fn close_standard() {
    // SAFETY: the numbers of a process that uses no other descriptors under them.
    (0..3).for_each(|number| _ = unsafe { libc::close(number) });
}

fn link(number: i32) -> Option<String> {
    Some(
        std::fs::read_link(format!("/proc/self/fd/{number}"))
            .ok()?
            .display()
            .to_string(),
    )
}

fn program() {
    // The standard library has filled the numbers that were free when `main` began; this library
    // must not have taken them before.
    let at_load: Vec<_> = (0..3)
        .filter_map(link)
        .filter(|path| path != "/dev/null")
        .collect();
    assert!(at_load.is_empty(), "when it was loaded: {at_load:?}");
    close_standard();
    let folder = std::env::temp_dir().join(format!("warpipe-standard-{}.d", std::process::id()));
    let outcome = std::panic::catch_unwind(|| open_everything(&folder));
    let _ = std::fs::remove_dir_all(&folder);
    outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

/// Opens each kind of endpoint, and checks after each that the numbers are free.
fn open_everything(folder: &Path) {
    let domain = none_taken("a domain", Domain::at(folder).unwrap());
    let (domain, device) = (&domain, &Device::host());
    let stream = device.stream().unwrap();
    let publisher = Publisher::new("a", domain.on(device)).unwrap();
    let publisher = none_taken("a publisher", publisher);
    let subscriber = Subscriber::open("a", domain.on(device), Duration::ZERO).unwrap();
    let mut subscriber = none_taken("a subscriber", subscriber);
    publisher.wait_for_subscribers(1, WAIT).unwrap();
    publisher.send_bytes(&stream, b"x").unwrap();
    let sample = none_taken("a sample", subscriber.receive(&stream, WAIT).unwrap());
    let timeline = Timeline::new("timeline", domain.on(device)).unwrap();
    let opened = Timeline::open("timeline", domain.on(device), Duration::ZERO).unwrap();
    let _timeline = none_taken("a timeline", (timeline, opened));
    let semaphore = Semaphore::new("semaphore", 1, domain.on(device)).unwrap();
    let opened = Semaphore::open("semaphore", domain.on(device), Duration::ZERO).unwrap();
    let _semaphore = none_taken("a semaphore", (semaphore, opened));
    let _event = none_taken("an event", Event::new(domain.on(device)).unwrap());
    let members = Members::new(domain.options()).unwrap();
    let _members = none_taken(
        "members",
        (
            Member::new(
                "m",
                MemberOptions {
                    role: "role".into(),
                    ..domain.options()
                },
            )
            .unwrap(),
            members,
        ),
    );
    let memory = none_taken("memory", Memory::allocate(device, 4096).unwrap());
    let fd = none_taken("a descriptor of it", memory.export_fd().unwrap());
    let opened = Memory::import_fd(device, &fd, &memory.info(), Access::Read).unwrap();
    let _opened = none_taken("opened memory", opened);
    let queue = Queue::new("queue", domain.on(device)).unwrap();
    let worker = Worker::open("queue", domain.on(device), Duration::ZERO).unwrap();
    let _queue = none_taken("a queue", (worker, queue));
    let pool = Pool::new("pool", domain.on(device)).unwrap();
    let _pool = none_taken(
        "a pool",
        (pool.allocate(4096, Duration::ZERO).unwrap(), pool),
    );
    let ticket = Ticket::to(domain, "nobody").unwrap();
    ticket.write_file(folder.join("ticket")).unwrap();
    none_taken("a ticket's file", ());
    sample.finish(WAIT).unwrap();
}

/// Checks that the made object occupies none of the numbers. A number that is taken for a moment,
/// by a file that is read, does not count.
fn none_taken<T>(what: &str, made: T) -> T {
    let start = Instant::now();
    loop {
        let taken: Vec<_> = (0..3).filter_map(link).collect();
        if taken.is_empty() {
            return made;
        }
        assert!(start.elapsed() < WAIT / 2, "{what}: {taken:?}");
        std::thread::park_timeout(Duration::from_millis(1));
    }
}
