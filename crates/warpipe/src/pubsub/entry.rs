//! The description of a sample in its ring entry: packed by the sender, copied once and checked by
//! the receiver.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::error::{Error, Result};
use crate::shm::segment::{ENTRY_META_BYTES_MAX, Entry, META_BYTES_MAX, MetaCell};
use crate::tensor::{DType, Layout, RANK_MAX};

/// The metadata of a sample, at most [`META_BYTES_MAX`] bytes: the user's, behind its [`Head`]. The
/// bytes are behind a pointer: most samples have none, and a sample moves often, and would copy
/// them with each move.
#[derive(Clone, Default)]
pub(crate) struct Metadata(Option<Arc<[u8]>>);

impl Metadata {
    pub(crate) const EMPTY: Metadata = Metadata(None);

    pub(crate) fn new(bytes: &[u8]) -> Result<Metadata> {
        Metadata::behind(&[], bytes)
    }

    /// The user's bytes behind the head, if there is one.
    pub(crate) fn behind(head: &[u8], bytes: &[u8]) -> Result<Metadata> {
        if head.len() + bytes.len() > META_BYTES_MAX {
            let found = match head.len() {
                0 => format!("{} bytes", bytes.len()),
                head => format!("{} bytes beside {head} that describe tensors", bytes.len()),
            };
            let allowed = format!("at most {META_BYTES_MAX} bytes in all");
            return Err(Error::argument("metadata", found, allowed));
        }
        Ok(Metadata(match (head, bytes) {
            ([], []) => None,
            ([], bytes) => Some(bytes.into()),
            _ => Some([head, bytes].concat().into()),
        }))
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }

    /// Whether it has no room in an entry.
    #[inline]
    pub(crate) fn is_long(&self) -> bool {
        self.as_bytes().len() > ENTRY_META_BYTES_MAX
    }
}

/// What a sample's metadata begins with, in front of the user's.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Head {
    #[default]
    None,
    /// The [place](crate::pubsub::place) of the tensor, which does not lie in the slot.
    Place,
    /// The list of the sample's [parts](crate::pubsub::parts).
    Parts,
}

impl Head {
    fn flag(self) -> u64 {
        match self {
            Head::None => 0,
            Head::Place => IN_PLACE,
            Head::Parts => PARTS,
        }
    }
}

impl std::fmt::Debug for Metadata {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.as_bytes().len())
    }
}

/// A sample's description, of what the sender's call was given: a copy would take longer than the
/// words of the entry do.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Description<'a> {
    pub(crate) sequence: u64,
    /// 0 for none.
    pub(crate) sent_ns: u64,
    pub(crate) region: u32,
    /// Where the slot begins in its region, in bytes.
    pub(crate) slot: u64,
    pub(crate) layout: &'a Layout,
    pub(crate) metadata: &'a Metadata,
}

/// A word of the publisher that was signalled with the sample when it was sent. If the publisher is
/// killed before it has signalled this link, this word decides whether the sample is complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Completion {
    /// Which of the publisher's published words.
    pub(crate) word: u32,
    /// The value that it reaches once the sample is complete.
    pub(crate) value: u64,
}

/// The strides follow from the shape and are not written.
const CONTIGUOUS: u64 = 1;
/// The completion is written.
const COMPLETED: u64 = 2;
/// The time of sending is written.
const STAMPED: u64 = 4;
/// The layout's offset is written; otherwise it is 0.
const SHIFTED: u64 = 8;
/// [`Head::Place`].
const IN_PLACE: u64 = 16;
/// [`Head::Parts`].
const PARTS: u64 = 32;
/// The metadata lies in the entry's cell of the link's metadata page, and its length here.
const LONG: u64 = 64;
const FLAGS: u64 = CONTIGUOUS | COMPLETED | STAMPED | SHIFTED | IN_PLACE | PARTS | LONG;

/// The most words of a description: packed, slot, time, offset, shape, strides, metadata,
/// completion.
const WORDS_MAX: usize = 4 + 2 * RANK_MAX + ENTRY_META_BYTES_MAX / 8 + 2;
const _: () = assert!(WORDS_MAX <= 58);

