//! Pictures on the host: reduced, compared, written.

use std::fs::File;
use std::io::{BufWriter, Cursor};
use std::path::Path;

use crate::stage::{Outcome, ensure};

/// The frame with a stored picture.
pub const REFERENCE_FRAME: u64 = 10;
/// Written by this example as `small.png`, checked by eye, and stored here.
const REFERENCE: &[u8] = include_bytes!("reference.png");
/// A picture is reduced by this factor.
const FACTOR: u32 = 4;
/// A channel may be off by this much of 255, except in a few pixels: another machine's sine may
/// round otherwise.
const LEVELS_OFF: u8 = 3;
const PIXELS_PER_EXCEPTION: usize = 1000;

/// Red, green, blue and 255 for each pixel, in rows from the top.
#[derive(Clone)]
pub struct Picture {
    width: u32,
    height: u32,
    pub pixels: Vec<u8>,
}

impl Picture {
    pub fn new(width: u32, height: u32) -> Picture {
        Picture {
            width,
            height,
            pixels: vec![0; 4 * width as usize * height as usize],
        }
    }

    /// The mean of each block of pixels.
    pub fn reduced(&self) -> Picture {
        let mut small = Picture::new(self.width / FACTOR, self.height / FACTOR);
        let places =
            (0..small.height).flat_map(|row| (0..small.width).map(move |column| (row, column)));
        for ((row, column), pixel) in places.zip(small.pixels.chunks_exact_mut(4)) {
            let mut sums = [0u32; 4];
            for y in row * FACTOR..(row + 1) * FACTOR {
                let start = 4 * (y * self.width + column * FACTOR) as usize;
                let run = &self.pixels[start..start + 4 * FACTOR as usize];
                run.chunks_exact(4).for_each(|pixel| {
                    (0..4).for_each(|channel| sums[channel] += u32::from(pixel[channel]))
                });
            }
            pixel.copy_from_slice(&sums.map(|sum| (sum / (FACTOR * FACTOR)) as u8));
        }
        small
    }

    pub fn write_png(&self, path: &Path) -> Outcome {
        let mut encoder =
            png::Encoder::new(BufWriter::new(File::create(path)?), self.width, self.height);
        encoder.set_color(png::ColorType::Rgba);
        encoder.set_compression(png::Compression::Fast);
        let mut writer = encoder.write_header()?;
        writer.write_image_data(&self.pixels)?;
        Ok(writer.finish()?)
    }

    fn read_png(file: &[u8]) -> Outcome<Picture> {
        let mut reader = png::Decoder::new(Cursor::new(file)).read_info()?;
        let (width, height) = (reader.info().width, reader.info().height);
        ensure(
            reader.output_color_type() == (png::ColorType::Rgba, png::BitDepth::Eight),
            || "not RGBA".into(),
        )?;
        ensure(width <= 1 << 14 && height <= 1 << 14, || {
            format!("{width}x{height} is too large")
        })?;
        let mut picture = Picture::new(width, height);
        reader.next_frame(&mut picture.pixels)?;
        Ok(picture)
    }
}

/// The stored picture, or the one in this file.
pub fn reference(path: Option<&Path>) -> Outcome<Picture> {
    match path {
        Some(path) => Picture::read_png(&std::fs::read(path)?),
        None => Picture::read_png(REFERENCE),
    }
}

/// An error unless the picture is as the reference, within the tolerance.
pub fn compare(picture: &Picture, reference: &Picture) -> Outcome {
    let sizes = [
        (picture.width, picture.height),
        (reference.width, reference.height),
    ];
    ensure(sizes[0] == sizes[1], || {
        format!("the reference is {:?}, not {:?}", sizes[1], sizes[0])
    })?;
    let pairs = picture
        .pixels
        .chunks_exact(4)
        .zip(reference.pixels.chunks_exact(4));
    let is_off =
        |(a, b): &(&[u8], &[u8])| a.iter().zip(*b).any(|(a, b)| a.abs_diff(*b) > LEVELS_OFF);
    let (off, all) = (pairs.filter(is_off).count(), picture.pixels.len() / 4);
    println!("{off} of {all} pixels differ from the reference by more than {LEVELS_OFF} levels");
    ensure(off * PIXELS_PER_EXCEPTION <= all, || {
        format!("{off} of {all} pixels are not as in the reference")
    })
}

/// An animation that repeats for ever.
pub fn write_gif(path: &Path, pictures: &[Picture]) -> Outcome {
    let Some(first) = pictures.first() else {
        return Ok(());
    };
    let [width, height] = [u16::try_from(first.width)?, u16::try_from(first.height)?];
    let mut encoder = gif::Encoder::new(BufWriter::new(File::create(path)?), width, height, &[])?;
    encoder.set_repeat(gif::Repeat::Infinite)?;
    for picture in pictures {
        let mut frame = gif::Frame::from_rgba_speed(width, height, &mut picture.pixels.clone(), 10);
        frame.delay = 8; // hundredths of a second
        encoder.write_frame(&frame)?;
    }
    Ok(())
}
