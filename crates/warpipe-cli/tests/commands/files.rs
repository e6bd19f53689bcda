//! `warpipe pub` and `warpipe sub`: files through real processes, bit for bit.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use rustix::process::Signal;
use warpipe::{Device, Domain, Subscriber};

use crate::support::{Ended, PATIENCE, Running, World, bytes, device, files, npy};

/// Publishes `sources` to one subscriber that saves them in the world's `saved`.
fn pass(
    world: &World,
    sources: &[PathBuf],
    more: &[&str],
) -> (Ended, Ended, Vec<(String, Vec<u8>)>) {
    let (device, count, saved) = (device(), sources.len().to_string(), world.path("saved"));
    let subscriber = world.start(&[
        "sub",
        "test/files",
        "--device",
        &device,
        "--count",
        &count,
        "--save",
        saved.to_str().unwrap(),
        "--json",
    ]);
    let mut arguments = vec!["pub", "test/files", "--device", &device, "--json"];
    arguments.extend(more);
    arguments.extend(sources.iter().map(|source| source.to_str().unwrap()));
    let published = world.run(&arguments);
    let received = subscriber.end();
    assert_eq!(
        (published.code, received.code),
        (Some(0), Some(0)),
        "{published:?}\n{received:?}"
    );
    (published, received, files(&saved))
}

#[test]
fn arrays_of_every_type_and_order_are_saved_as_they_were_published() {
    let world = World::new();
    let types = [
        "|b1", "|i1", "<i2", "<i4", "<i8", "|u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8",
        "<c16",
    ];
    let shapes: [(&[u64], bool); 6] = [
        (&[], false),
        (&[5], false),
        (&[3, 4], false),
        (&[3, 4], true),
        (&[2, 3, 4], true),
        (&[3, 0], false),
    ];
    let mut sources = Vec::new();
    for (index, descr) in types.iter().enumerate() {
        let (shape, fortran_order) = shapes[index % shapes.len()];
        let width: usize = descr[2..].parse().unwrap();
        let data = bytes(width * shape.iter().product::<u64>() as usize);
        sources.push(world.write(
            &format!("{index:02}.npy"),
            &npy(descr, fortran_order, shape, &data),
        ));
    }
    let (published, received, saved) = pass(&world, &sources, &[]);
    assert_eq!(published.events("sent").len(), sources.len());
    assert_eq!(received.event("done")["samples"], sources.len());
    assert_eq!(saved.len(), sources.len());
    for (source, (name, content)) in sources.iter().zip(&saved) {
        let file = source.file_name().unwrap().to_str().unwrap();
        assert!(
            name.ends_with(&format!("-{file}")),
            "{name} comes from {file}"
        );
        assert!(std::fs::read(source).unwrap() == *content, "{file}");
    }
}

#[test]
fn types_that_numpy_lacks_are_named_on_the_command_line_and_kept() {
    let world = World::new();
    let source = world.write("weights.npy", &npy("<V2", false, &[4], &bytes(8)));
    let (published, _, saved) = pass(
        &world,
        std::slice::from_ref(&source),
        &["--void-as", "bfloat16"],
    );
    assert_eq!(published.event("sent")["dtype"], "bfloat16");
    assert_eq!(saved[0].1, std::fs::read(&source).unwrap());
}

#[test]
fn a_large_array_and_plain_bytes_arrive_whole() {
    let world = World::new();
    let array = npy("<f4", false, &[700, 1000], &bytes(2_800_000));
    let sources = [
        world.write("a.npy", &array),
        world.write("b.bin", &bytes(100_001)),
        world.write("c", &bytes(1)),
    ];
    let (_, received, saved) = pass(&world, &sources, &[]);
    let names: Vec<&str> = saved.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["000001-a.npy", "000002-b.bin", "000003-c"]);
    assert!(saved[0].1 == array && saved[1].1 == bytes(100_001) && saved[2].1 == bytes(1));
    assert_eq!(received.events("received")[1]["file"], "b.bin");
}

#[test]
fn a_picture_becomes_an_array_of_its_pixels() {
    let world = World::new();
    let mut picture = Vec::new();
    let mut encoder = png::Encoder::new(&mut picture, 3, 2);
    encoder.set_color(png::ColorType::Rgb);
    encoder
        .write_header()
        .unwrap()
        .write_image_data(&bytes(18))
        .unwrap();
    let source = world.write("cat.png", &picture);
    let (published, _, saved) = pass(&world, &[source], &[]);
    assert_eq!(
        published.event("sent")["shape"],
        serde_json::json!([2, 3, 3])
    );
    assert_eq!(
        saved,
        [(
            "000001-cat.npy".to_owned(),
            npy("|u1", false, &[2, 3, 3], &bytes(18))
        )]
    );
}

#[test]
fn a_second_run_into_the_same_directory_overwrites_nothing() {
    let world = World::new();
    let source = world.write("a.npy", &npy("|u1", false, &[2], b"ab"));
    pass(&world, std::slice::from_ref(&source), &[]);
    std::fs::write(&source, npy("|u1", false, &[2], b"cd")).unwrap();
    let (_, _, saved) = pass(&world, &[source], &[]);
    let names: Vec<&str> = saved.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["000001-a-2.npy", "000001-a.npy"]);
    assert!(saved[0].1.ends_with(b"cd") && saved[1].1.ends_with(b"ab"));
}

