//! Memory that is sent to other processes by ticket, or as a bare descriptor.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use warpipe::backend::testing::{Counting, Wrapped};
use warpipe::{
    Access, Device, DeviceFault, Error, Expiry, HandleFault, Kind, Memory, MemoryInfo,
    PublishOptions, SharedMemory, Ticket,
};
use warpipe_testkit::{eventually, wait_readable};

use super::{Case, skip};
use crate::PATIENCE;
use crate::context::Context;
use crate::device_words::{fill, wrong_words};
use crate::peer::{HolderOrder, Order, Peer};

pub(super) const CASES: &[Case] = &[
    Case::new(
        "memory of another process is read and written through a ticket",
        through_a_ticket,
    ),
    Case::new(
        "memory that tickets open twice is mapped once and closed in any order",
        opened_twice,
    ),
    Case::new(
        "a ticket goes through a file, which its reader waits for",
        through_a_file,
    ),
    Case::new(
        "memory is passed over a user's own socket as a bare descriptor",
        over_a_socket,
    ),
    Case::new(
        "a wait for a name opens the memory that its producer publishes later",
        later_producer,
    ),
    Case::new(
        "a ticket reports that its owner has closed, or that another process holds the name",
        closed_owner,
    ),
    Case::new(
        "open memory stays whole when its owner is killed, and a ticket reports the death",
        killed_owner,
    )
    .ends_clients(),
    Case::new(
        "shared memory is unmapped only after the streams that use it",
        kept_for_streams,
    ),
    Case::new(
        "a process without descriptors opens no ticket, and later it does",
        no_descriptors,
    ),
    Case::new(
        "only users on the allow list can open a ticket",
        other_users,
    ),
    Case::new(
        "memory of another GPU is opened by a ticket, or refused by name",
        other_device,
    ),
    Case::new(
        "importers are killed at any moment and leave nothing behind",
        killed_importers,
    )
    .ends_clients()
    .long(900),
];

const WORDS: u64 = 1 << 16;

/// A peer that publishes.
fn publisher(
    context: &Context,
    name: &str,
    seed: u64,
    is_writable: bool,
) -> Result<(Peer, Ticket)> {
    let mut peer = context.peer()?;
    let ticket = publish(&mut peer, name, seed, is_writable)?;
    Ok((peer, ticket))
}

fn publish(peer: &mut Peer, name: &str, seed: u64, is_writable: bool) -> Result<Ticket> {
    let order = HolderOrder::Publish {
        name: name.into(),
        words: WORDS,
        seed,
        is_writable,
    };
    Ok(peer.text(&Order::Hold(order))?.parse()?)
}

/// Whether a memory is all of one pattern.
fn is_whole(context: &Context, memory: &SharedMemory, seed: u64) -> Result<()> {
    let wrong = wrong_words(
        memory,
        &context.stream()?,
        &mut context.error_counters()?,
        seed,
    )?;
    ensure!(
        wrong == 0,
        "{wrong} of {} words are wrong",
        memory.bytes() / 8
    );
    Ok(())
}

/// The device behind a backend that counts: what it opens is not found to be open already.
fn counting(context: &Context) -> (Device, impl Fn(&str) -> u64) {
    let wrapped = Wrapped::new(context.device.backend().clone(), Counting::default());
    let device = Device::from_backend(wrapped.clone());
    (device, move |method: &str| {
        wrapped.hook().calls().get(method).copied().unwrap_or(0)
    })
}

