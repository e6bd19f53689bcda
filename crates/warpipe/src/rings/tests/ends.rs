//! Ends of rings: a consumer with a lifeline that the test holds, and drivers that hold threads up.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::pipe::{PipeFlags, pipe_with};
use warpipe_testkit::eventually;

use super::{LIMIT, Place, side};
use crate::backend::testing::{Counting, Holding, Hook, Wrapped};
use crate::backend::{DeviceId, DeviceKind};
use crate::device::Device;
use crate::error::Error;
use crate::fuzzing::packet;
use crate::hostile::{alone, in_a_forked_child, send_raw};
use crate::ipc::message::{self, Message, Received};
use crate::ipc::peer::DeathEvidence;
use crate::ipc::{Kind, RequestHandler, encode};
use crate::memory::region::Region;
use crate::rings::{
    KernelRing, KernelRingOptions, RingEnd, RingMemory, Seat, WordsOffer, allocate, gone_offset,
    layout,
};

/// A consumer that is alive as long as its pipes are open, whatever becomes of this process.
struct Puppet {
    socket: OwnedFd,
    lifeline: Vec<OwnedFd>,
    words: Region,
}

impl Puppet {
    fn open(place: &Place) -> Puppet {
        Puppet::on((place.device.info().id, true), place).unwrap()
    }

    /// One that says that its kernels run there; the ring's refusal.
    fn on((device, runs_beside): Seat, place: &Place) -> std::result::Result<Puppet, String> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let kind = SocketType::SEQPACKET;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
        let address = SocketAddrUnix::new(place.folder.join("ring.sock")).unwrap();
        rustix::net::connect(&socket, &address).unwrap();
        let [(end, end_held), (alarm, alarm_held)] =
            [(); 2].map(|()| pipe_with(PipeFlags::CLOEXEC).unwrap());
        let hello = Message::Hello {
            device: Some(device),
            kind: Kind::KernelRing,
            body: vec![],
        };
        send_raw(&socket, &packet(&hello), &[end.as_fd(), alarm.as_fd()]).unwrap();
        let puppet = Puppet {
            socket,
            lifeline: vec![end_held, alarm_held],
            words: allocate(&place.device, layout::WORDS_BYTES).unwrap(),
        };
        match puppet.hear() {
            Message::SessionOpened { .. } => {}
            Message::Refused { text, .. } => return Err(text),
            other => panic!("{other:?}"),
        }
        let bytes = puppet.words.bytes();
        let offer = Message::MemoryRequest {
            serial: 1,
            body: encode(&WordsOffer { bytes, runs_beside }).unwrap(),
        };
        let words = puppet.words.export().unwrap();
        message::send(puppet.socket.as_fd(), &offer, &[words.as_fd()]).unwrap();
        match puppet.hear() {
            Message::Reply { .. } => Ok(puppet),
            Message::RequestFailed { text, .. } => Err(text),
            other => panic!("{other:?}"),
        }
    }

    fn hear(&self) -> Message {
        message::wait_readable(self.socket.as_fd(), LIMIT);
        match message::receive(self.socket.as_fd(), "ring") {
            Ok(Received::Message(message, _)) => message,
            other => panic!("{other:?}"),
        }
    }
}

fn wrapped<H: Hook + Default + 'static>(place: &mut Place) -> Arc<Wrapped<H>> {
    let wrapped = Wrapped::new(Device::host().backend().clone(), H::default());
    place.device = Device::from_backend(wrapped.clone());
    wrapped
}

/// A driver may hold the control thread up until the very kernel ends that waits for the dead.
#[test]
fn a_proven_death_is_told_as_such_also_while_the_control_thread_is_held_up() {
    let test = "a_proven_death_is_told_as_such_also_while_the_control_thread_is_held_up";
    alone(module_path!(), test, || {
        let place = Place::new();
        let options = KernelRingOptions {
            depth: 1,
            consumers: 2,
            ..place.options()
        };
        let producer = KernelRing::new("ring", options).unwrap();
        let puppet = Puppet::open(&place);
        let consumer = place.open().unwrap();
        producer.wait_for_consumers(LIMIT).unwrap();
        let RingMemory::Producer(memory) = &producer.held.memory else {
            unreachable!("it was built");
        };
        let server_core = memory.server_core();
        let client = server_core.client(1).unwrap();

        let mut other = Place::new();
        let driver = wrapped::<Holding>(&mut other);
        let _held_up = KernelRing::new("ring", other.options()).unwrap();
        driver.hook().hold("allocate");
        other.device = Device::host();
        thread::scope(|scope| {
            let opening = scope.spawn(|| other.open());
            driver.hook().wait_for(1);

            drop(puppet.lifeline);
            let process = &client.process;
            assert!(eventually(LIMIT, || process.shows(DeathEvidence::Proven)));
            // As the control thread does on its way to the proof.
            memory.ring_server.0.on_orphaned(&server_core, &client);
            let gone = || producer.page.at::<AtomicU64>(gone_offset(0)).load(SeqCst);
            assert_ne!(gone(), (RingEnd::Orphaned as u64), "it left no orphan");
            assert!(eventually(LIMIT, || gone() == (RingEnd::Died as u64)));
            driver.hook().unblock();
            opening.join().unwrap().unwrap();
        });

        // The producer goes on with the consumer that lives.
        let ((writer, _writing), (reader, _reading)) = (side(&producer), side(&consumer));
        for item in 0..3 {
            writer.wait(item).unwrap();
            writer.pass(item);
            reader.wait(item).unwrap();
            reader.pass(item);
        }
    });
}

