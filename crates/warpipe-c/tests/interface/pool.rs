//! Pools and their blocks through the C interface.

use std::ffi::{CStr, CString};
use std::os::unix::fs::MetadataExt;

use crate::common::{Fixture, LONG, none};
use warpipe_c::*;

const MIB: u64 = 1 << 20;

fn pool(fixture: &Fixture, name: &CStr) -> *mut warpipe_pool {
    let options = options!(warpipe_pool_options {
        domain: fixture.domain,
        device: fixture.device,
        memory_limit: 4 * MIB,
    });
    get!(warpipe_pool_create(name.as_ptr(), &options))
}

fn client(fixture: &Fixture, name: &CStr) -> *mut warpipe_pool_client {
    let options = options!(warpipe_open_options {
        domain: fixture.domain,
        device: fixture.device,
    });
    get!(warpipe_pool_client_open(name.as_ptr(), &options))
}

fn lend(memory: *mut warpipe_memory, access: warpipe_access) -> CString {
    let (access, mut length) = (access as u32, 0);
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_memory_lend(memory, access, none(), 0, &mut length)
    );
    let mut ticket = vec![0; length + 1];
    ok!(warpipe_memory_lend(
        memory,
        access,
        ticket.as_mut_ptr(),
        ticket.len(),
        none()
    ));
    let bytes: Vec<u8> = ticket.iter().map(|&byte| byte as u8).collect();
    CString::from_vec_with_nul(bytes).expect("a text that ends where its length says")
}

fn stats(pool: *mut warpipe_pool) -> warpipe_pool_stats {
    get!(warpipe_pool_get_stats(pool))
}

fn read<const N: usize>(memory: *mut warpipe_memory) -> [u8; N] {
    let mut bytes = [0; N];
    let buffer = bytes.as_mut_ptr().cast();
    ok!(warpipe_memory_copy_to(memory, 0, buffer, N, LONG));
    bytes
}

#[test]
fn a_lent_block_is_opened_by_its_ticket_and_returns_when_both_are_freed() {
    let fixture = Fixture::new();
    let pool = pool(&fixture, c"scratch");
    let block = get!(warpipe_pool_allocate(pool, 4096, 0));
    let (data, length) = (b"block".as_ptr().cast(), 5);
    ok!(warpipe_memory_write(block, fixture.stream, 0, data, length));
    fixture.synchronize();
    let ticket = lend(block, warpipe_access::WARPIPE_ACCESS_READ);
    let lent = get!(warpipe_ticket_open(ticket.as_ptr(), fixture.device, 0));
    assert_eq!(&read::<5>(lent), b"block");
    for memory in [block, lent] {
        let info: warpipe_memory_info = get!(warpipe_memory_get_info(memory));
        assert_eq!((info.bytes, info.mapped_bytes), (4096, 0));
        assert_eq!(info.is_read_only, memory == lent);
        assert_eq!(
            info.name[..8].iter().map(|&c| c as u8).collect::<Vec<_>>(),
            b"scratch\0"
        );
        let mut fd = 0;
        fails!(
            WARPIPE_INVALID_STATE,
            warpipe_memory_export_fd(memory, &mut fd)
        );
    }
    let found = stats(pool);
    assert_eq!((found.in_use_bytes, found.lent_bytes), (4096, 4096));
    fails!(
        WARPIPE_INVALID_STATE,
        warpipe_memory_lend(lent, 0, none(), 0, none())
    );
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_memory_lend(block, 7, none(), 0, none())
    );
    ok!(warpipe_memory_free_on(lent, fixture.stream));
    fails!(
        WARPIPE_INVALID_OBJECT,
        warpipe_memory_free_on(lent, fixture.stream)
    );
    ok!(warpipe_memory_free_on(block, fixture.stream));
    fails!(WARPIPE_INVALID_OBJECT, warpipe_close(block));
    let mut late = none();
    fails!(
        WARPIPE_NOT_FOUND,
        warpipe_ticket_open(ticket.as_ptr(), fixture.device, 0, &mut late)
    );
    ok!(warpipe_close(pool));
}

