//! Legacy handles: memory of another allocator, named across processes.

use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use warpipe::backend::IPC_EVENTS_MAX;
use warpipe::backend::testing::{Counting, Failing, Wrapped};
use warpipe::{Device, Error, HandleFault, LegacyHandle, LimitFault, PointerKind};
use warpipe_testkit::eventually;

use super::Case;
use crate::PATIENCE;
use crate::context::{Backend, Context};
use crate::device_malloc::{self, DeviceMalloc, OFFSET};
use crate::peer::{Order, Peer};

pub(super) const CASES: &[Case] = &[
    Case::new(
        "an interior pointer is opened with the right bytes, both ways",
        both_ways,
    ),
    Case::new(
        "legacy memory opened again is the same mapping and makes no driver call",
        opened_once,
    ),
    Case::new(
        "a legacy handle opens in the process that exported it",
        own_process,
    ),
    Case::new(
        "a killed exporter's legacy memory stays while it is open, and cannot be opened again",
        killed_exporter,
    )
    .ends_clients(),
    Case::new(
        "an importer killed with legacy memory open does not affect others",
        killed_importer,
    )
    .ends_clients(),
    Case::new(
        "legacy memory that its living exporter has freed is a typed error",
        freed_by_exporter,
    ),
    Case::new(
        "memory that no legacy handle can name is refused by its kind",
        not_exportable,
    ),
    Case::new(
        "truncated, changed and invented handles are typed errors",
        wrong_handles,
    ),
    Case::new(
        "legacy memory is not closed while a stream uses it",
        used_by_stream,
    ),
    Case::new(
        "a refused legacy export or open leaks nothing, and the next one succeeds",
        refusing_device,
    ),
    Case::new(
        "interprocess events open in another process, and their limit is a typed error",
        events,
    ),
];

const WORDS: u64 = 1 << 16;

fn export(peer: &mut Peer, seed: u64) -> Result<LegacyHandle> {
    Ok(peer
        .text(&Order::ExportLegacy { words: WORDS, seed })?
        .parse()?)
}

/// The error of an open that must fail.
fn refusal(handle: &LegacyHandle, device: &Device) -> Result<Error> {
    match handle.open(device) {
        Err(error) => Ok(error),
        Ok(memory) => bail!("it opened: {memory:?}"),
    }
}

fn both_ways(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    peer.ask(&Order::Guard)?;
    let handle = export(&mut peer, 5)?;
    ensure!(
        (handle.info().offset, handle.info().bytes) == (OFFSET, 8 * WORDS),
        "{handle:?}"
    );
    ensure!(
        handle.info().allocation_bytes >= OFFSET + 8 * WORDS
            && handle.info().pid == peer.id() as i32,
        "{handle:?}"
    );
    let memory = handle.open(&context.device)?;
    device_malloc::check(&memory, 5, &mut context.error_counters()?)?;
    memory.close(PATIENCE)?;

    let own = DeviceMalloc::new(&context.device, WORDS, 9)?;
    peer.ask(&Order::OpenLegacy {
        handle: own.export()?,
        seed: 9,
    })?;
    peer.ask(&Order::Settle)?;
    drop(own);
    peer.dismiss()
}

fn opened_once(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    let handle = export(&mut peer, 5)?;
    let counting = Wrapped::new(context.device.backend().clone(), Counting::default());
    let device = Device::from_backend(counting.clone());
    let first = handle.open(&device)?;
    let before = counting.hook().calls();
    let others = (0..100)
        .map(|_| handle.open(&device))
        .collect::<warpipe::Result<Vec<_>>>()?;
    ensure!(
        counting.hook().calls() == before,
        "a cached open called {:?}",
        counting.hook().calls()
    );
    ensure!(
        others.iter().all(|memory| memory.ptr() == first.ptr()),
        "another address"
    );
    drop(first);
    device_malloc::check(&others[50], 5, &mut context.error_counters()?)?;
    others
        .into_iter()
        .rev()
        .try_for_each(|memory| memory.close(PATIENCE))?;
    let calls = || {
        (
            counting.hook().calls().get("open_legacy").copied(),
            counting.hook().calls().get("close_legacy").copied(),
        )
    };
    let is_closed = eventually(PATIENCE, || calls() == (Some(1), Some(1)));
    ensure!(is_closed, "opened and closed {:?} times", calls());
    peer.dismiss()
}

