//! Tensors that are sent in place: a small sample carries the layout, and a legacy handle or, for
//! memory of `warpipe.torch.pool()`, the name under which this publisher has published that. The
//! tensor is kept until that sample's slot is free. **This module is marked for unsafe**: it exports
//! memory that other allocators own.
//!
//! # The carrier
//!
//! The slot is empty; everything is in the metadata, which is complete before any device work: the
//! magic bytes, a version, the element type's code and bits, the rank with the top bit for strides,
//! the shape, the strides, the offset and the handle's length (variable length, 7 bits a byte), the
//! handle, and the user's metadata. Published memory has a handle of length 0, followed by the place
//! in it, and by the name with its length. It is untrusted: the sender states it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyString};
use warpipe::statistics::SlowPath;
use warpipe::weights;
use warpipe::{
    DType, DevicePtr, Domain, Layout, LegacyHandle, LegacyMemory, Published, RANK_MAX,
    SharedMemory, SlotReturn, Stream, Ticket,
};

use crate::detached::detached;
use crate::errors::{Fault, Outcome};
use crate::metadata::BYTES_MAX;
use crate::source::{Source, SourceLocation};
use crate::torch_allocator;
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

/// The memory of `warpipe.torch.pool()` that a publisher has published, by its first byte: from the
/// first tensor that it sends of it until PyTorch has freed it, as seen at the next tensor.
#[derive(Debug)]
pub struct PublishedPool {
    domain: Domain,
    /// The users and groups that the publisher admits.
    admitted: (Vec<u32>, Vec<u32>),
    list: Mutex<HashMap<DevicePtr, Arc<Published>>>,
}

impl PublishedPool {
    /// For a publisher of this domain, which admits these users and groups.
    pub fn new(domain: &Domain, uids: &[u32], gids: &[u32]) -> PublishedPool {
        PublishedPool {
            domain: domain.clone(),
            admitted: (uids.to_vec(), gids.to_vec()),
            list: Mutex::default(),
        }
    }

    /// The name of the memory around `address`, and the address's place in it. `None` for memory of
    /// other allocators.
    fn place(&self, address: DevicePtr) -> Outcome<Option<(String, u64)>> {
        drop(self.take_freed());
        let Some((memory, offset)) = torch_allocator::find(address) else {
            return Ok(None);
        };
        let mut list = self.lock();
        let published = match list.get(&memory.ptr()) {
            Some(known) => known.clone(),
            None => {
                let made = memory.publication(&new_name()).domain(&self.domain);
                let made = made
                    .allow_uids(&self.admitted.0)
                    .allow_gids(&self.admitted.1);
                let made = Arc::new(made.build()?);
                list.insert(memory.ptr(), made.clone());
                made
            }
        };
        Ok(Some((published.name().to_owned(), offset)))
    }

    /// Takes out what PyTorch has freed. Its address is no other memory's as long as it is here.
    fn take_freed(&self) -> Vec<Arc<Published>> {
        let is_freed = |first: &DevicePtr, _: &mut Arc<Published>| !torch_allocator::has(*first);
        let mut list = self.lock();
        let freed = list.extract_if(is_freed);
        freed.map(|(_, published)| published).collect()
    }

    /// Ends all publications. What subscribers have open stays.
    pub fn clear(&self) {
        drop(std::mem::take(&mut *self.lock()));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<DevicePtr, Arc<Published>>> {
        lock(&self.list)
    }
}

impl Drop for PublishedPool {
    fn drop(&mut self) {
        // Not under the lock, which a forked child may find held for ever.
        let list = std::mem::take(self.list.get_mut().unwrap_or_else(PoisonError::into_inner));
        detached(|| drop(list));
    }
}

/// A name that no memory of this machine has had.
fn new_name() -> String {
    static START: LazyLock<u128> = LazyLock::new(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        now.unwrap_or_default().as_nanos()
    });
    static LAST: AtomicU64 = AtomicU64::new(0);
    let (number, process) = (LAST.fetch_add(1, Ordering::Relaxed), std::process::id());
    format!("in-place/{process}-{:x}-{number}", *START)
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
    pool: &PublishedPool,
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
    let not_exportable = |fault: Fault| NotInPlace {
        reason: SlowPath::NotExportable,
        fault,
    };
    let mut bytes = describe(&source.layout);
    if let Some((name, offset)) = pool.place(*address).map_err(not_exportable)? {
        put(&mut bytes, 0);
        put(&mut bytes, offset);
        put(&mut bytes, name.len() as u64);
        bytes.extend(name.as_bytes());
    } else {
        // SAFETY: the tensor is kept until the carrier's slot is free (`InPlace`), and the slot is
        // free after all its readers.
        let exported = unsafe { LegacyHandle::export(device, *address, source.layout.bytes()) };
        let handle = exported
            .map_err(|error| not_exportable(error.into()))?
            .to_bytes();
        put(&mut bytes, handle.len() as u64);
        bytes.extend(handle);
    }
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
    pub place: Place,
    pub metadata: Vec<u8>,
}