/// Word 0: region (32 bits), metadata length (9), type code (6), type bits / 8 (5), rank (4), flags
/// (8).
fn pack(region: u32, meta: u16, dtype: DType, rank: usize, flags: u64) -> u64 {
    u64::from(region)
        | u64::from(meta) << 32
        | u64::from(dtype.code()) << 41
        | u64::from(dtype.bits() / 8) << 47
        | (rank as u64) << 52
        | flags << 56
}

/// A description in the words of an entry: packed once for a sample, and written for each
/// subscriber.
#[derive(Clone)]
pub(crate) struct PackedEntry {
    sequence: u64,
    words: [u64; WORDS_MAX],
    length: usize,
    /// What does not fit in the entry, for its cell.
    long: Metadata,
}

impl Default for PackedEntry {
    fn default() -> PackedEntry {
        PackedEntry {
            sequence: 0,
            words: [0; WORDS_MAX],
            length: 0,
            long: Metadata::EMPTY,
        }
    }
}

impl PackedEntry {
    /// Writes the description. The entry belongs to the sender: no receiver uses what it reads here
    /// before the state word is published.
    #[inline]
    pub(crate) fn write(&self, entry: &Entry) {
        entry.sequence.store(self.sequence, Relaxed);
        let words = &self.words[..self.length.min(WORDS_MAX)];
        for (word, &value) in entry.words.iter().zip(words) {
            word.store(value, Relaxed);
        }
    }

    /// The metadata for the entry's cell; none if the entry has it.
    #[inline]
    pub(crate) fn long(&self) -> Option<&[u8]> {
        self.long.0.as_deref()
    }

    /// Packs another description in place of the last one.
    #[inline]
    pub(crate) fn pack(&mut self, description: Description<'_>) {
        self.sequence = description.sequence;
        let mut length = 0;
        description.put_words(|value| {
            if let Some(word) = self.words.get_mut(length) {
                *word = value;
                length += 1;
            }
        });
        self.length = length;
        self.long = match description.metadata.is_long() {
            true => description.metadata.clone(),
            false => Metadata::EMPTY,
        };
    }

    /// Says what the metadata begins with.
    #[inline]
    pub(crate) fn set_head(&mut self, head: Head) {
        self.words[0] |= head.flag() << 56;
    }

    /// The same sample for a link that did not exist when it was sent.
    pub(crate) fn with_completion(mut self, completion: Completion) -> PackedEntry {
        let end = [u64::from(completion.word), completion.value];
        self.words[0] |= COMPLETED << 56;
        let room = self.words.iter_mut().skip(self.length);
        room.zip(end).for_each(|(word, value)| *word = value);
        self.length += end.len();
        self
    }
}

/// Bytes as an entry has them.
#[inline]
pub(crate) fn words_of(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    })
}

impl Description<'_> {
    /// As an entry has it.
    pub(crate) fn packed(self) -> PackedEntry {
        let mut packed = PackedEntry::default();
        packed.pack(self);
        packed
    }

    /// Gives the words of an entry to `put`, one after another without gaps: what is left out makes
    /// room in the first cache line, which has the state word.
    #[inline]
    fn put_words(self, mut put: impl FnMut(u64)) {
        let layout = self.layout;
        let is_plain = layout.is_contiguous() && !layout.shape().contains(&0);
        let flag = |is_set: bool, flag: u64| if is_set { flag } else { 0 };
        let flags = flag(is_plain, CONTIGUOUS)
            | flag(self.sent_ns != 0, STAMPED)
            | flag(layout.offset() != 0, SHIFTED)
            | flag(self.metadata.is_long(), LONG);
        let (metadata, long) = match self.metadata.is_long() {
            false => (self.metadata.as_bytes(), None),
            true => (&[][..], Some(self.metadata.as_bytes().len() as u64)),
        };
        put(pack(
            self.region,
            metadata.len() as u16,
            layout.dtype(),
            layout.shape().len(),
            flags,
        ));
        put(self.slot);
        if flags & STAMPED != 0 {
            put(self.sent_ns);
        }
        if flags & SHIFTED != 0 {
            put(layout.offset());
        }
        layout.shape().iter().for_each(|&length| put(length));
        if !is_plain {
            layout
                .strides()
                .iter()
                .for_each(|&stride| put(stride as u64));
        }
        words_of(metadata).for_each(&mut put);
        long.into_iter().for_each(put);
    }
}

