//! Memory of this process as a tensor for consumers of DLPack. **This module is marked for
//! unsafe**: it hands out structures by their address, and frees them again.

use std::ptr::{NonNull, null_mut, with_exposed_provenance_mut};

use warpipe::{Layout, RANK_MAX};

use crate::abi::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLTensor, FLAG_IS_COPIED,
    FLAG_READ_ONLY, VERSION,
};
use crate::refusal::Refusal;

/// A tensor over memory that `Owner` keeps. [`into_versioned`](Self::into_versioned) or
/// [`into_legacy`](Self::into_legacy) make the structure for the consumer, with the owner in it.
/// Dropped before, it drops the owner.
///
/// The owner has to keep the memory valid until it is dropped: that is what a consumer relies on.
/// It is dropped on the thread that calls the deleter, which may be any; a panic there ends the
/// process, since a deleter is a function of C.
#[derive(Debug)]
pub struct Exported<Owner> {
    /// Null if the tensor has no elements.
    address: u64,
    device: DLDevice,
    dtype: DLDataType,
    ndim: i32,
    shape: [i64; RANK_MAX],
    strides: [i64; RANK_MAX],
    flags: u64,
    owner: Owner,
}

/// One allocation for everything that a tensor names, freed by its deleter.
struct Allocation<Owner> {
    managed: DLManagedTensorVersioned,
    shape: [i64; RANK_MAX],
    strides: [i64; RANK_MAX],
    _owner: Owner,
}

impl<Owner: Send + 'static> Exported<Owner> {
    /// A tensor of the shape, strides and element type of `layout`, with its element of all indices
    /// 0 at `address`. The layout's [`offset`](Layout::offset) is not added.
    ///
    /// # Errors
    /// [`Refusal::Backwards`] and [`Refusal::Length`]. They drop the owner.
    pub fn new(
        layout: &Layout,
        device: DLDevice,
        address: u64,
        owner: Owner,
    ) -> Result<Exported<Owner>, Refusal> {
        let steps = layout.shape().iter().zip(layout.strides());
        if steps
            .clone()
            .any(|(&length, &stride)| length > 1 && stride < 0)
        {
            return Err(Refusal::Backwards {
                strides: layout.strides().to_vec(),
            });
        }
        let mut shape = [0; RANK_MAX];
        let mut strides = [0; RANK_MAX];
        for (axis, (&length, &stride)) in steps.enumerate() {
            shape[axis] = i64::try_from(length).map_err(|_| Refusal::Length { length })?;
            strides[axis] = stride;
        }
        let dtype = layout.dtype();
        Ok(Exported {
            address: if layout.elements() == 0 { 0 } else { address },
            device,
            dtype: DLDataType {
                code: dtype.code(),
                bits: dtype.bits() / dtype.lanes() as u8,
                lanes: dtype.lanes(),
            },
            ndim: layout.shape().len() as i32,
            shape,
            strides,
            flags: 0,
            owner,
        })
    }

    /// Whether the consumer is told not to write the memory ([`FLAG_READ_ONLY`]). Without this
    /// call it is not told. A legacy structure cannot tell it.
    pub fn read_only(self, read_only: bool) -> Exported<Owner> {
        self.flag(FLAG_READ_ONLY, read_only)
    }

    /// Whether the memory is a copy made for the consumer ([`FLAG_IS_COPIED`]). Without this call
    /// it is none. A legacy structure cannot tell it.
    pub fn copied(self, copied: bool) -> Exported<Owner> {
        self.flag(FLAG_IS_COPIED, copied)
    }

    fn flag(mut self, flag: u64, is_set: bool) -> Exported<Owner> {
        if is_set {
            self.flags |= flag;
        } else {
            self.flags &= !flag;
        }
        self
    }

    /// The structure of DLPack 1.x ([`VERSION`]). The consumer calls its deleter once, on any
    /// thread; without that call the owner is never dropped.
    pub fn into_versioned(self) -> NonNull<DLManagedTensorVersioned> {
        let allocation = Box::<Allocation<Owner>>::new_uninit();
        // From here on by its address alone: a `Box` that is moved ends the pointers into it.
        let allocation = Box::into_raw(allocation).cast::<Allocation<Owner>>();
        // SAFETY: made above, large enough, and known here alone; nothing is read before it is
        // written.
        unsafe {
            let dl_tensor = DLTensor {
                data: match self.address {
                    0 => null_mut(),
                    address => with_exposed_provenance_mut(address as usize),
                },
                device: self.device,
                ndim: self.ndim,
                dtype: self.dtype,
                shape: (&raw mut (*allocation).shape).cast(),
                strides: (&raw mut (*allocation).strides).cast(),
                byte_offset: 0,
            };
            allocation.write(Allocation {
                managed: DLManagedTensorVersioned {
                    version: VERSION,
                    manager_ctx: allocation.cast(),
                    deleter: Some(delete::<Owner>),
                    flags: self.flags,
                    dl_tensor,
                },
                shape: self.shape,
                strides: self.strides,
                _owner: self.owner,
            });
            NonNull::new_unchecked(&raw mut (*allocation).managed)
        }
    }

    /// The structure for consumers older than DLPack 1.0. It has no flags; otherwise as
    /// [`into_versioned`](Self::into_versioned).
    pub fn into_legacy(self) -> NonNull<DLManagedTensor> {
        // SAFETY: made here.
        unsafe { to_legacy(self.into_versioned()) }
    }
}

/// The same tensor for a consumer older than DLPack 1.0, which is not told its flags. Its deleter
/// calls that of `tensor`.
///
/// # Safety
/// `tensor` is a structure of DLPack 1.x that the caller owns, and from now on this one does.
pub unsafe fn to_legacy(tensor: NonNull<DLManagedTensorVersioned>) -> NonNull<DLManagedTensor> {
    // SAFETY: the caller's promise.
    let dl_tensor = unsafe { (*tensor.as_ptr()).dl_tensor };
    NonNull::from(Box::leak(Box::new(DLManagedTensor {
        dl_tensor,
        manager_ctx: tensor.as_ptr().cast(),
        deleter: Some(delete_legacy),
    })))
}

/// # Safety
/// `tensor` is of [`Exported::into_versioned`] with the same owner, and not deleted yet.
unsafe extern "C" fn delete<Owner>(tensor: *mut DLManagedTensorVersioned) {
    // SAFETY: the caller's promise: `manager_ctx` is the allocation, which ends here.
    unsafe {
        drop(Box::from_raw(
            (*tensor).manager_ctx.cast::<Allocation<Owner>>(),
        ))
    };
}

/// # Safety
/// `tensor` is of [`to_legacy`], and not deleted yet.
unsafe extern "C" fn delete_legacy(tensor: *mut DLManagedTensor) {
    // SAFETY: the caller's promise: `manager_ctx` is the tensor inside, which was not deleted.
    unsafe {
        let inside: *mut DLManagedTensorVersioned = Box::from_raw(tensor).manager_ctx.cast();
        if let Some(deleter) = (*inside).deleter {
            deleter(inside);
        }
    }
}
