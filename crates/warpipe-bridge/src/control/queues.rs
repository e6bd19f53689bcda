//! The queues that go to peers and come from them: their lanes are begun and cleared away here.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use warpipe::{Endpoint, EndpointName, new_generation};

use super::{Control, RETRY, crowded, join_until};
use crate::lane::{Ending, LaneCounts, LaneReceiver, LaneSender};
use crate::message::{Id, Message, Purpose, is_made_by_bridges};
use crate::queue_exporter::{CARRIERS_MAX, QueueExport};
use crate::queue_importer::QueueImport;
use crate::status::{Direction, Notice, RemoteName};

/// Queues with one peer, in each direction.
const QUEUES_PER_PEER_MAX: usize = 16;
/// Imported queues in all.
const QUEUES_MAX: usize = if cfg!(test) { 4 } else { 256 };
/// How long a peer may take to take a lane of jobs, and to begin its lane of results, at first.
const READY_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest that it may take: more than the longest send, behind others.
const READY_TIMEOUT_MAX: Duration = Duration::from_secs(160);
/// How long a name that is no queue's is left alone.
const REST: Duration = Duration::from_secs(5);

/// The queues of a bridge.
#[derive(Default)]
pub(super) struct Queues {
    exports: HashMap<(Id, String), Export>,
    /// By the exporter's home and the name.
    imports: HashMap<(u64, String), Arc<QueueImport>>,
    /// The lanes, to be forgotten when they have ended.
    jobs: Vec<(Arc<LaneReceiver>, Arc<LaneSender>, JoinHandle<()>)>,
    results: Vec<(Arc<LaneReceiver>, JoinHandle<()>)>,
    threads: Vec<JoinHandle<()>>,
}

struct Export {
    export: Arc<QueueExport>,
    /// Threads that carry its jobs.
    carriers: usize,
    /// When the name was last seen in the domain with a peer that wants it.
    seen: Instant,
    made: Instant,
    /// When the last lane began.
    begun: Option<Instant>,
    patience: Patience,
    node: String,
    tensors: u64,
}

/// How long an answer may take: twice as long after one that was late. One that is late each time,
/// over a slow link with many lanes, would never be of use.
#[derive(Debug)]
struct Patience(Duration);

impl Patience {
    fn new() -> Patience {
        Patience(READY_TIMEOUT)
    }

    fn is_over(&mut self, waited: Duration) -> bool {
        let is_over = waited >= self.0;
        if is_over {
            self.0 = READY_TIMEOUT_MAX.min(2 * self.0);
        }
        is_over
    }
}

impl Queues {
    /// Whether a queue of this process has that name here.
    pub(super) fn has_published(&self, name: &str) -> bool {
        self.imports.values().any(|it| it.local_name() == name)
    }
}

fn thread(name: &str, work: impl FnOnce() + Send + 'static) -> Option<JoinHandle<()>> {
    let thread = std::thread::Builder::new().name(name.into());
    thread.spawn(work).ok()
}

impl Control {
    /// Begins the lanes of the queues that peers want, and clears away what has ended.
    pub(super) fn look_after_queues(&mut self) {
        self.begin_lanes();
        self.reap_queues();
    }

    /// Exports each queue that a peer wants and has not.
    pub(super) fn find_queues(&mut self, endpoints: &[Endpoint]) {
        for endpoint in endpoints {
            let name = endpoint.name.as_str();
            let patterns = &self.patterns.export_queues;
            let is_exported = patterns.iter().any(|pattern| pattern.matches(name));
            if !is_exported || is_made_by_bridges(name) || !self.is_elsewhere(endpoint) {
                continue;
            }
            for (bridge, peer) in &self.peers {
                let Some(known) = peer.hello.as_ref().filter(|known| known.hello.has_yours) else {
                    continue;
                };
                if !known.queues.iter().any(|pattern| pattern.matches(name)) {
                    continue;
                }
                let key = (*bridge, name.to_owned());
                // Names that were found to be no queue's take no place.
                let exports = self.queues.exports.iter();
                let count = exports.filter(|(key, it)| key.0 == *bridge && !it.export.is_over());
                if !self.queues.exports.contains_key(&key) && count.count() >= QUEUES_PER_PEER_MAX {
                    continue;
                }
                let options = &self.options;
                let entry = self.queues.exports.entry(key).or_insert_with(|| Export {
                    export: Arc::new(QueueExport::new(name, *bridge, options)),
                    carriers: 0,
                    seen: Instant::now(),
                    made: Instant::now(),
                    begun: None,
                    patience: Patience::new(),
                    node: known.hello.node.clone(),
                    tensors: 0,
                });
                entry.seen = Instant::now();
            }
        }
    }

