//! The options with which an endpoint of another process is opened by its name.

use std::ffi::c_char;
use std::time::Duration;

use warpipe::{Device, OpenOptions};

use crate::arguments::{text, timeout};
use crate::handle::Handle;
use crate::{
    OnDevice, device_options, domain_of, make_with, warpipe_device, warpipe_domain, warpipe_status,
};

/// Options of `warpipe_timeline_open`, `warpipe_semaphore_open` and `warpipe_pool_client_open`.
/// Begin with `{.size = sizeof(warpipe_open_options)}`; a field that is 0 has its default.
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
