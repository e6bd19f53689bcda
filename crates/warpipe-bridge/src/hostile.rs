//! Peers that break the protocol, and a peer beside them that keeps it.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use warpipe::{DType, Device, Domain, Layout, Publisher, Subscriber, Worker, new_generation};
use warpipe_testkit::{refuse_calls, this_program};
use zenoh::Wait;
use zenoh::bytes::ZBytes;
use zenoh::sample::Sample;
use zenoh::{Config, Session};

use crate::lane::tests::window;
use crate::lane::{Assembly, Ending, LaneReceiver, LaneSender, WINDOW_MAX};
use crate::message::{End, Hello, Id, Message, Part, Purpose, Tag, Tensor, hex};
use crate::session::{self, Events, Outbox, Presence};
use crate::{Bridge, Notice, Options};

/// A wait that no step needs whole: only a hang reaches it.
const LONG: Duration = Duration::from_secs(300);

/// Sends on a lane that has begun.
type Attack = fn(&Peer, Id);

enum Seen {
    Bridge(Id),
    Found(Id),
    Message(Message),
}

struct Recorder(Sender<Seen>);

impl Events for Recorder {
    fn presence(&self, bridge: Id, is_present: bool) {
        if is_present {
            let _ = self.0.send(Seen::Bridge(bridge));
        }
    }

    fn found(&self, bridge: Id) {
        let _ = self.0.send(Seen::Found(bridge));
    }

    fn received(&self, sample: &Sample) {
        let attachment = sample.attachment().expect("a bridge sends an attachment");
        let (_, message) = Message::decode(&attachment.to_bytes()).expect("a bridge's message");
        let _ = self.0.send(Seen::Message(message));
    }
}

/// A way to the bridge on which nothing comes back any more once `is_deaf` is set: the connection
/// stays, and what the bridge sends stays in its buffers. Returns its endpoint.
fn one_way(endpoint: &str, is_deaf: Arc<AtomicBool>) -> String {
    let bridge = endpoint.trim_start_matches("tcp/").to_owned();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let way = format!("tcp/{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        let (peer, _) = listener.accept().unwrap();
        let bridge = TcpStream::connect(bridge).unwrap();
        let (mut from_bridge, mut to_peer) =
            (bridge.try_clone().unwrap(), peer.try_clone().unwrap());
        std::thread::spawn(move || {
            let mut buffer = [0; 4096];
            while !is_deaf.load(Ordering::Acquire)
                && let Ok(count @ 1..) = from_bridge.read(&mut buffer)
                && to_peer.write_all(&buffer[..count]).is_ok()
            {}
        });
        let (mut peer, mut bridge) = (peer, bridge);
        let _ = std::io::copy(&mut peer, &mut bridge);
    });
    way
}

/// A peer; the test writes its messages itself.
struct Peer {
    presence: Presence,
    bridge: Id,
    outbox: Outbox,
    seen: Receiver<Seen>,
    hello: Hello,
}

impl Peer {
    fn connect(domain: &Domain, endpoint: &str, home: u64) -> Peer {
        let mut options = Options::new(domain, &Device::host());
        options.connect.push(endpoint.into());
        options.link_timeout = Duration::from_secs(600);
        let session = session::open(&options).unwrap();
        let me = session::id(&session);
        let (sender, seen) = channel();
        let presence = Presence::new(session, me, Arc::new(Recorder(sender))).unwrap();
        let bridge = loop {
            match seen.recv_timeout(LONG).unwrap() {
                Seen::Bridge(bridge) if bridge != me => break bridge,
                _ => {}
            }
        };
        let hello = Hello {
            node: format!("peer-{home}"),
            home,
            imports: vec!["camera/**".into()],
            queues: vec!["jobs".into()],
            has_yours: true,
        };
        let outbox = presence.outbox(me, &bridge).unwrap();
        let peer = Peer {
            presence,
            bridge,
            outbox,
            seen,
            hello,
        };
        peer.wait(|message| matches!(message, Message::Hello(_)).then_some(()));
        peer.send(Message::Hello(peer.hello.clone()));
        peer
    }

    fn send(&self, message: Message) {
        self.send_with(message, 0);
    }

    fn send_with(&self, message: Message, payload: usize) {
        self.outbox.send(&message, vec![0; payload]).unwrap();
    }

    fn wait<T>(&self, mut wanted: impl FnMut(Message) -> Option<T>) -> T {
        let start = Instant::now();
        while start.elapsed() < LONG {
            if let Seen::Message(message) = self.seen.recv_timeout(LONG).unwrap()
                && let Some(found) = wanted(message)
            {
                return found;
            }
        }
        panic!("the message did not come");
    }

    fn begin(&self, lane: Id, name: &str) {
        let (name, generation) = (name.into(), [7; 16]);
        let purpose = Purpose::Samples { name, generation };
        self.send(Message::Begin { lane, purpose });
    }

