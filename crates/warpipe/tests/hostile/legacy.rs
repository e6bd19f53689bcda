//! Legacy handles between real processes: exporters that die, free, lie or belong to another user.
//! **This module is marked for unsafe**: it exports addresses and closes by hand.

use std::io::{BufRead, BufReader, Write};
use std::process::{ChildStdin, ChildStdout, Stdio};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use warpipe_testkit::Rng;

use super::stage::{Guarded, LONG, alone, command, eventually, random_bytes, random_edge, role};
use crate::backend::testing::{Counting, Failing, Wrapped};
use crate::backend::{Backend, IPC_EVENTS_MAX, IpcBytes};
use crate::memory::legacy::forged;
use crate::{
    Device, Error, HandleFault, LegacyHandle, LegacyMemory, LimitFault, StateFault, Stream,
};

const BYTES: u64 = 64 << 10;
const OFFSET: u64 = 4096 + 8;

fn pattern() -> Vec<u8> {
    random_bytes(&mut Rng::with_seed(7), BYTES as usize)
}

/// Exports memory, reports its handle, then follows commands until its input ends.
fn export_and_obey() {
    let device = Device::host();
    let stream = device.stream().unwrap();
    let ptr = device.backend().allocate_plain(BYTES).unwrap();
    // SAFETY: all of an allocation of that length, live until it is freed below.
    let handle = unsafe {
        device
            .backend()
            .upload(stream.raw(), ptr, &pattern())
            .unwrap();
        LegacyHandle::export(&device, ptr + OFFSET, BYTES - OFFSET).unwrap()
    };
    println!("exported: {handle}");
    for line in std::io::stdin().lines() {
        assert_eq!(line.unwrap(), "free");
        // SAFETY: allocated above and freed once; the stream is idle.
        unsafe { device.backend().free_plain(ptr) }.unwrap();
        println!("freed");
    }
}

/// A process that has exported memory.
struct Exporter {
    process: Guarded,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
    handle: LegacyHandle,
}

impl Exporter {
    fn start(test: &str) -> Exporter {
        let mut command = command(module_path!(), test, "exporter");
        let mut process = Guarded(
            command
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap(),
        );
        let orders = process.0.stdin.take().unwrap();
        let mut answers = BufReader::new(process.0.stdout.take().unwrap());
        let handle = hear(&mut answers, "exported: ").parse().unwrap();
        Exporter {
            process,
            orders,
            answers,
            handle,
        }
    }

    fn free(&mut self) {
        self.orders.write_all(b"free\n").unwrap();
        hear(&mut self.answers, "freed");
    }

    fn kill(&mut self) {
        self.process.0.kill().unwrap();
        self.process.0.wait().unwrap();
    }
}

/// The rest of the next line behind `word` (the test runner writes into some lines).
fn hear(answers: &mut impl BufRead, word: &str) -> String {
    let found = answers
        .lines()
        .map(Result::unwrap)
        .find_map(|line| Some(line.split_once(word)?.1.to_owned()));
    found.unwrap_or_else(|| panic!("the other process ended without {word}"))
}

/// Whether this process is the exporter of its test, and has finished.
fn was_exporter() -> bool {
    let is_exporter = role().as_deref() == Some("exporter");
    if is_exporter {
        export_and_obey();
    }
    is_exporter
}

fn counting() -> (Arc<Wrapped<Counting>>, Device) {
    let counting = Wrapped::new(Device::host().backend().clone(), Counting::default());
    (counting.clone(), Device::from_backend(counting))
}

fn calls(counting: &Wrapped<Counting>, method: &str) -> u64 {
    counting.hook().calls().get(method).copied().unwrap_or(0)
}

fn assert_whole(memory: &LegacyMemory) {
    assert_eq!(memory.to_vec(LONG).unwrap(), pattern()[OFFSET as usize..]);
}

/// A stream that is blocked until the sender is dropped.
fn blocked(device: &Device) -> (Stream, mpsc::Sender<()>) {
    let (stream, (go, wait)) = (device.stream().unwrap(), mpsc::channel::<()>());
    stream.call(move || assert!(wait.recv().is_err())).unwrap();
    (stream, go)
}

