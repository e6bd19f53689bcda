//! `warpipe bench`: that it runs, and what it writes. No figure is judged here.

mod support;

use serde_json::Value;
use support::World;

const BENCHMARKS: [&str; 13] = [
    "handoff",
    "pipeline",
    "send",
    "size",
    "fanout",
    "ring",
    "queue",
    "death",
    "idle",
    "bandwidth",
    "attach",
    "semaphore",
    "legacy",
];

#[test]
fn every_benchmark_runs_on_the_host_and_reports_itself() {
    let world = World::new();
    let (report, plots) = (world.path("report.json"), world.path("plots"));
    let (out, svg) = (report.to_str().unwrap(), plots.to_str().unwrap());
    let ended = world.run(&[
        "bench", "all", "--quick", "--device", "host", "--out", out, "--svg", svg,
    ]);
    assert_eq!(ended.code, Some(0), "{}\n{}", ended.out, ended.err);

    let report: Value = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    assert_eq!(
        (&report["device"], &report["mode"], &report["quick"]),
        (&"host".into(), &"host".into(), &true.into())
    );
    let figures = report["figures"].as_array().unwrap();
    for bench in BENCHMARKS {
        assert!(
            figures.iter().any(|figure| figure["bench"] == bench),
            "no figure of {bench}"
        );
        assert!(
            ended.out.contains(&format!("{bench}: ")),
            "{bench} is not in the table"
        );
    }
    figures.iter().for_each(check_figure);

    let ring = std::fs::read_to_string(plots.join("ring.svg")).unwrap();
    assert!(
        ring.starts_with("<svg") && ring.trim_end().ends_with("</svg>"),
        "{ring}"
    );
}

/// Its fields agree with each other.
fn check_figure(figure: &Value) {
    let ours = figure["ours"]
        .as_f64()
        .unwrap_or_else(|| panic!("no number: {figure}"));
    if let (Some(floor), Some(ratio)) = (figure["floor"].as_f64(), figure["ratio"].as_f64()) {
        assert!(
            (ratio * floor - ours).abs() <= ours.abs() * 1e-6,
            "the ratio is another: {figure}"
        );
    }
    assert_eq!(
        figure["met"].is_boolean(),
        figure["wanted"] != "nothing",
        "judged without a wish: {figure}"
    );
    assert!(
        !figure["ours_rounds"].as_array().unwrap().is_empty(),
        "no rounds: {figure}"
    );
    let quantiles = &figure["ours_ns"];
    if !quantiles.is_null() {
        let values =
            ["p50", "p90", "p99", "p999", "max"].map(|name| quantiles[name].as_u64().unwrap());
        assert!(values.is_sorted(), "quantiles out of order: {figure}");
    }
}

#[test]
fn a_send_allocates_opens_and_registers_nothing() {
    let world = World::new();
    let report = world.path("report.json");
    let out = report.to_str().unwrap();
    assert_eq!(
        world
            .run(&["bench", "send", "--quick", "--device", "host", "--out", out])
            .code,
        Some(0)
    );
    let report: Value = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    let calls = report["figures"]
        .as_array()
        .unwrap()
        .iter()
        .find(|figure| figure["unit"] == "calls")
        .unwrap();
    assert_eq!(calls["ours"].as_f64(), Some(0.0), "{calls}");
    assert!(
        calls["note"].as_str().unwrap().contains("batch"),
        "the calls that a message makes were counted: {calls}"
    );
}

#[test]
fn a_cached_open_of_a_legacy_handle_calls_no_driver() {
    let world = World::new();
    let report = world.path("report.json");
    let out = report.to_str().unwrap();
    assert_eq!(
        world
            .run(&[
                "bench", "legacy", "--quick", "--device", "host", "--out", out
            ])
            .code,
        Some(0)
    );
    let report: Value = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    let calls = report["figures"]
        .as_array()
        .unwrap()
        .iter()
        .find(|figure| figure["unit"] == "calls")
        .unwrap();
    assert_eq!(calls["ours"].as_f64(), Some(0.0), "{calls}");
    assert!(
        calls["note"].as_str().unwrap().ends_with("1 before them"),
        "the first open was counted: {calls}"
    );
}

#[test]
fn a_benchmark_that_cannot_run_says_so() {
    let world = World::new();
    for arguments in [
        &["bench", "handoff", "--devices", "2", "--device", "host"][..],
        &["bench", "--role", "{\"Nobody\":1}"],
        &["bench", "nothing"],
        &[
            "bench",
            "idle",
            "--quick",
            "--device",
            "host",
            "--out",
            "/nowhere/report.json",
        ],
    ] {
        let ended = world.run(arguments);
        assert!(
            ended.code.is_some_and(|code| code != 0),
            "{arguments:?}: {:?}",
            ended.code
        );
        assert!(
            ended.err.contains("warpipe") || ended.err.contains("error"),
            "{arguments:?}: {:?}",
            ended.err
        );
        assert!(
            !ended.err.contains("panicked"),
            "{arguments:?}: {:?}",
            ended.err
        );
    }
}

#[test]
fn bandwidth_compares_each_direction_under_its_name_and_its_former_one() {
    let world = World::new();
    for name in ["bandwidth", "dma"] {
        let report = world.path("report.json");
        let out = report.to_str().unwrap();
        assert_eq!(
            world
                .run(&["bench", name, "--quick", "--device", "host", "--out", out])
                .code,
            Some(0)
        );
        let report: Value = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
        let figures = report["figures"].as_array().unwrap();
        let names: Vec<&str> = figures
            .iter()
            .map(|figure| figure["name"].as_str().unwrap())
            .collect();
        let wanted = [
            "reading an import",
            "writing an import",
            "host to an import",
            "an import to the host",
        ];
        assert_eq!(
            names,
            wanted.map(|name| format!("{name}, one device, 16 MiB"))
        );
        assert!(
            figures.iter().all(|figure| figure["ratio"].is_f64()),
            "a figure without its ratio: {figures:?}"
        );
    }
}
