//! A pool. The devices of peers, owner and clearing stream work late, each in its own order.
//! Work enqueued while a process holds a block uses the block; the block may be lent again when all
//! of that is done, and never shows another user's bytes.
//!
//! The bookkeeping is the library's ([`PoolState`]); the code around it repeats `pool/allocator.rs`
//! and `pool/server.rs`.

#[path = "pool/owner.rs"]
mod owner;

use std::collections::VecDeque;
use std::sync::Arc;

use super::allocator::PoolState;
use super::allocator::users::{Quotas, Users};
use super::last_writers::LastWriter;
use crate::backend::TimelineWord;
use crate::device::Device;
use crate::lend::claims::{Borrowers, Claimant};
use crate::lend::share_words::{SLOTS, ShareWords};
use crate::memory::arena::SlotId;
use crate::shm::page::SharedPage;
use crate::verify::histories::Draw;
use crate::verify::histories::memory::{Memory, Place};
use crate::verify::{page, process};

const LIMIT: u64 = 4 << 20;
/// Few, so that words run out.
const CLAIMS_MAX: u32 = 3;
/// The owner's user.
const OWNER: u64 = 1;
/// Each peer's.
const USERS: [u64; 3] = [2, 3, OWNER];

/// The planted fault of the owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// It lets a block go behind a stream and sets no fence.
    ForgetsFence,
    /// It frees what a peer had when its process dies.
    FreesAtDeath,
    /// ... when it closes gracefully, whatever its words say.
    FreesAtGoodbye,
    /// A peer that opens a block is not counted.
    ForgetsBorrowers,
    /// It does not say that a block is still to be cleared.
    GivesUncleared,
    /// It notes one user where several had a block.
    NotesOneUser,
}

/// One taking of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Lent {
    slot: SlotId,
    place: Place,
    serial: u64,
}

/// A block in a peer's hands.
#[derive(Debug, Clone, Copy)]
struct Hand {
    lent: Lent,
    word: u32,
    value: u64,
    /// It may be used when the slot's word has come to this value.
    ready: Option<u64>,
    /// Others have it, too.
    is_shared: bool,
    is_given_back: bool,
}

/// Pending work of a peer's device.
#[derive(Debug, Clone, Copy)]
enum Job {
    Use(Hand),
    Release { word: u32, value: u64 },
}

/// Pending work of the owner's device, on a stream or on the clearing stream.
#[derive(Debug, Clone, Copy)]
enum Work {
    Use(Lent),
    Zero(Lent),
    Signal { slot: SlotId, value: u64 },
}

#[derive(Debug)]
struct Peer {
    number: u64,
    page: Arc<SharedPage>,
    hands: Vec<Hand>,
    device: VecDeque<Job>,
    is_dead: bool,
    is_leaving: bool,
}

/// A pool, and the truth about it.
pub struct Play {
    fault: Fault,
    state: PoolState,
    memory: Memory,
    words: Vec<TimelineWord>,
    peers: [Option<Peer>; USERS.len()],
    owned: Vec<Lent>,
    stream: VecDeque<Work>,
    scrubber: VecDeque<Work>,
    /// Slots freed by the proof of a death, once the owner's streams are past it.
    pending: Vec<SlotId>,
    fences: u64,
    numbers: u64,
}

impl Play {
    pub fn new(fault: Fault) -> Play {
        let users = Users::new(OWNER as u32, Quotas::default());
        let (offers, _) = ShareWords::for_many(SLOTS).expect("a page");
        let mut state = PoolState::new(&Device::host(), LIMIT, users, offers);
        state.borrowers = Borrowers::new(CLAIMS_MAX);
        let (memory, words, peers, owned, stream, scrubber, pending) = Default::default();
        Play {
            fault,
            state,
            memory,
            words,
            peers,
            owned,
            stream,
            scrubber,
            pending,
            fences: 0,
            numbers: 0,
        }
    }

    /// # Errors

