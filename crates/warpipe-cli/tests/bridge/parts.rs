//! Samples of several tensors, on the device that `WARPIPE_TEST_DEVICE` names.

use warpipe::{
    DType, Layout, Memory, Publisher, PublisherOptions, SampleMut, Stream, Subscriber,
    SubscriberOptions,
};

use super::batches::open;
use super::{LONG, Pair};

/// The most bytes that cross these bridges in one sample: 1 MiB.
const BYTES_MAX: u64 = 1 << 20;

/// As much metadata as there is room for behind the list of the parts.
fn longest_metadata(loan: &mut SampleMut) -> Vec<u8> {
    let bytes: Vec<u8> = (0..4096).map(|at| (at % 251) as u8).collect();
    let fits = |length: &usize| loan.set_metadata(&bytes[..*length]).is_ok();
    let length = (0..=4096).rev().find(fits).unwrap();
    bytes[..length].to_vec()
}

fn send(loan: SampleMut, stream: &Stream, number: u64) {
    assert_eq!(loan.send(stream).unwrap(), number);
}

#[test]
fn the_parts_of_a_sample_arrive_with_their_names_layouts_bytes_and_the_longest_metadata() {
    let (pair, device) = (Pair::new(), open());
    let (near, far) = pair.domains();
    let publisher: PublisherOptions = near.on(&device);
    let publisher = Publisher::new("camera/front", publisher).unwrap();
    let _bridges = pair.bridges_on(&super::support::device(), &["--tensor-max", "1"]);
    let subscriber: SubscriberOptions = far.on(&device);
    let mut subscriber = Subscriber::open("camera/front", subscriber, LONG).unwrap();
    let stream = device.stream().unwrap();

    let memory = Memory::allocate(&device, 2 * BYTES_MAX).unwrap();
    let strided = Layout::strided(DType::F32, &[2, 3], &[4, 1], 1).unwrap();
    let copied = [
        ("image", Layout::contiguous(DType::U8, &[7, 3]).unwrap()),
        ("тень", strided),
        ("none", Layout::contiguous(DType::I64, &[0, 4]).unwrap()),
    ];
    let in_place = [
        ("lies", Layout::contiguous(DType::F64, &[3]).unwrap()),
        ("nothing", Layout::bytes_only(0).unwrap()),
    ];
    let content = |number: u64, layout: &Layout| vec![number as u8; layout.bytes() as usize];
    let published = memory.publish("memory", near.options()).unwrap();
    let mut sent = Vec::new();
    // The third has no part in its slot.
    for (number, in_slot, outside) in [
        (1, &copied[..], &in_place[..0]),
        (2, &copied[..], &in_place[..]),
        (3, &copied[..0], &in_place[..]),
    ] {
        let mut loan = publisher.loan_parts(in_slot).unwrap();
        for (name, layout) in in_slot {
            let bytes = content(number, layout);
            loan.write_part(&stream, name, &bytes).unwrap();
        }
        for (name, layout) in outside {
            let (bytes, at) = (content(number, layout), 4096 * number);
            memory.write(&stream, at, &bytes).unwrap();
            loan.add_part_in(name, &published, at, layout, ()).unwrap();
        }
        let metadata = longest_metadata(&mut loan);
        assert!(metadata.len() > 3500, "{}", metadata.len());
        send(loan, &stream, number);
        sent.push((number, [in_slot, outside].concat(), metadata));
    }
    // More bytes than may cross, in the slot and in place, cross neither whole nor cut.
    let long = Layout::bytes_only(BYTES_MAX + 1).unwrap();
    send(publisher.loan_parts(&[("long", long)]).unwrap(), &stream, 4);
    let half = Layout::bytes_only(BYTES_MAX / 2 + 1).unwrap();
    let mut loan = publisher.loan_parts(&[("half", half)]).unwrap();
    loan.add_part_in("other half", &published, 0, &half, ())
        .unwrap();
    send(loan, &stream, 5);
    publisher.send_bytes(&stream, b"one tensor").unwrap();

    for (number, layouts, metadata) in sent {
        let sample = subscriber.receive(&stream, LONG).unwrap();
        assert_eq!(
            (sample.sequence(), sample.metadata()),
            (number, &metadata[..])
        );
        assert_eq!(sample.parts().len(), layouts.len());
        for (part, (name, layout)) in sample.parts().iter().zip(&layouts) {
            assert_eq!((&*part.name, &part.layout), (*name, layout));
            assert!(!part.is_in_place);
            let bytes = sample.part_to_vec(name, LONG).unwrap();
            assert_eq!(bytes, content(number, layout));
        }
    }
    let last = subscriber.receive(&stream, LONG).unwrap();
    assert_eq!((last.sequence(), last.parts().len()), (6, 0));
    assert_eq!(last.info().discontinuity.map(|gap| gap.missing), Some(2));
    assert_eq!(last.to_vec(LONG).unwrap(), b"one tensor");
}
