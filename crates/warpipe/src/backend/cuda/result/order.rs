//! Streams, events, copies, and memory operations on words.

use std::ffi::{c_uint, c_void};
use std::ptr;

use super::{DriverAnswer, ready};
use crate::backend::cuda::fault::Fault;
use crate::backend::cuda::shutdown_gate;
use crate::backend::cuda::sys::*;

impl Driver {
    pub fn ipc_event_create(&self) -> DriverAnswer<CUevent> {
        let mut event = ptr::null_mut();
        // SAFETY: the out pointer is a live local.
        unsafe {
            call!(
                self,
                cuEventCreate(&mut event, EVENT_INTERPROCESS | EVENT_DISABLE_TIMING)
            )
        }?;
        Ok(event)
    }

    /// # Safety
    /// The event is live and was created for other processes.
    pub unsafe fn ipc_export_event(&self, event: CUevent) -> DriverAnswer<[u8; 64]> {
        let mut handle = CUipcHandle { reserved: [0; 64] };
        // SAFETY: the out pointer is a live local; the event is the caller's promise.
        unsafe { call!(self, cuIpcGetEventHandle(&mut handle, event)) }?;
        Ok(handle.reserved)
    }

    /// Accepts any bytes: an invalid handle is a failure.
    pub fn ipc_open_event(&self, handle: &[u8; 64]) -> DriverAnswer<CUevent> {
        let (mut event, handle) = (ptr::null_mut(), CUipcHandle { reserved: *handle });
        // SAFETY: the out pointer is a live local; the driver checks the bytes.
        unsafe { call!(self, cuIpcOpenEventHandle(&mut event, handle)) }?;
        Ok(event)
    }

