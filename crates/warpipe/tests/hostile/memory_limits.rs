//! Files, memory and threads that run out: a typed error, no leak, and later success. **This module
//! is marked for unsafe**: it ignores a signal and changes a user.

use std::time::Duration;

use rustix::process::Resource;

use super::descriptors::set_soft;
use super::descriptors::{descriptors, settled_descriptors};
use super::stage::{Scratch, alone, assert_delivers};
use crate::{Device, Error, HandshakeFault, Layout, LimitFault, PublisherOptions};

#[test]
fn a_memfd_that_cannot_grow_is_an_error_of_the_loan_and_of_the_new_subscriber() {
    alone(
        module_path!(),
        "a_memfd_that_cannot_grow_is_an_error_of_the_loan_and_of_the_new_subscriber",
        || {
            // SAFETY: the process has no other test in it, and nothing here relies on the signal.
            unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
            let scratch = Scratch::new();
            let publisher = scratch.publisher(|it| it);
            assert_delivers(&publisher, &mut scratch.subscriber(), b"before");
            let (before, held) = (settled_descriptors(), Device::host().backend().bytes_held());
            set_soft(Resource::Fsize, Some(4096));
            let large = Layout::bytes_only(64 << 20).unwrap();
            let loan = publisher.loan(&large).map(drop).unwrap_err();
            let newcomer = scratch.try_subscriber().map(drop).unwrap_err();
            set_soft(Resource::Fsize, None);
            assert!(
                matches!(
                    loan,
                    Error::Os {
                        call: "ftruncate",
                        ..
                    }
                ),
                "{loan}"
            );
            assert!(
                matches!(&newcomer, Error::Handshake { fault: HandshakeFault::Refused(why), .. } if why.contains("ftruncate")),
                "{newcomer}"
            );
            super::stage::eventually("nothing is left", || descriptors() <= before);
            assert_eq!(Device::host().backend().bytes_held(), held);
            publisher.loan(&large).map(drop).unwrap();
            assert_delivers(&publisher, &mut scratch.subscriber(), b"afterwards");
        },
    );
}

#[test]
fn an_address_space_that_is_full_is_an_error_of_the_loan_alone() {
    alone(
        module_path!(),
        "an_address_space_that_is_full_is_an_error_of_the_loan_alone",
        || {
            let scratch = Scratch::new();
            let publisher = scratch.publisher(|it| it);
            let mut subscriber = scratch.subscriber();
            assert_delivers(&publisher, &mut subscriber, b"before");
            let (before, held) = (settled_descriptors(), Device::host().backend().bytes_held());
            let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
            let used = pages.split(' ').next().unwrap().parse::<u64>().unwrap() * 4096;
            set_soft(Resource::As, Some(used + (256 << 20)));
            let large = Layout::bytes_only(1 << 30).unwrap();
            let loan = publisher.loan(&large).map(drop).unwrap_err();
            set_soft(Resource::As, None);
            assert!(matches!(loan, Error::Os { call: "mmap", .. }), "{loan}");
            assert_eq!(
                (settled_descriptors(), Device::host().backend().bytes_held()),
                (before, held)
            );
            assert_delivers(&publisher, &mut subscriber, b"afterwards");
            publisher.loan(&large).map(drop).unwrap();
        },
    );
}

#[test]
fn memory_beyond_the_machine_or_the_limit_is_refused_and_the_rest_still_works() {
    let scratch = Scratch::new();
    let machine = Device::host().info().memory_bytes;
    let publisher = scratch.publisher(|it| PublisherOptions {
        memory_limit: u64::MAX,
        ..it
    });
    let loan = publisher
        .loan(&Layout::bytes_only(machine + 1).unwrap())
        .map(drop)
        .unwrap_err();
    assert!(
        matches!(loan, Error::Limit(LimitFault::Device { bytes, .. }) if bytes > machine),
        "{loan}"
    );
    let loan = publisher
        .loan(&Layout::bytes_only(i64::MAX as u64).unwrap())
        .map(drop)
        .unwrap_err();
    assert!(
        matches!(
            loan,
            Error::Limit(LimitFault::Device { .. }) | Error::Limit(LimitFault::Memory { .. })
        ),
        "{loan}"
    );
    assert_eq!(publisher.stats().unwrap().memory_bytes, 0);
    assert_delivers(&publisher, &mut scratch.subscriber(), b"afterwards");
    drop(publisher);

    let publisher = scratch.publisher(|it| PublisherOptions {
        memory_limit: 4 << 20,
        loan_timeout: Duration::from_millis(20),
        ..it
    });
    let small = Layout::bytes_only(1 << 20).unwrap();
    let loans: Vec<_> = (0..4).map(|_| publisher.loan(&small).unwrap()).collect();
    let error = publisher.loan(&small).map(drop).unwrap_err();
    assert!(
        matches!(error, Error::Limit(LimitFault::Memory { bytes, used, limit, .. }) if (bytes, used, limit) == (1 << 20, 4 << 20, 4 << 20))
    );
    let error = publisher
        .loan(&Layout::bytes_only((4 << 20) + 1).unwrap())
        .map(drop)
        .unwrap_err();
    assert!(
        matches!(error, Error::Limit(LimitFault::Memory { .. })),
        "{error}"
    );
    drop(loans);
    assert_delivers(&publisher, &mut scratch.subscriber(), b"released");
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[test]
fn a_reactor_that_finds_no_thread_leaves_nothing_and_can_be_started_later() {
    alone(
        module_path!(),
        "a_reactor_that_finds_no_thread_leaves_nothing_and_can_be_started_later",
        || {
            const LIMITED: u32 = 61_235;
            if !rustix::process::geteuid().is_root() {
                return println!("skipped: the limit is of users who are not root");
            }
            // SAFETY: plain system calls; this process has one test and no other thread that
            // depends on the user.
            let answer = unsafe { [libc::setgid(LIMITED), libc::setuid(LIMITED)] };
            assert_eq!(answer, [0, 0]);
            let (before, mut failures) = ((threads(), settled_descriptors()), 0);
            for spare in 0..10 {
                set_soft(Resource::Nproc, Some((before.0 + spare) as u64));
                let started = crate::runtime::reactor::Reactor::of_process();
                set_soft(Resource::Nproc, None);
                let Err(error) = started else { break };
                assert!(matches!(error, Error::Os { call: "clone", .. }), "{error}");
                failures += 1;
                super::stage::eventually("nothing is left", || {
                    (threads(), descriptors()) == before
                });
            }
            assert!((1..10).contains(&failures), "{failures} failures");
        },
    );
}
