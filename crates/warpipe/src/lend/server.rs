//! The lender's side of its sessions.

use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::claims::{Borrowers, Claimant};
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
    /// Of a borrower's page.
    words: u32,
    ready_bytes: u64,
    /// Of the ready words, and of more pages for borrowers that claim by words.
    pages: Vec<CloseOnForkFd>,
    /// The runs that borrowers may have mapped.
    runs: GivenRuns,
}

/// The part of a lender that differs: what is lent, and to which borrowers.
pub(crate) trait Lender: Send + Sync {
    type Request: DeserializeOwned;
    type Refusal: Serialize;

    fn lending(&self) -> &Lending;

    fn admit(&self, client: &ClientInfo, claimant: Claimant);

    /// Whether a client may claim by words, and gets the page of the offers.
    fn is_offered_to(&self, _client: &ClientInfo) -> bool {
        true
    }

    /// Whether a client has a claim.
    fn has_any(&self, client: u64) -> bool;

    /// As [`Claimant::leave`].
    fn leave(&self, client: u64, is_dead: bool);

    /// Answers a request for memory: [`Lending::lend`].
    fn lend(
        &self,
        client: &ClientInfo,
        request: Self::Request,
    ) -> Result<LendReply<Self::Refusal>, Rejection>;

    /// Whether a client has a claim in a run that it was not lent by an answer.
    fn has_claim_in(&self, _client: u64, _run: u32) -> bool {
        false
    }

    /// Descriptors of a run's pieces, from number `first` on. None if there is no such piece.
    fn export(&self, run: u32, first: u32) -> Result<Vec<CloseOnForkFd>>;

    /// Ends a claim of which its borrower has not learned.
    fn take_back(&self, client: u64, claim: (u32, u64));

    /// Takes what borrowers have no more.
    fn collect(&self, server_core: &ServerCore);

    /// As [`collect`](Self::collect), every 200 ms on the reactor's thread, which must not wait for
    /// a lock that is held across a driver call.
    fn on_tick(&self, server_core: &ServerCore);
}

impl Lending {
    /// For a lender of memory on this device, of which a borrower has a page of so many words.
    pub(crate) fn new(
        owner: DeviceId,
        words: u32,
        ready: &SharedPage,
        pages: Vec<CloseOnForkFd>,
    ) -> Lending {
        Lending {
            owner,
            words,
            ready_bytes: ready.bytes() as u64,
            pages,
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
            words,
            ready_bytes,
            ref pages,
            ..
        } = self.lending();
        if let Some(device) = client.device.filter(|device| device.kind != owner.kind) {
            return Err(Rejection::new(format!(
                "its memory is on {owner}, which {device} cannot reach"
            )));
        }
        let (page, fd) = SharedPage::create(None, words_bytes(words as usize))?;
        let hello = HelloReply {
            owner,
            claims_bytes: page.bytes() as u64,
            ready_bytes,
        };
        let pages = match self.is_offered_to(client) {
            true => &pages[..],
            false => &pages[..1],
        };
        let copies = pages.iter().map(CloseOnForkFd::duplicate);
        let fds = [Ok(fd)]
            .into_iter()
            .chain(copies)
            .collect::<Result<_, _>>()?;
        let reply = OutgoingReply::new(&hello, fds)?;
        let (process, permit) = (client.process.clone(), client.quota_permit.clone());
        self.admit(client, Claimant::new(Arc::new(page), process, Some(permit)));
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
        let runs = &self.lending().runs;
        if self.has_claim_in(client.id, run) {
            runs.give(client.id, run);
        }
        let is_given = runs.has(client.id, run);
        let fds = is_given.then(|| self.export(run, first)).transpose()?;
        let fds = fds.unwrap_or_default();
        let reply = match fds[..] {
            [] => LendReply::<()>::Gone,
            _ => LendReply::Pieces,
        };
        OutgoingReply::new(&reply, fds)
    }

    fn on_suspect(&self, _: &ServerCore, client: &ClientInfo) -> bool {
        self.has_any(client.id)
    }

    fn on_disconnect(&self, server_core: &ServerCore, client: &ClientInfo, how: Disconnected) {
        self.lending().runs.forget(client.id);
        let is_dead = how == Disconnected::ProcessDied;
        self.leave(client.id, is_dead);
        self.collect(server_core);
    }

    fn take_back(&self, client: &ClientInfo, body: &[u8]) -> bool {
        // Pieces are asked for again.
        if let Ok(LendReply::<()>::Lent(Grant { word, value, .. })) = decode(body, "a lender") {
            Lender::take_back(self, client.id, (word, value));
        }
        true
    }

    fn on_server_tick(&self, server_core: &ServerCore, _: u64) {
        self.on_tick(server_core);
        self.lending().tell_ended(server_core);
    }
}
