//! Memory, its tickets and legacy handles through the C interface.

use std::ffi::{CStr, CString, c_char, c_void};
use std::fs::File;
use std::os::fd::FromRawFd;

use crate::common::{Fixture, LONG, Malloc, SHORT, none, text};
use warpipe_c::*;

/// Calls a function that fills a buffer with a text, first without room for it.
macro_rules! get_text {
    ($function:ident($($argument:expr),* $(,)?)) => {{
        let mut length = 0;
        fails!(WARPIPE_INVALID_INPUT, $function($($argument,)* none(), 0, &mut length));
        let mut buffer = vec![1; length + 1];
        fails!(
            WARPIPE_INVALID_INPUT,
            $function($($argument,)* buffer.as_mut_ptr(), length, none())
        );
        assert_eq!(buffer, vec![1; length + 1], "nothing is written where it has no room");
        ok!($function($($argument,)* buffer.as_mut_ptr(), length + 1, none()));
        text_of(&buffer)
    }};
}

fn text_of(buffer: &[c_char]) -> CString {
    let bytes: Vec<u8> = buffer.iter().map(|&byte| byte as u8).collect();
    CString::from_vec_with_nul(bytes).expect("a text that ends where its length says")
}

fn allocate(fixture: &Fixture, contents: &[u8]) -> *mut warpipe_memory {
    let memory = get!(warpipe_memory_allocate(fixture.device, 4096));
    write(fixture, memory, 0, contents);
    memory
}

fn write(fixture: &Fixture, memory: *mut warpipe_memory, offset: u64, bytes: &[u8]) {
    let (data, length) = (bytes.as_ptr().cast(), bytes.len());
    ok!(warpipe_memory_write(
        memory,
        fixture.stream,
        offset,
        data,
        length
    ));
}

fn read<const N: usize>(memory: *const warpipe_memory, offset: u64) -> [u8; N] {
    let mut bytes = [0; N];
    let buffer = bytes.as_mut_ptr().cast();
    ok!(warpipe_memory_copy_to(memory, offset, buffer, N, LONG));
    bytes
}

fn info(memory: *const warpipe_memory) -> warpipe_memory_info {
    get!(warpipe_memory_get_info(memory))
}

fn publish(
    fixture: &Fixture,
    memory: *mut warpipe_memory,
    name: &CStr,
    access: warpipe_access,
) -> *mut warpipe_published {
    let options = options!(warpipe_publish_options {
        domain: fixture.domain,
        access: access as u32,
    });
    get!(warpipe_memory_publish(memory, name.as_ptr(), &options))
}

#[test]
fn memory_is_written_and_read_in_parts() {
    let fixture = Fixture::new();
    let memory = allocate(&fixture, b"0123456789");
    let found = info(memory);
    assert_eq!(
        (found.bytes, found.is_cuda, found.is_read_only),
        (4096, false, false)
    );
    assert_ne!(found.data, 0);
    assert!(found.mapped_bytes >= 4096);
    assert_eq!((found.name[0], found.uuid), (0, [0; 16]));
    write(&fixture, memory, 4, b"xy");
    assert_eq!(&read::<10>(memory, 0), b"0123xy6789");
    assert_eq!(&read::<2>(memory, 5), b"y6");
    ok!(warpipe_memory_used_on(memory, fixture.stream));
    ok!(warpipe_close(memory));
    fails!(WARPIPE_INVALID_OBJECT, warpipe_close(memory));
    ok!(warpipe_close(none::<u8>()));
}

#[test]
fn a_range_beyond_the_memory_is_neither_written_nor_read() {
    let fixture = Fixture::new();
    let memory = allocate(&fixture, b"");
    let mut byte = 0_u8;
    for offset in [4096, u64::MAX] {
        let (data, buffer) = (b"x".as_ptr().cast(), (&raw mut byte).cast());
        fails!(
            WARPIPE_INVALID_INPUT,
            warpipe_memory_write(memory, fixture.stream, offset, data, 1)
        );
        fails!(
            WARPIPE_INVALID_INPUT,
            warpipe_memory_copy_to(memory, offset, buffer, 1, LONG)
        );
    }
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_memory_copy_to(memory, 0, none(), 1, LONG)
    );
    ok!(warpipe_memory_copy_to(memory, 4096, none(), 0, 0));
    ok!(warpipe_close(memory));
}

#[test]
fn memory_of_no_bytes_and_a_null_place_are_refused() {
    let fixture = Fixture::new();
    let mut memory = none();
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_memory_allocate(fixture.device, 0, &mut memory)
    );
    assert!(memory.is_null());
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_memory_allocate(fixture.device, 1, none())
    );
    let wrong = fails!(
        WARPIPE_INVALID_OBJECT,
        warpipe_memory_copy_to(fixture.device.cast(), 0, none(), 0, 0)
    );
    assert_eq!(wrong, "a warpipe_device was passed for a warpipe_memory");
}

