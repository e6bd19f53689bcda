//! A pool lends blocks to other processes: lent by ticket, returned, and reclaimed after a death.
//!
//! The owner keeps four blocks of memory and hands all of them out. A borrower opens the tickets,
//! finds the data of the owner's device in each block, works on it in place, and returns it behind
//! its own device work. A second borrower is killed (`SIGKILL`) while it holds a block and its
//! kernel is about to write into it: the block returns when the death is proven, and belongs to the
//! owner alone.
//!
//! **This module is marked for unsafe**: it launches kernels on device memory.
//!
//! ```text
//! cargo run -p warpipe --example pool
//! ```
//!
//! It ends with `ok: 4 blocks lent and given back, 1 taken back from the dead; all of 8192 KiB free
//! at the end`.

mod stage;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use stage::{Outcome, PATIENCE, Stage, ensure, play};
use warpipe::{
    Access, Buffer, Change, Error, LentBuffer, LimitFault, Member, MemberOptions, Members, Pool,
    PoolOptions, PoolStats, Ticket,
};

const NAME: &str = "scratch";
const BLOCKS: u64 = 4;
const BLOCK: u64 = 2 << 20;
const WORDS: u64 = BLOCK / 8;
const LIMIT: u64 = BLOCKS * BLOCK;
/// The value that the owner writes last.
const LAST: u64 = 1000;

fn main() -> ExitCode {
    play(&[], |stage| match stage.role() {
        "borrower" => borrow(stage),
        "doomed" => hold(stage),
        _ => own(stage),
    })
}

/// The file of a ticket. Tickets are texts: any other way to send them would do.
fn ticket_file(stage: &Stage, number: u64) -> PathBuf {
    stage.domain.path().join(format!("block-{number}.ticket"))
}

/// Adds one to every word of each block, in place, and returns it.
fn borrow(stage: &Stage) -> Outcome<String> {
    let stream = stage.device.stream()?;
    for number in 0..BLOCKS {
        let block = LentBuffer::open(
            &Ticket::read_file(ticket_file(stage, number), Duration::ZERO)?,
            &stage.device,
            Duration::ZERO,
        )?;
        ensure(holds(&block.to_vec(PATIENCE)?, number, 0), || {
            format!("block {number} came with a wrong word")
        })?;
        // Before the work: the block is not returned in any case before this stream has done it.
        block.used_on(&stream);
        // SAFETY: the block has WORDS words, lent for writing, and its owner does not touch it
        // until it is returned.
        unsafe { warpipe_kernels::touch(&stream, block.ptr(), WORDS)? };
        // Behind the work on the stream; this process waits for nothing.
        block.free(&stream)?;
    }
    stream.synchronize(PATIENCE)?;
    Ok(format!("worked on {BLOCKS} blocks and gave them back"))
}

/// Takes the first block, begins to write into it, and is killed.
fn hold(stage: &Stage) -> Outcome<String> {
    let stream = stage.device.stream()?;
    let block = LentBuffer::open(
        &Ticket::read_file(ticket_file(stage, 0), Duration::ZERO)?,
        &stage.device,
        Duration::ZERO,
    )?;
    block.used_on(&stream);
    // SAFETY: as in `borrow`.
    unsafe {
        warpipe_kernels::slow_fill(&stream, block.ptr(), WORDS, 666, Duration::from_secs(10))?
    };
    let options = MemberOptions {
        role: "borrower".into(),
        ..stage.domain.options()
    };
    let _member = Member::new("doomed", options)?;
    std::thread::park_timeout(PATIENCE);
    Err("nobody killed it".into())
}

fn own(stage: &Stage) -> Outcome<String> {
    let pool = Pool::new(
        NAME,
        PoolOptions {
            memory_limit: LIMIT,
            reserve: LIMIT,
            ..stage.domain.on(&stage.device)
        },
    )?;
    show("at first", &pool.stats(), [0, 0])?;
    lend_and_get_back(stage, &pool)?;
    take_back_from_the_dead(stage, &pool)?;
    let stats = pool.stats();
    show("at the end", &stats, [0, 0])?;
    ensure(stats.regions == 1 && stats.total_bytes == LIMIT, || {
        format!("{} regions were taken", stats.regions)
    })?;
    ensure(stats.high_water_bytes == LIMIT, || {
        format!("at most {} bytes were used", stats.high_water_bytes)
    })?;
    // Four lent, one for the borrower that is killed, and the whole.
    let count = stats.allocations;
    ensure(count == BLOCKS + 2, || {
        format!("{count} blocks were handed out")
    })?;
    Ok(format!(
        "{BLOCKS} blocks lent and given back, 1 taken back from the dead; all of {} KiB free at the end",
        LIMIT >> 10
    ))
}

