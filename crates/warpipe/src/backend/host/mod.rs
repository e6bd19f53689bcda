//! The host backend.
use crate::backend::Backend;
use std::sync::Arc;
/// stub
#[derive(Debug)]
pub struct HostBackend;
impl HostBackend {
    /// stub
    pub fn shared() -> Arc<dyn Backend> {
        unimplemented!()
    }
}
