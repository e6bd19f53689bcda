//! The control thread's work for a publisher: makes the links of new subscribers, reads their
//! sockets, detects their ends and frees the slots they held. A sender of replies has one link,
//! which `reply_over` makes of its [partner](SubscriberLink::partner)'s.
//!
//! A subscriber that is killed: its socket's end or its alarm makes it suspect (`on_close`), and
//! what it had not taken is revoked. The end of its lifeline proves its death (`on_proven`).
//! `free_soon` then waits until this process's streams are past the link's signals, and
//! `reap_links` returns the slots that it held, and drops the link.

use std::os::fd::AsFd;
use std::sync::{Arc, Weak};

use super::super::link_end::LinkEnd;
use super::super::publisher_link::{PublisherLink, RingTerms};
use super::super::subscriber_link::{LinkPhase, SubscriberLink};
use super::PublisherCore;
use super::state::PublisherState;
use crate::backend::{Access, DeviceId};
use crate::error::{Error, HandshakeFault, Result};
use crate::ipc::acceptor::{ConnectionOwner, Hello, refusal, refusal_for, send_refusal};
use crate::ipc::connection::{self, Connection, ConnectionUser};
use crate::ipc::message::{self, CloseReason, Message, Received};
use crate::ipc::peer::ORPHAN_TIMEOUT;
use crate::kind::Kind;
use crate::os;
use crate::runtime::closer::PeerFd;
use crate::runtime::doorbell::PeerDoorbell;
use crate::runtime::fence::Fence;
use crate::runtime::reactor::{DropReadiness, EventSource, Next, new_generation};
use crate::runtime::releasable::ReleasableGuard;
use crate::shm::segment::{OpenError, Segment};
use crate::slow_path::{self, SlowPath};
use crate::statistics;
use crate::trace::{self, TraceEvent};

/// The number of the one link over which replies are sent.
pub(crate) const REPLIES: u64 = 1;

impl PublisherCore {
    /// Makes the link of a new subscriber and sends it. The error is the answer to one that is
    /// refused.
    fn attach(&self, connection: Connection, hello: &Hello) -> Result<(), Message> {
        let device = self
            .check_hello(hello)
            .map_err(|fault| refusal(false, fault))?;
        let policy = self.options.policy_for(&connection.peer);
        let (depth, replies) = (self.options.depth, self.role.replies);
        let (rings, segment_fd) =
            Segment::create_rings(&self.device, depth, replies, self.generation)
                .map_err(|error| refusal_for(&error))?;
        let (wake, their_wake) = PeerDoorbell::pair().map_err(|error| refusal_for(&error))?;
        let end = LinkEnd::new(connection.peer.into(), wake, connection.socket);
        // Never but in tests: a sender of replies has no name, and its link comes of `reply_over`.
        let may_set_aside = self.role.kind == Kind::Results;
        let mut link = SubscriberLink::new(connection.id, end, rings.0, policy, may_set_aside);
        link.quota_permit = Some(connection.quota_permit);
        link.replies = rings.1.map(|ring| (ring, device));
        link.segment_fd = Some(segment_fd);
        let mut state = self.lock();
        let chunks = state.arena.chunks();
        let welcome = Message::Welcome {
            generation: self.generation,
            device: self.device.info().id,
            depth,
            access: Access::Read,
            lossless: policy.is_lossless() && self.options.forwards.is_none(),
            source: self.options.forwards.unwrap_or(self.generation),
            regions: chunks.len() as u32,
            replies,
        };
        let pid = link.end.peer.pid;
        let welcomed = link
            .welcome(&welcome, their_wake, self.fences.published(), chunks)
            .map_err(|error| Error::os("sendmsg", format!("the link to process {pid}"), error))
            .and_then(|()| self.watch(&mut link));
        match welcomed.is_ok() && !state.is_closed {
            true => state.add(link),
            false => self.reactor.defer_drop(Box::new(link)),
        }
        welcomed.map_err(|error| refusal_for(&error))
    }

    /// Begins to read a link's socket, and to watch for its peer's death.
    fn watch(&self, link: &mut SubscriberLink) -> Result<()> {
        let this: Weak<dyn EventSource> = self.this.clone();
        let ends = (link.end.socket(), &*link.end.peer);
        let all = connection::watch(&self.reactor, ends, &this, link.id, ORPHAN_TIMEOUT)?;
        link.registrations.extend(all);
        Ok(())
    }