/// A sample's description as a receiver has checked it.
#[derive(Debug)]
pub(crate) struct CheckedEntry {
    pub(crate) sequence: u64,
    /// 0 for none.
    pub(crate) sent_ns: u64,
    /// Where the slot begins in its region, in bytes.
    pub(crate) slot: u64,
    /// With [`Head::Place`] the slot has no bytes.
    pub(crate) head: Head,
    /// Shared with the samples of the same layout before it. A sample is moved many times, and each
    /// move would copy the 150 bytes of a layout in place.
    pub(crate) layout: Arc<Layout>,
    pub(crate) metadata: Metadata,
    pub(crate) completion: Option<Completion>,
}

/// The layout of the entry that was checked last. Mostly the next one has the same, and is neither
/// checked nor allocated again.
#[derive(Debug)]
struct LastLayout {
    /// The strides followed from the shape.
    is_plain: bool,
    layout: Arc<Layout>,
}

/// A copy of what a peer wrote. It proves nothing yet: [`UntrustedEntry::check`] makes a
/// [`CheckedEntry`] of it.
///
/// The receiver keeps one and reads each entry into it, so that only what has been checked is
/// moved.
#[derive(Debug, Default)]
pub(crate) struct UntrustedEntry {
    sequence: u64,
    packed: u64,
    slot: u64,
    sent_ns: u64,
    offset: u64,
    shape: [u64; RANK_MAX],
    strides: [i64; RANK_MAX],
    metadata: Metadata,
    /// The length of metadata in the entry's cell.
    long: u64,
    completion: [u64; 2],
    last_layout: Option<LastLayout>,
}

/// A field with an illegal value, and the values that are legal.
#[derive(Debug)]
pub(crate) struct Violation {
    pub(crate) field: &'static str,
    pub(crate) found: String,
    pub(crate) allowed: String,
}

#[cold]
pub(crate) fn violation(
    field: &'static str,
    found: impl ToString,
    allowed: impl ToString,
) -> Violation {
    Violation {
        field,
        found: found.to_string(),
        allowed: allowed.to_string(),
    }
}

impl UntrustedEntry {
    /// Copies the entry, every word at most once. Lengths are clamped here and checked in `check`.
    /// The bytes past them in the copy are left over from the last one and are never used.
    #[inline]
    pub(crate) fn copy(&mut self, entry: &Entry) {
        let mut words = entry.words.iter();
        let mut get = || words.next().map_or(0, |word| word.load(Relaxed));
        self.sequence = entry.sequence.load(Relaxed);
        self.packed = get();
        self.slot = get();
        self.sent_ns = if self.has(STAMPED) { get() } else { 0 };
        self.offset = if self.has(SHIFTED) { get() } else { 0 };
        let rank = self.rank().min(RANK_MAX);
        self.shape[..rank].fill_with(&mut get);
        if !self.has(CONTIGUOUS) {
            self.strides[..rank].fill_with(|| get() as i64);
        }
        self.metadata = Metadata::EMPTY;
        let length = self.meta_length().min(ENTRY_META_BYTES_MAX);
        if length > 0 {
            let mut bytes = [0; ENTRY_META_BYTES_MAX];
            for chunk in bytes.chunks_mut(8).take(length.div_ceil(8)) {
                chunk.copy_from_slice(&get().to_le_bytes());
            }
            self.metadata = Metadata(Some(bytes[..length].into()));
        }
        self.long = if self.is_long() { get() } else { 0 };
        if self.has(COMPLETED) {
            self.completion = [get(), get()];
        }
    }

    /// Whether the metadata lies in the entry's cell.
    #[inline]
    pub(crate) fn is_long(&self) -> bool {
        self.has(LONG)
    }

    /// Copies the metadata in the entry's cell, which is a part of the entry, as
    /// [`copy`](Self::copy) does.
    pub(crate) fn copy_long(&mut self, cell: &MetaCell) {
        let length = self.long.min(META_BYTES_MAX as u64) as usize;
        let words = cell.iter().take(length.div_ceil(8));
        let mut bytes: Vec<u8> = words
            .flat_map(|it| it.load(Relaxed).to_le_bytes())
            .collect();
        bytes.truncate(length);
        self.metadata = Metadata(Some(bytes.into()));
    }

    pub(crate) fn region(&self) -> u32 {
        self.packed as u32
    }

