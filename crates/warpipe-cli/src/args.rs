//! The command line's arguments.

use std::ffi::OsString;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use warpipe::DType;

use crate::device_arg::DeviceArg;
use crate::{demo, doctor, exit, run, weights};

/// Hands tensors in GPU memory from one process to others of the same machine, without a copy
///
/// A publisher opens an endpoint under a name, and subscribers find it by that name. Names belong
/// to a domain, which is a directory: $WARPIPE_DOMAIN if it is set, else $XDG_RUNTIME_DIR/warpipe,
/// else /run/user/UID/warpipe, else /tmp/warpipe-UID. Without a GPU, tensors lie in host memory.
#[derive(Debug, Parser)]
#[command(name = "warpipe", version, after_help = exit::HELP, propagate_version = true)]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Demo(DemoArgs),
    #[command(alias = "publish")]
    Pub(PubArgs),
    #[command(alias = "subscribe")]
    Sub(SubArgs),
    Doctor(DoctorArgs),
    Ls(LsArgs),
    Gc(GcArgs),
    Top(TopArgs),
    Metrics(MetricsArgs),
    Members(MembersArgs),
    Weights(WeightsArgs),
    Run(RunArgs),
    #[cfg(feature = "bridge")]
    Bridge(Box<crate::bridge::BridgeArgs>),
    #[cfg(not(feature = "bridge"))]
    Bridge(NoBridgeArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
    #[command(hide = true)]
    DemoPublisher(demo::ChildArgs),
    #[command(hide = true)]
    DemoSubscriber(demo::ChildArgs),
    #[command(hide = true)]
    DoctorChild(doctor::ChildArgs),
    #[command(hide = true)]
    WeightsChild(weights::ChildArgs),
    #[command(hide = true)]
    MpsDaemon(run::ChildArgs),
}

/// Shows what warpipe is for: latency, throughput, and recovery from the death of a process
///
/// Starts one publisher and several subscribers, each a process of its own, in a temporary domain.
/// The demo has four parts:
/// 1. It measures the hand-over of a small tensor with one in flight.
/// 2. It measures how much data per second all subscribers see; each word is checked on the device.
/// 3. It kills a subscriber that holds samples, and starts a new one in its place.
/// 4. It kills the publisher in the middle of a write, and starts a new one in its place.
///
/// Every figure is what the processes reported, by CLOCK_MONOTONIC. No byte of a tensor is copied on
/// the way. If a claim of the demo does not hold, the demo names it and the exit code is 1. Ctrl-C
/// ends all processes and removes the domain.
#[derive(Debug, Args)]
#[command(after_help = exit::HELP, after_long_help = format!("{}\n\n{}", demo::JSON_HELP, exit::HELP))]
#[command(verbatim_doc_comment)]
pub struct DemoArgs {
    /// Device of the tensors: auto (the first GPU, else the host), host, cuda or cuda:N
    #[arg(long, default_value_t = DeviceArg::Auto)]
    pub device: DeviceArg,
    /// Number of subscribers, 1 to 32
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=32))]
    pub subscribers: u32,
    /// Size of each tensor in MiB, 1 to 4096
    #[arg(long, value_name = "MIB", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=4096))]
    pub megabytes: u64,
    /// Duration of part 2, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = seconds)]
    pub seconds: Duration,
    /// Prints one JSON object per line instead of text
    #[arg(long)]
    pub json: bool,
    /// Kills processes only while they have no work on the device, as under MPS
    #[arg(long, hide = true)]
    pub idle: bool,
    /// Makes a fault, for the test that the demo reports it
    #[arg(long, hide = true, value_parser = demo::PLANTS)]
    pub plant: Option<String>,
}

impl DemoArgs {
    /// The size of each tensor.
    pub fn item_bytes(&self) -> u64 {
        self.megabytes << 20
    }

    /// Whether this fault is to be made.
    pub fn has_plant(&self, plant: &str) -> bool {
        self.plant.as_deref() == Some(plant)
    }
}

