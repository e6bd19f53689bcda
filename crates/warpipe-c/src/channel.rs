//! Channels: a publisher hands tensors to any number of subscribers.

use std::ffi::{c_char, c_void};
use std::time::Duration;

use warpipe::{
    Device, Layout, PeerState, Policy, Publisher, PublisherOptions, Stream, Subscriber,
    SubscriberOptions,
};

use crate::arguments::{
    choice, flag, number, put_list, put_unless_null, slice, text, time, time_option, timeout,
};
use crate::call::{call, call_on, get, make_beside};
use crate::handle::{self, Locked};
use crate::{
    Failure, HostCall, LoanKind, OnDevice, Result, device_options, domain_of, layout_of, lend,
    make_with, warpipe_allow, warpipe_device, warpipe_domain, warpipe_host_function,
    warpipe_layout, warpipe_loan, warpipe_published, warpipe_sample, warpipe_status,
};

/// Hands tensors in device memory to any number of subscribers. Any number of threads may use it.
/// Closed, it ends gracefully: subscribers still receive the samples that are complete, and loans
/// that were not sent can only be discarded.
pub struct warpipe_publisher(());

/// Receives the tensors of one publisher. One thread at a time may use it; its samples may go to
/// any thread. Samples that it has received outlive it.
pub struct warpipe_subscriber(());

/// The action when a subscriber holds as many samples as the publisher's depth.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum warpipe_policy {
    /// A send waits for room, then fails with `WARPIPE_TIMEOUT`, and no subscriber gets the sample.
    WARPIPE_POLICY_BLOCK = 0,
    /// The subscriber loses the oldest sample that it has not received yet.
    WARPIPE_POLICY_DROP_OLDEST = 1,
    /// The subscriber does not get this sample.
    WARPIPE_POLICY_DROP_NEWEST = 2,
    /// A send fails at once with `WARPIPE_LIMIT_REACHED`, and no subscriber gets the sample.
    WARPIPE_POLICY_FAIL = 3,
}

/// The state of a peer.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum warpipe_peer_state {
    /// There is no such peer now.
    WARPIPE_PEER_NONE = 0,
    /// It gives signs of life.
    WARPIPE_PEER_ALIVE = 1,
    /// It has given none for a while: it may be stopped.
    WARPIPE_PEER_STALLED = 2,
    /// It has said that it ends.
    WARPIPE_PEER_LEAVING = 3,
    /// Its socket has ended; its death is not proven yet.
    WARPIPE_PEER_SUSPECT = 4,
    /// Its death is proven.
    WARPIPE_PEER_DEAD = 5,
}

/// Options of a publisher. Begin with `{.size = sizeof(warpipe_publisher_options)}`; a field that
/// is 0 has its default.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_publisher_options {
    /// `sizeof(warpipe_publisher_options)`.
    pub size: usize,
    /// The domain of its name; the environment's by default.
    pub domain: *const warpipe_domain,
    /// The device that holds the samples; the first GPU by default, else the host.
    pub device: *const warpipe_device,
    /// How many samples each subscriber may have been given and not released: 1 to 4096; 16 by
    /// default.
    pub depth: u32,
    /// A `warpipe_policy`; to block, by default.
    pub policy: u32,
    /// With `WARPIPE_POLICY_BLOCK`, how long a send waits, in nanoseconds; 5 s by default.
    pub block_timeout_ns: u64,
    /// How many of the last samples a late subscriber gets first; none by default.
    pub history: u32,
    /// The most subscribers at once, of which half may be of one other user, and a quarter, or 64,
    /// in one other process; 256 by default.
    pub subscribers_max: u32,
    /// The most device memory that the samples may take, in bytes; 4 GiB by default.
    pub memory_limit: u64,
    /// How long a loan waits for memory that is in use, in nanoseconds; 5 s by default.
    pub loan_timeout_ns: u64,
    /// Silence after which a subscriber loses its link, in nanoseconds, at least 500 ms; never by
    /// default.
    pub evict_after_ns: u64,
    /// How long a subscriber may take to attach, in nanoseconds; 5 s by default.
    pub handshake_timeout_ns: u64,
    /// Other users that are admitted; none by default.
    pub allow: warpipe_allow,
    /// 1: samples say when they were sent and received; not by default.
    pub timestamps: u32,
}

