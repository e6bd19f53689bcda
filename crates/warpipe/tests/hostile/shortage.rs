//! A publisher or server in a process that lacks descriptors for a new peer: the peer is refused with
//! the reason, and may come again.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::process::Resource;

use super::descriptors::{
    leave_descriptors, raise_descriptor_limit, set_soft, settled_descriptors,
};
use super::publisher_handshake::hello;
use super::stage::{LONG, Scratch, alone, eventually, hear, in_a_forked_child, packet, send_raw};
use crate::ipc::Kind;
use crate::ipc::message::{self, Message, Received};
use crate::{
    Client, Device, Domain, Error, HandshakeFault, Layout, Pool, PoolClient, Server, Subscriber,
};

/// A user without other processes.
const TENANT: u32 = 60_014;

/// Sends this `Hello` to an endpoint that has room for `spare` descriptors then, those of the `Hello`
/// among them. Returns the connection, and the other ends of the descriptors.
fn send_hello(scratch: &Scratch, hello: &Message, spare: usize) -> (OwnedFd, [OwnedFd; 2]) {
    let socket = scratch.connection();
    let [(end, end_writer), (alarm, alarm_writer)] =
        [(); 2].map(|()| rustix::pipe::pipe().unwrap());
    // The connection has been accepted, and the process opened.
    settled_descriptors();
    leave_descriptors(spare);
    // Fails where the connection has been too late.
    let _ = send_raw(&socket, &packet(hello), &[end.as_fd(), alarm.as_fd()]);
    (socket, [end_writer, alarm_writer])
}

fn is_welcome(answer: &Received) -> bool {
    matches!(
        answer,
        Received::Message(Message::Welcome { .. } | Message::SessionOpened { .. }, _)
    )
}

/// Whether a peer that comes during a shortage is admitted or learns of it, and is admitted when that
/// is over.
fn is_told_and_may_come_again(scratch: &Scratch, hello: &Message, spare: usize) -> bool {
    let (socket, _writers) = send_hello(scratch, hello, spare);
    // The answer is there before there is room; this process needs some itself to take it.
    assert!(message::wait_readable(socket.as_fd(), LONG));
    raise_descriptor_limit();
    let answer = hear(&socket);
    let is_refused = matches!(answer, Received::Message(Message::NoRoom { .. }, _));
    let (again, _writers) = send_hello(scratch, hello, 64);
    let later = hear(&again);
    raise_descriptor_limit();
    if is_welcome(&answer) == is_refused || !is_welcome(&later) {
        eprintln!("with room for {spare}: {answer:?}, then {later:?}");
        return false;
    }
    true
}

#[test]
fn a_subscriber_that_comes_while_the_publisher_lacks_descriptors_is_told_and_may_come_again() {
    // Two for the lifeline in the `Hello`, one for the segment, two for the wake channel.
    for spare in 0..=6 {
        in_a_forked_child(|| {
            let scratch = Scratch::new();
            let _publisher = scratch.publisher(|it| it);
            is_told_and_may_come_again(&scratch, &hello(), spare)
        });
    }
}

fn pool_hello() -> Message {
    Message::Hello {
        device: None,
        kind: Kind::Pool,
        body: vec![],
    }
}

#[test]
fn a_client_that_comes_while_the_server_lacks_descriptors_is_told_and_may_come_again() {
    let hello = pool_hello();
    for spare in 0..=4 {
        in_a_forked_child(|| {
            let scratch = Scratch::new();
            let _pool = Pool::new("a", scratch.domain.on(&Device::host())).unwrap();
            is_told_and_may_come_again(&scratch, &hello, spare)
        });
    }
}

#[test]
fn a_subscriber_without_room_in_its_process_is_told_so_and_may_come_again() {
    in_a_forked_child(|| {
        let scratch = Scratch::new();
        let publisher = scratch.publisher(|it| it);
        drop(scratch.subscriber());
        eventually("it is gone", || publisher.subscribers().is_empty());
        settled_descriptors();
        // Its own descriptors, and few for the publisher, in one process.
        leave_descriptors(8);
        let subscribe =
            || Subscriber::open("a", scratch.domain.on(&Device::host()), Duration::ZERO);
        let error = subscribe().map(drop).unwrap_err();
        eprintln!("{error}");
        let is_peers = matches!(
            error,
            Error::Handshake {
                fault: HandshakeFault::NoRoom(_),
                ..
            }
        );
        let is_told = is_peers || error.is_descriptor_limit();
        raise_descriptor_limit();
        is_told && subscribe().is_ok()
    });
}

/// Whether an error says that descriptors lack, here or at the peer.
fn tells_of_descriptors(error: &Error) -> bool {
    let at_peer = |fault: &HandshakeFault| matches!(fault, HandshakeFault::NoRoom(_));
    error.is_descriptor_limit() || matches!(error, Error::Handshake { fault, .. } if at_peer(fault))
}

#[test]
fn a_domain_and_the_first_subscriber_of_a_process_without_descriptors_say_what_they_lack() {
    let test =
        "a_domain_and_the_first_subscriber_of_a_process_without_descriptors_say_what_they_lack";
    alone(module_path!(), test, || {
        let scratch = Scratch::new();
        let _publisher = scratch.publisher(|it| it);
        for spare in 0..=24 {
            in_a_forked_child(|| {
                leave_descriptors(spare);
                let opened = Domain::at(&scratch.path).and_then(|domain| {
                    Subscriber::open("a", domain.on(&Device::host()), Duration::ZERO)
                });
                let is_told = opened.as_ref().map_or_else(tells_of_descriptors, |_| true);
                eprintln!("{spare} spare: {:?}", opened.err().map(|it| it.to_string()));
                is_told
            });
        }
    });
}

