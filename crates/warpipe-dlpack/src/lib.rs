//! DLPack 1.x over memory of [`warpipe`]: tensors made for other frameworks, and theirs read.
//!
//! * [`DLManagedTensorVersioned`], [`DLManagedTensor`] and the structures inside them have the
//!   layout of `dlpack.h` on a 64-bit machine.
//! * [`Exported`] makes either of the two over memory that an owner keeps; the consumer's call of
//!   the deleter drops the owner.
//! * [`Imported`] takes either of the two, checked, and calls its deleter when it is dropped.
//! * [`Refusal`] is the error of both.
//! * [`Elements`] copies a tensor in row-major order, whatever its strides are.
//!
//! Nothing here orders streams. The memory has to be complete for its
//! reader, as `__dlpack__` of the array API standard says with its argument `stream`.
//!
//! Source: the [DLPack specification](https://dmlc.github.io/dlpack/latest/c_api.html).
//!
//! ```
//! use warpipe::{DType, Device, Layout};
//! use warpipe_dlpack::{DLDevice, Exported, Imported};
//!
//! let numbers = vec![1.5f32, 2.5, 3.5];
//! let address = numbers.as_ptr().expose_provenance() as u64;
//! let layout = Layout::contiguous(DType::F32, &[3])?;
//! let tensor = Exported::new(&layout, DLDevice::of(&Device::host()), address, numbers)?
//!     .read_only(true)
//!     .into_versioned();
//!
//! // SAFETY: the tensor was made above, and nothing else has it.
//! let imported = unsafe { Imported::from_versioned(tensor) }?;
//! assert_eq!((imported.dtype(), imported.shape()), (DType::F32, &[3][..]));
//! assert!(imported.is_read_only());
//! drop(imported); // calls the deleter, which frees `numbers`
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![deny(missing_docs)]

mod abi;
mod elements;
mod export;
mod import;
mod refusal;

pub use abi::{
    CPU, CUDA, CUDA_HOST, CUDA_MANAGED, DLDataType, DLDevice, DLManagedTensor,
    DLManagedTensorVersioned, DLPackVersion, DLTensor, FLAG_IS_COPIED, FLAG_READ_ONLY, VERSION,
};
pub use elements::Elements;
pub use export::{Exported, to_legacy};
pub use import::{Imported, row_major};
pub use refusal::Refusal;
