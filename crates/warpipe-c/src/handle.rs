//! The table of objects behind the pointers that C holds.
//!
//! A pointer is a key: the object's type in its highest bits, then a generation and an index of
//! that type's table. Nothing is read at the address. A key that was closed is not found again
//! (until 2^32 later objects have had its place), and a call that is under way keeps its object
//! until it returns.

use std::ffi::c_void;
use std::ops::Deref;

use crate::warpipe_status::{WARPIPE_INVALID_OBJECT, WARPIPE_LIMIT_REACHED};
use crate::{Failure, Result};

mod atomic;
mod table;

use table::Refusal;
pub(crate) use table::{ENTRIES_MAX, Found, Locked, Table};

const TYPE_BITS: u32 = 6;
const TYPE_SHIFT: u32 = usize::BITS - TYPE_BITS;
const _: () = assert!(table::KEY_BITS <= TYPE_SHIFT);

/// A type of pointers in C, and the objects behind them.
pub(crate) trait Handle: Sized + 'static {
    /// An object.
    type Object: Send + 'static;
    /// How a call has the object.
    type Guard: Guard<Self::Object>;
    /// Its number among the types, from 1.
    const TYPE: usize;
    /// Its name for messages: `warpipe_publisher`.
    const NAME: &'static str;

    /// The table of its objects.
    fn table() -> &'static Table<Self::Object>;
}

/// An object in a call: [`Found`] of one that any number of threads may use, [`Locked`] of one that
/// one thread at a time may use. The value of the latter may be [taken](Locked::take), which closes
/// the pointer unless it is put back.
pub(crate) trait Guard<T>: Deref<Target = T> + Sized {
    fn find(table: &'static Table<T>, key: u64) -> Result<Self, Refusal>;
}

impl<T: Sync> Guard<T> for Found<T> {
    #[inline]
    fn find(table: &'static Table<T>, key: u64) -> Result<Found<T>, Refusal> {
        table.get(key)
    }
}

impl<T> Guard<T> for Locked<T> {
    #[inline]
    fn find(table: &'static Table<T>, key: u64) -> Result<Locked<T>, Refusal> {
        table.lock(key)
    }
}

/// Declares the types: a number, the type in C, how a call has an object, and the object's type.
macro_rules! handles {
    ($($number:literal $name:ident: $guard:ident<$object:ty>;)+) => {
        $(impl $crate::handle::Handle for $name {
            type Object = $object;
            type Guard = $crate::handle::$guard<$object>;
            const TYPE: usize = $number;
            const NAME: &'static str = stringify!($name);

            fn table() -> &'static $crate::handle::Table<$object> {
                static TABLE: $crate::handle::Table<$object> = $crate::handle::Table::new();
                &TABLE
            }
        })+

        /// The name of a type's number, and the end of a key of that type.
        pub(crate) fn type_of(number: usize) -> Option<(&'static str, fn(u64) -> bool)> {
            match number {
                $($number => Some((stringify!($name), |key| {
                    <$name as $crate::handle::Handle>::table().close(key)
                })),)+
                _ => None,
            }
        }
    };
}
pub(crate) use handles;

/// A pointer for an object to come. Large objects are made behind it, so that they are moved once.
#[inline]
pub(crate) fn reserve<P: Handle>() -> Result<Reserved<P>> {
    P::table().reserve().map(Reserved).ok_or_else(too_many::<P>)
}

/// See [`reserve`].
#[derive(Debug)]
pub(crate) struct Reserved<P: Handle>(table::Reserved<P::Object>);

impl<P: Handle> Reserved<P> {
    #[inline(always)]
    pub(crate) fn fill(self, object: P::Object) -> *mut P {
        let key = self.0.fill(object) as usize;
        std::ptr::without_provenance_mut(key | P::TYPE << TYPE_SHIFT)
    }
}

/// The object behind a pointer.
#[inline]
pub(crate) fn find<P: Handle>(pointer: *const P) -> Result<P::Guard> {
    let key = key_of(pointer)?;
    P::Guard::find(P::table(), key).map_err(refused::<P>)
}

#[cold]
fn too_many<P: Handle>() -> Failure {
    let said = format!(
        "this process has {ENTRIES_MAX} open objects of {}; close some",
        P::NAME
    );
    Failure::Own(WARPIPE_LIMIT_REACHED, said)
}

#[cold]
fn refused<P: Handle>(refusal: Refusal) -> Failure {
    let name = P::NAME;
    match refusal {
        Refusal::Closed => Failure::closed(name),
        Refusal::InUse => Failure::state(&format!(
            "another thread is in a call on this {name}, and one of the two calls uses it alone"
        )),
    }
}

/// The object behind a pointer, for this call alone: no other one uses it now.
pub(crate) fn lock<P: Handle>(pointer: *const P) -> Result<Locked<P::Object>> {
    P::table().lock(key_of(pointer)?).map_err(refused::<P>)
}

/// The object behind a pointer, if that is not null.
pub(crate) fn find_optional<P: Handle>(pointer: *const P) -> Result<Option<P::Guard>> {
    if pointer.is_null() {
        return Ok(None);
    }
    find(pointer).map(Some)
}

/// Ends a pointer of any type. Its object is dropped here, or by the last call that uses it. Null
/// is nothing to close, as for `free(3)`.
pub(crate) fn close(pointer: *mut c_void) -> Result<()> {
    let (number, key) = parts(pointer.addr());
    match crate::type_of(number) {
        _ if pointer.is_null() => Ok(()),
        Some((name, close)) => close(key)
            .then_some(())
            .ok_or_else(|| Failure::closed(name)),
        None => Err(no_key("object of warpipe", pointer.addr())),
    }
}

#[inline]
fn key_of<P: Handle>(pointer: *const P) -> Result<u64> {
    match parts(pointer.addr()) {
        (number, key) if number == P::TYPE => Ok(key),
        _ => Err(no_key(P::NAME, pointer.addr())),
    }
}

/// The number of a pointer's type, and its key in the table of that.
fn parts(pointer: usize) -> (usize, u64) {
    let key = pointer & !(usize::MAX << TYPE_SHIFT);
    (pointer >> TYPE_SHIFT, key as u64)
}

/// The number of a pointer's type, or of none.
pub(crate) fn number_of(pointer: *const c_void) -> usize {
    parts(pointer.addr()).0
}

#[cold]
pub(crate) fn no_key(wanted: &str, pointer: usize) -> Failure {
    let said = match crate::type_of(parts(pointer).0) {
        _ if pointer == 0 => format!(
            "null was passed for a {wanted}; pass one that is open, and was not sent or released"
        ),
        Some((found, _)) => format!("a {found} was passed for a {wanted}"),
        None => format!("this pointer is no {wanted}; pass one that this library gave"),
    };
    Failure::Own(WARPIPE_INVALID_OBJECT, said)
}
