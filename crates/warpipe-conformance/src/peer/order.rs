//! A peer's orders and answers: one line of JSON each.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use warpipe::{LegacyHandle, Policy, PublisherOptions, Subscriber, SubscriberOptions};

use super::semaphore::SemaphoreOrder;
use super::weights::WeightsOrder;

/// How a peer shall publish. The defaults are the options'.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct PublisherPlan {
    /// The endpoint's name.
    pub name: String,
    /// See [`PublisherOptions::depth`].
    pub depth: Option<u32>,
    /// See [`PublisherOptions::history`].
    pub history: Option<u32>,
    /// See [`PublisherOptions::memory_limit`].
    pub memory_limit: Option<u64>,
    /// See [`PublisherOptions::policy`].
    pub policy: Option<PolicyPlan>,
    /// See [`PublisherOptions::evict_after`], in milliseconds.
    pub evict_after_ms: Option<u64>,
}

/// A [`Policy`] in words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum PolicyPlan {
    /// [`Policy::Block`] for so many milliseconds.
    Block(u64),
    /// [`Policy::DropOldest`].
    DropOldest,
    /// [`Policy::DropNewest`].
    DropNewest,
    /// [`Policy::Fail`].
    Fail,
}

impl PolicyPlan {
    /// The policy meant.
    pub fn policy(self) -> Policy {
        match self {
            PolicyPlan::Block(milliseconds) => Policy::Block {
                timeout: Duration::from_millis(milliseconds),
            },
            PolicyPlan::DropOldest => Policy::DropOldest,
            PolicyPlan::DropNewest => Policy::DropNewest,
            PolicyPlan::Fail => Policy::Fail,
        }
    }
}

impl PublisherPlan {
    /// A plan with the defaults.
    pub fn of(name: &str) -> PublisherPlan {
        PublisherPlan {
            name: name.into(),
            ..PublisherPlan::default()
        }
    }

    pub(super) fn options(&self, default: PublisherOptions) -> PublisherOptions {
        PublisherOptions {
            depth: self.depth.unwrap_or(default.depth),
            history: self.history.unwrap_or(default.history),
            memory_limit: self.memory_limit.unwrap_or(default.memory_limit),
            policy: self.policy.map_or(default.policy, |it| it.policy()),
            evict_after: self.evict_after_ms.map(Duration::from_millis),
            ..default
        }
    }
}

/// How a peer shall subscribe.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct SubscriberPlan {
    /// The endpoint's name.
    pub name: String,
    /// See [`SubscriberOptions::reconnect`].
    pub reconnect: bool,
    /// See [`Subscriber::open`], in milliseconds.
    pub wait_ms: Option<u64>,
}

impl SubscriberPlan {
    /// A plan with the defaults.
    pub fn of(name: &str) -> SubscriberPlan {
        SubscriberPlan {
            name: name.into(),
            ..SubscriberPlan::default()
        }
    }

    pub(super) fn attach(&self, options: SubscriberOptions) -> warpipe::Result<Subscriber> {
        let wait = self.wait_ms.map(Duration::from_millis).unwrap_or_default();
        let options = SubscriberOptions {
            reconnect: self.reconnect,
            ..options
        };
        Subscriber::open(&self.name, options, wait)
    }
}

/// Samples to send.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Batch {
    /// How many.
    pub count: u64,
    /// Words in each.
    pub words: u64,
    /// The first one's seed; each further one's is one higher.
    pub seed: u64,
    /// How long each one's kernel waits before it writes.
    pub slow_us: u64,
}

impl Batch {
    /// `count` samples of `words` words, written at once.
    pub fn of(count: u64, words: u64, seed: u64) -> Batch {
        Batch {
            count,
            words,
            seed,
            slow_us: 0,
        }
    }

    /// The same, written late.
    pub fn slow(self, slow: Duration) -> Batch {
        Batch {
            slow_us: slow.as_micros() as u64,
            ..self
        }
    }
}

/// A peer's orders at a queue or a service. The result of every job is the checksum of its input's
/// words.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Task {
    /// Attach to a queue as a worker.
    Attach(String),
    /// Lease one job and hold it. Answers [`Answer::Leased`].
    Lease,
    /// Serve a service.
    Serve(String),
    /// Accept one request and hold it. Answers [`Answer::Leased`].
    Accept,
    /// Answer what has been held longest.
    Answer(Reply),
    /// Wait until everything enqueued is done.
    Synchronize,
    /// Lease and complete until the queue ends. Writes a line `leased JOB ATTEMPT` for each;
    /// answers with how many.
    Work {
        /// How long each one's kernel takes.
        slow_us: u64,
    },
    /// Accept and reply until none has come for a while. Answers with how many.
    ServeOn {
        /// How long each one's kernel takes.
        slow_us: u64,
        /// How long none comes in the end.
        idle_ms: u64,
    },
    /// Take no more jobs and requests.
    Leave,
    /// Own a queue.
    Own(String),
    /// Own a queue and submit jobs to it. Answers when they are submitted.
    Submit {
        /// The queue's name.
        queue: String,
        /// The jobs.
        batch: Batch,
    },
    /// Be a client, make calls one after the other, and check the replies. Answers with how many
    /// were right.
    Call {
        /// The service's name.
        service: String,
        /// The requests.
        batch: Batch,
    },
}

