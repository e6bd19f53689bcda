//! `top`, `ls -v` and `metrics`, over processes that publish, stop and die.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::support::pty::OnTerminal;
use crate::support::{Ended, Running, World};
use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};
use serde_json::Value;
use warpipe::{Device, Domain, Pool, Publisher, Subscriber};
use warpipe_testkit::{ChildProcess, eventually};

/// A look of `top --once --json`.
fn once(world: &World) -> Value {
    // Read while it runs: the object of 1,000 endpoints is longer than a pipe.
    let mut command = world.warpipe(&["top", "--once", "--json", "--interval", "0.1"]);
    let ended = command.output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
    serde_json::from_slice(&ended.stdout).unwrap()
}

/// The endpoint of that name, once it is as wanted.
fn endpoint_when(world: &World, name: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    let mut last = Value::Null;
    let found = eventually(crate::support::PATIENCE, || {
        let look = once(world);
        let endpoints = look["endpoints"].as_array().unwrap();
        last = endpoints
            .iter()
            .find(|it| it["name"] == name)
            .cloned()
            .unwrap_or(look);
        is_so(&last)
    });
    assert!(found, "{name} stays so: {last:#}");
    last
}

/// A process that publishes a file again and again, and one that receives it.
fn pair(world: &World, name: &str) -> (ChildProcess, ChildProcess) {
    let file = world.write("a.bin", &[7; 10_000]);
    let (file, device) = (file.to_str().unwrap(), crate::support::device());
    let start = |arguments: &[&str]| {
        let mut command = world.warpipe(arguments);
        // Nobody reads what they say.
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        ChildProcess::start(&mut command).unwrap()
    };
    let publisher = start(&[
        "pub", name, file, "--loop", "--rate", "200", "--device", &device,
    ]);
    endpoint_when(world, name, |it| it["state"] == "live");
    let subscriber = start(&["sub", name, "--device", &device]);
    endpoint_when(world, name, |it| {
        it["timed"].as_u64().is_some_and(|timed| timed >= 3)
    });
    (publisher, subscriber)
}

fn pid(child: &ChildProcess) -> i32 {
    child.pid().as_raw_nonzero().get()
}

#[test]
fn a_look_says_rate_lag_latency_and_which_process_shares_the_memory() {
    let world = World::new();
    let (publisher, subscriber) = pair(&world, "camera/front");
    let seen = endpoint_when(&world, "camera/front", |it| {
        it["rate"]["items_per_second"]
            .as_f64()
            .is_some_and(|rate| rate > 0.0)
            && it["rate"]["latency_ns"].is_u64()
    });
    assert_eq!(
        (&seen["pid"], &seen["kind"]),
        (&pid(&publisher).into(), &"publisher".into())
    );
    assert_eq!(seen["subscribers"][0]["pid"], pid(&subscriber));
    let items = seen["items"].as_u64().unwrap();
    assert_eq!(seen["bytes"], items * 10_000);
    let look = once(&world);
    let shared = look["memory"]
        .as_array()
        .unwrap()
        .iter()
        .find(|it| it["owner"] == pid(&publisher));
    let shared = shared.unwrap_or_else(|| panic!("{look:#}"));
    assert_eq!(shared["borrowers"], Value::from(vec![pid(&subscriber)]));
    assert_eq!(shared["endpoint"], "camera/front");
    let text = world.run(&["ls", "-v"]);
    let holder = format!("shared by 1 (process {})", pid(&subscriber));
    assert!(text.out.contains(&holder), "{text:?}");
}

#[test]
fn processes_of_other_domains_stand_under_a_heading_of_their_own() {
    let (world, elsewhere) = (World::new(), World::new());
    let (publisher, _subscriber) = pair(&world, "camera/here");
    let (other, _other_subscriber) = pair(&elsewhere, "camera/elsewhere");
    let text = world.run(&["ls", "-v"]).out;
    let place = |word: &str| text.find(word).unwrap_or_else(|| panic!("{word}: {text}"));
    let [here, others] = ["in this domain:", "in other domains"].map(place);
    let [ours, theirs] = [&publisher, &other].map(|it| place(&format!(" {}  warpipe ", pid(it))));
    assert!(here < ours && ours < others && others < theirs, "{text}");
}

