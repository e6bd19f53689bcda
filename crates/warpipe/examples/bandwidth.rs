//! Measures copies through another process's memory and through this process's own: both are the
//! same memory.
//!
//! A second process, the exporter, allocates memory and sends a ticket. The first maps it, verifies
//! that bytes go both ways, and then copies: host to device, device to host, and within the device,
//! each through the import and with memory of its own. The two alternate, after a warm-up round,
//! and the best round of each counts. With two GPUs that reach each other, the exporter also runs
//! on the second one, beside memory that the first process has there itself. The host's memory is
//! pinned (`cuMemHostRegister`); a pageable copy measures the driver's staging instead.
//!
//! **This module is marked for unsafe**: it maps and pins host memory, and copies by address.
//!
//! ```text
//! cargo run --release -p warpipe --example bandwidth
//! cargo run --release -p warpipe --example bandwidth -- --device cuda --mib 1024 --at-least 0.9
//! ```
//!
//! `--mib N` is the size of a copy (256 on a GPU, 16 on the host), `--rounds N` how often it is
//! measured. With `--at-least RATIO` a ratio below it is an error; without it the figures are only
//! printed, because on a shared machine they depend on the other load. (`warpipe-bench bandwidth`
//! writes the same figures to a report.) It ends with `ok: N comparisons, all bytes right; the
//! lowest ratio is 0.99`.

mod stage;

use std::process::ExitCode;
use std::time::Duration;
use std::time::Instant;

use rustix::mm::{MapFlags, ProtFlags};
use stage::talk::Talk;
use stage::{Outcome, PATIENCE, Stage, ensure, play};
use warpipe::{
    Access, Device, DeviceKind, DevicePtr, Memory, PublishOptions, SharedMemory, Stream, Ticket,
};

/// Copies in a row that give one rate.
const COPIES: u64 = 8;
const SEED: u64 = 5;

fn main() -> ExitCode {
    play(&["--mib", "--rounds", "--at-least"], |stage| {
        match stage.role() {
            "exporter" => export(stage, Talk::with_parent()?),
            _ => compare(stage),
        }
    })
}

/// The exporter's role: keeps its memory until the other side is done.
fn export(stage: &Stage, mut talk: Talk) -> Outcome<String> {
    let peer = if talk.hear()? == "on the peer" {
        Some(peer_of(stage)?.ok_or("there is no peer")?)
    } else {
        None
    };
    let device = peer.unwrap_or_else(|| stage.device.clone());
    let memory = Memory::allocate(&device, talk.hear()?.parse()?)?;
    let published = memory.publish(
        "memory",
        PublishOptions {
            access: Access::ReadWrite,
            ..stage.domain.options()
        },
    )?;
    talk.tell(published.ticket(..)?)?;
    talk.expect("written")?;
    talk.tell(if is_pattern(&memory.to_vec(PATIENCE)?) {
        "right"
    } else {
        "wrong"
    })?;
    // The other side sends no more lines: it ends its input when it has measured.
    talk.hear_or_end()?;
    Ok(format!(
        "{} MiB of {device} were copied from and to",
        memory.bytes() >> 20
    ))
}

fn compare(stage: &Stage) -> Outcome<String> {
    let is_host = stage.device.info().id.kind == DeviceKind::Host;
    let bytes = stage
        .number("--mib", if is_host { 16 } else { 256 })?
        .max(1)
        << 20;
    let rounds = stage.number("--rounds", 7)?.max(1);
    let bench = Bench {
        stream: stage.device.stream()?,
        pinned: Pinned::new(&stage.device, bytes)?,
        bytes,
        rounds,
    };
    println!(
        "{} MiB a copy on {}, the best of {rounds} rounds, host memory pinned",
        bytes >> 20,
        stage.device
    );
    println!(
        "{:<24} {:>12} {:>12} {:>7}",
        "", "import GB/s", "own GB/s", "ratio"
    );

    let mut ratios = one_device(stage, &bench)?;
    match peer_of(stage)? {
        Some(peer) => ratios.extend(two_devices(stage, &bench, &peer)?),
        None => println!("skipped: peer to peer; there are no two GPUs that this process sees"),
    }
    let lowest = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    if let Some(bound) = stage.option("--at-least") {
        let bound: f64 = bound.parse()?;
        ensure(lowest >= bound, || {
            format!("a ratio of {lowest:.3} is below {bound}")
        })?;
    }
    Ok(format!(
        "{} comparisons, all bytes right; the lowest ratio is {lowest:.3}",
        ratios.len()
    ))
}