fn own_process(context: &Context) -> Result<()> {
    let own = DeviceMalloc::new(&context.device, WORDS, 3)?;
    let handle: LegacyHandle = own.export()?.to_string().parse()?;
    let memory = handle.open(&context.device)?;
    ensure!(
        memory.ptr() == own.ptr + OFFSET,
        "it lies at another address"
    );
    device_malloc::check(&memory, 3, &mut context.error_counters()?)?;
    drop((memory, own));
    match refusal(&handle, &context.device)? {
        Error::Handle {
            what: "legacy handle",
            fault: HandleFault::Stale { .. },
        } => Ok(()),
        other => bail!("freed memory of this process gave {other:?}"),
    }
}

fn killed_exporter(context: &Context) -> Result<()> {
    let (mut holder, mut other) = (context.peer()?, context.peer()?);
    let (open, unopened) = (export(&mut holder, 5)?, export(&mut other, 6)?);
    let memory = open.open(&context.device)?;
    holder.kill()?;
    other.kill()?;
    device_malloc::check(&memory, 5, &mut context.error_counters()?)?;
    device_malloc::check(
        &open.open(&context.device)?,
        5,
        &mut context.error_counters()?,
    )?;
    memory.close(PATIENCE)?;
    for (handle, peer) in [(unopened, &other), (open, &holder)] {
        // Another thread closes the memory if the share above was not the last.
        let is_gone = || matches!(handle.open(&context.device), Err(Error::PeerGone { .. }));
        ensure!(
            eventually(PATIENCE, is_gone),
            "{:?}",
            handle.open(&context.device)
        );
        match refusal(&handle, &context.device)? {
            Error::PeerGone { pid, .. } => {
                ensure!(pid == peer.id() as i32, "process {pid} is reported gone")
            }
            error => bail!("a dead exporter gave {error:?}"),
        }
    }
    Ok(())
}

fn killed_importer(context: &Context) -> Result<()> {
    let own = DeviceMalloc::new(&context.device, WORDS, 9)?;
    let (mut victim, mut witness) = (context.peer()?, context.peer()?);
    victim.ask(&Order::OpenLegacy {
        handle: own.export()?,
        seed: 9,
    })?;
    victim.kill()?;
    witness.ask(&Order::OpenLegacy {
        handle: own.export()?,
        seed: 9,
    })?;
    witness.ask(&Order::CloseLegacy)?;
    device_malloc::check(
        &own.export()?.open(&context.device)?,
        9,
        &mut context.error_counters()?,
    )?;
    witness.dismiss()
}

fn freed_by_exporter(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    let handle = export(&mut peer, 5)?;
    handle.open(&context.device)?.close(PATIENCE)?;
    peer.ask(&Order::FreeLegacy)?;
    match refusal(&handle, &context.device)? {
        Error::Handle {
            what: "legacy handle",
            fault: HandleFault::Stale { pid, .. },
        } => {
            ensure!(pid == peer.id() as i32, "process {pid} is reported alive");
        }
        other => bail!("freed memory gave {other:?}"),
    }
    peer.dismiss()
}

fn not_exportable(context: &Context) -> Result<()> {
    let device = &context.device;
    let refused = |what: &str, ptr, due| match device_malloc::export(device, ptr) {
        Err(Error::Handle {
            fault:
                HandleFault::NotExportable {
                    ptr: reported,
                    kind,
                },
            ..
        }) => {
            ensure!(
                (reported, kind) == (ptr, due),
                "{what} is reported as {kind:?}"
            );
            Ok(())
        }
        other => bail!("{what} gave {other:?}"),
    };
    let mut peer = context.peer()?;
    let import = export(&mut peer, 5)?.open(device)?;
    refused("null", 0, PointerKind::Null)?;
    refused("an import", import.ptr(), PointerKind::Import)?;
    let local = Box::new([0u64; 512]);
    refused("host memory", local.as_ptr() as u64, PointerKind::Host)?;
    let is_gpu = context.settings.backend == Backend::Cuda;
    // Host memory is no less ordinary for being registered with the host.
    let pinned = if is_gpu {
        PointerKind::Pinned
    } else {
        PointerKind::Host
    };
    refused(
        "registered memory",
        context.error_counters()?.address(),
        pinned,
    )?;
    let publisher = context.publisher("regions")?;
    let loan = publisher.loan(&warpipe::Layout::bytes_only(4096)?)?;
    refused("a region", loan.slot_ptr(), PointerKind::Vmm)?;
    drop(loan);
    if is_gpu {
        let managed = |ptr| refused("managed memory", ptr, PointerKind::Managed);
        device_malloc::with_memory_by("cuMemAllocManaged", 1, managed)?;
        device_malloc::with_memory_by("cuMemAllocAsync", 0, |ptr| {
            refused("pooled memory", ptr, PointerKind::Pool)
        })?;
    }
    refused(
        "freed memory",
        device_malloc::freed(device)?,
        PointerKind::Unknown,
    )?;
    import.close(PATIENCE)?;
    peer.dismiss()
}

