//! The lanes of the peers: begun, and cleared away when they have ended.

use std::collections::HashSet;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use warpipe::{Endpoint, EndpointName, new_generation};

use super::report::Meter;
use super::{
    Control, ExportLane, IMPORTS_MAX, ImportLane, Kept, LANES_PER_PEER_MAX, RETRY, Work, crowded,
};
use crate::error::{Error, Result};
use crate::exporter::Export;
use crate::importer::{Import, Left};
use crate::lane::{Ending, LaneReceiver, LaneSender};
use crate::message::{End, Id, Message, Purpose, bounded, is_made_by_bridges};
use crate::session::Outbox;
use crate::status::Notice;

/// How long the reason for which a lane ended is known, beyond the rest of its name: more than a
/// peer may take to refuse the next one.
const REASON_KEPT: Duration = Duration::from_secs(30);
/// How long the name of something that is no publisher is left alone.
const OTHER_KIND_REST: Duration = Duration::from_secs(5);

impl Control {
    /// Begins a lane for each name that a peer wants and has not.
    pub(super) fn export_names(&mut self, endpoints: &[Endpoint]) {
        self.answer_questions(endpoints);
        let known = self.peers.values().filter_map(|peer| peer.hello.as_ref());
        let reachable: HashSet<u64> = known.map(|known| known.hello.home).collect();
        for endpoint in endpoints {
            let name = endpoint.name.as_str();
            let is_exported = self
                .patterns
                .export
                .iter()
                .any(|pattern| pattern.matches(name));
            if !is_exported || is_made_by_bridges(name) || !self.is_elsewhere(endpoint) {
                continue;
            }
            let bridges: Vec<Id> = self.peers.keys().copied().collect();
            for bridge in bridges {
                self.export_to(&bridge, name, &reachable);
            }
        }
    }

    /// Whether another process of this machine has the name. A name of this process is an imported
    /// one, and does not go back.
    pub(super) fn is_elsewhere(&self, endpoint: &Endpoint) -> bool {
        let name = endpoint.name.as_str();
        match endpoint.holder.as_ref().map(|holder| holder.pid) {
            None => false,
            Some(Some(pid)) => pid != std::process::id() as i32,
            // A process in another PID namespace, which has no number here.
            Some(None) => {
                let mut imports = self.imports.values();
                !imports.any(|kept| kept.import.local_name() == name)
                    && !self.queues.has_published(name)
            }
        }
    }

    /// Asks the bridges of a machine whether a source of it lives for which a publisher waits here
    /// without a lane: it may have ended while they could not be reached.
    pub(super) fn ask_for_sources(&self) {
        for ((home, name), kept) in &self.imports {
            let Some(generation) = kept.import.waits_for() else {
                continue;
            };
            let is_there = |known: &super::KnownHello| known.hello.home == *home;
            for peer in self.peers.values() {
                if peer.hello.as_ref().is_some_and(is_there) {
                    let name = name.clone();
                    peer.outbox.post(Message::Waits { name, generation });
                }
            }
        }
    }

    /// A peer waits for a source of this machine. It gets its answer after the next look.
    pub(super) fn asked(&mut self, from: Id, name: String, generation: Id) {
        if let Some(peer) = self.peers.get_mut(&from)
            && peer.questions.len() < LANES_PER_PEER_MAX
        {
            peer.questions.push((name, generation));
        }
    }

    /// A source has ended if nobody holds its name. Any other has its lane, or gets one.
    fn answer_questions(&mut self, endpoints: &[Endpoint]) {
        if self.peers.values().all(|peer| peer.questions.is_empty()) {
            return;
        }
        let held = endpoints.iter().filter(|it| it.holder.is_some());
        let held: HashSet<&str> = held.map(|it| it.name.as_str()).collect();
        for peer in self.peers.values_mut() {
            let questions = std::mem::take(&mut peer.questions);
            if peer.hello.is_none() {
                continue;
            }
            for (name, generation) in questions {
                if !held.contains(name.as_str()) {
                    peer.outbox.post(Message::Gone { name, generation });
                }
            }
        }
    }

