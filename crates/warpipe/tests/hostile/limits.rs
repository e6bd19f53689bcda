//! Descriptors that run out: a typed error, no leak, and later success.

use std::time::Duration;

use rustix::process::Resource;

use super::descriptors::{
    descriptors, is_descriptor_limit, leave_descriptors, leave_no_descriptor, leave_the_reserve,
    raise_descriptor_limit, set_soft, settled_descriptors,
};
use super::stage::{
    LONG, Scratch, TestProcess, alone, assert_delivers, domain_of_test, eventually, next_order,
    role, stream,
};
use crate::runtime::reactor::Reactor;
use crate::runtime::reserve::RESERVE_MAX;
use crate::{
    Device, Error, HandshakeFault, Layout, PeerState, Publisher, PublisherOptions, Queue,
    StateFault, Subscriber, SubscriberOptions, Worker,
};

#[test]
fn a_publisher_that_finds_no_descriptor_leaves_nothing_and_can_be_built_later() {
    alone(
        module_path!(),
        "a_publisher_that_finds_no_descriptor_leaves_nothing_and_can_be_built_later",
        || {
            let scratch = Scratch::new();
            let stream = stream();
            let build = || {
                let options = PublisherOptions {
                    history: 1,
                    ..scratch.domain.on(&Device::host())
                };
                let publisher = Publisher::new("a", options)?;
                publisher
                    .send_bytes(&stream, b"the first region, too")
                    .map(|_| publisher)
            };
            drop(build().unwrap());
            settled_descriptors();
            let mut failures = 0;
            for spare in 0..20 {
                let before = leave_descriptors(spare);
                let result = build().map(drop);
                raise_descriptor_limit();
                let Err(error) = result else { break };
                assert!(is_descriptor_limit(&error), "{spare} spare: {error}");
                assert_eq!(
                    std::fs::read_dir(&scratch.path).unwrap().count(),
                    0,
                    "{spare} spare"
                );
                eventually("nothing is left", || descriptors() <= before);
                failures += 1;
            }
            assert!((3..20).contains(&failures), "{failures} failures");
            assert_delivers(
                &build().unwrap(),
                &mut scratch.subscriber(),
                b"the first region, too",
            );
        },
    );
}

#[test]
fn a_reactor_that_finds_no_descriptor_leaves_none_in_the_reserve() {
    let test = "a_reactor_that_finds_no_descriptor_leaves_none_in_the_reserve";
    alone(module_path!(), test, || {
        for spare in 0..RESERVE_MAX {
            let before = leave_descriptors(spare);
            let result = Reactor::of_process().map(drop);
            raise_descriptor_limit();
            let error = result.unwrap_err();
            assert!(is_descriptor_limit(&error), "{spare} spare: {error}");
            assert_eq!(descriptors(), before, "{spare} spare");
        }
        Reactor::of_process().unwrap();
    });
}

/// A publisher in another process, which follows commands line by line.
struct Host(TestProcess);

impl Host {
    fn start(test: &str, scratch: &Scratch) -> Host {
        let mut process = TestProcess::start(module_path!(), test, "host", scratch);
        process.hear("ready");
        Host(process)
    }

    fn say(&mut self, order: &str) {
        self.0.order(order);
        self.0.hear("done");
    }
}

/// The other side of [`Host`].
fn serve() {
    let domain = domain_of_test();
    let mut publisher = Some(Publisher::new("a", domain.on(&Device::host())).unwrap());
    let stream = stream();
    println!("ready");
    while let Some(line) = next_order() {
        let (order, number) = line.split_once(' ').unwrap();
        let number: usize = number.parse().unwrap();
        match order {
            "leave" => assert!(leave_descriptors(number) > 0),
            "raise" => raise_descriptor_limit(),
            "leave_all" => drop(publisher.take()),
            "send" => assert!(
                publisher
                    .as_ref()
                    .unwrap()
                    .send_bytes(&stream, &vec![number as u8; number])
                    .is_ok()
            ),
            other => panic!("{other}"),
        }
        println!("done");
    }
}

