//! A pool's grants: peers take blocks, give them back by words that their devices write *later*,
//! close gracefully, die, and are proven dead, in any order. The bookkeeping is the library's
//! ([`PoolState`]); the code around it repeats `pool/allocator.rs` and `pool/server.rs`.
//!
//! Shown: a block is free only after its holder is past it. A dead peer's device may write until
//! its death is proven; a lying peer damages only its own blocks.

use std::collections::{HashMap, HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::allocator::users::{Quotas, Users};
use super::allocator::{LentBlock, PoolState};
use super::last_writers::LastWriter;
use crate::backend::Access;
use crate::device::Device;
use crate::lend::claims::{Borrowers, Claimant};
use crate::lend::share_words::{SLOTS, ShareWords};
use crate::memory::arena::SlotId;
use crate::shm::page::SharedPage;
use crate::verify::{page, process};

/// The owner's user; peer `n` is of user `n`.
const OWNER: u32 = 0;

/// The next act.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// A peer comes, under a new number.
    Come(u8),
    /// It asks for a block of its own.
    Ask(u8),
    /// It opens the block that the owner lends.
    Open(u8),
    /// Its process gives its oldest block back: the word is its device's to write.
    GiveBack(u8),
    /// Its device writes the oldest word that is due.
    Land(u8),
    /// It closes gracefully, having given everything back.
    Leave(u8),
    /// Its process dies. Its device does not yet.
    Die(u8),
    /// It is proven dead.
    Prove(u8),
    /// It writes into its page what comes to its mind.
    Lie(u8),
    /// The owner takes a block and lends it.
    LentBlock,
    /// The owner lets it go.
    LetGo,
    /// Streams of the owner's are past what they were given.
    Pass,
    /// The clearing stream has cleared its blocks.
    Clear,
    /// The reactor looks.
    Tick,
}

/// The planted fault of the owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    None,
    /// It frees what a peer had when its process dies.
    FreesAtDeath,
    /// ... when it closes gracefully, whatever its words say.
    FreesAtGoodbye,
    /// A peer that opens a block is not counted.
    ForgetsBorrowers,
    /// It clears nothing.
    ClearsNothing,
    /// It gives a block out before it is cleared.
    GivesUncleared,
    /// It notes one user where several had a block.
    NotesOneUser,
}

/// One held block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Hand {
    place: (u32, u64),
    word: u32,
    value: u64,
    /// Given back by the process; its device has still to write the word.
    is_given_back: bool,
}

/// A peer as it is.
#[derive(Debug, Clone, Default)]
struct Peer {
    number: u64,
    hands: Vec<Hand>,
    is_here: bool,
    is_dead: bool,
    is_leaving: bool,
    lies: bool,
}

/// A pool, and the truth about it.
pub struct Play {
    fault: Fault,
    state: PoolState,
    peers: Vec<Peer>,
    pages: HashMap<u64, Arc<SharedPage>>,
    next_number: u64,
    lent: Option<SlotId>,
    /// Slots freed by the proof of a death, after the owner's streams.
    pending: Vec<Vec<SlotId>>,
    fences: u64,
    cleared: u64,
    /// By place: the value at which what is under way there is cleared.
    clearing: HashMap<(u32, u64), u64>,
    /// By place: the user that wrote there last.
    written: HashMap<(u32, u64), u32>,
}

const BLOCK: u64 = 1 << 20;

/// Few, so that words run out.
const CLAIMS_MAX: u32 = 3;

impl Play {
    /// A pool of one region of two blocks, and peers that have not come yet.
    pub fn new(peers: usize, fault: Fault) -> Play {
        let device = Device::host();
        let users = Users::new(OWNER, Quotas::default());
        let (offers, _) = ShareWords::for_many(SLOTS).expect("a page");
        let mut state = PoolState::new(&device, 2 * BLOCK, users, offers);
        state.borrowers = Borrowers::new(CLAIMS_MAX);
        let (total, room) = (state.arena.total(), state.arena.room());
        let growth = state.arena.plan(BLOCK, total, room).expect("room");
        let made = growth.make(&device);
        state.adopt_for(OWNER, growth, made, None).expect("memory");
        Play {
            fault,
            state,
            peers: vec![Peer::default(); peers],
            pages: HashMap::new(),
            next_number: 1,
            lent: None,
            pending: Vec::new(),
            fences: 0,
            cleared: 0,
            clearing: HashMap::new(),
            written: HashMap::new(),
        }
    }

