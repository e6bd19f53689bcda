//! Shared by the tests of the C interface: calls that must succeed or fail, options, and a domain
//! and a device for one test.
//!
//! Every address that a test passes is null, or that of a value of its own: the macros' calls need
//! no other promise.

use std::ffi::{CStr, CString, c_void};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::ptr::null_mut;
use std::time::Duration;

use warpipe_c::*;
use warpipe_testkit::TempDir;

/// A timeout in nanoseconds that no test reaches.
pub const LONG: u64 = 60_000_000_000;
/// A timeout in nanoseconds for a wait that must pass in vain.
pub const SHORT: u64 = 1_000_000;

/// Calls a function, and returns its status.
macro_rules! call {
    (warpipe_close($object:expr)) => {
        ::warpipe_c::warpipe_close($object.cast())
    };
    ($function:ident($($argument:expr),* $(,)?)) => {{
        #[allow(unused_unsafe, reason = "functions without addresses are safe")]
        // SAFETY: every address is null, or that of a value that lives until the call returns.
        let status = unsafe { ::warpipe_c::$function($($argument),*) };
        status
    }};
}

/// Calls a function that must succeed.
macro_rules! ok {
    ($function:ident($($argument:expr),* $(,)?)) => {
        $crate::common::check(stringify!($function), call!($function($($argument),*)))
    };
}

/// Calls a function that must fail with this status, and returns the message.
macro_rules! fails {
    ($status:ident, $function:ident($($argument:expr),* $(,)?)) => {
        $crate::common::check_failure(
            stringify!($function),
            ::warpipe_c::warpipe_status::$status,
            call!($function($($argument),*)),
        )
    };
}

/// Calls a function that must succeed with the place for its result as the last argument, and
/// returns the result.
macro_rules! get {
    ($function:ident($($argument:expr),* $(,)?)) => {{
        let mut place = $crate::common::zeroed();
        ok!($function($($argument,)* &mut place));
        place
    }};
}

/// Options with these fields, and the default of every other.
macro_rules! options {
    ($type:ident { $($field:ident: $value:expr),* $(,)? }) => {{
        let mut options = $crate::common::zeroed::<::warpipe_c::$type>();
        options.size = size_of::<::warpipe_c::$type>();
        $(options.$field = $value;)*
        options
    }};
}

// Behind the macros, which it uses.
pub mod jobs;

#[track_caller]
pub fn check(function: &str, status: warpipe_status) {
    let expected = warpipe_status::WARPIPE_OK;
    assert_eq!(status, expected, "{function}: {}", message());
}

#[track_caller]
pub fn check_failure(function: &str, expected: warpipe_status, status: warpipe_status) -> String {
    assert_eq!(status, expected, "{function}: {}", message());
    message()
}

/// The message of this thread's last error.
pub fn message() -> String {
    let text = warpipe_error_message();
    // SAFETY: never null, and valid until this thread's next call that fails.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().expect("a message in UTF-8").to_string()
}

/// The value that C's `T value = {0};` makes.
pub fn zeroed<T: Plain>() -> T {
    // SAFETY: the trait says that zeros are a value.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// A type of the interface for which zeros are a value: structures of numbers and pointers.
///
/// # Safety
/// They are.
pub unsafe trait Plain: Copy {}

macro_rules! plain {
    ($($type:ty),+ $(,)?) => {
        // SAFETY: numbers, `bool`s and pointers.
        $(unsafe impl Plain for $type {})+
    };
}

plain! {
    bool, i32, u32, u64, usize,
    warpipe_device_info, warpipe_layout, warpipe_loan_info, warpipe_sample_info,
    warpipe_publisher_options, warpipe_subscriber_options,
    warpipe_queue_options, warpipe_queue_state, warpipe_worker_options,
    warpipe_client_options, warpipe_server_options, warpipe_create_options,
    warpipe_change, warpipe_endpoint, warpipe_member_info, warpipe_member_options,
    warpipe_members_options, warpipe_memory_info, warpipe_open_options, warpipe_part,
    warpipe_pool_options, warpipe_pool_quota, warpipe_pool_stats, warpipe_pool_usage,
    warpipe_publish_options, warpipe_semaphore_info,
}

// SAFETY: null.
unsafe impl<T> Plain for *mut T {}

/// A text as C has it.
pub fn text(text: &str) -> CString {
    CString::new(text).expect("no zero byte within")
}

/// The layout of this many bytes.
pub fn bytes_layout(bytes: u64) -> warpipe_layout {
    let dtype = warpipe_dtype::WARPIPE_UINT8 as u32;
    get!(warpipe_layout_contiguous(dtype, &bytes, 1))
}

/// A pointer that goes to another thread. It is a key, so that any thread may have it.
#[derive(Debug)]
pub struct Shared<T>(*mut T);

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Shared<T> {
        *self
    }
}

