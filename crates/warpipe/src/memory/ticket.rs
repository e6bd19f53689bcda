//! Tickets: a text that names memory, for any process that may open it.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::mapped_region::{IMPORTS, ImportKey, MappedRegion};
use super::owned::MemoryInfo;
use super::region::{Region, check_reach};
use super::shared::SharedMemory;
use crate::backend::{Access, DeviceId};
use crate::device::Device;
use crate::error::{Error, Expiry, HandleFault, NameFault, Result};
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::handle::{self, HandleKind, Payload, text_form};
use crate::ipc::{Address, ClientSession, IncomingReply, Kind};
use crate::origin::ProcessOrigin;
use crate::wait::Wait;

/// The generation of an endpoint, which names one run of its owner.
pub(crate) type Incarnation = [u8; 16];

/// The number of the one memory of a publication.
pub(super) const PUBLISHED_ID: u64 = 0;

/// A publication's first reply. The memory's descriptor goes with it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct PublishedReply {
    pub(super) info: MemoryInfo,
    pub(super) access: Access,
}

/// Names memory of a process on this machine: domain, endpoint, its incarnation, the memory's
/// number, a range of its bytes, and its device. A text ([`Display`](std::fmt::Display) and
/// [`FromStr`](std::str::FromStr);
/// serde writes the same), of a few hundred letters, digits and colons: it can go through a file
/// ([`write_file`](Ticket::write_file)), a pipe, a socket, an environment variable or MPI. It is no
/// secret and gives no right: the owner checks each client's credentials.
///
/// ```
/// use warpipe::{Error, Ticket};
/// # let folder = std::env::temp_dir().join(format!("warpipe-ticket-{}", std::process::id()));
/// # let domain = warpipe::Domain::at(&folder)?;
/// let ticket = Ticket::to(&domain, "weights")?; // the later holder of that name
/// assert_eq!(ticket.to_string().parse::<Ticket>()?, ticket);
/// assert!(matches!("hello".parse::<Ticket>(), Err(Error::Handle { .. })));
/// # std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Ticket {
    #[serde(with = "handle::text")]
    fields: Fields,
}

/// What [`Ticket::info`] reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TicketInfo<'a> {
    /// The domain's directory.
    pub domain: &'a Path,
    /// The endpoint's name.
    pub name: &'a str,
    /// The kind of object under the name: memory, or a pool.
    pub kind: Kind,
    /// The device that the memory is on, if that was known when the ticket was written.
    pub device: Option<DeviceId>,
    /// Its length in bytes, if that was known when the ticket was written.
    pub bytes: Option<u64>,
}

/// The contents of the text.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Fields {
    /// The boot of its machine.
    host: u64,
    domain: String,
    owner: u32,
    name: String,
    kind: Kind,
    incarnation: Option<Incarnation>,
    wanted: Wanted,
    device: Option<DeviceId>,
}

/// Which memory of an endpoint, and which bytes of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Wanted {
    pub(crate) id: u64,
    pub(crate) offset: u64,
    /// `None` for all.
    pub(crate) bytes: Option<u64>,
}

impl Wanted {
    /// Of the one memory of a publication.
    pub(crate) fn published(offset: u64, bytes: Option<u64>) -> Wanted {
        Wanted {
            id: PUBLISHED_ID,
            offset,
            bytes,
        }
    }
}

impl Ticket {
    pub(crate) fn new(
        domain: &Domain,
        name: &EndpointName,
        kind: Kind,
        incarnation: Option<Incarnation>,
        wanted: Wanted,
        device: Option<DeviceId>,
    ) -> Result<Ticket> {
        Ok(Ticket {
            fields: Fields {
                host: ProcessOrigin::here()?.host,
                domain: handle::path_of(domain)?,
                owner: domain.owner(),
                name: name.to_string(),
                kind,
                incarnation,
                wanted,
                device,
            },
        })
    }

    /// A ticket for the memory that will be published under `name`, now or later, by any run of its
    /// owner.
    ///
    /// # Errors
    /// [`Error::Name`]; [`Error::Os`] when the machine's identity cannot be read.
    pub fn to(domain: &Domain, name: &str) -> Result<Ticket> {
        let (name, wanted) = (EndpointName::new(name)?, Wanted::published(0, None));
        Ticket::new(domain, &name, Kind::Memory, None, wanted, None)
    }

