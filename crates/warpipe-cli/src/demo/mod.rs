//! `warpipe demo`: the purpose of warpipe, in four parts, each printed as it happens.
//!
//! The parts are data ([`parts::ALL`]): each gives orders to real processes, prints their reports,
//! and makes claims. The demo succeeds only if every claim holds.
//!
//! | module | is |
//! | --- | --- |
//! | `stage` | what all parts share: the processes, the output, the claims |
//! | `parts` | the four parts, and the end |
//! | `processes`, `protocol`, `orders` | children, and the lines between them and their parent |
//! | `publisher`, `watch`; `subscriber`, `checker`; `round_trips` | what children do |
//! | `leftovers`, `cleaner` | that nothing is left over, and if the demo itself is killed |

mod checker;
mod cleaner;
mod leftovers;
mod orders;
mod parts;
mod processes;
mod protocol;
mod publisher;
mod round_trips;
mod stage;
mod subscriber;
mod watch;

use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, ValueEnum};
use tempfile::TempDir;

use crate::args::DemoArgs;
use crate::device_arg::DeviceArg;
use crate::exit::Exit;
use crate::interrupt::Interrupt;
use crate::output::Output;

pub use cleaner::{CleanerArgs, run as run_cleaner};
pub use publisher::run as run_publisher;
pub use subscriber::run as run_subscriber;

use cleaner::Cleaner;
use stage::Stage;

const ENDPOINT: &str = "demo/stream";
const FOLDER_PREFIX: &str = "warpipe-demo-";
/// Samples that a subscriber may have in flight.
const DEPTH: u32 = 4;
/// Samples that a subscriber holds when it is killed.
const HELD: usize = 2;
/// How long processes may take to find each other, devices to open, and kernels to load.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// How long an item may take; a debug build on a busy core is slow.
const ITEM_PATIENCE: Duration = Duration::from_secs(60);

/// For `--help`.
pub const JSON_HELP: &str = "\
With --json the demo prints one object per line; its `event` says its kind. The name of a time ends in its unit;
times of the parts about deaths count from the kill.
  started           role, pid
  demo              device, why, mps, subscribers, item_bytes
  latency           trips, p50_us, p99_us (one hand-over: half a round trip), floor_p50_us, floor_p99_us
  throughput        items, verified, seconds, visible_gb_per_s
  subscriber_death  pid, busy, held, notified_ms, released_ms, lent_again_ms, others [role, verified, apart_ms],
                    started_ms, first_verified_ms, first_item
  publisher_death   pid, busy, complete, writing, started_ms, survivors [role, notified_ms, lost_ms, lost,
                    continued_ms, last_before, first_after]
  result            ok, interrupted, verified, wrong, gaps, lost, killed, left, claims [claim, holds, detail], failures,
                    and the parts once more, each under its name";

/// The children's arguments.
#[derive(Debug, Args)]
pub struct ChildArgs {
    #[arg(long)]
    parent: i32,
    #[arg(long)]
    device: DeviceArg,
    #[arg(long)]
    subscribers: u32,
    #[arg(long)]
    item_bytes: u64,
    #[arg(long)]
    plant: Option<Plant>,
}

/// A fault on purpose, to see that the demo names it and fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Plant {
    /// The third item has another pattern than its number says.
    WrongWord,
    /// A number is left out after a subscriber was killed.
    Gap,
    /// The publisher reports one item more than it completed.
    Lost,
    /// A file stays in the domain.
    Leftover,
}

/// Runs the demo.
pub fn run(args: &DemoArgs) -> anyhow::Result<Exit> {
    let output = Output::new(args.json);
    let interrupt = Interrupt::install()?;
    // Opened here to see that it is there, and left to the children.
    let chosen = args.device.open()?;
    let folder = private_folder()?;
    let cleaner = Cleaner::start(folder.path())?;
    let mut stage = Stage::new(args, &chosen, output, &interrupt, folder.path());
    stage.tell_started("cleaner", cleaner.pid())?;
    let ending = parts::perform(&mut stage);
    let exit = stage.finish(ending)?;
    folder.close().context("cannot remove the demo's folder")?;
    drop(cleaner);
    Ok(exit)
}

fn private_folder() -> anyhow::Result<TempDir> {
    let private = std::fs::Permissions::from_mode(0o700);
    let made = tempfile::Builder::new()
        .prefix(FOLDER_PREFIX)
        .permissions(private)
        .tempdir();
    made.with_context(|| {
        format!(
            "cannot make a directory in {} (TMPDIR says where)",
            std::env::temp_dir().display()
        )
    })
}
