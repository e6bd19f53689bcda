//! `warpipe demo`: real processes, and what happens when they are stopped or killed.

use crate::support::{PATIENCE, Running, World, device};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use warpipe_testkit::{pidfd, wait_readable};

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

/// The demo's own folder is removed.
fn is_cleared(world: &World) -> bool {
    std::fs::read_dir(world.path("tmp"))
        .unwrap()
        .next()
        .is_none()
}

#[test]
fn every_item_is_verified_by_every_subscriber() {
    let world = World::new();
    let ended = demo(&world, &["--subscribers", "3", "--seconds", "0.2"]).end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let latency = ended.event("latency");
    let figure = |name: &str| latency[name].as_f64().unwrap();
    assert!(
        figure("p50_us") > 0.0 && figure("p99_us") >= figure("p50_us"),
        "{latency}"
    );
    let verified = ended.event("throughput")["verified"].as_u64().unwrap();
    let result = ended.event("result");
    assert_eq!(
        (&result["ok"], &result["wrong"], &result["gaps"]),
        (&true.into(), &0.into(), &0.into())
    );
    assert!(
        result["verified"].as_u64().unwrap() > verified,
        "the parts after the throughput count, too"
    );
    assert_eq!(
        result["latency"]["p50_us"], latency["p50_us"],
        "the last line has all figures"
    );
    let claims = result["claims"].as_array().unwrap();
    assert!(claims.iter().all(|claim| claim["holds"] == true));
    // Four processes, and one more after each death.
    assert_eq!(ended.events("started").len(), 6);
    assert!(is_cleared(&world), "the domain is left");
}

#[test]
fn a_killed_subscriber_is_reported_by_its_publisher_its_neighbours_and_its_successor() {
    let world = World::new();
    let ended = demo(&world, &["--subscribers", "3", "--seconds", "0.2"]).end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let death = ended.event("subscriber_death");
    let figure = |name: &str| {
        death[name]
            .as_f64()
            .unwrap_or_else(|| panic!("{name} in {death}"))
    };
    assert!(figure("notified_ms") <= figure("released_ms"), "{death}");
    assert!(
        figure("notified_ms") <= figure("started_ms")
            && figure("started_ms") < figure("first_verified_ms")
    );
    let held = death["held"].as_array().unwrap();
    assert_eq!(held.len(), 2, "{death}");
    assert!(
        held.iter()
            .all(|number| number.as_u64() < death["first_item"].as_u64()),
        "{death}"
    );
    let others = death["others"].as_array().unwrap();
    let roles: Vec<_> = others
        .iter()
        .map(|other| other["role"].as_str().unwrap())
        .collect();
    assert_eq!(roles, ["subscriber 1", "subscriber 2"]);
    assert!(
        others
            .iter()
            .all(|other| other["verified"].as_u64() > Some(0)),
        "{death}"
    );
    // The successor has the name of the dead, in another process.
    let third: Vec<_> = ended
        .events("started")
        .into_iter()
        .filter(|it| it["role"] == "subscriber 3")
        .collect();
    assert!(
        third.len() == 2 && third[0]["pid"] == death["pid"] && third[1]["pid"] != death["pid"],
        "{third:?}"
    );
}

#[test]
fn a_killed_publisher_is_reported_by_every_survivor() {
    let world = World::new();
    let ended = demo(&world, &["--subscribers", "2", "--seconds", "0.2"]).end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let death = ended.event("publisher_death");
    let (complete, writing) = (
        death["complete"].as_u64().unwrap(),
        death["writing"].as_u64().unwrap(),
    );
    assert_eq!(writing, complete + 1, "{death}");
    let survivors = death["survivors"].as_array().unwrap();
    assert_eq!(survivors.len(), 2);
    for survivor in survivors {
        assert_eq!(survivor["lost"], writing, "{survivor}");
        assert_eq!(survivor["last_before"], complete, "{survivor}");
        assert_eq!(survivor["first_after"], 1, "{survivor}");
        for time in ["notified_ms", "lost_ms"] {
            assert!(
                survivor[time].as_f64().unwrap() < survivor["continued_ms"].as_f64().unwrap(),
                "{survivor}"
            );
        }
    }
    assert_eq!(
        ended.event("result")["lost"],
        2,
        "one item at each survivor"
    );
}

/// As where an MPS daemon answers: a kill in a kernel would end all its clients.
#[test]
fn processes_killed_without_work_on_the_device_lose_nothing() {
    let world = World::new();
    let ended = demo(&world, &["--seconds", "0.2", "--idle"]).end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let (subscriber, publisher) = (
        ended.event("subscriber_death"),
        ended.event("publisher_death"),
    );
    assert_eq!(
        (&subscriber["busy"], &publisher["busy"]),
        (&false.into(), &false.into())
    );
    assert_eq!(
        subscriber["held"].as_array().unwrap().len(),
        2,
        "it holds samples all the same"
    );
    assert_eq!(
        (&publisher["writing"], &ended.event("result")["lost"]),
        (&Value::Null, &0.into())
    );
    let survivors = publisher["survivors"].as_array().unwrap();
    assert!(
        survivors
            .iter()
            .all(|survivor| survivor["last_before"] == publisher["complete"]),
        "{publisher}"
    );
}

