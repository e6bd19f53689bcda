//! The client: sends requests and waits for replies.

use std::ops::Deref;
use std::time::Duration;

use super::{check_service_name, client_prefix};
use crate::clock::now_ns;
use crate::device::Device;
use crate::error::{Error, NameFault, Result};
use crate::ipc::domain::Domain;
use crate::options::in_domain;
use crate::queue::{
    JobHandle, JobResult, Loan, Queue, QueueOptions, QueueState, QueueWatch, SubmitError,
};
use crate::runtime::reactor::new_generation;
use crate::stream::Stream;
use crate::tensor::Layout;
use crate::wait::Wait;

/// How many random names are tried before the last failure counts.
const NAME_TRIES: u32 = 8;

/// The options of a [`Client`]: its requests are the jobs of a queue, and its servers the workers.
#[derive(Debug, Clone)]
pub struct ClientOptions {
    /// The domain of its name; the environment's by default.
    pub domain: Option<Domain>,
    /// The device that holds the requests; [`Device::preferred`] by default.
    pub device: Option<Device>,
    /// The most device memory that requests may take, in bytes: 4 GiB by default.
    pub memory_limit: u64,
    /// How long a wait polls before it sleeps: as [`SubscriberOptions::spin`].
    ///
    /// [`SubscriberOptions::spin`]: crate::SubscriberOptions::spin
    pub spin: Duration,
    /// How many requests a server may hold at once: as [`QueueOptions::prefetch`].
    pub prefetch: u32,
    /// How often a request is tried: as [`QueueOptions::max_attempts`].
    pub max_attempts: u32,
    /// How long a server may hold requests without answering any: as
    /// [`QueueOptions::lease_timeout`].
    pub lease_timeout: Option<Duration>,
    /// The most requests that are pending or have a reply not taken yet: as
    /// [`QueueOptions::limit`].
    pub limit: usize,
    /// How long [`Client::loan`] waits for memory: 5 s by default.
    pub loan_timeout: Duration,
}

in_domain!(ClientOptions, device);

impl Default for ClientOptions {
    fn default() -> ClientOptions {
        let queue = QueueOptions::default();
        ClientOptions {
            domain: None,
            device: None,
            memory_limit: queue.memory_limit,
            spin: queue.spin,
            prefetch: queue.prefetch,
            max_attempts: queue.max_attempts,
            lease_timeout: queue.lease_timeout,
            limit: queue.limit,
            loan_timeout: queue.submit_timeout,
        }
    }
}

impl ClientOptions {
    fn queue(self) -> QueueOptions {
        QueueOptions {
            domain: self.domain,
            device: self.device,
            memory_limit: self.memory_limit,
            spin: self.spin,
            prefetch: self.prefetch,
            max_attempts: self.max_attempts,
            lease_timeout: self.lease_timeout,
            limit: self.limit,
            submit_timeout: self.loan_timeout,
            ..QueueOptions::default()
        }
    }
}

/// Sends requests to the servers of a service. Its methods may be called from any number of
/// threads.
///
/// ```
/// use std::time::Duration;
/// use warpipe::{Client, Device, Domain, Layout, Server};
/// # let folder = std::env::temp_dir().join(format!("warpipe-service-{}", std::process::id()));
/// # let (domain, device) = (Domain::at(&folder)?, Device::host());
/// let client = Client::new("upper", domain.on(&device))?;
/// // In another process, as a rule:
/// let mut server = Server::new("upper", domain.on(&device))?;
/// # let stream = device.stream()?;
/// # let second = Duration::from_secs(1);
/// # let serving = std::thread::spawn({ let (stream, device) = (stream.clone(), device.clone()); move || {
///
/// let request = server.accept(&stream, Duration::from_secs(5))?;
/// let mut output = request.output(request.layout())?;
/// output.write(&stream, &request.to_vec(second)?.to_ascii_uppercase())?;
/// request.complete(output, &stream)?;
/// # Ok::<_, warpipe::Error>(server) }});
///
/// let mut question = client.loan(&Layout::bytes_only(5)?)?;
/// question.write(&stream, b"hello")?;
/// let reply = client.call(question, &stream, Duration::from_secs(5))?;
/// assert_eq!(reply.to_vec(second)?, b"HELLO");
/// # drop((reply, client, serving.join().unwrap()?)); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
#[derive(Debug)]
pub struct Client {
    pub(super) queue: Queue,
}

