//! Content hashes that are computed once the version is offered, on a thread of its publisher.

use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::time::Duration;

use super::contents::Contents;
use super::held::Held;
use super::holder;
use super::keeper_session::offer_to_keeper;
use super::manifest::{ContentHash, Manifest};
use crate::debug::opaque_debug;
use crate::error::{Error, Result};
use crate::fork::thread::Thread;
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::{IpcServer, until_open};
use crate::mutex::LockUnpoisoned;
use crate::wait::Wait;

/// How long the thread waits for a keeper that takes the hashes.
const KEEPER_TIMEOUT: Duration = Duration::from_secs(30);

/// Tensors of a version that have no hashes yet.
pub(super) struct Unhashed {
    contents: Contents,
    /// Each with the number of its tensor, once they have been computed.
    hashes: Mutex<Option<Vec<(usize, ContentHash)>>>,
}

opaque_debug!(Unhashed {});

impl Unhashed {
    pub(super) fn new(contents: Contents) -> Unhashed {
        Unhashed {
            contents,
            hashes: Mutex::default(),
        }
    }

    /// The manifest with the hashes, which are computed once, whatever it is published under.
    fn hash(&self, manifest: &Manifest) -> Result<Manifest> {
        let mut known = self.hashes.locked();
        if known.is_none() {
            *known = Some(self.contents.begin_to_hash(manifest.tensors())?.finish()?);
        }
        let mut hashed = manifest.clone();
        hashed.add_hashes(known.iter().flatten().copied());
        Ok(hashed)
    }
}

/// What a publication serves.
#[derive(Debug)]
pub(super) struct Current {
    holder: Mutex<IpcServer>,
    held: Arc<Held>,
    /// The same version, once it has its hashes. A forked child reads it without a lock.
    hashed: OnceLock<Arc<Held>>,
    /// `None` while hashes are to come; then the error for which there are none, until it was told.
    progress: Mutex<Option<Option<Error>>>,
    changed: Condvar,
}

impl Current {
    /// Of a version that `holder` serves. A thread hashes what is `unhashed`, and keeps what the
    /// holder needs no longer than this lives.
    pub(super) fn new(
        holder: IpcServer,
        held: Arc<Held>,
        unhashed: Option<Arc<Unhashed>>,
        (domain, name): (&Domain, &EndpointName),
    ) -> Arc<Current> {
        let current = Arc::new(Current {
            holder: Mutex::new(holder),
            held: held.clone(),
            hashed: OnceLock::new(),
            progress: Mutex::new(unhashed.is_none().then_some(None)),
            changed: Condvar::new(),
        });
        let Some(unhashed) = unhashed else {
            return current;
        };
        let task = Task {
            unhashed,
            domain: domain.clone(),
            name: name.clone(),
            held,
            current: Arc::downgrade(&current),
        };
        let run = move || {
            let done = task.run();
            if let Some(current) = task.current.upgrade() {
                current.end(done);
            }
        };
        if let Err(error) = Thread::start("warpipe-weights", run) {
            current.end(Err(error));
        }
        current
    }

    /// The version, with its hashes if they are there.
    pub(super) fn held(&self) -> &Arc<Held> {
        self.hashed.get().unwrap_or(&self.held)
    }

    /// Serves the version with its hashes from now on.
    fn replace(&self, holder: IpcServer, hashed: Arc<Held>) {
        let _ = self.hashed.set(hashed);
        // Ended behind the lock.
        let _without = std::mem::replace(&mut *self.holder.locked(), holder);
    }

    fn end(&self, done: Result<()>) {
        *self.progress.locked() = Some(done.err());
        self.changed.notify_all();
    }

    /// Waits until the keeper has the hashes that come later, if any do.
    pub(super) fn wait_for_hashes(&self, wait: &Wait<'_>) -> Result<()> {
        let mut progress = wait.sleep_while(&self.progress, &self.changed, Option::is_none);
        let Some(error) = progress.as_mut() else {
            return Err(Error::timeout("the content hashes", wait.limit()));
        };
        error.take().map_or(Ok(()), Err)
    }
}

struct Task {
    unhashed: Arc<Unhashed>,
    domain: Domain,
    name: EndpointName,
    held: Arc<Held>,
    current: Weak<Current>,
}

impl Task {
    fn run(&self) -> Result<()> {
        let manifest = self.unhashed.hash(&self.held.manifest)?;
        let held = Arc::new(self.held.hashed(manifest)?);
        let (domain, name) = (&self.domain, &self.name);
        // The next keeper finds them there.
        if self.current.strong_count() > 0 {
            let holder = holder::serve(domain, name.as_str(), held.clone())?;
            if let Some(current) = self.current.upgrade() {
                current.replace(holder, held.clone());
            }
        }
        // An offer that has a number already brings a version's hashes.
        let offer = holder::offer(domain, name.as_str(), held)?;
        let wait = Wait::at_most(KEEPER_TIMEOUT);
        until_open(&wait, || offer_to_keeper(domain, name, &offer.1, &wait)).map(drop)
    }
}
