//! The place of a tensor that is sent where it lies. An entry has it in front of the user's
//! metadata, by `postcard`; the sample's slot has no bytes. It is untrusted: a receiver reads it
//! once, and checks what it opens against the layout.

use serde::{Deserialize, Serialize};

use super::entry::{Violation, violation};
use crate::backend::DevicePtr;
use crate::device::Device;
use crate::error::Result;
use crate::ipc::Kind;
use crate::ipc::domain::{Domain, EndpointName};
use crate::memory::legacy::{LegacyHandle, check_range};
use crate::memory::region::Kept;
use crate::memory::ticket::{Incarnation, Ticket, Wanted};
use crate::wait::Wait;

/// Where the first of the tensor's bytes lies.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Place<'a> {
    /// In memory of another allocator: the bytes of a [`LegacyHandle`].
    Legacy(&'a [u8]),
    /// In memory that is published in the sender's domain.
    Published {
        name: &'a str,
        incarnation: Incarnation,
        offset: u64,
    },
}

impl<'a> Place<'a> {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        // Numbers, bytes and texts can always be serialized.
        postcard::to_stdvec(self).unwrap_or_default()
    }

    /// The place, and the user's metadata behind it.
    pub(crate) fn read(metadata: &'a [u8]) -> Result<(Place<'a>, &'a [u8]), Violation> {
        postcard::take_from_bytes(metadata).map_err(|error| {
            let allowed = "a legacy handle, or a name and an offset";
            violation("place", format!("{metadata:02x?} ({error})"), allowed)
        })
    }

    /// Opens the `bytes` bytes there: their address here, and what keeps them mapped, unless they
    /// are this process's own. Memory that is open here is found without a call of the driver, or a
    /// message to its owner.
    ///
    /// # Errors
    /// As [`LegacyHandle::open`], or as [`Ticket::open`] of a ticket for one run of the owner; of
    /// bytes that do not lie there, too.
    pub(crate) fn open(
        &self,
        bytes: u64,
        domain: &Domain,
        device: &Device,
        wait: &Wait<'_>,
    ) -> Result<(DevicePtr, Option<Kept>)> {
        match *self {
            Place::Legacy(handle) => {
                let handle = LegacyHandle::from_bytes(handle)?;
                check_range(0, bytes, handle.bytes())?;
                let (ptr, import) = handle.import(device)?;
                Ok((ptr, import.map(|import| import as Kept)))
            }
            Place::Published {
                name,
                incarnation,
                offset,
            } => {
                let (wanted, kind) = (Wanted::published(offset, Some(bytes)), Kind::Memory);
                let endpoint = EndpointName::new(name)?;
                let ticket = Ticket::new(domain, &endpoint, kind, Some(incarnation), wanted, None)?;
                let mapping = ticket.map(device, wait)?;
                mapping.check(name, offset, bytes)?;
                Ok((mapping.region().ptr() + offset, Some(mapping)))
            }
        }
    }
}

#[cfg(test)]
mod tests;
