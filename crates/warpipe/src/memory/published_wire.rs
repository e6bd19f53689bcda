//! What a client asks of published memory, and what it gets.

use std::os::fd::AsFd;

use serde::{Deserialize, Serialize};

use super::mapped_region::MappedRegion;
use super::region::Region;
use crate::backend::{Access, DeviceId};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::ipc::{IncomingReply, decode};

/// One run of an endpoint.
pub(crate) type Incarnation = [u8; 16];

/// The number of the one memory of a publication.
pub(super) const PUBLISHED_ID: u64 = 0;

/// A client's request.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct TicketRequest {
    pub(super) incarnation: Option<Incarnation>,
    pub(super) id: u64,
}

/// The reply; a descriptor goes with the memory.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum TicketReply {
    Memory {
        mapped: u64,
        bytes: u64,
        access: Access,
        owner: DeviceId,
    },
    Expired,
}

/// Checks and maps the memory in a publication's reply. `None` if it is another publication than
/// the requested one.
pub(super) fn import(
    incoming: IncomingReply,
    device: &Device,
    name: &str,
) -> Result<Option<MappedRegion>> {
    let wrong = |field, found: String, allowed: &str| Error::Protocol {
        name: name.to_string(),
        field,
        found,
        allowed: allowed.to_string(),
    };
    let TicketReply::Memory {
        mapped,
        bytes,
        access,
        owner,
    } = decode(&incoming.body, name)?
    else {
        return Ok(None);
    };
    if bytes == 0 || bytes > mapped {
        return Err(wrong("bytes", bytes.to_string(), &format!("1 to {mapped}")));
    }
    let [fd] = &incoming.fds[..] else {
        return Err(wrong("descriptors", incoming.fds.len().to_string(), "1"));
    };
    super::shared::check_reach(device, owner)?;
    let region = Region::import(device, fd.as_fd(), mapped, access, owner)?;
    fd.approve();
    MappedRegion::of(region, device, owner, access, bytes).map(Some)
}
