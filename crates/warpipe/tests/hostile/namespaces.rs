//! Processes of other PID namespaces, as in containers: each has the number 1 in its own, and 0 or
//! another number in others. **This module is marked for unsafe**: it makes namespaces.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};

use super::stage::{
    Guarded, LONG, Scratch, alone, command, domain_of_test, eventually, role, stream,
};
use crate::origin::ProcessOrigin;
use crate::queue::{Queue, Worker, WorkerOptions};
use crate::{
    Change, Device, Domain, Error, Member, MemberOptions, Members, PeerState, Publisher,
    PublisherOptions, Subscriber,
};

/// Runs a command as the first process of a PID namespace of its own, in a user namespace in which
/// its user is root. It ends with the process that is started here, which waits for it.
///
/// `proc` is mounted anew, as container runtimes do it; or not, if the role says `bare`.
fn isolate(command: &mut Command, role: &str) {
    let is_bare = role == "bare";
    let (uid, gid) = (
        rustix::process::geteuid().as_raw(),
        rustix::process::getegid().as_raw(),
    );
    let maps = [
        ("/proc/self/setgroups", "deny".to_owned()),
        ("/proc/self/gid_map", format!("0 {gid} 1")),
        ("/proc/self/uid_map", format!("0 {uid} 1")),
    ];
    let enter = move || {
        let failed = || Err(std::io::Error::last_os_error());
        // SAFETY: plain system calls. The child in which this is called has one thread, as has the
        // child that it forks.
        unsafe {
            if libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWPID | libc::CLONE_NEWNS) != 0 {
                return failed();
            }
            maps.iter()
                .try_for_each(|(path, map)| std::fs::write(path, map))?;
            match libc::fork() {
                -1 => failed(),
                0 => {
                    let none = std::ptr::null();
                    let flags = libc::MS_NOSUID | libc::MS_NODEV | libc::MS_NOEXEC;
                    let proc = c"proc".as_ptr();
                    let codes = [
                        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL),
                        if is_bare {
                            0
                        } else {
                            libc::mount(proc, c"/proc".as_ptr(), proc, flags, none)
                        },
                    ];
                    if codes == [0, 0] { Ok(()) } else { failed() }
                }
                child => {
                    // The descriptor that reports `exec` to the parent is open here, too.
                    libc::close_range(0, u32::MAX, 0);
                    let mut status = 0;
                    libc::waitpid(child, &mut status, 0);
                    libc::_exit(libc::WEXITSTATUS(status));
                }
            }
        }
    };
    // SAFETY: the closure makes system calls; its data was allocated before the fork.
    unsafe { command.pre_exec(enter) };
}

/// A process of another namespace, which follows commands line by line.
struct Island {
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    process: Guarded,
}

impl Island {
    fn start(test: &str, role: &str, scratch: &Scratch) -> std::io::Result<Island> {
        let mut command = command(module_path!(), test, role);
        command
            .env("WARPIPE_HOSTILE_PATH", &scratch.path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        isolate(&mut command, role);
        let mut process = Guarded(command.spawn()?);
        let stdin = process.0.stdin.take().unwrap();
        let stdout = BufReader::new(process.0.stdout.take().unwrap());
        Ok(Island {
            stdin,
            stdout,
            process,
        })
    }

    fn tell(&mut self, order: &str) {
        writeln!(self.stdin, "{order}").unwrap();
    }

    /// Its next line.
    fn hear(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(
                self.stdout.read_line(&mut line).unwrap() > 0,
                "it ended before it said a word"
            );
            if let Some((_, word)) = line.split_once("outcome: ") {
                return word.trim().to_owned();
            }
        }
    }

    fn asked(&mut self, order: &str) -> String {
        self.tell(order);
        self.hear()
    }

    fn kill(&mut self) {
        self.process.0.kill().unwrap();
        self.process.0.wait().unwrap();
    }
}

/// Starts one for each role, and runs `body` with them; skips the test where namespaces are not
/// available.
fn with_islands<const N: usize>(
    test: &str,
    roles: [&str; N],
    body: impl FnOnce(&Scratch, [Island; N]),
) {
    alone(module_path!(), test, || {
        let scratch = Scratch::new();
        let mut islands = Vec::new();
        for role in roles {
            match Island::start(test, role, &scratch) {
                Ok(mut island) => {
                    assert_eq!(
                        island.hear(),
                        "1",
                        "it is the first process of its namespace"
                    );
                    islands.push(island);
                }
                Err(error) => return println!("skipped: no PID namespace of its own: {error}"),
            }
        }
        body(
            &scratch,
            islands.try_into().unwrap_or_else(|_| unreachable!()),
        );
    });
}

