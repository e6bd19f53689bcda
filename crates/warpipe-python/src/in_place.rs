//! Tensors that are sent in place: which of them can be, and the library's loan for each. **This
//! module is marked for unsafe**: it exports memory that other allocators own.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyString};
use warpipe::statistics::SlowPath;
use warpipe::{DevicePtr, Layout, PublishOptions, Published, Publisher, SampleMut};

use crate::detached::DropDetached;
use crate::errors::{Fault, Outcome};
use crate::exclusive::locked;
use crate::interpreter_exit::LibraryHeld;
use crate::source::Source;
use crate::thread_exit::prepare_exit;
use crate::torch_allocator;

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
        prepare_exit();
        let allowed = "True, False or \"require\"";
        match (found.cast::<PyBool>(), found.cast::<PyString>()) {
            (Ok(wanted), _) if wanted.is_true() => Ok(ZeroCopy::Try),
            (Ok(_), _) => Ok(ZeroCopy::No),
            (_, Ok(word)) if word.to_str()? == "require" => Ok(ZeroCopy::Require),
            (_, Ok(word)) => Err(Fault::argument("zero_copy", word.to_str()?, allowed).into()),
            _ => Err(PyTypeError::new_err(format!("zero_copy is {allowed}"))),
        }
    }
}

/// The memory of `warpipe.torch.pool()` that a publisher has published, by its first byte: from the
/// first tensor that it sends of it until PyTorch has freed it, as seen at the next tensor.
#[derive(Debug)]
pub struct PublishedPool {
    /// The publisher's domain, and the users and groups that it admits.
    options: PublishOptions,
    /// Not dropped under the lock, which a forked child may find held for ever.
    list: DropDetached<Mutex<HashMap<DevicePtr, Arc<Published>>>>,
}

impl PublishedPool {
    /// For a publisher of this domain, which admits these users and groups.
    pub fn new(options: PublishOptions) -> PublishedPool {
        PublishedPool {
            options,
            list: DropDetached::new(Mutex::default()),
        }
    }

    /// The memory around `address`, and the address's place in it. `None` for memory of other
    /// allocators.
    fn place(&self, address: DevicePtr) -> Outcome<Option<(Arc<Published>, u64)>> {
        drop(self.take_freed());
        let Some((memory, offset)) = torch_allocator::find(address) else {
            return Ok(None);
        };
        let mut list = locked(&self.list);
        let published = match list.get(&memory.ptr()) {
            Some(known) => known.clone(),
            None => {
                let made = memory.publish(&new_name(), self.options.clone())?;
                let made = Arc::new(made);
                list.insert(memory.ptr(), made.clone());
                made
            }
        };
        Ok(Some((published, offset)))
    }

    /// Takes out what PyTorch has freed. Its address is no other memory's as long as it is here.
    fn take_freed(&self) -> Vec<Arc<Published>> {
        let is_freed = |first: &DevicePtr, _: &mut Arc<Published>| !torch_allocator::has(*first);
        let mut list = locked(&self.list);
        let freed = list.extract_if(is_freed);
        freed.map(|(_, published)| published).collect()
    }

    /// Ends all publications. What subscribers have open stays.
    pub fn clear(&self) {
        drop(std::mem::take(&mut *locked(&self.list)));
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

fn refuse(reason: SlowPath, words: String) -> NotInPlace {
    let said = format!("the tensor cannot be sent where it lies: {words}");
    let fault = Fault::Own("ExportError", said);
    NotInPlace { reason, fault }
}

fn not_exportable(fault: Fault) -> NotInPlace {
    let reason = SlowPath::NotExportable;
    NotInPlace { reason, fault }
}

/// Sets the metadata of a tensor, or of several, that are sent where they lie.
pub fn set_metadata(loan: &mut SampleMut, metadata: &[u8]) -> Result<(), NotInPlace> {
    let noted = loan.set_metadata(metadata);
    noted.map_err(|error| refuse(SlowPath::NoMetadataRoom, error.to_string()))
}

/// Where a tensor lies that is sent there.
enum Place {
    /// In published memory, from this byte on.
    Published(Arc<Published>, u64),
    /// In memory of another allocator, at this address.
    Plain(DevicePtr),
}

/// The tensor's layout and place, and what keeps it, which any thread of the library drops.
fn locate(
    source: Source,
    pool: &PublishedPool,
) -> Result<(Layout, Place, LibraryHeld<Source>), NotInPlace> {
    let gathered = || {
        let said = "it has gaps, or is no array, and is gathered into a copy; make it a contiguous one first";
        refuse(SlowPath::Gathered, said.into())
    };
    let (address, layout) = (source.address().ok_or_else(gathered)?, source.layout);
    if layout.bytes() == 0 {
        return Err(refuse(SlowPath::NotExportable, "it is empty".into()));
    }
    let published = pool.place(address).map_err(not_exportable)?;
    let place = match published {
        Some((memory, offset)) => Place::Published(memory, offset),
        None => Place::Plain(address),
    };
    Ok((layout, place, LibraryHeld::new(source)))
}

/// Adds the tensor of this name to a loan of several, where it lies, or says why it cannot be.
pub fn add_part(
    loan: &mut SampleMut,
    name: &str,
    source: Source,
    pool: &PublishedPool,
) -> Result<(), NotInPlace> {
    let (layout, place, owner) = locate(source, pool)?;
    let added = match place {
        Place::Published(memory, offset) => {
            let owner = (owner, memory.clone());
            loan.add_part_in(name, &memory, offset, &layout, owner)
        }
        // SAFETY: as in `loan`.
        Place::Plain(address) => unsafe { loan.add_part_at(name, address, &layout, owner) },
    };
    added.map_err(|error| not_exportable(error.into()))
}

/// A loan of the tensor where it lies, or the reason why there is none. The publisher keeps the
/// tensor until no subscriber reads it.
pub fn loan(
    publisher: &Publisher,
    source: Source,
    pool: &PublishedPool,
) -> Result<SampleMut, NotInPlace> {
    let (layout, place, owner) = locate(source, pool)?;
    let loan = match place {
        // A subscriber may open the memory after this publisher is closed.
        Place::Published(memory, offset) => {
            let owner = (owner, memory.clone());
            publisher.loan_in(&memory, offset, &layout, owner)
        }
        // SAFETY: the tensor keeps its allocation, as PyTorch's caching allocator does while
        // subscribers exist; see `Publisher.send`.
        Place::Plain(address) => unsafe { publisher.loan_at(address, &layout, owner) },
    };
    loan.map_err(|error| not_exportable(error.into()))
}
