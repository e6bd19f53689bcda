//! A server with links to living clients that fail or are never made.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::time::Duration;

use super::{Client, Pending, Server, ServerOptions, client_prefix};
use crate::backend::testing::{Panicking, Wrapped};
use crate::device::Device;
use crate::error::{Error, NameFault};
use crate::ipc::domain::Domain;
use crate::pubsub::{Publisher, PublisherOptions, Subscriber};
use crate::queue::Lease;
use crate::stream::Stream;
use crate::wait::{OptionalExtension, Wait};

const SOON: Duration = Duration::from_secs(10);

struct RpcFixture {
    folder: PathBuf,
    domain: Domain,
    device: Device,
    stream: Stream,
}

impl RpcFixture {
    fn new(name: &str) -> RpcFixture {
        let folder =
            std::env::temp_dir().join(format!("warpipe-service-{name}-{}", std::process::id()));
        let device = Device::host();
        RpcFixture {
            domain: Domain::at(&folder).unwrap(),
            stream: device.stream().unwrap(),
            folder,
            device,
        }
    }

    fn server(&self) -> Server {
        Server::new("upper", self.domain.on(&self.device)).unwrap()
    }

    fn client(&self) -> Client {
        Client::new("upper", self.domain.on(&self.device)).unwrap()
    }

    fn asks(&self, client: &Client) -> Pending {
        let mut input = client.loan(&crate::Layout::bytes_only(8).unwrap()).unwrap();
        input.write(&self.stream, b"question").unwrap();
        client.request(input, &self.stream, 2 * SOON).unwrap()
    }

    /// Accepts as an event loop does, and sleeps on the descriptor alone.
    fn accept_when_rung(&self, server: &mut Server, descriptor: &OwnedFd) -> Lease {
        loop {
            if let Some(lease) = server
                .accept(&self.stream, Duration::ZERO)
                .optional()
                .unwrap()
            {
                return lease;
            }
            assert!(is_readable(descriptor, SOON), "nothing rang");
        }
    }

    fn serves(&self, server: &mut Server, client: &Client) {
        let pending = self.asks(client);
        server
            .accept(&self.stream, SOON)
            .unwrap()
            .complete(None, &self.stream)
            .unwrap();
        drop(pending.wait(&self.stream, SOON).unwrap());
    }
}

