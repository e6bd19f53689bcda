//! `weights`: keepers and workers that are really killed, and what the commands say of them.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use crate::support::weights::{
    Stage, Worker, children_of, expected, leak, open_device, safetensors,
};
use crate::support::{PATIENCE, device, full_pipe};
use rustix::process::Signal;
use serde_json::{Value, json};
use warpipe::weights::{Hashing, SharedWeights, Weights};
use warpipe::{DType, Device, Layout};
use warpipe_testkit::{ChildProcess, eventually, wait_readable};

#[test]
#[ignore = "the part of the worker, for the other tests to start"]
fn a_worker() {
    crate::support::weights::be_a_worker();
}

#[test]
fn weights_are_served_listed_verified_and_dropped_and_their_readers_keep_them() {
    let stage = Stage::new();
    assert!(stage.ls().is_empty());
    let mut serve = stage.serve(&[]);
    let ready = serve.wait_for("ready", 1).remove(0);
    let pid = serve.pid();
    assert_eq!(
        (&ready["name"], &ready["version"], &ready["tensors"]),
        (&"w".into(), &1.into(), &2.into()),
        "{ready}"
    );
    assert_eq!(
        (&ready["from"], &ready["pid"]),
        (&"files".into(), &pid.into())
    );
    assert!(ready["seconds"].as_f64().is_some() && ready["device"].is_string());
    assert!(children_of(pid).is_empty(), "the loading process has ended");
    let mut workers = [Worker::start(&stage), Worker::start(&stage)];
    for worker in &mut workers {
        assert_eq!(worker.reply(), expected(1));
    }

    let row = stage.ls().remove(0);
    assert_eq!(
        (
            &row["name"],
            &row["state"],
            &row["version"],
            &row["tensors"]
        ),
        (&"w".into(), &"offered".into(), &1.into(), &2.into()),
        "{row}"
    );
    assert_eq!(
        (&row["keeper_pid"], &row["holders"], &row["bytes"]),
        (&pid.into(), &2.into(), &ready["bytes"]),
        "{row}"
    );
    let text = stage.world.run(&["weights", "ls"]).out;
    for word in [
        "1 name",
        "version 1",
        "2 tensors",
        "5.3 MiB",
        "2 processes have",
    ] {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
    assert!(text.contains(&format!("keeper: process {pid}")), "{text}");

    let verified = stage.world.run(&["weights", "verify", "w", "--json"]);
    assert_eq!(verified.code, Some(0), "{verified:?}");
    let row = verified.event("verified");
    assert_eq!((&row["version"], &row["tensors"]), (&1.into(), &2.into()));
    assert_eq!(row["damaged"], serde_json::json!([]));
    let text = stage.world.run(&["weights", "verify", "w"]).out;
    assert!(text.contains("every content hash is right"), "{text}");

    let dropped = stage.world.run(&["weights", "drop", "w", "--json"]);
    assert_eq!(dropped.code, Some(0), "{dropped:?}");
    let row = dropped.event("dropped");
    assert_eq!(
        (&row["keeper_pid"], &row["holders"]),
        (&pid.into(), &2.into())
    );
    let ended = serve.end();
    assert_eq!((ended.code, ended.err.as_str()), (Some(0), ""), "{ended:?}");
    assert_eq!(ended.event("ended")["reason"], "dropped");
    for worker in &mut workers {
        assert_eq!(worker.read(), expected(1));
    }
    let row = stage.ls().remove(0);
    assert_eq!(
        (
            &row["state"],
            &row["keeper_pid"],
            &row["version"],
            &row["holders"]
        ),
        (&"no keeper".into(), &().into(), &1.into(), &2.into()),
        "{row}"
    );
    let text = stage.world.run(&["weights", "ls"]).out;
    assert!(text.contains("no keeper: `serve` takes it over"), "{text}");
    for arguments in [&["weights", "drop", "w"][..], &["weights", "verify", "w"]] {
        let refused = stage.world.run(arguments);
        assert_eq!(refused.code, Some(3), "{refused:?}");
        assert!(refused.err.contains("warpipe weights serve"), "{refused:?}");
    }
}

#[test]
fn a_killed_keeper_is_replaced_from_its_readers_without_the_files() {
    let stage = Stage::new();
    let mut serve = stage.serve(&[]);
    serve.wait_for("ready", 1);
    let mut worker = Worker::start(&stage);
    assert_eq!(worker.reply(), expected(1));
    let mut doomed = Worker::start(&stage);
    assert_eq!(doomed.reply(), expected(1));
    doomed.kill();
    serve.signal(Signal::KILL);
    serve.end();
    assert_eq!(worker.read(), expected(1));
    assert_eq!(stage.ls()[0]["state"], "no keeper");
    assert_eq!(stage.ls()[0]["holders"], 1);

    std::fs::remove_file(&stage.file).unwrap();
    let mut serve = stage.serve(&[]);
    let checking = serve.wait_for("checking", 1).remove(0);
    assert_eq!(
        (&checking["version"], &checking["holders"]),
        (&1.into(), &1.into()),
        "{checking}"
    );
    let ready = serve.wait_for("ready", 1).remove(0);
    assert_eq!(
        (&ready["from"], &ready["version"], &ready["tensors"]),
        (&"processes".into(), &1.into(), &2.into()),
        "{ready}"
    );
    let mut newcomer = Worker::start(&stage);
    assert_eq!(newcomer.reply(), expected(1));
    worker.kill();
    newcomer.kill();
    serve.signal(Signal::TERM);
    let ended = serve.end();
    assert_eq!(ended.code, Some(130), "{ended:?}");
    assert_eq!(ended.event("ended")["reason"], "interrupted");
    stage.assert_nothing_is_left();
}

#[test]
fn a_request_to_end_that_comes_twice_at_once_ends_a_keeper_in_order() {
    let stage = Stage::new();
    let mut serve = stage.serve(&[]);
    serve.wait_for("ready", 1);
    // Both signals wait for it, as when `timeout` signals its child and then the child's group.
    serve.stop();
    for signal in [Signal::INT, Signal::TERM, Signal::CONT] {
        serve.signal(signal);
    }
    let ended = serve.end();
    assert_eq!(ended.code, Some(130), "{ended:?}");
    assert_eq!(ended.event("ended")["reason"], "interrupted");
    stage.assert_nothing_is_left();
}

#[test]
fn names_of_stopped_processes_are_listed_as_such_beside_the_others() {
    let stage = Stage::new();
    let mut stopped = stage.serve(&[]);
    stopped.wait_for("ready", 1);
    let other = ["weights", "serve", "--name", "other", "--json"];
    let mut other = stage.world.start(&other);
    other.wait_for("waiting", 1);
    stopped.stop();
    let rows = stage.ls();
    let states = rows.iter().map(|row| json!([row["name"], row["state"]]));
    assert_eq!(
        states.collect::<Vec<_>>(),
        [json!(["other", "none"]), json!(["w", "no answer"])]
    );
    let told = stage.world.run(&["weights", "ls"]).out;
    assert!(told.contains("no answer: stopped, or no keeper"), "{told}");
    stopped.signal(Signal::CONT);
    for serve in [stopped, other] {
        serve.signal(Signal::TERM);
        serve.end();
    }
}

/// `serve` that says everything there, as a child.
fn serve_into(stage: &Stage, arguments: &[&str], output: impl Fn() -> Stdio) -> ChildProcess {
    let mut serve = stage
        .world
        .warpipe(&stage.serve_arguments(&stage.file, arguments));
    serve.stdin(Stdio::null()).stdout(output()).stderr(output());
    ChildProcess::start(&mut serve).unwrap()
}

#[test]
fn a_keeper_keeps_the_weights_whatever_becomes_of_what_it_says_and_one_signal_ends_it() {
    let closed = || {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        Stdio::from(writer)
    };
    let full_disk = || Stdio::from(File::options().write(true).open("/dev/full").unwrap());
    let closed_terminal = || Stdio::from(File::from(crate::support::pty::hung_up()));
    let (_reader, full) = full_pipe();
    let full_pipe = || Stdio::from(full.try_clone().unwrap());
    let outputs: [(&str, &dyn Fn() -> Stdio); 4] = [
        ("a closed pipe", &closed),
        ("a full disk", &full_disk),
        ("a closed terminal", &closed_terminal),
        ("a full pipe", &full_pipe),
    ];
    for (output, open) in outputs {
        let stage = Stage::new();
        let mut serve = serve_into(&stage, &[], open);
        let end = serve.pidfd().unwrap();
        let has_ended = || wait_readable(&end, Duration::ZERO).unwrap();
        let is_offered = || stage.ls().iter().any(|row| row["state"] == "offered");
        assert!(eventually(PATIENCE, || is_offered() || has_ended()));
        assert!(is_offered(), "it has ended with {output}");
        // Drop and open again: it has said `ready` by now, or tries to.
        let verified = stage.world.run(&["weights", "verify", "w"]);
        assert_eq!(verified.code, Some(0), "{output}: {verified:?}");
        assert!(!has_ended(), "it has ended with {output}");
        serve.signal(Signal::TERM).unwrap();
        assert_eq!(serve.wait(PATIENCE).unwrap().code(), Some(130), "{output}");
        stage.assert_nothing_is_left();
    }
}

#[test]
fn a_keeper_with_progress_that_nobody_reads_loads_and_ends_when_it_is_dropped() {
    let stage = Stage::new();
    let (_reader, full) = full_pipe();
    let path = stage.file.to_str().unwrap();
    let mut serve = stage
        .world
        .warpipe(&["weights", "serve", path, "--name", "w"]);
    serve.args(["--device", &device()]).stdin(Stdio::null());
    serve.stdout(full.try_clone().unwrap()).stderr(full);
    let mut serve = ChildProcess::start(&mut serve).unwrap();
    let is_offered = || stage.ls().iter().any(|row| row["state"] == "offered");
    assert!(eventually(PATIENCE, is_offered));
    let dropped = stage.world.run(&["weights", "drop", "w"]);
    assert_eq!(dropped.code, Some(0), "{dropped:?}");
    assert_eq!(serve.wait(PATIENCE).unwrap().code(), Some(0));
    stage.assert_nothing_is_left();
}

#[test]
fn a_takeover_is_said_in_words() {
    let stage = Stage::new();
    let mut serve = stage.serve(&[]);
    serve.wait_for("ready", 1);
    let mut worker = Worker::start(&stage);
    worker.reply();
    serve.signal(Signal::KILL);
    serve.end();
    std::fs::remove_file(&stage.file).unwrap();
    let path = stage.file.to_str().unwrap();
    let mut serve = stage
        .world
        .start(&["weights", "serve", path, "--name", "w", "--quiet"]);
    let said = serve.wait_for_line("ready");
    assert!(said.contains("checking the hashes of version 1"), "{said}");
    assert!(said.contains("no file was read"), "{said}");
    serve.signal(Signal::INT);
    let ended = serve.end();
    assert_eq!(
        (ended.code, ended.err.as_str()),
        (Some(130), ""),
        "{ended:?}"
    );
}

#[test]
fn a_damaged_version_is_not_taken_over_and_the_files_are_loaded() {
    let stage = Stage::new();
    let mut serve = stage.serve(&[]);
    serve.wait_for("ready", 1);
    let mut worker = Worker::start(&stage);
    assert_eq!(worker.reply(), expected(1));
    if device() != "host" {
        // Only memory of the host can be written through its descriptor without a device.
        return;
    }
    overwrite_memory_of(serve.pid());
    let verified = stage.world.run(&["weights", "verify", "w", "--json"]);
    assert_eq!(verified.code, Some(1), "{verified:?}");
    assert_eq!(
        verified.event("verified")["damaged"],
        serde_json::json!(["a"])
    );
    let text = stage.world.run(&["weights", "verify", "w"]);
    assert_eq!(text.code, Some(1));
    assert!(
        text.out.contains("1 tensor differs") && text.out.contains("\n  a\n"),
        "{text:?}"
    );

    serve.signal(Signal::KILL);
    serve.end();
    let mut serve = stage.serve(&[]);
    let damaged = serve.wait_for("damaged", 1).remove(0);
    assert_eq!(
        (&damaged["version"], &damaged["damaged"]),
        (&1.into(), &serde_json::json!(["a"])),
        "{damaged}"
    );
    let ready = serve.wait_for("ready", 1).remove(0);
    assert_eq!(
        (&ready["from"], &ready["version"]),
        (&"files".into(), &2.into()),
        "no number is used twice: {ready}"
    );
    let verified = stage.world.run(&["weights", "verify", "w"]);
    assert_eq!(verified.code, Some(0), "{verified:?}");
}

/// Changes one byte of tensor `a` through the keeper's descriptor, as any process of this user can.
fn overwrite_memory_of(keeper: i32) {
    let folder = format!("/proc/{keeper}/fd");
    let is_memory = |path: &PathBuf| {
        std::fs::read_link(path).is_ok_and(|to| to.to_string_lossy().contains("warpipe-region"))
    };
    let entries = std::fs::read_dir(folder).unwrap();
    let mut paths = entries.map(|entry| entry.unwrap().path());
    let path = paths.find(is_memory).unwrap();
    let memory = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    memory.write_all_at(&[99], 299_999).unwrap();
}

#[test]
fn a_folder_with_an_index_is_loaded_with_lines_of_progress_unless_they_are_not_wanted() {
    let stage = Stage::new();
    let folder = stage.world.path("model");
    std::fs::create_dir(&folder).unwrap();
    for (file, name) in [("one.safetensors", "a"), ("two.safetensors", "b")] {
        std::fs::write(folder.join(file), safetensors(&[(name, &[7; 1000])])).unwrap();
    }
    let index = r#"{"weight_map":{"a":"one.safetensors","b":"two.safetensors"}}"#;
    std::fs::write(folder.join("model.safetensors.index.json"), index).unwrap();
    let folder = folder.to_str().unwrap();
    let serve = |options: &[&str]| {
        let mut arguments = vec!["weights", "serve", folder, "--name", "w"];
        arguments.extend(["--device", leak(device())]);
        arguments.extend(options);
        let mut serve = stage.world.start(&arguments);
        let ready = serve.wait_for_line("ready");
        assert!(ready.contains("version 1: 2 tensors"), "{ready}");
        serve.signal(Signal::TERM);
        serve.end().err
    };
    assert!(serve(&[]).contains("loading  100 %  2.0 KiB of 2.0 KiB"));
    assert_eq!(serve(&["--quiet"]), "");
}

#[test]
fn a_keeper_has_no_device_no_mapping_of_the_memory_and_no_thread_for_it() {
    let stage = Stage::new();
    let mut serve = stage.serve(&[]);
    serve.wait_for("ready", 1);
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", serve.pid())).unwrap();
    assert!(!maps.contains("warpipe-region"), "{maps}");
    assert!(!maps.contains("libcuda"), "{maps}");
    let tasks = std::fs::read_dir(format!("/proc/{}/task", serve.pid())).unwrap();
    let names: Vec<String> = tasks
        .filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("comm")).ok())
        .collect();
    assert!(
        !names.iter().any(|name| name.contains("weights")),
        "{names:?}"
    );
}