fn subscribe(scratch: &Scratch) -> crate::Result<Subscriber> {
    Subscriber::open(
        "a",
        SubscriberOptions {
            handshake_timeout: Duration::from_millis(300),
            ..scratch.domain.on(&Device::host())
        },
        Duration::ZERO,
    )
}

#[test]
fn a_publisher_without_descriptors_refuses_new_subscribers_and_serves_the_others() {
    let test = "a_publisher_without_descriptors_refuses_new_subscribers_and_serves_the_others";
    if role().as_deref() == Some("host") {
        return serve();
    }
    let scratch = Scratch::new();
    let (mut host, stream) = (Host::start(test, &scratch), stream());
    host.say("send 1");
    let mut good = subscribe(&scratch).unwrap();
    let mut failures = 0;
    for spare in 0..12 {
        host.say(&format!("leave {spare}"));
        let result = subscribe(&scratch);
        host.say("send 100");
        assert_eq!(
            good.receive(&stream, LONG).unwrap().to_vec(LONG).unwrap(),
            [100; 100],
            "{spare} spare"
        );
        host.say("raise 0");
        match result {
            Ok(_) => break,
            Err(Error::Handshake {
                fault: HandshakeFault::NoRoom(why),
                ..
            }) => assert!(why.contains("descriptor"), "{spare} spare: {why}"),
            Err(error) => panic!("{spare} spare: {error}"),
        }
        failures += 1;
        // The raised limit serves the next one, at once or as soon as the backlog has been checked.
        eventually("a newcomer is let in again", || subscribe(&scratch).is_ok());
    }
    assert!((1..12).contains(&failures), "{failures} failures");
}

#[test]
fn a_subscriber_that_finds_no_descriptor_leaves_nothing_and_can_be_built_later() {
    let test = "a_subscriber_that_finds_no_descriptor_leaves_nothing_and_can_be_built_later";
    if role().as_deref() == Some("host") {
        return serve();
    }
    alone(module_path!(), test, || {
        let scratch = Scratch::new();
        let mut host = Host::start(test, &scratch);
        host.say("send 1");
        drop(subscribe(&scratch).unwrap());
        settled_descriptors();
        let mut failures = 0;
        for spare in 0..20 {
            let before = leave_descriptors(spare);
            let result = subscribe(&scratch).map(drop);
            raise_descriptor_limit();
            let Err(error) = result else { break };
            assert!(is_descriptor_limit(&error), "{spare} spare: {error}");
            eventually("nothing is left", || descriptors() <= before);
            failures += 1;
        }
        assert!((3..20).contains(&failures), "{failures} failures");
        let (mut good, stream) = (subscribe(&scratch).unwrap(), stream());
        host.say("send 7");
        assert_eq!(
            good.receive(&stream, LONG).unwrap().to_vec(LONG).unwrap(),
            [7; 7]
        );
    });
}

#[test]
fn a_subscriber_without_descriptors_gets_samples_in_new_memory_by_its_reserve() {
    let test = "a_subscriber_without_descriptors_gets_samples_in_new_memory_by_its_reserve";
    if role().as_deref() == Some("host") {
        return serve();
    }
    alone(module_path!(), test, || {
        let scratch = Scratch::new();
        let mut host = Host::start(test, &scratch);
        let (mut subscriber, stream) = (subscribe(&scratch).unwrap(), stream());
        host.say("send 1");
        drop(subscriber.receive(&stream, LONG).unwrap());
        leave_the_reserve();
        // Each in memory of its own, announced after the previous one.
        for bytes in [4_000_000, 40_000_000] {
            host.say(&format!("send {bytes}"));
            let sample = subscriber.receive(&stream, LONG).unwrap();
            assert_eq!(sample.to_vec(LONG).unwrap().len(), bytes);
        }
    });
}