    /// Sends replies over the link of `partner` from here on, and reads its socket.
    pub(super) fn reply_over(&self, partner: Arc<PublisherLink>) -> Result<()> {
        let segment = partner
            .take_replies((self.this.clone(), REPLIES))
            .ok_or_else(|| self.fault(HandshakeFault::Segment("no ring for replies".into())))?;
        let policy = self.options.policy_for(&partner.end.peer);
        let end = partner.end.of_replies();
        let mut link = SubscriberLink::new(REPLIES, end, segment, policy, true);
        link.phase = LinkPhase::Live;
        link.partner = Some(partner);
        // Its socket may be readable at once.
        let mut state = self.lock();
        self.watch(&mut link)?;
        state.add(link);
        Ok(())
    }

    /// The receiver of a new link's replies, if it has a ring for them.
    fn receive_replies(&self, link: &mut SubscriberLink) -> Result<()> {
        let (Some((segment, device)), Some(observer)) = (link.replies.take(), &self.role.observer)
        else {
            return Ok(());
        };
        let generation = new_generation();
        let terms = RingTerms {
            name: self.name.clone(),
            device: self.device.clone(),
            sender_device: device,
            generation,
            source: generation,
            lossless: true,
        };
        let end = link.end.of_replies();
        let sender: (Weak<dyn EventSource>, u64) = (self.this.clone(), link.id);
        let partner =
            PublisherLink::of_ring(terms, segment, None, end, &observer.doorbell, Some(sender))?;
        partner.watch(ORPHAN_TIMEOUT)?;
        link.partner = Some(partner);
        // Of the memory in which the replies lie.
        os::let_descriptors_in(link.end.socket(), true);
        Ok(())
    }

    /// The subscriber's device.
    fn check_hello(&self, hello: &Hello) -> Result<DeviceId, HandshakeFault> {
        let own = self.device.info().id;
        match (hello.device, hello.body.as_slice()) {
            (Some(device), []) if device.kind == own.kind => Ok(device),
            (Some(device), []) => {
                slow_path::count(SlowPath::NoPeerAccess, 0);
                Err(HandshakeFault::Device {
                    publisher: own.to_string(),
                    subscriber: device.to_string(),
                })
            }
            (_, body) => Err(HandshakeFault::Garbled(body.len())),
        }
    }

    /// Takes a message of a link's subscriber, over either of its rings.
    fn handle_message(
        &self,
        state: &mut PublisherState,
        id: u64,
        message: Message,
        fds: Vec<PeerFd>,
    ) -> Result<()> {
        if matches!(message, Message::Returned { .. }) {
            // A sample may be set aside and returned between two looks.
            state.reclaim(&self.fences, true);
        }
        let PublisherState { links, arena, .. } = state;
        let Some(link) = links.iter_mut().find(|link| link.id == id) else {
            return Ok(());
        };
        match message {
            Message::Returned { positions } => {
                for position in positions {
                    let slot = link.take_back(position).ok_or_else(|| {
                        let allowed = "one that was set aside";
                        Error::protocol(&self.name, "returned sample", position, allowed)
                    })?;
                    arena.release(slot);
                }
            }
            Message::RegionClosed { id } if link.remove_closed_region(id) => {}
            other => {
                let refused = match (link.end.closed_by(other), &link.partner) {
                    (Ok(_), _) => {
                        self.trace_left(link, &"it has closed");
                        link.leave(None);
                        return Ok(());
                    }
                    (Err(other), Some(partner)) => partner.handle_message(other, fds),
                    (Err(other), None) => Err(other),
                };
                refused.map_err(|other| self.fault(other.unexpected("RegionClosed or Close")))?;
            }
        }
        Ok(())
    }

    /// The subscriber broke the protocol: its link ends, with all of its rings.
    fn fail_link(&self, link: &mut SubscriberLink, fault: Error) {
        self.trace_left(link, &fault);
        link.leave(Some(CloseReason::Failed(message::text(&fault))));
        if let Some(partner) = &link.partner {
            partner.fail(fault);
        }
    }

