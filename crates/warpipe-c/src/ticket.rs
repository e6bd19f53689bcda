//! Tickets: texts that name memory to other processes; and memory that is published for them.

use std::ffi::c_char;

use warpipe::{Domain, Kind, LentBuffer, PublishOptions, Ticket};

use crate::arguments::{Options, admitted, options, put_text, text, timeout};
use crate::call::{call, make, make_of};
use crate::handle::{self, Found};
use crate::{
    Failure, MemoryKind, MemoryObject, Result, access_of, domain_of, owned, run, streams_of,
    warpipe_device, warpipe_domain, warpipe_memory, warpipe_status,
};

/// Memory under a name, which other processes open by a ticket. Any number of threads may use it.
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
    /// Users that are admitted beside this process's own; the domain's directory must admit them,
    /// too.
    pub allow_uids: *const u32,
    /// How many those are.
    pub allow_uids_count: usize,
    /// Groups that are admitted.
    pub allow_gids: *const u32,
    /// How many those are.
    pub allow_gids_count: usize,
}

// SAFETY: numbers and pointers, which may be zero.
unsafe impl Options for warpipe_publish_options {}

/// Publishes allocated memory under a name (1 to 80 bytes of `a-z A-Z 0-9 _ - .` in parts joined by
/// `/`), so that tickets of it can be opened. `options` may be null. The memory may be closed
/// before its publication.
///
/// `*published` is the caller's, to be closed by `warpipe_published_close`.
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
    let publish = |memory: &mut Found<MemoryObject>| {
        // SAFETY: the caller's promises.
        let (name, options) = unsafe { (text("name", name)?, self::options(options)?) };
        let access = access_of("options->access", options.access)?;
        memory.with(|memory, _| {
            // SAFETY: the caller's promise.
            let (allow_uids, allow_gids) = unsafe { admitted!(options) };
            let options = PublishOptions {
                domain: domain_of(options.domain)?,
                access,
                allow_uids,
                allow_gids,
            };
            Ok(owned(memory)?.publish(name, options)?)
        })
    };
    // SAFETY: the caller's promise.
    unsafe { make_of(memory, "published", published, publish) }
}

/// A ticket for all of the memory, valid until the publication is closed: a text of some hundred
/// letters, digits, colons and hyphens, to be sent in any way. It is no secret and gives no right:
/// the owner checks each client's credentials.
///
/// The text is written to `buffer` with a zero at its end. `*length` becomes its length without
/// that, also if the buffer is too short; `length` may be null.
///
/// `WARPIPE_INVALID_INPUT`: `capacity` is too small, or the domain's path is not UTF-8.
///
/// # Safety
/// `buffer` is the address of `capacity` bytes, `length` null or that of a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_published_get_ticket(
    published: *const warpipe_published,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> warpipe_status {
    call(published, |published| {
        // SAFETY: the caller's promises.
        unsafe { put_text(published.ticket(..)?, buffer, capacity, length) }
    })
}

/// As `warpipe_published_get_ticket`, for the `bytes` bytes from byte `offset` on. A process that
/// opens it reaches no other bytes through this library, but maps all of the memory.
///
/// `WARPIPE_INVALID_INPUT` also for a range that does not lie inside.
///
/// # Safety
/// As for `warpipe_published_get_ticket`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_published_get_ticket_of(
    published: *const warpipe_published,
    offset: u64,
    bytes: u64,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> warpipe_status {
    call(published, |published| {
        let end = offset.checked_add(bytes).ok_or_else(|| {
            let found = format!("{bytes} from {offset} on");
            Failure::argument("bytes", found, "a range of the memory")
        })?;
        let ticket = published.ticket(offset..end)?;
        // SAFETY: the caller's promises.
        unsafe { put_text(ticket, buffer, capacity, length) }
    })
}

/// Releases the name of published memory: no further process opens it, and those that have it open
/// keep it. Null is ignored.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_published_close(published: *mut warpipe_published) -> warpipe_status {
    run(|| handle::close(published))
}

/// A ticket by its text.
///
/// # Safety
/// As for [`text`].
unsafe fn parse(ticket: *const c_char) -> Result<Ticket> {
    // SAFETY: the caller's promise.
    Ok(unsafe { text("ticket", ticket) }?.parse()?)
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
        let domain = match domain_of(domain)? {
            Some(domain) => domain,
            None => Domain::from_environment()?,
        };
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
/// `*memory` is the caller's, to be closed by `warpipe_memory_close`. It stays valid when its owner
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
    let open = || {
        // SAFETY: the caller's promise.
        let ticket = unsafe { parse(ticket) }?;
        let (streams, wait) = (streams_of(device)?, timeout(timeout_ns));
        let opened = match ticket.info().kind {
            Kind::Pool => MemoryKind::Lent(LentBuffer::open(&ticket, streams.device(), wait)?),
            _ => MemoryKind::Shared(ticket.open(streams.device(), wait)?),
        };
        Ok(MemoryObject::of(opened, &streams))
    };
    // SAFETY: the caller's promise.
    unsafe { make("memory", memory, open) }
}

/// Writes a ticket to a file of mode 0600, in one piece (`rename(2)`): a reader finds all of it, or
/// the previous file.
///
/// `WARPIPE_INVALID_INPUT`: no ticket; `WARPIPE_SYSTEM`; `WARPIPE_LIMIT_REACHED`.
///
/// # Safety
/// `ticket` and `path` are texts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_ticket_write_file(
    ticket: *const c_char,
    path: *const c_char,
) -> warpipe_status {
    // SAFETY: the caller's promises.
    run(|| unsafe { Ok(parse(ticket)?.write_file(text("path", path)?)?) })
}

/// Reads a ticket from a file, and waits up to `timeout_ns` nanoseconds for the file to appear
/// (`inotify(7)`). Its directory must exist. The text is written as by
/// `warpipe_published_get_ticket`.
///
/// `WARPIPE_TIMEOUT`: there is no such file; `WARPIPE_INVALID_INPUT`: it holds no ticket, or
/// `capacity` is too small; `WARPIPE_SYSTEM`.
///
/// # Safety
/// `path` is a text, `buffer` the address of `capacity` bytes, `length` null or that of a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_ticket_read_file(
    path: *const c_char,
    timeout_ns: u64,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> warpipe_status {
    run(|| {
        // Also without a wait, an absent file is a timeout.
        let waited = timeout(timeout_ns.max(1));
        // SAFETY: the caller's promises.
        unsafe {
            let ticket = Ticket::read_file(text("path", path)?, waited)?;
            put_text(ticket, buffer, capacity, length)
        }
    })
}
