//! Streams under capture into a graph: the capture stays valid, and nothing is recorded, lost or
//! released. **This module is marked for unsafe**: it names a device address to a publisher that is
//! to refuse it, and the default stream.

use std::fmt::Debug;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use warpipe::{
    Access, Error, Event, Layout, LentBuffer, Memory, Pool, Semaphore, StateFault, Stream, Timeline,
};
use warpipe_testkit::eventually;

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::device_words::{check, fill, wrong_words};
use crate::graph::{Graphs, Mode};
use crate::payload::{ErrorCounters, Payload};
use warpipe::OptionalExtension;

pub(super) const CASES: &[Case] = &[
    Case::new(
        "a capture continues while a subscriber attaches and leaves on another thread",
        bystanders,
    ),
    Case::new(
        "memory that a busy stream uses stays mapped while another thread captures",
        busy_streams,
    ),
    Case::new(
        "a capturing stream is refused by name, and nothing is recorded or lost",
        refusals,
    ),
    Case::new(
        "queue and service work is refused on a capturing stream, and possible after the capture",
        jobs,
    ),
    Case::new(
        "memory dropped while its stream captures is returned after the stream's work",
        drops,
    ),
    Case::new(
        "a copy from or to the host is refused on a capturing stream, and disturbs no capture",
        host_copies,
    ),
    Case::new(
        "the default stream is refused while a stream ordered with it captures",
        default_stream,
    ),
];

const WORDS: u64 = 4096;

/// Captures a kernel on a stream of its own while `meanwhile` runs on another thread, ends the
/// capture, and sees that the graph is whole. The caller keeps the tally: to unregister its memory,
/// the driver waits for every stream of the context.
fn while_capturing(
    context: &Context,
    error_counters: &mut ErrorCounters,
    meanwhile: impl FnOnce() -> Result<()> + Send,
) -> Result<()> {
    let graphs = Graphs::of(context)?;
    let stream = context.stream()?;
    let memory = Memory::allocate(&context.device, 8 * WORDS)?;
    graphs.begin(&stream, Mode::Global)?;
    fill(&memory, &stream, 7, Duration::ZERO, true)?;
    let outcome = thread::scope(|scope| scope.spawn(meanwhile).join());
    let graph = graphs
        .end(&stream)
        .context("the end of a capture that nobody was to disturb")?;
    outcome.map_err(|_| anyhow::anyhow!("the other thread panicked"))??;
    graph.launch(&stream)?;
    let wrong = wrong_words(&memory, &stream, error_counters, 7)?;
    ensure!(wrong == 0, "{wrong} wrong words of the graph");
    Ok(())
}

fn bystanders(context: &Context) -> Result<()> {
    while_capturing(context, &mut ErrorCounters::new(&context.device)?, || {
        let held = context.device.backend().bytes_held();
        let publisher = context.publisher("bystander")?;
        let mut subscriber = context.subscriber("bystander")?;
        let stream = context.stream()?;
        for seed in 1..=20 {
            Payload::of(WORDS, seed).send(&publisher, &stream)?;
            let sample = subscriber.receive(&stream, PATIENCE)?;
            ensure!(
                sample.to_vec(PATIENCE)?.len() as u64 == 8 * WORDS,
                "a sample of another length"
            );
            sample.finish(PATIENCE)?;
        }
        drop((subscriber, publisher));
        // By then the reaper has unregistered and unmapped all of it.
        let is_back = eventually(PATIENCE, || context.device.backend().bytes_held() == held);
        ensure!(
            is_back,
            "the memory did not come back while the other thread captured"
        );
        Ok(())
    })
}

/// a stream that is blocked until the sender is dropped.
fn held_up(context: &Context) -> Result<(Stream, Sender<()>)> {
    let (stream, (go, wait)): (_, (_, Receiver<()>)) = (context.stream()?, channel());
    stream.call(move || {
        let _ = wait.recv();
    })?;
    Ok((stream, go))
}

