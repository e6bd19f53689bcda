//! Memory that other code of this process has allocated, shared with other processes. **This module
//! is marked for unsafe**: it shares memory that the caller owns.

use std::ffi::{c_char, c_void};

use warpipe::{Access, AllocationClient, AllocationServer};

use crate::arguments::{out, text, timeout};
use crate::call::read;
use crate::{
    HostCall, MemoryKind, OnDevice, Owner, create, handle, make_memory_of, open_named, run,
    warpipe_create_options, warpipe_memory, warpipe_open_options, warpipe_status,
};

/// Shares memory that other code of this process has allocated. Any number of threads may use it.
/// Closed, it releases its name and its shares.
pub struct warpipe_allocation_server(());

/// Opens what an allocation server of another process shares. Any number of threads may use it.
/// What it has opened outlives it.
pub struct warpipe_allocation_client(());

/// Makes a server of `name` (1 to 80 bytes of `a-z A-Z 0-9 _ - .` in parts joined by `/`) for
/// memory of the options' device. `options` may be null.
///
/// `*server` is the caller's, to be closed by `warpipe_close`.
///
/// `WARPIPE_NAME_CONFLICT` when another process, or this one, has the name;
/// `WARPIPE_INVALID_INPUT`; `WARPIPE_SYSTEM`; `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `name` is a text, `options` null or the address of options, which name arrays of as many
/// elements as they say; `server` is the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_allocation_server_create(
    name: *const c_char,
    options: *const warpipe_create_options,
    server: *mut *mut warpipe_allocation_server,
) -> warpipe_status {
    let build = |options| {
        // SAFETY: the caller's promise.
        let name = unsafe { text("name", name) }?;
        Ok(AllocationServer::new(name, options)?)
    };
    // SAFETY: the caller's promises.
    unsafe { create("server", server, options, build) }
}

/// Shares `bytes` bytes at the device address `data`, complete behind the stream's work so far, for
/// reading and writing. `*number` is to be sent to one other process, which opens it once
/// (`warpipe_allocation_client_open_share`): for several, share it several times.
///
/// Memory of the virtual memory functions (`cuMemCreate`, `cuMemMap`), made to be exported by
/// descriptors as PyTorch's expandable segments are, comes as such, of all allocations in the
/// range; it stays valid when this process dies. Memory of `cudaMalloc` comes as a legacy handle.
///
/// `release` may be null. It is called once with `context`, on a thread of this library or in a
/// later call of this function, when the receiver has released the memory and its device is past
/// it, also after the server was closed; when the receiver is proven dead; of a share that is not
/// open, when it is withdrawn, or the server closed; and before the return of a call that fails.
///
/// `WARPIPE_INVALID_INPUT` for memory that cannot be exported, 0 bytes, a stream of another device,
/// or beyond 65,535 shares; `WARPIPE_INVALID_STATE` for a stream that is being captured;
/// `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// The memory stays allocated until `release` is called; any thread may call that. `stream` is a
/// stream of the server's device, `number` the address of a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_allocation_server_share(
    server: *const warpipe_allocation_server,
    stream: *mut c_void,
    data: u64,
    bytes: u64,
    release: Option<unsafe extern "C" fn(*mut c_void)>,
    context: *mut c_void,
    number: *mut u64,
) -> warpipe_status {
    // SAFETY: the caller's promise.
    let owner = Owner(unsafe { HostCall::new(release, context) });
    run(|| {
        // SAFETY: the caller's promise.
        let number = unsafe { out("number", number) }?;
        let found = handle::find(server)?;
        // SAFETY: the caller's promise.
        let stream = unsafe { found.streams.get(stream) }?;
        let (server, access) = (&found.object, Access::ReadWrite);
        // SAFETY: the caller's promise.
        number.put(unsafe { server.share(&stream, data, bytes, access, Box::new(owner)) }?);
        Ok(())
    })
}

/// Takes back a share that no process has opened. `*was_open` becomes whether one has, or the share
/// was over already: then nothing is done.
///
/// # Safety
/// `was_open` is the address of a `bool`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_allocation_server_withdraw(
    server: *const warpipe_allocation_server,
    number: u64,
    was_open: *mut bool,
) -> warpipe_status {
    let withdraw = |server: &OnDevice<AllocationServer>| server.withdraw(number).map(|done| !done);
    // SAFETY: the caller's promise.
    unsafe { read(server, "was_open", was_open, withdraw) }
}

/// Connects to the server of this name in another process, to open its shares. `options` may be
/// null.
///
/// `*client` is the caller's, to be closed by `warpipe_close`.
///
/// `WARPIPE_NOT_FOUND` when there is none, after `wait_ns`; `WARPIPE_REFUSED`, also for a device
/// that cannot reach its memory; `WARPIPE_NAME_CONFLICT` when something else has the name;
/// `WARPIPE_INVALID_INPUT`.
///
/// # Safety
/// `name` is a text, `options` null or the address of options, `client` that of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_allocation_client_open(
    name: *const c_char,
    options: *const warpipe_open_options,
    client: *mut *mut warpipe_allocation_client,
) -> warpipe_status {
    // SAFETY: the caller's promises.
    unsafe { open_named("client", client, name, options, AllocationClient::open) }
}

/// Opens a share, which is this process's from then on, and waits up to `timeout_ns` nanoseconds
/// until its contents are complete: one that is not opened in time can be opened again.
///
/// `*memory` is the caller's, to be closed by `warpipe_close`: its owner is told then, or when
/// this process has died.
///
/// `WARPIPE_NOT_FOUND` for a share that was opened already, or withdrawn; `WARPIPE_TIMEOUT`;
/// `WARPIPE_PEER_GONE`; `WARPIPE_LIMIT_REACHED`; `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `memory` is the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_allocation_client_open_share(
    client: *const warpipe_allocation_client,
    number: u64,
    timeout_ns: u64,
    memory: *mut *mut warpipe_memory,
) -> warpipe_status {
    let timeout = timeout(timeout_ns);
    let open = |client: &AllocationClient| client.open_share(number, timeout).map(MemoryKind::Lent);
    // SAFETY: the caller's promise.
    unsafe { make_memory_of(client, memory, open) }
}
