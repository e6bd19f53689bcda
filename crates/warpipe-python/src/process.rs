//! The process of an object, checked before any lock is touched: a forked child may find a lock
//! held for ever. **This module is marked for unsafe**: it registers a function that the C library
//! calls in forked children.

use std::sync::Once;
use std::sync::atomic::{AtomicU32, Ordering};

use warpipe::{Error, StateFault};

use crate::errors::Outcome;
use crate::{interpreter_exit, thread_exit};

/// The number of this process; 0 before it is asked for.
static OWN: AtomicU32 = AtomicU32::new(0);

/// The number of this process, without a system call: each call of the package asks for it.
pub fn own() -> u32 {
    match OWN.load(Ordering::Relaxed) {
        0 => {
            follow_forks();
            store_own();
            std::process::id()
        }
        own => own,
    }
}

fn follow_forks() {
    static FOLLOWED: Once = Once::new();
    FOLLOWED.call_once(|| {
        // SAFETY: the function is async-signal-safe: a system call and stores. It stays valid, for
        // an extension module of the interpreter is never unloaded.
        let code = unsafe { libc::pthread_atfork(None, None, Some(after_in_child)) };
        assert_eq!(code, 0, "pthread_atfork fails only without memory");
    });
}

extern "C" fn after_in_child() {
    store_own();
    interpreter_exit::begin_anew();
}

fn store_own() {
    OWN.store(std::process::id(), Ordering::Relaxed);
}

/// The process that an object was made in.
#[derive(Debug, Clone, Copy)]
pub struct Home(u32);

impl Home {
    /// The current process.
    pub fn here() -> Home {
        thread_exit::prepare_exit();
        Home(own())
    }

    /// Whether this is still the process.
    pub fn is_here(self) -> bool {
        self.0 == own()
    }

    /// An error in a forked child.
    pub fn check(self) -> Outcome<()> {
        thread_exit::prepare_exit();
        if self.is_here() {
            Ok(())
        } else {
            Err(Error::State(StateFault::Forked).into())
        }
    }
}
