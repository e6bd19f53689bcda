//! The command line's arguments.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use warpipe::DType;

use crate::device_arg::DeviceArg;
use crate::{bench, demo, doctor, exit};

/// Tensors in GPU memory, handed between processes without a copy.
///
/// Names live in a domain, which is a directory: $WARPIPE_DOMAIN, else $XDG_RUNTIME_DIR/warpipe,
/// else /run/user/UID/warpipe, else /tmp/warpipe-UID.
#[derive(Debug, Parser)]
#[command(name = "warpipe", version, after_help = exit::HELP, propagate_version = true)]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Demo(DemoArgs),
    Pub(PubArgs),
    Sub(SubArgs),
    Doctor(DoctorArgs),
    Ls(LsArgs),
    Members(MembersArgs),
    /// Measure the hand-over beside what the bare driver takes for the same, in the same run.
    Bench(bench::BenchArgs),
    #[command(hide = true)]
    DemoPublisher(demo::ChildArgs),
    #[command(hide = true)]
    DemoSubscriber(demo::ChildArgs),
    #[command(hide = true)]
    DemoCleaner(demo::CleanerArgs),
    #[command(hide = true)]
    DoctorChild(doctor::ChildArgs),
}

/// Shows what warpipe is for: latency, throughput, and what the death of a process costs the others
///
/// One publisher and several subscribers, each a process of its own, in a private temporary domain.
/// There are four parts:
/// 1. what a hand-over takes with one item in flight, and the same by bare words;
/// 2. how much data becomes visible to all subscribers a second, every word checked on the device;
/// 3. a subscriber is killed while it holds samples, and a new one takes its place;
/// 4. the publisher is killed in the middle of a write, and a new one takes its place.
///
/// Every figure is what the processes reported (CLOCK_MONOTONIC). No byte of a tensor is copied on the
/// way. A claim that does not hold is named, and the exit code is 1. Ctrl-C ends it cleanly.
#[derive(Debug, Args)]
#[command(after_help = exit::HELP, after_long_help = format!("{}\n\n{}", demo::JSON_HELP, exit::HELP))]
#[command(verbatim_doc_comment)]
pub struct DemoArgs {
    /// Where the tensors live: auto (the first GPU, else the host), host, cuda or cuda:N
    #[arg(long, default_value_t = DeviceArg::Auto)]
    pub device: DeviceArg,
    /// How many processes receive
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=32))]
    pub subscribers: u32,
    /// Size of each tensor, in MiB
    #[arg(long, value_name = "M", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=4096))]
    pub megabytes: u64,
    /// How long part 2 publishes, in seconds
    #[arg(long, value_name = "S", default_value = "2", value_parser = seconds)]
    pub seconds: Duration,
    /// Part 2 and the new publisher of part 4 stop after this many tensors, if not before
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub items: Option<u64>,
    /// One JSON object per line instead of text
    #[arg(long)]
    pub json: bool,
    /// Kill processes only while they have no work on the device, as where an MPS daemon answers
    #[arg(long, hide = true)]
    pub idle: bool,
    /// A fault on purpose, to see that it is named
    #[arg(long, hide = true)]
    pub plant: Option<demo::Plant>,
}

/// Publishes files as tensors, each as one sample
///
/// .npy  NumPy arrays of bool, int8-64, uint8-64, float16-64, complex64-128; Fortran order becomes strides;
///       big-endian data is turned into little-endian. V1, V2, V4 (as ml_dtypes saves) need --void-as.
/// .png  height x width x channels: 1 gray, 2 gray and alpha, 3 RGB, 4 RGBA. uint8; uint16 for 16 bit files.
///       Palettes and 1, 2, 4 bit samples are expanded.
/// else  plain bytes.
///
/// All files are checked before the first is sent; a damaged one stops the command. The file's name goes along
/// as the sample's metadata.
#[derive(Debug, Args)]
#[command(after_help = exit::HELP, verbatim_doc_comment)]
pub struct PubArgs {
    /// The endpoint's name, for example camera/front
    pub name: String,
    /// What to publish
    #[arg(required = true)]
    pub files: Vec<PathBuf>,
    /// Samples a second at most
    #[arg(long, value_name = "HZ", value_parser = rate)]
    pub rate: Option<f64>,
    /// Begin again after the last file, until interrupted
    #[arg(long = "loop")]
    pub repeat: bool,
    /// Wait for this many subscribers before the first sample (0: do not wait)
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub wait_subscribers: u32,
    /// The longest wait, in seconds: for subscribers, for room, and for the device
    #[arg(long, value_name = "S", default_value = "60", value_parser = seconds)]
    pub timeout: Duration,
    /// What to do when a subscriber has no room
    #[arg(long, value_enum, default_value_t = PolicyName::Block)]
    pub policy: PolicyName,
    /// How many samples a subscriber may have in flight
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub depth: u32,
    /// Read every file as plain bytes
    #[arg(long)]
    pub raw: bool,
    /// What the elements of .npy files are that call them V1, V2 or V4: bfloat16, float8_e4m3fn, complex32, ...
    #[arg(long, value_name = "DTYPE", value_parser = dtype)]
    pub void_as: Option<DType>,
    /// Where the tensors live: auto, host, cuda or cuda:N
    #[arg(long, default_value_t = DeviceArg::Auto)]
    pub device: DeviceArg,
    /// One JSON object per sample instead of lines
    #[arg(long)]
    pub json: bool,
}

