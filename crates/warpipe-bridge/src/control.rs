//! The control thread: which bridges there are, which names go to them, and which come from them.

mod inbox;
mod lanes;
mod present;
mod queues;
mod report;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use warpipe::{Publisher, Stream};

pub(crate) use self::inbox::{Event, Inbox};
pub(crate) use self::present::Present;
pub(crate) use self::queues::QueueRoutes;
use self::queues::Queues;
use self::report::Meter;
use crate::bridge::{CLOSE_PATIENCE, Shared};
use crate::error::Result;
use crate::exporter::Sent;
use crate::importer::{Import, Left};
use crate::lane::{Ending, LaneReceiver, LaneSender};
use crate::message::{End, Hello, Id, Message, node_name};
use crate::options::{Options, Patterns};
use crate::pattern::{self, Pattern};
use crate::session::{Outbox, Presence};
use crate::status::Notice;

/// How often the domain is looked at for names, and lanes that have ended are cleared away.
const TICK: Duration = Duration::from_millis(200);
/// How often the status is published.
const STATUS_INTERVAL: Duration = Duration::from_secs(1);
/// How long a name rests after its lane ended.
const RETRY: Duration = Duration::from_secs(1);
/// How often all tokens are asked for, at most.
const ASK_INTERVAL: Duration = Duration::from_secs(1);
/// Lanes with one peer, in each direction.
const LANES_PER_PEER_MAX: usize = 128;
/// Imported names, those of unreachable peers included.
const IMPORTS_MAX: usize = 1024;
/// Homes and names of which it is known how far they were sent.
const SENT_MAX: usize = 4096;
/// Questions of peers between two looks at the domain.
const QUESTIONS_MAX: usize = 1024;

/// Another bridge that is present.
struct Peer {
    /// Of this presence.
    number: u64,
    outbox: Arc<Outbox>,
    hello: Option<KnownHello>,
    exports: HashMap<String, ExportLane>,
    imports: Vec<ImportLane>,
    /// Names that rest until then.
    rests: HashMap<String, Instant>,
}

struct KnownHello {
    hello: Hello,
    imports: Vec<Pattern>,
    queues: Vec<Pattern>,
}

struct ExportLane {
    /// Whether it was said that the name goes to the peer.
    is_told: bool,
    sender: Arc<LaneSender>,
    thread: JoinHandle<Result<End>>,
    meter: Meter,
}

struct ImportLane {
    import: Arc<Import>,
    receiver: Arc<LaneReceiver>,
    thread: JoinHandle<Left>,
    meter: Meter,
}

pub(crate) struct Control {
    options: Arc<Options>,
    patterns: Patterns,
    home: u64,
    shared: Arc<Shared>,
    presence: Presence,
    peers: HashMap<Id, Peer>,
    /// By the exporter's home and the name.
    imports: HashMap<(u64, String), (Id, Arc<Import>)>,
    sent: HashMap<(u64, String), Arc<Mutex<Sent>>>,
    queues: Queues,
    /// Sources for which peers wait: the peer, the name and the generation.
    questions: Vec<(Id, String, Id)>,
    status: Option<(Publisher, Stream)>,
    looked: Instant,
    told: Instant,
    /// When all tokens were asked for.
    asked: Instant,
}

impl Control {
    pub(crate) fn new(
        mut options: Options,
        patterns: Patterns,
        shared: Arc<Shared>,
        presence: Presence,
    ) -> Result<Control> {
        options.node = node_name(&options.node);
        let now = Instant::now();
        Ok(Control {
            home: home(&options),
            options: Arc::new(options),
            patterns,
            shared,
            presence,
            peers: HashMap::new(),
            imports: HashMap::new(),
            sent: HashMap::new(),
            queues: Queues::default(),
            questions: Vec::new(),
            status: None,
            looked: now,
            told: now,
            asked: now,
        })
    }

    pub(crate) fn run(mut self) {
        loop {
            let (news, event) = self.shared.inbox.next(TICK);
            if news.stop {
                break;
            }
            if news.presence {
                self.look_for_bridges();
            }
            if news.done {
                self.reap();
            }
            match event {
                Some((from, Event::Hello(hello))) => self.greeted(from, hello),
                Some((from, Event::Begin { lane, purpose })) => self.begin(from, lane, purpose),
                Some((from, Event::Waits { name, generation })) => {
                    self.asked(from, name, generation);
                }
                Some((from, Event::Gone { name, generation })) => {
                    self.gone(&from, name, generation)
                }
                None => {}
            }
            if self.looked.elapsed() >= TICK {
                self.looked = Instant::now();
                self.tick();
            }
        }
        self.close();
    }

    fn close(&mut self) {
        let deadline = Instant::now() + CLOSE_PATIENCE;
        self.status = None;
        self.close_queues(deadline);
        let mut outboxes = Vec::new();
        let bridges: Vec<Id> = self.peers.keys().copied().collect();
        for bridge in bridges {
            let Some(peer) = self.peers.remove(&bridge) else {
                continue;
            };
            self.end_lanes(&peer);
            outboxes.push(peer.outbox.clone());
            // Each of them ends within a slice of its waits.
            for (_, lane) in peer.exports {
                join_until(lane.thread, deadline);
            }
            for lane in peer.imports {
                join_until(lane.thread, deadline);
            }
        }
        outboxes.iter().for_each(|outbox| outbox.flush(deadline));
    }