#[test]
fn a_descriptor_is_the_callers_and_maps_the_memory_again() {
    let fixture = Fixture::new();
    let memory = allocate(&fixture, b"shared");
    let fd: i32 = get!(warpipe_memory_export_fd(memory));
    let (found, read_only) = (info(memory), warpipe_access::WARPIPE_ACCESS_READ as u32);
    fixture.synchronize();
    let imported: *mut warpipe_memory = get!(warpipe_memory_import_fd(
        fixture.device,
        fd,
        found.bytes,
        found.mapped_bytes,
        found.uuid.as_ptr(),
        read_only,
    ));
    // SAFETY: the call above gave the descriptor to this test.
    drop(unsafe { File::from_raw_fd(fd) });
    assert_eq!(&read::<6>(imported, 0), b"shared");
    assert!(info(imported).is_read_only);
    let data = b"x".as_ptr().cast();
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_memory_write(imported, fixture.stream, 0, data, 1)
    );
    let mut fd = 0;
    fails!(
        WARPIPE_INVALID_STATE,
        warpipe_memory_export_fd(imported, &mut fd)
    );
    assert_eq!(fd, -1);
    ok!(warpipe_close(imported));
    ok!(warpipe_close(memory));
}

#[test]
fn no_other_descriptor_is_imported() {
    let fixture = Fixture::new();
    let null_device = File::open("/dev/null").expect("/dev/null opens");
    let mut memory = none();
    let fds = [
        (-1, warpipe_status::WARPIPE_INVALID_INPUT),
        (
            std::os::fd::AsRawFd::as_raw_fd(&null_device),
            warpipe_status::WARPIPE_DEVICE_FAILED,
        ),
    ];
    for (fd, expected) in fds {
        let status = call!(warpipe_memory_import_fd(
            fixture.device,
            fd,
            4096,
            4096,
            none::<u8>(),
            0,
            &mut memory,
        ));
        assert_eq!(status, expected, "{}", crate::common::message());
    }
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_memory_import_fd(fixture.device, 0, 1, 1, none::<u8>(), 2, &mut memory)
    );
    assert!(memory.is_null());
}

#[test]
fn a_ticket_opens_published_memory_and_a_part_of_it() {
    let fixture = Fixture::new();
    let memory = allocate(&fixture, b"weights");
    let access = warpipe_access::WARPIPE_ACCESS_READ_WRITE;
    let published = publish(&fixture, memory, c"weights", access);
    fixture.synchronize();
    let ticket = get_text!(warpipe_published_get_ticket(published, 0, 0));
    let (device, timeout) = (fixture.device, 0);
    let opened = get!(warpipe_ticket_open(ticket.as_ptr(), device, timeout));
    let found = info(opened);
    assert_eq!((found.bytes, found.mapped_bytes), (4096, 0));
    assert!(!found.is_read_only);
    assert_eq!(&read::<7>(opened, 0), b"weights");
    let part = get_text!(warpipe_published_get_ticket(published, 2, 3));
    let part = get!(warpipe_ticket_open(part.as_ptr(), device, timeout));
    assert_eq!(info(part).bytes, 3);
    assert_eq!(&read::<3>(part, 0), b"igh");
    let mut length = 0;
    for (offset, bytes) in [(4000, 97), (u64::MAX, 1), (4097, 0)] {
        fails!(
            WARPIPE_INVALID_INPUT,
            warpipe_published_get_ticket(published, offset, bytes, none(), 0, &mut length)
        );
    }
    assert_eq!(length, 0, "no ticket was made");

    ok!(warpipe_close(memory));
    ok!(warpipe_close(published));
    fails!(WARPIPE_INVALID_OBJECT, warpipe_close(published));
    let mut late = none();
    fails!(
        WARPIPE_NOT_FOUND,
        warpipe_ticket_open(ticket.as_ptr(), device, LONG, &mut late)
    );
    assert_eq!(&read::<7>(opened, 0), b"weights", "it stays open");
    ok!(warpipe_close(part));
    ok!(warpipe_close(opened));
}

#[test]
fn a_ticket_for_a_name_waits_until_memory_is_published_there() {
    let fixture = Fixture::new();
    let ticket = get_text!(warpipe_ticket_for(fixture.domain, c"later".as_ptr()));
    let mut opened = none();
    for timeout in [0, SHORT] {
        fails!(
            WARPIPE_NOT_FOUND,
            warpipe_ticket_open(ticket.as_ptr(), fixture.device, timeout, &mut opened)
        );
    }
    let memory = allocate(&fixture, b"here");
    fixture.synchronize();
    let domain = crate::common::Shared::new(fixture.domain);
    let device = crate::common::Shared::new(fixture.device);
    std::thread::scope(|scope| {
        let opening = scope.spawn(|| {
            let opened = get!(warpipe_ticket_open(ticket.as_ptr(), device.get(), LONG));
            assert_eq!(&read::<4>(opened, 0), b"here");
            ok!(warpipe_close(opened));
        });
        let options = options!(warpipe_publish_options {
            domain: domain.get(),
        });
        let published = get!(warpipe_memory_publish(memory, c"later".as_ptr(), &options));
        opening.join().expect("the memory is opened");
        ok!(warpipe_close(published));
    });
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_ticket_for(fixture.domain, c"no name".as_ptr(), none(), 0, none())
    );
    ok!(warpipe_close(memory));
}