device_options!(warpipe_publisher_options);

/// Options of a subscriber. Begin with `{.size = sizeof(warpipe_subscriber_options)}`; a field that
/// is 0 has its default.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_subscriber_options {
    /// `sizeof(warpipe_subscriber_options)`.
    pub size: usize,
    /// The domain of the publisher's name; the environment's by default.
    pub domain: *const warpipe_domain,
    /// The device to receive on; the first GPU by default, else the host.
    pub device: *const warpipe_device,
    /// How long to wait for a publisher of this name, in nanoseconds; by default not at all:
    /// `WARPIPE_NOT_FOUND`.
    pub wait_ns: u64,
    /// How long the publisher may take to answer, in nanoseconds; 5 s by default.
    pub handshake_timeout_ns: u64,
    /// How long after a publisher's suspected death what is not complete is given up, where a child
    /// of it keeps the proof back, in nanoseconds; 30 s by default.
    pub orphan_timeout_ns: u64,
    /// How long a wait polls before it sleeps, in nanoseconds; 20 us by default.
    pub spin_ns: u64,
    /// 1: attach to the next publisher of this name when one has gone; else receiving says
    /// `WARPIPE_PEER_GONE`.
    pub reconnect: u32,
}

device_options!(warpipe_subscriber_options);

/// A subscriber, as its publisher sees it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_subscriber_info {
    /// Its process id.
    pub pid: i32,
    /// Its effective user id.
    pub uid: u32,
    /// A `warpipe_peer_state`.
    pub state: u32,
    /// Samples that it was given and has not released.
    pub in_flight: u32,
    /// Nanoseconds since its last sign of life.
    pub silent_for_ns: u64,
    /// Samples that it did not get because of its policy.
    pub dropped: u64,
}

/// A publisher, as its subscriber sees it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_publisher_info {
    /// A `warpipe_peer_state`.
    pub state: u32,
    /// Its process id; 0 while there is none.
    pub pid: i32,
    /// Samples that the subscriber did not get because of the publisher's policy.
    pub dropped: u64,
}

pub(crate) fn state_of(state: PeerState) -> warpipe_peer_state {
    match state {
        PeerState::Alive => warpipe_peer_state::WARPIPE_PEER_ALIVE,
        PeerState::Leaving => warpipe_peer_state::WARPIPE_PEER_LEAVING,
        PeerState::Suspect => warpipe_peer_state::WARPIPE_PEER_SUSPECT,
        PeerState::Dead => warpipe_peer_state::WARPIPE_PEER_DEAD,
        _ => warpipe_peer_state::WARPIPE_PEER_STALLED,
    }
}

fn policy_of(options: &warpipe_publisher_options) -> Result<Policy> {
    let timeout = time(options.block_timeout_ns, Duration::from_secs(5));
    let block = Policy::Block { timeout };
    let policies = [block, Policy::DropOldest, Policy::DropNewest, Policy::Fail];
    let (name, allowed) = ("options->policy", "a warpipe_policy");
    choice(name, options.policy, allowed, &policies)
}