#[test]
fn a_handle_opened_again_calls_no_driver_and_the_last_one_closes() {
    let test = "a_handle_opened_again_calls_no_driver_and_the_last_one_closes";
    if was_exporter() {
        return;
    }
    let exporter = Exporter::start(test);
    let (counting, device) = counting();
    let memories: Vec<_> = (0..5)
        .map(|_| exporter.handle.open(&device).unwrap())
        .collect();
    assert_eq!(
        counting.hook().calls().into_iter().collect::<Vec<_>>(),
        [("open_legacy", 1)]
    );
    memories.iter().for_each(assert_whole);
    assert!(
        memories
            .iter()
            .all(|memory| memory.ptr() == memories[0].ptr())
    );
    // The first, the last, then those between.
    let mut memories = std::collections::VecDeque::from(memories);
    drop((memories.pop_front(), memories.pop_back()));
    memories.pop_back().unwrap().close(LONG).unwrap();
    memories.iter().for_each(assert_whole);
    assert_eq!(calls(&counting, "close_legacy"), 0);
    drop(memories);
    eventually("the last one closes", || {
        calls(&counting, "close_legacy") == 1
    });
    exporter.handle.open(&device).unwrap().close(LONG).unwrap();
    assert_eq!(
        (
            calls(&counting, "open_legacy"),
            calls(&counting, "close_legacy")
        ),
        (2, 2)
    );
}

#[test]
fn a_handle_that_overstates_its_length_does_not_share_an_open_mapping() {
    let test = "a_handle_that_overstates_its_length_does_not_share_an_open_mapping";
    if was_exporter() {
        return;
    }
    let (exporter, device) = (Exporter::start(test), Device::host());
    // The allocation's length, and the range's offset in it; the checksum is not secret.
    let forged = forged::with_range(&exporter.handle, 1 << 40, 1 << 39);
    let forged = LegacyHandle::from_bytes(&forged.to_bytes()).unwrap();
    assert!(
        forged.open(&device).is_err(),
        "the driver's bytes are of something shorter"
    );
    let memory = exporter.handle.open(&device).unwrap();
    let refused = forged.open(&device).unwrap_err();
    assert!(
        matches!(
            refused,
            Error::Handle {
                what: "legacy handle",
                fault: HandleFault::Range { .. }
            }
        ),
        "{refused}"
    );
    assert_whole(&memory);
    drop(exporter);
}

#[test]
fn many_threads_that_open_one_handle_ask_the_driver_once_and_leave_nothing() {
    let test = "many_threads_that_open_one_handle_ask_the_driver_once_and_leave_nothing";
    if was_exporter() {
        return;
    }
    let exporter = Exporter::start(test);
    let (counting, device) = counting();
    let kept = exporter.handle.open(&device).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                (0..200).for_each(|_| {
                    assert_eq!(exporter.handle.open(&device).unwrap().ptr(), kept.ptr())
                })
            });
        }
    });
    assert_eq!(calls(&counting, "open_legacy"), 1);
    kept.close(LONG).unwrap();
    eventually("all are closed", || calls(&counting, "close_legacy") == 1);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                (0..50).for_each(|_| exporter.handle.open(&device).unwrap().close(LONG).unwrap())
            });
        }
    });
    assert_eq!(
        calls(&counting, "open_legacy"),
        calls(&counting, "close_legacy")
    );
}

#[test]
fn a_killed_exporters_memory_stays_while_it_is_open_and_opens_no_more() {
    let test = "a_killed_exporters_memory_stays_while_it_is_open_and_opens_no_more";
    if was_exporter() {
        return;
    }
    let mut exporter = Exporter::start(test);
    let device = Device::host();
    let memory = exporter.handle.open(&device).unwrap();
    exporter.kill();
    assert_whole(&memory);
    memory.close(LONG).unwrap();
    match exporter.handle.open(&device) {
        Err(Error::PeerGone { pid, .. }) => assert_eq!(pid, exporter.process.0.id() as i32),
        other => panic!("{other:?}"),
    }
}

