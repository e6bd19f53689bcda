//! Accepted and refused `.npy` files; no file makes the reader panic.

use fastrand::Rng;
use warpipe::{DType, Layout};

use super::*;

fn bytes(random: &mut Rng, count: usize) -> Vec<u8> {
    std::iter::repeat_with(|| random.u8(..))
        .take(count)
        .collect()
}

fn read(file: impl AsRef<[u8]>, void_as: Option<DType>) -> Result<(Layout, Vec<u8>), Fault> {
    let file = file.as_ref();
    let mut reader = file;
    let header = read_header(&mut reader, file.len() as u64, void_as)?;
    let data = read_data(&mut reader, &header)?;
    Ok((header.layout, data))
}

fn written(layout: &Layout, slot: &[u8]) -> Vec<u8> {
    let mut file = Vec::new();
    write(&mut file, layout, slot).unwrap();
    file
}

/// A version 1.0 file around any header text, unpadded.
fn file(text: &str, data: &[u8]) -> Vec<u8> {
    let mut file = b"\x93NUMPY\x01\x00".to_vec();
    file.extend_from_slice(&(text.len() as u16).to_le_bytes());
    file.extend_from_slice(text.as_bytes());
    file.extend_from_slice(data);
    file
}

fn header_text(descr: &str, shape: &str) -> String {
    format!("{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}")
}

#[test]
fn every_dtype_comes_back_bit_exact_in_every_order() {
    let mut random = Rng::with_seed(1);
    for &dtype in DType::ALL {
        for shape in [
            &[][..],
            &[1],
            &[7],
            &[0],
            &[3, 5],
            &[2, 3, 4],
            &[1, 6, 1],
            &[4, 0, 2],
            &[2, 1, 2, 1, 2, 1, 2, 1],
        ] {
            for fortran_order in [false, true] {
                let layout = layout(dtype, shape, fortran_order).unwrap();
                let slot = bytes(&mut random, layout.bytes() as usize);
                let file = written(&layout, &slot);
                let (found, data) = read(&file, Some(dtype)).unwrap();
                assert_eq!(
                    (found.dtype(), found.shape(), &data),
                    (dtype, shape, &slot),
                    "{layout:?}"
                );
                assert_eq!(written(&found, &data), file, "{layout:?}");
                assert_eq!(
                    file.len() as u64 % 64,
                    layout.bytes() % 64,
                    "the data is aligned to 64 bytes"
                );
            }
        }
    }
}

#[test]
fn what_is_written_is_what_numpy_writes() {
    let layout = Layout::contiguous(DType::F32, &[3, 4]).unwrap();
    let mut numpy =
        b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }"
            .to_vec();
    numpy.resize(127, b' ');
    numpy.push(b'\n');
    numpy.resize(128 + 48, 7);
    assert_eq!(written(&layout, &[7; 48]), numpy);
}

#[test]
fn fortran_order_becomes_strides() {
    let text = "{'descr': '|u1', 'fortran_order': True, 'shape': (2, 3), }";
    let (layout, data) = read(file(text, b"abcdef"), None).unwrap();
    assert_eq!(
        (layout.shape(), layout.strides()),
        (&[2u64, 3][..], &[1i64, 2][..])
    );
    assert_eq!(data, b"abcdef");
}

#[test]
fn gaps_and_reversed_rows_are_gathered_into_row_major_order() {
    let gaps = Layout::strided(DType::U8, &[2, 2], &[3, 1], 1).unwrap();
    assert_eq!(read(written(&gaps, b".ab.cd"), None).unwrap().1, b"abcd");
    let reversed = Layout::strided(DType::U16, &[3], &[-1], 4).unwrap();
    assert_eq!(
        read(written(&reversed, b"aabbcc"), None).unwrap().1,
        b"ccbbaa"
    );
    let lone = Layout::strided(DType::F64, &[2, 1], &[2, i64::MAX], 0).unwrap();
    assert_eq!(
        read(written(&lone, b"11111111........22222222"), None)
            .unwrap()
            .1,
        b"1111111122222222"
    );
}

#[test]
fn a_broadcast_from_a_peer_cannot_fill_the_disk() {
    let broadcast = Layout::strided(DType::U8, &[1 << 40], &[0], 0).unwrap();
    assert!(write(&mut std::io::sink(), &broadcast, &[1]).is_err());
    let small = Layout::strided(DType::U8, &[2, 2], &[0, 1], 0).unwrap();
    assert_eq!(read(written(&small, b"xy"), None).unwrap().1, b"xyxy");
}

#[test]
fn a_layout_longer_than_its_slot_is_not_written() {
    let layout = Layout::contiguous(DType::U8, &[5]).unwrap();
    assert!(write(&mut std::io::sink(), &layout, b"four").is_err());
}