/// How a lease is answered.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Reply {
    /// With the result, by a kernel that takes so many microseconds.
    Complete {
        /// How long.
        slow_us: u64,
    },
    /// As failed.
    Fail(String),
    /// As returned.
    Requeue,
    /// As rejected.
    Reject(String),
    /// Not at all: it is dropped.
    Drop,
}

/// A peer's orders.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Order {
    /// Publish. Answers [`Answer::Done`].
    Publish(PublisherPlan),
    /// Subscribe. Answers with the subscriber's number.
    Subscribe(SubscriberPlan),
    /// Wait until so many subscribers are attached.
    AwaitSubscribers(usize),
    /// Loan and fill without sending.
    Loan(Batch),
    /// Loan, fill and send. Answers with the last sequence number, at once.
    Send(Batch),
    /// Loan, fill and send, behind a function that keeps the sending stream until
    /// [`Order::OpenGate`].
    SendBehindGate(Batch),
    /// Let the sending stream go on.
    OpenGate,
    /// Loan, fill, send, and wait until all data is complete.
    SendAndWait(Batch),
    /// The same, each in published memory of its own, where the tensors lie.
    SendInPlace(Batch),
    /// Send samples of two parts, the words and a few bytes, with long metadata; without waiting.
    SendParts(Batch),
    /// As [`Order::SendAndWait`], on a stream of its own, whatever the sending stream waits for.
    SendAside(Batch),
    /// Send until killed, or until the orders end. Writes a line `ready N` whenever the data of
    /// sample N is complete.
    Stream(Batch),
    /// Receive and check so many samples. Answers with the items; held ones are checked when they
    /// are released.
    Receive {
        /// Which subscriber.
        subscriber: usize,
        /// How many.
        count: u64,
        /// Do not release them yet.
        hold: bool,
    },
    /// Receive and check until the publisher ends. Answers with the items and then the end, as an
    /// item with a fault.
    ReceiveAll {
        /// Which subscriber.
        subscriber: usize,
    },
    /// Receive until killed, holding this many samples at a time. Writes a line `got N WRONG` for
    /// each one checked.
    Consume {
        /// Which subscriber.
        subscriber: usize,
        /// How many to hold.
        hold: usize,
    },
    /// Receive one sample and write into it with a kernel, which its importer must not.
    Overwrite {
        /// Which subscriber.
        subscriber: usize,
    },
    /// Check and release what is held, in random order. Answers with the items.
    Release,
    /// How many samples this subscriber was notified to have missed.
    Dropped {
        /// Which subscriber.
        subscriber: usize,
    },
    /// The publisher's state, as this subscriber sees it.
    PublisherState {
        /// Which subscriber.
        subscriber: usize,
    },
    /// Connect to an endpoint's socket and say nothing.
    ConnectOnly(String),
    /// Map the words in this file and play so many turns of ping-pong, as the side that waits
    /// first.
    PlayWords {
        /// The file, as this process can open it.
        path: String,
        /// How many turns.
        rounds: u64,
    },
    /// Allocate memory as another allocator does, with words of this pattern. Answers with a
    /// handle's text.
    ExportLegacy {
        /// How many words.
        words: u64,
        /// Their pattern.
        seed: u64,
    },
    /// Free what was allocated last.
    FreeLegacy,
    /// Open memory by a handle, check its words, and keep it open.
    OpenLegacy {
        /// The handle.
        handle: LegacyHandle,
        /// The seed of its words.
        seed: u64,
    },
    /// Close what was opened last, with an error if that fails.
    CloseLegacy,
    /// Open a share of another process's server, check its words, and keep it open.
    OpenShare {
        /// The server's name.
        name: String,
        /// The share.
        number: u64,
        /// The seed of its words.
        seed: u64,
    },
    /// Write into what was opened last, against its right.
    OverwriteShare,
    /// Release what was opened last.
    ReleaseShare,
    /// Share a part of an expandable segment. Answers with the share's number.
    ShareSegment {
        /// The server's name.
        name: String,
        /// The seed of its words.
        seed: u64,
    },
    /// Something with weights.
    Weights(WeightsOrder),
    /// Open another process's event by its 64 bytes, and destroy it.
    OpenEvent(Vec<u8>),
    /// Something with a semaphore.
    Semaphore(SemaphoreOrder),
    /// Join the domain.
    Join {
        /// As what.
        name: String,
        /// See [`warpipe::MemberOptions::role`].
        role: String,
    },
    /// Leave it, as every member that this peer is.
    Leave,
    /// An order about memory and pools.
    Hold(super::HolderOrder),
    /// Something about timelines and events.
    Signals(super::SignalOrder),
    /// About a kernel ring.
    Ring(super::RingOrder),
    /// Something while a function of the driver hangs.
    Hung(super::HungOrder),
    /// Fork a child that only lives on. Answers with its process id.
    Fork,
    /// The same by a bare `clone`, of which no library learns: the child holds all that its parent
    /// holds.
    ForkUnseen,
    /// Fork a child later, on a thread of its own, that lives until its parent has ended and so
    /// long afterwards. It writes one byte into the context's file of orphans.
    Orphan {
        /// When, in microseconds from now.
        in_us: u64,
        /// How much longer than its parent it lives, in milliseconds.
        after_ms: u64,
        /// Of which no library learns, as in [`Order::ForkUnseen`].
        unseen: bool,
    },
    /// Call `exec` of a program that only lives on. There is no answer.
    Exec,
    /// Work at a queue or a service, or submit to one.
    Task(Task),
    /// Warm up and count what is there.
    Guard,
    /// Drop everything, and see that it counts as before.
    Settle,
}