#[test]
fn a_subscriber_that_reconnects_goes_on_with_the_next_publisher() {
    let world = World::new();
    let (device, source) = (device(), world.write("a.bin", b"abc"));
    let subscriber = world.start(&[
        "sub",
        "again",
        "--device",
        &device,
        "--count",
        "2",
        "--reconnect",
        "--json",
    ]);
    for _ in 0..2 {
        let published = world.run(&[
            "pub",
            "again",
            source.to_str().unwrap(),
            "--device",
            &device,
        ]);
        assert_eq!(published.code, Some(0), "{published:?}");
    }
    let received = subscriber.end();
    assert_eq!(
        (received.code, received.events("received").len()),
        (Some(0), 2),
        "{received:?}"
    );
    let previous: Vec<_> = received
        .events("received")
        .iter()
        .map(|event| event["previous_pid"].is_number())
        .collect();
    assert_eq!(previous, [false, true], "{received:?}");
}

#[test]
fn a_subscriber_says_how_many_samples_are_missing() {
    let world = World::new();
    let domain = warpipe::Domain::at(world.path("domain")).unwrap();
    let device = warpipe::Device::host();
    let (publisher, stream) = (
        warpipe::Publisher::new(
            "skips",
            warpipe::PublisherOptions {
                history: 2,
                forwards: Some([7; 16]),
                ..domain.on(&device)
            },
        )
        .unwrap(),
        device.stream().unwrap(),
    );
    for number in [1, 5] {
        publisher.skip_to(number).unwrap();
        publisher.send_bytes(&stream, b"abc").unwrap();
    }
    let received = world.run(&["sub", "skips", "--device", "host", "--count", "2", "--json"]);
    let events = received.events("received");
    let missing = events.iter().map(|event| event["missing"].as_u64());
    let missing = Vec::from_iter(missing);
    assert_eq!(missing, [Some(0), Some(3)], "{received:?}");
    let done = received.event("done");
    assert_eq!((&done["missing"], &done["dropped"]), (&3.into(), &0.into()));
}

#[test]
fn without_a_count_a_subscriber_ends_with_its_publisher() {
    let world = World::new();
    let (device, source) = (device(), world.write("a.bin", b"abc"));
    let subscriber = world.start(&["sub", "one", "--device", &device, "--json"]);
    let published = world.run(&[
        "pub",
        "one",
        source.to_str().unwrap(),
        "--device",
        &device,
        "--json",
    ]);
    let received = subscriber.end();
    assert_eq!(
        (published.code, received.code),
        (Some(0), Some(0)),
        "{published:?} {received:?}"
    );
    assert_eq!(received.event("done")["samples"], 1);
}

#[test]
fn a_signal_ends_a_publisher_that_waits_for_room() {
    let world = World::new();
    let file = world.write("a.bin", b"bytes");
    let mut publisher = world.start(&[
        "pub",
        "test/full",
        "--device",
        "host",
        "--loop",
        "--depth",
        "1",
        "--timeout",
        "600",
        "--json",
        file.to_str().unwrap(),
    ]);
    let (domain, device) = (Domain::at(world.path("domain")).unwrap(), Device::host());
    // It receives nothing.
    let _subscriber = Subscriber::open("test/full", domain.on(&device), PATIENCE).unwrap();
    publisher.wait_for("sent", 1);
    publisher.signal(Signal::INT);
    let ended = publisher.end();
    assert_eq!(ended.code, Some(130), "{ended:?}");
    assert_eq!(ended.event("done")["interrupted"], true);
}

/// A stopped publisher of `test/stopped`.
fn stopped_publisher(world: &World) -> Running {
    let file = world.write("a.bin", b"bytes");
    let mut publisher = world.start(&[
        "pub",
        "test/stopped",
        "--device",
        "host",
        "--json",
        file.to_str().unwrap(),
    ]);
    publisher.wait_for("listening", 1);
    publisher.stop();
    publisher
}

#[test]
fn a_signal_ends_a_subscriber_that_waits_for_a_publisher() {
    let world = World::new();
    let _publisher = stopped_publisher(&world);
    for name in ["test/absent", "test/stopped"] {
        let mut subscriber = world.start(&[
            "sub",
            name,
            "--device",
            "host",
            "--timeout",
            "600",
            "--json",
        ]);
        subscriber.wait_for("listening", 1);
        subscriber.signal(Signal::INT);
        let ended = subscriber.end();
        assert_eq!(ended.code, Some(130), "{name}: {ended:?}");
    }
}

#[test]
fn a_subscriber_waits_for_a_stopped_publisher_as_long_as_it_is_told() {
    let world = World::new();
    let _publisher = stopped_publisher(&world);
    let ended = world.run(&[
        "sub",
        "test/stopped",
        "--device",
        "host",
        "--timeout",
        "0.1",
    ]);
    assert_eq!(ended.code, Some(4), "{ended:?}");
    assert!(ended.err.contains("within 100ms"), "{ended:?}");
}

