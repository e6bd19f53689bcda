//! Domains: the directories that hold the names of endpoints.

use std::ffi::c_char;

use warpipe::Domain;

use crate::arguments::{fixed, put_list, put_text, text, text_or_null};
use crate::call::{call, make};
use crate::{Result, handle, warpipe_status};

/// A directory of names. Endpoints meet by their name in one domain.
pub struct warpipe_domain(());

/// The most bytes of an endpoint's name, without the zero at its end.
pub const WARPIPE_NAME_BYTES_MAX: usize = 80;
const _: () = assert!(WARPIPE_NAME_BYTES_MAX == warpipe::NAME_BYTES_MAX);

/// An endpoint that `warpipe_domain_list` found.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_endpoint {
    /// Its name.
    pub name: [c_char; 81],
    /// The process that owns it; 0 for one that a dead process left, and -1 for a living owner
    /// of another PID namespace.
    pub pid: i32,
    /// What stands in the place of its files, if that is no endpoint's and keeps owners away: for
    /// example `a symlink`. Empty if nothing does.
    pub foreign: [c_char; 64],
}

/// The domain of an argument; of null, the environment's.
pub(crate) fn domain_of(domain: *const warpipe_domain) -> Result<Option<Domain>> {
    let found = handle::find_optional(domain)?;
    Ok(found.map(|domain| Domain::clone(&domain)))
}

/// Opens a domain: a directory of this user with mode 0700, which is made if it is missing. Null is
/// the environment's: `$WARPIPE_DOMAIN`, else `$XDG_RUNTIME_DIR/warpipe`, else
/// `/run/user/UID/warpipe`, else `/tmp/warpipe-UID`; it is also the one of every option that is
/// left null.
///
/// `*domain` is the caller's, to be closed by `warpipe_close`.
///
/// `WARPIPE_SYSTEM`: not such a directory.
///
/// # Safety
/// `path` is null or a text, `domain` the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_domain_open(
    path: *const c_char,
    domain: *mut *mut warpipe_domain,
) -> warpipe_status {
    // SAFETY: the caller's promise.
    let open = || match unsafe { text_or_null("path", path) }? {
        Some(path) => Ok(Domain::at(path)?),
        None => Ok(Domain::from_environment()?),
    };
    // SAFETY: the caller's promise.
    unsafe { make("domain", domain, open) }
}

/// Opens a domain of another user, with endpoints that may admit this one. Trusts that user's
/// names.
///
/// `*domain` is the caller's, to be closed by `warpipe_close`.
///
/// # Safety
/// `path` is a text, `domain` the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_domain_open_of_user(
    path: *const c_char,
    owner_uid: u32,
    domain: *mut *mut warpipe_domain,
) -> warpipe_status {
    // SAFETY: the caller's promise.
    let open = || Ok(Domain::of_user(unsafe { text("path", path) }?, owner_uid)?);
    // SAFETY: the caller's promise.
    unsafe { make("domain", domain, open) }
}

/// The path of a domain's directory, written to `buffer` with a zero at its end. `*length` becomes
/// its length without that, also if the buffer is too short; `length` may be null.
///
/// `WARPIPE_INVALID_INPUT`: `capacity` is too small.
///
/// # Safety
/// `buffer` is the address of `capacity` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_domain_get_path(
    domain: *const warpipe_domain,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> warpipe_status {
    call(domain, |domain| {
        let path = domain.path().to_string_lossy();
        // SAFETY: the caller's promises.
        unsafe { put_text(path, buffer, capacity, length) }
    })
}

/// Lists the endpoints of living and of dead processes, sorted by name: at most `capacity` of them.
/// `*count` becomes the number of all.
///
/// # Safety
/// `endpoints` is the address of `capacity` structures, `count` that of a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_domain_list(
    domain: *const warpipe_domain,
    endpoints: *mut warpipe_endpoint,
    capacity: usize,
    count: *mut usize,
) -> warpipe_status {
    call(domain, |domain| {
        let found = domain.endpoints()?;
        let all = found.iter().map(|endpoint| warpipe_endpoint {
            name: fixed(endpoint.name.as_str()),
            pid: (endpoint.holder.as_ref()).map_or(0, |holder| holder.pid.unwrap_or(-1)),
            foreign: fixed(endpoint.foreign.unwrap_or_default()),
        });
        // SAFETY: the caller's promises.
        unsafe { put_list(("endpoints", endpoints, capacity), count, all) }
    })
}
