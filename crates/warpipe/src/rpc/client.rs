//! The client: sends requests and waits for replies.

use std::time::Duration;

use super::{client_prefix, service_name};
use crate::clock::now_ns;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::queue::{
    JobHandle, JobResult, Loan, Queue, QueueBuilder, QueueState, QueueWatch, SubmitError,
};
use crate::runtime::reactor::new_generation;
use crate::stream::Stream;
use crate::tensor::Layout;
use crate::wait::Wait;

/// How many random names are tried before building fails.
const NAME_TRIES: u32 = 8;

/// The options of a client. See [`Client::builder`].
pub type ClientBuilder = QueueBuilder<Client>;

impl QueueBuilder<Client> {
    /// How long [`Client::loan`] waits for memory: 5 s by default.
    pub fn loan_timeout(mut self, timeout: Duration) -> Self {
        self.submit_timeout = timeout;
        self
    }

    /// Takes a name below the service's and accepts servers. No server needs to exist yet.
    ///
    /// # Errors
    /// [`Error::Name`] (at most 40 bytes), and the others of [`QueueBuilder::build`].
    pub fn build(self) -> Result<Client> {
        service_name(&self.name)?;
        let mut tries = 0;
        loop {
            let [a, b, c, d, ..] = new_generation();
            let name = format!(
                "{}{:08x}",
                client_prefix(&self.name),
                u32::from_le_bytes([a, b, c, d])
            );
            tries += 1;
            match self.build_queue(&name) {
                Err(Error::NameTaken { .. }) if tries < NAME_TRIES => {}
                built => {
                    return Ok(Client {
                        queue: built?,
                        service: self.name,
                    });
                }
            }
        }
    }
}

/// Sends requests to the servers of a service. Its methods may be called from any number of
/// threads.
///
/// ```
/// use std::time::Duration;
/// use warpipe::{Client, Device, Domain, Server};
/// # let folder = std::env::temp_dir().join(format!("warpipe-service-{}", std::process::id()));
/// # let (domain, device) = (Domain::at(&folder)?, Device::host());
/// let client = Client::builder("upper").domain(&domain).device(&device).build()?;
/// let mut server = Server::builder("upper").domain(&domain).device(&device).build()?; // in another process
/// # let stream = device.stream()?;
/// # let second = Duration::from_secs(1);
/// # let serving = std::thread::spawn({ let (stream, device) = (stream.clone(), device.clone()); move || {
///
/// let request = server.accept(&stream, Duration::from_secs(5))?;
/// let mut output = request.output(request.layout())?;
/// output.write(&stream, &request.to_vec(second)?.to_ascii_uppercase())?;
/// request.complete_with(output, &stream)?;
/// # Ok::<_, warpipe::Error>(server) }});
///
/// let reply = client.call_bytes(b"hello", &stream, Duration::from_secs(5))?;
/// assert_eq!(reply.to_vec()?, b"HELLO");
/// # drop((reply, client, serving.join().unwrap()?)); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
#[derive(Debug)]
pub struct Client {
    pub(super) queue: Queue,
    service: String,
}

impl Client {
    /// A builder for a client of this service.
    pub fn builder(service: &str) -> ClientBuilder {
        ClientBuilder::new(service)
    }

    /// The service's name.
    pub fn service(&self) -> &str {
        &self.service
    }

    /// The device of this client.
    pub fn device(&self) -> &Device {
        self.queue.device()
    }

    /// Lends memory for a request.
    ///
    /// # Errors
    /// Those of [`Queue::loan`].
    pub fn loan(&self, layout: &Layout) -> Result<Loan> {
        self.queue.loan(layout)
    }

