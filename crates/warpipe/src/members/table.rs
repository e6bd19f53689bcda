//! The table of members that a watch knows.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use super::changes::Cleanup;
use super::{Change, HEARTBEAT, Introduction, MemberInfo, member_name};
use crate::error::{Error, Result};
use crate::ipc::PeerState;
use crate::ipc::domain::{Author, Domain, EndpointName};
use crate::ipc::{ClientSession, IncomingReply};
use crate::runtime::heartbeat::{PeerHeartbeat, Uptime};
use crate::runtime::reactor::STALLED_AFTER;
use crate::shm::page::SharedPage;

/// A member that has answered.
pub(super) struct MemberEntry {
    name: EndpointName,
    introduction: Introduction,
    page: SharedPage,
    pulse: PeerHeartbeat,
    is_stalled: bool,
    is_suspect: bool,
    /// Dropped last: it closes the session.
    session: ClientSession,
}

/// A process that listens under a member's name and has not answered yet.
pub(super) struct UnresponsiveMember {
    pub(super) pid: i32,
    pub(super) uid: u32,
    /// The time since it was first called. Read at each tick.
    pub(super) clock: Uptime,
}

/// The work that a proven death leaves.
pub(super) struct MemberDeath {
    pub(super) member: MemberInfo,
    pub(super) author: Author,
    pub(super) cleanups: Vec<Cleanup>,
    /// Drop it while no lock is held.
    pub(super) removed: MemberEntry,
}

/// All members and unanswered names of a watch.
#[derive(Default)]
pub(super) struct MemberTable {
    /// By a number that this watch counts up.
    entries: BTreeMap<u64, MemberEntry>,
    pub(super) unresponsive: HashMap<EndpointName, UnresponsiveMember>,
    cleanups: HashMap<String, Vec<Cleanup>>,
    cleanups_count: usize,
    /// Names under `members/` that the last scan could not follow.
    pub(super) overlooked: usize,
}

/// The most clean-ups that are registered with one watch.
const CLEANUPS_MAX: usize = 4096;

impl MemberEntry {
    /// Opens the entry from a member's reply.
    pub(super) fn open(
        name: EndpointName,
        session: ClientSession,
        incoming: IncomingReply,
    ) -> Result<MemberEntry> {
        let (introduction, [fd]) = incoming.open::<Introduction, 1>(name.as_str())?;
        let introduction = introduction.check(name.as_str())?;
        let page = SharedPage::read(fd, introduction.page_bytes as usize, name.as_str())?;
        let pulse = PeerHeartbeat::new(page.at::<AtomicU64>(HEARTBEAT).load(Relaxed));
        Ok(MemberEntry {
            name,
            introduction,
            page,
            pulse,
            is_stalled: false,
            is_suspect: false,
            session,
        })
    }

    pub(super) fn session(&self) -> &ClientSession {
        &self.session
    }

    fn state(&self) -> PeerState {
        match (self.is_suspect, self.is_stalled) {
            (true, _) => PeerState::Suspect,
            (_, true) => PeerState::Stalled,
            _ => PeerState::Alive,
        }
    }

    fn info(&self, state: PeerState) -> MemberInfo {
        MemberInfo {
            name: member_name(&self.name).unwrap_or_default().to_owned(),
            role: self.introduction.role.clone(),
            pid: self.session.pid(),
            uid: self.session.uid(),
            state,
            silent_for: self.pulse.silence(),
            since_ns: self.introduction.since_ns,
            generation: self.session.generation(),
            endpoints: Vec::new(),
        }
    }
}

impl MemberTable {
    /// Members and names that have not answered yet.
    pub(super) fn len(&self) -> usize {
        self.entries.len() + self.unresponsive.len()
    }

    /// The names of the members that are present and not suspect.
    pub(super) fn present(&self) -> HashSet<EndpointName> {
        let present = self.entries.values().filter(|entry| !entry.is_suspect);
        present.map(|entry| entry.name.clone()).collect()
    }

    /// The names of the members that are present, or were until their connections were lost.
    pub(super) fn known(&self) -> HashSet<EndpointName> {
        let entries = self.entries.values();
        entries.map(|entry| entry.name.clone()).collect()
    }

    /// Adds a member that has answered. A member that returns after its connection was lost,
    /// with the same incarnation, is no change.
    pub(super) fn admit(&mut self, id: u64, mut entry: MemberEntry) -> Option<Change> {
        let is_same = |(_, other): &(&u64, &MemberEntry)| {
            other.name == entry.name
                && other.session.generation() == entry.session.generation()
                && other.is_suspect
        };
        let known = self.entries.iter().find(is_same).map(|(id, _)| *id);
        let told = match known.and_then(|id| self.entries.remove(&id)) {
            Some(known) => {
                (entry.is_stalled, entry.pulse) = (known.is_stalled, known.pulse);
                None
            }
            None => Some(Change::Joined(entry.info(PeerState::Alive))),
        };
        self.entries.insert(id, entry);
        told
    }

