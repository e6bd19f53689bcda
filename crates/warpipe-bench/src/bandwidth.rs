//! Copies from and to another process's memory through an import, compared with the same copies of
//! own memory.
//!
//! The example `bandwidth` prints the same; this one is for reports. **This module is marked for
//! unsafe**: it copies device memory by address.

use std::os::fd::AsFd;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use warpipe::{Access, Device, DeviceId, DevicePtr, Stream};
use warpipe_bench::raw::{LINE_BYTES, Memory, Words, enqueue};
use warpipe_cli::device_arg::DeviceArg;
use warpipe_testkit::figure::{Figure, Wanted};

use super::Role;
use super::peer_process::{Control, PeerProcess};
use super::setup::{BenchDomain, Setup};

/// An import is the memory itself: its budget is the error of measurement.
const RATIO_MIN: f64 = 0.98;

/// The parameters of the importing process.
#[derive(Debug, Serialize, Deserialize)]
pub struct Terms {
    place: BenchDomain,
    /// Where the memory lies.
    owner: DeviceArg,
    bytes: u64,
    copies: u64,
    rounds: usize,
}

/// GB/s of each round.
#[derive(Debug, Serialize, Deserialize)]
struct Rates {
    /// The results.
    name: String,
    import: Vec<f64>,
    own: Vec<f64>,
}

pub fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    let bytes: u64 = if setup.is_host() || setup.quick {
        16 << 20
    } else {
        256 << 20
    };
    let mut places = vec![("one device", setup.place())];
    places.extend(
        setup
            .second
            .map(|second| ("two devices", setup.place_on(second))),
    );
    let mut figures = Vec::new();
    for (devices, place) in places {
        let (owner, copies) = (setup.choice, if setup.quick { 2 } else { 16 });
        for rates in measure(
            setup,
            Terms {
                place,
                owner,
                bytes,
                copies,
                rounds: setup.rounds(),
            },
        )? {
            let name = format!("{}, {devices}, {} MiB", rates.name, bytes >> 20);
            let note = "the floor is the same copy of memory that the process has allocated itself; more is better";
            let figure = Figure::new("bandwidth", name, "GB/s", &rates.import)
                .beside(&rates.own)
                .note(note);
            figures.push(figure.wanted(Wanted::RatioAtLeast(RATIO_MIN)));
        }
    }
    Ok(figures)
}

fn measure(setup: &Setup, terms: Terms) -> anyhow::Result<Vec<Rates>> {
    let memory = Memory::allocate(&setup.device, terms.bytes)?;
    let peer = PeerProcess::start(&Role::Bandwidth(terms))?;
    let (fd, bytes, owner) = memory.export()?;
    peer.control.send(&(bytes, owner))?;
    peer.control.send_fd(fd.as_fd())?;
    let rates = peer.control.hear()?;
    peer.end()?;
    Ok(rates)
}

/// The part of the process that imports.
pub fn copy(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    let (device, _) = terms.place.open()?;
    let (bytes, owner): (u64, DeviceId) = control.hear()?;
    let theirs = Memory::import_for(
        Access::ReadWrite,
        &device,
        control.receive_fd()?,
        bytes,
        owner,
    )?;
    let own = Own::allocate(&device, terms)?;
    let other = Memory::allocate(&device, terms.bytes)?;
    // Pinned, as the words that streams signal are.
    let host = Words::create(&device, terms.bytes as usize / LINE_BYTES)?;
    let mut copier = Copier {
        stream: device.stream()?,
        words: Words::create(&device, 1)?,
        turn: 0,
    };
    let (theirs, own, other, host) = (theirs.ptr(), own.mapped.ptr(), other.ptr(), host.address(0));
    let mut figures = vec![
        copier.figure("reading an import", [other, theirs], [other, own], terms)?,
        copier.figure("writing an import", [theirs, other], [own, other], terms)?,
    ];
    if terms.owner == terms.place.device {
        figures.push(copier.figure("host to an import", [theirs, host], [own, host], terms)?);
        figures.push(copier.figure("an import to the host", [host, theirs], [host, own], terms)?);
    }
    control.send(&figures)
}

/// Memory of this process on the owner's device, mapped for its own.
struct Own {
    mapped: Memory,
    /// Where it was allocated, if that is another device.
    _there: Option<Memory>,
}

impl Own {
    fn allocate(device: &Device, terms: &Terms) -> anyhow::Result<Own> {
        if terms.owner == terms.place.device {
            return Ok(Own {
                mapped: Memory::allocate(device, terms.bytes)?,
                _there: None,
            });
        }
        let there = Memory::allocate(&terms.owner.open()?.device, terms.bytes)?;
        let (fd, bytes, owner) = there.export()?;
        let mapped = Memory::import_for(Access::ReadWrite, device, fd, bytes, owner)?;
        Ok(Own {
            mapped,
            _there: Some(there),
        })
    }
}

struct Copier {
    stream: Stream,
    words: Words,
    turn: u64,
}

impl Copier {
    /// Both copies in turns, each as [to, from]; the first round warms up.
    fn figure(
        &mut self,
        name: &str,
        import: [DevicePtr; 2],
        own: [DevicePtr; 2],
        terms: &Terms,
    ) -> anyhow::Result<Rates> {
        let mut rates = Rates {
            name: name.to_owned(),
            import: Vec::new(),
            own: Vec::new(),
        };
        for round in 0..=terms.rounds {
            let (with_own, through_import) = (self.rate(own, terms)?, self.rate(import, terms)?);
            if round > 0 {
                rates.own.push(with_own);
                rates.import.push(through_import);
            }
        }
        Ok(rates)
    }

    /// GB/s copied.
    fn rate(&mut self, [into, from]: [DevicePtr; 2], terms: &Terms) -> anyhow::Result<f64> {
        self.turn += 1;
        let start = Instant::now();
        for _ in 0..terms.copies {
            // SAFETY: both are that long, and kept until the word behind the copies is reached.
            unsafe { self.stream.copy(into, from, terms.bytes) }?;
        }
        // SAFETY: the word lives until it has been awaited.
        unsafe { enqueue(&self.stream, &[self.words.signal(0, self.turn)]) }?;
        self.words.await_word(0, self.turn)?;
        Ok((terms.copies * terms.bytes) as f64 / start.elapsed().as_secs_f64() / 1e9)
    }
}