#[test]
fn memory_that_a_living_exporter_has_freed_is_reported_as_stale() {
    let test = "memory_that_a_living_exporter_has_freed_is_reported_as_stale";
    if was_exporter() {
        return;
    }
    let mut exporter = Exporter::start(test);
    let device = Device::host();
    let memory = exporter.handle.open(&device).unwrap();
    exporter.free();
    assert_whole(&memory);
    memory.close(LONG).unwrap();
    match exporter.handle.open(&device) {
        Err(Error::Handle {
            what: "legacy handle",
            fault: HandleFault::Stale { pid, .. },
        }) => assert_eq!(pid, exporter.handle.info().pid),
        other => panic!("{other:?}"),
    }
}

#[test]
fn opened_memory_can_be_neither_exported_again_nor_closed_twice() {
    let test = "opened_memory_can_be_neither_exported_again_nor_closed_twice";
    if was_exporter() {
        return;
    }
    // Alone: what another thread maps may get the address that is closed twice.
    alone(module_path!(), test, || {
        let exporter = Exporter::start(test);
        let device = Device::host();
        let memory = exporter.handle.open(&device).unwrap();
        // SAFETY: the memory is open; the test expects a refusal.
        let exported = unsafe { LegacyHandle::export(&device, memory.ptr(), 8) };
        assert!(matches!(
            exported,
            Err(Error::Handle {
                fault: HandleFault::NotExportable {
                    kind: crate::backend::PointerKind::Import,
                    ..
                },
                ..
            })
        ));
        memory.close(LONG).unwrap();

        let handle = &exporter.handle;
        let base = device
            .backend()
            .open_legacy(
                &handle.info().raw,
                handle.info().allocation_bytes,
                handle.info().device,
            )
            .unwrap();
        // SAFETY: opened above, and no stream used it; the test expects a refusal of the second close.
        let closes = unsafe {
            [
                device.backend().close_legacy(base),
                device.backend().close_legacy(base),
            ]
        };
        let [
            Ok(()),
            Err(Error::Handle {
                what: "legacy handle",
                fault: HandleFault::NotOpen(ptr),
            }),
        ] = closes
        else {
            panic!("{closes:?}")
        };
        assert_eq!(ptr, base);
    });
}

#[test]
fn memory_is_not_closed_under_a_recorded_stream_and_is_closed_under_any_other() {
    let test = "memory_is_not_closed_under_a_recorded_stream_and_is_closed_under_any_other";
    if was_exporter() {
        return;
    }
    let (named, unnamed) = (Exporter::start(test), Exporter::start(test));
    let (counting, device) = counting();
    let (stream, go) = blocked(&device);
    let used = named.handle.open(&device).unwrap();
    used.used_on(&stream);
    drop(used);
    // The negative control: nothing else delays a close, and it comes after the other stream was
    // released.
    drop(unnamed.handle.open(&device).unwrap());
    eventually("what no stream uses is closed", || {
        calls(&counting, "close_legacy") == 1
    });
    let again = named.handle.open(&device).unwrap();
    assert_eq!(
        calls(&counting, "open_legacy"),
        2,
        "what the stream uses is open still"
    );
    assert_whole(&again);
    again.used_on(&stream);
    let error = again.close(Duration::from_millis(1)).unwrap_err();
    assert!(matches!(error, Error::Timeout { .. }), "{error}");
    assert_eq!(calls(&counting, "close_legacy"), 1);
    drop(go);
    eventually("the stream is past its work", || {
        calls(&counting, "close_legacy") == 2
    });
}

#[test]
fn an_open_that_fails_leaves_nothing_and_can_be_tried_again() {
    let test = "an_open_that_fails_leaves_nothing_and_can_be_tried_again";
    if was_exporter() {
        return;
    }
    let exporter = Exporter::start(test);
    let failing = Wrapped::new(Device::host().backend().clone(), Failing::default());
    let device = Device::from_backend(failing.clone());
    failing.hook().aim("open_legacy", 1);
    assert!(matches!(
        exporter.handle.open(&device),
        Err(Error::Driver {
            code: Error::INJECTED,
            ..
        })
    ));
    let memory = exporter.handle.open(&device).unwrap();
    assert_whole(&memory);
    failing.hook().aim("close_legacy", 1);
    assert!(matches!(
        memory.close(LONG),
        Err(Error::Driver {
            code: Error::INJECTED,
            ..
        })
    ));
}

