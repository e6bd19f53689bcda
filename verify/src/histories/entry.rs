//! Entries of a ring: an encoded description decodes to the same, and random words decode to a
//! layout inside the slot or are refused.

use std::sync::atomic::Ordering::Relaxed;

use super::Draw;
use crate::pubsub::entry::{Completion, Description, Metadata, UntrustedEntry};
use crate::shm::segment::Entry;
use crate::tensor::{DType, Layout};

const REGION_BYTES: u64 = 1 << 40;

/// An entry that is written, spoilt and read again and again, with one copy, as a receiver does.
pub struct Play {
    entry: Box<Entry>,
    copy: UntrustedEntry,
}

impl Default for Play {
    fn default() -> Play {
        Play {
            // SAFETY: atomics alone, of which every bit pattern is valid.
            entry: unsafe { Box::new_zeroed().assume_init() },
            copy: UntrustedEntry::default(),
        }
    }
}

impl Play {
    /// # Errors
    /// The violation, if any.
    pub fn act(&mut self, draw: Draw) -> Result<(), String> {
        let (kind, which, by) = draw;
        if kind % 2 == 0 {
            return self.describe(draw);
        }
        let entry = &self.entry;
        let word = &entry.words[usize::from(which) % entry.words.len()];
        word.store(word.load(Relaxed) ^ (u64::from(by) << (kind % 57)), Relaxed);
        self.copy.copy(entry);
        if let Ok(found) = self.copy.check(REGION_BYTES) {
            let end = found.slot.checked_add(found.layout.bytes());
            if end.is_none_or(|end| end > REGION_BYTES) {
                return Err(format!("{found:?} ends outside its region"));
            }
        }
        Ok(())
    }

    fn describe(&mut self, (kind, which, by): Draw) -> Result<(), String> {
        let dtype = DType::ALL[usize::from(which) % DType::ALL.len()];
        let shape: Vec<u64> = (0..by % 9)
            .map(|axis| 1 + u64::from(axis ^ which) % 5)
            .collect();
        let mut layout = Layout::contiguous(dtype, &shape).map_err(|error| error.to_string())?;
        if kind % 4 == 0 {
            let turned: Vec<i64> = layout.strides().iter().map(|stride| -stride).collect();
            let first = layout.bytes() - dtype.bytes();
            layout = Layout::strided(dtype, &shape, &turned, first)
                .map_err(|error| error.to_string())?;
        }
        let metadata =
            Metadata::new(&vec![by; usize::from(which)]).map_err(|error| error.to_string())?;
        let completion = (kind % 3 == 0).then_some(Completion {
            word: which.into(),
            value: by.into(),
        });
        let (sequence, sent_ns, region, slot) =
            (kind.into(), by.into(), which.into(), 512 * u64::from(by));
        let told = Description {
            sequence,
            sent_ns,
            region,
            slot,
            layout: &layout,
            metadata: &metadata,
        };
        let (packed, entry) = (told.packed(), &*self.entry);
        let packed = match completion {
            Some(completion) => packed.with_completion(completion),
            None => packed,
        };
        packed.write(entry);
        self.copy.copy(entry);
        let found = self
            .copy
            .check(REGION_BYTES)
            .map_err(|wrong| format!("{wrong:?} of {told:?}"))?;
        // The stride of a dimension of one means nothing, and is not told where the rest has no
        // gaps.
        let plain = |layout: &Layout| {
            (
                layout.dtype(),
                layout.offset(),
                layout.bytes(),
                layout.shape().to_vec(),
            )
        };
        let is_same_layout = if layout.is_contiguous() {
            found.layout.is_contiguous() && plain(&found.layout) == plain(&layout)
        } else {
            *found.layout == layout
        };
        let is_same = (
            found.sequence,
            found.sent_ns,
            self.copy.region(),
            found.slot,
        ) == (sequence, sent_ns, region, slot)
            && is_same_layout
            && found.completion == completion
            && found.metadata.as_bytes() == told.metadata.as_bytes();
        if is_same {
            Ok(())
        } else {
            Err(format!("{told:?} comes out as {found:?}"))
        }
    }
}
