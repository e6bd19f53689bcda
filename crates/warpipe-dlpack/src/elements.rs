//! The elements of a tensor in any order, copied in row-major order. **This module is marked for
//! unsafe**: it reads memory that other frameworks name.

use std::borrow::Cow;
use std::ptr::with_exposed_provenance;

use warpipe::backend::{DevicePtr, Rows, room_for};
use warpipe::{DType, Error, Layout, Result, Stream};

/// Where the elements of a tensor lie, on the host or on a GPU: with gaps or without, in any order.
/// It owns nothing.
#[derive(Debug, Clone, Copy)]
pub struct Elements {
    lowest: DevicePtr,
    layout: Layout,
}

impl Elements {
    /// Elements of this layout in the slot that begins at `lowest`.
    pub fn new(layout: Layout, lowest: DevicePtr) -> Elements {
        Elements { lowest, layout }
    }

    /// Elements of this shape and these strides, in elements. The one with all indices 0 is at
    /// `address`. As the strides of an import, they may be any numbers.
    ///
    /// # Errors
    /// [`Error::Argument`] as of [`Layout::strided`], and for elements before the first address or
    /// behind the last one.
    pub fn of(dtype: DType, shape: &[u64], strides: &[i64], address: u64) -> Result<Elements> {
        // How far the elements reach before the one with all indices 0.
        let steps = shape.iter().zip(strides).map(|(&length, &stride)| {
            let last = i128::from(length.saturating_sub(1));
            i128::from(stride.min(0)).saturating_mul(last)
        });
        let below = steps.fold(0i128, i128::saturating_add).unsigned_abs();
        let below = if shape.contains(&0) { 0 } else { below };
        let below = u64::try_from(below.saturating_mul(u128::from(dtype.bytes())));
        let below = below.unwrap_or(u64::MAX);
        let layout = Layout::strided(dtype, shape, strides, below)?;
        let lowest = address.checked_sub(below);
        let lowest = lowest.filter(|lowest| lowest.checked_add(layout.bytes()).is_some());
        let lowest = lowest.ok_or_else(|| Error::Argument {
            argument: "tensor layout",
            found: "it reaches further than an address can".into(),
            allowed: String::new(),
        })?;
        Ok(Elements { lowest, layout })
    }

    /// The address of the first byte.
    pub fn lowest(&self) -> DevicePtr {
        self.lowest
    }

    /// The layout of the slot from there on, gaps included.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The layout of a copy: row-major, without gaps.
    ///
    /// # Errors
    /// [`Error::Argument`] for elements that lie on each other and are together more than
    /// `i64::MAX` bytes.
    pub fn packed(&self) -> Result<Layout> {
        Layout::contiguous(self.layout.dtype(), self.layout.shape())
    }

    /// Enqueues the copy of all elements to `to`: one operation.
    ///
    /// # Errors
    /// As of [`Stream::copy_elements`].
    ///
    /// # Safety
    /// As for [`Stream::copy_elements`].
    pub unsafe fn copy_on(&self, stream: &Stream, to: DevicePtr) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { stream.copy_elements(to, &self.packed()?, self.lowest, &self.layout) }
    }

    /// Copies all elements to `to`, on the CPU.
    ///
    /// # Errors
    /// As of [`packed`](Self::packed).
    ///
    /// # Safety
    /// The elements are on the host and readable; `to` is writable for as many bytes as the copy
    /// has, and apart from them.
    pub unsafe fn copy_to(&self, to: DevicePtr) -> Result<()> {
        let rows = Rows::between(to, &self.packed()?, self.lowest, &self.layout)?;
        // SAFETY: the caller's promise; every row lies in its tensor, as layouts are checked to.
        unsafe { rows.copy() };
        Ok(())
    }

    /// The bytes of all elements in row-major order: a copy, unless they lie so.
    ///
    /// # Errors
    /// [`Error::Limit`] when this process has no room for them.
    ///
    /// # Safety
    /// The elements are on the host, and readable and unchanged as long as the result is used.
    pub unsafe fn bytes(&self) -> Result<Cow<'_, [u8]>> {
        let bytes = self.packed()?.bytes();
        if bytes > 0 && self.layout.is_contiguous() {
            let first = with_exposed_provenance((self.lowest + self.layout.offset()) as usize);
            // SAFETY: these are the bytes of the elements; the caller's promise.
            let found = unsafe { std::slice::from_raw_parts(first, bytes as usize) };
            return Ok(Cow::Borrowed(found));
        }
        let mut copy: Vec<u8> = room_for(bytes)?;
        // SAFETY: the caller's promise; there is room for all of it, and all of it is written.
        unsafe {
            self.copy_to(copy.as_mut_ptr().expose_provenance() as DevicePtr)?;
            copy.set_len(bytes as usize);
        }
        Ok(Cow::Owned(copy))
    }
}