/// Makes a publisher of `name` (1 to 80 bytes of `a-z A-Z 0-9 _ - .` in parts joined by `/`), and
/// begins to listen. `options` may be null.
///
/// `*publisher` is the caller's, to be closed by `warpipe_close`.
///
/// `WARPIPE_NAME_CONFLICT` when another process, or this one, has the name;
/// `WARPIPE_INVALID_INPUT`; `WARPIPE_SYSTEM`; `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `name` is a text, `options` null or the address of options, `publisher` that of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_publisher_create(
    name: *const c_char,
    options: *const warpipe_publisher_options,
    publisher: *mut *mut warpipe_publisher,
) -> warpipe_status {
    let build = |options: &warpipe_publisher_options, device: &Device| {
        // SAFETY: the caller's promises.
        let (name, (allow_uids, allow_gids)) =
            unsafe { (text("name", name)?, options.allow.admitted()?) };
        let default = PublisherOptions::default();
        let options = PublisherOptions {
            domain: domain_of(options.domain)?,
            device: Some(device.clone()),
            memory_limit: number(options.memory_limit, default.memory_limit),
            depth: number(options.depth, default.depth),
            policy: policy_of(options)?,
            history: options.history,
            timestamps: options.timestamps != 0,
            loan_timeout: time(options.loan_timeout_ns, default.loan_timeout),
            evict_after: time_option(options.evict_after_ns),
            handshake_timeout: time(options.handshake_timeout_ns, default.handshake_timeout),
            subscribers_max: number(options.subscribers_max, default.subscribers_max),
            allow_uids,
            allow_gids,
            policy_of: None,
            forwards: None,
        };
        Ok(Publisher::new(name, options)?)
    };
    // SAFETY: the caller's promises.
    unsafe { make_with("publisher", publisher, options, build) }
}

/// Lends a slot for a tensor of this layout: memory of the publisher's device that no subscriber
/// reads, with undefined contents.
///
/// `*loan` is the caller's, to be closed by `warpipe_loan_send` or `warpipe_loan_discard`.
///
/// `WARPIPE_LIMIT_REACHED` when the memory limit is in use for longer than the loan's timeout, or
/// the device is full.
///
/// # Safety
/// `layout` is the address of a layout, `loan` that of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_publisher_loan(
    publisher: *const warpipe_publisher,
    layout: *const warpipe_layout,
    loan: *mut *mut warpipe_loan,
) -> warpipe_status {
    // SAFETY: the caller's promises.
    unsafe { lend(publisher, layout, loan, Publisher::loan, LoanKind::Sample) }
}

/// The owner of a tensor that is sent where it lies. Dropped, it calls the caller's function.
pub(crate) struct Owner(pub(crate) Option<HostCall>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(HostCall::call);
    }
}

/// Lends memory to be sent where it lies, without a copy, by `warpipe_loan_send`. Subscribers
/// receive it as any other sample.
///
/// With `memory` it is that published memory from byte `offset` on, with the access that the
/// publication gives; keep that as long as a subscriber may still receive the first sample in it.
/// Without, it is `layout.bytes` bytes at the device address `offset`, in memory of `cudaMalloc`
/// (`cuMemAlloc`): gone when this process is, and subscribers, of this user alone, can also write
/// it.
///
/// `release(argument)` is called once: when the loan is discarded, or no subscriber reads the
/// tensor any more, because each has released it or is dead; also if this call fails. Nothing
/// writes the tensor meanwhile. `release` may be null.
///
/// `WARPIPE_INVALID_INPUT` for bytes that do not lie in the memory, memory of another device or
/// domain than the publisher's, or other memory than `warpipe_legacy_export` takes; as
/// `warpipe_publisher_loan`.
///
/// # Safety
/// `release(argument)` may be called by any thread, and waits for nothing. Memory without a
/// publication stays allocated until then, and as long as a subscriber has it open: perhaps as long
/// as that is attached. The rest as for `warpipe_publisher_loan`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_publisher_loan_in(
    publisher: *const warpipe_publisher,
    memory: *const warpipe_published,
    offset: u64,
    layout: *const warpipe_layout,
    release: warpipe_host_function,
    argument: *mut c_void,
    loan: *mut *mut warpipe_loan,
) -> warpipe_status {
    // SAFETY: the caller's promise.
    let owner = Owner(unsafe { HostCall::new(release, argument) });
    let take = |publisher: &Publisher, layout: &Layout| {
        let Some(memory) = handle::find_optional(memory)? else {
            // SAFETY: the caller's promise.
            return Ok(unsafe { publisher.loan_at(offset, layout, owner) }?);
        };
        Ok::<_, Failure>(publisher.loan_in(&memory, offset, layout, owner)?)
    };
    // SAFETY: the caller's promises.
    unsafe { lend(publisher, layout, loan, take, LoanKind::Sample) }
}

