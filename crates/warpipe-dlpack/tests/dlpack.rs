//! Both structures both ways, invalid ones, and the calls of their deleters. Miri runs these tests
//! too: it finds every wrong address and every leak.

use std::borrow::Cow;
use std::ffi::c_void;
use std::ptr::{NonNull, null_mut, without_provenance_mut};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use warpipe::{DType, Device, Error, Layout};
use warpipe_dlpack::{
    CPU, CUDA, DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion,
    DLTensor, Elements, Exported, FLAG_IS_COPIED, FLAG_READ_ONLY, Imported, Refusal, VERSION,
    row_major,
};

const GPU: DLDevice = DLDevice {
    device_type: CUDA,
    device_id: 3,
};
const ADDRESS: u64 = 4096;

fn transposed() -> Layout {
    Layout::strided(DType::BF16, &[2, 3], &[1, 2], 8).unwrap()
}

/// An export of `layout`, and the owner in it, which is counted by its references.
fn exported(layout: Layout) -> (Exported<Arc<()>>, Arc<()>) {
    let owner = Arc::new(());
    let exported = Exported::new(&layout, GPU, ADDRESS, owner.clone()).unwrap();
    (exported, owner)
}

/// Both imports of one export, each of which owns a tensor of its own.
fn both_ways(layout: Layout) -> [Imported; 2] {
    let versioned = exported(layout).0.into_versioned();
    let legacy = exported(layout).0.into_legacy();
    // SAFETY: each tensor was made above, and nothing else has it.
    unsafe {
        [
            Imported::from_versioned(versioned).unwrap(),
            Imported::from_legacy(legacy).unwrap(),
        ]
    }
}

#[test]
fn an_export_that_no_consumer_takes_drops_its_owner() {
    let (exported, owner) = exported(Layout::contiguous(DType::F32, &[2, 3]).unwrap());
    assert_eq!(Arc::strong_count(&owner), 2);
    drop(exported);
    assert_eq!(Arc::strong_count(&owner), 1);
}

#[test]
fn a_versioned_tensor_has_the_fields_of_its_layout_and_keeps_its_owner_until_it_is_deleted() {
    let (exported, owner) = exported(transposed());
    let tensor = exported.read_only(true).copied(true).into_versioned();
    // SAFETY: made above; live until its deleter is called at the end.
    unsafe {
        let fields = tensor.read();
        assert_eq!(fields.version, VERSION);
        assert_eq!(fields.flags, FLAG_READ_ONLY | FLAG_IS_COPIED);
        check_fields(&fields.dl_tensor);
        assert_eq!(Arc::strong_count(&owner), 2);
        fields.deleter.unwrap()(tensor.as_ptr());
    }
    assert_eq!(Arc::strong_count(&owner), 1);
}

#[test]
fn a_legacy_tensor_has_the_fields_of_its_layout_and_keeps_its_owner_until_it_is_deleted() {
    let (exported, owner) = exported(transposed());
    let tensor = exported.into_legacy();
    // SAFETY: as above.
    unsafe {
        let fields = tensor.read();
        check_fields(&fields.dl_tensor);
        assert_eq!(Arc::strong_count(&owner), 2);
        fields.deleter.unwrap()(tensor.as_ptr());
    }
    assert_eq!(Arc::strong_count(&owner), 1);
}

/// # Safety
/// `tensor` is of a live export.
unsafe fn check_fields(tensor: &DLTensor) {
    assert_eq!((tensor.data as u64, tensor.byte_offset), (ADDRESS, 0));
    assert_eq!((tensor.device, tensor.ndim), (GPU, 2));
    let dtype = DLDataType {
        code: 4,
        bits: 16,
        lanes: 1,
    };
    assert_eq!(tensor.dtype, dtype);
    // SAFETY: the caller's promise, and two dimensions.
    let (shape, strides) = unsafe {
        (
            std::slice::from_raw_parts(tensor.shape, 2),
            std::slice::from_raw_parts(tensor.strides, 2),
        )
    };
    assert_eq!((shape, strides), (&[2, 3][..], &[1, 2][..]));
}

#[test]
fn flags_are_set_by_their_own_calls_alone() {
    for (read_only, copied) in [(false, false), (true, false), (false, true), (true, true)] {
        let (exported, _owner) = exported(transposed());
        let turned = exported.read_only(!read_only).copied(!copied);
        let tensor = turned.read_only(read_only).copied(copied).into_versioned();
        // SAFETY: made above, and nothing else has it.
        let imported = unsafe { Imported::from_versioned(tensor) }.unwrap();
        assert_eq!(imported.is_read_only(), read_only);
        assert_eq!(imported.is_copied(), copied);
    }
}

