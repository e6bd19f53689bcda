//! DLPack both ways. **This module is marked for unsafe**: it takes in and hands out structures by
//! their address, and reads memory that other frameworks name.

use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

use warpipe::{SlotHold, Stream};
use warpipe_dlpack::{
    CPU, CUDA, CUDA_HOST, CUDA_MANAGED, DLDevice, DLManagedTensor, DLManagedTensorVersioned,
    Elements, Exported, Imported, Refusal, to_legacy,
};

use crate::arguments::{out, out_object};
use crate::call::call;
use crate::{
    Failure, MemoryKind, OnDevice, Received, Result, handle, layout_of, run, warpipe_layout,
    warpipe_loan, warpipe_memory, warpipe_sample, warpipe_status,
};

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Failure {
        Failure::input(refusal.to_string())
    }
}

/// Gives a tensor to C.
///
/// # Safety
/// As for [`out_object`].
unsafe fn give<Owner: Send + 'static>(
    tensor: *mut *mut DLManagedTensorVersioned,
    export: impl FnOnce() -> Result<Exported<Owner>>,
) -> warpipe_status {
    run(|| {
        // SAFETY: the caller's promise.
        let place = unsafe { out_object("tensor", tensor) }?;
        place.put(export()?.into_versioned().as_ptr());
        Ok(())
    })
}

/// The same tensor for consumers of DLPack before 1.0, as `at::fromDLPack`: they are not told of
/// memory that they may only read. The deleter of `*legacy` calls that of `tensor`, which is no more
/// the caller's.
///
/// # Safety
/// `tensor` is a valid tensor of DLPack that the caller owns, `legacy` the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_dlpack_to_legacy(
    tensor: *mut DLManagedTensorVersioned,
    legacy: *mut *mut DLManagedTensor,
) -> warpipe_status {
    run(|| {
        // SAFETY: the caller's promise.
        let place = unsafe { out_object("legacy", legacy) }?;
        let tensor = NonNull::new(tensor).ok_or_else(|| Failure::null("tensor"))?;
        // SAFETY: the caller's promise.
        place.put(unsafe { to_legacy(tensor) }.as_ptr());
        Ok(())
    })
}

/// Gives a sample to another framework: `*tensor` is read-only memory of the device, which the
/// framework's deleter releases behind the work of the stream that the sample was received with.
/// A consumer on another stream waits for the sample first (`warpipe_sample_wait_on`), and has that
/// stream wait for it before the deleter.
///
/// Closes `sample`. `*tensor` is the caller's, for `at::fromDLPackVersioned` and its like, or to be
/// ended by its own deleter.
///
/// `WARPIPE_INVALID_INPUT` for a tensor with negative strides, which PyTorch does not take; the
/// sample stays the caller's then.
///
/// # Safety
/// `tensor` is the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_sample_to_dlpack(
    sample: *mut warpipe_sample,
    tensor: *mut *mut DLManagedTensorVersioned,
) -> warpipe_status {
    // SAFETY: the caller's promise.
    unsafe { give(tensor, || export_sample(sample)) }
}

fn export_sample(sample: *mut warpipe_sample) -> Result<Exported<OnDevice<Received>>> {
    let mut found = handle::find(sample)?;
    let device = DLDevice::of(found.streams.device());
    let (layout, address) = (*found.sample.layout(), found.sample.ptr());
    // An export drops an owner that it refuses: asked first without one.
    Exported::new(&layout, device, address, ())?;
    let exported = Exported::new(&layout, device, address, found.take())?;
    Ok(exported.read_only(true))
}

/// A view of a loan's memory for another framework to write. It keeps the memory mapped, and gives
/// no right to write it once the loan is sent, submitted or discarded. The loan stays the caller's.
///
/// `*tensor` is the caller's, for `at::fromDLPackVersioned` and its like, or to be ended by its own
/// deleter.
///
/// # Safety
/// `tensor` is the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_loan_to_dlpack(
    loan: *const warpipe_loan,
    tensor: *mut *mut DLManagedTensorVersioned,
) -> warpipe_status {
    // SAFETY: the caller's promise.
    unsafe { give(tensor, || export_loan(loan)) }
}

