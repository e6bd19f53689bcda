//! The checks' second process: `warpipe doctor-child`.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::process::Command;
use std::time::Duration;

use clap::{Args, ValueEnum};
use warpipe::backend::RawRegion;
use warpipe::{Access, Device, DeviceKind, Stream};

use crate::device_arg::DeviceArg;
use crate::exit::Exit;
use crate::process::{follow_parent, this_program};
use crate::registered::RegisteredPage;

use super::memory::SEED;

/// The child's line when it has read the parent's memory, before it tries to write.
pub const READ: &str = "read";
/// Its line when a write was let through.
pub const WRITTEN: &str = "written";
/// Its line, before the reason, when the driver refused a write.
pub const REFUSED: &str = "refused: ";

const PATIENCE: Duration = Duration::from_secs(10);

/// The task of a child.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Task {
    /// End.
    Nothing,
    /// Map the memory behind standard input for reading, read it, and try to write it.
    WriteReadOnly,
}

#[derive(Debug, Args)]
pub struct ChildArgs {
    #[arg(value_enum)]
    task: Task,
    #[arg(long)]
    parent: i32,
    #[arg(long, default_value_t = DeviceArg::Host)]
    device: DeviceArg,
    #[arg(long, default_value_t = 0)]
    bytes: u64,
}

/// The command that starts such a child.
pub fn command(task: Task) -> Command {
    let mut command = this_program();
    let name = task
        .to_possible_value()
        .map(|value| value.get_name().to_owned())
        .unwrap_or_default();
    command.args([
        "doctor-child",
        &name,
        "--parent",
        &std::process::id().to_string(),
    ]);
    command
}

/// In the child.
pub fn run(args: &ChildArgs) -> anyhow::Result<Exit> {
    follow_parent(args.parent)?;
    match args.task {
        Task::Nothing => {}
        Task::WriteReadOnly => write_read_only(args)?,
    }
    Ok(Exit::Done)
}

fn write_read_only(args: &ChildArgs) -> anyhow::Result<()> {
    let device = args.device.open()?.device;
    let stream = device.stream()?;
    let page = RegisteredPage::new(&device)?;
    let input = io::stdin();
    let region =
        device
            .backend()
            .import(input.as_fd(), args.bytes, Access::Read, device.info().id)?;
    // SAFETY: the region is mapped for reading until the end of this process, and the page outlives
    // the wait below.
    unsafe {
        warpipe_kernels::check(&stream, region.ptr, region.bytes / 8, SEED, page.address(0))
    }?;
    stream.synchronize(PATIENCE)?;
    anyhow::ensure!(
        page.word(0).load() == 0,
        "the memory does not hold what its owner wrote"
    );
    say(READ)?;
    match write(&device, &stream, &region) {
        Ok(()) => say(WRITTEN),
        Err(error) => say(&format!("{REFUSED}{error}")),
    }
}

/// A store from the device. On the host it is this very process that the MMU stops, with SIGSEGV.
fn write(device: &Device, stream: &Stream, region: &RawRegion) -> warpipe::Result<()> {
    if device.info().id.kind == DeviceKind::Host {
        // SAFETY: none is claimed: the memory is mapped read-only, and a fault that ends this
        // process, made for it alone, is what is being tried. If the store goes through, it hits
        // memory that the parent gave up for it.
        unsafe { std::ptr::write_volatile(region.ptr as *mut u64, 0) };
        return Ok(());
    }
    // SAFETY: as above; here the fault ends the context of this process.
    unsafe { warpipe_kernels::fill(stream, region.ptr, 1, !SEED) }?;
    stream.synchronize(PATIENCE)
}

fn say(word: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{word}")?;
    Ok(out.flush()?)
}
