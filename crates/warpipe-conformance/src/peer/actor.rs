//! The peer's own side: carries out one order after the other until there are no more.

use std::io::{BufRead as _, Write as _};
use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use warpipe::{
    AllocationClient, AllocationServer, DType, DevicePtr, Error, Layout, LegacyMemory, LentBuffer,
    Loss, Member, MemberOptions, Memory, Published, Publisher, Sample, SampleMut, Stream,
    Subscriber,
};

use super::holder::Holder;
use super::hung::Hung;
use super::order::{Answer, Batch, Fault, Item, Order};
use super::orphan;
use super::ring::{self, Rings};
use super::semaphore::Contender;
use super::signals::Signals;
use super::weights::WeightsHolder;
use super::worker::WorkerActor;
use crate::PATIENCE;
use crate::context::{Context, Settings};
use crate::device_malloc::{self, DeviceMalloc};
use crate::device_words::wrong_words;
use crate::guard::Guard;
use crate::payload::{Check, ErrorCounters, Payload};
use crate::shared_allocations::ForeignMemory;
use crate::words::Words;

/// Carries out the orders on standard input.
///
/// # Errors
/// The device cannot be opened, or the orders cannot be read.
pub fn act(settings: Settings, folder: &Path, ordinal: u32) -> Result<()> {
    let mut actor = Actor::new(Context::open(settings, folder, ordinal)?)?;
    for line in std::io::stdin().lock().lines() {
        let order: Order = serde_json::from_str(&line?).context("an order")?;
        let answer = actor
            .carry_out(order)
            .unwrap_or_else(|error| Answer::Fault(Fault::of_any(&error)));
        say(&serde_json::to_string(&answer)?);
    }
    Ok(())
}

/// Writes a line in one piece. A case that is gone reads nothing any more; its peer is about to be
/// killed.
pub(super) fn say(line: &str) {
    let _ = std::io::stdout()
        .lock()
        .write_all(format!("{line}\n").as_bytes());
}

/// Fields are dropped in this order: samples and loans before the ends of the channel, streams
/// after them.
struct Actor {
    held: Vec<(Sample, Option<Check>, Item)>,
    loans: Vec<SampleMut>,
    /// Keeps the sending stream until it is dropped.
    gate: Option<mpsc::Sender<()>>,
    opened: Vec<LegacyMemory>,
    plain: Vec<DeviceMalloc>,
    shares: Vec<LentBuffer>,
    servers: Vec<AllocationServer>,
    subscribers: Vec<Subscriber>,
    publisher: Option<Publisher>,
    published: Vec<Published>,
    worker_actor: WorkerActor,
    holder: Holder,
    hung: Hung,
    sockets: Vec<std::os::fd::OwnedFd>,
    semaphore: Contender,
    members: Vec<Member>,
    rings: Rings,
    weights: WeightsHolder,
    signals: Option<Signals>,
    streams: Option<Streams>,
    guard: Option<Guard>,
    context: Context,
}

struct Streams {
    sending: Stream,
    receiving: Stream,
    error_counters: ErrorCounters,
}

impl Actor {
    fn new(context: Context) -> Result<Actor> {
        Ok(Actor {
            held: Vec::new(),
            loans: Vec::new(),
            gate: None,
            opened: Vec::new(),
            plain: Vec::new(),
            shares: Vec::new(),
            servers: Vec::new(),
            subscribers: Vec::new(),
            publisher: None,
            published: Vec::new(),
            worker_actor: WorkerActor::default(),
            holder: Holder::default(),
            hung: Hung::default(),
            sockets: Vec::new(),
            semaphore: Contender::default(),
            members: Vec::new(),
            rings: Rings::default(),
            weights: WeightsHolder::default(),
            signals: None,
            streams: None,
            guard: None,
            context,
        })
    }

