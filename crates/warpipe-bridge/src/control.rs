//! The control thread: which bridges there are, which names go to them, and which come from them.

mod inbox;
mod lanes;
mod present;
mod queues;
mod report;
mod sent;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use warpipe::{Publisher, Stream};

pub(crate) use self::inbox::{Event, Inbox};
pub(crate) use self::present::Present;
pub(crate) use self::queues::QueueRoutes;
use self::queues::Queues;
use self::report::Meter;
use self::sent::SentBook;
use crate::bridge::{CLOSE_PATIENCE, Shared};
use crate::error::Result;
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
const IMPORTS_MAX: usize = if cfg!(test) { 160 } else { 1024 };
/// The part of its time that the control thread may take to look at the domain is one of these.
const LOOK_SHARE: u32 = 4;

/// Another bridge that is present.
struct Peer {
    /// Of this presence.
    number: u64,
    outbox: Arc<Outbox>,
    hello: Option<KnownHello>,
    exports: HashMap<String, ExportLane>,
    imports: Vec<ImportLane>,
    /// Names that rest until then, and why their lanes ended, for a while longer.
    rests: HashMap<String, (Instant, String)>,
    /// Sources for which it waits, since the last look: their names and generations.
    questions: Vec<(String, Id)>,
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
    work: Work<Result<End>>,
    meter: Meter,
}

struct ImportLane {
    import: Arc<Import>,
    receiver: Arc<LaneReceiver>,
    work: Work<Left>,
    meter: Meter,
}

/// The thread of a lane.
struct Work<T> {
    thread: JoinHandle<T>,
    /// It does nothing more but end.
    is_done: Arc<AtomicBool>,
}

impl<T: Send + 'static> Work<T> {
    /// Starts a thread that wakes the control thread when its work is done, and what it had for it
    /// has gone.
    fn start(
        name: &str,
        shared: &Arc<Shared>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> std::io::Result<Work<T>> {
        let is_done = Arc::new(AtomicBool::new(false));
        let (done, shared) = (is_done.clone(), shared.clone());
        let thread = std::thread::Builder::new().name(name.into());
        let thread = thread.spawn(move || {
            let result = work();
            done.store(true, Ordering::Release);
            shared.done();
            result
        })?;
        Ok(Work { thread, is_done })
    }

    fn is_done(&self) -> bool {
        self.is_done.load(Ordering::Acquire) || self.thread.is_finished()
    }
}

/// An imported name.
struct Kept {
    /// The bridge that brings it, or brought it last.
    holder: Id,
    import: Arc<Import>,
    /// When its last lane began.
    begun: Instant,
}

pub(crate) struct Control {
    options: Arc<Options>,
    patterns: Patterns,
    home: u64,
    shared: Arc<Shared>,
    presence: Presence,
    peers: HashMap<Id, Peer>,
    /// By the exporter's home and the name.
    imports: HashMap<(u64, String), Kept>,
    sent: SentBook,
    queues: Queues,
    status: Option<(Publisher, Stream)>,
    /// When the domain is looked at again.
    looks: Instant,
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
            sent: SentBook::default(),
            queues: Queues::default(),
            status: None,
            looks: now + TICK,
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
            let now = Instant::now();
            if now >= self.looks {
                self.tick();
                // A domain with thousands of names takes its time: the peers get most of it.
                self.looks = now + TICK.max(LOOK_SHARE * now.elapsed());
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
                join_until(lane.work.thread, deadline);
            }
            for lane in peer.imports {
                join_until(lane.work.thread, deadline);
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
        if let Ok(endpoints) = self.options.domain.endpoints() {
            self.export_names(&endpoints);
            self.find_queues(&endpoints);
        }
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
            questions: Vec::new(),
        };
        self.peers.insert(bridge, peer);
        self.greet(&bridge);
    }

    /// The peer is unreachable: suspicion, and no proof of anything. Its lanes end; what it exported
    /// stays published here, and waits.
    fn disappeared(&mut self, bridge: &Id) {
        if let Some(known) = self.forget(bridge).and_then(|peer| peer.hello) {
            let node = known.hello.node;
            self.shared.notice(Notice::Unreachable { node });
        }
    }

    fn forget(&mut self, bridge: &Id) -> Option<Peer> {
        let peer = self.peers.remove(bridge)?;
        self.cut_queues(bridge);
        self.end_lanes(&peer);
        Some(peer)
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
        let knew = |known: &KnownHello| known.hello.has_yours;
        if !hello.has_yours && peer.hello.as_ref().is_some_and(knew) {
            // It has lost sight of this end, and ended its lanes.
            self.forget(&from);
            return self.greeted(from, hello);
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

/// Of entries by home and name, each with its age (a larger one is younger), the oldest one of the
/// home that has the most.
fn crowded<'a, T: Ord>(
    entries: impl Iterator<Item = (&'a (u64, String), T)>,
) -> Option<(u64, String)> {
    let mut homes: HashMap<u64, (usize, T, &String)> = HashMap::new();
    for ((home, name), age) in entries {
        match homes.entry(*home) {
            Entry::Vacant(vacant) => {
                vacant.insert((1, age, name));
            }
            Entry::Occupied(mut occupied) => {
                let (count, oldest, of) = occupied.get_mut();
                *count += 1;
                if age < *oldest {
                    (*oldest, *of) = (age, name);
                }
            }
        }
    }
    let oldest_first = |a: &(usize, T, &String), b: &(usize, T, &String)| b.1.cmp(&a.1);
    let most = homes
        .into_iter()
        .max_by(|(_, a), (_, b)| a.0.cmp(&b.0).then_with(|| oldest_first(a, b)));
    most.map(|(home, (_, _, name))| (home, name.clone()))
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
