//! The options of a publisher, and what it says of its subscribers.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::observer::SubscriberChanges;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::ipc::domain::Domain;
use crate::ipc::limits::PeerLimits;
use crate::ipc::peer::Peer;
use crate::ipc::{Kind, PeerState};
use crate::options::{EndpointOptions, option_setters};
use crate::shm::segment::DEPTH_MAX;

/// The action when a subscriber's ring is full. Declared by the publisher, for each subscriber.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Policy {
    /// `send` waits for room, then fails with [`Error::Timeout`], and no subscriber gets the
    /// sample.
    Block {
        /// The longest wait.
        timeout: Duration,
    },
    /// The subscriber loses the oldest sample that it has not received yet. Samples that it holds
    /// stay.
    DropOldest,
    /// The subscriber does not get this sample.
    DropNewest,
    /// `send` fails at once with [`Error::Full`], and no subscriber gets the sample.
    Fail,
}

impl Policy {
    /// Whether a subscriber under this policy sees every sample.
    pub(crate) fn is_lossless(self) -> bool {
        matches!(self, Policy::Block { .. } | Policy::Fail)
    }
}

/// The credentials of a subscriber that asks to attach. A publisher's policy can depend on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PeerCredentials {
    /// Its process id.
    pub pid: i32,
    /// Its effective user id.
    pub uid: u32,
    /// Its effective group id.
    pub gid: u32,
}

type PolicyOf = Arc<dyn Fn(&PeerCredentials) -> Policy + Send + Sync>;

/// The options of a publisher. See [`Publisher::builder`](crate::Publisher::builder).
#[derive(Clone)]
pub struct PublisherBuilder {
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) shared: EndpointOptions,
    policy: Policy,
    policy_of: Option<PolicyOf>,
    pub(super) depth: u32,
    pub(super) history: u32,
    pub(super) timestamps: bool,
    /// The source of the samples that this publisher forwards.
    pub(super) forwards: Option<[u8; 16]>,
    pub(super) loan_timeout: Duration,
    pub(super) evict_after: Option<Duration>,
    /// Receives the changes of the set of subscribers. With an observer, each sample also signals
    /// its slot's fence word, so that it can be forwarded.
    pub(super) observer: Option<Arc<SubscriberChanges>>,
    /// The depth of the ring of each subscriber's replies, which the observer's owner receives; 0
    /// for none.
    pub(super) replies: u32,
}

impl PublisherBuilder {
    option_setters! { (shared):
        shared,
        /// The domain to publish in; the environment's by default.
        domain,
        /// The device that holds the samples; [`Device::preferred`] by default.
        device,
        /// The most device memory that the samples may take, in bytes: 4 GiB by default. It is
        /// taken as needed, in regions that double. Slots held by stopped or leaving subscribers
        /// may come on top, at most as much again.
        memory_limit,
        /// How long a subscriber may take to attach before its connection is closed: 5 s by
        /// default.
        handshake_timeout,
        allow_uids,
        allow_gids,
    }

    pub(super) fn new(name: &str) -> PublisherBuilder {
        PublisherBuilder {
            name: name.to_string(),
            kind: Kind::Publisher,
            shared: EndpointOptions::default(),
            policy: Policy::Block {
                timeout: Duration::from_secs(5),
            },
            policy_of: None,
            depth: 16,
            history: 0,
            timestamps: false,
            forwards: None,
            loan_timeout: Duration::from_secs(5),
            evict_after: None,
            observer: None,
            replies: 0,
        }
    }

    /// How many samples each subscriber may have been given and not released: 1 to 4096, 16 by
    /// default.
    pub fn depth(mut self, samples: u32) -> Self {
        self.depth = samples;
        self
    }

    /// The action when a subscriber's ring is full: [`Policy::Block`] for 5 s by default.
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// A policy for each subscriber, chosen by its credentials.
    pub fn policy_of(
        mut self,
        choose: impl Fn(&PeerCredentials) -> Policy + Send + Sync + 'static,
    ) -> Self {
        self.policy_of = Some(Arc::new(choose));
        self
    }

    /// How many of the last samples a late subscriber gets first: 0 by default, at most the depth.
    pub fn history(mut self, samples: u32) -> Self {
        self.history = samples;
        self
    }

