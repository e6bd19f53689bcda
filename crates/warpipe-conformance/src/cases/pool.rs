//! A pool: blocks that are lent to other processes, allocated by them, and come back, whichever
//! process dies.

use std::collections::HashMap;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use warpipe::{
    Access, Buffer, Error, Expiry, HandleFault, Kind, LentBuffer, LimitFault, Pool, PoolClient,
    PoolOptions, Quota, Ticket,
};
use warpipe_testkit::eventually;

use super::Case;
use super::handles::{NOBODY, open_to_others};
use crate::PATIENCE;
use crate::context::Context;
use crate::device_words::{fill, wrong_words};
use crate::peer::{Fault, HolderOrder, Order, Peer};

pub(super) const CASES: &[Case] = &[
    Case::new(
        "another process can use a lent block, which is free when both have released it",
        lent,
    ),
    Case::new(
        "a block is reused after its owner's stream has completed, unless freed on another stream",
        owner_busy,
    ),
    Case::new(
        "a block is reused after its borrower's stream, unless it was freed on another stream",
        peer_busy,
    ),
    Case::new(
        "a killed borrower's block is reclaimed, and not before its death",
        killed_borrower,
    )
    .ends_clients(),
    Case::new(
        "a borrower killed while it writes writes nothing into the next borrower's block",
        killed_writer,
    )
    .ends_clients(),
    Case::new(
        "peers allocate from a pool, wait for each other, and leave nothing",
        remote_allocation,
    ),
    Case::new(
        "a borrower that exits without releasing its blocks returns them",
        ended_borrower,
    ),
    Case::new(
        "a killed owner's blocks stay valid, and a request is a typed error",
        killed_owner,
    )
    .ends_clients(),
    Case::new(
        "a block that passes to another user is cleared, and to the same user it is not",
        other_user,
    ),
    Case::new(
        "users of a pool keep to their quotas and regions, also when one is killed while it works",
        tenants,
    )
    .ends_clients(),
    Case::new(
        "borrowers are killed at any moment and every block is reclaimed",
        storm,
    )
    .ends_clients()
    .long(900),
];

/// A block: as much as a pool of [`one`] has.
const BYTES: u64 = 2 << 20;

/// A pool of one block.
fn one(context: &Context) -> Result<Pool> {
    Ok(Pool::new(
        "pool",
        PoolOptions {
            memory_limit: BYTES,
            ..context.domain.on(&context.device)
        },
    )?)
}

fn ticket_of(peer: &mut Peer, order: HolderOrder) -> Result<Ticket> {
    Ok(peer.text(&Order::Hold(order))?.parse()?)
}

fn number(peer: &mut Peer, order: HolderOrder) -> Result<u64> {
    peer.number(&Order::Hold(order))
}

/// Whether a block is all of one pattern.
fn wrong(context: &Context, block: &Buffer, seed: u64) -> Result<u64> {
    wrong_words(
        block,
        &context.stream()?,
        &mut context.error_counters()?,
        seed,
    )
}

/// Fills a block and waits for that.
fn fill_now(context: &Context, block: &Buffer, seed: u64) -> Result<()> {
    let stream = context.stream()?;
    fill(block, &stream, seed, Duration::ZERO, true)?;
    Ok(stream.synchronize(PATIENCE)?)
}

fn is_full<T: std::fmt::Debug>(result: warpipe::Result<T>) -> Result<()> {
    match result {
        Err(Error::Limit(LimitFault::Memory {
            used: BYTES,
            limit: BYTES,
            ..
        })) => Ok(()),
        other => bail!("with all memory in use, {other:?}"),
    }
}