#[test]
fn a_lone_subscriber_is_replaced_too() {
    let world = World::new();
    let ended = demo(&world, &["--subscribers", "1", "--seconds", "0.2"]).end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(
        ended.event("subscriber_death")["others"],
        Value::Array(vec![])
    );
    assert_eq!(
        ended.event("publisher_death")["survivors"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
}

#[test]
fn people_are_told_the_four_parts_in_lines_that_fit_a_terminal() {
    let world = World::new();
    let (tmp, device) = (world.path("tmp"), device());
    std::fs::create_dir(&tmp).unwrap();
    let mut command = world.warpipe(&[
        "demo",
        "--megabytes",
        "1",
        "--seconds",
        "0.2",
        "--device",
        &device,
    ]);
    command.env("TMPDIR", &tmp);
    let ended = Running::start(command).end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for expected in [
        &format!("(asked for with --device {device}"),
        "1  latency",
        "p50",
        "2  throughput: tensors of 1.0 MiB to 2 subscribers",
        "tensors verified in",
        "GB/s made visible",
        "3  death of a subscriber",
        "subscriber 1 went on without a gap",
        "4  death of the publisher",
        "items verified, every word right, two processes killed,\nnothing lost that was complete, nothing left over",
    ] {
        assert!(
            ended.out.contains(expected),
            "{expected:?} is missing in\n{}",
            ended.out
        );
    }
    assert!(!ended.out.contains('\x1b'), "no colours into a pipe");
    for line in ended.out.lines() {
        assert!(line.chars().count() <= 100, "{line:?}");
    }
}

#[test]
fn a_claim_that_does_not_hold_is_named_and_fails_the_demo() {
    for (plant, named) in [
        ("wrong-word", "every subscriber verified every tensor"),
        ("gap", "the other subscribers went on without a gap"),
        ("lost", "nothing was lost that was complete"),
        ("leftover", "nothing is left over"),
    ] {
        let world = World::new();
        let ended = demo(&world, &["--seconds", "0.2", "--plant", plant]).end();
        let result = ended.event("result");
        assert_eq!(
            (ended.code, &result["ok"]),
            (Some(1), &false.into()),
            "{plant}: {ended:?}"
        );
        let failed = |claim: &&Value| claim["holds"] == false;
        let claims: Vec<_> = result["claims"]
            .as_array()
            .unwrap()
            .iter()
            .filter(failed)
            .collect();
        assert!(
            claims.iter().any(|claim| claim["claim"] == named),
            "{plant}: {claims:?}"
        );
        assert!(
            result["failures"].to_string().contains(named),
            "{plant}: {result}"
        );
        assert!(is_cleared(&world), "{plant}: the folder is left");
    }
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
        assert!(
            rustix::process::test_kill_process(pid(process)).is_err(),
            "{process} is left"
        );
    }
    assert!(is_cleared(&world), "the domain is left");
}

/// A demo's output when another process kills one of its processes while it publishes.
fn killed_from_outside(role: &str) -> String {
    let world = World::new();
    let mut running = demo(&world, &["--seconds", "1000"]);
    let started = running.wait_for("started", 3);
    running.wait_for("ready", 1);
    let victim = started
        .iter()
        .find(|process| process["role"] == role)
        .unwrap();
    kill_process(pid(victim), Signal::KILL).unwrap();
    let ended = running.end();
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(is_cleared(&world), "the domain is left");
    ended.event("result")["failures"].to_string()
}

#[test]
fn a_subscriber_that_others_kill_is_named_with_its_reason_and_fails_the_demo() {
    let failures = killed_from_outside("subscriber 2");
    assert!(
        failures.contains("subscriber 2") && failures.contains("SIGKILL"),
        "{failures}"
    );
}

#[test]
fn a_publisher_that_others_kill_is_named_with_its_reason_and_fails_the_demo() {
    let failures = killed_from_outside("publisher");
    assert!(
        failures.contains("publisher") && failures.contains("SIGKILL"),
        "{failures}"
    );
}

#[test]
fn a_killed_demo_leaves_no_process_behind() {
    let world = World::new();
    let mut running = demo(&world, &["--seconds", "1000"]);
    let started = running.wait_for("started", 3);
    running.signal(Signal::KILL);
    for process in &started {
        // Without the process there is no descriptor of it.
        let ended = pidfd(pid(process)).map_or(Ok(true), |fd| wait_readable(fd, PATIENCE));
        assert!(ended.unwrap(), "{process} goes on without its parent");
    }
}
