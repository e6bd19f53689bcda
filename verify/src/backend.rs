//! Stand-in for the device trait. The timeline word is the library's.

#[path = "../../crates/warpipe/src/backend/word.rs"]
mod word;

pub(crate) use word::TimelineWord;

pub(crate) type DevicePtr = u64;

#[derive(Debug, Clone, Copy)]
pub(crate) enum StreamOp {
    Wait { word: DevicePtr, value: u64 },
    Signal { word: DevicePtr, value: u64 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Access;
