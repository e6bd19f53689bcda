//! The members of a domain: lifelines prove their deaths, a shared word carries their heartbeats.
//!
//! A [`Member`] holds the endpoint `members/NAME` and writes a heartbeat, every 200 ms, into a page
//! that it shares with each watch. [`Members`] follows the domain's directory (`inotify(7)`),
//! connects to each member, and reports every [`Change`]. There is no central registrar.
//!
//! *Stalled* comes from the heartbeat and is for people: a stopped, hung or starved process may
//! continue at any moment, so no resource is reclaimed from it. *Died* comes from the kernel: the
//! process's lifeline has ended, and its devices do no more work for it.

mod changes;
mod member;
mod monitor;
mod table;
#[cfg(test)]
mod tests;
mod watch;

use std::time::Duration;

use serde::{Deserialize, Serialize};

pub use self::member::{Member, MemberOptions};
pub use self::watch::{Members, MembersOptions};
use crate::error::{Error, Result};
use crate::ipc::PeerState;
use crate::ipc::domain::{Author, EndpointName};

crate::ipc::messages!(Introduction);

/// The most members that one watch follows. Further names wait until there is room.
pub(crate) const MEMBERS_MAX: usize = 1024;

/// The longest role, in bytes.
pub(crate) const ROLE_BYTES_MAX: usize = 64;

/// The directory of members' names.
const FOLDER: &str = "members/";

/// The offset of the heartbeat word in a member's page: the member writes the time there.
const HEARTBEAT: usize = 0;

/// A member's answer to a watch. The descriptor of its page goes with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Introduction {
    role: String,
    /// Its process as it sees itself, and as it writes itself into its lock files.
    author: Author,
    since_ns: u64,
    page_bytes: u32,
}

/// A member as a watch sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemberInfo {
    /// The name that it joined under. Its endpoint is `members/NAME`.
    pub name: String,
    /// The role that it declares. Empty while it has not answered yet: it was stopped before this
    /// watch began.
    pub role: String,
    /// Its process id as this process sees it, from the kernel; 0 if this PID namespace does not
    /// contain it.
    pub pid: i32,
    /// Its user id, from the kernel.
    pub uid: u32,
    /// [`Alive`](PeerState::Alive), [`Stalled`](PeerState::Stalled) or
    /// [`Suspect`](PeerState::Suspect) in a list; in a change also [`Leaving`](PeerState::Leaving)
    /// (it has left) and [`Dead`](PeerState::Dead).
    pub state: PeerState,
    /// The time since its last heartbeat.
    pub silent_for: Duration,
    /// The time at which it joined, by its own account, in nanoseconds of
    /// [`clock::now_ns`](crate::clock::now_ns). 0 before it has answered.
    pub since_ns: u64,
    /// This incarnation: each join under the name has another one. Zeros before it has answered.
    pub generation: [u8; 16],
    /// The endpoints that its process holds in the domain. In [`Change::Died`], the endpoints that
    /// it left and that this watch removes next, if it cleans; empty in other changes.
    pub endpoints: Vec<EndpointName>,
}

/// A change of a member's state. [`Joined`](Change::Joined) and the member's end are reported once
/// for each incarnation.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Change {
    /// It has joined.
    Joined(MemberInfo),
    /// Its heartbeat has stalled for a second in which the watch itself ran. It may recover at any
    /// moment.
    Stalled(MemberInfo),
    /// Its heartbeat has recovered.
    Recovered(MemberInfo),
    /// It has closed gracefully. Its process may be alive.
    Left(MemberInfo),
    /// Its process is proven dead. Its names are free: its files in the domain are removed next.
    Died(MemberInfo),
}

impl Change {
    /// The member that changed.
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

/// The member's name in an endpoint's name, if the endpoint is a member's.
fn member_name(endpoint: &EndpointName) -> Option<&str> {
    endpoint.as_str().strip_prefix(FOLDER)
}

fn is_role(role: &str) -> bool {
    role.len() <= ROLE_BYTES_MAX && !role.chars().any(char::is_control)
}

/// What a role may be, for people.
fn allowed_role() -> String {
    format!("up to {ROLE_BYTES_MAX} bytes without control characters")
}

impl Introduction {
    /// Checks that a peer's introduction is one that a member may send.
    fn check(self, name: &str) -> Result<Introduction> {
        let wrong = |field, found, allowed| Err(Error::protocol(name, field, found, allowed));
        if !is_role(&self.role) {
            let found = format!("{} bytes", self.role.len());
            return wrong("role", found, allowed_role());
        }
        if self.author.pid <= 0 {
            return wrong("process id", self.author.pid.to_string(), "above 0".into());
        }
        Ok(self)
    }
}
