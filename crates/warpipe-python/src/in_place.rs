//! Tensors that are sent in place: a small sample carries a legacy handle and the layout, and the
//! tensor is kept until that sample's slot is free. **This module is marked for unsafe**: it
//! exports memory that other allocators own.
//!
//! # The carrier
//!
//! The slot is empty; everything is in the metadata, which is complete before any device work: the
//! magic bytes, a version, the element type's code and bits, the rank with the top bit for strides,
//! the shape, the strides, the offset and the handle's length (variable length, 7 bits a byte), the
//! handle, and the user's metadata. It is untrusted: the sender states it.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyString};
use warpipe::statistics::SlowPath;
use warpipe::weights;
use warpipe::{DType, Layout, LegacyHandle, LegacyMemory, RANK_MAX, SlotReturn};

use crate::detached::detached;
use crate::errors::{Fault, Outcome};
use crate::interpreter_exit::LibraryHeld;
use crate::metadata::BYTES_MAX;
use crate::source::{Source, SourceLocation};
use crate::wait::in_slices;

const MAGIC: [u8; 5] = *b"\xf5WPIP";
const VERSION: u8 = 2;
const STRIDED: u8 = 0x80;

/// The most allocations that a subscriber keeps open for later samples.
const OPEN_MAX: usize = 8;

/// Whether a tensor is to be sent in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ZeroCopy {
    No,
    /// If possible; else it is copied, and a warning says why.
    Try,
    /// It must be possible; else it is an error.
    Require,
}

impl<'a, 'py> FromPyObject<'a, 'py> for ZeroCopy {
    type Error = PyErr;

    fn extract(found: Borrowed<'a, 'py, PyAny>) -> PyResult<ZeroCopy> {
        if let Ok(wanted) = found.cast::<PyBool>() {
            return Ok(if wanted.is_true() {
                ZeroCopy::Try
            } else {
                ZeroCopy::No
            });
        }
        match found.cast::<PyString>() {
            Ok(word) if word.to_str()? == "require" => Ok(ZeroCopy::Require),
            Ok(_) => {
                Err(
                    Fault::argument("zero_copy", found.to_string(), "True, False or \"require\"")
                        .into(),
                )
            }
            Err(_) => Err(PyTypeError::new_err(
                "zero_copy is True, False or \"require\"",
            )),
        }
    }
}

/// Tensors that were sent in place, each until no subscriber reads it.
#[derive(Debug, Default)]
pub struct InPlace {
    list: Mutex<Vec<Sent>>,
}

#[derive(Debug)]
struct Sent {
    returned: SlotReturn,
    _tensor: Source,
}

impl InPlace {
    fn lock(&self) -> MutexGuard<'_, Vec<Sent>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps a tensor until the slot of its carrier is free.
    pub fn keep(&self, tensor: Source, returned: SlotReturn) {
        self.lock().push(Sent {
            returned,
            _tensor: tensor,
        });
    }

    /// Drops tensors with carriers that are free again. Returns how many are not.
    pub fn sweep(&self) -> usize {
        let mut list = self.lock();
        // A tensor in an unknown state is kept.
        let is_back = |sent: &mut Sent| sent.returned.is_back().unwrap_or(false);
        let done: Vec<Sent> = list.extract_if(.., is_back).collect();
        let left = list.len();
        drop(list);
        // Without the lock: a destructor here may be foreign code.
        drop(done);
        left
    }

    /// Waits, at most `patience`, until all tensors are free. Runs before the publisher is dropped,
    /// because only the publisher knows which are. A tensor that is not free by then is kept until
    /// the process ends: a subscriber may be reading it.
    pub fn settle(&self, py: Python<'_>, patience: Option<Duration>) -> PyResult<()> {
        let waited = in_slices(py, patience, |slice| {
            let is_done = self.sweep() == 0;
            if !is_done {
                std::thread::park_timeout(slice.min(Duration::from_millis(1)));
            }
            Ok(is_done.then_some(()))
        });
        std::mem::forget(std::mem::take(&mut *self.lock()));
        waited.map(drop)
    }
}

impl Drop for InPlace {
    fn drop(&mut self) {
        // Not under the lock, which a forked child may find held for ever.
        let list = std::mem::take(self.list.get_mut().unwrap_or_else(PoisonError::into_inner));
        let is_back = |sent: &Sent| sent.returned.is_back().unwrap_or(false);
        let (back, out): (Vec<_>, Vec<_>) = detached(|| list.into_iter().partition(is_back));
        drop(back);
        std::mem::forget(out);
    }
}

/// Why a tensor cannot be sent in place.
#[derive(Debug)]
pub struct NotInPlace {
    pub reason: SlowPath,
    pub fault: Fault,
}

/// The metadata of a carrier, or the reason why the tensor cannot be sent in place.
pub fn carrier(
    device: &warpipe::Device,
    source: &Source,
    metadata: &[u8],
) -> Result<Vec<u8>, NotInPlace> {
    let refuse = |reason: SlowPath, words: String| {
        let fault = Fault::Own(
            "ExportError",
            format!("the tensor cannot be sent where it lies: {words}"),
        );
        NotInPlace { reason, fault }
    };
    let (SourceLocation::Device(address, ..) | SourceLocation::Host(address, _)) = &source.place
    else {
        return Err(refuse(
            SlowPath::Gathered,
            "it has gaps, or is no array, and is gathered into a copy; make it a contiguous one first".into(),
        ));
    };
    if source.layout.bytes() == 0 {
        return Err(refuse(SlowPath::NotExportable, "it is empty".into()));
    }
    // SAFETY: the tensor is kept until the carrier's slot is free (`InPlace`), and the slot is free
    // after all its readers.
    let exported = unsafe { LegacyHandle::export(device, *address, source.layout.bytes()) };
    let handle = exported.map_err(|error| NotInPlace {
        reason: SlowPath::NotExportable,
        fault: error.into(),
    })?;
    let mut bytes = describe(&source.layout);
    let handle = handle.to_bytes();
    put(&mut bytes, handle.len() as u64);
    bytes.extend(handle);
    let room = BYTES_MAX.saturating_sub(bytes.len());
    if metadata.len() > room {
        return Err(refuse(
            SlowPath::NoMetadataRoom,
            format!(
                "its metadata takes {} bytes, and beside its name there is room for {room}",
                metadata.len()
            ),
        ));
    }
    bytes.extend(metadata);
    Ok(bytes)
}