#[test]
fn an_import_of_an_export_is_the_same_tensor_and_drops_the_owner_on_any_thread() {
    let (first, versioned_owner) = exported(transposed());
    let (second, legacy_owner) = exported(transposed());
    // SAFETY: each tensor is made here, and nothing else has it.
    let imports = unsafe {
        [
            Imported::from_versioned(first.into_versioned()).unwrap(),
            Imported::from_legacy(second.into_legacy()).unwrap(),
        ]
    };
    for imported in &imports {
        assert_eq!((imported.device(), imported.dtype()), (GPU, DType::BF16));
        assert_eq!(imported.address(), ADDRESS);
        assert_eq!(imported.shape(), [2, 3]);
        assert_eq!(imported.strides(), [1, 2]);
        assert!(!imported.is_read_only() && !imported.is_copied());
    }
    let owners = [versioned_owner, legacy_owner];
    assert_eq!(owners.each_ref().map(Arc::strong_count), [2, 2]);
    std::thread::spawn(move || drop(imports)).join().unwrap();
    assert_eq!(owners.each_ref().map(Arc::strong_count), [1, 1]);
}

#[test]
fn tensors_of_every_rank_and_element_type_come_back() {
    for rank in 0..=warpipe::RANK_MAX {
        let layout = Layout::contiguous(DType::U8, &vec![2; rank]).unwrap();
        for imported in both_ways(layout) {
            assert_eq!(imported.shape(), layout.shape());
            assert_eq!(imported.strides(), layout.strides());
        }
    }
    for &dtype in DType::ALL {
        for imported in both_ways(Layout::contiguous(dtype, &[5]).unwrap()) {
            assert_eq!(imported.dtype(), dtype);
        }
    }
}

#[test]
fn a_tensor_without_elements_has_no_address() {
    for imported in both_ways(Layout::contiguous(DType::U8, &[3, 0]).unwrap()) {
        assert_eq!((imported.shape(), imported.address()), (&[3, 0][..], 0));
    }
}

#[test]
fn a_layout_that_runs_backwards_is_not_exported_and_its_owner_is_dropped() {
    let owner = Arc::new(());
    let layout = Layout::strided(DType::U8, &[2], &[-1], 1).unwrap();
    let refusal = Exported::new(&layout, GPU, ADDRESS, owner.clone()).unwrap_err();
    assert_eq!(refusal, Refusal::Backwards { strides: vec![-1] });
    assert_eq!(Arc::strong_count(&owner), 1);
    let lone = Layout::strided(DType::U8, &[1], &[-1], 1).unwrap();
    assert!(Exported::new(&lone, GPU, ADDRESS, owner).is_ok());
}

#[test]
fn a_length_beyond_signed_numbers_is_not_exported() {
    let layout = Layout::strided(DType::U8, &[0, u64::MAX], &[1, 1], 0).unwrap();
    let refusal = Exported::new(&layout, GPU, ADDRESS, ()).unwrap_err();
    assert_eq!(refusal, Refusal::Length { length: u64::MAX });
}

#[test]
#[cfg_attr(miri, ignore = "the host backend calls what Miri does not know")]
fn the_host_is_the_cpu() {
    let host = DLDevice {
        device_type: CPU,
        device_id: 0,
    };
    assert_eq!(DLDevice::of(&Device::host()), host);
}

/// A tensor as another framework makes it: f32, 2 by 3, rows 4 elements apart. Counts the calls of
/// its deleters.
struct Foreign {
    shape: [i64; 2],
    strides: [i64; 2],
    deleted: AtomicU32,
}

unsafe extern "C" fn count_versioned(tensor: *mut DLManagedTensorVersioned) {
    // SAFETY: `manager_ctx` is the counter of a `Foreign` that outlives the tensor.
    unsafe { (*(*tensor).manager_ctx.cast::<AtomicU32>()).fetch_add(1, Ordering::Relaxed) };
}

unsafe extern "C" fn count_legacy(tensor: *mut DLManagedTensor) {
    // SAFETY: as above.
    unsafe { (*(*tensor).manager_ctx.cast::<AtomicU32>()).fetch_add(1, Ordering::Relaxed) };
}

impl Foreign {
    fn new() -> Foreign {
        Foreign {
            shape: [2, 3],
            strides: [4, 1],
            deleted: AtomicU32::new(0),
        }
    }