/// Loans, copies from memory of the host and sends, in one call. `*sequence`, which may be null,
/// becomes the sample's number. The source may be reused when the call returns.
///
/// `layout` may be null: then the sample is a tensor of `bytes` bytes (`WARPIPE_UINT8`). Fails as
/// `warpipe_publisher_loan` and `warpipe_loan_send`.
///
/// # Safety
/// `data` is the address of `bytes` bytes; `stream` is a stream of the publisher's device; `layout`
/// is null or the address of a layout, `sequence` null or that of a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_publisher_send_host(
    publisher: *const warpipe_publisher,
    stream: *mut c_void,
    layout: *const warpipe_layout,
    data: *const c_void,
    bytes: usize,
    sequence: *mut u64,
) -> warpipe_status {
    let send = |publisher: &Publisher, stream: &Stream| {
        // SAFETY: the caller's promise.
        let data = unsafe { slice("data", data.cast::<u8>(), bytes) }?;
        let sent = if layout.is_null() {
            publisher.send_bytes(stream, data)?
        } else {
            // SAFETY: the caller's promise.
            publisher.send_slice(stream, &unsafe { layout_of(layout) }?, data)?
        };
        // SAFETY: the caller's promise.
        unsafe { put_unless_null(sequence, sent) };
        Ok(())
    };
    // SAFETY: the caller's promise.
    unsafe { call_on(publisher, stream, send) }
}

/// Waits until `count` subscribers are attached.
///
/// `WARPIPE_TIMEOUT`.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_publisher_wait_for_subscribers(
    publisher: *const warpipe_publisher,
    count: usize,
    timeout_ns: u64,
) -> warpipe_status {
    let timeout = timeout(timeout_ns);
    call(publisher, |it| Ok(it.wait_for_subscribers(count, timeout)?))
}

/// Lists the subscribers, at most `capacity` of them. `*count` becomes the number of all.
///
/// # Safety
/// `subscribers` is the address of `capacity` structures, `count` that of a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_publisher_list_subscribers(
    publisher: *const warpipe_publisher,
    subscribers: *mut warpipe_subscriber_info,
    capacity: usize,
    count: *mut usize,
) -> warpipe_status {
    call(publisher, |publisher| {
        let found = publisher.subscribers();
        let all = found.iter().map(|info| warpipe_subscriber_info {
            pid: info.pid,
            uid: info.uid,
            state: state_of(info.state) as u32,
            in_flight: info.in_flight,
            silent_for_ns: u64::try_from(info.silent_for.as_nanos()).unwrap_or(u64::MAX),
            dropped: info.dropped,
        });
        // SAFETY: the caller's promises.
        unsafe { put_list(("subscribers", subscribers, capacity), count, all) }
    })
}

