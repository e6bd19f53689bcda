//! Clients, requests and servers through the C interface.

use std::ffi::c_void;
use std::time::Duration;

use crate::common::{
    Fixture, LONG, SHORT, Shared, becomes_readable, bytes_layout, leased, none, zeroed,
};
use warpipe_c::*;
use warpipe_testkit::eventually;

/// A client and a server of one service.
struct Service {
    client: *mut warpipe_client,
    server: *mut warpipe_server,
    fixture: Fixture,
}

impl Service {
    fn new() -> Service {
        let fixture = Fixture::new();
        let options = options!(warpipe_client_options {
            domain: fixture.domain,
            device: fixture.device,
        });
        let client = get!(warpipe_client_create(c"upper".as_ptr(), &options));
        let options = options!(warpipe_server_options {
            domain: fixture.domain,
            device: fixture.device,
        });
        let server = get!(warpipe_server_create(c"upper".as_ptr(), &options));
        Service {
            client,
            server,
            fixture,
        }
    }

    fn loan(&self, bytes: &[u8]) -> *mut warpipe_loan {
        let layout = bytes_layout(bytes.len() as u64);
        let loan = get!(warpipe_client_loan(self.client, &layout));
        self.fixture.write(loan, bytes);
        loan
    }

    fn request(&self, bytes: &[u8]) -> *mut warpipe_job {
        let (loan, stream) = (self.loan(bytes), self.fixture.stream);
        get!(warpipe_client_request(self.client, loan, stream, LONG))
    }

    fn accept(&self) -> (*mut warpipe_lease, *mut warpipe_sample) {
        let (server, stream) = (self.server, self.fixture.stream);
        leased(|lease, input| ok!(warpipe_server_accept(server, stream, LONG, lease, input)))
    }

    /// Asks, and waits for the reply.
    fn call(&self, bytes: &[u8]) -> *mut warpipe_sample {
        let request = self.request(bytes);
        let reply = get!(warpipe_job_wait(request, self.fixture.stream, LONG));
        ok!(warpipe_close(request));
        reply
    }

    fn close(self) {
        ok!(warpipe_close(self.server));
        ok!(warpipe_close(self.client));
    }
}

#[test]
fn a_call_returns_the_reply_of_a_server() {
    let service = Service::new();
    let own_stream = service.fixture.another_stream();
    let (server, stream) = (Shared::new(service.server), Shared::new(own_stream));
    let serving = std::thread::spawn(move || {
        let (server, stream) = (server.get(), stream.get());
        let (lease, input) =
            leased(|lease, input| ok!(warpipe_server_accept(server, stream, LONG, lease, input)));
        let mut bytes = [0u8; 5];
        let buffer = bytes.as_mut_ptr().cast();
        ok!(warpipe_sample_copy_to(input, none(), buffer, 5, LONG));
        ok!(warpipe_sample_finish(input, LONG));
        bytes.make_ascii_uppercase();
        let output = get!(warpipe_lease_output(lease, &bytes_layout(5)));
        let data = bytes.as_ptr().cast();
        ok!(warpipe_loan_write(output, stream, none(), data, 5));
        ok!(warpipe_lease_complete(
            lease,
            output,
            stream,
            WARPIPE_USUAL_TIMEOUT
        ));
    });
    ok!(warpipe_client_wait_for_servers(service.client, 1, LONG));
    let reply = service.call(b"hello");
    assert_eq!(service.fixture.read(reply), b"HELLO");
    let info: warpipe_sample_info = get!(warpipe_sample_get_info(reply));
    assert_eq!(info.pid, std::process::id() as i32);
    ok!(warpipe_sample_finish(reply, LONG));
    serving.join().expect("no panic");
    service.fixture.destroy(own_stream);
    service.close();
}