    /// What the ticket says.
    pub fn info(&self) -> TicketInfo<'_> {
        let fields = &self.fields;
        TicketInfo {
            domain: Path::new(&fields.domain),
            name: &fields.name,
            kind: fields.kind,
            device: fields.device,
            bytes: fields.wanted.bytes,
        }
    }

    /// Fetches the memory from its owner and maps it on `device`, once in a process. Each call
    /// contacts the owner: a ticket of an owner that is gone opens nothing, even if this process
    /// has the memory open. It waits for an owner that has not published yet; an expired ticket is
    /// an error at once: that owner does not come back.
    ///
    /// # Errors
    /// [`Error::NotFound`]: it has not been published yet, or its owner has died (`was_there`).
    /// [`Error::Handle`]: its owner is gone, or another owner holds the name. [`Error::Timeout`]:
    /// the wait was cancelled while its owner did not answer. [`Error::Handle`] for one of another
    /// machine. [`Error::Refused`], [`Error::Name`]. [`Error::Argument`], [`Error::Device`],
    /// [`Error::Os`], [`Error::Limit`].
    pub fn open<'w>(&self, device: &Device, wait: impl Into<Wait<'w>>) -> Result<SharedMemory> {
        self.check(Kind::Memory, device)?;
        let Wanted { offset, bytes, .. } = self.fields.wanted;
        SharedMemory::whole(&self.fetch(device, &wait.into())?, &self.fields.name)?
            .range(offset, bytes)
    }

    /// The memory around what it names, if this process has it open on `device`: the owner is not
    /// contacted.
    ///
    /// # Errors
    /// Those of [`open`](Self::open) that need no owner.
    pub(crate) fn known(&self, device: &Device) -> Result<Option<Arc<MappedRegion>>> {
        self.check(Kind::Memory, device)?;
        let key = |run| ImportKey::new(self.fields.owner, run, PUBLISHED_ID, device);
        let run = self.fields.incarnation;
        Ok(run.and_then(|run| IMPORTS.get(&key(run))))
    }

    /// The memory around what it names, mapped on `device`.
    pub(crate) fn fetch(&self, device: &Device, wait: &Wait<'_>) -> Result<Arc<MappedRegion>> {
        let (session, incoming) = self.attach(device, &[], wait)?;
        let key = ImportKey::new(session.uid(), session.generation(), PUBLISHED_ID, device);
        let import = || {
            let mapping = self.import(incoming, device)?;
            let region = mapping.region();
            region.identify(session.generation(), PUBLISHED_ID);
            Ok(Arc::new(mapping))
        };
        match self.fields.wanted.id {
            PUBLISHED_ID => IMPORTS.get_or(&key, |_| true, import),
            _ => Err(self.expired(Expiry::Replaced)),
        }
    }

    /// Checks and maps the memory in a publication's reply.
    fn import(&self, incoming: IncomingReply, device: &Device) -> Result<MappedRegion> {
        let (reply, [fd]) = incoming.open(&self.fields.name)?;
        let PublishedReply { info, access } = reply;
        let MemoryInfo {
            bytes,
            mapped_bytes,
            device: owner,
        } = info;
        if bytes == 0 || bytes > mapped_bytes {
            let allowed = format!("1 to {mapped_bytes}");
            return Err(Error::protocol(&self.fields.name, "bytes", bytes, allowed));
        }
        check_reach(device, owner)?;
        let region = Region::import(device, &[fd.as_fd()], mapped_bytes, access, owner)?;
        fd.approve();
        MappedRegion::of(region, device, owner, access, bytes)
    }

    /// Whether it can be opened as `kind` on `device` at all.
    pub(crate) fn check(&self, kind: Kind, device: &Device) -> Result<()> {
        if self.fields.host != ProcessOrigin::here()?.host {
            return Err(Error::handle("ticket", HandleFault::ForeignHost));
        }
        if self.fields.kind != kind {
            let (name, found) = (self.fields.name.clone(), self.fields.kind.to_string());
            return Err(Error::Name(NameFault::OtherKind {
                name,
                wanted: kind,
                found,
            }));
        }
        self.fields
            .device
            .map_or(Ok(()), |owner| check_reach(device, owner))
    }

    /// Opens a session with its owner. If it names an incarnation that is gone, it has expired.
    pub(crate) fn attach(
        &self,
        device: &Device,
        body: &[u8],
        wait: &Wait<'_>,
    ) -> Result<(ClientSession, IncomingReply)> {
        let Fields {
            ref domain,
            owner,
            ref name,
            kind,
            incarnation,
            ..
        } = self.fields;
        let (domain, name) = (Domain::of_user(domain, owner)?, EndpointName::new(name)?);
        let at = Address {
            domain: &domain,
            name: &name,
            kind,
        };
        let wait = match incarnation {
            Some(_) => wait.cancellable_within(Duration::ZERO),
            None => wait.clone(),
        };
        let attached = ClientSession::attach(&at, Some(device.info().id), body, &wait);
        let (session, incoming) = attached.map_err(|error| match error {
            Error::NotFound { was_there, .. } if incarnation.is_some() => {
                self.expired(Expiry::Gone { died: was_there })
            }
            Error::Name(NameFault::OtherKind { .. }) if incarnation.is_some() => {
                self.expired(Expiry::Replaced)
            }
            other => other,
        })?;
        // Whatever it gives: it is another run than the one that was wanted.
        if incarnation.is_some_and(|wanted| wanted != session.generation()) {
            return Err(self.expired(Expiry::Replaced));
        }
        Ok((session, incoming))
    }

    pub(crate) fn expired(&self, expiry: Expiry) -> Error {
        let name = self.fields.name.clone();
        Error::handle("ticket", HandleFault::Expired { name, expiry })
    }

    pub(crate) fn incarnation(&self) -> Option<Incarnation> {
        self.fields.incarnation
    }

    /// The user that owns the domain.
    pub(crate) fn owner(&self) -> u32 {
        self.fields.owner
    }

    pub(crate) fn wanted(&self) -> Wanted {
        self.fields.wanted
    }
}