fn lend_and_get_back(stage: &Stage, pool: &Pool) -> Outcome {
    let stream = stage.device.stream()?;
    let mut blocks = Vec::new();
    for number in 0..BLOCKS {
        let block = pool.allocate(BLOCK, Duration::ZERO)?;
        fill(&block, &stream, number)?;
        blocks.push(block);
    }
    // A ticket does not order work: lent memory must be complete by now.
    stream.synchronize(PATIENCE)?;
    for (block, number) in blocks.iter().zip(0..) {
        block
            .lend(Access::ReadWrite)?
            .write_file(ticket_file(stage, number))?;
    }
    let refused = pool.allocate(BLOCK, Duration::ZERO).err();
    ensure(
        matches!(refused, Some(Error::Limit(LimitFault::Memory { .. }))),
        || format!("a full pool said {refused:?}"),
    )?;
    stage.start("borrower")?.finish()?;
    show("given back by the borrower", &pool.stats(), [LIMIT, 0])?;
    for (block, number) in blocks.into_iter().zip(0..) {
        ensure(holds(&block.to_vec(PATIENCE)?, number, 1), || {
            format!("block {number} came back with a wrong word")
        })?;
        block.free(&stream)?;
    }
    stream.synchronize(PATIENCE)?;
    show("freed by the owner", &pool.stats(), [0, 0])
}

fn take_back_from_the_dead(stage: &Stage, pool: &Pool) -> Outcome {
    let members = Members::new(stage.domain.options())?;
    let block = pool.allocate(BLOCK, Duration::ZERO)?;
    block
        .lend(Access::ReadWrite)?
        .write_file(ticket_file(stage, 0))?;
    let doomed = stage.start("doomed")?;
    while !matches!(
        members.changes(PATIENCE)?.ok_or("nobody joined")?,
        Change::Joined(_)
    ) {}
    // The owner drops its handle: now the block is the borrower's alone, and stays so.
    drop(block);
    show("held by the doomed", &pool.stats(), [0, BLOCK])?;
    let refused = pool.allocate(LIMIT, Duration::ZERO).err();
    ensure(
        matches!(refused, Some(Error::Limit(LimitFault::Memory { .. }))),
        || format!("with a block lent, all: {refused:?}"),
    )?;
    println!("killing the doomed, process {}", doomed.pid());
    doomed.kill()?;
    // All of the pool: this needs the dead borrower's block, and waits for it.
    let all = pool.allocate(LIMIT, PATIENCE)?;
    show("taken back", &pool.stats(), [LIMIT, 0])?;
    let stream = stage.device.stream()?;
    fill(&all, &stream, LAST)?;
    ensure(holds(&all.to_vec(PATIENCE)?, LAST, 0), || {
        "somebody else writes into the block".into()
    })?;
    drop(all);
    Ok(())
}

fn fill(block: &Buffer, stream: &warpipe::Stream, seed: u64) -> Outcome {
    block.used_on(stream);
    // SAFETY: the block's bytes are whole words, and no other process uses them while the block is
    // not lent.
    unsafe { warpipe_kernels::fill(stream, block.ptr(), block.bytes() / 8, seed)? };
    Ok(())
}

/// Whether each word is the word of `seed`, plus `more`.
fn holds(bytes: &[u8], seed: u64, more: u64) -> bool {
    let words = bytes
        .chunks_exact(8)
        .map(|word| u64::from_ne_bytes(word.try_into().expect("chunks of 8 bytes")));
    words
        .zip(0..)
        .all(|(word, index)| word == warpipe_kernels::pattern(seed, index).wrapping_add(more))
}

/// Prints the statistics, and checks the bytes of the owner and of its borrowers.
fn show(when: &str, stats: &PoolStats, [owner, borrowers]: [u64; 2]) -> Outcome {
    let PoolStats {
        in_use_bytes,
        lent_bytes,
        waiting_bytes,
        allocations,
        waits,
        ..
    } = *stats;
    let kib = [in_use_bytes, lent_bytes, waiting_bytes].map(|bytes| bytes >> 10);
    println!(
        "{when}: owner {} KiB, lent {} KiB, waiting {} KiB; {allocations} blocks so far, {waits} of them waited for",
        kib[0], kib[1], kib[2]
    );
    let found = [in_use_bytes, lent_bytes, waiting_bytes];
    ensure(found == [owner, borrowers, 0], || {
        format!("{when}: {found:?} bytes, not {:?}", [owner, borrowers, 0])
    })
}