    /// The violation, if any.
    pub fn act(&mut self, (kind, which, size): Draw) -> Result<(), String> {
        let (peer, which) = (
            usize::from(which) % USERS.len(),
            usize::from(which) / USERS.len(),
        );
        match kind % 19 {
            0 => self.come(peer),
            1 | 2 => self.ask(peer, bytes_of(size))?,
            3 => self.open(peer, which)?,
            4 => self.use_of(peer, which),
            5 | 6 => self.give_back(peer, which),
            7 | 8 => self.run(peer)?,
            9 => self.leave(peer),
            10 => self.die(peer),
            11 => self.prove(peer),
            12 => drop(self.own(bytes_of(size))?),
            13 => self.lend(which),
            14 => self.use_own(which),
            15 => self.let_go(which),
            16 => self.work(true)?,
            17 => self.work(false)?,
            _ => self.tick(),
        }
        self.check()
    }

    fn come(&mut self, peer: usize) {
        if self.peers[peer].is_some() {
            return;
        }
        self.numbers += 1;
        let (number, page) = (self.numbers, Arc::new(page(1)));
        let borrowers = &mut self.state.borrowers;
        borrowers.add(number, Claimant::new(page.clone(), process(), None));
        let (hands, device) = Default::default();
        self.peers[peer] = Some(Peer {
            number,
            page,
            hands,
            device,
            is_dead: false,
            is_leaving: false,
        });
    }

    fn alive(&mut self, peer: usize) -> Option<&mut Peer> {
        self.peers[peer]
            .as_mut()
            .filter(|peer| !peer.is_dead && !peer.is_leaving)
    }

    fn lent(&self, slot: SlotId) -> Lent {
        let (serial, at) = (self.state.arena.serial(slot), self.state.arena.slot(slot));
        Lent {
            slot,
            serial,
            place: Place {
                region: at.region,
                offset: at.offset,
                bytes: at.bytes(),
            },
        }
    }

    fn range(lent: &Lent) -> std::ops::Range<u64> {
        lent.place.offset..lent.place.offset + lent.place.bytes
    }

    /// As `PoolAllocator::take`: the block, and the fence behind which it is clear.
    fn take(
        &mut self,
        bytes: u64,
        user: u64,
        is_owned: bool,
    ) -> Result<Option<(Lent, Option<u64>)>, String> {
        self.reclaim();
        let slot = match self.state.arena.take(bytes) {
            Some(slot) => slot,
            None => {
                let (total, room) = (self.state.arena.total(), self.state.arena.room());
                let Some(growth) = self.state.arena.plan(bytes, total, room) else {
                    return Ok(None);
                };
                let made = growth.make(&Device::host());
                self.state
                    .adopt_for(OWNER as u32, growth, made, None)
                    .map_err(|error| error.to_string())?;
                let chunks = self.state.arena.chunks();
                self.memory.add(chunks[chunks.len() - 1].region.bytes());
                self.state
                    .arena
                    .take(bytes)
                    .ok_or("a new region has no room")?
            }
        };
        self.words.resize_with(
            self.words.len().max(slot as usize + 1),
            TimelineWord::default,
        );
        let lent = self.lent(slot);
        self.is_unused(&lent)?;
        let cleared_at = self.clear_for(&lent, user);
        if is_owned {
            self.state.owned.insert(slot, vec![]);
        }
        Ok(Some((lent, cleared_at)))
    }

    /// As `PoolAllocator::clear_for`.
    fn clear_for(&mut self, lent: &Lent, user: u64) -> Option<u64> {
        let last_writers = &mut self
            .state
            .users
            .region(lent.place.region as usize)
            .last_writers;
        let is_foreign = last_writers.are_foreign_to(user as u32, &Play::range(lent));
        last_writers.set(Play::range(lent), LastWriter::User(user as u32));
        is_foreign.then(|| {
            self.fences += 1;
            let value = self.fences;
            self.scrubber.extend([
                Work::Zero(*lent),
                Work::Signal {
                    slot: lent.slot,
                    value,
                },
            ]);
            self.state.arena.fence(lent.slot, value);
            value
        })
    }

