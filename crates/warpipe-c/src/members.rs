//! Members: the processes of a domain, with notice when one joins, stalls, leaves or dies.

use std::ffi::c_char;

use warpipe::{Change, Error, Member, MemberInfo, MemberOptions, Members, MembersOptions};

use crate::arguments::{Options, fixed, flag, options, put_list, text, text_or_null, timeout};
use crate::call::{call, make, read};
use crate::{Failure, domain_of, state_of, warpipe_allow, warpipe_domain, warpipe_status};

/// This process as a member of a domain. Any number of threads may use it. Closed, it leaves the
/// domain.
pub struct warpipe_member(());

/// The members of a domain, followed until this is closed. Any number of threads may use it.
pub struct warpipe_members(());

/// The most bytes of a member's role, without the zero at its end.
pub const WARPIPE_ROLE_BYTES_MAX: usize = 64;

/// Options of `warpipe_member_create`. Begin with `{.size = sizeof(warpipe_member_options)}`; a
/// field that is 0 has its default.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_member_options {
    /// `sizeof(warpipe_member_options)`.
    pub size: usize,
    /// The domain to join; the environment's by default.
    pub domain: *const warpipe_domain,
    /// Tells people and programs the purpose of the process: up to `WARPIPE_ROLE_BYTES_MAX` bytes
    /// without control characters; empty by default.
    pub role: *const c_char,
    /// Other users that are admitted; none by default.
    pub allow: warpipe_allow,
}

// SAFETY: numbers and pointers, which may be zero.
unsafe impl Options for warpipe_member_options {}

/// Options of `warpipe_members_open`. Begin with `{.size = sizeof(warpipe_members_options)}`; a
/// field that is 0 has its default.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_members_options {
    /// `sizeof(warpipe_members_options)`.
    pub size: usize,
    /// The domain to watch; the environment's by default.
    pub domain: *const warpipe_domain,
    /// 1 to leave the files of dead members' endpoints in the domain. By default they are removed,
    /// each under its lock, so that no living process loses one.
    pub keeps_files: u32,
}

// SAFETY: numbers and pointers, which may be zero.
unsafe impl Options for warpipe_members_options {}

/// A member of a domain.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_member_info {
    /// The name that it joined under.
    pub name: [c_char; 81],
    /// The role that it declares; empty while it has not answered yet.
    pub role: [c_char; 65],
    /// Its process id, from the kernel; 0 if this PID namespace does not contain it.
    pub pid: i32,
    /// Its user id, from the kernel.
    pub uid: u32,
    /// A `warpipe_peer_state`. In a change, `WARPIPE_PEER_LEAVING` says that it has left.
    pub state: u32,
    /// Nanoseconds since its last sign of life.
    pub silent_for_ns: u64,
    /// When it joined, by its own account, in nanoseconds of `CLOCK_MONOTONIC`; 0 before it has
    /// answered.
    pub since_ns: u64,
    /// This incarnation: each join under the name has another one. Zeros before it has answered.
    pub generation: [u8; 16],
}

/// The kinds of changes of a member's state.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum warpipe_change_kind {
    /// A change that this version does not know.
    WARPIPE_CHANGE_OTHER = 0,
    /// It has joined. The members that were present when the watch began come first.
    WARPIPE_CHANGE_JOINED = 1,
    /// Its signs of life have stopped for a second. It may recover at any moment.
    WARPIPE_CHANGE_STALLED = 2,
    /// It gives signs of life again.
    WARPIPE_CHANGE_RECOVERED = 3,
    /// It has closed gracefully. Its process may be alive.
    WARPIPE_CHANGE_LEFT = 4,
    /// Its process is proven dead. Its names are free: its files in the domain are removed next.
    WARPIPE_CHANGE_DIED = 5,
}

/// A change of a member's state.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_change {
    /// A `warpipe_change_kind`.
    pub kind: u32,
    /// The member.
    pub member: warpipe_member_info,
}

impl warpipe_member_info {
    fn of(member: &MemberInfo) -> warpipe_member_info {
        warpipe_member_info {
            name: fixed(&member.name),
            role: fixed(&member.role),
            pid: member.pid,
            uid: member.uid,
            state: state_of(member.state) as u32,
            silent_for_ns: u64::try_from(member.silent_for.as_nanos()).unwrap_or(u64::MAX),
            since_ns: member.since_ns,
            generation: member.generation,
        }
    }
}

