//! Memory published under a name: serves clients that have a ticket.

use std::ops::{Bound, RangeBounds};
use std::sync::Arc;

use super::mapped_region::{IMPORTS, ImportKey};
use super::owned::{Memory, MemoryInfo};
use super::ticket::{Incarnation, PUBLISHED_ID, PublishedReply, Ticket, Wanted};
use crate::backend::Access;
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::{
    AccessPolicy, ClientInfo, IpcServer, Kind, OutgoingReply, Rejection, RequestHandler, ServerCore,
};
use crate::options::{chosen_domain, in_domain, serve};

/// The options with which [`Memory::publish`] publishes memory; those of a channel are
/// [`PublisherOptions`](crate::PublisherOptions).
#[derive(Debug, Clone, Default)]
pub struct PublishOptions {
    /// The domain to publish in; the environment's by default.
    pub domain: Option<Domain>,
    /// How importers map the memory: [`Access::Read`] by default, which the MMU enforces against
    /// mistakes. A hostile importer can map the memory writable. Send a copy instead.
    pub access: Access,
    /// Admits these users beside this process's own. The domain directory must admit them, too.
    pub allow_uids: Vec<u32>,
    /// Admits processes with one of these as their effective group. The kernel reports no
    /// supplementary groups of a peer, so those do not count.
    pub allow_gids: Vec<u32>,
}

in_domain!(PublishOptions);

impl Memory {
    /// Publishes it under a name: for reading, by this user, unless the options say more. From now
    /// on tickets can be opened.
    ///
    /// # Errors
    /// [`Error::Name`], [`Error::Os`], [`Error::Driver`] when the memory cannot be
    /// exported.
    pub fn publish(&self, name: &str, options: PublishOptions) -> Result<Published> {
        let name = EndpointName::new(name)?;
        let domain = chosen_domain(&options.domain)?;
        let memory = self.clone();
        let handler = Arc::new(PublishedHandler {
            info: memory.info(),
            access: options.access,
            export: memory.mapping.region().export()?,
        });
        let access = AccessPolicy::of(options.allow_uids, options.allow_gids);
        let server = serve(&Some(domain.clone()), &name, Kind::Memory, access, handler)?;
        let generation = server.server_core().generation();
        memory.mapping.region().identify(generation, PUBLISHED_ID);
        // A ticket that is opened in this process finds this mapping, without a call of the driver.
        IMPORTS.put(
            &ImportKey::new(domain.owner(), generation, PUBLISHED_ID, memory.device()),
            &memory.mapping,
        );
        Ok(Published {
            server,
            memory,
            domain,
            name,
        })
    }
}

/// Memory under a name. Dropping it releases the name: no further process can open the memory, and
/// those that have it open keep it.
#[derive(Debug)]
pub struct Published {
    server: IpcServer,
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
    pub(crate) fn name(&self) -> &str {
        self.name.as_str()
    }

    pub(crate) fn domain(&self) -> &Domain {
        &self.domain
    }

    /// Which run of the name's owner this is.
    pub(crate) fn incarnation(&self) -> Incarnation {
        self.server.server_core().generation()
    }

    /// A ticket for a range of the memory, in bytes, or for all of it (`..`), valid until the
    /// publication is dropped. A process that opens it can reach no other bytes through this
    /// library, but maps all of the memory.
    ///
    /// # Errors
    /// [`Error::Argument`] for a range that does not lie inside, and for one that ends before it
    /// begins, or a domain with a path that is not UTF-8; [`Error::Os`] when the machine's identity
    /// cannot be read.
    pub fn ticket(&self, range: impl RangeBounds<u64>) -> Result<Ticket> {
        let (offset, bytes) = offset_and_length(range, self.memory.bytes())?;
        self.memory.mapping.check(self.name(), offset, bytes)?;
        let (wanted, incarnation) = (Wanted::published(offset, Some(bytes)), self.incarnation());
        Ticket::new(
            &self.domain,
            &self.name,
            Kind::Memory,
            Some(incarnation),
            wanted,
            Some(self.memory.mapping.owner),
        )
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
    // A range without an end that begins outside is refused by `check`, which says what there is.
    match end.checked_sub(start) {
        Some(bytes) => Ok((start, bytes)),
        None if matches!(range.end_bound(), Bound::Unbounded) => Ok((start, 0)),
        None => Err(Error::argument(
            "range",
            format!("{start}..{end}"),
            "one that does not end before it begins",
        )),
    }
}

/// Gives the memory to each client that is admitted. A client that wants another run of the
/// name's owner sees by the session's generation that this is none.
struct PublishedHandler {
    info: MemoryInfo,
    access: Access,
    export: CloseOnForkFd,
}

impl RequestHandler for PublishedHandler {
    fn on_connect(
        &self,
        _: &ServerCore,
        _: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        let PublishedHandler { info, access, .. } = *self;
        let export = CloseOnForkFd::duplicate(&self.export)?;
        OutgoingReply::new(&PublishedReply { info, access }, vec![export])
    }

    fn runs_on_reactor(&self) -> bool {
        true
    }
}