fn through_a_ticket(context: &Context) -> Result<()> {
    let (mut peer, ticket) = publisher(context, "weights", 1, true)?;
    ensure!(
        (ticket.info().bytes, ticket.info().device)
            == (Some(8 * WORDS), Some(context.device.info().id)),
        "{ticket:?}"
    );
    let memory = ticket.open(&context.device, Duration::ZERO)?;
    is_whole(context, &memory, 1)?;
    let stream = context.stream()?;
    fill(&memory, &stream, 2, Duration::ZERO, true)?;
    stream.synchronize(PATIENCE)?;
    ensure!(
        peer.number(&Order::Hold(HolderOrder::Withdraw { seed: 2 }))? == 0,
        "what is written here is read there"
    );
    is_whole(context, &memory, 2)?;
    let half = memory.range(4 * WORDS, None)?;
    ensure!(
        half.to_vec(PATIENCE)? == memory.to_vec(PATIENCE)?[4 * WORDS as usize..],
        "a range is a part"
    );
    ensure!(
        matches!(
            memory.range(8 * WORDS - 8, 16),
            Err(Error::Argument {
                argument: "range",
                ..
            })
        ),
        "a range ends inside"
    );
    peer.dismiss()
}

fn opened_twice(context: &Context) -> Result<()> {
    let (peer, ticket) = publisher(context, "weights", 1, false)?;
    let (device, calls) = counting(context);
    for keeps_first in [true, false] {
        let before = (calls("import"), calls("release"));
        let first = ticket.open(&device, Duration::ZERO)?;
        let second = Ticket::to(&context.domain, "weights")?.open(&device, Duration::ZERO)?;
        ensure!(calls("import") == before.0 + 1, "the driver is asked once");
        ensure!(
            first.ptr() == second.ptr(),
            "the same memory has the same address"
        );
        let (kept, closed) = if keeps_first {
            (first, second)
        } else {
            (second, first)
        };
        drop(closed);
        is_whole(context, &kept, 1)?;
        ensure!(calls("release") == before.1, "it is open still");
        drop(kept);
        ensure!(
            eventually(PATIENCE, || calls("release") == before.1 + 1),
            "the last handle unmaps it"
        );
    }
    peer.dismiss()
}

fn through_a_file(context: &Context) -> Result<()> {
    let file = context.domain.path().join("weights.ticket");
    let (mut peer, reader) = (context.peer()?, file.clone());
    let waiting = std::thread::spawn(move || Ticket::read_file(reader, PATIENCE));
    publish(&mut peer, "weights", 3, false)?.write_file(&file)?;
    let ticket = waiting
        .join()
        .map_err(|_| anyhow::anyhow!("the reader panicked"))??;
    is_whole(context, &ticket.open(&context.device, Duration::ZERO)?, 3)?;
    std::fs::remove_file(file)?;
    peer.dismiss()
}

fn over_a_socket(context: &Context) -> Result<()> {
    let path = context.domain.path().join("own.socket");
    let listener = UnixListener::bind(&path)?;
    let (mut peer, _) = publisher(context, "weights", 4, false)?;
    peer.send(&Order::Hold(HolderOrder::Send {
        path: path.display().to_string(),
    }))?;
    ensure!(wait_readable(&listener, PATIENCE)?, "the peer connects");
    let (fd, info) = receive(&listener.accept()?.0)?;
    peer.answer()??;
    std::fs::remove_file(&path)?;
    let memory = Memory::import_fd(&context.device, &fd, &info, Access::Read)?;
    drop(fd);
    peer.dismiss()?;
    is_whole(context, &memory, 4).context("its maker has ended")
}

fn receive(socket: &std::os::unix::net::UnixStream) -> Result<(OwnedFd, MemoryInfo)> {
    ensure!(wait_readable(socket, PATIENCE)?, "the peer sends");
    let mut bytes = [0u8; 1024];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::net::recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = message {
            let fd = fds.next().context("a descriptor")?;
            return Ok((fd, serde_json::from_slice(&bytes[..got.bytes])?));
        }
    }
    bail!("no descriptor came")
}

fn later_producer(context: &Context) -> Result<()> {
    let ticket = Ticket::to(&context.domain, "late")?;
    match ticket.open(&context.device, Duration::ZERO) {
        Err(Error::NotFound {
            kind: Kind::Memory,
            was_there: false,
            ..
        }) => {}
        other => bail!("before its producer came, {other:?}"),
    }
    let mut waiting = context.peer()?;
    let wait_ms = PATIENCE.as_millis() as u64;
    waiting.send(&Order::Hold(HolderOrder::Open {
        ticket: ticket.clone(),
        wait_ms,
    }))?;
    let (producer, _) = publisher(context, "late", 5, false)?;
    waiting.answer()??;
    ensure!(
        waiting.number(&Order::Hold(HolderOrder::Check { number: 0, seed: 5 }))? == 0,
        "the bytes are right"
    );
    is_whole(context, &ticket.open(&context.device, Duration::ZERO)?, 5)?;
    waiting.dismiss()?;
    producer.dismiss()
}