fn busy_streams(context: &Context) -> Result<()> {
    let backend = context.device.backend().clone();
    let (memory, idle) = (
        Memory::allocate(&context.device, 8 * WORDS)?,
        Memory::allocate(&context.device, 8 * WORDS)?,
    );
    let mut error_counters = ErrorCounters::new(&context.device)?;
    let filling = context.stream()?;
    fill(&memory, &filling, 3, Duration::ZERO, true)?;
    filling.synchronize(PATIENCE)?;
    let (stream, go) = held_up(context)?;
    let check = check(&memory, &stream, &mut error_counters, 3)?;
    let (done, is_done) = channel();
    stream.call(move || {
        let _ = done.send(());
    })?;
    // From here on it is known to the memory alone.
    drop(stream);
    while_capturing(context, &mut error_counters, || {
        // More streams than a list keeps without looking which of them are idle.
        for _ in 0..32 {
            memory.used_on(&context.stream()?);
        }
        let held = backend.bytes_held();
        drop(memory);
        // It is dropped after the busy one, and is polled after it.
        drop(idle);
        let is_back = eventually(PATIENCE, || backend.bytes_held() < held);
        ensure!(is_back, "memory that no stream works on did not come back");
        ensure!(
            held - backend.bytes_held() == backend.granularity(),
            "memory under a busy stream was unmapped"
        );
        Ok(())
    })?;
    drop(go);
    is_done
        .recv_timeout(PATIENCE)
        .context("the stream did not come to its end")?;
    ensure!(
        error_counters.wrong_words(check) == 0,
        "the memory was not there any more"
    );
    Ok(())
}

fn refused<T: Debug>(what: &str, outcome: Result<T, impl Into<Error>>) -> Result<()> {
    match outcome.map_err(Into::into) {
        Err(Error::State(StateFault::Capturing(_))) => Ok(()),
        other => bail!("{what} gave {other:?}"),
    }
}

fn refusals(context: &Context) -> Result<()> {
    let (graphs, device, domain) = (Graphs::of(context)?, &context.device, &context.domain);
    let (stream, free) = (context.stream()?, context.stream()?);
    let publisher = context.publisher("frames")?;
    let mut subscriber = context.subscriber("frames")?;
    publisher.send_bytes(&free, b"early")?;
    let mut loan = publisher.loan(&Layout::bytes_only(4)?)?;
    loan.write(&free, b"late")?;
    free.synchronize(PATIENCE)?;
    let (timeline, event) = (
        Timeline::new("steps", domain.on(device))?,
        Event::new(domain.on(device))?,
    );
    event.record(&free, PATIENCE)?;
    let semaphore = Semaphore::new("permits", 1, domain.on(device))?;
    let (memory, pool) = (
        Memory::allocate(device, 8 * WORDS)?,
        Pool::new("pool", domain.on(device))?,
    );
    let block = pool.allocate(4096, Duration::ZERO)?;
    let lent = LentBuffer::open(&block.lend(Access::ReadWrite)?, device, Duration::ZERO)?;

    graphs.begin(&stream, Mode::Global)?;
    fill(&memory, &stream, 9, Duration::ZERO, true)?;
    refused("write", loan.write(&stream, b"lost"))?;
    refused("send_bytes", publisher.send_bytes(&stream, b"lost"))?;
    // SAFETY: memory of that length, which is not read, since the stream is refused.
    refused("send_device", unsafe {
        publisher.send_device(&stream, &Layout::bytes_only(4)?, memory.ptr())
    })?;
    let failed = loan.send(&stream).err().context("send took the stream")?;
    let loan = failed.returned.context("send kept the loan")?;
    refused("send", Err::<(), _>(failed.error))?;
    refused("receive", subscriber.receive(&stream, PATIENCE))?;
    refused(
        "receive without a wait",
        subscriber.receive(&stream, Duration::ZERO),
    )?;
    refused("signal", timeline.signal(&stream, 1, PATIENCE))?;
    refused("a timeline's wait", timeline.wait(&stream, 0))?;
    refused("record", event.record(&stream, PATIENCE))?;
    refused("an event's wait", event.wait(&stream))?;
    refused("acquire", semaphore.acquire(&stream, PATIENCE))?;
    refused(
        "acquire without a wait",
        semaphore.acquire(&stream, Duration::ZERO),
    )?;
    refused(
        "release",
        semaphore.acquire(&free, PATIENCE)?.release(&stream),
    )?;
    refused("a write to memory", memory.write(&stream, 0, b"lost"))?;
    refused("a block's write", block.write(&stream, 0, b"lost"))?;
    refused("a lent block's write", lent.write(&stream, 0, b"lost"))?;
    refused("a lent block's free", lent.free(&stream))?;
    refused("a block's free", block.free(&stream))?;
    refused("call", stream.call(|| ()))?;
    refused("is_idle", stream.is_idle())?;
    refused("synchronize", stream.synchronize(PATIENCE))?;
    refused("wait_for", stream.wait_for(&free))?;
    refused("wait_for it", free.wait_for(&stream))?;
    let sample = subscriber.receive(&free, PATIENCE)?;
    refused("wait_on", sample.wait_on(&stream))?;
    ensure!(
        sample.to_vec(PATIENCE)? == b"early",
        "the first sample has changed"
    );
    drop(sample);
    ensure!(
        subscriber
            .receive(&free, Duration::ZERO)
            .optional()?
            .is_none(),
        "something was sent all the same"
    );
    let graph = graphs.end(&stream)?;

    ensure!(loan.send(&stream)? == 2, "a refused send used a number up");
    let sample = subscriber.receive(&stream, PATIENCE)?;
    ensure!(
        sample.to_vec(PATIENCE)? == b"late",
        "the sample has changed"
    );
    sample.finish(PATIENCE)?;
    timeline.signal(&stream, 3, PATIENCE)?;
    timeline.wait_host(3, PATIENCE)?;
    graph.launch(&stream)?;
    graph.launch(&stream)?;
    let wrong = wrong_words(&memory, &stream, &mut ErrorCounters::new(device)?, 9)?;
    ensure!(wrong == 0, "{wrong} wrong words of the graph");
    ensure!(
        timeline.value() == 3,
        "a launch set the timeline to {}",
        timeline.value()
    );
    ensure!(event.query()?, "a launch recorded the event");
    let is_free = || {
        semaphore
            .acquire_host(Duration::ZERO)
            .optional()
            .is_ok_and(|permit| permit.is_some())
    };
    ensure!(
        eventually(PATIENCE, is_free),
        "the permit has not come back"
    );
    ensure!(
        eventually(PATIENCE, || pool.stats().in_use_bytes
            + pool.stats().lent_bytes
            == 0),
        "a block is missing"
    );
    Ok(())
}