    fn meta_length(&self) -> usize {
        (self.packed >> 32 & 0x1ff) as usize
    }

    fn rank(&self) -> usize {
        (self.packed >> 52 & 0xf) as usize
    }

    fn has(&self, flag: u64) -> bool {
        self.packed >> 56 & flag != 0
    }

    /// Checks the copy against a region of `region_bytes` bytes.
    pub(crate) fn check(&mut self, region_bytes: u64) -> Result<CheckedEntry, Violation> {
        let code = (self.packed >> 41 & 0x3f) as u8;
        let bits = (self.packed >> 47 & 0x1f) as u8 * 8;
        let dtype = DType::from_dlpack(code, bits).ok_or_else(|| {
            violation(
                "dtype",
                format!("code {code}, {bits} bits"),
                "a DLPack type",
            )
        })?;
        let rank = self.rank();
        if rank > RANK_MAX {
            return Err(violation("rank", rank, format!("0 to {RANK_MAX}")));
        }
        if self.meta_length() > ENTRY_META_BYTES_MAX || self.is_long() && self.meta_length() > 0 {
            return Err(violation("metadata length", self.meta_length(), "0 to 256"));
        }
        if self.long > META_BYTES_MAX as u64 {
            let allowed = format!("0 to {META_BYTES_MAX}");
            return Err(violation("metadata length", self.long, allowed));
        }
        let head = match (self.has(IN_PLACE), self.has(PARTS)) {
            (false, false) => Some(Head::None),
            (true, false) => Some(Head::Place),
            (false, true) => Some(Head::Parts),
            (true, true) => None,
        };
        let Some(head) = head.filter(|_| self.packed >> 56 & !FLAGS == 0) else {
            let found = format!("{:#x}", self.packed >> 56);
            let allowed = format!("bits of {FLAGS:#x}, a tensor in place without parts");
            return Err(violation("flags", found, allowed));
        };
        let [word, value] = self.completion;
        let completion = self
            .has(COMPLETED)
            .then(|| u32::try_from(word).map(|word| Completion { word, value }));
        let completion = completion
            .transpose()
            .map_err(|_| violation("completion", word, "32 bits"))?;
        let layout = self.layout(dtype, rank)?;
        let bytes = match head {
            Head::Place => 0,
            Head::None | Head::Parts => layout.bytes(),
        };
        let end = self.slot.checked_add(bytes);
        if end.is_none_or(|end| end > region_bytes) {
            let found = format!("{} + {bytes} bytes", self.slot);
            let allowed = format!("inside the region's {region_bytes} bytes");
            return Err(violation("slot", found, allowed));
        }
        Ok(CheckedEntry {
            sequence: self.sequence,
            sent_ns: self.sent_ns,
            slot: self.slot,
            head,
            layout,
            metadata: std::mem::take(&mut self.metadata),
            completion,
        })
    }

    #[inline]
    fn layout(&mut self, dtype: DType, rank: usize) -> Result<Arc<Layout>, Violation> {
        let is_plain = self.has(CONTIGUOUS);
        let is_the_same = |last: &&LastLayout| {
            let known = &last.layout;
            last.is_plain == is_plain
                && known.dtype() == dtype
                && known.offset() == self.offset
                && *known.shape() == self.shape[..rank]
                && (is_plain || *known.strides() == self.strides[..rank])
        };
        if let Some(last) = self.last_layout.as_ref().filter(is_the_same) {
            return Ok(last.layout.clone());
        }
        let layout = Arc::new(self.another_layout(dtype, rank)?);
        self.last_layout = Some(LastLayout {
            is_plain,
            layout: layout.clone(),
        });
        Ok(layout)
    }

    fn another_layout(&self, dtype: DType, rank: usize) -> Result<Layout, Violation> {
        let shape = &self.shape[..rank];
        let layout = if self.has(CONTIGUOUS) && self.offset == 0 {
            Layout::contiguous(dtype, shape)
        } else if self.has(CONTIGUOUS) {
            Layout::contiguous(dtype, shape)
                .and_then(|plain| Layout::strided(dtype, shape, plain.strides(), self.offset))
        } else {
            Layout::strided(dtype, shape, &self.strides[..rank], self.offset)
        };
        layout.map_err(|error| violation("layout", error, "a layout inside its slot"))
    }
}
