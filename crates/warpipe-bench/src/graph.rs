//! CUDA graphs, by the driver's own functions, which the backend does not call. **This module is
//! marked for unsafe**: it calls the driver.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

use anyhow::ensure;
use libloading::Library;
use warpipe::Stream;

type Handle = *mut c_void;

/// `CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`: other threads may call the driver meanwhile.
const THREAD_LOCAL: c_uint = 1;

/// The driver's functions for graphs, with a device's primary context current on this thread.
#[derive(Debug)]
pub struct Graphs {
    library: Library,
}

/// Recorded work that can be launched.
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
    /// Makes the context of the GPU with this number current on this thread.
    pub fn of(ordinal: u32) -> anyhow::Result<Graphs> {
        // SAFETY: the library is loaded already, so nothing is initialised again.
        let library = unsafe { Library::new("libcuda.so.1")? };
        let graphs = Graphs { library };
        let mut primary: Handle = ptr::null_mut();
        let device = c_int::try_from(ordinal)?;
        call!(graphs, cuDevicePrimaryCtxRetain(&mut primary, device): *mut Handle, c_int);
        call!(graphs, cuCtxSetCurrent(primary): Handle);
        Ok(graphs)
    }

    /// Records what `work` enqueues on the stream, instead of running it.
    pub fn record(
        &self,
        stream: &Stream,
        work: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<Graph<'_>> {
        let raw = stream.raw().0;
        call!(self, cuStreamBeginCapture_v2(raw, THREAD_LOCAL): Handle, c_uint);
        let worked = work();
        let mut recorded = Graph {
            graphs: self,
            graph: ptr::null_mut(),
            launchable: ptr::null_mut(),
        };
        // The stream leaves its capture in any case.
        call!(self, cuStreamEndCapture(raw, &mut recorded.graph): Handle, *mut Handle);
        worked?;
        call!(
            self,
            cuGraphInstantiateWithFlags(&mut recorded.launchable, recorded.graph, 0):
                *mut Handle, Handle, u64
        );
        Ok(recorded)
    }
}

impl Graph<'_> {
    /// Enqueues the recorded work.
    pub fn launch(&self, stream: &Stream) -> anyhow::Result<()> {
        call!(self.graphs, cuGraphLaunch(self.launchable, stream.raw().0): Handle, Handle);
        Ok(())
    }

    fn destroy(&self) -> anyhow::Result<()> {
        if !self.launchable.is_null() {
            call!(self.graphs, cuGraphExecDestroy(self.launchable): Handle);
        }
        if !self.graph.is_null() {
            call!(self.graphs, cuGraphDestroy(self.graph): Handle);
        }
        Ok(())
    }
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        let _ = self.destroy();
    }
}