    /// Begins a lane and waits until it is taken.
    fn begun(&self, name: &str) -> Id {
        let lane = new_generation();
        self.begin(lane, name);
        self.wait(|message| match message {
            Message::Ready { lane: of, .. } if of == lane => Some(()),
            Message::Stop { lane: of, reason } if of == lane => panic!("{name}: {reason}"),
            _ => None,
        });
        lane
    }

    /// Waits until the bridge has taken all that was sent before.
    fn is_served(&self) {
        let lane = new_generation();
        self.begin(lane, "other");
        self.stopped(lane);
    }

    /// The reason for which the bridge stops a lane.
    fn stopped(&self, lane: Id) -> String {
        self.wait(|message| match message {
            Message::Stop { lane: of, reason } if of == lane => Some(reason),
            _ => None,
        })
    }

    /// Sends the next sample of a lane, in one part.
    fn sample(&self, lane: Id, number: u64, sequence: u64, claimed: u64, payload: usize) {
        let layout = Layout::contiguous(DType::U8, &[claimed]).unwrap();
        let tensor = Some(Tensor::new(Tag::Sample { sequence }, &layout, b""));
        let part = Part {
            lane,
            number,
            offset: 0,
            tensor,
            more: Vec::new(),
        };
        self.send_with(Message::Part(part), payload);
    }
}

impl Peer {
    /// Sends a sample of 8 bytes that claims to have these parts.
    fn parts(&self, lane: Id, parts: &[(&str, u64)]) {
        let layout = Layout::contiguous(DType::U8, &[8]).unwrap();
        let tensor = Tensor::new(Tag::Sample { sequence: 1 }, &layout, b"");
        let part = Part {
            lane,
            number: 1,
            offset: 0,
            tensor: Some(tensor.claiming_several(parts)),
            more: Vec::new(),
        };
        self.send_with(Message::Part(part), 8);
    }

    /// Sends several samples, by their numbers and bytes, in one part.
    fn several(&self, lane: Id, number: u64, samples: &[(u64, u64)], payload: Vec<u8>) {
        let mut tensors = samples.iter().map(|&(sequence, bytes)| {
            let layout = Layout::contiguous(DType::U8, &[bytes]).unwrap();
            Tensor::new(Tag::Sample { sequence }, &layout, &[sequence as u8])
        });
        let part = Part {
            lane,
            number,
            offset: 0,
            tensor: tensors.next(),
            more: tensors.collect(),
        };
        self.outbox.send(&Message::Part(part), payload).unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.presence.session.close().wait();
    }
}

struct World {
    _folder: TempDir,
    domain: Domain,
    endpoint: String,
    bridge: Bridge,
}

impl World {
    fn new() -> World {
        World::importing(&[])
    }

    /// With patterns of names to import beside those of every test.
    fn importing(patterns: &[String]) -> World {
        World::with(|options| options.import.extend_from_slice(patterns))
    }

    fn with(change: impl FnOnce(&mut Options)) -> World {
        let folder = tempfile::tempdir().unwrap();
        let domain = Domain::at(folder.path().join("domain")).unwrap();
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("tcp/{}", free.local_addr().unwrap());
        drop(free);
        let mut options = Options::new(&domain, &Device::host());
        options.listen.push(endpoint.clone());
        options.export.push("camera/**".into());
        options.import.push("from/**".into());
        options.import.push("bridge/*".into());
        options.import_queues.push("work".into());
        options.tensor_bytes_max = 1 << 20;
        // A peer that hears nothing stays, too.
        options.link_timeout = Duration::from_secs(600);
        change(&mut options);
        let bridge = Bridge::open(options).unwrap();
        World {
            _folder: folder,
            domain,
            endpoint,
            bridge,
        }
    }

    fn peer(&self, home: u64) -> Peer {
        Peer::connect(&self.domain, &self.endpoint, home)
    }

    fn wait_for(&self, mut wanted: impl FnMut(&Notice) -> bool) {
        let start = Instant::now();
        while start.elapsed() < LONG {
            if self.bridge.next_notice(LONG).is_some_and(|it| wanted(&it)) {
                return;
            }
        }
        panic!("the notice did not come");
    }

    fn wait_for_refused(&self) {
        let start = Instant::now();
        while self.bridge.status().refused == 0 {
            assert!(start.elapsed() < LONG, "nothing was refused");
            let _ = self.bridge.next_notice(Duration::from_millis(50));
        }
    }
}

