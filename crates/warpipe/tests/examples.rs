//! Runs every example as a separate program, which must succeed, in time, with its stated last
//! line.
//!
//! `WARPIPE_TEST_DEVICE` names another device than the host (`cuda`, `cuda:1`).

use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{ChildStderr, ChildStdout, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Signal, kill_process_group};
use warpipe_testkit::{ChildProcess, temporary_folder, wait_readable};

/// Far beyond the run time of any example: only a hang reaches it.
const LIMIT: Duration = Duration::from_secs(240);

/// The output of a program, and its exit status.
#[derive(Debug)]
struct Ended {
    code: Option<i32>,
    out: String,
    err: String,
}

/// Runs one example in a temporary folder of its own, which is removed afterwards.
fn run(example: &str, arguments: &[&str]) -> Ended {
    let folder = temporary_folder().unwrap();
    let device = std::env::var("WARPIPE_TEST_DEVICE").unwrap_or_else(|_| "host".into());
    let mut command = Command::new(built(example));
    command
        .args(["--device", &device])
        .args(arguments)
        .current_dir(folder.path())
        .env("TMPDIR", folder.path());
    let ended = Running::start(command).end();
    let left: Vec<_> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert!(
        left.iter()
            .all(|name| !name.to_string_lossy().starts_with("warpipe-")),
        "{example} left {left:?}"
    );
    ended
}

/// Runs one example, which must succeed with this last line (`*` stands for any text).
fn ends_with(example: &str, arguments: &[&str], last_line: &str) -> Ended {
    let ended = run(example, arguments);
    assert_eq!(ended.code, Some(0), "{example}: {ended:#?}");
    let last = ended.out.lines().last().unwrap_or_default();
    let parts: Vec<&str> = last_line.split('*').collect();
    let mut rest = last;
    let matches = parts.iter().all(|part| {
        rest.find(part)
            .map(|place| rest = &rest[place + part.len()..])
            .is_some()
    });
    assert!(
        matches && last.starts_with(parts[0]),
        "{example} ended with {last:?}, not with {last_line:?}"
    );
    ended
}

/// The path of the example's binary, built by Cargo or by the bundle for a GPU machine. `cargo test
/// -p warpipe` builds all examples; with `--test examples` it does not.
fn built(example: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let path = test
        .parent()
        .and_then(Path::parent)
        .unwrap()
        .join("examples")
        .join(example);
    assert!(
        path.exists(),
        "{} is not built; run `cargo build -p warpipe --examples` first",
        path.display()
    );
    path
}

/// A process group that is killed if the test ends first.
struct Running {
    child: ChildProcess,
    out: Option<ChildStdout>,
    err: Option<ChildStderr>,
}

impl Running {
    fn start(mut command: Command) -> Running {
        use std::os::unix::process::CommandExt;
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0);
        let mut child = ChildProcess::start(&mut command).unwrap();
        Running {
            out: child.take_stdout(),
            err: child.take_stderr(),
            child,
        }
    }

    /// The first line of its output.
    fn line(&mut self) -> String {
        let out = self.out.as_mut().unwrap();
        assert!(wait_readable(&*out, LIMIT).unwrap(), "it said nothing");
        // It writes whole lines, and only the first is read here.
        let (mut line, mut byte) = (Vec::new(), [0]);
        while out.read(&mut byte).unwrap() == 1 && byte != *b"\n" {
            line.extend(byte);
        }
        String::from_utf8(line).unwrap()
    }

    fn end(mut self) -> Ended {
        let out = read(self.out.take().unwrap());
        let err = read(self.err.take().unwrap());
        let status = self.child.wait(LIMIT);
        self.kill_if_alive();
        let ended = Ended {
            code: status.as_ref().ok().and_then(ExitStatus::code),
            out: out.join().unwrap(),
            err: err.join().unwrap(),
        };
        assert!(status.is_ok(), "{status:?}: {ended:#?}");
        ended
    }

    /// Kills its children, too: they hold the pipes open.
    fn kill_if_alive(&mut self) {
        if self.child.wait(Duration::ZERO).is_err() {
            let _ = kill_process_group(self.child.pid(), Signal::KILL);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill_if_alive();
    }
}

fn read(mut pipe: impl Read + Send + 'static) -> std::thread::JoinHandle<String> {
    std::thread::spawn(move || {
        let mut text = Vec::new();
        pipe.read_to_end(&mut text).unwrap();
        String::from_utf8_lossy(&text).into_owned()
    })
}

#[test]
fn fibonacci_numbers_cross_between_two_processes() {
    ends_with(
        "fibonacci",
        &[],
        "ok: 65536 Fibonacci numbers crossed, every one of them right",
    );
}

