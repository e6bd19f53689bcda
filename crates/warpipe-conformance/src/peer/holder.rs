//! A peer's orders for memory and pools. **This module is marked for unsafe**: it changes its user.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};
use warpipe::{
    Access, Buffer, Domain, LentBuffer, Memory, OpenOptions, Pool, PoolClient, PoolOptions,
    PublishOptions, Published, SharedMemory, Stream, Ticket,
};

use super::order::Answer;
use crate::PATIENCE;
use crate::context::Context;
use crate::device_words::{fill, wrong_words};
use crate::payload::ErrorCounters;

/// Orders about memory. Objects are named by their number, in the order in which
/// they came, each kind counted for itself.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum HolderOrder {
    /// Allocate, fill with a pattern, and publish. Answers with a ticket.
    Publish {
        /// The name.
        name: String,
        /// How many words.
        words: u64,
        /// Their pattern.
        seed: u64,
        /// A process that opens it may write.
        is_writable: bool,
    },
    /// Give up what was published last. Answers with the words that are not of this pattern.
    Withdraw {
        /// The pattern.
        seed: u64,
    },
    /// Send what was published last over a socket, as a bare descriptor.
    Send {
        /// The socket's path.
        path: String,
    },
    /// Open a ticket. Answers with the memory's number.
    Open {
        /// The ticket.
        ticket: Ticket,
        /// How long to wait for its owner.
        wait_ms: u64,
    },
    /// Check shared memory. Answers with the words that are not of this pattern.
    Check {
        /// Its number.
        number: usize,
        /// The pattern.
        seed: u64,
    },
    /// Drop shared memory.
    Close {
        /// Its number.
        number: usize,
    },
    /// Open a ticket with no descriptor left, which must fail. Answers with the fault.
    OpenWithoutDescriptors(Ticket),
    /// Keep a pool.
    Pool {
        /// Its name.
        name: String,
        /// Its memory limit.
        limit: u64,
    },
    /// Allocate of the own pool, and fill. Answers with a ticket that lends the block for writing.
    Lend {
        /// How many bytes.
        bytes: u64,
        /// The pattern.
        seed: u64,
    },
    /// Open a ticket of a pool. Answers with the block's number.
    Borrow(Ticket),
    /// Allocate of another's pool. Answers with the block's number.
    Allocate {
        /// The pool's name.
        name: String,
        /// How many bytes.
        bytes: u64,
        /// How long to wait for them.
        wait_ms: u64,
    },
    /// Check a borrowed block. Answers with the words that are not of this pattern.
    CheckBlock {
        /// Its number.
        number: usize,
        /// The pattern.
        seed: u64,
    },
    /// Write a borrowed block, late, and let it go at once. Answers when that is enqueued.
    FillAndFree {
        /// Its number.
        number: usize,
        /// The pattern.
        seed: u64,
        /// How late.
        slow_us: u64,
        /// Behind the stream that writes; false for the negative control: on another one.
        is_behind: bool,
    },
    /// Let a borrowed block go.
    FreeBlock {
        /// Its number.
        number: usize,
    },
    /// Wait until the peer's stream has done everything.
    Settle,
    /// Become another user for good (root alone can). From now on the domain is that of root.
    Become(u32),
}

/// A peer's memory. Dropped in this order: what it has of others before what it gave them.
#[derive(Default)]
pub(super) struct Holder {
    shared: Vec<Option<SharedMemory>>,
    lent: Vec<Option<LentBuffer>>,
    /// With the names of their pools.
    clients: Vec<(String, PoolClient)>,
    buffers: Vec<Buffer>,
    pool: Option<Pool>,
    published: Vec<Published>,
    tools: Option<(Stream, ErrorCounters)>,
    domain: Option<Domain>,
}