#[test]
fn big_endian_files_are_turned_around_number_by_number() {
    let (layout, data) = read(file(&header_text("'>f4'", "(2,)"), b"abcdefgh"), None).unwrap();
    assert_eq!((layout.dtype(), &data[..]), (DType::F32, &b"dcbahgfe"[..]));
    let (_, data) = read(file(&header_text("'>c8'", "(1,)"), b"abcdefgh"), None).unwrap();
    assert_eq!(&data, b"dcbahgfe", "the real part stays in front");
    let (_, data) = read(file(&header_text("'>u1'", "(2,)"), b"ab"), None).unwrap();
    assert_eq!(&data, b"ab");
}

#[test]
fn what_ml_dtypes_calls_f1_is_read_and_saved_as_something_numpy_can_load() {
    let (layout, data) = read(file(&header_text("'<f1'", "(2,)"), b"ab"), None).unwrap();
    assert_eq!(layout.dtype(), DType::F8_E5M2);
    let saved = written(&layout, &data);
    assert!(
        saved.starts_with(b"\x93NUMPY\x01\x00v\x00{'descr': '<V1'"),
        "{}",
        String::from_utf8_lossy(&saved)
    );
}

#[test]
fn versions_2_and_3_have_a_longer_length_field() {
    for version in [2, 3] {
        let text = header_text("'<u2'", "(2,)");
        let mut file = b"\x93NUMPY".to_vec();
        file.extend_from_slice(&[version, 0]);
        file.extend_from_slice(&(text.len() as u32).to_le_bytes());
        file.extend_from_slice(text.as_bytes());
        file.extend_from_slice(b"wxyz");
        assert_eq!(read(&file, None).unwrap().1, b"wxyz");
    }
}

#[test]
fn keys_may_come_in_any_order_and_quoting_as_python_allows() {
    for text in [
        "{\"shape\":(2L,),'descr':\"<u2\",'fortran_order':False}",
        "  { 'fortran_order' : False , 'shape' : ( 2 , ) , 'descr' : 'u2' , } \n",
        "{'shape': (1, 2), 'descr': '=u2', 'fortran_order': False}",
    ] {
        assert_eq!(
            read(file(text, b"wxyz"), None).unwrap().1,
            b"wxyz",
            "{text}"
        );
    }
}

macro_rules! refused {
    ($($name:ident: $file:expr => $fault:pat,)*) => {$(
        #[test]
        fn $name() {
            let fault = read($file, None).unwrap_err();
            assert!(matches!(fault, $fault), "{fault:?}");
            assert!(!fault.to_string().is_empty());
        }
    )*};
}

refused! {
    an_empty_file_is_refused: b"" => Fault::Magic,
    half_a_magic_is_refused: b"\x93NUM" => Fault::Magic,
    another_magic_is_refused: b"PK\x03\x04aaaaaaaaaaaa" => Fault::Magic,
    an_unknown_version_is_refused: b"\x93NUMPY\x04\x00v\x00{}" => Fault::Version(4, 0),
    a_minor_version_is_refused: b"\x93NUMPY\x01\x01v\x00{}" => Fault::Version(1, 1),
    a_file_that_ends_in_its_length_is_refused: b"\x93NUMPY\x01\x00v" => Fault::Short { .. },
    a_header_past_the_end_is_refused: b"\x93NUMPY\x01\x00v\x00{'descr'" => Fault::Short { .. },
    a_header_of_four_gigabytes_is_refused: b"\x93NUMPY\x02\x00\xff\xff\xff\xff{'descr'" => Fault::HeaderLength(4_294_967_295),
    an_empty_header_is_refused: file("", b"") => Fault::Header { .. },
    an_empty_dictionary_is_refused: file("{}", b"") => Fault::Missing("descr"),
    a_header_without_its_end_is_refused: file("{'descr': '<f4', ", b"") => Fault::Header { .. },
    a_string_without_its_end_is_refused: file("{'descr: ", b"") => Fault::Header { .. },
    an_escape_in_a_string_is_refused: file("{'de\\scr': '<f4'}", b"") => Fault::Header { .. },
    a_key_twice_is_refused: file("{'descr': '<f4', 'descr': '<f4'}", b"") => Fault::Header { .. },
    an_unknown_key_is_refused: file("{'order': 'C'}", b"") => Fault::Header { .. },
    a_header_without_an_order_is_refused: file("{'descr': '<f4', 'shape': (1,)}", b"abcd") => Fault::Missing("fortran_order"),
    a_header_without_a_shape_is_refused: file("{'descr': '<f4', 'fortran_order': False}", b"") => Fault::Missing("shape"),
    text_after_the_header_is_refused: file("{'descr': '<f4', 'fortran_order': False, 'shape': ()} import os", b"") => Fault::Header { .. },
    an_order_that_is_no_boolean_is_refused: file("{'fortran_order': 1}", b"") => Fault::Header { .. },
    a_shape_that_is_no_tuple_is_refused: file(&header_text("'<u2'", "[2]"), b"wxyz") => Fault::Header { .. },
    a_shape_in_mere_parentheses_is_refused: file(&header_text("'<u2'", "(2)"), b"wxyz") => Fault::Header { .. },
    a_fractional_dimension_is_refused: file(&header_text("'<u2'", "(2.0,)"), b"wxyz") => Fault::Header { .. },
    a_negative_dimension_is_refused: file(&header_text("'<u2'", "(-2,)"), b"wxyz") => Fault::Negative(_),
    a_dimension_past_64_bits_is_refused: file(&header_text("'<u2'", "(99999999999999999999,)"), b"") => Fault::Shape(_),
    a_shape_whose_size_overflows_is_refused: file(&header_text("'<f8'", "(4294967296, 4294967296)"), b"") => Fault::Shape(_),
    an_empty_shape_whose_size_overflows_is_refused: file(&header_text("'<f8'", "(18446744073709551615, 2, 0)"), b"") => Fault::Shape(_),
    nine_dimensions_are_refused: file(&header_text("'|u1'", "(1,1,1,1,1,1,1,1,1)"), b"a") => Fault::Shape(_),
    a_hundred_dimensions_are_refused: file(&header_text("'|u1'", &format!("({})", "1,".repeat(100))), b"a") => Fault::Shape(_),
    objects_are_refused: file(&header_text("'|O'", "(1,)"), b"........") => Fault::Object,
    records_are_refused: file(&header_text("[('x', '<f4')]", "(1,)"), b"....") => Fault::Structured,
    texts_are_refused: file(&header_text("'<U4'", "(1,)"), &[0; 16]) => Fault::Dtype(_),
    dates_are_refused: file(&header_text("'<M8[ns]'", "(1,)"), &[0; 8]) => Fault::Dtype(_),
    extended_floats_are_refused: file(&header_text("'<f16'", "(1,)"), &[0; 16]) => Fault::Dtype(_),
    a_type_without_a_name_is_refused: file(&header_text("''", "(1,)"), b"") => Fault::Dtype(_),
    voids_are_refused_unless_named: file(&header_text("'<V2'", "(1,)"), b"ab") => Fault::Void(_),
    a_short_file_is_refused: file(&header_text("'<f4'", "(3,)"), b"eleven byte") => Fault::Short { needed: 12, found: 11 },
    a_shape_far_larger_than_the_file_is_refused: file(&header_text("'<f4'", "(1152921504606846976,)"), b"") => Fault::Short { .. },
    trailing_bytes_are_refused: file(&header_text("'<f4'", "(1,)"), b"fivey") => Fault::Trailing { extra: 1, needed: 4 },
}

