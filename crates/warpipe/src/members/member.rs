//! The member's side: a name, an answer, a heartbeat.

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

/// This process as a member of a domain; dropped, it leaves.
#[derive(Debug)]
pub struct Member {
    server: IpcServer,
    heartbeat: Arc<HeartbeatSource>,
    name: String,
}

impl Member {
    /// Takes the endpoint `members/NAME` (`bind(2)` under an `fcntl(2)` lock) and answers whoever watches the domain, until
    /// it is dropped. A process may be several members.
    ///
    /// `name` is 1 to 72 bytes, as an [`EndpointName`](crate::EndpointName); `role` says what the process does, to people
    /// and to programs: up to [`ROLE_BYTES_MAX`](super::ROLE_BYTES_MAX) bytes, or empty.
    ///
    /// # Errors
    /// [`Error::NameTaken`](crate::Error::NameTaken) while a living process has the name (a dead one's is free at once);
    /// [`Error::Name`](crate::Error::Name), [`Error::Argument`](crate::Error::Argument) for a role that cannot be;
    /// [`Error::ForeignFile`](crate::Error::ForeignFile) where something else has its place.
    ///
    /// ```
    /// # use warpipe::{Domain, Error, Member};
    /// # let folder = std::env::temp_dir().join(format!("warpipe-join-{}", std::process::id()));
    /// # let domain = Domain::at(&folder)?;
    /// let trainer = Member::join(&domain, "trainer/0", "trainer")?;
    /// assert!(matches!(Member::join(&domain, "trainer/0", "impostor"), Err(Error::NameTaken { .. })));
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

    /// What it joined as.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it says that it does.
    pub fn role(&self) -> &str {
        &self.heartbeat.introduction.role
    }

    /// This incarnation, as [`MemberInfo::generation`](super::MemberInfo::generation) shows it.
    pub fn generation(&self) -> [u8; 16] {
        self.server.server_core().generation()
    }
}

/// What is behind the name.
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
