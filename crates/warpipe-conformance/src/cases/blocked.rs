//! No thread that others rely on blocks in a driver call: while any function of it hangs, in every
//! thread that calls it, streams are rescued, heartbeats come and new peers are admitted. **This
//! module is marked for unsafe**: it copies by address.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use warpipe::{
    Memory, PeerState, PoolClient, Semaphore, Subscriber, SubscriberOptions, Timeline, Worker,
    WorkerOptions,
};
use warpipe_testkit::eventually;

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::device_malloc::DeviceMalloc;
use crate::fake_driver::FakeDriver;
use crate::peer::{
    Batch, FOREIGN_SEED, FOREIGN_WORDS, HungOrder, Order, Peer, PublisherPlan, SemaphoreOrder,
    SignalOrder, WAITING,
};

pub(super) const CASES: &[Case] = &[
    Case::new(
        "every function that the library calls is one that the next case blocks",
        all_functions,
    ),
    Case::new(
        "while a function of the driver hangs, streams are rescued and new peers attach",
        blocked,
    )
    .limit(400)
    .long(400),
    Case::new(
        "copies that have page-locked memory go on while the driver registers more for another",
        copies_with_room,
    ),
];

/// Newcomers to endpoints of the process in which a function hangs: to a channel that nobody uses,
/// and to what threads use that hang.
const ENDPOINTS: &[(&str, Attach)] = &[
    ("idle channel", |context, patience| {
        attach_to_channel(context, "idle", patience)
    }),
    ("channel", |context, patience| {
        attach_to_channel(context, "warm/channel", patience)
    }),
    ("queue", |context, patience| {
        Worker::open(
            "warm/queue",
            WorkerOptions {
                handshake_timeout: patience,
                ..context.worker_options()
            },
            Duration::ZERO,
        )?;
        Ok(())
    }),
    ("pool", |context, patience| {
        PoolClient::open("warm/pool", context.domain.on(&context.device), patience)?;
        Ok(())
    }),
    ("timeline", |context, patience| {
        Timeline::open(
            "warm/timeline",
            context.domain.on(&context.device),
            patience,
        )?;
        Ok(())
    }),
    ("semaphore", |context, patience| {
        Semaphore::open(
            "warm/semaphore",
            context.domain.on(&context.device),
            patience,
        )?;
        Ok(())
    }),
];

type Attach = fn(&Context, Duration) -> Result<()>;

fn attach_to_channel(context: &Context, name: &str, patience: Duration) -> Result<()> {
    Subscriber::open(
        name,
        SubscriberOptions {
            handshake_timeout: patience,
            ..context.domain.on(&context.device)
        },
        Duration::ZERO,
    )?;
    Ok(())
}

/// Everybody comes.
const COME: &[&str] = &[];
/// Nobody comes before the call returns.
const WAIT: &[&str] = &[
    "idle channel",
    "channel",
    "queue",
    "pool",
    "timeline",
    "semaphore",
];

/// Every function that the library calls once a device is open, and the newcomers that wait for it:
/// to let somebody in takes a registration and whatever is called around each call, and the thread
/// that does it also imports what others announce.
const FUNCTIONS: &[(&str, &[&str])] = &[
    ("cuCtxGetCurrent", WAIT),
    ("cuCtxGetId", WAIT),
    ("cuCtxPopCurrent_v2", WAIT),
    ("cuCtxPushCurrent_v2", WAIT),
    ("cuDeviceGet", COME),
    ("cuDeviceGetUuid_v2", COME),
    ("cuDevicePrimaryCtxGetState", WAIT),
    ("cuEventCreate", COME),
    ("cuEventDestroy_v2", COME),
    ("cuEventQuery", COME),
    ("cuEventRecord", COME),
    ("cuIpcCloseMemHandle", COME),
    ("cuIpcGetEventHandle", COME),
    ("cuIpcGetMemHandle", COME),
    ("cuIpcOpenMemHandle_v2", COME),
    ("cuLaunchKernel", COME),
    ("cuMemAddressFree", COME),
    ("cuMemAddressReserve", WAIT),
    ("cuMemAlloc_v2", COME),
    ("cuMemCreate", COME),
    ("cuMemExportToShareableHandle", COME),
    ("cuMemFree_v2", COME),
    ("cuMemGetAddressRange_v2", COME),
    ("cuMemHostGetDevicePointer_v2", WAIT),
    ("cuMemHostRegister_v2", WAIT),
    ("cuMemImportFromShareableHandle", WAIT),
    ("cuMemMap", WAIT),
    ("cuMemRelease", COME),
    ("cuMemSetAccess", WAIT),
    ("cuMemUnmap", COME),
    ("cuMemcpyDtoHAsync_v2", COME),
    ("cuMemcpyHtoDAsync_v2", COME),
    ("cuPointerGetAttribute", COME),
    ("cuStreamBatchMemOp_v2", COME),
    ("cuStreamCreate", COME),
    ("cuStreamDestroy_v2", COME),
    ("cuStreamIsCapturing", COME),
    ("cuStreamQuery", COME),
    ("cuStreamWaitValue64_v2", COME),
    ("cuStreamWriteValue64_v2", COME),
    ("cuThreadExchangeStreamCaptureMode", WAIT),
];

