//! Memory kept under a name: what answers those who come with a ticket.

use std::ops::{Bound, RangeBounds};
use std::os::fd::AsFd;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::mapping::{IMPORTS, Key, Mapping};
use super::owned::Memory;
use super::region::Region;
use super::ticket::{Incarnation, Ticket, Wanted};
use crate::backend::{Access, DeviceId};
use crate::device::Device;
use crate::domain::{Domain, EndpointName};
use crate::error::{Error, Result};
use crate::fork::PrivateFd;
use crate::rendezvous::{Address, Admission, Answer, Caller, Desk, Ending, Gift, Keep, Keeper, Kind, Refusal, decode};

/// The number of the one memory of a publication.
pub(super) const ONLY: u64 = 0;

/// What a visitor comes for.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Request {
    pub(super) incarnation: Option<Incarnation>,
    pub(super) id: u64,
}

/// What it is told; a descriptor goes with the memory.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Reply {
    Memory { mapped: u64, bytes: u64, access: Access, owner: DeviceId },
    Expired,
}

/// How memory is to be published.
#[derive(Debug, Clone)]
pub struct Publication {
    memory: Memory,
    name: String,
    domain: Option<Domain>,
    access: Access,
    admission: Admission,
}

impl Publication {
    pub(super) fn new(memory: &Memory, name: &str) -> Publication {
        let (memory, name, admission) = (memory.clone(), name.to_string(), Admission::default());
        Publication { memory, name, domain: None, access: Access::Read, admission }
    }

    /// The domain to publish in; the environment's by default.
    pub fn domain(mut self, domain: &Domain) -> Self {
        self.domain = Some(domain.clone());
        self
    }

    /// What those who open it may do: [`Access::Read`] by default, which the MMU enforces against mistakes. Whoever has
    /// the descriptor could map it otherwise, so a reader that is hostile gets a copy, and no ticket.
    pub fn access(mut self, access: Access) -> Self {
        self.access = access;
        self
    }

    /// Admit these users beside the own one. The domain directory must let them in, too.
    pub fn allow_uids(mut self, uids: &[u32]) -> Self {
        self.admission.uids.extend(uids);
        self
    }

    /// Admit processes whose effective group is one of these.
    pub fn allow_gids(mut self, gids: &[u32]) -> Self {
        self.admission.gids.extend(gids);
        self
    }

    /// Takes the name; from now on tickets can be opened.
    ///
    /// # Errors
    /// [`Error::Name`], [`Error::NameTaken`], [`Error::ForeignFile`], [`Error::Domain`], [`Error::DescriptorLimit`],
    /// [`Error::Driver`] when the memory cannot be exported.
    pub fn build(self) -> Result<Published> {
        let name = EndpointName::new(&self.name)?;
        let domain = self.domain.map_or_else(Domain::from_environment, Ok)?;
        let memory = self.memory;
        let counter = Counter {
            mapped: memory.mapping.region().bytes(),
            bytes: memory.bytes(),
            access: self.access,
            owner: memory.mapping.owner,
            export: memory.mapping.region().export()?,
        };
        let at = Address { domain: &domain, name: &name, kind: Kind::Memory };
        let keeper = Keeper::open(&at, self.admission, Arc::new(counter))?;
        // Opened here, it is found here: the same mapping, and the driver is not asked.
        IMPORTS.put(&Key::new(domain.owner(), keeper.desk().generation(), ONLY, memory.device()), &memory.mapping);
        Ok(Published { keeper, memory, domain, name })
    }
}

/// Memory under a name. Dropped, it gives the name up: nobody else can open it, and who has it open keeps it.
#[derive(Debug)]
pub struct Published {
    keeper: Keeper,
    memory: Memory,
    domain: Domain,
    name: EndpointName,
}

impl Published {
    /// The memory.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The name.
    pub fn name(&self) -> &str {
        self.name.as_str()
    }