#[test]
fn a_lane_that_breaks_the_protocol_ends_with_its_reason_and_the_lane_of_another_peer_goes_on() {
    let world = World::new();
    let (hostile, honest) = (world.peer(1), world.peer(2));
    let kept = honest.begun("from/kept");
    let mut sequence = 0;
    let mut goes_on = |parts: u64| {
        for _ in 0..parts {
            sequence += 1;
            honest.sample(kept, sequence, sequence, 8, 8);
        }
        let granted = |message| match message {
            Message::Credit { lane, parts } if lane == kept => (parts > sequence).then_some(()),
            Message::Stop { reason, .. } => panic!("{reason}"),
            _ => None,
        };
        honest.wait(granted);
    };
    let attacks: [(&str, Attack); 9] = [
        ("came behind part 0", |peer, lane| {
            peer.sample(lane, 2, 1, 8, 8)
        }),
        ("is not allowed", |peer, lane| {
            peer.sample(lane, 1, 1, 1 << 40, 8)
        }),
        ("is not allowed", |peer, lane| {
            peer.sample(lane, 1, u64::MAX, 8, 8)
        }),
        ("bytes at 0", |peer, lane| peer.sample(lane, 1, 1, 8, 4096)),
        ("without its tensor", |peer, lane| {
            let part = Part {
                lane,
                number: 1,
                offset: 0,
                tensor: None,
                more: Vec::new(),
            };
            peer.send_with(Message::Part(part), 8);
        }),
        ("another number of bytes", |peer, lane| {
            peer.several(lane, 1, &[(1, 8), (2, 8)], vec![0; 15])
        }),
        ("another number of bytes", |peer, lane| {
            peer.several(lane, 1, &[(1, 1 << 40), (2, 8)], vec![0; 16])
        }),
        ("do not fill 8 bytes", |peer, lane| {
            peer.parts(lane, &[("a", 1 << 40)])
        }),
        ("do not fill 8 bytes", |peer, lane| {
            peer.parts(lane, &[("a", i64::MAX as u64), ("b", i64::MAX as u64)])
        }),
    ];
    for (number, (expected, attack)) in attacks.into_iter().enumerate() {
        let lane = hostile.begun(&format!("from/hostile-{number}"));
        attack(&hostile, lane);
        let reason = hostile.stopped(lane);
        assert!(reason.contains(expected), "{reason}");
        goes_on(16);
    }
    for name in [
        "from/../../etc",
        "from//a",
        "camera/front",
        "from/\0",
        "bridge/7",
    ] {
        let lane = new_generation();
        hostile.begin(lane, name);
        let reason = hostile.stopped(lane);
        assert!(reason.contains("is not imported here"), "{reason}");
    }
    goes_on(16);
}

#[test]
fn samples_that_come_in_one_part_are_published_one_by_one_for_one_credit() {
    let world = World::new();
    let peer = world.peer(1);
    let lane = peer.begun("from/several");
    let device = Device::host();
    let mut subscriber =
        Subscriber::open("from/several", world.domain.on(&device), Duration::ZERO).unwrap();
    let stream = device.stream().unwrap();
    // Some of 70,000 bytes: Zenoh cuts such a message into pieces of its own.
    let sizes: [u64; 6] = [1, 70_000, 0, 3, 70_000, 2];
    let mut sequence = 0;
    // Half a window of parts, with more samples than a window has parts.
    for number in 1..=16 {
        let samples: Vec<_> = (1..).map(|next| sequence + next).zip(sizes).collect();
        let bytes = |&(sequence, bytes): &(u64, u64)| vec![sequence as u8; bytes as usize];
        let payload = samples.iter().flat_map(bytes).collect();
        peer.several(lane, number, &samples, payload);
        for sample in &samples {
            let got = subscriber.receive(&stream, LONG).unwrap();
            assert_eq!((got.sequence(), got.layout().bytes()), *sample);
            assert_eq!(got.metadata(), [got.sequence() as u8]);
            assert_eq!(got.to_vec(LONG).unwrap(), bytes(sample));
        }
        sequence += sizes.len() as u64;
    }
    let granted = peer.wait(|message| match message {
        Message::Credit { lane: of, parts } if of == lane => Some(parts),
        Message::Stop { reason, .. } => panic!("{reason}"),
        _ => None,
    });
    assert_eq!(granted, 48);
}

#[test]
fn several_tensors_in_one_part_are_for_samples_alone() {
    let layout = Layout::contiguous(DType::U8, &[8]).unwrap();
    let tensor = Tensor::new(Tag::Job { number: 1 }, &layout, b"");
    let part = Part {
        lane: [1; 16],
        number: 1,
        offset: 0,
        tensor: None,
        more: vec![tensor.clone()],
    };
    let reason = Assembly::new(tensor, layout, ()).add(&part, 8).unwrap_err();
    assert_eq!(reason, "several tensors came in one part");
}

#[test]
fn a_lane_of_another_peer_cannot_be_begun_again_nor_a_machine_be_another_one() {
    let world = World::new();
    let (hostile, honest) = (world.peer(1), world.peer(2));
    let kept = honest.begun("from/kept");
    hostile.begin(kept, "from/hostile");
    assert_eq!(hostile.stopped(kept), "the lane has begun already");
    let other = Hello {
        home: 2,
        ..hostile.hello.clone()
    };
    hostile.send(Message::Hello(other));
    world.wait_for_refused();
}

