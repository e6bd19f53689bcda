//! Forked children of a process that dies, with their copies of the driver's files and of the
//! lifeline.
//!
//! Memfds with the same names stand for the driver's files. A lock on one lasts as long as the file
//! is open in any process, like the work of a device.

use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::MemfdFlags;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process};

use super::stage::{LONG, Scratch, TestProcess, command, domain_of_test, eventually, role, stream};
use crate::fork::driver_files::EXPORTED;
use crate::fork::lifeline::Lifeline;
use crate::ipc::peer::{DeathEvidence, Process};
use crate::os;
use crate::{Device, Domain, Subscriber};

/// The driver's files: so many that releasing them takes longer than releasing a lifeline.
const FILES: usize = 200;

/// One of the driver's files.
fn driver_file(flags: MemfdFlags) -> OwnedFd {
    let file = rustix::fs::memfd_create(c"/dev/nvidia-uvm", flags).unwrap();
    os::ofd_write_lock(file.as_fd(), 0).unwrap();
    file
}

/// A parent's report: a line of numbers.
fn say(words: &[i32]) {
    let words: Vec<String> = words.iter().map(i32::to_string).collect();
    println!("numbers {}", words.join(" "));
    std::io::stdout().flush().unwrap();
}

/// A child that has closed its copies, and lives until it is killed.
fn fork_and_live() -> i32 {
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    // SAFETY: the child makes three system calls.
    match unsafe { libc::fork() } {
        0 => {
            rustix::io::write(&writer, b"x").unwrap();
            live()
        }
        child => {
            rustix::io::read(&reader, &mut [0]).unwrap();
            child
        }
    }
}

fn live() -> ! {
    // SAFETY: waits for a signal; its own alarm sends one if no other process does.
    unsafe {
        libc::alarm(6 * LONG.as_secs() as u32);
        loop {
            libc::pause();
        }
    }
}

/// A parent that is unknown when it forks: it creates its lifeline after that, and dies on command.
fn fork_link_and_die(files: &[OwnedFd]) -> ! {
    let child = fork_and_live();
    let lifeline = Lifeline::of_process().unwrap();
    let mut words = vec![lifeline.end.as_fd().as_raw_fd()];
    words.extend(files.iter().map(AsRawFd::as_raw_fd));
    say(&words);
    say(&[child]);
    std::io::stdin().read_line(&mut String::new()).unwrap();
    // SAFETY: ends the process at once.
    unsafe { libc::_exit(0) }
}

/// Hides procfs from a parent, as in some containers. False where that is not possible.
fn hide_procfs() -> bool {
    let root = c"/".as_ptr();
    let (proc, tmpfs) = (c"/proc".as_ptr(), c"tmpfs".as_ptr());
    // SAFETY: plain system calls with terminated paths, in a process of one test: its mounts are
    // its own from the first on.
    let codes = unsafe {
        [
            libc::unshare(libc::CLONE_NEWNS),
            libc::mount(
                root,
                root,
                std::ptr::null(),
                libc::MS_REC | libc::MS_PRIVATE,
                std::ptr::null(),
            ),
            libc::mount(tmpfs, proc, tmpfs, 0, std::ptr::null()),
        ]
    };
    codes == [0; 3] && std::fs::create_dir_all("/proc/self/fd").is_ok()
}

/// A parent that calls `exec` on command, and leaves a child.
fn fork_and_exec(files: &[OwnedFd]) -> ! {
    let lifeline = Lifeline::of_process().unwrap();
    let mut words = vec![
        lifeline.end.as_fd().as_raw_fd(),
        lifeline.alarm.as_fd().as_raw_fd(),
    ];
    words.extend(files.iter().map(AsRawFd::as_raw_fd));
    say(&words);
    say(&[fork_and_live()]);
    std::io::stdin().read_line(&mut String::new()).unwrap();
    panic!("{}", std::process::Command::new("sleep").arg("600").exec());
}

/// A parent that forks on command, and dies at once. Its child reports its process id, and lives
/// on.
fn fork_and_die(files: &[OwnedFd]) -> ! {
    let lifeline = Lifeline::of_process().unwrap();
    let mut words = vec![lifeline.end.as_fd().as_raw_fd()];
    words.extend(files.iter().map(AsRawFd::as_raw_fd));
    say(&words);
    std::io::stdin().read_line(&mut String::new()).unwrap();
    // SAFETY: the child makes system calls alone; glibc's allocator, which `say` uses, works in it.
    match unsafe { libc::fork() } {
        0 => {
            let links = files
                .iter()
                .map(|file| link(&format!("/proc/self/fd/{}", file.as_raw_fd())) == "/dev/null");
            let mut words = vec![std::process::id() as i32];
            words.extend(links.map(i32::from));
            say(&words);
            loop {
                std::thread::park();
            }
        }
        // SAFETY: ends the process at once.
        _ => unsafe { libc::_exit(0) },
    }
}

fn link(path: &str) -> String {
    std::fs::read_link(path)
        .map(|path| path.display().to_string())
        .unwrap_or_default()
}

