//! Services: a client sends requests, each with a deadline, and any server of the service answers.

use std::ffi::{c_char, c_void};

use warpipe::{Client, ClientOptions, Device, Server, ServerOptions, Stream};

use crate::arguments::{number, text, time, time_option, timeout};
use crate::call::{call, make_on};
use crate::{
    LoanKind, Submitted, device_options, domain_of, lend, make_lease, make_with, pass,
    warpipe_device, warpipe_domain, warpipe_job, warpipe_layout, warpipe_lease, warpipe_loan,
    warpipe_queue_state, warpipe_sample, warpipe_status,
};

/// Sends requests to the servers of a service. Any number of threads may use it. Closed, its
/// requests are withdrawn; replies that were taken stay usable.
pub struct warpipe_client(());

/// Answers the requests of all clients of a service, together with its other servers. One thread at
/// a time may use it; its leases may go to any thread. Closed, requests that it was sent and has
/// not accepted go to other servers; its leases can still be answered.
pub struct warpipe_server(());

/// Options of a client. Begin with `{.size = sizeof(warpipe_client_options)}`; a field that is 0
/// has its default.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_client_options {
    /// `sizeof(warpipe_client_options)`.
    pub size: usize,
    /// The domain of the service; the environment's by default.
    pub domain: *const warpipe_domain,
    /// The device that holds the requests; the first GPU by default, else the host.
    pub device: *const warpipe_device,
    /// The most requests without a reply; 1,048,576 by default.
    pub limit: usize,
    /// How many attempts at a request may fail before it is dead-lettered; 3 by default.
    pub max_attempts: u32,
    /// How many requests a server may hold at once: 1 to 256; 2 by default.
    pub prefetch: u32,
    /// How long a server may hold requests without answering any, in nanoseconds: then they go to
    /// another server. By default its death is waited for.
    pub lease_timeout_ns: u64,
    /// The most device memory that requests may take, in bytes; 4 GiB by default.
    pub memory_limit: u64,
    /// How long a loan waits for memory that is in use, in nanoseconds; 5 s by default.
    pub loan_timeout_ns: u64,
    /// How long a wait polls before it sleeps, in nanoseconds; up to 20 us by default.
    pub spin_ns: u64,
}

device_options!(warpipe_client_options);

/// Options of a server. Begin with `{.size = sizeof(warpipe_server_options)}`; a field that is 0
/// has its default.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_server_options {
    /// `sizeof(warpipe_server_options)`.
    pub size: usize,
    /// The domain of the service; the environment's by default.
    pub domain: *const warpipe_domain,
    /// The device to work with, which holds the replies; the first GPU by default, else the host.
    pub device: *const warpipe_device,
    /// The most clients at once; 256 by default. Each takes four descriptors.
    pub clients_max: usize,
    /// The most device memory that the replies to one client may take, in bytes; 4 GiB by default.
    pub memory_limit: u64,
    /// How long a client may take to accept this server, in nanoseconds; 5 s by default.
    pub handshake_timeout_ns: u64,
    /// How long a reply waits for its client to release earlier ones, and a loan for memory, in
    /// nanoseconds; 10 s by default.
    pub answer_timeout_ns: u64,
    /// How long a wait polls before it sleeps, in nanoseconds; up to 20 us by default.
    pub spin_ns: u64,
}

device_options!(warpipe_server_options);

/// Makes a client of `service` (a name as a publisher's, of at most 40 bytes). No server needs to
/// exist yet. `options` may be null.
///
/// `*client` is the caller's, to be closed by `warpipe_close`.
///
/// `WARPIPE_INVALID_INPUT`; `WARPIPE_SYSTEM`; `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `service` is a text, `options` null or the address of options, `client` that of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_client_create(
    service: *const c_char,
    options: *const warpipe_client_options,
    client: *mut *mut warpipe_client,
) -> warpipe_status {
    let build = |options: &warpipe_client_options, device: &Device| {
        // SAFETY: the caller's promise.
        let service = unsafe { text("service", service) }?;
        let default = ClientOptions::default();
        let options = ClientOptions {
            domain: domain_of(options.domain)?,
            device: Some(device.clone()),
            memory_limit: number(options.memory_limit, default.memory_limit),
            spin: time(options.spin_ns, default.spin),
            prefetch: number(options.prefetch, default.prefetch),
            max_attempts: number(options.max_attempts, default.max_attempts),
            lease_timeout: time_option(options.lease_timeout_ns),
            limit: number(options.limit, default.limit),
            loan_timeout: time(options.loan_timeout_ns, default.loan_timeout),
        };
        Ok(Client::new(service, options)?)
    };
    // SAFETY: the caller's promises.
    unsafe { make_with("client", client, options, build) }
}