fn lent(context: &Context) -> Result<()> {
    let pool = one(context)?;
    let mut peer = context.peer()?;
    for owner_is_first in [true, false] {
        let block = pool.allocate(BYTES, Duration::ZERO)?;
        fill_now(context, &block, 1)?;
        let ticket = block.lend(Access::ReadWrite)?;
        let it = number(&mut peer, HolderOrder::Borrow(ticket.clone()))? as usize;
        ensure!(
            number(
                &mut peer,
                HolderOrder::CheckBlock {
                    number: it,
                    seed: 1
                }
            )? == 0,
            "the bytes are right"
        );
        let stats = pool.stats();
        ensure!(
            (stats.in_use_bytes, stats.lent_bytes, stats.peers) == (BYTES, BYTES, 1),
            "{stats:?}"
        );
        if owner_is_first {
            drop(block);
            is_full(pool.allocate(8, Duration::ZERO))?;
            peer.ask(&Order::Hold(HolderOrder::FreeBlock { number: it }))?;
        } else {
            let order = HolderOrder::FillAndFree {
                number: it,
                seed: 2,
                slow_us: 0,
                is_behind: true,
            };
            peer.ask(&Order::Hold(order))?;
            ensure!(
                eventually(PATIENCE, || pool.stats().lent_bytes == 0),
                "its stream says that it is done"
            );
            ensure!(
                wrong(context, &block, 2)? == 0,
                "what the peer wrote is read here"
            );
            is_full(pool.allocate(8, Duration::ZERO))?;
            drop(block);
        }
        drop(pool.allocate(BYTES, PATIENCE)?);
        match peer.try_ask(&Order::Hold(HolderOrder::Borrow(ticket)))? {
            Err(Fault { kind, text }) => {
                ensure!(
                    kind == "HandleFault::Expired" && text.contains("back"),
                    "{text}"
                )
            }
            Ok(answer) => bail!("a returned block was lent: {answer:?}"),
        }
    }
    peer.dismiss()?;
    ensure!(
        eventually(PATIENCE, || pool.stats().peers == 0),
        "a client that left is removed"
    );
    Ok(())
}

/// How long a stream is busy where its work must still be running when something else has been
/// done.
const LONG: Duration = Duration::from_secs(3);

fn owner_busy(context: &Context) -> Result<()> {
    let pool = one(context)?;
    let (busy, idle) = (context.stream()?, context.stream()?);
    for is_behind in [true, false] {
        let block = pool.allocate(BYTES, Duration::ZERO)?;
        let slow = if is_behind {
            Duration::from_millis(300)
        } else {
            LONG
        };
        fill(&block, &busy, 1, slow, is_behind)?;
        block.free(if is_behind { &busy } else { &idle })?;
        let next = if is_behind {
            is_full(pool.allocate(8, Duration::ZERO))?;
            pool.allocate(BYTES, PATIENCE)?
        } else {
            pool.allocate(BYTES, LONG / 2)
                .context("the control gets the block while it is written")?
        };
        fill_now(context, &next, 2)?;
        busy.synchronize(PATIENCE)?;
        let wrong = wrong(context, &next, 2)?;
        ensure!(
            (wrong == 0) == is_behind,
            "{wrong} wrong words, freed behind the stream: {is_behind}"
        );
    }
    Ok(())
}

fn peer_busy(context: &Context) -> Result<()> {
    let pool = one(context)?;
    let mut peer = context.peer()?;
    for is_behind in [true, false] {
        let block = pool.allocate(BYTES, Duration::ZERO)?;
        let it = number(
            &mut peer,
            HolderOrder::Borrow(block.lend(Access::ReadWrite)?),
        )? as usize;
        drop(block);
        let slow_us = if is_behind {
            Duration::from_millis(300)
        } else {
            LONG
        }
        .as_micros() as u64;
        peer.ask(&Order::Hold(HolderOrder::FillAndFree {
            number: it,
            seed: 1,
            slow_us,
            is_behind,
        }))?;
        let next = if is_behind {
            is_full(pool.allocate(8, Duration::ZERO))?;
            pool.allocate(BYTES, PATIENCE)?
        } else {
            pool.allocate(BYTES, LONG / 2)
                .context("the control gets the block while it is written")?
        };
        fill_now(context, &next, 2)?;
        peer.ask(&Order::Hold(HolderOrder::Settle))?;
        let wrong = wrong(context, &next, 2)?;
        ensure!(
            (wrong == 0) == is_behind,
            "{wrong} wrong words, freed behind the stream: {is_behind}"
        );
    }
    peer.dismiss()
}

fn killed_borrower(context: &Context) -> Result<()> {
    let pool = one(context)?;
    for _ in 0..3 {
        let block = pool.allocate(BYTES, Duration::ZERO)?;
        let mut peer = context.peer()?;
        number(&mut peer, HolderOrder::Borrow(block.lend(Access::Read)?))?;
        drop(block);
        is_full(pool.allocate(8, Duration::from_millis(100)))?;
        peer.stop()?;
        is_full(pool.allocate(8, Duration::from_millis(100))).context("stopped is not dead")?;
        peer.kill()?;
        drop(pool.allocate(BYTES, PATIENCE)?);
        let stats = pool.stats();
        ensure!((stats.lent_bytes, stats.peers) == (0, 0), "{stats:?}");
    }
    Ok(())
}

