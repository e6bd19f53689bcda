//! The server: answers the requests of all clients of a service.

mod polled;

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::{check_service_name, client_prefix};
use crate::device::Device;
use crate::error::{Error, Result, StateFault};
use crate::fork::{CloseOnForkFd, OwnerProcess};
use crate::ipc::domain::{Arrivals, Domain, EndpointName};
use crate::memory::arena::check_limit;
use crate::options::{chosen_place, in_domain};
use crate::pubsub::Subscriber;
use crate::queue::{Lease, Worker, WorkerOptions};
use crate::runtime::attempt::Attempt;
use crate::runtime::doorbell::LocalDoorbell;
use crate::runtime::epoll::{EpollSet, EventFlags};
use crate::runtime::spin::Polls;
use crate::stream::Stream;
use crate::wait::{SLICE, Wait};

/// The most clients that are attached to at the same time.
const ATTACHING_MAX: usize = 32;

/// The longest time between two scans of the directory: a client that could not be attached to is
/// tried again.
const SCAN_INTERVAL: Duration = Duration::from_secs(1);

/// The tags of the server's own doorbell and timer. Clients have those behind.
const DOORBELL: u64 = 0;
const SCAN_TIMER: u64 = 1;

/// The options of a [`Server`].
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// The domain to look in; the environment's by default.
    pub domain: Option<Domain>,
    /// The device to work with, which holds the replies; [`Device::preferred`] by default.
    pub device: Option<Device>,
    /// The most device memory that the replies to one client may take, in bytes: 4 GiB by default.
    pub memory_limit: u64,
    /// How long a wait polls before it sleeps: as [`SubscriberOptions::spin`].
    ///
    /// [`SubscriberOptions::spin`]: crate::SubscriberOptions::spin
    pub spin: Duration,
    /// How long a client may take to accept this server: 5 s by default. Other clients are served
    /// meanwhile.
    pub handshake_timeout: Duration,
    /// How long a reply may wait for its client to release earlier ones, and for memory: 10 s by
    /// default.
    pub answer_timeout: Duration,
    /// The most clients at once: 256 by default. Each takes four descriptors.
    pub clients_max: usize,
}

in_domain!(ServerOptions, device);

impl Default for ServerOptions {
    fn default() -> ServerOptions {
        let worker = WorkerOptions::default();
        ServerOptions {
            domain: None,
            device: None,
            memory_limit: worker.memory_limit,
            spin: worker.spin,
            handshake_timeout: worker.handshake_timeout,
            answer_timeout: worker.answer_timeout,
            clients_max: 256,
        }
    }
}

/// A client, by the name that a scan has found.
#[derive(Debug)]
struct ClientEntry {
    /// The tag of its worker's events.
    id: u64,
    name: EndpointName,
    state: ClientState,
}

#[derive(Debug)]
enum ClientState {
    Attaching(Attempt<Worker>),
    Attached(Box<Worker>),
    /// The link or the attempt has failed then: it is tried again, but not at once.
    Failed(Instant),
}

/// Answers the requests of all clients of a service, together with the service's other servers.
/// Belongs to one thread at a time; its leases may go anywhere. It can be polled:
/// [`AsFd`](std::os::fd::AsFd). For an example see [`Client`](super::Client).
///
/// Dropped, it takes no more requests: those that it was sent and has not accepted go to other
/// servers.
#[derive(Debug)]
pub struct Server {
    owner_process: OwnerProcess,
    service: String,
    options: ServerOptions,
    domain: Domain,
    device: Device,
    clients: Vec<ClientEntry>,
    /// Rung when an attempt to attach has a result, and when the directory has changed.
    doorbell: Arc<LocalDoorbell>,
    _arrivals: Arrivals,
    /// An event loop polls the descriptor: then clients are asked to ring for as long as the server
    /// lives.
    is_polled: AtomicBool,
    /// For a server that is polled, and so sleeps in no call of its own.
    scan_timer: CloseOnForkFd,
    readable: EpollSet,
    last_scan: Option<Instant>,
    /// Why the last scan could not begin to attach to a client: this process is short of threads.
    attach_error: Option<Error>,
    /// The client that is polled first next time.
    next_client: usize,
    next_id: u64,
}