#[test]
fn a_backlog_without_workers_is_seen_wherever_one_looks() {
    let world = World::new();
    let domain = Domain::at(world.path("domain")).unwrap();
    let device = Device::host();
    let queue = warpipe::Queue::new("jobs", domain.on(&device)).unwrap();
    let stream = device.stream().unwrap();
    let jobs = [(); 3].map(|()| queue.submit_bytes(b"input", &stream).unwrap());
    let seen = endpoint_when(&world, "jobs", |it| it["waiting"] == 3);
    assert_eq!(seen["peers"], 0);
    let said = "3 jobs wait, and no worker is attached";
    for arguments in [
        &["ls", "-v"][..],
        &["top", "--once", "--interval", "0.1"],
        &["doctor"],
    ] {
        let text = world.run(arguments).out;
        assert!(text.contains(said), "{arguments:?} {text}");
    }
    let mut server = world.start(&["metrics", "--listen", "127.0.0.1:0"]);
    let said = server.wait_for_line("http://");
    let address = said.trim().trim_start_matches("http://");
    let address = address.trim_end_matches("/metrics");
    let answer = ask(address, b"GET /metrics HTTP/1.1\r\n\r\n");
    let counted = "warpipe_endpoint_waiting{name=\"jobs\",kind=\"queue\"} 3\n";
    assert!(answer.contains(counted), "{answer}");
    // The wait for a result knows, too. One that does not wait gives no reason.
    let moment = std::time::Duration::from_millis(1);
    let late = jobs[0].wait(&stream, moment).unwrap_err().to_string();
    assert!(
        late.contains("attached workers: 0, jobs that wait: 3"),
        "{late}"
    );
    let late = queue.wait_for_workers(2, moment).unwrap_err().to_string();
    assert!(
        late.contains("2 workers of \"jobs\" (0 attached)"),
        "{late}"
    );
}

#[test]
fn a_pool_is_shown_with_the_memory_that_it_shares_and_without_rates() {
    const BLOCK: u64 = 1 << 20;
    let world = World::new();
    let domain = Domain::at(world.path("domain")).unwrap();
    let pool = Pool::new("scratch", domain.on(&Device::host())).unwrap();
    let block = pool.allocate(BLOCK, Duration::ZERO).unwrap();
    let seen = endpoint_when(&world, "scratch", |it| it["kind"] == "pool");
    assert!(seen["memory"].as_u64() >= Some(BLOCK), "{seen:#}");
    let text = world.run(&["top", "--once", "--interval", "0.1"]).out;
    let line = text.lines().find(|line| line.contains("scratch")).unwrap();
    assert!(line.contains("memory ") && !line.contains("/s"), "{line}");
    drop(block);
}

#[test]
fn a_stopped_publisher_and_a_stopped_subscriber_are_seen_with_their_counts() {
    let world = World::new();
    let (publisher, subscriber) = pair(&world, "camera/stopped");
    subscriber.stop().unwrap();
    let seen = endpoint_when(&world, "camera/stopped", |it| {
        it["subscribers"][0]["state"] == "stalled"
    });
    assert_eq!(seen["state"], "live");
    publisher.stop().unwrap();
    let seen = endpoint_when(&world, "camera/stopped", |it| it["state"] == "stopped");
    assert!(seen["items"].as_u64().unwrap() >= 3, "{seen:#}");
    assert_eq!(seen["subscribers"][0]["pid"], pid(&subscriber));
    publisher.signal(Signal::KILL).unwrap();
    endpoint_when(&world, "camera/stopped", |it| it["state"] == "stale");
    // The memory lives on in the subscriber alone.
    let look = once(&world);
    let kept = look["memory"]
        .as_array()
        .unwrap()
        .iter()
        .find(|it| it["borrowers"] == Value::from(vec![pid(&subscriber)]));
    assert_eq!(
        kept.unwrap_or_else(|| panic!("{look:#}"))["owner"],
        Value::Null
    );
    let text = world.run(&["ls", "-v"]).out;
    assert!(
        text.contains("no owner: its importers alone keep it"),
        "{text}"
    );
}

