//! Headers of damaged and of hostile files.

use super::*;

fn entry(name: &str, dtype: &str, shape: &str, begin: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}"#)
}

fn header(entries: &[String]) -> Vec<u8> {
    format!("{{{}}}", entries.join(",")).into_bytes()
}

/// The tensor and the reason of a refusal.
fn refused(entries: &[String], data_bytes: u64) -> (String, String) {
    let fault = parse(&header(entries), data_bytes).unwrap_err();
    let of_tensor = fault.text.strip_prefix("tensor \"");
    let parts = of_tensor.and_then(|text| text.split_once("\": "));
    let (name, reason) = parts.unwrap_or_else(|| panic!("{fault:?}"));
    (name.into(), reason.into())
}

#[test]
fn tensors_of_a_whole_header_lie_where_it_says_in_the_order_of_the_file() {
    let meta = r#""__metadata__":{"format":"pt"}"#.to_string();
    let late = entry("b", "F32", "[2,3]", 4, 28);
    let early = entry("a", "BF16", "[2]", 0, 4);
    let empty = entry("none", "I64", "[0,7]", 28, 28);
    let mut text = header(&[meta, late, early, empty]);
    text.extend_from_slice(b"    ");
    let tensors = parse(&text, 28).unwrap();
    let found: Vec<_> = tensors
        .iter()
        .map(|t| (t.name.as_str(), t.begin - 8 - text.len() as u64))
        .collect();
    assert_eq!(found, [("a", 0), ("b", 4), ("none", 28)]);
    assert_eq!(
        tensors[1].layout,
        Layout::contiguous(DType::F32, &[2, 3]).unwrap()
    );
    assert!(parse(b"{}", 0).unwrap().is_empty());
}

#[test]
fn every_element_type_is_read_and_one_that_no_framework_has_is_refused_by_name() {
    for (name, dtype) in [
        ("BOOL", DType::BOOL),
        ("F8_E4M3", DType::F8_E4M3FN),
        ("F8_E5M2", DType::F8_E5M2),
        ("C64", DType::C64),
        ("U64", DType::U64),
        ("BF16", DType::BF16),
    ] {
        let bytes = dtype.bytes();
        let tensors = parse(&header(&[entry("a", name, "[]", 0, bytes)]), bytes).unwrap();
        assert_eq!(tensors[0].layout.dtype(), dtype);
    }
    for name in ["F6_E2M3", "Q4_K", "f32", ""] {
        let (tensor, reason) = refused(&[entry("w", name, "[2]", 0, 1)], 1);
        assert_eq!(tensor, "w");
        assert!(reason.contains(name), "{reason}");
    }
}

#[test]
fn values_of_four_bits_are_read_in_pairs_beside_their_scales() {
    let entries = [
        entry("w", "F4", "[2,64]", 0, 64),
        entry("w_scale", "F8_E8M0", "[2,2]", 64, 68),
        entry("none", "F4", "[0]", 68, 68),
    ];
    let tensors = parse(&header(&entries), 68).unwrap();
    let layout = |dtype, shape: &[u64]| Layout::contiguous(dtype, shape).unwrap();
    let found: Vec<_> = tensors.iter().map(|it| it.layout).collect();
    assert_eq!(
        found,
        [
            layout(DType::F4_E2M1FN_X2, &[2, 32]),
            layout(DType::F8_E8M0FNU, &[2, 2]),
            layout(DType::F4_E2M1FN_X2, &[0]),
        ]
    );
    for (shape, bytes) in [("[2,3]", 3), ("[1]", 1), ("[]", 1)] {
        let (_, reason) = refused(&[entry("w", "F4", shape, 0, bytes)], bytes);
        assert!(reason.contains("2 does not divide"), "{shape}: {reason}");
    }
    let (_, reason) = refused(&[entry("w", "F4", "[4]", 0, 4)], 4);
    assert!(reason.contains("2 bytes"), "{reason}");
}

