//! A link: everything that two processes share, and nothing that a third one does.
//!
//! One socket for the handshake, news and the descriptors of memory; one sealed memfd, the *link segment*, in
//! which samples are announced; one wake channel. The formats are drawn byte by byte in `docs/design/link.md`,
//! what each death leaves behind in `docs/design/recovery.md`.

pub(crate) mod closer;
pub(crate) mod entry;
pub(crate) mod limits;
pub(crate) mod message;
pub(crate) mod peer;
pub(crate) mod proof;
pub(crate) mod pulse;
pub(crate) mod ring;
pub(crate) mod seal;
pub(crate) mod segment;
pub(crate) mod wake;
pub(crate) mod watcher;

/// The state of the process at the other end, for people and for policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeerState {
    /// Its heartbeat is fresh.
    Alive,
    /// It is there, and its heartbeat is not: stopped, hung, or starved of the CPU.
    Stalled,
    /// It takes part no more, but may still hold samples: it said goodbye, or was evicted.
    Leaving,
    /// Its socket has closed without a goodbye: presumed dead, not yet proven.
    Suspect,
    /// Proven dead: its lifeline has ended, and its device is quiet.
    Dead,
}