fn killed_writer(context: &Context) -> Result<()> {
    let pool = one(context)?;
    for slow_ms in [100, 500] {
        let block = pool.allocate(BYTES, Duration::ZERO)?;
        let mut peer = context.peer()?;
        let it = number(
            &mut peer,
            HolderOrder::Borrow(block.lend(Access::ReadWrite)?),
        )? as usize;
        drop(block);
        let slow_us = 1_000 * slow_ms;
        peer.ask(&Order::Hold(HolderOrder::FillAndFree {
            number: it,
            seed: 1,
            slow_us,
            is_behind: true,
        }))?;
        peer.strike()?;
        let next = pool.allocate(BYTES, PATIENCE)?;
        fill_now(context, &next, 2)?;
        peer.ended()?;
        // Longer than what it had enqueued.
        let late = context.stream()?;
        warpipe_kernels::spin(&late, Duration::from_millis(200 + slow_ms))?;
        late.synchronize(PATIENCE)?;
        ensure!(
            wrong(context, &next, 2)? == 0,
            "nobody else writes the next one's block"
        );
    }
    Ok(())
}

fn remote_allocation(context: &Context) -> Result<()> {
    let mut owner = context.peer()?;
    owner.ask(&Order::Hold(HolderOrder::Pool {
        name: "pool".into(),
        limit: 2 * BYTES,
    }))?;
    let client = PoolClient::open("pool", context.domain.on(&context.device), Duration::ZERO)?;
    let stream = context.stream()?;
    let mut error_counters = context.error_counters()?;
    let blocks: Vec<LentBuffer> = (0..2)
        .map(|_| client.allocate(BYTES, Duration::ZERO))
        .collect::<warpipe::Result<_>>()?;
    for (seed, block) in blocks.iter().enumerate() {
        fill(block, &stream, seed as u64, Duration::ZERO, true)?;
    }
    for (seed, block) in blocks.iter().enumerate() {
        ensure!(
            wrong_words(block, &stream, &mut error_counters, seed as u64)? == 0,
            "blocks do not overlap"
        );
    }
    match client.allocate(8, Duration::ZERO) {
        Err(Error::Limit(LimitFault::Memory { used, limit, .. })) => {
            ensure!((used, limit) == (2 * BYTES, 2 * BYTES))
        }
        other => bail!("with all memory in use, {other:?}"),
    }
    let mut other = context.peer()?;
    let wait_ms = PATIENCE.as_millis() as u64;
    other.send(&Order::Hold(HolderOrder::Allocate {
        name: "pool".into(),
        bytes: BYTES,
        wait_ms,
    }))?;
    let mut blocks = blocks.into_iter();
    let freed = blocks.next().context("a block")?;
    fill(&freed, &stream, 7, Duration::from_millis(100), true)?;
    freed.free(&stream)?;
    ensure!(
        other.answer()?? == crate::peer::Answer::Number(0),
        "it gets the released block"
    );
    let order = HolderOrder::FillAndFree {
        number: 0,
        seed: 8,
        slow_us: 0,
        is_behind: true,
    };
    other.ask(&Order::Hold(order))?;
    other.dismiss()?;
    drop(blocks);
    drop(client.allocate(BYTES, PATIENCE)?);
    drop(client);
    owner.dismiss()
}

fn ended_borrower(context: &Context) -> Result<()> {
    let pool = one(context)?;
    let block = pool.allocate(BYTES, Duration::ZERO)?;
    let mut peer = context.peer()?;
    number(&mut peer, HolderOrder::Borrow(block.lend(Access::Read)?))?;
    drop(block);
    peer.dismiss()?;
    drop(pool.allocate(BYTES, PATIENCE)?);
    Ok(())
}

