//! The place of a tensor that is sent where it lies. An entry has it in front of the user's
//! metadata, by `postcard`; the sample's slot has no bytes. It is untrusted: a receiver reads it
//! once, and checks what it opens against the layout.

use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::entry::{Violation, violation};
use crate::backend::DevicePtr;
use crate::device::Device;
use crate::error::{Error, HandleFault, Result};
use crate::ipc::Kind;
use crate::ipc::domain::{Domain, EndpointName};
use crate::memory::legacy::{LegacyHandle, check_range};
use crate::memory::mapped_region::MappedRegion;
use crate::memory::region::Kept;
use crate::memory::ticket::{Incarnation, Ticket, Wanted};
use crate::runtime::attempt::Attempt;
use crate::runtime::doorbell::LocalDoorbell;
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

/// Published memory that is fetched from its owner, which may be stopped.
pub(crate) type Asked = Attempt<Arc<MappedRegion>>;

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
    /// message to its owner. Else its owner is `asked`, and the doorbell rings at the answer.
    ///
    /// # Errors
    /// As [`LegacyHandle::open`], or as [`Ticket::open`] of a ticket for one run of the owner; of
    /// bytes that do not lie there, too. [`Error::Timeout`] until there is an answer.
    pub(crate) fn open(
        &self,
        bytes: u64,
        (domain, device): (&Domain, &Device),
        asked: &mut Option<Asked>,
        doorbell: &Arc<LocalDoorbell>,
    ) -> Result<(DevicePtr, Option<Kept>)> {
        match *self {
            Place::Legacy(handle) => {
                let handle = LegacyHandle::from_bytes(handle)?;
                check_range(0, bytes, handle.info().bytes)?;
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
                let mapping = fetch(ticket, device, asked, doorbell)?;
                // What the sender said is no argument of the caller's.
                let allocation = mapping.bytes;
                let wrong = HandleFault::Range {
                    offset,
                    bytes,
                    allocation,
                };
                let checked = mapping.check(name, offset, bytes);
                checked.map_err(|_| Error::handle("place of a tensor", wrong))?;
                Ok((mapping.region().ptr() + offset, Some(mapping)))
            }
        }
    }
}

/// The memory around what the ticket names.
fn fetch(
    ticket: Ticket,
    device: &Device,
    asked: &mut Option<Asked>,
    doorbell: &Arc<LocalDoorbell>,
) -> Result<Arc<MappedRegion>> {
    let found = match asked {
        Some(attempt) => attempt.result(),
        None => ticket.known(device)?.map(Ok),
    };
    if found.is_some() {
        *asked = None;
    } else if asked.is_none() {
        let (name, device) = (ticket.info().name.to_string(), device.clone());
        let reach = move |wait: &Wait<'_>| ticket.fetch(&device, wait);
        *asked = Some(Attempt::start(&name, doorbell.clone(), reach, drop)?);
    }
    found.unwrap_or_else(|| Err(Error::timeout("", Duration::ZERO)))
}

#[cfg(test)]
mod tests;