    fn carry_out(&mut self, order: Order) -> Result<Answer> {
        match order {
            Order::Publish(plan) => {
                self.publisher = Some(Publisher::new(
                    &plan.name,
                    plan.options(self.context.domain.on(&self.context.device)),
                )?);
            }
            Order::Subscribe(plan) => {
                self.subscribers
                    .push(plan.attach(self.context.domain.on(&self.context.device))?);
                return Ok(Answer::Number(self.subscribers.len() as u64 - 1));
            }
            Order::AwaitSubscribers(count) => {
                self.publisher()?.wait_for_subscribers(count, PATIENCE)?
            }
            Order::Loan(batch) => self.loan(batch)?,
            Order::SendBehindGate(batch) => {
                let (gate, opened) = mpsc::channel::<()>();
                self.gate = Some(gate);
                self.streams()?
                    .sending
                    .call(move || _ = opened.recv_timeout(100 * PATIENCE))?;
                return Ok(Answer::Number(self.send(batch)?));
            }
            Order::OpenGate => self.gate = None,
            Order::Send(batch) => return Ok(Answer::Number(self.send(batch)?)),
            Order::SendAndWait(batch) => {
                let sequence = self.send(batch)?;
                self.streams()?.sending.synchronize(PATIENCE)?;
                return Ok(Answer::Number(sequence));
            }
            Order::SendInPlace(batch) => return Ok(Answer::Number(self.send_in_place(batch)?)),
            Order::SendParts(batch) => return Ok(Answer::Number(self.send_parts(batch)?)),
            Order::SendAside(batch) => {
                let aside = self.context.stream()?;
                let sequence = self.send_on(&aside, batch)?;
                aside.synchronize(PATIENCE)?;
                return Ok(Answer::Number(sequence));
            }
            Order::Stream(batch) => self.stream(batch)?,
            Order::Receive {
                subscriber,
                count,
                hold,
            } => {
                return (0..count)
                    .map(|_| self.receive(subscriber, hold))
                    .collect::<Result<_>>()
                    .map(Answer::Items);
            }
            Order::ReceiveAll { subscriber } => {
                return Ok(Answer::Items(self.receive_all(subscriber)?));
            }
            Order::Consume { subscriber, hold } => self.consume(subscriber, hold)?,
            Order::Overwrite { subscriber } => self.overwrite(subscriber)?,
            Order::Release => return Ok(Answer::Items(self.release()?)),
            Order::Dropped { subscriber } => {
                return Ok(Answer::Number(self.subscriber(subscriber)?.dropped()));
            }
            Order::PublisherState { subscriber } => {
                return Ok(Answer::Text(format!(
                    "{:?}",
                    self.subscriber(subscriber)?.publisher().map(|it| it.state)
                )));
            }
            Order::ConnectOnly(name) => self.connect_only(&name)?,
            Order::PlayWords { path, rounds } => self.play_words(&path, rounds)?,
            Order::ExportLegacy { words, seed } => {
                let plain = DeviceMalloc::new(&self.context.device, words, seed)?;
                let handle = plain.export()?;
                self.plain.push(plain);
                return Ok(Answer::Text(handle.to_string()));
            }
            Order::FreeLegacy => drop(self.plain.pop().context("memory to free")?),
            Order::OpenLegacy { handle, seed } => {
                let memory = handle.open(&self.context.device)?;
                device_malloc::check(&memory, seed, &mut self.streams()?.error_counters)?;
                self.opened.push(memory);
            }
            Order::CloseLegacy => self
                .opened
                .pop()
                .context("memory to close")?
                .close(PATIENCE)?,
            Order::OpenShare { name, number, seed } => self.open_share(&name, number, seed)?,
            Order::OverwriteShare => self.overwrite_share()?,
            Order::ReleaseShare => drop(self.shares.pop().context("a share to release")?),
            Order::ShareSegment { name, seed } => return self.share_segment(&name, seed),
            Order::Weights(order) => return self.weights.carry_out(&self.context, order),
            Order::OpenEvent(handle) => device_malloc::open_event(&self.context.device, &handle)?,
            Order::Semaphore(order) => return self.semaphore.carry_out(&self.context, order),
            Order::Join { name, role } => self.members.push(Member::new(
                &name,
                MemberOptions {
                    role,
                    ..self.context.domain.options()
                },
            )?),
            Order::Leave => self.members.clear(),
            Order::Hung(order) => return self.hung.carry_out(&self.context, order),
            Order::Hold(order) => return self.holder.carry_out(&self.context, order),
            Order::Signals(order) => {
                let signals = match &mut self.signals {
                    Some(signals) => signals,
                    none => none.insert(Signals::new(&self.context)?),
                };
                return signals.carry_out(&self.context, order);
            }
            Order::Ring(order) => return ring::carry_out(&mut self.rings, &self.context, order),
            Order::Fork => return Ok(Answer::Number(orphan::fork_and_live(false, None)? as u64)),
            Order::ForkUnseen => {
                return Ok(Answer::Number(orphan::fork_and_live(true, None)? as u64));
            }
            Order::Orphan {
                in_us,
                after_ms,
                unseen,
            } => {
                orphan::start(&self.context.orphans_path(), in_us, after_ms, unseen)?;
            }
            Order::Exec => return Err(exec_and_live().into()),
            Order::Task(task) => return self.worker_actor.carry_out(task, &self.context),
            Order::Guard => {
                self.context.warm_up()?;
                self.guard = Some(self.context.guard());
            }
            Order::Settle => self.settle()?,
        }
        Ok(Answer::Done)
    }

