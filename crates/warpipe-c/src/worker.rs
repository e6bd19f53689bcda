//! Workers: they lease jobs of a queue.

use std::ffi::{c_char, c_void};

use warpipe::{Device, Stream, Worker, WorkerOptions};

use crate::arguments::{number, text, time, timeout};
use crate::{
    device_options, domain_of, make_lease, make_with, warpipe_device, warpipe_domain,
    warpipe_lease, warpipe_sample, warpipe_status,
};

/// Takes jobs of one queue. One thread at a time may use it; its leases may go to any thread.
/// Closed, jobs that it was given and has not leased go to other workers, at no cost of an attempt;
/// its leases can still be answered.
pub struct warpipe_worker(());

/// Options of a worker. Begin with `{.size = sizeof(warpipe_worker_options)}`; a field that is 0
/// has its default.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_worker_options {
    /// `sizeof(warpipe_worker_options)`.
    pub size: usize,
    /// The domain of the queue's name; the environment's by default.
    pub domain: *const warpipe_domain,
    /// The device to work with, which holds the results; the first GPU by default, else the host.
    pub device: *const warpipe_device,
    /// How long to wait for a queue of this name, in nanoseconds; by default not at all:
    /// `WARPIPE_NOT_FOUND`.
    pub wait_ns: u64,
    /// How long the queue may take to answer, in nanoseconds; 5 s by default.
    pub handshake_timeout_ns: u64,
    /// How long an answer waits for the queue's owner to release earlier results, and a loan for
    /// memory, in nanoseconds; 10 s by default.
    pub answer_timeout_ns: u64,
    /// The most device memory that results may take, in bytes; 4 GiB by default.
    pub memory_limit: u64,
    /// How long a wait polls before it sleeps, in nanoseconds; up to 20 us by default.
    pub spin_ns: u64,
}

device_options!(warpipe_worker_options);

/// Attaches to the queue of this name. `options` may be null.
///
/// `*worker` is the caller's, to be closed by `warpipe_close`.
///
/// `WARPIPE_NOT_FOUND` when there is none, after `wait_ns`; `WARPIPE_NAME_CONFLICT` when the name
/// is no queue's; `WARPIPE_REFUSED`; `WARPIPE_LIMIT_REACHED`; `WARPIPE_PROTOCOL` for another
/// version; `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `queue` is a text, `options` null or the address of options, `worker` that of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_worker_open(
    queue: *const c_char,
    options: *const warpipe_worker_options,
    worker: *mut *mut warpipe_worker,
) -> warpipe_status {
    let open = |options: &warpipe_worker_options, device: &Device| {
        // SAFETY: the caller's promise.
        let queue = unsafe { text("queue", queue) }?;
        let (default, wait) = (WorkerOptions::default(), timeout(options.wait_ns));
        let options = WorkerOptions {
            domain: domain_of(options.domain)?,
            device: Some(device.clone()),
            memory_limit: number(options.memory_limit, default.memory_limit),
            spin: time(options.spin_ns, default.spin),
            handshake_timeout: time(options.handshake_timeout_ns, default.handshake_timeout),
            answer_timeout: time(options.answer_timeout_ns, default.answer_timeout),
        };
        Ok(Worker::open(queue, options, wait)?)
    };
    // SAFETY: the caller's promises.
    unsafe { make_with("worker", worker, options, open) }
}

/// Waits for the next job, up to `timeout_ns` nanoseconds; 0 takes one that is there. `stream` will
/// wait, on the device, until the input is complete: kernels enqueued on it read complete data.
///
/// `*lease`, the answer, is the caller's, to be closed by `warpipe_lease_complete` and its like or
/// `warpipe_close`; so is `*input`, by `warpipe_sample_release_on` and its like, behind every
/// stream with work that reads it, before the answer or after.
///
/// `WARPIPE_TIMEOUT`; `WARPIPE_PEER_GONE` when the queue has: then a worker's loop is done;
/// `WARPIPE_LINK_CLOSED` when the queue, which lives, has ended this worker's link;
/// `WARPIPE_INVALID_STATE` for a stream that is being captured, or while another thread leases;
/// `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `stream` is a stream of the worker's device, `lease` and `input` addresses of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_worker_lease(
    worker: *mut warpipe_worker,
    stream: *mut c_void,
    timeout_ns: u64,
    lease: *mut *mut warpipe_lease,
    input: *mut *mut warpipe_sample,
) -> warpipe_status {
    let take = |worker: &mut Worker, stream: &Stream| worker.lease(stream, timeout(timeout_ns));
    // SAFETY: the caller's promises.
    unsafe { make_lease(worker, stream, lease, input, take) }
}
