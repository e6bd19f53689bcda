//! `warpipe demo`: real processes, and what happens when they are stopped or killed.

mod support;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use support::{Running, World, device, ends, files};

/// The demo, with its temporary domain inside the world.
fn demo(world: &World, arguments: &[&str]) -> Running {
    let device = device();
    let mut command = world.warpipe(&["demo", "--json", "--megabytes", "1", "--device", &device]);
    std::fs::create_dir_all(world.path("tmp")).unwrap();
    Running::start({
        command.args(arguments).env("TMPDIR", world.path("tmp"));
        command
    })
}

fn pid(started: &Value) -> Pid {
    Pid::from_raw(started["pid"].as_i64().unwrap() as i32).unwrap()
}

#[test]
fn every_item_is_verified_by_every_subscriber() {
    let world = World::new();
    let ended = demo(&world, &["--subscribers", "3", "--items", "7", "--seconds", "100"]).end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let result = ended.event("result");
    assert_eq!(
        (&result["items"], &result["verified"], &result["wrong"], &result["dropped"]),
        (&7.into(), &21.into(), &0.into(), &0.into())
    );
    assert_eq!(result["ok"], true);
    assert!(result["latency_p99_us"].as_f64().unwrap() >= result["latency_p50_us"].as_f64().unwrap());
    assert_eq!(ended.events("started").len(), 4);
    assert!(files(&world.path("tmp")).is_empty(), "the domain is removed");
}

#[test]
fn the_table_for_people_says_what_was_seen() {
    let world = World::new();
    let (tmp, device) = (world.path("tmp"), device());
    std::fs::create_dir(&tmp).unwrap();
    let mut command =
        world.warpipe(&["demo", "--megabytes", "1", "--items", "3", "--seconds", "100", "--device", &device]);
    command.env("TMPDIR", &tmp);
    let ended = Running::start(command).end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for expected in ["3 of 1.0 MiB, to 2 subscribers", "6 of 6", "GB/s", "p50", "every checksum held"] {
        assert!(ended.out.contains(expected), "{expected:?} is missing in\n{}", ended.out);
    }
    assert!(!ended.out.contains('\x1b'), "no colours into a pipe");
}

#[test]
fn a_wrong_word_is_found_and_fails_the_demo() {
    let world = World::new();
    let ended = demo(&world, &["--items", "5", "--seconds", "100", "--sabotage", "3"]).end();
    let result = ended.event("result");
    assert_eq!((ended.code, &result["wrong"], &result["verified"]), (Some(1), &2.into(), &8.into()), "{ended:?}");
}

#[test]
fn an_interrupt_ends_every_process_and_removes_the_domain() {
    let world = World::new();
    let mut running = demo(&world, &["--seconds", "1000"]);
    let started = running.wait_for("started", 3);
    running.signal(Signal::INT);
    let ended = running.end();
    assert_eq!(ended.code, Some(130), "{ended:?}");
    assert_eq!(ended.event("result")["interrupted"], true);
    for process in &started {
        assert!(rustix::process::test_kill_process(pid(process)).is_err(), "{process} is left");
    }
    assert!(std::fs::read_dir(world.path("tmp")).unwrap().next().is_none(), "the domain is left");
}

#[test]
fn a_killed_subscriber_is_named_with_its_reason() {
    let world = World::new();
    let mut running = demo(&world, &["--seconds", "1000"]);
    let started = running.wait_for("started", 3);
    let victim = started.iter().find(|process| process["role"] == "subscriber 2").unwrap();
    kill_process(pid(victim), Signal::KILL).unwrap();
    running.signal(Signal::INT);
    let ended = running.end();
    let failures = ended.event("result")["failures"].to_string();
    assert!(failures.contains("subscriber 2") && failures.contains("SIGKILL"), "{ended:?}");
}

#[test]
fn a_killed_publisher_ends_the_demo_as_a_failure() {
    let world = World::new();
    let mut running = demo(&world, &["--seconds", "1000"]);
    let started = running.wait_for("started", 3);
    kill_process(pid(&started[0]), Signal::KILL).unwrap();
    let ended = running.end();
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.event("result")["failures"].to_string().contains("SIGKILL"), "{ended:?}");
}

#[test]
fn a_killed_demo_leaves_no_process_behind() {
    let world = World::new();
    let mut running = demo(&world, &["--seconds", "1000"]);
    let started = running.wait_for("started", 3);
    running.signal(Signal::KILL);
    for process in &started {
        assert!(ends(pid(process)), "{process} goes on without its parent");
    }
}
