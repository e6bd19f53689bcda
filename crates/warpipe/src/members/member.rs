//! The member's side: its name, its answers, its heartbeat.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use super::{HEARTBEAT, Introduction, check_role, endpoint};
use crate::clock::now_ns;
use crate::error::Result;
use crate::fork::CloseOnForkFd;
use crate::ipc::domain::{Author, Domain};
use crate::ipc::{
    AccessPolicy, Address, ClientInfo, Disconnected, IpcServer, Kind, OutgoingReply, Rejection,
    RequestHandler, ServerCore,
};
use crate::shm::page::{PAGE_BYTES, SharedPage};

/// This process as a member of a domain. The drop leaves the domain.
#[derive(Debug)]
pub struct Member {
    server: IpcServer,
    heartbeat: Arc<HeartbeatSource>,
    name: String,
}

impl Member {
    /// Takes the endpoint `members/NAME` (`bind(2)` under an `fcntl(2)` lock) and answers each
    /// watch of the domain, until it is dropped. A process may be several members.
    ///
    /// `name` is 1 to 72 bytes, as an [`EndpointName`](crate::EndpointName). `role` tells people
    /// and programs the purpose of the process: up to [`ROLE_BYTES_MAX`](super::ROLE_BYTES_MAX)
    /// bytes, or empty.
    ///
    /// # Errors
    /// [`Error::NameTaken`](crate::Error::NameTaken) while a living process has the name (a dead
    /// one's is free at once); [`Error::Name`](crate::Error::Name),
    /// [`Error::Argument`](crate::Error::Argument) for an invalid role;
    /// [`Error::ForeignFile`](crate::Error::ForeignFile) where a file of another kind has its
    /// place.
    ///
    /// ```
    /// # use warpipe::{Domain, Error, Member};
    /// # let folder = std::env::temp_dir().join(format!("warpipe-join-{}", std::process::id()));
    /// # let domain = Domain::at(&folder)?;
    /// let trainer = Member::join(&domain, "trainer/0", "trainer")?;
    /// let second = Member::join(&domain, "trainer/0", "impostor");
    /// assert!(matches!(second, Err(Error::NameTaken { .. })));
    /// # drop(trainer); std::fs::remove_dir_all(folder).ok();
    /// # Ok::<(), Error>(())
    /// ```
    pub fn join(domain: &Domain, name: &str, role: &str) -> Result<Member> {
        check_role(role)?;
        let (page, fd) = SharedPage::publish(None, PAGE_BYTES)?;
        let introduction = Introduction {
            role: role.to_owned(),
            author: Author::own(),
            since_ns: now_ns(),
            page_bytes: page.bytes() as u32,
        };
        let heartbeat = Arc::new(HeartbeatSource {
            page,
            fd,
            introduction,
        });
        heartbeat.write_heartbeat(now_ns());
        let at = Address {
            domain,
            name: &endpoint(name)?,
            kind: Kind::Member,
        };
        let server = IpcServer::open(&at, AccessPolicy::default(), heartbeat.clone())?;
        Ok(Member {
            server,
            heartbeat,
            name: name.to_owned(),
        })
    }

    /// The name that it joined under.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The role that it declares.
    pub fn role(&self) -> &str {
        &self.heartbeat.introduction.role
    }

    /// This incarnation, as [`MemberInfo::generation`](super::MemberInfo::generation) shows it.
    pub fn generation(&self) -> [u8; 16] {
        self.server.server_core().generation()
    }
}

/// Serves the name: introduction and heartbeat page.
#[derive(Debug)]
struct HeartbeatSource {
    page: SharedPage,
    fd: CloseOnForkFd,
    introduction: Introduction,
}

impl HeartbeatSource {
    fn write_heartbeat(&self, now_ns: u64) {
        self.page.at::<AtomicU64>(HEARTBEAT).store(now_ns, Relaxed);
    }
}

impl RequestHandler for HeartbeatSource {
    fn on_connect(
        &self,
        _: &ServerCore,
        _: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        OutgoingReply::new(
            &self.introduction,
            vec![CloseOnForkFd::duplicate(&self.fd)?],
        )
    }

    fn on_request(
        &self,
        _: &ServerCore,
        _: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        Err(Rejection("a member answers no questions".into()))
    }

    fn holds_anything(&self, _: &ClientInfo) -> bool {
        false
    }

    fn on_disconnect(&self, _: &ServerCore, _: &ClientInfo, _: Disconnected) {}

    fn on_server_tick(&self, _: &ServerCore, now_ns: u64) {
        self.write_heartbeat(now_ns);
    }
}
