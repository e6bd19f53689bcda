//! A publisher whose process lacks descriptors for a new link: the subscriber waits, and gets the
//! link when there is room, or the reason when the time for the handshake is over.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::descriptors::{leave_descriptors, raise_descriptor_limit, settled_descriptors};
use super::publisher_handshake::hello;
use super::stage::{LONG, Scratch, eventually, hear, in_a_forked_child, packet, send_raw};
use crate::Publisher;
use crate::ipc::message::{self, Message, Received};
use crate::runtime::reactor::{EventSource, Next, Reactor};

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

/// Says `Hello` to a publisher that has room for `spare` descriptors then, those of the `Hello`
/// among them. Returns the connection, and the other ends of the descriptors.
fn say_hello(scratch: &Scratch, spare: usize) -> (OwnedFd, [OwnedFd; 2]) {
    let socket = scratch.connection();
    let [(end, end_writer), (alarm, alarm_writer)] =
        [(); 2].map(|()| rustix::pipe::pipe().unwrap());
    // The connection has been accepted, and the process opened.
    settled_descriptors();
    leave_descriptors(spare);
    // Fails where the connection has been too late.
    let _ = send_raw(&socket, &packet(&hello()), &[end.as_fd(), alarm.as_fd()]);
    (socket, [end_writer, alarm_writer])
}

fn publisher(scratch: &Scratch, timeout: Duration) -> Publisher {
    scratch.publisher(|it| it.handshake_timeout(timeout))
}

/// Whether a subscriber that came during a shortage gets its link when that is over.
fn is_welcome_when_there_is_room(spare: usize) -> bool {
    let scratch = Scratch::new();
    let publisher = publisher(&scratch, LONG);
    let clock = Arc::new(Clock(AtomicU32::new(0)));
    let me: Weak<dyn EventSource> = Arc::downgrade(&clock) as Weak<dyn EventSource>;
    Reactor::of_process().unwrap().register_ticks(me);
    let (socket, _writers) = say_hello(&scratch, spare);
    let ticks = clock.0.load(SeqCst);
    eventually("it has been tried, and tried again", || {
        message::wait_readable(socket.as_fd(), Duration::ZERO) || clock.0.load(SeqCst) >= ticks + 3
    });
    raise_descriptor_limit();
    let answer = hear(&socket);
    let is_welcome = matches!(answer, Received::Message(Message::Welcome { .. }, _));
    if !is_welcome {
        eprintln!("with room for {spare}: {answer:?}");
    }
    drop(publisher);
    is_welcome
}

#[test]
fn a_subscriber_that_comes_while_the_publisher_lacks_descriptors_gets_its_link_when_there_is_room()
{
    // Two for the lifeline in the `Hello`, one for the segment, two for the wake channel.
    for spare in 0..=6 {
        in_a_forked_child(|| is_welcome_when_there_is_room(spare));
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
            let (socket, _writers) = say_hello(&scratch, 2);
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
        let (socket, writers) = say_hello(&scratch, 2);
        drop((socket, writers));
        raise_descriptor_limit();
        let mut subscriber = scratch.subscriber();
        super::stage::assert_delivers(&publisher, &mut subscriber, b"to another one");
        eventually("it is gone", || publisher.subscribers().len() == 1);
        true
    });
}
