//! DLPack both ways. **This module is marked for unsafe**: it takes in and hands out structures by
//! their address, and reads memory that other frameworks name.

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use warpipe::backend::{DevicePtr, Rows};
use warpipe::{Layout, SlotHold, Stream};
use warpipe_dlpack::{
    CPU, CUDA, CUDA_HOST, CUDA_MANAGED, DLDevice, DLManagedTensor, DLManagedTensorVersioned,
    Exported, Imported, Refusal, to_legacy,
};

use crate::arguments::{out, out_object};
use crate::call::call;
use crate::warpipe_status::WARPIPE_LIMIT_REACHED;
use crate::{
    Failure, LoanKind, MemoryKind, OnDevice, Received, Result, handle, layout_of, run,
    warpipe_layout, warpipe_loan, warpipe_memory, warpipe_sample, warpipe_status,
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

/// A tensor of another framework: its structure, read and checked. The tensor stays the caller's.
///
/// # Safety
/// `tensor` is null or the address of a valid tensor of DLPack.
unsafe fn read<M>(tensor: *const M, import: Import<M>) -> Result<Borrowed> {
    let tensor = NonNull::new(tensor.cast_mut()).ok_or_else(|| Failure::null("tensor"))?;
    // SAFETY: the caller's promise.
    Borrowed::of(unsafe { import(tensor) }?)
}

/// The contents of a foreign tensor, which its owner keeps.
#[derive(Debug)]
struct Borrowed {
    device: DLDevice,
    /// The address of the first byte, and the layout from there.
    lowest: DevicePtr,
    layout: Layout,
    /// The same elements in row-major order.
    packed: Layout,
}

impl Borrowed {
    fn of(imported: Imported) -> Result<Borrowed> {
        // The caller keeps the tensor, and calls its deleter.
        let imported = std::mem::ManuallyDrop::new(imported);
        let (dtype, shape, strides) = (imported.dtype(), imported.shape(), imported.strides());
        let packed = Layout::contiguous(dtype, shape)?;
        // How far the elements reach before the one with all indices 0.
        let before = shape.iter().zip(strides).map(|(&length, &stride)| {
            let steps = i128::from(length.saturating_sub(1));
            (i128::from(stride) * steps).min(0)
        });
        let before = before.sum::<i128>().unsigned_abs() * u128::from(dtype.bytes());
        let offset = if packed.bytes() == 0 { 0 } else { before };
        let lowest = u64::try_from(offset)
            .ok()
            .and_then(|offset| Some((offset, imported.address().checked_sub(offset)?)));
        let (offset, lowest) = lowest
            .ok_or_else(|| Failure::input("its elements reach before the first address".into()))?;
        Ok(Borrowed {
            device: imported.device(),
            lowest,
            layout: Layout::strided(dtype, shape, strides, offset)?,
            packed,
        })
    }

    /// Refuses a tensor that the device of `stream` does not reach.
    fn check_place(&self, stream: &Stream) -> Result<bool> {
        let own = DLDevice::of(stream.device());
        let on_host = matches!(self.device.device_type, CPU | CUDA_HOST);
        let same_gpu = matches!(self.device.device_type, CUDA | CUDA_MANAGED)
            && own.device_type == CUDA
            && own.device_id == self.device.device_id;
        if on_host || same_gpu {
            return Ok(on_host);
        }
        let DLDevice {
            device_type,
            device_id,
        } = self.device;
        let found = format!("on DLPack device type {device_type}, number {device_id}");
        let allowed = format!(
            "one on the host, or on {} of this endpoint",
            stream.device()
        );
        Err(Failure::argument("tensor", found, allowed))
    }

    /// Enqueues the copy of all elements into a loan's slot, which has the layout `packed`. Of a
    /// tensor on the host nothing is read after the return.
    ///
    /// # Safety
    /// The tensor's memory is readable, on a GPU until the stream has done the copy.
    unsafe fn copy_into(&self, loan: &mut LoanKind, stream: &Stream) -> Result<()> {
        if self.packed.bytes() == 0 {
            return Ok(());
        }
        if !self.check_place(stream)? {
            // Before the copy, of which the driver may take a part alone.
            loan.stay_behind(stream);
            // SAFETY: the slot is the loan's alone and as long as its layout; the caller promises
            // the tensor.
            unsafe {
                stream.copy_elements(loan.slot_ptr(), &self.packed, self.lowest, &self.layout)
            }?;
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.with_host_bytes(|bytes| loan.write(stream, bytes)) }
    }

    /// Passes the elements in row-major order to `work`.
    ///
    /// # Safety
    /// The tensor is on the host and readable.
    unsafe fn with_host_bytes<R>(&self, work: impl FnOnce(&[u8]) -> Result<R>) -> Result<R> {
        let length = self.packed.bytes() as usize;
        if self.layout.is_contiguous() {
            let first = std::ptr::with_exposed_provenance(self.lowest as usize);
            // SAFETY: contiguous, so that its bytes are these; the caller's promise.
            return work(unsafe { std::slice::from_raw_parts(first, length) });
        }
        let mut bytes: Vec<u8> = Vec::new();
        if bytes.try_reserve_exact(length).is_err() {
            let said = format!("this process has no room for a copy of {length} bytes");
            return Err(Failure::Own(WARPIPE_LIMIT_REACHED, said));
        }
        let to = bytes.as_mut_ptr().expose_provenance() as DevicePtr;
        let rows = Rows::between(to, &self.packed, self.lowest, &self.layout)?;
        // SAFETY: the vector has room for the packed elements, and all of them are written; the
        // tensor is the caller's promise.
        unsafe {
            rows.copy();
            bytes.set_len(length);
        }
        work(&bytes)
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
        let (place, tensor) = unsafe { (out("layout", layout)?, read(tensor, import)?) };
        place.put(warpipe_layout::of(&tensor.packed));
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
        let tensor = unsafe { read(tensor, import) }?;
        let (found, wanted) = (&tensor.packed, lent.layout());
        if found != wanted {
            let allowed = format!("{wanted:?}, the loan's layout");
            return Err(Failure::argument("tensor", format!("{found:?}"), allowed));
        }
        let OnDevice { object, streams } = &mut **lent;
        // SAFETY: the caller's promises.
        unsafe { tensor.copy_into(object, &*streams.get(stream)?) }
    })
}
