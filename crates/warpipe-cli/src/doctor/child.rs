//! The checks' second process: `warpipe doctor-child`.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::time::Duration;

use clap::Args;
use warpipe::backend::RawRegion;
use warpipe::{Access, Device, DeviceKind, Stream};

use crate::device_arg::DeviceArg;
use crate::exit::Exit;
use crate::process::follow_parent;
use crate::registered::RegisteredPage;

use super::memory::SEED;

/// The child's line when it has read the parent's memory, before it tries to write.
pub const READ: &str = "read";
/// Its line when a write was let through.
pub const WRITTEN: &str = "written";
/// Its line, before the reason, when the driver refused a write.
pub const REFUSED: &str = "refused: ";

const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, Args)]
pub struct ChildArgs {
    #[arg(long)]
    parent: i32,
    #[arg(long, default_value_t = DeviceArg::Host)]
    device: DeviceArg,
    /// The bytes of the memory behind standard input. Without them the child ends at once.
    #[arg(long)]
    bytes: Option<u64>,
}

/// In the child: maps the memory behind standard input for reading, reads it, and tries to write it.
pub fn run(args: &ChildArgs) -> anyhow::Result<Exit> {
    follow_parent(args.parent)?;
    if let Some(bytes) = args.bytes {
        write_read_only(args.device, bytes)?;
    }
    Ok(Exit::Done)
}

fn write_read_only(device: DeviceArg, bytes: u64) -> anyhow::Result<()> {
    let device = device.open()?.device;
    let stream = device.stream()?;
    let page = RegisteredPage::new(&device)?;
    let (input, id) = (io::stdin(), device.info().id);
    let backend = device.backend();
    let region = backend.import(&[input.as_fd()], bytes, Access::Read, id)?;
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
