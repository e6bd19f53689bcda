//! The options with which an endpoint of another process is opened by its name.

use warpipe::{Device, OpenOptions};

use crate::device::{device_options, warpipe_device};
use crate::domain::{domain_of, warpipe_domain};
use crate::failure::Failure;

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

/// These options on a device.
pub(crate) fn open_options(
    options: &warpipe_open_options,
    device: &Device,
) -> Result<OpenOptions, Failure> {
    Ok(OpenOptions {
        domain: domain_of(options.domain)?,
        device: Some(device.clone()),
    })
}