fn export_loan(loan: *const warpipe_loan) -> Result<Exported<SlotHold>> {
    let lent = handle::find(loan)?;
    let device = DLDevice::of(lent.streams.device());
    let exported = Exported::new(lent.layout(), device, lent.ptr(), lent.hold())?;
    Ok(exported)
}

/// A view of memory for another framework, as a tensor of this layout. It keeps the memory open,
/// also when `memory` is closed; until its deleter is called, nothing frees the memory
/// (`warpipe_memory_free_on` refuses). Its work on other streams than the library has seen is for
/// the caller to order (`warpipe_memory_used_on`).
///
/// `*tensor` is the caller's, for `at::fromDLPackVersioned` and its like, or to be ended by its own
/// deleter.
///
/// `WARPIPE_INVALID_INPUT`: the layout is longer than the memory, or has negative strides.
///
/// # Safety
/// `layout` is the address of a layout, `tensor` that of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_memory_to_dlpack(
    memory: *const warpipe_memory,
    layout: *const warpipe_layout,
    tensor: *mut *mut DLManagedTensorVersioned,
) -> warpipe_status {
    // SAFETY: the caller's promises.
    unsafe { give(tensor, || export_memory(memory, layout)) }
}

/// # Safety
/// As for [`layout_of`].
unsafe fn export_memory(
    memory: *const warpipe_memory,
    layout: *const warpipe_layout,
) -> Result<Exported<Arc<MemoryKind>>> {
    // SAFETY: the caller's promise.
    let layout = unsafe { layout_of(layout) }?;
    let (found, bytes) = (handle::find(memory)?, layout.bytes());
    let info = found.info();
    if bytes > info.bytes {
        let allowed = format!("the memory's {}", info.bytes);
        return Err(Failure::argument("layout->bytes", bytes, allowed));
    }
    let (device, address) = (
        DLDevice::of(found.streams.device()),
        info.data + layout.offset(),
    );
    let exported = Exported::new(&layout, device, address, found.object.clone())?;
    Ok(exported.read_only(info.is_read_only))
}

/// How a structure of DLPack is read.
type Import<M> = unsafe fn(NonNull<M>) -> Result<Imported, Refusal>;

/// A tensor of another framework: its device and elements, read and checked. The tensor stays the
/// caller's.
///
/// # Safety
/// `tensor` is null or the address of a valid tensor of DLPack.
unsafe fn read<M>(tensor: *const M, import: Import<M>) -> Result<(DLDevice, Elements)> {
    let tensor = NonNull::new(tensor.cast_mut()).ok_or_else(|| Failure::null("tensor"))?;
    // SAFETY: the caller's promise. The caller keeps the tensor, and calls its deleter.
    let found = ManuallyDrop::new(unsafe { import(tensor) }?);
    let elements = Elements::of(
        found.dtype(),
        found.shape(),
        found.strides(),
        found.address(),
    )?;
    Ok((found.device(), elements))
}

/// Whether a tensor's device is the host. Refuses one that `stream` does not reach.
fn is_on_host(device: DLDevice, stream: &Stream) -> Result<bool> {
    let DLDevice {
        device_type,
        device_id,
    } = device;
    let own = DLDevice::of(stream.device());
    let is_same_gpu = own.device_type == CUDA && own.device_id == device_id;
    match device_type {
        CPU | CUDA_HOST => Ok(true),
        CUDA | CUDA_MANAGED if is_same_gpu => Ok(false),
        _ => {
            let found = format!("on DLPack device type {device_type}, number {device_id}");
            let own = stream.device();
            let allowed = format!("one on the host, or on {own} of this endpoint");
            Err(Failure::argument("tensor", found, allowed))
        }
    }
}