    fn begin_lanes(&mut self) {
        for ((bridge, name), entry) in &mut self.queues.exports {
            let export = &entry.export;
            // The first carrier finds out whether the name is a queue's.
            while !export.is_over() && entry.carriers < export.workers().clamp(1, CARRIERS_MAX) {
                let (work, carrier) = (export.clone(), entry.carriers);
                let Some(carrier) = thread("bridge-carry", move || work.carry_all(carrier)) else {
                    break;
                };
                self.queues.threads.push(carrier);
                entry.carriers += 1;
            }
            if let (Some(lane), Some(begun)) = (export.lane(), entry.begun) {
                if lane.is_taken() && export.has_results() {
                    entry.patience = Patience::new();
                } else if entry.patience.is_over(begun.elapsed()) {
                    // A message may have been lost: they begin anew.
                    lane.end("the peer did not take it, or began no lane of results");
                }
            }
            let rests = entry.begun.is_some_and(|begun| begun.elapsed() < RETRY);
            let Some(peer) = self.peers.get(bridge).filter(|peer| peer.hello.is_some()) else {
                continue;
            };
            if !export.is_queue() || export.is_over() || rests || export.lane().is_some() {
                continue;
            }
            entry.begun = Some(Instant::now());
            let lane = Arc::new(LaneSender::new(
                new_generation(),
                *bridge,
                peer.outbox.clone(),
            ));
            self.shared.add_sender(&lane);
            let purpose = Purpose::Jobs { name: name.clone() };
            let begin = Message::Begin {
                lane: lane.lane,
                purpose,
            };
            self.shared.add_export(lane.lane, export);
            if !lane.post(begin) {
                lane.end("its begin was not sent");
            }
            if let Some(older) = export.connect(lane) {
                self.shared.forget_queue(&older.lane);
                self.shared.notice(Notice::ExportEnded {
                    name: name.clone(),
                    node: entry.node.clone(),
                    reason: older.ended().unwrap_or_default(),
                });
            }
            self.shared.notice(Notice::Exporting {
                name: name.clone(),
                node: entry.node.clone(),
            });
        }
    }

    fn reap_queues(&mut self) {
        let lease = self.options.lease;
        let shared = self.shared.clone();
        let peers = &self.peers;
        self.queues.exports.retain(|(bridge, _), entry| {
            // Without the peer its jobs go back when the lease has ended. If it has none it may go at
            // once, with its threads: a peer that comes and goes would have more and more of them.
            let is_unused = entry.seen.elapsed() >= lease || !peers.contains_key(bridge);
            if is_unused && entry.export.held() == 0 && !entry.export.is_over() {
                entry.export.end();
            }
            if !entry.export.is_over() {
                return true;
            }
            // A lane may have begun just when it ended.
            entry.export.end();
            shared.forget_export(&entry.export);
            // A name that is no queue's is looked at again after a rest.
            !entry.export.is_queue() && entry.made.elapsed() < REST
        });
        self.queues.imports.retain(|_, import| !import.is_over());
        let over =
            |(lane, results, thread): &(Arc<LaneReceiver>, Arc<LaneSender>, JoinHandle<()>)| {
                if thread.is_finished() {
                    shared.forget_queue(&lane.lane);
                    shared.forget_queue(&results.lane);
                }
                !thread.is_finished()
            };
        self.queues.jobs.retain(over);
        self.queues.results.retain(|(lane, thread)| {
            if thread.is_finished() {
                shared.forget_queue(&lane.lane);
            }
            !thread.is_finished()
        });
        self.queues.threads.retain(|thread| !thread.is_finished());
    }