    /// A ticket for all of it: good until this is dropped.
    ///
    /// # Errors
    /// [`Error::Os`] when the machine's identity cannot be read; [`Error::Argument`] for a domain whose path is no UTF-8.
    pub fn ticket(&self) -> Result<Ticket> {
        self.ticket_of(..)
    }

    /// A ticket for a range of it, in bytes. Whoever opens it can reach no other bytes by this library, but maps all.
    ///
    /// # Errors
    /// [`Error::Range`] for one that does not lie inside; [`Error::Argument`] for one that ends before it begins; as
    /// [`ticket`](Self::ticket).
    pub fn ticket_of(&self, range: impl RangeBounds<u64>) -> Result<Ticket> {
        let (offset, bytes) = offset_and_length(range, self.memory.bytes())?;
        self.memory.mapping.check(self.name(), offset, bytes)?;
        let wanted = Wanted { id: ONLY, offset, bytes: Some(bytes) };
        let incarnation = Some(self.keeper.desk().generation());
        Ticket::new(&self.domain, &self.name, Kind::Memory, incarnation, wanted, Some(self.memory.mapping.owner))
    }
}

fn offset_and_length(range: impl RangeBounds<u64>, available: u64) -> Result<(u64, u64)> {
    let start = match range.start_bound() {
        Bound::Included(&start) => start,
        Bound::Excluded(&before) => before.saturating_add(1),
        Bound::Unbounded => 0,
    };
    let end = match range.end_bound() {
        Bound::Included(&last) => last.saturating_add(1),
        Bound::Excluded(&end) => end,
        Bound::Unbounded => available,
    };
    // Unbounded at its end, it begins outside, which is told of with what there is.
    match end.checked_sub(start) {
        Some(bytes) => Ok((start, bytes)),
        None if matches!(range.end_bound(), Bound::Unbounded) => Ok((start, 0)),
        None => Err(Error::argument("range", format!("{start}..{end}"), "one that does not end before it begins")),
    }
}

/// What answers for a publication.
struct Counter {
    mapped: u64,
    bytes: u64,
    access: Access,
    owner: DeviceId,
    export: PrivateFd,
}

impl Keep for Counter {
    fn admit(&self, desk: &Desk, _: &Caller, body: &[u8]) -> Result<Answer, Refusal> {
        let Request { incarnation, id } = decode(body, desk.name())?;
        if id != ONLY || incarnation.is_some_and(|wanted| wanted != desk.generation()) {
            return Answer::new(&Reply::Expired, vec![]);
        }
        let export = PrivateFd::duplicate(&self.export)?;
        let Counter { mapped, bytes, access, owner, .. } = *self;
        Answer::new(&Reply::Memory { mapped, bytes, access, owner }, vec![export])
    }

    fn answer(&self, _: &Desk, _: &Caller, _: &[u8]) -> Result<Answer, Refusal> {
        Err(Refusal("there is nothing more to ask of memory".into()))
    }

    fn holds(&self, _: &Caller) -> bool {
        false
    }

    fn gone(&self, _: &Desk, _: &Caller, _: Ending) {}

    fn is_quick(&self) -> bool {
        true
    }
}

/// What a publication gave, checked and mapped. `None` if it is another one than was wanted.
pub(super) fn import(gift: Gift, device: &Device, name: &str) -> Result<Option<Mapping>> {
    let wrong = |field, found: String, allowed: &str| Error::Protocol {
        name: name.to_string(),
        field,
        found,
        allowed: allowed.to_string(),
    };
    let Reply::Memory { mapped, bytes, access, owner } = decode(&gift.body, name)? else { return Ok(None) };
    if bytes == 0 || bytes > mapped {
        return Err(wrong("bytes", bytes.to_string(), &format!("1 to {mapped}")));
    }
    let [fd] = &gift.fds[..] else {
        return Err(wrong("descriptors", gift.fds.len().to_string(), "1"));
    };
    super::shared::check_reach(device, owner)?;
    let region = Region::import(device, fd.as_fd(), mapped, access, owner)?;
    fd.approve();
    Mapping::of(region, device, owner, access, bytes).map(Some)
}
