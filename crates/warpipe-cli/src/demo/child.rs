//! What the demo's publisher and subscribers have in common: orders, one a line of standard input,
//! and facts on standard output.

use std::sync::mpsc::{Receiver, channel};

use clap::Args;
use serde::Serialize;
use warpipe::Device;

use crate::args::DemoArgs;
use crate::output::Output;
use crate::process;

/// A child's arguments.
#[derive(Debug, Args)]
pub struct ChildArgs {
    #[arg(long)]
    pub parent: i32,
    #[command(flatten)]
    pub demo: DemoArgs,
}

/// A child at its start.
pub struct Child {
    pub device: Device,
    /// Ends when the demo is over.
    pub orders: Receiver<String>,
}

impl Child {
    /// Dies with its parent from now on.
    pub fn begin(args: &ChildArgs) -> anyhow::Result<Child> {
        process::follow_parent(args.parent)?;
        let device = args.demo.device.open()?.device;
        warpipe_kernels::preload(&device)?;
        let (sender, orders) = channel();
        std::thread::spawn(move || {
            let mut lines = std::io::stdin().lines().map_while(Result::ok);
            lines.try_for_each(|line| sender.send(line))
        });
        Ok(Child { device, orders })
    }
}

/// Reports to the parent.
pub fn tell(facts: impl Serialize) -> anyhow::Result<()> {
    Ok(Output::new(true).json_only(&facts)?)
}