#[test]
fn a_credit_beyond_any_window_ends_its_lane_and_so_does_a_part_beyond_the_credit_or_its_length() {
    let world = World::new();
    let peer = world.peer(1);
    let outbox = Arc::new(peer.presence.outbox([3; 16], &[4; 16]).unwrap());
    let sender = LaneSender::new([1; 16], [2; 16], outbox.clone());
    sender.ready(0, WINDOW_MAX);
    assert!(sender.wait_credit(Duration::ZERO));
    sender.grant(u64::MAX);
    assert!(!sender.wait_credit(Duration::ZERO));
    assert!(sender.ended().unwrap().contains("allowed more than"));

    let receiver = LaneReceiver::new([1; 16], [2; 16], window(), outbox);
    receiver.accept(0).unwrap();
    for number in 1..=100 {
        let part = Part {
            lane: [1; 16],
            number,
            offset: 0,
            tensor: None,
            more: Vec::new(),
        };
        receiver.put(part, ZBytes::new());
    }
    assert!(receiver.next().unwrap().is_some() && receiver.next().unwrap().is_some());
    let reason = "part 3 is beyond the credit of 2".into();
    assert_eq!(receiver.next(), Err(Ending::Fault(reason)));

    let outbox = Arc::new(peer.presence.outbox([3; 16], &[4; 16]).unwrap());
    let receiver = LaneReceiver::new([1; 16], [2; 16], window(), outbox);
    receiver.accept(0).unwrap();
    let part = Part {
        lane: [1; 16],
        number: 1,
        offset: 0,
        tensor: None,
        more: Vec::new(),
    };
    receiver.put(part, vec![0; (1 << 20) + 1].into());
    assert!(matches!(receiver.next(), Err(Ending::Fault(reason)) if reason.contains("1048577")));
}

#[test]
fn names_that_wait_take_a_bounded_number_of_places_and_ended_ones_give_theirs_back() {
    let world = World::new();
    let (hostile, honest) = (world.peer(1), world.peer(2));
    let leave = |name: &str, end: End| {
        let lane = hostile.begun(name);
        hostile.send(Message::End { lane, end });
        world.wait_for(|it| matches!(it, Notice::ImportEnded { name: of, .. } if of == name));
    };
    for number in 0..140 {
        leave(&format!("from/ended-{number}"), End::Closed);
    }
    for number in 0..128 {
        leave(&format!("from/waits-{number}"), End::Paused);
    }
    let lane = new_generation();
    hostile.begin(lane, "from/one-more");
    assert!(hostile.stopped(lane).contains("are kept already"));
    honest.begun("from/kept");
}

#[test]
fn messages_of_queues_that_break_the_protocol_end_their_own_lane() {
    let world = World::new();
    let (hostile, honest) = (world.peer(1), world.peer(2));
    let begun = |peer: &Peer, purpose: Purpose| {
        let lane = new_generation();
        peer.send(Message::Begin { lane, purpose });
        lane
    };
    let jobs = |name: &str| Purpose::Jobs { name: name.into() };
    let taken = |peer: &Peer, lane: Id| {
        peer.wait(|message| match message {
            Message::Ready { lane: of, .. } if of == lane => Some(()),
            Message::Stop { lane: of, reason } if of == lane => panic!("{reason}"),
            _ => None,
        });
    };
    let kept = begun(&honest, jobs("work"));
    taken(&honest, kept);
    let lane = begun(&hostile, jobs("other"));
    assert!(hostile.stopped(lane).contains("is not imported here"));
    let lane = begun(&hostile, Purpose::Results { jobs: kept });
    assert!(hostile.stopped(lane).contains("no such lane"));
    // A sample, and a job with fewer bytes than its part.
    for (tag, bytes, expected) in [
        (Tag::Sample { sequence: 1 }, 8, "something else"),
        (Tag::Job { number: 1 }, 4, "8 bytes at 0"),
    ] {
        let lane = begun(&hostile, jobs("work"));
        taken(&hostile, lane);
        let layout = Layout::contiguous(DType::U8, &[bytes]).unwrap();
        let part = Part {
            lane,
            number: 1,
            offset: 0,
            tensor: Some(Tensor::new(tag, &layout, b"")),
            more: Vec::new(),
        };
        hostile.send_with(Message::Part(part), 8);
        let reason = hostile.stopped(lane);
        assert!(reason.contains(expected), "{reason}");
    }
    // Another peer's lane.
    let number = 1;
    hostile.send(Message::Taken { lane: kept, number });
    let count = u32::MAX;
    hostile.send(Message::Workers { lane: kept, count });
    world.wait_for_refused();
    let lane = begun(&hostile, jobs("work"));
    taken(&hostile, lane);
}