fn jobs(context: &Context) -> Result<()> {
    let graphs = Graphs::of(context)?;
    let (stream, free) = (context.stream()?, context.stream()?);
    let queue = context.queue("jobs")?;
    let mut worker = context.worker("jobs")?;
    let mut server = context.server("answers")?;
    let first = queue.submit_bytes(b"first", &free)?;
    let lease = worker.lease(&free, PATIENCE)?;
    let (input, answer_handle) = (lease.input, lease.answer_handle);
    let mut loan = queue.loan(&Layout::bytes_only(6)?)?;
    loan.write(&free, b"second")?;
    graphs.begin(&stream, Mode::Global)?;
    let failed = answer_handle
        .complete(None, &stream, PATIENCE)
        .err()
        .context("complete took the stream")?;
    let answer_handle = failed
        .returned
        .answer_handle
        .context("complete ended the answer handle")?;
    refused("complete", Err::<(), _>(failed.error))?;
    let failed = queue
        .submit(loan, &stream)
        .err()
        .context("submit took the stream")?;
    let loan = failed.returned.context("submit kept the loan")?;
    refused("submit", Err::<(), _>(failed.error))?;
    refused("lease", worker.lease(&stream, PATIENCE))?;
    refused("accept", server.accept(&stream, Duration::ZERO))?;
    let graph = graphs.end(&stream)?;

    answer_handle.complete(None, &stream, PATIENCE)?;
    input.release()?;
    first.wait(&stream, PATIENCE)?.sample.finish(PATIENCE)?;
    let second = queue.submit(*loan, &stream)?;
    // The worker's stream captures when it drops its lease: that is an answer, too, and the job
    // goes round once more.
    let lease = worker.lease(&stream, PATIENCE)?;
    graphs.begin(&stream, Mode::Global)?;
    drop(lease);
    let again = worker.lease(&free, PATIENCE)?;
    ensure!(again.attempt == 2, "attempt {}", again.attempt);
    drop(graphs.end(&stream)?);
    again.complete(None, &free)?;
    second.wait(&stream, PATIENCE)?.sample.finish(PATIENCE)?;
    graph.launch(&stream)?;
    stream.synchronize(PATIENCE)?;
    Ok(())
}

