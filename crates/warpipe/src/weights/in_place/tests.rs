//! **This module is marked for unsafe**: it adds tensors by address.

use super::*;
use crate::tensor::DType;

#[test]
fn a_part_is_as_many_pieces_of_one_length_as_lie_side_by_side() {
    const PIECE: u64 = 1 << 21;
    let row = |base, count, bytes| (0..count).map(move |index| (base + index * bytes, bytes));
    let part = |pieces, piece_bytes| Part {
        pieces,
        ..Part::whole(piece_bytes)
    };
    let count = PIECES_MAX as u64 - 3;
    // No gap before the piece of another length; a gap before the last ones.
    let end = PIECE + count * PIECE;
    let pieces = row(PIECE, count, PIECE)
        .chain([(end, 4096)])
        .chain(row(end + 8192, 2, 4096));
    let (parts, begins) = parts_of(pieces, 512);
    let wanted = [part(count as u32, PIECE), part(1, 4096), part(2, 4096)];
    assert_eq!(parts, wanted);
    let offsets: Vec<u64> = begins.into_values().collect();
    let behind = 512 + count * PIECE;
    assert_eq!(offsets, [512, behind, behind + 4096]);
}

#[test]
fn a_tensor_in_allocations_of_several_lengths_is_refused_with_its_name() {
    let device = Device::host();
    let memory = crate::Memory::allocate(&device, 4096).unwrap();
    let mut tensors = TensorsInPlace::new(&device);
    for (base, bytes) in [(1 << 21, 1 << 20), (3 << 20, 1 << 20), (4 << 20, 1 << 21)] {
        let fd = PieceFd::own(memory.private_export().unwrap());
        tensors.pieces.insert(base, (bytes, fd));
    }
    let layout = |bytes| Layout::contiguous(DType::U8, &[bytes]).unwrap();
    // SAFETY: nothing reads the tensors, which no memory has.
    let mut add = |name, bytes, at| unsafe { tensors.add(name, layout(bytes), at, Box::new(())) };
    add("whole", 3 << 19, 1 << 21).unwrap();
    let refused = add("norm", 1 << 20, (4 << 20) - 512).unwrap_err();
    assert!(matches!(refused, Error::Argument { .. }), "{refused}");
    let text = refused.to_string();
    for word in ["\"norm\"", "1048576 and of 2097152 bytes", "publish a copy"] {
        assert!(text.contains(word), "{text}");
    }
    assert_eq!((tensors.tensors.len(), tensors.pieces()), (1, 3));
}