    /// Sends samples to a link from here on, those of the history first, if its segment could be
    /// registered.
    fn go_live(&self, state: &mut PublisherState, id: u64, registered: Result<(), OpenError>) {
        let link = state.find(id);
        let Some(link) = link.filter(|link| link.phase == LinkPhase::Attaching) else {
            return;
        };
        // Not for a link that is refused: it would be kept for its other ring.
        let received =
            registered.and_then(|()| self.receive_replies(link).map_err(OpenError::Local));
        match received {
            Ok(()) if message::send(link.end.socket(), &Message::Attached, &[]).is_err() => {
                link.leave(None);
                if let Some(partner) = &link.partner {
                    partner.on_close(id);
                }
            }
            Ok(()) => {
                let uid = link.end.peer.uid;
                self.trace(link, |name, id, pid| {
                    TraceEvent::SubscriberAttached(name, id, pid, uid)
                });
                link.phase = LinkPhase::Joining;
                state.history.has_joiners = true;
                // The thread that is sending now gives it the history when it has finished.
                if !(state.is_sending && state.history.is_kept()) {
                    self.replay(state);
                }
            }
            Err(OpenError::Fault(fault)) => link.refuse(fault),
            Err(OpenError::Local(error)) => link.refuse(error),
        }
    }

    fn trace(&self, link: &SubscriberLink, event: impl FnOnce(String, u64, i32) -> TraceEvent) {
        trace::emit(|| event(self.name.clone(), link.id, link.end.peer.pid));
    }

    fn trace_left(&self, link: &SubscriberLink, reason: &dyn ToString) {
        self.trace(link, |name, id, pid| {
            TraceEvent::SubscriberLeft(name, id, pid, reason.to_string())
        });
    }

    /// Gives the history to the links that wait for it, and has the fence thread complete it.
    pub(super) fn replay(&self, state: &mut PublisherState) {
        let PublisherState {
            history,
            links,
            arena,
            ..
        } = state;
        if history.replay(links, arena, &self.fences) {
            let core = self.this.clone();
            self.reactor.drop_after(move || {
                core.upgrade()
                    .is_none_or(|core| core.lock().history.complete_due(&core.fences))
            });
        }
        // They are live now, maybe at the end of a send and not of a message.
        self.notify();
    }

    /// Drops the links that are over: those that have left and released everything, and those that
    /// do not attach. Their memory is kept until this process's streams are past it and the current
    /// send is over.
    fn reap_links(&self, state: &mut PublisherState) {
        state.reclaim(&self.fences, true);
        for owner in state.owners.take_free(&state.arena) {
            self.reactor.defer_drop(Box::new(owner));
        }
        let limit = self.options.handshake_timeout;
        let over = state.take_links(|link| match link.is_staying() {
            true => link.phase == LinkPhase::Attaching && link.clock.ran() > limit,
            false => link.in_flight() == 0 && link.has_partner_ended(),
        });
        let is_observed = self.role.observer.is_some();
        if is_observed && !over.is_empty() {
            self.notify();
        }
        for mut link in over {
            if is_observed {
                state.untaken.extend(link.take_untaken());
            }
            link.registrations.clear();
            // The segment alone: a deferred drop that waits for a stream must not keep descriptors.
            let segment = link.ring.segment().clone();
            state.history.forget(&segment);
            drop(link);
            let mut past = self.past_signals();
            self.reactor.drop_after(move || {
                if Arc::strong_count(&segment) > 1 {
                    DropReadiness::Held
                } else {
                    past().into()
                }
            });
        }
    }

    /// Frees the slots of a dead subscriber once this process's streams are past them, whatever
    /// values it left in its words.
    fn free_soon(&self, id: u64) {
        let (core, mut past) = (self.this.clone(), self.past_signals());
        self.reactor.drop_after(move || {
            if !past() {
                return false;
            }
            if let Some(core) = core.upgrade() {
                let mut state = core.lock();
                if let Some(link) = state.find(id) {
                    link.ring.mark_signals_done();
                    core.reap_links(&mut state);
                    core.notify();
                }
            }
            true
        });
    }

    /// Returns a check whether every signal of a link that gets no more samples has been executed.
    /// This covers sends that began before now and have not enqueued their signals yet.
    fn past_signals(&self) -> impl FnMut() -> bool + Send + 'static {
        let sends = self.send_lock.clone();
        let mut fence = Fence::later(self.streams.clone());
        let last = sends.last();
        move || sends.is_over(last) && fence.is_reached()
    }

    fn evict_stalled(&self, state: &mut PublisherState) {
        let Some(limit) = self.options.evict_after else {
            return;
        };
        for link in state.links.iter_mut().filter(|link| link.is_live()) {
            let silence = link.silence();
            if silence > limit {
                self.trace(link, |name, id, pid| {
                    TraceEvent::SubscriberEvicted(name, id, pid, silence.as_millis() as u64)
                });
                link.leave(Some(CloseReason::Evicted(format!(
                    "no sign of life for {silence:.1?}"
                ))));
                self.notify();
            }
        }
    }
}

