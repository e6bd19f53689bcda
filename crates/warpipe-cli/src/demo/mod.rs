//! `warpipe demo`: the purpose of warpipe, in four parts, each printed as it happens.
//!
//! Each part works with real processes, prints what they report, and makes claims. The demo succeeds
//! only if every claim holds.
//!
//! | module | is |
//! | --- | --- |
//! | `parts` | the four parts, and the end |
//! | `stage` | what all parts share: the processes, the output, the claims |
//! | `child`, `publisher`, `subscriber` | the processes |

mod child;
mod parts;
mod publisher;
mod stage;
mod subscriber;

use std::time::Duration;

use anyhow::Context;

use crate::args::DemoArgs;
use crate::exit::Exit;
use crate::interrupt::Interrupt;
use crate::process;

pub use child::ChildArgs;
pub use publisher::run as run_publisher;
pub use subscriber::run as run_subscriber;

use stage::Stage;

const ENDPOINT: &str = "demo/stream";
/// Samples that a subscriber may have in flight.
const DEPTH: u32 = 4;
/// Samples that a subscriber holds when it is killed.
const HELD: usize = 2;
/// The size of the items whose latency is measured: a hand-over's, not a kernel's.
const SMALL_BYTES: u64 = 4096;
/// The first items, which come one at a time: those before the measurement, and those of it.
const WARM_UP: u64 = 20;
const MEASURED: u64 = 300;
/// How long processes may take to find each other, devices to open and kernels to load, and how long
/// an item may take; a debug build on a busy core is slow.
const PATIENCE: Duration = Duration::from_secs(60);
/// The length of work that is killed before it ends.
const WORK: Duration = Duration::from_secs(9);

/// Faults on purpose, to see that the demo names them and fails: the third item has another pattern
/// than its number says; the number behind those of the small items is left out; the publisher
/// reports one item more than it completed; a file stays in the domain.
pub const PLANTS: [&str; 4] = ["wrong-word", "gap", "lost", "leftover"];

/// For `--help`.
pub const JSON_HELP: &str = "\
With --json the demo prints one object per line; its `event` says its kind. The name of a time ends in its unit;
times of the parts about deaths count from the kill.
  started           role, pid
  ready             the publisher and all subscribers
  latency           p50_us, p99_us (of one hand-over)
  throughput        verified, seconds, visible_gb_per_s
  subscriber_death  pid, busy, held, notified_ms, released_ms, started_ms, first_verified_ms, first_item,
                    others [role, verified]
  publisher_death   pid, busy, complete, writing, started_ms, survivors [role, notified_ms, lost_ms, lost,
                    continued_ms, last_before, first_after]
  result            ok, interrupted, device, why, mps, subscribers, item_bytes, seconds, verified, wrong, gaps, lost,
                    claims [claim, holds, detail], failures, and the parts once more, each under its name";

/// Runs the demo.
pub fn run(args: &DemoArgs) -> anyhow::Result<Exit> {
    let _interrupt = Interrupt::install()?;
    // Opened here to see that it is there, and left to the children.
    let chosen = args.device.open()?;
    let folder = process::private_folder(&std::env::temp_dir(), "warpipe-demo-")?;
    let mut stage = Stage::new(args, &chosen, folder.path());
    let ending = parts::perform(&mut stage);
    let exit = stage.finish(ending)?;
    folder.close().context("cannot remove the demo's folder")?;
    Ok(exit)
}