#[test]
fn a_request_is_waited_for_and_its_lease_names_the_client_and_the_deadline() {
    let service = Service::new();
    let stream = service.fixture.stream;
    let pending = service.request(b"question");
    let mut reply = none();
    fails!(
        WARPIPE_TIMEOUT,
        warpipe_job_wait(pending, stream, 0, &mut reply)
    );
    assert!(!get!(warpipe_job_is_done(pending)));
    let (lease, input) = service.accept();
    let info: warpipe_sample_info = get!(warpipe_sample_get_info(input));
    ok!(warpipe_close(input));
    assert_eq!(info.pid, std::process::id() as i32);
    assert!(info.deadline_ns > warpipe::clock::now_ns());
    let (mut state, mut servers) = (zeroed::<warpipe_queue_state>(), [0; 2]);
    ok!(warpipe_client_get_state(
        service.client,
        &mut state,
        servers.as_mut_ptr(),
        2
    ));
    assert_eq!((state.workers, state.leased), (1, 1));
    assert_eq!(servers, [info.pid, 0]);
    ok!(warpipe_lease_complete(
        lease,
        none(),
        stream,
        WARPIPE_USUAL_TIMEOUT
    ));
    ok!(warpipe_job_wait(pending, stream, LONG, &mut reply));
    assert_eq!(service.fixture.read(reply), b"");
    ok!(warpipe_sample_finish(reply, LONG));
    fails!(
        WARPIPE_NOT_FOUND,
        warpipe_job_wait(pending, stream, LONG, &mut reply)
    );
    ok!(warpipe_close(pending));
    fails!(WARPIPE_INVALID_OBJECT, warpipe_close(pending));
    service.close();
}

#[test]
fn a_closed_request_is_withdrawn() {
    let service = Service::new();
    let pending = service.request(b"question");
    let waiting = || {
        let mut state = zeroed::<warpipe_queue_state>();
        ok!(warpipe_client_get_state(
            service.client,
            &mut state,
            none(),
            0
        ));
        state.waiting
    };
    assert_eq!(waiting(), 1);
    ok!(warpipe_close(pending));
    assert_eq!(waiting(), 0);
    service.close();
}

#[test]
fn a_rejected_request_says_why() {
    let service = Service::new();
    let stream = service.fixture.stream;
    let pending = service.request(b"question");
    let (lease, input) = service.accept();
    ok!(warpipe_close(input));
    ok!(warpipe_lease_reject(
        lease,
        c"too long".as_ptr(),
        WARPIPE_USUAL_TIMEOUT
    ));
    let mut reply = none();
    let watch: *mut warpipe_watch = get!(warpipe_client_watch(service.client));
    while !get!(warpipe_job_is_done(pending)) {
        assert!(becomes_readable(get!(warpipe_get_fd(watch.cast()))));
        ok!(warpipe_watch_quiet(watch));
    }
    ok!(warpipe_close(watch));
    let said = fails!(
        WARPIPE_JOB_FAILED,
        warpipe_job_wait(pending, stream, LONG, &mut reply)
    );
    assert!(said.contains("too long"), "{said}");
    ok!(warpipe_close(pending));
    service.close();
}

#[test]
fn a_deadline_that_passes_ends_the_wait() {
    let service = Service::new();
    let (client, stream) = (service.client, service.fixture.stream);
    let mut reply = none();
    for deadline in [0, SHORT] {
        let loan = service.loan(b"question");
        let pending = get!(warpipe_client_request(client, loan, stream, deadline));
        fails!(WARPIPE_INVALID_OBJECT, warpipe_loan_discard(loan, stream));
        fails!(
            WARPIPE_TIMEOUT,
            warpipe_job_wait(pending, stream, LONG, &mut reply)
        );
        assert!(get!(warpipe_job_is_done(pending)));
        ok!(warpipe_close(pending));
    }
    service.close();
}

#[test]
fn a_second_thread_may_not_use_a_server_that_accepts() {
    let service = Service::new();
    let (server, stream) = (
        Shared::new(service.server),
        Shared::new(service.fixture.stream),
    );
    let accepting = std::thread::spawn(move || {
        let (server, stream) = (server.get(), stream.get());
        let (lease, input) =
            leased(|lease, input| ok!(warpipe_server_accept(server, stream, LONG, lease, input)));
        ok!(warpipe_close(input));
        Shared::new(lease)
    });
    let mut fd = 0;
    assert!(eventually(Duration::from_nanos(LONG), || {
        call!(warpipe_get_fd(service.server.cast(), &mut fd))
            == warpipe_status::WARPIPE_INVALID_STATE
    }));
    let (mut lease, mut input) = (none(), none());
    let stream = service.fixture.stream;
    fails!(
        WARPIPE_INVALID_STATE,
        warpipe_server_accept(service.server, stream, 0, &mut lease, &mut input)
    );
    let pending = service.request(b"question");
    let lease = accepting.join().expect("no panic").get();
    ok!(warpipe_close(lease));
    ok!(warpipe_close(pending));
    service.close();
}

