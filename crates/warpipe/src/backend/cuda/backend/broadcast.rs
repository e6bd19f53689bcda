//! Many signals in one launch: a kernel that stores up to 64 words at once.
//!
//! A stream's memory operations run one after another: a batch of 64 words takes an H200 45 us, the
//! kernel 4 us. Its threads store in parallel, each behind a fence at system scope.

use std::ffi::CStr;

use super::super::sys::{CUdeviceptr, CUstream, Driver, Fault};
use super::CudaBackend;
use super::kernels::ResidentKernel;
use crate::backend::StreamOp;
use crate::error::Result;
use crate::kernel::module;

const PTX: &CStr = module(concat!(include_str!("broadcast.ptx"), "\0"));

/// The words that one launch can store.
pub(in crate::backend::cuda) const WORDS_MAX: usize = 64;

#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Signal {
    word: CUdeviceptr,
    value: u64,
}

/// The kernel's one parameter, by value, as in `broadcast.cu`.
#[repr(C)]
#[derive(Debug)]
struct SignalBatch {
    count: u64,
    signals: [Signal; WORDS_MAX],
}

const _: () = assert!(size_of::<SignalBatch>() == 8 + 16 * WORDS_MAX);

impl SignalBatch {
    const EMPTY: SignalBatch = SignalBatch {
        count: 0,
        signals: [Signal { word: 0, value: 0 }; WORDS_MAX],
    };
}

/// Loads the kernel. The context is current.
pub(super) fn load(driver: &Driver) -> Result<ResidentKernel> {
    // SAFETY: the kernel of `broadcast.cu`; without signals it stores nothing.
    unsafe { ResidentKernel::load(driver, PTX, c"warpipe_broadcast", SignalBatch::EMPTY) }
}

impl CudaBackend {
    /// Stores the words of up to [`WORDS_MAX`] signals, behind the stream's earlier work.
    ///
    /// # Safety
    /// As for [`crate::backend::Streams::batch`]; `ops` are signals.
    pub(in crate::backend::cuda) unsafe fn signal_at_once(
        &self,
        stream: CUstream,
        ops: &[StreamOp],
    ) -> Result<(), Fault> {
        let mut list = SignalBatch::EMPTY;
        for (signal, op) in list.signals.iter_mut().zip(ops) {
            if let StreamOp::Signal { word, value } = *op {
                *signal = Signal { word, value };
                list.count += 1;
            }
        }
        let shape = (1, WORDS_MAX as u32);
        // SAFETY: the kernel reads `count` of the pairs; the caller vouches for their words.
        unsafe { self.broadcast.launch(self.driver, stream, shape, list) }
    }
}
