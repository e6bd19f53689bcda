//! DLPack through the C interface: tensors of another framework sent, and memory given to one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{Fixture, LONG, bytes_layout, none};
use warpipe::{DType, Device, Layout};
use warpipe_c::*;
use warpipe_dlpack::{
    DLDevice, DLManagedTensor, DLManagedTensorVersioned, Exported, FLAG_READ_ONLY,
};

/// The memory of a foreign tensor; counts its end.
struct Foreign {
    _numbers: Vec<i32>,
    deleted: Arc<AtomicUsize>,
}

impl Drop for Foreign {
    fn drop(&mut self) {
        self.deleted.fetch_add(1, Ordering::SeqCst);
    }
}

/// A tensor of another framework over these numbers.
fn foreign(
    numbers: Vec<i32>,
    shape: &[u64],
    strides: &[i64],
    deleted: &Arc<AtomicUsize>,
) -> *mut DLManagedTensorVersioned {
    let address = numbers.as_ptr().expose_provenance() as u64;
    let layout = Layout::strided(DType::I32, shape, strides, 0).unwrap();
    let owner = Foreign {
        _numbers: numbers,
        deleted: deleted.clone(),
    };
    let tensor = Exported::new(&layout, DLDevice::of(&Device::host()), address, owner);
    tensor.unwrap().into_versioned().as_ptr()
}

/// Calls a tensor's deleter, as its consumer does.
fn delete(tensor: *mut DLManagedTensorVersioned) {
    // SAFETY: a live tensor, which is deleted here only.
    unsafe { (*tensor).deleter.expect("a deleter")(tensor) }
}

/// The elements of a tensor without gaps.
fn elements(tensor: *const DLManagedTensorVersioned) -> Vec<i32> {
    // SAFETY: a live tensor on the host, contiguous and complete.
    unsafe {
        let inner = (*tensor).dl_tensor;
        let shape = std::slice::from_raw_parts(inner.shape, inner.ndim as usize);
        let count = shape.iter().product::<i64>() as usize;
        let first = inner.data.cast::<u8>().add(inner.byte_offset as usize);
        std::slice::from_raw_parts(first.cast::<i32>(), count).to_vec()
    }
}

fn numbers(bytes: &[u8]) -> Vec<i32> {
    let (chunks, _) = bytes.as_chunks();
    chunks
        .iter()
        .map(|&bytes| i32::from_ne_bytes(bytes))
        .collect()
}

#[test]
fn a_strided_tensor_is_sent_in_row_major_order_and_stays_the_callers() {
    let fixture = Fixture::new();
    let (publisher, subscriber) = fixture.channel(c"tensors");
    let deleted = Arc::new(AtomicUsize::new(0));
    // The transpose of 2 x 3.
    let tensor = foreign(vec![0, 1, 2, 3, 4, 5], &[3, 2], &[1, 3], &deleted);
    let layout: warpipe_layout = get!(warpipe_dlpack_get_layout(tensor));
    assert_eq!((layout.rank, layout.shape[0], layout.bytes), (2, 3, 24));
    let loan = get!(warpipe_publisher_loan(publisher, &layout));
    ok!(warpipe_loan_write_dlpack(loan, fixture.stream, tensor));
    let sequence: u64 = get!(warpipe_loan_send(
        loan,
        fixture.stream,
        WARPIPE_USUAL_TIMEOUT
    ));
    assert_eq!((sequence, deleted.load(Ordering::SeqCst)), (1, 0));
    delete(tensor);
    assert_eq!(deleted.load(Ordering::SeqCst), 1);
    let sample = get!(warpipe_subscriber_receive(subscriber, fixture.stream, LONG));
    assert_eq!(numbers(&fixture.read(sample)), [0, 3, 1, 4, 2, 5]);

    // The receiver gives it on, and ends its subscriber before the tensor.
    let given: *mut DLManagedTensorVersioned = get!(warpipe_sample_to_dlpack(sample));
    fails!(WARPIPE_INVALID_OBJECT, warpipe_sample_finish(sample, LONG));
    ok!(warpipe_close(subscriber));
    ok!(warpipe_close(publisher));
    assert_eq!(elements(given), [0, 3, 1, 4, 2, 5]);
    // SAFETY: a live tensor.
    assert_eq!(unsafe { (*given).flags } & FLAG_READ_ONLY, FLAG_READ_ONLY);
    let given = crate::common::Shared::new(given);
    std::thread::spawn(move || delete(given.get()))
        .join()
        .unwrap();
}