/// Where the tensor is.
#[derive(Debug)]
pub enum Place {
    Legacy(LegacyHandle),
    /// In memory that is published under a name of the publisher's domain.
    Published {
        name: String,
        offset: u64,
        bytes: u64,
    },
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
    let mut length = number()?;
    let offset = match length {
        0 => {
            let offset = number()?;
            length = number()?;
            Some(offset)
        }
        _ => None,
    };
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    let (handle, metadata) = rest
        .split_at_checked(length)
        .ok_or_else(|| wrong("it is cut short"))?;
    let place = match offset {
        Some(offset) => Place::Published {
            name: str::from_utf8(handle)
                .map_err(|_| wrong("a garbled name"))?
                .to_owned(),
            offset,
            bytes: layout.bytes(),
        },
        None => Place::Legacy(LegacyHandle::from_bytes(handle)?),
    };
    if let Place::Legacy(handle) = &place
        && layout.bytes() != handle.bytes()
    {
        return Err(wrong(&format!(
            "{} bytes of memory for {layout:?}",
            handle.bytes()
        )));
    }
    Ok(Some(Named {
        layout,
        place,
        metadata: metadata.to_vec(),
    }))
}

/// Adds a tensor that is published where it lies, and that `owner` keeps allocated.
pub fn add_in_place(
    tensors: &mut weights::TensorsInPlace,
    name: &str,
    layout: Layout,
    address: u64,
    owner: impl Send + 'static,
) -> Outcome<()> {
    // SAFETY: the owner is what keeps the tensor's memory allocated, and the caller of `publish`
    // writes it no more, as its documentation says.
    Ok(unsafe { tensors.add(name, layout, address, Box::new(owner)) }?)
}

/// Memory of a publisher's allocator, open in a subscriber.
#[derive(Debug)]
pub enum OpenedMemory {
    Legacy(LegacyMemory),
    Shared(SharedMemory),
}

impl OpenedMemory {
    /// The address of the first byte.
    pub fn ptr(&self) -> DevicePtr {
        match self {
            OpenedMemory::Legacy(memory) => memory.ptr(),
            OpenedMemory::Shared(memory) => memory.ptr(),
        }
    }

    /// The device that it is mapped on.
    pub fn device(&self) -> &warpipe::Device {
        match self {
            OpenedMemory::Legacy(memory) => memory.device(),
            OpenedMemory::Shared(memory) => memory.device(),
        }
    }

    /// Records that a stream is given work on it.
    pub fn used_on(&self, stream: &Stream) {
        match self {
            // Only a forked child is refused, and it uses nothing.
            OpenedMemory::Legacy(memory) => drop(memory.used_by(stream)),
            OpenedMemory::Shared(memory) => memory.used_on(stream),
        }
    }
}

/// The allocations that a subscriber has open of its publisher. The last few stay open, because the
/// next sample mostly lies in one of them and the driver takes long to open one.
#[derive(Debug)]
pub struct Openings {
    domain: Domain,
    legacy: Mutex<Vec<(LegacyHandle, LegacyMemory)>>,
    published: Mutex<Vec<(String, SharedMemory)>>,
}

impl Openings {
    /// For a subscriber of this domain.
    pub fn new(domain: &Domain) -> Openings {
        Openings {
            domain: domain.clone(),
            legacy: Mutex::default(),
            published: Mutex::default(),
        }
    }

    /// Opens the tensor's memory. The library maps each allocation once, however often it is
    /// opened.
    pub fn open(&self, place: &Place, device: &warpipe::Device) -> Outcome<OpenedMemory> {
        Ok(match place {
            Place::Legacy(handle) => OpenedMemory::Legacy(self.open_legacy(handle, device)?),
            &Place::Published {
                ref name,
                offset,
                bytes,
            } => {
                let whole = self.open_published(name, device)?;
                OpenedMemory::Shared(whole.range(offset, bytes)?)
            }
        })
    }

    fn open_legacy(
        &self,
        handle: &LegacyHandle,
        device: &warpipe::Device,
    ) -> Outcome<LegacyMemory> {
        let opened = handle.open(device)?;
        let is_same =
            |known: &LegacyHandle| known.raw() == handle.raw() && known.pid() == handle.pid();
        keep(
            &self.legacy,
            *handle,
            is_same,
            || Ok(handle.open(device)?),
            |_| (),
        )?;
        Ok(opened)
    }

    fn open_published(&self, name: &str, device: &warpipe::Device) -> Outcome<SharedMemory> {
        let open = || Ok(Ticket::to(&self.domain, name)?.open(device, Duration::ZERO)?);
        keep(
            &self.published,
            name.to_owned(),
            |known| known == name,
            open,
            Clone::clone,
        )
    }

    /// Closes the allocations that are only kept for later samples.
    pub fn clear(&self) {
        drop(std::mem::take(&mut *lock(&self.legacy)));
        drop(std::mem::take(&mut *lock(&self.published)));
    }
}

fn lock<T>(list: &Mutex<T>) -> MutexGuard<'_, T> {
    list.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Moves an entry to the end of a list, or makes it there, and gives a part of it. The oldest one
/// beyond the most is dropped, without the lock.
fn keep<K, V, P>(
    list: &Mutex<Vec<(K, V)>>,
    key: K,
    is_same: impl Fn(&K) -> bool,
    open: impl FnOnce() -> Outcome<V>,
    part: impl FnOnce(&V) -> P,
) -> Outcome<P> {
    let known = {
        let mut list = lock(list);
        let known = list.iter().position(|(known, _)| is_same(known));
        known.map(|index| list.remove(index))
    };
    let kept = match known {
        Some(kept) => kept,
        None => (key, open()?),
    };
    let found = part(&kept.1);
    let mut list = lock(list);
    list.push(kept);
    let oldest = (list.len() > OPEN_MAX).then(|| list.remove(0));
    drop(list);
    drop(oldest);
    Ok(found)
}