    /// The lanes of a peer's queues end: it is unreachable.
    pub(super) fn cut_queues(&self, bridge: &Id) {
        for (_, entry) in self
            .queues
            .exports
            .iter()
            .filter(|(key, _)| key.0 == *bridge)
        {
            if let Some(lane) = entry.export.lane() {
                lane.end("the peer is unreachable");
            }
        }
        for (lane, results, _) in self.queues.jobs.iter().filter(|it| it.0.peer == *bridge) {
            lane.end(Ending::Cut);
            results.end("the peer is unreachable");
        }
        for (lane, _) in self.queues.results.iter().filter(|it| it.0.peer == *bridge) {
            lane.end(Ending::Cut);
        }
    }

    /// Gives the jobs back and ends the threads.
    pub(super) fn close_queues(&mut self, deadline: Instant) {
        let queues = std::mem::take(&mut self.queues);
        queues.exports.values().for_each(|entry| entry.export.end());
        queues.imports.values().for_each(|import| import.end());
        let mut threads = queues.threads;
        for (lane, results, thread) in queues.jobs {
            lane.end(Ending::Cut);
            results.end("the bridge ends");
            threads.push(thread);
        }
        for (lane, thread) in queues.results {
            lane.end(Ending::Cut);
            threads.push(thread);
        }
        for thread in threads {
            join_until(thread, deadline);
        }
    }

    /// A peer begins a lane of jobs to this end.
    pub(super) fn begin_jobs(&mut self, from: Id, lane: Id, name: &str) -> Result<(), String> {
        let patterns = &self.patterns.import_queues;
        let wants = patterns.iter().any(|pattern| pattern.matches(name));
        if !wants || is_made_by_bridges(name) || EndpointName::new(name).is_err() {
            return Err(format!("queue {name:?} is not imported here"));
        }
        let peer = self.peers.get(&from).ok_or("there was no hello")?;
        let known = peer.hello.as_ref().ok_or("there was no hello")?;
        if self.shared.has_receiver(&lane) {
            return Err("the lane has begun already".into());
        }
        let lanes = self.queues.jobs.iter().filter(|it| it.0.peer == from);
        if lanes.count() >= 2 * QUEUES_PER_PEER_MAX {
            return Err(format!(
                "{QUEUES_PER_PEER_MAX} queues of this peer are here already"
            ));
        }
        let key = (known.hello.home, name.to_owned());
        let own = self
            .queues
            .imports
            .keys()
            .filter(|key| key.0 == known.hello.home);
        let (own, is_new) = (own.count(), !self.queues.imports.contains_key(&key));
        let (node, outbox) = (known.hello.node.clone(), peer.outbox.clone());
        let is_full = self.queues.imports.len() >= QUEUES_MAX;
        if is_new && (own >= QUEUES_PER_PEER_MAX || is_full && !self.end_unreachable_queue()) {
            return Err("too many queues are imported already".into());
        }
        let import = match self.queues.imports.get(&key) {
            Some(import) if !import.is_over() => import.clone(),
            _ => {
                let import = Arc::new(QueueImport::new(name, &node, &self.options));
                let work = import.clone();
                let sender = thread("bridge-results", move || work.take_results());
                self.queues
                    .threads
                    .push(sender.ok_or("no thread was started")?);
                self.queues.imports.insert(key, import.clone());
                import
            }
        };
        let results = Arc::new(LaneSender::new(new_generation(), from, outbox.clone()));
        let receiver = Arc::new(LaneReceiver::new(
            lane,
            from,
            self.shared.memory.window(),
            outbox,
        ));
        import.connect(&receiver, &results);
        self.shared.add_sender(&results);
        self.shared.add_receiver(&receiver);
        self.shared.add_import(lane, from, &import);
        let (incoming, outgoing, shared) = (receiver.clone(), results.clone(), self.shared.clone());
        let left = import.clone();
        let jobs = thread("bridge-jobs", move || {
            import.take_jobs(&incoming, &outgoing);
            shared.done();
        });
        let Some(jobs) = jobs else {
            left.leave(&receiver, &results, &Ending::Cut);
            self.shared.forget_queue(&receiver.lane);
            self.shared.forget_queue(&results.lane);
            return Err("no thread was started".into());
        };
        self.queues.jobs.push((receiver, results, jobs));
        let name = name.to_owned();
        self.shared.notice(Notice::Importing { name, node });
        Ok(())
    }

