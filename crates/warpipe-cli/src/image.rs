//! PNG pictures as tensors of height x width x channels.
//!
//! Palettes, 1, 2 and 4 bit samples and a transparent colour are expanded, so that the channels are
//! 1 (gray), 2 (gray, alpha), 3 (red, green, blue) or 4 (red, green, blue, alpha). Samples are
//! `uint8`; those of 16 bit files stay as they are and make a `uint16` tensor. Of an animation the
//! still picture is taken. No colour is converted.

use std::io::{BufRead, Seek};

use png::{BitDepth, Decoder, Transformations};
use warpipe::{DType, Layout};

/// A fault of a `.png` file.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The decoder's word.
    #[error("it is not a whole, undamaged PNG: {0}")]
    Damaged(#[from] png::DecodingError),
    /// Dimensions that so short a file cannot hold.
    #[error(
        "it claims {width} x {height} pixels, which {file} bytes cannot hold; its header lies or it is cut short"
    )]
    TooLarge {
        /// By its header.
        width: u32,
        /// By its header.
        height: u32,
        /// The file's length.
        file: u64,
    },
    /// No room to decode it.
    #[error("there is no memory for its {0} bytes")]
    Memory(usize),
    /// A tensor of that shape cannot be.
    #[error("its dimensions cannot be used: {0}")]
    Layout(#[from] warpipe::Error),
}

/// Deflate shrinks nothing below one byte for 1032.
const DEFLATE_RATIO_MAX: u128 = 1032;

/// Decodes a file that is `length` bytes long.
pub fn read(reader: impl BufRead + Seek, length: u64) -> Result<(Layout, Vec<u8>), Fault> {
    let mut decoder = Decoder::new(reader);
    decoder.set_transformations(Transformations::EXPAND);
    let mut reader = decoder.read_info()?;
    check_size(reader.info(), length)?;
    let bytes = reader
        .output_buffer_size()
        .ok_or(Fault::Memory(usize::MAX))?;
    let mut data = Vec::new();
    data.try_reserve_exact(bytes)
        .map_err(|_| Fault::Memory(bytes))?;
    data.resize(bytes, 0);
    let frame = reader.next_frame(&mut data)?;
    reader.finish()?;
    data.truncate(frame.buffer_size());
    let dtype = if frame.bit_depth == BitDepth::Sixteen {
        DType::U16
    } else {
        DType::U8
    };
    if dtype == DType::U16 {
        // PNG is big-endian, tensors are not.
        data.chunks_exact_mut(2).for_each(<[u8]>::reverse);
    }
    let channels = frame.color_type.samples() as u64;
    let layout = Layout::contiguous(
        dtype,
        &[u64::from(frame.height), u64::from(frame.width), channels],
    )?;
    Ok((layout, data))
}

