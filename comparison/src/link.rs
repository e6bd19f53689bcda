//! One direction from one producer to some consumers, by each library.

use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure};
use iceoryx2::port::listener::Listener;
use iceoryx2::port::notifier::Notifier;
use iceoryx2::port::publisher::Publisher as IceoryxPublisher;
use iceoryx2::port::subscriber::Subscriber as IceoryxSubscriber;
use iceoryx2::port::update_connections::UpdateConnections;
use iceoryx2::prelude::{BackpressureStrategy, Node, NodeBuilder, ipc};
use serde::{Deserialize, Serialize};
use warpipe::{Device, Domain, OptionalExtension, Publisher, PublisherOptions, Stream, Subscriber, SubscriberOptions};
use warpipe_bench::PATIENCE;
use warpipe_bench::peer_process::Control;
use warpipe_bench::raw::{LINE_BYTES, SharedMemory};
use warpipe_bench::rings::{DEPTH, LINES, Patience, Payload, Ring, doorbell};

/// What carries the items.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Library {
    Bare,
    Warpipe,
    Iceoryx2,
}

/// How an end waits for an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Wait {
    /// Polls.
    Poll,
    /// Polls, and gives its CPU away after 64 polls in vain: another end may need it.
    PollAndYield,
    /// Sleeps at once.
    Sleep,
}

impl Wait {
    /// Looks until there is an item.
    fn poll<T>(self, mut look: impl FnMut() -> anyhow::Result<Option<T>>) -> anyhow::Result<T> {
        let start = Instant::now();
        loop {
            for _ in 0..10_000 {
                for _ in 0..64 {
                    if let Some(found) = look()? {
                        return Ok(found);
                    }
                    std::hint::spin_loop();
                }
                if self == Wait::PollAndYield {
                    std::thread::yield_now();
                }
            }
            ensure!(start.elapsed() < PATIENCE, "no item came");
        }
    }
}

pub trait Producer {
    fn send(&mut self, payload: &Payload) -> anyhow::Result<()>;
}

pub trait Consumer {
    fn receive(&mut self) -> anyhow::Result<Payload>;
}

/// The shared memory and the eventfds of a bare ring.
#[derive(Debug)]
pub struct BareParts {
    memory: SharedMemory,
    filled: OwnedFd,
    emptied: OwnedFd,
}

impl BareParts {
    pub fn create() -> anyhow::Result<BareParts> {
        Ok(BareParts {
            memory: SharedMemory::create(LINES)?,
            filled: doorbell()?,
            emptied: doorbell()?,
        })
    }

    pub fn send_to(&self, control: &Control) -> anyhow::Result<()> {
        control.send_fd(self.memory.fd())?;
        control.send_fd(self.filled.as_fd())?;
        control.send_fd(self.emptied.as_fd())
    }

    pub fn receive_from(control: &Control) -> anyhow::Result<BareParts> {
        Ok(BareParts {
            memory: SharedMemory::open(control.receive_fd()?, LINES)?,
            filled: control.receive_fd()?,
            emptied: control.receive_fd()?,
        })
    }

    fn ring(&self) -> Ring<'_> {
        Ring::new(&self.memory, 0, &self.filled, &self.emptied)
    }
}

/// How a bare ring waits; `None` where it cannot: it does not yield.
pub fn bare_patience(wait: Wait) -> Option<Patience> {
    match wait {
        Wait::Poll => Some(Patience::Spin),
        Wait::PollAndYield => None,
        Wait::Sleep => Some(Patience::Sleep { spins: 0 }),
    }
}

/// A ring to each consumer.
pub struct BareProducer<'a>(Vec<Ring<'a>>, Patience);

impl<'a> BareProducer<'a> {
    pub fn new(parts: &'a [BareParts], patience: Patience) -> BareProducer<'a> {
        BareProducer(parts.iter().map(BareParts::ring).collect(), patience)
    }
}

impl Producer for BareProducer<'_> {
    fn send(&mut self, payload: &Payload) -> anyhow::Result<()> {
        let BareProducer(rings, patience) = self;
        rings
            .iter_mut()
            .try_for_each(|ring| ring.push(payload, *patience))
    }
}

pub struct BareConsumer<'a>(Ring<'a>, Patience);

impl<'a> BareConsumer<'a> {
    pub fn new(parts: &'a BareParts, patience: Patience) -> BareConsumer<'a> {
        BareConsumer(parts.ring(), patience)
    }
}

impl Consumer for BareConsumer<'_> {
    fn receive(&mut self) -> anyhow::Result<Payload> {
        let mut payload = [0; LINE_BYTES];
        self.0.pop(&mut payload, self.1)?;
        Ok(payload)
    }
}

pub struct OurProducer {
    publisher: Publisher,
    stream: Stream,
}

impl OurProducer {
    pub fn new(domain: &Domain, name: &str) -> anyhow::Result<OurProducer> {
        let device = Device::host();
        let options = PublisherOptions {
            depth: DEPTH as u32,
            ..domain.on(&device)
        };
        let publisher = Publisher::new(name, options)?;
        let stream = device.stream()?;
        Ok(OurProducer { publisher, stream })
    }
}

impl Producer for OurProducer {
    fn send(&mut self, payload: &Payload) -> anyhow::Result<()> {
        self.publisher.send_bytes(&self.stream, payload)?;
        Ok(())
    }
}

pub struct OurConsumer {
    subscriber: Subscriber,
    stream: Stream,
    wait: Wait,
}