fn orders() -> impl Iterator<Item = String> {
    println!("outcome: {}", std::process::id());
    std::io::stdin().lines().map_while(Result::ok)
}

fn domain() -> Domain {
    domain_of_test()
}

/// Publishes `a`, and reports its subscribers.
fn publish() {
    let (mut publisher, stream) = (None, stream());
    for order in orders() {
        let publisher = publisher.get_or_insert_with(|| {
            Publisher::new(
                "a",
                PublisherOptions {
                    depth: 4,
                    ..domain().on(&Device::host())
                },
            )
            .unwrap()
        });
        match order.as_str() {
            "send" => println!(
                "outcome: {:?}",
                publisher.send_bytes(&stream, b"from another namespace")
            ),
            "count" => println!("outcome: {}", publisher.subscribers().len()),
            "pid" => println!("outcome: {}", publisher.subscribers()[0].pid),
            _ => println!("outcome: ready"),
        }
    }
}

/// Subscribes to `a`, and reports its samples.
fn subscribe() {
    let (mut subscriber, stream) = (None, stream());
    for order in orders() {
        let subscriber = subscriber.get_or_insert_with(|| {
            Subscriber::open("a", domain().on(&Device::host()), std::time::Duration::ZERO).unwrap()
        });
        if order == "attach" {
            println!("outcome: {:?}", subscriber.publisher().map(|it| it.pid));
            continue;
        }
        match subscriber.receive(&stream, LONG) {
            Ok(sample) => println!("outcome: {} bytes", sample.to_vec(LONG).unwrap().len()),
            Err(Error::PeerGone { graceful, .. }) => {
                println!("outcome: gone, graceful {graceful}")
            }
            Err(error) => println!("outcome: {error:?}"),
        }
    }
}

#[test]
fn two_processes_that_do_not_see_each_other_share_a_channel_and_each_others_deaths() {
    let test = "two_processes_that_do_not_see_each_other_share_a_channel_and_each_others_deaths";
    match role().as_deref() {
        Some("publisher") => return publish(),
        Some("subscriber") => return subscribe(),
        _ => {}
    }
    let roles = ["publisher", "subscriber", "subscriber"];
    with_islands(test, roles, |_, [mut publisher, mut first, mut second]| {
        assert_eq!(publisher.asked("open"), "ready");
        assert_eq!(
            [first.asked("attach"), second.asked("attach")],
            ["Some(0)", "Some(0)"]
        );
        eventually("both are there", || publisher.asked("count") == "2");
        assert_eq!(publisher.asked("pid"), "0");
        assert_eq!(publisher.asked("send"), "Ok(1)");
        assert_eq!(
            [first.asked("receive"), second.asked("receive")],
            ["22 bytes", "22 bytes"]
        );
        first.kill();
        eventually("a subscriber's death is proven", || {
            publisher.asked("count") == "1"
        });
        assert_eq!(publisher.asked("send"), "Ok(2)");
        assert_eq!(second.asked("receive"), "22 bytes");
        publisher.kill();
        assert_eq!(second.asked("receive"), "gone, graceful false");
    });
}

/// Works on the queue `q`: returns each job with its own answer; or takes one and keeps it.
fn work() {
    let (mut worker, stream) = (None, stream());
    for order in orders() {
        let worker = worker.get_or_insert_with(|| {
            Worker::open(
                "q",
                WorkerOptions {
                    answer_timeout: LONG,
                    ..domain().on(&Device::host())
                },
                std::time::Duration::ZERO,
            )
            .unwrap()
        });
        if order == "open" {
            println!("outcome: ready");
            continue;
        }
        let lease = worker.lease(&stream, LONG).unwrap();
        println!("outcome: attempt {}", lease.attempt);
        if order == "keep" {
            std::mem::forget(lease);
        } else {
            lease.complete(None, &stream).unwrap();
        }
    }
}

/// Owns the queue `q`.
fn own() {
    let (mut queue, mut jobs, stream) = (None, Vec::new(), stream());
    for order in orders() {
        let queue =
            queue.get_or_insert_with(|| Queue::new("q", domain().on(&Device::host())).unwrap());
        match order.as_str() {
            "open" => println!("outcome: ready"),
            "submit" => {
                jobs.push(queue.submit_bytes(b"work", &stream).unwrap());
                println!("outcome: submitted");
            }
            workers if workers.parse::<usize>().is_ok() => {
                println!(
                    "outcome: {:?}",
                    queue.wait_for_workers(workers.parse().unwrap(), LONG)
                );
            }
            _ => {
                let result = jobs.remove(0).wait(&stream, LONG).unwrap();
                println!(
                    "outcome: done at attempt {} by {}",
                    result.attempt, result.worker_pid
                );
            }
        }
    }
}