#[test]
fn without_a_free_descriptor_an_open_is_an_error_and_works_again_later() {
    let test = "without_a_free_descriptor_an_open_is_an_error_and_works_again_later";
    if was_exporter() {
        return;
    }
    alone(module_path!(), test, || {
        let exporter = Exporter::start(test);
        let device = Device::host();
        exporter.handle.open(&device).unwrap().close(LONG).unwrap();
        let mut hoard = Vec::new();
        while let Ok(fd) = rustix::io::dup(std::io::stdin()) {
            hoard.push(fd);
            assert!(hoard.len() < 1 << 21, "there is a limit");
        }
        match exporter.handle.open(&device) {
            Err(error) if error.is_descriptor_limit() => {}
            other => panic!("{other:?}"),
        }
        hoard.clear();
        assert_whole(&exporter.handle.open(&device).unwrap());
    });
}

#[test]
fn forged_driver_bytes_open_nothing_and_do_no_harm() {
    let test = "forged_driver_bytes_open_nothing_and_do_no_harm";
    if was_exporter() {
        return;
    }
    let exporter = Exporter::start(test);
    let (device, mut random) = (Device::host(), Rng::with_seed(11));
    let open = |raw: &IpcBytes, bytes| device.backend().open_legacy(raw, bytes, device.info().id);
    for round in 0..2_000 {
        let mut raw = exporter.handle.info().raw;
        match round % 3 {
            0 => raw[random.usize(..64)] ^= 1 << random.u64(..8),
            1 => raw[8 + 8 * random.usize(..6)..][..8]
                .copy_from_slice(&random_edge(&mut random).to_le_bytes()),
            _ => raw.copy_from_slice(&random_bytes(&mut random, 64)),
        }
        if raw == exporter.handle.info().raw {
            continue;
        }
        if let Ok(base) = open(&raw, BYTES) {
            // The number of another thread of the exporter names the same process, and so the same
            // memory.
            let but_pid = |raw: &IpcBytes| [&raw[..32], &raw[36..]].concat();
            assert_eq!(but_pid(&raw), but_pid(&exporter.handle.info().raw));
            // SAFETY: opened just now, and no stream used it.
            unsafe { device.backend().close_legacy(base) }.unwrap();
        }
    }
    for bytes in [1 << 40, BYTES + 4096, u64::MAX] {
        assert!(
            open(&exporter.handle.info().raw, bytes).is_err(),
            "an allocation longer than it is"
        );
    }
    assert_whole(&exporter.handle.open(&device).unwrap());
}

#[test]
fn another_user_cannot_open_a_handle() {
    let test = "another_user_cannot_open_a_handle";
    if was_exporter() {
        return;
    }
    if role().as_deref() == Some("other_user") {
        // SAFETY: plain system calls; this process has one test and no other thread that depends on
        // the user.
        let codes = unsafe { [libc::setgid(65534), libc::setuid(65534)] };
        assert_eq!(codes, [0, 0]);
        let handle: LegacyHandle = std::env::var("WARPIPE_HOSTILE_HANDLE")
            .unwrap()
            .parse()
            .unwrap();
        return match handle.open(&Device::host()) {
            Err(Error::Handle {
                what: "legacy handle",
                fault,
            }) => println!("outcome: {fault:?}"),
            other => println!("outcome: {other:?}"),
        };
    }
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can become another user");
    }
    let exporter = Exporter::start(test);
    let mut other_user = command(module_path!(), test, "other_user");
    let output = other_user
        .env("WARPIPE_HOSTILE_HANDLE", exporter.handle.to_string())
        .output()
        .unwrap();
    let outcome = hear(&mut output.stdout.as_slice(), "outcome: ");
    assert!(
        outcome.contains("Stale") && outcome.contains("denied"),
        "{outcome}"
    );
}