/// Publishes files as tensors, one sample for each file
///
/// The type of a file follows from its name:
///   .npy   a NumPy array of bool, int8 to int64, uint8 to uint64, float16 to float64, complex64 or
///          complex128. Fortran order becomes strides; big-endian data becomes little-endian. Arrays
///          of V1, V2 and V4, as ml_dtypes saves them, need --void-as.
///   .png   a tensor of height x width x channels: 1 gray, 2 gray and alpha, 3 RGB, 4 RGBA. The
///          elements are uint8, or uint16 for files of 16 bits. Palettes and samples of 1, 2 or 4
///          bits are expanded.
///   other  the plain bytes, as a tensor of uint8.
///
/// All files are checked before the first one is sent; a damaged file stops the command. The name of
/// the file is the metadata of its sample.
#[derive(Debug, Args)]
#[command(after_help = exit::HELP, verbatim_doc_comment)]
pub struct PubArgs {
    /// Name of the endpoint, for example camera/front
    pub name: String,
    /// Files to publish, in this order
    #[arg(required = true)]
    pub files: Vec<PathBuf>,
    /// Highest rate, in samples per second, 0.001 to 1000000; no limit by default
    #[arg(long, value_name = "HZ", value_parser = rate)]
    pub rate: Option<f64>,
    /// Publishes the files again and again, until interrupted
    #[arg(long = "loop")]
    pub repeat: bool,
    /// Number of subscribers to wait for before the first sample; 0 does not wait
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub wait_subscribers: u32,
    /// Longest wait for subscribers, for room, and for the device, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub timeout: Duration,
    /// Action when a subscriber has no room for a sample
    #[arg(long, value_enum, default_value_t = PolicyName::Block)]
    pub policy: PolicyName,
    /// Number of samples that each subscriber may have in flight, 1 to 4096
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub depth: u32,
    /// Reads every file as plain bytes
    #[arg(long)]
    pub raw: bool,
    /// Element type of .npy files of V1, V2 or V4: bfloat16, float8_e4m3fn, complex32, ...; without
    /// it such files are refused
    #[arg(long, value_name = "DTYPE", value_parser = dtype)]
    pub void_as: Option<DType>,
    /// Device of the tensors: auto (the first GPU, else the host), host, cuda or cuda:N
    #[arg(long, default_value_t = DeviceArg::Auto)]
    pub device: DeviceArg,
    #[command(flatten)]
    pub domain: DomainArg,
    /// Prints one JSON object per sample instead of text
    #[arg(long)]
    pub json: bool,
}

/// The policy of a publisher for a subscriber that has no room.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum PolicyName {
    /// Waits for room, at most --timeout
    Block,
    /// Takes back the oldest sample that the subscriber has not received
    DropOldest,
    /// Does not send this sample to the subscriber
    DropNewest,
    /// Ends the command with an error
    Fail,
}

/// Receives tensors, and saves them with --save
///
/// Prints one line for each sample: sequence number, element type, shape, size in bytes, latency and
/// file name.
///
/// With --save, each tensor becomes a .npy file with the bits that were published; a file that was
/// published as plain bytes becomes a file with those bytes. Element types that NumPy lacks are saved
/// as ml_dtypes saves them: bfloat16 as '<V2', float8 types as '<V1', complex32 as '<V4'. Strides
/// that are neither row-major nor column-major are gathered into row-major order. The name of a file
/// is its sequence number and the harmless characters of the name that the publisher sent. Nothing
/// is written outside DIR and no file is overwritten: a name that exists gets -2, -3, ...
#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct SubArgs {
    /// Name of the endpoint, for example camera/front
    pub name: String,
    /// Ends after this number of samples; by default when the publisher ends
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// Saves each sample in this directory; by default nothing is saved
    #[arg(long, value_name = "DIR")]
    pub save: Option<PathBuf>,
    /// Longest wait for the publisher, and for each sample, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub timeout: Duration,
    /// Waits for the next publisher of that name when the publisher ends or dies
    #[arg(long)]
    pub reconnect: bool,
    /// Device that reads the tensors: auto, host, cuda or cuda:N; it must reach the publisher's
    /// memory
    #[arg(long, default_value_t = DeviceArg::Auto)]
    pub device: DeviceArg,
    #[command(flatten)]
    pub domain: DomainArg,
    /// Prints one JSON object per sample instead of text
    #[arg(long)]
    pub json: bool,
}

/// Checks each feature of warpipe on this machine by using it
///
/// Checks the host and each GPU, and says what to do about each failure. A verdict is `ok`, `no`
/// (the feature is absent and nothing is broken) or `failed`. The exit code is 0 if at least one
/// backend works completely; a machine without a GPU is no error.
#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct DoctorArgs {
    /// Prints one JSON object per check and one for the summary, instead of text
    #[arg(long)]
    pub json: bool,
}