#[test]
fn ranges_that_overlap_leave_gaps_or_lie_outside_are_refused_with_the_tensors_name() {
    let a = entry("a", "U8", "[8]", 0, 8);
    let cases = [
        ([a.clone(), entry("b", "U8", "[8]", 4, 12)], 12, "overlap"),
        ([a.clone(), entry("b", "U8", "[8]", 0, 8)], 8, "overlap"),
        (
            [a.clone(), entry("b", "U8", "[8]", 12, 20)],
            20,
            "belong to no tensor",
        ),
        ([a.clone(), entry("b", "U8", "[8]", 8, 16)], 15, "outside"),
        ([a.clone(), entry("b", "U8", "[8]", 16, 8)], 16, "reversed"),
        ([a.clone(), entry("b", "U8", "[8]", 8, 15)], 15, "hold 7"),
        (
            [
                a.clone(),
                entry("b", "F32", "[4611686018427387904,4]", 8, 16),
            ],
            16,
            "2^63",
        ),
        (
            [
                a.clone(),
                entry("b", "U8", "[18446744073709551615]", 8, u64::MAX),
            ],
            16,
            "2^63",
        ),
        (
            [a.clone(), entry("b", "U8", "[1,1,1,1,1,1,1,1,1]", 8, 9)],
            9,
            "dimensions",
        ),
        ([a.clone(), entry("a", "U8", "[8]", 8, 16)], 16, "twice"),
        ([a.clone(), entry("b", "U8", "[-1]", 8, 16)], 16, "invalid"),
        ([a.clone(), entry("b", "U8", "[1.5]", 8, 16)], 16, "invalid"),
        ([a.clone(), entry("b", "U8", "8", 8, 16)], 16, "invalid"),
    ];
    for (entries, data_bytes, wanted) in cases {
        let (tensor, reason) = refused(&entries, data_bytes);
        assert!(tensor == "a" || tensor == "b", "{tensor}");
        assert!(reason.contains(wanted), "{reason} without {wanted}");
    }
}

#[test]
fn bytes_behind_the_last_tensor_are_refused() {
    let text = header(&[entry("a", "U8", "[8]", 0, 8)]);
    let fault = parse(&text, 9).unwrap_err();
    let described = LENGTH_BYTES + text.len() as u64 + 8;
    let found = described + 1;
    assert_eq!(fault, truncated(found, described));
    assert!(fault.text.contains(&described.to_string()), "{fault}");
}