    /// Everything that may happen to so many peers.
    pub fn acts(peers: u8) -> Vec<Act> {
        let each = [
            Act::Come,
            Act::Ask,
            Act::Open,
            Act::GiveBack,
            Act::Land,
            Act::Leave,
            Act::Die,
            Act::Prove,
            Act::Lie,
        ];
        let of_peers = (0..peers).flat_map(|peer| each.map(|act| act(peer)));
        of_peers
            .chain([Act::LentBlock, Act::LetGo, Act::Pass, Act::Clear, Act::Tick])
            .collect()
    }

    /// Makes it happen.
    ///
    /// # Errors
    /// The violation, if any.
    pub fn act(&mut self, act: Act) -> Result<(), String> {
        match act {
            Act::Come(peer) => self.come(peer.into()),
            Act::Ask(peer) => self.ask(peer.into())?,
            Act::Open(peer) => self.open(peer.into()),
            Act::GiveBack(peer) => {
                let peer = &mut self.peers[usize::from(peer)];
                let alive = peer.is_here && !peer.is_dead;
                let oldest = peer
                    .hands
                    .iter_mut()
                    .find(|hand| alive && !hand.is_given_back);
                oldest
                    .into_iter()
                    .for_each(|hand| hand.is_given_back = true);
            }
            Act::Land(peer) => self.land(peer.into()),
            Act::Leave(peer) => self.leave(peer.into()),
            Act::Die(peer) => self.die(peer.into()),
            Act::Prove(peer) => self.prove(peer.into()),
            Act::Lie(peer) => self.lie(peer.into()),
            Act::LentBlock => self.lend()?,
            Act::LetGo => {
                if let Some(slot) = self.lent.take() {
                    self.state.release_owner(slot);
                }
            }
            Act::Pass => {
                let freed = std::mem::take(&mut self.pending);
                freed
                    .into_iter()
                    .flatten()
                    .for_each(|slot| self.state.arena.release(slot));
            }
            Act::Clear => self.cleared = self.fences,
            Act::Tick => self.reclaim(),
        }
        self.check()
    }

    fn come(&mut self, peer: usize) {
        if self.peers[peer].is_here {
            return;
        }
        let (number, page) = (self.next_number, Arc::new(page(1)));
        self.next_number += 1;
        self.pages.insert(number, page.clone());
        let claimant = Claimant::new(page, process(), None);
        self.state.borrowers.add(number, claimant);
        self.peers[peer] = Peer {
            number,
            is_here: true,
            ..Peer::default()
        };
    }

    fn is_alive(&self, peer: usize) -> bool {
        let peer = &self.peers[peer];
        peer.is_here && !peer.is_dead && !peer.is_leaving
    }

    fn place(&self, slot: SlotId) -> (u32, u64) {
        let slot = self.state.arena.slot(slot);
        (slot.region, slot.offset)
    }

    /// As `PoolAllocator::take`.
    fn take(&mut self, user: u32, is_owned: bool) -> Result<Option<SlotId>, String> {
        self.reclaim();
        let Some(slot) = self.state.arena.take(BLOCK) else {
            return Ok(None);
        };
        let place = self.place(slot);
        for peer in self.peers.iter().filter(|peer| !peer.lies) {
            if let Some(hand) = peer.hands.iter().find(|hand| hand.place == place) {
                return Err(format!(
                    "the block at {place:?} is lent again while {peer:?} has it: {hand:?}"
                ));
            }
        }
        if self.lent.is_some_and(|lent| self.place(lent) == place) {
            return Err(format!(
                "the block at {place:?} is lent again while its owner has it"
            ));
        }
        if self
            .clearing
            .get(&place)
            .is_some_and(|&value| value > self.cleared)
        {
            return Err(format!(
                "the block at {place:?} is lent again before it is cleared"
            ));
        }
        let range = place.1..place.1 + BLOCK;
        let last_writers = &mut self.state.users.region(0).last_writers;
        if last_writers.are_foreign_to(user, &range) && self.fault != Fault::ClearsNothing {
            self.fences += 1;
            self.clearing.insert(place, self.fences);
            if self.fault != Fault::GivesUncleared {
                self.state.arena.fence(slot, self.fences);
            }
            // Its next holder waits for that and does not see the old contents.
            self.written.remove(&place);
        }
        last_writers.set(range, LastWriter::User(user));
        if let Some(&other) = self.written.get(&place).filter(|&&other| other != user) {
            return Err(format!(
                "user {user} sees what user {other} left at {place:?}"
            ));
        }
        if is_owned {
            self.state.owned.insert(slot, vec![]);
        }
        Ok(Some(slot))
    }

