//! Devices and streams.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use warpipe::{Device, DeviceInfo, DeviceKind, Stream};

use crate::arguments::{Options, fixed, options, out_object, text_or_null, timeout};
use crate::call::{call, call_on, get, make};
use crate::handle::{self, Handle};
use crate::streams::{OnDevice, Streams};
use crate::{Failure, Result, run, warpipe_status};

/// A GPU, or the host: memory of memfds, threads as streams. Endpoints that were made with it
/// outlive it.
pub struct warpipe_device(());

/// The properties of a device.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct warpipe_device_info {
    /// 1 for a GPU, 0 for the host.
    pub is_cuda: bool,
    /// The device's ordinal in this process, as `cudaSetDevice` takes it; 0 for the host.
    pub ordinal: u32,
    /// The GPU's UUID, the same in every process; zeros for the host.
    pub uuid: [u8; 16],
    /// Total memory in bytes.
    pub memory_bytes: u64,
    /// The name for people, cut off after 127 bytes: the GPU's product name, or `host`.
    pub name: [c_char; 128],
}

impl warpipe_device_info {
    fn of(info: &DeviceInfo) -> warpipe_device_info {
        warpipe_device_info {
            is_cuda: info.id.kind == DeviceKind::Cuda,
            ordinal: info.ordinal,
            uuid: info.id.uuid,
            memory_bytes: info.memory_bytes,
            name: fixed(&info.name),
        }
    }
}

/// The device of an argument; of null, the first GPU, else the host.
pub(crate) fn streams_of(device: *const warpipe_device) -> Result<Arc<Streams>> {
    Ok(match handle::find_optional(device)? {
        Some(device) => device.streams.clone(),
        None => Arc::new(Streams::new(Device::preferred().device)),
    })
}

/// Options of an object on a device.
pub(crate) trait DeviceOptions: Options {
    fn device(&self) -> *const warpipe_device;
}

/// Makes a structure the options of an object on the device that its field `device` names.
macro_rules! device_options {
    ($options:ty) => {
        // SAFETY: numbers and pointers, which may be zero.
        unsafe impl $crate::arguments::Options for $options {}

        impl $crate::device::DeviceOptions for $options {
            fn device(&self) -> *const $crate::device::warpipe_device {
                self.device
            }
        }
    };
}
pub(crate) use device_options;

/// Makes an object by options, which say on which device.
///
/// # Safety
/// As for [`make`] and [`options`].
pub(crate) unsafe fn make_with<O: DeviceOptions, P: Handle<Object = OnDevice<T>>, T>(
    name: &str,
    place: *mut *mut P,
    given: *const O,
    work: impl FnOnce(&O, &Device) -> Result<T>,
) -> warpipe_status {
    let make_object = || {
        // SAFETY: the caller's promise.
        let options = unsafe { options(given) }?;
        let streams = streams_of(options.device())?;
        let object = work(&options, streams.device())?;
        Ok(OnDevice { object, streams })
    };
    // SAFETY: the caller's promise.
    unsafe { make(name, place, make_object) }
}

fn named(name: &str) -> Result<Device> {
    if name == "host" {
        return Ok(Device::host());
    }
    if name == "cuda" {
        return Ok(Device::cuda(0)?);
    }
    if let Some(ordinal) = name
        .strip_prefix("cuda:")
        .and_then(|rest| rest.parse().ok())
    {
        return Ok(Device::cuda(ordinal)?);
    }
    if let Some(uuid) = name.strip_prefix("GPU-").and_then(uuid_of) {
        return Ok(Device::by_uuid(uuid)?);
    }
    let allowed = "NULL, \"host\", \"cuda\", \"cuda:ORDINAL\" or \"GPU-UUID\"";
    Err(Failure::argument("name", format!("{name:?}"), allowed))
}

fn uuid_of(text: &str) -> Option<[u8; 16]> {
    let digits = text.replace('-', "");
    let is_whole = digits.len() == 32 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    let number = is_whole.then(|| u128::from_str_radix(&digits, 16).ok())?;
    number.map(u128::to_be_bytes)
}

/// Opens a device: `"cuda"` or `"cuda:N"` (an ordinal among those that `CUDA_VISIBLE_DEVICES`
/// leaves), `"GPU-..."` (a UUID), or `"host"`. `NULL` is the first GPU if there is one, else the
/// host; `warpipe_device_get_info` says which.
///
/// `*device` is the caller's, to be closed by `warpipe_close`. Endpoints that were made with
/// it stay usable after that.
///
/// `WARPIPE_DEVICE_UNAVAILABLE`, `WARPIPE_DEVICE_FAILED`, `WARPIPE_INVALID_INPUT`.
///
/// # Safety
/// `name` is null or a text, `device` the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_device_open(
    name: *const c_char,
    device: *mut *mut warpipe_device,
) -> warpipe_status {
    let open = || {
        // SAFETY: the caller's promise.
        let device = match unsafe { text_or_null("name", name) }? {
            Some(name) => named(name)?,
            None => Device::preferred().device,
        };
        let streams = Arc::new(Streams::new(device));
        Ok(OnDevice {
            object: (),
            streams,
        })
    };
    // SAFETY: the caller's promise.
    unsafe { make("device", device, open) }
}

