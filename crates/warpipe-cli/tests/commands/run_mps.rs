//! `run --mps`, with a program in PATH that plays the MPS daemon.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::{PATIENCE, World};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use warpipe_testkit::{ChildProcess, eventually};

/// The daemon: in the foreground it listens on a FIFO named `control` until it is told to quit. Its
/// other calls are commands on standard input. It writes its number to `$RECORD`, and that of its
/// server, if it is to have one, beside it.
const DAEMON: &str = r#"#!/bin/bash
pipe="$CUDA_MPS_PIPE_DIRECTORY"
if [ "$1" = -f ]; then
    echo $$ > "$RECORD"
    echo "$pipe" > "$RECORD.pipe"
    echo "${CUDA_VISIBLE_DEVICES-unset}" > "$RECORD.devices"
    [ -z "$FAILS" ] || { echo "no GPU here" >&2; exit 3; }
    [ -z "$MUTE" ] || exec tail -f /dev/null
    mkfifo "$pipe/control" && exec 3<>"$pipe/control"
    [ -z "$STUBBORN" ] || trap '' TERM
    # A server, which does not end by itself.
    mkfifo "$pipe/wait"
    [ -z "$SERVER" ] || { nvidia-cuda-mps-server <> "$pipe/wait" & echo $! > "$RECORD.server"; }
    while read -r command <&3; do
        [ "$command" = quit ] && [ -z "$STUBBORN" ] && exit 0
    done
else
    while read -r command; do
        [ "$command" = quit ] && echo quit > "$pipe/control"
    done
fi
exit 0
"#;

struct Stage {
    world: World,
    record: PathBuf,
}

impl Stage {
    fn new() -> Stage {
        let world = World::new();
        fs::create_dir(world.path("bin")).unwrap();
        fs::create_dir(world.path("tmp")).unwrap();
        let daemon = world.write("bin/nvidia-cuda-mps-control", DAEMON.as_bytes());
        fs::set_permissions(daemon, fs::Permissions::from_mode(0o700)).unwrap();
        fs::copy("/bin/cat", world.path("bin/nvidia-cuda-mps-server")).unwrap();
        let record = world.path("record");
        Stage { world, record }
    }

    fn command(&self, program: &[&str]) -> Command {
        let mut command = self
            .world
            .warpipe(&[&["run", "--mps", "--"], program].concat());
        let path = std::env::var("PATH").unwrap();
        command
            .env(
                "PATH",
                format!("{}:{path}", self.world.path("bin").display()),
            )
            .env("RECORD", &self.record)
            .env("TMPDIR", self.world.path("tmp"))
            .env_remove("XDG_RUNTIME_DIR")
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env_remove("CUDA_MPS_PIPE_DIRECTORY")
            .stdin(Stdio::null());
        command
    }

    fn daemon(&self) -> Pid {
        process_in(&self.record)
    }

    fn server(&self) -> Pid {
        process_in(&self.record.with_extension("server"))
    }

    /// Neither the daemon nor a folder is left.
    fn is_clean(&self) -> bool {
        let is_gone = || test_kill_process(self.daemon()).is_err();
        let is_empty = || fs::read_dir(self.world.path("tmp")).unwrap().count() == 0;
        eventually(PATIENCE, || is_gone() && is_empty())
    }
}

fn process_in(file: &Path) -> Pid {
    let number = fs::read_to_string(file).unwrap();
    Pid::from_raw(number.trim().parse().unwrap()).unwrap()
}

#[test]
fn a_program_finds_its_own_daemon_and_its_exit_code_is_passed_on() {
    let stage = Stage::new();
    let script = "[ -p \"$CUDA_MPS_PIPE_DIRECTORY/control\" ] && [ -d \"$CUDA_MPS_LOG_DIRECTORY\" ] && stat -c %a \"$CUDA_MPS_PIPE_DIRECTORY/..\" && exit 7";
    let ended = stage.command(&["sh", "-c", script]).output().unwrap();
    assert_eq!(ended.status.code(), Some(7), "{ended:?}");
    assert_eq!(String::from_utf8_lossy(&ended.stdout).trim(), "700");
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(
        said.contains("ends all") && said.contains("clients of the daemon"),
        "{said}"
    );
    assert!(
        test_kill_process(stage.daemon()).is_err(),
        "the daemon runs on"
    );
    assert!(stage.is_clean());
}