impl Holder {
    pub(super) fn carry_out(&mut self, context: &Context, order: HolderOrder) -> Result<Answer> {
        if self.tools.is_none() {
            self.tools = Some((context.stream()?, context.error_counters()?));
        }
        let (stream, error_counters) = self.tools.as_mut().context("made above")?;
        let device = &context.device;
        let domain = self.domain.as_ref().unwrap_or(&context.domain);
        match order {
            HolderOrder::Publish {
                name,
                words,
                seed,
                is_writable,
            } => {
                let memory = Memory::allocate(device, 8 * words)?;
                fill(&memory, stream, seed, Duration::ZERO, true)?;
                stream.synchronize(PATIENCE)?;
                let published = memory.publish(
                    &name,
                    PublishOptions {
                        access: access(is_writable),
                        ..domain.options()
                    },
                )?;
                let ticket = published.ticket(..)?;
                self.published.push(published);
                return Ok(Answer::Text(ticket.to_string()));
            }
            HolderOrder::Withdraw { seed } => {
                let published = self.published.pop().context("something published")?;
                return Ok(Answer::Number(wrong_words(
                    published.memory(),
                    stream,
                    error_counters,
                    seed,
                )?));
            }
            HolderOrder::Send { path } => {
                let published = self.published.last().context("something published")?;
                send(published.memory(), &path)?;
            }
            HolderOrder::Open { ticket, wait_ms } => {
                self.shared
                    .push(Some(ticket.open(device, Duration::from_millis(wait_ms))?));
                return Ok(Answer::Number(self.shared.len() as u64 - 1));
            }
            HolderOrder::Check { number, seed } => {
                let memory = self
                    .shared
                    .get(number)
                    .and_then(Option::as_ref)
                    .context("open memory")?;
                return Ok(Answer::Number(wrong_words(
                    memory,
                    stream,
                    error_counters,
                    seed,
                )?));
            }
            HolderOrder::Close { number } => {
                drop(self.shared.get_mut(number).context("open memory")?.take())
            }
            HolderOrder::OpenWithoutDescriptors(ticket) => {
                return without_descriptors(|| ticket.open(device, Duration::ZERO).map(drop));
            }
            HolderOrder::Pool { name, limit } => {
                let options = PoolOptions {
                    memory_limit: limit,
                    ..domain.on(device)
                };
                let pool = Pool::new(&name, options)?;
                self.pool = Some(pool);
            }
            HolderOrder::Lend { bytes, seed } => {
                let buffer = self
                    .pool
                    .as_ref()
                    .context("a pool")?
                    .allocate(bytes, Duration::ZERO)?;
                fill(&buffer, stream, seed, Duration::ZERO, true)?;
                stream.synchronize(PATIENCE)?;
                let ticket = buffer.lend(Access::ReadWrite)?;
                self.buffers.push(buffer);
                return Ok(Answer::Text(ticket.to_string()));
            }
            HolderOrder::Borrow(ticket) => {
                // It stays, and with it its mapping: a negative control writes memory that it has
                // released.
                let name = ticket.info().name;
                if !self.clients.iter().any(|(known, _)| known == name) {
                    let options: OpenOptions = domain.on(device);
                    let client = PoolClient::open(name, options, Duration::ZERO)?;
                    self.clients.push((name.to_string(), client));
                }
                self.lent
                    .push(Some(LentBuffer::open(&ticket, device, Duration::ZERO)?));
                return Ok(Answer::Number(self.lent.len() as u64 - 1));
            }
            HolderOrder::Allocate {
                name,
                bytes,
                wait_ms,
            } => {
                let known = self.clients.iter().find(|(known, _)| *known == name);
                let client = match known {
                    Some((_, client)) => client.clone(),
                    None => {
                        let client = PoolClient::open(&name, domain.on(device), Duration::ZERO)?;
                        self.clients.push((name, client.clone()));
                        client
                    }
                };
                self.lent.push(Some(
                    client.allocate(bytes, Duration::from_millis(wait_ms))?,
                ));
                return Ok(Answer::Number(self.lent.len() as u64 - 1));
            }
            HolderOrder::CheckBlock { number, seed } => {
                let block = self
                    .lent
                    .get(number)
                    .and_then(Option::as_ref)
                    .context("a block")?;
                return Ok(Answer::Number(wrong_words(
                    block,
                    stream,
                    error_counters,
                    seed,
                )?));
            }
            HolderOrder::FillAndFree {
                number,
                seed,
                slow_us,
                is_behind,
            } => {
                let block = self
                    .lent
                    .get_mut(number)
                    .and_then(Option::take)
                    .context("a block")?;
                fill(
                    &block,
                    stream,
                    seed,
                    Duration::from_micros(slow_us),
                    is_behind,
                )?;
                if is_behind {
                    block.free(stream)?
                } else {
                    block.free(&context.stream()?)?
                }
            }
            HolderOrder::FreeBlock { number } => {
                drop(self.lent.get_mut(number).context("a block")?.take())
            }
            HolderOrder::Settle => stream.synchronize(PATIENCE)?,
            HolderOrder::Become(uid) => {
                become_user(uid)?;
                self.domain = Some(Domain::of_user(context.domain.path(), 0)?);
            }
        }
        Ok(Answer::Done)
    }
}

fn access(is_writable: bool) -> Access {
    if is_writable {
        Access::ReadWrite
    } else {
        Access::Read
    }
}

/// Sends a descriptor and what must be known of it, as a user's own program might.
fn send(memory: &Memory, path: &str) -> Result<()> {
    let (fd, info) = (memory.export_fd()?, memory.info());
    let socket = UnixStream::connect(path).context("the case's socket")?;
    let fds = [fd.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    ensure!(
        ancillary.push(SendAncillaryMessage::ScmRights(&fds)),
        "room for a descriptor"
    );
    let text = serde_json::to_vec(&info)?;
    rustix::net::sendmsg(
        &socket,
        &[IoSlice::new(&text)],
        &mut ancillary,
        SendFlags::NOSIGNAL,
    )?;
    Ok(())
}

/// Does something with the limit of descriptors at what is open.
fn without_descriptors(work: impl FnOnce() -> warpipe::Result<()>) -> Result<Answer> {
    let before = getrlimit(Resource::Nofile);
    // Every number below the limit is taken.
    let mut fillers = Vec::new();
    let lowest = rustix::io::fcntl_dupfd_cloexec(std::io::stderr(), 0)?;
    let limit = 64 + std::os::fd::AsRawFd::as_raw_fd(&lowest) as u64;
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: Some(limit),
            maximum: before.maximum,
        },
    )?;
    while let Ok(fd) = rustix::io::fcntl_dupfd_cloexec(std::io::stderr(), 0) {
        fillers.push(fd);
    }
    let worked = work();
    drop(fillers);
    setrlimit(Resource::Nofile, before)?;
    worked?;
    Ok(Answer::Done)
}

fn become_user(uid: u32) -> Result<()> {
    // SAFETY: plain system calls on numbers; the C library changes all threads.
    let codes = unsafe { [libc::setgid(uid), libc::setuid(uid)] };
    ensure!(codes == [0, 0], "only root can become another user");
    Ok(())
}