#[test]
fn a_void_of_another_width_than_the_named_type_is_refused() {
    let fault = read(
        file(&header_text("'<V2'", "(1,)"), b"ab"),
        Some(DType::F8_E4M3),
    )
    .unwrap_err();
    assert!(
        matches!(fault, Fault::VoidWidth { found: 2, .. }),
        "{fault:?}"
    );
}

#[test]
fn a_file_that_changes_after_its_header_was_read_is_refused() {
    let layout = Layout::contiguous(DType::U8, &[4]).unwrap();
    let header = Header { layout, swap: 1 };
    assert!(matches!(
        read_data(&mut &b"abc"[..], &header),
        Err(Fault::Short {
            needed: 4,
            found: 3
        })
    ));
    assert!(matches!(
        read_data(&mut &b"abcde"[..], &header),
        Err(Fault::Trailing { .. })
    ));
}

#[test]
fn every_truncation_of_a_file_is_refused() {
    let layout = Layout::contiguous(DType::F32, &[2, 3]).unwrap();
    let whole = written(&layout, &[5; 24]);
    for length in 0..whole.len() {
        assert!(read(&whole[..length], None).is_err(), "{length} bytes");
    }
}

#[test]
fn no_damage_makes_the_reader_panic_or_take_more_than_the_file_has() {
    let mut random = Rng::with_seed(2);
    for round in 0..20_000 {
        let dtype = DType::ALL[random.usize(..DType::ALL.len())];
        let shape: Vec<u64> = (0..random.usize(..5))
            .map(|_| random.usize(..4) as u64)
            .collect();
        let layout = layout(dtype, &shape, round % 2 == 0).unwrap();
        let slot = bytes(&mut random, layout.bytes() as usize);
        let mut file = written(&layout, &slot);
        for _ in 0..=random.usize(..4) {
            damage(&mut file, &mut random);
        }
        if let Ok((layout, data)) = read(&file, Some(dtype)) {
            assert!(data.len() < file.len() && data.len() as u64 == layout.bytes());
            written(&layout, &data);
        }
    }
}

/// One flipped bit, replaced byte, cut, or doubled stretch, mostly in the header.
fn damage(file: &mut Vec<u8>, random: &mut Rng) {
    if file.is_empty() {
        return;
    }
    let at = random.usize(..file.len().min(80));
    match random.usize(..5) {
        0 => file[at] ^= 1 << random.usize(..8),
        1 => file[at] = b"(){}[],:'\"-0123456789LTFVOcfiu<>=|\\\x00\xff"[random.usize(..37)],
        2 => file.truncate(random.usize(..file.len())),
        3 => drop(file.remove(at)),
        _ => {
            let stretch = file[at..(at + random.usize(..12)).min(file.len())].to_vec();
            file.splice(at..at, stretch);
        }
    }
}