    /// # Safety
    /// Both ranges are mapped until the copy is done; the stream is live.
    pub unsafe fn copy_async(
        &self,
        dst: CUdeviceptr,
        src: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> DriverAnswer {
        // SAFETY: the caller's promise.
        unsafe { call!(self, cuMemcpyAsync(dst, src, bytes, stream)) }
    }

    /// # Safety
    /// Both boxes are mapped until the copy is done; the stream is live.
    pub unsafe fn copy_box_async(&self, rows: &CUDA_MEMCPY3D, stream: CUstream) -> DriverAnswer {
        // SAFETY: the caller's promise.
        unsafe { call!(self, cuMemcpy3DAsync_v2(rows, stream)) }
    }

    /// # Safety
    /// `dst` is writable for the bytes until it is done; the stream is live.
    pub unsafe fn zero_async(
        &self,
        dst: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> DriverAnswer {
        // SAFETY: the caller's promise.
        unsafe { call!(self, cuMemsetD8Async(dst, 0, bytes, stream)) }
    }

    /// # Safety
    /// `dst` is writable and `src` readable for the bytes until the copy is done; the stream is
    /// live.
    pub unsafe fn upload_async(
        &self,
        dst: CUdeviceptr,
        src: *const u8,
        bytes: usize,
        stream: CUstream,
    ) -> DriverAnswer {
        // SAFETY: the caller's promise.
        unsafe { call!(self, cuMemcpyHtoDAsync_v2(dst, src.cast(), bytes, stream)) }
    }

    /// # Safety
    /// `dst` is writable and `src` readable for the bytes until the copy is done; the stream is
    /// live.
    pub unsafe fn download_async(
        &self,
        dst: *mut u8,
        src: CUdeviceptr,
        bytes: usize,
        stream: CUstream,
    ) -> DriverAnswer {
        // SAFETY: the caller's promise.
        unsafe { call!(self, cuMemcpyDtoHAsync_v2(dst.cast(), src, bytes, stream)) }
    }

    pub fn stream_create(&self) -> DriverAnswer<CUstream> {
        let mut stream = ptr::null_mut();
        // SAFETY: the out pointer is a live local.
        unsafe { call!(self, cuStreamCreate(&mut stream, STREAM_NON_BLOCKING)) }?;
        Ok(stream)
    }

    /// # Safety
    /// The stream is live and destroyed once.
    pub unsafe fn stream_destroy(&self, stream: CUstream) -> DriverAnswer {
        // SAFETY: the caller's promise.
        unsafe { call!(self, cuStreamDestroy_v2(stream)) }
    }

    /// # Safety
    /// The stream is live.
    pub unsafe fn stream_query(&self, stream: CUstream) -> DriverAnswer<bool> {
        // SAFETY: the caller's promise.
        ready(unsafe { call!(self, cuStreamQuery(stream)) })
    }

    /// Whether work on the stream is recorded into a graph. The legacy default stream counts as
    /// capturing while a stream that is ordered with it captures. The query disturbs no capture.
    ///
    /// # Safety
    /// The stream is live.
    #[inline]
    pub unsafe fn stream_is_capturing(&self, stream: CUstream) -> DriverAnswer<bool> {
        let mut status = STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the out pointer is a live local; the stream is the caller's promise.
        match unsafe { call!(self, cuStreamIsCapturing(stream, &mut status)) } {
            Ok(()) => Ok(status != STREAM_CAPTURE_STATUS_NONE),
            Err(fault) if fault.is(&[CUresult::STREAM_CAPTURE_IMPLICIT]) => Ok(true),
            Err(fault) => Err(fault),
        }
    }

    /// Sets this thread's mode, and returns the one before.
    pub fn exchange_capture_mode(&self, mode: c_uint) -> DriverAnswer<c_uint> {
        let mut mode = mode;
        // SAFETY: the pointer is to a live local, which the driver reads and writes.
        unsafe { call!(self, cuThreadExchangeStreamCaptureMode(&mut mode)) }?;
        Ok(mode)
    }

    /// # Safety
    /// Both handles are live.
    pub unsafe fn stream_wait_event(&self, stream: CUstream, event: CUevent) -> DriverAnswer {
        // SAFETY: the caller's promise.
        unsafe { call!(self, cuStreamWaitEvent(stream, event, 0)) }
    }

    /// # Safety
    /// The stream is live; the word is device-accessible until the operation is done.
    #[inline]
    pub unsafe fn stream_wait_value(
        &self,
        stream: CUstream,
        word: CUdeviceptr,
        value: u64,
    ) -> DriverAnswer {
        // SAFETY: the caller's promise.
        unsafe {
            call!(
                self,
                cuStreamWaitValue64_v2(stream, word, value, STREAM_WAIT_VALUE_GEQ)
            )
        }
    }

    /// # Safety
    /// The stream is live; the word is device-accessible until the operation is done.
    #[inline]
    pub unsafe fn stream_write_value(
        &self,
        stream: CUstream,
        word: CUdeviceptr,
        value: u64,
    ) -> DriverAnswer {
        // SAFETY: the caller's promise.
        unsafe {
            call!(
                self,
                cuStreamWriteValue64_v2(stream, word, value, STREAM_WRITE_VALUE_DEFAULT)
            )
        }
    }

    /// At most 256 operations.
    ///
    /// # Safety
    /// The stream is live; every word is device-accessible until its operation is done.
    #[inline]
    pub unsafe fn stream_batch(
        &self,
        stream: CUstream,
        operations: &mut [CUstreamBatchMemOpParams],
    ) -> DriverAnswer {
        let count = operations.len() as c_uint;
        // SAFETY: the pointer and count are those of one slice; the rest is the caller's promise.
        unsafe {
            call!(
                self,
                cuStreamBatchMemOp_v2(stream, count, operations.as_mut_ptr(), 0)
            )
        }
    }

    /// # Safety
    /// The stream is live; `function` may be called once with `argument` from any thread.
    pub unsafe fn launch_host(
        &self,
        stream: CUstream,
        function: CUhostFn,
        argument: *mut c_void,
    ) -> DriverAnswer {
        // SAFETY: the caller's promise.
        unsafe { call!(self, cuLaunchHostFunc(stream, function, argument)) }
    }

    pub fn event_create(&self) -> DriverAnswer<CUevent> {
        let mut event = ptr::null_mut();
        // SAFETY: the out pointer is a live local.
        unsafe { call!(self, cuEventCreate(&mut event, EVENT_DISABLE_TIMING)) }?;
        Ok(event)
    }

    /// # Safety
    /// The event is live and destroyed once.
    pub unsafe fn event_destroy(&self, event: CUevent) -> DriverAnswer {
        // SAFETY: the caller's promise.
        unsafe { call!(self, cuEventDestroy_v2(event)) }
    }

    /// # Safety
    /// Both handles are live.
    pub unsafe fn event_record(&self, event: CUevent, stream: CUstream) -> DriverAnswer {
        // SAFETY: the caller's promise.
        unsafe { call!(self, cuEventRecord(event, stream)) }
    }

    /// # Safety
    /// The event is live.
    pub unsafe fn event_query(&self, event: CUevent) -> DriverAnswer<bool> {
        // SAFETY: the caller's promise.
        ready(unsafe { call!(self, cuEventQuery(event)) })
    }
}