fn wrong_handles(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    let handle = export(&mut peer, 5)?;
    let text = handle.to_string();
    for wrong in [
        &text[..text.len() - 2],
        &text[1..],
        "",
        "warpipe-legacy:00",
        &text.replace("575048", "575049"),
    ] {
        match wrong.parse::<LegacyHandle>() {
            Err(Error::Handle {
                what: "legacy handle",
                ..
            }) => {}
            other => bail!("{wrong:?} gave {other:?}"),
        }
    }
    let backend = context.device.backend();
    let mut rng = context.rng();
    for round in 0..20 {
        let invented: [u8; 64] =
            std::array::from_fn(|_| if round == 0 { 0 } else { rng.u64(..256) as u8 });
        match backend.open_legacy(
            &invented,
            handle.info().allocation_bytes,
            handle.info().device,
        ) {
            Err(Error::Handle {
                what: "legacy handle",
                fault: HandleFault::Refused(_),
            }) => {}
            other => bail!("invented bytes gave {other:?}"),
        }
    }
    let other = if context.settings.backend == Backend::Cuda {
        Device::host()
    } else {
        return peer.dismiss();
    };
    match refusal(&handle, &other)? {
        Error::Handle {
            what: "legacy handle",
            fault: HandleFault::Device { .. },
        } => peer.dismiss(),
        error => bail!("another backend's handle gave {error:?}"),
    }
}

fn used_by_stream(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    let handle = export(&mut peer, 5)?;
    let counting = Wrapped::new(context.device.backend().clone(), Counting::default());
    let device = Device::from_backend(counting.clone());
    let stream = device.stream()?;
    let memory = handle.open(&device)?;
    device_malloc::fill_late(&memory, &stream, 77, Duration::from_millis(200))?;
    drop(memory);
    let is_closed = || counting.hook().calls().contains_key("close_legacy");
    while !stream.is_idle()? {
        let closed = is_closed();
        // Asked after the look at the count: what is closed under a stream that is busy still was
        // closed too early.
        ensure!(
            !closed || stream.is_idle()?,
            "closed under a stream that writes it"
        );
        std::thread::yield_now();
    }
    ensure!(
        eventually(PATIENCE, is_closed),
        "it is closed when the stream is done"
    );
    device_malloc::check(
        &handle.open(&context.device)?,
        77,
        &mut context.error_counters()?,
    )
    .context("what the late kernel wrote")?;
    peer.dismiss()
}

fn refusing_device(context: &Context) -> Result<()> {
    let failing = Wrapped::new(context.device.backend().clone(), Failing::default());
    let device = Device::from_backend(failing.clone());
    let own = DeviceMalloc::new(&device, WORDS, 3)?;
    for method in ["locate", "export_legacy"] {
        failing.hook().aim(method, 1);
        match own.export() {
            Err(Error::Driver {
                code: Error::INJECTED,
                ..
            }) => {}
            other => bail!("{method} failed, and gave {other:?}"),
        }
    }
    own.export()?;
    let mut peer = context.peer()?;
    let handle = export(&mut peer, 5)?;
    failing.hook().aim("open_legacy", 1);
    match refusal(&handle, &device)? {
        Error::Driver {
            code: Error::INJECTED,
            ..
        } => {}
        other => bail!("open_legacy failed, and gave {other:?}"),
    }
    device_malloc::check(&handle.open(&device)?, 5, &mut context.error_counters()?)?;
    peer.dismiss()
}

fn events(context: &Context) -> Result<()> {
    let mut peer = context.peer()?;
    device_malloc::with_events(&context.device, 1, |handles, end| {
        ensure!(end.is_none(), "the first gave {end:?}");
        peer.ask(&Order::OpenEvent(handles[0].to_vec())).map(drop)
    })?;
    match peer.try_ask(&Order::OpenEvent(vec![7; 64]))? {
        Err(fault) => ensure!(
            fault.kind == "Handle" && fault.text.contains("a usable legacy handle"),
            "{fault}"
        ),
        Ok(answer) => bail!("invented bytes gave {answer:?}"),
    }
    let device = &context.device;
    device_malloc::with_events(device, IPC_EVENTS_MAX + 1, |handles, end| match end {
        Some(Error::Limit(LimitFault::Events(IPC_EVENTS_MAX))) => {
            context.figure("interprocess_events", handles.len() as u64);
            Ok(())
        }
        other => bail!("after {} events came {other:?}", handles.len()),
    })?;
    device_malloc::with_events(device, 8, |_, end| match end {
        None => Ok(()),
        Some(error) => bail!("destroyed events count still: {error}"),
    })?;
    peer.dismiss()
}