/// A session of Zenoh in one of its modes, connected to the bridge; `None` if it is turned away.
fn session(mode: &str, endpoint: &str, settings: &[(&str, &str)]) -> Option<Session> {
    let mut config = Config::default();
    for (key, value) in settings {
        config.insert_json5(key, value).unwrap();
    }
    for (key, value) in [
        ("mode", format!("{mode:?}")),
        ("listen/endpoints", "[]".into()),
        ("connect/endpoints", format!("[{endpoint:?}]")),
        ("connect/timeout_ms", "0".into()),
        ("connect/exit_on_failure", "true".into()),
        ("scouting/multicast/enabled", "false".into()),
    ] {
        config.insert_json5(key, &value).unwrap();
    }
    zenoh::open(config).wait().ok()
}

#[test]
fn a_session_that_subscribes_to_everything_learns_of_no_other_peer_and_gets_none_of_its_messages() {
    let gateway = ("gateway", "{ south: [{}] }");
    for (mode, settings) in [
        ("peer", &[][..]),
        ("peer", &[gateway]),
        ("router", &[]),
        ("client", &[]),
    ] {
        let world = World::new();
        let first = world.peer(1);
        let spy = session(mode, &world.endpoint, settings);
        // It would be told of the others' keys, or be sent what goes to them.
        assert_eq!(spy.is_none(), mode != "peer", "{mode}");
        let Some(spy) = spy else { continue };
        let (sender, keys) = channel();
        let watch = |key: &str| {
            let (sender, all) = (sender.clone(), spy.declare_subscriber(key.to_owned()));
            let all = all.callback(move |it| drop(sender.send(it.key_expr().to_string())));
            all.wait().unwrap()
        };
        let _all = ["**", "warpipe/**", "warpipe/2/inbox/*"].map(watch);
        let me = session::id(&spy);
        let (answers, answered) = channel();
        let own = spy.declare_subscriber(format!("warpipe/2/inbox/@{}", hex(&me)));
        let own = own.callback(move |it| {
            let message = it.attachment().unwrap().to_bytes();
            let _ = answers.send(Message::decode(&message).unwrap());
        });
        let _own = own.wait().unwrap();
        let present = spy.liveliness().declare_subscriber("**").history(true);
        let (tokens, present_keys) = channel();
        let present = present.callback(move |it| drop(tokens.send(it.key_expr().to_string())));
        let _present = present.wait().unwrap();
        let token = format!("warpipe/2/bridge/{}", hex(&me));
        let _token = spy.liveliness().declare_token(token).wait().unwrap();
        let (bridge, _) = answered.recv_timeout(LONG).unwrap();
        // An answer comes behind all that went to others before.
        let all_has_come = || {
            let (lane, name) = (new_generation(), "other".into());
            let begin = Message::Begin {
                lane,
                purpose: Purpose::Jobs { name },
            };
            let inbox = format!("warpipe/2/inbox/@{}", hex(&bridge));
            let put = spy.put(inbox, b"").attachment(begin.encode(&me));
            put.wait().unwrap();
            loop {
                let (_, message) = answered.recv_timeout(LONG).unwrap();
                if matches!(message, Message::Stop { lane: of, .. } if of == lane) {
                    break;
                }
            }
        };
        all_has_come();
        let second = world.peer(2);
        for peer in [&first, &second] {
            peer.begun(&format!("from/{}", peer.hello.home));
        }
        all_has_come();
        let hidden = |key: &String| !key.contains(&hex(&me)) && !key.contains(&hex(&bridge));
        let others: Vec<String> = keys.try_iter().filter(hidden).collect();
        assert_eq!(others, [""; 0], "{mode}");
        let others: Vec<String> = present_keys.try_iter().filter(hidden).collect();
        assert_eq!(others, [""; 0], "{mode}");
        let _ = spy.close().wait();
    }
}

#[test]
fn a_peer_that_reads_nothing_keeps_no_other_one_waiting_and_the_bridge_can_end() {
    // Its greeting is long, and a few thousand are more than the buffers of a link hold.
    let world = World::importing(&[(); 14].map(|()| "a".repeat(250)));
    let is_deaf = Arc::new(AtomicBool::new(false));
    let way = one_way(&world.endpoint, is_deaf.clone());
    let deaf = Peer::connect(&world.domain, &way, 3);
    world.wait_for(|it| matches!(it, Notice::Reached { node } if node == "peer-3"));
    is_deaf.store(true, Ordering::Release);
    let honest = world.peer(1);
    // Each is answered with the bridge's own. Few at a time: more may not wait.
    for number in 0..3900 {
        let has_yours = false;
        let hello = deaf.hello.clone();
        deaf.send(Message::Hello(Hello { has_yours, ..hello }));
        if number % 100 == 0 {
            honest.is_served();
        }
    }
    honest.begun("from/kept");
    let is_lost = |it: &Notice| matches!(it, Notice::Unreachable { .. });
    loop {
        let notice = world.bridge.next_notice(LONG).unwrap();
        assert!(!is_lost(&notice), "{notice}");
        if matches!(&notice, Notice::Importing { name, .. } if name == "from/kept") {
            break;
        }
    }
    drop(world);
}

