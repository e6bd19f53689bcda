//! What the demo's publisher and subscribers have in common: orders, one word a line of standard
//! input, events on standard output, and a count of what is left over at the end.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use clap::Args;
use serde_json::{Value, json};
use warpipe::{Device, Domain, Publisher, PublisherOptions, Subscriber, SubscriberOptions};

use super::Plant;
use crate::device_arg::DeviceArg;
use crate::output::Output;
use crate::process;

/// How long what was dropped may take to go: streams have to be past it.
const SETTLE: Duration = Duration::from_secs(10);
const ASK_EVERY: Duration = Duration::from_millis(5);

/// A child's arguments.
#[derive(Debug, Args)]
pub struct ChildArgs {
    #[arg(long)]
    pub parent: i32,
    #[arg(long)]
    pub device: DeviceArg,
    #[arg(long)]
    pub subscribers: usize,
    #[arg(long)]
    pub item_bytes: u64,
    #[arg(long)]
    pub plant: Option<Plant>,
}

/// Descriptors, mappings of segments, and bytes of device memory.
type Holdings = [u64; 3];

/// A child at its start.
pub struct Child {
    pub device: Device,
    pub domain: Domain,
    /// Ends when the demo is over.
    pub orders: Receiver<String>,
    before: Holdings,
}

impl Child {
    /// Dies with its parent from now on.
    pub fn begin(args: &ChildArgs) -> anyhow::Result<Child> {
        process::follow_parent(args.parent)?;
        let device = args.device.open()?.device;
        warpipe_kernels::preload(&device)?;
        let domain = Domain::from_environment()?;
        // The first link of a process makes what stays until the process ends.
        let name = format!("demo/before-{}", std::process::id());
        let publisher = Publisher::new(&name, PublisherOptions::at(&domain, &device))?;
        let subscriber = Subscriber::new(&name, SubscriberOptions::at(&domain, &device))?;
        drop((subscriber, publisher));
        let (sender, orders) = channel();
        std::thread::spawn(move || {
            for line in std::io::stdin().lines().map_while(Result::ok) {
                let _ = sender.send(line);
            }
        });
        let before = held(&device)?;
        Ok(Child {
            device,
            domain,
            orders,
            before,
        })
    }

    /// Reports what this process holds beyond what it held at its start, once that is nothing or time
    /// is up.
    pub fn tell_leftovers(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + SETTLE;
        loop {
            let now = held(&self.device)?;
            let extra: Holdings =
                std::array::from_fn(|index| now[index].saturating_sub(self.before[index]));
            if extra == Holdings::default() || Instant::now() > deadline {
                let [descriptors, mappings, bytes] = extra;
                return tell(json!({
                    "event": "left",
                    "descriptors": descriptors, "mappings": mappings, "bytes of device memory": bytes,
                }));
            }
            std::thread::sleep(ASK_EVERY);
        }
    }
}

/// Reports to the parent.
pub fn tell(event: Value) -> anyhow::Result<()> {
    Ok(Output::new(true).say(String::new, &event)?)
}

fn held(device: &Device) -> anyhow::Result<Holdings> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let mappings = maps.lines().filter(|line| line.contains("memfd:warpipe"));
    let targets = std::fs::read_dir("/proc/self/fd")?
        .filter_map(|entry| std::fs::read_link(entry.ok()?.path()).ok());
    // Not a driver's device files, and not the listing's own descriptor.
    let is_outside = |target: &PathBuf| ["/dev", "/proc"].iter().all(|it| !target.starts_with(it));
    let descriptors = targets.filter(is_outside).count() as u64;
    let bytes = device.backend().bytes_held();
    Ok([descriptors, mappings.count() as u64, bytes])
}