/// The look of `top --once --json` once the memory of the weights is as wanted.
fn memory_when(stage: &Stage, is_so: impl Fn(&Value) -> bool) -> Value {
    let mut last = Value::Null;
    let found = eventually(PATIENCE, || {
        let look = ["top", "--once", "--json", "--interval", "0.1"];
        last = stage.world.run(&look).json().remove(0);
        let rows = last["memory"].as_array().unwrap();
        rows.iter().any(|row| row["endpoint"] == "w" && is_so(row))
    });
    assert!(found, "it stays so: {last:#}");
    last
}

#[test]
fn the_memory_of_weights_is_seen_with_its_keeper_and_its_readers() {
    let stage = Stage::new();
    let mut serve = stage.serve(&[]);
    let bytes = serve.wait_for("ready", 1).remove(0)["bytes"].as_u64();
    let mut worker = Worker::start(&stage);
    assert_eq!(worker.reply(), expected(1));
    let (keeper, reader) = (serve.pid(), worker.pid());
    let look = memory_when(&stage, |row| {
        row["keepers"] == json!([keeper])
            && row["borrowers"] == json!([reader])
            && row["owner"].is_null()
            && row["bytes"].as_u64() >= bytes
    });
    let processes = look["processes"].as_array().unwrap();
    let process = processes.iter().find(|it| it["pid"] == keeper).unwrap();
    let kept = ["gpu_kept", "host_kept"].map(|field| process[field].as_u64().unwrap());
    assert!(kept.iter().sum::<u64>() >= bytes.unwrap(), "{process}");
    let text = stage.world.run(&["ls", "-v"]).out;
    for words in [
        format!("kept by process {keeper}"),
        format!("shared by 1 (process {reader})"),
        "without mapping it".into(),
    ] {
        assert!(text.contains(&words), "{words}: {text}");
    }

    serve.signal(Signal::KILL);
    serve.end();
    let text = stage.world.run(&["ls", "-v"]).out;
    assert!(text.contains("no owner: its importers alone"), "{text}");
    let mut next = stage.serve(&[]);
    next.wait_for("ready", 1);
    let keeper = next.pid();
    memory_when(&stage, |row| {
        row["keepers"] == json!([keeper]) && row["borrowers"] == json!([reader])
    });
    worker.kill();
}

