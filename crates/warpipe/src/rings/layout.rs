//! The table of a kernel ring's constants and of its parameter block. The CPU version reads the
//! block by this table, and `include/warpipe/device.cuh` holds the same in C, written by
//! `cargo xtask ring-header`.

/// The version of the block. A kernel that was compiled with another one does nothing.
pub const LAYOUT: u64 = 1;
/// The most slots of a ring.
pub const DEPTH_MAX: u64 = 1024;
/// The most consumers of a ring.
pub const CONSUMERS_MAX: u64 = 8;
/// Bytes from one slot's word to the next one's: a line of the L2 cache, so that two sides never
/// write one line.
pub const WORD_STRIDE: u64 = 128;
/// The role of a block's side.
pub const PRODUCER: u64 = 0;
/// The role of a block's side.
pub const CONSUMER: u64 = 1;
/// A side that never has to wait looks at its stop word at each item with a number one below a
/// multiple of this.
pub const STOP_LOOK: u64 = 256;

/// A named number.
pub type Constant = (&'static str, u64, &'static str);

/// How a wait ends. The first values are those of the `gone` word, too.
pub const STATUSES: &[Constant] = &[
    ("OK", 0, "the slot may be used"),
    ("CLOSED", 1, "every peer has ended, and this one gracefully"),
    (
        "DIED",
        2,
        "every peer has ended, and this one's process is proven dead",
    ),
    (
        "ORPHANED",
        3,
        "a peer's process has exited; a child of it may keep its kernels running",
    ),
    ("STOPPED", 4, "this side stops"),
    (
        "SPIN_LIMIT",
        5,
        "the word did not come within the ring's limit of looks",
    ),
    (
        "WRONG_LAYOUT",
        6,
        "this code was compiled for another version of the block",
    ),
];

/// The numbers that kernels use.
pub const CONSTANTS: &[Constant] = &[
    ("LAYOUT", LAYOUT, "the version of the block"),
    ("DEPTH_MAX", DEPTH_MAX, "the most slots"),
    ("CONSUMERS_MAX", CONSUMERS_MAX, "the most consumers"),
    (
        "WORD_STRIDE",
        WORD_STRIDE,
        "bytes from one slot's word to the next one's",
    ),
    ("PRODUCER", PRODUCER, "a role"),
    ("CONSUMER", CONSUMER, "a role"),
    (
        "STOP_LOOK",
        STOP_LOOK,
        "items between two looks of a side that never waits",
    ),
];

/// Words of 64 bits in a structure.
#[derive(Debug, Clone, Copy)]
pub struct Field {
    pub name: &'static str,
    pub offset: u64,
    pub words: u64,
    pub about: &'static str,
}

macro_rules! fields {
    ($list:ident: $($constant:ident = $name:ident, $offset:expr, $words:expr, $about:expr;)*) => {
        $(#[doc = $about] pub const $constant: u64 = $offset;)*
        /// All of them, in the order of their offsets.
        pub const $list: &[Field] = &[
            $(Field { name: stringify!($name), offset: $offset, words: $words, about: $about },)*
        ];
    };
}

/// Offsets in a peer's part of the block.
pub mod peer {
    use super::Field;

    fields! { FIELDS:
        MINE = mine, 0, 1, "where this side spins: a word for each slot, in this side's memory";
        THEIRS = theirs, 8, 1, "where the peer spins: a word for each slot, in the peer's memory";
        GONE = gone, 16, 1, "where this process's reactor says that the peer has ended";
        LOST = lost, 24, 1, "not 0: the producer's kernels wait for this consumer no more";
    }

    /// The length of a peer's part.
    pub const BYTES: u64 = 32;
}

/// Offsets in the block.
pub mod block {
    use super::{CONSUMERS_MAX, DEPTH_MAX, Field, peer};

    fields! { FIELDS:
        LAYOUT = layout, 0, 1, "the version";
        ROLE = role, 8, 1, "producer or consumer";
        PEERS = peers, 16, 1, "how many peers: a consumer has one";
        DEPTH = depth, 24, 1, "slots, a power of two";
        SLOT_BYTES = slot_bytes, 32, 1, "bytes of a slot, a multiple of 128";
        SPINS_MAX = spins_max, 40, 1, "looks at a word after which a wait ends";
        LOOK_EVERY = look_every, 48, 1, "looks at a word between two at the stop and gone words";
        SLOTS = slots, 56, 1, "the first slot, in the producer's memory";
        STOP = stop, 64, 1, "where this process says that its kernels are to stop";
        STATUS = status, 72, 1, "where a failed wait on a stream says why";
        PEER = peer, 128, CONSUMERS_MAX * peer::BYTES / 8, "the peers";
        CURSOR = cursor, 384, 1, "the next item; written by this side's kernels alone";
        GRANTED = granted, 512, 1, "one more than the item that a wait on a stream was given";
        FAILED = failed, 520, 1, "how a wait on a stream failed; no later one waits";
        ARRIVALS = arrivals, 640, DEPTH_MAX, "for each slot, blocks that have finished its item";
    }

    /// The length of the block.
    pub const BYTES: u64 = 640 + DEPTH_MAX * 8;
}

/// The bytes of one side's words for one peer.
pub const WORDS_BYTES: u64 = DEPTH_MAX * WORD_STRIDE;

/// The lines of `device.cuh` that stand between its two marks.
pub fn header() -> String {
    let mut text = String::new();
    for (name, value, about) in CONSTANTS.iter().chain(STATUSES) {
        text += &format!("#define WARPIPE_RING_{name} {value}ull /* {about} */\n");
    }
    text += &structure("warpipe_ring_peer", peer::FIELDS, peer::BYTES);
    text += &structure("warpipe_ring_params", block::FIELDS, block::BYTES);
    text
}

fn structure(name: &str, fields: &[Field], bytes: u64) -> String {
    let mut text = format!("\nstruct {name} {{\n");
    let mut end = 0;
    for field in fields {
        if field.offset > end {
            let words = (field.offset - end) / 8;
            text += &format!("    unsigned long long unused_{end}[{words}];\n");
        }
        let declared = match (field.name, field.words) {
            ("peer", _) => "warpipe_ring_peer peer[WARPIPE_RING_CONSUMERS_MAX]".to_owned(),
            (name, 1) => format!("unsigned long long {name}"),
            (name, words) => format!("unsigned long long {name}[{words}]"),
        };
        text += &format!("    {declared}; /* {} */\n", field.about);
        end = field.offset + field.words * 8;
    }
    text += "};\n";
    // Words of 64 bits alone: the length is right only if every offset is. (NVRTC 12.0 has no offsetof.)
    text + &format!("static_assert(sizeof({name}) == {bytes}, \"{name}\");\n")
}
