//! The messages between the demo's processes: orders on a child's standard input, events on its
//! standard output, one JSON object a line. Times are nanoseconds of `CLOCK_MONOTONIC`, the same in
//! all processes.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::leftovers::Holdings;
use crate::statistics::Histogram;

/// A child's next order. The end of its standard input orders it to end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "order", rename_all = "snake_case")]
pub enum Order {
    /// The publisher and one subscriber: round trips with one item in flight, beside bare words in
    /// the file `floor`.
    RoundTrips {
        /// How many of each kind.
        trips: u32,
        /// Shared memory that both open; none leaves the floor out.
        floor: Option<PathBuf>,
    },
    /// The publisher: publish as fast as items are taken, up to these limits or the next order.
    Publish {
        /// For this long.
        milliseconds: Option<u64>,
        /// So many items more.
        items: Option<u64>,
    },
    /// The publisher: no further item.
    Pause,
    /// The publisher: report when this subscriber is detected as gone, and the fate of the slots of
    /// these items.
    Watch {
        /// The subscriber's process.
        pid: i32,
        /// The items that it holds.
        numbers: Vec<u64>,
    },
    /// The publisher: complete what was sent, and then stop: in the middle of a write, or between
    /// two.
    StopInWrite {
        /// In the middle.
        busy: bool,
    },
    /// A subscriber: take two items, keep them, and receive nothing more.
    Hold {
        /// With work on the device that does not end.
        busy: bool,
    },
    /// A subscriber: report as soon as its stream waits for this item.
    Await {
        /// The item.
        number: u64,
    },
    /// A subscriber: report as soon as everything up to this item is checked.
    Reach {
        /// The item.
        number: u64,
    },
    /// A subscriber: report the items verified from one time until the first item at or after
    /// another.
    Since {
        /// From here on.
        from_ns: u64,
        /// And at least until here.
        until_ns: u64,
    },
}

/// A child's event.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// It has its endpoint and waits for orders.
    Ready,
    /// After `RoundTrips`; the subscriber's histograms are empty.
    RoundTrips {
        /// Of one round trip over two channels.
        ours: Histogram,
        /// Of one by bare words.
        floor: Histogram,
    },
    /// After `Publish` with limits, or `Pause`.
    Published {
        /// The last item's number.
        items: u64,
        /// When the first of this order was sent.
        first_ns: u64,
    },
    /// After `Watch`: it watches.
    Watching,
    /// The publisher was notified that the subscriber has gone.
    SubscriberGone {
        /// When.
        at_ns: u64,
    },
    /// The slots of all watched items are free.
    Released {
        /// When.
        at_ns: u64,
    },
    /// Each of those slots has been lent again.
    LentAgain {
        /// When the last was.
        at_ns: u64,
    },
    /// After `StopInWrite`.
    Stopped {
        /// Everything up to this item is complete.
        complete: u64,
        /// This one was announced, and half of it is written.
        writing: Option<u64>,
    },
    /// After `Hold`.
    Held {
        /// The items that it has and does not release.
        numbers: Vec<u64>,
        /// The samples that it verified before.
        counts: Counts,
    },
    /// After `Await`.
    Waiting,
    /// The first item of a publisher that was verified.
    First {
        /// The item.
        number: u64,
        /// When the check was seen to be done.
        at_ns: u64,
        /// If there was a publisher before.
        after: Option<Previous>,
    },
    /// A subscriber was notified that its publisher has gone.
    PublisherGone {
        /// When.
        at_ns: u64,
    },
    /// An item that was not complete was discarded, and the stream that waited for it went on.
    Lost {
        /// The item.
        number: u64,
        /// When.
        at_ns: u64,
    },
    /// After `Reach`.
    Reached {
        /// So far.
        counts: Counts,
    },
    /// After `Since`.
    Went {
        /// Items verified.
        verified: u64,
        /// The longest time between two of them.
        apart_ns: u64,
        /// Items that were not the next one, so far.
        gaps: u64,
    },
    /// At the end of a subscriber: all that it checked.
    Finished {
        /// In the end.
        counts: Counts,
    },
    /// At the end of every child: its resources beyond those before its endpoint was made.
    Left {
        /// Nothing, if all is well.
        extra: Holdings,
    },
}

/// A subscriber's counts, over all publishers that it followed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Items with every word right, in order.
    pub verified: u64,
    /// Items with a wrong word.
    pub wrong: u64,
    /// Items that were not the next one.
    pub gaps: u64,
    /// Items that their publisher did not complete.
    pub lost: u64,
    /// When the last check was seen to be done; 0 before.
    pub last_ns: u64,
}

/// The publisher that a subscriber followed before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Previous {
    /// Its process.
    pub pid: i32,
    /// Whether it had closed gracefully.
    pub graceful: bool,
    /// The last of its items that was verified.
    pub last: u64,
}
