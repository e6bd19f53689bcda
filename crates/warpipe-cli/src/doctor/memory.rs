//! Checks of one device: it can share memory, share it for reading only, order work.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use warpipe::backend::{RawRegion, StreamOp};
use warpipe::{Access, Device, DeviceKind, Stream};

use super::child::{READ, REFUSED, WRITTEN};
use super::report::Check;
use crate::device_arg::DeviceArg;
use crate::output;
use crate::process;
use crate::registered::RegisteredPage;

/// The pattern that the owner writes.
pub const SEED: u64 = 0x5eed;

const PATIENCE: Duration = Duration::from_secs(10);
/// Opening a GPU in a new process may take seconds on a busy machine.
const CHILD_PATIENCE: Duration = Duration::from_secs(30);
/// How long a stream that must wait is given to go on wrongly.
const MUST_WAIT: Duration = Duration::from_millis(20);

const SIGSEGV: i32 = 11;

/// Whether everything that the checks made and dropped has been given back.
pub fn given_back() -> Check {
    let start = Instant::now();
    loop {
        let stats = warpipe::process_stats();
        if stats.dropping == 0 && stats.kept == 0 {
            return Check::ok("given back", "nothing waits for a device");
        }
        if start.elapsed() > PATIENCE {
            let detail = format!(
                "{} dropped and kept, {} for more than 60 s; {} with {} bytes that the driver has not taken back",
                stats.dropping, stats.overdue, stats.kept, stats.kept_bytes
            );
            return Check::failed(
                "given back",
                detail,
                "a device does not do its work: see dmesg for its driver",
            );
        }
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

/// A region, allocated or imported, released with its owner.
pub struct Scratch {
    device: Device,
    pub region: RawRegion,
}

impl Scratch {
    /// One unit of device memory.
    pub fn allocate(device: &Device) -> anyhow::Result<Scratch> {
        let bytes = device.backend().granularity();
        let region = device.backend().allocate(bytes).context("allocating")?;
        let device = device.clone();
        Ok(Scratch { device, region })
    }

    /// The same memory through its descriptor, on this or another device.
    pub fn import(&self, on: &Device, access: Access) -> warpipe::Result<Scratch> {
        let (fd, owner) = (self.export()?, self.device.info().id);
        let backend = on.backend();
        let region = backend.import(&[fd.as_fd()], self.region.bytes, access, owner)?;
        let device = on.clone();
        Ok(Scratch { device, region })
    }

    fn export(&self) -> warpipe::Result<OwnedFd> {
        // SAFETY: the region came from this backend, and is released in `drop` only.
        unsafe { self.device.backend().export(&self.region) }
    }

    /// Writes the pattern with a kernel, and waits for it.
    pub fn fill(&self, stream: &Stream) -> warpipe::Result<()> {
        // SAFETY: the region is mapped as long as self, and the kernel is waited for.
        unsafe { warpipe_kernels::fill(stream, self.region.ptr, self.region.bytes / 8, SEED) }?;
        stream.synchronize(PATIENCE)
    }

    /// How many words are not the pattern, counted by a kernel and, for the first ones, by the CPU.
    pub fn wrong_words(&self, stream: &Stream) -> anyhow::Result<u64> {
        let page = RegisteredPage::new(&self.device)?;
        let (words, count, wrong) = (self.region.ptr, self.region.bytes / 8, page.address(0));
        // SAFETY: the region is mapped as long as self, the page until the end of this function;
        // the kernel is waited for below.
        unsafe { warpipe_kernels::check(stream, words, count, SEED, wrong) }?;
        if let Err(error) = stream.synchronize(PATIENCE) {
            // The kernel may still run and count.
            std::mem::forget(page);
            return Err(error.into());
        }
        let mut first = [0u8; 64];
        let backend = self.device.backend();
        // SAFETY: the region has at least a page, and the stream is idle.
        unsafe { backend.download(stream.raw(), &mut first, words) }?;
        let pattern = (0..).map(|index| warpipe_kernels::pattern(SEED, index));
        let first = first.chunks_exact(8).zip(pattern);
        let differing = first.filter(|(found, due)| **found != due.to_le_bytes()[..]);
        Ok(page.word(0).load().max(differing.count() as u64))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: released here only; every kernel on it was waited for, or failed with its
        // context.
        let _ = unsafe { self.device.backend().release(&mut self.region) };
    }
}

/// Allocates, exports, imports, writes through the one mapping and reads through the other.
pub fn shared(device: &Device) -> Check {
    let tried = || -> anyhow::Result<String> {
        let stream = device.stream()?;
        let owned = Scratch::allocate(device)?;
        let imported = owned
            .import(device, Access::ReadWrite)
            .context("exporting and importing")?;
        owned.fill(&stream).context("writing")?;
        let wrong = imported.wrong_words(&stream).context("reading")?;
        ensure!(
            wrong == 0,
            "{wrong} words written through one mapping read differently through the other"
        );
        let size = output::bytes(owned.region.bytes);
        Ok(format!(
            "{size} allocated, exported as a descriptor, imported, written, read back"
        ))
    };
    Check::from_result("shared memory", tried(), next(device))
}

/// Lets a child map memory for reading, and see its write refused.
///
/// On a GPU the refusal is a fault of the child's context, which under MPS takes every other
/// client's with it: not something to provoke in somebody's working day.
pub fn read_only(device: &Device) -> Check {
    if device.info().id.kind == DeviceKind::Cuda && super::system::mps_answers() {
        return Check::no(
            "read-only mapping",
            "not tried: under MPS the fault that it provokes ends every client of the daemon",
            "to have it tried, stop the MPS daemon and run this again",
        );
    }
    let tried = || -> anyhow::Result<String> {
        let stream = device.stream()?;
        let owned = Scratch::allocate(device)?;
        owned.fill(&stream)?;
        let (said, status) = ask_child(device, owned.export()?, owned.region.bytes)?;
        let refusal = refusal(&said, status)?;
        let wrong = owned.wrong_words(&stream)?;
        ensure!(wrong == 0, "{wrong} words changed under their owner");
        Ok(format!(
            "another process read it, and its write was stopped: {refusal}"
        ))
    };
    Check::from_result("read-only mapping", tried(), next(device))
}

fn ask_child(device: &Device, memory: OwnedFd, bytes: u64) -> anyhow::Result<(String, ExitStatus)> {
    let mut child = process::child_of_this("doctor-child")
        .args(["--device", &DeviceArg::of(device).to_string()])
        .args(["--bytes", &bytes.to_string()])
        .stdin(memory)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("starting a second process")?;
    process::end(&mut child, CHILD_PATIENCE)?;
    // The child is gone: what it left in its pipes ends.
    let output = child.wait_with_output()?;
    let said = [output.stdout, output.stderr].concat();
    Ok((String::from_utf8_lossy(&said).into_owned(), output.status))
}

/// Why the child's write did not go through, or that it did.
fn refusal(said: &str, status: ExitStatus) -> anyhow::Result<String> {
    let mut lines = said.lines();
    let ending = process::ending(status);
    if lines.next() != Some(READ) {
        let said = said.trim();
        bail!("the second process could not read: it said {said:?} and {ending}");
    }
    match lines.next() {
        None if status.signal() == Some(SIGSEGV) => Ok("SIGSEGV".to_owned()),
        Some(line) if line.starts_with(REFUSED) => Ok(line[REFUSED.len()..].to_owned()),
        Some(WRITTEN) => bail!("a write through a read-only mapping went through"),
        other => bail!("the second process said {other:?} and {ending}"),
    }
}

/// Holds a stream on a word, lets it go with the CPU, and holds it again until another stream lets
/// it go.
pub fn stream_order(device: &Device) -> Check {
    let tried = || -> anyhow::Result<String> {
        let page = RegisteredPage::new(device)?;
        let (held, free) = (device.stream()?, device.stream()?);
        let result = hold_and_release(device, &page, &held, &free);
        // On every path, no stream may still wait for a word of a page that is unmapped.
        page.word(0).store(i64::MAX as u64);
        let idle = [&held, &free].map(|stream| stream.synchronize(PATIENCE));
        let idle: warpipe::Result<()> = idle.into_iter().collect();
        if idle.is_err() {
            std::mem::forget(page);
        }
        result?;
        idle?;
        let done =
            "a stream waited for a word, and went on when the CPU, then another stream, wrote it";
        Ok(done.to_owned())
    };
    Check::from_result("stream memory operations", tried(), next(device))
}

fn hold_and_release(
    device: &Device,
    page: &RegisteredPage,
    held: &Stream,
    free: &Stream,
) -> anyhow::Result<()> {
    let backend = device.backend();
    let (gate, done) = (page.address(0), page.address(1));
    for value in [1, 2] {
        let wait = StreamOp::Wait { word: gate, value };
        let signal = |word| StreamOp::Signal { word, value };
        // SAFETY: the stream is live; the caller keeps the page until both streams are idle.
        unsafe { backend.batch(held.raw(), &[wait, signal(done)]) }?;
        ensure!(
            !page.word(1).wait(value, MUST_WAIT, true),
            "a stream did not wait for its word"
        );
        if value == 1 {
            page.word(0).store(value);
        } else {
            // SAFETY: as above.
            unsafe { backend.batch(free.raw(), &[signal(gate)]) }?;
        }
        ensure!(
            page.word(1).wait(value, PATIENCE, true),
            "a stream did not go on when its word was written"
        );
    }
    Ok(())
}

fn next(device: &Device) -> &'static str {
    match device.info().id.kind {
        DeviceKind::Host => {
            "check the sandbox or container: it must allow memfd_create, mmap and exec of /proc/self/exe"
        }
        _ => "update the NVIDIA driver (R525 or newer), or use --device host",
    }
}