    fn ask(&mut self, peer: usize) -> Result<(), String> {
        let number = self.peers[peer].number;
        if !self.is_alive(peer) || self.state.borrowers.is_full(number) {
            return Ok(());
        }
        if let Some(slot) = self.take(peer as u32 + 1, false)? {
            self.grant_block(peer, slot);
        }
        Ok(())
    }

    fn grant_block(&mut self, peer: usize, slot: SlotId) {
        let place = self.place(slot);
        let Peer { number, hands, .. } = &mut self.peers[peer];
        let claim = self.state.borrowers.claim(*number, slot);
        let (word, value) = claim.expect("it was asked");
        hands.push(Hand {
            place,
            word,
            value,
            is_given_back: false,
        });
        self.written.insert(place, peer as u32 + 1);
    }

    fn open(&mut self, peer: usize) {
        let (Some(slot), number) = (self.lent, self.peers[peer].number) else {
            return;
        };
        if !self.is_alive(peer) || self.state.borrowers.is_full(number) {
            return;
        }
        self.grant_block(peer, slot);
        if self.fault != Fault::ForgetsBorrowers {
            self.state.arena.hold(slot);
        }
        if self.fault != Fault::NotesOneUser {
            let (region, offset) = self.place(slot);
            self.state
                .users
                .region(region as usize)
                .last_writers
                .set(offset..offset + BLOCK, LastWriter::Several);
        }
    }

    /// The word comes behind all that the device was to do with the block.
    fn land(&mut self, peer: usize) {
        let Peer { number, hands, .. } = &mut self.peers[peer];
        if let Some(index) = hands.iter().position(|hand| hand.is_given_back) {
            let hand = hands.remove(index);
            self.pages[number]
                .word(hand.word as usize)
                .store(hand.value);
        }
    }

    fn leave(&mut self, peer: usize) {
        let it = &mut self.peers[peer];
        if !it.is_here
            || it.is_dead
            || it.is_leaving
            || it.hands.iter().any(|hand| !hand.is_given_back)
        {
            return;
        }
        it.is_leaving = true;
        let number = it.number;
        self.state.borrowers.leave(number, false);
        if self.fault == Fault::FreesAtGoodbye {
            self.free(number);
            self.state_passes();
        }
        self.reclaim();
    }

    fn die(&mut self, peer: usize) {
        let it = &mut self.peers[peer];
        if !it.is_here || it.is_dead {
            return;
        }
        it.is_dead = true;
        let number = it.number;
        if self.fault == Fault::FreesAtDeath {
            self.free(number);
            self.state_passes();
        }
    }

    fn state_passes(&mut self) {
        let freed = std::mem::take(&mut self.pending);
        freed
            .into_iter()
            .flatten()
            .for_each(|slot| self.state.arena.release(slot));
    }

    /// As `PoolAllocator::free_deferred`.
    fn free(&mut self, number: u64) {
        self.state.borrowers.leave(number, true);
        let dead = self.state.collect_released();
        self.pending.push(dead);
    }

    /// From here on nothing of it writes: what was under way never lands.
    fn prove(&mut self, peer: usize) {
        if !self.peers[peer].is_here || !self.peers[peer].is_dead {
            return;
        }
        let number = self.peers[peer].number;
        self.peers[peer] = Peer::default();
        self.free(number);
        self.reclaim();
    }

    fn lie(&mut self, peer: usize) {
        if !self.is_alive(peer) {
            return;
        }
        let Peer {
            number,
            hands,
            lies,
            ..
        } = &mut self.peers[peer];
        *lies = true;
        for hand in hands {
            self.pages[number]
                .word(hand.word as usize)
                .store(hand.value);
        }
    }

    fn lend(&mut self) -> Result<(), String> {
        if self.lent.is_none()
            && let Some(slot) = self.take(OWNER, true)?
        {
            self.lent = Some(slot);
            let place = self.place(slot);
            self.written.insert(place, OWNER);
            let lend = LentBlock {
                slot,
                bytes: BLOCK,
                access: Access::ReadWrite,
            };
            self.state.lent_blocks.insert(1, lend);
            self.state.owned.insert(slot, vec![1]);
        }
        Ok(())
    }

