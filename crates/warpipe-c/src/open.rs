//! The options with which an endpoint of another process is opened by its name.

use std::time::Duration;

use warpipe::{Domain, Opener};

use crate::arguments::{Options, time_option};
use crate::device::warpipe_device;
use crate::domain::{domain_of, warpipe_domain};
use crate::failure::Failure;
use crate::streams::Streams;

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

// SAFETY: numbers and pointers, which may be zero.
unsafe impl Options for warpipe_open_options {}

impl warpipe_open_options {
    pub(crate) fn wait(&self) -> Duration {
        time_option(self.wait_ns).unwrap_or_default()
    }
}

/// An opener with these options.
pub(crate) fn with_options<T>(
    opener: Opener<T>,
    options: &warpipe_open_options,
    streams: &Streams,
) -> Result<Opener<T>, Failure> {
    let domain: Option<Domain> = domain_of(options.domain)?;
    let opener = opener.device(streams.device());
    Ok(match &domain {
        Some(domain) => opener.domain(domain),
        None => opener,
    })
}
