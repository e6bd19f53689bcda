//! What the attendant does for a publisher: it lets subscribers in, reads their sockets, sees them go and frees what
//! they held.

use super::*;
use crate::backend::DeviceId;
use crate::fork::PrivateFd;
use crate::link::limits::makes_way;
use crate::link::segment::OpenError;

impl Core {
    /// Takes in those who connect, some at a time. Without descriptors left, connections wait in the backlog: the
    /// listener stays readable, and only the next tick looks at it again.
    fn accept(&self) -> Next {
        use rustix::net::{SocketFlags, accept_with};
        for _ in 0..ACCEPTED_AT_ONCE {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match PrivateFd::open(|| accept_with(&self.claim.listener, flags)) {
                Ok(socket) => self.greet(Arc::new(PeerSocket::from(socket))),
                Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => return Next::Keep,
                Err(_) => {
                    self.is_deaf.store(true, Ordering::Relaxed);
                    return Next::Stop;
                }
            }
        }
        Next::Keep
    }

    pub(super) fn listen(&self) -> Result<()> {
        let watch = self.watcher.watch(self.claim.listener.as_fd(), &self.me, LISTENER)?;
        *self.listener_watch.lock().unwrap_or_else(PoisonError::into_inner) = Some(watch);
        Ok(())
    }

    fn listen_again(&self) {
        if self.is_deaf.swap(false, Ordering::Relaxed) && !self.lock().closed && self.listen().is_err() {
            self.is_deaf.store(true, Ordering::Relaxed);
        }
    }

    /// Looks who is there, before a byte is read, and waits for its `Hello`.
    fn greet(&self, socket: Arc<PeerSocket>) {
        let peer = match Peer::of(socket.as_fd(), &self.name) {
            Ok(peer) => peer,
            Err(error) => return refuse(&socket, false, error),
        };
        if let Err((denied, reason)) =
            self.claim.listener.screen(socket.as_fd(), &peer, || self.options.admits(peer.uid, peer.gid))
        {
            return refuse(&socket, denied, reason);
        }
        let mut greetings = self.greetings.lock().unwrap_or_else(PoisonError::into_inner);
        if greetings.len() >= GREETINGS_MAX {
            // Who says nothing makes way for who may: a crowd of mutes keeps nobody out.
            let crowd = greetings.iter().map(|(id, greeting)| (*id, greeting.peer.uid));
            makes_way(crowd)
                .and_then(|id| greetings.remove(&id))
                .into_iter()
                .for_each(|mute| refuse(&mute.socket, false, CROWDED));
        }
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        match self.watcher.watch(socket.as_fd(), &self.me, tag(id, SOCKET)) {
            Ok(watch) => {
                drop(greetings.insert(id, Greeting { watch, clock: Uptime::default(), peer, socket, seat: None }))
            }
            Err(error) => refuse(&socket, false, error),
        }
    }

    /// A greeting's socket speaks.
    fn on_greeting(&self, id: u64) -> Next {
        let mut greetings = self.greetings.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(greeting) = greetings.get(&id) else { return Next::Stop };
        let received = message::receive(greeting.socket.as_fd(), &self.name);
        if matches!(received, Ok(Received::Nothing)) {
            return Next::Keep;
        }
        let Some(mut greeting) = greetings.remove(&id) else { return Next::Stop };
        drop(greetings);
        match received {
            Ok(Received::Message(Message::Hello { device, generation, kind }, mut fds))
                if kind == self.options.kind =>
            {
                crate::os::let_descriptors_in(greeting.socket.as_fd(), false);
                let adopted = message::take_lifeline(&mut fds).and_then(|lifeline| greeting.peer.adopt(lifeline));
                if let Err(fault) = adopted {
                    refuse(&greeting.socket, false, fault);
                    return Next::Stop;
                }
                match self.seats.take(&greeting.peer, &greeting.socket) {
                    Ok(seat) => greeting.seat = Some(seat),
                    Err((limit, max)) => {
                        let _ = message::send(greeting.socket.as_fd(), &Message::Full { limit, max }, &[]);
                        return Next::Stop;
                    }
                }
                self.attach_soon(id, greeting, device, generation);
            }
            Ok(Received::Message(Message::Hello { .. } | Message::Visit { .. }, _)) => {
                let message = Message::OtherKind { found: self.options.kind };
                let _ = message::send(greeting.socket.as_fd(), &message, &[]);
            }
            Ok(Received::Message(other, _)) => refuse(&greeting.socket, false, other.unexpected("Hello")),
            Ok(_) => {}
            Err(Error::Handshake { fault, .. }) => refuse(&greeting.socket, false, fault),
            Err(error) => refuse(&greeting.socket, false, error),
        }
        Next::Stop
    }

    /// Leaves the making of a link to the attendant: registering memory is the driver's and may take its time.
    fn attach_soon(&self, id: u64, greeting: Greeting, device: DeviceId, generation: [u8; 16]) {
        let core = self.this.clone();
        let attach = move || {
            if let Some(core) = core.upgrade() {
                core.attach(id, greeting, device, generation);
            }
        };
        self.watcher.attend(Box::new(attach));
    }