#[test]
fn a_subscriber_that_leaves_during_a_shortage_leaves_nothing_behind() {
    in_a_forked_child(|| {
        let scratch = Scratch::new();
        let publisher = scratch.publisher(|it| it);
        let (socket, writers) = send_hello(&scratch, &hello(), 2);
        drop((socket, writers));
        raise_descriptor_limit();
        let mut subscriber = scratch.subscriber();
        super::stage::assert_delivers(&publisher, &mut subscriber, b"to another one");
        eventually("it is gone", || publisher.subscribers().len() == 1);
        true
    });
}

/// Fills the descriptors that this user may have in flight with answers of the pool that nobody
/// reads. Returns whether another client of the pool outlasts that.
fn outlasts_unread_answers(scratch: &Scratch) -> bool {
    // SAFETY: plain system calls; this process has no other thread.
    let codes = unsafe { [libc::setgid(TENANT), libc::setuid(TENANT)] };
    assert_eq!(codes, [0; 2]);
    set_soft(Resource::Nofile, Some(256));
    let domain = Domain::at(&scratch.path).unwrap();
    let pool = Pool::new("a", domain.on(&Device::host())).unwrap();
    let client = PoolClient::open("a", domain.on(&Device::host()), Duration::ZERO).unwrap();
    drop(client.allocate(1, Duration::ZERO).unwrap());
    let silent = [(); 4].map(|()| {
        let (socket, pipes) = (scratch.connection(), [(); 2].map(|()| rustix::pipe::pipe()));
        let pipes = pipes.map(Result::unwrap);
        let ends = pipes.each_ref().map(|(end, _)| end.as_fd());
        send_raw(&socket, &packet(&pool_hello()), &ends).unwrap();
        assert!(message::wait_readable(socket.as_fd(), LONG));
        (socket, pipes)
    });
    let request = |body: &[u8]| {
        packet(&Message::Request {
            serial: 5,
            body: body.to_vec(),
        })
    };
    // A block of one byte, and then the descriptor of its region.
    let (block, pieces) = ([1, 1, 1], [0, 0, 0]);
    silent.iter().for_each(|(socket, _)| {
        send_raw(socket, &request(&block), &[]).unwrap();
    });
    let ask_for_pieces = || client.session().ipc().request(&pieces, LONG).map(drop);
    ask_for_pieces().unwrap();
    let mut outcomes = Vec::new();
    eventually("no more may be in flight", || {
        silent.iter().for_each(|(socket, _)| {
            let _ = send_raw(socket, &request(&pieces), &[]);
        });
        let outcome = ask_for_pieces();
        let is_over = outcome.is_err();
        outcomes.extend(is_over.then_some(outcome));
        is_over
    });
    drop(silent);
    eventually("it is served again", || ask_for_pieces().is_ok());
    let usage = pool.usage(TENANT);
    eprintln!("{outcomes:?} {usage:?}");
    !client.is_owner_gone()
}

#[test]
fn answers_that_one_client_does_not_read_end_no_session_of_another_one() {
    if !rustix::process::geteuid().is_root() {
        return println!(
            "skipped: only root is exempt from the limit, and can become another user"
        );
    }
    in_a_forked_child(|| {
        let scratch = Scratch::new();
        std::os::unix::fs::chown(&scratch.path, Some(TENANT), Some(TENANT)).unwrap();
        outlasts_unread_answers(&scratch)
    });
}

/// Becomes a user without other processes, who may have no more threads than now once it
/// [is limited](limit_threads).
fn become_tenant(scratch: &Scratch) {
    std::os::unix::fs::chown(&scratch.path, Some(TENANT), Some(TENANT)).unwrap();
    // SAFETY: plain system calls; this process has no other thread.
    let codes = unsafe { [libc::setgid(TENANT), libc::setuid(TENANT)] };
    assert_eq!(codes, [0; 2]);
}

/// Whether this process may have no more threads than it has.
fn limit_threads(is_limited: bool) {
    set_soft(Resource::Nproc, is_limited.then_some(1));
}

/// Runs `work` in the only process of its user: root's threads are not limited.
fn as_tenant(work: impl FnOnce(&Domain) -> bool) {
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can become another user");
    }
    in_a_forked_child(|| {
        let scratch = Scratch::new();
        become_tenant(&scratch);
        work(&Domain::at(&scratch.path).unwrap())
    });
}

#[test]
fn a_server_without_a_thread_for_a_client_says_so_and_serves_it_when_there_is_one() {
    as_tenant(|domain| {
        let (device, soon) = (Device::host(), Duration::from_millis(50));
        let stream = device.stream().unwrap();
        let client = Client::new("s", domain.on(&device)).unwrap();
        let mut server = Server::new("s", domain.on(&device)).unwrap();
        let input = client.loan(&Layout::bytes_only(8).unwrap()).unwrap();
        let _pending = client.request(input, &stream, LONG).unwrap();
        limit_threads(true);
        let short = server.accept(&stream, soon).unwrap_err();
        let is_told = matches!(short, Error::Os { call: "clone", .. });
        eprintln!("{short}");
        limit_threads(false);
        let request = server.accept(&stream, LONG).unwrap();
        is_told && request.complete(None, &stream).is_ok()
    });
}
