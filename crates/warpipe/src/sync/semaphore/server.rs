//! The creator's side: lets members in, and takes back what the dead leave behind.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::member_monitor::MemberMonitor;
use super::page::{CREATOR, SemaphorePage};
use super::signals::MemberSignals;
use crate::backend::DeviceKind;
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::ipc::{
    ClientInfo, Disconnected, OutgoingReply, Rejection, RequestHandler, ServerCore, decode,
};
use crate::shm::seal;

/// What comes with the admission, beside the page's descriptor.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SemaphoreWelcome {
    /// The visitor's number.
    pub(super) member: u32,
    pub(super) permits: u32,
}

/// What a member asks about another one, whose device its own streams are about to wait for.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum SemaphoreRequest {
    /// A page to share with it, and its process; answered with [`MemberPresence`].
    Page { member: u32 },
    /// That page is mapped here, and can be given to the other one, too. Answered with nothing.
    Mapped { member: u32 },
}

/// Whether the member is here: then a page comes with the answer, and pidfd and lifeline of it unless it is
/// the creator. If it is not, it
/// owes nothing any more.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct MemberPresence(pub(super) bool);

/// What the creator tells a member that has not asked.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum SemaphoreNotice {
    /// This member's streams are to wait for yours: map and seal the page that comes with it, and signal there.
    Serve { member: u32 },
    /// This member is here no more.
    Gone { member: u32 },
}

/// A page for two members, and what tells of the other one's death.
pub(super) struct PageOffer<F> {
    pub(super) page: F,
    /// Its pidfd and lifeline; none of the creator's.
    pub(super) process: Option<[F; 3]>,
}

/// Whose semaphore it is.
#[derive(Debug)]
pub(super) struct SemaphoreServer {
    shared_page: Arc<SemaphorePage>,
    page: CloseOnForkFd,
    device: DeviceKind,
    /// Members that have been let in and are not gone. The lock also keeps sweeps apart; nothing of the driver is
    /// called under it.
    members: Mutex<BTreeSet<u32>>,
    /// The creator's own.
    signals: Arc<MemberSignals>,
    monitor: Arc<MemberMonitor>,
    /// By who asked: pages that it has not mapped yet, and whose signals they are for. One for each.
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

    /// Makes a page for `asker`, whose streams are to wait for those of `member`. None if that is not here.
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

    /// The asker has mapped its page: the other one can have it, too.
    pub(super) fn forward(
        &self,
        server_core: &ServerCore,
        asker: u32,
        member: u32,
    ) -> Result<(), Rejection> {
        let offered = self.offers().remove(&asker).filter(|(of, _)| *of == member);
        let (_, page) = offered.ok_or_else(|| Rejection("it was offered no such page".into()))?;
        if member == CREATOR {
            return Ok(self.signals.add_listener(asker, page.into())?);
        }
        let is_told = server_core.tell(
            member.into(),
            OutgoingReply::new(&SemaphoreNotice::Serve { member: asker }, vec![page])?,
        );
        if is_told {
            Ok(())
        } else {
            Err(Rejection(format!("member {member} does not answer")))
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
        _desk: &ServerCore,
        client: &ClientInfo,
        _body: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        if client.device.map(|device| device.kind) != Some(self.device) {
            let text = format!(
                "it is for {:?} devices; open it on a device of that kind",
                self.device
            );
            return Err(Rejection(text));
        }
        let member = u32::try_from(client.id)
            .ok()
            .filter(|&member| member < CREATOR);
        let member = member.ok_or_else(|| {
            Rejection("it has had all the members it can count; create it anew".into())
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

    /// Its permits stay with it: what its device does under them may still go on.
    fn on_orphaned(&self, _desk: &ServerCore, client: &ClientInfo) {
        if let Ok(member) = u32::try_from(client.id) {
            self.monitor.handle_death(member);
        }
    }

    /// What its page says, which the process may go on to use only if it breaks the rules.
    fn holds_anything(&self, client: &ClientInfo) -> bool {
        u32::try_from(client.id).is_ok_and(|member| self.shared_page.holds(member))
    }

    fn on_disconnect(&self, server_core: &ServerCore, client: &ClientInfo, _ending: Disconnected) {
        // After a goodbye, too: a member says it only when its devices have signalled all that it promised.
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
            // One that does not read what it is sent keeps a page that says nothing any more.
            let _ = OutgoingReply::new(&SemaphoreNotice::Gone { member }, vec![])
                .map(|notice| server_core.tell(other.into(), notice));
        }
    }

    /// On the reactor's thread: atomics and wake-ups alone. What a dead member owes behind a living one's work comes
    /// due without anybody dying once more.
    fn on_server_tick(&self, _desk: &ServerCore, _now_ns: u64) {
        self.sweep(&self.members());
    }
}