    /// A source for which a publisher here waits has ended.
    pub(super) fn gone(&mut self, from: &Id, name: String, generation: Id) {
        let Some(known) = self.peers.get(from).and_then(|peer| peer.hello.as_ref()) else {
            return;
        };
        let node = known.hello.node.clone();
        let import = self.imports.get(&(known.hello.home, name.clone()));
        if import.is_some_and(|kept| kept.import.end(generation)) {
            self.shared.notice(Notice::ImportEnded {
                name,
                node,
                reason: "its publisher ended while there was no link".into(),
                waits: false,
            });
        }
    }

    fn export_to(&mut self, bridge: &Id, name: &str, reachable: &HashSet<u64>) {
        let Some(peer) = self.peers.get_mut(bridge) else {
            return;
        };
        let Some(known) = peer.hello.as_ref().filter(|known| known.hello.has_yours) else {
            return;
        };
        let rests = peer
            .rests
            .get(name)
            .is_some_and(|(until, _)| Instant::now() < *until);
        let wants = known.imports.iter().any(|pattern| pattern.matches(name));
        let is_full = peer.exports.len() >= LANES_PER_PEER_MAX;
        if !wants || rests || is_full || peer.exports.contains_key(name) {
            return;
        }
        let sent = self.sent.open(known.hello.home, name, reachable);
        let sender = Arc::new(LaneSender::new(
            new_generation(),
            *bridge,
            peer.outbox.clone(),
        ));
        let export = Export {
            name: name.to_owned(),
            options: self.options.clone(),
            sender: sender.clone(),
            sent,
        };
        let mut senders = self
            .shared
            .senders
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        senders.insert(sender.lane, sender.clone());
        drop(senders);
        match Work::start("bridge-export", &self.shared, move || export.run()) {
            Ok(work) => {
                let lane = ExportLane {
                    is_told: false,
                    sender,
                    work,
                    meter: Meter::default(),
                };
                peer.exports.insert(name.to_owned(), lane);
            }
            Err(_) => {
                let rest = (Instant::now() + RETRY, String::new());
                peer.rests.insert(name.to_owned(), rest);
                self.forget_sender(&sender.lane);
            }
        }
    }

    /// A peer begins a lane to this end.
    pub(super) fn begin(&mut self, from: Id, lane: Id, purpose: Purpose) {
        let begun = match purpose {
            Purpose::Samples { name, generation } => self.import(from, lane, &name, generation),
            Purpose::Jobs { name } => self.begin_jobs(from, lane, &name),
            Purpose::Results { jobs } => self.begin_results(from, lane, jobs),
        };
        if let (Err(reason), Some(peer)) = (begun, self.peers.get(&from)) {
            let reason = bounded(&reason);
            peer.outbox.post(Message::Stop { lane, reason });
        }
    }

    fn import(&mut self, from: Id, lane: Id, name: &str, generation: Id) -> Result<(), String> {
        let wants = self
            .patterns
            .import
            .iter()
            .any(|pattern| pattern.matches(name));
        if !wants || is_made_by_bridges(name) || EndpointName::new(name).is_err() {
            return Err(format!("{name:?} is not imported here"));
        }
        let peer = self.peers.get(&from).ok_or("there was no hello")?;
        let known = peer.hello.as_ref().ok_or("there was no hello")?;
        if peer.imports.len() >= LANES_PER_PEER_MAX {
            return Err(format!(
                "{LANES_PER_PEER_MAX} names are imported from this peer already"
            ));
        }
        // A lane of another peer too: its receiver would be replaced.
        let receivers = self.shared.receivers.read();
        let receivers = receivers.unwrap_or_else(PoisonError::into_inner);
        let is_known = receivers.contains_key(&lane);
        drop(receivers);
        let key = (known.hello.home, name.to_owned());
        let holder = self.imports.get(&key).map(|kept| kept.holder);
        if is_known {
            return Err("the lane has begun already".into());
        }
        if holder.is_some_and(|it| it != from && self.peers.contains_key(&it)) {
            return Err(format!(
                "{name:?} comes from another bridge of that machine already"
            ));
        }
        // Names that wait without a lane count: else one peer could take all places, a lane each.
        let own = self.imports.values().filter(|kept| kept.holder == from);
        if holder != Some(from) && own.count() >= LANES_PER_PEER_MAX {
            return Err(format!(
                "{LANES_PER_PEER_MAX} names of this peer are kept already"
            ));
        }
        let node = known.hello.node.clone();
        let outbox = peer.outbox.clone();
        if holder.is_none() && self.imports.len() >= IMPORTS_MAX && !self.end_unreachable() {
            return Err(format!("{IMPORTS_MAX} names are imported already"));
        }
        let kept = self.imports.entry(key).or_insert_with(|| Kept {
            holder: from,
            import: Arc::new(Import::new(name, &node)),
            begun: Instant::now(),
        });
        (kept.holder, kept.begun) = (from, Instant::now());
        let import = kept.import.clone();
        self.start_import(from, lane, import, outbox, generation)
    }

