//! The creator's side: admits members, and takes back the permits of dead ones.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::member_monitor::{MemberMonitor, SemaphoreNotice};
use super::page::{CREATOR, SemaphorePage};
use super::signals::MemberSignals;
use crate::backend::DeviceKind;
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::ipc::{
    ClientInfo, Disconnected, OutgoingReply, Rejection, RequestHandler, ServerCore, decode,
};
use crate::shm::seal;

/// The body of the admission, beside the page's descriptor.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SemaphoreWelcome {
    /// The new member's number.
    pub(super) member: u32,
    pub(super) permits: u32,
}

/// A member's request about another member. Its own streams are about to wait for that one's.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum SemaphoreRequest {
    /// Requests a page to share with it, and its process; answered with [`MemberPresence`].
    Page { member: u32 },
    /// The requester has mapped that page, so the other member may get it. Answered with an empty
    /// reply.
    Mapped { member: u32 },
}

/// Whether the member is present. If so, a page comes with the answer, and also its pidfd and
/// lifeline unless it is the creator. An absent member owes no signal.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct MemberPresence(pub(super) bool);

/// A page for two members, and the descriptors that prove the other member's death.
pub(super) struct PageOffer<F> {
    pub(super) page: F,
    /// Its pidfd and lifeline; `None` for the creator.
    pub(super) process: Option<[F; 3]>,
}

/// The creator's semaphore.
#[derive(Debug)]
pub(super) struct SemaphoreServer {
    shared_page: Arc<SemaphorePage>,
    page: CloseOnForkFd,
    device: DeviceKind,
    /// Members that have been admitted and are not gone. The lock also serializes sweeps; no driver
    /// call is made under it.
    members: Mutex<BTreeSet<u32>>,
    /// The creator's own signals.
    signals: Arc<MemberSignals>,
    monitor: Arc<MemberMonitor>,
    /// By requester: a page that it has not mapped yet, and the member that will signal there.
    /// One for each requester.
    offers: Mutex<HashMap<u32, (u32, CloseOnForkFd)>>,
}

impl SemaphoreServer {
    pub(super) fn new(
        shared_page: Arc<SemaphorePage>,
        page: CloseOnForkFd,
        device: DeviceKind,
        signals: Arc<MemberSignals>,
        monitor: Arc<MemberMonitor>,
    ) -> SemaphoreServer {
        SemaphoreServer {
            shared_page,
            page,
            device,
            members: Mutex::default(),
            signals,
            monitor,
            offers: Mutex::default(),
        }
    }

    fn offers(&self) -> MutexGuard<'_, HashMap<u32, (u32, CloseOnForkFd)>> {
        self.offers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates a page for `asker`: its streams are to wait for those of `member`. `None` if
    /// `member` is absent.
    pub(super) fn offer(
        &self,
        server_core: &ServerCore,
        asker: u32,
        member: u32,
    ) -> Result<Option<PageOffer<CloseOnForkFd>>> {
        let process = match member {
            CREATOR => None,
            _ => {
                let members = self.members();
                let process = if members.contains(&member) {
                    server_core.process_of(member.into())
                } else {
                    None
                };
                let Some(process) = process else {
                    self.sweep(&members);
                    return Ok(None);
                };
                Some(
                    process
                        .relay()
                        .map_err(|e| Error::os("fcntl(F_DUPFD)", "a member's lifeline", e))?,
                )
            }
        };
        let page = seal::memfd(
            c"warpipe-words",
            super::signals::bytes_for(self.shared_page.permits()) as u64,
        )?;
        let copy = CloseOnForkFd::duplicate(&page)
            .map_err(|e| Error::os("fcntl(F_DUPFD)", "a page of two members", e))?;
        self.offers().insert(asker, (member, copy));
        Ok(Some(PageOffer { page, process }))
    }

