//! An event's handle: text, or bytes, that names the event to other processes.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::backend::{DeviceId, IpcBytes};
use crate::error::{Error, Result};
use crate::ipc::domain::{Domain, EndpointName};
use crate::origin;

/// The prefix of a handle's text.
const PREFIX: &str = "warpipe-event:";

/// The first bytes of a handle.
const MAGIC: [u8; 4] = *b"WPEV";

const VERSION: u16 = 1;

/// Magic, version, checksum.
const HEAD_BYTES: usize = 4 + 2 + 8;

/// The longest handle: a path of 4096 bytes and the other fields.
const BYTES_MAX: usize = 8192;

/// Names an event to other processes: its domain, its exporter's endpoint, its number there, and on
/// CUDA the 64 bytes of `cuIpcGetEventHandle`. It is a name and grants no access: the domain must
/// admit the importer.
///
/// As text it is `warpipe-event:` and hexadecimal digits. Both forms have a checksum against
/// accidental changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct EventHandle {
    pub(super) body: HandleBody,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct HandleBody {
    /// The domain's directory.
    pub(super) domain: PathBuf,
    /// The exporter's endpoint.
    pub(super) endpoint: String,
    /// The endpoint's incarnation.
    pub(super) generation: [u8; 16],
    pub(super) index: u32,
    /// The serial number of the event among those that have used this slot.
    pub(super) serial: u64,
    pub(super) device: DeviceId,
    /// The two halves of the `CUipcEventHandle`.
    pub(super) ipc: Option<([u8; 32], [u8; 32])>,
}

impl EventHandle {
    /// The handle as bytes, of variable length.
    pub fn to_bytes(&self) -> Vec<u8> {
        // Strings and numbers can always be serialized; the export refused a path that is not text.
        let body = postcard::to_stdvec(&self.body).unwrap_or_default();
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend(origin::hash(&body).to_le_bytes());
        bytes.extend(body);
        bytes
    }

    /// Parses and checks bytes of [`to_bytes`](Self::to_bytes).
    ///
    /// # Errors
    /// [`Error::EventHandle`].
    pub fn from_bytes(bytes: &[u8]) -> Result<EventHandle> {
        let garbled = |what| fault(EventHandleFault::Garbled(what));
        if bytes.len() < HEAD_BYTES || bytes.len() > BYTES_MAX {
            return Err(garbled("it has no such length"));
        }
        let (head, body) = bytes.split_at(HEAD_BYTES);
        if head[..4] != MAGIC {
            return Err(garbled("it does not begin as a handle does"));
        }
        let theirs = u16::from_le_bytes([head[4], head[5]]);
        if theirs != VERSION {
            return Err(fault(EventHandleFault::Version {
                theirs,
                ours: VERSION,
            }));
        }
        if head[6..] != origin::hash(body).to_le_bytes() {
            return Err(garbled("its checksum is wrong"));
        }
        match postcard::take_from_bytes::<HandleBody>(body) {
            Ok((body, [])) if EndpointName::new(&body.endpoint).is_ok() => Ok(EventHandle { body }),
            _ => Err(garbled("its contents are no handle's")),
        }
    }

    /// The 64 bytes of `cuIpcGetEventHandle`, for an importer without this library. An event opened
    /// by them has CUDA's hazards.
    pub fn ipc_bytes(&self) -> Option<IpcBytes> {
        let (first, second) = self.body.ipc?;
        let mut bytes = [0; 64];
        bytes[..32].copy_from_slice(&first);
        bytes[32..].copy_from_slice(&second);
        Some(bytes)
    }

    /// The handle's domain, which must exist and belong to this user. It is not created if it is
    /// missing, since the handle is untrusted.
    pub(super) fn domain(&self) -> Result<Domain> {
        Domain::of_user(&self.body.domain, rustix::process::geteuid().as_raw())
    }
}

/// The reason why an event handle is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EventHandleFault {
    /// The text or the bytes are not a handle, or were cut or changed.
    #[error("it is garbled ({0})")]
    Garbled(&'static str),
    /// A handle of another version.
    #[error("it is of version {theirs}, this is {ours}")]
    Version {
        /// The handle's version.
        theirs: u16,
        /// This library's version.
        ours: u16,
    },
    /// The event was dropped; its exporter may be alive.
    #[error("its maker has dropped the event")]
    Dropped,
    /// The handle names an event of another kind of device.
    #[error("it names an event of {owner}, and {device} cannot share that")]
    Device {
        /// The exporter's device.
        owner: String,
        /// The device on which it was opened.
        device: String,
    },
}