    fn publisher(&self) -> Result<&Publisher> {
        self.publisher.as_ref().context("it does not publish")
    }

    fn subscriber(&mut self, index: usize) -> Result<&mut Subscriber> {
        self.subscribers
            .get_mut(index)
            .context("no such subscriber")
    }

    fn streams(&mut self) -> Result<&mut Streams> {
        if self.streams.is_none() {
            let (sending, receiving) = (self.context.stream()?, self.context.stream()?);
            self.streams = Some(Streams {
                sending,
                receiving,
                error_counters: self.context.error_counters()?,
            });
        }
        self.streams.as_mut().context("made above")
    }

    fn payloads(batch: Batch) -> impl Iterator<Item = Payload> {
        let slow = Duration::from_micros(batch.slow_us);
        (0..batch.count)
            .map(move |index| Payload::of(batch.words, batch.seed.wrapping_add(index)).slow(slow))
    }

    fn loan(&mut self, batch: Batch) -> Result<()> {
        let stream = self.streams()?.sending.clone();
        for payload in Self::payloads(batch) {
            self.loans.push(payload.loan(self.publisher()?, &stream)?);
        }
        Ok(())
    }

    fn send(&mut self, batch: Batch) -> Result<u64> {
        let stream = self.streams()?.sending.clone();
        self.send_on(&stream, batch)
    }

    fn send_on(&mut self, stream: &Stream, batch: Batch) -> Result<u64> {
        let mut sequence = 0;
        for payload in Self::payloads(batch) {
            sequence = payload.send(self.publisher()?, stream)?;
        }
        Ok(sequence)
    }

    fn send_in_place(&mut self, batch: Batch) -> Result<u64> {
        let stream = self.streams()?.sending.clone();
        let layout = Layout::contiguous(DType::U64, &[batch.words])?;
        let mut sequence = 0;
        for payload in Self::payloads(batch) {
            let memory = Memory::allocate(&self.context.device, layout.bytes())?;
            let name = format!("in-place/{}", payload.mark.seed);
            let published = memory.publish(&name, self.context.domain.options())?;
            let loan = self.publisher()?.loan_in(&published, 0, &layout, memory);
            let mut loan = loan?;
            payload.fill(&mut loan, &stream)?;
            sequence = loan.send(&stream)?;
            self.published.push(published);
        }
        stream.synchronize(PATIENCE)?;
        Ok(sequence)
    }

    fn send_parts(&mut self, batch: Batch) -> Result<u64> {
        let stream = self.streams()?.sending.clone();
        let words = Layout::contiguous(DType::U64, &[batch.words])?;
        let parts = [("words", words), ("few", Layout::bytes_only(100)?)];
        let mut sequence = 0;
        for payload in Self::payloads(batch) {
            let mut loan = self.publisher()?.loan_parts(&parts)?;
            // The words lie first in the slot.
            payload.fill(&mut loan, &stream)?;
            loan.write_part(&stream, "few", &[7; 100])?;
            let metadata = [&payload.mark.to_bytes()[..], &[1; 1000]].concat();
            loan.set_metadata(&metadata)?;
            sequence = loan.send(&stream)?;
        }
        Ok(sequence)
    }

