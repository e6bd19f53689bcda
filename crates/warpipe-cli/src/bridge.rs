//! `warpipe bridge`: names of this domain on another machine, and of another machine here.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde_json::json;
use warpipe_bridge::{Bridge, Options, Policy, Tls};

use crate::announcer::Announcer;
use crate::args::{DomainArg, seconds};
use crate::device_arg::DeviceArg;
use crate::exit::{Exit, HELP};
use crate::interrupt::{Interrupt, LOOK};
use crate::output::printable;

/// Carries names between this machine and others, over TCP or TLS
///
/// A bridge on each side: one listens and the other one connects; each may export and import. An
/// exported name is received like by any subscriber, and published under the same name on the other
/// machine, or under remote/HOST/NAME where the name is taken. Samples keep their order and their
/// numbers, and a gap in the numbers counts what is missing.
///
/// Off loopback a bridge uses TLS, or needs --insecure. With --ca, a listener admits only peers with
/// a certificate of that authority. It runs until it is interrupted.
#[derive(Debug, Args)]
#[command(after_help = HELP)]
pub struct BridgeArgs {
    /// Listens on tcp/HOST:PORT or tls/HOST:PORT
    #[arg(long, value_name = "ENDPOINT", required_unless_present = "connect")]
    pub listen: Vec<String>,
    /// Connects to a bridge that listens there, again and again until it is there
    #[arg(long, value_name = "ENDPOINT")]
    pub connect: Vec<String>,
    /// Names that peers may import: * is one part of a name, ** any number of parts
    #[arg(long, value_name = "PATTERN")]
    pub export: Vec<String>,
    /// Names that are imported from peers
    #[arg(long, value_name = "PATTERN")]
    pub import: Vec<String>,
    /// Queues of this machine of which workers of the peers may do jobs
    #[arg(long, value_name = "PATTERN")]
    pub export_queue: Vec<String>,
    /// Queues of peers of which workers of this machine do jobs
    #[arg(long, value_name = "PATTERN")]
    pub import_queue: Vec<String>,
    /// Time after which the jobs of an unreachable peer go back to their queue, in seconds, 0.5 to
    /// 86400
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub lease: Duration,
    /// Action when an importer has no room for a sample
    #[arg(long, value_enum, default_value_t = BridgePolicy::Block)]
    pub policy: BridgePolicy,
    /// Number of samples of a name that wait for an importer before the policy acts, 1 to 1024;
    /// fewer than the publisher's depth
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub held: u32,
    /// Number of samples of an imported name that its subscribers may have in flight, 1 to 4096
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub depth: u32,
    /// Number of samples of an imported name that a late subscriber gets first, at most the depth
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(..=4096))]
    pub history: u32,
    /// Largest tensor in MiB; larger ones are left out at the exporter, and refused at the importer
    #[arg(long, value_name = "MIB", default_value_t = 4096, value_parser = clap::value_parser!(u64).range(1..=1048576))]
    pub tensor_max: u64,
    /// Device memory of each imported name in MiB
    #[arg(long, value_name = "MIB", default_value_t = 4096, value_parser = clap::value_parser!(u64).range(1..=1048576))]
    pub memory: u64,
    /// Memory of this process in MiB for what has arrived and is not in device memory yet, of all
    /// names and queues together; with many of them each has less on its way
    #[arg(long, value_name = "MIB", default_value_t = 2048, value_parser = clap::value_parser!(u64).range(2..=1048576))]
    pub receive_memory: u64,
    /// Silence after which a peer counts as unreachable, in seconds, 0.5 to 600
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    pub link_timeout: Duration,
    /// Certificate of this end, in PEM
    #[arg(long, value_name = "FILE", requires = "key")]
    pub cert: Option<PathBuf>,
    /// Private key of the certificate, in PEM
    #[arg(long, value_name = "FILE", requires = "cert")]
    pub key: Option<PathBuf>,
    /// Certificates of the authority of the peers' certificates, in PEM
    #[arg(long, value_name = "FILE")]
    pub ca: Option<PathBuf>,
    /// Allows plain TCP off loopback: anybody in between can read and alter everything
    #[arg(long)]
    pub insecure: bool,
    /// Name of this machine for its peers; by default its host name
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Device of imported tensors, which also reads exported ones: auto, host, cuda or cuda:N
    #[arg(long, default_value_t = DeviceArg::Auto)]
    pub device: DeviceArg,
    #[command(flatten)]
    pub domain: DomainArg,
    /// Prints one JSON object per event instead of text
    #[arg(long)]
    pub json: bool,
}

/// The action of an exporter when an importer has no room.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum BridgePolicy {
    /// Receives nothing meanwhile, so that the publisher's own policy decides
    Block,
    /// Leaves out the oldest sample that waits
    DropOldest,
    /// Leaves out the new sample
    DropNewest,
    /// Ends the export of that name to that peer
    Fail,
}

/// Runs a bridge until it is interrupted.
pub fn run(args: &BridgeArgs) -> anyhow::Result<Exit> {
    let announcer = Announcer::start(args.json)?;
    let interrupt = Interrupt::install()?;
    let bridge = Bridge::open(options(args)?)?;
    announcer.human(|| "the bridge is open".to_owned());
    while !interrupt.came() {
        if let Some(notice) = bridge.next_notice(LOOK) {
            let event = notice.to_string();
            announcer.say(|| printable(&event), &json!({ "event": event }));
        }
    }
    Ok(Exit::Interrupted)
}

fn options(args: &BridgeArgs) -> anyhow::Result<Options> {
    let domain = args.domain.open()?;
    let mut options = Options::new(&domain, &args.device.open()?.device);
    options.node = args.name.clone().unwrap_or_else(host_name);
    options.listen.clone_from(&args.listen);
    options.connect.clone_from(&args.connect);
    options.export.clone_from(&args.export);
    options.import.clone_from(&args.import);
    options.export_queues.clone_from(&args.export_queue);
    options.import_queues.clone_from(&args.import_queue);
    options.lease = args.lease;
    options.policy = match args.policy {
        BridgePolicy::Block => Policy::Block,
        BridgePolicy::DropOldest => Policy::DropOldest,
        BridgePolicy::DropNewest => Policy::DropNewest,
        BridgePolicy::Fail => Policy::Fail,
    };
    options.held_max = args.held as usize;
    options.depth = args.depth;
    options.history = args.history;
    options.tensor_bytes_max = args.tensor_max << 20;
    options.memory_limit = args.memory << 20;
    options.receive_bytes_max = args.receive_memory << 20;
    options.link_timeout = args.link_timeout;
    options.insecure = args.insecure;
    options.tls = Tls {
        certificate: args.cert.clone(),
        key: args.key.clone(),
        authority: args.ca.clone(),
    };
    Ok(options)
}

fn host_name() -> String {
    let name = rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned();
    if name.is_empty() { "host".into() } else { name }
}