#[test]
fn the_domain_is_chosen_with_an_option() {
    let stage = Stage::new();
    let other = stage.world.path("other");
    let other = other.to_str().unwrap();
    let mut serve = stage.serve(&["--domain", other]);
    serve.wait_for("ready", 1);
    assert!(stage.ls().is_empty());
    let listed = stage
        .world
        .run(&["weights", "ls", "--json", "--domain", other]);
    assert_eq!(listed.json()[0]["name"], "w");
    for command in ["verify", "drop"] {
        let ended = stage
            .world
            .run(&["weights", command, "w", "--domain", other]);
        assert_eq!(ended.code, Some(0), "{ended:?}");
    }
}

#[test]
fn a_version_that_a_program_publishes_is_listed_as_well() {
    let stage = Stage::new();
    let mut serve = stage.serve(&[]);
    serve.wait_for("ready", 1);
    let layout = Layout::contiguous(DType::U8, &[2]).unwrap();
    let weights = Weights::from_bytes(&open_device(), [("c", layout, &[1, 2][..])]).unwrap();
    let published = weights.publish(&stage.domain(), "w", PATIENCE).unwrap();
    let row = stage.ls().remove(0);
    assert_eq!(
        (&row["version"], &row["tensors"], &row["holders"]),
        (&published.version.into(), &1.into(), &1.into()),
        "{row}"
    );
}

