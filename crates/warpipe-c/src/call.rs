//! The forms of a call from C. It finds an object by its pointer, and then does something
//! ([`call`], [`call_on`]), writes a value to a place of the caller's ([`read`]), or gives the
//! caller the pointer of a new object ([`make`] and its like). A new object's entry in the table is
//! reserved first: nothing is done if the table is full.

use std::ffi::c_void;
use std::ptr::null_mut;

use warpipe::Stream;

use crate::arguments::{out, out_object, put_unless_null};
use crate::handle::{self, Handle};
use crate::{Failure, OnDevice, Result, run, warpipe_status};

/// Runs `work` on the object behind a pointer.
pub(crate) fn call<P: Handle>(
    pointer: *const P,
    work: impl FnOnce(&mut P::Guard) -> Result<()>,
) -> warpipe_status {
    run(|| work(&mut handle::find(pointer)?))
}

/// As [`call`], with a stream of the object's device.
///
/// # Safety
/// As for [`Streams::get`](crate::streams::Streams::get).
pub(crate) unsafe fn call_on<P: Handle<Object = OnDevice<T>>, T>(
    pointer: *const P,
    stream: *mut c_void,
    work: impl FnOnce(&T, &Stream) -> Result<()>,
) -> warpipe_status {
    run(|| {
        let found = handle::find(pointer)?;
        // SAFETY: the caller's promise.
        let stream = unsafe { found.streams.get(stream) }?;
        work(&found.object, &stream)
    })
}

/// Writes what `work` gives of an object to `place`, which must not be null.
///
/// # Safety
/// As for [`out`].
#[inline(always)]
pub(crate) unsafe fn read<P: Handle, V, E: Into<Failure>>(
    pointer: *const P,
    name: &str,
    place: *mut V,
    work: impl FnOnce(&P::Object) -> Result<V, E>,
) -> warpipe_status {
    run(|| {
        // SAFETY: the caller's promise.
        let place = unsafe { out(name, place) }?;
        place.put(work(&*handle::find(pointer)?).map_err(E::into)?);
        Ok(())
    })
}

/// As [`read`], of a value that is always there.
///
/// # Safety
/// As for [`out`].
#[inline(always)]
pub(crate) unsafe fn get<P: Handle, V>(
    pointer: *const P,
    name: &str,
    place: *mut V,
    work: impl FnOnce(&P::Object) -> V,
) -> warpipe_status {
    // SAFETY: the caller's promise.
    unsafe { read(pointer, name, place, |found| Ok::<_, Failure>(work(found))) }
}

/// Writes the pointer of the object that `work` makes to `place`, which must not be null.
///
/// # Safety
/// As for [`out_object`].
#[inline(always)]
pub(crate) unsafe fn make<P: Handle>(
    name: &str,
    place: *mut *mut P,
    work: impl FnOnce() -> Result<P::Object>,
) -> warpipe_status {
    run(|| {
        // SAFETY: the caller's promise.
        let place = unsafe { out_object(name, place) }?;
        let entry = handle::reserve()?;
        place.put(entry.fill(work()?));
        Ok(())
    })
}

/// As [`make`], for an object that the caller may not want: `place` may be null.
///
/// # Safety
/// As for [`put_unless_null`].
#[inline(always)]
pub(crate) unsafe fn make_optional<P: Handle>(
    place: *mut *mut P,
    work: impl FnOnce() -> Result<P::Object>,
) -> warpipe_status {
    run(|| {
        // SAFETY: the caller's promise.
        unsafe { put_unless_null(place, null_mut()) };
        let entry = (!place.is_null()).then(handle::reserve).transpose()?;
        let object = work()?;
        if let Some(entry) = entry {
            // SAFETY: the caller's promise.
            unsafe { put_unless_null(place, entry.fill(object)) };
        }
        Ok(())
    })
}

/// As [`make`], of an object that comes from another one, the `source`, and is on its device.
///
/// # Safety
/// As for [`make`].
#[inline(always)]
pub(crate) unsafe fn make_beside<S, T, P, V>(
    source: *const S,
    name: &str,
    place: *mut *mut P,
    work: impl FnOnce(&mut S::Guard) -> Result<V>,
) -> warpipe_status
where
    S: Handle<Object = OnDevice<T>>,
    P: Handle<Object = OnDevice<V>>,
{
    run(|| {
        // SAFETY: the caller's promise.
        let place = unsafe { out_object(name, place) }?;
        let entry = handle::reserve()?;
        let mut found = handle::find(source)?;
        // Not by `make`: the result is moved once, to its entry.
        place.put(entry.fill(OnDevice {
            object: work(&mut found)?,
            streams: found.streams.clone(),
        }));
        Ok(())
    })
}

/// As [`make_beside`], with a stream of that device.
///
/// # Safety
/// As for [`make`] and [`Streams::get`](crate::streams::Streams::get).
#[inline(always)]
pub(crate) unsafe fn make_on<S, T, P, V>(
    source: *const S,
    stream: *mut c_void,
    name: &str,
    place: *mut *mut P,
    work: impl FnOnce(&T, &Stream) -> Result<V>,
) -> warpipe_status
where
    S: Handle<Object = OnDevice<T>>,
    P: Handle<Object = OnDevice<V>>,
{
    let work = |found: &mut S::Guard| {
        // SAFETY: the caller's promise.
        let stream = unsafe { found.streams.get(stream) }?;
        work(&found.object, &stream)
    };
    // SAFETY: the caller's promise.
    unsafe { make_beside(source, name, place, work) }
}