fn closed_owner(context: &Context) -> Result<()> {
    let (mut peer, ticket) = publisher(context, "weights", 6, false)?;
    let memory = ticket.open(&context.device, Duration::ZERO)?;
    peer.ask(&Order::Hold(HolderOrder::Withdraw { seed: 6 }))?;
    // Also while the memory is open here, which stays as it was.
    match ticket.open(&context.device, Duration::ZERO) {
        Err(Error::Handle {
            fault:
                HandleFault::Expired {
                    expiry: Expiry::Gone { died: false },
                    ..
                },
            ..
        }) => {}
        other => bail!("after its owner closed, {other:?}"),
    }
    is_whole(context, &memory, 6)?;
    drop(memory);
    let later = publish(&mut peer, "weights", 7, false)?;
    match ticket.open(&context.device, PATIENCE) {
        Err(Error::Handle {
            fault:
                HandleFault::Expired {
                    expiry: Expiry::Replaced,
                    ..
                },
            ..
        }) => {}
        other => bail!("under a later owner, {other:?}"),
    }
    is_whole(context, &later.open(&context.device, Duration::ZERO)?, 7)?;
    peer.dismiss()
}

fn killed_owner(context: &Context) -> Result<()> {
    let (mut peer, ticket) = publisher(context, "weights", 8, true)?;
    let memory = ticket.open(&context.device, Duration::ZERO)?;
    peer.kill()?;
    is_whole(context, &memory, 8)?;
    let stream = context.stream()?;
    fill(&memory, &stream, 9, Duration::ZERO, true)?;
    stream.synchronize(PATIENCE)?;
    is_whole(context, &memory, 9)?;
    match ticket.open(&context.device, Duration::ZERO) {
        Err(Error::Handle {
            fault:
                HandleFault::Expired {
                    expiry: Expiry::Gone { died: true },
                    ..
                },
            ..
        }) => {}
        other => bail!("after its owner's death, {other:?}"),
    }
    match Ticket::to(&context.domain, "weights")?.open(&context.device, Duration::ZERO) {
        Err(Error::NotFound {
            was_there: true, ..
        }) => Ok(()),
        other => bail!("a name left by the dead gave {other:?}"),
    }
}

fn kept_for_streams(context: &Context) -> Result<()> {
    let (mut peer, ticket) = publisher(context, "weights", 1, true)?;
    let (device, calls) = counting(context);
    let stream = device.stream()?;
    let memory = ticket.open(&device, Duration::ZERO)?;
    fill(&memory, &stream, 2, Duration::from_millis(300), true)?;
    drop(memory);
    while !stream.is_idle()? {
        ensure!(
            calls("release") == 0 || stream.is_idle()?,
            "unmapped under a stream"
        );
        std::thread::yield_now();
    }
    ensure!(
        eventually(PATIENCE, || calls("release") == 1),
        "it is unmapped behind it"
    );
    ensure!(
        peer.number(&Order::Hold(HolderOrder::Withdraw { seed: 2 }))? == 0,
        "the stream has written it all"
    );
    peer.dismiss()
}

fn no_descriptors(context: &Context) -> Result<()> {
    let (peer, ticket) = publisher(context, "weights", 1, false)?;
    let mut poor = context.peer()?;
    match poor.try_ask(&Order::Hold(HolderOrder::OpenWithoutDescriptors(
        ticket.clone(),
    )))? {
        Err(fault) => ensure!(
            fault.kind == "Os" && fault.text.contains("os error 24"),
            "{fault}"
        ),
        Ok(answer) => bail!("without a descriptor, {answer:?}"),
    }
    poor.ask(&Order::Hold(HolderOrder::Open { ticket, wait_ms: 0 }))?;
    ensure!(
        poor.number(&Order::Hold(HolderOrder::Check { number: 0, seed: 1 }))? == 0,
        "the bytes are right"
    );
    poor.dismiss()?;
    peer.dismiss()
}