/// Refuses dimensions that the file's length cannot account for, before any memory is taken for
/// them.
fn check_size(info: &png::Info<'_>, length: u64) -> Result<(), Fault> {
    let bits =
        u128::from(info.width) * (info.color_type.samples() * info.bit_depth as usize) as u128;
    let packed = bits.div_ceil(8) * u128::from(info.height);
    if packed > DEFLATE_RATIO_MAX * u128::from(length) {
        return Err(Fault::TooLarge {
            width: info.width,
            height: info.height,
            file: length,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use png::ColorType;

    use super::*;

    fn encode(color: ColorType, depth: BitDepth, width: u32, height: u32, data: &[u8]) -> Vec<u8> {
        encode_with(color, depth, width, height, data, |_| {})
    }

    fn encode_with(
        color: ColorType,
        depth: BitDepth,
        width: u32,
        height: u32,
        data: &[u8],
        prepare: impl FnOnce(&mut png::Encoder<'_, &mut Vec<u8>>),
    ) -> Vec<u8> {
        let mut file = Vec::new();
        let mut encoder = png::Encoder::new(&mut file, width, height);
        encoder.set_color(color);
        encoder.set_depth(depth);
        prepare(&mut encoder);
        encoder
            .write_header()
            .unwrap()
            .write_image_data(data)
            .unwrap();
        file
    }

    fn decode(file: &[u8]) -> Result<(Layout, Vec<u8>), Fault> {
        read(Cursor::new(file), file.len() as u64)
    }

    #[test]
    fn eight_bit_pictures_keep_their_channels_and_samples() {
        for (color, channels) in [
            (ColorType::Grayscale, 1),
            (ColorType::GrayscaleAlpha, 2),
            (ColorType::Rgb, 3),
            (ColorType::Rgba, 4),
        ] {
            let samples: Vec<u8> = (0..2 * 3 * channels)
                .map(|sample| sample as u8 * 9)
                .collect();
            let (layout, data) = decode(&encode(color, BitDepth::Eight, 3, 2, &samples)).unwrap();
            assert_eq!(
                (layout.dtype(), layout.shape()),
                (DType::U8, &[2, 3, channels][..]),
                "{color:?}"
            );
            assert_eq!(data, samples, "{color:?}");
        }
    }

    #[test]
    fn sixteen_bit_samples_stay_sixteen_bits() {
        let (layout, data) = decode(&encode(
            ColorType::Grayscale,
            BitDepth::Sixteen,
            2,
            1,
            &[1, 2, 3, 4],
        ))
        .unwrap();
        assert_eq!(
            (layout.dtype(), layout.shape(), &data[..]),
            (DType::U16, &[1, 2, 1][..], &[2, 1, 4, 3][..])
        );
    }

    #[test]
    fn one_bit_samples_become_black_and_white_bytes() {
        let (layout, data) = decode(&encode(
            ColorType::Grayscale,
            BitDepth::One,
            3,
            1,
            &[0b1010_0000],
        ))
        .unwrap();
        assert_eq!(
            (layout.shape(), &data[..]),
            (&[1, 3, 1][..], &[255, 0, 255][..])
        );
    }

    #[test]
    fn palettes_become_colours_and_transparency_becomes_alpha() {
        let palette = vec![10, 20, 30, 40, 50, 60];
        let plain = encode_with(
            ColorType::Indexed,
            BitDepth::Two,
            2,
            1,
            &[0b0100_0000],
            |encoder| {
                encoder.set_palette(palette.clone());
            },
        );
        let (layout, data) = decode(&plain).unwrap();
        assert_eq!(
            (layout.shape(), &data[..]),
            (&[1, 2, 3][..], &[40, 50, 60, 10, 20, 30][..])
        );
        let clear = encode_with(
            ColorType::Indexed,
            BitDepth::Two,
            2,
            1,
            &[0b0100_0000],
            |encoder| {
                encoder.set_palette(palette);
                encoder.set_trns(vec![0]);
            },
        );
        let (layout, data) = decode(&clear).unwrap();
        assert_eq!(
            (layout.shape(), &data[..]),
            (&[1, 2, 4][..], &[40, 50, 60, 255, 10, 20, 30, 0][..])
        );
    }

    #[test]
    fn every_truncation_is_refused() {
        let whole = encode(ColorType::Rgb, BitDepth::Eight, 4, 4, &[77; 48]);
        for length in 0..whole.len() {
            assert!(
                decode(&whole[..length]).is_err(),
                "{length} of {} bytes",
                whole.len()
            );
        }
    }

    #[test]
    fn a_flipped_bit_never_panics() {
        let whole = encode(ColorType::Rgb, BitDepth::Eight, 4, 4, &[77; 48]);
        for bit in 0..whole.len() * 8 {
            let mut file = whole.clone();
            file[bit / 8] ^= 1 << (bit % 8);
            if let Ok((layout, data)) = decode(&file) {
                assert_eq!(layout.bytes(), data.len() as u64);
            }
        }
    }

    #[test]
    fn dimensions_that_the_file_cannot_hold_are_refused_before_memory_is_taken() {
        let mut file = Vec::new();
        {
            let mut encoder = png::Encoder::new(&mut file, 1 << 20, 1 << 30);
            encoder.set_color(ColorType::Grayscale);
            encoder
                .write_header()
                .unwrap()
                .write_chunk(png::chunk::IDAT, b"\x78\x9c\x03\0\0\0\0\x01")
                .unwrap();
        }
        assert!(
            matches!(decode(&file), Err(Fault::TooLarge { .. })),
            "{:?}",
            decode(&file)
        );
    }
}
