//! What C passes by address: copied once, checked, and only the copy used. **This module is marked
//! for unsafe**: it reads and writes at addresses that the caller gives.

use std::ffi::{CStr, c_char};
use std::ptr::NonNull;
use std::time::Duration;

use crate::warpipe_status::WARPIPE_PROTOCOL;
use crate::{Failure, Result};

/// A text that ends with a zero byte.
///
/// # Safety
/// `text` is null, or the address of such a text, which does not change during the call.
pub(crate) unsafe fn text<'a>(name: &str, text: *const c_char) -> Result<&'a str> {
    // SAFETY: the caller's promise.
    unsafe { text_or_null(name, text) }?.ok_or_else(|| Failure::null(name))
}

/// As [`text`], and `None` for null.
///
/// # Safety
/// As for [`text`].
pub(crate) unsafe fn text_or_null<'a>(name: &str, text: *const c_char) -> Result<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: not null, and the caller's promise.
    let text = unsafe { CStr::from_ptr(text) };
    let text = text.to_str();
    text.map(Some)
        .map_err(|_| Failure::argument(name, "not UTF-8", "text in UTF-8"))
}

/// `count` values at an address, which may be null if there are none.
///
/// # Safety
/// `data` is the address of `count` values that do not change during the call, if `count` is not 0.
pub(crate) unsafe fn slice<'a, T>(name: &str, data: *const T, count: usize) -> Result<&'a [T]> {
    let data = checked(name, data, count)?;
    // SAFETY: not null, aligned and no longer than a slice may be; the rest is the caller's
    // promise.
    Ok(unsafe { std::slice::from_raw_parts(data, count) })
}

/// `count` places for values, of which `write` fills as many as it returns.
///
/// # Safety
/// `data` is the address of `count` places that nothing else uses during the call, if `count` is
/// not 0.
pub(crate) unsafe fn slice_mut<'a, T>(
    name: &str,
    data: *mut T,
    count: usize,
) -> Result<&'a mut [T]> {
    let data = checked(name, data, count)?.cast_mut();
    // SAFETY: as for `slice`; every type that is written here is valid whatever its bytes are.
    Ok(unsafe { std::slice::from_raw_parts_mut(data, count) })
}

/// The address of an array; of an empty one, any that a slice may have.
fn checked<T>(name: &str, data: *const T, count: usize) -> Result<*const T> {
    if count == 0 {
        return Ok(NonNull::dangling().as_ptr());
    }
    if data.is_null() {
        return Err(Failure::null(name));
    }
    if !data.is_aligned() {
        let allowed = format!("an address that {} divides", align_of::<T>());
        return Err(Failure::argument(name, format!("{data:p}"), allowed));
    }
    if count > isize::MAX as usize / size_of::<T>() {
        let found = format!("{count} elements long");
        return Err(Failure::argument(name, found, "less than an address space"));
    }
    Ok(data)
}

/// A place for a result. It is written once, when the call succeeds.
#[derive(Debug)]
pub(crate) struct Out<T>(*mut T);

/// A place for a result, which must be there.
///
/// # Safety
/// `place` is null, or the address of a place for a `T` that nothing else uses during the call.
pub(crate) unsafe fn out<T>(name: &str, place: *mut T) -> Result<Out<T>> {
    if place.is_null() {
        return Err(Failure::null(name));
    }
    Ok(Out(place))
}

/// As [`out`] for a pointer to an object: null until the call succeeds.
///
/// # Safety
/// As for [`out`].
pub(crate) unsafe fn out_object<T>(name: &str, place: *mut *mut T) -> Result<Out<*mut T>> {
    // SAFETY: the caller's promise.
    let place = unsafe { out(name, place) }?;
    place.put(std::ptr::null_mut());
    Ok(place)
}

impl<T> Out<T> {
    pub(crate) fn put(&self, value: T) {
        // SAFETY: not null; `out`'s caller promised the rest. Unaligned, as C may pack a structure.
        unsafe { self.0.write_unaligned(value) }
    }
}

/// As [`Out::put`], where the caller may pass null if it does not want the value.
///
/// # Safety
/// As for [`out`].
pub(crate) unsafe fn put_unless_null<T>(place: *mut T, value: T) {
    if !place.is_null() {
        // SAFETY: not null, and the caller's promise.
        unsafe { place.write_unaligned(value) }
    }
}

/// A structure of options. Its first field is its size in the caller's version: fields may be
/// added behind the known ones, and zero bytes are the defaults.
///
/// # Safety
/// Zeros are a valid value of it.
pub(crate) unsafe trait Options: Copy {}