/// Reads a device's properties.
///
/// # Safety
/// `info` is the address of such a structure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_device_get_info(
    device: *const warpipe_device,
    info: *mut warpipe_device_info,
) -> warpipe_status {
    let info_of = |streams: &Streams| warpipe_device_info::of(streams.device().info());
    // SAFETY: the caller's promise.
    unsafe { get(device, "info", info, |device| info_of(&device.streams)) }
}

/// Makes a stream (`cuStreamCreate`, non-blocking; a thread on the host). On CUDA `*stream` is a
/// `CUstream`, which is a `cudaStream_t`; wherever this library takes a stream, it takes any stream
/// of the device. Null is the device's default stream.
///
/// A stream must live until every endpoint, sample, loan and memory that it was passed with is
/// closed: the end of one is ordered behind the stream's work.
///
/// `*stream` is the caller's, to be destroyed by `warpipe_stream_destroy`.
///
/// # Safety
/// `stream` is the address of a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_stream_create(
    device: *const warpipe_device,
    stream: *mut *mut c_void,
) -> warpipe_status {
    run(|| {
        // SAFETY: the caller's promise.
        let place = unsafe { out_object("stream", stream) }?;
        place.put(handle::find(device)?.streams.create()?);
        Ok(())
    })
}

/// Destroys a stream of `warpipe_stream_create`, once; work that is enqueued still runs. The
/// library keeps it as long as endpoints and samples refer to it.
///
/// `WARPIPE_INVALID_INPUT` for any other stream.
#[unsafe(no_mangle)]
pub extern "C" fn warpipe_stream_destroy(
    device: *const warpipe_device,
    stream: *mut c_void,
) -> warpipe_status {
    call(device, |device| device.streams.destroy(stream))
}

/// Waits on the CPU until all work enqueued on the stream so far is done.
///
/// `WARPIPE_TIMEOUT` when it is not within `timeout_ns` nanoseconds; `WARPIPE_DEVICE_FAILED`, also
/// for a fault of earlier work.
///
/// # Safety
/// `stream` is a stream of the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_stream_synchronize(
    device: *const warpipe_device,
    stream: *mut c_void,
    timeout_ns: u64,
) -> warpipe_status {
    let synchronize = |(): &(), stream: &Stream| Ok(stream.synchronize(timeout(timeout_ns))?);
    // SAFETY: the caller's promise.
    unsafe { call_on(device, stream, synchronize) }
}

/// Makes `stream` wait, on the device, until the work enqueued on `other` so far is done
/// (`cuStreamWaitEvent`). No CPU waits.
///
/// # Safety
/// Both are streams of the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_stream_wait_for(
    device: *const warpipe_device,
    stream: *mut c_void,
    other: *mut c_void,
) -> warpipe_status {
    call(device, |device| {
        // SAFETY: the caller's promise.
        let (stream, other) = unsafe { (device.streams.get(stream)?, device.streams.get(other)?) };
        Ok(stream.wait_for(&other)?)
    })
}

/// A function that the CPU runs in a stream's order.
pub type warpipe_host_function = Option<unsafe extern "C" fn(argument: *mut c_void)>;

/// The caller's promise for a function that is called later.
pub(crate) struct HostCall {
    function: unsafe extern "C" fn(*mut c_void),
    argument: *mut c_void,
}

// SAFETY: the caller of `new` promises that any thread may call it.
unsafe impl Send for HostCall {}

impl HostCall {
    /// None for no function.
    ///
    /// # Safety
    /// `function(argument)` may be called once, by any thread, at any later time.
    pub(crate) unsafe fn new(
        function: warpipe_host_function,
        argument: *mut c_void,
    ) -> Option<HostCall> {
        function.map(|function| HostCall { function, argument })
    }

    pub(crate) fn call(self) {
        // SAFETY: the promise of `new`'s caller.
        unsafe { (self.function)(self.argument) }
    }
}

/// Enqueues a function on the CPU behind the stream's work (`cuLaunchHostFunc`): on the host device
/// this is how "kernels" run. It must not call this library or the device, and an exception of C++
/// must not leave it.
///
/// # Safety
/// `function(argument)` may be called once, by another thread, at any later time. `stream` is a
/// stream of the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_stream_call(
    device: *const warpipe_device,
    stream: *mut c_void,
    function: warpipe_host_function,
    argument: *mut c_void,
) -> warpipe_status {
    let enqueue = |(): &(), stream: &Stream| {
        // SAFETY: the caller's promise.
        let call = unsafe { HostCall::new(function, argument) };
        let call = call.ok_or_else(|| Failure::null("function"))?;
        Ok(stream.call(move || call.call())?)
    };
    // SAFETY: the caller's promise.
    unsafe { call_on(device, stream, enqueue) }
}

/// Enqueues a copy of `bytes` bytes between device addresses (`cuMemcpyAsync`).
///
/// # Safety
/// Both ranges stay mapped until the copy is done, and do not overlap. `stream` is a stream of the
/// device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn warpipe_stream_copy(
    device: *const warpipe_device,
    stream: *mut c_void,
    to: u64,
    from: u64,
    bytes: u64,
) -> warpipe_status {
    // SAFETY: the caller's promise of both ranges.
    let copy = |(): &(), stream: &Stream| Ok(unsafe { stream.copy(to, from, bytes) }?);
    // SAFETY: the caller's promise.
    unsafe { call_on(device, stream, copy) }
}