#[test]
fn the_lanes_of_a_peer_that_has_lost_sight_of_the_bridge_end_and_begin_anew() {
    let world = World::new();
    let peer = world.peer(1);
    let lane = peer.begun("from/kept");
    let (hello, has_yours) = (peer.hello.clone(), false);
    peer.send(Message::Hello(Hello { has_yours, ..hello }));
    peer.stopped(lane);
    peer.send(Message::Hello(peer.hello.clone()));
    peer.begun("from/kept");
}

#[test]
fn a_session_that_declares_hundreds_of_runs_takes_one_place() {
    let world = World::with(|options| options.peers_max = 2);
    let hostile = world.peer(1);
    let runs: Vec<Id> = (0..400).map(|_| new_generation()).collect();
    let declare = |run: &Id| {
        let key = format!("warpipe/2/bridge/{}", hex(run));
        let liveliness = hostile.presence.session.liveliness();
        liveliness.declare_token(key).wait().unwrap()
    };
    let _tokens: Vec<_> = runs.iter().map(declare).collect();
    hostile.is_served();
    // Nor does any of them have a say.
    let outbox = hostile.presence.outbox(runs[0], &hostile.bridge).unwrap();
    let (name, generation) = ("from/fake".into(), [7; 16]);
    outbox
        .send(&Message::Gone { name, generation }, ZBytes::new())
        .unwrap();
    world.wait_for_refused();
    let honest = world.peer(2);
    world.wait_for(|it| matches!(it, Notice::Reached { node } if node == "peer-2"));
    honest.begun("from/honest");
}

#[test]
fn all_tokens_can_be_asked_for_and_no_session_connects_with_the_id_of_another() {
    let world = World::new();
    let peer = world.peer(1);
    peer.presence.ask();
    let (mut found, me) = (Vec::new(), session::id(&peer.presence.session));
    while found.len() < 2 {
        if let Seen::Found(bridge) = peer.seen.recv_timeout(LONG).unwrap() {
            found.push(bridge);
        }
    }
    assert!(found.contains(&me) && found.iter().any(|it| *it != me));
    let id = format!("\"{}\"", peer.presence.session.zid());
    assert!(session("peer", &world.endpoint, &[("id", &id)]).is_none());
    peer.begun("from/kept");
}

#[test]
fn names_that_wait_for_machines_that_went_keep_out_no_name_of_one_that_is_there() {
    let world = World::new();
    // All places, by one machine behind the other.
    for (home, count) in [(1, 128), (2, 32)] {
        let hostile = world.peer(home);
        for number in 0..count {
            hostile.begun(&format!("from/{home}-{number}"));
        }
        drop(hostile);
        world.wait_for(|it| matches!(it, Notice::Unreachable { .. }));
    }
    let honest = world.peer(3);
    // Its lanes were cut, and end within a slice of their waits.
    let start = Instant::now();
    let is_taken = || {
        let lane = new_generation();
        honest.begin(lane, "from/honest");
        honest.wait(|message| match message {
            Message::Ready { lane: of, .. } if of == lane => Some(true),
            Message::Stop { lane: of, .. } if of == lane => Some(false),
            _ => None,
        })
    };
    while !is_taken() {
        assert!(start.elapsed() < LONG, "no place came back");
    }
    // The machine with the most of them lost one.
    world.wait_for(
        |it| matches!(it, Notice::ImportEnded { node, waits: false, .. } if node == "peer-1"),
    );
}

#[test]
fn a_peer_that_floods_keeps_no_other_one_waiting_and_the_bridge_can_end() {
    let world = World::new();
    let (hostile, honest) = (world.peer(1), world.peer(2));
    let is_over = Arc::new(AtomicBool::new(false));
    let over = is_over.clone();
    let flood = std::thread::spawn(move || {
        let lane = hostile.begun("from/flood");
        let (name, generation) = (String::from("from/flood"), [7; 16]);
        while !over.load(Ordering::Acquire) {
            let purpose = Purpose::Samples {
                name: name.clone(),
                generation: new_generation(),
            };
            for message in [
                Message::Hello(hostile.hello.clone()),
                Message::Begin {
                    lane: new_generation(),
                    purpose,
                },
                Message::Waits {
                    name: new_generation().map(|byte| byte.to_string()).concat(),
                    generation,
                },
                Message::Gone {
                    name: name.clone(),
                    generation,
                },
                Message::Credit {
                    lane,
                    parts: u64::MAX,
                },
                Message::Taken {
                    lane,
                    number: u64::MAX,
                },
                Message::Stop {
                    lane,
                    reason: String::new(),
                },
            ] {
                hostile.send(message);
            }
        }
    });
    for number in 0..8 {
        let name = format!("from/kept-{number}");
        let lane = honest.begun(&name);
        let mut subscriber =
            Subscriber::open(&name, world.domain.on(&Device::host()), Duration::ZERO).unwrap();
        let stream = Device::host().stream().unwrap();
        honest.sample(lane, 1, 1, 8, 8);
        let sample = subscriber.receive(&stream, LONG).unwrap();
        assert_eq!(sample.sequence(), 1);
    }
    drop(world);
    is_over.store(true, Ordering::Release);
    flood.join().unwrap();
}

