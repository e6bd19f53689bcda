//! Owners and partners killed at random moments, many of them, where `storm.rs` kills the ends of
//! channels: those of queues, services, pools, memory, semaphores and timelines, and members.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use warpipe::{
    Change, Client, ClientOptions, Error, LentBuffer, LimitFault, Loss, Members, PoolClient,
    Semaphore, Ticket, Timeline, Worker, WorkerOptions,
};
use warpipe_testkit::{Rng, eventually};

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::device_words::wrong_words;
use crate::payload::{fill_input, input_layout, result_of, work};
use crate::peer::{
    Answer, Batch, HolderOrder, Order, Peer, PublisherPlan, SemaphoreOrder, SignalOrder, Task,
};

pub(super) const CASES: &[Case] = &[
    case(
        "owners of a queue are killed at any moment: its worker fails, and leases no job twice",
        queues,
    ),
    case(
        "servers are killed at any moment, and every request is answered once and correctly",
        servers,
    ),
    case(
        "clients are killed at any moment, and the server continues",
        clients,
    ),
    case(
        "owners of a pool are killed at any moment: blocks stay whole, and borrowers get an error",
        pools,
    ),
    case(
        "owners of memory are killed at any moment: it stays whole where it is open",
        memory,
    ),
    case(
        "creators of a semaphore are killed at any moment: members fail, and no stream waits",
        semaphores,
    ),
    case(
        "a timeline's waiters are killed at any moment, and its values reach the others",
        waiters,
    ),
    case(
        "members are killed at any moment, and each death is reported once",
        members,
    ),
    case(
        "owners of every kind are killed while they begin, and opening them is a typed error",
        beginners,
    ),
];

const fn case(name: &'static str, run: fn(&Context) -> Result<()>) -> Case {
    Case::new(name, run).ends_clients().long(1800)
}

const WORDS: u64 = 256;
/// Jobs of one owner.
const JOBS: u64 = 200;
/// A pool's block.
const BYTES: u64 = 2 << 20;
/// Kills of each storm, unless more were asked for.
const SHORT: u32 = 5;

/// In which a victim is killed, once it works.
fn pause(rng: &mut Rng, most_us: u64) {
    std::thread::park_timeout(Duration::from_micros(rng.u64(..most_us)));
}

/// Kills of a long storm after which it is seen that nothing is left. That takes 0.1 s, in which
/// the threads that close descriptors end; a leak stays until the next look.
const LOOK_EVERY: u32 = 10;

/// One kill after the other, after which nothing may be left.
fn storm(context: &Context, mut one: impl FnMut(Peer, &mut Rng, u64) -> Result<()>) -> Result<()> {
    let mut rng = context.rng();
    let guard = context.guard();
    let kills = context.kills(SHORT, 300, 60);
    for kill in 1..=kills {
        let words = || format!("kill {kill}");
        let victim = context.mortal(&mut rng)?;
        one(victim, &mut rng, kill.into()).with_context(words)?;
        context.orphans_end()?;
        context.domain.clean()?;
        if kills <= LOOK_EVERY || kill % LOOK_EVERY == 0 || kill == kills {
            guard.settles().with_context(words)?;
        }
    }
    context.figure_storm(kills)
}

/// Kills the victim within `most_us`, while the survivor does one thing after the other, until it
/// fails. Returns the error that is no end of a wait.
fn kill_under(
    victim: &mut Peer,
    rng: &mut Rng,
    most_us: u64,
    mut step: impl FnMut() -> warpipe::Result<()>,
) -> Result<Error> {
    std::thread::scope(|scope| {
        let killer = scope.spawn(|| {
            pause(rng, most_us);
            victim.kill()
        });
        let begun = Instant::now();
        let outcome = loop {
            match step() {
                Ok(())
                | Err(
                    Error::Timeout { .. }
                    | Error::Limit(LimitFault::Memory { .. })
                    | Error::Lost(Loss::Sample { .. }),
                ) => {}
                Err(error) => break Ok(error),
            }
            if begun.elapsed() > 2 * PATIENCE {
                break Err(anyhow!("the survivor gets no error"));
            }
        };
        killer.join().map_err(|_| anyhow!("a panic"))??;
        outcome
    })
}

