//! Stream capture, by the driver's own functions, which the backend does not call. **This module is
//! marked for unsafe**: it calls the driver.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

use anyhow::{Result, ensure};
use libloading::Library;
use warpipe::{Device, Stream};

use crate::cases::Skip;
use crate::context::Context;

type Handle = *mut c_void;

/// The calls that a capture forbids to other threads.
#[derive(Debug, Clone, Copy)]
pub enum Mode {
    /// Unsafe calls of every thread: the default of CUDA's runtime and of PyTorch.
    Global = 0,
    /// Unsafe calls of the thread that captures.
    ThreadLocal = 1,
    /// Nothing.
    Relaxed = 2,
}

/// The driver's functions for graphs, with the primary context of device 0 current on this thread.
#[derive(Debug)]
pub struct Graphs {
    library: Library,
}

/// A capture that was ended; its work can be launched.
#[derive(Debug)]
pub struct Graph<'a> {
    graphs: &'a Graphs,
    graph: Handle,
    launchable: Handle,
}

macro_rules! call {
    ($graphs:expr, $name:ident($($argument:expr),*): $($type:ty),*) => {{
        // SAFETY: the driver's function of this name has this signature, and every place that it
        // writes to lives.
        let code = unsafe {
            let function = $graphs
                .library
                .get::<unsafe extern "C" fn($($type),*) -> c_int>(stringify!($name))?;
            function($($argument),*)
        };
        ensure!(code == 0, "{}: {code}", stringify!($name));
    }};
}

impl Graphs {
    /// Makes the context current on this thread.
    ///
    /// # Errors
    /// The case is skipped where there is no driver; the driver lacks a function or refuses.
    pub fn of(context: &Context) -> Result<Graphs> {
        if context.settings.backend == crate::Backend::Host {
            return Err(Skip("the host backend's streams cannot be captured".into()).into());
        }
        // SAFETY: the library is loaded already, so nothing is initialised again.
        let library = unsafe { Library::new("libcuda.so.1")? };
        let graphs = Graphs { library };
        let mut primary: Handle = ptr::null_mut();
        call!(graphs, cuDevicePrimaryCtxRetain(&mut primary, 0): *mut Handle, c_int);
        call!(graphs, cuCtxSetCurrent(primary): Handle);
        Ok(graphs)
    }

    /// `cuStreamBeginCapture`: what the stream is given from now on is recorded.
    ///
    /// # Errors
    /// The driver refuses the call.
    pub fn begin(&self, stream: &Stream, mode: Mode) -> Result<()> {
        call!(self, cuStreamBeginCapture_v2(stream.raw().0, mode as c_uint): Handle, c_uint);
        Ok(())
    }

    /// `cuStreamEndCapture` and `cuGraphInstantiate`: what was recorded.
    ///
    /// # Errors
    /// The capture has been invalidated, or the driver refuses a call.
    pub fn end(&self, stream: &Stream) -> Result<Graph<'_>> {
        let (mut graph, mut launchable): (Handle, Handle) = (ptr::null_mut(), ptr::null_mut());
        call!(self, cuStreamEndCapture(stream.raw().0, &mut graph): Handle, *mut Handle);
        call!(
            self,
            cuGraphInstantiateWithFlags(&mut launchable, graph, 0): *mut Handle, Handle, u64
        );
        Ok(Graph {
            graphs: self,
            graph,
            launchable,
        })
    }

    /// A stream that is ordered with the legacy default stream.
    ///
    /// # Errors
    /// The driver refuses the call.
    pub fn blocking_stream(&self, device: &Device) -> Result<Stream> {
        let mut stream: Handle = ptr::null_mut();
        call!(self, cuStreamCreate(&mut stream, 0): *mut Handle, c_uint);
        // SAFETY: made above; it is never destroyed, so it outlives everything in the case's
        // process.
        Ok(unsafe { Stream::borrow_raw(device, stream) })
    }

    /// `cuDevicePrimaryCtxReset`, which is what `cudaDeviceReset` does.
    ///
    /// # Errors
    /// The driver refuses the call.
    pub fn reset_device(&self) -> Result<()> {
        call!(self, cuDevicePrimaryCtxReset_v2(0): c_int);
        Ok(())
    }
}

impl Graph<'_> {
    /// `cuGraphLaunch`: enqueues the recorded work on a stream that does not capture.
    ///
    /// # Errors
    /// The driver refuses the call.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        call!(self.graphs, cuGraphLaunch(self.launchable, stream.raw().0): Handle, Handle);
        Ok(())
    }

    fn destroy(&self) -> Result<()> {
        call!(self.graphs, cuGraphExecDestroy(self.launchable): Handle);
        call!(self.graphs, cuGraphDestroy(self.graph): Handle);
        Ok(())
    }
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        let _ = self.destroy();
    }
}
