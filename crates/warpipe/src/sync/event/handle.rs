//! An event's handle: text, or bytes, that names the event to other processes.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::backend::{DeviceId, IpcBytes};
use crate::error::{Error, HandleFault, Result};
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::handle::{self, DriverHandle, HandleKind, Payload, text_form};

/// Names an event to other processes: its domain, its exporter's endpoint, its number there, and on
/// CUDA the 64 bytes of `cuIpcGetEventHandle`. It is a name and grants no access: the domain must
/// admit the importer.
///
/// As text it is `warpipe-event:` and hexadecimal digits. Both forms have a checksum against
/// accidental changes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EventHandle {
    #[serde(with = "handle::text")]
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
    /// The `CUipcEventHandle`.
    pub(super) ipc: Option<DriverHandle>,
}

impl EventHandle {
    /// The handle as bytes, of variable length.
    #[doc(hidden)] // For the Python package.
    pub fn to_bytes(&self) -> Vec<u8> {
        handle::to_bytes(HandleKind::Event, &self.body)
    }

    /// Parses and checks bytes of [`to_bytes`](Self::to_bytes).
    ///
    /// # Errors
    /// [`Error::Handle`].
    #[doc(hidden)] // For the Python package.
    pub fn from_bytes(bytes: &[u8]) -> Result<EventHandle> {
        let body = HandleBody::checked(handle::from_bytes(HandleKind::Event, bytes))?;
        Ok(EventHandle { body })
    }

    /// The 64 bytes of `cuIpcGetEventHandle`, for an importer without this library. An event opened
    /// by them has CUDA's hazards.
    #[doc(hidden)] // For the Python package.
    pub fn ipc_bytes(&self) -> Option<IpcBytes> {
        self.body.ipc.map(|DriverHandle(bytes)| bytes)
    }

    /// The handle's domain, which must exist and belong to this user. It is not created if it is
    /// missing, since the handle is untrusted.
    pub(super) fn domain(&self) -> Result<Domain> {
        Domain::of_user(&self.body.domain, rustix::process::geteuid().as_raw())
    }
}

pub(super) fn fault(fault: HandleFault) -> Error {
    Error::handle("event handle", fault)
}

text_form!(EventHandle, body: HandleBody);

impl Payload for HandleBody {
    const KIND: HandleKind = HandleKind::Event;

    fn checked(payload: Result<HandleBody, HandleFault>) -> Result<HandleBody> {
        let body = payload.map_err(fault)?;
        if EndpointName::new(&body.endpoint).is_err() {
            return Err(fault(HandleFault::Damaged("it has no name of an endpoint")));
        }
        Ok(body)
    }
}

/// For [`fuzzing`](crate::fuzzing): bytes with a valid checksum and any contents.
#[cfg(any(test, feature = "testing"))]
pub(crate) mod forged {
    use super::*;
    use crate::backend::DeviceKind;

    pub(crate) fn handle(body: &[u8]) -> Vec<u8> {
        handle::seal(HandleKind::Event, body)
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
        let cuda = body(DeviceKind::Cuda, Some(DriverHandle([1; 64])));
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
            ipc: Some(DriverHandle(std::array::from_fn(|index| index as u8))),
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
                    Err(Error::Handle {
                        what: "event handle",
                        ..
                    })
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
