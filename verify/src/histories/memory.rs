//! Memory that records the writer of each unit, so that damage by a late write is seen.

use std::ops::Range;

/// The unit in which an arena cuts its regions.
pub const UNIT: u64 = 512;

/// A range of a region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    pub region: u32,
    pub offset: u64,
    pub bytes: u64,
}

impl Place {
    /// Whether the two have a byte in common.
    pub fn meets(&self, other: &Place) -> bool {
        let overlap =
            self.offset < other.offset + other.bytes && other.offset < self.offset + self.bytes;
        self.region == other.region && overlap
    }

    fn units(&self) -> Range<usize> {
        (self.offset / UNIT) as usize..((self.offset + self.bytes) / UNIT) as usize
    }
}

/// The regions, with a tag for each unit; 0 is what the device gives, and what is cleared.
#[derive(Debug, Default)]
pub struct Memory(Vec<Vec<u64>>);

impl Memory {
    pub fn add(&mut self, bytes: u64) {
        self.0.push(vec![0; (bytes / UNIT) as usize]);
    }

    pub fn fill(&mut self, place: Place, tag: u64) {
        self.0[place.region as usize][place.units()].fill(tag);
    }

    /// A tag that is present and not `allowed`.
    pub fn foreign(&self, place: Place, allowed: impl Fn(u64) -> bool) -> Option<u64> {
        self.0[place.region as usize][place.units()]
            .iter()
            .copied()
            .find(|&tag| !allowed(tag))
    }

    /// The length of each region.
    pub fn regions(&self) -> impl Iterator<Item = u64> {
        self.0.iter().map(|units| units.len() as u64 * UNIT)
    }
}