#[test]
fn ring_loses_nothing_to_a_slow_reader_and_its_sender_waits() {
    ends_with(
        "ring",
        &[],
        "ok: 200 of 200 frames in order, none lost; the sender found the ring full * times",
    );
}

#[test]
fn consumer_first_gives_up_clearly_or_waits() {
    ends_with(
        "consumer_first",
        &[],
        "ok: gave up twice, then waited, and received: hello from a latecomer",
    );
}

#[test]
fn threads_alias_one_publishers_memory() {
    let last =
        "ok: 4 threads read 20 frames each in the publisher's own memory; nothing was copied";
    ends_with("threads", &[], last);
}

#[test]
fn tenants_are_kept_apart_and_one_of_them_notices_nothing_of_the_others_mistakes() {
    let last = if rustix::process::geteuid().is_root() {
        "ok: 2 users kept to their quotas; 1 write outside was stopped, 1 death cleaned up, \
         1 flood unnoticed; all words right in * rounds"
    } else {
        "ok: skipped: only root can start processes of other users"
    };
    ends_with("tenants", &[], last);
}

#[test]
fn an_option_that_no_example_knows_is_refused() {
    let ended = run("fibonacci", &["--colour", "red"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(
        ended.err.contains("\"--colour\" is no option here"),
        "{ended:?}"
    );
}

#[test]
fn a_device_that_there_is_not_ends_the_example_with_a_clear_error() {
    let folder = temporary_folder().unwrap();
    let mut command = Command::new(built("consumer_first"));
    command
        .args(["--device", "nowhere", "--role", "consumer"])
        .env("WARPIPE_DOMAIN", folder.path());
    let ended = Running::start(command).end();
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(
        ended.err.contains("--device is auto, host, cuda or cuda:N"),
        "{ended:?}"
    );
}

#[test]
fn pipeline_goes_on_when_its_middle_stage_is_killed_and_started_again() {
    ends_with(
        "pipeline",
        &[],
        "ok: 400 frames: * verified, none wrong; * lost with 1 killed filters (9 each at most)",
    );
}

#[test]
fn render_draws_every_frame_as_in_the_reference() {
    ends_with(
        "render",
        &["--frames", "12"],
        "ok: 12 of 12 frames, 0 lost, * frames/s, as in the reference",
    );
}

#[test]
fn render_loses_at_most_the_frames_in_flight_when_its_renderer_is_killed() {
    let last = "ok: * of 24 frames, * lost, * frames/s, as in the reference";
    let ended = ends_with("render", &["--frames", "24", "--kill"], last);
    assert!(ended.out.contains("killing the renderer"), "{ended:#?}");
}

#[test]
fn render_refuses_a_picture_that_is_not_the_reference() {
    let folder = temporary_folder().unwrap();
    let other = folder.path().join("another-frame.png");
    std::fs::write(&other, include_bytes!("examples/another-frame.png")).unwrap();
    let ended = run(
        "render",
        &["--frames", "12", "--reference", other.to_str().unwrap()],
    );
    assert_eq!(ended.code, Some(1), "{ended:#?}");
    assert!(
        ended.err.contains("pixels are not as in the reference"),
        "{ended:#?}"
    );
}

#[test]
fn crash_recovery_tells_a_stopped_worker_from_a_dead_one_and_clears_up_after_the_dead() {
    let last = "ok: * frames of 4 workers verified; one stalled and recovered, one died and was replaced, 3 left";
    let ended = ends_with("crash_recovery", &[], last);
    assert!(
        ended
            .out
            .contains("worker-2: died, and left frames/worker-2 and members/worker-2"),
        "{ended:#?}"
    );
}

#[test]
fn workers_do_every_task_though_one_of_them_is_killed() {
    let last = "ok: 200 of 200 tasks right; 1 worker was killed, and * tasks were redone";
    let ended = ends_with("workers", &[], last);
    assert!(ended.out.contains("killing a worker"), "{ended:#?}");
}

#[test]
fn pool_gets_its_blocks_back_from_a_borrower_and_from_a_dead_one() {
    let last = "ok: 4 blocks lent and given back, 1 taken back from the dead; all of 8192 KiB free at the end";
    let ended = ends_with("pool", &[], last);
    assert!(
        ended
            .out
            .contains("held by the doomed: owner 0 KiB, lent 2048 KiB"),
        "{ended:#?}"
    );
}

#[test]
fn semaphore_lets_no_more_in_than_it_has_permits() {
    let last = "ok: never more than 2 of 6 processes inside; 120 turns, and no addition lost";
    ends_with("semaphore", &[], last);
}

#[test]
fn without_the_semaphore_more_are_inside_and_the_example_says_so() {
    let ended = run("semaphore", &["--without"]);
    assert_eq!(ended.code, Some(1), "{ended:#?}");
    assert!(
        ended.err.contains("were inside, and 2 may be"),
        "{ended:#?}"
    );
}

#[test]
fn weights_are_read_as_slices_of_cudarc_after_their_trainer_has_ended() {
    ends_with(
        "shared_weights",
        &[],
        "ok: 2 readers had both tensors of version 1 without a copy, after their trainer",
    );
}

#[test]
fn inference_servers_reply_what_the_reference_says() {
    ends_with(
        "inference_server",
        &[],
        "ok: 64 requests answered by 2 servers, all within 0.00001 of the reference",
    );
}

#[test]
fn fork_doubles_the_parents_numbers_in_its_child() {
    ends_with(
        "fork",
        &[],
        "ok: 65536 numbers of the parent, doubled in place by its forked child",
    );
}

#[test]
fn events_make_a_stream_wait_and_tell_what_was_never_recorded_and_what_is_lost() {
    let last = "ok: the child's stream waited, and 65536 words are right; never recorded and lost are errors";
    let ended = ends_with("events", &[], last);
    let said = [
        "the stream waited and read for",
        "has never been recorded",
        "was lost: the work that process",
    ];
    assert!(
        said.iter().all(|said| ended.out.contains(said)),
        "{ended:#?}"
    );
}

#[test]
fn pipes_carry_nine_tensors_with_their_values() {
    let ended = ends_with(
        "pipes",
        &[],
        "ok: 9 tensors came by legacy handles and 9 by tickets, each with its values",
    );
    for n in 1..=9 {
        let tensor = format!(
            "tensor {n}: [{n}, {0}] by a legacy handle, [{n}, {0}] by a ticket",
            2 * n
        );
        assert!(
            ended.out.contains(&tensor),
            "{tensor} is missing in {ended:#?}"
        );
    }
}

#[test]
fn producer_consumer_of_one_terminal_agree() {
    ends_with(
        "producer_consumer",
        &[],
        "ok: the consumer opened the ticket, and 1048576 words are right",
    );
}

#[test]
fn producer_consumer_agree_if_the_producer_was_first() {
    in_two_terminals(["producer", "consumer"], "the ticket is in");
}

#[test]
fn producer_consumer_agree_if_the_consumer_was_first() {
    in_two_terminals(["consumer", "producer"], "looking for");
}

/// Runs the two roles of `producer_consumer`, the second once the first has printed `is_there`.
fn in_two_terminals(roles: [&str; 2], is_there: &str) {
    let folder = temporary_folder().unwrap();
    let device = std::env::var("WARPIPE_TEST_DEVICE").unwrap_or_else(|_| "host".into());
    let [first, second] = roles.map(|role| {
        let mut command = Command::new(built("producer_consumer"));
        command
            .args(["--device", &device, "--role", role])
            .env("WARPIPE_DOMAIN", folder.path())
            .current_dir(folder.path());
        command
    });
    let mut first = Running::start(first);
    let said = first.line();
    assert!(said.contains(is_there), "the {} said {said:?}", roles[0]);
    if roles[0] == "producer" {
        use std::os::unix::fs::MetadataExt;
        let file = std::fs::metadata(folder.path().join("producer_consumer.ticket")).unwrap();
        assert_eq!(
            file.mode() & 0o777,
            0o600,
            "the ticket's file is not private"
        );
    }
    let second = Running::start(second).end();
    let first = first.end();
    assert_eq!(
        (first.code, second.code),
        (Some(0), Some(0)),
        "{first:#?} {second:#?}"
    );
    let out = first.out + &second.out;
    assert!(out.contains("consumer: 1048576 words are right"), "{out}");
    let left: Vec<_> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert!(left.is_empty(), "they left {left:?}");
}

#[test]
fn bandwidth_moves_right_bytes_through_an_import_and_compares() {
    let last = "ok: * comparisons, all bytes right; the lowest ratio is *";
    let ended = ends_with("bandwidth", &["--mib", "8", "--rounds", "2"], last);
    let lines = [
        "host to device",
        "device to host",
        "device to device, read",
        "device to device, write",
        "peer to peer",
    ];
    assert!(
        lines.iter().all(|line| ended.out.contains(line)),
        "{ended:#?}"
    );
}

#[test]
fn bandwidth_below_the_bound_that_was_asked_for_is_an_error() {
    let ended = run(
        "bandwidth",
        &["--mib", "1", "--rounds", "1", "--at-least", "1000"],
    );
    assert_eq!(ended.code, Some(1), "{ended:#?}");
    assert!(ended.err.contains("is below 1000"), "{ended:#?}");
}
