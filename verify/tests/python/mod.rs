//! Stand-in for PyO3 and for the package around `dlpack.rs`: one thread's objects, all of them
//! capsules.

pub mod ffi;

/// A device of the host.
#[derive(Debug, Clone)]
pub struct Device;

pub struct Info {
    pub ordinal: usize,
}

impl Device {
    pub fn info(&self) -> Info {
        Info { ordinal: 0 }
    }
}

pub mod device {
    pub fn is_cuda(_: &super::Device) -> bool {
        false
    }
}

pub mod errors {
    use super::prelude::PyErr;

    pub enum Fault {
        Own(&'static str, String),
    }

    impl Fault {
        pub fn dtype(found: impl std::fmt::Display, next: &str) -> Fault {
            Fault::Own("DTypeError", format!("{found} {next}"))
        }

        pub fn layout(reason: impl std::fmt::Display) -> Fault {
            Fault::Own("LayoutError", reason.to_string())
        }
    }

    impl From<Fault> for PyErr {
        fn from(Fault::Own(class, text): Fault) -> PyErr {
            PyErr(format!("{class}: {text}"))
        }
    }
}

pub mod memory {
    use std::sync::Arc;

    use crate::tensor::Layout;

    #[derive(Debug, Clone)]
    pub struct Memory {
        pub layout: Layout,
        pub address: u64,
        pub device: crate::Device,
        pub read_only: bool,
        pub hold: Arc<()>,
    }

    #[derive(Debug)]
    pub struct ConsumerStay(pub Arc<()>);
}

pub mod prelude {
    use std::marker::PhantomData;

    use super::ffi::{self, PyObject};

    #[derive(Debug)]
    pub struct PyErr(pub String);

    pub type PyResult<T> = Result<T, PyErr>;

    #[derive(Debug)]
    pub struct PyAny;

    #[derive(Debug, Clone, Copy)]
    pub struct Interpreter<'py>(PhantomData<&'py ()>);

    pub type Python<'py> = Interpreter<'py>;

    #[allow(non_upper_case_globals, reason = "it is made as a value of that name")]
    pub const Python: Interpreter<'static> = Interpreter(PhantomData);

    impl PyErr {
        pub fn fetch(_: Python<'_>) -> PyErr {
            PyErr("the interpreter refused".into())
        }
    }

    /// An object that ends with it.
    #[derive(Debug)]
    pub struct Py<T>(*mut PyObject, PhantomData<T>);

    /// An object that does not.
    #[derive(Debug)]
    pub struct Bound<'py, T>(*mut PyObject, PhantomData<&'py T>);

    impl<T> Drop for Py<T> {
        fn drop(&mut self) {
            // SAFETY: a capsule of `PyCapsule_New`, ended once: there is one `Py` of each.
            unsafe { ffi::end(self.0) };
        }
    }

    impl<'py, T> Bound<'py, T> {
        pub fn of(object: &'py Py<T>) -> Bound<'py, T> {
            Bound(object.0, PhantomData)
        }

        pub fn from_owned_ptr_or_err(
            _: Python<'py>,
            object: *mut PyObject,
        ) -> PyResult<Bound<'py, T>> {
            if object.is_null() {
                Err(PyErr("no capsule".into()))
            } else {
                Ok(Bound(object, PhantomData))
            }
        }

        pub fn unbind(self) -> Py<T> {
            Py(self.0, PhantomData)
        }

        pub fn py(&self) -> Python<'py> {
            Interpreter(PhantomData)
        }

        pub fn as_ptr(&self) -> *mut PyObject {
            self.0
        }
    }
}

pub mod sync {
    pub mod critical_section {
        pub fn with_critical_section<T, R>(
            _: &crate::prelude::Bound<'_, T>,
            work: impl FnOnce() -> R,
        ) -> R {
            work()
        }
    }
}
