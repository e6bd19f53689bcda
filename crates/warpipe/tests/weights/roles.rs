//! The parts of the child processes. Each takes a command a line, and replies with a line for each.
//! **This module is marked for unsafe**: it publishes tensors by address.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use warpipe::weights::{Keeper, PublishedWeights, SharedWeights, TensorsInPlace, Weights};
use warpipe::{DType, Device, Domain, Error, Layout, Memory};

use super::{REPLY, TENSOR_BYTES, TENSORS, WAIT, descriptors, publish};

fn say(text: impl std::fmt::Display) {
    println!("{REPLY}{text}");
}

/// Keeps the name, and replies with its version.
pub fn keeper(domain: &Domain, commands: impl Iterator<Item = String>) {
    let keeper = Keeper::new("w", domain.options()).unwrap();
    let candidate = keeper.state().unwrap().candidate;
    say(format_args!(
        "candidate {candidate:?} unanswered {}",
        keeper.state().unwrap().unanswered
    ));
    for _ in commands {
        say(format_args!(
            "version {:?}",
            keeper.state().unwrap().version
        ));
    }
}

/// Builds a keeper again and again, each time with room for one more descriptor.
pub fn short_keeper(domain: &Domain, commands: impl Iterator<Item = String>) {
    // What a process opens once.
    let other = Keeper::new("other", domain.options()).unwrap();
    drop(other);
    let whole = getrlimit(Resource::Nofile);
    let used = descriptors("self").len() as u64 - 1;
    for (room, _) in (0..).zip(commands) {
        let current = Some(used + room);
        setrlimit(Resource::Nofile, Rlimit { current, ..whole }).unwrap();
        let built = Keeper::new("w", domain.options());
        setrlimit(Resource::Nofile, whole).unwrap();
        match built {
            Ok(keeper) => say(format_args!(
                "candidate {:?}",
                keeper.state().unwrap().candidate
            )),
            Err(error) if error.is_descriptor_limit() => say("error"),
            Err(other) => say(other),
        }
    }
}

/// Opens the version that is offered, and newer ones on command.
pub fn worker(domain: &Domain, commands: impl Iterator<Item = String>) {
    let mut weights = SharedWeights::open("w", domain.on(&Device::host()), WAIT).unwrap();
    say_version(&weights);
    for command in commands {
        match command.split_once(' ') {
            Some(("follow", last)) => {
                let last: u64 = last.parse().unwrap();
                while weights.info().version < last {
                    weights = weights.newer(WAIT).unwrap();
                    assert_eq!(u64::from(byte_of(&weights)), weights.info().version);
                }
            }
            _ if command == "newer" => weights = weights.newer(WAIT).unwrap(),
            _ => {}
        }
        say_version(&weights);
    }
}

/// Publishes a version of so many pieces, where they lie.
pub fn publish_in_place(domain: &Domain, pieces: usize) -> warpipe::Result<PublishedWeights> {
    let (device, layout) = (Device::host(), Layout::contiguous(DType::U8, &[8])?);
    let mut tensors = TensorsInPlace::new(&device);
    for number in 0..pieces {
        let memory = Memory::allocate(&device, 8)?;
        let ptr = memory.ptr();
        // SAFETY: the tensor lies in its owner, and nothing writes it.
        unsafe { tensors.add(&number.to_string(), layout, ptr, Box::new(memory))? };
    }
    let mut builder = Weights::builder(&device, [])?;
    builder.in_place = Some(tensors);
    let weights = builder.finish()?;
    weights.publish(domain, "w", WAIT)
}

/// Allows this process no more than so many further descriptors.
fn leave_room(count: u64) {
    let (used, whole) = (
        descriptors("self").len() as u64 - 1,
        getrlimit(Resource::Nofile),
    );
    let current = Some(used + count);
    setrlimit(Resource::Nofile, Rlimit { current, ..whole }).unwrap();
}

