//! `weights serve` that ends before it offers anything: wrong files and names, and deaths while it
//! loads.

use std::path::Path;

use crate::support::weights::{Stage, children_of, with_header};
use crate::support::{PATIENCE, Running};
use rustix::process::Signal;
use warpipe_testkit::eventually;

#[test]
fn files_that_cannot_be_loaded_are_named_and_nothing_is_offered_or_left() {
    let stage = Stage::new();
    let model = std::fs::read(&stage.file).unwrap();
    let two = |first: [u64; 2], second: [u64; 2]| {
        let entry = |name, [begin, end]: [u64; 2]| {
            let length = end - begin;
            format!(
                r#""{name}":{{"dtype":"U8","shape":[{length}],"data_offsets":[{begin},{end}]}}"#
            )
        };
        let header = format!("{{{},{}}}", entry("a", first), entry("b", second));
        with_header(&header, &[0; 20])
    };
    let folder = stage.world.path("empty");
    std::fs::create_dir(&folder).unwrap();
    let cases = [
        (
            stage.world.write("cut", &model[..1000]),
            "outside of the file",
        ),
        (stage.world.write("short", &model[..5]), "5 bytes"),
        (
            stage.world.write("text", b"this is no model at all"),
            "no safetensors file",
        ),
        (
            stage.world.write("overlap", &two([0, 12], [8, 20])),
            "overlap",
        ),
        (
            stage.world.write("range", &two([0, 10], [10, 30])),
            "outside of the file",
        ),
        (stage.world.path("absent"), "No such file"),
        (folder, "no safetensors file"),
    ];
    for (path, words) in cases {
        let refused = stage.world.run(&stage.serve_arguments(&path, &[]));
        assert_eq!(
            (refused.code, refused.out.as_str()),
            (Some(5), ""),
            "{refused:?}"
        );
        let is_named = refused.err.contains(path.to_str().unwrap());
        assert!(
            is_named && refused.err.contains(words),
            "{words}: {refused:?}"
        );
        stage.assert_nothing_is_left();
    }
}

#[test]
fn weights_larger_than_the_memory_are_refused_before_they_are_read() {
    let stage = Stage::new();
    let bytes: u64 = 1 << 42;
    let header =
        format!(r#"{{"a":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
    let path = stage.world.write("huge", &with_header(&header, &[]));
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    // A hole: no disk space is used.
    file.set_len(8 + header.len() as u64 + bytes).unwrap();
    let refused = stage.world.run(&stage.serve_arguments(&path, &[]));
    assert_eq!(
        (refused.code, refused.out.as_str()),
        (Some(6), ""),
        "{refused:?}"
    );
    assert!(refused.err.contains("no room for"), "{refused:?}");
    stage.assert_nothing_is_left();
}

#[test]
fn a_taken_or_wrong_name_is_refused_and_its_keeper_goes_on() {
    let stage = Stage::new();
    let mut serve = stage.serve(&[]);
    serve.wait_for("ready", 1);
    let taken = stage.serve(&[]).end();
    assert_eq!((taken.code, taken.out.as_str()), (Some(2), ""), "{taken:?}");
    let holder = format!("held by process {}", serve.pid());
    assert!(taken.err.contains(&holder), "{taken:?}");
    let next = "next: publish a new version to it with `warpipe.weights.publish`";
    assert!(taken.err.contains(next), "{taken:?}");
    let path = stage.file.to_str().unwrap();
    for name in ["../w", "", &"n".repeat(201)] {
        let wrong = stage.world.run(&["weights", "serve", path, "--name", name]);
        assert_eq!(wrong.code, Some(2), "{wrong:?}");
    }
    assert_eq!(stage.ls()[0]["keeper_pid"], serve.pid());
}

/// A file that takes long to load: the reading blocks until it is killed, or the keeper ends.
fn start_a_load_that_lasts(stage: &Stage) -> Running {
    let bytes: u64 = 1 << 32;
    let header =
        format!(r#"{{"a":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[0,{bytes}]}}}}"#);
    let path = stage.world.write("large", &with_header(&header, &[]));
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(8 + header.len() as u64 + bytes).unwrap();
    let serve = stage.world.start(&stage.serve_arguments(&path, &[]));
    let has_child = eventually(PATIENCE, || !children_of(serve.pid()).is_empty());
    assert!(has_child, "the loading process has been started");
    serve
}

#[test]
fn a_loading_process_that_is_killed_is_an_error_and_leaves_nothing() {
    let stage = Stage::new();
    let serve = start_a_load_that_lasts(&stage);
    kill(children_of(serve.pid())[0]);
    let ended = serve.end();
    assert_eq!((ended.code, ended.out.as_str()), (Some(1), ""), "{ended:?}");
    assert!(
        ended.err.contains("killed by signal 9 (SIGKILL)"),
        "{ended:?}"
    );
    stage.assert_nothing_is_left();
}

#[test]
fn a_loading_process_ends_with_its_keeper_however_that_ends() {
    for signal in [Signal::INT, Signal::TERM, Signal::KILL] {
        let stage = Stage::new();
        let serve = start_a_load_that_lasts(&stage);
        let child = children_of(serve.pid())[0];
        serve.signal(signal);
        let ended = serve.end();
        let code = if signal == Signal::KILL {
            None
        } else {
            Some(130)
        };
        assert_eq!(ended.code, code, "{ended:?}");
        let is_gone = || !Path::new(&format!("/proc/{child}")).exists() || is_zombie(child);
        assert!(eventually(PATIENCE, is_gone), "process {child} lives");
        if signal != Signal::KILL {
            stage.assert_nothing_is_left();
        }
    }
}

#[test]
fn a_keeper_that_loads_ends_when_it_is_dropped() {
    let stage = Stage::new();
    let serve = start_a_load_that_lasts(&stage);
    let dropped = stage.world.run(&["weights", "drop", "w"]);
    assert_eq!(dropped.code, Some(0), "{dropped:?}");
    assert!(
        dropped.out.contains("no process has the weights open"),
        "{dropped:?}"
    );
    let ended = serve.end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    stage.assert_nothing_is_left();
}

fn kill(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).unwrap();
    rustix::process::kill_process(pid, Signal::KILL).unwrap();
}

fn is_zombie(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.contains("State:\tZ")
}