    /// Ends a name that waits for a machine that cannot be reached, to make room: of the machine
    /// with the most of them, the one that was begun first. Says whether there was one.
    fn end_unreachable(&mut self) -> bool {
        let waiting = self.imports.iter().filter(|(_, kept)| {
            !self.peers.contains_key(&kept.holder) && Arc::strong_count(&kept.import) == 1
        });
        let victim = crowded(waiting.map(|(key, kept)| (key, kept.begun)));
        let Some(kept) = victim.and_then(|key| self.imports.remove(&key)) else {
            return false;
        };
        self.shared.notice(Notice::ImportEnded {
            name: kept.import.name.clone(),
            node: kept.import.node.clone(),
            reason: "a name of a machine that can be reached needs its place".into(),
            waits: false,
        });
        true
    }

    fn start_import(
        &mut self,
        from: Id,
        lane: Id,
        import: Arc<Import>,
        outbox: Arc<Outbox>,
        generation: Id,
    ) -> Result<(), String> {
        let peer = self.peers.get(&from).ok_or("there was no hello")?;
        // Its older lane, if there is one, ends: the exporter began anew.
        for older in peer
            .imports
            .iter()
            .filter(|older| Arc::ptr_eq(&older.import, &import))
        {
            // What came before its end is published first, however long subscribers here take.
            if matches!(older.receiver.ending(), Some(Ending::Sender(_))) {
                return Err("what came on the lane before is not published yet".into());
            }
            older.receiver.end(Ending::Cut);
        }
        let receiver = Arc::new(LaneReceiver::new(
            lane,
            from,
            self.shared.memory.window(),
            outbox,
        ));
        let mut receivers = self
            .shared
            .receivers
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        receivers.insert(lane, receiver.clone());
        drop(receivers);
        let (name, node) = (import.name.clone(), import.node.clone());
        let (runs, incoming, options) = (import.clone(), receiver.clone(), self.options.clone());
        let run = move || runs.run(&options, &incoming, generation);
        let work = match Work::start("bridge-import", &self.shared, run) {
            Ok(work) => work,
            Err(error) => {
                self.forget_receiver(&lane);
                return Err(error.to_string());
            }
        };
        let lane = ImportLane {
            import,
            receiver,
            work,
            meter: Meter::default(),
        };
        let peer = self.peers.get_mut(&from).ok_or("there was no hello")?;
        peer.imports.push(lane);
        self.shared.notice(Notice::Importing { name, node });
        Ok(())
    }