/// A user that every system has.
pub(super) const NOBODY: u32 = 65534;

/// Lets other users come as far as the domain, where its endpoints decide.
pub(super) fn open_to_others(context: &Context) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return skip("only root can become another user");
    }
    let mut folders = context.domain.path().ancestors().take(3);
    let open =
        |folder: &Path| std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o755));
    folders
        .try_for_each(open)
        .context("opening the domain to others")
}

fn other_users(context: &Context) -> Result<()> {
    open_to_others(context)?;
    let memory = Memory::allocate(&context.device, 8 * WORDS)?;
    let stream = context.stream()?;
    fill(&memory, &stream, 1, Duration::ZERO, true)?;
    stream.synchronize(PATIENCE)?;
    let closed = memory.publish("closed", context.domain.options())?;
    let others = memory.publish(
        "others",
        PublishOptions {
            allow_uids: vec![12345],
            ..context.domain.options()
        },
    )?;
    let open = memory.publish(
        "open",
        PublishOptions {
            allow_uids: vec![NOBODY],
            ..context.domain.options()
        },
    )?;
    let mut other_user = context.peer()?;
    other_user.ask(&Order::Hold(HolderOrder::Become(NOBODY)))?;
    for published in [&closed, &others] {
        match other_user.try_ask(&Order::Hold(HolderOrder::Open {
            ticket: published.ticket(..)?,
            wait_ms: 0,
        }))? {
            Err(fault) => ensure!(
                fault.kind == "Refused" && fault.text.contains("does not admit"),
                "{fault}"
            ),
            Ok(answer) => bail!("another user got {answer:?}"),
        }
    }
    other_user.ask(&Order::Hold(HolderOrder::Open {
        ticket: open.ticket(..)?,
        wait_ms: 0,
    }))?;
    ensure!(
        other_user.number(&Order::Hold(HolderOrder::Check { number: 0, seed: 1 }))? == 0,
        "the bytes are right"
    );
    other_user.dismiss()
}

fn other_device(context: &Context) -> Result<()> {
    if context.settings.devices < 2 {
        return skip("it needs two devices");
    }
    let mut peer = context.peer_on(1)?;
    let ticket = publish(&mut peer, "far", 1, false)?;
    match ticket.open(&context.device, Duration::ZERO) {
        Ok(memory) => {
            ensure!(
                memory.owner() != context.device.info().id,
                "it lies on the other device"
            );
            is_whole(context, &memory, 1)?;
        }
        Err(Error::Device {
            fault: DeviceFault::OutOfReach,
            text,
        }) => {
            ensure!(
                ticket
                    .info()
                    .device
                    .is_some_and(|id| text.contains(&id.to_string())),
                "the owner gets an error"
            );
        }
        Err(other) => bail!("neither open nor out of reach: {other}"),
    }
    peer.dismiss()
}

fn killed_importers(context: &Context) -> Result<()> {
    let memory = Memory::allocate(&context.device, 8 * WORDS)?;
    let published = memory.publish("weights", context.domain.options())?;
    let (ticket, mut rng, guard) = (published.ticket(..)?, context.rng(), context.guard());
    let kills = context.kills(6, 200, 40);
    for _ in 0..kills {
        let mut victim = context.mortal(&mut rng)?;
        // It is there, with its device.
        victim.ask(&Order::Hold(HolderOrder::Settle))?;
        victim.send(&Order::Hold(HolderOrder::Open {
            ticket: ticket.clone(),
            wait_ms: 0,
        }))?;
        victim.send(&Order::Hold(HolderOrder::Close { number: 0 }))?;
        std::thread::park_timeout(Duration::from_micros(rng.u64(..2_000)));
        victim.kill()?;
    }
    guard.settles()?;
    context.figure_storm(kills)
}