fn drops(context: &Context) -> Result<()> {
    let (graphs, device, domain) = (Graphs::of(context)?, &context.device, &context.domain);
    let publisher = context.publisher("frames")?;
    let mut subscriber = context.subscriber("frames")?;
    let semaphore = Semaphore::new("permits", 1, domain.on(device))?;
    let pool = Pool::new("pool", domain.on(device))?;
    let block = pool.allocate(4096, Duration::ZERO)?;
    let (stream, go) = held_up(context)?;
    let loan = publisher.loan(&Layout::bytes_only(4)?)?;
    let sent = loan.returned();
    loan.send(&context.stream()?)?;
    let (sample, permit) = (
        subscriber.receive(&stream, PATIENCE)?,
        semaphore.acquire(&stream, PATIENCE)?,
    );
    block.used_on(&stream);
    let mut unsent = publisher.loan(&Layout::bytes_only(4)?)?;
    unsent.write(&stream, b"lost")?;
    let loaned = unsent.returned();

    graphs.begin(&stream, Mode::Global)?;
    drop((sample, permit, block, unsent));
    let is_back = || -> Result<[bool; 4]> {
        let permit = semaphore.acquire_host(Duration::ZERO).optional()?;
        Ok([
            sent.is_back()?,
            loaned.is_back()?,
            permit.is_some(),
            pool.stats().in_use_bytes + pool.stats().waiting_bytes == 0,
        ])
    };
    ensure!(
        is_back()? == [false; 4],
        "back under the capture: {:?}",
        is_back()?
    );
    drop(graphs.end(&stream)?);
    ensure!(
        is_back()? == [false; 4],
        "back before the stream was past them: {:?}",
        is_back()?
    );
    drop(go);
    ensure!(
        eventually(PATIENCE, || is_back().is_ok_and(|back| back == [true; 4])),
        "back in the end: {:?}",
        is_back()?
    );
    // The link has not been closed because of it.
    publisher.send_bytes(&stream, b"next")?;
    subscriber.receive(&stream, PATIENCE)?.finish(PATIENCE)?;
    Ok(())
}

fn host_copies(context: &Context) -> Result<()> {
    let graphs = Graphs::of(context)?;
    let (stream, backend) = (context.stream()?, context.device.backend());
    let (memory, raw) = (Memory::allocate(&context.device, 1 << 20)?, stream.raw());
    let at = memory.ptr();
    graphs.begin(&stream, Mode::Global)?;
    // SAFETY: the stream and the memory, which is as long, live.
    unsafe {
        // In rows, as one row, through page-locked memory and without.
        for bytes in [1, 8, 9, 64 << 10, 1 << 20] {
            refused("upload", backend.upload(raw, at, &vec![7; bytes]))?;
        }
        refused(
            "pieces",
            backend.upload_pieces(raw, at, &[&[7; 8], &[7; 9]]),
        )?;
        refused("download", backend.download(raw, &mut [7; 8], at))?;
        refused(
            "copy_to_host",
            backend.copy_to_host(raw, &[(at, 8)]).map(drop),
        )?;
    }
    let graph = graphs.end(&stream)?;
    graph.launch(&stream)?;
    stream.synchronize(PATIENCE)?;
    let found = memory.to_vec(PATIENCE)?;
    ensure!(found.iter().all(|&byte| byte == 0), "the graph has a copy");
    Ok(())
}

fn default_stream(context: &Context) -> Result<()> {
    let graphs = Graphs::of(context)?;
    // SAFETY: the default stream is always there.
    let default = unsafe { Stream::borrow_raw(&context.device, std::ptr::null_mut()) };
    let blocking = graphs.blocking_stream(&context.device)?;
    let publisher = context.publisher("frames")?;
    let mut subscriber = context.subscriber("frames")?;
    graphs.begin(&blocking, Mode::Global)?;
    refused("send_bytes", publisher.send_bytes(&default, b"lost"))?;
    refused("receive", subscriber.receive(&default, PATIENCE))?;
    drop(graphs.end(&blocking)?);
    publisher.send_bytes(&default, b"kept")?;
    ensure!(
        subscriber.receive(&default, PATIENCE)?.to_vec(PATIENCE)? == b"kept",
        "the sample has changed"
    );
    default.synchronize(PATIENCE)?;
    Ok(())
}
