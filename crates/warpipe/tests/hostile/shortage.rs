//! A publisher or server whose process lacks descriptors for a new peer: the peer waits, and is
//! admitted when there is room, or gets the reason when the time for the handshake is over.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::descriptors::{leave_descriptors, raise_descriptor_limit, settled_descriptors};
use super::publisher_handshake::hello;
use super::stage::{LONG, Scratch, eventually, hear, in_a_forked_child, packet, send_raw};
use crate::ipc::Kind;
use crate::ipc::message::{self, Message, Received};
use crate::runtime::reactor::{EventSource, Next, Reactor};
use crate::{Device, Pool, Publisher};

/// Counts the reactor's ticks.
struct Clock(AtomicU32);

impl EventSource for Clock {
    fn on_ready(&self, _: u64) -> Next {
        Next::Stop
    }

    fn on_tick(&self, _: u64) {
        self.0.fetch_add(1, SeqCst);
    }
}

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

fn publisher(scratch: &Scratch, timeout: Duration) -> Publisher {
    scratch.publisher(|it| it.handshake_timeout(timeout))
}

/// Whether a peer that came during a shortage is admitted when that is over.
fn is_welcome_when_there_is_room(scratch: &Scratch, hello: &Message, spare: usize) -> bool {
    let clock = Arc::new(Clock(AtomicU32::new(0)));
    let me: Weak<dyn EventSource> = Arc::downgrade(&clock) as Weak<dyn EventSource>;
    Reactor::of_process().unwrap().register_ticks(me);
    let (socket, _writers) = send_hello(scratch, hello, spare);
    let ticks = clock.0.load(SeqCst);
    eventually("it has been tried, and tried again", || {
        message::wait_readable(socket.as_fd(), Duration::ZERO) || clock.0.load(SeqCst) >= ticks + 3
    });
    raise_descriptor_limit();
    let answer = hear(&socket);
    let is_welcome = matches!(
        answer,
        Received::Message(Message::Welcome { .. } | Message::SessionOpened { .. }, _)
    );
    if !is_welcome {
        eprintln!("with room for {spare}: {answer:?}");
    }
    is_welcome
}

#[test]
fn a_subscriber_that_comes_while_the_publisher_lacks_descriptors_gets_its_link_when_there_is_room()
{
    // Two for the lifeline in the `Hello`, one for the segment, two for the wake channel.
    for spare in 0..=6 {
        in_a_forked_child(|| {
            let scratch = Scratch::new();
            let _publisher = publisher(&scratch, LONG);
            is_welcome_when_there_is_room(&scratch, &hello(), spare)
        });
    }
}

#[test]
fn a_client_that_comes_while_the_server_lacks_descriptors_is_admitted_when_there_is_room() {
    // A client that expects no certain incarnation.
    let hello = Message::Hello {
        generation: [7; 16],
        device: None,
        kind: Kind::Pool,
        body: vec![0],
    };
    for spare in 0..=4 {
        in_a_forked_child(|| {
            let scratch = Scratch::new();
            let pool = Pool::builder("a")
                .domain(&scratch.domain)
                .device(&Device::host());
            let _pool = pool.build().unwrap();
            is_welcome_when_there_is_room(&scratch, &hello, spare)
        });
    }
}

#[test]
fn a_subscriber_learns_of_a_shortage_that_lasts_for_the_whole_handshake() {
    in_a_forked_child(|| {
        let scratch = Scratch::new();
        let publisher = publisher(&scratch, Duration::from_secs(1));
        let mut refused = None;
        // A connection may be too late before its `Hello` is read.
        eventually("one is refused", || {
            raise_descriptor_limit();
            let (socket, _writers) = send_hello(&scratch, &hello(), 2);
            if let Received::Message(Message::Refused { denied, text }, _) = hear(&socket) {
                refused = Some((denied, text));
            }
            refused.is_some()
        });
        raise_descriptor_limit();
        let (denied, text) = refused.unwrap();
        !denied && text.contains("no file descriptor left") && publisher.subscribers().is_empty()
    });
}

#[test]
fn a_subscriber_that_leaves_during_a_shortage_leaves_nothing_behind() {
    in_a_forked_child(|| {
        let scratch = Scratch::new();
        let publisher = publisher(&scratch, LONG);
        let (socket, writers) = send_hello(&scratch, &hello(), 2);
        drop((socket, writers));
        raise_descriptor_limit();
        let mut subscriber = scratch.subscriber();
        super::stage::assert_delivers(&publisher, &mut subscriber, b"to another one");
        eventually("it is gone", || publisher.subscribers().len() == 1);
        true
    });
}
