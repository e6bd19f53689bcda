//! A buffer and its copies. Over the fake driver, or a GPU, these run on the CUDA backend. A test
//! that holds a stream up has a process of its own: the end of another test's buffer
//! (`cuMemHostUnregister`) waits for that stream, and the calls that would let it go on wait for
//! that end.

use std::sync::mpsc;

use super::*;
use crate::backend::testing::{Failing, Wrapped};
use crate::hostile::alone;
use crate::memory::Memory;

const WAIT: Duration = Duration::from_secs(60);

#[test]
fn a_buffer_is_not_given_out_before_the_device_has_copied_it() {
    let test = "a_buffer_is_not_given_out_before_the_device_has_copied_it";
    alone(module_path!(), test, || {
        let device = Device::preferred().device;
        let memory = Memory::allocate(&device, 2 * (BUFFERS * PAGE_BYTES) as u64).unwrap();
        let mut staging = Staging::new(&device, PAGE_BYTES).unwrap();
        let (go_on, wait) = mpsc::channel::<()>();
        let held_up = move || wait.recv().unwrap_or_default();
        staging.stream.call(held_up).unwrap();
        let place = |index: usize| (index * PAGE_BYTES) as u64;
        for index in 0..BUFFERS {
            let buffer = staging.fill(Duration::ZERO).unwrap();
            assert_eq!(buffer.len(), PAGE_BYTES);
            buffer.fill(index as u8 + 1);
            staging.copy_to(&memory, place(index), PAGE_BYTES).unwrap();
        }
        let early = staging.fill(Duration::ZERO).unwrap_err();
        assert!(matches!(early, Error::Timeout { .. }), "{early}");
        go_on.send(()).unwrap();
        for index in BUFFERS..2 * BUFFERS {
            staging.fill(WAIT).unwrap().fill(index as u8 + 1);
            staging.copy_to(&memory, place(index), PAGE_BYTES).unwrap();
        }
        staging.finish(WAIT).unwrap();
        let expected = (1..=2 * BUFFERS as u8).flat_map(|byte| vec![byte; PAGE_BYTES]);
        let expected: Vec<u8> = expected.collect();
        assert!(memory.to_vec(WAIT).unwrap() == expected);
    });
}

#[test]
fn a_buffer_with_a_copy_that_no_event_follows_is_given_out_once_the_stream_is_idle() {
    let test = "a_buffer_with_a_copy_that_no_event_follows_is_given_out_once_the_stream_is_idle";
    alone(module_path!(), test, || {
        let inner = Device::preferred().device;
        let backend = Wrapped::new(inner.backend().clone(), Failing::default());
        let device = Device::from_backend(backend.clone());
        let memory = Memory::allocate(&device, PAGE_BYTES as u64).unwrap();
        let mut staging = Staging::new(&device, PAGE_BYTES).unwrap();
        let (go_on, wait) = mpsc::channel::<()>();
        let held_up = move || wait.recv().unwrap_or_default();
        staging.stream.call(held_up).unwrap();
        staging.fill(Duration::ZERO).unwrap().fill(7);
        backend.hook().aim("record_event", 1);
        let refused = staging.copy_to(&memory, 0, PAGE_BYTES).unwrap_err();
        assert!(
            matches!(
                refused,
                Error::Driver {
                    code: Error::INJECTED,
                    ..
                }
            ),
            "{refused}"
        );
        // The other buffers are free; then it is this one's turn.
        for _ in 1..BUFFERS {
            staging.fill(Duration::ZERO).unwrap();
        }
        let early = staging.fill(Duration::ZERO).unwrap_err();
        assert!(matches!(early, Error::Timeout { .. }), "{early}");
        go_on.send(()).unwrap();
        staging.fill(WAIT).unwrap().fill(8);
        assert!(memory.to_vec(WAIT).unwrap() == vec![7; PAGE_BYTES]);
    });
}

#[test]
fn more_bytes_than_a_buffer_or_the_memory_has_are_refused() {
    let device = Device::preferred().device;
    let memory = Memory::allocate(&device, 2 * PAGE_BYTES as u64).unwrap();
    let mut staging = Staging::new(&device, PAGE_BYTES).unwrap();
    staging.fill(WAIT).unwrap();
    for (offset, bytes) in [
        (0, PAGE_BYTES + 1),
        (2 * PAGE_BYTES as u64, 1),
        (u64::MAX, 1),
    ] {
        let refused = staging.copy_to(&memory, offset, bytes).unwrap_err();
        assert!(
            matches!(
                refused,
                Error::Argument {
                    argument: "range",
                    ..
                }
            ),
            "{refused}"
        );
    }
}
