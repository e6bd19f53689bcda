//! Delivery to one chosen subscriber, and slots that stay held so that they can be given to another one later.
//!
//! What is sent with an observer about always signals the slot's own word on the board, as with a history: whoever gets
//! the same slot later has its `ready` ordered behind that.

use super::*;
use crate::link::ring::Room;
use crate::link::segment::Segment;

/// Who gets a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::channel) enum Recipients {
    /// Every subscriber.
    All,
    /// The one with this number.
    One(u64),
    /// Nobody yet.
    Nobody,
}

impl Recipients {
    #[inline]
    pub(super) fn include(self, outlet: &Outlet) -> bool {
        match self {
            Recipients::All => true,
            Recipients::One(id) => outlet.id == id,
            Recipients::Nobody => false,
        }
    }

    /// Whether a send must wait for this one.
    #[inline]
    pub(super) fn await_it(self, outlet: &Outlet) -> bool {
        self.include(outlet) && outlet.must_be_awaited()
    }

    /// Whether the one who is meant is still there.
    #[inline]
    pub(super) fn check(self, name: &str, state: &mut State) -> Result<()> {
        match self {
            Recipients::One(id) if !state.is_live(id) => {
                Err(Error::LinkClosed { name: name.to_string(), reason: "the one it was meant for has gone".into() })
            }
            _ => Ok(()),
        }
    }
}

/// A live subscriber, to be chosen.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Member {
    pub(crate) id: u64,
    /// For people.
    pub(crate) pid: i32,
    pub(crate) process: ProcessId,
    /// What it said that it is.
    pub(crate) generation: [u8; 16],
}

/// Of subscribers that have gone.
#[derive(Debug, Default)]
pub(crate) struct Departures {
    /// What they had been given and not taken: their number, the position.
    pub(crate) untaken: Vec<(u64, u64)>,
    /// What they had said that they are, when they hold nothing any more.
    pub(crate) generations: Vec<[u8; 16]>,
}

/// Hears of subscribers that come and go.
#[derive(Debug)]
pub(crate) struct Observer {
    pub(crate) bell: Bell,
    has_news: AtomicBool,
}

impl Observer {
    pub(crate) fn new() -> Result<Observer> {
        Ok(Observer { bell: Bell::new()?, has_news: AtomicBool::new(true) })
    }

    pub(crate) fn tell(&self) {
        self.has_news.store(true, Ordering::SeqCst);
        self.bell.ring();
    }

    /// Whether anything was told since it was last asked.
    #[inline]
    pub(crate) fn take_news(&self) -> bool {
        self.has_news.load(Ordering::Relaxed) && self.has_news.swap(false, Ordering::SeqCst)
    }
}

/// A filled slot that is kept, so that what lies in it can be given to one subscriber after another without a copy.
#[derive(Debug)]
pub(crate) struct Parcel {
    core: Arc<Core>,
    slot: SlotId,
    layout: Layout,
}

impl Parcel {
    /// Gives it to the subscriber with this number, too. `None` if that has gone or has no room.
    pub(crate) fn forward(&self, to: u64, metadata: &Metadata) -> Result<Option<u64>> {
        self.core.forward(self.slot, &self.layout, metadata, to)
    }
}

impl Drop for Parcel {
    fn drop(&mut self) {
        if self.core.home.is_here() {
            self.core.lock().arena.let_go(self.slot);
        } else {
            std::mem::forget(self.core.clone());
        }
    }
}

impl State {
    fn is_live(&mut self, id: u64) -> bool {
        self.find(id).is_some_and(|outlet| outlet.is_live())
    }
}

impl Core {
    /// Wakes who waits for a change, and tells the observer.
    pub(super) fn ring(&self) {
        self.bell.ring();
        self.options.observer.iter().for_each(|observer| observer.tell());
    }

    /// The subscribers that can be chosen.
    pub(in crate::channel) fn members(&self) -> Vec<Member> {
        let state = self.lock();
        let live = state.outlets.iter().filter(|outlet| outlet.is_live());
        live.map(|o| Member { id: o.id, pid: o.peer.pid, process: o.peer.id, generation: o.generation }).collect()
    }

    /// The number of the live subscriber in that process.
    pub(in crate::channel) fn member_of(&self, process: ProcessId) -> Option<u64> {
        let state = self.lock();
        state.outlets.iter().find(|outlet| outlet.is_live() && outlet.peer.id == process).map(|outlet| outlet.id)
    }

    /// Whether the subscriber still gets samples.
    pub(in crate::channel) fn has_member(&self, id: u64) -> bool {
        self.lock().is_live(id)
    }