/// The row-major layout of another framework's tensor: the one to lend for a copy of it. The tensor
/// stays the caller's.
///
/// # Safety
/// `tensor` is a valid tensor of DLPack, `layout` the address of a layout.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_dlpack_get_layout(
    tensor: *const DLManagedTensorVersioned,
    layout: *mut warpipe_layout,
) -> warpipe_status {
    // SAFETY: the caller's promises.
    unsafe { get_layout(tensor, Imported::from_versioned, layout) }
}

/// As `warpipe_dlpack_get_layout`, of a tensor of DLPack before 1.0.
///
/// # Safety
/// As for `warpipe_dlpack_get_layout`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_dlpack_get_layout_legacy(
    tensor: *const DLManagedTensor,
    layout: *mut warpipe_layout,
) -> warpipe_status {
    // SAFETY: the caller's promises.
    unsafe { get_layout(tensor, Imported::from_legacy, layout) }
}

/// # Safety
/// As for [`warpipe_dlpack_get_layout`].
unsafe fn get_layout<M>(
    tensor: *const M,
    import: Import<M>,
    layout: *mut warpipe_layout,
) -> warpipe_status {
    run(|| {
        // SAFETY: the caller's promises.
        let (place, (_, found)) = unsafe { (out("layout", layout)?, read(tensor, import)?) };
        place.put(warpipe_layout::of(&found.packed()?));
        Ok(())
    })
}

/// Enqueues a copy of another framework's tensor into a loan, in row-major order whatever its
/// strides are. It may lie on the host or on the endpoint's GPU. The tensor stays the caller's; on
/// a GPU its memory has to stay until the stream has done the copy, as it does if the framework
/// frees memory in that stream's order.
///
/// `WARPIPE_INVALID_INPUT` unless shape and element type are the loan's.
///
/// # Safety
/// `tensor` is a valid tensor of DLPack, complete in the stream's order; `stream` is a stream of
/// the endpoint's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_loan_write_dlpack(
    loan: *mut warpipe_loan,
    stream: *mut c_void,
    tensor: *const DLManagedTensorVersioned,
) -> warpipe_status {
    // SAFETY: the caller's promises.
    unsafe { write_loan(loan, stream, tensor, Imported::from_versioned) }
}

/// As `warpipe_loan_write_dlpack`, of a tensor of DLPack before 1.0.
///
/// # Safety
/// As for `warpipe_loan_write_dlpack`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_loan_write_dlpack_legacy(
    loan: *mut warpipe_loan,
    stream: *mut c_void,
    tensor: *const DLManagedTensor,
) -> warpipe_status {
    // SAFETY: the caller's promises.
    unsafe { write_loan(loan, stream, tensor, Imported::from_legacy) }
}

/// # Safety
/// As for [`warpipe_loan_write_dlpack`].
unsafe fn write_loan<M>(
    loan: *mut warpipe_loan,
    stream: *mut c_void,
    tensor: *const M,
    import: Import<M>,
) -> warpipe_status {
    call(loan, |lent| {
        // SAFETY: the caller's promise.
        let (device, elements) = unsafe { read(tensor, import) }?;
        let (found, wanted) = (elements.packed()?, *lent.layout());
        if found != wanted {
            let allowed = format!("{wanted:?}, the loan's layout");
            return Err(Failure::argument("tensor", format!("{found:?}"), allowed));
        }
        let OnDevice { object, streams } = &mut **lent;
        // SAFETY: the caller's promise.
        let stream = unsafe { streams.get(stream) }?;
        if found.bytes() == 0 {
            return Ok(());
        }
        if is_on_host(device, &stream)? {
            // SAFETY: the caller promises the tensor, of which nothing is read after the return.
            return object.write(&stream, &unsafe { elements.bytes() }?);
        }
        // Before the copy, of which the driver may take a part alone.
        object.stay_behind(&stream);
        // SAFETY: the slot is the loan's alone and as long as its layout; the caller promises the
        // tensor.
        Ok(unsafe { elements.copy_on(&stream, object.slot_ptr()) }?)
    })
}