#[test]
fn queues_of_machines_that_went_keep_out_none_of_one_that_is_there() {
    let world = World::new();
    let begin = |peer: &Peer| {
        let (lane, name) = (new_generation(), "work".into());
        let purpose = Purpose::Jobs { name };
        peer.send(Message::Begin { lane, purpose });
        lane
    };
    // All places, by one machine behind the other.
    for home in 1..=4 {
        let hostile = world.peer(home);
        begin(&hostile);
        hostile.is_served();
        drop(hostile);
        world.wait_for(|it| matches!(it, Notice::Unreachable { .. }));
    }
    let honest = world.peer(5);
    let lane = begin(&honest);
    honest.wait(|message| match message {
        Message::Ready { lane: of, .. } if of == lane => Some(()),
        Message::Stop { lane: of, reason } if of == lane => panic!("{reason}"),
        _ => None,
    });
}

#[test]
fn a_lane_begins_again_once_what_came_on_the_one_before_is_published() {
    let world = World::with(|options| options.depth = 2);
    let peer = world.peer(1);
    let (device, name) = (Device::host(), "from/kept");
    let lane = peer.begun(name);
    let mut subscriber = Subscriber::open(name, world.domain.on(&device), Duration::ZERO).unwrap();
    for sequence in 1..=6 {
        peer.sample(lane, sequence, sequence, 8, 8);
    }
    let end = End::Paused;
    peer.send(Message::End { lane, end });
    let early = new_generation();
    peer.begin(early, name);
    assert!(peer.stopped(early).contains("is not published yet"));
    let stream = device.stream().unwrap();
    for sequence in 1..=6 {
        let sample = subscriber.receive(&stream, LONG).unwrap();
        assert_eq!(sample.sequence(), sequence);
    }
    world.wait_for(|it| matches!(it, Notice::ImportEnded { .. }));
    peer.begun(name);
}

#[test]
fn a_name_that_waits_long_for_device_memory_says_so_once_and_goes_on_when_there_is_some() {
    let world = World::with(|options| {
        options.memory_limit = 2 << 20;
        options.history = 0;
    });
    let peer = world.peer(1);
    let (device, name, length) = (Device::host(), "from/large", 700_000);
    let lane = peer.begun(name);
    let mut subscriber = Subscriber::open(name, world.domain.on(&device), Duration::ZERO).unwrap();
    let stream = device.stream().unwrap();
    let mut received = |sequence| {
        peer.sample(lane, sequence, sequence, length, length as usize);
        subscriber.receive(&stream, LONG).unwrap()
    };
    let held = [received(1), received(2)];
    peer.sample(lane, 3, 3, length, length as usize);
    let is_waiting = |it: &Notice| matches!(it, Notice::WaitsForMemory { .. });
    let mut waits = None;
    world.wait_for(|it| {
        waits = is_waiting(it).then(|| it.clone());
        waits.is_some()
    });
    let (name, node) = (name.to_owned(), "peer-1".to_owned());
    let wanted = Notice::WaitsForMemory {
        name,
        node,
        bytes: length,
        limit: 2 << 20,
    };
    assert_eq!(waits, Some(wanted));
    drop(held);
    let third = subscriber.receive(&stream, LONG).unwrap();
    assert_eq!(third.sequence(), 3);
    let end = End::Closed;
    peer.send(Message::End { lane, end });
    world.wait_for(|it| {
        assert!(!is_waiting(it), "{it}");
        matches!(it, Notice::ImportEnded { .. })
    });
}

#[test]
fn a_job_that_is_too_long_here_has_failed_and_its_lane_goes_on() {
    let world = World::new();
    let peer = world.peer(1);
    let lane = new_generation();
    let name = "work".into();
    peer.send(Message::Begin {
        lane,
        purpose: Purpose::Jobs { name },
    });
    let results = peer.wait(|message| match message {
        Message::Begin {
            lane,
            purpose: Purpose::Results { .. },
        } => Some(lane),
        Message::Stop { reason, .. } => panic!("{reason}"),
        _ => None,
    });
    let (after, parts) = (0, 8);
    peer.send(Message::Ready {
        lane: results,
        after,
        parts,
    });
    // Two bytes more than the bridge takes.
    let layout = Layout::contiguous(DType::U8, &[(1 << 20) + 2]).unwrap();
    let mut tensor = Some(Tensor::new(Tag::Job { number: 7 }, &layout, b""));
    for (number, offset, bytes) in [(1, 0, 1 << 20), (2, 1 << 20, 2)] {
        let part = Part {
            lane,
            number,
            offset,
            tensor: tensor.take(),
            more: Vec::new(),
        };
        peer.send_with(Message::Part(part), bytes);
    }
    let failed = peer.wait(|message| match message {
        Message::Part(part) => Some(part.tensor.unwrap().tag),
        Message::Stop { reason, .. } => panic!("{reason}"),
        _ => None,
    });
    let Tag::Failed { number, reason, .. } = failed else {
        panic!("{failed:?}");
    };
    assert!(
        number == 7 && reason.contains("takes 1048576 bytes"),
        "{reason}"
    );
}

