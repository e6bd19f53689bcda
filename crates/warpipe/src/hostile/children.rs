//! Forked children of a process that dies: what they hold of the driver's files, and of the lifeline.
//!
//! The driver's files are played by memfds of their names. A lock on one lives as long as the file is open in any
//! process, as the work of a device does.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{ChildStdout, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::MemfdFlags;
use rustix::process::{Pid, Signal, kill_process};

use super::stage::{Guarded, LONG, command, role};
use crate::fork::driver_files::EXPORTED;
use crate::fork::lifeline::Lifeline;
use crate::os;

/// Files of the driver: so many that to release them takes longer than to release a lifeline.
const FILES: usize = 200;

/// One of them.
fn driver_file(flags: MemfdFlags) -> OwnedFd {
    let file = rustix::fs::memfd_create(c"/dev/nvidia-uvm", flags).unwrap();
    os::ofd_write_lock(file.as_fd(), 0).unwrap();
    file
}

/// What a parent says of itself: a line of numbers.
fn say(words: &[i32]) {
    let words: Vec<String> = words.iter().map(i32::to_string).collect();
    println!("numbers {}", words.join(" "));
    std::io::stdout().flush().unwrap();
}

/// A parent: forks when it is told to, and dies at once. Its child says its process id, and lives on.
fn fork_and_die(files: &[OwnedFd]) -> ! {
    let lifeline = Lifeline::of_process().unwrap();
    let mut words = vec![lifeline.end.as_fd().as_raw_fd()];
    words.extend(files.iter().map(AsRawFd::as_raw_fd));
    say(&words);
    std::io::stdin().read_line(&mut String::new()).unwrap();
    // SAFETY: the child makes system calls alone; glibc's allocator, which `say` uses, works in it.
    match unsafe { libc::fork() } {
        0 => {
            let links = files.iter().map(|file| link(&format!("/proc/self/fd/{}", file.as_raw_fd())) == "/dev/null");
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
    std::fs::read_link(path).map(|path| path.display().to_string()).unwrap_or_default()
}

/// A parent as its peer sees it.
struct Parent {
    process: Guarded,
    lines: std::io::Lines<BufReader<ChildStdout>>,
    /// The end of its lifeline, and its files.
    end: OwnedFd,
    files: Vec<OwnedFd>,
}

impl Parent {
    fn start(test: &str) -> Parent {
        let mut command = command(module_path!(), test, "parent");
        let mut process = Guarded(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
        let mut lines = BufReader::new(process.0.stdout.take().unwrap()).lines();
        let numbers = hear(&mut lines);
        let open = |fd: &i32| std::fs::File::open(Path::new("/proc").join(format!("{}/fd/{fd}", process.0.id())));
        let mut opened = numbers.iter().map(|fd| OwnedFd::from(open(fd).unwrap()));
        let end = opened.next().unwrap();
        let files = opened.collect();
        Parent { process, lines, end, files }
    }

    /// Has it fork and die; the child, and which of the files it found to be `/dev/null`.
    fn strike(&mut self) -> (Child, Vec<i32>) {
        self.process.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
        let has_ended_first = self.has_ended(LONG.as_secs() as i64).then(|| self.locked());
        let mut words = hear(&mut self.lines);
        let child = Child(Pid::from_raw(words.remove(0)).unwrap());
        assert_eq!(has_ended_first.unwrap_or(0), 0, "the lifeline ended while files of the driver were open");
        (child, words)
    }

    /// How many of the files are open in any process.
    fn locked(&self) -> usize {
        self.files.iter().filter(|file| os::ofd_is_locked(file.as_fd(), 0).unwrap()).count()
    }

    fn has_ended(&self, seconds: i64) -> bool {
        let limit = Timespec { tv_sec: seconds, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.end, PollFlags::empty())], Some(&limit)).unwrap() == 1
    }
}

fn hear(lines: &mut std::io::Lines<BufReader<ChildStdout>>) -> Vec<i32> {
    let line = lines.map(Result::unwrap).find(|line| line.contains("numbers ")).expect("it says its numbers");
    let (_, numbers) = line.split_once("numbers ").unwrap();
    numbers.split(' ').map(|number| number.parse().unwrap()).collect()
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
        fork_and_die(&(0..FILES).map(|_| driver_file(MemfdFlags::CLOEXEC)).collect::<Vec<_>>());
    }
    for _ in 0..10 {
        let mut parent = Parent::start(test);
        let (child, replaced) = parent.strike();
        assert!(parent.has_ended(0), "the child delays nobody");
        assert_eq!(replaced, [1; FILES], "the numbers stay in use");
        assert!(rustix::process::test_kill_process(child.0).is_ok(), "the child lives");
    }
}

#[test]
fn a_forked_child_that_keeps_exported_memory_keeps_its_parents_lifeline() {
    let test = "a_forked_child_that_keeps_exported_memory_keeps_its_parents_lifeline";
    if role().is_some() {
        let files = [
            driver_file(MemfdFlags::CLOEXEC),
            // Exported by this library, and by somebody else.
            driver_file(MemfdFlags::CLOEXEC),
            driver_file(MemfdFlags::empty()),
        ];
        EXPORTED.set(files[1].as_raw_fd());
        fork_and_die(&files);
    }
    let mut parent = Parent::start(test);
    parent.process.0.stdin.as_mut().unwrap().write_all(b"\n").unwrap();
    let words = hear(&mut parent.lines);
    let child = Child(Pid::from_raw(words[0]).unwrap());
    assert_eq!(words[1..], [1, 0, 0], "what was exported is left alone");
    assert!(parent.process.0.wait().unwrap().success());
    assert!(!parent.has_ended(0), "what may be a file of the driver is open");
    drop(child);
    assert!(parent.has_ended(LONG.as_secs() as i64));
}
