//! Manifests of hostile peers.

use super::encoding::{FORMAT, Head};
use super::*;
use crate::tensor::DType;

fn tensor(name: &str, shape: &[u64], offset: u64) -> TensorInfo {
    TensorInfo {
        name: name.into(),
        layout: Layout::contiguous(DType::U8, shape).unwrap(),
        offset,
        hash: Some([7; 16]),
    }
}

fn encoded(bytes: u64, tensors: Vec<TensorInfo>) -> Vec<u8> {
    // Without the checks of `new`: as a hostile peer writes it.
    in_parts(bytes, vec![Part::whole(4096)], tensors)
}

fn in_parts(bytes: u64, parts: Vec<Part>, tensors: Vec<TensorInfo>) -> Vec<u8> {
    unchecked(bytes, parts, tensors).encode()
}

fn unchecked(bytes: u64, parts: Vec<Part>, tensors: Vec<TensorInfo>) -> Manifest {
    Manifest {
        is_hashed: are_hashed(&tensors),
        bytes,
        parts,
        begins: vec![],
        tensors,
        by_name: HashMap::new(),
        hashing: Hashing::Device,
        metadata: vec![],
    }
}

fn refused(bytes: u64, tensors: Vec<TensorInfo>) -> String {
    Manifest::decode(&encoded(bytes, tensors)).unwrap_err()
}

#[test]
fn a_manifest_arrives_as_it_was_sent_and_finds_tensors_by_name() {
    let tensors = vec![
        tensor("z", &[3, 2], 0),
        tensor("none", &[0], 512),
        tensor("a", &[], 512),
    ];
    let sent = Manifest::new(1024, vec![Part::whole(4096)], tensors.clone()).unwrap();
    let sealed = sent.seal("any").unwrap();
    let received = Manifest::receive(sealed.fd.as_fd(), sealed.bytes).unwrap();
    assert_eq!((received.bytes(), received.tensors()), (1024, &tensors[..]));
    for tensor in &tensors {
        assert_eq!(received.tensor(tensor.name.as_ref()), Some(tensor));
    }
    assert_eq!(received.tensor("b"), None);
}

#[test]
fn tensors_that_overlap_lie_outside_or_share_a_name_are_refused() {
    let a = || tensor("a", &[512], 0);
    assert!(refused(1024, vec![a(), a()]).contains("two tensors"));
    assert!(
        refused(1024, vec![tensor("a", &[513], 0), tensor("b", &[1], 512)]).contains("at byte 512")
    );
    assert!(refused(1024, vec![tensor("b", &[1], 512), a()]).contains("at byte 0"));
    assert!(refused(1024, vec![a(), tensor("b", &[513], 512)]).contains("outside"));
    assert!(refused(1024, vec![tensor("b", &[1], u64::MAX - 511)]).contains("outside"));
    assert!(refused(1024, vec![tensor("b", &[1], 8)]).contains("at byte 8"));
    assert!(refused(1024, vec![tensor("", &[1], 0)]).contains("name"));
    assert!(refused(1024, vec![tensor(&"n".repeat(1025), &[1], 0)]).contains("name"));
}

#[test]
fn tied_weights_are_one_tensor_under_several_names_and_nothing_else_overlaps() {
    let tied = || {
        vec![
            tensor("a", &[700], 0),
            tensor("b", &[700], 0),
            tensor("c", &[700], 0),
            tensor("d", &[4], 1024),
        ]
    };
    let sent = Manifest::new(2048, vec![Part::whole(4096)], tied()).unwrap();
    let received = Manifest::decode(&sent.encode()).unwrap();
    assert_eq!(received.tensors(), &tied()[..]);
    assert_eq!(received.tensor("c").unwrap().offset, 0);
    type Change = fn(&mut TensorInfo);
    let changes: [Change; 4] = [
        |b| b.layout = Layout::contiguous(DType::U8, &[699]).unwrap(),
        |b| b.layout = Layout::contiguous(DType::U8, &[7, 100]).unwrap(),
        |b| b.hash = Some([8; 16]),
        |b| b.name = "a".into(),
    ];
    for (index, change) in changes.into_iter().enumerate() {
        let mut tensors = tied();
        change(&mut tensors[1]);
        assert!(
            Manifest::decode(&encoded(2048, tensors)).is_err(),
            "{index}"
        );
    }
    // Another tensor in between.
    let mut apart = tied();
    apart.swap(2, 3);
    assert!(refused(2048, apart).contains("at byte 0"));
}