fn queues(context: &Context) -> Result<()> {
    let stream = context.stream()?;
    let mut leased = 0;
    storm(context, |mut victim, rng, _| {
        victim.task(Task::Own("jobs".into()))?;
        let options = WorkerOptions {
            answer_timeout: context.wait(rng),
            ..context.worker_options()
        };
        let mut worker = Worker::open("jobs", options, Duration::ZERO)?;
        let batch =
            Batch::of(JOBS, WORDS, rng.u64(..) >> 16).slow(Duration::from_micros(rng.u64(..300)));
        victim.send(&Order::Task(Task::Submit {
            queue: "jobs".into(),
            batch,
        }))?;
        // In any order: a job whose input is not complete yet does not hold up those behind it.
        let (mut seen, mut again) = (BTreeSet::new(), 0);
        // The jobs that this worker gave back, since there was no room for their results in time.
        let mut given_back = BTreeMap::new();
        let outcome = kill_under(&mut victim, rng, 20_000, || {
            let lease = worker.lease(&stream, PATIENCE)?;
            leased += 1;
            let (job, attempt) = (lease.job, lease.attempt);
            let is_due = match given_back.remove(&job) {
                Some(earlier) => attempt == earlier + 1,
                None => attempt == 1 && seen.insert(job),
            };
            again += u64::from(!is_due);
            let done =
                work(&lease, Duration::ZERO).and_then(|output| lease.complete(output, &stream));
            if done.is_err() {
                given_back.insert(job, attempt);
            }
            done
        })?;
        ensure!(again == 0, "{again} of {seen:?} came twice");
        ensure!(
            matches!(
                outcome,
                Error::PeerGone {
                    graceful: false,
                    ..
                }
            ),
            "its worker got {outcome}"
        );
        drop(worker);
        Ok(stream.synchronize(PATIENCE)?)
    })?;
    context.figure("leased", leased);
    Ok(())
}

fn servers(context: &Context) -> Result<()> {
    let stream = context.stream()?;
    let mut replies = 0u64;
    let idle_ms = 1000 * PATIENCE.as_millis() as u64;
    storm(context, |mut victim, rng, kill| {
        let client = Client::new(
            "sum",
            ClientOptions {
                max_attempts: 1000,
                ..context.domain.on(&context.device)
            },
        )?;
        let mut heir = context.peer()?;
        for peer in [&mut victim, &mut heir] {
            peer.task(Task::Serve("sum".into()))?;
            peer.send(&Order::Task(Task::ServeOn {
                slow_us: rng.u64(..1_000),
                idle_ms,
            }))?;
        }
        let mut pending = Vec::new();
        for seed in 1000 * kill..1000 * kill + 10 {
            let input = fill_input(
                client.loan(&input_layout(WORDS)?)?,
                seed,
                Duration::ZERO,
                &stream,
            )?;
            pending.push((
                seed,
                client
                    .request(input, &stream, 3 * PATIENCE)
                    .map_err(Error::from)?,
            ));
        }
        pause(rng, 20_000);
        victim.kill()?;
        for (seed, asked) in pending {
            let reply = asked.wait(&stream, PATIENCE)?;
            ensure!(
                reply.to_vec(PATIENCE)? == result_of(WORDS, seed),
                "the reply to {seed} is wrong"
            );
            replies += 1;
        }
        heir.kill()?;
        drop(client);
        Ok(stream.synchronize(PATIENCE)?)
    })?;
    context.figure("replies", replies);
    Ok(())
}

fn clients(context: &Context) -> Result<()> {
    let stream = context.stream()?;
    let mut server = context.peer()?;
    server.task(Task::Serve("sum".into()))?;
    let idle_ms = 1000 * PATIENCE.as_millis() as u64;
    server.send(&Order::Task(Task::ServeOn {
        slow_us: 200,
        idle_ms,
    }))?;
    storm(context, |mut victim, rng, kill| {
        let batch = Batch::of(1_000_000, WORDS, rng.u64(..) >> 16);
        victim.send(&Order::Task(Task::Call {
            service: "sum".into(),
            batch,
        }))?;
        pause(rng, 50_000);
        victim.kill()?;
        let client = context.client("sum")?;
        for seed in 1000 * kill..1000 * kill + 3 {
            let input = fill_input(
                client.loan(&input_layout(WORDS)?)?,
                seed,
                Duration::ZERO,
                &stream,
            )?;
            let reply = client.call(input, &stream, 3 * PATIENCE)?;
            ensure!(
                reply.to_vec(PATIENCE)? == result_of(WORDS, seed),
                "the reply to {seed} is wrong"
            );
        }
        drop(client);
        Ok(stream.synchronize(PATIENCE)?)
    })?;
    server.kill()
}

/// The ticket that a victim that is about to be killed has answered with, if it came so far.
fn last_ticket(victim: &mut Peer) -> Result<Option<Ticket>> {
    let lines = victim.last_lines()?;
    let mut texts = lines
        .iter()
        .filter_map(|line| match serde_json::from_str(line) {
            Ok(Answer::Text(text)) => Some(text),
            _ => None,
        });
    texts.next_back().map(|text| Ok(text.parse()?)).transpose()
}

