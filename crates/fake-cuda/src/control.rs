//! Control by the process that uses the fake driver: its calls are counted, made to hang, or made
//! to fail, by function.
//!
//! A test finds the functions below by `dlsym` in the loaded library. They are not part of CUDA's
//! API. The table belongs to the process; a thread can be [exempt](fakeCudaExempt), so that a
//! test's own calls are neither counted, held nor failed.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::config;
use crate::status::{INVALID_VALUE, Outcome, Status};

/// The orders for one function, and its counts.
#[derive(Default)]
struct Function {
    calls: u64,
    is_blocked: bool,
    /// How many calls hang.
    hanging: u64,
    failures: Vec<Failure>,
    /// How many calls were failed.
    failed: u64,
}

#[derive(Clone, Copy)]
struct Failure {
    /// Which call, from 1, since the count began.
    call: u64,
    code: c_int,
}

type Table = BTreeMap<String, Function>;

static TABLE: Mutex<Option<Table>> = Mutex::new(None);
static CHANGED: Condvar = Condvar::new();
/// Whether any order was ever given: without one a call costs nothing.
static IS_ASKED: AtomicBool = AtomicBool::new(false);

thread_local! {
    static IS_EXEMPT: Cell<bool> = const { Cell::new(false) };
}

fn lock() -> MutexGuard<'static, Option<Table>> {
    TABLE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn of<'a>(table: &'a mut Option<Table>, name: &str) -> &'a mut Function {
    table
        .get_or_insert_with(from_environment)
        .entry(name.to_owned())
        .or_default()
}

fn from_environment() -> Table {
    let mut table = Table::new();
    for (function, call, code) in &config::get().failures {
        table
            .entry(function.clone())
            .or_default()
            .failures
            .push(Failure {
                call: *call,
                code: *code,
            });
    }
    table
}

/// Every function of the driver begins with this.
pub fn pass(name: &'static str) -> Outcome {
    let is_asked = IS_ASKED.load(Ordering::Acquire) || !config::get().failures.is_empty();
    if !is_asked || IS_EXEMPT.get() {
        return Ok(());
    }
    let mut table = lock();
    let function = of(&mut table, name);
    function.calls += 1;
    let call = function.calls;
    if let Some(failure) = function
        .failures
        .iter()
        .find(|failure| failure.call == call)
    {
        function.failed += 1;
        return Err(Status(failure.code));
    }
    if !function.is_blocked {
        return Ok(());
    }
    function.hanging += 1;
    CHANGED.notify_all();
    let is_held = |table: &mut Option<Table>| of(table, name).is_blocked;
    table = CHANGED
        .wait_while(table, is_held)
        .unwrap_or_else(PoisonError::into_inner);
    of(&mut table, name).hanging -= 1;
    Ok(())
}

/// Changes or queries the record of a function.
///
/// # Safety
/// `name` is null or a terminated text.
unsafe fn with<T>(name: *const c_char, body: impl FnOnce(&mut Function) -> T) -> Option<T> {
    if name.is_null() {
        return None;
    }
    // SAFETY: not null, so a terminated text by the caller's promise.
    let name = unsafe { CStr::from_ptr(name) }.to_str().ok()?;
    let mut table = lock();
    let value = body(of(&mut table, name));
    IS_ASKED.store(true, Ordering::Release);
    CHANGED.notify_all();
    Some(value)
}

fn code(done: Option<()>) -> c_int {
    done.map_or(INVALID_VALUE.0, |()| 0)
}

/// From now on every call of the function hangs.
#[unsafe(no_mangle)]
unsafe extern "C" fn fakeCudaBlock(name: *const c_char) -> c_int {
    // SAFETY: the caller's text.
    code(unsafe { with(name, |function| function.is_blocked = true) })
}

/// Releases the calls of the function that hang; later calls do not hang.
#[unsafe(no_mangle)]
unsafe extern "C" fn fakeCudaRelease(name: *const c_char) -> c_int {
    // SAFETY: the caller's text.
    code(unsafe { with(name, |function| function.is_blocked = false) })
}

/// How many calls of the function hang.
#[unsafe(no_mangle)]
unsafe extern "C" fn fakeCudaHanging(name: *const c_char) -> u64 {
    // SAFETY: the caller's text.
    unsafe { with(name, |function| function.hanging) }.unwrap_or(0)
}

/// Fails call number `call` of the function, from 1 and counted from the last [`fakeCudaReset`].
#[unsafe(no_mangle)]
unsafe extern "C" fn fakeCudaFail(name: *const c_char, call: u64, status: c_int) -> c_int {
    // SAFETY: the caller's text.
    code(unsafe {
        with(name, |function| {
            function.failures.push(Failure { call, code: status })
        })
    })
}

/// How many calls of the function were failed since the last [`fakeCudaReset`].
#[unsafe(no_mangle)]
unsafe extern "C" fn fakeCudaFailed(name: *const c_char) -> u64 {
    // SAFETY: the caller's text.
    unsafe { with(name, |function| function.failed) }.unwrap_or(0)
}

/// Resets all counts to 0 and all orders to fail. Functions that hang still hang.
#[unsafe(no_mangle)]
extern "C" fn fakeCudaReset() {
    let mut table = lock();
    IS_ASKED.store(true, Ordering::Release);
    for function in table.get_or_insert_with(Table::new).values_mut() {
        (function.calls, function.failed) = (0, 0);
        function.failures.clear();
    }
}

/// Whether this thread's calls are exempt from counts and orders. Returns the previous value.
#[unsafe(no_mangle)]
extern "C" fn fakeCudaExempt(is_exempt: c_int) -> c_int {
    IS_EXEMPT.replace(is_exempt != 0).into()
}

/// Gives `each` the name of every function that was called since the last [`fakeCudaReset`], and
/// how often.
#[unsafe(no_mangle)]
unsafe extern "C" fn fakeCudaCalls(
    each: Option<
        unsafe extern "C" fn(name: *const c_char, length: usize, calls: u64, argument: *mut c_void),
    >,
    argument: *mut c_void,
) {
    let Some(each) = each else { return };
    let table = lock();
    for (name, function) in table
        .iter()
        .flatten()
        .filter(|(_, function)| function.calls > 0)
    {
        // SAFETY: the caller's function, with the argument that came with it; the text lives while
        // it runs.
        unsafe { each(name.as_ptr().cast(), name.len(), function.calls, argument) };
    }
}
