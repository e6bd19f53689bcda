//! Who answers.

mod polled;

use std::collections::{HashMap, HashSet};
use std::ops::Deref;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::epoll;

use self::polled::Clock;
use super::clients_of;
use crate::device::Device;
use crate::domain::{Arrivals, Domain, EndpointName};
use crate::error::{Error, Result};
use crate::fork::{Home, PrivateFd};
use crate::link::wake::Bell;
use crate::link::watcher::Watcher;
use crate::memory::arena::check_limit;
use crate::queue::{Lease, Loan, Worker, WorkerBuilder};
use crate::spin::{Came, Spin};
use crate::stream::Stream;

/// The most clients that are attached to at the same time.
const GREETED_AT_ONCE: usize = 32;

/// A look at the directory at least this often: a client that could not be attached to is tried again.
const LOOK_EVERY: Duration = Duration::from_secs(1);

const ARRIVALS: u64 = 0;
const BELL: u64 = 1;
const CLOCK: u64 = 2;

/// What a server is made with. See [`Server::builder`].
#[derive(Debug, Clone)]
pub struct ServerBuilder {
    service: String,
    domain: Option<Domain>,
    device: Option<Device>,
    spin: Option<Duration>,
    memory_limit: u64,
    handshake_timeout: Duration,
    answer_timeout: Duration,
    clients_max: usize,
}

impl ServerBuilder {
    /// The domain to look in; the environment's by default.
    pub fn domain(mut self, domain: &Domain) -> Self {
        self.domain = Some(domain.clone());
        self
    }

    /// The device to work with, in whose memory the replies lie; [`Device::preferred`] by default.
    pub fn device(mut self, device: &Device) -> Self {
        self.device = Some(device.clone());
        self
    }

    /// How long a wait polls before it sleeps, as [`SubscriberBuilder::spin`](crate::SubscriberBuilder::spin).
    pub fn spin(mut self, spin: Duration) -> Self {
        self.spin = Some(spin);
        self
    }

    /// The most device memory that the replies to one client may take, in bytes: 4 GiB by default.
    pub fn memory_limit(mut self, bytes: u64) -> Self {
        self.memory_limit = bytes;
        self
    }

    /// How long a client may take to let it in: 5 s by default. Others are served meanwhile.
    pub fn handshake_timeout(mut self, timeout: Duration) -> Self {
        self.handshake_timeout = timeout;
        self
    }

    /// How long a reply may wait for its client to release earlier ones, and for memory: 10 s by default.
    pub fn answer_timeout(mut self, timeout: Duration) -> Self {
        self.answer_timeout = timeout;
        self
    }

    /// The most clients at once: 256 by default. Each takes about a dozen descriptors.
    pub fn clients_max(mut self, clients: usize) -> Self {
        self.clients_max = clients;
        self
    }

    /// Begins to look for clients; there need not be any yet.
    ///
    /// # Errors
    /// [`Error::Name`] (at most 40 bytes), [`Error::Domain`], or what the system says.
    pub fn build(self) -> Result<Server> {
        EndpointName::new(&format!("{}00000000", clients_of(&self.service)))?;
        let domain = self.domain.clone().map_or_else(Domain::from_environment, Ok)?;
        let device = self.device.clone().unwrap_or_else(|| Device::preferred().device);
        check_limit(&device, self.memory_limit)?;
        let readable = PrivateFd::open(|| epoll::create(epoll::CreateFlags::CLOEXEC));
        let readable = readable.map_err(|e| Error::os("epoll_create1", "a server", e))?;
        let arrivals = domain.arrivals()?;
        let door = Arc::new(Door { let_in: Mutex::default(), bell: Bell::new()? });
        listen_to(&readable, arrivals.as_fd(), ARRIVALS)?;
        let clock = Clock::new()?;
        listen_to(&readable, door.bell.as_fd(), BELL)?;
        listen_to(&readable, clock.as_fd(), CLOCK)?;
        Ok(Server {
            home: Home::here(),
            spin: Spin::new(self.spin),
            options: self,
            domain,
            device,
            clients: Vec::new(),
            greeted: HashSet::new(),
            gone: HashSet::new(),
            failed: HashMap::new(),
            is_clearing: Arc::default(),
            door,
            arrivals,
            clock,
            readable,
            looked: None,
            turn: 0,
            next_id: CLOCK + 1,
        })
    }
}