    /// Nobody has the bytes, and no device has still to use them.
    fn is_unused(&self, lent: &Lent) -> Result<(), String> {
        let is_other = |other: &Lent| other.serial != lent.serial && other.place.meets(&lent.place);
        let hands = self
            .peers
            .iter()
            .flatten()
            .flat_map(|peer| &peer.hands)
            .map(|hand| &hand.lent);
        if let Some(other) = hands.chain(&self.owned).find(|other| is_other(other)) {
            return Err(format!("{lent:?} is lent, and somebody has {other:?}"));
        }
        let jobs = self.peers.iter().flatten().flat_map(|peer| &peer.device);
        let jobs = jobs.filter_map(|job| {
            if let Job::Use(hand) = job {
                Some(&hand.lent)
            } else {
                None
            }
        });
        let works = self.stream.iter().chain(&self.scrubber);
        let works = works.filter_map(|work| {
            if let Work::Use(it) | Work::Zero(it) = work {
                Some(it)
            } else {
                None
            }
        });
        let late = jobs.chain(works).find(|late| is_other(late));
        late.map_or(Ok(()), |late| {
            Err(format!(
                "{lent:?} is lent, and a device has still to use {late:?}"
            ))
        })
    }

    /// As `PoolAllocator::grant_new`.
    fn ask(&mut self, peer: usize, bytes: u64) -> Result<(), String> {
        let Some(number) = self.alive(peer).map(|peer| peer.number) else {
            return Ok(());
        };
        self.reclaim();
        if self.state.borrowers.is_full(number) {
            return Ok(());
        }
        if let Some((lent, cleared_at)) = self.take(bytes, USERS[peer], false)? {
            self.grant_block(peer, lent, cleared_at, false);
        }
        Ok(())
    }

    /// As `PoolAllocator::grant`. The peer that gets a block uses it at once.
    fn grant_block(&mut self, peer: usize, lent: Lent, cleared_at: Option<u64>, is_shared: bool) {
        let Some(Peer {
            number,
            hands,
            device,
            ..
        }) = &mut self.peers[peer]
        else {
            return;
        };
        let Ok((word, value)) = self.state.borrowers.claim(*number, lent.slot) else {
            return;
        };
        let hand = Hand {
            lent,
            word,
            value,
            ready: cleared_at.filter(|_| self.fault != Fault::GivesUncleared),
            is_shared,
            is_given_back: false,
        };
        hands.push(hand);
        device.push_back(Job::Use(hand));
    }

    /// As `PoolAllocator::grant_lent`.
    fn open(&mut self, peer: usize, which: usize) -> Result<(), String> {
        let Some(number) = self.alive(peer).map(|peer| peer.number) else {
            return Ok(());
        };
        self.reclaim();
        let lent_blocks: Vec<SlotId> = self
            .state
            .lent_blocks
            .values()
            .map(|lend| lend.slot)
            .collect();
        if lent_blocks.is_empty() || self.state.borrowers.is_full(number) {
            return Ok(());
        }
        let slot = lent_blocks
            .into_iter()
            .min_by_key(|&slot| (slot as usize + which) % 4)
            .unwrap_or_default();
        let lent = self.lent(slot);
        if !self.owned.contains(&lent) {
            return Err(format!(
                "{lent:?} can be opened, and its owner has let it go"
            ));
        }
        self.grant_block(peer, lent, None, true);
        if self.fault != Fault::ForgetsBorrowers {
            self.state.arena.hold(slot);
        }
        if USERS[peer] != OWNER && self.fault != Fault::NotesOneUser {
            self.state
                .users
                .region(lent.place.region as usize)
                .last_writers
                .set(Play::range(&lent), LastWriter::Several);
        }
        Ok(())
    }

    fn use_of(&mut self, peer: usize, which: usize) {
        let Some(peer) = self.alive(peer) else { return };
        let held: Vec<Hand> = peer
            .hands
            .iter()
            .copied()
            .filter(|hand| !hand.is_given_back)
            .collect();
        if let Some(&hand) = held.get(which % held.len().max(1)) {
            peer.device.push_back(Job::Use(hand));
        }
    }

    /// The process gives a block back: its device is to write the word behind all that it was
    /// given.
    fn give_back(&mut self, peer: usize, which: usize) {
        let Some(peer) = self.alive(peer) else { return };
        let held: Vec<usize> = (0..peer.hands.len())
            .filter(|&index| !peer.hands[index].is_given_back)
            .collect();
        if let Some(&index) = held.get(which % held.len().max(1)) {
            let hand = &mut peer.hands[index];
            hand.is_given_back = true;
            peer.device.push_back(Job::Release {
                word: hand.word,
                value: hand.value,
            });
        }
    }