#[test]
fn a_keeper_without_files_keeps_what_processes_publish_and_the_next_one_takes_it_over() {
    let stage = Stage::new();
    let device = device();
    let arguments = [
        "weights", "serve", "--name", "w", "--json", "--device", &device,
    ];
    let mut first = stage.world.start(&arguments);
    assert_eq!(first.wait_for("waiting", 1)[0]["name"], "w");
    let layout = Layout::contiguous(DType::U8, &[2]).unwrap();
    let mut builder = Weights::builder(&open_device(), [("c", layout)]).unwrap();
    builder.metadata = br#"{"model": "m", "plan": {"of": 1}, "tp": 2}"#.to_vec();
    let weights = builder.finish().unwrap();
    let published = weights.publish(&stage.domain(), "w", PATIENCE).unwrap();
    let row = stage.ls().remove(0);
    assert_eq!(
        (
            &row["state"],
            &row["metadata"]["model"],
            &row["metadata"]["tp"]
        ),
        (&"offered".into(), &"m".into(), &2.into()),
        "{row}"
    );
    let listed = stage.world.run(&["weights", "ls"]);
    assert!(listed.out.contains("\n    model=m  tp=2\n"), "{listed:?}");

    first.signal(Signal::KILL);
    first.end();
    let mut second = stage.world.start(&arguments);
    let ready = second.wait_for("ready", 1).remove(0);
    assert_eq!(
        (&ready["from"], &ready["version"]),
        (&"processes".into(), &published.version.into()),
        "{ready}"
    );
    second.signal(Signal::TERM);
    second.end();
}