/// Lists the names in the domain, and the process that holds each
///
/// The name of a process that has died is listed as stale until another process takes it.
#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct LsArgs {
    #[command(flatten)]
    pub domain: DomainArg,
    /// Prints one JSON object per name instead of text
    #[arg(long)]
    pub json: bool,
    /// Lists the domains of all users, for an administrator
    ///
    /// Looks at `/run/user/UID/warpipe` and `/tmp/warpipe-UID` of every UID. A domain elsewhere,
    /// named by `$WARPIPE_DOMAIN`, is not found. Only root may read the domains of others.
    #[arg(long, conflicts_with = "path")]
    pub all_users: bool,
    /// Adds the counts of each endpoint, its subscribers, and the holders of all memory
    ///
    /// As `warpipe top --once` without rates; with --json the same object.
    #[arg(short, long, conflicts_with = "all_users")]
    pub verbose: bool,
}

/// For `run --help`.
const RUN_HELP: &str = "\
Exit codes:
  0      success of the program
  1      the daemon cannot be started; the program was not run
  2      wrong usage
  126    the program cannot be run
  127    the program is not there
  128+N  signal N ended the program
  Others are the program's own.";

/// Runs a program with a private MPS daemon, and quits the daemon when the program ends
///
/// Processes that share a GPU take turns in time slices; under MPS their kernels run beside each other,
/// and hand over in microseconds. The daemon (`nvidia-cuda-mps-control`, which comes with NVIDIA's driver) has folders of
/// its own: no other program uses it, and the machine's own daemon, if there is one, is not touched.
/// It serves the GPUs that CUDA_VISIBLE_DEVICES names, as this command has it; the program sees
/// these, from number 0 on, and does not get the variable if it lists numbers.
///
/// Signals are passed on to the program. When this command is killed, the program gets SIGTERM, and the
/// daemon ends all the same.
#[derive(Debug, Args)]
#[command(after_help = RUN_HELP)]
pub struct RunArgs {
    /// Starts a private MPS daemon for the program
    #[arg(long)]
    pub mps: bool,
    /// Does not say what MPS gives up
    #[arg(short, long)]
    pub quiet: bool,
    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    pub program: Vec<OsString>,
}

/// Shows the names that dead processes left in the domain, and removes them with --yes
///
/// A name counts as dead if no process holds its lock, whatever process id stands in the lock file.
/// Without --yes nothing is removed. With it, the files of each name are removed under the locks that
/// a new owner takes: a name that a process takes meanwhile stays, with all its files. Files of other
/// programs and of other users are shown and kept. Nobody has to call this: a dead name is taken over
/// by its next owner.
#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct GcArgs {
    /// Removes what is shown as dead
    #[arg(short, long)]
    pub yes: bool,
    /// Leaves out what is younger than this many seconds
    #[arg(long, value_name = "SECONDS", value_parser = age)]
    pub older_than: Option<Duration>,
    #[command(flatten)]
    pub domain: DomainArg,
    /// Prints one JSON object per name and one with the total, instead of text
    #[arg(long)]
    pub json: bool,
}

/// Shows the endpoints of the domain and the processes with their memory, and keeps it up to date
///
/// For each endpoint: samples and bytes per second, the mean latency (of publishers that state when
/// they send), samples in flight, dropped samples, and the state and lag of each subscriber. For
/// each process: descriptors, and the memory that it has allocated, or imported from others. For
/// memory: the processes that share it. It reads the statistics pages of this user's processes, also
/// of those that are stopped; nothing is asked of them, and nothing changes.
///
/// Keys: Tab or 1 2 3 choose endpoints, processes or memory; arrows and PageUp, PageDown scroll; s
/// chooses the column to sort by, r reverses the order; / begins a filter, Enter ends it, Esc clears
/// it; space pauses; Ctrl-Z suspends; q quits.
#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct TopArgs {
    /// Observes for one interval, prints the result, and ends
    #[arg(long)]
    pub once: bool,
    /// Prints one JSON object; with --once
    #[arg(long, requires = "once")]
    pub json: bool,
    /// Panics after the first frame, for the test that the terminal is restored
    #[arg(long, hide = true)]
    pub plant_panic: bool,
    /// Time between two looks, in seconds, 0.1 to 3600
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    pub interval: Duration,
    #[command(flatten)]
    pub domain: DomainArg,
}

