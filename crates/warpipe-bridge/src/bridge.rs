//! The handle of a bridge, and what its threads share.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;

use zenoh::Wait;
use zenoh::sample::Sample;

use crate::control::{Control, Event, Inbox, Present, QueueRoutes};
use crate::error::{Error, Result};
use crate::lane::{Ending, LaneReceiver, LaneSender, ReceiveMemory};
use crate::message::{Id, Message, PART_BYTES_MAX};
use crate::options::Options;
use crate::session::{self, Events, Presence};
use crate::status::{Notice, Status};

/// Notices that may wait for the caller; later ones are left out.
const NOTICES_MAX: usize = 1024;

/// How long a bridge that ends waits for links that take nothing.
pub(crate) const CLOSE_PATIENCE: Duration = Duration::from_secs(2);

/// Shared by the threads of a bridge.
pub(crate) struct Shared {
    pub(crate) me: Id,
    pub(crate) senders: RwLock<HashMap<Id, Arc<LaneSender>>>,
    pub(crate) receivers: RwLock<HashMap<Id, Arc<LaneReceiver>>>,
    pub(crate) queues: RwLock<QueueRoutes>,
    pub(crate) status: Mutex<Status>,
    pub(crate) refused: AtomicU64,
    pub(crate) memory: Arc<ReceiveMemory>,
    pub(crate) inbox: Inbox,
    present: Mutex<Present>,
    notices: SyncSender<Notice>,
}

impl Shared {
    pub(crate) fn sender(&self, lane: &Id, peer: &Id) -> Option<Arc<LaneSender>> {
        let senders = self.senders.read().unwrap_or_else(PoisonError::into_inner);
        senders.get(lane).filter(|it| it.peer == *peer).cloned()
    }

    pub(crate) fn receiver(&self, lane: &Id, peer: &Id) -> Option<Arc<LaneReceiver>> {
        let receivers = self
            .receivers
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        receivers.get(lane).filter(|it| it.peer == *peer).cloned()
    }

    pub(crate) fn notice(&self, notice: Notice) {
        let _ = self.notices.try_send(notice);
    }

    /// The bridges that are present.
    pub(crate) fn present(&self) -> MutexGuard<'_, Present> {
        self.present.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A lane's thread has ended.
    pub(crate) fn done(&self) {
        self.inbox.tell(|news| news.done = true);
    }

    /// Tells the control thread, without waiting for it. `None` if it takes nothing more of that
    /// peer, or the sender is no bridge that is present.
    fn tell(&self, from: Id, event: Event) -> Option<()> {
        if !self.present().is_here(&from) {
            // The sign of its presence may come later; it greets again until it is answered.
            return matches!(event, Event::Hello(_)).then_some(());
        }
        self.inbox.put(from, event).then_some(())
    }

    pub(crate) fn refuse(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Hands a message of a lane to its lane; `None` if there is no such lane of that peer.
    fn route(&self, from: Id, message: Message, sample: &Sample) -> Option<()> {
        match message {
            Message::Part(part) => {
                let receiver = self.receiver(&part.lane, &from)?;
                if sample.payload().len() > PART_BYTES_MAX {
                    receiver.end(Ending::Fault("a part is too long".into()));
                } else {
                    receiver.put(part, sample.payload().clone());
                }
            }
            Message::End { lane, end } => self.receiver(&lane, &from)?.end(Ending::Sender(end)),
            Message::Ready { lane, after, parts } => self.sender(&lane, &from)?.ready(after, parts),
            Message::Credit { lane, parts } => self.sender(&lane, &from)?.grant(parts),
            Message::Stop { lane, reason } => {
                let reason = format!("the other end stopped it: {}", reason.escape_debug());
                self.sender(&lane, &from)?.end(&reason);
            }
            Message::Workers { lane, count } => self.workers(&from, &lane, count)?,
            Message::Taken { lane, number } => self.taken(&from, &lane, number)?,
            Message::Hello(hello) => self.tell(from, Event::Hello(hello))?,
            Message::Begin { lane, purpose } => self.tell(from, Event::Begin { lane, purpose })?,
            Message::Waits { name, generation } => {
                self.tell(from, Event::Waits { name, generation })?;
            }
            Message::Gone { name, generation } => {
                self.tell(from, Event::Gone { name, generation })?;
            }
        }
        Some(())
    }
}

impl Events for Shared {
    fn presence(&self, bridge: Id, is_present: bool) {
        if bridge == self.me {
            return;
        }
        if is_present {
            self.present().came(bridge);
        } else {
            self.present().went(&bridge);
        }
        self.inbox.tell(|news| news.presence = true);
    }

