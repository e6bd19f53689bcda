//! Modules and launches: a kernel's name and parameters come from the PTX, its work from the CPU
//! host version of that name.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use warpipe::{HostKernel, KernelLaunch};

use crate::capture;
use crate::gather::Gather;
use crate::memory;
use crate::status::*;
use crate::stream;
use crate::work::{self, Work};

/// An `.entry` of a module.
#[derive(Debug, PartialEq, Eq)]
struct Entry {
    name: String,
    /// The bytes of each parameter.
    parameters: Vec<usize>,
}

/// The target of a `CUfunction`.
struct Function {
    host_version: HostVersion,
    parameters: usize,
}

enum HostVersion {
    /// A kernel of `warpipe-kernels`: every parameter is 64 bits wide.
    Plain(HostKernel),
    /// The backend's own kernel that stores many words.
    Broadcast,
    /// The backend's own kernel that copies between tensors of different layouts.
    Gather,
}

#[derive(Default)]
struct Loaded {
    modules: Vec<Arc<Vec<Entry>>>,
    functions: HashMap<usize, Arc<Function>>,
}

static LOADED: Mutex<Option<Loaded>> = Mutex::new(None);

fn with<T>(body: impl FnOnce(&mut Loaded) -> T) -> T {
    body(
        LOADED
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get_or_insert_default(),
    )
}

/// The entries of a PTX text; none if it is not PTX.
fn entries(ptx: &str) -> Option<Vec<Entry>> {
    if !ptx.contains(".version") || !ptx.contains(".target") {
        return None;
    }
    ptx.split(".entry").skip(1).map(entry).collect()
}

/// An entry from the text after the keyword: `NAME(PARAMETERS)`, or a name alone.
fn entry(text: &str) -> Option<Entry> {
    let text = text.trim_start();
    let end = text.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '$'))?;
    let (name, rest) = text.split_at(end);
    let list = match rest.trim_start().strip_prefix('(') {
        Some(list) => &list[..list.find(')')?],
        None => "",
    };
    let parameters: Option<Vec<usize>> =
        list.split(".param").skip(1).map(parameter_bytes).collect();
    Some(Entry {
        name: name.to_owned(),
        parameters: parameters?,
    })
}

/// The size of ` .u64 NAME`, ` .align 8 .b8 NAME[1032]` and the like.
fn parameter_bytes(text: &str) -> Option<usize> {
    let kind = text.split_whitespace().rfind(|word| {
        word.strip_prefix(['.']).is_some_and(
            |word| matches!(word.as_bytes(), [b'b' | b'u' | b's' | b'f', digit, ..] if digit.is_ascii_digit()),
        )
    })?;
    let bits: usize = kind[2..].parse().ok()?;
    let count = match text.split_once('[') {
        Some((_, rest)) => rest.split(']').next()?.parse().ok()?,
        None => 1,
    };
    Some(bits / 8 * count)
}

/// Loads PTX; the only supported option is the compiler's log buffer.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleLoadDataEx(
    module: *mut *mut c_void,
    image: *const c_void,
    count: u32,
    options: *mut u32,
    values: *mut *mut c_void,
) -> c_int {
    answer("cuModuleLoadDataEx", Needs::Context, || {
        capture::check_unsafe_call()?;
        if image.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's terminated text.
        let text = unsafe { CStr::from_ptr(image.cast()) };
        match text.to_str().ok().and_then(entries) {
            // SAFETY: the caller's out pointer.
            Some(entries) => unsafe { give(module, keep(entries)) },
            None => {
                // SAFETY: the caller's arrays of `count`.
                unsafe { write_log(count as usize, options, values, c"ptxas fatal : not PTX") };
                Err(INVALID_PTX)
            }
        }
    })
}

fn keep(entries: Vec<Entry>) -> *mut c_void {
    let module = Arc::new(entries);
    let handle = Arc::as_ptr(&module).addr();
    with(|loaded| loaded.modules.push(module));
    ptr::without_provenance_mut(handle)
}