#[test]
fn a_publisher_that_is_killed_ends_its_subscriber_with_a_reason() {
    let world = World::new();
    let (device, source) = (device(), world.write("a.bin", b"abc"));
    let mut subscriber = world.start(&["sub", "one", "--device", &device, "--json"]);
    let arguments = [
        "pub",
        "one",
        source.to_str().unwrap(),
        "--device",
        &device,
        "--loop",
        "--rate",
        "20",
        "--json",
    ];
    let publisher = world.start(&arguments);
    subscriber.wait_for("received", 2);
    publisher.signal(rustix::process::Signal::KILL);
    let received = subscriber.end();
    assert_eq!(received.code, Some(4), "{received:?}");
    assert!(
        received.err.contains("has died") && received.err.contains("--reconnect"),
        "{}",
        received.err
    );
}

#[test]
fn a_damaged_file_is_named_and_nothing_at_all_is_published() {
    let world = World::new();
    let whole = npy("<f4", false, &[2, 2], &bytes(16));
    let good = world.write("good.npy", &whole);
    let damages: [(&str, Vec<u8>); 6] = [
        ("cut short", whole[..whole.len() - 1].to_vec()),
        ("follow the data", [&whole[..], b"x"].concat()),
        ("magic", b"not an array".to_vec()),
        ("cut short", npy("<f8", false, &[1 << 50], b"")),
        ("Python objects", npy("|O", false, &[1], &bytes(8))),
        (
            "negative",
            replaced(&npy("|u1", false, &[77], b""), b"(77,)", b"(-7,)"),
        ),
    ];
    for (fault, content) in damages {
        let bad = world.write("bad.npy", &content);
        let ended = world.run(&[
            "pub",
            "x",
            good.to_str().unwrap(),
            bad.to_str().unwrap(),
            "--device",
            &device(),
            "--json",
        ]);
        assert_eq!(
            (ended.code, ended.out.as_str()),
            (Some(5), ""),
            "{fault}: {ended:?}"
        );
        assert!(
            ended.err.contains("bad.npy") && ended.err.contains(fault),
            "{fault}: {}",
            ended.err
        );
    }
    let nobody = world.run(&["sub", "x", "--device", &device(), "--timeout", "0.2"]);
    assert_eq!(nobody.code, Some(3), "{nobody:?}");
}

#[test]
fn a_plain_file_that_is_not_as_long_as_it_says_is_no_damaged_array() {
    let world = World::new();
    // Its length is 0.
    let arguments = [
        "pub",
        "x",
        "/proc/version",
        "--device",
        "host",
        "--wait-subscribers",
        "0",
    ];
    let ended = world.run(&arguments);
    assert_eq!(ended.code, Some(5), "{ended:?}");
    let said = "/proc/version: 1 bytes follow the data";
    assert!(ended.err.contains(said), "{ended:?}");
}

#[test]
fn the_directory_of_a_domain_is_its_users_whatever_the_umask() {
    let world = World::new();
    let arguments = ["sub", "x", "--device", "host", "--timeout", "0.1"];
    let shell = world.by_shell("umask 0177", &arguments);
    let ended = Running::start(shell).end();
    assert_eq!(ended.code, Some(3), "{ended:?}");
    let domain = std::fs::metadata(world.path("domain")).unwrap();
    assert_eq!(domain.permissions().mode() & 0o7777, 0o700);
}

#[test]
fn a_damaged_picture_a_directory_and_a_missing_file_are_refused() {
    let world = World::new();
    let cases: [(PathBuf, &str); 3] = [
        (
            world.write("x.png", b"\x89PNG\r\n\x1a\n"),
            "not a usable .png",
        ),
        (world.path("."), "not a regular file"),
        (world.path("none.npy"), "No such file"),
    ];
    for (path, fault) in cases {
        let ended = world.run(&[
            "pub",
            "x",
            path.to_str().unwrap(),
            "--device",
            &device(),
            "--json",
        ]);
        assert_eq!((ended.code, ended.out.as_str()), (Some(5), ""), "{ended:?}");
        assert!(ended.err.contains(fault), "{}", ended.err);
    }
}

#[test]
fn nothing_is_saved_beside_the_directory_asked_for() {
    let world = World::new();
    let before: Vec<_> = listing(world.path(".").as_path());
    let source = world.write("a.bin", b"abc");
    pass(&world, &[source], &[]);
    let after = listing(world.path(".").as_path());
    let new: Vec<_> = after.iter().filter(|name| !before.contains(name)).collect();
    assert_eq!(new, ["a.bin", "domain", "saved"]);
}

fn listing(directory: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(directory)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

fn replaced(content: &[u8], old: &[u8], new: &[u8]) -> Vec<u8> {
    let at = content
        .windows(old.len())
        .position(|window| window == old)
        .unwrap();
    [&content[..at], new, &content[at + old.len()..]].concat()
}
