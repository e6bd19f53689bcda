//! The part that all handles of one publisher share: its slots, from the loan to the return.
//!
//! The lock guards [`state`], with its [`history`]; [`slot_fences`] needs no lock. The operations
//! over them: [`memory`] (a loan gets a slot, and gives it back), [`backpressure`] (a send waits
//! for room, and begins), [`send`], and [`accept`] (the control thread's work).

mod accept;
mod backpressure;
mod history;
mod memory;
mod owners;
mod send;
mod slot_fences;
mod state;
#[cfg(test)]
mod tests;

pub(crate) use accept::REPLIES;
pub use memory::{SlotHold, SlotReturn};
pub(super) use send::Delivery;
pub(super) use state::{Given, Recipients, SendTurn};

use std::sync::atomic::Ordering::Release;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use self::slot_fences::SlotFences;
use self::state::PublisherState;
use super::options::{PublisherOptions, PublisherRole};
use super::subscriber::Subscriber;
use super::subscriber_link::SubscriberLink;
use crate::atomic::{self, AtomicU32};
use crate::device::Device;
use crate::error::{Error, HandshakeFault, Result};
use crate::fork::OwnerProcess;
use crate::ipc::acceptor::{Acceptor, AcceptorOptions};
use crate::ipc::domain::NameClaim;
use crate::mutex::LockUnpoisoned;
use crate::runtime::fence::{Fence, StreamSet};
use crate::runtime::reactor::{DropReadiness, Reactor, new_generation};
use crate::runtime::timed_lock::TimedLock;
use crate::statistics::{EndpointRow, EndpointWords, Role};
use crate::stream::Stream;

/// How often a sender polls for room before it sleeps: a few milliseconds, within which a full
/// pipeline usually moves on. Each poll is short, because room that is seen late makes the sample
/// late.
const POLLS: u32 = 16_000;

/// The shared part of a publisher.
pub(super) struct PublisherCore {
    pub(super) owner_process: OwnerProcess,
    pub(super) options: PublisherOptions,
    pub(super) role: PublisherRole,
    pub(super) name: String,
    pub(super) device: Device,
    generation: [u8; 16],
    this: Weak<PublisherCore>,
    reactor: Arc<Reactor>,
    /// Never held across a call of the driver that gives a stream work or asks one: see
    /// [`state`].
    state: Mutex<PublisherState>,
    /// Changes of links, and slots that a proof has freed: what this process notices. A peer's
    /// release is none.
    changes: AtomicU32,
    pub(super) send_lock: Arc<TimedLock>,
    pub(super) fences: SlotFences,
    /// All streams that have worked on the links or the fence words.
    streams: Arc<StreamSet>,
    /// `None` for the sender of a link's replies, which has no name.
    acceptor: Option<Arc<Acceptor>>,
}

/// Why a sample was not sent, and whether the failure came before or after it was announced.
pub(super) enum SendFailure {
    /// No subscriber has seen the sample: the loan is unchanged.
    BeforePublish(Error),
    /// Subscribers have seen the sample. They see that it is lost, and they release the slot.
    AfterPublish(Error),
}

impl From<Error> for SendFailure {
    fn from(error: Error) -> SendFailure {
        SendFailure::BeforePublish(error)
    }
}

impl std::fmt::Debug for PublisherCore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Publisher")
            .field("name", &self.name)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

impl PublisherCore {
    /// A publisher at a name that it has claimed.
    pub(super) fn new(
        name: &str,
        options: PublisherOptions,
        role: PublisherRole,
        device: Device,
        claim: NameClaim,
    ) -> Result<Arc<PublisherCore>> {
        let domain = claim.domain_identity();
        let core = PublisherCore::assemble((name, domain), options, role, device, Some(claim))?;
        core.acceptor.iter().try_for_each(|it| it.listen())?;
        core.reactor.register_ticks(core.this.clone());
        Ok(core)
    }

