//! The Python package's DLPack structures, from `crates/warpipe-python/src`, with stand-ins for the
//! interpreter's capsules: which side deletes a structure, and the handling of invalid structures.
//! Miri finds every wrong address, and every leak.
#![allow(clippy::all, reason = "the package's source is checked where it lives")]

extern crate self as pyo3;
extern crate self as warpipe;

#[path = "../../crates/warpipe-python/src/dlpack.rs"]
#[allow(dead_code, reason = "not all of it is tried here")]
mod dlpack;
#[path = "../src/error.rs"]
#[allow(dead_code)]
mod error;
#[path = "python/mod.rs"]
mod python;
#[path = "../../crates/warpipe/src/tensor.rs"]
#[allow(dead_code)]
pub mod tensor;

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;

pub use python::{Device, device, errors, ffi, memory, prelude, sync};
pub use tensor::{DType, RANK_MAX};

use self::dlpack::{Imported, export, import};
use self::memory::{ConsumerStay, Memory};
use self::prelude::{Bound, Py, PyAny, PyErr, Python};
use self::tensor::Layout;

fn memory(layout: Layout) -> (Memory, Arc<()>) {
    let hold = Arc::new(());
    (
        Memory {
            layout,
            address: 4096,
            device: Device,
            read_only: true,
            hold: hold.clone(),
        },
        hold,
    )
}

fn taken(found: &Py<PyAny>) -> Result<Imported, PyErr> {
    import(&Bound::of(found))
}

#[test]
fn a_capsule_that_nobody_takes_ends_its_memory() {
    for versioned in [false, true] {
        let (memory, hold) = memory(Layout::contiguous(DType::F32, &[2, 3]).unwrap());
        let stay = Arc::new(());
        let capsule = export(
            Python,
            &memory,
            Some(ConsumerStay(stay.clone())),
            versioned,
            false,
        )
        .unwrap();
        drop(memory);
        assert_eq!((Arc::strong_count(&hold), Arc::strong_count(&stay)), (2, 2));
        drop(capsule);
        assert_eq!(
            (Arc::strong_count(&hold), Arc::strong_count(&stay)),
            (1, 1),
            "versioned: {versioned}"
        );
    }
}

#[test]
fn a_tensor_is_taken_once_and_ends_with_its_taker() {
    for versioned in [false, true] {
        let layout = Layout::strided(DType::BF16, &[2, 3], &[1, 2], 8).unwrap();
        let (memory, hold) = memory(layout);
        let capsule = export(Python, &memory, None, versioned, true).unwrap();
        drop(memory);
        let tensor = taken(&capsule).unwrap();
        assert_eq!(
            (tensor.device, tensor.dtype, tensor.address),
            ((1, 0), DType::BF16, 4096)
        );
        assert_eq!(
            (&tensor.shape[..], &tensor.strides[..]),
            (&[2, 3][..], &[1, 2][..])
        );
        assert!(taken(&capsule).is_err(), "it was consumed already");
        drop(capsule);
        assert_eq!(Arc::strong_count(&hold), 2);
        std::thread::spawn(move || drop(tensor)).join().unwrap();
        assert_eq!(Arc::strong_count(&hold), 1);
    }
}

#[test]
fn tensors_of_every_rank_and_empty_ones_come_back() {
    for rank in 0..=8 {
        let (memory, _hold) = memory(Layout::contiguous(DType::U8, &vec![2; rank]).unwrap());
        let tensor = taken(&export(Python, &memory, None, true, false).unwrap()).unwrap();
        assert_eq!(tensor.shape, vec![2; rank]);
    }
    let (memory, _hold) = memory(Layout::contiguous(DType::U8, &[3, 0]).unwrap());
    let tensor = taken(&export(Python, &memory, None, false, false).unwrap()).unwrap();
    assert_eq!((&tensor.shape[..], tensor.address), (&[3, 0][..], 0));
}

#[test]
fn what_runs_backwards_is_refused_and_leaves_nothing() {
    let (memory, hold) = memory(Layout::strided(DType::U8, &[2], &[-1], 1).unwrap());
    assert!(export(Python, &memory, None, true, false).is_err());
    assert_eq!(Arc::strong_count(&hold), 2);
}

#[test]
fn a_capsule_that_cannot_be_made_leaves_nothing() {
    for versioned in [false, true] {
        let (memory, hold) = memory(Layout::contiguous(DType::U8, &[1]).unwrap());
        ffi::refuse_next();
        assert!(export(Python, &memory, None, versioned, false).is_err());
        assert_eq!(Arc::strong_count(&hold), 2);
    }
}

