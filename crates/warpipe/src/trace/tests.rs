//! The events that a program sees, through a subscriber of its own.

#![cfg(feature = "tracing")]

use std::io::{BufRead as _, BufReader};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use super::TraceEvent;
use super::queue::WAITING_MAX;
use crate::ipc::domain::Domain;
use crate::{Device, Publisher, PublisherOptions};

const WAIT: Duration = Duration::from_secs(20);
const ROLE: &str = "WARPIPE_TRACE_ROLE";
const DOMAIN: &str = "WARPIPE_TRACE_DOMAIN";

/// An event as the subscriber got it.
#[derive(Debug, Clone, PartialEq)]
struct Seen {
    name: &'static str,
    fields: Vec<(String, String)>,
}

impl Seen {
    fn field(&self, name: &str) -> Option<&str> {
        let found = self.fields.iter().find(|(field, _)| field == name);
        found.map(|(_, value)| value.as_str())
    }
}

impl Visit for Seen {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.fields.push((field.name().into(), value.into()));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.fields
            .push((field.name().into(), format!("{value:?}")));
    }
}

/// The payload of a panic that panics once more when it is dropped.
struct PanicsAgain;

impl Drop for PanicsAgain {
    fn drop(&mut self) {
        panic!("as the test wants it");
    }
}

/// Sends each event to all receivers. An event of the name `panics` makes it panic twice, and it
/// waits while `blocked` is locked.
struct Collector {
    receivers: Mutex<Vec<Sender<Seen>>>,
    blocked: Mutex<()>,
}

struct Installed(&'static Collector);

impl Subscriber for Installed {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "warpipe"
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        drop(self.0.blocked.lock().unwrap());
        let mut seen = Seen {
            name: event.metadata().name(),
            fields: vec![],
        };
        event.record(&mut seen);
        if seen.field("name") == Some("panics") {
            std::panic::panic_any(PanicsAgain);
        }
        let mut receivers = self.0.receivers.lock().unwrap();
        receivers.retain(|receiver| receiver.send(seen.clone()).is_ok());
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

fn collector() -> &'static Collector {
    static COLLECTOR: OnceLock<&'static Collector> = OnceLock::new();
    COLLECTOR.get_or_init(|| {
        let collector: &Collector = Box::leak(Box::new(Collector {
            receivers: Mutex::default(),
            blocked: Mutex::default(),
        }));
        tracing::subscriber::set_global_default(Installed(collector)).unwrap();
        collector
    })
}

fn listen() -> Receiver<Seen> {
    let (tell, told) = channel();
    collector().receivers.lock().unwrap().push(tell);
    told
}

/// The next event of this name about the endpoint `endpoint`. Tests of one process see each
/// other's.
fn next(seen: &Receiver<Seen>, name: &str, endpoint: &str) -> Seen {
    loop {
        let event = seen.recv_timeout(WAIT).expect(name);
        if event.name == name && event.field("name") == Some(endpoint) {
            return event;
        }
    }
}

struct Folder(Domain);

impl Folder {
    fn new(title: &str) -> Folder {
        let path =
            std::env::temp_dir().join(format!("warpipe-trace-{title}-{}", std::process::id()));
        Folder(Domain::at(path).unwrap())
    }

    fn publisher(&self, name: &str) -> Publisher {
        Publisher::new(name, self.0.on(&Device::host())).unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.0.path());
    }
}

#[test]
fn the_life_of_a_name_and_its_subscriber_is_told_in_order() {
    let (seen, folder) = (listen(), Folder::new("life"));
    let publisher = folder.publisher("told");
    let opened = next(&seen, "endpoint.opened", "told");
    assert_eq!(opened.field("kind"), Some("publisher"), "{opened:?}");
    let subscriber =
        crate::Subscriber::open("told", folder.0.on(&Device::host()), Duration::ZERO).unwrap();
    let attached = next(&seen, "subscriber.attached", "told");
    let pid = std::process::id().to_string();
    assert_eq!(attached.field("pid"), Some(pid.as_str()), "{attached:?}");
    drop(subscriber);
    let left = next(&seen, "subscriber.left", "told");
    assert_eq!(left.field("subscriber"), attached.field("subscriber"));
    drop(publisher);
    next(&seen, "endpoint.closed", "told");
}

/// This test again, in a process that is killed at the end.
struct Child(std::process::Child);