impl ConnectionOwner for PublisherCore {
    fn on_connection(&self, connection: Connection, hello: Hello) {
        // Held until the subscriber is told: without its permit the socket is shut down.
        let (socket, _permit) = (connection.socket.clone(), connection.quota_permit.clone());
        if let Err(refusal) = self.attach(connection, &hello) {
            send_refusal(&self.name, &socket, &refusal);
        }
    }
}

impl ConnectionUser for PublisherCore {
    /// The messages are read under the lock: threads that read at the same time take them in order.
    fn on_message(&self, id: u64) -> Next {
        let mut state = ReleasableGuard::new(&self.state, self.lock());
        let link = state.find(id).filter(|link| link.reads_socket());
        let Some(socket) = link.map(|link| link.end.socket.clone()) else {
            return Next::Stop;
        };
        connection::read(socket.as_fd(), &self.name, |received| {
            let Some(link) = state.find(id).filter(|link| link.reads_socket()) else {
                return Next::Stop;
            };
            let handled = match received {
                Ok(Received::Message(Message::Attached, _))
                    if link.phase == LinkPhase::Attaching =>
                {
                    let segment = link.ring.segment().clone();
                    let Some(fd) = link.segment_fd.take() else {
                        return Next::Stop;
                    };
                    // Without the lock, which every sender takes: the driver may need a moment.
                    let registered = state.unlocked(|| segment.register(fd.as_fd()));
                    drop(segment);
                    self.go_live(&mut state, id, registered);
                    Ok(())
                }
                Ok(Received::Message(message, fds)) => {
                    self.handle_message(&mut state, id, message, fds)
                }
                Ok(_) => {
                    state.unlocked(|| self.on_close(id));
                    return Next::Stop;
                }
                Err(error) => Err(error),
            };
            self.notify();
            if let Err(fault) = handled {
                if let Some(link) = state.find(id) {
                    self.fail_link(link, fault);
                }
                return Next::Stop;
            }
            Next::Keep
        })
    }

    /// A leaving subscriber is finished, any other is suspect from now on.
    fn on_close(&self, id: u64) {
        let mut state = self.lock();
        if let Some(link) = state.find(id) {
            if let Some(partner) = &link.partner {
                partner.on_close(id);
            }
            if link.is_staying() {
                self.trace(link, TraceEvent::SubscriberSuspect);
                link.leave(None);
                link.phase = LinkPhase::Suspect;
            }
        }
        self.reap_links(&mut state);
        self.notify();
    }

    /// No part of the peer's process can access memory any more, so all slots that it held are free
    /// once this process's own streams are past them.
    fn on_proven(&self, id: u64) {
        let mut state = self.lock();
        if let Some(link) = state.find(id) {
            self.trace(link, TraceEvent::SubscriberDied);
            link.ring.mark_receiver_dead();
            link.leave(None);
            self.free_soon(id);
            self.reap_links(&mut state);
            self.notify();
        }
    }
}

impl EventSource for PublisherCore {
    fn runs_on_control_thread(&self) -> bool {
        true
    }

    fn on_ready(&self, tag: u64) -> Next {
        connection::dispatch(self, tag)
    }

    fn on_tick(&self, now_ns: u64) {
        self.acceptor.iter().for_each(|it| it.tick());
        let mut state = self.lock();
        state.links.iter().for_each(|link| link.beat(now_ns));
        state.history.complete_due(&self.fences);
        // Repeats announcements for which this process lacked resources when the memory grew.
        let _ = state.announce(&self.name);
        self.evict_stalled(&mut state);
        self.reap_links(&mut state);
        if let Some(acceptor) = &self.acceptor {
            state.row.set_domain(acceptor.domain_identity());
        }
        state.write_statistics();
        if let Some(observer) = &self.role.observer {
            state.row.set_waiting(observer.jobs_waiting());
        }
        drop(state);
        statistics::beat(now_ns);
    }
}
