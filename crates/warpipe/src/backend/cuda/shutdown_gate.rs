//! The shutdown gate: while the driver is torn down at the end of the process, only the thread that
//! ends the process calls it. **This module is marked for unsafe**: it hooks `atexit(3)`.
//!
//! `exit` runs the handlers of `libcuda` while all other threads continue, including this
//! library's; a thread that then queries an event dies of SIGSEGV, and the process with it. So
//! every driver call is made [inside](DriverGuard) a gate. A handler of this library closes the
//! gate first: it waits for the threads inside, and threads that come later park for ever. That
//! takes one atomic addition for each entry, in a cache line of the thread's own: see
//! [`entrances`]. A handler that runs after this one and waits for a parked thread waits for ever.

mod entrances;
#[cfg(all(loom, not(miri)))]
#[path = "../../../../../verify/src/models/gate.rs"]
pub mod model;

use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicI32, AtomicUsize};
use std::time::{Duration, Instant};

use rustix::io::Errno;

use self::entrances::{Entrance, Entrances};
use crate::atomic::{AtomicBool, AtomicU32};
use crate::backoff::Backoff;
use crate::error::{Error, Result};

/// The limit for the wait for running calls at the end of the process. A call that blocks for
/// longer is still running when the teardown begins. A CPU function on a stream
/// (`cuLaunchHostFunc`) makes no driver calls, so it never enters the gate; if it calls `exit`,
/// this limit bounds the wait for threads that are blocked behind its stream.
const PATIENCE: Duration = Duration::from_secs(2);

/// 0 before the driver is initialised. A child inherits it on purpose.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Remembers the process in which the driver was initialised, which is the only one that may use
/// it.
pub(super) fn remember_process() {
    let _ = PROCESS.compare_exchange(0, std::process::id(), Relaxed, Relaxed);
}

/// Whether this process is a fork of the one in which the driver was initialised.
pub(super) fn forked() -> bool {
    let process = PROCESS.load(Relaxed);
    process != 0 && process != std::process::id()
}

/// So many threads have an entrance each, and all others share the second number.
const OWN: usize = 64;
const SHARED: usize = 64;

/// A child inherits the counts, and never waits for them ([`forked`]).
static GATE: Gate = Gate::new();

/// The number of the next thread that comes to a gate for the first time. No number is given twice.
static NEXT: AtomicUsize = AtomicUsize::new(0);

/// No thread has this number.
const UNNUMBERED: usize = usize::MAX;

thread_local! {
    /// Without a destructor, as the driver is called by destructors of other thread-locals, too.
    static HERE: Here = const {
        Here { entries: Cell::new(0), number: Cell::new(UNNUMBERED) }
    };
}

/// A thread's own record.
struct Here {
    /// Its entries. Only the first one is counted at an entrance.
    entries: Cell<usize>,
    /// Its number among the threads that come to a gate.
    number: Cell<usize>,
}

#[derive(Debug)]
struct Gate {
    threads: Entrances<OWN, SHARED>,
    /// The id of the thread that ends the process; 0 until one does.
    closer: AtomicI32,
}

/// While it lives, this thread may call the driver.
#[derive(Debug)]
pub(crate) struct DriverGuard {
    gate: &'static Gate,
    /// The entry belongs to one thread.
    _here: PhantomData<*const ()>,
}

/// Lets this thread call the driver until the result is dropped. Once the process ends, this
/// returns only on the thread that ends it: its destructors may still call the driver.
#[inline]
pub(crate) fn enter() -> DriverGuard {
    GATE.try_enter().unwrap_or_else(|| park_forever())
}

/// A limited wait, in a loop that polls inside the gate.
pub(super) struct Wait {
    start: Instant,
    limit: Duration,
    backoff: Backoff,
}

impl Wait {
    pub(super) fn new(limit: Duration) -> Wait {
        Wait {
            start: Instant::now(),
            limit,
            backoff: Backoff::default(),
        }
    }

    /// Call it between the calls of the loop: it does not return once the process ends.
    ///
    /// # Errors
    /// [`Error::Timeout`] on `what`.
    pub(super) fn pause(&mut self, what: impl FnOnce() -> String) -> Result<()> {
        if self.start.elapsed() >= self.limit {
            return Err(Error::timeout(what(), self.limit));
        }
        if GATE.leave_if_ending() {
            park_forever();
        }
        self.backoff.pause();
        Ok(())
    }

    pub(super) fn is_spinning(&self) -> bool {
        self.backoff.is_spinning()
    }
}

/// Whether this thread may call the driver.
#[inline]
pub(super) fn is_inside() -> bool {
    HERE.with(|here| here.entries.get() > 0)
}