/// Where clients that were attached to on other threads come in.
#[derive(Debug)]
struct Door {
    let_in: Mutex<Vec<(EndpointName, Result<Worker>)>>,
    bell: Bell,
}

#[derive(Debug)]
struct Guest {
    id: u64,
    name: EndpointName,
    worker: Worker,
}

/// Answers the requests of all clients of a service, together with the others that do. Belongs to one thread at a time;
/// its requests may go anywhere. It can be polled: [`AsFd`], [`try_accept`](Self::try_accept). For an example see
/// [`Client`](super::Client).
///
/// Dropped, it takes no more: what it was sent and has not accepted goes to other servers.
#[derive(Debug)]
pub struct Server {
    home: Home,
    options: ServerBuilder,
    spin: Spin,
    domain: Domain,
    device: Device,
    clients: Vec<Guest>,
    /// Being attached to.
    greeted: HashSet<EndpointName>,
    /// Names that nobody holds any more.
    gone: HashSet<EndpointName>,
    /// Names whose links have failed, and when: they are tried again, but not at once.
    failed: HashMap<EndpointName, Instant>,
    /// The attendant has been asked to clear away what they left, and has not begun.
    is_clearing: Arc<AtomicBool>,
    door: Arc<Door>,
    arrivals: Arrivals,
    clock: Clock,
    readable: PrivateFd,
    looked: Option<Instant>,
    /// Whose turn it is.
    turn: usize,
    next_id: u64,
}

impl Server {
    /// A server of this service, to be built.
    pub fn builder(service: &str) -> ServerBuilder {
        ServerBuilder {
            service: service.to_string(),
            domain: None,
            device: None,
            spin: None,
            memory_limit: 4 << 30,
            handshake_timeout: Duration::from_secs(5),
            answer_timeout: Duration::from_secs(10),
            clients_max: 256,
        }
    }

    /// The service's name.
    pub fn service(&self) -> &str {
        &self.options.service
    }

    /// How many clients it is attached to.
    pub fn clients(&self) -> usize {
        self.clients.len()
    }

    /// Waits for the next request of any client; they take turns. `stream` will wait, on the device, until the input is
    /// complete. A request whose deadline has passed is not given out. A client that goes, or breaks its link's
    /// protocol, is let go, and nothing else is touched.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::Os`] when the directory cannot be read; [`Error::Argument`] for a stream of another
    /// device; [`Error::Forked`]; [`Error::Driver`].
    pub fn accept(&mut self, stream: &Stream, timeout: Duration) -> Result<Request> {
        self.home.check()?;
        stream.check_usable(&self.device)?;
        let start = Instant::now();
        let limit = self.spin.limit().min(timeout);
        let mut asleep: Option<Instant> = None;
        loop {
            self.look_around()?;
            if let Some(request) = self.poll(stream)? {
                let came = match asleep {
                    Some(asleep) => Came::Asleep { slept: asleep.elapsed() },
                    None => Came::Polling { elapsed: start.elapsed() },
                };
                self.spin.tell(limit, came);
                return Ok(request);
            }
            let waited = start.elapsed();
            if waited >= timeout {
                return Err(Error::Timeout { what: format!("a request to {:?}", self.service()), waited: timeout });
            }
            if waited < limit {
                std::hint::spin_loop();
            } else {
                asleep = Some(Instant::now());
                self.sleep((timeout - waited).min(LOOK_EVERY));
            }
        }
    }