    /// Makes the link and sends it.
    fn attach(&self, id: u64, greeting: Greeting, device: DeviceId, generation: [u8; 16]) {
        let own = self.device.info().id;
        let Greeting { watch, peer, socket, seat, .. } = greeting;
        drop(watch);
        if !share_memory(own, device) {
            let fault = HandshakeFault::Device { publisher: own.to_string(), subscriber: device.to_string() };
            return refuse(&socket, false, fault);
        }
        let (policy, pid) = (self.options.policy_for(&peer), peer.pid);
        let parts = match Parts::new(&self.device, self.options.depth, self.generation, peer, socket.clone()) {
            Ok(parts) => parts.seated(seat),
            Err(error) => return refuse(&socket, false, error),
        };
        let mut state = self.lock();
        let welcome = Message::Welcome {
            generation: self.generation,
            device: own,
            depth: self.options.depth,
            access: Access::Read,
            lossless: policy.is_lossless(),
            regions: state.arena.chunks().len() as u32,
        };
        let completions = self.completions.as_ref().map(|fd| (self.board.bytes(), fd.as_fd()));
        let mut outlet = match parts.welcome(id, policy, &welcome, completions, state.arena.chunks()) {
            Ok(outlet) if !state.closed => outlet,
            Ok(outlet) => return self.watcher.bury(Box::new(outlet)),
            Err((remains, error)) => {
                drop(state);
                let context = format!("the link to process {pid}");
                refuse(&socket, false, Error::os("sendmsg", context, error));
                return self.watcher.bury(remains);
            }
        };
        let watch = |fd, kind| self.watcher.watch(fd, &self.me, tag(id, kind));
        let sign = |sign, kind| outlet.peer.watch(sign, &self.me, tag(id, kind));
        if let (Ok(socket), Ok(suspect), Ok(proven)) =
            (watch(outlet.socket(), SOCKET), sign(Sign::Suspect, SUSPECT), sign(Sign::Proven, PROVEN))
        {
            outlet.watches.extend([socket, suspect, proven]);
            outlet.generation = generation;
            state.outlets.push(outlet);
        } else {
            self.watcher.bury(Box::new(outlet));
        }
    }