text_form!(Ticket, fields: Fields);

impl Payload for Fields {
    const KIND: HandleKind = HandleKind::Ticket;

    fn checked(payload: Result<Fields, HandleFault>) -> Result<Fields> {
        let fields = payload.map_err(|fault| Error::handle("ticket", fault))?;
        if EndpointName::new(&fields.name).is_err() {
            let fault = HandleFault::Damaged("it has no name of an endpoint");
            return Err(Error::handle("ticket", fault));
        }
        Ok(fields)
    }
}

/// For [`fuzzing`](crate::fuzzing): texts with a valid checksum over any contents.
#[cfg(any(test, feature = "testing"))]
pub(crate) mod forged {
    use super::*;
    use crate::backend::DeviceKind;

    pub(crate) fn text(bytes: &[u8]) -> String {
        handle::to_text(HandleKind::Ticket, &handle::seal(HandleKind::Ticket, bytes))
    }

    /// Two tickets: one with every field, and one with as few as possible.
    pub(crate) fn bodies() -> Vec<Vec<u8>> {
        let device = Some(DeviceId {
            kind: DeviceKind::Host,
            uuid: [3; 16],
        });
        let all = Wanted {
            id: 3,
            offset: 4096,
            bytes: Some(100),
        };
        let (domain, name) = ("/run/user/1000/warpipe", "camera/front");
        let mut fields = Fields {
            host: 1 << 40,
            domain: domain.into(),
            owner: 1000,
            name: name.into(),
            kind: Kind::Memory,
            incarnation: Some([7; 16]),
            wanted: all,
            device,
        };
        let whole = postcard::to_stdvec(&fields);
        let wanted = Wanted {
            id: PUBLISHED_ID,
            offset: 0,
            bytes: None,
        };
        fields = Fields {
            kind: Kind::Pool,
            incarnation: None,
            wanted,
            device: None,
            ..fields
        };
        [whole, postcard::to_stdvec(&fields)]
            .into_iter()
            .flatten()
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{DeviceFault, NameFault};

    fn is_of_the_text(error: &Error) -> bool {
        let Error::Handle {
            what: "ticket",
            fault,
        } = error
        else {
            return false;
        };
        matches!(
            fault,
            HandleFault::NoHandle(_)
                | HandleFault::OtherKind { .. }
                | HandleFault::Version { .. }
                | HandleFault::Oversized(_)
                | HandleFault::Damaged(_)
        )
    }

    fn ticket() -> Ticket {
        let wanted = Wanted {
            id: 3,
            offset: 4096,
            bytes: Some(100),
        };
        let fields = Fields {
            host: ProcessOrigin::here().unwrap().host,
            domain: "/run/user/1000/warpipe".into(),
            owner: 1000,
            name: "camera/front".into(),
            kind: Kind::Memory,
            incarnation: Some([7; 16]),
            wanted,
            device: Some(Device::host().info().id),
        };
        Ticket { fields }
    }

    #[test]
    fn a_ticket_goes_through_text_and_serde_unchanged() {
        let text = ticket().to_string();
        assert!(
            text.bytes()
                .all(|byte| byte.is_ascii_alphanumeric() || b":-".contains(&byte)),
            "{text}"
        );
        assert_eq!(text.parse::<Ticket>().unwrap(), ticket());
        assert_eq!(format!("  {text}\n").parse::<Ticket>().unwrap(), ticket());
        let bytes = postcard::to_stdvec(&ticket()).unwrap();
        assert_eq!(postcard::from_bytes::<Ticket>(&bytes).unwrap(), ticket());
    }

    #[test]
    fn every_text_that_is_cut_short_or_changed_is_refused() {
        let text = ticket().to_string();
        for end in 0..text.len() {
            let refused = text[..end].parse::<Ticket>().unwrap_err();
            assert!(is_of_the_text(&refused), "{end}: {refused}");
        }
        for at in 0..text.len() {
            for letter in [b'0', b'f', b':', b'z', b' '] {
                let mut other = text.clone().into_bytes();
                other[at] = letter;
                let other = String::from_utf8(other).unwrap();
                assert!(
                    other == text || other.parse::<Ticket>().is_err(),
                    "{at}: {other}"
                );
            }
        }
        let mut named = ticket();
        named.fields.name = "../etc".into();
        let refused = named.to_string().parse::<Ticket>().unwrap_err();
        let fault = HandleFault::Damaged("it has no name of an endpoint");
        assert!(
            matches!(&refused, Error::Handle { what: "ticket", fault: found } if *found == fault),
            "{refused}"
        );
    }

    #[test]
    fn a_ticket_of_another_machine_opens_nothing() {
        let mut ticket = ticket();
        ticket.fields.host ^= 1;
        assert!(matches!(
            ticket.open(&Device::host(), Duration::ZERO),
            Err(Error::Handle {
                what: "ticket",
                fault: HandleFault::ForeignHost
            })
        ));
    }

    #[test]
    fn a_gpus_memory_is_out_of_the_hosts_reach() {
        let mut ticket = ticket();
        ticket.fields.device = Some(DeviceId {
            kind: crate::backend::DeviceKind::Cuda,
            uuid: [1; 16],
        });
        assert!(matches!(
            ticket.open(&Device::host(), Duration::ZERO),
            Err(Error::Device {
                fault: DeviceFault::OutOfReach,
                ..
            })
        ));
    }

    #[test]
    fn memory_of_one_user_is_not_found_for_another_users_ticket() {
        let folder =
            std::env::temp_dir().join(format!("warpipe-ticket-user-{}", std::process::id()));
        let (domain, device) = (Domain::at(&folder).unwrap(), Device::host());
        let published = crate::Memory::allocate(&device, 64)
            .unwrap()
            .publish("weights", domain.options())
            .unwrap();
        let mut ticket = published.ticket(..).unwrap();
        assert!(ticket.open(&device, Duration::ZERO).is_ok());
        ticket.fields.owner += 1;
        let refused = ticket.open(&device, Duration::ZERO).unwrap_err();
        assert!(
            matches!(refused, Error::Name(NameFault::Domain { .. })),
            "{refused}"
        );
        drop(published);
        let _ = std::fs::remove_dir_all(folder);
    }
}
