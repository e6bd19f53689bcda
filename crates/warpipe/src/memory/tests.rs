//! Publishing, tickets and imports, in one process; tests with several processes are in the
//! conformance suite.

use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::arena::Arena;
use super::*;
use crate::backend::testing::{Counting, Failing, Hook, Wrapped};
use crate::backend::{Access, DeviceId, DeviceKind};
use crate::error::{HandleFault, LimitFault};
use crate::{Device, DeviceFault, Domain, Error, Expiry, Kind, PublishOptions, Result};

const WAIT: Duration = Duration::from_secs(10);

struct Stage {
    folder: PathBuf,
    domain: Domain,
    device: Device,
}

impl Stage {
    fn new(title: &str) -> Stage {
        let folder =
            std::env::temp_dir().join(format!("warpipe-shared-{title}-{}", std::process::id()));
        Stage {
            domain: Domain::at(&folder).unwrap(),
            folder,
            device: Device::host(),
        }
    }

    fn publish(&self, name: &str, contents: &[u8]) -> Published {
        let memory = Memory::allocate(&self.device, contents.len() as u64).unwrap();
        memory
            .write(&self.device.stream().unwrap(), 0, contents)
            .unwrap();
        memory.publish(name, self.domain.options()).unwrap()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// The host under another backend: what it opens is not found to be open already.
fn other<H: Hook + 'static>(hook: H) -> (Device, Arc<Wrapped<H>>) {
    let wrapped = Wrapped::new(Device::host().backend().clone(), hook);
    (Device::from_backend(wrapped.clone()), wrapped)
}

fn calls(counting: &Wrapped<Counting>, method: &str) -> u64 {
    counting.hook().calls().get(method).copied().unwrap_or(0)
}

#[test]
fn in_its_own_process_a_ticket_leads_to_the_same_memory() {
    let stage = Stage::new("alias");
    let published = stage.publish("a", b"abc");
    let shared = published
        .ticket(..)
        .unwrap()
        .open(&stage.device, Duration::ZERO)
        .unwrap();
    assert_eq!(shared.ptr(), published.memory().ptr());
    let named = Ticket::to(&stage.domain, "a")
        .unwrap()
        .open(&stage.device, Duration::ZERO)
        .unwrap();
    assert_eq!((named.ptr(), named.bytes()), (shared.ptr(), 3));
    drop(published);
    assert_eq!(
        named.to_vec(WAIT).unwrap(),
        b"abc",
        "it outlives its publication"
    );
}

#[test]
fn a_mapping_is_kept_until_the_stream_that_uses_it_is_past_it() {
    let stage = Stage::new("busy");
    let published = stage.publish("a", b"abc");
    for is_noted in [true, false] {
        let (device, counting) = other(Counting::default());
        let stream = device.stream().unwrap();
        let (go, wait) = mpsc::channel::<()>();
        let shared = published
            .ticket(..)
            .unwrap()
            .open(&device, Duration::ZERO)
            .unwrap();
        if is_noted {
            shared.used_on(&stream);
        }
        stream.call(move || assert!(wait.recv().is_err())).unwrap();
        drop(shared);
        // The control: a stream that nobody named is not waited for.
        let is_early = eventually_within(
            Duration::from_millis(if is_noted { 50 } else { 10_000 }),
            || calls(&counting, "release") == 1,
        );
        assert_eq!(is_early, !is_noted);
        drop(go);
        assert!(eventually(|| calls(&counting, "release") == 1));
    }
}

#[test]
fn a_ticket_distinguishes_a_missing_owner_from_one_that_is_gone() {
    let stage = Stage::new("gone");
    let named = Ticket::to(&stage.domain, "a").unwrap();
    let early = named.open(&stage.device, Duration::ZERO).unwrap_err();
    assert!(
        matches!(
            early,
            Error::NotFound {
                kind: Kind::Memory,
                was_there: false,
                ..
            }
        ),
        "{early}"
    );
    let published = stage.publish("a", b"abc");
    let ticket = published.ticket(..).unwrap();
    drop(published);
    let (device, _counting) = other(Counting::default());
    let gone = ticket.open(&device, WAIT).unwrap_err();
    assert!(
        matches!(
            gone,
            Error::Handle {
                fault: HandleFault::Expired {
                    expiry: Expiry::Gone { died: false },
                    ..
                },
                ..
            }
        ),
        "{gone}"
    );
    let _later = stage.publish("a", b"def");
    let replaced = ticket.open(&device, Duration::ZERO).unwrap_err();
    assert!(
        matches!(
            replaced,
            Error::Handle {
                fault: HandleFault::Expired {
                    expiry: Expiry::Replaced,
                    ..
                },
                ..
            }
        ),
        "{replaced}"
    );
    assert_eq!(
        named
            .open(&device, Duration::ZERO)
            .unwrap()
            .to_vec(WAIT)
            .unwrap(),
        b"def",
        "a name may have a new owner"
    );
}

#[test]
fn a_waiter_for_a_name_gets_memory_that_is_published_later() {
    let stage = Stage::new("later");
    let ticket = Ticket::to(&stage.domain, "a").unwrap();
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| ticket.open(&stage.device, WAIT).unwrap().to_vec(WAIT));
        let _published = stage.publish("a", b"late");
        assert_eq!(waiting.join().unwrap().unwrap(), b"late");
    });
}