    /// Ends a queue of a machine that cannot be reached, to make room: one of the machine with the
    /// most of them. Says whether there was one.
    fn end_unreachable_queue(&mut self) -> bool {
        let known = self.peers.values().filter_map(|peer| peer.hello.as_ref());
        let reachable: HashSet<u64> = known.map(|known| known.hello.home).collect();
        let imports = self.queues.imports.keys();
        let waiting = imports.filter(|key| !reachable.contains(&key.0));
        let victim = crowded(waiting.map(|key| (key, ())));
        let ended = victim.and_then(|key| self.queues.imports.remove(&key));
        ended.inspect(|import| import.end()).is_some()
    }

    /// A peer begins the lane of results for a lane of jobs.
    pub(super) fn begin_results(&mut self, from: Id, lane: Id, jobs: Id) -> Result<(), String> {
        let exports = self.queues.exports.values();
        let of = |it: &&Export| {
            it.export.peer == from && it.export.lane().is_some_and(|lane| lane.lane == jobs)
        };
        let export = { exports }.find(of);
        let export = export
            .ok_or("there is no such lane of jobs")?
            .export
            .clone();
        if self.shared.has_receiver(&lane) {
            return Err("the lane has begun already".into());
        }
        let lanes = self.queues.results.iter().filter(|it| it.0.peer == from);
        if lanes.count() >= 2 * QUEUES_PER_PEER_MAX {
            return Err("too many lanes of results are here already".into());
        }
        let peer = self.peers.get(&from).ok_or("there was no hello")?;
        let outbox = peer.outbox.clone();
        let receiver = Arc::new(LaneReceiver::new(
            lane,
            from,
            self.shared.memory.window(),
            outbox,
        ));
        self.shared.add_receiver(&receiver);
        let incoming = receiver.clone();
        let results = thread("bridge-answer", move || {
            export.take_results(&incoming, &jobs)
        });
        let Some(results) = results else {
            self.shared.forget_queue(&receiver.lane);
            return Err("no thread was started".into());
        };
        self.queues.results.push((receiver, results));
        Ok(())
    }

    /// The rows of the status.
    pub(super) fn queue_rows(&mut self, elapsed: Duration) -> Vec<RemoteName> {
        use std::sync::atomic::Ordering::Relaxed;
        let mut rows = Vec::new();
        let row = |name: String, node: &str, direction, workers: usize| RemoteName {
            name,
            node: node.into(),
            direction,
            reachable: true,
            tensors: 0,
            bytes: 0,
            rate: 0.0,
            credit: 0,
            dropped: 0,
            missing: 0,
            repeated: 0,
            workers: Some(workers as u32),
        };
        let fill = |row: &mut RemoteName, counts: &LaneCounts| {
            row.tensors = counts.tensors.load(Relaxed);
            row.bytes = counts.bytes.load(Relaxed);
            row.credit = counts.credit.load(Relaxed);
            row.repeated = counts.repeated.load(Relaxed);
        };
        for ((bridge, name), entry) in &mut self.queues.exports {
            let export = &entry.export;
            if !export.is_queue() || export.is_over() {
                continue;
            }
            let mut row = row(name.clone(), &entry.node, Direction::To, export.workers());
            row.reachable = self.peers.contains_key(bridge);
            if let Some(lane) = export.lane() {
                fill(&mut row, &lane.counts);
                let more = row.tensors.saturating_sub(entry.tensors);
                entry.tensors = row.tensors;
                row.rate = more as f64 / elapsed.as_secs_f64().max(0.001);
            }
            row.repeated = export.repeated();
            rows.push(row);
        }
        for ((home, _), import) in &self.queues.imports {
            let (node, workers) = (&import.node, import.workers());
            let mut row = row(import.local_name(), node, Direction::From, workers);
            let is_there = |known: &super::KnownHello| known.hello.home == *home;
            let mut peers = self.peers.values();
            row.reachable = peers.any(|peer| peer.hello.as_ref().is_some_and(is_there));
            if let Some((lane, ..)) = (self.queues.jobs.iter())
                .find(|(lane, _, thread)| !thread.is_finished() && import.has(lane))
            {
                fill(&mut row, &lane.counts);
                row.rate = import.new_jobs(row.tensors) as f64 / elapsed.as_secs_f64().max(0.001);
            }
            rows.push(row);
        }
        rows
    }
}

