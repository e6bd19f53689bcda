//! `warpipe bridge` as two processes on loopback, between two domains.

#[path = "bridge/batches.rs"]
mod batches;
#[path = "bridge/links.rs"]
mod links;
#[path = "bridge/parts.rs"]
mod parts;
#[path = "bridge/queues.rs"]
mod queues;
mod support;

use std::net::TcpListener;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::Value;
use warpipe::{
    DType, Device, Domain, Error, Layout, Memory, PeerState, Policy, Publisher, PublisherOptions,
    Sample, Subscriber, SubscriberInfo, SubscriberOptions,
};

use support::{PATIENCE, Running, World};
use warpipe_testkit::ChildProcess;

/// A wait that no step needs whole: only a hang reaches it.
const LONG: Duration = Duration::from_secs(60);

/// Two domains, and what bridges between them are started with.
struct Pair {
    near: World,
    far: World,
    endpoint: String,
}

impl Pair {
    fn new() -> Pair {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("tcp/{}", free.local_addr().unwrap());
        Pair {
            near: World::new(),
            far: World::new(),
            endpoint,
        }
    }

    fn domains(&self) -> (Domain, Domain) {
        let open = |world: &World| Domain::at(world.path("domain")).unwrap();
        (open(&self.near), open(&self.far))
    }

