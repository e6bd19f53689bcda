//! The next step for a person, in C's words where those differ from Rust's.

use std::borrow::Cow;

use warpipe::{Error, Kind};

/// The next step after this error.
pub(super) fn of(error: &Error) -> Option<Cow<'static, str>> {
    let own = match error {
        Error::NoDriver { .. } => "install the NVIDIA driver, or open the device \"host\"",
        Error::DriverSymbol { .. } => {
            "update the driver (R525 or newer), or open the device \"host\""
        }
        Error::NoDevice { .. } => {
            "check CUDA_VISIBLE_DEVICES and the container's device list, or open the device \"host\""
        }
        Error::DevicePermission { .. } => {
            "add this user to the group that owns it, or open the device \"host\""
        }
        Error::DeviceReset { .. } => "close the device, and open it again",
        Error::NotFound {
            kind: Kind::Publisher,
            ..
        } => "start the publisher, or set wait_ns to wait for it",
        Error::NotFound {
            kind: Kind::Queue, ..
        } => "start the queue's owner, or set wait_ns to wait for it",
        Error::NotFound { .. } => "start its owner, or wait for it with a timeout",
        Error::PeerGone {
            kind: Kind::Publisher,
            ..
        } => "subscribe again, or set reconnect",
        Error::EventLimit { .. } => "close some",
        Error::Forked => "open a new one in the child (CUDA cannot follow a fork at all: use exec)",
        other => return other.hint(),
    };
    Some(Cow::Borrowed(own))
}