    /// A peer's device makes its next step, also when its process is dead; it waits for what is
    /// being cleared.
    fn run(&mut self, index: usize) -> Result<(), String> {
        let Some(peer) = &mut self.peers[index] else {
            return Ok(());
        };
        match peer.device.front().copied() {
            Some(Job::Use(hand)) => {
                let word = &self.words[hand.lent.slot as usize];
                if hand.ready.is_some_and(|value| !word.reached(value)) {
                    return Ok(());
                }
                peer.device.pop_front();
                self.touch(hand.lent, USERS[index], hand.is_shared)
            }
            Some(Job::Release { word, value }) => {
                peer.device.pop_front();
                peer.hands.retain(|hand| hand.word != word);
                peer.page.word(word as usize).store(value);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// A device reads a block and writes it.
    fn touch(&mut self, lent: Lent, user: u64, is_shared: bool) -> Result<(), String> {
        let hands = self
            .peers
            .iter()
            .flatten()
            .flat_map(|peer| &peer.hands)
            .map(|hand| &hand.lent);
        let spoilt = |other: &&Lent| other.serial != lent.serial && other.place.meets(&lent.place);
        if let Some(other) = hands.chain(&self.owned).find(spoilt) {
            return Err(format!("user {user} writes {lent:?} late, into {other:?}"));
        }
        if let Some(other) = self
            .memory
            .foreign(lent.place, |tag| is_shared || tag == 0 || tag == user)
        {
            return Err(format!(
                "user {user} sees what user {other} left in {lent:?}"
            ));
        }
        self.memory.fill(lent.place, user);
        Ok(())
    }

    fn leave(&mut self, peer: usize) {
        let fault = self.fault;
        let Some(peer) = self
            .alive(peer)
            .filter(|peer| peer.hands.iter().all(|hand| hand.is_given_back))
        else {
            return;
        };
        peer.is_leaving = true;
        let number = peer.number;
        self.state.borrowers.leave(number, false);
        if fault == Fault::FreesAtGoodbye {
            self.free_deferred(number);
        }
        self.reclaim();
    }

    fn die(&mut self, peer: usize) {
        let Some(peer) = self.peers[peer].as_mut() else {
            return;
        };
        peer.is_dead = true;
        let number = peer.number;
        if self.fault == Fault::FreesAtDeath {
            self.free_deferred(number);
        }
    }

    /// From here on nothing of a dead peer's runs. As `PoolAllocator::on_disconnect`.
    fn prove(&mut self, peer: usize) {
        if let Some(Peer { number, .. }) = self.peers[peer].take_if(|peer| peer.is_dead) {
            self.free_deferred(number);
            self.reclaim();
        }
    }

    /// As `PoolAllocator::free_deferred`, up to its proof.
    fn free_deferred(&mut self, number: u64) {
        self.state.borrowers.leave(number, true);
        let dead = self.state.collect_released();
        self.pending.extend(dead);
    }

    fn check(&self) -> Result<(), String> {
        let (used, total) = (self.state.used(), self.state.arena.total());
        if used > total || total > LIMIT {
            return Err(format!("{used} bytes are used of {total}"));
        }
        Ok(())
    }

    /// All go, and everything is free again.
    ///
    /// # Errors
    /// What is not.
    pub fn finish(&mut self) -> Result<(), String> {
        (0..USERS.len()).for_each(|peer| self.die(peer));
        (0..USERS.len()).for_each(|peer| self.prove(peer));
        while !self.owned.is_empty() {
            self.let_go(0);
        }
        while !self.stream.is_empty() || !self.scrubber.is_empty() {
            self.work(true)?;
            self.work(false)?;
        }
        self.tick();
        self.tick();
        match self.state.used() {
            0 => Ok(()),
            used => Err(format!("{used} bytes are never free again")),
        }
    }
}

/// A few units, or up to half a region.
fn bytes_of(size: u8) -> u64 {
    match size {
        0..=63 => 1 + u64::from(size) * 40,
        _ => u64::from(size) * 4_000,
    }
}