#[test]
fn an_exporter_that_gives_no_credit_holds_up_no_outcome_for_another_of_its_machine() {
    let world = World::new();
    let (hostile, honest) = (world.peer(1), world.peer(1));
    // Begins a lane of jobs, and takes its lane of results with so much credit.
    let begun = |peer: &Peer, credit: u64| {
        let (lane, name) = (new_generation(), "work".into());
        let purpose = Purpose::Jobs { name };
        peer.send(Message::Begin { lane, purpose });
        let results = peer.wait(|message| match message {
            Message::Stop { lane: of, reason } if of == lane => panic!("{reason}"),
            Message::Begin {
                lane: results,
                purpose: Purpose::Results { jobs },
            } if jobs == lane => Some(results),
            _ => None,
        });
        peer.send(Message::Ready {
            lane: results,
            after: 0,
            parts: credit,
        });
        lane
    };
    let device = Device::host();
    let stream = device.stream().unwrap();
    let mut worker = None;
    for (peer, credit) in [(&hostile, 0), (&honest, 8)] {
        let lane = begun(peer, credit);
        let layout = Layout::contiguous(DType::U8, &[8]).unwrap();
        let part = Part {
            lane,
            number: 1,
            offset: 0,
            tensor: Some(Tensor::new(Tag::Job { number: 7 }, &layout, b"")),
            more: Vec::new(),
        };
        peer.send_with(Message::Part(part), 8);
        let worker = worker.get_or_insert_with(|| {
            Worker::open("work", world.domain.on(&device), Duration::ZERO).unwrap()
        });
        let lease = worker.lease(&stream, LONG).unwrap();
        lease.complete(None, &stream).unwrap();
    }
    honest.wait(|message| match message {
        Message::Part(part) => Some(part.tensor.unwrap().tag == Tag::Result { number: 7 }),
        _ => None,
    });
}

#[test]
fn a_sandbox_that_refuses_random_numbers_has_lanes() {
    const REFUSED: &str = "WARPIPE_TEST_REFUSED";
    let Ok(error) = std::env::var(REFUSED) else {
        for error in [libc::ENOSYS, libc::EPERM] {
            // A process of its own: Zenoh finds out once in each whether there is `getrandom`.
            let mut sandbox = this_program();
            sandbox.args([
                "--exact",
                "hostile::a_sandbox_that_refuses_random_numbers_has_lanes",
            ]);
            let sandbox = sandbox.env(REFUSED, error.to_string()).output().unwrap();
            let said = String::from_utf8_lossy(&sandbox.stdout);
            assert!(said.contains("1 passed"), "{said}");
        }
        return;
    };
    refuse_calls(&[(libc::SYS_getrandom, error.parse().unwrap())]);
    let world = World::new();
    let peer = world.peer(1);
    let (lane, name) = (new_generation(), "work".into());
    let purpose = Purpose::Jobs { name };
    peer.send(Message::Begin { lane, purpose });
    // A lane of results, with a number of its own.
    peer.wait(|message| matches!(message, Message::Begin { .. }).then_some(()));
}

#[test]
fn a_lane_that_a_peer_refuses_again_and_again_is_told_of_once_for_each_reason() {
    const DOMAIN: &str = "WARPIPE_TEST_DOMAIN";
    let test =
        "hostile::a_lane_that_a_peer_refuses_again_and_again_is_told_of_once_for_each_reason";
    if let Ok(domain) = std::env::var(DOMAIN) {
        let domain = Domain::at(domain).unwrap();
        let _source = Publisher::new("camera/front", domain.on(&Device::host())).unwrap();
        std::io::stdin().read_line(&mut String::new()).unwrap();
        return;
    }
    let world = World::new();
    let mut source = this_program();
    source
        .args(["--exact", test])
        .env(DOMAIN, world.domain.path());
    let mut source = source.stdin(Stdio::piped()).spawn().unwrap();
    let peer = world.peer(1);
    for reason in [
        "it comes from elsewhere",
        "it comes from elsewhere",
        "no room",
    ] {
        let lane = peer.wait(|message| match message {
            Message::Begin { lane, .. } => Some(lane),
            _ => None,
        });
        let reason = reason.into();
        peer.send(Message::Stop { lane, reason });
    }
    let mut ends = Vec::new();
    while !ends
        .last()
        .is_some_and(|end: &String| end.ends_with("no room"))
    {
        let notice = world.bridge.next_notice(LONG).expect("it is told of");
        if let Notice::ExportEnded { reason, .. } = notice {
            ends.push(reason);
        }
    }
    drop(source.stdin.take());
    assert!(source.wait().unwrap().success());
    assert_eq!(ends.len(), 2, "{ends:?}");
}
