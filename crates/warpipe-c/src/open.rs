//! The options of endpoints that several kinds have: made for other processes, or opened by name.

use std::ffi::c_char;
use std::time::Duration;

use warpipe::{CreateOptions, Device, OpenOptions};

use crate::arguments::{slice, text, timeout};
use crate::handle::Handle;
use crate::{
    OnDevice, Result, device_options, domain_of, make_with, warpipe_device, warpipe_domain,
    warpipe_status,
};

/// The users and groups that an endpoint admits, beside this process's own user. The domain's
/// directory must admit them, too.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_allow {
    /// User ids.
    pub uids: *const u32,
    /// How many those are.
    pub uids_count: usize,
    /// Group ids.
    pub gids: *const u32,
    /// How many those are.
    pub gids_count: usize,
}

impl warpipe_allow {
    /// The users, and the groups.
    ///
    /// # Safety
    /// As for [`slice`], for both arrays.
    pub(crate) unsafe fn admitted(&self) -> Result<(Vec<u32>, Vec<u32>)> {
        // SAFETY: the caller's promise.
        let uids = unsafe { slice("options->allow.uids", self.uids, self.uids_count) }?;
        // SAFETY: the caller's promise.
        let gids = unsafe { slice("options->allow.gids", self.gids, self.gids_count) }?;
        Ok((uids.to_vec(), gids.to_vec()))
    }
}

/// Options of `warpipe_timeline_create`, `warpipe_event_create`, `warpipe_semaphore_create` and
/// `warpipe_allocation_server_create`. Begin with `{.size = sizeof(warpipe_create_options)}`; a
/// field that is 0 has its default.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_create_options {
    /// `sizeof(warpipe_create_options)`.
    pub size: usize,
    /// The domain in which other processes find it; the environment's by default.
    pub domain: *const warpipe_domain,
    /// The device of its streams; the first GPU by default, else the host.
    pub device: *const warpipe_device,
    /// Other users that are admitted; none by default. Each can write a semaphore's page: a wrong
    /// one can take permits that are not its own, and let in more than the maximum.
    pub allow: warpipe_allow,
}

device_options!(warpipe_create_options);

/// Makes an endpoint for other processes, with these options.
///
/// # Safety
/// As for [`make_with`]; the options name arrays of as many elements as they say.
pub(crate) unsafe fn create<P: Handle<Object = OnDevice<T>>, T>(
    said: &str,
    place: *mut *mut P,
    options: *const warpipe_create_options,
    create: impl FnOnce(CreateOptions) -> Result<T>,
) -> warpipe_status {
    let create = |options: &warpipe_create_options, device: &Device| {
        // SAFETY: the caller's promise.
        let (allow_uids, allow_gids) = unsafe { options.allow.admitted() }?;
        create(CreateOptions {
            domain: domain_of(options.domain)?,
            device: Some(device.clone()),
            allow_uids,
            allow_gids,
        })
    };
    // SAFETY: the caller's promises.
    unsafe { make_with(said, place, options, create) }
}

/// Options of `warpipe_timeline_open`, `warpipe_event_open`, `warpipe_semaphore_open`,
/// `warpipe_pool_client_open` and `warpipe_allocation_client_open`. Begin with
/// `{.size = sizeof(warpipe_open_options)}`; a field that is 0 has its default.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_open_options {
    /// `sizeof(warpipe_open_options)`.
    pub size: usize,
    /// The domain of its name; the environment's by default.
    pub domain: *const warpipe_domain,
    /// The device to use it on; the first GPU by default, else the host.
    pub device: *const warpipe_device,
    /// How long to wait for an endpoint of this name, in nanoseconds; by default not at all:
    /// `WARPIPE_NOT_FOUND`.
    pub wait_ns: u64,
}

device_options!(warpipe_open_options);

/// Opens an endpoint of another process by its name, with these options.
///
/// # Safety
/// As for [`make_with`] and [`text`].
pub(crate) unsafe fn open_named<P: Handle<Object = OnDevice<T>>, T>(
    said: &str,
    place: *mut *mut P,
    name: *const c_char,
    options: *const warpipe_open_options,
    open: impl FnOnce(&str, OpenOptions, Duration) -> warpipe::Result<T>,
) -> warpipe_status {
    let open = |options: &warpipe_open_options, device: &Device| {
        // SAFETY: the caller's promise.
        let name = unsafe { text("name", name) }?;
        let found_by = OpenOptions {
            domain: domain_of(options.domain)?,
            device: Some(device.clone()),
        };
        Ok(open(name, found_by, timeout(options.wait_ns))?)
    };
    // SAFETY: the caller's promises.
    unsafe { make_with(said, place, options, open) }
}
