//! The creator's side: admits members, and takes back the permits of dead ones.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard};

use serde::{Deserialize, Serialize};

use super::member_monitor::{MemberMonitor, SemaphoreNotice};
use super::page::CREATOR;
use crate::backend::DeviceKind;
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::ipc::{
    ClientInfo, Disconnected, OutgoingReply, Rejection, RequestHandler, ServerCore, decode, encode,
};
use crate::mutex::LockUnpoisoned;
use crate::runtime::closer::PeerFd;
use crate::shm::page::SharedPage;

/// The body of the admission, beside the page's descriptor.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SemaphoreWelcome {
    /// The new member's number.
    pub(super) member: u32,
    pub(super) permits: u32,
}

/// A member's request: its own streams are about to wait for those of another one. With it comes
/// the page that the two are to share, which the requester has mapped. Answered with
/// [`MemberPresence`].
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct SemaphoreRequest {
    pub(super) member: u32,
}

/// Whether the member is present, and has been told of the page. If it is present, its pidfd and
/// lifeline come with the answer, unless it is the creator. An absent member owes no signal.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct MemberPresence {
    pub(super) is_here: bool,
    pub(super) is_told: bool,
}

/// A present member that another one has a page for.
pub(super) struct Introduction {
    /// The member got the page. If not, it is about to be proven dead, or does not read its
    /// messages.
    pub(super) is_told: bool,
    /// The descriptors that prove its death; `None` for the creator.
    pub(super) process: Option<[PeerFd; 3]>,
}

/// The creator's semaphore.
#[derive(Debug)]
pub(super) struct SemaphoreServer {
    page: CloseOnForkFd,
    device: DeviceKind,
    /// Members that have been admitted and are not gone. The lock also serializes sweeps; no driver
    /// call is made under it.
    members: Mutex<BTreeSet<u32>>,
    monitor: Arc<MemberMonitor>,
}

impl SemaphoreServer {
    pub(super) fn new(
        page: CloseOnForkFd,
        device: DeviceKind,
        monitor: Arc<MemberMonitor>,
    ) -> SemaphoreServer {
        SemaphoreServer {
            page,
            device,
            members: Mutex::default(),
            monitor,
        }
    }

    /// Has `member` signal to `asker`, on a page that the latter has mapped. `None` if `member` is
    /// absent.
    pub(super) fn introduce(
        &self,
        server_core: &ServerCore,
        asker: u32,
        member: u32,
        page: PeerFd,
    ) -> Result<Option<Introduction>> {
        if member == CREATOR {
            self.monitor.signals.add_listener(asker, page)?;
            let (is_told, process) = (true, None);
            return Ok(Some(Introduction { is_told, process }));
        }
        let bytes = super::signals::bytes_for(self.monitor.shared_page.permits());
        SharedPage::check_unsealed(&page, bytes, server_core.name())?;
        let members = self.members();
        let is_member = members.contains(&member);
        let client = server_core.client(member.into());
        let Some(client) = client.filter(|_| is_member) else {
            self.sweep(&members);
            return Ok(None);
        };
        drop(members);
        let process = client
            .process
            .relay()
            .map_err(|e| Error::os("fcntl(F_DUPFD)", "a member's lifeline", e))?;
        let notice = encode(&SemaphoreNotice::Serve { member: asker })?;
        let notice = OutgoingReply {
            body: notice,
            fds: vec![page.accept()],
        };
        let is_told = server_core.tell(member.into(), &notice);
        let process = Some(process.map(PeerFd::from));
        Ok(Some(Introduction { is_told, process }))
    }

    fn members(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.members.locked()
    }

    fn sweep(&self, members: &BTreeSet<u32>) {
        self.monitor
            .shared_page
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
                permits: self.monitor.shared_page.permits(),
            },
            vec![page],
        )?;
        self.members().insert(member);
        Ok(answer)
    }

    fn takes_memory(&self) -> bool {
        true
    }

    fn takes_memory_again(&self) -> bool {
        true
    }

    fn on_memory(
        &self,
        server_core: &ServerCore,
        client: &ClientInfo,
        body: &[u8],
        page: PeerFd,
    ) -> Result<OutgoingReply, Rejection> {
        let asker = u32::try_from(client.id).unwrap_or(CREATOR);
        let SemaphoreRequest { member } = decode(body, server_core.name())?;
        let introduction = self.introduce(server_core, asker, member, page)?;
        let presence = MemberPresence {
            is_here: introduction.is_some(),
            is_told: introduction.as_ref().is_some_and(|made| made.is_told),
        };
        let process = introduction.and_then(|made| made.process);
        let process = process.into_iter().flatten().map(PeerFd::accept);
        OutgoingReply::new(&presence, process.collect())
    }

    /// Its permits stay with it: its device work under them may continue.
    fn on_orphaned(&self, _server_core: &ServerCore, client: &ClientInfo) {
        if let Ok(member) = u32::try_from(client.id) {
            self.monitor.handle_death(member);
        }
    }

    /// By the shared page. A process that still uses its permits after its socket's end breaks the
    /// rules.
    fn on_suspect(&self, _server_core: &ServerCore, client: &ClientInfo) -> bool {
        u32::try_from(client.id).is_ok_and(|member| self.monitor.shared_page.holds(member))
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