    fn exporting<'a>(&'a self, more: &[&'a str]) -> Vec<&'a str> {
        let own = [
            "bridge", "--device", "host", "--name", "near", "--export", "**",
        ];
        [&own[..], &["--listen", &self.endpoint], more].concat()
    }

    fn importing<'a>(&'a self, more: &[&'a str]) -> Vec<&'a str> {
        let own = [
            "bridge",
            "--device",
            "host",
            "--name",
            "far",
            "--import",
            "camera/**",
        ];
        [&own[..], &["--connect", &self.endpoint], more].concat()
    }

    fn exporter(&self, more: &[&str]) -> Running {
        self.near.start(&self.exporting(more))
    }

    fn importer(&self, more: &[&str]) -> Running {
        self.far.start(&self.importing(more))
    }
}

fn publisher(domain: &Domain) -> Publisher {
    Publisher::new("camera/front", domain.on(&Device::host())).unwrap()
}

fn subscriber(domain: &Domain) -> Subscriber {
    Subscriber::open(
        "camera/front",
        SubscriberOptions {
            reconnect: true,
            ..domain.on(&Device::host())
        },
        LONG,
    )
    .unwrap()
}

#[test]
fn a_name_of_one_domain_has_the_same_samples_numbers_and_layouts_in_another() {
    let pair = Pair::new();
    let (near, far) = pair.domains();
    let publisher = publisher(&near);
    let _bridges = (pair.exporter(&[]), pair.importer(&[]));
    let mut subscriber = subscriber(&far);
    let stream = Device::host().stream().unwrap();
    let layout = Layout::strided(DType::F32, &[2, 3], &[4, 1], 1).unwrap();
    for number in 1..=100u8 {
        let mut loan = publisher.loan(&layout).unwrap();
        let bytes = vec![number; layout.bytes() as usize];
        loan.write(&stream, &bytes).unwrap();
        loan.set_metadata(&[number]).unwrap();
        assert_eq!(loan.send(&stream).unwrap(), u64::from(number));
        let sample = subscriber.receive(&stream, LONG).unwrap();
        assert_eq!(
            (sample.sequence(), sample.layout()),
            (number.into(), &layout)
        );
        assert_eq!(sample.metadata(), [number]);
        assert_eq!(sample.to_vec(LONG).unwrap(), bytes);
    }
}

#[test]
fn a_tensor_in_place_that_cannot_be_opened_is_missing_and_ends_nothing() {
    let pair = Pair::new();
    let (near, far) = pair.domains();
    let publisher = publisher(&near);
    let _bridges = (pair.exporter(&[]), pair.importer(&[]));
    let mut subscriber = subscriber(&far);
    let local = ["sub", "camera/front", "--device", "host", "--count", "3"];
    let local = pair.near.start(&[&local[..], &["--json"]].concat());
    publisher.wait_for_subscribers(2, LONG).unwrap();
    let (device, layout) = (Device::host(), Layout::bytes_only(4096).unwrap());
    let stream = device.stream().unwrap();
    publisher.send_bytes(&stream, b"first").unwrap();
    assert_eq!(next(&mut subscriber), (1, b"first".to_vec()));
    let memory = Memory::allocate(&device, 4096).unwrap();
    let published = memory.publish("memory", near.options()).unwrap();
    let loan = publisher.loan_in(&published, 0, &layout, memory).unwrap();
    drop(published);
    loan.send(&stream).unwrap();
    publisher.send_bytes(&stream, b"third").unwrap();
    let third = subscriber.receive(&stream, LONG).unwrap();
    assert_eq!(
        (third.sequence(), third.to_vec(LONG).unwrap()),
        (3, b"third".to_vec())
    );
    assert_eq!(third.info().discontinuity.map(|gap| gap.missing), Some(1));
    let done = local.end().event("done");
    assert_eq!((&done["samples"], &done["lost"]), (&2.into(), &1.into()));
}

/// The next sample's number and contents.
fn next(subscriber: &mut Subscriber) -> (u64, Vec<u8>) {
    let stream = Device::host().stream().unwrap();
    let sample = subscriber.receive(&stream, LONG).unwrap();
    (sample.sequence(), sample.to_vec(LONG).unwrap())
}

/// Publishes until a sample reaches the subscriber.
fn publish_until_received(publisher: &Publisher, subscriber: &mut Subscriber) -> u64 {
    publish_until_sample(publisher, subscriber).sequence()
}

/// As [`publish_until_received`], after a sample of this number: the next one counts exactly those
/// that are missing between them. Returns its number, and the count.
fn publish_until_next(
    publisher: &Publisher,
    subscriber: &mut Subscriber,
    before: u64,
) -> (u64, u64) {
    let sample = publish_until_sample(publisher, subscriber);
    let gap = sample.info().discontinuity;
    let missing = gap.map_or(0, |gap| gap.missing);
    assert_eq!(gap.and_then(|gap| gap.previous), None);
    assert_eq!(sample.sequence(), before + 1 + missing, "{gap:?}");
    (sample.sequence(), missing)
}

fn publish_until_sample(publisher: &Publisher, subscriber: &mut Subscriber) -> Sample {
    let stream = Device::host().stream().unwrap();
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        let _ = publisher.send_bytes(&stream, b"again").unwrap();
        match subscriber.receive(&stream, Duration::from_millis(50)) {
            Ok(sample) => return sample,
            Err(Error::Timeout { .. }) => {}
            Err(error) => panic!("{error}"),
        }
    }
    panic!("no sample came");
}

#[test]
fn a_hundred_thousand_small_samples_have_the_exact_sum() {
    let pair = Pair::new();
    let (near, far) = pair.domains();
    let options = PublisherOptions {
        depth: 256,
        policy: Policy::Block { timeout: LONG },
        ..near.on(&Device::host())
    };
    let publisher = Publisher::new("camera/front", options).unwrap();
    let _bridges = (pair.exporter(&[]), pair.importer(&["--depth", "256"]));
    let mut subscriber = subscriber(&far);
    let sender = std::thread::spawn(move || {
        let stream = Device::host().stream().unwrap();
        for number in 1..=100_000u64 {
            publisher
                .send_bytes(&stream, &number.to_le_bytes())
                .unwrap();
        }
        publisher
    });
    let stream = Device::host().stream().unwrap();
    let (mut sum, mut bytes) = (0, [0; 8]);
    for number in 1..=100_000 {
        let sample = subscriber.receive(&stream, LONG).unwrap();
        sample.copy_to(&mut bytes, LONG).unwrap();
        sum += u64::from_le_bytes(bytes);
        assert_eq!(
            (sample.sequence(), u64::from_le_bytes(bytes)),
            (number, number)
        );
    }
    assert_eq!(sum, 5_000_050_000);
    drop(sender.join().unwrap());
}

#[test]
fn a_tensor_of_a_gibibyte_arrives_whole() {
    let pair = Pair::new();
    let (near, far) = pair.domains();
    let publisher = publisher(&near);
    let _bridges = (pair.exporter(&[]), pair.importer(&[]));
    let mut subscriber = subscriber(&far);
    let stream = Device::host().stream().unwrap();
    let bytes: u64 = 1 << 30;
    let mut whole = vec![0; bytes as usize];
    for (number, part) in whole.chunks_mut(4096).enumerate() {
        part.fill(number as u8);
        part[..8].copy_from_slice(&number.to_le_bytes());
    }
    publisher.send_bytes(&stream, &whole).unwrap();
    let sample = subscriber.receive(&stream, LONG).unwrap();
    assert!(sample.to_vec(LONG).unwrap() == whole, "the bytes differ");
}

#[test]
fn a_killed_publisher_is_gone_in_the_other_domain_too_and_the_next_one_is_another_run() {
    let pair = Pair::new();
    let (_, far) = pair.domains();
    let file = pair.near.write("frame.bin", b"frame");
    let arguments = [
        "pub",
        "camera/front",
        file.to_str().unwrap(),
        "--loop",
        "--rate",
        "100",
    ];
    let arguments = [
        &arguments[..],
        &["--device", "host", "--wait-subscribers", "0"],
    ]
    .concat();
    let first = pair.near.start(&arguments);
    let _bridges = (pair.exporter(&[]), pair.importer(&[]));
    let mut once = Subscriber::open("camera/front", far.on(&Device::host()), LONG).unwrap();
    let mut follows = subscriber(&far);
    assert_eq!(
        (next(&mut once).1, next(&mut follows).1),
        (b"frame".to_vec(), b"frame".to_vec())
    );
    // Beside the other one: the importer waits for each of its subscribers.
    let follows = std::thread::spawn(move || {
        let stream = Device::host().stream().unwrap();
        let samples = std::iter::repeat_with(|| follows.receive(&stream, LONG).unwrap());
        let mut gaps = samples.filter_map(|sample| sample.info().discontinuity);
        gaps.find(|gap| gap.previous.is_some()).unwrap()
    });
    first.signal(Signal::KILL);
    first.end();
    let stream = Device::host().stream().unwrap();
    let gone = std::iter::repeat_with(|| once.receive(&stream, LONG)).find_map(Result::err);
    assert!(matches!(gone, Some(Error::PeerGone { .. })), "{gone:?}");
    let _second = pair.near.start(&arguments);
    let gap = follows.join().unwrap();
    assert_eq!(gap.missing, 0, "another publisher's numbers begin anew");
}

#[test]
fn a_killed_exporter_proves_nothing_the_publisher_there_goes_on_and_what_is_missing_is_counted() {
    let pair = Pair::new();
    let (near, far) = pair.domains();
    let publisher = publisher(&near);
    let exporter = pair.exporter(&[]);
    let mut importer = pair.importer(&["--json"]);
    let mut once = Subscriber::open("camera/front", far.on(&Device::host()), LONG).unwrap();
    let before = publish_until_received(&publisher, &mut once);
    exporter.signal(Signal::KILL);
    exporter.end();
    importer.wait_for_line("is unreachable");
    let stream = Device::host().stream().unwrap();
    let unseen = [(); 3].map(|()| publisher.send_bytes(&stream, b"unseen").unwrap());
    let _exporter = pair.exporter(&[]);
    // The same link of the same subscriber: the numbers go on, with a gap. Samples of before the
    // kill may still come.
    let (mut after, mut missing) = (before, 0);
    while after < unseen[2] {
        let (sequence, gap) = publish_until_next(&publisher, &mut once, after);
        (after, missing) = (sequence, missing + gap);
    }
    assert!(missing >= 3, "{before} {after} {missing}");
}

#[test]
fn a_source_that_ended_while_its_bridge_was_down_is_gone_in_the_other_domain_when_it_is_back() {
    let pair = Pair::new();
    let (near, far) = pair.domains();
    let publisher = publisher(&near);
    let exporter = pair.exporter(&[]);
    let mut importer = pair.importer(&["--json"]);
    let mut once = Subscriber::open("camera/front", far.on(&Device::host()), LONG).unwrap();
    publish_until_received(&publisher, &mut once);
    exporter.signal(Signal::KILL);
    exporter.end();
    importer.wait_for_line("is unreachable");
    drop(publisher);
    // Nothing is known of it until its machine can be reached again.
    let stream = Device::host().stream().unwrap();
    loop {
        match once.receive(&stream, Duration::from_millis(50)) {
            Ok(_) => {}
            Err(Error::Timeout { .. }) => break,
            Err(error) => panic!("{error}"),
        }
    }
    let _exporter = pair.exporter(&[]);
    let gone = once.receive(&stream, LONG).map(|sample| sample.sequence());
    assert!(matches!(gone, Err(Error::PeerGone { .. })), "{gone:?}");
}

#[test]
fn an_exporter_that_was_evicted_comes_back_and_the_publisher_there_goes_on() {
    let pair = Pair::new();
    let (near, far) = pair.domains();
    let options = PublisherOptions {
        evict_after: Some(Duration::from_secs(2)),
        ..near.on(&Device::host())
    };
    let publisher = Publisher::new("camera/front", options).unwrap();
    let patient = ["--link-timeout", "600"];
    let (exporter, _importer) = (pair.exporter(&patient), pair.importer(&patient));
    let mut once = Subscriber::open("camera/front", far.on(&Device::host()), LONG).unwrap();
    let before = publish_until_received(&publisher, &mut once);
    exporter.stop();
    // It may have been stopped while it had a sample, which it keeps.
    let has_left = |one: &SubscriberInfo| one.state == PeerState::Leaving;
    let is_evicted = || publisher.subscribers().iter().all(has_left);
    assert!(warpipe_testkit::eventually(PATIENCE, is_evicted));
    exporter.signal(Signal::CONT);
    publish_until_next(&publisher, &mut once, before);
}

#[test]
fn a_killed_importer_comes_back_as_another_run_and_what_is_missing_is_counted() {
    let pair = Pair::new();
    let (near, far) = pair.domains();
    let publisher = Publisher::new(
        "camera/front",
        PublisherOptions {
            history: 8,
            ..near.on(&Device::host())
        },
    )
    .unwrap();
    let _exporter = pair.exporter(&[]);
    let importer = pair.importer(&[]);
    let mut subscriber = subscriber(&far);
    let before = publish_until_received(&publisher, &mut subscriber);
    importer.signal(Signal::KILL);
    importer.end();
    let _importer = pair.importer(&[]);
    follow_to_next_run(&publisher, &mut subscriber, before);
}

#[test]
fn after_both_bridges_were_killed_no_sample_of_the_history_comes_twice() {
    let pair = Pair::new();
    let (near, far) = pair.domains();
    let publisher = Publisher::new(
        "camera/front",
        PublisherOptions {
            history: 16,
            ..near.on(&Device::host())
        },
    )
    .unwrap();
    let start = || [pair.exporter(&[]), pair.importer(&["--history", "16"])];
    let bridges = start();
    let mut subscriber = subscriber(&far);
    let before = publish_until_received(&publisher, &mut subscriber);
    for bridge in bridges {
        bridge.signal(Signal::KILL);
        bridge.end();
    }
    let _bridges = start();
    follow_to_next_run(&publisher, &mut subscriber, before);
}

/// Publishes until a sample of the importer's next run comes. Each number follows the one before, by
/// the count of those that are missing.
fn follow_to_next_run(publisher: &Publisher, subscriber: &mut Subscriber, before: u64) {
    let (mut last, start) = (before, Instant::now());
    while start.elapsed() < PATIENCE {
        let sample = publish_until_sample(publisher, subscriber);
        let gap = sample.info().discontinuity;
        last += 1 + gap.map_or(0, |gap| gap.missing);
        assert_eq!(sample.sequence(), last, "{gap:?}");
        if gap.is_some_and(|gap| gap.previous.is_some()) {
            return;
        }
    }
    panic!("no other run came");
}

#[test]
fn a_late_subscriber_gets_the_history_of_the_other_machine() {
    let pair = Pair::new();
    let (near, far) = pair.domains();
    let publisher = Publisher::new(
        "camera/front",
        PublisherOptions {
            history: 4,
            ..near.on(&Device::host())
        },
    )
    .unwrap();
    let stream = Device::host().stream().unwrap();
    for number in 1..=9u8 {
        publisher.send_bytes(&stream, &[number]).unwrap();
    }
    let _bridges = (pair.exporter(&[]), pair.importer(&["--history", "4"]));
    let mut first = subscriber(&far);
    let samples = [(); 4].map(|()| next(&mut first));
    assert_eq!(
        samples,
        [6, 7, 8, 9].map(|number| (number.into(), vec![number]))
    );
    let mut late = subscriber(&far);
    assert_eq!([(); 4].map(|()| next(&mut late)), samples);
}

#[test]
fn a_link_that_is_silent_is_unreachable_and_no_publisher_there_is_told_of_a_death() {
    let pair = Pair::new();
    let (near, far) = pair.domains();
    let publisher = publisher(&near);
    let exporter = pair.exporter(&["--link-timeout", "1"]);
    let mut importer = pair.importer(&["--link-timeout", "1", "--json"]);
    let mut once = Subscriber::open("camera/front", far.on(&Device::host()), LONG).unwrap();
    let before = publish_until_received(&publisher, &mut once);
    exporter.stop();
    importer.wait_for_line("is unreachable");
    exporter.signal(Signal::CONT);
    publish_until_next(&publisher, &mut once, before);
}

/// The numbers of samples that were sent, and of those that a slow receiver got.
struct Overwhelmed {
    sent: Vec<u64>,
    got: Vec<u64>,
}

/// A receiver that takes nothing until `count` samples were sent, or the publisher was held up. Then
/// it takes all that is on its way, to the last sample that comes.
fn overwhelm(policy: &str, count: usize) -> Overwhelmed {
    let pair = Pair::new();
    let (near, far) = pair.domains();
    // With block the publisher's timeout is what ends the sending.
    let timeout = if policy == "block" {
        Duration::from_secs(2)
    } else {
        LONG
    };
    let options = PublisherOptions {
        policy: Policy::Block { timeout },
        ..near.on(&Device::host())
    };
    let publisher = Publisher::new("camera/front", options).unwrap();
    let _bridges = (
        pair.exporter(&["--policy", policy]),
        pair.importer(&["--depth", "2"]),
    );
    let mut slow = subscriber(&far);
    let stream = Device::host().stream().unwrap();
    let mut sent = Vec::new();
    while sent.len() < count {
        match publisher.send_bytes(&stream, &[0; 4096]) {
            Ok(number) => sent.push(number),
            Err(Error::Timeout { .. }) => break,
            Err(error) => panic!("{error}"),
        }
    }
    let (mut got, start) = (Vec::new(), Instant::now());
    let last = *sent.last().unwrap();
    while start.elapsed() < LONG {
        match slow.receive(&stream, Duration::from_millis(50)) {
            Ok(sample) => {
                let missing = sample.info().discontinuity.map_or(0, |gap| gap.missing);
                let next = got.last().map(|&last: &u64| last + 1 + missing);
                assert_eq!(sample.sequence(), next.unwrap_or(sample.sequence()));
                got.push(sample.sequence());
            }
            // It leaves out the last one itself, so only a later one is behind all that came.
            Err(Error::Timeout { .. }) if policy == "drop-newest" => {
                publisher.send_bytes(&stream, &[1; 4096]).unwrap();
            }
            Err(Error::Timeout { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        if got.last().is_some_and(|&number| number >= last) {
            assert!(got.is_sorted(), "{got:?}");
            got.retain(|&number| number <= last);
            return Overwhelmed { sent, got };
        }
    }
    panic!("the last sample did not come: {got:?}");
}

#[test]
fn with_block_a_slow_receiver_holds_up_the_publisher_and_loses_nothing() {
    const MANY: usize = 100_000;
    let Overwhelmed { sent, got } = overwhelm("block", MANY);
    assert!(sent.len() < MANY, "the publisher was held up");
    assert_eq!(got, sent);
}

#[test]
fn with_drop_oldest_a_slow_receiver_loses_samples_and_gets_the_last_one() {
    let Overwhelmed { got, .. } = overwhelm("drop-oldest", 3000);
    assert!(got.len() < 3000 && got.last() == Some(&3000), "{got:?}");
}

#[test]
fn with_drop_newest_a_slow_receiver_loses_the_last_samples() {
    let Overwhelmed { got, .. } = overwhelm("drop-newest", 3000);
    assert!(
        got.first() == Some(&1) && got.last() < Some(&3000),
        "{got:?}"
    );
}

#[test]
fn with_fail_a_slow_receiver_loses_its_publisher_and_the_source_goes_on() {
    let pair = Pair::new();
    let (near, far) = pair.domains();
    let publisher = Publisher::new(
        "camera/front",
        PublisherOptions {
            policy: Policy::Block { timeout: LONG },
            ..near.on(&Device::host())
        },
    )
    .unwrap();
    let mut exporter = pair.exporter(&["--policy", "fail", "--json"]);
    let _importer = pair.importer(&["--depth", "2"]);
    let mut slow = Subscriber::open("camera/front", far.on(&Device::host()), LONG).unwrap();
    let stream = Device::host().stream().unwrap();
    for _ in 0..3000 {
        publisher.send_bytes(&stream, &[0; 4096]).unwrap();
    }
    exporter.wait_for_line("samples wait for room at the importer");
    let gone = std::iter::repeat_with(|| slow.receive(&stream, LONG)).find_map(Result::err);
    assert!(matches!(gone, Some(Error::PeerGone { .. })), "{gone:?}");
}

/// The number of kills: 20, or as many as the environment says.
fn kills() -> u64 {
    let set = std::env::var("WARPIPE_TEST_KILLS").ok();
    set.map_or(20, |kills| {
        kills.parse().expect("WARPIPE_TEST_KILLS is a number")
    })
}

#[test]
fn whichever_process_is_killed_nothing_comes_twice_and_samples_come_again() {
    let pair = Pair::new();
    let (_, far) = pair.domains();
    let file = pair.near.write("frame.bin", b"frame");
    let publish = [
        "pub",
        "camera/front",
        file.to_str().unwrap(),
        "--loop",
        "--rate",
        "500",
    ];
    let publish = [
        &publish[..],
        &["--device", "host", "--wait-subscribers", "0"],
    ]
    .concat();
    let listen = ["sub", "camera/front", "--device", "host", "--reconnect"];
    let mut rng = warpipe_testkit::Rng::new();
    let seed = rng.u64(..);
    rng.seed(seed);
    println!("seed {seed}");
    let start = |index: usize| {
        let mut command = match index {
            0 => pair.near.warpipe(&publish),
            1 => pair.near.warpipe(&pair.exporting(&[])),
            2 => pair.far.warpipe(&pair.importing(&[])),
            _ => pair.far.warpipe(&listen),
        };
        // Nothing reads what they say: a full pipe would stop them.
        let command = command.stdin(Stdio::null()).stdout(Stdio::null());
        ChildProcess::start(command.stderr(Stdio::null())).unwrap()
    };
    let mut processes = [0, 1, 2, 3].map(start);
    let mut subscriber = subscriber(&far);
    let stream = Device::host().stream().unwrap();
    let mut last = next(&mut subscriber).0;
    // How many runs of the publisher may still begin anew.
    let mut begun = 0;
    for kill in 0..kills() {
        let victim = rng.usize(..4);
        begun += u32::from(victim == 0);
        processes[victim].signal(Signal::KILL).unwrap();
        // Its name is free once the process is reaped.
        processes[victim].wait(PATIENCE).unwrap();
        processes[victim] = start(victim);
        // Samples that were published before the kill may still come: some more than those.
        let mut due = rng.usize(20..60);
        while due > 0 {
            let sample = subscriber.receive(&stream, LONG);
            let sample = sample.unwrap_or_else(|error| panic!("kill {kill} of {victim}: {error}"));
            assert_eq!(sample.to_vec(LONG).unwrap(), b"frame");
            let (sequence, gap) = (sample.sequence(), sample.info().discontinuity);
            let missing = gap.map_or(0, |gap| gap.missing);
            if sequence != last + 1 + missing {
                // Only a run of the publisher begins anew; a bridge's run goes on with its numbers.
                let is_another = gap.is_some_and(|gap| gap.previous.is_some());
                assert!(is_another && begun > 0, "{last} {sequence} {gap:?}");
                assert_eq!(missing, 0, "{last} {sequence}");
                begun -= 1;
            }
            last = sequence;
            due -= 1;
        }
    }
}

#[test]
fn bytes_that_are_no_zenoh_end_their_own_connection_alone() {
    use std::io::Write;
    let pair = Pair::new();
    let (near, far) = pair.domains();
    let publisher = publisher(&near);
    let _bridges = (pair.exporter(&[]), pair.importer(&[]));
    let mut subscriber = subscriber(&far);
    let mut last = publish_until_received(&publisher, &mut subscriber);
    let mut rng = warpipe_testkit::Rng::with_seed(7);
    for length in [0, 1, 2, 3, 100, 70_000] {
        let address = pair.endpoint.trim_start_matches("tcp/");
        let mut peer = std::net::TcpStream::connect(address).unwrap();
        let garbage: Vec<u8> = (0..length).map(|_| rng.u8(..)).collect();
        let _ = peer.write_all(&garbage);
        let number = publish_until_received(&publisher, &mut subscriber);
        assert_eq!(number, last + 1, "no sample was lost");
        last = number;
    }
}

#[test]
fn a_name_that_is_taken_is_published_under_its_machine() {
    let pair = Pair::new();
    let (near, far) = pair.domains();
    let [source, _taken] = [&near, &far].map(publisher);
    let _bridges = (pair.exporter(&[]), pair.importer(&[]));
    let mut subscriber =
        Subscriber::open("remote/near/camera/front", far.on(&Device::host()), LONG).unwrap();
    publish_until_received(&source, &mut subscriber);
    let row = listed(&pair.far, |row| row["tensors"].as_u64() > Some(0));
    assert_eq!(row["name"], "remote/near/camera/front");
}

/// The row of `ls --json` about the name at one end, once it says what is wanted.
fn listed(world: &World, wanted: impl Fn(&Value) -> bool) -> Value {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        let rows = world.run(&["ls", "--json"]).json();
        let mut remote = rows.into_iter().filter(|row| row["bridge"].is_string());
        if let Some(row) = remote.find(&wanted) {
            return row;
        }
    }
    panic!("ls did not show it");
}

#[test]
fn ls_shows_at_both_ends_which_names_are_remote_from_where_and_whether_they_can_be_reached() {
    let pair = Pair::new();
    let (near, far) = pair.domains();
    let publisher = publisher(&near);
    let exporter = pair.exporter(&[]);
    let _importer = pair.importer(&["--link-timeout", "1"]);
    publish_until_received(&publisher, &mut subscriber(&far));
    let row = listed(&pair.near, |row| row["tensors"].as_u64() > Some(0));
    assert_eq!(
        (&row["name"], &row["node"], &row["direction"]),
        (&"camera/front".into(), &"far".into(), &"to".into())
    );
    let row = listed(&pair.far, |row| row["reachable"] == true);
    assert_eq!(
        (&row["node"], &row["direction"]),
        (&"near".into(), &"from".into())
    );
    assert!(
        row["credit"].as_u64() > Some(0) && row["rate"].is_number(),
        "{row}"
    );
    let text = pair.far.run(&["ls"]).out;
    assert!(text.contains("camera/front from near  reachable"), "{text}");
    exporter.signal(Signal::KILL);
    exporter.end();
    let row = listed(&pair.far, |row| row["reachable"] == false);
    assert_eq!(row["name"], "camera/front");
}

#[test]
fn plain_text_off_loopback_is_refused_with_the_next_step() {
    let world = World::new();
    let ended = world.run(&["bridge", "--listen", "tcp/0.0.0.0:7447", "--export", "**"]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.err.contains("--insecure"), "{ended:?}");
}