#[test]
fn a_limit_below_the_devices_unit_is_refused_at_once() {
    let stage = Stage::new("below-a-unit");
    let unit = Arena::new(&stage.device, u64::MAX).granularity();
    let build = |bytes| {
        [
            crate::Publisher::new(
                "a",
                crate::PublisherOptions {
                    memory_limit: bytes,
                    ..stage.domain.on(&stage.device)
                },
            )
            .map(drop),
            crate::Pool::new(
                "b",
                crate::PoolOptions {
                    memory_limit: bytes,
                    ..stage.domain.on(&stage.device)
                },
            )
            .map(drop),
            crate::Server::new(
                "c",
                crate::ServerOptions {
                    memory_limit: bytes,
                    ..stage.domain.on(&stage.device)
                },
            )
            .map(drop),
            crate::Queue::new(
                "d",
                crate::QueueOptions {
                    memory_limit: bytes,
                    ..stage.domain.on(&stage.device)
                },
            )
            .map(drop),
        ]
    };
    for refused in build(unit - 1) {
        assert!(
            matches!(
                refused,
                Err(Error::Argument {
                    argument: "memory_limit",
                    ..
                })
            ),
            "{refused:?}"
        );
    }
    build(unit).into_iter().for_each(|built| built.unwrap());
}

#[test]
fn ranges_end_inside_or_are_an_error() {
    let stage = Stage::new("range");
    let published = stage.publish("a", b"abcdef");
    let middle = published.ticket(1..=2).unwrap();
    assert_eq!(middle.info().bytes, Some(2));
    let shared = middle.open(&stage.device, Duration::ZERO).unwrap();
    assert_eq!(shared.to_vec(WAIT).unwrap(), b"bc");
    assert_eq!(shared.range(1, None).unwrap().to_vec(WAIT).unwrap(), b"c");
    assert!(matches!(
        shared.range(1, 2),
        Err(Error::Argument { argument: "range", found, allowed }) if found == "1..3" && allowed.starts_with("0..2 of ")
    ));
    assert!(matches!(
        published.ticket(4..=6),
        Err(Error::Argument {
            argument: "range",
            ..
        })
    ));
    assert!(matches!(
        published.ticket(7..),
        Err(Error::Argument {
            argument: "range",
            ..
        })
    ));
    #[expect(clippy::reversed_empty_ranges, reason = "that is what is refused")]
    let reversed = published.ticket(5..2);
    assert!(
        matches!(
            reversed,
            Err(Error::Argument {
                argument: "range",
                ..
            })
        ),
        "{reversed:?}"
    );
    assert!(matches!(
        published.ticket(0..u64::MAX),
        Err(Error::Argument {
            argument: "range",
            ..
        })
    ));
}

#[test]
fn memory_for_reading_is_not_written() {
    let stage = Stage::new("read-only");
    let (device, _counting) = other(Counting::default());
    let stream = device.stream().unwrap();
    let published = stage.publish("a", b"abc");
    let shared = published
        .ticket(..)
        .unwrap()
        .open(&device, Duration::ZERO)
        .unwrap();
    assert!(matches!(
        shared.write(&stream, 0, b"x"),
        Err(Error::Argument { .. })
    ));
    let writable = published
        .memory()
        .publish(
            "b",
            PublishOptions {
                access: Access::ReadWrite,
                ..stage.domain.options()
            },
        )
        .unwrap();
    let shared = writable
        .ticket(..)
        .unwrap()
        .open(&device, Duration::ZERO)
        .unwrap();
    shared.write(&stream, 1, b"x").unwrap();
    assert!(matches!(
        shared.write(&stream, 3, b"x"),
        Err(Error::Argument {
            argument: "range",
            ..
        })
    ));
    stream.synchronize(WAIT).unwrap();
    assert_eq!(published.memory().to_vec(WAIT).unwrap(), b"axc");
}

