//! Copies out of another process's memory through an import, beside copies out of one's own.

use std::os::fd::AsFd;
use std::time::Instant;

use serde::{Deserialize, Serialize};
use warpipe::Stream;
use warpipe::backend::{DeviceId, DevicePtr};

use super::Role;
use super::figure::Figure;
use super::partner::{Control, Partner};
use super::raw::{Memory, Words, enqueue};
use super::setup::{Place, Setup};

/// What the reader agrees on.
#[derive(Debug, Serialize, Deserialize)]
pub struct Terms {
    place: Place,
    bytes: u64,
    copies: u64,
    rounds: usize,
}

pub fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    let bytes = if setup.is_host() || setup.quick { 16 << 20 } else { 256 << 20 };
    let mut places = vec![("one device", setup.place())];
    places.extend(setup.second.map(|second| ("two devices", setup.place_on(second))));
    let mut figures = Vec::new();
    for (name, place) in places {
        let copies = if setup.quick { 2 } else { 16 };
        let (theirs, own) = measure(setup, Terms { place, bytes, copies, rounds: setup.rounds() })?;
        let name = format!("reading an import, {name}, {} MiB", bytes >> 20);
        let note = "the floor is the reader's own memory; more is better";
        figures.push(Figure::new("dma", name, "GB/s", &theirs).beside(&own).note(note));
    }
    Ok(figures)
}

fn measure(setup: &Setup, terms: Terms) -> anyhow::Result<(Vec<f64>, Vec<f64>)> {
    let memory = Memory::allocate(&setup.device, terms.bytes)?;
    let partner = Partner::start(&Role::Dma(terms))?;
    let (fd, bytes, owner) = memory.export()?;
    partner.control.tell(&(bytes, owner))?;
    partner.control.send_fd(fd.as_fd())?;
    let rates = partner.control.hear()?;
    partner.end()?;
    Ok(rates)
}

/// The reader's part.
pub fn read(terms: &Terms, control: &Control) -> anyhow::Result<()> {
    let (device, _) = terms.place.open()?;
    let (bytes, owner): (u64, DeviceId) = control.hear()?;
    let theirs = Memory::import(&device, control.receive_fd()?, bytes, owner)?;
    let (own, into) = (Memory::allocate(&device, terms.bytes)?, Memory::allocate(&device, terms.bytes)?);
    let mut reader = Reader { stream: device.stream()?, words: Words::create(&device, 1)?, turn: 0 };
    let (mut through_import, mut from_own) = (Vec::new(), Vec::new());
    for _ in 0..=terms.rounds {
        from_own.push(reader.rate(into.ptr(), own.ptr(), terms)?);
        through_import.push(reader.rate(into.ptr(), theirs.ptr(), terms)?);
    }
    control.tell(&(&through_import[1..], &from_own[1..]))
}

struct Reader {
    stream: Stream,
    words: Words,
    turn: u64,
}

impl Reader {
    /// GB/s read.
    fn rate(&mut self, into: DevicePtr, from: DevicePtr, terms: &Terms) -> anyhow::Result<f64> {
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
