//! The work of a stream's thread, one piece after another.

use std::ffi::c_void;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::config;
use crate::event::Event;

/// Rounds that a wait spins before it sleeps between looks.
const SPINS: u32 = 1_000;
const SLEEP_MAX: Duration = Duration::from_micros(50);

/// One enqueued piece of work. Addresses were checked when it was enqueued.
#[derive(Clone)]
pub enum Work {
    Write {
        word: u64,
        value: u64,
    },
    Wait {
        word: u64,
        value: u64,
    },
    Copy {
        dst: u64,
        src: u64,
        bytes: usize,
    },
    Set {
        dst: u64,
        value: u8,
        bytes: usize,
    },
    /// A copy from pageable memory; the call has taken the bytes.
    Staged {
        dst: u64,
        bytes: Vec<u8>,
    },
    Function {
        function: unsafe extern "C" fn(*mut c_void),
        argument: usize,
    },
    Kernel(Arc<dyn Fn() + Send + Sync>),
    Record {
        event: Arc<Event>,
        turn: u64,
    },
    Await {
        event: Arc<Event>,
        turn: u64,
    },
    /// Notifies a caller that waits for everything before it.
    Tell(std::sync::mpsc::Sender<()>),
}

impl Work {
    /// # Safety
    /// The addresses are still mapped.
    pub unsafe fn run(self) {
        match self {
            Work::Write { word, value } => {
                std::thread::sleep(config::get().delay);
                // SAFETY: the caller's promise, and the word is aligned: checked at the call.
                unsafe { store(word, value) };
            }
            // SAFETY: as above.
            Work::Wait { word, value } => unsafe { wait(word, value) },
            Work::Copy { dst, src, bytes } => {
                // SAFETY: the caller's promise; copies that overlap are the program's fault, as on
                // a GPU.
                unsafe { ptr::copy(place(src).cast_const(), place(dst), bytes) }
            }
            // SAFETY: the caller's promise on `dst`.
            Work::Set { dst, value, bytes } => unsafe {
                ptr::write_bytes(place(dst), value, bytes)
            },
            Work::Staged { dst, bytes } => {
                // SAFETY: the caller's promise on `dst`.
                unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), place(dst), bytes.len()) }
            }
            Work::Function { function, argument } => {
                // SAFETY: the program gave the pair to be called once, from any thread.
                unsafe { function(ptr::with_exposed_provenance_mut(argument)) }
            }
            Work::Kernel(kernel) => kernel(),
            Work::Record { event, turn } => event.complete(turn),
            Work::Await { event, turn } => event.wait(turn),
            Work::Tell(sender) => {
                let _ = sender.send(());
            }
        }
    }
}

fn place(address: u64) -> *mut u8 {
    ptr::with_exposed_provenance_mut(address as usize)
}

/// Stores a word after everything that this thread has done.
///
/// # Safety
/// The word is mapped, writable and aligned.
pub unsafe fn store(word: u64, value: u64) {
    // SAFETY: the caller's promise; words are only used atomically.
    unsafe { AtomicU64::from_ptr(place(word).cast()) }.store(value, Ordering::Release);
}

/// # Safety
/// The word is mapped and aligned until it has reached the value.
unsafe fn wait(word: u64, value: u64) {
    // SAFETY: the caller's promise; words are only used atomically.
    let word = unsafe { AtomicU64::from_ptr(place(word).cast()) };
    let mut rounds = 0u32;
    while (word.load(Ordering::Acquire).wrapping_sub(value) as i64) < 0 {
        rounds = rounds.saturating_add(1);
        match rounds {
            0..SPINS => std::hint::spin_loop(),
            // Another process or a CPU writes the word, and neither wakes a GPU: only polling sees
            // it.
            _ => std::thread::sleep(SLEEP_MAX),
        }
    }
}
