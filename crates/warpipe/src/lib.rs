//! GPU memory and streams of tensors, handed between processes without a copy, surviving the death of any of them.
#![deny(missing_docs)]

pub mod backend;
pub mod device;
mod error;
#[cfg(feature = "cudarc")]
pub mod interop_cudarc;
pub mod kernel;
mod stream;
pub mod tensor;

pub use device::Device;
pub use error::{Error, HandshakeFault, Holder, Result};
pub use kernel::Kernel;
pub use stream::Stream;
pub use tensor::{DType, Layout};