    /// A link's socket speaks.
    fn on_socket<'a>(&'a self, mut state: MutexGuard<'a, State>, id: u64) -> Next {
        for _ in 0..MESSAGES_AT_ONCE {
            let Some(outlet) = state.find(id) else { return Next::Stop };
            match message::receive(outlet.socket(), &self.name) {
                Ok(Received::Nothing) => return Next::Keep,
                Ok(Received::Message(Message::Attached, _)) if outlet.phase == Phase::Attaching => {
                    let Some((segment, fd)) = outlet.take_segment() else { return Next::Stop };
                    // Without the lock, which every sender takes: the driver may need a moment.
                    drop(state);
                    let registered = segment.register(fd.as_fd());
                    drop(segment);
                    state = self.go_live(self.lock(), id, registered);
                }
                Ok(Received::Message(Message::Bye(_), _)) => {
                    outlet.leave(None);
                    self.ring();
                }
                Ok(Received::End) => {
                    self.on_end(&mut state, id);
                    return Next::Stop;
                }
                Ok(Received::Message(other, _)) => {
                    let fault = other.unexpected("Attached or Bye").to_string();
                    outlet.leave(Some(Farewell::Failed(message::text(fault))));
                    return Next::Stop;
                }
                Err(error) => {
                    outlet.leave(Some(Farewell::Failed(message::text(error))));
                    return Next::Stop;
                }
            }
        }
        Next::Keep
    }

    /// Gives a link samples from here on, if its segment could be registered; those of the history first.
    fn go_live<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        id: u64,
        registered: Result<(), OpenError>,
    ) -> MutexGuard<'a, State> {
        let Some(outlet) = state.find(id).filter(|outlet| outlet.phase == Phase::Attaching) else { return state };
        match registered {
            Ok(()) if message::send(outlet.socket(), &Message::Attached, &[]).is_err() => outlet.leave(None),
            Ok(()) if self.options.history == 0 => outlet.phase = Phase::Live,
            Ok(()) => {
                outlet.phase = Phase::Joining;
                state.joiners.push_back(id);
                // Whoever sends just now lets it in when that is done.
                if !state.is_sending {
                    self.replay(&mut state);
                }
            }
            Err(OpenError::Fault(fault)) => outlet.refuse(fault),
            Err(OpenError::Local(error)) => outlet.refuse(error),
        }
        self.ring();
        state
    }

    /// It does no more, whenever its socket comes to its end: what it said before is in there.
    fn on_suspect(&self, id: u64) -> Next {
        let _ = (0..LAST_WORDS).all(|_| self.on_socket(self.lock(), id) == Next::Keep);
        self.on_end(&mut self.lock(), id);
        Next::Stop
    }

    /// The socket has closed: a leaver is done with it, anybody else is suspect from now on.
    fn on_end(&self, state: &mut State, id: u64) {
        if let Some(outlet) = state.find(id)
            && matches!(outlet.phase, Phase::Attaching | Phase::Joining | Phase::Live)
        {
            outlet.leave(None);
            outlet.phase = Phase::Suspect;
        }
        self.bury(state);
        self.ring();
    }

    /// Proven dead: nothing of that process can touch memory any more, so all that it held is free as soon as
    /// this process's own streams are done with it.
    fn on_death(&self, state: &mut State, id: u64) -> Next {
        if let Some(outlet) = state.find(id) {
            outlet.ring.receiver_is_dead();
            outlet.leave(None);
            self.free_soon(id);
            self.bury(state);
            self.ring();
        }
        Next::Stop
    }

    /// Forgets the leavers that have released everything.
    fn bury(&self, state: &mut State) {
        self.reclaim(state, true);
        let is_done = |o: &mut Outlet| matches!(o.phase, Phase::Leaving | Phase::Suspect) && o.holds_nothing();
        let done: Vec<Outlet> = state.outlets.extract_if(.., is_done).collect();
        for outlet in done {
            if self.options.observer.is_some() {
                state.departures.untaken.extend(outlet.untaken.iter().map(|&position| (outlet.id, position)));
                state.departures.generations.push(outlet.generation);
                self.ring();
            }
            self.drop_outlet(state, outlet);
        }
    }

    /// Lets a link's memory go once this process's streams are past it, and what is being sent has been.
    fn drop_outlet(&self, state: &mut State, mut outlet: Outlet) {
        outlet.watches.clear();
        // The segment alone: what waits for a stream must not keep descriptors.
        let segment = outlet.ring.segment().clone();
        state.due.retain(|due| !Arc::ptr_eq(&due.segment, &segment));
        drop(outlet);
        let mut past = self.past_signals();
        self.watcher.retire(move || if Arc::strong_count(&segment) > 1 { Usage::Held } else { past().into() });
    }

    /// Frees what a dead subscriber held once this process's streams are past it, whatever it left in its words.
    fn free_soon(&self, id: u64) {
        let (core, mut past) = (self.this.clone(), self.past_signals());
        self.watcher.retire(move || {
            if !past() {
                return false;
            }
            if let Some(core) = core.upgrade() {
                let mut state = core.lock();
                if let Some(outlet) = state.find(id) {
                    outlet.ring.signals_are_done();
                    core.bury(&mut state);
                    core.ring();
                }
            }
            true
        });
    }

    /// Tells when every signal of a link that gets no more samples has been executed: of the sends until now, too, that
    /// have told their streams nothing yet.
    fn past_signals(&self) -> impl FnMut() -> bool + Send + 'static {
        let (turns, streams, mut proof) = (self.turns.clone(), self.streams.clone(), None);
        let turn = turns.last();
        move || turns.is_over(turn) && proof.get_or_insert_with(|| streams.mark()).is_passed()
    }

    fn evict_stalled(&self, state: &mut State) {
        let Some(limit) = self.options.evict_after else { return };
        for outlet in state.outlets.iter_mut().filter(|outlet| outlet.is_live()) {
            let silence = outlet.silence();
            if silence > limit {
                outlet.leave(Some(Farewell::Evicted(format!("no sign of life for {silence:.1?}"))));
                self.ring();
            }
        }
    }
}

impl Watched for Core {
    fn is_attended(&self) -> bool {
        true
    }

    fn on_ready(&self, tag: u64) -> Next {
        if !self.home.is_here() {
            return Next::Stop;
        }
        let (id, kind) = (tag >> 2, tag & 3);
        if tag == LISTENER {
            return self.accept();
        }
        if kind == SUSPECT {
            return self.on_suspect(id);
        }
        let mut state = self.lock();
        match kind {
            PROVEN => self.on_death(&mut state, id),
            _ if state.find(id).is_some() => self.on_socket(state, id),
            _ => {
                drop(state);
                self.on_greeting(id)
            }
        }
    }

    fn on_tick(&self, now_ns: u64) {
        self.seats.settle();
        self.claim.listener.look();
        self.listen_again();
        // Looked at with every tick.
        let late = |clock: &Uptime| clock.ran() > self.options.handshake_timeout;
        self.greetings.lock().unwrap_or_else(PoisonError::into_inner).retain(|_, greeting| !late(&greeting.clock));
        let mut state = self.lock();
        let is_late = |outlet: &mut Outlet| outlet.phase == Phase::Attaching && late(&outlet.clock);
        let given_up: Vec<Outlet> = state.outlets.extract_if(.., is_late).collect();
        given_up.into_iter().for_each(|outlet| self.drop_outlet(&mut state, outlet));
        for outlet in &state.outlets {
            outlet.beat(now_ns);
            outlet.feel_pulse();
        }
        self.look_out(&mut state);
        // What this process had no room for when the memory grew.
        let _ = state.announce(&self.name);
        self.evict_stalled(&mut state);
        self.bury(&mut state);
    }
}

fn refuse(socket: &PeerSocket, denied: bool, reason: impl ToString) {
    let _ = message::send(socket.as_fd(), &Message::Refused { denied, text: message::text(reason) }, &[]);
}
