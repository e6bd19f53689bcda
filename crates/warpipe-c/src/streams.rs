//! Streams as C names them: by their raw handle. **This module is marked for unsafe**: it borrows
//! streams that the caller keeps alive.
//!
//! The library tells streams apart by its own objects, so that an endpoint must see one object for
//! one raw handle: each device that C opens has a list of those that it has seen.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::c_void;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use warpipe::{Device, DeviceId, DeviceKind, PerProcess, Stream};

use crate::{Failure, Result};

/// So many streams of a device are found without a lock; further ones are looked up under one.
const KNOWN_MAX: usize = 16;

/// More further streams than this are not remembered: the list of them starts anew.
const MORE_MAX: usize = 256;

/// How long a lock of this module is waited for. It is held for less than a millisecond, but a
/// child that was forked meanwhile never gets that of its parent's device.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// A device, and the streams that calls have named on it.
#[derive(Debug)]
pub(crate) struct Streams {
    device: Device,
    known: [OnceLock<Known>; KNOWN_MAX],
    more: Mutex<HashMap<usize, Stream>>,
}

/// An object, and the streams of its device.
#[derive(Debug)]
pub(crate) struct OnDevice<T> {
    pub(crate) object: T,
    pub(crate) streams: Arc<Streams>,
}

impl<T> OnDevice<T> {
    /// An object of the same device.
    #[inline]
    pub(crate) fn beside<U>(&self, object: U) -> OnDevice<U> {
        let streams = self.streams.clone();
        OnDevice { object, streams }
    }
}

impl<T> Deref for OnDevice<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.object
    }
}

impl<T> DerefMut for OnDevice<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.object
    }
}

/// A stream that a call has named. It stays as long as its device's endpoints: an owned stream
/// that is destroyed before them keeps its raw handle, so that no other stream gets it.
#[derive(Debug)]
struct Known {
    raw: usize,
    stream: Stream,
    is_destroyed: AtomicBool,
}

/// The streams that C has made in this process and not destroyed, and the hosts' default streams,
/// by device and raw handle. A forked child begins with none: its parent's streams have no threads
/// there, and another thread may have held their lock.
static OWNED: PerProcess<Mutex<HashMap<(DeviceId, usize), Stream>>> = PerProcess::new();

fn lock<T>(mutex: &Mutex<T>) -> Result<MutexGuard<'_, T>> {
    let start = Instant::now();
    loop {
        match mutex.try_lock() {
            Ok(guard) => return Ok(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Ok(PoisonError::into_inner(poisoned)),
            Err(TryLockError::WouldBlock) if start.elapsed() < LOCK_TIMEOUT => {
                std::thread::yield_now();
            }
            Err(TryLockError::WouldBlock) => {
                let said = "the list of streams is locked for ever, as in a child that was forked while a thread used it; use exec";
                return Err(Failure::state(said));
            }
        }
    }
}

impl Streams {
    pub(crate) fn new(device: Device) -> Streams {
        Streams {
            device,
            known: Default::default(),
            more: Mutex::default(),
        }
    }

    pub(crate) fn device(&self) -> &Device {
        &self.device
    }

    /// The stream with this raw handle.
    ///
    /// # Safety
    /// On CUDA it is a stream of this device's primary context, which lives until everything that
    /// was made with it is closed.
    #[inline(always)]
    pub(crate) unsafe fn get(&self, raw: *mut c_void) -> Result<Cow<'_, Stream>> {
        let known = self.known.iter().map_while(OnceLock::get);
        if let Some(stream) = known.into_iter().find_map(|known| known.is(raw)) {
            return Ok(Cow::Borrowed(stream));
        }
        // SAFETY: the caller's promise.
        unsafe { self.find_and_remember(raw) }
    }

    /// # Safety
    /// As for [`get`](Self::get).
    #[cold]
    unsafe fn find_and_remember(&self, raw: *mut c_void) -> Result<Cow<'_, Stream>> {
        let mut more = lock(&self.more)?;
        // Another thread may have remembered it before this one had the lock.
        if let Some(stream) = self.known.iter().find_map(|place| place.get()?.is(raw)) {
            return Ok(Cow::Borrowed(stream));
        }
        if let Some(stream) = more.get(&raw.addr()) {
            return Ok(Cow::Owned(stream.clone()));
        }
        // SAFETY: the caller's promise.
        let stream = unsafe { self.find(raw) }?;
        let Some(place) = self.known.iter().find(|place| place.get().is_none()) else {
            if more.len() == MORE_MAX {
                more.clear();
            }
            more.insert(raw.addr(), stream.clone());
            return Ok(Cow::Owned(stream));
        };
        let known = place.get_or_init(|| Known {
            raw: raw.addr(),
            stream,
            is_destroyed: AtomicBool::new(false),
        });
        Ok(Cow::Borrowed(&known.stream))
    }

    /// # Safety
    /// As for [`get`](Self::get).
    #[cold]
    unsafe fn find(&self, raw: *mut c_void) -> Result<Stream> {
        let key = self.owned_key(raw);
        let mut owned = lock(OWNED.get())?;
        if let Some(stream) = owned.get(&key) {
            return Ok(stream.clone());
        }
        if self.device.info().id.kind != DeviceKind::Host {
            // SAFETY: the caller's promise.
            return Ok(unsafe { Stream::borrow_raw(&self.device, raw) });
        }
        if !raw.is_null() {
            let allowed = "NULL, or a stream of warpipe_stream_create that was not destroyed (device \"host\")";
            return Err(Failure::argument("stream", format!("{raw:p}"), allowed));
        }
        let default = self.device.stream()?;
        owned.insert(key, default.clone());
        Ok(default)
    }

    fn owned_key(&self, raw: *mut c_void) -> (DeviceId, usize) {
        (self.device.info().id, raw.addr())
    }

    /// Makes a stream for C.
    pub(crate) fn create(&self) -> Result<*mut c_void> {
        let stream = self.device.stream()?;
        let raw = stream.raw().0;
        let key = self.owned_key(raw);
        lock(OWNED.get())?.insert(key, stream);
        Ok(raw)
    }

    /// Destroys a stream of [`create`](Self::create), once what was made with it is closed.
    pub(crate) fn destroy(&self, raw: *mut c_void) -> Result<()> {
        let key = self.owned_key(raw);
        let taken = if raw.is_null() {
            None
        } else {
            lock(OWNED.get())?.remove(&key)
        };
        // Dropped behind the lock: its end is a call of the driver.
        let Some(_stream) = taken else {
            let allowed = "a stream of warpipe_stream_create on this device, once";
            return Err(Failure::argument("stream", format!("{raw:p}"), allowed));
        };
        for known in self.known.iter().filter_map(OnceLock::get) {
            if known.raw == raw.addr() {
                known.is_destroyed.store(true, Ordering::Release);
            }
        }
        let _dropped = lock(&self.more)?.remove(&raw.addr());
        Ok(())
    }
}

impl Known {
    #[inline]
    fn is(&self, raw: *mut c_void) -> Option<&Stream> {
        let found = self.raw == raw.addr() && !self.is_destroyed.load(Ordering::Acquire);
        found.then_some(&self.stream)
    }
}
