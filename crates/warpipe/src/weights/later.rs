//! Content hashes that are computed once the version is offered, on a thread of its publisher.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};
use std::time::Duration;

use super::contents::Contents;
use super::held::Held;
use super::holder::Holder;
use super::keeper_session::offer_to_keeper;
use super::manifest::{ContentHash, Manifest};
use crate::error::{Error, Result};
use crate::fork::thread::Thread;
use crate::ipc::domain::{Domain, EndpointName};
use crate::ipc::until_open;
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

impl fmt::Debug for Unhashed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unhashed").finish_non_exhaustive()
    }
}

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
    holder: Mutex<Holder>,
    held: Arc<Held>,
    /// The same version, once it has its hashes. A forked child reads it without a lock.
    hashed: OnceLock<Arc<Held>>,
}

impl Current {
    pub(super) fn new(holder: Holder, held: Arc<Held>) -> Arc<Current> {
        Arc::new(Current {
            holder: Mutex::new(holder),
            held,
            hashed: OnceLock::new(),
        })
    }

    /// The version, with its hashes if they are there.
    pub(super) fn held(&self) -> &Arc<Held> {
        self.hashed.get().unwrap_or(&self.held)
    }

    /// Serves the version with its hashes from now on.
    fn replace(&self, holder: Holder, hashed: Arc<Held>) {
        let _ = self.hashed.set(hashed);
        // Ended behind the lock.
        let _without = std::mem::replace(&mut *self.holder.locked(), holder);
    }
}

/// The thread that hashes a publication's tensors.
#[derive(Debug)]
pub(super) struct LaterHashes {
    progress: Arc<(Mutex<Progress>, Condvar)>,
}

#[derive(Debug, Default)]
struct Progress {
    is_over: bool,
    error: Option<Error>,
}

impl LaterHashes {
    /// Begins the thread. It keeps what the publication's holder needs no longer than that lives.
    pub(super) fn begin(
        unhashed: &Arc<Unhashed>,
        domain: &Domain,
        name: &EndpointName,
        current: &Arc<Current>,
    ) -> LaterHashes {
        let later = LaterHashes {
            progress: Arc::default(),
        };
        let task = Task {
            unhashed: unhashed.clone(),
            domain: domain.clone(),
            name: name.clone(),
            held: current.held.clone(),
            current: Arc::downgrade(current),
        };
        let progress = later.progress.clone();
        let started = Thread::start("warpipe-weights", move || end(&progress, task.run()));
        if let Err(error) = started {
            end(&later.progress, Err(error));
        }
        later
    }

    /// Waits until the keeper has the hashes.
    pub(super) fn wait(&self, wait: &Wait<'_>) -> Result<()> {
        let (progress, changed) = &*self.progress;
        let mut progress = wait.sleep_while(progress, changed, |it| !it.is_over);
        if !progress.is_over {
            return Err(Error::timeout("the content hashes", wait.limit()));
        }
        progress.error.take().map_or(Ok(()), Err)
    }
}

fn end(progress: &(Mutex<Progress>, Condvar), done: Result<()>) {
    let mut state = progress.0.locked();
    (state.is_over, state.error) = (true, done.err());
    drop(state);
    progress.1.notify_all();
}

struct Task {
    unhashed: Arc<Unhashed>,
    domain: Domain,
    name: EndpointName,
    held: Arc<Held>,
    current: Weak<Current>,
}

impl Task {
    fn run(self) -> Result<()> {
        let manifest = self.unhashed.hash(&self.held.manifest)?;
        let held = Arc::new(self.held.hashed(manifest)?);
        let (domain, name) = (&self.domain, &self.name);
        // The next keeper finds them there.
        if self.current.strong_count() > 0 {
            let holder = Holder::serve(domain, name.as_str(), held.clone())?;
            if let Some(current) = self.current.upgrade() {
                current.replace(holder, held.clone());
            }
        }
        // An offer that has a number already brings a version's hashes.
        let offer = Holder::offer(domain, name.as_str(), held)?;
        let wait = Wait::at_most(KEEPER_TIMEOUT);
        until_open(&wait, || offer_to_keeper(domain, name, &offer.1, &wait)).map(drop)
    }
}