    fn found(&self, bridge: Id) {
        if bridge != self.me && self.present().found(bridge) {
            self.inbox.tell(|news| news.presence = true);
        }
    }

    fn received(&self, sample: &Sample) {
        let message = sample.attachment().map(|bytes| bytes.to_bytes());
        let message = message.and_then(|bytes| Message::decode(&bytes));
        let routed = message.and_then(|(from, message)| self.route(from, message, sample));
        if routed.is_none() {
            self.refuse();
        }
    }
}

/// A bridge between the domain of its options and other machines, until it is dropped. Dropping it
/// takes a few seconds at most, also while a peer reads nothing.
pub struct Bridge {
    shared: Arc<Shared>,
    notices: Mutex<Receiver<Notice>>,
    control: Option<JoinHandle<()>>,
    /// Ends with the control thread.
    runs: Mutex<Receiver<()>>,
    session: zenoh::Session,
}

impl Bridge {
    /// Opens the endpoints and begins to carry names.
    ///
    /// # Errors
    /// [`Error::Insecure`], [`Error::Endpoint`], [`Error::Pattern`] and [`Error::Option`] for the
    /// options; [`Error::Zenoh`] for an address in use or a certificate that cannot be read;
    /// [`Error::Local`]; [`Error::Thread`].
    pub fn open(options: Options) -> Result<Bridge> {
        let patterns = options.check()?;
        let (notices, told) = sync_channel(NOTICES_MAX);
        let session = session::open(&options)?;
        let (part_bytes, bytes) = (options.part_bytes as u64, options.receive_bytes_max);
        let memory = ReceiveMemory::new(options.window, part_bytes, bytes);
        let shared = Arc::new(Shared {
            me: session::id(&session),
            senders: RwLock::default(),
            receivers: RwLock::default(),
            queues: RwLock::default(),
            status: Mutex::default(),
            refused: AtomicU64::new(0),
            memory,
            inbox: Inbox::default(),
            present: Mutex::default(),
            notices,
        });
        let presence = Presence::new(session.clone(), shared.me, shared.clone())?;
        let control = Control::new(options, patterns, shared.clone(), presence)?;
        let thread = std::thread::Builder::new().name("bridge-control".into());
        let (running, runs) = sync_channel(0);
        let control = thread.spawn(move || {
            control.run();
            drop(running);
        });
        let control = control.map_err(|source| Error::Thread {
            purpose: "a bridge",
            source,
        })?;
        Ok(Bridge {
            shared,
            notices: Mutex::new(told),
            control: Some(control),
            runs: Mutex::new(runs),
            session,
        })
    }

    /// The next thing that happened, at the latest after `timeout`; `None` if nothing did.
    pub fn next_notice(&self, timeout: Duration) -> Option<Notice> {
        let notices = self.notices.lock().unwrap_or_else(PoisonError::into_inner);
        notices.recv_timeout(timeout).ok()
    }

    /// The state, as of the last second.
    pub fn status(&self) -> Status {
        let status = self.shared.status.lock();
        status.unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        self.shared.inbox.tell(|news| news.stop = true);
        // A lane may be in the middle of a send to a peer that reads nothing. The control thread
        // leaves it behind, and the end of the session ends it: Zenoh takes up to 10 s for that.
        let runs = self.runs.get_mut().unwrap_or_else(PoisonError::into_inner);
        let _ = runs.recv_timeout(2 * CLOSE_PATIENCE);
        let (closing, closed) = sync_channel::<()>(0);
        let session = self.session.clone();
        let thread = std::thread::Builder::new().name("bridge-close".into());
        let close = thread.spawn(move || {
            let _ = session.close().wait();
            drop(closing);
        });
        if close.is_err() {
            let _ = self.session.close().wait();
        }
        let _ = closed.recv_timeout(CLOSE_PATIENCE);
        let is_over = runs.recv_timeout(CLOSE_PATIENCE) == Err(RecvTimeoutError::Disconnected);
        if let Some(control) = self.control.take().filter(|_| is_over) {
            let _ = control.join();
        }
    }
}

impl std::fmt::Debug for Bridge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bridge").finish_non_exhaustive()
    }
}
