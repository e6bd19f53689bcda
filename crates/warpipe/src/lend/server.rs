//! The lender's side of its sessions.

use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::claims::Borrowers;
use super::given_runs::GivenRuns;
use super::{Grant, HelloReply, LendNotice, LendReply, LendRequest, Offer, OfferPlace};
use crate::backend::DeviceId;
use crate::error::Result;
use crate::fork::CloseOnForkFd;
use crate::ipc::{
    ClientInfo, Disconnected, OutgoingReply, Rejection, RequestHandler, ServerCore, decode,
};
use crate::shm::page::{SharedPage, words_bytes};

/// What the sessions of a lender have in common.
#[derive(Debug)]
pub(crate) struct Lending {
    /// The device that the memory lies on.
    owner: DeviceId,
    claims_max: u32,
    ready_bytes: u64,
    ready_fd: CloseOnForkFd,
    /// The runs that borrowers may have mapped.
    runs: GivenRuns,
}

/// The part of a lender that differs: what is lent, and to which borrowers.
pub(crate) trait Lender: Send + Sync {
    /// What a claim is on.
    type Lent;
    type Request: DeserializeOwned;
    type Refusal: Serialize;

    fn lending(&self) -> &Lending;

    /// Calls `call` with the borrowers, under the lender's lock.
    fn with_borrowers<R>(&self, call: impl FnOnce(&mut Borrowers<Self::Lent>) -> R) -> R;

    /// Answers a request for memory: [`Lending::lend`].
    fn lend(
        &self,
        client: &ClientInfo,
        request: Self::Request,
    ) -> Result<LendReply<Self::Refusal>, Rejection>;

    /// Descriptors of a run's pieces, from number `first` on. None if there is no such piece.
    fn export(&self, run: u32, first: u32) -> Result<Vec<CloseOnForkFd>>;

    /// Gets back what was lent to a borrower that has not learned of it.
    fn take_back(&self, lent: Self::Lent);

    /// Takes what borrowers have no more.
    fn collect(&self, server_core: &ServerCore);

    /// As [`collect`](Self::collect), every 200 ms on the reactor's thread, which must not wait for
    /// a lock that is held across a driver call.
    fn on_tick(&self, server_core: &ServerCore);
}

impl Lending {
    /// For a lender of memory on this device, of which a borrower may have so many claims.
    pub(crate) fn new(
        owner: DeviceId,
        claims_max: u32,
        (ready, ready_fd): (&SharedPage, CloseOnForkFd),
    ) -> Lending {
        Lending {
            owner,
            claims_max,
            ready_bytes: ready.bytes() as u64,
            ready_fd,
            runs: GivenRuns::default(),
        }
    }

    /// Lends to a client. Gives back what was to be lent if that has the most claims that it may
    /// have.
    pub(crate) fn lend<T, R>(
        &self,
        borrowers: &mut Borrowers<T>,
        client: &ClientInfo,
        lent: T,
        offer: Offer,
    ) -> Result<LendReply<R>, T> {
        let (word, value) = borrowers.claim(client.id, lent)?;
        if let OfferPlace::Run { run, .. } = offer.place {
            self.runs.give(client.id, run);
        }
        Ok(LendReply::Lent(Grant { word, value, offer }))
    }

    /// The lender has this run no longer: borrowers that may have mapped it are told.
    pub(crate) fn end_run(&self, run: u32) {
        self.runs.end(run);
    }

    /// Tells borrowers of the runs that have ended. A stopped one is told when it goes on.
    pub(crate) fn tell_ended(&self, server_core: &ServerCore) {
        self.runs.tell(|client, run| {
            let notice = OutgoingReply::new(&LendNotice::RunEnded(run), vec![]);
            notice.is_ok_and(|notice| server_core.tell(client, &notice))
        });
    }
}

impl<L: Lender> RequestHandler for L {
    fn on_connect(
        &self,
        _: &ServerCore,
        client: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        let &Lending {
            owner,
            claims_max,
            ready_bytes,
            ref ready_fd,
            ..
        } = self.lending();
        if let Some(device) = client.device.filter(|device| device.kind != owner.kind) {
            return Err(Rejection::new(format!(
                "its memory is on {owner}, which {device} cannot reach"
            )));
        }
        let (page, fd) = SharedPage::create(None, words_bytes(claims_max as usize))?;
        let hello = HelloReply {
            owner,
            claims_bytes: page.bytes() as u64,
            ready_bytes,
        };
        let reply = OutgoingReply::new(&hello, vec![fd, CloseOnForkFd::duplicate(ready_fd)?])?;
        let (process, permit) = (client.process.clone(), Some(client.quota_permit.clone()));
        self.with_borrowers(|it| it.add(client.id, Arc::new(page), process, permit));
        Ok(reply)
    }

    fn on_request(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        body: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        let (run, first) = match decode(body, server_core.name())? {
            LendRequest::Pieces { run, first } => (run, first),
            LendRequest::Memory(request) => {
                return OutgoingReply::new(&self.lend(client, request)?, vec![]);
            }
        };
        let is_given = self.lending().runs.has(client.id, run);
        let fds = is_given.then(|| self.export(run, first)).transpose()?;
        let fds = fds.unwrap_or_default();
        let reply = match fds[..] {
            [] => LendReply::<()>::Gone,
            _ => LendReply::Pieces,
        };
        OutgoingReply::new(&reply, fds)
    }

    fn on_suspect(&self, _: &ServerCore, client: &ClientInfo) -> bool {
        self.with_borrowers(|borrowers| borrowers.has_any(client.id))
    }

    fn on_disconnect(&self, server_core: &ServerCore, client: &ClientInfo, how: Disconnected) {
        self.lending().runs.forget(client.id);
        let is_dead = how == Disconnected::ProcessDied;
        self.with_borrowers(|borrowers| borrowers.leave(client.id, is_dead));
        self.collect(server_core);
    }

    fn take_back(&self, client: &ClientInfo, body: &[u8]) -> bool {
        // Pieces are asked for again.
        if let Ok(LendReply::<()>::Lent(Grant { word, value, .. })) = decode(body, "a lender")
            && let Some(lent) = self.with_borrowers(|it| it.take_back(client.id, (word, value)))
        {
            Lender::take_back(self, lent);
        }
        true
    }

    fn on_server_tick(&self, server_core: &ServerCore, _: u64) {
        self.on_tick(server_core);
        self.lending().tell_ended(server_core);
    }
}