#[test]
fn a_screen_follows_keys_and_sizes_and_a_domain_that_vanishes() {
    let world = World::new();
    let (_publisher, _subscriber) = pair(&world, "camera/screen");
    let command = world.warpipe(&["top", "--interval", "0.1"]);
    let mut top = OnTerminal::start(command, 130, 24);
    top.until(|lines| {
        lines
            .iter()
            .any(|line| line.contains("camera/screen") && line.contains("live"))
    });
    top.until(|lines| lines.iter().any(|line| line.contains("lag")));
    top.press("2");
    top.until(|lines| lines[2].starts_with("COMMAND"));
    top.press("\t");
    top.until(|lines| lines[2].starts_with("ENDPOINT"));
    top.press("1/nothing");
    top.until(|lines| lines[23].starts_with("filter: nothing_") && !lines[3].contains("camera"));
    top.press("\x1b");
    top.until(|lines| lines[3].starts_with("camera/screen"));
    for (columns, rows) in [(40, 6), (5, 2), (200, 50)] {
        top.resize(columns, rows);
        let is_drawn =
            |lines: &[String]| lines[0].starts_with(&world.path("domain").to_str().unwrap()[..4]);
        top.until(is_drawn);
    }
    std::fs::remove_dir_all(world.path("domain")).unwrap();
    top.until(|lines| {
        lines[1].contains("there is no directory") && !lines[3].contains("camera/screen")
    });
    // Another domain at the same place.
    let domain = Domain::at(world.path("domain")).unwrap();
    let _publisher = Publisher::new("camera/again", domain.on(&Device::host())).unwrap();
    top.until(|lines| lines[3].starts_with("camera/again") && !lines[1].contains("there is no"));
    top.press("q");
    let (status, is_restored, lines) = top.end();
    assert!(status.success() && is_restored, "{status} {lines:#?}");
}

#[test]
fn the_terminal_is_restored_however_the_command_ends() {
    let world = World::new();
    for (end, code) in [
        ("\x03", 0),
        ("INT", 130),
        ("TERM", 130),
        ("HUP", 130),
        ("QUIT", 130),
    ] {
        let mut top = OnTerminal::start(world.warpipe(&["top"]), 80, 24);
        top.until(|lines| lines[23].contains("q quit"));
        match end {
            "INT" => top.signal(Signal::INT),
            "TERM" => top.signal(Signal::TERM),
            "HUP" => top.signal(Signal::HUP),
            "QUIT" => top.signal(Signal::QUIT),
            keys => top.press(keys),
        }
        let (status, is_restored, lines) = top.end();
        assert_eq!(status.code(), Some(code), "{end:?} {lines:#?}");
        assert!(is_restored, "{end:?} {lines:#?}");
    }
    let top = OnTerminal::start(world.warpipe(&["top", "--plant-panic"]), 80, 24);
    let (status, is_restored, lines) = top.end();
    assert!(!status.success() && is_restored, "{status} {lines:#?}");
    assert!(lines.join(" ").contains("planted"), "{lines:#?}");
}

#[test]
fn a_stop_gives_the_terminal_back_and_a_continuation_draws_the_whole_screen() {
    let world = World::new();
    let mut top = OnTerminal::start(world.warpipe(&["top"]), 80, 24);
    for stop in ["\x1a", "TSTP", "STOP"] {
        top.until(|lines| lines[23].contains("q quit"));
        match stop {
            "TSTP" => top.signal(Signal::TSTP),
            "STOP" => top.signal(Signal::STOP),
            key => top.press(key),
        }
        // SIGSTOP leaves the program no time.
        assert!(top.until_stopped() || stop == "STOP", "{stop:?}");
        top.set_modes_of_a_shell();
        top.wipe();
        top.signal(Signal::CONT);
        top.until(|lines| lines[2].starts_with("NAME") && lines[23].contains("q quit"));
    }
    // Raw again: a key needs no Enter.
    top.press("q");
    let (status, is_restored, lines) = top.end();
    assert!(status.success() && is_restored, "{status} {lines:#?}");
}