/// Attaches to the publisher of this name. `options` may be null.
///
/// `*subscriber` is the caller's, to be closed by `warpipe_close`.
///
/// `WARPIPE_NOT_FOUND` when there is none, after `wait_ns`; `WARPIPE_REFUSED`;
/// `WARPIPE_LIMIT_REACHED`; `WARPIPE_PROTOCOL` for another version; `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `name` is a text, `options` null or the address of options, `subscriber` that of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_subscriber_open(
    name: *const c_char,
    options: *const warpipe_subscriber_options,
    subscriber: *mut *mut warpipe_subscriber,
) -> warpipe_status {
    let open = |options: &warpipe_subscriber_options, device: &Device| {
        // SAFETY: the caller's promise.
        let name = unsafe { text("name", name) }?;
        let (default, wait) = (SubscriberOptions::default(), timeout(options.wait_ns));
        let options = SubscriberOptions {
            domain: domain_of(options.domain)?,
            device: Some(device.clone()),
            reconnect: flag("options->reconnect", options.reconnect)?,
            spin: time(options.spin_ns, default.spin),
            handshake_timeout: time(options.handshake_timeout_ns, default.handshake_timeout),
            orphan_timeout: time(options.orphan_timeout_ns, default.orphan_timeout),
        };
        Ok(Subscriber::open(name, options, wait)?)
    };
    // SAFETY: the caller's promises.
    unsafe { make_with("subscriber", subscriber, options, open) }
}

/// Waits for the next sample, up to `timeout_ns` nanoseconds; 0 takes one that is there. `stream`
/// will wait, on the device, until the sample's data is complete: kernels enqueued on it read
/// complete data.
///
/// `*sample` is the caller's, to be closed by `warpipe_sample_finish`, `warpipe_sample_release` or
/// `warpipe_sample_release_on`.
///
/// `WARPIPE_TIMEOUT`; `WARPIPE_PEER_GONE` once every sample that the publisher completed was
/// received (not with `reconnect`); `WARPIPE_LINK_CLOSED`; `WARPIPE_INVALID_STATE` for a stream
/// that is being captured, or while another thread receives; `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `stream` is a stream of the subscriber's device, `sample` the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_subscriber_receive(
    subscriber: *mut warpipe_subscriber,
    stream: *mut c_void,
    timeout_ns: u64,
    sample: *mut *mut warpipe_sample,
) -> warpipe_status {
    let receive = |found: &mut Locked<OnDevice<Subscriber>>| {
        let OnDevice { object, streams } = &mut **found;
        // SAFETY: the caller's promise.
        let stream = unsafe { streams.get(stream) }?;
        Ok(object.receive(&stream, timeout(timeout_ns))?.into())
    };
    // SAFETY: the caller's promise.
    unsafe { make_beside(subscriber, "sample", sample, receive) }
}

/// Closes `previous`, and waits for the next sample with its stream, as
/// `warpipe_subscriber_receive`: in one call of the driver (`cuStreamBatchMemOp`) while both are
/// not complete. `previous` is released whatever the result, unless the call is refused before it
/// waits. It may be closed after any error: `WARPIPE_INVALID_OBJECT` says that it was.
///
/// # Safety
/// As for `warpipe_subscriber_receive`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_subscriber_receive_next(
    subscriber: *mut warpipe_subscriber,
    previous: *mut warpipe_sample,
    timeout_ns: u64,
    sample: *mut *mut warpipe_sample,
) -> warpipe_status {
    let receive = |found: &mut Locked<OnDevice<Subscriber>>| {
        let previous = handle::find(previous)?.take().object.sample;
        Ok(found.receive_next(previous, timeout(timeout_ns))?.into())
    };
    // SAFETY: the caller's promise.
    unsafe { make_beside(subscriber, "sample", sample, receive) }
}

/// A subscriber's publisher, and how much of it was missed.
///
/// # Safety
/// `info` is the address of such a structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_subscriber_get_info(
    subscriber: *const warpipe_subscriber,
    info: *mut warpipe_publisher_info,
) -> warpipe_status {
    let info_of = |subscriber: &Subscriber| {
        let publisher = subscriber.publisher();
        let none = warpipe_peer_state::WARPIPE_PEER_NONE;
        let (state, pid) = publisher.map_or((none, 0), |it| (state_of(it.state), it.pid));
        warpipe_publisher_info {
            state: state as u32,
            pid,
            dropped: subscriber.dropped(),
        }
    };
    // SAFETY: the caller's promise.
    unsafe { get(subscriber, "info", info, |it| info_of(it)) }
}