    /// One look at each client, beginning with the one whose turn it is.
    fn poll(&mut self, stream: &Stream) -> Result<Option<Request>> {
        let mut left = self.clients.len();
        while left > 0 && !self.clients.is_empty() {
            left -= 1;
            self.turn = (self.turn + 1) % self.clients.len();
            let guest = &mut self.clients[self.turn];
            if !guest.worker.may_have_news() {
                continue;
            }
            match guest.worker.try_lease(stream) {
                Ok(None) => {}
                Ok(Some(lease)) => return Ok(Some(Request { client_pid: guest.worker.queue_pid(), lease })),
                Err(
                    error @ (Error::Capturing { .. }
                    | Error::Driver { .. }
                    | Error::Argument { .. }
                    | Error::Injected { .. }),
                ) => {
                    return Err(error);
                }
                Err(_) => self.see_off(self.turn),
            }
        }
        Ok(None)
    }

    /// A client has gone, or its link has failed. Which of the two the next attempt tells.
    fn see_off(&mut self, index: usize) {
        let Guest { name, worker, .. } = self.clients.swap_remove(index);
        let _ = epoll::delete(&self.readable, worker.descriptor());
        self.failed.insert(name, Instant::now());
    }

    /// Looks for new clients, when something new has appeared in the directory or a while has passed.
    fn look_around(&mut self) -> Result<()> {
        self.take_in();
        if self.looked.is_some_and(|looked| looked.elapsed() < LOOK_EVERY) {
            return Ok(());
        }
        self.looked = Some(Instant::now());
        let names = self.domain.names_after(&clients_of(self.service()))?;
        self.gone.retain(|name| names.contains(name));
        self.failed.retain(|name, since| since.elapsed() < LOOK_EVERY && names.contains(name));
        self.clear_away();
        for name in names {
            let is_known = self.clients.iter().any(|guest| guest.name == name)
                || self.greeted.contains(&name)
                || self.gone.contains(&name)
                || self.failed.contains_key(&name);
            let has_room = self.greeted.len() < GREETED_AT_ONCE
                && self.clients.len() + self.greeted.len() < self.options.clients_max;
            if !is_known && has_room {
                self.greet(name);
            }
        }
        Ok(())
    }

    /// Removes what dead clients left: their names were for once, and nobody will take them again. A name that is held
    /// stays.
    fn clear_away(&self) {
        let names: Vec<_> = self.gone.iter().chain(self.failed.keys()).cloned().collect();
        let Ok(watcher) = Watcher::of_process() else { return };
        // One look at a time, however late the attendant is. A name that is still held is tried again with the next.
        if names.is_empty() || self.is_clearing.swap(true, Ordering::AcqRel) {
            return;
        }
        let (domain, is_clearing) = (self.domain.clone(), self.is_clearing.clone());
        watcher.attend(Box::new(move || {
            is_clearing.store(false, Ordering::Release);
            names.iter().for_each(|name| _ = domain.clear_name(name));
        }));
    }

    /// Attaches to a client, on a thread of its own: it may be stopped, and others are not to wait for it.
    fn greet(&mut self, name: EndpointName) {
        let builder: WorkerBuilder = Worker::builder(name.as_str())
            .domain(&self.domain)
            .device(&self.device)
            .timeout(self.options.answer_timeout)
            .memory_limit(self.options.memory_limit)
            .handshake_timeout(self.options.handshake_timeout);
        let (door, guest) = (Arc::downgrade(&self.door), name.clone());
        let meet = move || {
            let built = builder.build();
            if let Some(door) = door.upgrade() {
                door.let_in.lock().unwrap_or_else(PoisonError::into_inner).push((guest, built));
                door.bell.ring();
            }
        };
        if std::thread::Builder::new().name("warpipe-greeter".into()).spawn(meet).is_ok() {
            self.greeted.insert(name);
        }
    }