impl Client {
    /// Takes a name below the service's and accepts servers. No server needs to exist yet.
    ///
    /// # Errors
    /// [`Error::Name`] (at most 40 bytes), and the others of [`Queue::new`].
    pub fn new(service: &str, options: ClientOptions) -> Result<Client> {
        check_service_name(service)?;
        let options = options.queue();
        let mut tries = 0;
        loop {
            let [a, b, c, d, ..] = new_generation();
            let name = format!(
                "{}{:08x}",
                client_prefix(service),
                u32::from_le_bytes([a, b, c, d])
            );
            tries += 1;
            match Queue::of_service(&name, service, options.clone()) {
                Err(Error::Name(NameFault::Taken { .. })) if tries < NAME_TRIES => {}
                made => {
                    return Ok(Client { queue: made? });
                }
            }
        }
    }

    /// Lends memory for a request.
    ///
    /// # Errors
    /// Those of [`Queue::loan`].
    pub fn loan(&self, layout: &Layout) -> Result<Loan> {
        self.queue.loan(layout)
    }

    /// The queue of its requests.
    #[doc(hidden)] // For bindings.
    pub fn queue(&self) -> &Queue {
        &self.queue
    }

    /// Sends a request behind the work enqueued on `stream`; the reply must come within `deadline`.
    /// No server begins the request later.
    ///
    /// # Errors
    /// As [`Queue::submit`].
    pub fn request(
        &self,
        input: Loan,
        stream: &Stream,
        deadline: Duration,
    ) -> Result<Pending, SubmitError> {
        let nanoseconds = u64::try_from(deadline.as_nanos()).unwrap_or(u64::MAX);
        let deadline_ns = now_ns().saturating_add(nanoseconds);
        self.request_before(input, stream, deadline_ns, deadline)
    }

    /// [`request`](Self::request) with the deadline as a point in time, in `CLOCK_MONOTONIC`
    /// nanoseconds, and another wait for room: a [`Wait`] that is cancelled has sent nothing.
    ///
    /// # Errors
    /// As [`request`](Self::request).
    #[doc(hidden)] // For the Python package.
    pub fn request_before<'w>(
        &self,
        input: Loan,
        stream: &Stream,
        deadline_ns: u64,
        room: impl Into<Wait<'w>>,
    ) -> Result<Pending, SubmitError> {
        let (deadline_ns, queue) = (deadline_ns.max(1), &self.queue);
        let handle = queue.submit_before(input, stream, deadline_ns, &room.into())?;
        Ok(Pending { handle })
    }

    /// Sends a request and waits for the reply.
    ///
    /// # Errors
    /// Those of [`request`](Self::request) and [`JobHandle::wait`].
    pub fn call(&self, input: Loan, stream: &Stream, deadline: Duration) -> Result<JobResult> {
        self.request(input, stream, deadline)?
            .wait(stream, Duration::MAX)
    }

    /// A descriptor that tells an event loop when to poll. See [`Queue::watch`].
    ///
    /// # Errors
    /// Those of [`Queue::watch`].
    pub fn watch(&self) -> Result<QueueWatch> {
        self.queue.watch()
    }

    /// Waits until `count` servers are attached. A server attaches to a new client while it accepts
    /// requests ([`Server::accept`](crate::Server::accept)).
    ///
    /// # Errors
    /// [`Error::Timeout`]; [`Error::State`].
    pub fn wait_for_servers<'w>(&self, count: usize, wait: impl Into<Wait<'w>>) -> Result<()> {
        self.queue.wait_for_workers(count, wait)
    }

    /// The state of its requests; `workers` are the servers.
    ///
    /// # Errors
    /// [`Error::State`].
    pub fn state(&self) -> Result<QueueState> {
        self.queue.state()
    }
}

/// A request without a reply. Dropped, the request is cancelled.
///
/// Its number, and how its reply is waited for, are those of the [`JobHandle`] that it dereferences
/// to; [`JobResult::worker_pid`] is the server's.
#[derive(Debug)]
#[must_use = "a request that is dropped is cancelled"]
pub struct Pending {
    handle: JobHandle,
}

impl Deref for Pending {
    type Target = JobHandle;

    fn deref(&self) -> &JobHandle {
        &self.handle
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        // If the reply was taken, or the client is gone, there is nothing to cancel.
        let _ = self.cancel();
    }
}