    /// Clears away the lanes that have ended.
    pub(super) fn reap(&mut self) {
        let (mut ended, mut unsaid) = (Vec::new(), Vec::new());
        for peer in self.peers.values_mut() {
            let node = peer
                .hello
                .as_ref()
                .map_or_else(String::new, |known| known.hello.node.clone());
            for (name, lane) in &mut peer.exports {
                if !lane.is_told && lane.sender.is_taken() {
                    lane.is_told = true;
                    let (name, node) = (name.clone(), node.clone());
                    self.shared.notice(Notice::Exporting { name, node });
                }
            }
            for lane in &peer.imports {
                if let Some(bytes) = lane.receiver.waits_for_memory() {
                    self.shared.notice(Notice::WaitsForMemory {
                        name: lane.import.local_name(),
                        node: node.clone(),
                        bytes,
                        limit: self.options.memory_limit,
                    });
                }
            }
            let done: Vec<String> = peer
                .exports
                .iter()
                .filter(|(_, lane)| lane.work.is_done())
                .map(|(name, _)| name.clone())
                .collect();
            for name in done {
                let Some(lane) = peer.exports.remove(&name) else {
                    continue;
                };
                let result = lane.work.thread.join();
                if matches!(&result, Ok(Err(error)) if is_no_publisher(error)) {
                    // A queue or a pool, say, which a wide pattern matches too.
                    let rest = (Instant::now() + OTHER_KIND_REST, String::new());
                    peer.rests.insert(name, rest);
                    unsaid.push(lane.sender.lane);
                    continue;
                }
                let (reason, rest) = export_reason(&lane.sender, result);
                let rest = (Instant::now() + rest, reason.clone());
                let before = peer.rests.insert(name.clone(), rest);
                if !lane.is_told && before.is_some_and(|(_, before)| before == reason) {
                    // Said when it ended so before.
                    unsaid.push(lane.sender.lane);
                    continue;
                }
                ended.push((
                    lane.sender.lane,
                    Notice::ExportEnded {
                        name,
                        node: node.clone(),
                        reason,
                    },
                ));
            }
            let (done, live) = std::mem::take(&mut peer.imports)
                .into_iter()
                .partition(|lane: &ImportLane| lane.work.is_done());
            peer.imports = live;
            let done: Vec<ImportLane> = done;
            for lane in done {
                let (reason, waits) = match lane.work.thread.join() {
                    Ok(Left::Ended(end)) => (end_text(&end), false),
                    Ok(Left::Waiting(reason)) => (reason, true),
                    Err(_) => ("its thread panicked".into(), true),
                };
                let (name, node) = (lane.import.name.clone(), lane.import.node.clone());
                ended.push((
                    lane.receiver.lane,
                    Notice::ImportEnded {
                        name,
                        node,
                        reason,
                        waits,
                    },
                ));
            }
            peer.rests
                .retain(|_, (until, _)| Instant::now() < *until + REASON_KEPT);
        }
        // A name without a source any more gives its place back: no lane and no publisher has it.
        self.imports
            .retain(|_, kept| Arc::strong_count(&kept.import) > 1 || kept.import.is_published());
        unsaid.iter().for_each(|lane| self.forget_sender(lane));
        for (lane, notice) in ended {
            self.forget_sender(&lane);
            self.forget_receiver(&lane);
            self.shared.notice(notice);
        }
    }
}

/// Whether a name has an owner that publishes no samples.
fn is_no_publisher(error: &Error) -> bool {
    matches!(
        error,
        Error::Local(warpipe::Error::Name(warpipe::NameFault::OtherKind { .. }))
    )
}

/// Why an export ended, and how long its name rests.
fn export_reason(
    sender: &LaneSender,
    result: std::thread::Result<Result<End>>,
) -> (String, Duration) {
    match result {
        // By the policy: not again while this peer is present.
        Ok(Ok(End::Failed(reason))) => (reason, Duration::from_secs(u32::MAX.into())),
        Ok(Ok(End::Paused)) => (
            sender
                .ended()
                .unwrap_or_else(|| "the peer did not take it".into()),
            RETRY,
        ),
        Ok(Ok(end)) => (end_text(&end), Duration::ZERO),
        Ok(Err(error)) => (error.to_string(), RETRY),
        Err(_) => ("its thread panicked".into(), RETRY),
    }
}

fn end_text(end: &End) -> String {
    match end {
        End::Closed => "its publisher closed".into(),
        End::Died => "its publisher died".into(),
        End::Failed(reason) => reason.escape_debug().to_string(),
        End::Paused => "paused".into(),
    }
}
