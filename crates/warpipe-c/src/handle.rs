//! The table of objects behind the pointers that C holds.
//!
//! A pointer is a key: the object's type in its highest bits, then a generation and an index of that
//! type's table. Nothing is read at the address. A key that was closed is not found again (until
//! 2^32 later objects have had its place), and a call that is under way keeps its object until it
//! returns.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::failure::Failure;

mod table;

pub(crate) use table::{ENTRIES_MAX, Found, Table};

const TYPE_BITS: u32 = 6;
const TYPE_SHIFT: u32 = usize::BITS - TYPE_BITS;
const _: () = assert!(table::KEY_BITS <= TYPE_SHIFT);

/// An object of the interface.
pub(crate) trait Object: Sized + Send + Sync + 'static {
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
pub(crate) fn insert<T: Object>(object: T) -> Result<*mut T::Pointee, Failure> {
    let key = T::table().insert(object);
    let key = key.map_err(|_object| Failure::TooMany(T::NAME))? as usize;
    Ok(std::ptr::without_provenance_mut(
        key | T::TYPE << TYPE_SHIFT,
    ))
}

/// The object behind a pointer.
pub(crate) fn get<T: Object>(pointer: *const T::Pointee) -> Result<Found<T>, Failure> {
    let key = key_of::<T>(pointer)?;
    T::table().get(key).ok_or(Failure::Closed(T::NAME))
}

/// The object behind a pointer, if that is not null.
pub(crate) fn get_optional<T: Object>(
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

/// An object that one thread at a time may use, and that a call may consume. A mutex without a
/// queue: a second thread is refused, and one atomic operation less for each call.
#[derive(Debug)]
pub(crate) struct Exclusive<T> {
    is_used: AtomicBool,
    /// On the heap: an object has some hundred bytes, which each move from the table to the stack
    /// and on would copy.
    value: UnsafeCell<Held<T>>,
}

// SAFETY: `value` is accessed through `Locked` alone, of which there is one at a time.
unsafe impl<T: Send> Sync for Exclusive<T> {}

impl<T> Exclusive<T> {
    pub(crate) fn new(value: T) -> Exclusive<T> {
        Exclusive {
            is_used: AtomicBool::new(false),
            value: UnsafeCell::new(Some(Box::new(value))),
        }
    }

    /// The value, unless another thread uses it or a call has consumed it.
    pub(crate) fn lock(&self, name: &'static str) -> Result<Locked<'_, T>, Failure> {
        if self.is_used.swap(true, Ordering::Acquire) {
            return Err(Failure::InUse(name));
        }
        let mut locked = Locked(self);
        if locked.place().is_none() {
            return Err(Failure::Closed(name));
        }
        Ok(locked)
    }
}

/// A value that this thread uses.
#[derive(Debug)]
pub(crate) struct Locked<'a, T>(&'a Exclusive<T>);

impl<T> Locked<'_, T> {
    fn place(&mut self) -> &mut Held<T> {
        // SAFETY: `is_used` was false when this was made, and is true until it is dropped, so that
        // no other `Locked` of this object exists; the borrow of `self` excludes a second one here.
        unsafe { &mut *self.0.value.get() }
    }

    pub(crate) fn value(&mut self) -> &mut T {
        self.place().as_mut().expect("checked when it was locked")
    }
}

impl<T> Drop for Locked<'_, T> {
    fn drop(&mut self) {
        self.0.is_used.store(false, Ordering::Release);
    }
}

/// A value that a call may consume, while it has it.
pub(crate) type Held<T> = Option<Box<T>>;

/// Passes the value behind `pointer` to `consume`, which takes it when it uses it up: then the
/// pointer is closed. A value that it leaves, or puts back, stays the caller's.
pub(crate) fn consume<T, P, R>(
    pointer: *mut P,
    consume: impl FnOnce(&mut Held<T>) -> Result<R, Failure>,
) -> Result<R, Failure>
where
    Exclusive<T>: Object<Pointee = P>,
{
    let object = get::<Exclusive<T>>(pointer)?;
    let mut locked = object.lock(<Exclusive<T> as Object>::NAME)?;
    let result = consume(locked.place());
    let is_used_up = locked.place().is_none();
    drop(locked);
    if is_used_up {
        // Unless another thread has closed it meanwhile.
        let _ = <Exclusive<T> as Object>::table().close(key_of::<Exclusive<T>>(pointer)?);
    }
    result
}

/// Takes what [`consume`] passes, after every check that may still leave it the caller's.
pub(crate) fn take<T>(held: &mut Held<T>) -> T {
    *held.take().expect("checked when it was locked")
}

/// What [`consume`] passes, before it is taken.
pub(crate) fn held<T>(held: &Held<T>) -> &T {
    held.as_ref().expect("checked when it was locked")
}