    /// As `PoolAllocator::reclaim`.
    fn reclaim(&mut self) {
        let dead = self.state.collect_released();
        if !dead.is_empty() {
            self.pending.push(dead);
        }
        let cleared = self.cleared;
        self.state.arena.collect(|_, value| value <= cleared);
    }

    /// The slots that are held, and by how many.
    fn held(&self) -> impl Iterator<Item = (SlotId, u32)> {
        let slots = self.state.arena.slots();
        let held = slots.filter(|(_, slot)| slot.holders > 0);
        held.map(|(id, slot)| (id, slot.holders))
    }

    /// The invariant of every state.
    fn check(&self) -> Result<(), String> {
        let mut places = HashSet::new();
        for (slot, _) in self.held() {
            if !places.insert(self.place(slot)) {
                return Err(format!("two blocks lie at {:?}", self.place(slot)));
            }
        }
        for peer in self.peers.iter().filter(|peer| !peer.lies) {
            for hand in &peer.hands {
                if !places.contains(&hand.place) {
                    return Err(format!("{peer:?} has a block that is free: {hand:?}"));
                }
            }
        }
        if self.state.used() > self.state.arena.total() {
            return Err(format!(
                "{} bytes are used of {}",
                self.state.used(),
                self.state.arena.total()
            ));
        }
        Ok(())
    }

    /// Everybody goes, and everything is free again.
    ///
    /// # Errors
    /// What is not.
    pub fn finish(&mut self) -> Result<(), String> {
        for peer in 0..self.peers.len() as u8 {
            for act in [Act::Die(peer), Act::Prove(peer)] {
                self.act(act)?;
            }
        }
        for act in [
            Act::LetGo,
            Act::Clear,
            Act::Pass,
            Act::Tick,
            Act::Clear,
            Act::Tick,
        ] {
            self.act(act)?;
        }
        if self.state.used() != 0 {
            return Err(format!("{} bytes are never free again", self.state.used()));
        }
        Ok(())
    }

    /// All that tells one state from another; what only counts is left out.
    fn print(&self) -> String {
        let mut blocks: Vec<_> = self
            .held()
            .map(|(slot, holders)| {
                (
                    self.place(slot),
                    holders,
                    self.state.owned.contains_key(&slot),
                )
            })
            .collect();
        blocks.sort();
        let mut written: Vec<_> = self.written.iter().collect();
        written.sort();
        let words = |number: u64| {
            let page = self.pages.get(&number)?;
            Some(
                (0..CLAIMS_MAX)
                    .map(|word| page.word(word as usize).load())
                    .collect::<Vec<_>>(),
            )
        };
        let peers: Vec<_> = self
            .peers
            .iter()
            .map(|peer| (peer, words(peer.number)))
            .collect();
        let waiting = self.state.arena.waiting_bytes();
        let behind = self.fences - self.cleared;
        let text = format!(
            "{blocks:?} {written:?} {peers:?} {:?} {:?} {:?} {waiting} {behind} {:?}",
            self.state.borrowers, self.lent, self.pending, self.state.users
        );
        // Not where its pages lie.
        let pages = self.pages.values();
        pages.fold(text, |text, page| text.replace(&format!("{page:?}"), ""))
    }
}

/// A panic is a finding, too.
fn sound(play: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(play)).unwrap_or_else(|_| Err("the books do not add up".into()))
}

/// Plays every row of acts up to a length, each state once. How many states there were.
///
/// # Errors
/// The violation, and the acts before it.
pub fn search(peers: u8, length: usize, fault: Fault) -> Result<usize, String> {
    let acts = Play::acts(peers);
    let (mut seen, mut open) = (HashSet::new(), VecDeque::from([Vec::new()]));
    while let Some(row) = open.pop_front() {
        for &act in &acts {
            let mut row = row.clone();
            row.push(act);
            let mut play = Play::new(peers.into(), fault);
            let played = sound(|| row.iter().try_for_each(|&act| play.act(act)));
            played.map_err(|wrong| format!("{wrong}\nafter {row:?}"))?;
            if seen.insert(play.print()) {
                sound(|| play.finish()).map_err(|wrong| format!("{wrong}\nafter {row:?}"))?;
                if row.len() < length {
                    open.push_back(row);
                }
            }
        }
    }
    Ok(seen.len())
}