#[test]
fn a_queue_distinguishes_workers_with_equal_pids_and_redelivers_a_dead_ones_job() {
    let test = "a_queue_distinguishes_workers_with_equal_pids_and_redelivers_a_dead_ones_job";
    match role().as_deref() {
        Some("owner") => return own(),
        Some("worker") => return work(),
        _ => {}
    }
    with_islands(
        test,
        ["owner", "worker", "worker"],
        |_, [mut owner, mut first, mut second]| {
            assert_eq!(owner.asked("open"), "ready");
            assert_eq!(first.asked("open"), "ready");
            assert_eq!(owner.asked("1"), "Ok(())");
            assert_eq!(owner.asked("submit"), "submitted");
            assert_eq!(first.asked("keep"), "attempt 1");
            assert_eq!(second.asked("open"), "ready");
            assert_eq!(owner.asked("2"), "Ok(())");
            first.kill();
            assert_eq!(second.asked("do"), "attempt 2");
            assert_eq!(owner.asked("wait"), "done at attempt 2 by 0");
        },
    );
}

/// Joins as a member, and holds an endpoint.
fn join() {
    let mut held = None;
    for name in orders() {
        if name == "look" {
            let watch = Members::new(domain().options()).unwrap();
            eventually("both are seen", || watch.list().unwrap().len() == 2);
            println!("outcome: {}", seen(&watch));
            continue;
        }
        let publisher = Publisher::new(&name, domain().on(&Device::host())).unwrap();
        held = Some((
            Member::new(
                &name,
                MemberOptions {
                    role: "publishes".into(),
                    ..domain().options()
                },
            )
            .unwrap(),
            publisher,
        ));
        println!("outcome: ready");
    }
    drop(held);
}

/// The members, and the endpoints of each.
fn seen(watch: &Members) -> String {
    let members = watch.list().unwrap().into_iter();
    let texts = members.map(|member| {
        let endpoints: Vec<_> = member.endpoints.iter().map(ToString::to_string).collect();
        format!("{}: {}", member.name, endpoints.join(" "))
    });
    texts.collect::<Vec<_>>().join(", ")
}

/// The number that a process has in its innermost namespace.
fn innermost(pid: i32) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let numbers = status
        .lines()
        .find_map(|line| line.strip_prefix("NSpid:"))
        .unwrap_or_default();
    numbers
        .split_whitespace()
        .skip(1)
        .last()
        .unwrap_or_default()
        .to_owned()
}

#[test]
fn members_and_name_holders_with_equal_pids_are_not_confused() {
    let test = "members_and_name_holders_with_equal_pids_are_not_confused";
    if role().as_deref() == Some("member") {
        return join();
    }
    with_islands(
        test,
        ["member", "member"],
        |scratch, [mut first, mut second]| {
            assert_eq!(
                [first.asked("one"), second.asked("two")],
                ["ready", "ready"]
            );
            let watch = Members::new(scratch.domain.options()).unwrap();
            eventually("both are seen", || watch.list().unwrap().len() == 2);
            let right = "one: members/one one, two: members/two two";
            assert_eq!(seen(&watch), right);
            assert_eq!(second.asked("look"), right);
            for endpoint in scratch.domain.endpoints().unwrap() {
                let pid = endpoint
                    .holder
                    .and_then(|holder| holder.pid)
                    .expect("a holder that is seen from here");
                assert_eq!(innermost(pid), "1", "process {pid}");
            }
            first.kill();
            let died = loop {
                match watch.changes(LONG).unwrap().expect("its end is reported") {
                    Change::Died(member) => break member,
                    other => assert_ne!(other.member().state, PeerState::Leaving, "{other:?}"),
                }
            };
            let removed: Vec<_> = died.endpoints.iter().map(ToString::to_string).collect();
            assert_eq!(
                (died.name.as_str(), removed),
                ("one", vec!["members/one".to_owned(), "one".to_owned()])
            );
            assert_eq!(seen(&watch), "two: members/two two");
        },
    );
}

#[test]
fn pids_in_the_proc_of_another_namespace_identify_no_process() {
    let test = "pids_in_the_proc_of_another_namespace_identify_no_process";
    if role().as_deref() == Some("bare") {
        for _ in orders() {
            let here = ProcessOrigin::here().unwrap();
            // There is no other process here.
            println!(
                "outcome: {:?}",
                [
                    here.life(&here),
                    ProcessOrigin { pid: 2, ..here }.life(&here)
                ]
            );
        }
        return;
    }
    with_islands(test, ["bare"], |_, [mut island]| {
        assert_eq!(island.asked("look"), "[Unknown, Unknown]")
    });
}