    /// The requester has mapped its page: the other member may get it now.
    pub(super) fn forward(
        &self,
        server_core: &ServerCore,
        asker: u32,
        member: u32,
    ) -> Result<(), Rejection> {
        let offered = self.offers().remove(&asker).filter(|(of, _)| *of == member);
        let (_, page) = offered.ok_or_else(|| Rejection::new("it was offered no such page"))?;
        if member == CREATOR {
            return Ok(self.signals.add_listener(asker, page.into())?);
        }
        let is_told = server_core.tell(
            member.into(),
            &OutgoingReply::new(&SemaphoreNotice::Serve { member: asker }, vec![page])?,
        );
        if is_told {
            Ok(())
        } else {
            Err(Rejection::new(format!("member {member} does not answer")))
        }
    }

    fn members(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sweep(&self, members: &BTreeSet<u32>) {
        self.shared_page
            .sweep(|member| member == CREATOR || members.contains(&member));
    }
}

impl RequestHandler for SemaphoreServer {
    fn on_connect(
        &self,
        _server_core: &ServerCore,
        client: &ClientInfo,
        _body: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        if client.device.map(|device| device.kind) != Some(self.device) {
            let text = format!(
                "it is for {:?} devices; open it on a device of that kind",
                self.device
            );
            return Err(Rejection::new(text));
        }
        let member = u32::try_from(client.id)
            .ok()
            .filter(|&member| member < CREATOR);
        let member = member.ok_or_else(|| {
            Rejection::new("it has had all the members it can count; create it anew")
        })?;
        let page = CloseOnForkFd::duplicate(&self.page)
            .map_err(|e| Error::os("fcntl(F_DUPFD)", "the semaphore's page", e))?;
        let answer = OutgoingReply::new(
            &SemaphoreWelcome {
                member,
                permits: self.shared_page.permits(),
            },
            vec![page],
        )?;
        self.members().insert(member);
        Ok(answer)
    }

    fn on_request(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        body: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        let asker = u32::try_from(client.id).unwrap_or(CREATOR);
        match decode(body, server_core.name())? {
            SemaphoreRequest::Page { member } => {
                let offer = self.offer(server_core, asker, member)?;
                let is_here = MemberPresence(offer.is_some());
                let fds = offer.into_iter();
                let fds = fds.flat_map(|PageOffer { page, process }| {
                    [page].into_iter().chain(process.into_iter().flatten())
                });
                OutgoingReply::new(&is_here, fds.collect())
            }
            SemaphoreRequest::Mapped { member } => {
                self.forward(server_core, asker, member)?;
                Ok(OutgoingReply::default())
            }
        }
    }

    /// Its permits stay with it: its device work under them may continue.
    fn on_orphaned(&self, _server_core: &ServerCore, client: &ClientInfo) {
        if let Ok(member) = u32::try_from(client.id) {
            self.monitor.handle_death(member);
        }
    }

    /// The shared page tells. A process that goes on to use its permits breaks the rules.
    fn holds_anything(&self, client: &ClientInfo) -> bool {
        u32::try_from(client.id).is_ok_and(|member| self.shared_page.holds(member))
    }

    fn on_disconnect(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        _disconnected: Disconnected,
    ) {
        // Also after a graceful close: a member closes only when its devices have completed its
        // promised signals.
        let mut members = self.members();
        members.retain(|&member| u64::from(member) != client.id);
        self.sweep(&members);
        let others: Vec<u32> = members.iter().copied().collect();
        drop(members);
        let Ok(member) = u32::try_from(client.id) else {
            return;
        };
        self.offers().remove(&member);
        self.monitor.remove_member(member);
        for other in others {
            // A member that does not read its messages keeps a page that has no use any more.
            let _ = OutgoingReply::new(&SemaphoreNotice::Gone { member }, vec![])
                .map(|notice| server_core.tell(other.into(), &notice));
        }
    }

    /// Runs on the reactor's thread: atomics and wake-ups alone. A dead member's values behind a
    /// living member's work are completed here, without another death.
    fn on_server_tick(&self, _server_core: &ServerCore, _now_ns: u64) {
        self.sweep(&self.members());
    }
}