    fn deleted(&self) -> u32 {
        self.deleted.load(Ordering::Relaxed)
    }

    fn manager_ctx(&self) -> *mut c_void {
        (&raw const self.deleted).cast_mut().cast()
    }

    fn tensor(&self) -> DLTensor {
        DLTensor {
            data: without_provenance_mut(ADDRESS as usize),
            device: GPU,
            ndim: 2,
            dtype: DLDataType {
                code: 2,
                bits: 32,
                lanes: 1,
            },
            shape: (&raw const self.shape).cast_mut().cast(),
            strides: (&raw const self.strides).cast_mut().cast(),
            byte_offset: 8,
        }
    }

    fn versioned(&self, dl_tensor: DLTensor) -> DLManagedTensorVersioned {
        DLManagedTensorVersioned {
            version: DLPackVersion { major: 1, minor: 7 },
            manager_ctx: self.manager_ctx(),
            deleter: Some(count_versioned),
            flags: 0,
            dl_tensor,
        }
    }

    fn legacy(&self, dl_tensor: DLTensor) -> DLManagedTensor {
        DLManagedTensor {
            dl_tensor,
            manager_ctx: self.manager_ctx(),
            deleter: Some(count_legacy),
        }
    }
}

fn import_versioned(tensor: &mut DLManagedTensorVersioned) -> Result<Imported, Refusal> {
    // SAFETY: its shape and strides are null or those of a `Foreign`, with two numbers for all
    // ranks that are read; the caller keeps it until the import is dropped.
    unsafe { Imported::from_versioned(NonNull::from(tensor)) }
}

fn import_legacy(tensor: &mut DLManagedTensor) -> Result<Imported, Refusal> {
    // SAFETY: as above.
    unsafe { Imported::from_legacy(NonNull::from(tensor)) }
}

/// Imports the tensor of a [`Foreign`], changed by `change`, in both structures, and sees that each
/// result is the same and calls the deleter once if it was taken, never if it was refused.
fn both<T: PartialEq + std::fmt::Debug>(
    change: impl Fn(&mut DLTensor),
    read: impl Fn(&Imported) -> T,
) -> Result<T, Refusal> {
    let foreign = Foreign::new();
    let mut tensor = foreign.tensor();
    change(&mut tensor);
    let check = |import: Result<Imported, Refusal>, before: u32| {
        let result = import.as_ref().map(&read).map_err(Clone::clone);
        assert_eq!(foreign.deleted(), before, "{result:?}");
        drop(import);
        let calls = u32::from(result.is_ok());
        assert_eq!(foreign.deleted(), before + calls, "{result:?}");
        result
    };
    let versioned = check(import_versioned(&mut foreign.versioned(tensor)), 0);
    let legacy = check(
        import_legacy(&mut foreign.legacy(tensor)),
        foreign.deleted(),
    );
    assert_eq!(versioned, legacy);
    versioned
}

#[test]
fn a_tensor_of_another_framework_is_read_and_deleted_once() {
    let read = |imported: &Imported| {
        let shape = imported.shape().to_vec();
        (shape, imported.strides().to_vec(), imported.address())
    };
    let found = both(|_| (), read);
    assert_eq!(found, Ok((vec![2, 3], vec![4, 1], ADDRESS + 8)));
    let packed = both(|tensor| tensor.strides = null_mut(), read);
    assert_eq!(packed, Ok((vec![2, 3], vec![3, 1], ADDRESS + 8)));
    let scalar = |tensor: &mut DLTensor| {
        (tensor.ndim, tensor.shape, tensor.strides) = (0, null_mut(), null_mut());
    };
    assert_eq!(both(scalar, read), Ok((vec![], vec![], ADDRESS + 8)));
}

#[test]
fn a_tensor_without_a_deleter_is_imported() {
    let foreign = Foreign::new();
    let mut versioned = foreign.versioned(foreign.tensor());
    versioned.deleter = None;
    assert!(import_versioned(&mut versioned).is_ok());
    let mut legacy = foreign.legacy(foreign.tensor());
    legacy.deleter = None;
    assert!(import_legacy(&mut legacy).is_ok());
    assert_eq!(foreign.deleted(), 0);
}

