//! A standard workload for each primitive, both ends in this process, with an oracle in every step.
//!
//! A turn is a round of work with fresh numbers; work that it cannot finish, because a call was
//! refused, is finished by the next turn. It returns two kinds of errors: an [error of the
//! library](is_refusal), after which the next turn must succeed, and anything else, which is a
//! broken guarantee: a wrong word, a sample that is lost or comes twice, a lost permit, a wait that
//! does not end.

mod channel;
mod jobs;
mod stores;
mod words;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use warpipe::{Error, JobEnd, LimitFault};

use crate::context::Context;
use crate::fake_driver::FakeDriver;

/// Where a workload runs.
#[derive(Debug, Clone)]
pub struct Site {
    /// The device, the domain, and the rest.
    pub context: Arc<Context>,
    /// The first part of its endpoints' names.
    pub name: String,
    /// The fake driver; its orders must not affect the workload's own kernels and checks, if
    /// they are.
    pub fake_driver: Option<Arc<FakeDriver>>,
    /// How long anything may take before it counts as hung.
    pub patience: Duration,
}

impl Site {
    fn name_of(&self, endpoint: &str) -> String {
        format!("{}/{endpoint}", self.name)
    }

    /// Does something that is the user's and not the library's.
    fn apart<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        let exempt = self
            .fake_driver
            .as_deref()
            .map(FakeDriver::exempt)
            .transpose()?;
        let value = work();
        drop(exempt);
        value
    }

    /// Tries something until it gives a value.
    fn until<T>(&self, what: &str, mut attempt: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        let deadline = Instant::now() + self.patience;
        loop {
            if let Some(value) = attempt()? {
                return Ok(value);
            }
            if Instant::now() >= deadline {
                bail!("it hangs: {what} did not come within {:?}", self.patience);
            }
            std::thread::park_timeout(Duration::from_micros(200));
        }
    }
}

/// One primitive at work.
pub trait Workload: Send {
    /// A round of work. `seed` is not used twice.
    ///
    /// # Errors
    /// As the module says.
    fn turn(&mut self, seed: u64) -> Result<()>;

    /// Checks all resources after a turn that succeeded.
    ///
    /// # Errors
    /// It is not.
    fn audit(&mut self) -> Result<()> {
        Ok(())
    }
}

/// A primitive, by name.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    /// Its name.
    pub name: &'static str,
    open: fn(Site) -> Result<Box<dyn Workload>>,
}

impl Kind {
    /// Makes its endpoints.
    ///
    /// # Errors
    /// Those of the library.
    pub fn open(self, site: Site) -> Result<Box<dyn Workload>> {
        (self.open)(site)
    }
}

/// All there are.
pub const KINDS: &[Kind] = &[
    Kind {
        name: "channel",
        open: channel::open,
    },
    Kind {
        name: "queue",
        open: jobs::queue,
    },
    Kind {
        name: "service",
        open: jobs::service,
    },
    Kind {
        name: "pool",
        open: stores::pool,
    },
    Kind {
        name: "memory",
        open: stores::memory,
    },
    Kind {
        name: "legacy handle",
        open: stores::legacy,
    },
    Kind {
        name: "timeline",
        open: words::timeline,
    },
    Kind {
        name: "event",
        open: words::event,
    },
    Kind {
        name: "semaphore",
        open: words::semaphore,
    },
];

/// Whether the library has said that something was refused. A time-out is no refusal: where nobody
/// holds anything up, what does not come hangs.
pub fn is_refusal(error: &anyhow::Error) -> bool {
    let known = error
        .chain()
        .find_map(|cause| cause.downcast_ref::<Error>());
    let is_hang = |error: &Error| {
        matches!(
            error,
            Error::Timeout { .. }
                | Error::Limit(LimitFault::Memory { .. })
                | Error::Job {
                    end: JobEnd::Expired,
                    ..
                }
        )
    };
    known.is_some_and(|error| !is_hang(error))
}
