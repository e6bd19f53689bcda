//! Allocations of other code, shared through the C interface.

use std::ffi::c_void;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::common::{Fixture, LONG, none};
use warpipe_c::*;

const BYTES: u64 = 4096;
const FAR: u64 = 2 << 20;

static RELEASED: AtomicUsize = AtomicUsize::new(0);

extern "C" fn released(context: *mut c_void) {
    assert_eq!(context as usize, 7);
    RELEASED.fetch_add(1, Ordering::SeqCst);
}

fn until_released(count: usize) {
    let began = Instant::now();
    while RELEASED.load(Ordering::SeqCst) < count {
        assert!(began.elapsed().as_secs() < 60, "the owner is not told");
        std::thread::yield_now();
    }
}

#[test]
fn a_share_is_opened_once_and_its_owner_is_told_when_it_is_closed() {
    let fixture = Fixture::new();
    let memory = get!(warpipe_memory_allocate(fixture.device, FAR));
    let info: warpipe_memory_info = get!(warpipe_memory_get_info(memory));
    let (data, length) = (b"share".as_ptr().cast(), 5);
    ok!(warpipe_memory_write(
        memory,
        fixture.stream,
        512,
        data,
        length
    ));
    let name = c"others".as_ptr();
    let options = options!(warpipe_create_options {
        domain: fixture.domain,
        device: fixture.device,
    });
    let server = get!(warpipe_allocation_server_create(name, &options));
    let share = |at: u64, bytes: u64| {
        let (address, context) = (info.data + at, 7 as *mut c_void);
        let stream = fixture.stream;
        get!(warpipe_allocation_server_share(
            server,
            stream,
            address,
            bytes,
            Some(released),
            context
        ))
    };
    let options = options!(warpipe_open_options {
        domain: fixture.domain,
        device: fixture.device,
    });
    let client = get!(warpipe_allocation_client_open(name, &options));

    let number: u64 = share(512, BYTES);
    let opened = get!(warpipe_allocation_client_open_share(client, number, LONG));
    let seen: warpipe_memory_info = get!(warpipe_memory_get_info(opened));
    assert_eq!(seen.bytes, BYTES);
    let mut bytes = [0u8; 5];
    let buffer = bytes.as_mut_ptr().cast();
    ok!(warpipe_memory_copy_to(opened, 0, buffer, 5, LONG));
    assert_eq!(&bytes, b"share");
    let mut again = none();
    fails!(
        WARPIPE_NOT_FOUND,
        warpipe_allocation_client_open_share(client, number, LONG, &mut again)
    );
    assert!(get!(warpipe_allocation_server_withdraw(server, number)));
    assert_eq!(RELEASED.load(Ordering::SeqCst), 0);
    ok!(warpipe_close(opened));
    until_released(1);

    let withdrawn: u64 = share(0, BYTES);
    assert!(!get!(warpipe_allocation_server_withdraw(server, withdrawn)));
    until_released(2);
    fails!(
        WARPIPE_NOT_FOUND,
        warpipe_allocation_client_open_share(client, withdrawn, LONG, &mut again)
    );

    let mut refused = 0;
    let (context, stream) = (7 as *mut c_void, fixture.stream);
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_allocation_server_share(
            server,
            stream,
            1,
            BYTES,
            Some(released),
            context,
            &mut refused
        )
    );
    until_released(3);

    let (left, used): (u64, u64) = (share(0, BYTES), share(512, BYTES));
    let opened = get!(warpipe_allocation_client_open_share(client, used, LONG));
    ok!(warpipe_close(server));
    until_released(4);
    ok!(warpipe_memory_copy_to(opened, 0, buffer, 5, LONG));
    assert_eq!(RELEASED.load(Ordering::SeqCst), 4, "it is open");
    ok!(warpipe_close(opened));
    until_released(5);
    fails!(
        WARPIPE_PEER_GONE,
        warpipe_allocation_client_open_share(client, left, LONG, &mut again)
    );
    ok!(warpipe_close(client));
    ok!(warpipe_close(memory));
}