/// The queues by their lanes, for messages that come on Zenoh's threads.
#[derive(Debug, Default)]
pub(crate) struct QueueRoutes {
    exports: HashMap<Id, Arc<QueueExport>>,
    imports: HashMap<Id, (Id, Arc<QueueImport>)>,
}

impl crate::bridge::Shared {
    fn routes<T>(&self, change: impl FnOnce(&mut QueueRoutes) -> T) -> T {
        let routes = self.queues.write();
        change(&mut routes.unwrap_or_else(PoisonError::into_inner))
    }

    fn add_export(&self, lane: Id, export: &Arc<QueueExport>) {
        self.routes(|it| it.exports.insert(lane, export.clone()));
    }

    fn add_import(&self, lane: Id, peer: Id, import: &Arc<QueueImport>) {
        self.routes(|it| it.imports.insert(lane, (peer, import.clone())));
    }

    fn forget_export(&self, export: &Arc<QueueExport>) {
        let lanes = self.routes(|it| {
            let lanes = it.exports.iter().filter(|(_, of)| Arc::ptr_eq(of, export));
            lanes.map(|(lane, _)| *lane).collect::<Vec<Id>>()
        });
        lanes.iter().for_each(|lane| self.forget_queue(lane));
    }

    fn forget_queue(&self, lane: &Id) {
        self.routes(|it| {
            it.exports.remove(lane);
            it.imports.remove(lane);
        });
        let senders = self.senders.write();
        senders.unwrap_or_else(PoisonError::into_inner).remove(lane);
        let receivers = self.receivers.write();
        receivers
            .unwrap_or_else(PoisonError::into_inner)
            .remove(lane);
    }

    fn add_sender(&self, lane: &Arc<LaneSender>) {
        let senders = self.senders.write();
        let mut senders = senders.unwrap_or_else(PoisonError::into_inner);
        senders.insert(lane.lane, lane.clone());
    }

    fn add_receiver(&self, lane: &Arc<LaneReceiver>) {
        let receivers = self.receivers.write();
        let mut receivers = receivers.unwrap_or_else(PoisonError::into_inner);
        receivers.insert(lane.lane, lane.clone());
    }

    fn has_receiver(&self, lane: &Id) -> bool {
        let receivers = self.receivers.read();
        receivers
            .unwrap_or_else(PoisonError::into_inner)
            .contains_key(lane)
    }

    /// The peer's workers for a lane of jobs; `None` if there is no such lane to that peer.
    pub(crate) fn workers(&self, from: &Id, lane: &Id, count: u32) -> Option<()> {
        let routes = self.queues.read();
        let routes = routes.unwrap_or_else(PoisonError::into_inner);
        let export = routes.exports.get(lane).filter(|it| it.peer == *from)?;
        export.announced(lane, count);
        Some(())
    }

    /// The exporter took an outcome, or wants none.
    pub(crate) fn taken(&self, from: &Id, lane: &Id, number: u64) -> Option<()> {
        let routes = self.queues.read();
        let routes = routes.unwrap_or_else(PoisonError::into_inner);
        let (_, import) = routes.imports.get(lane).filter(|it| it.0 == *from)?;
        import.put_taken(*from, number).then_some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_that_takes_as_long_each_time_is_in_time_in_the_end() {
        let mut patience = Patience::new();
        let long = Duration::from_secs(75);
        assert!(!patience.is_over(READY_TIMEOUT / 2));
        let late = (0..10).take_while(|_| patience.is_over(long)).count();
        assert_eq!(late, 3);
        while patience.0 < READY_TIMEOUT_MAX {
            assert!(patience.is_over(Duration::MAX));
        }
        assert!(patience.is_over(READY_TIMEOUT_MAX));
    }
}