    fn stream(&mut self, batch: Batch) -> Result<()> {
        let stream = self.streams()?.sending.clone();
        for payload in Self::payloads(Batch {
            count: u64::MAX,
            ..batch
        }) {
            let sequence = payload.send(self.publisher()?, &stream)?;
            stream.call(move || say(&format!("ready {sequence}")))?;
        }
        Ok(())
    }

    fn receive(&mut self, subscriber: usize, hold: bool) -> Result<Item> {
        let stream = self.streams()?.receiving.clone();
        let sample = self.subscriber(subscriber)?.receive(&stream, PATIENCE)?;
        let error_counters = &mut self.streams()?.error_counters;
        let mut item = describe(&sample);
        let check = error_counters.check_sample(&sample)?;
        if hold {
            self.held.push((sample, check, item.clone()));
            return Ok(item);
        }
        conclude(error_counters, sample, check, &mut item)?;
        Ok(item)
    }

    fn receive_all(&mut self, subscriber: usize) -> Result<Vec<Item>> {
        let mut items = Vec::new();
        loop {
            match self.receive(subscriber, false) {
                Ok(item) => items.push(item),
                Err(error) => {
                    items.push(Item {
                        fault: Some(Fault::of_any(&error)),
                        ..Item::default()
                    });
                    return Ok(items);
                }
            }
        }
    }

    fn consume(&mut self, subscriber: usize, hold: usize) -> Result<()> {
        let mut rng = self.context.rng();
        loop {
            self.receive(subscriber, true)?;
            while self.held.len() > hold {
                let (sample, check, mut item) = self
                    .held
                    .swap_remove(rng.u64(..self.held.len() as u64) as usize);
                conclude(
                    &mut self.streams()?.error_counters,
                    sample,
                    check,
                    &mut item,
                )?;
                say(&format!(
                    "got {} {}",
                    item.sequence,
                    item.wrong.unwrap_or(u64::MAX)
                ));
            }
        }
    }

    fn overwrite(&mut self, subscriber: usize) -> Result<()> {
        let stream = self.streams()?.receiving.clone();
        let sample = self.subscriber(subscriber)?.receive(&stream, PATIENCE)?;
        let words = sample.layout().bytes() / 8;
        ensure!(words > 0, "a sample of at least a word");
        overwrite(&stream, sample.slot_ptr(), words)
    }

    fn overwrite_share(&mut self) -> Result<()> {
        let stream = self.streams()?.receiving.clone();
        let memory = self.shares.last().context("a share to write into")?;
        overwrite(&stream, memory.ptr(), memory.bytes() / 8)
    }

    fn release(&mut self) -> Result<Vec<Item>> {
        let mut items = Vec::new();
        let mut rng = self.context.rng();
        while !self.held.is_empty() {
            let (sample, check, mut item) = self
                .held
                .swap_remove(rng.u64(..self.held.len() as u64) as usize);
            conclude(
                &mut self.streams()?.error_counters,
                sample,
                check,
                &mut item,
            )?;
            items.push(item);
        }
        Ok(items)
    }

    fn play_words(&mut self, path: &str, rounds: u64) -> Result<()> {
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(path)
            .context("opening the words")?;
        let words = Words::map(&self.context.device, file)?;
        let stream = self.streams()?.receiving.clone();
        words.play(&stream, rounds, false)?;
        Ok(stream.synchronize(PATIENCE)?)
    }

    fn open_share(&mut self, name: &str, number: u64, seed: u64) -> Result<()> {
        let client = AllocationClient::open(
            name,
            self.context.domain.on(&self.context.device),
            Duration::ZERO,
        )?;
        let memory = client.open_share(number, PATIENCE)?;
        let stream = self.context.stream()?;
        let wrong = wrong_words(&memory, &stream, &mut self.streams()?.error_counters, seed)?;
        ensure!(wrong == 0, "{wrong} wrong words in shared memory");
        self.shares.push(memory);
        Ok(())
    }

