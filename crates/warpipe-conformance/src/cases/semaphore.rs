//! Semaphores between processes, and after deaths.

use std::path::PathBuf;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use warpipe::{Error, Kind, Semaphore};
use warpipe_testkit::{Rng, eventually};

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::peer::{Answer, Board, Order, Peer, SemaphoreOrder};
use warpipe::OptionalExtension;

pub(super) const CASES: &[Case] = &[
    Case::new(
        "a semaphore: 16 processes, never more holders than permits, and no waiter is starved",
        contention,
    )
    .long(600),
    Case::new(
        "a semaphore: a blocked acquire times out, and one without a wait returns at once",
        timeouts,
    ),
    Case::new(
        "a semaphore: the next holder's stream sees all writes of the last holder's slow kernel",
        order,
    ),
    Case::new(
        "a semaphore without its waits shows unfinished data (negative control)",
        order_control,
    ),
    Case::new(
        "a semaphore: a killed holder's permit and a killed waiter's slot are reclaimed",
        killed_holder_and_waiter,
    ),
    Case::new(
        "a semaphore: streams continue when a holder is killed after its release",
        killed_after_release,
    )
    .ends_clients(),
    Case::new(
        "a semaphore: a member acquires although the last holder is killed while the two connect",
        killed_while_connecting,
    )
    .limit(180)
    .ends_clients(),
    Case::new(
        "a semaphore that its creator drops while its stream waits for a holder that is killed",
        dropped_too_early,
    )
    .ends_clients(),
    Case::new(
        "a semaphore: streams continue when the last holder and the creator are killed",
        both_killed,
    )
    .ends_clients(),
    Case::new(
        "a semaphore's creator is killed: waiters get an error, held permits stay valid",
        killed_creator,
    )
    .ends_clients(),
    Case::new(
        "a semaphore under random kills: one at a time, and the count is right at the end",
        storm,
    )
    .ends_clients()
    .limit(180)
    .long(900),
];

const NAME: &str = "turns";

/// Processes that compete.
const PROCESSES: usize = 16;

/// The longest kernel there is: no wait for its end, its process is killed.
const FOR_EVER: Duration = Duration::from_secs(10);

fn create(context: &Context, permits: u32) -> Result<Semaphore> {
    Ok(Semaphore::new(
        NAME,
        permits,
        context.domain.on(&context.device),
    )?)
}

fn open(context: &Context) -> Result<Peer> {
    open_with(context, true)
}

fn open_with(context: &Context, waits: bool) -> Result<Peer> {
    open_by(context.peer()?, waits)
}

fn open_by(mut peer: Peer, waits: bool) -> Result<Peer> {
    ask(
        &mut peer,
        SemaphoreOrder::Open {
            name: NAME.into(),
            waits,
        },
    )?;
    Ok(peer)
}

fn ask(peer: &mut Peer, order: SemaphoreOrder) -> Result<Answer> {
    peer.ask(&Order::Semaphore(order))
}

fn number(answer: Answer) -> Result<u64> {
    match answer {
        Answer::Number(number) => Ok(number),
        other => bail!("{other:?} instead of a number"),
    }
}

fn board(context: &Context) -> Result<(PathBuf, Board)> {
    let (board, path) = Board::create(&context.device)?;
    Ok((path, board))
}

fn text(path: &std::path::Path) -> String {
    path.to_string_lossy().into_owned()
}

/// All permits are free again, and no waiter is left.
fn is_restored(semaphore: &Semaphore) -> Result<()> {
    let is_so = || {
        semaphore.state().available == semaphore.state().permits && semaphore.state().waiting == 0
    };
    let restored = eventually(PATIENCE, is_so);
    let (free, all) = (semaphore.state().available, semaphore.state().permits);
    ensure!(
        restored,
        "{free} of {all} permits are free, {} wait",
        semaphore.state().waiting
    );
    Ok(())
}