#[test]
fn a_subscriber_without_even_a_reserve_is_told_so_and_can_attach_again() {
    let test = "a_subscriber_without_even_a_reserve_is_told_so_and_can_attach_again";
    if role().as_deref() == Some("host") {
        return serve();
    }
    alone(module_path!(), test, || {
        let scratch = Scratch::new();
        let mut host = Host::start(test, &scratch);
        let (mut subscriber, stream) = (subscribe(&scratch).unwrap(), stream());
        host.say("send 1");
        drop(subscriber.receive(&stream, LONG).unwrap());
        leave_no_descriptor();
        host.say("send 4000000");
        let told = subscriber.receive(&stream, LONG).unwrap_err();
        assert!(is_descriptor_limit(&told), "{told}");
        let over = subscriber.receive(&stream, LONG).unwrap_err();
        assert!(
            matches!(&over, Error::State(StateFault::LinkClosed { reason, .. }) if reason.contains("descriptor")),
            "{over}"
        );
        raise_descriptor_limit();
        let mut again = subscribe(&scratch).unwrap();
        host.say("send 100");
        assert_eq!(
            again.receive(&stream, LONG).unwrap().to_vec(LONG).unwrap(),
            [100; 100]
        );
    });
}

/// A publisher ends while its subscriber has no descriptor for the memory of its last sample.
fn ends_while_descriptors_lack(test: &str, is_graceful: bool) {
    if role().as_deref() == Some("host") {
        return serve();
    }
    alone(module_path!(), test, || {
        let scratch = Scratch::new();
        let mut host = Host::start(test, &scratch);
        let (mut subscriber, stream) = (subscribe(&scratch).unwrap(), stream());
        host.say("send 1");
        drop(subscriber.receive(&stream, LONG).unwrap());
        leave_the_reserve();
        host.say("send 4000000");
        if is_graceful {
            host.say("leave_all 0");
        }
        // By now it is proven dead, whatever could be read.
        host.0.kill();
        eventually("it is dead", || {
            subscriber.publisher().map(|it| it.state) == Some(PeerState::Dead)
        });
        assert_eq!(
            subscriber
                .receive(&stream, LONG)
                .unwrap()
                .to_vec(LONG)
                .unwrap()
                .len(),
            4_000_000
        );
        let end = subscriber.receive(&stream, LONG).unwrap_err();
        assert!(
            matches!(end, Error::PeerGone { graceful, .. } if graceful == is_graceful),
            "{end}"
        );
    });
}

#[test]
fn samples_sent_before_a_publishers_death_are_received_by_the_reserve() {
    let test = "samples_sent_before_a_publishers_death_are_received_by_the_reserve";
    ends_while_descriptors_lack(test, false);
}

#[test]
fn a_close_behind_a_region_is_received_by_the_reserve() {
    ends_while_descriptors_lack("a_close_behind_a_region_is_received_by_the_reserve", true);
}

#[test]
fn a_region_that_finds_no_room_in_the_subscriber_closes_its_link_with_the_reason() {
    let test = "a_region_that_finds_no_room_in_the_subscriber_closes_its_link_with_the_reason";
    if role().as_deref() == Some("host") {
        return serve();
    }
    alone(module_path!(), test, || {
        let scratch = Scratch::new();
        let mut host = Host::start(test, &scratch);
        let (mut subscriber, stream) = (subscribe(&scratch).unwrap(), stream());
        host.say("send 1");
        drop(subscriber.receive(&stream, LONG).unwrap());
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        let used = pages.split(' ').next().unwrap().parse::<u64>().unwrap() * 4096;
        set_soft(Resource::As, Some(used + (48 << 20)));
        host.say("send 100000000");
        let told = subscriber.receive(&stream, LONG).unwrap_err();
        assert!(matches!(told, Error::Os { call: "mmap", .. }), "{told}");
        set_soft(Resource::As, None);
        let mut again = subscribe(&scratch).unwrap();
        host.say("send 100");
        assert_eq!(
            again.receive(&stream, LONG).unwrap().to_vec(LONG).unwrap(),
            [100; 100]
        );
    });
}