#[test]
fn a_garbled_ticket_or_handle_opens_nothing() {
    let fixture = Fixture::new();
    let memory = allocate(&fixture, b"");
    let published = publish(
        &fixture,
        memory,
        c"weights",
        warpipe_access::WARPIPE_ACCESS_READ,
    );
    let ticket = get_text!(warpipe_published_get_ticket(published, 0, 0));
    let ticket = ticket.to_str().expect("ASCII");
    let changed = format!("{}0", &ticket[..ticket.len() - 1]);
    let also_changed = format!("{}1", &ticket[..ticket.len() - 1]);
    let one = if changed == ticket {
        also_changed
    } else {
        changed
    };
    let mut opened = none();
    for garbled in ["", "ticket", &one, &ticket[1..], &"x".repeat(20_000)] {
        let garbled = text(garbled);
        let garbled = garbled.as_ptr();
        fails!(
            WARPIPE_INVALID_INPUT,
            warpipe_ticket_open(garbled, fixture.device, 0, &mut opened)
        );
        fails!(
            WARPIPE_INVALID_INPUT,
            warpipe_legacy_open(garbled, fixture.device, &mut opened)
        );
    }
    let not_utf8 = c"\xff\xfe";
    for wrong in [none::<c_char>().cast_const(), not_utf8.as_ptr()] {
        fails!(
            WARPIPE_INVALID_INPUT,
            warpipe_ticket_open(wrong, fixture.device, 0, &mut opened)
        );
    }
    assert!(opened.is_null());
    ok!(warpipe_close(published));
    ok!(warpipe_close(memory));
}

#[test]
fn publishing_refuses_options_of_no_size_or_of_a_newer_library() {
    #[repr(C)]
    struct Newer {
        known: warpipe_publish_options,
        newer: u64,
    }
    let fixture = Fixture::new();
    let memory = allocate(&fixture, b"");
    let mut published = none();
    let mut newer = Newer {
        known: options!(warpipe_publish_options {
            domain: fixture.domain,
        }),
        newer: 1,
    };
    newer.known.size = 0;
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_memory_publish(memory, c"w".as_ptr(), &newer.known, &mut published)
    );
    newer.known.size = size_of::<Newer>();
    fails!(
        WARPIPE_PROTOCOL,
        warpipe_memory_publish(
            memory,
            c"w".as_ptr(),
            (&raw const newer).cast(),
            &mut published
        )
    );
    assert!(published.is_null());
    newer.newer = 0;
    ok!(warpipe_memory_publish(
        memory,
        c"w".as_ptr(),
        (&raw const newer).cast(),
        &mut published
    ));
    let mut second = none();
    fails!(
        WARPIPE_NAME_CONFLICT,
        warpipe_memory_publish(memory, c"w".as_ptr(), &newer.known, &mut second)
    );
    newer.known.access = 2;
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_memory_publish(memory, c"v".as_ptr(), &newer.known, &mut second)
    );
    ok!(warpipe_close(published));
    ok!(warpipe_close(memory));
}

#[test]
fn a_legacy_handle_opens_the_memory_at_its_own_address() {
    let fixture = Fixture::new();
    let malloc = Malloc::new(4096);
    let device = fixture.device;
    let text = get_text!(warpipe_legacy_export(device, malloc.1 + 64, 256));
    let opened = get!(warpipe_legacy_open(text.as_ptr(), device));
    let found = info(opened);
    assert_eq!((found.data, found.bytes), (malloc.1 + 64, 256));
    assert!(!found.is_cuda && !found.is_read_only);
    ok!(warpipe_memory_used_on(opened, fixture.stream));
    let mut byte = 7_u8;
    let buffer = (&raw mut byte).cast::<c_void>();
    ok!(warpipe_memory_write(
        opened,
        fixture.stream,
        255,
        buffer.cast_const(),
        1
    ));
    byte = 0;
    ok!(warpipe_memory_copy_to(opened, 255, buffer, 1, LONG));
    assert_eq!(byte, 7);
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_memory_copy_to(opened, 256, buffer, 1, LONG)
    );
    ok!(warpipe_legacy_close(opened, LONG));
    fails!(WARPIPE_INVALID_OBJECT, warpipe_legacy_close(opened, LONG));

    let own = allocate(&fixture, b"");
    fails!(WARPIPE_INVALID_STATE, warpipe_legacy_close(own, LONG));
    fails!(
        WARPIPE_INVALID_STATE,
        warpipe_memory_free_on(own, fixture.stream)
    );
    let own_data = info(own).data;
    for (data, bytes) in [(0, 1), (malloc.1, 4097), (own_data, 1)] {
        fails!(
            WARPIPE_INVALID_INPUT,
            warpipe_legacy_export(device, data, bytes, none(), 0, none())
        );
    }
    fails!(
        WARPIPE_INVALID_OBJECT,
        warpipe_legacy_export(none(), malloc.1, 1, none(), 0, none())
    );
    ok!(warpipe_close(own));
}
