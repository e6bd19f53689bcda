//! Samples that go in one part, and in several, on the device that `WARPIPE_TEST_DEVICE` names.

use warpipe::{
    DType, Device, Layout, Policy, Publisher, PublisherOptions, SampleMut, Stream, Subscriber,
};

use super::support::{Running, device};
use super::{LONG, Pair};

pub(super) fn open() -> Device {
    match device().as_str() {
        "host" => Device::host(),
        _ => Device::cuda(0).unwrap(),
    }
}

impl Pair {
    /// Both bridges, on the device, with these options, too.
    pub(super) fn bridges_on(&self, device: &str, more: &[&str]) -> (Running, Running) {
        let with = |arguments: Vec<&str>| -> Vec<String> {
            let named = |it: &str| if it == "host" { device } else { it }.to_owned();
            arguments.into_iter().map(named).collect()
        };
        let (exporting, importing) = (with(self.exporting(more)), with(self.importing(more)));
        let start = |world: &super::World, arguments: &[String]| {
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            world.start(&arguments)
        };
        (start(&self.near, &exporting), start(&self.far, &importing))
    }
}

/// Tensors that share a part, alone in one, in several, and without bytes.
fn layouts() -> Vec<Layout> {
    let bytes = [
        1,
        2,
        3,
        8,
        0,
        4096,
        4097,
        70_001,
        128 << 10,
        (128 << 10) + 1,
        (3 << 20) + 5,
    ];
    let mut layouts: Vec<Layout> = bytes.map(|it| Layout::bytes_only(it).unwrap()).into();
    layouts.push(Layout::strided(DType::F32, &[2, 3], &[4, 1], 1).unwrap());
    layouts.push(Layout::contiguous(DType::I64, &[3, 5, 7]).unwrap());
    layouts
}

/// The layout of a sample: each comes several times behind itself, and behind every other one.
fn layout_of(number: u64, layouts: &[Layout]) -> Layout {
    let long_run = number % 97 > 40;
    let index = if long_run {
        5
    } else {
        (number * number / 3) as usize % layouts.len()
    };
    layouts[index]
}

fn content_of(number: u64, layout: &Layout) -> Vec<u8> {
    let byte = |at: u64| (at.wrapping_mul(31) ^ at >> 8 ^ number.wrapping_mul(7)) as u8;
    (0..layout.bytes()).map(byte).collect()
}

fn metadata_of(number: u64) -> Vec<u8> {
    vec![number as u8; (number % 40) as usize * 6]
}

fn fill(loan: &mut SampleMut, number: u64, layout: &Layout, stream: &Stream) {
    if layout.bytes() > 0 {
        loan.write(stream, &content_of(number, layout)).unwrap();
    }
    loan.set_metadata(&metadata_of(number)).unwrap();
}

#[test]
fn samples_of_many_layouts_that_go_together_arrive_each_with_its_own() {
    const COUNT: u64 = 600;
    let (pair, device) = (Pair::new(), open());
    let (near, far) = pair.domains();
    let options = PublisherOptions {
        depth: 128,
        policy: Policy::Block { timeout: LONG },
        ..near.on(&device)
    };
    let publisher = Publisher::new("camera/front", options).unwrap();
    let _bridges = pair.bridges_on(&super::support::device(), &[]);
    let mut subscriber = Subscriber::open("camera/front", far.on(&device), LONG).unwrap();
    let layouts = layouts();
    let (sent, on) = (layouts.clone(), device.clone());
    let sender = std::thread::spawn(move || {
        let stream = on.stream().unwrap();
        for number in 1..=COUNT {
            let layout = layout_of(number, &sent);
            let mut loan = publisher.loan(&layout).unwrap();
            fill(&mut loan, number, &layout, &stream);
            assert_eq!(loan.send(&stream).unwrap(), number);
        }
        publisher
    });
    let stream = device.stream().unwrap();
    for number in 1..=COUNT {
        let sample = subscriber.receive(&stream, LONG).unwrap();
        let layout = layout_of(number, &layouts);
        assert_eq!((sample.sequence(), sample.layout()), (number, &layout));
        assert_eq!(sample.metadata(), metadata_of(number), "sample {number}");
        let found = sample.to_vec(LONG).unwrap();
        assert!(found == content_of(number, &layout), "sample {number}");
    }
    drop(sender.join().unwrap());
}
