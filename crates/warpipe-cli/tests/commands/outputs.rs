//! Outputs that are closed, full, or read by nobody.

use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};

use crate::support::{PATIENCE, World, device, files, full_pipe};
use rustix::process::Signal;
use warpipe_testkit::{ChildProcess, eventually};

/// Whether a process catches SIGTERM.
fn catches_term(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let mask = caught.map_or(0, |mask| u64::from_str_radix(mask.trim(), 16).unwrap());
    mask & (1 << (Signal::TERM.as_raw() - 1)) != 0
}

#[test]
fn one_signal_ends_a_command_whose_output_nobody_takes_and_nothing_is_left() {
    let world = World::new();
    let (file, device) = (world.write("a.bin", &[7; 100]), device());
    let file = file.to_str().unwrap();
    for arguments in [
        &[
            "pub",
            "x",
            file,
            "--wait-subscribers",
            "0",
            "--device",
            &device,
        ][..],
        &["pub", "x", file, "--device", &device, "--json"],
        &["sub", "x", "--device", &device],
        &["members", "--follow"],
        &["demo", "--device", "host", "--megabytes", "1"],
    ] {
        let (_reader, full) = full_pipe();
        let mut command = world.warpipe(arguments);
        command
            .stdin(Stdio::null())
            .stderr(full.try_clone().unwrap());
        let mut running = ChildProcess::start(command.stdout(full)).unwrap();
        let pid = running.pid().as_raw_nonzero().get();
        assert!(eventually(PATIENCE, || catches_term(pid)), "{arguments:?}");
        running.signal(Signal::TERM).unwrap();
        let status = running.wait(PATIENCE).unwrap();
        assert_eq!(status.code(), Some(130), "{arguments:?}");
        let domain = world.path("domain");
        assert!(
            !domain.exists() || files(&domain).is_empty(),
            "{arguments:?}"
        );
    }
}

#[test]
fn a_command_that_only_shows_ends_with_its_reader_and_unfinished_work_is_an_error() {
    let world = World::new();
    let file = world.write("a.bin", &[7; 100]);
    let (file, folder, device) = (file.to_str().unwrap(), world.path("saved"), device());
    let publish = [
        "pub",
        "x",
        file,
        "--wait-subscribers",
        "0",
        "--device",
        &device,
    ];
    let save = [
        "sub",
        "x",
        "--save",
        folder.to_str().unwrap(),
        "--device",
        &device,
    ];
    for (arguments, code) in [(&["ls"][..], 0), (&publish, 7), (&save, 7)] {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = world.warpipe(arguments);
        let output = command.stdout(writer).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {errors}");
        assert_eq!(errors.is_empty(), code == 0, "{arguments:?}: {errors}");
    }
}

#[test]
fn help_that_finds_no_room_is_an_error() {
    let world = World::new();
    let said = world.path("said");
    let binary = env!("CARGO_BIN_EXE_warpipe");
    for script in [
        format!("exec '{binary}' --help > /dev/full"),
        format!(
            "ulimit -f 0; exec '{binary}' --version > '{}'",
            said.display()
        ),
    ] {
        let output = Command::new("sh").args(["-c", &script]).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(7), "{script}: {errors}");
        assert!(errors.contains("cannot be printed"), "{script}: {errors}");
    }
}

#[test]
fn a_command_short_of_threads_says_which_limit_to_raise() {
    use std::os::unix::process::CommandExt;
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can become a user without other processes");
    }
    const USER: u32 = 61_237;
    let world = World::new();
    let binary = world.for_all_users(env!("CARGO_BIN_EXE_warpipe"));
    let domain = world.path("domain");
    std::fs::create_dir(&domain).unwrap();
    std::os::unix::fs::chown(&domain, Some(USER), Some(USER)).unwrap();
    std::fs::set_permissions(&domain, PermissionsExt::from_mode(0o700)).unwrap();
    let file = world.write("a.bin", &[7; 100]);
    for arguments in [
        &["metrics", "--listen", "127.0.0.1:0"][..],
        &["pub", "x", file.to_str().unwrap(), "--device", "host"],
        &["members"],
    ] {
        let mut command = Command::new("sh");
        command.args([
            "-c",
            "{ ulimit -u 0 || ulimit -p 0; } 2>/dev/null; exec \"$0\" \"$@\"",
        ]);
        command
            .arg(&binary)
            .args(arguments)
            .env("WARPIPE_DOMAIN", &domain);
        let output = command.uid(USER).gid(USER).output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(7), "{arguments:?}: {errors}");
        assert!(errors.contains("ulimit -u"), "{arguments:?}: {errors}");
        assert!(files(&domain).is_empty(), "{arguments:?}");
    }
}