impl OurConsumer {
    pub fn new(domain: &Domain, name: &str, wait: Wait) -> anyhow::Result<OurConsumer> {
        let device = Device::host();
        let options = SubscriberOptions {
            spin: Duration::ZERO,
            ..domain.on(&device)
        };
        let subscriber = Subscriber::open(name, options, PATIENCE)?;
        let stream = device.stream()?;
        Ok(OurConsumer {
            subscriber,
            stream,
            wait,
        })
    }
}

impl Consumer for OurConsumer {
    fn receive(&mut self) -> anyhow::Result<Payload> {
        let OurConsumer {
            subscriber,
            stream,
            wait,
        } = self;
        let sample = match wait {
            Wait::Sleep => subscriber.receive(stream, PATIENCE)?,
            wait => wait.poll(|| Ok(subscriber.receive(stream, Duration::ZERO).optional()?))?,
        };
        let mut payload = [0; LINE_BYTES];
        sample.copy_to(&mut payload, PATIENCE)?;
        Ok(payload)
    }
}

/// This process among those of iceoryx2.
pub struct Iceoryx(Node<ipc::Service>);

/// An error of iceoryx2, which are of many types.
fn failed(what: &str, error: impl std::fmt::Debug) -> anyhow::Error {
    anyhow!("iceoryx2: {what}: {error:?}")
}

impl Iceoryx {
    pub fn new() -> anyhow::Result<Iceoryx> {
        let node = NodeBuilder::new().create::<ipc::Service>();
        Ok(Iceoryx(node.map_err(|e| failed("a node", e))?))
    }

    pub fn producer(&self, name: &str, wait: Wait) -> anyhow::Result<IceoryxProducer> {
        let publisher = self
            .items(name)?
            .publisher_builder()
            .backpressure_strategy(BackpressureStrategy::RetryUntilDelivered)
            .create();
        let notifier = match wait {
            Wait::Sleep => {
                let notifier = self.events(name)?.notifier_builder().create();
                Some(notifier.map_err(|e| failed("a notifier", e))?)
            }
            Wait::Poll | Wait::PollAndYield => None,
        };
        Ok(IceoryxProducer {
            publisher: publisher.map_err(|e| failed("a publisher", e))?,
            notifier,
        })
    }

    pub fn consumer(&self, name: &str, wait: Wait) -> anyhow::Result<IceoryxConsumer> {
        let listener = match wait {
            Wait::Sleep => {
                let listener = self.events(name)?.listener_builder().create();
                Some(listener.map_err(|e| failed("a listener", e))?)
            }
            Wait::Poll | Wait::PollAndYield => None,
        };
        let subscriber = self.items(name)?.subscriber_builder().create();
        Ok(IceoryxConsumer {
            subscriber: subscriber.map_err(|e| failed("a subscriber", e))?,
            listener,
            wait,
        })
    }

    fn items(
        &self,
        name: &str,
    ) -> anyhow::Result<
        iceoryx2::service::port_factory::publish_subscribe::PortFactory<ipc::Service, Payload, ()>,
    > {
        let name = name.try_into().map_err(|e| failed("a name", e))?;
        self.0
            .service_builder(&name)
            .publish_subscribe::<Payload>()
            .enable_safe_overflow(false)
            .subscriber_max_buffer_size(DEPTH)
            .open_or_create()
            .map_err(|e| failed("a service", e))
    }

    fn events(
        &self,
        name: &str,
    ) -> anyhow::Result<iceoryx2::service::port_factory::event::PortFactory<ipc::Service>> {
        let name = name.try_into().map_err(|e| failed("a name", e))?;
        let event = self.0.service_builder(&name).event().open_or_create();
        event.map_err(|e| failed("an event service", e))
    }
}

pub struct IceoryxProducer {
    publisher: IceoryxPublisher<ipc::Service, Payload, ()>,
    notifier: Option<Notifier<ipc::Service>>,
}

impl Producer for IceoryxProducer {
    fn send(&mut self, payload: &Payload) -> anyhow::Result<()> {
        let sample = self
            .publisher
            .loan_uninit()
            .map_err(|e| failed("loan", e))?;
        let sent = sample.write_payload(*payload).send();
        sent.map_err(|e| failed("send", e))?;
        if let Some(notifier) = &self.notifier {
            notifier.notify().map_err(|e| failed("notify", e))?;
        }
        Ok(())
    }
}

pub struct IceoryxConsumer {
    subscriber: IceoryxSubscriber<ipc::Service, Payload, ()>,
    listener: Option<Listener<ipc::Service>>,
    wait: Wait,
}

impl IceoryxConsumer {
    /// Connects to the producers that there are. Else its first look would, and until then items that
    /// find the buffer full are lost.
    pub fn connect(&self) -> anyhow::Result<()> {
        let connected = self.subscriber.update_connections();
        connected.map_err(|e| failed("update_connections", e))
    }

    fn look(&self) -> anyhow::Result<Option<Payload>> {
        let sample = self
            .subscriber
            .receive()
            .map_err(|e| failed("receive", e))?;
        Ok(sample.map(|sample| *sample))
    }
}

impl Consumer for IceoryxConsumer {
    fn receive(&mut self) -> anyhow::Result<Payload> {
        let Some(listener) = &mut self.listener else {
            return self.wait.poll(|| self.look());
        };
        // An event may have been taken with an earlier item, and it may come without an item.
        let start = Instant::now();
        loop {
            let sample = self
                .subscriber
                .receive()
                .map_err(|e| failed("receive", e))?;
            if let Some(sample) = sample {
                return Ok(*sample);
            }
            let waited = listener.timed_wait(|_| {}, PATIENCE);
            waited.map_err(|e| failed("timed_wait", e))?;
            ensure!(start.elapsed() < PATIENCE, "no item came");
        }
    }
}