    /// The sender of the replies to what `subscriber` receives.
    pub(super) fn of_replies(
        subscriber: &Subscriber,
        options: PublisherOptions,
        role: PublisherRole,
        device: Device,
    ) -> Result<Arc<PublisherCore>> {
        let partner = subscriber.link_of_replies()?;
        let at = (subscriber.name(), subscriber.domain_identity());
        let core = PublisherCore::assemble(at, options, role, device, None)?;
        core.reply_over(partner)?;
        core.reactor.register_ticks(core.this.clone());
        Ok(core)
    }

    fn assemble(
        (name, domain): (&str, [u64; 2]),
        options: PublisherOptions,
        role: PublisherRole,
        device: Device,
        claim: Option<NameClaim>,
    ) -> Result<Arc<PublisherCore>> {
        let reactor = Reactor::of_process()?;
        let fences = SlotFences::new(&device, options.history > 0)?;
        let generation = new_generation();
        let row = EndpointRow::open(&EndpointWords {
            kind: role.kind,
            role: Role::Owner,
            name,
            domain,
            device: Some(device.info().id),
            generation,
            depth: options.depth,
            memory_max: options.memory_limit,
        });
        Ok(Arc::new_cyclic(|me: &Weak<PublisherCore>| PublisherCore {
            owner_process: OwnerProcess::current(),
            generation,
            this: me.clone(),
            reactor: reactor.clone(),
            state: Mutex::new(PublisherState::new(&options, &device, row)),
            changes: AtomicU32::default(),
            send_lock: Arc::default(),
            fences,
            streams: Arc::default(),
            acceptor: claim.map(|claim| {
                let acceptor = AcceptorOptions {
                    name: name.to_string(),
                    kind: role.kind,
                    access_policy: options.access_policy(),
                    handshake_timeout: options.handshake_timeout,
                    runs_on_control_thread: true,
                };
                Acceptor::new(claim, acceptor, &reactor, me.clone())
            }),
            name: name.to_string(),
            options,
            role,
            device,
        }))
    }

    /// The domain of its name.
    pub(super) fn domain_identity(&self) -> Option<[u64; 2]> {
        self.acceptor.as_ref().map(|it| it.domain_identity())
    }

    fn fault(&self, fault: HandshakeFault) -> Error {
        Error::Handshake {
            name: self.name.clone(),
            fault,
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, PublisherState> {
        self.state.locked()
    }

    pub(super) fn record_use(&self, stream: &Stream) {
        self.streams.record_use(stream);
    }

    /// Counts a change, wakes the threads of this process that wait for one, and notifies the
    /// observer.
    pub(super) fn notify(&self) {
        self.changes.fetch_add(1, Release);
        atomic::wake(&self.changes);
        let observer = self.role.observer.iter();
        observer.for_each(|observer| observer.tell());
    }

    /// Withdraws the name, sends `Close` to every subscriber, and keeps the memory until no stream
    /// of this process writes it any more, and the owners of tensors until no subscriber reads. The
    /// `Close` messages are in their sockets when this returns, because the process may end then.
    /// Only the first call has an effect.
    pub(super) fn close(self: &Arc<PublisherCore>) {
        self.acceptor.iter().for_each(|it| it.close());
        let mut state = self.lock();
        if std::mem::replace(&mut state.is_closed, true) {
            return;
        }
        let partners = state.close_links();
        drop(state);
        drop(partners);
        self.notify();
        // Never on this thread, even if every stream is idle: unregistering memory may make the
        // driver wait for a stream that waits for a peer.
        let (core, mut fence) = (self.clone(), Fence::later(self.streams.clone()));
        self.reactor.drop_after(move || {
            // The socket is read for a partner as long as there is one.
            let has_partner = |link: &SubscriberLink| {
                let partner = link.partner.as_ref();
                partner.is_some_and(|partner| Arc::strong_count(partner) > 1)
            };
            if Arc::strong_count(&core) > 1 || core.lock().links.iter().any(has_partner) {
                return DropReadiness::Held;
            }
            if core.lock().owners.count() > 0 {
                return DropReadiness::Held;
            }
            let is_past = fence.is_reached();
            DropReadiness::from(is_past && core.lock().history.complete_due(&core.fences))
        });
    }
}
