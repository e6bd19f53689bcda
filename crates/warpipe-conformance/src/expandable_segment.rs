//! Memory in pieces, as PyTorch's expandable segments are: allocations of the virtual memory
//! functions side by side in one reserved range, made to be exported. **This module is marked
//! for unsafe**: it calls the driver by itself, as another library of the process would.

use std::ffi::{c_int, c_void};

use anyhow::{Context as _, Result, ensure};
use libloading::Library;
use warpipe::{Device, DevicePtr};

type Create = unsafe extern "C" fn(*mut u64, usize, *const Properties, u64) -> c_int;
type Reserve = unsafe extern "C" fn(*mut u64, usize, usize, u64, u64) -> c_int;
type Map = unsafe extern "C" fn(u64, usize, usize, u64, u64) -> c_int;
type SetAccess = unsafe extern "C" fn(u64, usize, *const AccessOf, usize) -> c_int;
type OfRange = unsafe extern "C" fn(u64, usize) -> c_int;
type Release = unsafe extern "C" fn(u64) -> c_int;
type Retain = unsafe extern "C" fn(*mut *mut c_void, c_int) -> c_int;
type SetCurrent = unsafe extern "C" fn(*mut c_void) -> c_int;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Location {
    kind: u32,
    id: c_int,
}

/// The first GPU.
const PLACE: Location = Location { kind: 1, id: 0 };

/// `CUmemAllocationProp`.
#[repr(C)]
struct Properties {
    kind: u32,
    handle_types: u32,
    location: Location,
    windows: usize,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
struct AccessOf {
    location: Location,
    flags: u32,
}

/// A range of pieces on the first GPU. Its drop unmaps it, as an allocator does that has no more
/// use for it.
pub struct ExpandableSegment {
    library: Library,
    /// Its first byte.
    pub ptr: DevicePtr,
    /// The length of each piece in bytes.
    piece: usize,
    mapped: usize,
    /// The length of the range in bytes.
    pub bytes: u64,
}

impl ExpandableSegment {
    /// A range of `pieces` allocations, of the device's granularity each.
    ///
    /// # Errors
    /// The driver refuses a call.
    pub fn new(device: &Device, pieces: u64) -> Result<ExpandableSegment> {
        ExpandableSegment::of(device, pieces, pieces)
    }

    /// As [`new`](Self::new), with a last piece that no process can export.
    ///
    /// # Errors
    /// The driver refuses a call.
    pub fn with_a_private_end(device: &Device, pieces: u64) -> Result<ExpandableSegment> {
        ExpandableSegment::of(device, pieces, pieces - 1)
    }

    fn of(device: &Device, pieces: u64, exportable: u64) -> Result<ExpandableSegment> {
        let piece = usize::try_from(device.backend().granularity())?;
        let bytes = pieces * piece as u64;
        // SAFETY: the library is loaded already, so nothing is initialised again.
        let library = unsafe { Library::new("libcuda.so.1")? };
        let mut segment = ExpandableSegment {
            library,
            ptr: 0,
            piece,
            mapped: 0,
            bytes,
        };
        segment.enter()?;
        let reserve = segment.function::<Reserve>("cuMemAddressReserve")?;
        // SAFETY: the driver's signature; the out pointer lives.
        check("cuMemAddressReserve", unsafe {
            reserve(&mut segment.ptr, bytes as usize, 0, 0, 0)
        })?;
        for number in 0..pieces {
            segment.map(segment.mapped, number < exportable)?;
            segment.mapped += 1;
        }
        segment.let_write(segment.ptr, bytes as usize)?;
        Ok(segment)
    }

    /// Unmaps a piece and maps a new allocation in its place, as the allocator does that has
    /// returned its memory to the device and needs some again.
    ///
    /// # Errors
    /// The driver refuses a call.
    pub fn map_anew(&mut self, number: usize) -> Result<()> {
        ensure!(number < self.mapped, "{number} of {} pieces", self.mapped);
        self.enter()?;
        self.unmap_piece(number)?;
        self.map(number, true)?;
        self.let_write(self.at(number), self.piece)
    }

    /// Where a piece begins.
    fn at(&self, number: usize) -> DevicePtr {
        self.ptr + (number * self.piece) as u64
    }

    fn let_write(&self, at: DevicePtr, bytes: usize) -> Result<()> {
        let access = AccessOf {
            location: PLACE,
            flags: 3,
        };
        let set = self.function::<SetAccess>("cuMemSetAccess")?;
        // SAFETY: the range is mapped; the description lives.
        check("cuMemSetAccess", unsafe { set(at, bytes, &access, 1) })
    }

    /// Makes the device's primary context current, in which the library works, too.
    fn enter(&self) -> Result<()> {
        let mut context = std::ptr::null_mut();
        let retain = self.function::<Retain>("cuDevicePrimaryCtxRetain")?;
        // SAFETY: the driver's signature; the out pointer lives.
        check("cuDevicePrimaryCtxRetain", unsafe {
            retain(&mut context, PLACE.id)
        })?;
        // SAFETY: the context was retained just now, and stays until the process ends.
        check("cuCtxSetCurrent", unsafe {
            self.function::<SetCurrent>("cuCtxSetCurrent")?(context)
        })
    }

    /// Maps a new allocation as a piece that is not mapped.
    fn map(&self, number: usize, is_exportable: bool) -> Result<()> {
        let properties = Properties {
            kind: 1, // pinned
            // 1: a POSIX descriptor.
            handle_types: u32::from(is_exportable),
            location: PLACE,
            windows: 0,
            flags: [0; 8],
        };
        let mut handle = 0;
        let create = self.function::<Create>("cuMemCreate")?;
        // SAFETY: the driver's signature; both pointers live.
        check("cuMemCreate", unsafe {
            create(&mut handle, self.piece, &properties, 0)
        })?;
        let at = self.at(number);
        // SAFETY: the range is reserved, and this piece of it empty; the handle was made just now.
        let made = unsafe { self.function::<Map>("cuMemMap")?(at, self.piece, 0, handle, 0) };
        // SAFETY: made above, released once; the mapping holds the allocation.
        let released = unsafe { self.function::<Release>("cuMemRelease")?(handle) };
        check("cuMemMap", made)?;
        check("cuMemRelease", released)
    }

    fn function<T: Copy>(&self, name: &str) -> Result<T> {
        // SAFETY: the types above are the signatures in the driver's header.
        let function = unsafe { self.library.get::<T>(name) };
        Ok(*function.with_context(|| format!("the driver lacks {name}"))?)
    }

    fn unmap_piece(&self, number: usize) -> Result<()> {
        let unmap = self.function::<OfRange>("cuMemUnmap")?;
        // SAFETY: mapped in `map`, unmapped once, when nothing uses it.
        check("cuMemUnmap", unsafe { unmap(self.at(number), self.piece) })
    }

    fn unmap(&mut self) -> Result<()> {
        self.enter()?;
        for number in 0..std::mem::take(&mut self.mapped) {
            self.unmap_piece(number)?;
        }
        // SAFETY: reserved in `new`, freed once, and empty.
        check("cuMemAddressFree", unsafe {
            self.function::<OfRange>("cuMemAddressFree")?(self.ptr, self.bytes as usize)
        })
    }
}

impl Drop for ExpandableSegment {
    fn drop(&mut self) {
        if self.ptr != 0 {
            // A failure leaves the range mapped, and the case that counts bytes sees it.
            let _ = self.unmap();
        }
    }
}

fn check(call: &str, code: c_int) -> Result<()> {
    ensure!(code == 0, "{call}: {code}");
    Ok(())
}