/// Serves the counts of the domain to Prometheus, as text over HTTP
///
/// GET /metrics looks at the domain and answers in the text format of Prometheus, version 0.0.4.
/// The names of the metrics are listed in docs/guide/observe.md and stay. Anyone who can connect
/// can read the names of the domain and the numbers of its processes, so the address has to be one
/// of loopback unless --any-address is given. SIGINT and SIGTERM end it.
#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct MetricsArgs {
    /// Address and port to listen on; port 0 takes a free one, which is printed
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9464", value_parser = address)]
    pub listen: SocketAddr,
    /// Allows an address that other machines may reach
    #[arg(long)]
    pub any_address: bool,
    #[command(flatten)]
    pub domain: DomainArg,
}

fn address(text: &str) -> Result<SocketAddr, String> {
    let parsed = text.parse();
    parsed.map_err(|_| "give a numeric address and a port, as 127.0.0.1:9464 or [::1]:9464".into())
}

/// An age, unlike the length of a wait, may be years.
fn age(text: &str) -> Result<Duration, String> {
    let age = within(
        0.0..=315_360_000.0,
        text,
        "age in seconds; use 0 to 315360000",
    );
    age.map(Duration::from_secs_f64)
}

/// Lists the members of the domain and their states
///
/// A member is a process that has joined the domain under a name, with a role. The state `stalled`
/// means that its heartbeat is older than 900 ms: the process is stopped, hangs, or lacks CPU time.
/// The state `suspect` means that its connection ended without a graceful close and its death is not
/// proven yet. With --follow, each change is printed until the command is interrupted: joined,
/// stalled, recovered, left, died. The command changes nothing in the domain.
#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct MembersArgs {
    /// Prints each change after the list, until interrupted
    #[arg(long)]
    pub follow: bool,
    #[command(flatten)]
    pub domain: DomainArg,
    /// Prints one JSON object per member or change instead of text
    #[arg(long)]
    pub json: bool,
}

/// Keeps a model's weights in memory, for all processes that use them
///
/// One copy of the weights lies in the device's memory, and any number of processes read it. It
/// stays as long as one of them lives: `serve` takes the weights over from those processes when it
/// is started again, and does not read the files.
#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct WeightsArgs {
    #[command(subcommand)]
    pub command: WeightsCommand,
}

#[derive(Debug, Subcommand)]
pub enum WeightsCommand {
    Serve(WeightsServeArgs),
    Ls(WeightsLsArgs),
    Drop(WeightsDropArgs),
    Verify(WeightsVerifyArgs),
}

/// Loads weights, and keeps them under a name until it is interrupted or told to end
///
/// Each PATH is a safetensors file, an index (model.safetensors.index.json), or a folder with one
/// of them: with one index and the files that it names, or with one safetensors file of any name. A
/// child process opens the device, checks all files, loads them into one memory, and ends. This
/// process keeps the memory's descriptor alone: it opens no device and needs no memory of its own.
///
/// When processes have weights of that name open already, their newest version is taken over: a
/// child process compares the content hash of each tensor, and no file is read. A version that is
/// damaged is not offered: the next older one is compared, and without one the files are loaded.
/// The same holds for a version on another device than the one that --device names.
///
/// Without a PATH it loads nothing: it keeps what engines and trainers publish under the name.
///
/// It prints a line with `ready` once the weights can be opened. Nothing is offered if a file is
/// damaged or written to meanwhile, the memory too small, or the name taken. SIGINT, SIGTERM and `warpipe weights drop`
/// end it; processes that have the weights open keep them.
#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct WeightsServeArgs {
    /// Safetensors files, indexes of them, or folders with one model; without any, what processes
    /// publish under the name is kept
    #[arg(value_name = "PATH")]
    pub paths: Vec<PathBuf>,
    /// Name of the weights, for example llama; at most 200 bytes
    #[arg(long)]
    pub name: String,
    /// Device of the weights: auto (where a version is that is taken over, else the first GPU, else
    /// the host), host, cuda or cuda:N
    #[arg(long, default_value_t = DeviceArg::Auto)]
    pub device: DeviceArg,
    /// Users that may open the weights beside this one, by their numbers; repeatable. The domain's
    /// folder has to let them pass (chmod 711)
    #[arg(long = "allow-uid", value_name = "UID")]
    pub allow_uids: Vec<u32>,
    /// Groups that may, by the effective group of a process; repeatable
    #[arg(long = "allow-gid", value_name = "GID")]
    pub allow_gids: Vec<u32>,
    #[command(flatten)]
    pub domain: DomainArg,
    /// Prints no progress
    #[arg(long)]
    pub quiet: bool,
    /// Prints JSON objects instead of text, one per event, and no progress
    #[arg(long)]
    pub json: bool,
}