/// Checks a forked child's view of its parent's memory. Returns the number of the first failed
/// check, or 0.
fn in_a_forked_child(exporter: &Exporter, memory: LegacyMemory, own: u64, stream: &Stream) -> i32 {
    let device = Device::host();
    let is_forked =
        |result: Result<(), Error>| matches!(result, Err(Error::State(StateFault::Forked)));
    // SAFETY: the allocation is its parent's; the test expects a refusal.
    let exported = unsafe { LegacyHandle::export(&device, own, 8) };
    if !is_forked(memory.write(stream, 0, &[0])) {
        return 1;
    }
    if !is_forked(exported.map(drop)) {
        return 2;
    }
    drop(memory);
    let Ok(again) = exporter.handle.open(&device) else {
        return 3;
    };
    // SAFETY: open, and so mapped for at least a byte; read by the CPU, as host memory is.
    if unsafe { *(again.ptr() as *const u8) } != pattern()[OFFSET as usize] {
        return 4;
    }
    if again.close(LONG).is_err() { 5 } else { 0 }
}

#[test]
fn a_forked_child_opens_handles_of_its_own_and_harms_none_of_its_parents() {
    let test = "a_forked_child_opens_handles_of_its_own_and_harms_none_of_its_parents";
    if was_exporter() {
        return;
    }
    alone(module_path!(), test, || {
        let exporter = Exporter::start(test);
        let (device, memory) = (
            Device::host(),
            exporter.handle.open(&Device::host()).unwrap(),
        );
        let (kept, stream) = (
            exporter.handle.open(&device).unwrap(),
            device.stream().unwrap(),
        );
        let own = device.backend().allocate_plain(4096).unwrap();
        // SAFETY: the child runs the checks, and ends without destructors.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = in_a_forked_child(&exporter, memory, own, &stream);
            // SAFETY: ends the child.
            unsafe { libc::_exit(code) };
        }
        let mut status = 0;
        eventually("the child ends", || {
            // SAFETY: the status is a live local; the child is ours.
            unsafe { libc::waitpid(child, &mut status, libc::WNOHANG) == child }
        });
        assert!(
            libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0,
            "status {status:#x}"
        );
        memory.close(LONG).unwrap();
        assert_whole(&kept);
        // SAFETY: allocated above, freed once.
        unsafe { device.backend().free_plain(own) }.unwrap();
    });
}

#[test]
fn the_interprocess_events_of_a_process_are_counted_and_one_that_is_dropped_counts_no_more() {
    let test =
        "the_interprocess_events_of_a_process_are_counted_and_one_that_is_dropped_counts_no_more";
    alone(module_path!(), test, || {
        let device = Device::host();
        let create = || device.backend().create_ipc_event();
        let mut events: Vec<_> = (0..IPC_EVENTS_MAX).map(|_| create().unwrap()).collect();
        assert!(matches!(
            create(),
            Err(Error::Limit(LimitFault::Events(IPC_EVENTS_MAX)))
        ));
        let ordinary = device.backend().create_event().unwrap();
        // SAFETY: each event here is live, and destroyed once.
        let destroy = |event| unsafe { device.backend().destroy_event(event) }.unwrap();
        destroy(ordinary);
        assert!(
            matches!(create(), Err(Error::Limit(LimitFault::Events(_)))),
            "an ordinary event does not count"
        );
        destroy(events.pop().unwrap());
        events.push(create().unwrap());
        events.into_iter().for_each(destroy);
    });
}

#[test]
fn an_events_handle_opens_and_anything_else_does_not() {
    let device = Device::host();
    let backend: &dyn Backend = &**device.backend();
    let (event, ordinary) = (
        backend.create_ipc_event().unwrap(),
        backend.create_event().unwrap(),
    );
    // SAFETY: each event here is live, and destroyed once.
    unsafe {
        let handle = backend.export_event(event).unwrap();
        assert!(matches!(
            backend.export_event(ordinary),
            Err(Error::Argument { .. })
        ));
        let opened = backend.open_event(&handle).unwrap();
        assert!(backend.query_event(opened).unwrap());
        for event in [event, ordinary, opened] {
            backend.destroy_event(event).unwrap();
        }
    }
    for garbage in [[0; 64], [0xff; 64]] {
        let refused = backend.open_event(&garbage);
        assert!(
            matches!(
                refused,
                Err(Error::Handle {
                    what: "legacy handle",
                    fault: HandleFault::Refused(_)
                })
            ),
            "{refused:?}"
        );
    }
}