    /// Sends to one subscriber, as [`send`](Self::send) does to all.
    pub(in crate::channel) fn send_to(
        &self,
        slot: SlotId,
        layout: &Layout,
        metadata: &Metadata,
        stream: &Stream,
        to: u64,
        limit: Option<Duration>,
    ) -> Result<u64, Unsent> {
        self.admit(stream)?;
        let to = Recipients::One(to);
        let mut turn = self.make_room_within(to, limit).map_err(Unsent::Untold)?;
        let sequence = self.deliver(&mut turn, slot, layout, metadata, stream, to)?;
        turn.arena.let_go(slot);
        Ok(sequence)
    }

    /// Keeps what lies in `slot` behind the work on `stream`, and gives it to one subscriber at once if that has room.
    /// Returns the position there.
    pub(in crate::channel) fn post(
        &self,
        slot: SlotId,
        layout: &Layout,
        metadata: &Metadata,
        stream: &Stream,
        to: Option<u64>,
    ) -> Result<(Parcel, Option<u64>), Unsent> {
        self.admit(stream)?;
        let mut turn = self.make_room(Recipients::Nobody).map_err(Unsent::Untold)?;
        let to = to.filter(|&id| turn.has_room(id)).map_or(Recipients::Nobody, Recipients::One);
        self.deliver(&mut turn, slot, layout, metadata, stream, to)?;
        // One that has left meanwhile was told nothing.
        let position = turn.places.first().filter(|place| place.is_told).map(|place| place.position);
        let core = self.this.upgrade().ok_or(Unsent::Untold(Error::Forked))?;
        Ok((Parcel { core, slot, layout: *layout }, position))
    }

    fn forward(&self, slot: SlotId, layout: &Layout, metadata: &Metadata, to: u64) -> Result<Option<u64>> {
        self.home.check()?;
        let mut turn = self.take_turn()?;
        self.reclaim(&mut turn, false);
        if turn.closed || !turn.has_room(to) {
            return Ok(None);
        }
        let State { arena, outlets, .. } = &mut *turn;
        let Some(outlet) = outlets.iter_mut().find(|outlet| outlet.id == to) else { return Ok(None) };
        let Some(position) = outlet.place(|_| {}) else { return Ok(None) };
        let fence = arena.fence_of(slot);
        let word = outlet.ring.segment().clone();
        self.ready_behind(&mut turn, slot, fence, &word, position)?;
        let sequence = turn.next_sequence;
        let State { arena, outlets, next_sequence, .. } = &mut *turn;
        let Some(outlet) = outlets.iter_mut().find(|outlet| outlet.id == to) else { return Ok(None) };
        if !outlet.is_live() {
            outlet.ring.forgo(position);
            return Ok(None);
        }
        *next_sequence += 1;
        arena.hold(slot);
        let (region, offset) = (arena.slot(slot).region, arena.slot(slot).offset);
        let metadata = metadata.clone();
        let description = Description {
            sequence,
            sent_ns: now_ns(),
            region,
            slot: offset,
            layout: *layout,
            metadata,
            completion: None,
        };
        outlet.publish(position, slot, &description);
        outlet.wake_sleeper();
        Ok(Some(position))
    }

    /// Makes `position` of a link ready behind the work that fills `slot`: by the CPU if that is done, else on the
    /// device, behind the word that the original send signals. That has been enqueued: whoever sends has the turn.
    fn ready_behind(
        &self,
        turn: &mut Turn<'_>,
        slot: SlotId,
        fence: u64,
        segment: &Arc<Segment>,
        position: u64,
    ) -> Result<()> {
        let index = slot as usize;
        if self.board.word(index).reached(fence) {
            segment.entry(position).ready.store(position);
        } else if let Some(stream) = &self.forward_stream {
            let wait = StreamOp::Wait { word: self.board.device_word(index), value: fence };
            let signal = StreamOp::Signal { word: segment.ready_word(position), value: position };
            // SAFETY: the board and the link's segment outlive their operations (see `send`).
            turn.unlocked(|| unsafe { stream.batch(&[wait, signal]) })?;
        }
        Ok(())
    }

    /// Ends one subscriber's link.
    pub(in crate::channel) fn expel(&self, id: u64, reason: &str) {
        let mut state = self.lock();
        if let Some(outlet) = state.find(id).filter(|outlet| outlet.is_live()) {
            outlet.leave(Some(Farewell::Failed(message::text(reason))));
        }
        drop(state);
        self.ring();
    }

    /// What those who have gone by now leave, each told once; with `all`, who is still here is named, too.
    pub(in crate::channel) fn take_departures(&self, all: bool) -> Departures {
        let mut state = self.lock();
        let mut departures = std::mem::take(&mut state.departures);
        for outlet in &mut state.outlets {
            let id = outlet.id;
            departures.generations.extend(all.then_some(outlet.generation));
            departures.untaken.extend(std::mem::take(&mut outlet.untaken).into_iter().map(|position| (id, position)));
        }
        departures
    }
}

impl State {
    fn has_room(&mut self, id: u64) -> bool {
        self.find(id).is_some_and(|outlet| outlet.is_live() && outlet.ring.room() != Room::Full)
    }
}