/// A parent as seen by its peer.
struct Parent {
    process: TestProcess,
    /// The end of its lifeline, and its files.
    end: OwnedFd,
    files: Vec<OwnedFd>,
}

impl Parent {
    fn start(test: &str) -> Parent {
        let mut process = TestProcess::run(&mut command(module_path!(), test, "parent"));
        let numbers = hear(&mut process);
        let pid = process.process.pid();
        let open =
            |fd: &i32| std::fs::File::open(Path::new("/proc").join(format!("{pid}/fd/{fd}")));
        let mut opened = numbers.iter().map(|fd| OwnedFd::from(open(fd).unwrap()));
        let end = opened.next().unwrap();
        let files = opened.collect();
        Parent {
            process,
            end,
            files,
        }
    }

    /// Has it fork and die. Returns the child, and the files that the child found to be
    /// `/dev/null`.
    fn strike(&mut self) -> (Child, Vec<i32>) {
        self.process.order("");
        let has_ended_first = self.has_ended(LONG.as_secs() as i64).then(|| self.locked());
        let mut words = hear(&mut self.process);
        let child = Child(Pid::from_raw(words.remove(0)).unwrap());
        assert_eq!(
            has_ended_first.unwrap_or(0),
            0,
            "the lifeline ended while files of the driver were open"
        );
        (child, words)
    }

    /// The number of the files that are open in any process.
    fn locked(&self) -> usize {
        self.files
            .iter()
            .filter(|file| os::ofd_is_locked(file.as_fd(), 0).unwrap())
            .count()
    }

    fn has_ended(&self, seconds: i64) -> bool {
        let limit = Timespec {
            tv_sec: seconds,
            tv_nsec: 0,
        };
        poll(
            &mut [PollFd::new(&self.end, PollFlags::empty())],
            Some(&limit),
        )
        .unwrap()
            == 1
    }
}

fn hear(process: &mut TestProcess) -> Vec<i32> {
    let numbers = process.hear("numbers ");
    let numbers = numbers.split(' ').map(|number| number.parse().unwrap());
    numbers.collect()
}

/// Killed at its end.
struct Child(Pid);

impl Drop for Child {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::KILL);
    }
}

#[test]
fn a_forked_child_releases_the_drivers_files_first_and_its_parents_lifeline_last() {
    let test = "a_forked_child_releases_the_drivers_files_first_and_its_parents_lifeline_last";
    if role().is_some() {
        fork_and_die(
            &(0..FILES)
                .map(|_| driver_file(MemfdFlags::CLOEXEC))
                .collect::<Vec<_>>(),
        );
    }
    for _ in 0..10 {
        let mut parent = Parent::start(test);
        let (child, replaced) = parent.strike();
        assert!(parent.has_ended(0), "the child delays nobody");
        assert_eq!(replaced, [1; FILES], "the numbers stay in use");
        assert!(
            rustix::process::test_kill_process(child.0).is_ok(),
            "the child lives"
        );
    }
}

#[test]
fn a_forked_child_that_keeps_exported_memory_keeps_its_parents_lifeline() {
    let test = "a_forked_child_that_keeps_exported_memory_keeps_its_parents_lifeline";
    if role().is_some() {
        let files = [
            driver_file(MemfdFlags::CLOEXEC),
            // Exported by this library, and by other code.
            driver_file(MemfdFlags::CLOEXEC),
            driver_file(MemfdFlags::empty()),
        ];
        EXPORTED.insert(files[1].as_raw_fd());
        fork_and_die(&files);
    }
    let mut parent = Parent::start(test);
    parent.process.order("");
    let words = hear(&mut parent.process);
    let child = Child(Pid::from_raw(words[0]).unwrap());
    assert_eq!(words[1..], [1, 0, 0], "what was exported is left alone");
    assert!(parent.process.process.wait(LONG).unwrap().success());
    assert!(
        !parent.has_ended(0),
        "what may be a file of the driver is open"
    );
    drop(child);
    assert!(parent.has_ended(LONG.as_secs() as i64));
}

#[test]
fn a_child_forked_before_the_first_link_keeps_the_lifeline_with_the_drivers_files() {
    let test = "a_child_forked_before_the_first_link_keeps_the_lifeline_with_the_drivers_files";
    if role().is_some() {
        // A file that looks like exported memory: the child keeps it.
        fork_link_and_die(&[
            driver_file(MemfdFlags::CLOEXEC),
            driver_file(MemfdFlags::empty()),
        ]);
    }
    let mut parent = Parent::start(test);
    let child = Child(Pid::from_raw(hear(&mut parent.process)[0]).unwrap());
    parent.process.order("");
    assert!(parent.process.process.wait(LONG).unwrap().success());
    assert_eq!(
        parent.locked(),
        1,
        "the child has what may be a file of the driver"
    );
    assert!(!parent.has_ended(0));
    drop(child);
    assert!(parent.has_ended(LONG.as_secs() as i64));
}