/// The halves of a `CUipcEventHandle`, as a handle carries them.
pub(super) fn halves(bytes: &IpcBytes) -> ([u8; 32], [u8; 32]) {
    let (mut first, mut second) = ([0; 32], [0; 32]);
    first.copy_from_slice(&bytes[..32]);
    second.copy_from_slice(&bytes[32..]);
    (first, second)
}

pub(super) fn fault(fault: EventHandleFault) -> Error {
    Error::EventHandle { fault }
}

impl fmt::Display for EventHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(PREFIX)?;
        self.to_bytes()
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl FromStr for EventHandle {
    type Err = Error;

    fn from_str(text: &str) -> Result<EventHandle> {
        let garbled = |what| fault(EventHandleFault::Garbled(what));
        let digits = text
            .strip_prefix(PREFIX)
            .ok_or_else(|| garbled("it does not begin as a handle does"))?
            .as_bytes();
        if digits.len() > 2 * BYTES_MAX || !digits.len().is_multiple_of(2) {
            return Err(garbled("it has no such length"));
        }
        let value = |digit: u8| char::from(digit).to_digit(16).map(|value| value as u8);
        let byte = |pair: &[u8]| Some(value(pair[0])? << 4 | value(pair[1])?);
        let bytes: Option<Vec<u8>> = digits.chunks_exact(2).map(byte).collect();
        EventHandle::from_bytes(
            &bytes.ok_or_else(|| garbled("it has digits that are not hexadecimal"))?,
        )
    }
}

impl TryFrom<String> for EventHandle {
    type Error = Error;

    fn try_from(text: String) -> Result<EventHandle> {
        text.parse()
    }
}

impl From<EventHandle> for String {
    fn from(handle: EventHandle) -> String {
        handle.to_string()
    }
}

/// For [`fuzzing`](crate::fuzzing): bytes with a valid checksum and any contents.
#[cfg(any(test, feature = "testing"))]
pub(crate) mod forged {
    use super::*;
    use crate::backend::DeviceKind;

    pub(crate) fn handle(body: &[u8]) -> Vec<u8> {
        [
            &MAGIC[..],
            &VERSION.to_le_bytes(),
            &origin::hash(body).to_le_bytes(),
            body,
        ]
        .concat()
    }

    /// The bodies of valid handles: one of CUDA, and one of the host.
    pub(crate) fn bodies() -> Vec<Vec<u8>> {
        let body = |kind, ipc| HandleBody {
            domain: "/run/user/7/warpipe".into(),
            endpoint: "events/0123456789abcdef".into(),
            generation: [7; 16],
            index: 300,
            serial: 2,
            device: DeviceId {
                kind,
                uuid: [3; 16],
            },
            ipc,
        };
        let cuda = body(DeviceKind::Cuda, Some(([1; 32], [2; 32])));
        let host = body(DeviceKind::Host, None);
        [cuda, host].iter().flat_map(postcard::to_stdvec).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Device;

    fn handle() -> EventHandle {
        let body = HandleBody {
            domain: "/run/user/7/warpipe".into(),
            endpoint: "events/0123456789abcdef".into(),
            generation: [7; 16],
            index: 300,
            serial: 2,
            device: Device::host().info().id,
            ipc: Some(halves(&std::array::from_fn(|index| index as u8))),
        };
        EventHandle { body }
    }

    #[test]
    fn a_handle_comes_back_from_text_bytes_and_serde_as_it_was() {
        let handle = handle();
        assert_eq!(handle.to_string().parse::<EventHandle>().unwrap(), handle);
        assert_eq!(EventHandle::from_bytes(&handle.to_bytes()).unwrap(), handle);
        let packed = postcard::to_stdvec(&handle).unwrap();
        assert_eq!(
            postcard::from_bytes::<EventHandle>(&packed).unwrap(),
            handle
        );
        assert_eq!(handle.ipc_bytes().unwrap()[63], 63);
    }

    #[test]
    fn a_handle_cut_anywhere_or_changed_anywhere_is_refused() {
        let (text, bytes) = (handle().to_string(), handle().to_bytes());
        for cut in 0..text.len() {
            assert!(
                matches!(
                    text[..cut].parse::<EventHandle>(),
                    Err(Error::EventHandle { .. })
                ),
                "cut at {cut}"
            );
        }
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut changed = bytes.clone();
                changed[at] ^= 1 << bit;
                assert!(
                    EventHandle::from_bytes(&changed).is_err(),
                    "byte {at}, bit {bit}"
                );
            }
        }
        for garbage in [
            "",
            "warpipe-event:",
            "warpipe-event:zz",
            "warpipe-event:0",
            "hello",
            &format!("{text}00"),
        ] {
            assert!(garbage.parse::<EventHandle>().is_err(), "{garbage}");
        }
    }
}