fn killed_owner(context: &Context) -> Result<()> {
    let mut owner = context.peer()?;
    owner.ask(&Order::Hold(HolderOrder::Pool {
        name: "pool".into(),
        limit: 2 * BYTES,
    }))?;
    let ticket = ticket_of(
        &mut owner,
        HolderOrder::Lend {
            bytes: BYTES,
            seed: 3,
        },
    )?;
    let lent = LentBuffer::open(&ticket, &context.device, Duration::ZERO)?;
    let client = PoolClient::open("pool", context.domain.on(&context.device), Duration::ZERO)?;
    owner.kill()?;
    let (stream, mut error_counters) = (context.stream()?, context.error_counters()?);
    ensure!(
        wrong_words(&lent, &stream, &mut error_counters, 3)? == 0,
        "it is whole"
    );
    ensure!(
        eventually(PATIENCE, || client.is_owner_gone()),
        "its end is reported"
    );
    match client.allocate(8, Duration::ZERO) {
        Err(Error::PeerGone {
            kind: Kind::Pool,
            graceful: false,
            pid,
            ..
        }) => ensure!(pid == owner.id() as i32),
        other => bail!("of a dead owner, {other:?}"),
    }
    match LentBuffer::open(&ticket, &context.device, Duration::ZERO) {
        Err(Error::Handle {
            fault:
                HandleFault::Expired {
                    expiry: Expiry::Gone { died: true },
                    ..
                },
            ..
        }) => {}
        other => bail!("a dead owner's ticket gave {other:?}"),
    }
    lent.free(&stream)?;
    drop(client);
    match PoolClient::open("pool", context.domain.on(&context.device), Duration::ZERO) {
        Err(Error::NotFound {
            kind: Kind::Pool,
            was_there: true,
            ..
        }) => Ok(()),
        other => bail!("a pool left by the dead gave {other:?}"),
    }
}

fn other_user(context: &Context) -> Result<()> {
    open_to_others(context)?;
    let options = PoolOptions {
        memory_limit: BYTES,
        allow_uids: vec![NOBODY],
        ..context.domain.on(&context.device)
    };
    let pool = Pool::new("pool", options)?;
    let zeros = |block: &Buffer| -> Result<bool> {
        Ok(block.to_vec(PATIENCE)?.iter().all(|&byte| byte == 0))
    };
    let allocate = || HolderOrder::Allocate {
        name: "pool".into(),
        bytes: BYTES,
        wait_ms: PATIENCE.as_millis() as u64,
    };
    for (uid, sees_it) in [(None, true), (Some(NOBODY), false)] {
        let mut peer = context.peer()?;
        if let Some(uid) = uid {
            peer.ask(&Order::Hold(HolderOrder::Become(uid)))?;
        }
        let block = pool.allocate(BYTES, Duration::ZERO)?;
        fill_now(context, &block, 4)?;
        drop(block);
        let it = number(&mut peer, allocate())? as usize;
        let wrong = number(
            &mut peer,
            HolderOrder::CheckBlock {
                number: it,
                seed: 4,
            },
        )?;
        ensure!(
            (wrong == 0) == sees_it,
            "{wrong} words are not what {uid:?} had before"
        );
        let order = HolderOrder::FillAndFree {
            number: it,
            seed: 5,
            slow_us: 0,
            is_behind: true,
        };
        peer.ask(&Order::Hold(order))?;
        peer.ask(&Order::Hold(HolderOrder::Settle))?;
        let block = pool.allocate(BYTES, PATIENCE)?;
        ensure!(
            zeros(&block)? != sees_it,
            "what {uid:?} wrote is seen here: {sees_it}"
        );
        peer.dismiss()?;
    }
    Ok(())
}

/// A fault of this kind, with `part` in its text.
fn fails_with(peer: &mut Peer, order: HolderOrder, kind: &str, part: &str) -> Result<()> {
    match peer.try_ask(&Order::Hold(order))? {
        Err(fault) if fault.kind == kind && fault.text.contains(part) => Ok(()),
        other => bail!("instead of {kind} with {part:?}: {other:?}"),
    }
}