    /// Sends a request behind the work enqueued on `stream`; the reply must come within `deadline`.
    /// No server begins the request later.
    ///
    /// # Errors
    /// [`Error::QueueFull`], with the loan; [`Error::Driver`]; [`Error::Forked`].
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
    pub fn request_before<'w>(
        &self,
        input: Loan,
        stream: &Stream,
        deadline_ns: u64,
        room: impl Into<Wait<'w>>,
    ) -> Result<Pending, SubmitError> {
        let (deadline_ns, queue) = (deadline_ns.max(1), &self.queue);
        let handle = queue.submit_before(input, stream, deadline_ns, &room.into())?;
        Ok(Pending {
            handle,
            service: self.service.clone(),
            deadline_ns,
        })
    }

    /// Sends a request and waits for the reply.
    ///
    /// # Errors
    /// Those of [`request`](Self::request) and [`Pending::wait`].
    pub fn call(&self, input: Loan, stream: &Stream, deadline: Duration) -> Result<JobResult> {
        self.request(input, stream, deadline)?
            .wait(stream, Duration::MAX)
    }

    /// Loans, copies `bytes` in, and [calls](Self::call).
    ///
    /// # Errors
    /// Those of [`loan`](Self::loan) and [`call`](Self::call).
    pub fn call_bytes(
        &self,
        bytes: &[u8],
        stream: &Stream,
        deadline: Duration,
    ) -> Result<JobResult> {
        let mut input = self.loan(&Layout::bytes_only(bytes.len() as u64)?)?;
        input.write(stream, bytes)?;
        self.call(input, stream, deadline)
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
    /// [`Error::Timeout`]; [`Error::Forked`].
    pub fn wait_for_servers<'w>(&self, count: usize, wait: impl Into<Wait<'w>>) -> Result<()> {
        self.queue.wait_for_workers(count, wait)
    }

    /// The state of its requests; `workers` are the servers.
    ///
    /// # Errors
    /// [`Error::Forked`].
    pub fn state(&self) -> Result<QueueState> {
        self.queue.state()
    }
}

/// A request without a reply. Dropped, the request is cancelled.
#[derive(Debug)]
#[must_use = "a request that is dropped is cancelled"]
pub struct Pending {
    handle: JobHandle,
    service: String,
    deadline_ns: u64,
}

impl Pending {
    /// Takes the reply, and waits for it, at most until the deadline, if it has not come. Its data is
    /// complete then; [`JobResult::worker_pid`] is the server's.
    ///
    /// # Errors
    /// [`Error::Timeout`] before the deadline, after which it can be waited for again;
    /// [`Error::DeadlinePassed`]; [`Error::Rejected`] by a server; [`Error::DeadLettered`] when all
    /// attempts failed; [`Error::QueueClosed`] when the client is gone; [`Error::Forked`].
    pub fn wait<'w>(&self, stream: &Stream, wait: impl Into<Wait<'w>>) -> Result<JobResult> {
        let left = Duration::from_nanos(self.deadline_ns.saturating_sub(now_ns()));
        let waited = self.handle.wait(stream, wait.into().no_longer_than(left));
        waited.map_err(|error| self.described(error))
    }

    /// Whether [`wait`](Self::wait) would return at once: the reply is there, or was taken, or the
    /// deadline has passed.
    ///
    /// # Errors
    /// [`Error::QueueClosed`] when the client is gone; [`Error::Forked`].
    pub fn is_done(&self) -> Result<bool> {
        Ok(self.handle.is_done()? || now_ns() >= self.deadline_ns)
    }

    /// Cancels the request, as dropping it does. False if its outcome was taken before.
    ///
    /// # Errors
    /// Those of [`JobHandle::cancel`].
    pub fn cancel(&self) -> Result<bool> {
        self.handle.cancel()
    }

    /// The request's number, from 1.
    pub fn id(&self) -> u64 {
        self.handle.id()
    }

    /// `CLOCK_MONOTONIC` nanoseconds by which the reply is wanted.
    pub fn deadline_ns(&self) -> u64 {
        self.deadline_ns
    }

    /// An error of the job as one of the request.
    fn described(&self, error: Error) -> Error {
        match error {
            Error::Timeout { what, waited } if now_ns() < self.deadline_ns => Error::Timeout {
                what: match what.is_empty() {
                    true => what,
                    false => format!("the reply to request {} of {:?}", self.id(), self.service),
                },
                waited,
            },
            Error::Timeout { .. } | Error::DeadlinePassed { .. } => self.deadline_passed(),
            Error::Rejected { job, reason, .. } => Error::Rejected {
                name: self.service.clone(),
                job,
                reason,
            },
            Error::DeadLettered { job, reasons, .. } => Error::DeadLettered {
                name: self.service.clone(),
                job,
                reasons,
            },
            other => other,
        }
    }

    fn deadline_passed(&self) -> Error {
        Error::DeadlinePassed {
            name: self.service.clone(),
            job: self.handle.id(),
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        // If the reply was taken, or the client is gone, there is nothing to cancel.
        let _ = self.cancel();
    }
}