fn contention(context: &Context) -> Result<()> {
    let rounds = u64::from(context.rounds(100, 2_000, 1_000));
    let (path, board) = board(context)?;
    let mut peers = (0..PROCESSES)
        .map(|_| context.peer())
        .collect::<Result<Vec<_>>>()?;
    for permits in [1, 3] {
        let semaphore = create(context, permits)?;
        let visited = board.visits().load(SeqCst);
        for peer in &mut peers {
            ask(
                peer,
                SemaphoreOrder::Open {
                    name: NAME.into(),
                    waits: true,
                },
            )?;
        }
        for peer in &mut peers {
            peer.send(&Order::Semaphore(SemaphoreOrder::Compete {
                board: text(&path),
                rounds,
            }))?;
        }
        let mut most = 0;
        for peer in &mut peers {
            most = most.max(number(peer.answer()??)?);
        }
        // At most every other process goes first, and those that looked before this one
        // queued.
        ensure!(
            most <= 2 * PROCESSES as u64,
            "{most} permits went to others while one waited"
        );
        ensure!(
            board.crowds().load(SeqCst) == 0,
            "more than {permits} were inside"
        );
        ensure!(
            board.visits().load(SeqCst) - visited == rounds * PROCESSES as u64,
            "everybody had his share"
        );
        is_restored(&semaphore)?;
        context.figure(&format!("most_passed_by_{permits}"), most);
    }
    peers.into_iter().try_for_each(Peer::dismiss)
}

fn timeouts(context: &Context) -> Result<()> {
    let semaphore = create(context, 2)?;
    let stream = context.stream()?;
    let mut peer = open(context)?;
    let acquire = |timeout_ms, on_stream| SemaphoreOrder::Acquire {
        timeout_ms,
        on_stream,
    };
    ask(&mut peer, acquire(1_000, true))?;
    let ours = semaphore
        .acquire(&stream, Duration::ZERO)
        .optional()?
        .context("the second of two permits")?;
    ensure!(
        semaphore
            .acquire(&stream, Duration::ZERO)
            .optional()?
            .is_none()
            && semaphore.acquire_host(Duration::ZERO).optional()?.is_none(),
        "there is no third"
    );
    let late = semaphore
        .acquire(&stream, Duration::from_millis(20))
        .map(drop);
    ensure!(matches!(late, Err(Error::Timeout { .. })), "{late:?}");
    let theirs = peer.try_ask(&Order::Semaphore(acquire(20, false)))?;
    ensure!(
        theirs.as_ref().is_err_and(|fault| fault.kind == "Timeout"),
        "{theirs:?}"
    );
    // A waiter that comes before us: what is freed is its own, though we ask first when it is free.
    peer.send(&Order::Semaphore(acquire(
        PATIENCE.as_millis() as u64,
        false,
    )))?;
    ensure!(
        eventually(PATIENCE, || semaphore.state().waiting == 1),
        "the peer waits"
    );
    ensure!(
        semaphore.acquire_host(Duration::ZERO).optional()?.is_none(),
        "nobody overtakes"
    );
    ours.release(&stream)?;
    ensure!(peer.answer()?? == Answer::Done, "the peer is handed it");
    ask(&mut peer, SemaphoreOrder::Release)?;
    stream.synchronize(PATIENCE)?;
    is_restored(&semaphore)?;
    peer.dismiss()
}

fn order(context: &Context) -> Result<()> {
    let semaphore = create(context, 1)?;
    let (path, board) = board(context)?;
    let (mut first, mut second) = (open(context)?, open(context)?);
    let turns = |count, slow_us| SemaphoreOrder::Turns {
        board: text(&path),
        count,
        slow_us,
    };
    // Exactly what the control does, and then many at once.
    ask(&mut first, turns(1, 1_000_000))?;
    ask(&mut second, turns(1, 0))?;
    ensure!(
        number(ask(&mut second, SemaphoreOrder::Wrong)?)? == 0,
        "the second sees the first's data"
    );
    let rounds = context.rounds(50, 2_000, 1_000).into();
    first.send(&Order::Semaphore(turns(rounds, 500)))?;
    second.send(&Order::Semaphore(turns(rounds, 500)))?;
    for peer in [&mut first, &mut second] {
        peer.answer()??;
    }
    for peer in [&mut first, &mut second] {
        ensure!(
            number(ask(peer, SemaphoreOrder::Wrong)?)? == 0,
            "each sees the other's data"
        );
    }
    drop(semaphore.acquire_host(PATIENCE)?);
    drop(board);
    first.dismiss()?;
    second.dismiss()
}