/// `DLTensor`, as `dlpack.h` has it.
#[repr(C)]
#[derive(Clone, Copy)]
struct Tensor {
    data: *mut c_void,
    device: [i32; 2],
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct Versioned {
    version: [u32; 2],
    deleted: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: Tensor,
}

unsafe extern "C" fn count(managed: *mut Versioned) {
    // SAFETY: `deleted` is a counter that outlives the tensor.
    unsafe { *(*managed).deleted.cast::<u32>() += 1 };
}

unsafe extern "C" fn keep(_: *mut ffi::PyObject) {}

/// The result of importing another framework's tensor, changed by `change`, and how often it is
/// deleted when all is over.
fn foreign(
    change: impl FnOnce(&mut Versioned),
) -> (Result<(Vec<u64>, Vec<i64>, u64), String>, u32) {
    let (mut shape, mut strides, mut deleted) = ([2i64, 3], [4i64, 1], 0u32);
    let (shape, strides, deleted) = (&raw mut shape, &raw mut strides, &raw mut deleted);
    let tensor = Tensor {
        data: std::ptr::without_provenance_mut(4096),
        device: [1, 0],
        ndim: 2,
        code: 2,
        bits: 32,
        lanes: 1,
        shape: shape.cast(),
        strides: strides.cast(),
        byte_offset: 8,
    };
    let mut managed = Versioned {
        version: [1, 0],
        deleted: deleted.cast(),
        deleter: Some(count),
        flags: 0,
        tensor,
    };
    change(&mut managed);
    // SAFETY: the name is static, and what the pointer names lives until the end of this function.
    let capsule = unsafe {
        ffi::PyCapsule_New(
            (&raw mut managed).cast(),
            c"dltensor_versioned".as_ptr(),
            Some(keep),
        )
    };
    let capsule = Bound::from_owned_ptr_or_err(Python, capsule)
        .unwrap()
        .unbind();
    let told =
        taken(&capsule).map(|found| (found.shape.clone(), found.strides.clone(), found.address));
    drop(capsule);
    // SAFETY: what counted has run, on this thread.
    (told.map_err(|error| error.0), unsafe { *deleted })
}

#[test]
fn another_frameworks_tensor_is_read_and_deleted_once() {
    let whole = (vec![2, 3], vec![4, 1], 4104);
    assert_eq!(foreign(|_| ()), (Ok(whole.clone()), 1));
    let plain = (vec![2, 3], vec![3, 1], 4104);
    assert_eq!(
        foreign(|managed| managed.tensor.strides = null_mut()),
        (Ok(plain), 1)
    );
    assert_eq!(foreign(|managed| managed.deleter = None), (Ok(whole), 0));
    let scalar = (vec![], vec![], 4104);
    let of_no_rank = foreign(|managed| {
        let tensor = &mut managed.tensor;
        (tensor.ndim, tensor.shape, tensor.strides) = (0, null_mut(), null_mut());
    });
    assert_eq!(of_no_rank, (Ok(scalar), 1));
}

#[test]
fn a_tensor_that_cannot_be_is_refused_and_deleted_once() {
    let lies: [fn(&mut Tensor); 9] = [
        |tensor| tensor.ndim = -1,
        |tensor| tensor.ndim = 9,
        |tensor| tensor.ndim = i32::MAX,
        |tensor| tensor.shape = null_mut(),
        |tensor| tensor.data = null_mut(),
        |tensor| tensor.lanes = 4,
        |tensor| (tensor.code, tensor.bits) = (255, 255),
        |tensor| tensor.byte_offset = u64::MAX,
        // SAFETY: the shape has two numbers.
        |tensor| unsafe { *tensor.shape.add(1) = -3 },
    ];
    for (index, lie) in lies.into_iter().enumerate() {
        let (told, deleted) = foreign(|managed| lie(&mut managed.tensor));
        assert!(
            told.is_err() && deleted == 1,
            "{index}: {told:?}, deleted {deleted} times"
        );
    }
}

#[test]
fn a_tensor_of_another_major_version_stays_with_its_capsule() {
    let (told, deleted) = foreign(|managed| managed.version = [2, 0]);
    assert!(
        told.is_err() && deleted == 0,
        "{told:?}, deleted {deleted} times"
    );
}

#[test]
fn strides_of_a_shape_that_no_memory_has_do_not_overflow() {
    assert_eq!(
        dlpack::row_major(&[u64::MAX, u64::MAX, 3]),
        [i64::MAX, 3, 1]
    );
}
