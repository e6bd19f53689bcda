//! Tickets: texts that name memory to other processes; and memory that is published for them.

use std::ffi::c_char;

use warpipe::{Device, Domain, Kind, LentBuffer, PublishOptions, Ticket};

use crate::arguments::{Options, options, put_text, text, timeout};
use crate::call::{call, make};
use crate::{
    MemoryKind, access_of, domain_of, handle, make_memory_on, owned, run, warpipe_allow,
    warpipe_device, warpipe_domain, warpipe_memory, warpipe_status,
};

/// Memory under a name, which other processes open by a ticket. Any number of threads may use it.
/// Closed, it releases its name: no further process opens it, and those that have it open keep it.
pub struct warpipe_published(());

/// Options of `warpipe_memory_publish`. Begin with `{.size = sizeof(warpipe_publish_options)}`; a
/// field that is 0 has its default.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_publish_options {
    /// `sizeof(warpipe_publish_options)`.
    pub size: usize,
    /// The domain to publish in; the environment's by default.
    pub domain: *const warpipe_domain,
    /// How importers map the memory, a `warpipe_access`; for reading, by default.
    pub access: u32,
    /// Other users that are admitted; none by default.
    pub allow: warpipe_allow,
}

// SAFETY: numbers and pointers, which may be zero.
unsafe impl Options for warpipe_publish_options {}

/// Publishes allocated memory under a name (1 to 80 bytes of `a-z A-Z 0-9 _ - .` in parts joined by
/// `/`), so that tickets of it can be opened. `options` may be null. The memory may be closed
/// before its publication.
///
/// `*published` is the caller's, to be closed by `warpipe_close`.
///
/// `WARPIPE_INVALID_STATE` unless the memory is of `warpipe_memory_allocate`;
/// `WARPIPE_NAME_CONFLICT` when another process, or this one, has the name;
/// `WARPIPE_INVALID_INPUT`; `WARPIPE_SYSTEM`; `WARPIPE_LIMIT_REACHED`; `WARPIPE_DEVICE_FAILED`.
///
/// # Safety
/// `name` is a text, `options` null or the address of options, `published` that of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_memory_publish(
    memory: *const warpipe_memory,
    name: *const c_char,
    options: *const warpipe_publish_options,
    published: *mut *mut warpipe_published,
) -> warpipe_status {
    let publish = || {
        let memory = handle::find(memory)?;
        // SAFETY: the caller's promises.
        let (name, options) = unsafe { (text("name", name)?, self::options(options)?) };
        // SAFETY: the caller's promise.
        let (allow_uids, allow_gids) = unsafe { options.allow.admitted() }?;
        let options = PublishOptions {
            domain: domain_of(options.domain)?,
            access: access_of("options->access", options.access)?,
            allow_uids,
            allow_gids,
        };
        Ok(owned(&memory)?.publish(name, options)?)
    };
    // SAFETY: the caller's promise.
    unsafe { make("published", published, publish) }
}

/// A ticket for the `bytes` bytes from byte `offset` on, or for all of them from there where
/// `bytes` is 0, valid until the publication is closed: a text of some hundred letters, digits,
/// colons and hyphens, to be sent in any way. It is no secret and gives no right: the owner checks
/// each client's credentials. A process that opens it reaches no other bytes through this library,
/// but maps all of the memory.
///
/// The text is written to `buffer` with a zero at its end. `*length` becomes its length without
/// that, also if the buffer is too short; `length` may be null.
///
/// `WARPIPE_INVALID_INPUT`: a range that does not lie inside, `capacity` is too small, or the
/// domain's path is not UTF-8.
///
/// # Safety
/// `buffer` is the address of `capacity` bytes, `length` null or that of a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_published_get_ticket(
    published: *const warpipe_published,
    offset: u64,
    bytes: u64,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> warpipe_status {
    call(published, |published| {
        let ticket = match bytes {
            0 => published.ticket(offset..),
            _ => published.ticket(offset..offset.saturating_add(bytes)),
        };
        // SAFETY: the caller's promises.
        unsafe { put_text(ticket?, buffer, capacity, length) }
    })
}

/// A ticket for the memory that will be published under `name`, now or later, by any process of
/// this user. `domain` may be null. The text is written as by `warpipe_published_get_ticket`.
///
/// `WARPIPE_INVALID_INPUT`: no name, or `capacity` is too small; `WARPIPE_SYSTEM`.
///
/// # Safety
/// `name` is a text, `buffer` the address of `capacity` bytes, `length` null or that of a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_ticket_for(
    domain: *const warpipe_domain,
    name: *const c_char,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> warpipe_status {
    run(|| {
        let domain = domain_of(domain)?.map_or_else(Domain::from_environment, Ok)?;
        // SAFETY: the caller's promises.
        unsafe {
            let ticket = Ticket::to(&domain, text("name", name)?)?;
            put_text(ticket, buffer, capacity, length)
        }
    })
}

/// Opens the memory that a ticket names, published memory or a block of a pool, and maps it on the
/// device, once in a process. `device` may be null: the first GPU, else the host. Waits up to
/// `timeout_ns` nanoseconds for memory of `warpipe_ticket_for` that is not published yet. White
/// space around the text is ignored.
///
/// `*memory` is the caller's, to be closed by `warpipe_close`. It stays valid when its owner
/// closes it or dies; a block returns to its pool then.
///
/// `WARPIPE_NOT_FOUND`: not published yet, or the owner is gone or has released the memory;
/// `WARPIPE_INVALID_INPUT`: no ticket, or one of another machine; `WARPIPE_NAME_CONFLICT`:
/// something else has the name; `WARPIPE_REFUSED`; `WARPIPE_LIMIT_REACHED`; `WARPIPE_TIMEOUT` when
/// the owner does not answer; `WARPIPE_DEVICE_FAILED`, also when the device cannot reach the
/// memory's.
///
/// # Safety
/// `ticket` is a text, `memory` the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_ticket_open(
    ticket: *const c_char,
    device: *const warpipe_device,
    timeout_ns: u64,
    memory: *mut *mut warpipe_memory,
) -> warpipe_status {
    let open = |device: &Device| {
        // SAFETY: the caller's promise.
        let ticket: Ticket = unsafe { text("ticket", ticket) }?.parse()?;
        let wait = timeout(timeout_ns);
        Ok(match ticket.info().kind {
            Kind::Pool => MemoryKind::Lent(LentBuffer::open(&ticket, device, wait)?),
            _ => MemoryKind::Shared(ticket.open(device, wait)?),
        })
    };
    // SAFETY: the caller's promise.
    unsafe { make_memory_on(device, memory, open) }
}