/// # Safety
/// The arrays have `count` entries, and an error log buffer among them has the size that stands
/// beside it.
unsafe fn write_log(count: usize, options: *mut u32, values: *mut *mut c_void, words: &CStr) {
    const LOG: u32 = 5;
    const LOG_BYTES: u32 = 6;
    if options.is_null() || values.is_null() {
        return;
    }
    // SAFETY: the caller's promise.
    let (options, values) = unsafe {
        (
            std::slice::from_raw_parts(options, count),
            std::slice::from_raw_parts(values, count),
        )
    };
    let value = |option| {
        options
            .iter()
            .position(|&other| other == option)
            .map(|index| values[index])
    };
    if let (Some(log), Some(bytes)) = (value(LOG), value(LOG_BYTES))
        && bytes.addr() > words.count_bytes()
    {
        // SAFETY: the buffer has room for the words and their end.
        unsafe {
            ptr::copy_nonoverlapping(
                words.as_ptr(),
                log.cast::<c_char>(),
                words.count_bytes() + 1,
            )
        };
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuModuleGetFunction(
    out: *mut *mut c_void,
    module: *mut c_void,
    name: *const c_char,
) -> c_int {
    answer("cuModuleGetFunction", Needs::Context, || {
        if name.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's terminated text.
        let name = unsafe { CStr::from_ptr(name) };
        let entries = with(|loaded| {
            loaded
                .modules
                .iter()
                .find(|known| Arc::as_ptr(known).addr() == module.addr())
                .cloned()
        })
        .ok_or(INVALID_HANDLE)?;
        let entry = entries
            .iter()
            .find(|entry| entry.name.as_bytes() == name.to_bytes())
            .ok_or(NOT_FOUND)?;
        let function = Arc::new(Function {
            host_version: host_version(entry)?,
            parameters: entry.parameters.len(),
        });
        let handle = Arc::as_ptr(&function).addr();
        with(|loaded| loaded.functions.insert(handle, function));
        // SAFETY: the caller's out pointer.
        unsafe { give(out, ptr::without_provenance_mut(handle)) }
    })
}

/// The host version of an entry.
fn host_version(entry: &Entry) -> Outcome<HostVersion> {
    if entry.name == "warpipe_broadcast" && entry.parameters == [size_of::<Signals>()] {
        return Ok(HostVersion::Broadcast);
    }
    if entry.name == "warpipe_gather" && entry.parameters == [size_of::<Gather>()] {
        return Ok(HostVersion::Gather);
    }
    let mut kernels = warpipe_kernels::ALL
        .iter()
        .chain(warpipe_kernels::render::ALL)
        .chain(warpipe_kernels::ring::ALL)
        .chain(warpipe::RING_STEPS)
        .chain(warpipe::weights::CONTENT_HASH);
    let kernel = kernels.find(|kernel| kernel.name.to_bytes() == entry.name.as_bytes());
    match kernel {
        Some(kernel) if entry.parameters.iter().all(|&bytes| bytes == 8) => {
            Ok(HostVersion::Plain(kernel.host))
        }
        _ => Err(NO_BINARY_FOR_GPU),
    }
}

fn find(function: *mut c_void) -> Outcome<Arc<Function>> {
    with(|loaded| loaded.functions.get(&function.addr()).cloned()).ok_or(INVALID_HANDLE)
}

#[unsafe(no_mangle)]
extern "C" fn cuFuncLoad(function: *mut c_void) -> c_int {
    answer("cuFuncLoad", Needs::Context, || find(function).map(drop))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuFuncGetAttribute(
    value: *mut c_int,
    _attribute: u32,
    function: *mut c_void,
) -> c_int {
    answer("cuFuncGetAttribute", Needs::Context, || {
        find(function)?;
        // SAFETY: the caller's out pointer.
        unsafe { give(value, 16) }
    })
}

/// The broadcast kernel's parameter.
#[repr(C)]
#[derive(Clone, Copy)]
struct Signals {
    count: u64,
    /// Word and value of each.
    signals: [[u64; 2]; 64],
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuLaunchKernel(
    function: *mut c_void,
    grid_x: u32,
    grid_y: u32,
    grid_z: u32,
    block_x: u32,
    block_y: u32,
    block_z: u32,
    _shared_bytes: u32,
    stream: *mut c_void,
    parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> c_int {
    answer("cuLaunchKernel", Needs::Context, || {
        let (function, stream) = (find(function)?, stream::find_for_work(stream)?);
        let flat = (grid_y, grid_z, block_y, block_z) == (1, 1, 1, 1);
        if !flat || grid_x == 0 || block_x == 0 || block_x > 1024 || parameters.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's array, one pointer for each parameter of the function.
        let parameters = unsafe { std::slice::from_raw_parts(parameters, function.parameters) };
        if parameters.iter().any(|parameter| parameter.is_null()) {
            return Err(INVALID_VALUE);
        }
        let work: Arc<dyn Fn() + Send + Sync> = match function.host_version {
            HostVersion::Plain(host_version) => {
                // SAFETY: each leads to a parameter of 64 bits, see `host_version`.
                let args: Vec<u64> = parameters
                    .iter()
                    .map(|&value| unsafe { value.cast::<u64>().read() })
                    .collect();
                // SAFETY: the program launched this kernel with these arguments.
                Arc::new(move || unsafe {
                    host_version(KernelLaunch {
                        grid: grid_x,
                        block: block_x,
                        args: &args,
                    })
                })
            }
            HostVersion::Broadcast => {
                // SAFETY: the one parameter has this layout, see `host_version`.
                let list = unsafe { parameters[0].cast::<Signals>().read() };
                check(&list)?;
                Arc::new(move || broadcast(&list, block_x))
            }
            HostVersion::Gather => {
                // SAFETY: the one parameter has this layout, see `host_version`.
                let gather = unsafe { parameters[0].cast::<Gather>().read() };
                gather.check(stream.device)?;
                Arc::new(move || gather.run())
            }
        };
        stream.push(Work::Kernel(work))
    })
}

/// Checks the words when the kernel is launched: a GPU would fault later, which a test could not
/// distinguish.
fn check(list: &Signals) -> Outcome {
    let words = &list.signals[..usize::try_from(list.count).unwrap_or(64).min(64)];
    let sound = words
        .iter()
        .all(|&[word, _]| word.is_multiple_of(8) && memory::usable(word, 8, true));
    if sound { Ok(()) } else { Err(INVALID_VALUE) }
}

/// The host version of `warpipe_broadcast`: thread `i` stores word `i`.
fn broadcast(list: &Signals, threads: u32) {
    let count = usize::try_from(list.count)
        .unwrap_or(64)
        .min(64)
        .min(threads as usize);
    for &[word, value] in &list.signals[..count] {
        // SAFETY: looked at when launched; that it is mapped until now is the program's duty.
        unsafe { work::store(word, value) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_gives_its_name_and_the_size_of_each_parameter() {
        let ptx = ".version 8.0\n.target sm_70\n.visible .entry one(\n\t.param .u64 one_param_0,\n\t.param .f32 one_param_1\n)\n{ ret; }\n\
            .visible .entry two(\n.param .align 8 .b8 two_param_0[1032]\n)\n{ ret; }\n.visible .entry three() { ret; }";
        let found = entries(ptx).unwrap();
        let shapes: Vec<_> = found
            .iter()
            .map(|entry| (entry.name.as_str(), entry.parameters.as_slice()))
            .collect();
        assert_eq!(
            shapes,
            [("one", &[8, 4][..]), ("two", &[1032]), ("three", &[])]
        );
    }

    #[test]
    fn text_that_is_no_ptx_is_refused() {
        assert!(entries("hello").is_none());
    }

    #[test]
    fn every_kernel_of_the_kernels_crate_can_be_run() {
        for kernel in warpipe_kernels::ALL
            .iter()
            .chain(warpipe_kernels::render::ALL)
            .chain(warpipe_kernels::ring::ALL)
            .chain(warpipe::RING_STEPS)
            .chain(warpipe::weights::CONTENT_HASH)
        {
            let found = entries(kernel.ptx.to_str().unwrap()).unwrap();
            let entry = found
                .iter()
                .find(|entry| entry.name.as_bytes() == kernel.name.to_bytes());
            assert!(
                host_version(entry.expect("the module has the kernel")).is_ok(),
                "{kernel:?}"
            );
        }
    }
}