fn one_device(stage: &Stage, bench: &Bench) -> Outcome<Vec<f64>> {
    let (exporter, mut talk) = stage.start_talking("exporter")?;
    talk.tell("on the same device")?;
    let theirs = bench.open(stage, &mut talk)?;
    let own = Memory::allocate(&stage.device, bench.bytes)?;
    let other = Memory::allocate(&stage.device, bench.bytes)?;
    let (host, theirs, own, other) = (bench.pinned.address, theirs.ptr(), own.ptr(), other.ptr());
    let ratios = vec![
        bench.line("host to device", [theirs, host], [own, host])?,
        bench.line("device to host", [host, theirs], [host, own])?,
        bench.line("device to device, read", [other, theirs], [other, own])?,
        bench.line("device to device, write", [theirs, other], [own, other])?,
    ];
    drop(talk);
    exporter.finish()?;
    Ok(ratios)
}

fn two_devices(stage: &Stage, bench: &Bench, peer: &Device) -> Outcome<Vec<f64>> {
    // Memory of the second GPU that this process has itself, mapped for the first one.
    let there = Memory::allocate(peer, bench.bytes)?;
    let own = match Memory::import_fd(
        &stage.device,
        there.export_fd()?,
        &there.info(),
        Access::ReadWrite,
    ) {
        Err(
            error @ warpipe::Error::Device {
                fault: warpipe::DeviceFault::OutOfReach,
                ..
            },
        ) => {
            println!("skipped: peer to peer; {error}");
            return Ok(Vec::new());
        }
        own => own?,
    };
    let (exporter, mut talk) = stage.start_talking("exporter")?;
    talk.tell("on the peer")?;
    let theirs = bench.open(stage, &mut talk)?;
    let here = Memory::allocate(&stage.device, bench.bytes)?;
    let (theirs, own, here) = (theirs.ptr(), own.ptr(), here.ptr());
    let ratios = vec![
        bench.line("peer to peer, read", [here, theirs], [here, own])?,
        bench.line("peer to peer, write", [theirs, here], [own, here])?,
    ];
    drop(talk);
    exporter.finish()?;
    Ok(ratios)
}

