//! The user that last had each byte range of a region.

use std::collections::BTreeMap;
use std::ops::Range;

/// The last user of some bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LastWriter {
    /// One user.
    User(u32),
    /// More than one.
    Several,
}

/// The last writers of a region. A range without an entry is as the driver gave it: zeros.
#[derive(Debug, Default)]
pub(super) struct LastWriters {
    /// By first byte: the end and the writer. The ranges do not overlap.
    ranges: BTreeMap<u64, (u64, LastWriter)>,
}

impl LastWriters {
    /// Whether a user other than `uid` has had any byte of `range`.
    pub(super) fn are_foreign_to(&self, uid: u32, range: &Range<u64>) -> bool {
        self.overlapping(range)
            .any(|(_, (_, writer))| writer != LastWriter::User(uid))
    }

    /// Records `writer` as the last user of `range`.
    pub(super) fn set(&mut self, range: Range<u64>, writer: LastWriter) {
        let overlapping: Vec<_> = self.overlapping(&range).collect();
        for (start, (end, old)) in overlapping {
            self.ranges.remove(&start);
            if start < range.start {
                self.ranges.insert(start, (range.start, old));
            }
            if end > range.end {
                self.ranges.insert(range.end, (end, old));
            }
        }
        self.ranges.insert(range.start, (range.end, writer));
    }

    fn overlapping(&self, range: &Range<u64>) -> impl Iterator<Item = (u64, (u64, LastWriter))> {
        let start = range.start;
        let before = self
            .ranges
            .range(..start)
            .next_back()
            .filter(|(_, (end, _))| *end > start);
        before
            .into_iter()
            .chain(self.ranges.range(range.clone()))
            .map(|(&start, &place)| (start, place))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fresh_memory_is_foreign_to_nobody() {
        assert!(!LastWriters::default().are_foreign_to(1, &(0..u64::MAX)));
    }

    #[test]
    fn every_byte_remembers_its_last_user() {
        let mut last_writers = LastWriters::default();
        let mut model = [None; 64];
        let mut chance = 7u64;
        for _ in 0..2_000 {
            chance = chance
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let start = (chance >> 33) % 60;
            let length = 1 + (chance >> 43) % 4;
            let uid = (chance >> 53) % 3;
            let (range, uid) = (start..start + length, uid as u32);
            let is_foreign = model[start as usize..(start + length) as usize]
                .iter()
                .any(|m| m.is_some_and(|m| m != uid));
            assert_eq!(
                last_writers.are_foreign_to(uid, &range),
                is_foreign,
                "{range:?} {uid}"
            );
            last_writers.set(range.clone(), LastWriter::User(uid));
            model[start as usize..(start + length) as usize].fill(Some(uid));
        }
    }

    #[test]
    fn bytes_that_several_users_wrote_are_foreign_to_each() {
        let mut last_writers = LastWriters::default();
        last_writers.set(0..8, LastWriter::Several);
        assert!(
            last_writers.are_foreign_to(1, &(7..9)) && !last_writers.are_foreign_to(1, &(8..9))
        );
    }
}