#[test]
fn a_child_forked_before_the_first_link_delays_no_peer() {
    let test = "a_child_forked_before_the_first_link_delays_no_peer";
    if role().is_some() {
        fork_link_and_die(&[driver_file(MemfdFlags::CLOEXEC)]);
    }
    let mut parent = Parent::start(test);
    let child = Child(Pid::from_raw(hear(&mut parent.process)[0]).unwrap());
    parent.process.order("");
    assert!(parent.has_ended(LONG.as_secs() as i64));
    assert!(
        rustix::process::test_kill_process(child.0).is_ok(),
        "the child lives"
    );
}

#[test]
fn exec_is_seen_although_a_child_keeps_the_lifeline_and_streams_need_not_wait_for_the_child() {
    let test =
        "exec_is_seen_although_a_child_keeps_the_lifeline_and_streams_need_not_wait_for_the_child";
    if role().is_some() {
        fork_and_exec(&[driver_file(MemfdFlags::empty())]);
    }
    let mut parent = Parent::start(test);
    let child = Child(Pid::from_raw(hear(&mut parent.process)[0]).unwrap());
    let pid = parent.process.process.pid();
    let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).unwrap();
    // The first of its files is the alarm.
    let process = Process::of_parts([
        pidfd,
        parent.end.try_clone().unwrap(),
        parent.files.remove(0),
    ]);
    assert!(!process.shows(DeathEvidence::Suspect));
    parent.process.order("");
    eventually("the process is suspect", || {
        process.shows(DeathEvidence::Suspect)
    });
    eventually("it is over after a while", || {
        process.shows(DeathEvidence::Orphaned(Duration::from_millis(10)))
    });
    assert!(
        !process.shows(DeathEvidence::Proven),
        "the child may hold the driver's files"
    );
    drop(child);
    eventually("nobody holds them", || process.shows(DeathEvidence::Proven));
    assert!(
        rustix::process::test_kill_process(pid).is_ok(),
        "the new program runs"
    );
}

/// Subscribes, holds a sample, and executes another program; a child that this library has not seen
/// keeps everything.
fn hold_and_exec(test: &str, scratch: &Domain) -> ! {
    let mut subscriber =
        Subscriber::open("a", scratch.on(&Device::host()), Duration::ZERO).unwrap();
    std::mem::forget(subscriber.receive(&stream(), LONG).unwrap());
    // SAFETY: a fork, without a stack of its own; the child makes two system calls.
    let child = unsafe { libc::syscall(libc::SYS_clone, libc::SIGCHLD, 0, 0, 0, 0) as i32 };
    if child == 0 {
        live();
    }
    say(&[child]);
    let mut after = command(module_path!(), test, "after");
    panic!("{}", after.stdin(Stdio::inherit()).exec());
}

#[test]
fn a_program_that_called_exec_lives_on_when_a_child_from_before_ends() {
    let test = "a_program_that_called_exec_lives_on_when_a_child_from_before_ends";
    match role().as_deref() {
        Some("before") => hold_and_exec(test, &domain_of_test()),
        Some(_) => {
            let mut subscriber =
                Subscriber::open("a", domain_of_test().on(&Device::host()), Duration::ZERO)
                    .unwrap();
            say(&[1]);
            assert_eq!(
                subscriber
                    .receive(&stream(), LONG)
                    .unwrap()
                    .to_vec(LONG)
                    .unwrap(),
                b"after"
            );
            return say(&[2]);
        }
        None => {}
    }
    let scratch = Scratch::new();
    let publisher = scratch.publisher(|it| it);
    let mut program = TestProcess::start(module_path!(), test, "before", &scratch);
    publisher.wait_for_subscribers(1, LONG).unwrap();
    publisher.send_bytes(&stream(), b"before").unwrap();
    let child = Child(Pid::from_raw(hear(&mut program)[0]).unwrap());
    assert_eq!(hear(&mut program), [1]);
    publisher.wait_for_subscribers(2, LONG).unwrap();
    drop(child);
    eventually("the program before is gone", || {
        publisher.subscribers().len() < 2
    });
    publisher.send_bytes(&stream(), b"after").unwrap();
    assert_eq!(hear(&mut program), [2], "the program after is not");
}

#[test]
fn a_forked_child_that_cannot_see_its_files_keeps_its_parents_lifeline() {
    let test = "a_forked_child_that_cannot_see_its_files_keeps_its_parents_lifeline";
    if role().is_some() {
        let file = driver_file(MemfdFlags::CLOEXEC);
        let lifeline = Lifeline::of_process().unwrap();
        say(&[lifeline.end.as_fd().as_raw_fd(), file.as_raw_fd()]);
        std::io::stdin().read_line(&mut String::new()).unwrap();
        say(&[if hide_procfs() { fork_and_live() } else { 0 }]);
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(0) }
    }
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can hide /proc");
        return;
    }
    let mut parent = Parent::start(test);
    parent.process.order("");
    let Some(child) = Pid::from_raw(hear(&mut parent.process)[0]).map(Child) else {
        println!("skipped: /proc cannot be hidden here");
        return;
    };
    assert!(parent.process.process.wait(LONG).unwrap().success());
    assert_eq!(parent.locked(), 1, "the child has a file of the driver");
    assert!(!parent.has_ended(0), "a false proof");
    drop(child);
    assert!(parent.has_ended(LONG.as_secs() as i64));
}