/// `atexit`: closes the gate when the process ends. Handlers run in the reverse order of their
/// registration, so call this after every call that may have made the driver register one of its
/// own; another registration does no harm.
///
/// # Errors
/// [`Error::Os`] without memory.
pub(super) fn close_before_the_driver() -> Result<()> {
    // SAFETY: the handler takes no arguments and returns. Its code is present when it runs: `exit`
    // runs it before any library is unloaded, and `dlclose`, if it unloads this library, runs it
    // before that.
    match unsafe { libc::atexit(close) } {
        0 => Ok(()),
        _ => Err(Error::os("atexit", "the end of the driver", Errno::NOMEM)),
    }
}

extern "C" fn close() {
    // A child cannot use the driver, and has none of the threads that its copy of the count
    // includes.
    if !forked() {
        GATE.close(PATIENCE);
    }
}

/// The process is ending, and the driver with it. No answer would be right: on an error a caller
/// would free memory, or notify a peer, although the driver is gone. So the thread stops here, and
/// ends with the process.
#[cold]
fn park_forever() -> ! {
    loop {
        std::thread::park();
    }
}

fn this_thread() -> i32 {
    // Not a thread-local with a destructor: the exiting thread's is gone by now.
    rustix::thread::gettid().as_raw_nonzero().get()
}

impl Here {
    #[inline]
    fn number(&self) -> usize {
        if self.number.get() == UNNUMBERED {
            self.number.set(NEXT.fetch_add(1, Relaxed));
        }
        self.number.get()
    }
}

impl Gate {
    const fn new() -> Gate {
        const fn empty() -> Entrance {
            Entrance {
                inside: AtomicU32::new(0),
            }
        }
        Gate {
            threads: Entrances {
                is_closed: AtomicBool::new(false),
                own: [const { empty() }; OWN],
                shared: [const { empty() }; SHARED],
            },
            closer: AtomicI32::new(0),
        }
    }

    #[inline]
    fn try_enter(&'static self) -> Option<DriverGuard> {
        HERE.with(|here| {
            let entries = here.entries.get();
            // A thread that is inside already is being waited for, and must be able to finish.
            if entries == 0 && !self.threads.enter(here.number()) && !self.is_closer() {
                self.threads.leave(here.number());
                return None;
            }
            here.entries.set(entries + 1);
            Some(DriverGuard {
                gate: self,
                _here: PhantomData,
            })
        })
    }

    /// A child that was forked while the process ended has nothing to close.
    #[cold]
    fn is_closer(&self) -> bool {
        self.closer.load(SeqCst) == this_thread() || forked()
    }

    /// Whether this thread has to park from now on. If so, its entries are taken back.
    #[inline]
    fn leave_if_ending(&self) -> bool {
        if !self.threads.seems_closed() || self.is_closer() {
            return false;
        }
        HERE.with(|here| {
            if here.entries.replace(0) > 0 {
                self.threads.leave(here.number());
            }
        });
        true
    }

    /// Closes the gate to all but this thread, and waits for the threads inside. This thread's own
    /// entries do not count: a signal handler may end the process in the middle of a call. False if
    /// other threads are still inside.
    fn close(&self, patience: Duration) -> bool {
        // Set before the gate is closed, as it is read only after that. If two threads call `exit`
        // the first one counts.
        let _ = self
            .closer
            .compare_exchange(0, this_thread(), SeqCst, SeqCst);
        if !self.threads.close() {
            return true;
        }
        let start = Instant::now();
        let mut backoff = Backoff::default();
        while self.threads.inside() > u64::from(is_inside()) {
            if start.elapsed() >= patience {
                return false;
            }
            backoff.pause();
        }
        true
    }
}