fn own_pool(name: &str) -> Order {
    Order::Hold(HolderOrder::Pool {
        name: name.into(),
        limit: 8 * BYTES,
    })
}

fn pools(context: &Context) -> Result<()> {
    let (stream, mut error_counters) = (context.stream()?, context.error_counters()?);
    let mut blocks = 0u64;
    storm(context, |mut victim, rng, seed| {
        victim.ask(&own_pool("pool"))?;
        let client = PoolClient::open("pool", context.domain.on(&context.device), Duration::ZERO)?;
        let ticket = victim
            .text(&Order::Hold(HolderOrder::Lend { bytes: BYTES, seed }))?
            .parse::<Ticket>()?;
        let lent = LentBuffer::open(&ticket, &context.device, Duration::ZERO)?;
        victim.send(&Order::Hold(HolderOrder::Lend {
            bytes: BYTES,
            seed: seed + 1,
        }))?;
        let wait = context.wait(rng);
        let outcome = kill_under(&mut victim, rng, 5_000, || {
            client.allocate(BYTES, wait)?.free(&stream)?;
            blocks += 1;
            Ok(())
        })?;
        ensure!(
            matches!(
                outcome,
                Error::PeerGone {
                    graceful: false,
                    ..
                }
            ),
            "the client got {outcome}"
        );
        ensure!(
            wrong_words(&lent, &stream, &mut error_counters, seed)? == 0,
            "a lent block is torn"
        );
        if let Some(ticket) = last_ticket(&mut victim)? {
            let late = LentBuffer::open(&ticket, &context.device, Duration::ZERO);
            ensure!(late.is_err(), "a dead owner's ticket opens");
        }
        drop((lent, client));
        Ok(stream.synchronize(PATIENCE)?)
    })?;
    context.figure("blocks", blocks);
    Ok(())
}

fn publish(name: String, seed: u64) -> Order {
    Order::Hold(HolderOrder::Publish {
        name,
        words: WORDS,
        seed,
        is_writable: false,
    })
}

fn memory(context: &Context) -> Result<()> {
    let (stream, mut error_counters) = (context.stream()?, context.error_counters()?);
    storm(context, |mut victim, rng, seed| {
        let ticket = victim
            .text(&publish(format!("weights{seed}"), seed))?
            .parse::<Ticket>()?;
        victim.send(&publish(format!("more{seed}"), seed + 1))?;
        let opened = ticket.open(&context.device, Duration::ZERO)?;
        pause(rng, 5_000);
        victim.kill()?;
        ensure!(
            wrong_words(&opened, &stream, &mut error_counters, seed)? == 0,
            "memory of the dead is torn"
        );
        if let Some(ticket) = last_ticket(&mut victim)? {
            ensure!(
                ticket.open(&context.device, Duration::ZERO).is_err(),
                "a dead owner's ticket opens"
            );
        }
        drop(opened);
        Ok(stream.synchronize(PATIENCE)?)
    })
}

fn create(name: &str, permits: u32) -> Order {
    Order::Semaphore(SemaphoreOrder::Create {
        name: name.into(),
        permits,
    })
}

fn semaphores(context: &Context) -> Result<()> {
    let stream = context.stream()?;
    let mut turns = 0u64;
    storm(context, |mut victim, rng, _| {
        victim.ask(&create("turns", rng.u64(1..=3) as u32))?;
        victim.send(&Order::Semaphore(SemaphoreOrder::BeSlow {
            slow_us: rng.u64(..2_000),
        }))?;
        let member = Semaphore::open("turns", context.domain.on(&context.device), PATIENCE)?;
        let wait = context.wait(rng);
        let outcome = kill_under(&mut victim, rng, 10_000, || {
            member.acquire(&stream, wait)?.release(&stream)?;
            turns += 1;
            Ok(())
        })?;
        ensure!(
            matches!(
                outcome,
                Error::PeerGone {
                    graceful: false,
                    ..
                }
            ),
            "a member got {outcome}"
        );
        stream
            .synchronize(PATIENCE)
            .context("the member's stream goes on")?;
        drop(member);
        Ok(())
    })?;
    context.figure("turns", turns);
    Ok(())
}

