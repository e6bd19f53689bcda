//! A recording of an event: its lane and its count there.

use std::fmt;

use super::layout::{self, Recording};

/// Selects the later of two recordings.
pub(super) trait LatestRecording: Sized {
    fn max_by_time(self, other: Self) -> Self;
}

impl LatestRecording for Option<(u64, Recording)> {
    fn max_by_time(self, other: Self) -> Self {
        match (self, other) {
            (Some((ours, _)), Some((theirs, _))) if theirs > ours => other,
            (None, _) => other,
            _ => self,
        }
    }
}

impl Recording {
    /// The recording as a number that is not 0, as C has it.
    #[doc(hidden)]
    pub fn to_bits(self) -> u64 {
        layout::recording_word(self)
    }

    /// The recording of [`to_bits`](Self::to_bits); `None` for a number that no recording has.
    #[doc(hidden)]
    pub fn from_bits(bits: u64) -> Option<Recording> {
        layout::recording_of_word(bits)
    }
}

impl fmt::Display for Recording {
    /// Its number among those of its recorder, and the recorder's place at the event.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of recorder {}", self.count, self.lane)
    }
}
