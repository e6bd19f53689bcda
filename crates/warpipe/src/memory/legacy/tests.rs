//! Tests in one process: the format, exportable memory, and handles of this process.

use std::sync::Arc;

use super::*;
use crate::backend::Backend;
use crate::backend::testing::{Counting, Wrapped};

/// Memory of another allocator, freed with this.
struct Plain(Device, DevicePtr);

impl Plain {
    fn new(device: &Device, bytes: u64) -> Plain {
        Plain(
            device.clone(),
            device.backend().allocate_plain(bytes).unwrap(),
        )
    }

    fn export(&self, offset: u64, bytes: u64) -> Result<LegacyHandle> {
        export(&self.0, self.1 + offset, bytes)
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, freed once, and no stream ever used it.
        unsafe { self.0.backend().free_plain(self.1) }.unwrap();
    }
}

fn export(device: &Device, ptr: DevicePtr, bytes: u64) -> Result<LegacyHandle> {
    // SAFETY: what is exported here lives until its test is over, or is not there to begin with.
    unsafe { LegacyHandle::export(device, ptr, bytes) }
}

fn sample() -> (Plain, LegacyHandle) {
    let plain = Plain::new(&Device::host(), 4096);
    let handle = plain.export(64, 256).unwrap();
    (plain, handle)
}

fn is_of_the_text(fault: &HandleFault) -> bool {
    matches!(
        fault,
        HandleFault::NoHandle(_)
            | HandleFault::OtherKind { .. }
            | HandleFault::Version { .. }
            | HandleFault::Oversized(_)
            | HandleFault::Damaged(_)
    )
}

fn fault<T: std::fmt::Debug>(result: Result<T>) -> HandleFault {
    match result {
        Err(Error::Handle { fault, .. }) => fault,
        other => panic!("{other:?}"),
    }
}

/// The handle's bytes after a change, with the checksum that fits them.
fn forged(handle: &LegacyHandle, change: impl FnOnce(&mut LegacyFields)) -> Vec<u8> {
    let mut forged = *handle;
    change(&mut forged.fields);
    forged.to_bytes()
}

#[test]
fn a_handle_goes_through_bytes_text_and_serde_unchanged() {
    let (plain, handle) = sample();
    assert_eq!(
        LegacyHandle::from_bytes(&handle.to_bytes()).unwrap(),
        handle
    );
    assert_eq!(
        format!("{handle}\n").parse::<LegacyHandle>().unwrap(),
        handle
    );
    let binary = postcard::to_stdvec(&handle).unwrap();
    assert_eq!(
        postcard::from_bytes::<LegacyHandle>(&binary).unwrap(),
        handle
    );
    let human = serde::de::value::StrDeserializer::<serde::de::value::Error>::new(Box::leak(
        handle.to_string().into_boxed_str(),
    ));
    assert_eq!(
        <LegacyHandle as serde::Deserialize>::deserialize(human).unwrap(),
        handle
    );
    assert_eq!(
        (
            handle.info().offset,
            handle.info().bytes,
            handle.info().allocation_bytes
        ),
        (64, 256, 4096)
    );
    assert_eq!(
        (handle.info().pid, handle.info().device),
        (std::process::id() as i32, Device::host().info().id)
    );
    drop(plain);
}

#[test]
fn every_cut_and_every_flipped_bit_is_refused() {
    let (_plain, handle) = sample();
    let bytes = handle.to_bytes();
    for length in 0..bytes.len() {
        let refused = fault(LegacyHandle::from_bytes(&bytes[..length]));
        assert!(is_of_the_text(&refused), "{length}: {refused}");
    }
    for bit in 0..8 * bytes.len() {
        let mut changed = bytes.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        let refused = fault(LegacyHandle::from_bytes(&changed));
        assert!(is_of_the_text(&refused), "{bit}: {refused}");
    }
}