#[test]
fn pairs_of_four_bits_are_two_lanes_in_dlpack_and_lone_ones_are_refused_with_the_next_step() {
    let foreign = Foreign::new();
    let with = |bits, lanes| {
        let mut tensor = foreign.tensor();
        (tensor.dtype.code, tensor.dtype.bits, tensor.dtype.lanes) = (17, bits, lanes);
        import_versioned(&mut foreign.versioned(tensor)).map(|imported| imported.dtype())
    };
    assert_eq!(with(4, 2), Ok(DType::F4_E2M1FN_X2));
    for (bits, lanes) in [(4, 1), (8, 1), (2, 4), (1, 8), (4, 65)] {
        let refused = with(bits, lanes).unwrap_err().to_string();
        assert_eq!(
            refused.contains("torch.float4_e2m1fn_x2"),
            bits == 4,
            "{refused}"
        );
    }
    let layout = Layout::contiguous(DType::F4_E2M1FN_X2, &[2, 3]).unwrap();
    let (exported, _owner) = exported(layout);
    let tensor = exported.into_versioned();
    // SAFETY: a live export, which nothing else has.
    unsafe {
        let dtype = (*tensor.as_ptr()).dl_tensor.dtype;
        assert_eq!((dtype.code, dtype.bits, dtype.lanes), (17, 4, 2));
        assert_eq!(*(*tensor.as_ptr()).dl_tensor.shape.add(1), 3);
        let imported = Imported::from_versioned(tensor).unwrap();
        assert_eq!(imported.dtype(), DType::F4_E2M1FN_X2);
    }
}

#[test]
fn an_invalid_tensor_is_refused_and_stays_with_its_owner() {
    let element_type = |code, bits, lanes| Refusal::ElementType { code, bits, lanes };
    let offset = Refusal::Offset {
        data: ADDRESS,
        byte_offset: u64::MAX - 7,
    };
    type Change = fn(&mut DLTensor);
    let cases: [(Change, Refusal); 11] = [
        (|tensor| tensor.ndim = -1, Refusal::Rank { ndim: -1 }),
        (|tensor| tensor.ndim = 9, Refusal::Rank { ndim: 9 }),
        (
            |tensor| tensor.ndim = i32::MIN,
            Refusal::Rank { ndim: i32::MIN },
        ),
        (
            |tensor| tensor.ndim = i32::MAX,
            Refusal::Rank { ndim: i32::MAX },
        ),
        (|tensor| tensor.shape = null_mut(), Refusal::NullShape),
        (|tensor| tensor.data = null_mut(), Refusal::NullData),
        (|tensor| tensor.dtype.lanes = 0, element_type(2, 32, 0)),
        (|tensor| tensor.dtype.lanes = 4, element_type(2, 32, 4)),
        (|tensor| tensor.dtype.bits = 4, element_type(2, 4, 1)),
        (|tensor| tensor.dtype.code = 255, element_type(255, 32, 1)),
        (|tensor| tensor.byte_offset = u64::MAX - 7, offset),
    ];
    for (change, refusal) in cases {
        assert_eq!(both(change, |_| ()), Err(refusal));
    }
}

#[test]
fn a_negative_length_is_refused_and_any_stride_is_read() {
    let mut foreign = Foreign::new();
    foreign.shape = [2, -3];
    foreign.strides = [i64::MIN, i64::MAX];
    let mut tensor = foreign.versioned(foreign.tensor());
    let refusal = Refusal::NegativeLength { shape: vec![2, -3] };
    assert_eq!(import_versioned(&mut tensor).unwrap_err(), refusal);
    assert_eq!(foreign.deleted(), 0);
    foreign.shape = [2, i64::MAX];
    let mut tensor = foreign.versioned(foreign.tensor());
    let imported = import_versioned(&mut tensor).unwrap();
    assert_eq!(imported.strides(), [i64::MIN, i64::MAX]);
    assert_eq!(imported.shape(), [2, i64::MAX as u64]);
}

#[test]
fn a_refused_tensor_can_be_given_again() {
    let foreign = Foreign::new();
    let mut tensor = foreign.versioned(foreign.tensor());
    tensor.dl_tensor.dtype.lanes = 2;
    assert!(import_versioned(&mut tensor).is_err());
    tensor.dl_tensor.dtype.lanes = 1;
    drop(import_versioned(&mut tensor).unwrap());
    assert_eq!(foreign.deleted(), 1);
}

#[test]
fn a_tensor_of_another_major_version_is_refused_by_its_version_alone() {
    for major in [0, 2, u32::MAX] {
        let foreign = Foreign::new();
        let mut tensor = foreign.versioned(foreign.tensor());
        tensor.version = DLPackVersion { major, minor: 5 };
        // Behind its deleter another version may have anything.
        tensor.dl_tensor.ndim = -1;
        let refusal = Refusal::Version { major, minor: 5 };
        assert_eq!(import_versioned(&mut tensor).unwrap_err(), refusal);
        assert_eq!(foreign.deleted(), 0);
    }
}

