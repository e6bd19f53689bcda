//! The directory in which names live.

use std::path::PathBuf;

use pyo3::prelude::*;

use warpipe::{CreateOptions, OpenOptions, Wait};

use crate::detached::call;
use crate::device::Device;
use crate::errors::Fault;
use crate::thread_exit;
use crate::tuples;
use crate::wait::{WaitLimit, awaited};

/// The directory in which endpoint names live.
///
/// ``Domain()`` is that of the environment: ``$WARPIPE_DOMAIN``, else ``$XDG_RUNTIME_DIR/warpipe``,
/// else ``/run/user/UID/warpipe``, else ``/tmp/warpipe-UID``. ``Domain(path)`` creates a missing
/// directory with mode 0700. With ``owner`` (a user id) the directory belongs to that user, and its
/// names are trusted. Everything that takes a domain also takes a path. Pickled, it is its path.
///
/// Raises ``DomainError`` for a directory that cannot be trusted or used.
#[pyclass(frozen, module = "warpipe")]
#[derive(Debug, Clone)]
pub struct Domain {
    pub inner: warpipe::Domain,
    /// The `owner` that it was made with.
    #[pyo3(get, name = "_owner")]
    owner: Option<u32>,
}

impl<'a, 'py> FromPyObject<'a, 'py> for Domain {
    type Error = PyErr;

    /// A domain, or a path.
    fn extract(found: Borrowed<'a, 'py, PyAny>) -> PyResult<Domain> {
        thread_exit::prepare_exit();
        match found.cast::<Domain>() {
            Ok(domain) => Ok(domain.get().clone()),
            Err(_) => Domain::new(Some(found.extract()?), None),
        }
    }
}

impl Domain {
    /// The domain of an argument that may be left out.
    pub fn or_usual(domain: Option<Domain>) -> PyResult<warpipe::Domain> {
        thread_exit::prepare_exit();
        let domain = domain.map_or_else(|| Domain::new(None, None), Ok);
        Ok(domain?.inner)
    }
}

/// The domain and the device of two arguments.
pub fn place(
    domain: Option<Domain>,
    device: Option<Device>,
) -> PyResult<(warpipe::Domain, Device)> {
    let device = device.unwrap_or_else(Device::preferred);
    Ok((Domain::or_usual(domain)?, device))
}

/// Opens what has a name, waiting for it, on a device.
pub fn opened<T: Send>(
    py: Python<'_>,
    (domain, device): (Option<Domain>, Option<Device>),
    wait: WaitLimit,
    open: impl FnOnce(OpenOptions, Wait<'_>) -> warpipe::Result<T> + Send,
) -> PyResult<(T, Device)> {
    let (domain, device) = place(domain, device)?;
    let options: OpenOptions = domain.on(&device);
    Ok((awaited(py, wait.0, |wait| open(options, wait))?, device))
}

/// Options of something that is made there, for these users and groups beside this process's own.
pub fn creation(
    (domain, device): (&warpipe::Domain, &Device),
    allow_uids: Vec<u32>,
    allow_gids: Vec<u32>,
) -> CreateOptions {
    CreateOptions {
        allow_uids,
        allow_gids,
        ..domain.on(device)
    }
}

#[pymethods]
impl Domain {
    #[new]
    #[pyo3(signature = (path = None, *, owner = None))]
    fn new(path: Option<PathBuf>, owner: Option<u32>) -> PyResult<Domain> {
        let made = match (path, owner) {
            (None, None) => warpipe::Domain::from_environment(),
            (Some(path), None) => warpipe::Domain::at(path),
            (Some(path), Some(owner)) => warpipe::Domain::of_user(path, owner),
            (None, Some(_)) => {
                let allowed = "the directory that `owner` owns";
                return Err(Fault::argument("path", "missing", allowed).into());
            }
        };
        Ok(Domain {
            inner: made.map_err(Fault::from)?,
            owner,
        })
    }

    /// The directory.
    #[getter]
    fn path(&self) -> PathBuf {
        self.inner.path().to_owned()
    }

    /// Every endpoint, an ``EndpointInfo`` each, sorted by name. ``alive`` is False for files of a
    /// dead process, unless ``foreign`` says that something else stands there; ``pid`` is None where
    /// it could not be determined.
    fn endpoints<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let found = call(py, || self.inner.endpoints())?;
        let info = |endpoint| tuples::endpoint_info(py, endpoint);
        found.iter().map(info).collect()
    }

    /// Removes the files of dead endpoints, and nothing else. Returns their names.
    fn clean(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        let cleaned = call(py, || self.inner.clean())?;
        Ok(cleaned.iter().map(ToString::to_string).collect())
    }

    fn __fspath__(&self) -> std::ffi::OsString {
        self.inner.path().as_os_str().to_owned()
    }
}