/// Called only while no stream waits, and here some do: see
/// [`publisher_state`](super::publisher_state).
const POSTPONED: &str = "cuMemHostUnregister";

/// Cells that are tried at the same time: they wait most of the time.
const AT_ONCE: usize = 5;

/// In which a heart that stood still would be seen to.
const LOOK: Duration = Duration::from_millis(1_500);

fn all_functions(context: &Context) -> Result<()> {
    FakeDriver::of(&context.settings)?;
    let mut peer = context.peer()?;
    let foreign = DeviceMalloc::new(&context.device, FOREIGN_WORDS, FOREIGN_SEED)?;
    let called = peer.text(&Order::Hung(HungOrder::Calls {
        foreign: foreign.export()?,
    }))?;
    let missing: Vec<&str> = called
        .split(' ')
        .filter(|name| {
            *name != POSTPONED && !FUNCTIONS.iter().any(|(function, _)| function == name)
        })
        .collect();
    ensure!(missing.is_empty(), "these are not let hang: {missing:?}");
    let unused: Vec<&str> = FUNCTIONS
        .iter()
        .map(|(name, _)| *name)
        .filter(|name| !called.split(' ').any(|other| other == *name))
        .collect();
    ensure!(unused.is_empty(), "these are not called: {unused:?}");
    peer.dismiss()
}

fn blocked(context: &Context) -> Result<()> {
    FakeDriver::of(&context.settings)?;
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE {
            scope.spawn(|| {
                while let Some((number, &(function, waiting))) = {
                    let number = next.fetch_add(1, SeqCst);
                    FUNCTIONS.get(number).map(|function| (number, function))
                } {
                    if let Err(error) = hang(context, number, function, waiting) {
                        eprintln!("{function}: {error:#}");
                        let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                        failed.push(format!("{function}: {error:#}"));
                    }
                }
            });
        }
    });
    let failed = failed.into_inner().unwrap_or_else(PoisonError::into_inner);
    context.figure("functions", FUNCTIONS.len());
    ensure!(failed.is_empty(), "{}", failed.join("; "));
    Ok(())
}

fn copies_with_room(context: &Context) -> Result<()> {
    const REGISTER: &str = "cuMemHostRegister_v2";
    const LARGE: usize = 1 << 20;
    let fake_driver = FakeDriver::of(&context.settings)?;
    let backend = context.device.backend();
    let (memory, stream) = (
        Memory::allocate(&context.device, LARGE as u64)?,
        context.stream()?,
    );
    let (go, wait) = channel::<()>();
    stream.call(move || {
        let _ = wait.recv();
    })?;
    // SAFETY: the memory is as long and lives, as does the stream; only this stream writes it.
    let upload = |bytes: &[u8]| unsafe { backend.upload(stream.raw(), memory.ptr(), bytes) };
    // The first piece of the first region: a large copy has to have another one.
    upload(&[1; 8])?;
    fake_driver.block(REGISTER)?;
    let uploaded = std::thread::scope(|scope| -> Result<()> {
        let large = scope.spawn(|| upload(&vec![2; LARGE]));
        let is_hanging = eventually(PATIENCE, || {
            fake_driver.hanging(REGISTER).is_ok_and(|count| count > 0)
        });
        let (tell, told) = channel();
        let small = scope.spawn(move || tell.send(upload(&[3; 8])));
        let small_came = told.recv_timeout(PATIENCE);
        fake_driver.release(REGISTER)?;
        // First: memory that is unregistered meanwhile waits for the stream, and the driver
        // registers none until then.
        drop(go);
        let large = large.join();
        drop(small);
        ensure!(is_hanging, "nothing was registered for the large copy");
        small_came.context("the small copy waited for the other's memory")??;
        large.map_err(|_| anyhow::anyhow!("a panic"))??;
        Ok(())
    });
    stream.synchronize(PATIENCE)?;
    uploaded
}