#[test]
fn an_owner_without_descriptors_loses_no_job_that_was_done() {
    let test = "an_owner_without_descriptors_loses_no_job_that_was_done";
    let device = Device::host();
    if role().as_deref() == Some("worker") {
        let domain = domain_of_test();
        let mut worker = crate::Worker::open("jobs", domain.on(&device), Duration::ZERO).unwrap();
        let stream = stream();
        let complete = |worker: &mut crate::Worker, bytes| {
            let lease = worker.lease(&stream, LONG).unwrap();
            println!("leased");
            next_order().unwrap();
            let output = lease.output(&Layout::bytes_only(bytes).unwrap()).unwrap();
            lease.complete(output, &stream).unwrap();
            println!("answered");
        };
        [10, 4_000_000, 10]
            .into_iter()
            .for_each(|bytes| complete(&mut worker, bytes));
        let _ = next_order();
        return;
    }
    alone(module_path!(), test, || {
        let (scratch, stream) = (Scratch::new(), stream());
        let options = crate::QueueOptions {
            max_attempts: 1,
            ..scratch.domain.on(&device)
        };
        let queue = crate::Queue::new("jobs", options).unwrap();
        let mut worker = TestProcess::start(module_path!(), test, "worker", &scratch);
        for (bytes, is_short) in [(10, false), (4_000_000, true), (10, false)] {
            let job = queue.submit_bytes(b"job", &stream).unwrap();
            worker.hear("leased");
            if is_short {
                leave_the_reserve();
            }
            worker.order("answer");
            worker.hear("answered");
            assert_eq!(job.wait(&stream, LONG).unwrap().layout().bytes(), bytes);
            raise_descriptor_limit();
        }
    });
}

/// Subscribers in processes of their own.
#[test]
fn a_subscriber_costs_its_publisher_six_descriptors() {
    let test = "a_subscriber_costs_its_publisher_six_descriptors";
    if role().as_deref() == Some("importer") {
        let domain = domain_of_test();
        let _subscriber =
            Subscriber::open("a", domain.on(&Device::host()), Duration::ZERO).unwrap();
        println!("attached");
        let _ = next_order();
        return;
    }
    alone(module_path!(), test, || {
        let scratch = Scratch::new();
        let _publisher = scratch.publisher(|it| it);
        let start = || {
            let mut process = TestProcess::start(module_path!(), test, "importer", &scratch);
            process.hear("attached");
            process
        };
        let first = start();
        let before = settled_descriptors();
        let others = [start(), start(), start()];
        // And two pipes of the test's.
        assert!(
            settled_descriptors() - before <= others.len() * (6 + 2),
            "{}",
            settled_descriptors() - before
        );
        drop((first, others));
    });
}

#[test]
fn a_process_takes_its_own_share_of_the_links_and_leaves_the_rest() {
    let test = "a_process_takes_its_own_share_of_the_links_and_leaves_the_rest";
    if role().as_deref() == Some("many") {
        let domain = domain_of_test();
        let subscribe = || Subscriber::open("a", domain.on(&Device::host()), Duration::ZERO);
        let subscribers: Vec<_> = (0..64).map(|_| subscribe().unwrap()).collect();
        let fault = match subscribe() {
            Err(Error::Handshake { fault, .. }) => fault,
            other => panic!("{other:?}"),
        };
        println!("refused {fault:?}");
        let _ = next_order();
        drop(subscribers);
        return;
    }
    let scratch = Scratch::new();
    let publisher = scratch.publisher(|it| it);
    let start = || {
        let mut process = TestProcess::start(module_path!(), test, "many", &scratch);
        let refused = process.hear("refused ");
        (process, refused)
    };
    let crowds = [start(), start()];
    assert!(
        crowds
            .iter()
            .all(|(_, refused)| refused.contains("Full { limit: Process, max: 64 }")),
        "{}",
        crowds[0].1
    );
    assert_eq!(publisher.subscribers().len(), 128);
    drop(crowds);
    eventually("a dead process's links are given back", || {
        publisher.subscribers().is_empty()
    });
    drop(start());
}