/// A container's first program belongs to a session from outside, which has no number inside.
#[test]
fn stops_and_continuations_work_where_the_session_is_outside_the_pid_namespace() {
    let unshare = || {
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount-proc"]);
        command.args(["--pid", "--fork", "--kill-child"]);
        command
    };
    let probe = unshare().arg("true").stderr(Stdio::null()).status();
    if !probe.is_ok_and(|status| status.success()) {
        return println!("declared skip: this user may make no namespaces");
    }
    let mut inside = unshare();
    inside.arg(std::env::current_exe().unwrap());
    inside.args(["--exact", STOPS]);
    let ran = inside.output().unwrap();
    let said = String::from_utf8_lossy(&ran.stdout);
    assert!(ran.status.success() && said.contains("1 passed"), "{said}");
}

/// The name of the test above.
const STOPS: &str =
    "observe::a_stop_gives_the_terminal_back_and_a_continuation_draws_the_whole_screen";

#[test]
fn a_thousand_endpoints_of_a_process_are_listed_and_scrolled() {
    let world = World::new();
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    setrlimit(Resource::Nofile, raised).unwrap();
    let domain = Domain::at(world.path("domain")).unwrap();
    let device = Device::host();
    let publish = |number: usize| {
        let name = format!("many/{number:04}");
        Publisher::new(&name, domain.on(&device)).unwrap()
    };
    let publishers: Vec<Publisher> = (0..1000).map(publish).collect();
    let look = once(&world);
    let endpoints = look["endpoints"].as_array().unwrap();
    let observed = endpoints
        .iter()
        .filter(|it| it["kind"] == "publisher")
        .count();
    assert_eq!((endpoints.len(), observed), (1000, 1000));
    let mut top = OnTerminal::start(world.warpipe(&["top", "--interval", "0.1"]), 100, 30);
    top.until(|lines| lines[3].starts_with("many/0000") && lines[0].contains("1,000 endpoints"));
    top.press("\x1b[F");
    top.until(|lines| lines[28].starts_with("many/0999"));
    top.press("r\x1b[H");
    top.until(|lines| lines[3].starts_with("many/0999"));
    drop(publishers);
    top.until(|lines| lines[0].contains(" 0 endpoints"));
    top.press("q");
    assert!(top.end().1);
}

/// Sends bytes to the server, and returns its answer.
fn ask(address: &str, request: &[u8]) -> String {
    try_ask(address, request).unwrap()
}

fn try_ask(address: &str, request: &[u8]) -> std::io::Result<String> {
    let mut client = TcpStream::connect(address)?;
    client.write_all(request)?;
    let mut answer = String::new();
    // Each silent client may hold up a server that answers one at a time for 2 s.
    client.set_read_timeout(Some(crate::support::PATIENCE))?;
    client.read_to_string(&mut answer)?;
    Ok(answer)
}