/// Lists the weights of the domain, with their keepers and the processes that have them open
///
/// Weights that processes have open after their keeper has died are listed, too: `warpipe weights
/// serve` with the same name takes them over. It opens no device and maps no memory.
#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct WeightsLsArgs {
    #[command(flatten)]
    pub domain: DomainArg,
    /// Prints one JSON object per name instead of text
    #[arg(long)]
    pub json: bool,
}

/// Ends the keeper of a name
///
/// The keeper gives its descriptors up, and its `warpipe weights serve` ends with exit code 0.
/// Processes that have the weights open keep them; with the last of these the memory is free.
#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct WeightsDropArgs {
    /// Name of the weights
    pub name: String,
    /// Longest wait for the keeper's end, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    pub timeout: Duration,
    #[command(flatten)]
    pub domain: DomainArg,
    /// Prints one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// Compares the content hash of every tensor with the one that was computed from the files
///
/// Lists the tensors that differ; the exit code is 1 then. It reads all of the memory and changes
/// nothing in it. If the keeper has taken a version over that is not checked yet, this is its
/// check: the keeper offers the version if it is right.
#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct WeightsVerifyArgs {
    /// Name of the weights
    pub name: String,
    /// Device that reads the memory: auto (the one on which it lies), host, cuda or cuda:N
    #[arg(long, default_value_t = DeviceArg::Auto)]
    pub device: DeviceArg,
    #[command(flatten)]
    pub domain: DomainArg,
    /// Prints one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// The domain of a command.
#[derive(Debug, Args)]
pub struct DomainArg {
    /// Directory of the domain, instead of the environment's
    #[arg(long = "domain", value_name = "DIR")]
    pub path: Option<PathBuf>,
}

impl DomainArg {
    /// It, with its directory made if it is missing.
    pub fn open(&self) -> warpipe::Result<warpipe::Domain> {
        warpipe::Domain::at(self.or_environment()?)
    }

    /// Its directory, or the environment's.
    pub fn or_environment(&self) -> warpipe::Result<PathBuf> {
        self.path
            .clone()
            .map_or_else(warpipe::Domain::environment_path, Ok)
    }
}

/// Prints a completion script for a shell
///
/// For one session of bash: source <(warpipe completions bash). To keep it, write the output to
/// ~/.local/share/bash-completion/completions/warpipe (bash), to a file _warpipe in a directory of
/// $fpath (zsh), or to ~/.config/fish/completions/warpipe.fish (fish).
#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct CompletionsArgs {
    /// The shell
    #[arg(value_enum)]
    pub shell: CompletionShell,
}

/// A shell with a completion script.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum CompletionShell {
    /// GNU Bash
    Bash,
    /// The Z shell
    Zsh,
    /// The fish shell
    Fish,
}

/// Prints a manual page
///
/// The page is in roff: warpipe man | man -l -
#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct ManArgs {
    /// The subcommand that the page describes, as in pub or weights-serve; by default the page
    /// describes warpipe itself
    #[arg(conflicts_with = "out")]
    pub subcommand: Option<String>,
    /// Writes the pages of warpipe and of all its subcommands into this directory instead
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

pub fn seconds(text: &str) -> Result<Duration, String> {
    let rule = "time in seconds; use a number above 0 and up to 86400";
    let seconds = within(f64::MIN_POSITIVE..=86_400.0, text, rule);
    seconds.map(Duration::from_secs_f64)
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds = within(0.1..=3600.0, text, "interval; use 0.1 to 3600 seconds");
    seconds.map(Duration::from_secs_f64)
}

fn rate(text: &str) -> Result<f64, String> {
    within(
        0.001..=1e6,
        text,
        "rate; use 0.001 to 1000000 samples a second",
    )
}

/// A number in a range, or a text that ends in the rule.
fn within(range: RangeInclusive<f64>, text: &str, rule: &str) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| range.contains(number));
    number.ok_or_else(|| format!("{text:?} is no {rule}"))
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
        assert_eq!(interval("0.1"), Ok(Duration::from_millis(100)));
        for wrong in ["0", "-1", "nan", "inf", "1e9", "x", ""] {
            assert!(interval(wrong).is_err(), "{wrong}");
            assert!(seconds(wrong).is_err() && rate(wrong).is_err(), "{wrong}");
        }
    }
}

/// Carries names between this machine and others; this command was built without it
#[cfg(not(feature = "bridge"))]
#[derive(Debug, Args)]
#[command(hide = true, disable_help_flag = true)]
pub struct NoBridgeArgs {
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    pub given: Vec<std::ffi::OsString>,
}