/// The first other GPU, if there is one.
fn peer_of(stage: &Stage) -> Outcome<Option<Device>> {
    let own = stage.device.info().id;
    if own.kind == DeviceKind::Host {
        return Ok(None);
    }
    for ordinal in 0..2 {
        match Device::cuda(ordinal) {
            Ok(device) if device.info().id != own => return Ok(Some(device)),
            Ok(_)
            | Err(warpipe::Error::Device {
                fault: warpipe::DeviceFault::NoSuchDevice,
                ..
            }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}

/// The common parameters of all comparisons.
struct Bench {
    stream: Stream,
    pinned: Pinned,
    bytes: u64,
    rounds: u64,
}

impl Bench {
    /// Maps the exporter's memory, and verifies that each side reads what the other writes.
    fn open(&self, stage: &Stage, talk: &mut Talk) -> Outcome<SharedMemory> {
        talk.tell(self.bytes)?;
        let theirs = talk
            .hear()?
            .parse::<Ticket>()?
            .open(&stage.device, Duration::ZERO)?;
        theirs.used_on(&self.stream);
        self.pinned.write_pattern();
        self.copies([theirs.ptr(), self.pinned.address], 1)?;
        talk.tell("written")?;
        talk.expect("right")?;
        self.pinned.clear();
        self.copies([self.pinned.address, theirs.ptr()], 1)?;
        ensure(self.pinned.is_pattern(), || {
            "what came back from the exporter's memory is wrong".into()
        })?;
        Ok(theirs)
    }

    /// Measures a copy through the import beside the same copy without it, each as [to, from].
    /// Returns the ratio.
    fn line(&self, name: &str, import: [DevicePtr; 2], own: [DevicePtr; 2]) -> Outcome<f64> {
        let (mut best_import, mut best_own) = (0.0f64, 0.0f64);
        for round in 0..=self.rounds {
            let (through_import, with_own) = (self.rate(import)?, self.rate(own)?);
            if round > 0 {
                best_import = best_import.max(through_import);
                best_own = best_own.max(with_own);
            }
        }
        let ratio = best_import / best_own;
        println!("{name:<24} {best_import:>12.1} {best_own:>12.1} {ratio:>7.3}");
        Ok(ratio)
    }

    /// GB/s.
    fn rate(&self, to_and_from: [DevicePtr; 2]) -> Outcome<f64> {
        let start = Instant::now();
        self.copies(to_and_from, COPIES)?;
        Ok((COPIES * self.bytes) as f64 / start.elapsed().as_secs_f64() / 1e9)
    }

    fn copies(&self, [to, from]: [DevicePtr; 2], copies: u64) -> Outcome {
        for _ in 0..copies {
            // SAFETY: both are `bytes` long, do not overlap, and are kept until the stream is idle,
            // which follows.
            unsafe { self.stream.copy(to, from, self.bytes)? };
        }
        // Not `synchronize`, which sleeps between two polls: the end must be seen at once.
        let start = Instant::now();
        while !self.stream.is_idle()? {
            ensure(start.elapsed() < PATIENCE, || {
                format!("a copy takes longer than {PATIENCE:?}")
            })?;
            std::hint::spin_loop();
        }
        Ok(())
    }
}

/// Host memory that the device accesses directly.
struct Pinned {
    device: Device,
    base: *mut u64,
    bytes: usize,
    /// The device's address of it.
    address: DevicePtr,
}

impl Pinned {
    fn new(device: &Device, bytes: u64) -> Outcome<Pinned> {
        let length = usize::try_from(bytes)?;
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh mapping at an address of the kernel's choice overlaps nothing.
        let base = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), length, protection, MapFlags::PRIVATE)?
        };
        let mut pinned = Pinned {
            device: device.clone(),
            base: base.cast(),
            bytes: length,
            address: 0,
        };
        // SAFETY: whole pages that stay mapped until `drop` has unregistered them.
        pinned.address = unsafe { device.backend().register(base.cast(), length)? };
        Ok(pinned)
    }

    /// The words. Only called while the stream is idle: then nothing else reads or writes them.
    fn words(&self) -> &[u64] {
        // SAFETY: mapped and zeroed pages of that length, as long as self; no copy is under way.
        unsafe { std::slice::from_raw_parts(self.base, self.bytes / 8) }
    }

    fn is_pattern(&self) -> bool {
        self.words()
            .iter()
            .zip(0..)
            .all(|(&word, index)| word == warpipe_kernels::pattern(SEED, index))
    }

    fn write_pattern(&self) {
        for index in 0..self.bytes / 8 {
            // SAFETY: in bounds; no copy is under way, and no reference to the words is alive.
            unsafe {
                self.base
                    .add(index)
                    .write(warpipe_kernels::pattern(SEED, index as u64))
            };
        }
    }

    fn clear(&self) {
        // SAFETY: as in `write_pattern`.
        unsafe { self.base.write_bytes(0, self.bytes / 8) };
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: registered and mapped in `new`; every copy was waited for.
        let _ = unsafe { self.device.backend().unregister(self.base.cast()) };
        // SAFETY: as above, and nothing uses the pages any more.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.bytes) };
    }
}

fn is_pattern(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<8>();
    let right = |(word, index): (&[u8; 8], u64)| {
        u64::from_ne_bytes(*word) == warpipe_kernels::pattern(SEED, index)
    };
    rest.is_empty() && words.iter().zip(0..).all(right)
}