fn waiters(context: &Context) -> Result<()> {
    let timeline = Timeline::new("values", context.domain.on(&context.device))?;
    let stream = context.stream()?;
    let mut witness = context.peer()?;
    witness.signals(SignalOrder::OpenTimeline("values".into()))?;
    let mut value = 0;
    storm(context, |mut victim, rng, _| {
        victim.send(&Order::Signals(SignalOrder::OpenTimeline("values".into())))?;
        for ahead in 1..=4 {
            victim.send(&Order::Signals(SignalOrder::Wait(value + ahead)))?;
        }
        victim.send(&Order::Signals(SignalOrder::WaitHost(value + 4)))?;
        if rng.bool() {
            victim.answer()?.context("it opens")?;
        }
        pause(rng, 10_000);
        for ahead in 1..=4 {
            timeline.signal(&stream, value + ahead, PATIENCE)?;
            if ahead == 2 {
                victim.strike()?;
            }
        }
        value += 4;
        witness.signals(SignalOrder::Wait(value))?;
        witness.signals(SignalOrder::Synchronize)?;
        ensure!(
            witness.signals(SignalOrder::Check(value))? == Answer::Number(1),
            "{value} does not come"
        );
        victim.ended()?;
        Ok(stream.synchronize(PATIENCE)?)
    })?;
    witness.dismiss()
}

fn members(context: &Context) -> Result<()> {
    let watch = Members::new(context.domain.options())?;
    let mut all = 0;
    storm(context, |mut victim, rng, kill| {
        for number in 0..3 {
            victim.send(&Order::Join {
                name: format!("soul-{kill}-{number}"),
                role: String::new(),
            })?;
        }
        victim.answer()?.context("it joins")?;
        pause(rng, 5_000);
        victim.kill()?;
        // How often each was reported joined, and dead. One that died before anybody
        // looked is removed without a word.
        let mut reported: BTreeMap<String, (u32, u32)> = BTreeMap::new();
        let mut is_over = || -> Result<bool> {
            while let Some(change) = watch.changes(Duration::ZERO)? {
                match change {
                    Change::Joined(member) => reported.entry(member.name).or_default().0 += 1,
                    Change::Died(member) => reported.entry(member.name).or_default().1 += 1,
                    Change::Stalled(_) | Change::Recovered(_) => {}
                    other => bail!("a killed member is reported as {other:?}"),
                }
            }
            Ok(reported.values().all(|&counts| counts == (1, 1)) && watch.list()?.is_empty())
        };
        let mut failed = None;
        let ended = eventually(PATIENCE, || {
            is_over().unwrap_or_else(|error| failed.replace(error).is_none())
        });
        failed.map_or(Ok(()), Err)?;
        ensure!(
            ended,
            "joined and died are reported {reported:?}, and {:?} are left",
            watch.list()
        );
        all += reported.len();
        Ok(())
    })?;
    context.figure("reported", all);
    Ok(())
}

/// How a kind begins in a victim, and how a survivor opens it.
type Beginning = (fn() -> Order, fn(&Context) -> warpipe::Result<()>);

const BEGINNINGS: &[Beginning] = &[
    (
        || Order::Publish(PublisherPlan::of("new")),
        |context| context.subscriber("new").map(drop),
    ),
    (
        || Order::Task(Task::Own("new".into())),
        |context| context.worker("new").map(drop),
    ),
    (
        || own_pool("new"),
        |context| {
            PoolClient::open("new", context.domain.on(&context.device), Duration::ZERO).map(drop)
        },
    ),
    (
        || create("new", 1),
        |context| {
            Semaphore::open("new", context.domain.on(&context.device), Duration::ZERO).map(drop)
        },
    ),
    (
        || Order::Signals(SignalOrder::CreateTimeline("new".into())),
        |context| {
            Timeline::open("new", context.domain.on(&context.device), Duration::ZERO).map(drop)
        },
    ),
];

fn beginners(context: &Context) -> Result<()> {
    let (mut opened, mut refused) = (0u64, 0u64);
    storm(context, |mut victim, rng, kill| {
        let (begin, open) = BEGINNINGS[kill as usize % BEGINNINGS.len()];
        victim.send(&begin())?;
        std::thread::scope(|scope| {
            let killer = scope.spawn(|| {
                pause(rng, 15_000);
                victim.kill()
            });
            while !killer.is_finished() {
                match open(context) {
                    Ok(()) => opened += 1,
                    Err(
                        Error::NotFound { .. }
                        | Error::PeerGone { .. }
                        | Error::Handshake { .. }
                        | Error::Timeout { .. },
                    ) => refused += 1,
                    Err(error) => bail!("opening gave {error:?}"),
                }
            }
            killer.join().map_err(|_| anyhow!("a panic"))?
        })
    })?;
    context.figure("opened", opened);
    context.figure("refused", refused);
    Ok(())
}