#[test]
fn a_bare_descriptor_is_imported_with_what_must_be_known_of_it() {
    let device = Device::host();
    let memory = Memory::allocate(&device, 100).unwrap();
    memory.write(&device.stream().unwrap(), 0, b"abc").unwrap();
    let (fd, info) = (memory.export_fd().unwrap(), memory.info());
    drop(memory);
    let shared = Memory::import_fd(&device, &fd, &info, Access::Read).unwrap();
    assert_eq!(&shared.to_vec(WAIT).unwrap()[..4], b"abc\0");
    let short = MemoryInfo {
        mapped_bytes: 2 * info.mapped_bytes,
        ..info
    };
    assert!(matches!(
        Memory::import_fd(&device, &fd, &short, Access::Read),
        Err(Error::Device {
            fault: DeviceFault::NotShareable,
            ..
        })
    ));
    let long = MemoryInfo {
        bytes: info.mapped_bytes + 1,
        ..info
    };
    assert!(matches!(
        Memory::import_fd(&device, &fd, &long, Access::Read),
        Err(Error::Argument {
            argument: "range",
            ..
        })
    ));
    let gpu = DeviceId {
        kind: DeviceKind::Cuda,
        uuid: [1; 16],
    };
    let foreign = MemoryInfo {
        device: gpu,
        ..info
    };
    assert!(matches!(
        Memory::import_fd(&device, &fd, &foreign, Access::Read),
        Err(Error::Device {
            fault: DeviceFault::OutOfReach,
            ..
        })
    ));
    let (pipe, _end) = rustix::pipe::pipe().unwrap();
    assert!(matches!(
        Memory::import_fd(&device, pipe.as_fd(), &info, Access::Read),
        Err(Error::Device {
            fault: DeviceFault::NotShareable,
            ..
        })
    ));
}

/// A device that cannot reach another one's memory.
#[derive(Debug)]
struct OutOfReach;

impl Hook for OutOfReach {
    fn before(&self, method: &'static str) -> Result<()> {
        if method == "import" {
            return Err(Error::device(
                DeviceFault::OutOfReach,
                "cuDeviceCanAccessPeer says no",
            ));
        }
        Ok(())
    }
}

#[test]
fn a_device_out_of_reach_is_an_error_by_name_and_keeps_nothing() {
    let stage = Stage::new("reach");
    let published = stage.publish("a", b"abc");
    let (device, _wrapped) = other(OutOfReach);
    let error = published
        .ticket(..)
        .unwrap()
        .open(&device, Duration::ZERO)
        .unwrap_err();
    assert!(
        matches!(
            error,
            Error::Device {
                fault: DeviceFault::OutOfReach,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn an_import_that_fails_can_be_tried_again() {
    let stage = Stage::new("again");
    let published = stage.publish("a", b"abc");
    let (device, failing) = other(Failing::default());
    failing.hook().aim("import", 1);
    let ticket = published.ticket(..).unwrap();
    assert!(matches!(
        ticket.open(&device, Duration::ZERO),
        Err(Error::Driver {
            code: Error::INJECTED,
            ..
        })
    ));
    assert_eq!(
        ticket
            .open(&device, Duration::ZERO)
            .unwrap()
            .to_vec(WAIT)
            .unwrap(),
        b"abc"
    );
}

#[test]
fn nothing_of_no_bytes_is_allocated() {
    assert!(matches!(
        Memory::allocate(&Device::host(), 0),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        Memory::allocate(&Device::host(), u64::MAX),
        Err(Error::Argument { .. })
    ));
    assert!(matches!(
        Memory::allocate(&Device::host(), 1 << 60),
        Err(Error::Limit(LimitFault::Device { .. }))
    ));
}

fn eventually(is_so: impl Fn() -> bool) -> bool {
    eventually_within(WAIT, is_so)
}

fn eventually_within(limit: Duration, is_so: impl Fn() -> bool) -> bool {
    let start = std::time::Instant::now();
    let mut backoff = crate::backoff::Backoff::default();
    while !is_so() {
        if start.elapsed() > limit {
            return false;
        }
        backoff.pause();
    }
    true
}