#[test]
fn a_version_whose_hashes_are_still_computed_is_taken_over_once_they_are_there() {
    let stage = Stage::new();
    let device = device();
    let arguments = [
        "weights", "serve", "--name", "w", "--json", "--device", &device,
    ];
    let mut first = stage.world.start(&arguments);
    first.wait_for("waiting", 1);
    // Enough to keep the CPU busy until the next keeper checks it.
    let layout = Layout::contiguous(DType::U8, &[64 << 20]).unwrap();
    let mut builder = Weights::builder(&open_device(), [("large", layout)]).unwrap();
    builder.hashing = Hashing::Later;
    let weights = builder.finish().unwrap();
    let published = weights.publish(&stage.domain(), "w", PATIENCE).unwrap();
    first.signal(Signal::KILL);
    first.end();
    let mut second = stage.world.start(&arguments);
    let ready = second.wait_for("ready", 1).remove(0);
    assert_eq!(
        (&ready["from"], &ready["version"]),
        (&"processes".into(), &published.version.into()),
        "{ready}"
    );
    second.signal(Signal::TERM);
    second.end();
}

#[test]
fn a_version_on_another_device_than_the_chosen_one_is_not_taken_over() {
    if Device::cuda(0).is_err() {
        // Two devices are needed: this runs on a GPU, and over the fake driver.
        return;
    }
    let stage = Stage::new();
    let path = stage.file.to_str().unwrap();
    let serve = |device| {
        let arguments = ["weights", "serve", path, "--name", "w", "--json"];
        stage
            .world
            .start(&[&arguments[..], &["--device", device]].concat())
    };
    let mut first = serve("host");
    first.wait_for("ready", 1);
    let (domain, host) = (stage.domain(), Device::host());
    let weights = SharedWeights::open("w", domain.on(&host), Duration::ZERO).unwrap();
    first.signal(Signal::KILL);
    first.end();

    let mut second = serve("cuda:0");
    let elsewhere = second.wait_for("elsewhere", 1).remove(0);
    assert_eq!(
        (&elsewhere["version"], &elsewhere["device"]),
        (&1.into(), &"host".into()),
        "{elsewhere}"
    );
    let ready = second.wait_for("ready", 1).remove(0);
    assert_eq!(
        (&ready["from"], &ready["version"]),
        (&"files".into(), &2.into()),
        "{ready}"
    );
    assert_eq!(weights.info().version, 1);
    second.signal(Signal::TERM);
    second.end();

    // Without a choice, it is taken over where it lies.
    let mut third = serve("auto");
    let ready = third.wait_for("ready", 1).remove(0);
    assert_eq!(
        (&ready["from"], &ready["version"]),
        (&"processes".into(), &1.into()),
        "{ready}"
    );
}

#[test]
fn a_name_of_200_bytes_is_served_and_seen_by_every_list() {
    let stage = Stage::new();
    let name = format!("org/model/tp0of8/{}", "n".repeat(183));
    let path = stage.file.to_str().unwrap();
    let device = device();
    let arguments = [
        "weights", "serve", path, "--name", &name, "--device", &device,
    ];
    let mut serve = stage.world.start(&arguments);
    serve.wait_for_line("ready");
    for list in [
        &["weights", "ls"][..],
        &["ls"],
        &["ls", "-v"],
        &["top", "--once"],
    ] {
        let listed = stage.world.run(list);
        assert!(listed.out.contains(&name), "{list:?}: {listed:?}");
    }
    let dropped = stage.world.run(&["weights", "drop", &name]);
    assert_eq!(dropped.code, Some(0), "{dropped:?}");
    assert_eq!(serve.end().code, Some(0));
    stage.assert_nothing_is_left();
}