/// One process that others wait for in four ways, and that is to die.
fn upstream(context: &Context, name: &str) -> Result<(Peer, String)> {
    let mut peer = context.peer()?;
    peer.publish(PublisherPlan::of(name))?;
    peer.signals(SignalOrder::CreateTimeline(format!("{name}/timeline")))?;
    let event = peer.text(&Order::Signals(SignalOrder::CreateEvents(1)))?;
    peer.signals(SignalOrder::Hold)?;
    peer.signals(SignalOrder::Record)?;
    peer.ask(&Order::Semaphore(SemaphoreOrder::Open {
        name: format!("{name}/semaphore"),
        waits: true,
    }))?;
    peer.ask(&Order::Semaphore(SemaphoreOrder::HoldUp))?;
    Ok((peer, event))
}

fn hang(context: &Context, cell: usize, function: &str, waiting: &[&str]) -> Result<()> {
    let context = &context.apart(&format!("cell{cell}"))?;
    let (up, down, idle) = ("up", "down", "idle");
    let _turns = Semaphore::new(
        &format!("{up}/semaphore"),
        1,
        context.domain.on(&context.device),
    )?;
    let (mut upstream, event) = upstream(context, up)?;
    let mut peer = context.peer()?;
    peer.ask(&Order::Guard)?;
    peer.ask(&Order::Hung(HungOrder::Publish(vec![
        down.into(),
        idle.into(),
    ])))?;
    let witness = context.subscriber(down)?;
    peer.send(&Order::Hung(HungOrder::Wait {
        name: up.into(),
        event,
    }))?;
    upstream.ask(&Order::AwaitSubscribers(1))?;
    upstream.ask(&Order::SendBehindGate(Batch::of(1, 64, 1)))?;
    peer.answer()?.context("its streams wait")?;
    let foreign = DeviceMalloc::new(&context.device, FOREIGN_WORDS, FOREIGN_SEED)?;
    let hang = HungOrder::Hang {
        function: function.into(),
        foreign: foreign.export()?,
    };
    ensure!(peer.number(&Order::Hung(hang))? > 0, "no call of it hangs");
    std::thread::park_timeout(LOOK);
    upstream.kill()?;
    for count in 0..WAITING {
        let line = peer
            .line(PATIENCE)
            .with_context(|| format!("{count} of {WAITING} streams were rescued"))?;
        ensure!(
            line.as_deref()
                .is_some_and(|line| line.starts_with("rescued ")),
            "it said {line:?}"
        );
    }
    let is_alive = || witness.publisher().map(|it| it.state) == Some(PeerState::Alive);
    ensure!(
        eventually(PATIENCE, is_alive),
        "it is seen as {:?}",
        witness.publisher().map(|it| it.state)
    );
    let came = attach(context, waiting);
    peer.ask(&Order::Hung(HungOrder::Release))
        .context("after the hang")?;
    came?;
    attach(context, COME).context("after the hang")?;
    drop(witness);
    peer.ask(&Order::Settle).context("what is left")?;
    peer.dismiss()
}

/// That all newcomers come but those that may wait.
fn attach(context: &Context, waiting: &[&str]) -> Result<()> {
    let one = |name: &str, attach: Attach| -> Result<()> {
        if waiting.contains(&name) {
            // It may come, and it may not.
            let _ = attach(context, LOOK);
            return Ok(());
        }
        let mut last = Ok(());
        // A handshake has a time-out of its own, which a slow machine may need again.
        let came = eventually(PATIENCE, || {
            last = attach(context, PATIENCE);
            last.is_ok()
        });
        if came {
            Ok(())
        } else {
            last.with_context(|| format!("a newcomer to the {name}"))
        }
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = ENDPOINTS
            .iter()
            .map(|&(name, attach)| scope.spawn(move || one(name, attach)))
            .collect();
        let ended: Result<Vec<()>> = threads
            .into_iter()
            .map(|thread| thread.join().map_err(|_| anyhow::anyhow!("a panic"))?)
            .collect();
        ended.map(drop)
    })
}