/// Lends memory for a request, a tensor of this layout, with undefined contents.
///
/// `*loan` is the caller's, to be closed by `warpipe_client_request` or
/// `warpipe_loan_discard`.
///
/// `WARPIPE_LIMIT_REACHED` when the memory limit is in use for longer than the loan's timeout, or
/// the device is full.
///
/// # Safety
/// `layout` is the address of a layout, `loan` that of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_client_loan(
    client: *const warpipe_client,
    layout: *const warpipe_layout,
    loan: *mut *mut warpipe_loan,
) -> warpipe_status {
    // SAFETY: the caller's promises.
    unsafe { lend(client, layout, loan, Client::loan, LoanKind::Job) }
}

/// Sends a loan of this client as a request, behind the work enqueued on `stream` so far. The reply
/// is wanted within `deadline_ns` nanoseconds from now; no server begins the request later, and
/// waits for its reply end then.
///
/// `*request` is the caller's, to be closed by `warpipe_close`: `warpipe_job_wait` gives the reply.
///
/// Closes `loan` when it succeeds, and also when the driver fails after a server has seen the
/// request (`WARPIPE_DEVICE_FAILED`). Else the loan stays the caller's: `WARPIPE_LIMIT_REACHED`
/// when there is no room until the deadline; `WARPIPE_INVALID_INPUT` for a loan of another client
/// or a stream of another device; `WARPIPE_INVALID_STATE` for a publisher's loan, or a stream that
/// is being captured.
///
/// # Safety
/// `stream` is a stream of the client's device, `request` the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_client_request(
    client: *const warpipe_client,
    loan: *mut warpipe_loan,
    stream: *mut c_void,
    deadline_ns: u64,
    request: *mut *mut warpipe_job,
) -> warpipe_status {
    let send = |client: &Client, stream: &Stream| {
        let deadline = timeout(deadline_ns);
        pass(loan, |loan| client.request(loan, stream, deadline)).map(Submitted::Request)
    };
    // SAFETY: the caller's promises.
    unsafe { make_on(client, stream, "request", request, send) }
}

/// Waits until `count` servers are attached. A server attaches to a new client while it is in
/// `warpipe_server_accept`.
///
/// `WARPIPE_TIMEOUT`.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_client_wait_for_servers(
    client: *const warpipe_client,
    count: usize,
    timeout_ns: u64,
) -> warpipe_status {
    let timeout = timeout(timeout_ns);
    call(client, |it| Ok(it.wait_for_servers(count, timeout)?))
}

/// Reads how many requests are in which state, and the process ids of at most `capacity` servers.
///
/// # Safety
/// `state` is the address of such a structure, `servers` that of `capacity` numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_client_get_state(
    client: *const warpipe_client,
    state: *mut warpipe_queue_state,
    servers: *mut i32,
    capacity: usize,
) -> warpipe_status {
    call(client, |client| {
        // SAFETY: the caller's promises.
        unsafe { warpipe_queue_state::put(&client.state()?, state, servers, capacity) }
    })
}

/// Makes a server of `service` (a name as a publisher's, of at most 40 bytes). No client needs to
/// exist yet. `options` may be null.
///
/// `*server` is the caller's, to be closed by `warpipe_close`.
///
/// `WARPIPE_INVALID_INPUT`; `WARPIPE_SYSTEM`; `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `service` is a text, `options` null or the address of options, `server` that of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_server_create(
    service: *const c_char,
    options: *const warpipe_server_options,
    server: *mut *mut warpipe_server,
) -> warpipe_status {
    let build = |options: &warpipe_server_options, device: &Device| {
        // SAFETY: the caller's promise.
        let service = unsafe { text("service", service) }?;
        let default = ServerOptions::default();
        let options = ServerOptions {
            domain: domain_of(options.domain)?,
            device: Some(device.clone()),
            memory_limit: number(options.memory_limit, default.memory_limit),
            spin: time(options.spin_ns, default.spin),
            handshake_timeout: time(options.handshake_timeout_ns, default.handshake_timeout),
            answer_timeout: time(options.answer_timeout_ns, default.answer_timeout),
            clients_max: number(options.clients_max, default.clients_max),
        };
        Ok(Server::new(service, options)?)
    };
    // SAFETY: the caller's promises.
    unsafe { make_with("server", server, options, build) }
}

/// Waits for the next request of any client, up to `timeout_ns` nanoseconds; 0 takes one that is
/// there. Clients are served in turn, and one that goes affects no other. `stream`, `*lease` and
/// `*input` are as for `warpipe_worker_lease`.
///
/// `WARPIPE_TIMEOUT`; `WARPIPE_SYSTEM` when the domain's directory cannot be read;
/// `WARPIPE_INVALID_STATE` for a stream that is being captured, or while another thread accepts;
/// `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `stream` is a stream of the server's device, `lease` and `input` addresses of pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_server_accept(
    server: *mut warpipe_server,
    stream: *mut c_void,
    timeout_ns: u64,
    lease: *mut *mut warpipe_lease,
    input: *mut *mut warpipe_sample,
) -> warpipe_status {
    let take = |server: &mut Server, stream: &Stream| server.accept(stream, timeout(timeout_ns));
    // SAFETY: the caller's promises.
    unsafe { make_lease(server, stream, lease, input, take) }
}