#[test]
fn a_tensor_of_another_shape_device_or_version_is_refused_and_the_loan_stays() {
    let fixture = Fixture::new();
    let (publisher, subscriber) = fixture.channel(c"tensors");
    let deleted = Arc::new(AtomicUsize::new(0));
    let tensor = foreign(vec![1, 2, 3, 4], &[4], &[1], &deleted);
    let wrong = get!(warpipe_publisher_loan(publisher, &bytes_layout(16)));
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_loan_write_dlpack(wrong, fixture.stream, tensor)
    );
    ok!(warpipe_loan_discard(wrong, fixture.stream));
    let layout: warpipe_layout = get!(warpipe_dlpack_get_layout(tensor));
    let loan = get!(warpipe_publisher_loan(publisher, &layout));
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_loan_write_dlpack(loan, fixture.stream, none())
    );
    // SAFETY: a live tensor, which nothing else uses.
    unsafe { (*tensor).dl_tensor.device.device_type = warpipe_dlpack::CUDA };
    let said = fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_loan_write_dlpack(loan, fixture.stream, tensor)
    );
    assert!(said.contains("host"), "{said}");
    // SAFETY: as above.
    unsafe { (*tensor).version.major = 2 };
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_loan_write_dlpack(loan, fixture.stream, tensor)
    );
    assert_eq!(deleted.load(Ordering::SeqCst), 0);
    delete(tensor);
    ok!(warpipe_loan_discard(loan, fixture.stream));
    ok!(warpipe_close(subscriber));
    ok!(warpipe_close(publisher));
}

#[test]
fn a_loan_is_filled_through_a_tensor_and_its_memory_stays_as_long_as_that() {
    let fixture = Fixture::new();
    let (publisher, subscriber) = fixture.channel(c"tensors");
    let dtype = warpipe_dtype::WARPIPE_INT32 as u32;
    let layout: warpipe_layout = get!(warpipe_layout_contiguous(dtype, [2u64, 2].as_ptr(), 2));
    let loan = get!(warpipe_publisher_loan(publisher, &layout));
    let tensor: *mut DLManagedTensorVersioned = get!(warpipe_loan_to_dlpack(loan));
    // SAFETY: a live tensor of four elements on the host, which nobody reads yet.
    unsafe {
        let data = (*tensor).dl_tensor.data.cast::<i32>();
        (0..4).for_each(|index| data.add(index).write(7 * index as i32));
    }
    ok!(warpipe_loan_send(
        loan,
        fixture.stream,
        WARPIPE_USUAL_TIMEOUT,
        none()
    ));
    let sample = get!(warpipe_subscriber_receive(subscriber, fixture.stream, LONG));
    assert_eq!(numbers(&fixture.read(sample)), [0, 7, 14, 21]);
    ok!(warpipe_sample_finish(sample, LONG));
    ok!(warpipe_close(subscriber));
    ok!(warpipe_close(publisher));
    assert_eq!(elements(tensor).len(), 4);
    delete(tensor);
}

#[test]
fn memory_stays_open_for_a_tensor_and_is_not_freed_under_it() {
    let fixture = Fixture::new();
    let memory: *mut warpipe_memory = get!(warpipe_memory_allocate(fixture.device, 4096));
    ok!(warpipe_memory_write(
        memory,
        fixture.stream,
        8,
        [5i32, 6].as_ptr().cast(),
        8
    ));
    fixture.synchronize();
    let dtype = warpipe_dtype::WARPIPE_INT32 as u32;
    let mut layout: warpipe_layout = get!(warpipe_layout_contiguous(dtype, [2u64].as_ptr(), 1));
    layout.offset = 8;
    let tensor: *mut DLManagedTensorVersioned = get!(warpipe_memory_to_dlpack(memory, &layout));
    let second: *mut DLManagedTensorVersioned = get!(warpipe_memory_to_dlpack(memory, &layout));
    let legacy: *mut DLManagedTensor = get!(warpipe_dlpack_to_legacy(second));
    // SAFETY: a live tensor, deleted here only.
    unsafe { (*legacy).deleter.expect("a deleter")(legacy) };
    fails!(
        WARPIPE_INVALID_STATE,
        warpipe_memory_free_on(memory, fixture.stream)
    );
    ok!(warpipe_close(memory));
    assert_eq!(elements(tensor), [5, 6]);
    delete(tensor);

    let long = bytes_layout(1 << 20);
    let memory: *mut warpipe_memory = get!(warpipe_memory_allocate(fixture.device, 4096));
    let mut none = none();
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_memory_to_dlpack(memory, &long, &mut none)
    );
    ok!(warpipe_close(memory));
}