#[test]
fn a_memory_is_of_whole_parts_and_each_tensor_lies_in_one_of_them() {
    let part = |pieces, piece_bytes| Part {
        pieces,
        ..Part::whole(piece_bytes)
    };
    let two = || vec![part(3, 1024), part(1, 4096)];
    let tensors = vec![tensor("a", &[3072], 0), tensor("b", &[10], 3072)];
    let sent = Manifest::new(4000, two(), tensors).unwrap();
    let received = Manifest::decode(&sent.encode()).unwrap();
    assert_eq!(received, sent);
    assert_eq!(
        received.pieces().collect::<Vec<_>>(),
        [1024, 1024, 1024, 4096]
    );
    let places = [0, 3071, 3072, 9000].map(|offset| received.part_at(offset).0);
    assert_eq!(places, [0, 0, 1, 1]);
    // It ends in the last part.
    for bytes in [0, 1, 3072, 3 * 1024 + 4096 + 1, u64::MAX] {
        let found = Manifest::decode(&in_parts(bytes, two(), vec![])).unwrap_err();
        assert!(found.contains("bytes in parts"), "{found}");
    }
    let over = vec![tensor("a", &[513], 2560)];
    let found = Manifest::decode(&in_parts(4000, two(), over)).unwrap_err();
    assert!(found.contains("two parts"), "{found}");
    let wrong = [
        part(0, 1024),
        part(1, 0),
        part(1, 700),
        part(u32::MAX, 1024),
        part(PIECES_MAX as u32 + 1, 1024),
        part(2, 1 << 63),
    ];
    for wrong in wrong {
        let found = Manifest::decode(&in_parts(512, vec![wrong], vec![])).unwrap_err();
        assert!(found.contains("a part of"), "{found}");
    }
    let wide = vec![part(1, 1 << 63), part(1, 1 << 63)];
    assert!(Manifest::decode(&in_parts(512, wide, vec![])).is_err());
    // An allocator may have put all pieces side by side, with a tensor over most of them.
    let all = (PIECES_MAX as u64 - 1) * 512;
    let row = vec![part(PIECES_MAX as u32, 512)];
    Manifest::new(all + 512, row, vec![tensor("a", &[all], 512)]).unwrap();
    let many = vec![part(PIECES_MAX as u32, 512), part(1, 512)];
    let found = Manifest::decode(&in_parts(512, many, vec![])).unwrap_err();
    assert!(found.contains("pieces, at most"), "{found}");
    assert!(Manifest::decode(&in_parts(512, vec![], vec![])).is_err());
}

#[test]
fn garbled_bytes_are_refused_and_none_panics_or_makes_room_for_what_is_not_there() {
    let whole = encoded(1024, vec![tensor("a", &[4], 0), tensor("b", &[2, 2], 512)]);
    assert!(Manifest::decode(&whole).is_ok());
    for at in 0..whole.len() {
        assert!(Manifest::decode(&whole[..at]).is_err(), "{at}");
        for byte in [0, 1, 9, 0x7f, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] = byte;
            let _ = Manifest::decode(&bytes);
        }
    }
    let mut longer = whole.clone();
    longer.push(0);
    assert!(Manifest::decode(&longer).unwrap_err().contains("behind"));
    let head = |format, parts, tensors| {
        let head = Head {
            format,
            bytes: 1024,
            parts,
            tensors,
            hashing: Hashing::Device,
            metadata_bytes: 0,
        };
        Manifest::decode(&postcard::to_stdvec(&head).unwrap()).unwrap_err()
    };
    assert!(head(FORMAT + 1, 1, 0).contains(&format!("format {}", FORMAT + 1)));
    assert!(head(FORMAT, 1, u32::MAX).contains("tensors"));
    assert!(head(FORMAT, u32::MAX, 0).contains("parts"));
    assert!(head(FORMAT, PIECES_MAX as u32, 0).contains("garbled"));
    assert!(head(FORMAT, 0, TENSORS_MAX as u32).contains("garbled"));
}