/// A peer's answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// It is done.
    Done,
    /// A number.
    Number(u64),
    /// A word.
    Text(String),
    /// Samples.
    Items(Vec<Item>),
    /// A job was leased.
    Leased {
        /// Its number.
        job: u64,
        /// Which attempt.
        attempt: u32,
    },
    /// It failed.
    Fault(Fault),
}

/// A received sample, as its receiver found it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Item {
    /// Its number; 0 if there is none because of the fault.
    pub sequence: u64,
    /// The seed of its mark.
    pub seed: u64,
    /// Its layout in words.
    pub layout: String,
    /// A checksum of its metadata.
    pub metadata: u64,
    /// Wrong words that the check kernel saw; `None` while it is held.
    pub wrong: Option<u64>,
    /// How many samples are missing before it.
    pub missing: u64,
    /// The previous publisher's pid, and whether it closed gracefully.
    pub previous: Option<(i32, bool)>,
    /// A checksum of all its bytes, read by the CPU.
    pub digest: Option<u64>,
    /// Why it, or the next one, did not come.
    pub fault: Option<Fault>,
}

impl Item {
    /// Whether all of it came as it was sent.
    pub fn is_whole(&self) -> bool {
        self.wrong == Some(0) && self.fault.is_none()
    }
}

/// An error of the library in another process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// The variant of [`warpipe::Error`].
    pub kind: String,
    /// The text of the error.
    pub text: String,
}

impl Fault {
    /// The error's variant and words.
    pub fn of(error: &warpipe::Error) -> Fault {
        Fault {
            kind: kind_of(error),
            text: error.to_string(),
        }
    }

    /// The same for any error; one that is not of the library has the kind `Other`.
    pub fn of_any(error: &anyhow::Error) -> Fault {
        let known = error
            .chain()
            .find_map(|cause| cause.downcast_ref::<warpipe::Error>());
        known.map_or_else(
            || Fault {
                kind: "Other".into(),
                text: format!("{error:#}"),
            },
            Fault::of,
        )
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.kind, self.text)
    }
}

impl std::error::Error for Fault {}

macro_rules! variants {
    ($($variant:ident)*; $($outer:ident($fault:ident: $($inner:ident)*))*) => {
        /// The name of an error's variant, or of the fault in it.
        pub fn kind_of(error: &warpipe::Error) -> String {
            use warpipe::*;
            let name = match error {
                Error::Handle { fault: HandleFault::Expired { .. }, .. } => "HandleFault::Expired",
                $(Error::$variant { .. } => stringify!($variant),)*
                $($(Error::$outer($fault::$inner { .. }) => {
                    concat!(stringify!($fault), "::", stringify!($inner))
                })*)*
                _ => "Other",
            };
            name.to_owned()
        }
    };
}

variants! {
    Device Driver Os NotFound Handle Refused Handshake Protocol PeerGone Timeout Job
    Argument;
    Limit(LimitFault: Device Depth Memory Quota Events Jobs)
    Name(NameFault: Invalid Taken OtherKind Foreign Domain)
    Lost(Loss: Sample Event)
    Weights(WeightsFault: File Unverified Mismatch)
    State(StateFault: Capturing NotRecorded QueueClosed LinkClosed Forked)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_names_the_variant_also_behind_other_words() {
        assert_eq!(
            kind_of(&warpipe::Error::State(warpipe::StateFault::Forked)),
            "StateFault::Forked"
        );
        let wrapped = anyhow::Error::from(warpipe::Error::NotFound {
            kind: warpipe::Kind::Publisher,
            name: "a".into(),
            domain: "/tmp".into(),
            was_there: false,
        })
        .context("while looking");
        assert_eq!(Fault::of_any(&wrapped).kind, "NotFound");
        assert_eq!(Fault::of_any(&anyhow::anyhow!("no")).kind, "Other");
    }
}