    /// Takes in the clients that were attached to. Those that could not be are tried again a while later (an attempt puts
    /// something new into the directory, and is no reason for the next), unless nobody is there.
    fn take_in(&mut self) {
        if self.greeted.is_empty() {
            return;
        }
        let let_in = std::mem::take(&mut *self.door.let_in.lock().unwrap_or_else(PoisonError::into_inner));
        for (name, built) in let_in {
            self.greeted.remove(&name);
            match built {
                Ok(worker) if listen_to(&self.readable, worker.descriptor(), self.next_id).is_ok() => {
                    self.clients.push(Guest { id: self.next_id, name, worker });
                    self.next_id += 1;
                }
                Err(Error::NoPublisher { .. }) => drop(self.gone.insert(name)),
                _ => drop(self.failed.insert(name, Instant::now())),
            }
        }
    }

    #[cfg(test)]
    pub(super) fn refused(&self) -> usize {
        self.failed.len()
    }

    #[cfg(test)]
    pub(super) fn clock(&self) -> &Clock {
        &self.clock
    }

    #[cfg(test)]
    pub(super) fn under_way(&self) -> usize {
        self.greeted.len()
    }

    /// Sleeps until a client, or the directory, speaks.
    fn sleep(&mut self, limit: Duration) {
        self.set_asleep(true);
        // Whatever came before the clients were asked to ring did not.
        if !self.clients.iter().any(|guest| guest.worker.may_have_news()) {
            self.listen(limit);
        }
        self.set_asleep(false);
    }

    fn hear(&mut self, id: u64) {
        match id {
            ARRIVALS => {
                self.arrivals.drain();
                self.looked = None;
            }
            BELL => self.door.bell.drain(),
            CLOCK => self.clock.quiet(),
            id => self.clients.iter().filter(|guest| guest.id == id).for_each(|guest| guest.worker.quiet()),
        }
    }
}

/// A request, to be answered: [`reply`](Self::reply), [`reject`](Self::reject), or [`fail`](Self::fail) so that another
/// server tries. What can be read of it is its [`Lease`]'s. Dropped, it counts as failed.
#[derive(Debug)]
#[must_use = "a request that is dropped is a failed attempt"]
pub struct Request {
    lease: Lease,
    client_pid: i32,
}

impl Deref for Request {
    type Target = Lease;

    fn deref(&self) -> &Lease {
        &self.lease
    }
}

impl Request {
    /// The process that asks.
    pub fn client_pid(&self) -> i32 {
        self.client_pid
    }

    /// The lease that it is, for [`Lease::split`].
    pub fn into_lease(self) -> Lease {
        self.lease
    }

    /// Replies without a tensor once the work enqueued on `stream` is done.
    ///
    /// # Errors
    /// [`Error::QueueGone`] when the client has; the others of [`Lease::complete`].
    pub fn reply(self, stream: &Stream) -> Result<()> {
        self.lease.complete(stream)
    }

    /// Replies with `output`, of [`Lease::output`], once the work enqueued on `stream` is done.
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub fn reply_with(self, output: Loan, stream: &Stream) -> Result<()> {
        self.lease.complete_with(output, stream)
    }

    /// Says no: the client gets [`Error::Rejected`]. Of the reason, 200 bytes.
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub fn reject(self, reason: &str) -> Result<()> {
        self.lease.reject(reason)
    }

    /// This server cannot: another one tries.
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub fn fail(self, reason: &str) -> Result<()> {
        self.lease.fail(reason)
    }

    /// Another server is to do it, and it costs no attempt: for a server that leaves.
    ///
    /// # Errors
    /// As [`reply`](Self::reply).
    pub fn give_back(self) -> Result<()> {
        self.lease.give_back()
    }
}

fn listen_to(readable: &PrivateFd, fd: std::os::fd::BorrowedFd<'_>, what: u64) -> Result<()> {
    epoll::add(readable, fd, epoll::EventData::new_u64(what), epoll::EventFlags::IN)
        .map_err(|e| Error::os("epoll_ctl", "a server's descriptor", e))
}