#[test]
fn a_block_is_not_freed_on_a_stream_that_does_not_exist() {
    let fixture = Fixture::new();
    let pool = pool(&fixture, c"scratch");
    let block: *mut warpipe_memory = get!(warpipe_pool_allocate(pool, 4096, 0));
    let wrong = fixture.device.cast();
    fails!(WARPIPE_INVALID_INPUT, warpipe_memory_free_on(block, wrong));
    assert_eq!(stats(pool).in_use_bytes, 4096);
    ok!(warpipe_memory_free_on(block, fixture.stream));
    ok!(warpipe_close(pool));
    fails!(WARPIPE_INVALID_OBJECT, warpipe_close(pool));
    ok!(warpipe_close(none::<u8>()));
}

#[test]
fn a_client_allocates_until_the_limit_and_its_blocks_return() {
    let fixture = Fixture::new();
    let pool = pool(&fixture, c"scratch");
    let client = client(&fixture, c"scratch");
    let block: *mut warpipe_memory = get!(warpipe_pool_client_allocate(client, 3 * MIB, 0));
    assert_eq!(stats(pool).lent_bytes, 3 * MIB);
    let mut more = none();
    fails!(
        WARPIPE_LIMIT_REACHED,
        warpipe_pool_client_allocate(client, 3 * MIB, 0, &mut more)
    );
    fails!(
        WARPIPE_LIMIT_REACHED,
        warpipe_pool_allocate(pool, 5 * MIB, 0, &mut more)
    );
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_pool_client_allocate(client, 0, 0, &mut more)
    );
    assert!(more.is_null());
    ok!(warpipe_close(block));
    let again = get!(warpipe_pool_client_allocate(client, 3 * MIB, u64::MAX));
    ok!(warpipe_close(client));
    ok!(warpipe_close(pool));
    assert_eq!(
        read::<4>(again),
        [0; 4],
        "a block outlives its client and pool"
    );
    ok!(warpipe_close(again));
}

#[test]
fn a_users_quota_limits_its_blocks() {
    let fixture = Fixture::new();
    let uid = std::fs::metadata("/proc/self").expect("/proc").uid();
    let quota = warpipe_pool_quota {
        uid,
        blocks_max: 1,
        bytes_max: 0,
    };
    let options = options!(warpipe_pool_options {
        domain: fixture.domain,
        device: fixture.device,
        user_bytes_max: 2 * MIB,
        quotas: &quota,
        quotas_count: 1,
    });
    let pool = get!(warpipe_pool_create(c"scratch".as_ptr(), &options));
    let block: *mut warpipe_memory = get!(warpipe_pool_allocate_for(pool, uid, 4096, 0));
    let mut second = none();
    fails!(
        WARPIPE_LIMIT_REACHED,
        warpipe_pool_allocate_for(pool, uid, 4096, 0, &mut second)
    );
    let own: warpipe_pool_usage = get!(warpipe_pool_get_usage(pool, uid));
    assert_eq!((own.bytes, own.blocks), (4096, 1));
    assert_eq!((own.bytes_max, own.blocks_max), (0, 1));
    let other: warpipe_pool_usage = get!(warpipe_pool_get_usage(pool, uid + 1));
    assert_eq!((other.bytes, other.bytes_max), (0, 2 * MIB));
    assert_eq!((other.blocks, other.blocks_max), (0, 0));
    ok!(warpipe_close(block));
    ok!(warpipe_close(pool));
}

#[test]
fn options_of_no_size_and_arrays_at_null_are_refused() {
    let fixture = Fixture::new();
    let mut options = options!(warpipe_pool_options {
        domain: fixture.domain,
        device: fixture.device,
    });
    let mut pool = none();
    options.quotas_count = 1;
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_pool_create(c"scratch".as_ptr(), &options, &mut pool)
    );
    options.quotas_count = 0;
    options.size = 0;
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_pool_create(c"scratch".as_ptr(), &options, &mut pool)
    );
    options.size = size_of::<warpipe_pool_options>();
    (options.memory_limit, options.reserve) = (MIB, 2 * MIB);
    fails!(
        WARPIPE_LIMIT_REACHED,
        warpipe_pool_create(c"scratch".as_ptr(), &options, &mut pool)
    );
    assert!(pool.is_null());
    let mut opened = options!(warpipe_open_options {
        domain: fixture.domain,
        device: fixture.device,
    });
    let mut client = none();
    fails!(
        WARPIPE_NOT_FOUND,
        warpipe_pool_client_open(c"scratch".as_ptr(), &opened, &mut client)
    );
    opened.size = 1;
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_pool_client_open(c"scratch".as_ptr(), &opened, &mut client)
    );
    assert!(client.is_null());
}