/// A daemon numbers the GPUs that its variable names anew.
#[test]
fn numbers_of_gpus_are_the_daemons_and_their_uuids_also_the_programs() {
    for (devices, of_program) in [
        ("1", "unset"),
        ("2,0", "unset"),
        ("GPU-12", "GPU-12"),
        ("", ""),
    ] {
        let stage = Stage::new();
        let mut command = stage.command(&["sh", "-c", "echo ${CUDA_VISIBLE_DEVICES-unset}"]);
        let ended = command
            .env("CUDA_VISIBLE_DEVICES", devices)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&ended.stdout);
        assert_eq!(said.trim_end(), of_program, "{ended:?}");
        let of_daemon = fs::read_to_string(stage.record.with_extension("devices")).unwrap();
        assert_eq!(of_daemon.trim_end(), devices);
    }
}

#[test]
fn a_daemon_inside_another_ones_program_is_refused() {
    let stage = Stage::new();
    let started = stage.world.path("started");
    let inner = [
        env!("CARGO_BIN_EXE_warpipe"),
        "run",
        "--mps",
        "--",
        "touch",
        started.to_str().unwrap(),
    ];
    let ended = stage.command(&inner).output().unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(
        said.contains("run it without a daemon of its own"),
        "{said}"
    );
    assert!(!started.exists() && stage.is_clean());
}

#[test]
fn a_supervisor_removes_no_folder_that_was_there_before() {
    let stage = Stage::new();
    fs::create_dir(stage.world.path("mine")).unwrap();
    let kept = stage.world.write("mine/notes.txt", b"a user's");
    let folder = stage.world.path("mine");
    let ended = stage
        .world
        .run(&["mps-daemon", "--folder", folder.to_str().unwrap()]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.out.contains("is no empty folder"), "{ended:?}");
    assert_eq!(fs::read(kept).unwrap(), b"a user's");
}

#[test]
fn a_program_that_a_signal_ends_gives_128_and_its_number() {
    let stage = Stage::new();
    let ended = stage
        .command(&["sh", "-c", "kill -KILL $$"])
        .output()
        .unwrap();
    assert_eq!(ended.status.code(), Some(137), "{ended:?}");
    assert!(stage.is_clean());
}

#[test]
fn a_program_that_is_not_there_gives_127_and_the_daemon_ends() {
    let stage = Stage::new();
    let ended = stage.command(&["no-such-program"]).output().unwrap();
    assert_eq!(ended.status.code(), Some(127), "{ended:?}");
    assert!(String::from_utf8_lossy(&ended.stderr).contains("no-such-program"));
    assert!(stage.is_clean());
}

#[test]
fn signals_are_passed_on_to_the_program() {
    let stage = Stage::new();
    let ready = stage.world.path("ready");
    let script = format!(
        "mkfifo {0}.fifo; cat <> {0}.fifo & trap 'kill $!; exit 9' TERM; : > {0}; wait",
        ready.display()
    );
    let mut running = stage.command(&["bash", "-c", &script]).spawn().unwrap();
    assert!(eventually(PATIENCE, || ready.exists()));
    kill_process(Pid::from_child(&running), Signal::TERM).unwrap();
    assert_eq!(running.wait().unwrap().code(), Some(9));
    assert!(stage.is_clean());
}

#[test]
fn a_signal_while_the_daemon_starts_ends_the_command_and_the_program_is_not_run() {
    let stage = Stage::new();
    let started = stage.world.path("started");
    let program = ["touch", started.to_str().unwrap()];
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143)] {
        // It never answers.
        let mut command = stage.command(&program);
        let mut running = ChildProcess::start(command.env("MUTE", "1")).unwrap();
        let is_started = || fs::read(&stage.record).is_ok_and(|text| text.ends_with(b"\n"));
        assert!(eventually(PATIENCE, is_started));
        running.signal(signal).unwrap();
        assert_eq!(running.wait(PATIENCE).unwrap().code(), Some(code));
        assert!(test_kill_process(stage.daemon()).is_err());
        assert!(!started.exists());
        assert_eq!(fs::read_dir(stage.world.path("tmp")).unwrap().count(), 0);
        fs::remove_file(&stage.record).unwrap();
    }
}

#[test]
fn the_daemon_and_the_program_end_when_the_command_is_killed() {
    let stage = Stage::new();
    let program = stage.world.path("program");
    let script = format!(
        "mkfifo {0}.fifo; echo $$ > {0}.new && mv {0}.new {0} && exec cat <> {0}.fifo",
        program.display()
    );
    let mut running = stage.command(&["sh", "-c", &script]).spawn().unwrap();
    assert!(eventually(PATIENCE, || program.exists()));
    running.kill().unwrap();
    running.wait().unwrap();
    assert!(stage.is_clean());
    let number = fs::read_to_string(&program)
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    let program = Pid::from_raw(number).unwrap();
    assert!(
        eventually(PATIENCE, || test_kill_process(program).is_err()),
        "the program runs on"
    );
}

