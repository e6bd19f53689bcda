//! The free ranges of one region.
//!
//! A freed range is first kept as it is, beside others of its length: most slots have the length of
//! one that was freed just now, and are found without a search. Such ranges are joined with their
//! neighbours only when no range is long enough otherwise.

/// Of so many lengths, ranges are kept unjoined.
const LENGTHS_MAX: usize = 8;

/// The free ranges; no two overlap.
#[derive(Debug)]
pub(super) struct FreeRanges {
    /// `(offset, bytes)`, by offset, never adjacent to each other.
    joined: Vec<(u64, u64)>,
    /// Unjoined ranges, by their length.
    unjoined: Vec<Unjoined>,
}

/// Free ranges of one length.
#[derive(Debug)]
struct Unjoined {
    bytes: u64,
    offsets: Vec<u64>,
}

impl FreeRanges {
    /// One range, from 0 on.
    pub(super) fn new(bytes: u64) -> FreeRanges {
        FreeRanges {
            joined: vec![(0, bytes)],
            unjoined: Vec::new(),
        }
    }

    /// Takes `bytes` out of a free range, and returns their offset.
    #[inline]
    pub(super) fn take(&mut self, bytes: u64) -> Option<u64> {
        let of_length = self.unjoined.iter_mut().find(|it| it.bytes == bytes);
        if let Some(offset) = of_length.and_then(|it| it.offsets.pop()) {
            return Some(offset);
        }
        let fit = self
            .joined
            .iter()
            .position(|&(_, length)| length >= bytes)?;
        let (offset, length) = self.joined[fit];
        if length == bytes {
            self.joined.remove(fit);
        } else {
            self.joined[fit] = (offset + bytes, length - bytes);
        }
        Some(offset)
    }

    /// Adds a range that [`take`](Self::take) gave.
    #[inline]
    pub(super) fn give_back(&mut self, offset: u64, bytes: u64) {
        if let Some(same) = self.unjoined.iter_mut().find(|it| it.bytes == bytes) {
            return same.offsets.push(offset);
        }
        let offsets = vec![offset];
        if self.unjoined.len() < LENGTHS_MAX {
            return self.unjoined.push(Unjoined { bytes, offsets });
        }
        match self.unjoined.iter_mut().find(|it| it.offsets.is_empty()) {
            Some(unused) => *unused = Unjoined { bytes, offsets },
            None => self.join_one(offset, bytes),
        }
    }

    /// Joins all ranges with their neighbours. False if nothing has changed.
    pub(super) fn join(&mut self) -> bool {
        let before = self.joined.len();
        for Unjoined { bytes, offsets } in &mut self.unjoined {
            let ranges = offsets.drain(..).map(|offset| (offset, *bytes));
            self.joined.extend(ranges);
        }
        if self.joined.len() == before {
            return false;
        }
        self.joined.sort_unstable();
        self.joined.dedup_by(|next, last| {
            let is_adjacent = last.0 + last.1 == next.0;
            if is_adjacent {
                last.1 += next.1;
            }
            is_adjacent
        });
        true
    }

    fn join_one(&mut self, offset: u64, bytes: u64) {
        let free = &mut self.joined;
        let index = free.partition_point(|&(start, _)| start < offset);
        let joins_next = free
            .get(index)
            .is_some_and(|&(start, _)| start == offset + bytes);
        let joins_last = index > 0 && free[index - 1].0 + free[index - 1].1 == offset;
        match (joins_last, joins_next) {
            (true, true) => free[index - 1].1 += bytes + free.remove(index).1,
            (true, false) => free[index - 1].1 += bytes,
            (false, true) => free[index] = (offset, bytes + free[index].1),
            (false, false) => free.insert(index, (offset, bytes)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const UNIT: u64 = 512;

    #[test]
    fn ranges_taken_and_given_back_at_random_never_overlap_and_join_to_the_whole() {
        let mut random = warpipe_testkit::Rng::with_seed(9);
        for _ in 0..50 {
            let whole = 64 * UNIT;
            let (mut free, mut taken) = (FreeRanges::new(whole), Vec::<(u64, u64)>::new());
            for _ in 0..500 {
                let bytes = UNIT * random.u64(1..12);
                if random.bool() || taken.is_empty() {
                    let offset = free.take(bytes).or_else(|| {
                        free.join();
                        free.take(bytes)
                    });
                    let Some(offset) = offset else {
                        let used: u64 = taken.iter().map(|range| range.1).sum();
                        assert!(used > 0, "{bytes} of {whole} bytes, all of them free");
                        continue;
                    };
                    let overlaps = |&(other, length): &(u64, u64)| {
                        offset < other + length && other < offset + bytes
                    };
                    assert!(offset + bytes <= whole && !taken.iter().any(overlaps));
                    taken.push((offset, bytes));
                } else {
                    let (offset, bytes) = taken.swap_remove(random.usize(..taken.len()));
                    free.give_back(offset, bytes);
                }
            }
            for (offset, bytes) in taken {
                free.give_back(offset, bytes);
            }
            free.join();
            assert_eq!(free.joined, [(0, whole)]);
        }
    }

    #[test]
    fn a_range_of_a_length_that_was_freed_is_found_among_thousands_without_a_search() {
        let mut free = FreeRanges::new(8192 * UNIT);
        let taken: Vec<u64> = (0..8192).map(|_| free.take(UNIT).unwrap()).collect();
        for offset in taken.into_iter().step_by(2) {
            free.give_back(offset, UNIT);
        }
        assert!(free.joined.is_empty());
        let last = free.unjoined[0].offsets.last().copied();
        assert_eq!(free.take(UNIT), last);
    }
}
