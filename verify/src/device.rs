//! Stand-in for a device, with heap memory.

use std::time::Duration;

use crate::backend::TimelineWord;
use crate::error::Result;

#[derive(Debug, Clone)]
pub(crate) struct Device;

impl Device {
    pub(crate) fn backend(&self) -> &Device {
        self
    }

    /// The unit in which it gives memory.
    pub(crate) fn granularity(&self) -> u64 {
        4096
    }

    pub(crate) fn wait_word(&self, word: &TimelineWord, value: u64, _: Duration) -> Result<bool> {
        while !word.reached(value) {
            word.park(value, Duration::MAX);
        }
        Ok(true)
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("device")
    }
}
