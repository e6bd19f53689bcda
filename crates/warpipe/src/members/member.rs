//! The member's side: its name, its answers, its heartbeat.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use super::{HEARTBEAT, Introduction, allowed_role, endpoint, is_role};
use crate::clock::now_ns;
use crate::error::{Error, Result};
use crate::fork::CloseOnForkFd;
use crate::ipc::domain::{Author, Domain};
use crate::ipc::{
    AccessPolicy, ClientInfo, IpcServer, Kind, OutgoingReply, Rejection, RequestHandler, ServerCore,
};
use crate::options::{in_domain, serve};
use crate::shm::page::{PAGE_BYTES, SharedPage};

/// The options of a [`Member`].
#[derive(Debug, Clone, Default)]
pub struct MemberOptions {
    /// The domain to join; the environment's by default.
    pub domain: Option<Domain>,
    /// Tells people and programs the purpose of the process: up to 64 bytes; empty by default.
    pub role: String,
    /// Lets these users see this member in their watches, beside this process's own. The domain
    /// directory must admit them, too. They cannot join: the names of a domain are its user's.
    pub allow_uids: Vec<u32>,
    /// Admits processes with one of these as their effective group. The kernel reports no
    /// supplementary groups of a peer, so those do not count.
    pub allow_gids: Vec<u32>,
}

in_domain!(MemberOptions);

/// This process as a member of a domain. The drop leaves the domain.
#[derive(Debug)]
pub struct Member {
    /// This incarnation, as [`MemberInfo::generation`](super::MemberInfo::generation) shows it.
    pub generation: [u8; 16],
    _server: IpcServer,
}

impl Member {
    /// Takes the endpoint `members/NAME` (`bind(2)` under an `fcntl(2)` lock) and answers each
    /// watch of the domain, until it is dropped. The name has 1 to 72 bytes as an
    /// [`EndpointName`](crate::EndpointName). A process may be several members.
    ///
    /// # Errors
    /// [`Error::Name`](crate::Error::Name) while a living process has the name (a dead one's is
    /// free at once); [`Error::Name`](crate::Error::Name),
    /// [`Error::Argument`](crate::Error::Argument) for an invalid role;
    /// [`Error::Name`](crate::Error::Name) where a file of another kind has its place.
    ///
    /// ```
    /// # use warpipe::{Domain, Error, Member, MemberOptions};
    /// # let folder = std::env::temp_dir().join(format!("warpipe-join-{}", std::process::id()));
    /// # let domain = Domain::at(&folder)?;
    /// let options = MemberOptions { role: "trainer".into(), ..domain.options() };
    /// let trainer = Member::new("trainer/0", options)?;
    /// let second = Member::new("trainer/0", domain.options());
    /// assert!(matches!(second, Err(Error::Name(warpipe::NameFault::Taken { .. }))));
    /// # drop(trainer); std::fs::remove_dir_all(folder).ok();
    /// # Ok::<(), Error>(())
    /// ```
    pub fn new(name: &str, options: MemberOptions) -> Result<Member> {
        if !is_role(&options.role) {
            let found = format!("{:?}", options.role);
            return Err(Error::argument("role", found, allowed_role()));
        }
        let (page, fd) = SharedPage::publish(None, PAGE_BYTES)?;
        let introduction = Introduction {
            role: options.role,
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
        let at = endpoint(name)?;
        let access = AccessPolicy::of(options.allow_uids, options.allow_gids);
        let server = serve(&options.domain, &at, Kind::Member, access, heartbeat)?;
        Ok(Member {
            generation: server.server_core().generation(),
            _server: server,
        })
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

    fn on_server_tick(&self, _: &ServerCore, now_ns: u64) {
        self.write_heartbeat(now_ns);
    }
}