impl warpipe_change {
    fn of(change: &Change) -> warpipe_change {
        let kind = match change {
            Change::Joined(_) => warpipe_change_kind::WARPIPE_CHANGE_JOINED,
            Change::Stalled(_) => warpipe_change_kind::WARPIPE_CHANGE_STALLED,
            Change::Recovered(_) => warpipe_change_kind::WARPIPE_CHANGE_RECOVERED,
            Change::Left(_) => warpipe_change_kind::WARPIPE_CHANGE_LEFT,
            Change::Died(_) => warpipe_change_kind::WARPIPE_CHANGE_DIED,
            _ => warpipe_change_kind::WARPIPE_CHANGE_OTHER,
        };
        warpipe_change {
            kind: kind as u32,
            member: warpipe_member_info::of(change.member()),
        }
    }
}

/// Joins a domain under `name`, 1 to 72 bytes of `a-z A-Z 0-9 _ - .` in parts joined by `/`, until
/// the member is closed or the process ends. A process may be several members. `options` may be
/// null.
///
/// `*member` is the caller's, to be closed by `warpipe_close`.
///
/// `WARPIPE_NAME_CONFLICT` while a living process has the name; `WARPIPE_INVALID_INPUT`, also for
/// the role; `WARPIPE_SYSTEM`.
///
/// # Safety
/// `name` is a text, `options` null or the address of options. Their role is null or a text, and
/// they name arrays of as many elements as they say; `member` is the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_member_create(
    name: *const c_char,
    options: *const warpipe_member_options,
    member: *mut *mut warpipe_member,
) -> warpipe_status {
    let build = || {
        // SAFETY: the caller's promises.
        let (name, options) = unsafe { (text("name", name)?, self::options(options)?) };
        // SAFETY: the caller's promises.
        let (role, (allow_uids, allow_gids)) = unsafe {
            let role = text_or_null("options->role", options.role)?;
            (role.unwrap_or_default(), options.allow.admitted()?)
        };
        let options = MemberOptions {
            domain: domain_of(options.domain)?,
            role: role.to_string(),
            allow_uids,
            allow_gids,
        };
        Ok(Member::new(name, options)?)
    };
    // SAFETY: the caller's promise.
    unsafe { make("member", member, build) }
}

/// Watches the members of a domain (`inotify(7)`), on two threads of the library. Waits until the
/// present ones have answered, at most a second for those that do not. `options` may be null. A
/// watch is no member.
///
/// `*members` is the caller's, to be closed by `warpipe_close`.
///
/// `WARPIPE_SYSTEM`; `WARPIPE_LIMIT_REACHED` when there is no watch, thread or descriptor left.
///
/// # Safety
/// `options` is null or the address of options, `members` that of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_members_open(
    options: *const warpipe_members_options,
    members: *mut *mut warpipe_members,
) -> warpipe_status {
    let build = || {
        // SAFETY: the caller's promise.
        let options = unsafe { self::options(options) }?;
        Ok(Members::new(MembersOptions {
            domain: domain_of(options.domain)?,
            keep_files: flag("options->keeps_files", options.keeps_files)?,
        })?)
    };
    // SAFETY: the caller's promise.
    unsafe { make("members", members, build) }
}

/// Lists the present members, sorted by name: at most `capacity` of them. `*count` becomes the
/// number of all.
///
/// `WARPIPE_SYSTEM` when the directory cannot be read.
///
/// # Safety
/// `list` is the address of `capacity` structures, `count` that of a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_members_list(
    members: *const warpipe_members,
    list: *mut warpipe_member_info,
    capacity: usize,
    count: *mut usize,
) -> warpipe_status {
    call(members, |members| {
        let found = members.list()?;
        let all = found.iter().map(warpipe_member_info::of);
        // SAFETY: the caller's promises.
        unsafe { put_list(("list", list, capacity), count, all) }
    })
}

/// Takes the next change of a member's state, waited for at most `timeout_ns` nanoseconds; 0 takes
/// one that is there.
///
/// `WARPIPE_TIMEOUT`: there was none.
///
/// # Safety
/// `change` is the address of such a structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_members_next_change(
    members: *const warpipe_members,
    timeout_ns: u64,
    change: *mut warpipe_change,
) -> warpipe_status {
    let waited = timeout(timeout_ns);
    let next_change = |members: &Members| match members.changes(waited)? {
        Some(found) => Ok(warpipe_change::of(&found)),
        None => {
            let what = "a change of a member's state".into();
            Err(Failure::from(Error::Timeout { what, waited }))
        }
    };
    // SAFETY: the caller's promise.
    unsafe { read(members, "change", change, |members| next_change(members)) }
}