#[test]
fn a_manifest_that_could_still_change_is_not_read() {
    let bytes = encoded(512, vec![tensor("a", &[4], 0)]);
    let open = seal::memfd(c"warpipe-manifest", bytes.len() as u64).unwrap();
    write_all(open.as_fd(), &bytes).unwrap();
    let refused = Manifest::receive(open.as_fd(), bytes.len() as u64).unwrap_err();
    assert!(refused.contains("seal"), "{refused}");
    let sealed = Manifest::new(512, vec![Part::whole(512)], vec![tensor("a", &[4], 0)]).unwrap();
    let sealed = sealed.seal("any").unwrap();
    for bytes in [
        0,
        sealed.bytes - 1,
        sealed.bytes + 1,
        MANIFEST_BYTES_MAX + 1,
        u64::MAX,
    ] {
        assert!(
            Manifest::receive(sealed.fd.as_fd(), bytes).is_err(),
            "{bytes}"
        );
    }
    let (_end, pipe) = rustix::pipe::pipe().unwrap();
    assert!(Manifest::receive(pipe.as_fd(), 4).is_err());
}

#[test]
fn leases_bases_strides_absent_hashes_and_metadata_arrive_and_wrong_ones_are_refused() {
    let turned = Layout::strided(DType::F32, &[3, 4], &[1, 3], 0).unwrap();
    let tensors = || {
        let mut tensors = vec![tensor("a", &[4], 0), tensor("b", &[4], 512)];
        (tensors[0].layout, tensors[1].hash) = (turned, None);
        tensors
    };
    let part = Part {
        lease: 2,
        base: Some(([3; 16], 9)),
        ..Part::whole(1024)
    };
    let sent = Manifest::new(1024, vec![part], tensors()).unwrap();
    let sent = sent.with_hashing(Hashing::Later);
    let sent = sent.with_metadata(b"{\"step\":1}".into());
    let received = Manifest::decode(&sent.encode()).unwrap();
    assert_eq!(received, sent);
    assert_eq!((received.leases(), received.hashing()), (2, Hashing::Later));
    assert_eq!(received.metadata(), b"{\"step\":1}");
    assert_eq!(
        (received.tensors()[0].layout, received.is_hashed()),
        (turned, false)
    );
    let mut hashed = received.clone();
    hashed.add_hashes([(0, [7; 16]), (1, [8; 16])]);
    assert!(hashed.is_hashed() && hashed.tensor("b").unwrap().hash == Some([8; 16]));
    let many = Part {
        lease: LEASES_MAX as u32 + 1,
        ..part
    };
    let found = Manifest::decode(&in_parts(1024, vec![many], tensors())).unwrap_err();
    assert!(found.contains("a part of"), "{found}");
    for (shape, strides) in [([3, 4], [1, 4]), ([3, 4], [0, 1]), ([3, 4], [1, 1])] {
        let layout = Layout::strided(DType::U8, &shape, &strides, 0).unwrap();
        let gaps = vec![TensorInfo {
            layout,
            ..tensor("gaps", &[4], 0)
        }];
        let found = refused(1024, gaps);
        assert!(found.contains("\"gaps\" of"), "{found}");
    }
    let long =
        unchecked(1024, vec![part], vec![]).with_metadata(vec![b' '; METADATA_BYTES_MAX + 1]);
    let found = Manifest::decode(&long.encode()).unwrap_err();
    assert!(found.contains("metadata"), "{found}");
    for wrong in [&b"{"[..], b"\x00", b"{} {}", b"\"\xff\"", b" "] {
        let sent = Manifest::new(1024, vec![part], tensors()).unwrap();
        let sent = sent.with_metadata(wrong.into()).encode();
        let found = Manifest::decode(&sent).unwrap_err();
        assert!(found.contains("metadata"), "{found}");
    }
    let mut cut = sent.encode();
    cut.pop();
    let found = Manifest::decode(&cut).unwrap_err();
    assert!(found.contains("behind the last tensor"), "{found}");
}

#[test]
fn tens_of_thousands_of_tensors_are_found_by_name_after_they_were_sent() {
    const TENSORS: u64 = 50_000;
    let name = |number| {
        format!(
            "model.layers.{}.mlp.experts.{number}.down_proj",
            number % 61
        )
    };
    let named = |number| tensor(&name(number), &[8], number * 512);
    let bytes = TENSORS * 512;
    let sent = Manifest::new(
        bytes,
        vec![Part::whole(bytes)],
        (0..TENSORS).map(named).collect(),
    );
    let sealed = sent.unwrap().seal("any").unwrap();
    let received = Manifest::receive(sealed.fd.as_fd(), sealed.bytes).unwrap();
    for number in [0, 1, 4711, TENSORS - 1] {
        let found = received.tensor(&name(number)).unwrap();
        assert_eq!(found.offset, number * 512);
    }
}