impl Drop for RpcFixture {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// An event loop's descriptor: requested once, so that only rings make it readable.
fn descriptor_of(server: &Server) -> OwnedFd {
    server.as_fd().try_clone_to_owned().unwrap()
}

fn is_readable(descriptor: &OwnedFd, limit: Duration) -> bool {
    use rustix::event::{PollFd, PollFlags, poll};
    let mut fds = [PollFd::from_borrowed_fd(descriptor.as_fd(), PollFlags::IN)];
    poll(&mut fds, Some(&crate::os::timespec(limit))).unwrap() > 0
}

#[test]
fn the_descriptor_of_a_polled_server_tells_of_new_clients_and_of_each_request() {
    let fixture = RpcFixture::new("polled");
    let mut server = fixture.server();
    let descriptor = descriptor_of(&server);
    server.set_scans_every(Duration::ZERO);
    assert!(
        server
            .accept(&fixture.stream, Duration::ZERO)
            .optional()
            .unwrap()
            .is_none(),
        "nobody has asked"
    );
    assert!(
        !is_readable(&descriptor, Duration::ZERO),
        "nothing has come, and nothing rings"
    );
    let client = fixture.client();
    for _ in 0..3 {
        let pending = fixture.asks(&client);
        fixture
            .accept_when_rung(&mut server, &descriptor)
            .complete(None, &fixture.stream)
            .unwrap();
        drop(pending.wait(&fixture.stream, SOON).unwrap());
    }
    // Between two polls of an event loop another call may wait, and it leaves the clients asked to
    // ring.
    let pending = fixture.asks(&client);
    server
        .accept(&fixture.stream, SOON)
        .unwrap()
        .complete(None, &fixture.stream)
        .unwrap();
    drop(pending.wait(&fixture.stream, SOON).unwrap());
    let pending = fixture.asks(&client);
    fixture
        .accept_when_rung(&mut server, &descriptor)
        .complete(None, &fixture.stream)
        .unwrap();
    drop(pending.wait(&fixture.stream, SOON).unwrap());
}

#[test]
fn a_polled_server_attaches_again_to_a_client_whose_link_failed() {
    let fixture = RpcFixture::new("polled-again");
    let (mut server, client) = (fixture.server(), fixture.client());
    fixture.serves(&mut server, &client);
    let descriptor = descriptor_of(&server);
    client.queue.expel_all("for a test");
    let pending = fixture.asks(&client);
    fixture
        .accept_when_rung(&mut server, &descriptor)
        .complete(None, &fixture.stream)
        .unwrap();
    drop(pending.wait(&fixture.stream, SOON).unwrap());
}

#[test]
fn a_living_client_whose_link_failed_is_attached_to_again() {
    let fixture = RpcFixture::new("again");
    let (mut server, client) = (fixture.server(), fixture.client());
    fixture.serves(&mut server, &client);
    client.queue.expel_all("for a test");
    // The end of the client is seen, and nothing else has come.
    while server.clients() > 0 {
        let idle = server.accept(&fixture.stream, Duration::from_millis(1));
        assert!(matches!(idle, Err(Error::Timeout { .. })), "{idle:?}");
    }
    fixture.serves(&mut server, &client);
}

#[test]
fn a_client_that_has_no_room_is_not_asked_again_at_once() {
    let fixture = RpcFixture::new("full");
    let name = format!("{}00000001", client_prefix("upper"));
    let options = PublisherOptions {
        subscribers_max: 1,
        ..fixture.domain.on(&fixture.device)
    };
    let full = Publisher::new(&name, options).unwrap();
    let other =
        Subscriber::open(&name, fixture.domain.on(&fixture.device), Duration::ZERO).unwrap();
    let mut server = fixture.server();
    let accept = |server: &mut Server| {
        server
            .accept(&fixture.stream, Duration::from_millis(1))
            .map(drop)
    };
    while server.unattached_counts().1 == 0 {
        assert!(matches!(accept(&mut server), Err(Error::Timeout { .. })));
    }
    // The attempt itself has changed the directory.
    assert!(matches!(accept(&mut server), Err(Error::Timeout { .. })));
    let (attaching, _) = server.unattached_counts();
    assert_eq!(attaching, 0, "it tries as often as it can");
    drop((other, full));
}

#[test]
fn a_name_that_is_too_long_for_a_service_is_refused_as_it_was_given() {
    let fixture = RpcFixture::new("names");
    let long = "x".repeat(41);
    let refused = |built: Option<Error>| {
        matches!(built, Some(Error::Name(NameFault::Invalid { name, reason }))
            if name == long && reason.contains("40 bytes"))
    };
    let (domain, device) = (&fixture.domain, &fixture.device);
    assert!(refused(Client::new(&long, domain.on(device)).err()));
    assert!(refused(Server::new(&long, domain.on(device)).err()));
    assert!(Client::new(&long[1..], domain.on(device)).is_ok());
}

#[test]
fn a_client_is_attached_to_after_an_attempt_that_panicked() {
    let fixture = RpcFixture::new("panicked");
    let panicking = Wrapped::new(fixture.device.backend().clone(), Panicking::default());
    let device = Device::from_backend(panicking.clone());
    let mut server = Server::new("upper", fixture.domain.on(&device)).unwrap();
    let stream = device.stream().unwrap();
    panicking.hook().aim("register", 1);
    let client = fixture.client();
    let pending = fixture.asks(&client);
    let lease = server.accept(&stream, SOON).unwrap();
    assert!(panicking.hook().has_struck());
    lease.complete(None, &stream).unwrap();
    drop(pending.wait(&fixture.stream, SOON).unwrap());
}

#[test]
fn an_accept_that_polls_for_long_is_cancelled_meanwhile() {
    let fixture = RpcFixture::new("polls");
    let mut server = Server::new(
        "upper",
        ServerOptions {
            spin: Duration::MAX,
            ..fixture.domain.on(&fixture.device)
        },
    )
    .unwrap();
    for is_polled in [false, true] {
        let descriptor = is_polled.then(|| descriptor_of(&server));
        let start = std::time::Instant::now();
        let late = server.accept(&fixture.stream, Wait::at_most(SOON).unless(&|| true));
        assert!(matches!(late, Err(Error::Timeout { .. })));
        assert!(start.elapsed() < SOON);
        // An event loop looks again: what came meanwhile did not ring.
        assert!(descriptor.is_none_or(|it| is_readable(&it, Duration::ZERO)));
    }
}