impl Server {
    /// Begins to scan for clients of this service. No client needs to exist yet.
    ///
    /// # Errors
    /// [`Error::Name`] (at most 40 bytes), or an error of the system.
    pub fn new(service: &str, options: ServerOptions) -> Result<Server> {
        check_service_name(service)?;
        let (domain, device) = chosen_place(&options.domain, &options.device)?;
        check_limit(&device, options.memory_limit)?;
        let readable = EpollSet::new("a server")?;
        let doorbell = Arc::new(LocalDoorbell::new()?);
        let arrivals = domain.ring_at_arrivals(doorbell.clone())?;
        let scan_timer = polled::scan_timer()?;
        readable.add(&*doorbell, DOORBELL, EventFlags::IN)?;
        readable.add(&scan_timer, SCAN_TIMER, EventFlags::IN)?;
        Ok(Server {
            owner_process: OwnerProcess::current(),
            service: service.to_string(),
            options,
            domain,
            device,
            clients: Vec::new(),
            doorbell,
            _arrivals: arrivals,
            is_polled: AtomicBool::new(false),
            scan_timer,
            readable,
            last_scan: None,
            attach_error: None,
            next_client: 0,
            next_id: SCAN_TIMER + 1,
        })
    }

    /// The service's name.
    pub(crate) fn service(&self) -> &str {
        &self.service
    }

    /// How many clients it is attached to.
    pub fn clients(&self) -> usize {
        self.requests().count()
    }

