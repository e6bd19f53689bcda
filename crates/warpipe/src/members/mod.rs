//! Who is in a domain, and what becomes of them: lifelines for deaths, a shared word for heartbeats.
//!
//! A [`Member`] holds the endpoint `members/NAME` and writes a heartbeat, every 200 ms, into a page that it hands to
//! whoever asks. [`Members`] follows the domain's directory (`inotify(7)`), visits each member, and tells of every
//! [`Change`]. There is no registrar whose death would matter: each watch sees for itself.
//!
//! Two different things are told. *Stalled* is what a heartbeat says, and it is for people: a stopped, hung or starved
//! process may go on the next moment, so nothing may be taken from it. *Died* is what the kernel says: the process's
//! lifeline has ended, its devices do nothing more for it.
//!
//! ```
//! use std::time::Duration;
//! use warpipe::{Change, Domain, Member, Members};
//! # let folder = std::env::temp_dir().join(format!("warpipe-members-{}", std::process::id()));
//! let domain = Domain::at(&folder)?; // Domain::from_environment() in a program
//! let members = Members::watch(&domain)?;
//! let member = Member::join(&domain, "worker-1", "worker")?;
//!
//! let joined = members.changes(Duration::from_secs(10))?;
//! assert!(matches!(joined, Some(Change::Joined(who)) if who.name == "worker-1" && who.role == "worker"));
//! assert_eq!(members.list()?.len(), 1);
//!
//! drop(member);
//! assert!(matches!(members.changes(Duration::from_secs(10))?, Some(Change::Left(_))));
//! # drop(members); std::fs::remove_dir_all(folder).ok();
//! # Ok::<(), warpipe::Error>(())
//! ```
//!
//! # What comes back when a member dies
//!
//! * Its names: a watch removes the sockets and lock files that the dead process left anywhere in the domain (see
//!   [`MembersBuilder::clean`]), so that a successor finds them free.
//! * What was registered for it with [`Members::on_death_of`].
//! * Its samples, memory, permits and jobs come back without this module: who shares them with the dead process sees the
//!   same proof, and takes them back then.

mod changes;
mod member;
mod monitor;
mod table;
#[cfg(test)]
mod tests;
mod watch;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use self::member::Member;
pub use self::watch::{Members, MembersBuilder};
use crate::error::{Error, Result};
use crate::ipc::PeerState;
use crate::ipc::domain::{Author, EndpointName};

crate::ipc::messages!(Introduction);

/// The most members that one watch follows; further names wait until there is room.
pub const MEMBERS_MAX: usize = 1024;

/// The longest role.
pub const ROLE_BYTES_MAX: usize = 64;

/// Where members' names live.
const FOLDER: &str = "members/";

/// The word, in a member's page, that it writes the time into.
const HEARTBEAT: usize = 0;

/// What a member answers to a watch, with the descriptor of its page.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Introduction {
    role: String,
    /// As it knows itself, and writes itself into its lock files.
    author: Author,
    since_ns: u64,
    page_bytes: u32,
}

/// A member, as a watch knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemberInfo {
    /// What it joined as; its endpoint is `members/NAME`.
    pub name: String,
    /// What it says that it does. Empty while it has not answered yet: it was stopped before this watch began.
    pub role: String,
    /// Its process id as this process sees it, asked of the kernel; 0 where this PID namespace does not have it.
    pub pid: i32,
    /// Its user, asked of the kernel.
    pub uid: u32,
    /// [`Alive`](PeerState::Alive), [`Stalled`](PeerState::Stalled) or [`Suspect`](PeerState::Suspect) in a list; in a
    /// change also [`Leaving`](PeerState::Leaving) (it has left) and [`Dead`](PeerState::Dead).
    pub state: PeerState,
    /// How long its heartbeat has been silent.
    pub silent_for: Duration,
    /// When it joined, as it says, in nanoseconds of [`clock::now_ns`](crate::clock::now_ns). 0 before it has answered.
    pub since_ns: u64,
    /// This incarnation: another one each time that somebody joins under the name. Zeros before it has answered.
    pub generation: [u8; 16],
    /// The endpoints that its process holds in the domain. In [`Change::Died`] those that it left and that this watch
    /// removed; in other changes none.
    pub endpoints: Vec<EndpointName>,
}

/// What became of a member. [`Joined`](Change::Joined) and its end are told once for each incarnation.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Change {
    /// It is there.
    Joined(MemberInfo),
    /// Its heartbeat has stood still for a second in which the watch itself ran. It may be back the next moment.
    Stalled(MemberInfo),
    /// Its heartbeat is back.
    Recovered(MemberInfo),
    /// It has said goodbye. Its process may live on.
    Left(MemberInfo),
    /// Its process is proven dead, and what it left in the domain is removed.
    Died(MemberInfo),
}

impl Change {
    /// Whose.
    pub fn member(&self) -> &MemberInfo {
        match self {
            Change::Joined(member)
            | Change::Stalled(member)
            | Change::Recovered(member)
            | Change::Left(member)
            | Change::Died(member) => member,
        }
    }

    fn is_end(&self) -> bool {
        matches!(self, Change::Left(_) | Change::Died(_))
    }

    fn is_of_heartbeat(&self) -> bool {
        matches!(self, Change::Stalled(_) | Change::Recovered(_))
    }
}

/// The endpoint of a member's name.
fn endpoint(name: &str) -> Result<EndpointName> {
    EndpointName::new(&format!("{FOLDER}{name}"))
}

/// The member's name in an endpoint's, if that is one.
fn member_name(endpoint: &EndpointName) -> Option<&str> {
    endpoint.as_str().strip_prefix(FOLDER)
}

fn is_role(role: &str) -> bool {
    role.len() <= ROLE_BYTES_MAX && !role.chars().any(char::is_control)
}

fn check_role(role: &str) -> Result<()> {
    let allowed = || format!("up to {ROLE_BYTES_MAX} bytes without control characters");
    if is_role(role) {
        Ok(())
    } else {
        Err(Error::argument("role", format!("{role:?}"), allowed()))
    }
}

impl Introduction {
    /// What a peer sent, once it is seen to be what a member may say.
    fn check(self, name: &str) -> Result<Introduction> {
        let wrong = |field, found: String, allowed: String| {
            Err(Error::Protocol {
                name: name.to_string(),
                field,
                found,
                allowed,
            })
        };
        if !is_role(&self.role) {
            let allowed = format!("up to {ROLE_BYTES_MAX} bytes without control characters");
            return wrong("role", format!("{} bytes", self.role.len()), allowed);
        }
        if self.author.pid <= 0 {
            return wrong("process id", self.author.pid.to_string(), "above 0".into());
        }
        Ok(self)
    }
}