#[test]
fn a_description_with_a_field_too_few_too_many_or_twice_is_refused() {
    for info in [
        r#"{"dtype":"U8","shape":[1]}"#,
        r#"{"dtype":"U8","data_offsets":[0,1]}"#,
        r#"{"dtype":"U8","shape":[1],"data_offsets":[0,1],"extra":1}"#,
        r#"{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}"#,
        r#"{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}"#,
        r#"{"dtype":"U8","shape":[1],"data_offsets":[0]}"#,
        r#"[1]"#,
        "null",
        "7",
    ] {
        let text = format!(r#"{{"w":{info}}}"#);
        let fault = parse(text.as_bytes(), 1).unwrap_err();
        let is_named = fault.text.starts_with("tensor \"w\": ");
        assert!(is_named, "{fault:?}");
    }
}

#[test]
fn a_header_that_is_no_map_of_tensors_is_refused() {
    let deep = "[".repeat(100_000);
    let deep = format!(r#"{{"w":{deep}"#);
    for text in [
        "",
        " {}",
        "[]",
        "{",
        "{}x",
        "{\"a\"",
        "{\"__metadata__\":7}",
        "{\"__metadata__\":{\"a\":[]}}",
        "{\"\u{0}",
        deep.as_str(),
    ] {
        let refused = parse(text.as_bytes(), 0);
        assert!(refused.is_err(), "{:?}", &text[..text.len().min(20)]);
    }
    assert!(parse(b"{\"\xff\":1}", 0).is_err());
}

#[test]
fn a_name_without_bytes_or_with_too_many_is_refused_in_a_short_message() {
    for name in ["", &"n".repeat(NAME_BYTES_MAX + 1), &"n".repeat(1 << 20)] {
        let (tensor, reason) = refused(&[entry(name, "U8", "[1]", 0, 1)], 1);
        assert!(tensor.len() <= NAME_BYTES_MAX, "{}", tensor.len());
        assert!(reason.contains("bytes"), "{reason}");
    }
    let longest = "n".repeat(NAME_BYTES_MAX);
    assert!(parse(&header(&[entry(&longest, "U8", "[1]", 0, 1)]), 1).is_ok());
}

#[test]
fn the_reason_of_a_refusal_is_short_however_long_the_text_in_the_file_is() {
    let long = "n".repeat(1 << 20);
    for text in [
        format!(r#"{{"w":{{"{long}":1}}}}"#),
        format!(r#"{{"w":"{long}"}}"#),
        format!(r#"{{"w":{{"dtype":"U8","shape":"{long}"}}}}"#),
        format!(r#"{{"__metadata__":"{long}"}}"#),
    ] {
        let shown = parse(text.as_bytes(), 0).unwrap_err().to_string();
        assert!(shown.len() < 2 * NAME_BYTES_MAX, "{} bytes", shown.len());
    }
}

#[test]
fn metadata_twice_or_with_a_key_twice_are_refused() {
    for text in [
        r#"{"__metadata__":{},"__metadata__":{}}"#,
        r#"{"__metadata__":{"a":"1","a":"2"}}"#,
    ] {
        let shown = parse(text.as_bytes(), 0).unwrap_err().to_string();
        assert!(shown.contains("twice"), "{shown}");
    }
    assert!(parse(br#"{"__metadata__":{"a":"1","b":"1"}}"#, 0).is_ok());
}

#[test]
fn more_tensors_or_metadata_than_the_limit_are_told_as_a_limit() {
    let entries: Vec<String> = (0..=TENSORS_MAX)
        .map(|index| entry(&format!("{index:x}"), "U8", "[0]", 0, 0))
        .collect();
    assert_eq!(parse(&header(&entries[1..]), 0).unwrap().len(), TENSORS_MAX);
    let limit = |what| WeightsFileFault::limit(what, TENSORS_MAX as u64);
    assert_eq!(parse(&header(&entries), 0).unwrap_err(), limit("tensors"));
    let entries: Vec<String> = (0..=TENSORS_MAX)
        .map(|index| format!(r#""{index:x}":"""#))
        .collect();
    let text = format!(r#"{{"__metadata__":{{{}}}}}"#, entries.join(","));
    let fault = parse(text.as_bytes(), 0).unwrap_err();
    assert_eq!(fault, limit("entries of metadata"));
}

#[test]
fn a_headers_length_is_believed_only_where_the_file_has_room_for_it() {
    let length = |length: u64| header_bytes(length.to_le_bytes(), 108);
    assert_eq!(length(100), Ok(100));
    assert_eq!(length(2), Ok(2));
    for wrong in [0, 1, 101, HEADER_BYTES_MAX, u64::MAX, 1 << 63] {
        let fault = length(wrong).unwrap_err();
        let told = format!("its header would have {wrong} bytes, allowed are 2 to 100");
        assert!(fault.text.starts_with(&told), "{fault:?}");
    }
    let fault = length(100u64.swap_bytes()).unwrap_err().to_string();
    assert!(fault.contains("big endian"), "{fault}");
    assert!(header_bytes((HEADER_BYTES_MAX + 1).to_le_bytes(), u64::MAX).is_err());
}

#[test]
fn no_mutation_of_a_header_panics() {
    let whole = header(&[
        entry("a", "BF16", "[2]", 0, 4),
        entry("b", "F32", "[2,3]", 4, 28),
    ]);
    assert!(parse(&whole, 28).is_ok());
    for at in 0..whole.len() {
        for byte in [0, b'"', b'{', b'}', b'9', b'-', 0xff] {
            let mut text = whole.clone();
            text[at] = byte;
            let _ = parse(&text, 28);
        }
        assert!(parse(&whole[..at], 28).is_err());
    }
}