#[test]
fn the_daemon_its_server_and_its_folder_go_when_the_supervisor_is_killed() {
    let stage = Stage::new();
    let go = stage.world.path("go");
    let script = format!(
        "mkfifo {0}.new && mv {0}.new {0} && read line < {0}; exit 5",
        go.display()
    );
    let mut running = stage
        .command(&["sh", "-c", &script])
        .env("SERVER", "1")
        .spawn()
        .unwrap();
    let server = stage.record.with_extension("server");
    let is_written = |path: &Path| fs::read_to_string(path).is_ok_and(|it| it.ends_with('\n'));
    assert!(eventually(PATIENCE, || go.exists() && is_written(&server)));
    let daemon = stage.daemon();
    kill_process(parent_of(daemon), Signal::KILL).unwrap();
    let has_ended = eventually(PATIENCE, || test_kill_process(daemon).is_err());
    fs::write(&go, "\n").unwrap();
    assert_eq!(running.wait().unwrap().code(), Some(5), "the program's own");
    assert!(has_ended, "the daemon runs on");
    assert!(stage.is_clean());
    let server = stage.server();
    assert!(
        eventually(PATIENCE, || test_kill_process(server).is_err()),
        "a server runs on"
    );
}

fn parent_of(pid: Pid) -> Pid {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).unwrap();
    let (_, fields) = stat.rsplit_once(')').unwrap();
    let parent = fields.split_ascii_whitespace().nth(1).unwrap();
    Pid::from_raw(parent.parse().unwrap()).unwrap()
}

#[test]
fn a_daemon_that_does_not_quit_is_killed() {
    let stage = Stage::new();
    let ended = stage
        .command(&["true"])
        .env("STUBBORN", "1")
        .output()
        .unwrap();
    assert_eq!(ended.status.code(), Some(0), "{ended:?}");
    assert!(stage.is_clean());
}

#[test]
fn no_server_outlives_its_daemon_however_that_ends() {
    for (program, stubborn) in [
        ("true", ""),
        ("true", "1"),
        ("kill -KILL $(cat $RECORD)", ""),
    ] {
        let stage = Stage::new();
        let mut command = stage.command(&["sh", "-c", program]);
        let ended = command
            .env("SERVER", "1")
            .env("STUBBORN", stubborn)
            .output()
            .unwrap();
        assert_eq!(ended.status.code(), Some(0), "{ended:?}");
        let is_gone = test_kill_process(stage.server()).is_err();
        assert!(is_gone && stage.is_clean(), "{program}, {stubborn:?}");
    }
}

#[test]
fn an_ignored_signal_stays_ignored_in_the_program() {
    let stage = Stage::new();
    let run = stage.command(&["grep", "SigIgn", "/proc/self/status"]);
    let mut shell = Command::new("sh");
    shell
        .args(["-c", "trap '' HUP; exec \"$0\" \"$@\""])
        .arg(run.get_program())
        .args(run.get_args());
    for (name, value) in run.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    let ended = shell.output().unwrap();
    let said = String::from_utf8_lossy(&ended.stdout);
    let mask = said.trim().strip_prefix("SigIgn:").map(str::trim);
    let mask = u64::from_str_radix(mask.unwrap_or_default(), 16).unwrap();
    assert!(mask & 1 == 1, "SIGHUP ends the program: {said}");
    assert!(stage.is_clean());
}

#[test]
fn a_daemon_that_cannot_start_is_an_error_that_shows_its_words() {
    let stage = Stage::new();
    let ended = stage
        .command(&["touch", "started"])
        .env("FAILS", "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert_eq!(ended.status.code(), Some(1), "{said}");
    assert!(
        said.contains("exit code 3") && said.contains("no GPU here"),
        "{said}"
    );
    assert!(stage.is_clean());

    let ended = stage
        .command(&["true"])
        .env("PATH", stage.world.path("tmp"))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(
        ended.status.code() == Some(1) && said.contains("is not in PATH"),
        "{said}"
    );
    assert!(stage.is_clean());
}

#[test]
fn a_folder_too_long_for_the_daemons_sockets_is_refused() {
    let stage = Stage::new();
    let long = stage.world.path(&"x".repeat(90));
    fs::create_dir(&long).unwrap();
    let ended = stage
        .command(&["true"])
        .env("TMPDIR", &long)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(
        ended.status.code() == Some(1) && said.contains("too long"),
        "{said}"
    );
    assert!(!stage.record.exists() && fs::read_dir(&long).unwrap().count() == 0);
}

#[test]
fn without_mps_it_says_what_it_is_for() {
    let stage = Stage::new();
    let ended = stage.world.run(&["run", "--", "true"]);
    assert_eq!(ended.code, Some(2), "{}", ended.err);
    assert!(
        ended.err.contains("warpipe run --mps -- PROGRAM"),
        "{}",
        ended.err
    );
}