    fn tick(&mut self) {
        self.reap();
        self.look_for_bridges();
        let greeting: Vec<Id> = self
            .peers
            .iter()
            .filter(|(_, peer)| peer.hello.is_none())
            .map(|(id, _)| *id)
            .collect();
        greeting.iter().for_each(|bridge| self.greet(bridge));
        self.export_names();
        self.look_after_queues();
        if self.told.elapsed() >= STATUS_INTERVAL {
            let elapsed = std::mem::replace(&mut self.told, Instant::now()).elapsed();
            self.tell_status(elapsed);
            self.ask_for_sources();
        }
    }

    /// Compares the peers with the bridges that are present.
    fn look_for_bridges(&mut self) {
        let until = self.shared.present().number();
        // Zenoh's locks are taken under none of ours: its threads wait for them.
        let connected = self.presence.connected();
        let mut known = self.shared.present();
        known.settle(connected, until);
        let present = known.here().clone();
        let asks = known.is_incomplete() && self.asked.elapsed() >= ASK_INTERVAL;
        if asks {
            known.asks();
        }
        drop(known);
        if asks {
            self.asked = Instant::now();
            self.presence.ask();
        }
        let is_gone =
            |(id, peer): (&Id, &Peer)| (present.get(id) != Some(&peer.number)).then_some(*id);
        let gone: Vec<Id> = self.peers.iter().filter_map(is_gone).collect();
        gone.iter().for_each(|bridge| self.disappeared(bridge));
        for (bridge, number) in present {
            if !self.peers.contains_key(&bridge) && self.peers.len() < self.options.peers_max {
                self.appeared(bridge, number);
            }
        }
    }

    fn appeared(&mut self, bridge: Id, number: u64) {
        let Ok(outbox) = self.presence.outbox(self.shared.me, &bridge) else {
            return;
        };
        let peer = Peer {
            number,
            outbox: Arc::new(outbox),
            hello: None,
            exports: HashMap::new(),
            imports: Vec::new(),
            rests: HashMap::new(),
        };
        self.peers.insert(bridge, peer);
        self.greet(&bridge);
    }

    /// The peer is unreachable: suspicion, and no proof of anything. Its lanes end; what it exported
    /// stays published here, and waits.
    fn disappeared(&mut self, bridge: &Id) {
        let Some(peer) = self.peers.remove(bridge) else {
            return;
        };
        self.cut_queues(bridge);
        self.end_lanes(&peer);
        if let Some(known) = &peer.hello {
            let node = known.hello.node.clone();
            self.shared.notice(Notice::Unreachable { node });
        }
    }

    fn end_lanes(&self, peer: &Peer) {
        for lane in peer.exports.values() {
            lane.sender.end("the peer is unreachable");
            self.forget_sender(&lane.sender.lane);
        }
        for lane in &peer.imports {
            lane.receiver.end(Ending::Cut);
            self.forget_receiver(&lane.receiver.lane);
        }
    }

    fn forget_sender(&self, lane: &Id) {
        let mut senders = self
            .shared
            .senders
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        senders.remove(lane);
    }

    fn forget_receiver(&self, lane: &Id) {
        let mut receivers = self
            .shared
            .receivers
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        receivers.remove(lane);
    }

    fn greet(&self, bridge: &Id) {
        let Some(peer) = self.peers.get(bridge) else {
            return;
        };
        let hello = Hello {
            node: self.options.node.clone(),
            home: self.home,
            imports: self.options.import.clone(),
            queues: self.options.import_queues.clone(),
            has_yours: peer.hello.is_some(),
        };
        // One that reads nothing is greeted again with the next tick.
        peer.outbox.post(Message::Hello(hello));
    }

    fn greeted(&mut self, from: Id, hello: Hello) {
        self.look_for_bridges();
        let Some(peer) = self.peers.get_mut(&from) else {
            return;
        };
        let patterns = (pattern::all(&hello.imports), pattern::all(&hello.queues));
        let (Ok(imports), Ok(queues)) = patterns else {
            return;
        };
        let node = node_name(&hello.node);
        // A run of a bridge is one machine's for good: with another home it would take over what
        // another peer has published.
        let is_other =
            |known: &KnownHello| known.hello.home != hello.home || known.hello.node != node;
        if peer.hello.as_ref().is_some_and(is_other) {
            self.shared.refuse();
            return;
        }
        let (is_first, answers) = (peer.hello.is_none(), hello.has_yours);
        let hello = Hello {
            node: node.clone(),
            ..hello
        };
        peer.hello = Some(KnownHello {
            hello,
            imports,
            queues,
        });
        if is_first {
            self.shared.notice(Notice::Reached { node });
        }
        if is_first || !answers {
            self.greet(&from);
        }
    }
}

/// Joins a thread, or leaves it behind: it sends to a link that takes nothing.
fn join_until<T>(thread: JoinHandle<T>, deadline: Instant) {
    while !thread.is_finished() && Instant::now() < deadline {
        std::thread::park_timeout(Duration::from_millis(2));
    }
    if thread.is_finished() {
        let _ = thread.join();
    }
}

/// A number that every run of a bridge in this domain of this machine has.
fn home(options: &Options) -> u64 {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    std::fs::read_to_string("/etc/machine-id")
        .ok()
        .hash(&mut hasher);
    options.node.hash(&mut hasher);
    let path = options.domain.path();
    path.canonicalize()
        .unwrap_or_else(|_| path.to_owned())
        .hash(&mut hasher);
    hasher.finish()
}