    fn share_segment(&mut self, name: &str, seed: u64) -> Result<Answer> {
        let server = AllocationServer::new(name, self.context.domain.on(&self.context.device))?;
        let memory = ForeignMemory::segment(&self.context, mpsc::channel().0)?;
        let number = memory.share(&server, &self.context.stream()?, seed)?;
        self.servers.push(server);
        Ok(Answer::Number(number))
    }

    fn connect_only(&mut self, name: &str) -> Result<()> {
        use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
        let path = self
            .context
            .domain
            .path()
            .join(format!("{}.sock", name.replace('/', "+")));
        let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None)?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(&path)?)?;
        self.sockets.push(socket);
        Ok(())
    }

    fn settle(&mut self) -> Result<()> {
        self.held.clear();
        self.loans.clear();
        self.gate = None;
        self.opened.clear();
        self.plain.clear();
        self.subscribers.clear();
        self.publisher = None;
        self.worker_actor.end()?;
        self.holder = Holder::default();
        self.hung = Hung::default();
        self.sockets.clear();
        self.semaphore = Contender::default();
        self.members.clear();
        self.rings = Rings::default();
        self.signals.take().map_or(Ok(()), Signals::end)?;
        if let Some(streams) = self.streams.take() {
            streams.sending.synchronize(PATIENCE)?;
            streams.receiving.synchronize(PATIENCE)?;
        }
        self.guard
            .take()
            .context("a guard to compare with")?
            .settles()
    }
}

/// The checks of a sample that are possible before its data is complete.
fn describe(sample: &Sample) -> Item {
    let mark = crate::payload::PayloadMark::of(sample.metadata());
    let gap = sample.info().discontinuity;
    Item {
        sequence: sample.sequence(),
        seed: mark.map_or(0, |mark| mark.seed),
        layout: describe_layout(sample.layout()),
        metadata: digest(sample.metadata()),
        missing: gap.map_or(0, |gap| gap.missing),
        previous: gap
            .and_then(|gap| gap.previous)
            .map(|previous| (previous.pid, previous.graceful)),
        ..Item::default()
    }
}

/// All of a layout in words.
pub(crate) fn describe_layout(layout: &warpipe::Layout) -> String {
    format!(
        "{} {:?} by {:?} from {}",
        layout.dtype(),
        layout.shape(),
        layout.strides(),
        layout.offset()
    )
}

/// Releases a sample behind its check and writes down how both ended. A lost sample is the item's
/// fault and no failure of ours; what the check saw of it does not count.
fn conclude(
    error_counters: &mut ErrorCounters,
    sample: Sample,
    check: Option<Check>,
    item: &mut Item,
) -> Result<()> {
    let stream = sample.stream().clone();
    if sample.layout().bytes() <= 64 << 10 && sample.wait(PATIENCE).is_ok() {
        item.digest = Some(digest(&sample.to_vec(PATIENCE)?));
    }
    match sample.finish(PATIENCE) {
        Ok(()) => {
            stream.synchronize(PATIENCE)?;
            item.wrong = check.map(|check| error_counters.wrong_words(check));
        }
        Err(error @ Error::Lost(Loss::Sample { .. })) => item.fault = Some(Fault::of(&error)),
        Err(error) => bail!(error),
    }
    Ok(())
}

/// Writes into memory that may only be read.
fn overwrite(stream: &Stream, ptr: DevicePtr, words: u64) -> Result<()> {
    // SAFETY: none is claimed: the mapping is read-only, and that this faults is what is tried. The
    // process has no other use.
    unsafe { crate::payload::fill_words(stream, ptr, words, 0, Duration::ZERO)? };
    stream.synchronize(PATIENCE)?;
    Ok(())
}

/// A checksum of bytes (FNV-1a, Fowler, Noll and Vo).
pub(crate) fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum, &byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// Becomes a program that lives until it is killed.
fn exec_and_live() -> std::io::Error {
    use std::os::unix::process::CommandExt as _;
    std::process::Command::new("sleep").arg("600").exec()
}