#[test]
fn a_deleter_is_called_on_the_thread_that_drops_the_import() {
    let foreign = Foreign::new();
    let mut versioned = foreign.versioned(foreign.tensor());
    let mut legacy = foreign.legacy(foreign.tensor());
    let imports = [
        import_versioned(&mut versioned).unwrap(),
        import_legacy(&mut legacy).unwrap(),
    ];
    std::thread::scope(|scope| {
        for imported in imports {
            scope.spawn(move || drop(imported));
        }
    });
    assert_eq!(foreign.deleted(), 2);
}

#[test]
fn shape_and_strides_need_not_be_aligned() {
    let foreign = Foreign::new();
    let mut bytes = [0i64; 3];
    let start = bytes.as_mut_ptr().wrapping_byte_add(1);
    // SAFETY: 16 of the 24 bytes.
    unsafe { start.cast::<[i64; 2]>().write_unaligned([7, 5]) };
    let mut tensor = foreign.versioned(foreign.tensor());
    tensor.dl_tensor.shape = start;
    let imported = import_versioned(&mut tensor).unwrap();
    assert_eq!(imported.shape(), [7, 5]);
}

#[test]
fn strides_of_a_shape_that_no_memory_has_do_not_overflow() {
    assert_eq!(row_major(&[u64::MAX, u64::MAX, 3]), [i64::MAX, 3, 1]);
    assert_eq!(row_major(&[2, 0, 3]), [3, 3, 1]);
    assert_eq!(row_major(&[]), [0; 0]);
}

/// The elements of a tensor over `bytes`, with the one of all indices 0 at byte `first`.
fn elements(bytes: &[u8], shape: &[u64], strides: &[i64], first: usize) -> Elements {
    let address = bytes.as_ptr().expose_provenance() + first;
    Elements::of(DType::U8, shape, strides, address as u64).unwrap()
}

#[test]
fn elements_in_any_order_are_copied_in_row_major_order() {
    let bytes: Vec<u8> = (0..24).collect();
    // Rows 1 and 2, columns 4 and 3 of 4 x 6: the columns run backwards.
    let crop = elements(&bytes, &[2, 2], &[6, -1], 10);
    assert_eq!((crop.layout().bytes(), crop.layout().offset()), (8, 1));
    assert_eq!(crop.packed().unwrap().bytes(), 4);
    // SAFETY: the bytes stay until the end of this test.
    unsafe {
        assert!(matches!(crop.bytes().unwrap(), Cow::Owned(copy) if copy == [10, 9, 16, 15]));
        let mut copy = [0u8; 4];
        let to = copy.as_mut_ptr().expose_provenance() as u64;
        crop.copy_to(to).unwrap();
        assert_eq!(copy, [10, 9, 16, 15]);
        let lone = elements(&bytes, &[1, 3], &[-99, 1], 5);
        assert!(matches!(lone.bytes().unwrap(), Cow::Borrowed([5, 6, 7])));
    }
}

#[test]
fn a_tensor_without_elements_needs_no_memory() {
    let nothing = Elements::of(DType::F32, &[3, 0], &[-1 << 62, 1], 0).unwrap();
    assert_eq!((nothing.lowest(), nothing.layout().bytes()), (0, 0));
    // SAFETY: nothing is read.
    assert!(unsafe { nothing.bytes() }.unwrap().is_empty());
}

#[test]
fn elements_before_the_first_address_or_behind_the_last_are_refused() {
    for (shape, stride, address) in [
        (4, -1, 11),
        (4, 1, u64::MAX - 8),
        (2, i64::MIN, 1 << 63),
        (u64::MAX, i64::MIN, 0),
    ] {
        let found = Elements::of(DType::F32, &[shape], &[stride], address);
        assert!(matches!(found, Err(Error::Argument { .. })), "{found:?}");
    }
}

#[test]
#[cfg_attr(miri, ignore = "Miri ends where there is no room")]
fn a_copy_that_this_process_has_no_room_for_is_an_error() {
    // One byte in 2^62 places.
    let everywhere = elements(&[7], &[1 << 62], &[0], 0);
    // SAFETY: nothing is read before there is room.
    let refused = unsafe { everywhere.bytes() };
    assert!(matches!(refused, Err(Error::Limit(_))), "{refused:?}");
}