    /// Whether samples say when they were sent, and received: see
    /// [`Sample::sent_at_ns`](crate::Sample::sent_at_ns). Not by default: each costs a look
    /// at the clock, and the time is a word more in each entry of the ring.
    pub fn timestamps(mut self, stamps: bool) -> Self {
        self.timestamps = stamps;
        self
    }

    /// This publisher forwards the samples of another one under their numbers: `source` is its
    /// [`publisher_source`](crate::Subscriber::publisher_source).
    /// [`Publisher::skip_to`](crate::Publisher::skip_to) may leave out numbers, and subscribers
    /// accept a gap under every policy. A subscriber that follows the name from one forwarder of a
    /// source to the next one sees the numbers go on: it is told how many samples are missing in
    /// between, and receives none twice.
    #[doc(hidden)] // For the bridge.
    pub fn forwards(mut self, source: [u8; 16]) -> Self {
        self.forwards = Some(source);
        self
    }

    /// How long [`Publisher::loan`](crate::Publisher::loan) waits for memory that is in use: 5 s by
    /// default.
    pub fn loan_timeout(mut self, timeout: Duration) -> Self {
        self.loan_timeout = timeout;
        self
    }

    /// Close the link of a subscriber that has given no sign of life for this long; never by
    /// default. Its samples stay untouched until it releases them or dies. Counted in steps of 200
    /// ms in which this process itself runs; at least 500 ms.
    pub fn evict_after(mut self, silence: Option<Duration>) -> Self {
        self.evict_after = silence;
        self
    }

    /// The most subscribers at once: 256 by default. Half of them may be of one user other than
    /// this process's own, and a quarter, or 64 if that is more, in one other process. A subscriber
    /// counts from its `Hello` until it has left and released all its samples, or is proven dead.
    /// Beyond the limit a new one gets [`HandshakeFault::Full`](crate::HandshakeFault::Full).
    pub fn subscribers_max(mut self, subscribers: u32) -> Self {
        self.shared.access.limits = PeerLimits::of(subscribers);
        self
    }

    /// The kind of this endpoint, as processes that open it see it.
    pub(crate) fn kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }

    /// For an owner that chooses which subscriber gets which sample: `observer` is notified of
    /// every subscriber that comes or goes.
    pub(crate) fn observed_by(mut self, observer: &Arc<SubscriberChanges>) -> Self {
        self.observer = Some(observer.clone());
        self
    }

    /// With an observer: each subscriber sends replies, over a ring of this depth.
    pub(crate) fn replies(mut self, depth: u32) -> Self {
        self.replies = depth;
        self
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.depth == 0 || self.depth > DEPTH_MAX {
            let allowed = format!("1 to {DEPTH_MAX}");
            return Err(Error::argument("depth", self.depth, allowed));
        }
        if self.history > self.depth {
            let allowed = format!("0 to the depth, {}", self.depth);
            return Err(Error::argument("history", self.history, allowed));
        }
        match self.evict_after {
            Some(silence) if silence < Duration::from_millis(500) => {
                let (found, allowed) = (format!("{silence:?}"), "at least 500 ms, or none");
                Err(Error::argument("evict_after", found, allowed))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn policy_for(&self, peer: &Peer) -> Policy {
        let peer = PeerCredentials {
            pid: peer.pid,
            uid: peer.uid,
            gid: peer.gid,
        };
        self.policy_of
            .as_ref()
            .map_or(self.policy, |choose| choose(&peer))
    }
}

impl fmt::Debug for PublisherBuilder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PublisherBuilder")
            .field("name", &self.name)
            .field("depth", &self.depth)
            .finish_non_exhaustive()
    }
}

/// The state of one subscriber. See [`Publisher::subscribers`](crate::Publisher::subscribers).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SubscriberInfo {
    /// Its process id.
    pub pid: i32,
    /// Its effective user id.
    pub uid: u32,
    /// Alive, stalled, leaving, suspect or dead.
    pub state: PeerState,
    /// Time since its last sign of life.
    pub silent_for: Duration,
    /// Samples that it was given and has not released.
    pub in_flight: u32,
    /// Samples that it did not get because of its policy.
    pub dropped: u64,
}