impl Child {
    /// Starts it in a role, and returns once it has written a line.
    fn start(test: &str, role: &str, domain: &Domain) -> Child {
        use std::process::{Command, Stdio};
        let path = format!("trace::tests::{test}");
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &path, "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(DOMAIN, domain.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let started = lines
            .map_while(Result::ok)
            .any(|line| line.contains("ready"));
        assert!(started, "the child has ended");
        Child(child)
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The child's part: it has an endpoint until it is killed.
fn wait_with<T>(endpoint: T) {
    println!("ready");
    let _ = std::io::stdin().read_line(&mut String::new());
    drop(endpoint);
}

#[test]
fn the_deaths_of_a_subscriber_and_of_an_owner_are_told() {
    let here = "the_deaths_of_a_subscriber_and_of_an_owner_are_told";
    let subscriber = |domain: &Domain, name: &str| {
        crate::Subscriber::open(name, domain.on(&Device::host()), Duration::ZERO).unwrap()
    };
    if let Ok(role) = std::env::var(ROLE) {
        let domain = Domain::at(std::env::var_os(DOMAIN).unwrap()).unwrap();
        return match role.as_str() {
            "subscriber" => {
                let mut subscriber = subscriber(&domain, "survivor");
                let stream = Device::host().stream().unwrap();
                let sample = subscriber.receive(&stream, WAIT).unwrap();
                wait_with((sample, subscriber))
            }
            _ => wait_with(Publisher::new("victim", domain.on(&Device::host())).unwrap()),
        };
    }
    let (seen, folder) = (listen(), Folder::new("deaths"));
    let options = PublisherOptions {
        history: 1,
        ..folder.0.on(&Device::host())
    };
    let publisher = Publisher::new("survivor", options).unwrap();
    let stream = Device::host().stream().unwrap();
    publisher.send_bytes(&stream, b"held").unwrap();
    let child = Child::start(here, "subscriber", &folder.0);
    let attached = next(&seen, "subscriber.attached", "survivor");
    let pid = child.pid();
    drop(child);
    let died = next(&seen, "subscriber.died", "survivor");
    for event in [&attached, &died] {
        assert_eq!(event.field("pid"), Some(pid.as_str()), "{event:?}");
    }
    let owner = Child::start(here, "publisher", &folder.0);
    let _orphan = subscriber(&folder.0, "victim");
    let pid = owner.pid();
    drop(owner);
    let died = next(&seen, "owner.died", "victim");
    assert_eq!(died.field("pid"), Some(pid.as_str()), "{died:?}");
}

#[test]
fn a_connection_that_breaks_the_protocol_is_told_with_its_process_and_the_reason() {
    let (seen, folder) = (listen(), Folder::new("refused"));
    let _publisher = folder.publisher("strict");
    assert!(
        crate::AllocationClient::open("strict", folder.0.on(&Device::host()), Duration::ZERO)
            .is_err()
    );
    let refused = next(&seen, "connection.refused", "strict");
    let pid = std::process::id().to_string();
    assert_eq!(refused.field("pid"), Some(pid.as_str()), "{refused:?}");
    assert!(
        refused
            .field("reason")
            .is_some_and(|it| it.contains("publisher")),
        "{refused:?}"
    );
}

#[test]
fn a_subscriber_that_blocks_or_panics_holds_up_no_endpoint() {
    let (seen, folder) = (listen(), Folder::new("blocked"));
    let blocked = collector().blocked.lock().unwrap();
    drop(folder.publisher("panics"));
    let publisher = folder.publisher("goes-on");
    drop(crate::Subscriber::open("goes-on", folder.0.on(&Device::host()), Duration::ZERO).unwrap());
    drop(publisher);
    assert_eq!(
        seen.try_iter()
            .filter(|it| it.field("name") == Some("goes-on"))
            .count(),
        0
    );
    drop(blocked);
    next(&seen, "endpoint.opened", "goes-on");
    next(&seen, "endpoint.closed", "goes-on");
}

#[test]
fn events_beyond_the_queues_limit_are_counted() {
    let seen = listen();
    let blocked = collector().blocked.lock().unwrap();
    // The thread may have taken some, and stands at the first of them.
    for number in 0..3 * WAITING_MAX as u64 {
        super::emit(|| TraceEvent::WeightsOffered("many".into(), number, 0));
    }
    drop(blocked);
    let (mut given, mut dropped) = (0, 0);
    while given + dropped < 3 * WAITING_MAX as u64 {
        let event = seen.recv_timeout(WAIT).unwrap();
        match (event.name, event.field("name")) {
            ("weights.offered", Some("many")) => given += 1,
            ("events.dropped", _) => {
                dropped += event.field("count").unwrap().parse::<u64>().unwrap()
            }
            _ => {}
        }
    }
    assert!(
        given <= 2 * WAITING_MAX as u64 && dropped > 0,
        "{given} given, {dropped} dropped"
    );
}

#[test]
fn the_guide_lists_each_event_with_its_level_and_fields() {
    let guide = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/guide/observe.md");
    let guide = std::fs::read_to_string(guide).unwrap();
    let listed: Vec<&str> = guide
        .lines()
        .filter(|line| {
            ["ERROR", "WARN", "INFO", "DEBUG"]
                .iter()
                .any(|level| line.contains(&format!("| {level} |")))
        })
        .collect();
    assert_eq!(listed.len(), TraceEvent::ALL.len(), "{listed:#?}");
    for (level, name, fields) in TraceEvent::ALL {
        let fields: Vec<String> = fields.iter().map(|field| format!("`{field}`")).collect();
        let row = format!("| `{name}` | {level} | {} |", fields.join(", "));
        assert!(
            listed.iter().any(|line| line.starts_with(&row)),
            "the guide lacks {row}"
        );
    }
}