/// Keeps the name with room for few pieces.
pub fn narrow_keeper(domain: &Domain, commands: impl Iterator<Item = String>) {
    let keeper = Keeper::new("w", domain.options()).unwrap();
    leave_room(150);
    say("ready");
    for _ in commands {
        say(format_args!(
            "version {:?}",
            keeper.state().unwrap().version
        ));
    }
}

/// Opens weights, with room for few pieces.
pub fn narrow_worker(domain: &Domain, commands: impl Iterator<Item = String>) {
    leave_room(150);
    for _ in commands {
        match SharedWeights::open("w", domain.on(&Device::host()), WAIT) {
            Ok(weights) => say(format_args!("version {}", weights.info().version)),
            Err(error) if error.is_descriptor_limit() => say(format_args!("limit: {error}")),
            Err(error) => say(error),
        }
    }
}

/// Publishes versions, whatever happens to their keeper, and holds the last of them.
pub fn publisher(domain: &Domain, commands: impl Iterator<Item = String>) {
    let mut published = None;
    for command in commands {
        let byte = command.strip_prefix("publish ").unwrap().parse().unwrap();
        let next = loop {
            match publish(domain, byte) {
                Ok(next) => break next,
                Err(Error::PeerGone { .. } | Error::Handshake { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        };
        say(format_args!("version {}", next.version));
        published = Some(next);
    }
    drop(published);
}

/// Publishes tensors where they lie: the same again with `again`, and new ones with `fill` and a byte.
pub fn trainer(domain: &Domain, commands: impl Iterator<Item = String>) {
    let (device, mut memory, mut published) = (Device::host(), Vec::new(), None);
    for command in commands {
        if let Some(byte) = command.strip_prefix("fill ") {
            let byte = byte.parse::<u8>().unwrap();
            memory = (0..TENSORS).map(|_| filled(&device, byte)).collect();
        }
        let next = publish_memory(domain, &device, &memory).unwrap();
        say(format_args!("version {}", next.version));
        published = Some(next);
    }
    drop(published);
}

fn filled(device: &Device, byte: u8) -> Memory {
    let memory = Memory::allocate(device, TENSOR_BYTES as u64).unwrap();
    let stream = device.stream().unwrap();
    memory.write(&stream, 0, &[byte; TENSOR_BYTES]).unwrap();
    stream.synchronize(WAIT).unwrap();
    memory
}

fn publish_memory(
    domain: &Domain,
    device: &Device,
    memory: &[Memory],
) -> warpipe::Result<PublishedWeights> {
    let layout = Layout::contiguous(DType::U8, &[TENSOR_BYTES as u64])?;
    let mut tensors = TensorsInPlace::new(device);
    for (number, memory) in memory.iter().enumerate() {
        let (ptr, owner) = (memory.ptr(), Box::new(memory.clone()));
        // SAFETY: the tensor lies in its owner, and nothing writes it.
        unsafe { tensors.add(&number.to_string(), layout, ptr, owner)? };
    }
    let mut builder = Weights::builder(device, [])?;
    builder.in_place = Some(tensors);
    let weights = builder.finish()?;
    weights.publish(domain, "w", WAIT)
}

fn say_version(weights: &SharedWeights) {
    say(format_args!(
        "version {} byte {}",
        weights.info().version,
        byte_of(weights)
    ));
}

/// The byte that all tensors consist of.
pub fn byte_of(weights: &SharedWeights) -> u8 {
    assert_eq!(weights.tensors().len(), TENSORS);
    let tensors = weights.tensors().iter().map(|tensor| tensor.name.as_ref());
    let bytes: Vec<u8> = tensors
        .flat_map(|name| {
            let tensor = weights.tensor(name).unwrap();
            tensor.memory.to_vec(WAIT).unwrap()
        })
        .collect();
    assert!(bytes.iter().all(|&byte| byte == bytes[0]) && bytes.len() == TENSORS * TENSOR_BYTES);
    bytes[0]
}
