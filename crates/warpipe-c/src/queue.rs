//! Queues: jobs that one of any number of workers does, each once, and their results.

use std::ffi::{c_char, c_void};

use warpipe::{
    Device, Error, JobEnd, Queue, QueueOptions, QueueState, ResultOrder, Stream, SubmitError,
};

use crate::arguments::{
    choice, number, out, put_list, put_unless_null, text, time, time_option, timeout,
    timeout_unless_usual,
};
use crate::call::{call, make_on, make_optional};
use crate::{
    LoanKind, Result, Submitted, Unpassed, device_options, domain_of, handle, lend, make_with,
    pass, warpipe_device, warpipe_domain, warpipe_job, warpipe_layout, warpipe_loan,
    warpipe_sample, warpipe_status,
};

/// Hands jobs to worker processes, each to one, and gets each one's result once. A job that a
/// worker's death or failure leaves goes to another worker. Any number of threads may use it.
/// Closed, its jobs end without an outcome, and its workers get `WARPIPE_PEER_GONE`; results that
/// were taken stay usable, and a job's handle says `WARPIPE_INVALID_STATE`.
pub struct warpipe_queue(());

/// The order in which `warpipe_queue_next_result` gives results.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum warpipe_result_order {
    /// In the order of submission.
    WARPIPE_ORDER_SUBMISSION = 0,
    /// In the order of completion.
    WARPIPE_ORDER_COMPLETION = 1,
}

/// Options of a queue. Begin with `{.size = sizeof(warpipe_queue_options)}`; a field that is 0 has
/// its default.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_queue_options {
    /// `sizeof(warpipe_queue_options)`.
    pub size: usize,
    /// The domain of its name; the environment's by default.
    pub domain: *const warpipe_domain,
    /// The device that holds the inputs; the first GPU by default, else the host.
    pub device: *const warpipe_device,
    /// The most jobs that are pending or have an outcome not taken yet; 1,048,576 by default.
    pub limit: usize,
    /// How often a job is tried before it is dead-lettered; 3 by default.
    pub max_attempts: u32,
    /// How many jobs a worker may hold at once: 1 to 256; 2 by default.
    pub prefetch: u32,
    /// A `warpipe_result_order`; that of submission, by default.
    pub order: u32,
    /// The most workers at once; 256 by default.
    pub workers_max: u32,
    /// How long a worker may hold jobs without answering any, in nanoseconds: then they go to other
    /// workers, and its late answers do not count. By default its death is waited for.
    pub lease_timeout_ns: u64,
    /// The most device memory that inputs may take, in bytes; 4 GiB by default.
    pub memory_limit: u64,
    /// How long a worker may take to attach, in nanoseconds; 5 s by default.
    pub handshake_timeout_ns: u64,
    /// How long a submission waits for room, and a loan for memory, in nanoseconds; 5 s by default.
    pub submit_timeout_ns: u64,
    /// How long a wait polls before it sleeps, in nanoseconds; up to 20 us by default.
    pub spin_ns: u64,
}

device_options!(warpipe_queue_options);

/// The jobs and workers of a queue, or the requests and servers of a client, by their numbers.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_queue_state {
    /// Workers that can be given jobs.
    pub workers: usize,
    /// Jobs that no worker has leased.
    pub waiting: usize,
    /// Jobs that workers hold.
    pub leased: usize,
    /// Jobs with an outcome that was not taken.
    pub finished: usize,
}

impl warpipe_queue_state {
    /// Writes the state, and the process ids of as many workers as there are places.
    ///
    /// # Safety
    /// `state` is null or the address of such a structure, `workers` that of `capacity` numbers.
    pub(crate) unsafe fn put(
        found: &QueueState,
        state: *mut warpipe_queue_state,
        workers: *mut i32,
        capacity: usize,
    ) -> Result<()> {
        let (mut count, pids) = (0, found.workers.iter().copied());
        // SAFETY: the caller's promises.
        let state = unsafe {
            put_list(("workers", workers, capacity), &mut count, pids)?;
            out("state", state)?
        };
        state.put(warpipe_queue_state {
            workers: count,
            waiting: found.waiting,
            leased: found.leased,
            finished: found.finished,
        });
        Ok(())
    }
}