#[test]
fn a_handle_that_was_forged_is_refused_for_what_is_wrong_with_it() {
    let (_plain, handle) = sample();
    let pid = forged(&handle, |fields| fields.origin.pid = -1);
    assert_eq!(
        fault(LegacyHandle::from_bytes(&pid)),
        HandleFault::Damaged("it names no process")
    );
    for (offset, bytes) in [(0, 4097), (4096, 1), (u64::MAX, 2), (0, 0), (1, u64::MAX)] {
        let range = forged(&handle, |fields| {
            (fields.offset, fields.bytes) = (offset, bytes);
        });
        let wanted = HandleFault::Range {
            offset,
            bytes,
            allocation: 4096,
        };
        assert_eq!(fault(LegacyHandle::from_bytes(&range)), wanted);
    }
}

#[test]
fn a_handle_of_another_machine_or_backend_is_refused_by_name() {
    let (_plain, handle) = sample();
    let mut elsewhere = handle;
    elsewhere.fields.origin.host ^= 1;
    assert_eq!(
        fault(elsewhere.open(&Device::host())),
        HandleFault::ForeignHost
    );
    let owner = DeviceId {
        kind: crate::backend::DeviceKind::Cuda,
        uuid: [7; 16],
    };
    let mut on_a_gpu = handle;
    on_a_gpu.fields.owner = owner;
    match fault(on_a_gpu.open(&Device::host())) {
        HandleFault::Device {
            owner: told,
            device,
        } => assert_eq!((told, device.as_str()), (owner.to_string(), "host")),
        other => panic!("{other}"),
    }
}

#[test]
fn a_handle_of_this_process_opens_without_the_driver_at_the_exporters_address() {
    let counting = Wrapped::new(Device::host().backend().clone(), Counting::default());
    let device = Device::from_backend(counting.clone());
    let (plain, handle) = sample();
    let (first, second) = (handle.open(&device).unwrap(), handle.open(&device).unwrap());
    assert_eq!(
        (first.ptr(), second.ptr(), first.bytes()),
        (plain.1 + 64, plain.1 + 64, 256)
    );
    drop(first);
    second.close(std::time::Duration::ZERO).unwrap();
    let calls = counting.hook().calls();
    assert_eq!(
        (calls.get("open_legacy"), calls.get("close_legacy")),
        (None, None),
        "{calls:?}"
    );
}

#[test]
fn memory_that_this_process_has_freed_is_stale_also_when_its_address_is_used_again() {
    let device = Device::host();
    let (plain, handle) = sample();
    let address = plain.1;
    drop(plain);
    assert!(matches!(
        fault(handle.open(&device)),
        HandleFault::Stale { .. }
    ));
    // The system mostly gives the same address again; then the handle must stay stale.
    let again = Plain::new(&device, 4096);
    let other = again.export(64, 256).unwrap();
    assert!(matches!(
        fault(handle.open(&device)),
        HandleFault::Stale { .. }
    ));
    assert_eq!(
        other.open(&device).unwrap().ptr(),
        again.1 + 64,
        "the address was {address:#x} before"
    );
}

#[test]
fn a_range_that_leaves_its_allocation_is_refused() {
    let plain = Plain::new(&Device::host(), 1000);
    for (offset, bytes) in [(0, 1001), (999, 2), (0, 0), (8, u64::MAX)] {
        let wanted = HandleFault::Range {
            offset,
            bytes,
            allocation: 1000,
        };
        assert_eq!(fault(plain.export(offset, bytes)), wanted);
    }
    assert_eq!(plain.export(999, 1).unwrap().info().offset, 999);
}

#[test]
fn an_error_of_the_driver_while_exporting_is_passed_on() {
    let failing = Wrapped::new(
        Device::host().backend().clone(),
        crate::backend::testing::Failing::default(),
    );
    let device = Device::from_backend(failing.clone() as Arc<dyn Backend>);
    let plain = Plain::new(&device, 64);
    for method in ["locate", "export_legacy"] {
        failing.hook().aim(method, 1);
        assert!(
            matches!(
                plain.export(0, 8),
                Err(Error::Driver {
                    code: Error::INJECTED,
                    ..
                })
            ),
            "{method}"
        );
    }
    plain.export(0, 8).unwrap();
}
