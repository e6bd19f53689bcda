//! Regression tests for lost wake-ups of a subscriber that follows one publisher after the other.

use std::path::PathBuf;

use super::*;
use crate::channel::Publisher;
use crate::tensor::Layout;

const LONG: Duration = Duration::from_secs(20);

struct Place {
    folder: PathBuf,
    domain: Domain,
    device: Device,
}

impl Place {
    fn new(title: &str) -> Place {
        let folder = std::env::temp_dir().join(format!("warpipe-follow-{title}-{}", std::process::id()));
        Place { domain: Domain::at(&folder).unwrap(), folder, device: Device::host() }
    }

    /// One that has its memory already: the announcement of a region rings, too.
    fn publisher(&self) -> Publisher {
        let publisher = Publisher::builder("camera").domain(&self.domain).device(&self.device).build().unwrap();
        drop(publisher.loan(&Layout::bytes_only(8).unwrap()).unwrap());
        publisher
    }

    fn subscriber(&self) -> Subscriber {
        let builder = Subscriber::builder("camera").domain(&self.domain).device(&self.device);
        builder.reconnect(true).timeout(LONG).build().unwrap()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Polls as an event loop does: looks until there is nothing, then sleeps on the descriptor.
fn receive_polled(subscriber: &mut Subscriber, stream: &Stream) -> Sample {
    let start = Instant::now();
    loop {
        if let Some(sample) = subscriber.try_receive(stream).unwrap() {
            return sample;
        }
        assert!(start.elapsed() < LONG && wait_readable(subscriber.readable.as_fd(), LONG), "nobody rings");
    }
}

#[test]
fn a_subscriber_that_sleeps_is_woken_by_the_first_sample_of_its_next_publisher() {
    const ROUNDS: u8 = 3;
    let place = Place::new("sleeping");
    let stream = place.device.stream().unwrap();
    let mut publisher = Some(place.publisher());
    let (mut subscriber, receiving, (tell, told)) = (place.subscriber(), stream.clone(), std::sync::mpsc::channel());
    // Longer than the test waits: a receive looks once more when its time is up.
    std::thread::spawn(move || {
        for _ in 0..ROUNDS {
            let sample = subscriber.receive_timeout(&receiving, Duration::from_secs(3600)).unwrap();
            tell.send(sample.to_vec(LONG).unwrap()).unwrap();
        }
    });
    for round in 0..ROUNDS {
        drop(publisher.take());
        let publisher = publisher.insert(place.publisher());
        publisher.wait_for_subscribers(1, LONG).unwrap();
        publisher.send_bytes(&stream, &[round]).unwrap();
        assert_eq!(told.recv_timeout(LONG).expect("a sample"), [round]);
    }
}

#[test]
fn a_polled_subscriber_is_rung_by_a_publisher_that_came_while_it_looked() {
    let place = Place::new("polled");
    let stream = place.device.stream().unwrap();
    let first = place.publisher();
    let mut subscriber = place.subscriber();
    let _ = subscriber.as_fd();
    // Gone, and followed by another, before the next look.
    drop(first);
    let next = place.publisher();
    let received = std::thread::scope(|scope| {
        let receiving = scope.spawn(|| receive_polled(&mut subscriber, &stream));
        next.wait_for_subscribers(1, LONG).unwrap();
        // The look that attached is over: the descriptor alone can tell of what comes now.
        next.send_bytes(&stream, b"hello").unwrap();
        receiving.join().unwrap()
    });
    assert_eq!(received.to_vec(LONG).unwrap(), b"hello");
}

#[test]
fn a_polled_subscriber_tries_a_name_again_that_closed_on_it() {
    use rustix::net::{SocketAddrUnix, SocketFlags, SocketType, accept_with};
    let place = Place::new("closing");
    let stream = place.device.stream().unwrap();
    let first = place.publisher();
    let mut subscriber = place.subscriber();
    let _ = subscriber.as_fd();
    drop(first);
    // Listens there, and closes each connection unanswered, as a publisher on its way out does.
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let listener = rustix::net::socket_with(rustix::net::AddressFamily::UNIX, SocketType::SEQPACKET, flags, None);
    let listener = listener.unwrap();
    let path = place.domain.path().join("camera.sock");
    rustix::net::bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    rustix::net::listen(&listener, 8).unwrap();
    std::thread::scope(|scope| {
        let polling = scope.spawn(|| receive_polled(&mut subscriber, &stream));
        for _ in 0..3 {
            assert!(wait_readable(listener.as_fd(), LONG), "it does not come again");
            drop(accept_with(&listener, SocketFlags::CLOEXEC).unwrap());
        }
        std::fs::remove_file(&path).unwrap();
        drop(listener);
        let next = place.publisher();
        next.wait_for_subscribers(1, LONG).unwrap();
        next.send_bytes(&stream, b"hello").unwrap();
        assert_eq!(polling.join().unwrap().to_vec(LONG).unwrap(), b"hello");
    });
}
