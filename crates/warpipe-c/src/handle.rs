//! The table of objects behind the pointers that C holds.
//!
//! A pointer is a key: the object's type in its highest bits, then a generation and an index of that
//! type's table. Nothing is read at the address. A key that was closed is not found again (until
//! 2^32 later objects have had its place), and a call that is under way keeps its object until it
//! returns.

use crate::failure::Failure;

mod atomic;
mod table;

use table::Refusal;
pub(crate) use table::{ENTRIES_MAX, Found, Locked, Table};

const TYPE_BITS: u32 = 6;
const TYPE_SHIFT: u32 = usize::BITS - TYPE_BITS;
const _: () = assert!(table::KEY_BITS <= TYPE_SHIFT);

/// An object of the interface: one that any number of threads may use ([`get`]), or one at a time
/// ([`lock`]).
pub(crate) trait Object: Sized + Send + 'static {
    /// The type that its pointer has in C.
    type Pointee;
    /// Its number among the types, from 1.
    const TYPE: usize;
    /// Its name for messages: `warpipe_publisher`.
    const NAME: &'static str;

    /// The table of its type.
    fn table() -> &'static Table<Self>;
}

/// Declares which objects there are: the Rust type, its number, and its type in C.
macro_rules! objects {
    ($($number:literal $name:ident = $type:ty;)+) => {
        $(impl $crate::handle::Object for $type {
            type Pointee = $name;
            const TYPE: usize = $number;
            const NAME: &'static str = stringify!($name);

            fn table() -> &'static $crate::handle::Table<Self> {
                static TABLE: $crate::handle::Table<$type> = $crate::handle::Table::new();
                &TABLE
            }
        })+

        /// The name of a type's number.
        pub(crate) fn name_of(number: usize) -> Option<&'static str> {
            match number {
                $($number => Some(stringify!($name)),)+
                _ => None,
            }
        }
    };
}
pub(crate) use objects;

/// Gives an object to C: its pointer.
#[inline(always)]
pub(crate) fn insert<T: Object>(object: T) -> Result<*mut T::Pointee, Failure> {
    Ok(reserve()?.fill(object))
}

/// A pointer for an object to come. Large objects are made behind it, so that they are moved once.
#[inline]
pub(crate) fn reserve<T: Object>() -> Result<Reserved<T>, Failure> {
    match T::table().reserve() {
        Some(entry) => Ok(Reserved(entry)),
        None => Err(Failure::TooMany(T::NAME)),
    }
}

/// As [`reserve`], unless the caller wants no pointer.
pub(crate) fn reserve_if<T: Object>(wanted: bool) -> Result<Option<Reserved<T>>, Failure> {
    wanted.then(reserve).transpose()
}

/// See [`reserve`].
#[derive(Debug)]
pub(crate) struct Reserved<T: Object>(table::Reserved<T>);

impl<T: Object> Reserved<T> {
    #[inline(always)]
    pub(crate) fn fill(self, object: T) -> *mut T::Pointee {
        let key = self.0.fill(object) as usize;
        std::ptr::without_provenance_mut(key | T::TYPE << TYPE_SHIFT)
    }
}

/// The object behind a pointer, shared with other threads.
#[inline]
pub(crate) fn get<T: Object + Sync>(pointer: *const T::Pointee) -> Result<Found<T>, Failure> {
    let key = key_of::<T>(pointer)?;
    T::table().get(key).map_err(refused::<T>)
}

/// The object behind a pointer, for this call alone: a second thread is refused. Its value may be
/// [taken](Locked::take), which closes the pointer unless it is put back.
#[inline]
pub(crate) fn lock<T: Object>(pointer: *const T::Pointee) -> Result<Locked<T>, Failure> {
    let key = key_of::<T>(pointer)?;
    T::table().lock(key).map_err(refused::<T>)
}

#[cold]
fn refused<T: Object>(refusal: Refusal) -> Failure {
    match refusal {
        Refusal::Closed => Failure::Closed(T::NAME),
        Refusal::InUse => Failure::InUse(T::NAME),
    }
}

/// The object behind a pointer, if that is not null.
pub(crate) fn get_optional<T: Object + Sync>(
    pointer: *const T::Pointee,
) -> Result<Option<Found<T>>, Failure> {
    if pointer.is_null() {
        return Ok(None);
    }
    get(pointer).map(Some)
}

/// Ends a pointer. Its object is dropped here, or by the last call that uses it. Null is nothing to
/// close, as for `free(3)`.
pub(crate) fn close<T: Object>(pointer: *mut T::Pointee) -> Result<(), Failure> {
    if pointer.is_null() {
        return Ok(());
    }
    let key = key_of::<T>(pointer)?;
    if T::table().close(key) {
        Ok(())
    } else {
        Err(Failure::Closed(T::NAME))
    }
}

#[inline]
fn key_of<T: Object>(pointer: *const T::Pointee) -> Result<u64, Failure> {
    if pointer.is_null() {
        return Err(Failure::Null(T::NAME));
    }
    let key = pointer.addr();
    let found = key >> TYPE_SHIFT;
    if found == T::TYPE {
        Ok((key & !(usize::MAX << TYPE_SHIFT)) as u64)
    } else {
        Err(Failure::WrongType {
            wanted: T::NAME,
            found: crate::name_of(found),
        })
    }
}