fn order_of(order: u32) -> Result<ResultOrder> {
    let orders = [ResultOrder::Submission, ResultOrder::Completion];
    choice("options->order", order, "a warpipe_result_order", &orders)
}

/// Makes a queue of `name` (as a publisher's), and begins to accept workers.
/// `options` may be null.
///
/// `*queue` is the caller's, to be closed by `warpipe_close`.
///
/// `WARPIPE_NAME_CONFLICT` when another process, or this one, has the name;
/// `WARPIPE_INVALID_INPUT`; `WARPIPE_SYSTEM`; `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `name` is a text, `options` null or the address of options, `queue` that of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_queue_create(
    name: *const c_char,
    options: *const warpipe_queue_options,
    queue: *mut *mut warpipe_queue,
) -> warpipe_status {
    let build = |options: &warpipe_queue_options, device: &Device| {
        // SAFETY: the caller's promise.
        let name = unsafe { text("name", name) }?;
        let default = QueueOptions::default();
        let options = QueueOptions {
            domain: domain_of(options.domain)?,
            device: Some(device.clone()),
            memory_limit: number(options.memory_limit, default.memory_limit),
            spin: time(options.spin_ns, default.spin),
            prefetch: number(options.prefetch, default.prefetch),
            max_attempts: number(options.max_attempts, default.max_attempts),
            lease_timeout: time_option(options.lease_timeout_ns),
            limit: number(options.limit, default.limit),
            order: order_of(options.order)?,
            submit_timeout: time(options.submit_timeout_ns, default.submit_timeout),
            handshake_timeout: time(options.handshake_timeout_ns, default.handshake_timeout),
            workers_max: number(options.workers_max, default.workers_max),
        };
        Ok(Queue::new(name, options)?)
    };
    // SAFETY: the caller's promises.
    unsafe { make_with("queue", queue, options, build) }
}

/// Lends memory for the input of a job, a tensor of this layout, with undefined contents.
///
/// `*loan` is the caller's, to be closed by `warpipe_queue_submit` or `warpipe_loan_discard`.
///
/// `WARPIPE_LIMIT_REACHED` when the memory limit is in use for longer than the submission's
/// timeout, or the device is full.
///
/// # Safety
/// `layout` is the address of a layout, `loan` that of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_queue_loan(
    queue: *const warpipe_queue,
    layout: *const warpipe_layout,
    loan: *mut *mut warpipe_loan,
) -> warpipe_status {
    // SAFETY: the caller's promises.
    unsafe { lend(queue, layout, loan, Queue::loan, LoanKind::Job) }
}

/// Submits a loan of this queue as a job, behind the work enqueued on `stream` so far. Waits up to
/// `timeout_ns` nanoseconds for room (`WARPIPE_USUAL_TIMEOUT`: as long as the queue's options say),
/// but neither for a worker nor for the device.
///
/// `*job` is the caller's, to be closed by `warpipe_close`. `job` may be null: then
/// `warpipe_queue_next_result` gives the result.
///
/// Closes `loan` when it succeeds, and also when the driver fails after a worker has seen the job
/// (`WARPIPE_DEVICE_FAILED`). Else the loan stays the caller's, to be submitted again or discarded:
/// `WARPIPE_LIMIT_REACHED` without room; `WARPIPE_TIMEOUT` while the driver blocks another thread's
/// submission; `WARPIPE_INVALID_INPUT` for a loan of another queue or a stream of another device;
/// `WARPIPE_INVALID_STATE` after `warpipe_queue_shutdown`, for a publisher's loan, or for a stream
/// that is being captured.
///
/// # Safety
/// `stream` is a stream of the queue's device; `job` is null or the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_queue_submit(
    queue: *const warpipe_queue,
    loan: *mut warpipe_loan,
    stream: *mut c_void,
    timeout_ns: u64,
    job: *mut *mut warpipe_job,
) -> warpipe_status {
    let submit = || {
        let queue = handle::find(queue)?;
        // SAFETY: the caller's promise.
        let stream = unsafe { queue.streams.get(stream) }?;
        let submitted = pass(loan, |loan| match timeout_unless_usual(timeout_ns) {
            Some(limit) => queue.submit_within(loan, &stream, limit),
            None => queue.submit(loan, &stream),
        })?;
        Ok(queue.beside(Submitted::Job(submitted)))
    };
    // SAFETY: the caller's promise.
    unsafe { make_optional(job, submit) }
}