impl Drop for DriverGuard {
    #[inline]
    fn drop(&mut self) {
        HERE.with(|here| {
            let entries = here.entries.get() - 1;
            here.entries.set(entries);
            if entries == 0 {
                self.gate.threads.leave(here.number());
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::sync::{Mutex, mpsc};
    use std::thread;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    fn gate() -> &'static Gate {
        Box::leak(Box::new(Gate::new()))
    }

    fn is_ending(gate: &Gate) -> bool {
        gate.threads.seems_closed()
    }

    fn elsewhere<T: Send>(work: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| scope.spawn(work).join().unwrap())
    }

    #[test]
    fn a_closed_gate_lets_nobody_in_but_the_thread_that_closed_it() {
        let gate = gate();
        assert!(elsewhere(|| gate.try_enter().is_some()));
        assert!(gate.close(LONG));
        assert!(elsewhere(|| gate.try_enter().is_none()));
        assert!(gate.try_enter().is_some());
        assert!(!gate.leave_if_ending());
        assert!(is_ending(gate));
        assert_eq!(
            gate.threads.inside(),
            0,
            "a refused caller is no longer counted"
        );
    }

    #[test]
    fn the_end_waits_for_a_thread_inside_which_may_enter_once_more() {
        let gate = gate();
        let (told, is_in) = mpsc::channel();
        let left = thread::scope(|scope| {
            let other = scope.spawn(move || {
                let outer = gate.try_enter().unwrap();
                told.send(()).unwrap();
                while !is_ending(gate) {
                    thread::yield_now();
                }
                let nested = gate.try_enter();
                let was_let_in = nested.is_some();
                let with_both = gate.threads.inside();
                drop(nested);
                let counted = (with_both, gate.threads.inside());
                drop(outer);
                (was_let_in, counted)
            });
            is_in.recv().unwrap();
            assert!(gate.close(LONG));
            assert_eq!(gate.threads.inside(), 0);
            other.join().unwrap()
        });
        assert_eq!(left, (true, (1, 1)), "a thread counts once");
    }

    #[test]
    fn a_thread_that_polls_inside_leaves_when_the_process_ends() {
        let gate = gate();
        let (told, is_in) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(move || {
                let entries = [gate.try_enter(), gate.try_enter()];
                told.send(()).unwrap();
                while !gate.leave_if_ending() {
                    thread::yield_now();
                }
                // Outside tests the thread stops here.
                std::mem::forget(entries);
            });
            is_in.recv().unwrap();
            assert!(gate.close(LONG));
        });
        assert_eq!(gate.threads.inside(), 0);
    }

    #[test]
    fn a_call_that_does_not_end_is_waited_for_no_longer_than_patience_and_once() {
        let gate = gate();
        let (told, is_in) = mpsc::channel();
        let (go, wait) = mpsc::channel::<()>();
        thread::scope(|scope| {
            scope.spawn(move || {
                let _guard = gate.try_enter();
                told.send(()).unwrap();
                assert!(wait.recv().is_err());
            });
            is_in.recv().unwrap();
            assert!(!gate.close(Duration::from_millis(1)));
            assert!(gate.close(LONG), "the second handler waits for nothing");
            drop(go);
        });
    }

    #[test]
    fn a_thread_that_ends_the_process_inside_a_call_does_not_wait_for_itself() {
        let gate = gate();
        let _guard = (gate.try_enter(), gate.try_enter());
        assert!(gate.close(Duration::ZERO));
    }

    #[test]
    fn more_threads_than_entrances_are_all_waited_for() {
        let gate = gate();
        let count = OWN + SHARED + 6;
        let (told, is_in) = mpsc::channel();
        let (go, wait) = mpsc::channel::<()>();
        let wait = Mutex::new(wait);
        thread::scope(|scope| {
            for _ in 0..count {
                let (told, wait) = (told.clone(), &wait);
                scope.spawn(move || {
                    let _guard = gate.try_enter().unwrap();
                    told.send(()).unwrap();
                    wait.lock().unwrap().recv().unwrap();
                });
            }
            (0..count).for_each(|_| is_in.recv().unwrap());
            assert_eq!(gate.threads.inside(), count as u64);
            // One after the other: the last one alone is waited for, too.
            (1..count).for_each(|_| go.send(()).unwrap());
            assert!(!gate.close(Duration::ZERO));
            go.send(()).unwrap();
        });
        assert_eq!(gate.threads.inside(), 0);
    }

    #[test]
    fn a_destructor_of_an_ending_thread_enters_and_leaves() {
        struct EntersLate(&'static Gate, mpsc::Sender<bool>);
        impl Drop for EntersLate {
            fn drop(&mut self) {
                let guard = self.0.try_enter();
                let _ = self.1.send(guard.is_some() && self.0.threads.inside() == 1);
            }
        }
        thread_local! {
            static LATE: RefCell<Option<EntersLate>> = const { RefCell::new(None) };
        }
        let gate = gate();
        let (told, entered) = mpsc::channel();
        let ends = thread::spawn(move || {
            LATE.set(Some(EntersLate(gate, told)));
            drop(gate.try_enter());
        });
        ends.join().unwrap();
        assert_eq!(entered.recv(), Ok(true));
        assert!(gate.close(Duration::ZERO));
    }

    #[test]
    fn a_panic_inside_leaves_the_gate() {
        let gate = gate();
        let panicked = thread::spawn(|| {
            let _guard = gate.try_enter();
            panic!("inside");
        });
        assert!(panicked.join().is_err());
        assert!(gate.close(Duration::ZERO));
    }
}