    /// Leases the next request of any client, and waits if there is none; clients are served in
    /// turn. `stream` will wait, on the device, until the input is complete. The client is the
    /// owner of the lease's queue, and the result is its reply. A request past its deadline is not
    /// returned. A client that goes, or breaks its link's protocol, is detached, and no other
    /// client is affected.
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::Os`] when the directory cannot be read, and instead of the
    /// timeout when this process has no thread left to attach to a client; [`Error::Argument`] for
    /// a stream of another device; [`Error::State`]; [`Error::Driver`].
    pub fn accept<'w>(&mut self, stream: &Stream, wait: impl Into<Wait<'w>>) -> Result<Lease> {
        self.owner_process.check()?;
        stream.check_usable(&self.device)?;
        let (wait, is_polled) = (wait.into(), self.is_polled.load(Relaxed));
        if is_polled {
            // Drained before the poll: a later ring is about later events.
            self.wait_events(Duration::ZERO);
        }
        let mut polls = Polls::for_at_most(self.options.spin.min(wait.time_left()));
        loop {
            self.scan_directory()?;
            if let Some(lease) = self.poll(stream)? {
                return Ok(lease);
            }
            // A user may have it poll for long.
            if self.options.spin > SLICE && wait.is_look_due() && wait.is_cancelled() {
                if is_polled {
                    // Another look is due: what came before the clients were asked to ring did not.
                    self.set_asleep(true);
                    self.ring();
                }
                return Err(self.nothing_within(&wait));
            }
            if polls.pass() {
                continue;
            }
            if is_polled {
                self.set_asleep(true);
                // Requests that came before the clients were asked to ring did not ring.
                if let Some(lease) = self.poll(stream)? {
                    return Ok(lease);
                }
            }
            let pause = wait.slice();
            if pause.is_zero() {
                return Err(self.nothing_within(&wait));
            }
            self.sleep(pause.min(SCAN_INTERVAL));
        }
    }

    /// The error of a wait that ended without a request.
    fn nothing_within(&mut self, wait: &Wait<'_>) -> Error {
        self.attach_error.take().unwrap_or_else(|| {
            wait.timed_out(|| {
                format!(
                    "a request to {:?} ({} clients attached)",
                    self.service(),
                    self.clients()
                )
            })
        })
    }

    /// Polls each client once, beginning with `next_client`.
    fn poll(&mut self, stream: &Stream) -> Result<Option<Lease>> {
        for _ in 0..self.clients.len() {
            self.next_client = (self.next_client + 1) % self.clients.len();
            let client = &mut self.clients[self.next_client];
            let ClientState::Attached(worker) = &mut client.state else {
                continue;
            };
            if !worker.jobs.may_have_news() {
                continue;
            }
            match worker.lease(stream, Duration::ZERO) {
                Err(Error::Timeout { .. }) => {}
                Ok(lease) => return Ok(Some(lease)),
                Err(
                    error @ (Error::State(StateFault::Capturing(_))
                    | Error::Driver { .. }
                    | Error::Argument { .. }),
                ) => {
                    return Err(error);
                }
                Err(_) => {
                    // It has gone, or its link has failed. The next attempt shows which of the two.
                    self.readable.remove(&worker.jobs.readable);
                    client.state = ClientState::Failed(Instant::now());
                }
            }
        }
        Ok(None)
    }

    /// Scans for new clients when the directory has changed or the interval has passed.
    fn scan_directory(&mut self) -> Result<()> {
        self.take_attached();
        if self
            .last_scan
            .is_some_and(|last_scan| last_scan.elapsed() < SCAN_INTERVAL)
        {
            return Ok(());
        }
        self.last_scan = Some(Instant::now());
        let names = self.domain.names_after(&client_prefix(self.service()))?;
        self.clients.retain(|client| match client.state {
            ClientState::Failed(since) => {
                since.elapsed() < SCAN_INTERVAL && names.contains(&client.name)
            }
            _ => true,
        });
        self.attach_error = None;
        for name in names {
            let is_known = self.clients.iter().any(|client| client.name == name);
            let attaching = self.attaching();
            let has_room =
                attaching < ATTACHING_MAX && self.clients() + attaching < self.options.clients_max;
            if !is_known && has_room {
                self.attach(name);
            }
        }
        Ok(())
    }

    /// How many clients are being attached to.
    fn attaching(&self) -> usize {
        let is_attaching = |it: &&ClientEntry| matches!(it.state, ClientState::Attaching(_));
        self.clients.iter().filter(is_attaching).count()
    }

    /// The requests of the clients that are attached to.
    fn requests(&self) -> impl Iterator<Item = &Subscriber> {
        self.clients
            .iter()
            .filter_map(|client| match &client.state {
                ClientState::Attached(worker) => Some(&worker.jobs),
                _ => None,
            })
    }

    /// Attaches to a client, on a thread of its own: the client may be stopped, and other clients
    /// must not wait for it.
    fn attach(&mut self, name: EndpointName) {
        let options = WorkerOptions {
            memory_limit: self.options.memory_limit,
            spin: self.options.spin,
            handshake_timeout: self.options.handshake_timeout,
            answer_timeout: self.options.answer_timeout,
            ..self.domain.on(&self.device)
        };
        let (domain, client) = (self.domain.clone(), name.clone());
        let reach = move |_: &Wait<'_>| {
            let built = Worker::open(client.as_str(), options.clone(), Duration::ZERO);
            if matches!(built, Err(Error::NotFound { .. })) {
                // Each name is used once, so no other process takes it again. One that is held
                // stays.
                domain.clean_name(&client);
            }
            built
        };
        match Attempt::start(name.as_str(), self.doorbell.clone(), reach, drop) {
            Ok(attempt) => {
                let (id, state) = (self.next_id, ClientState::Attaching(attempt));
                self.clients.push(ClientEntry { id, name, state });
                self.next_id += 1;
            }
            Err(error) => self.attach_error = Some(error),
        }
    }

    /// Takes the results of attempts. An attempt itself changes the directory, and that change is
    /// no reason for the next one.
    fn take_attached(&mut self) {
        for client in &mut self.clients {
            let ClientState::Attaching(attempt) = &client.state else {
                continue;
            };
            let (readable, id) = (&self.readable, client.id);
            let watch = |it: &Worker| readable.add(&it.jobs.readable, id, EventFlags::IN);
            client.state = match attempt.result() {
                None => continue,
                Some(Ok(worker)) if watch(&worker).is_ok() => ClientState::Attached(worker.into()),
                Some(_) => ClientState::Failed(Instant::now()),
            };
        }
    }

    /// How many clients are being attached to, and how many attempts have failed.
    #[cfg(test)]
    pub(super) fn unattached_counts(&self) -> (usize, usize) {
        let attaching = self.attaching();
        (attaching, self.clients.len() - self.clients() - attaching)
    }

    /// Sleeps until a client rings or the directory changes.
    fn sleep(&mut self, limit: Duration) {
        self.set_asleep(true);
        // Requests that came before the clients were asked to ring did not ring.
        if !self.requests().any(Subscriber::may_have_news) {
            self.wait_events(limit);
        }
        self.set_asleep(false);
    }

    fn handle_event(&mut self, id: u64) {
        match id {
            DOORBELL => {
                self.doorbell.drain();
                self.last_scan = None;
            }
            SCAN_TIMER => {
                let _ = rustix::io::read(&self.scan_timer, &mut [0; 8]);
                self.last_scan = None;
            }
            id => {
                let mut clients = self.clients.iter_mut();
                let client = clients.find(|client| client.id == id);
                if let Some(ClientState::Attached(worker)) = client.map(|it| &mut it.state) {
                    worker.jobs.drain();
                }
            }
        }
    }
}