#[test]
fn metrics_are_served_beside_many_silent_clients() {
    let world = World::new();
    let domain = Domain::at(world.path("domain")).unwrap();
    let device = Device::host();
    let publisher = Publisher::new("camera/metrics", domain.on(&device)).unwrap();
    let _subscriber =
        Subscriber::open("camera/metrics", domain.on(&device), Duration::ZERO).unwrap();
    publisher
        .send_bytes(&device.stream().unwrap(), &[1; 100])
        .unwrap();
    let mut server = world.start(&["metrics", "--listen", "127.0.0.1:0"]);
    let said = server.wait_for_line("http://");
    let address = said
        .trim()
        .trim_start_matches("http://")
        .trim_end_matches("/metrics");
    // They say nothing, and keep their connections: the next one is answered beside them.
    let silent = (0..200).map(|_| TcpStream::connect(address).unwrap());
    let _silent: Vec<TcpStream> = silent.collect();
    let answer = ask(address, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
    let counted = "warpipe_endpoint_bytes_total{name=\"camera/metrics\",kind=\"publisher\"} 100\n";
    assert!(answer.contains(counted), "{answer}");
    assert!(ask(address, b"\x1b[2J\r\n\r\n").starts_with("HTTP/1.1 400 "));
    server.signal(Signal::TERM);
    assert_eq!(server.end().code, Some(130));
}

#[test]
fn a_metrics_server_without_free_descriptors_answers_when_it_has_some() {
    let world = World::new();
    let mut command = Command::new("sh");
    let line = "ulimit -n 32 && exec \"$0\" metrics --listen 127.0.0.1:0";
    command.args(["-c", line, env!("CARGO_BIN_EXE_warpipe")]);
    command.env("WARPIPE_DOMAIN", world.path("domain"));
    let mut server = Running::start(command);
    let said = server.wait_for_line("http://");
    let address = said.trim().trim_start_matches("http://");
    let address = address.trim_end_matches("/metrics");
    let silent = (0..100).map(|_| TcpStream::connect(address).unwrap());
    let silent: Vec<TcpStream> = silent.collect();
    drop(silent);
    let answered = eventually(crate::support::PATIENCE, || {
        // Reset while there is none.
        try_ask(address, b"GET /metrics HTTP/1.1\r\n\r\n")
            .is_ok_and(|answer| answer.starts_with("HTTP/1.1 200 OK\r\n"))
    });
    assert!(answered);
    assert!(!world.path("domain").exists(), "a look makes no directory");
    server.signal(Signal::TERM);
    assert_eq!(server.end().code, Some(130));
}

#[test]
fn a_metrics_server_answers_also_if_nobody_reads_its_address() {
    let world = World::new();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = free.local_addr().unwrap().to_string();
    drop(free);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = world.warpipe(&["metrics", "--listen", &address]);
    command.stdin(Stdio::null()).stdout(writer);
    let mut server = ChildProcess::start(&mut command).unwrap();
    let end = server.pidfd().unwrap();
    let has_ended = || warpipe_testkit::wait_readable(&end, std::time::Duration::ZERO).unwrap();
    let is_answered = || {
        try_ask(&address, b"GET /metrics HTTP/1.1\r\n\r\n")
            .is_ok_and(|answer| answer.starts_with("HTTP/1.1 200 OK\r\n"))
    };
    assert!(eventually(crate::support::PATIENCE, || is_answered() || has_ended()));
    assert!(is_answered(), "it has ended");
    server.signal(Signal::TERM).unwrap();
    let status = server.wait(crate::support::PATIENCE).unwrap();
    assert_eq!(status.code(), Some(130));
}

#[test]
fn wrong_uses_are_refused_with_the_next_step() {
    let world = World::new();
    let refused = |ended: &Ended, word: &str| {
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert!(ended.err.contains(word), "{ended:?}");
    };
    refused(
        &world.run(&["metrics", "--listen", "0.0.0.0:0"]),
        "--any-address",
    );
    refused(
        &world.run(&["metrics", "--listen", "localhost:9464"]),
        "127.0.0.1:9464",
    );
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let ended = world.run(&["metrics", "--listen", &address]);
    assert_eq!(ended.code, Some(7), "{ended:?}");
    assert!(ended.err.contains("next: choose another port"), "{ended:?}");
    refused(&world.run(&["top"]), "warpipe top --once");
    refused(&world.run(&["top", "--json"]), "--once");
    let missing = world.path("missing");
    let elsewhere = ["top", "--once", "--domain", missing.to_str().unwrap()];
    refused(&world.run(&elsewhere), "cannot be a domain");
    assert!(!missing.exists(), "a look makes no directory");
    refused(&world.run(&["top", "--interval", "0"]), "0.1 to 3600");
}