fn tenants(context: &Context) -> Result<()> {
    const OTHER: u32 = NOBODY - 1;
    open_to_others(context)?;
    let quota = Quota {
        bytes: BYTES,
        blocks: 4,
    };
    let pool = Pool::new(
        "pool",
        PoolOptions {
            memory_limit: 2 * BYTES,
            allow_uids: vec![NOBODY, OTHER],
            user_quota: quota,
            quota_for: HashMap::from([(OTHER, Quota::default())]),
            ..context.domain.on(&context.device)
        },
    )?;
    let allocate = |bytes, wait_ms| HolderOrder::Allocate {
        name: "pool".into(),
        bytes,
        wait_ms,
    };
    let mut peers = Vec::new();
    for uid in [NOBODY, OTHER] {
        let mut peer = context.peer()?;
        peer.ask(&Order::Hold(HolderOrder::Become(uid)))?;
        number(&mut peer, allocate(BYTES, 0))?;
        peers.push(peer);
    }
    let (mut killed, mut survivor) = (peers.remove(0), peers.remove(0));
    let of_user = format!("quota of user {NOBODY}");
    fails_with(&mut killed, allocate(8, 20), "LimitFault::Quota", &of_user)?;
    fails_with(&mut survivor, allocate(8, 20), "LimitFault::Memory", "pool")?;
    ensure!(pool.usage(NOBODY).region_bytes == BYTES && pool.usage(OTHER).region_bytes == BYTES);
    // Killed while its device writes the block.
    let order = HolderOrder::FillAndFree {
        number: 0,
        seed: 3,
        slow_us: 2_000_000,
        is_behind: true,
    };
    killed.ask(&Order::Hold(order))?;
    ensure!(
        pool.usage(NOBODY).bytes == BYTES,
        "it counts while the device writes it"
    );
    killed.kill()?;
    let block = pool.allocate_for(OTHER, BYTES, PATIENCE)?;
    ensure!(pool.usage(NOBODY).region_bytes == 0, "its region is gone");
    ensure!(
        block.to_vec(PATIENCE)?.iter().all(|&byte| byte == 0),
        "the next user reads zeros"
    );
    fill_now(context, &block, 9)?;
    let ticket = block.lend(Access::ReadWrite)?;
    let it = number(&mut survivor, HolderOrder::Borrow(ticket.clone()))? as usize;
    let check = HolderOrder::CheckBlock {
        number: it,
        seed: 9,
    };
    ensure!(number(&mut survivor, check)? == 0, "the bytes are right");
    // Neither another tenant nor the owner's user has that region.
    let mut stranger = context.peer()?;
    let of_other = format!("of user {OTHER}");
    let borrow = || HolderOrder::Borrow(ticket.clone());
    fails_with(&mut stranger, borrow(), "Refused", &of_other)?;
    stranger.ask(&Order::Hold(HolderOrder::Become(NOBODY)))?;
    survivor.dismiss()?;
    drop(block);
    number(&mut stranger, allocate(BYTES, PATIENCE.as_millis() as u64))?;
    ensure!(
        eventually(PATIENCE, || pool.usage(OTHER).bytes == 0),
        "what the survivor had is free once its end is noticed"
    );
    stranger.dismiss()
}

fn storm(context: &Context) -> Result<()> {
    const PEERS: usize = 3;
    let options = PoolOptions {
        memory_limit: 8 * BYTES,
        reserve: 8 * BYTES,
        ..context.domain.on(&context.device)
    };
    let pool = Pool::new("pool", options)?;
    let mut rng = context.rng();
    let guard = context.guard();
    let rounds = context.kills(12, 300, 90).div_ceil(PEERS as u32);
    for round in 0..rounds {
        let lent = pool.allocate(BYTES, PATIENCE)?;
        let ticket = lent.lend(Access::ReadWrite)?;
        let mut peers = (0..PEERS)
            .map(|_| context.mortal(&mut rng))
            .collect::<Result<Vec<_>>>()?;
        // They are there, with their devices.
        peers
            .iter_mut()
            .try_for_each(|peer| peer.ask(&Order::Hold(HolderOrder::Settle)).map(drop))?;
        for peer in &mut peers {
            peer.send(&Order::Hold(HolderOrder::Borrow(ticket.clone())))?;
            for number in 1..=4 {
                let bytes = BYTES / (1 + rng.u64(..8));
                peer.send(&Order::Hold(HolderOrder::Allocate {
                    name: "pool".into(),
                    bytes,
                    wait_ms: 5_000,
                }))?;
                let (seed, slow_us) = (rng.u64(..9), rng.u64(..3_000));
                let order = HolderOrder::FillAndFree {
                    number,
                    seed,
                    slow_us,
                    is_behind: true,
                };
                peer.send(&Order::Hold(order))?;
            }
        }
        drop(lent);
        std::thread::park_timeout(Duration::from_micros(rng.u64(..30_000)));
        peers.iter().try_for_each(Peer::strike)?;
        for peer in &mut peers {
            peer.ended()?;
        }
        let is_free = || pool.stats().peers == 0 && pool.stats().lent_bytes == 0;
        ensure!(
            eventually(PATIENCE, is_free),
            "round {round}: {:?}",
            pool.stats()
        );
        drop(
            pool.allocate(8 * BYTES, PATIENCE)
                .with_context(|| format!("all of it after round {round}"))?,
        );
        drop(peers);
        guard.settles()?;
    }
    context.figure_storm(rounds * PEERS as u32)
}
