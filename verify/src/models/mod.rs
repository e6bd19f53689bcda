//! Models for loom: two or three threads that run the library's own code, in every order and with
//! every value that weak memory allows, within a bound on preemptions.
//!
//! Readers run on spawned threads, and the writer on the model's first thread: loom finds that a
//! load could have come after a later change only if the changing thread has not itself loaded in
//! between.

pub mod counter;
pub mod ring;
pub mod shares;
pub mod sleep;
pub mod table;
pub mod timeline;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use loom::sync::{Condvar, Mutex};

use crate::atomic::{self, Fences, Way};
// Where they see what they check.
pub use crate::backend::cuda::shutdown_gate::model as gate;
pub use crate::pubsub::publisher_link::model as rescue;
pub use crate::rings::model as kernel_ring;
pub use crate::sync::semaphore::model as room;

/// A model, and how often threads may be put aside in it: `VERIFY_DEEPER` of the environment comes
/// on top.
#[derive(Clone, Copy)]
pub struct Model {
    pub name: &'static str,
    pub bound: usize,
    pub body: fn(),
}

/// Runs a model to its end, with both kinds of fences. How many executions there were.
///
/// # Errors
/// The failure of one of them.
pub fn check(model: Model) -> Result<u64, String> {
    Ok(check_with(model, Fences::Before)? + check_with(model, Fences::Behind)?)
}

fn check_with(model: Model, fences: Fences) -> Result<u64, String> {
    atomic::fences(fences);
    let mut builder = loom::model::Builder::new();
    let deeper = std::env::var("VERIFY_DEEPER")
        .ok()
        .and_then(|more| more.parse().ok())
        .unwrap_or(0);
    builder.preemption_bound = Some(model.bound + deeper);
    builder.max_branches = 20_000;
    let executions = Arc::new(AtomicU64::new(0));
    let count = executions.clone();
    let run = move || {
        count.fetch_add(1, Relaxed);
        atomic::begin();
        (model.body)();
    };
    let result = catch_unwind(AssertUnwindSafe(|| builder.check(run)));
    atomic::set(Way::Plain);
    match result {
        Ok(()) => Ok(executions.load(Relaxed)),
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or(panic.downcast_ref::<&str>().copied());
            Err(text.unwrap_or("it panicked").to_owned())
        }
    }
}

/// A socket that an end sleeps on. Rung once or often, it wakes once.
#[derive(Clone)]
struct Socket(Arc<(Mutex<bool>, Condvar)>);

impl Socket {
    fn new() -> Socket {
        Socket(Arc::new((Mutex::new(false), Condvar::new())))
    }

    fn ring(&self) {
        let mut rung = self.0.0.lock().expect("nobody panics");
        *rung = true;
        self.0.1.notify_all();
    }

    /// Sleeps until it is rung, without a limit, and takes that in.
    fn sleep(&self) {
        let mut rung = self.0.0.lock().expect("nobody panics");
        while !*rung {
            rung = self.0.1.wait(rung).expect("nobody panics");
        }
        *rung = false;
    }
}