#[test]
fn a_servers_descriptor_is_readable_when_a_request_comes() {
    let service = Service::new();
    let (server, stream) = (service.server, service.fixture.stream);
    let fd: i32 = get!(warpipe_get_fd(server.cast()));
    let pending = service.request(b"question");
    let (mut lease, mut input): (*mut warpipe_lease, _) = (none(), none());
    while lease.is_null() {
        assert!(becomes_readable(fd));
        let input = &mut input;
        let status = call!(warpipe_server_accept(server, stream, 0, &mut lease, input));
        let is_expected = matches!(
            status,
            warpipe_status::WARPIPE_OK | warpipe_status::WARPIPE_TIMEOUT
        );
        assert!(is_expected, "{}", crate::common::message());
    }
    ok!(warpipe_lease_complete(
        lease,
        none(),
        stream,
        WARPIPE_USUAL_TIMEOUT
    ));
    ok!(warpipe_close(input));
    ok!(warpipe_close(pending));
    service.close();
}

#[test]
fn requests_of_a_closed_client_and_loans_of_another_are_refused() {
    let service = Service::new();
    let stream = service.fixture.stream;
    let other = Service::new();
    let (loan, mut pending) = (service.loan(b"question"), none());
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_client_request(other.client, loan, stream, LONG, &mut pending)
    );
    ok!(warpipe_client_request(
        service.client,
        loan,
        stream,
        LONG,
        &mut pending
    ));
    let client = service.client;
    service.close();
    fails!(WARPIPE_INVALID_OBJECT, warpipe_close(client));
    let mut second = none();
    fails!(
        WARPIPE_INVALID_OBJECT,
        warpipe_client_request(client, loan, stream, LONG, &mut second)
    );
    ok!(warpipe_close(pending));
    other.close();
}

#[test]
fn a_request_outlives_its_client_only_as_a_handle() {
    let service = Service::new();
    let stream = service.fixture.stream;
    let pending = service.request(b"question");
    ok!(warpipe_close(service.client));
    let mut reply = none();
    fails!(
        WARPIPE_INVALID_STATE,
        warpipe_job_wait(pending, stream, LONG, &mut reply)
    );
    let mut is_done = false;
    fails!(
        WARPIPE_INVALID_STATE,
        warpipe_job_is_done(pending, &mut is_done)
    );
    ok!(warpipe_close(pending));
    ok!(warpipe_close(service.server));
}

#[test]
fn invalid_names_options_and_pointers_are_refused() {
    let service = Service::new();
    let (mut client, mut server) = (none(), none());
    let long = c"a-name-of-more-than-forty-bytes-is-too-long".as_ptr();
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_client_create(long, none(), &mut client)
    );
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_server_create(long, none(), &mut server)
    );
    let (mut of_client, mut of_server) = (
        options!(warpipe_client_options {}),
        options!(warpipe_server_options {}),
    );
    (of_client.size, of_server.size) = (0, 0);
    let name = c"upper".as_ptr();
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_client_create(name, &of_client, &mut client)
    );
    fails!(
        WARPIPE_INVALID_INPUT,
        warpipe_server_create(name, &of_server, &mut server)
    );
    fails!(
        WARPIPE_INVALID_OBJECT,
        warpipe_client_wait_for_servers(service.server.cast(), 1, 0)
    );
    fails!(
        WARPIPE_TIMEOUT,
        warpipe_client_wait_for_servers(service.client, 1, 0)
    );
    let (mut lease, mut input, mut fd) = (none(), none(), 0);
    let stream = service.fixture.stream;
    fails!(
        WARPIPE_TIMEOUT,
        warpipe_server_accept(service.server, stream, 0, &mut lease, &mut input)
    );
    fails!(WARPIPE_INVALID_OBJECT, warpipe_get_fd(none(), &mut fd));
    ok!(warpipe_close(none::<c_void>()));
    let server = service.server;
    service.close();
    fails!(WARPIPE_INVALID_OBJECT, warpipe_close(server));
}
