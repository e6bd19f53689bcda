//! The two steps of a ring on a stream, `steps.cu`.

use std::ffi::CStr;

use super::KernelRing;
use super::host_ring::HostRing;
use crate::error::{Error, Result};
use crate::kernel::{Kernel, KernelLaunch, module};
use crate::stream::Stream;

/// A static, so that it has one address, and the module is loaded once.
static PTX: &CStr = module(concat!(include_str!("steps.ptx"), "\0"));

/// Waits for the next item.
pub(crate) static WAIT: Kernel = Kernel::new(c"warpipe_ring_wait_step", PTX, wait);
/// Passes on the item that was waited for.
pub(crate) static PASS: Kernel = Kernel::new(c"warpipe_ring_pass_step", PTX, pass);

/// # Safety
/// As for [`HostRing::new`], of the one argument.
unsafe fn wait(launch: KernelLaunch<'_>) {
    // SAFETY: the caller's promise.
    unsafe { HostRing::new(launch.args[0]) }.wait_step();
}

/// # Safety
/// As for [`HostRing::new`], of the one argument.
unsafe fn pass(launch: KernelLaunch<'_>) {
    // SAFETY: the caller's promise.
    unsafe { HostRing::new(launch.args[0]) }.pass_step();
}

/// Both kernels.
pub static RING_STEPS: &[Kernel] = &[
    Kernel::new(c"warpipe_ring_wait_step", PTX, wait),
    Kernel::new(c"warpipe_ring_pass_step", PTX, pass),
];

impl KernelRing {
    /// Has `stream` wait for the next item, or a producer's for the next free slot, by a kernel of
    /// one thread. May be captured in a graph. If the wait ends without the item, no later step of
    /// this side waits or passes anything on, and [`check`](Self::check) says why.
    ///
    /// # Errors
    /// As for [`params`](Self::params), and [`Error::Driver`].
    pub fn wait_on(&self, stream: &Stream) -> Result<()> {
        self.enqueue(&WAIT, stream, stream)
    }

    /// The producer: publishes the item in the slot that [`wait_on`](Self::wait_on) waited for,
    /// behind the stream's work so far. Without such a wait it does nothing. May be captured in a
    /// graph.
    ///
    /// # Errors
    /// As for [`wait_on`](Self::wait_on), and [`Error::Argument`] for a consumer.
    pub fn publish_on(&self, stream: &Stream) -> Result<()> {
        self.check_role(true)?;
        self.enqueue(&PASS, stream, stream)
    }

    /// A consumer: releases the item that [`wait_on`](Self::wait_on) waited for, behind the stream's
    /// work so far. May be captured in a graph.
    ///
    /// # Errors
    /// As for [`wait_on`](Self::wait_on), and [`Error::Argument`] for a producer.
    pub fn release_on(&self, stream: &Stream) -> Result<()> {
        self.check_role(false)?;
        self.enqueue(&PASS, stream, stream)
    }

    fn check_role(&self, is_producer: bool) -> Result<()> {
        if self.info().is_producer == is_producer {
            return Ok(());
        }
        let (found, allowed) = match is_producer {
            true => (
                "a consumer's",
                "the producer's: a consumer calls release_on",
            ),
            false => (
                "the producer's",
                "a consumer's: the producer calls publish_on",
            ),
        };
        Err(Error::argument("ring", found, allowed))
    }

    /// As [`wait_on`](Self::wait_on), on a stream that is being captured and that its owner may
    /// destroy: the ring records `user` in its place.
    #[doc(hidden)] // For the Python package, with streams of other frameworks.
    pub fn capture_wait(&self, stream: &Stream, user: &Stream) -> Result<()> {
        self.enqueue(&WAIT, stream, user)
    }

    /// As [`publish_on`](Self::publish_on) or [`release_on`](Self::release_on), see
    /// [`capture_wait`](Self::capture_wait).
    #[doc(hidden)]
    pub fn capture_pass(&self, publishes: bool, stream: &Stream, user: &Stream) -> Result<()> {
        self.check_role(publishes)?;
        self.enqueue(&PASS, stream, user)
    }

    /// Launches a step. The ring's memory lives until `user` is past it.
    fn enqueue(&self, step: &'static Kernel, stream: &Stream, user: &Stream) -> Result<()> {
        let params = self.params(user)?;
        stream.check_of(&self.device)?;
        // SAFETY: the kernel takes the block, which lives until the stream is past it. Where `user`
        // is another stream, `stream` is being captured: it runs nothing, and the stream that
        // launches the graph is named to `params`.
        unsafe { stream.launch(step, 1, 1, &[params]) }
    }
}