impl From<SubmitError> for Unpassed {
    fn from(failed: SubmitError) -> Unpassed {
        Unpassed {
            failure: failed.error.into(),
            loan: failed.returned,
        }
    }
}

/// Waits for the next result, in the order of the queue's options, of a job that
/// `warpipe_job_wait` has not taken: up to `timeout_ns` nanoseconds; 0 takes one that is there. The
/// result is complete: work on `stream` may read it at once.
///
/// `*sample` is the caller's, to be closed by `warpipe_sample_finish`, `warpipe_sample_release` or
/// `warpipe_sample_release_on`. `*job`, which may be null, becomes the number of the result's job,
/// or of the job that failed, and 0 when there is neither.
///
/// `WARPIPE_JOB_FAILED`, once in the job's place: every attempt failed, or a worker rejected it;
/// `WARPIPE_TIMEOUT`, also when there is no job; `WARPIPE_INVALID_STATE`.
///
/// # Safety
/// `stream` is a stream of the queue's device, `sample` the address of a pointer; `job` is null or
/// the address of a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_queue_next_result(
    queue: *const warpipe_queue,
    stream: *mut c_void,
    timeout_ns: u64,
    sample: *mut *mut warpipe_sample,
    job: *mut u64,
) -> warpipe_status {
    let next_result = |queue: &Queue, stream: &Stream| {
        let result = queue.next_result(stream, timeout(timeout_ns));
        let found = result.as_ref().map_or_else(failed_job, |result| result.job);
        // SAFETY: the caller's promise.
        unsafe { put_unless_null(job, found) };
        Ok(result?.into())
    };
    // SAFETY: the caller's promises.
    unsafe {
        put_unless_null(job, 0);
        make_on(queue, stream, "sample", sample, next_result)
    }
}

/// The job of which an error is the outcome, or 0.
fn failed_job(error: &Error) -> u64 {
    match error {
        Error::Job { job, end, .. } if !matches!(end, JobEnd::Taken) => *job,
        _ => 0,
    }
}

/// Waits until `count` workers are attached.
///
/// `WARPIPE_TIMEOUT`.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_queue_wait_for_workers(
    queue: *const warpipe_queue,
    count: usize,
    timeout_ns: u64,
) -> warpipe_status {
    let timeout = timeout(timeout_ns);
    call(queue, |queue| Ok(queue.wait_for_workers(count, timeout)?))
}

/// Waits until every job has its outcome. The outcomes stay to be taken.
///
/// `WARPIPE_TIMEOUT`.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_queue_drain(
    queue: *const warpipe_queue,
    timeout_ns: u64,
) -> warpipe_status {
    call(queue, |queue| Ok(queue.drain(timeout(timeout_ns))?))
}

/// Takes no more jobs, and waits until every job has its outcome. Then, also after a timeout here,
/// the queue's name is free, and its workers get `WARPIPE_PEER_GONE`. The outcomes stay to be taken
/// until `warpipe_close`.
///
/// `WARPIPE_TIMEOUT`; the queue takes no more jobs all the same.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_queue_shutdown(
    queue: *const warpipe_queue,
    timeout_ns: u64,
) -> warpipe_status {
    call(queue, |queue| Ok(queue.shutdown(timeout(timeout_ns))?))
}

/// Reads how many jobs are in which state, and the process ids of at most `capacity` workers.
///
/// # Safety
/// `state` is the address of such a structure, `workers` that of `capacity` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_queue_get_state(
    queue: *const warpipe_queue,
    state: *mut warpipe_queue_state,
    workers: *mut i32,
    capacity: usize,
) -> warpipe_status {
    call(queue, |queue| {
        // SAFETY: the caller's promises.
        unsafe { warpipe_queue_state::put(&queue.state()?, state, workers, capacity) }
    })
}
