//! The CUDA driver API.
use crate::backend::Backend;
use crate::error::{Error, Result};
use std::sync::Arc;
#[derive(Debug)]
/// stub
pub struct CudaBackend;
impl CudaBackend {
    /// stub
    pub fn open(_ordinal: u32) -> Result<Arc<dyn Backend>> {
        Err(Error::NoDriver { searched: "libcuda.so.1".into(), reason: "not built yet".into() })
    }
}
/// stub
pub fn device_count() -> Result<u32> {
    Err(Error::NoDriver { searched: "libcuda.so.1".into(), reason: "not built yet".into() })
}
/// stub
pub fn device_uuid(_ordinal: u32) -> Result<[u8; 16]> {
    Err(Error::NoDriver { searched: "libcuda.so.1".into(), reason: "not built yet".into() })
}
