//! A sample's way out: a place on each link, the entries, the signals that complete it, and what is undone when they fail.

use super::*;

impl Core {
    /// Sends what lies in `slot` to every subscriber, behind the work enqueued on `stream`.
    pub(in crate::channel) fn send(
        &self,
        slot: SlotId,
        layout: &Layout,
        metadata: &Metadata,
        stream: &Stream,
    ) -> Result<u64, Unsent> {
        let _range = nvtx::range(nvtx::SEND);
        stream.check_of(&self.device).map_err(Unsent::Untold)?;
        let mut state = self.make_room(Recipients::All).map_err(Unsent::Untold)?;
        let sequence = self.deliver(&mut state, slot, layout, metadata, stream, Recipients::All)?;
        state.arena.let_go(slot);
        Ok(sequence)
    }

    /// Tells the recipients of what lies in `slot`, and enqueues on `stream` what completes it. The caller's hold on the
    /// slot stays, unless subscribers had been told when it failed.
    pub(super) fn deliver(
        &self,
        state: &mut State,
        slot: SlotId,
        layout: &Layout,
        metadata: &Metadata,
        stream: &Stream,
        to: Recipients,
    ) -> Result<u64, Unsent> {
        self.note(stream);
        self.prepare(state, slot, to);
        // SAFETY: the words lie in link segments and the board, which are let go only when this stream, noted above,
        // is proven to be past them (`close`, `drop_outlet`).
        let enqueue = |state: &State| unsafe { stream.batch(&state.ops) };
        // It is `ready` that orders the devices, so the entries may be out before the driver is asked: a subscriber on
        // another core enqueues its wait and its kernels meanwhile.
        let early = self.signals_first(state).then(|| enqueue(state));
        let sequence = self.tell(state, slot, layout, metadata);
        let enqueued = early.unwrap_or_else(|| enqueue(state));
        // Only now: a wake-up costs as much as many signals, and who wakes finds the words of the host's streams stored.
        state.wake_sleepers();
        if let Err(error) = enqueued {
            self.abort(state, slot);
            return Err(Unsent::Told(error));
        }
        Ok(sequence)
    }

    /// Whether the signals must, or should, be enqueued before the entries are out.
    ///
    /// They must for a subscriber in this process: the streams of one context share a few hardware queues, and a wait
    /// that gets into one ahead of its own signal is never over. They should on the host, where there is no driver to
    /// wait for: an entry that is ready from the first goes to the reader's cache once, and not there and back again.
    fn signals_first(&self, state: &State) -> bool {
        let is_host = self.device.info().id.kind == DeviceKind::Host;
        is_host || state.places.iter().any(|&(index, _)| state.outlets[index].is_local)
    }

    /// Finds the places of one sample, and leaves the signals that complete it in `state.ops`. To be followed by
    /// [`tell`](Self::tell), whatever comes of the signals: a word that is reached must not meet another sample.
    fn prepare(&self, state: &mut State, slot: SlotId, to: Recipients) {
        state.place(to);
        let State { outlets, places, ops, .. } = &mut *state;
        ops.clear();
        ops.extend(places.iter().map(|&(index, position)| outlets[index].ready_op(position)));
        // Without a reader's word that says when the slot is done, its own word on the board does.
        if self.history_stream.is_some() || state.places.is_empty() {
            let value = state.next_fence();
            state.arena.fence(slot, value);
            state.ops.push(StreamOp::Signal { word: self.board.device_word(slot as usize), value });
        }
    }

    /// Writes the entries of one sample at the places that [`prepare`](Self::prepare) found.
    fn tell(&self, state: &mut State, slot: SlotId, layout: &Layout, metadata: &Metadata) -> u64 {
        let sequence = state.next_sequence;
        state.next_sequence += 1;
        let (region, offset) = (state.arena.slot(slot).region, state.arena.slot(slot).offset);
        let description = Description {
            sequence,
            sent_ns: now_ns(),
            region,
            slot: offset,
            layout: *layout,
            metadata: metadata.clone(),
        };
        let State { arena, outlets, places, .. } = state;
        for &(index, position) in places.iter() {
            arena.hold(slot);
            outlets[index].publish(position, slot, &description);
        }
        let keep = self.options.history as usize;
        if keep > 0 {
            state.remember(slot, description, keep);
        }
        sequence
    }

    /// Ends a sample whose data will never be complete, for every subscriber that was told of it.
    fn abort(&self, state: &mut State, slot: SlotId) {
        state.outlets.iter_mut().for_each(|outlet| outlet.abort(slot));
        let State { arena, history, .. } = state;
        history.iter_mut().filter(|kept| kept.slot == slot).for_each(|kept| kept.is_lost = true);
        if arena.fence_of(slot) != 0 {
            self.board.word(slot as usize).store(arena.fence_of(slot));
        }
        arena.let_go(slot);
    }
}