    /// A member's socket has closed. After a graceful close the member is gone; else it stays until
    /// its death is proven.
    pub(super) fn ended(&mut self, id: u64, graceful: bool) -> Option<(Change, MemberEntry)> {
        if !graceful {
            self.entries.get_mut(&id)?.is_suspect = true;
            return None;
        }
        let entry = self.entries.remove(&id)?;
        Some((Change::Left(entry.info(PeerState::Leaving)), entry))
    }

    pub(super) fn died(&mut self, id: u64) -> Option<MemberDeath> {
        let entry = self.entries.remove(&id)?;
        let member = entry.info(PeerState::Dead);
        let cleanups = self.cleanups.remove(&member.name).unwrap_or_default();
        self.cleanups_count -= cleanups.len();
        Some(MemberDeath {
            author: entry.introduction.author,
            member,
            cleanups,
            removed: entry,
        })
    }

    /// Refreshes the heartbeat of every member. Call it with each tick.
    pub(super) fn refresh_heartbeats(&mut self) -> Vec<Change> {
        let mut changes = Vec::new();
        for unresponsive in self.unresponsive.values() {
            unresponsive.clock.ran();
        }
        for entry in self.entries.values_mut().filter(|entry| !entry.is_suspect) {
            entry
                .pulse
                .tick(entry.page.at::<AtomicU64>(HEARTBEAT).load(Relaxed));
            let is_stalled = entry.pulse.is_stalled();
            if is_stalled != std::mem::replace(&mut entry.is_stalled, is_stalled) {
                let info = entry.info(entry.state());
                changes.push(if is_stalled {
                    Change::Stalled(info)
                } else {
                    Change::Recovered(info)
                });
            }
        }
        changes
    }

    pub(super) fn register(&mut self, name: &str, cleanup: Cleanup) -> Result<()> {
        if self.cleanups_count >= CLEANUPS_MAX {
            let allowed = format!("up to {CLEANUPS_MAX} at a time");
            return Err(Error::argument("on_death_of", CLEANUPS_MAX + 1, allowed));
        }
        let of_name = self.cleanups.entry(name.to_owned()).or_default();
        of_name.push(cleanup);
        self.cleanups_count += 1;
        Ok(())
    }

    /// All members, sorted by name, each with its author for the lock files. A name that has not
    /// answered for as long as a heartbeat may pause counts as stalled.
    pub(super) fn list(&self) -> Vec<(MemberInfo, Option<Author>)> {
        let known = self.entries.values().map(|entry| {
            let author = entry.introduction.author;
            (entry.info(entry.state()), Some(author))
        });
        let unresponsive = self
            .unresponsive
            .iter()
            .filter(|(_, unresponsive)| unresponsive.clock.ran() > STALLED_AFTER);
        let unresponsive = unresponsive.map(|(name, unresponsive)| (unresponsive.info(name), None));
        let mut all: Vec<_> = known.chain(unresponsive).collect();
        all.sort_by(|(one, _), (other, _)| one.name.cmp(&other.name));
        all
    }
}

impl UnresponsiveMember {
    fn info(&self, name: &EndpointName) -> MemberInfo {
        MemberInfo {
            name: member_name(name).unwrap_or_default().to_owned(),
            role: String::new(),
            pid: self.pid,
            uid: self.uid,
            state: PeerState::Stalled,
            silent_for: self.clock.ran(),
            since_ns: 0,
            generation: [0; 16],
            endpoints: Vec::new(),
        }
    }
}

/// Adds the endpoints that each member holds in the domain. A name that has not answered is listed
/// only if a process holds the name's lock.
pub(super) fn with_endpoints(
    list: Vec<(MemberInfo, Option<Author>)>,
    domain: &Domain,
) -> Result<Vec<MemberInfo>> {
    let held = domain.held()?;
    let complete = |(mut member, author): (MemberInfo, Option<Author>)| {
        let of_name = || {
            held.iter()
                .find(|(name, _)| member_name(name) == Some(&member.name))
                .map(|(_, author)| *author)
        };
        let author = author.or_else(of_name)?;
        // Of another user's endpoint only the listener is known, by its process id in this
        // namespace.
        let here = Some(Author::seen(member.pid)).filter(|here| here.pid > 0);
        let is_its = |holder: Author| holder == author || Some(holder) == here;
        member.endpoints = held
            .iter()
            .filter(|(_, holder)| is_its(*holder))
            .map(|(name, _)| name.clone())
            .collect();
        Some(member)
    };
    Ok(list.into_iter().filter_map(complete).collect())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_name_that_does_not_answer_is_not_stalled_while_the_watch_itself_stands_still() {
        let mut table = MemberTable::default();
        let unresponsive = UnresponsiveMember {
            pid: 1,
            uid: 1,
            clock: Uptime::default(),
        };
        unresponsive.clock.freeze(Duration::from_secs(60));
        let name = EndpointName::new("members/slow").unwrap();
        table.unresponsive.insert(name.clone(), unresponsive);
        assert!(table.list().is_empty());
        table.unresponsive[&name].clock.advance(STALLED_AFTER);
        let [(member, None)] = &table.list()[..] else {
            panic!("one member that has not answered");
        };
        assert_eq!((&*member.name, member.state), ("slow", PeerState::Stalled));
    }
}