fn order_control(context: &Context) -> Result<()> {
    let _semaphore = create(context, 1)?;
    let (path, board) = board(context)?;
    let (mut first, mut second) = (open(context)?, open_with(context, false)?);
    let turns = |slow_us| SemaphoreOrder::Turns {
        board: text(&path),
        count: 1,
        slow_us,
    };
    ask(&mut first, turns(1_000_000))?;
    ask(&mut second, turns(0))?;
    let wrong = number(ask(&mut second, SemaphoreOrder::Wrong)?)?;
    ensure!(
        wrong > 0,
        "without the wait the second must see unfinished data"
    );
    context.figure("wrong_words_without_waits", wrong);
    ask(&mut first, SemaphoreOrder::Wrong)?;
    drop(board);
    first.dismiss()?;
    second.dismiss()
}

fn killed_holder_and_waiter(context: &Context) -> Result<()> {
    let semaphore = create(context, 1)?;
    let acquire = SemaphoreOrder::Acquire {
        timeout_ms: PATIENCE.as_millis() as u64,
        on_stream: true,
    };
    for _ in 0..context.rounds(3, 50, 20) {
        let (mut holder, mut waiter) = (open(context)?, open(context)?);
        ask(&mut holder, acquire.clone())?;
        waiter.send(&Order::Semaphore(acquire.clone()))?;
        ensure!(
            eventually(PATIENCE, || semaphore.state().waiting == 1),
            "the waiter waits"
        );
        // The waiter first: what its holder then leaves must not go to the dead.
        waiter.kill()?;
        holder.kill()?;
        semaphore.acquire_host(PATIENCE)?.release_now();
        is_restored(&semaphore)?;
    }
    Ok(())
}

fn killed_after_release(context: &Context) -> Result<()> {
    let semaphore = create(context, 1)?;
    let mut witness = open(context)?;
    let stream = context.stream()?;
    for round in 0..context.rounds(2, 20, 10) {
        let mut victim = open(context)?;
        ask(
            &mut victim,
            SemaphoreOrder::BeSlow {
                slow_us: FOR_EVER.as_micros() as u64,
            },
        )?;
        // The creator's stream behind it, alone and with that of another process, which could let
        // both go.
        semaphore.acquire(&stream, PATIENCE)?.release(&stream)?;
        if round % 2 == 1 {
            ask(&mut witness, SemaphoreOrder::BeSlow { slow_us: 0 })?;
        }
        victim.kill()?;
        stream
            .synchronize(PATIENCE)
            .context("the creator's stream goes on")?;
        ask(&mut witness, SemaphoreOrder::Wrong).context("the witness's stream goes on")?;
        semaphore.acquire_host(PATIENCE)?.release_now();
        is_restored(&semaphore)?;
    }
    witness.dismiss()
}

fn killed_while_connecting(context: &Context) -> Result<()> {
    let semaphore = create(context, 1)?;
    let (stream, mut rng) = (context.stream()?, context.rng());
    for round in 0..context.rounds(12, 500, 100) {
        let mut victim = open(context)?;
        ask(
            &mut victim,
            SemaphoreOrder::BeSlow {
                slow_us: FOR_EVER.as_micros() as u64,
            },
        )?;
        // Another one each time, which is not connected to anybody; or the creator.
        let survivor = match round % 3 {
            0 => semaphore.clone(),
            _ => Semaphore::open(NAME, context.domain.on(&context.device), Duration::ZERO)?,
        };
        let spins = rng.u32(..40_000);
        let acquired = std::thread::scope(|scope| {
            let acquiring = scope.spawn(|| survivor.acquire(&stream, PATIENCE));
            (0..spins).for_each(|_| std::hint::spin_loop());
            let killed = victim.kill();
            let acquired = acquiring.join();
            killed.map(|()| acquired)
        })?;
        let permit = acquired.map_err(|_| anyhow::anyhow!("it panicked"))?;
        permit
            .with_context(|| format!("round {round}: the survivor acquires"))?
            .release(&stream)?;
        stream
            .synchronize(PATIENCE)
            .context("the survivor's stream goes on")?;
    }
    is_restored(&semaphore)
}

fn dropped_too_early(context: &Context) -> Result<()> {
    let semaphore = create(context, 1)?;
    let stream = context.stream()?;
    let mut victim = open(context)?;
    ask(
        &mut victim,
        SemaphoreOrder::BeSlow {
            slow_us: FOR_EVER.as_micros() as u64,
        },
    )?;
    semaphore.acquire(&stream, PATIENCE)?.release(&stream)?;
    drop(semaphore);
    ensure!(!stream.is_idle()?, "the stream waits for the victim");
    victim.kill()?;
    stream
        .synchronize(PATIENCE)
        .context("the creator's stream goes on")?;
    // And then the name is free.
    let mut again = None;
    let is_free = || {
        again = create(context, 1).ok();
        again.is_some()
    };
    ensure!(eventually(PATIENCE, is_free), "the name becomes free");
    Ok(())
}