#[test]
fn opens_that_fail_for_want_of_descriptors_leave_their_owner_nothing_to_keep() {
    let test = "opens_that_fail_for_want_of_descriptors_leave_their_owner_nothing_to_keep";
    if role().as_deref() == Some("client") {
        let domain = domain_of_test();
        let device = Device::host();
        let open = |name: &str| match name {
            "pool" => crate::PoolClient::open(name, domain.on(&device), Duration::ZERO).map(drop),
            "timeline" => crate::Timeline::open(name, domain.on(&device), Duration::ZERO).map(drop),
            _ => crate::Semaphore::open(name, domain.on(&device), Duration::ZERO).map(drop),
        };
        let names = ["pool", "timeline", "turns"];
        names.iter().for_each(|name| open(name).unwrap());
        settled_descriptors();
        for name in names {
            // However far it gets before it has none left.
            for spare in 1..20 {
                raise_descriptor_limit();
                leave_descriptors(spare);
                let failed = |_: &usize| {
                    open(name)
                        .inspect_err(|error| assert!(is_descriptor_limit(error)))
                        .is_err()
                };
                if (0..100).take_while(failed).count() == 0 {
                    break;
                }
                assert!(spare < 19, "{name} cannot be opened");
            }
            raise_descriptor_limit();
        }
        println!("no descriptors left");
        let _ = next_order();
        return;
    }
    alone(module_path!(), test, || {
        let scratch = Scratch::new();
        let device = Device::host();
        let _pool = crate::Pool::new("pool", scratch.domain.on(&device)).unwrap();
        let _timeline = crate::Timeline::new("timeline", scratch.domain.on(&device)).unwrap();
        let _turns = crate::Semaphore::new("turns", 1, scratch.domain.on(&device)).unwrap();
        let before = settled_descriptors();
        let mut client = TestProcess::start(module_path!(), test, "client", &scratch);
        client.hear("no descriptors left");
        // The client is alive, and its two pipes are open.
        eventually("nothing of it is kept", || descriptors() <= before + 2);
        drop(client);
    });
}

#[test]
fn a_reply_without_a_free_descriptor_ends_its_session_alone_and_its_block_is_returned() {
    let test = "a_reply_without_a_free_descriptor_ends_its_session_alone_and_its_block_is_returned";
    let device = Device::host();
    if role().as_deref() == Some("owner") {
        let domain = domain_of_test();
        let pool = crate::Pool::new("pool", domain.on(&device)).unwrap();
        println!("lent {}", pool.stats().lent_bytes);
        while next_order().is_some() {
            println!("lent {}", pool.stats().lent_bytes);
        }
        return;
    }
    alone(module_path!(), test, || {
        let scratch = Scratch::new();
        let mut owner = TestProcess::start(module_path!(), test, "owner", &scratch);
        assert_eq!(owner.hear("lent "), "0");
        let open =
            || crate::PoolClient::open("pool", scratch.domain.on(&device), Duration::ZERO).unwrap();
        let client = open();
        let held = client.allocate(4096, Duration::ZERO).unwrap();
        leave_the_reserve();
        // The descriptor of its region, once more.
        client.session().ipc().request(&[0, 0, 0], LONG).unwrap();
        raise_descriptor_limit();
        leave_no_descriptor();
        // The control: a block of a region that is mapped comes without a descriptor.
        drop(client.allocate(4096, Duration::ZERO).unwrap());
        let error = client.allocate(4 << 20, Duration::ZERO).map(drop);
        let error = error.unwrap_err();
        raise_descriptor_limit();
        assert!(is_descriptor_limit(&error), "{error}");
        let over = client.allocate(4096, Duration::ZERO).map(drop).unwrap_err();
        assert!(is_descriptor_limit(&over), "{over}");
        let again = open();
        drop(again.allocate(4096, Duration::ZERO).unwrap());
        drop((held, client));
        eventually("everything is given back", || {
            owner.order("count");
            owner.hear("lent ") == "0"
        });
    });
}

#[test]
fn a_worker_takes_four_descriptors_and_two_of_its_queue() {
    alone(
        module_path!(),
        "a_worker_takes_four_descriptors_and_two_of_its_queue",
        || {
            let (scratch, device) = (Scratch::new(), Device::host());
            let queue = Queue::new("q", scratch.domain.on(&device)).unwrap();
            let worker = || Worker::open("q", scratch.domain.on(&device), Duration::ZERO).unwrap();
            // The first one brings the lifeline of this process.
            let first = worker();
            queue.wait_for_workers(1, LONG).unwrap();
            let before = settled_descriptors();
            let others = [worker(), worker()];
            queue.wait_for_workers(3, LONG).unwrap();
            assert_eq!(settled_descriptors() - before, 2 * (4 + 2));
            drop((first, others));
        },
    );
}
