//! Stand-in for a stream: it gets no work here.

use crate::backend::StreamOp;
use crate::error::Result;

#[derive(Debug, Clone)]
pub(crate) struct Stream;

impl Stream {
    pub(crate) fn is_same(&self, _: &Stream) -> bool {
        true
    }

    pub(crate) unsafe fn batch(&self, _: &[StreamOp]) -> Result<()> {
        Ok(())
    }
}
