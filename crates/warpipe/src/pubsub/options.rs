//! The options of a publisher, and what it says of its subscribers.

use std::sync::Arc;
use std::time::Duration;

use super::observer::SubscriberChanges;
use crate::debug::opaque_debug;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::ipc::domain::Domain;
use crate::ipc::limits::PeerLimits;
use crate::ipc::peer::Peer;
use crate::ipc::{AccessPolicy, HANDSHAKE_TIMEOUT, Kind, PeerState};
use crate::options::MEMORY_LIMIT;
use crate::options::in_domain;
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
    /// `send` fails at once with [`Error::Limit`], and no subscriber gets the sample.
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

/// The options of a [`Publisher`](crate::Publisher).
#[derive(Clone)]
pub struct PublisherOptions {
    /// The domain to publish in; the environment's by default.
    pub domain: Option<Domain>,
    /// The device that holds the samples; [`Device::preferred`] by default.
    pub device: Option<Device>,
    /// The most device memory that the samples may take, in bytes: 4 GiB by default. It is taken as
    /// needed, in regions that double. Slots held by stopped or leaving subscribers may come on
    /// top, at most as much again.
    pub memory_limit: u64,
    /// How many samples each subscriber may have been given and not released: 1 to 4096, 16 by
    /// default.
    pub depth: u32,
    /// The action when a subscriber's ring is full: [`Policy::Block`] for 5 s by default.
    pub policy: Policy,
    /// Chooses a policy for each subscriber by its credentials, in place of `policy`: none by
    /// default, else `Some(Arc::new(|peer| ..))`.
    pub policy_of: Option<PolicyOf>,
    /// How many of the last samples a late subscriber gets first: 0 by default, at most the depth.
    pub history: u32,
    /// Whether samples say when they were sent, and received: see
    /// [`SampleInfo::sent_at_ns`](crate::SampleInfo::sent_at_ns). Not by default: each costs a look at the
    /// clock, and the time is a word more in each entry of the ring.
    pub timestamps: bool,
    /// This publisher forwards the samples of another one under their numbers: this is its
    /// [`publisher_source`](crate::Subscriber::publisher_source).
    /// [`Publisher::skip_to`](crate::Publisher::skip_to) may leave out numbers, and subscribers
    /// accept a gap under every policy. A subscriber that follows the name from one forwarder of a
    /// source to the next one sees the numbers go on: it is told how many samples are missing in
    /// between, and receives none twice.
    #[doc(hidden)] // For the bridge.
    pub forwards: Option<[u8; 16]>,
    /// How long [`Publisher::loan`](crate::Publisher::loan) waits for memory that is in use: 5 s by
    /// default.
    pub loan_timeout: Duration,
    /// Close the link of a subscriber that has given no sign of life for this long; never by
    /// default. Its samples stay untouched until it releases them or dies. Counted in steps of 200
    /// ms in which this process itself runs; at least 500 ms.
    pub evict_after: Option<Duration>,
    /// How long a subscriber may take to attach before its connection is closed: 5 s by default.
    pub handshake_timeout: Duration,
    /// The most subscribers at once: 256 by default. Half of them may be of one user other than
    /// this process's own, and a quarter, or 64 if that is more, in one other process. A subscriber
    /// counts from its `Hello` until it has left and released all its samples, or is proven dead.
    /// Beyond the limit a new one gets [`HandshakeFault::Full`](crate::HandshakeFault::Full).
    pub subscribers_max: u32,
    /// Admits these users beside this process's own. The domain directory must admit them, too.
    pub allow_uids: Vec<u32>,
    /// Admits processes with one of these as their effective group. The kernel reports no
    /// supplementary groups of a peer, so those do not count.
    pub allow_gids: Vec<u32>,
}

in_domain!(PublisherOptions, device);

opaque_debug!(PublisherOptions {
    domain,
    device,
    depth,
    policy,
    history
});

impl Default for PublisherOptions {
    fn default() -> PublisherOptions {
        PublisherOptions {
            domain: None,
            device: None,
            memory_limit: MEMORY_LIMIT,
            depth: 16,
            policy: Policy::Block {
                timeout: Duration::from_secs(5),
            },
            policy_of: None,
            history: 0,
            timestamps: false,
            forwards: None,
            loan_timeout: Duration::from_secs(5),
            evict_after: None,
            handshake_timeout: HANDSHAKE_TIMEOUT,
            subscribers_max: 256,
            allow_uids: Vec::new(),
            allow_gids: Vec::new(),
        }
    }
}

impl PublisherOptions {
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

    pub(super) fn access_policy(&self) -> AccessPolicy {
        AccessPolicy {
            uids: self.allow_uids.clone(),
            gids: self.allow_gids.clone(),
            limits: PeerLimits::of(self.subscribers_max),
        }
    }
}

/// The role of a publisher: by itself, or as the part of another endpoint.
#[derive(Clone)]
pub(crate) struct PublisherRole {
    /// The kind of this endpoint, as processes that open it see it.
    pub(crate) kind: Kind,
    /// Receives the changes of the set of subscribers, for an owner that chooses which subscriber
    /// gets which sample. With an observer, each sample also signals its slot's fence word, so that
    /// it can be forwarded.
    pub(crate) observer: Option<Arc<SubscriberChanges>>,
    /// The depth of the ring of each subscriber's replies, which the observer's owner receives; 0
    /// for none.
    pub(crate) replies: u32,
}

impl PublisherRole {
    /// An endpoint of this kind, without an observer.
    pub(crate) fn of(kind: Kind) -> PublisherRole {
        PublisherRole {
            kind,
            observer: None,
            replies: 0,
        }
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
