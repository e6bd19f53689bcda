//! The member's side: a name, an answer, a heartbeat.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use super::{BEAT, Introduction, check_role, endpoint};
use crate::clock::now_ns;
use crate::domain::{Author, Domain};
use crate::error::Result;
use crate::fork::PrivateFd;
use crate::memory::page::{PAGE_BYTES, Page};
use crate::rendezvous::{Address, Admission, Answer, Caller, Desk, Ending, Keep, Keeper, Kind, Refusal};

/// This process as a member of a domain; dropped, it leaves.
#[derive(Debug)]
pub struct Member {
    keeper: Keeper,
    heart: Arc<Heart>,
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
        let (page, fd) = Page::publish(None, PAGE_BYTES)?;
        let introduction = Introduction {
            role: role.to_owned(),
            author: Author::own(),
            since_ns: now_ns(),
            page_bytes: page.bytes() as u32,
        };
        let heart = Arc::new(Heart { page, fd, introduction });
        heart.beat(now_ns());
        let at = Address { domain, name: &endpoint(name)?, kind: Kind::Member };
        let keeper = Keeper::open(&at, Admission::default(), heart.clone())?;
        Ok(Member { keeper, heart, name: name.to_owned() })
    }

    /// What it joined as.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it says that it does.
    pub fn role(&self) -> &str {
        &self.heart.introduction.role
    }

    /// This incarnation, as [`MemberInfo::generation`](super::MemberInfo::generation) shows it.
    pub fn generation(&self) -> [u8; 16] {
        self.keeper.desk().generation()
    }
}

/// What is behind the name.
#[derive(Debug)]
struct Heart {
    page: Page,
    fd: PrivateFd,
    introduction: Introduction,
}

impl Heart {
    fn beat(&self, now_ns: u64) {
        self.page.at::<AtomicU64>(BEAT).store(now_ns, Relaxed);
    }
}

impl Keep for Heart {
    fn admit(&self, _: &Desk, _: &Caller, _: &[u8]) -> Result<Answer, Refusal> {
        Answer::new(&self.introduction, vec![PrivateFd::duplicate(&self.fd)?])
    }

    fn answer(&self, _: &Desk, _: &Caller, _: &[u8]) -> Result<Answer, Refusal> {
        Err(Refusal("a member answers no questions".into()))
    }

    fn holds(&self, _: &Caller) -> bool {
        false
    }

    fn gone(&self, _: &Desk, _: &Caller, _: Ending) {}

    fn tick(&self, _: &Desk, now_ns: u64) {
        self.beat(now_ns);
    }
}
