//! Tensors with gaps, or in another order. Their elements are sent in row-major order.
//! **This module is marked for unsafe**: it reads memory that other frameworks name.

use warpipe::Layout;
use warpipe::backend::{DevicePtr, Rows};

use crate::errors::{Fault, Outcome};

/// A tensor in its present memory, on the host or on a GPU.
#[derive(Debug)]
pub struct Scattered {
    /// The address of the first byte.
    lowest: DevicePtr,
    layout: Layout,
    /// The same elements in row-major order.
    packed: Layout,
}

impl Scattered {
    /// A layout of bytes that begin at `lowest`.
    pub fn new(layout: Layout, lowest: DevicePtr) -> Outcome<Scattered> {
        Ok(Scattered {
            lowest,
            layout,
            packed: Layout::contiguous(layout.dtype(), layout.shape())?,
        })
    }

    /// The layout that is sent.
    pub fn packed(&self) -> Layout {
        self.packed
    }

    /// The bytes from its first to its last, gaps included.
    pub fn extent(&self) -> (DevicePtr, u64) {
        (self.lowest, self.layout.bytes())
    }

    /// Enqueues the copy of all elements to `to`: one piece of work.
    ///
    /// # Safety
    /// As for [`warpipe::Stream::copy_elements`].
    pub unsafe fn enqueue(&self, stream: &warpipe::Stream, to: DevicePtr) -> Outcome<()> {
        // SAFETY: the caller's promise.
        Ok(unsafe { stream.copy_elements(to, &self.packed, self.lowest, &self.layout) }?)
    }

    /// Copies all elements to `to`, on the CPU.
    ///
    /// # Safety
    /// The tensor is on the host and readable; `to` is writable for as many bytes, and apart from
    /// it.
    pub unsafe fn copy_to(&self, to: DevicePtr) -> Outcome<()> {
        let rows = Rows::between(to, &self.packed, self.lowest, &self.layout)?;
        // SAFETY: the caller's promise; every row lies in its tensor, as layouts are checked to.
        unsafe { rows.copy() };
        Ok(())
    }

    /// The same into a vector.
    ///
    /// # Safety
    /// The tensor is on the host and readable.
    pub unsafe fn to_vec(&self) -> Outcome<Vec<u8>> {
        let mut bytes = room_for(self.packed.bytes())?;
        // SAFETY: the caller's promise; there is room for all of it, and all of it is written.
        unsafe {
            self.copy_to(bytes.as_mut_ptr().expose_provenance() as DevicePtr)?;
            bytes.set_len(self.packed.bytes() as usize);
        }
        Ok(bytes)
    }
}

/// An empty vector that has room for so many bytes.
pub fn room_for(length: u64) -> Outcome<Vec<u8>> {
    let mut bytes = Vec::new();
    let room = usize::try_from(length)
        .ok()
        .and_then(|length| bytes.try_reserve_exact(length).ok());
    room.ok_or_else(|| {
        Fault::Own(
            "DeviceMemoryError",
            format!("this process has no room for {length} bytes"),
        )
    })?;
    Ok(bytes)
}