impl<T> Copy for Shared<T> {}

impl<T> Shared<T> {
    pub fn new(pointer: *mut T) -> Shared<T> {
        Shared(pointer)
    }

    pub fn get(self) -> *mut T {
        self.0
    }
}

// SAFETY: nothing is read at the address, except by calls that any thread may make.
unsafe impl<T> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T> Sync for Shared<T> {}

/// A domain of one test, the host device, and a stream of it.
#[derive(Debug)]
pub struct Fixture {
    pub domain: *mut warpipe_domain,
    pub device: *mut warpipe_device,
    pub stream: *mut c_void,
    _folder: TempDir,
}

impl Fixture {
    pub fn new() -> Fixture {
        let folder = warpipe_testkit::temporary_folder().expect("a temporary directory");
        let path = text(folder.path().to_str().expect("a path in UTF-8"));
        let domain = get!(warpipe_domain_open(path.as_ptr()));
        let device: *mut warpipe_device = get!(warpipe_device_open(c"host".as_ptr()));
        let stream = get!(warpipe_stream_create(device));
        Fixture {
            domain,
            device,
            stream,
            _folder: folder,
        }
    }

    /// Waits until the work of the stream is done.
    pub fn synchronize(&self) {
        ok!(warpipe_stream_synchronize(self.device, self.stream, LONG));
    }

    /// Fills a loan.
    pub fn write(&self, loan: *mut warpipe_loan, bytes: &[u8]) {
        let data = bytes.as_ptr().cast();
        ok!(warpipe_loan_write(
            loan,
            self.stream,
            none(),
            data,
            bytes.len()
        ));
    }

    /// Reads a sample.
    pub fn read(&self, sample: *const warpipe_sample) -> Vec<u8> {
        let info: warpipe_sample_info = get!(warpipe_sample_get_info(sample));
        let mut bytes = vec![0; info.layout.bytes as usize];
        let buffer = bytes.as_mut_ptr().cast();
        ok!(warpipe_sample_copy_to(
            sample,
            none(),
            buffer,
            bytes.len(),
            LONG
        ));
        bytes
    }

    /// Another stream, to be destroyed by [`Fixture::destroy`].
    pub fn another_stream(&self) -> *mut c_void {
        get!(warpipe_stream_create(self.device))
    }

    /// Destroys a stream.
    pub fn destroy(&self, stream: *mut c_void) {
        ok!(warpipe_stream_destroy(self.device, stream));
    }

    /// A publisher, and a subscriber that is attached to it.
    pub fn channel(&self, name: &CStr) -> (*mut warpipe_publisher, *mut warpipe_subscriber) {
        let options = options!(warpipe_publisher_options {
            domain: self.domain,
            device: self.device,
        });
        let publisher = get!(warpipe_publisher_create(name.as_ptr(), &options));
        let options = options!(warpipe_subscriber_options {
            domain: self.domain,
            device: self.device,
        });
        let subscriber = get!(warpipe_subscriber_open(name.as_ptr(), &options));
        (publisher, subscriber)
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        ok!(warpipe_stream_destroy(self.device, self.stream));
        ok!(warpipe_close(self.device));
        ok!(warpipe_close(self.domain));
    }
}

/// Memory of another allocator, freed at its end.
#[derive(Debug)]
pub struct Malloc(warpipe::Device, pub u64);

impl Malloc {
    pub fn new(bytes: u64) -> Malloc {
        let device = warpipe::Device::host();
        let data = device.backend().allocate_plain(bytes);
        Malloc(device, data.expect("the host has memory"))
    }
}

impl Drop for Malloc {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, and freed once, after the test has closed it.
        unsafe { self.0.backend().free_plain(self.1) }.expect("it was allocated");
    }
}

/// The bytes that came with a sample or job.
pub fn metadata(info: &warpipe_sample_info) -> Vec<u8> {
    if info.metadata.is_null() {
        return Vec::new();
    }
    // SAFETY: valid as long as the sample is, which the caller has not closed.
    unsafe { std::slice::from_raw_parts(info.metadata, info.metadata_bytes) }.to_vec()
}

/// Whether a descriptor of the interface becomes readable.
pub fn becomes_readable(fd: i32) -> bool {
    // SAFETY: its endpoint, which the caller has not closed, keeps it open.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    warpipe_testkit::wait_readable(fd, Duration::from_nanos(LONG)).expect("poll(2)")
}

/// Null, where any pointer fits.
pub fn none<T>() -> *mut T {
    null_mut()
}

/// A lease and its input, by a call for both.
pub fn leased(
    take: impl FnOnce(&mut *mut warpipe_lease, &mut *mut warpipe_sample),
) -> (*mut warpipe_lease, *mut warpipe_sample) {
    let (mut lease, mut input) = (none(), none());
    take(&mut lease, &mut input);
    (lease, input)
}