/// A copy of the caller's options; the defaults for null.
///
/// # Safety
/// `options` is null, or the address of a structure of as many bytes as its first field says.
pub(crate) unsafe fn options<T: Options>(options: *const T) -> Result<T> {
    // SAFETY: zeros are valid, by the trait.
    let mut copy: T = unsafe { std::mem::zeroed() };
    if options.is_null() {
        return Ok(copy);
    }
    // SAFETY: not null; the caller promises at least the size.
    let size = unsafe { options.cast::<usize>().read_unaligned() };
    if size < size_of::<usize>() || size > 64 * 1024 {
        let allowed = format!("sizeof({})", name_of::<T>());
        return Err(Failure::argument("options->size", size, allowed));
    }
    let (known, bytes) = (size.min(size_of::<T>()), options.cast::<u8>());
    // SAFETY: the caller promises `size` bytes; the copy has room for those that are known.
    let newer = unsafe {
        std::ptr::copy_nonoverlapping(bytes, std::ptr::from_mut(&mut copy).cast(), known);
        std::slice::from_raw_parts(bytes.add(known), size - known)
    };
    if newer.iter().any(|&byte| byte != 0) {
        let (name, version) = (name_of::<T>(), env!("CARGO_PKG_VERSION"));
        let said = format!(
            "a {name} of {size} bytes uses options that this library ({version}) does not have; run one version"
        );
        return Err(Failure::Own(WARPIPE_PROTOCOL, said));
    }
    Ok(copy)
}

/// The name of a type in C, which is that of its type here without the modules.
fn name_of<T>() -> &'static str {
    let path = std::any::type_name::<T>();
    path.rsplit("::").next().unwrap_or(path)
}

/// Copies as many values as there are places, and tells the number of all.
///
/// # Safety
/// As for [`slice_mut`] and [`out`].
pub(crate) unsafe fn put_list<T>(
    (name, places, capacity): (&str, *mut T, usize),
    count: *mut usize,
    found: impl ExactSizeIterator<Item = T>,
) -> Result<()> {
    // SAFETY: the caller's promises.
    let (places, count) = unsafe { (slice_mut(name, places, capacity)?, out("count", count)?) };
    count.put(found.len());
    for (place, value) in places.iter_mut().zip(found) {
        *place = value;
    }
    Ok(())
}

/// Copies a text and its end into the caller's buffer. The length is told in any case, so that a
/// caller may ask with a capacity of 0 first.
///
/// # Safety
/// `buffer` is the address of `capacity` bytes, and `length` null or the address of a place.
pub(crate) unsafe fn put_text(
    found: impl ToString,
    buffer: *mut c_char,
    capacity: usize,
    length: *mut usize,
) -> Result<()> {
    let found = found.to_string();
    // SAFETY: the caller's promise.
    unsafe { put_unless_null(length, found.len()) };
    if capacity <= found.len() {
        let allowed = format!("at least {} bytes", found.len() + 1);
        return Err(Failure::argument("capacity", capacity, allowed));
    }
    // SAFETY: the caller's promise; a byte may have any value.
    let buffer = unsafe { slice_mut("buffer", buffer.cast::<u8>(), capacity) }?;
    buffer[..found.len()].copy_from_slice(found.as_bytes());
    buffer[found.len()] = 0;
    Ok(())
}

/// A text in a field of fixed length, cut off at a character's end if it is longer.
pub(crate) fn fixed<const N: usize>(text: &str) -> [c_char; N] {
    let mut field = [0; N];
    let mut end = text.len().min(N - 1);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    for (to, &from) in field.iter_mut().zip(&text.as_bytes()[..end]) {
        *to = from as c_char;
    }
    field
}

/// A timeout in nanoseconds.
pub(crate) fn timeout(nanoseconds: u64) -> Duration {
    Duration::from_nanos(nanoseconds)
}

/// As a timeout: the one of the endpoint's options, or of its policy.
pub const WARPIPE_USUAL_TIMEOUT: u64 = 0x7FFF_FFFF_FFFF_FFFE;

/// A timeout in nanoseconds; `None` for the endpoint's own.
pub(crate) fn timeout_unless_usual(nanoseconds: u64) -> Option<Duration> {
    (nanoseconds != WARPIPE_USUAL_TIMEOUT).then(|| timeout(nanoseconds))
}

/// An option that is a time, with 0 for its default.
pub(crate) fn time_option(nanoseconds: u64) -> Option<Duration> {
    (nanoseconds != 0).then(|| timeout(nanoseconds))
}

/// An option that is 0 or 1: a `bool` of other bytes would be no value of Rust.
pub(crate) fn flag(name: &str, found: u32) -> Result<bool> {
    choice(name, found, "0 or 1", &[false, true])
}

/// The choice of a number among `choices`, those of an enumeration in C.
pub(crate) fn choice<T: Copy>(name: &str, found: u32, allowed: &str, choices: &[T]) -> Result<T> {
    let chosen = choices.get(found as usize).copied();
    chosen.ok_or_else(|| Failure::argument(name, found, allowed))
}

/// An option that is a number, with 0 for its default.
pub(crate) fn number<T: PartialEq + Default>(value: T, default: T) -> T {
    if value == T::default() {
        default
    } else {
        value
    }
}

/// An option that is a time, with 0 for its default.
pub(crate) fn time(nanoseconds: u64, default: Duration) -> Duration {
    time_option(nanoseconds).unwrap_or(default)
}
