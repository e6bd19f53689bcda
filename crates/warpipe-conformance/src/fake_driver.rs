//! Control of the fake driver: calls of this process are counted, made to hang, or made to
//! fail. **This module is marked for unsafe**: it calls functions that it looks up by name.

use std::collections::BTreeMap;
use std::ffi::{CString, c_char, c_int, c_void};
use std::marker::PhantomData;

use anyhow::{Result, ensure};
use libloading::Library;

use crate::cases::Skip;
use crate::context::{Backend, Settings};

/// The fake driver that this process has loaded in the driver's place.
#[derive(Debug)]
pub struct FakeDriver {
    library: Library,
}

/// While it lives, this thread's calls are neither counted nor harmed.
#[derive(Debug)]
pub struct Exempt<'a> {
    fake_driver: &'a FakeDriver,
    before: c_int,
    /// It is this thread's.
    _here: PhantomData<*const ()>,
}

type OfName<T> = unsafe extern "C" fn(*const c_char) -> T;
type Each = unsafe extern "C" fn(*const c_char, usize, u64, *mut c_void);

impl FakeDriver {
    /// Finds it.
    ///
    /// # Errors
    /// The case is skipped on the host and over the real driver, which cannot be ordered
    /// to fail.
    pub fn of(settings: &Settings) -> Result<FakeDriver> {
        let skip = || Skip("it needs the fake driver".into());
        if settings.backend == Backend::Host {
            return Err(skip().into());
        }
        // SAFETY: the library is loaded already, so nothing is initialised again.
        let library = unsafe { Library::new("libcuda.so.1")? };
        // SAFETY: nothing is called by it: only whether it is there is asked.
        let is_fake = unsafe { library.get::<OfName<c_int>>("fakeCudaBlock") }.is_ok();
        if is_fake {
            Ok(FakeDriver { library })
        } else {
            Err(skip().into())
        }
    }

    fn call<T>(&self, control: &str, name: &str) -> Result<T> {
        let name = CString::new(name)?;
        // SAFETY: the fake driver has these functions, which take a terminated text; `T` is what
        // the caller knows that they answer: a status, or a count.
        Ok(unsafe { self.library.get::<OfName<T>>(control)?(name.as_ptr()) })
    }

    /// From now on every call of `function` hangs.
    ///
    /// # Errors
    /// None in practice.
    pub fn block(&self, function: &str) -> Result<()> {
        ensure!(
            self.call::<c_int>("fakeCudaBlock", function)? == 0,
            "it blocks {function}"
        );
        Ok(())
    }

    /// Calls of `function` go on.
    ///
    /// # Errors
    /// None in practice.
    pub fn release(&self, function: &str) -> Result<()> {
        ensure!(
            self.call::<c_int>("fakeCudaRelease", function)? == 0,
            "it releases {function}"
        );
        Ok(())
    }

    /// How many calls of `function` hang.
    ///
    /// # Errors
    /// None in practice.
    pub fn hanging(&self, function: &str) -> Result<u64> {
        self.call("fakeCudaHanging", function)
    }

    /// How many calls of `function` were failed since the last [`reset`](Self::reset).
    ///
    /// # Errors
    /// None in practice.
    pub fn failed(&self, function: &str) -> Result<u64> {
        self.call("fakeCudaFailed", function)
    }

    /// Fails call number `call` of `function`, from 1 and counted from the last
    /// [`reset`](Self::reset), with this status.
    ///
    /// # Errors
    /// None in practice.
    pub fn fail(&self, function: &str, call: u64, status: i32) -> Result<()> {
        type Fail = unsafe extern "C" fn(*const c_char, u64, c_int) -> c_int;
        let name = CString::new(function)?;
        // SAFETY: the fake driver's function of this name has this signature; the text is
        // terminated.
        let code =
            unsafe { self.library.get::<Fail>("fakeCudaFail")?(name.as_ptr(), call, status) };
        ensure!(code == 0, "it fails {function}");
        Ok(())
    }

    /// Counts anew, and fails nothing any more.
    ///
    /// # Errors
    /// None in practice.
    pub fn reset(&self) -> Result<()> {
        // SAFETY: the fake driver's function of this name has this signature.
        unsafe {
            self.library
                .get::<unsafe extern "C" fn()>("fakeCudaReset")?()
        };
        Ok(())
    }

    /// How often each function was called since the last [`reset`](Self::reset).
    ///
    /// # Errors
    /// None in practice.
    pub fn calls(&self) -> Result<BTreeMap<String, u64>> {
        unsafe extern "C" fn each(
            name: *const c_char,
            length: usize,
            calls: u64,
            argument: *mut c_void,
        ) {
            // SAFETY: the fake driver's text of that length, and the map below, which nobody else
            // uses meanwhile.
            let (name, map) = unsafe {
                (
                    std::slice::from_raw_parts(name.cast(), length),
                    &mut *argument.cast::<BTreeMap<String, u64>>(),
                )
            };
            map.insert(String::from_utf8_lossy(name).into_owned(), calls);
        }
        let mut map: BTreeMap<String, u64> = BTreeMap::new();
        // SAFETY: the fake driver's function of this name has this signature, and `each` takes what
        // it is given here.
        unsafe {
            let calls = self
                .library
                .get::<unsafe extern "C" fn(Each, *mut c_void)>("fakeCudaCalls")?;
            calls(each, (&raw mut map).cast());
        }
        Ok(map)
    }

    /// Keeps this thread's calls out, until the result is dropped.
    ///
    /// # Errors
    /// None in practice.
    pub fn exempt(&self) -> Result<Exempt<'_>> {
        Ok(Exempt {
            fake_driver: self,
            before: self.set_exempt(1)?,
            _here: PhantomData,
        })
    }

    fn set_exempt(&self, is_exempt: c_int) -> Result<c_int> {
        // SAFETY: the fake driver's function of this name has this signature.
        Ok(unsafe {
            self.library
                .get::<unsafe extern "C" fn(c_int) -> c_int>("fakeCudaExempt")?(
                is_exempt
            )
        })
    }
}

impl Drop for Exempt<'_> {
    fn drop(&mut self) {
        let _ = self.fake_driver.set_exempt(self.before);
    }
}