fn both_killed(context: &Context) -> Result<()> {
    for creator_first in [true, false] {
        let mut creator = context.peer()?;
        ask(
            &mut creator,
            SemaphoreOrder::Create {
                name: NAME.into(),
                permits: 1,
            },
        )?;
        let semaphore = Semaphore::open(NAME, context.domain.on(&context.device), Duration::ZERO)?;
        let stream = context.stream()?;
        let mut victim = open(context)?;
        ask(
            &mut victim,
            SemaphoreOrder::BeSlow {
                slow_us: FOR_EVER.as_micros() as u64,
            },
        )?;
        let permit = semaphore.acquire(&stream, PATIENCE)?;
        let (early, late) = if creator_first {
            (&mut creator, &mut victim)
        } else {
            (&mut victim, &mut creator)
        };
        early.strike()?;
        late.kill()?;
        early.ended()?;
        stream
            .synchronize(PATIENCE)
            .context("the survivor's stream goes on")?;
        permit.release(&stream)?;
        stream.synchronize(PATIENCE)?;
    }
    Ok(())
}

fn killed_creator(context: &Context) -> Result<()> {
    let mut creator = context.peer()?;
    ask(
        &mut creator,
        SemaphoreOrder::Create {
            name: NAME.into(),
            permits: 1,
        },
    )?;
    let semaphore = Semaphore::open(NAME, context.domain.on(&context.device), Duration::ZERO)?;
    let stream = context.stream()?;
    let permit = semaphore.acquire(&stream, PATIENCE)?;
    let mut waiter = open(context)?;
    let acquire = SemaphoreOrder::Acquire {
        timeout_ms: 4 * PATIENCE.as_millis() as u64,
        on_stream: true,
    };
    waiter.send(&Order::Semaphore(acquire))?;
    ensure!(
        eventually(PATIENCE, || semaphore.state().waiting == 1),
        "the waiter waits"
    );
    creator.kill()?;
    let answer = waiter.answer()?;
    ensure!(
        answer.as_ref().is_err_and(|fault| fault.kind == "PeerGone"),
        "the waiter got {answer:?}"
    );
    permit.release(&stream)?;
    stream.synchronize(PATIENCE)?;
    let is_refused = || {
        matches!(
            semaphore.acquire_host(Duration::ZERO).optional(),
            Err(Error::PeerGone {
                kind: Kind::Semaphore,
                graceful: false,
                ..
            })
        )
    };
    ensure!(eventually(PATIENCE, is_refused), "an acquire is refused");
    waiter.dismiss()?;
    drop(semaphore);
    // The name is free for the next.
    create(context, 1).map(drop)
}

fn storm(context: &Context) -> Result<()> {
    let semaphore = create(context, 1)?;
    let (path, board) = board(context)?;
    let mut rng = context.rng();
    let join = |slot, rng: &mut Rng| -> Result<Peer> {
        let mut peer = open_by(context.mortal(rng)?, true)?;
        peer.send(&Order::Semaphore(SemaphoreOrder::CompeteUntilKilled {
            board: text(&path),
            slot,
        }))?;
        Ok(peer)
    };
    let mut peers = (0..6)
        .map(|slot| join(slot, &mut rng))
        .collect::<Result<Vec<_>>>()?;
    let kills = context.kills(12, 500, 200);
    for round in 0..kills {
        let before = board.visits().load(SeqCst);
        let slot = rng.u64(..peers.len() as u64) as usize;
        std::thread::park_timeout(Duration::from_micros(rng.u64(..2_000)));
        peers[slot].kill()?;
        let goes_on = eventually(PATIENCE, || board.visits().load(SeqCst) >= before + 20);
        ensure!(goes_on, "nobody gets in after kill {round}");
        peers[slot] = join(slot, &mut rng)?;
    }
    peers.iter_mut().try_for_each(Peer::kill)?;
    ensure!(
        board.crowds().load(SeqCst) == 0,
        "two of the living were inside at once"
    );
    is_restored(&semaphore)?;
    context.figure_storm(kills + 6)?;
    context.figure("visits", board.visits().load(SeqCst));
    Ok(())
}