/// What a publisher does with a subscriber that has no room.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum PolicyName {
    /// Wait for it, at most --timeout
    Block,
    /// Take back the oldest sample that it has not taken
    DropOldest,
    /// Leave it out of this sample
    DropNewest,
    /// End with an error
    Fail,
}

/// Receives tensors, and saves them if asked to
///
/// Prints a line for each: sequence, type, shape, bytes, latency, file name.
///
/// With --save, tensors become .npy files, bit for bit what was published, and files that were published as plain
/// bytes become those bytes again. Types that NumPy lacks are saved as ml_dtypes saves them: bfloat16 as '<V2',
/// float8 types as '<V1', complex32 as '<V4'. Strides other than row- or column-major are
/// gathered into row-major order. A file's name is its sequence number and what is harmless of the name that the
/// publisher sent; nothing is written outside DIR, and no file is overwritten: a taken name gets -2, -3, ...
#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct SubArgs {
    /// The endpoint's name, for example camera/front
    pub name: String,
    /// End after this many samples; without it, when the publisher ends
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Save each sample in this directory
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,
    /// The longest wait, in seconds: for the publisher, and for each sample
    #[arg(long, value_name = "S", default_value = "60", value_parser = seconds)]
    pub timeout: Duration,
    /// When the publisher ends or dies, wait for the next one of that name
    #[arg(long)]
    pub reconnect: bool,
    /// Where to read: auto, host, cuda or cuda:N; it must reach the publisher's memory
    #[arg(long, default_value_t = DeviceArg::Auto)]
    pub device: DeviceArg,
    /// One JSON object per sample instead of lines
    #[arg(long)]
    pub json: bool,
}

/// Finds out, by doing it, what works on this machine
///
/// Tries everything that warpipe needs on every device, and says what to do about what does not work.
/// Each verdict is `ok`, `no` (not there, and nothing is broken) or `failed`. Ends well if at least one backend works
/// completely; a machine without a GPU is no error.
#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct DoctorArgs {
    /// One JSON object per check, and one for the summary
    #[arg(long)]
    pub json: bool,
}

/// Lists the names in the domain and who holds them
#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct LsArgs {
    /// One JSON object per name
    #[arg(long)]
    pub json: bool,
}

/// Lists the members of the domain: who they are, and whether they are alive
///
/// A member is a process that has joined the domain under a name, with a role. `stalled` is one whose heartbeat is older
/// than 900 ms: stopped, hung, or starved of the CPU. `suspect` is one whose connection has closed without a goodbye and
/// whose death is not proven yet. With --follow, changes are printed as they come, until interrupted: joined, stalled,
/// recovered, left, died. Nothing is removed from the domain.
#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct MembersArgs {
    /// Go on after the list, and print each change
    #[arg(long)]
    pub follow: bool,
    /// One JSON object per member, or per change
    #[arg(long)]
    pub json: bool,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no time in seconds; use a number above 0 and up to 86400");
    let seconds: f64 = text.parse().map_err(|_| wrong())?;
    if seconds > 0.0 && seconds <= 86_400.0 {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err(wrong())
    }
}

fn rate(text: &str) -> Result<f64, String> {
    let rate = text
        .parse()
        .ok()
        .filter(|rate: &f64| *rate >= 0.001 && *rate <= 1e6);
    rate.ok_or_else(|| format!("{text:?} is no rate; use 0.001 to 1000000 samples a second"))
}

fn dtype(text: &str) -> Result<DType, String> {
    DType::from_name(text).ok_or_else(|| {
        let names: Vec<&str> = DType::ALL.iter().map(|dtype| dtype.name()).collect();
        format!("there is no dtype {text:?}; there are {}", names.join(", "))
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_arguments_are_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn times_and_rates_have_bounds() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["0", "-1", "nan", "inf", "1e9", "x", ""] {
            assert!(seconds(wrong).is_err() && rate(wrong).is_err(), "{wrong}");
        }
    }
}