fn describe(layout: &Layout) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    let strided = if layout.is_contiguous() { 0 } else { STRIDED };
    let dtype = layout.dtype();
    bytes.extend([
        VERSION,
        dtype.code(),
        dtype.bits(),
        layout.shape().len() as u8 | strided,
    ]);
    layout
        .shape()
        .iter()
        .for_each(|&length| put(&mut bytes, length));
    if strided != 0 {
        // Zigzag, so that small negative numbers are short, too.
        layout
            .strides()
            .iter()
            .for_each(|&stride| put(&mut bytes, (stride << 1 ^ stride >> 63) as u64));
        put(&mut bytes, layout.offset());
    }
    bytes
}

fn put(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn get(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f).checked_shl(shift)?;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

/// The tensor that a carrier names.
#[derive(Debug)]
pub struct Named {
    pub layout: Layout,
    pub handle: LegacyHandle,
    pub metadata: Vec<u8>,
}

/// Parses a sample's metadata; `None` for an ordinary sample.
pub fn read(metadata: &[u8]) -> Outcome<Option<Named>> {
    let Some(rest) = metadata.strip_prefix(&MAGIC) else {
        return Ok(None);
    };
    let wrong = |what: &str| {
        Fault::Own(
            "ProtocolError",
            format!("a tensor that was sent where it lies: {what}"),
        )
    };
    let [version, code, bits, rank, rest @ ..] = rest else {
        return Err(wrong("it is cut short"));
    };
    if *version != VERSION {
        return Err(wrong(&format!(
            "version {version}, this is {VERSION}; run one version on both sides"
        )));
    }
    let dtype = DType::from_dlpack(*code, *bits).ok_or_else(|| wrong("an unknown element type"))?;
    let (strided, rank) = (rank & STRIDED != 0, usize::from(rank & !STRIDED));
    if rank > RANK_MAX {
        return Err(wrong("too many dimensions"));
    }
    let mut rest = rest;
    let mut number = || get(&mut rest).ok_or_else(|| wrong("it is cut short"));
    let shape = (0..rank).map(|_| number()).collect::<Outcome<Vec<u64>>>()?;
    let layout = if strided {
        let unzigzag = |number: u64| (number >> 1) as i64 ^ -((number & 1) as i64);
        let strides = (0..rank)
            .map(|_| number().map(unzigzag))
            .collect::<Outcome<Vec<i64>>>()?;
        Layout::strided(dtype, &shape, &strides, number()?)?
    } else {
        Layout::contiguous(dtype, &shape)?
    };
    let length = usize::try_from(number()?).unwrap_or(usize::MAX);
    let (handle, metadata) = rest
        .split_at_checked(length)
        .ok_or_else(|| wrong("it is cut short"))?;
    let handle = LegacyHandle::from_bytes(handle)?;
    if layout.bytes() != handle.bytes() {
        return Err(wrong(&format!(
            "{} bytes of memory for {layout:?}",
            handle.bytes()
        )));
    }
    Ok(Some(Named {
        layout,
        handle,
        metadata: metadata.to_vec(),
    }))
}

/// Adds a tensor that is published where it lies, and that `owner` keeps allocated.
pub fn add_in_place(
    tensors: &mut weights::TensorsInPlace,
    name: &str,
    layout: Layout,
    address: u64,
    owner: LibraryHeld<impl Send + 'static>,
) -> Outcome<()> {
    // SAFETY: the owner is what keeps the tensor's memory allocated, and the caller of `publish`
    // writes it no more, as its documentation says.
    Ok(unsafe { tensors.add(name, layout, address, Box::new(owner)) }?)
}

/// The allocations that a subscriber has open of its publisher. The last few stay open, because the
/// next sample mostly lies in one of them and the driver takes long to open one.
#[derive(Debug, Default)]
pub struct Openings {
    list: Mutex<Vec<(LegacyHandle, LegacyMemory)>>,
}

impl Openings {
    /// Opens the allocation of a handle. The library maps each allocation once, however often it is
    /// opened.
    pub fn open(&self, handle: &LegacyHandle, device: &warpipe::Device) -> Outcome<LegacyMemory> {
        let opened = handle.open(device)?;
        let mut list = self.list.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same =
            |known: &LegacyHandle| known.raw() == handle.raw() && known.pid() == handle.pid();
        let known = list.iter().position(|(known, _)| is_same(known));
        let kept = match known {
            Some(index) => list.remove(index),
            None => (*handle, handle.open(device)?),
        };
        list.push(kept);
        let oldest = if list.len() > OPEN_MAX {
            Some(list.remove(0))
        } else {
            None
        };
        drop(list);
        drop(oldest);
        Ok(opened)
    }

    /// Closes the allocations that are only kept for later samples.
    pub fn clear(&self) {
        let list = std::mem::take(&mut *self.list.lock().unwrap_or_else(PoisonError::into_inner));
        drop(list);
    }
}
