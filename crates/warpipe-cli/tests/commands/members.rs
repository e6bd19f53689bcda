//! `members`: the list, and the changes that it prints.

use std::process::{Child, Command, Stdio};

use crate::support::World;
use rustix::process::{Pid, Signal, kill_process};
use warpipe::{Domain, Member, MemberOptions};

/// Set for the process that a test starts to be a member.
const DOMAIN: &str = "WARPIPE_TEST_MEMBER_OF";

/// A member in a process of its own: this program once more, which plays `worker`.
struct Worker(Child);

impl Worker {
    fn start(world: &World) -> Worker {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--ignored", "--exact", "members::a_worker_as_others_see_it"])
            .env(DOMAIN, world.path("domain"));
        Worker(
            command
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap(),
        )
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
#[ignore = "the part of the worker, for the other tests to start"]
fn a_worker_as_others_see_it() {
    let domain = Domain::at(std::env::var_os(DOMAIN).expect("started by another test")).unwrap();
    let options = MemberOptions {
        role: "works".into(),
        ..domain.options()
    };
    let _member = Member::new("worker", options).unwrap();
    loop {
        // Until it is killed.
        std::thread::park();
    }
}

#[test]
fn members_are_listed_with_their_role_and_process() {
    let world = World::new();
    let domain = Domain::at(world.path("domain")).unwrap();
    assert!(world.run(&["members"]).out.contains(": 0 members"));
    let _member = Member::new(
        "trainer/0",
        MemberOptions {
            role: "trains".into(),
            ..domain.options()
        },
    )
    .unwrap();
    let listed = world.run(&["members", "--json"]);
    let rows = listed.json();
    assert_eq!((listed.code, rows.len()), (Some(0), 1), "{listed:?}");
    let row = &rows[0];
    assert_eq!(
        (&row["event"], &row["name"]),
        (&"member".into(), &"trainer/0".into()),
        "{row}"
    );
    assert_eq!(
        (&row["role"], &row["pid"]),
        (&"trains".into(), &std::process::id().into()),
        "{row}"
    );
    assert_eq!(
        row["endpoints"],
        serde_json::json!(["members/trainer/0"]),
        "{row}"
    );
    let text = world.run(&["members"]).out;
    for word in [
        "trainer/0",
        "trains",
        &format!("process {}", std::process::id()),
        "silent for",
    ] {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
}

#[test]
fn changes_are_told_as_they_come_until_it_is_interrupted() {
    let world = World::new();
    let domain = Domain::at(world.path("domain")).unwrap();
    let early = Member::new("early", domain.options()).unwrap();
    let mut watch = world.start(&["members", "--follow", "--json"]);
    assert_eq!(watch.wait_for("member", 1)[0]["name"], "early");
    let worker = Worker::start(&world);
    assert_eq!(
        watch.wait_for("joined", 1)[0]["name"],
        "worker",
        "a listed member is not reported again"
    );
    worker.signal(Signal::STOP);
    assert_eq!(watch.wait_for("stalled", 1)[0]["name"], "worker");
    worker.signal(Signal::CONT);
    assert_eq!(watch.wait_for("recovered", 1)[0]["name"], "worker");
    worker.signal(Signal::KILL);
    assert_eq!(watch.wait_for("died", 1)[0]["name"], "worker");
    assert!(
        world.path("domain").join("members+worker.sock").exists(),
        "a listing removes nothing"
    );
    drop(early);
    assert_eq!(watch.wait_for("left", 1)[0]["name"], "early");
    watch.signal(Signal::INT);
    let ended = watch.end();
    assert_eq!(
        (ended.code, ended.err.as_str()),
        (Some(130), ""),
        "{ended:?}"
    );
}