#[test]
fn a_suspect_consumer_of_a_started_ring_has_not_ended() {
    let place = Place::new();
    let producer = KernelRing::new("ring", place.options()).unwrap();
    let mut puppet = Puppet::open(&place);
    producer.wait_for_consumers(LIMIT).unwrap();
    let alarm = puppet.lifeline.pop();
    drop((alarm, puppet.socket));
    let RingMemory::Producer(memory) = &producer.held.memory else {
        unreachable!("it was built");
    };
    let server_core = memory.server_core();
    let client = server_core.client(1).unwrap();
    let process = &client.process;
    assert!(eventually(LIMIT, || process.shows(DeathEvidence::Suspect)));
    assert!(memory.ring_server.0.on_suspect(&server_core, &client));
    let gone = producer.page.at::<AtomicU64>(gone_offset(0));
    assert_eq!(gone.load(SeqCst), 0, "its kernels may still read the slot");
    drop(puppet.lifeline);
    let is_dead = eventually(LIMIT, || gone.load(SeqCst) == (RingEnd::Died as u64));
    assert!(is_dead);
}

/// Its kernels may run, and the driver may wait for them.
#[test]
fn a_ring_that_takes_no_consumer_refuses_one_without_a_call_of_the_driver() {
    let mut place = Place::new();
    let driver = wrapped::<Counting>(&mut place);
    let producer = KernelRing::new("ring", place.options()).unwrap();
    place.device = Device::host();
    let consumer = place.open().unwrap();
    let refused = |why: &str| {
        let before = driver.hook().calls();
        match place.open() {
            Err(Error::Refused {
                denied: false,
                text,
                ..
            }) => assert!(text.contains(why), "{text}"),
            other => panic!("{other:?}"),
        }
        assert_eq!(driver.hook().calls(), before);
    };
    refused("has its 1 consumers");
    producer.wait_for_consumers(LIMIT).unwrap();
    refused("has started");
    drop(consumer);
}

#[test]
fn a_place_is_free_again_although_the_driver_holds_its_memory() {
    let test = "a_place_is_free_again_although_the_driver_holds_its_memory";
    alone(module_path!(), test, || {
        let mut place = Place::new();
        let driver = wrapped::<Holding>(&mut place);
        let producer = KernelRing::new("ring", place.options()).unwrap();
        place.device = Device::host();
        let first = Puppet::open(&place);
        driver.hook().hold("release");
        drop(first);
        driver.hook().wait_for(1);
        let second = place.open().unwrap();
        producer.wait_for_consumers(LIMIT).unwrap();
        driver.hook().unblock();
        drop(second);
    });
}

#[test]
fn a_ring_that_is_dropped_right_before_the_end_of_its_process_has_closed() {
    let place = Place::new();
    let producer = KernelRing::new(
        "ring",
        KernelRingOptions {
            depth: 1,
            ..place.options()
        },
    )
    .unwrap();
    let (writer, _writing) = thread::scope(|scope| {
        let published = scope.spawn(|| {
            producer.wait_for_consumers(LIMIT).unwrap();
            let (writer, stream) = side(&producer);
            writer.wait(0).unwrap();
            writer.pass(0);
            (writer, stream)
        });
        in_a_forked_child(|| {
            let consumer = place.open().unwrap();
            let (reader, _stream) = side(&consumer);
            let came = reader.wait(0);
            drop(consumer);
            came.is_ok()
        });
        published.join().unwrap()
    });
    assert_eq!(writer.wait(1), Err(RingEnd::Closed));
}

#[test]
fn consumers_of_two_processes_on_one_gpu_in_time_slices_are_refused_unless_that_is_allowed() {
    let [gpu, other] = [1, 2].map(|uuid| DeviceId {
        kind: DeviceKind::Cuda,
        uuid: [uuid; 16],
    });
    let place = Place::new();
    let options = KernelRingOptions {
        consumers: 3,
        ..place.options()
    };
    let producer = KernelRing::new("ring", options.clone()).unwrap();
    let _first = Puppet::on((gpu, false), &place).unwrap();
    let _of_this_process = Puppet::on((gpu, false), &place).unwrap();
    in_a_forked_child(|| {
        let refused = Puppet::on((gpu, true), &place).err();
        let on_another = || eventually(LIMIT, || Puppet::on((other, false), &place).is_ok());
        refused.is_some_and(|text| text.contains("MPS") && text.ends_with("time slices"))
            && on_another()
    });
    drop(producer);

    let options = KernelRingOptions {
        allow_time_slices: true,
        ..options
    };
    let name_is_free = || KernelRing::new("ring", options.clone()).ok();
    let mut producer = None;
    assert!(eventually(LIMIT, || {
        producer = name_is_free();
        producer.is_some()
    }));
    let _first = Puppet::on((gpu, false), &place).unwrap();
    in_a_forked_child(|| Puppet::on((gpu, false), &place).is_ok());
}

#[test]
fn an_opener_that_waits_goes_on_with_the_next_producer_when_one_closes_during_the_attachment() {
    let mut place = Place::new();
    let first = KernelRing::new("ring", place.options()).unwrap();
    let driver = wrapped::<Holding>(&mut place);
    let device = std::mem::replace(&mut place.device, Device::host());
    // The consumer has its answer by then, and has not brought its words.
    driver.hook().hold("import");
    thread::scope(|scope| {
        let opening = scope.spawn(|| KernelRing::open("ring", place.domain.on(&device), LIMIT));
        driver.hook().wait_for(1);
        drop(first);
        let next = KernelRing::new("ring", place.options()).unwrap();
        driver.hook().unblock();
        let consumer = opening.join().unwrap().unwrap();
        next.wait_for_consumers(LIMIT).unwrap();
        consumer.check().unwrap();
    });
}
