//! Many signals in one launch: a kernel that stores up to 64 words at once.
//!
//! A stream's memory operations run one after another: a batch of 64 words takes an H200 45 us, the
//! kernel 4 us. Its threads store in parallel, each behind a fence at system scope.

use std::ffi::{CStr, c_void};
use std::ptr;

use super::super::sys::Fault;
use super::super::sys::{CUdeviceptr, CUfunction, CUstream, Driver};
use super::kernels::load_resident;
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

/// The kernel, resident in one context.
#[derive(Debug)]
pub(in crate::backend::cuda) struct Broadcast {
    function: CUfunction,
}

impl Broadcast {
    /// Loads the kernel and launches it once without words, see [`load_resident`]. The context is
    /// current.
    pub fn load(driver: &Driver) -> Result<Broadcast> {
        load_resident(driver, PTX, c"warpipe_broadcast", |function, stream| {
            // SAFETY: no words, and the stream is live.
            unsafe { Broadcast { function }.launch(driver, stream, &[]) }
        })
        .map(|function| Broadcast { function })
    }

    /// Stores the words of up to [`WORDS_MAX`] signals, behind the stream's earlier work.
    ///
    /// # Safety
    /// As for [`crate::backend::Backend::batch`]; `ops` are signals.
    pub unsafe fn launch(
        &self,
        driver: &Driver,
        stream: CUstream,
        ops: &[StreamOp],
    ) -> Result<(), Fault> {
        let mut list = SignalBatch {
            count: 0,
            signals: [Signal { word: 0, value: 0 }; WORDS_MAX],
        };
        for (signal, op) in list.signals.iter_mut().zip(ops) {
            if let StreamOp::Signal { word, value } = *op {
                *signal = Signal { word, value };
                list.count += 1;
            }
        }
        let mut parameters = [ptr::from_mut(&mut list).cast::<c_void>()];
        // SAFETY: the kernel takes this one structure by value and reads `count` of its pairs;
        // the caller vouches for their words.
        unsafe { driver.launch(self.function, 1, WORDS_MAX as u32, stream, &mut parameters) }
    }
}
