//! `warpipe-bench`: that it runs, and what it writes. No figure is judged here.

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use warpipe_testkit::temporary_folder;

/// Those with figures on the host. `placement` and the graphs of `kernel_ring` are measured on a GPU
/// alone; `cargo xtask test` runs the latter over the fake driver.
const BENCHMARKS: [&str; 18] = [
    "handoff",
    "pipeline",
    "send",
    "size",
    "fanout",
    "ring",
    "queue",
    "death",
    "idle",
    "subscribers",
    "bandwidth",
    "attach",
    "semaphore",
    "legacy",
    "kernel_ring",
    "c",
    "statistics",
    "growth",
];

fn run(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_warpipe-bench"))
        .args(arguments)
        .env_remove("RUST_BACKTRACE")
        .output()
        .unwrap()
}

/// Runs it quickly on the host, which succeeds. Returns its report, and what it printed.
fn measure(bench: &str, more: &[&str]) -> (Value, String) {
    let folder = temporary_folder().unwrap();
    let report = folder.path().join("report.json");
    let out = report.to_str().unwrap();
    let output = run(&[&[bench, "--quick", "--device", "host", "--out", out], more].concat());
    assert!(output.status.success(), "{output:?}");
    let report = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    (report, String::from_utf8(output.stdout).unwrap())
}

/// The figure of a benchmark that counts calls of the driver: none.
fn no_calls(bench: &str) -> Value {
    let (report, _) = measure(bench, &[]);
    let figures = report["figures"].as_array().unwrap();
    let calls = figures.iter().find(|figure| figure["unit"] == "calls");
    let calls = calls.expect("a figure that counts calls").clone();
    assert_eq!(calls["ours"].as_f64(), Some(0.0), "{calls}");
    calls
}

#[test]
fn every_benchmark_runs_on_the_host_and_reports_itself() {
    let folder = temporary_folder().unwrap();
    let (report, printed) = measure("all", &["--svg", folder.path().to_str().unwrap()]);
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
            printed.contains(&format!("{bench}: ")),
            "{bench} is not in the table"
        );
    }
    figures.iter().for_each(check_figure);

    let ring = std::fs::read_to_string(folder.path().join("ring.svg")).unwrap();
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
fn several_benchmarks_run_in_one_call() {
    let (report, _) = measure("handoff", &["send"]);
    let figures = report["figures"].as_array().unwrap();
    let of = |bench: &str| figures.iter().any(|figure| figure["bench"] == bench);
    assert!(of("handoff") && of("send") && !of("size"), "{figures:?}");
}

#[test]
fn a_report_has_what_was_measured_before_a_benchmark_that_is_killed() {
    let folder = temporary_folder().unwrap();
    let report = folder.path().join("report.json");
    let mut run = Command::new(env!("CARGO_BIN_EXE_warpipe-bench"))
        .args([
            "send",
            "subscribers",
            "--device",
            "host",
            "--quick",
            "--out",
        ])
        .arg(&report)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(run.stdout.take().unwrap()).lines();
    // The first line of a later benchmark: the report of the earlier one is written by then.
    assert!(lines.any(|line| line.unwrap().starts_with("subscribers: ")));
    run.kill().unwrap();
    run.wait().unwrap();
    let report: Value = serde_json::from_slice(&std::fs::read(&report).unwrap()).unwrap();
    assert_eq!(report["figures"][0]["bench"], "send");
}

#[test]
fn a_send_allocates_opens_and_registers_nothing() {
    let calls = no_calls("send");
    assert!(
        calls["note"].as_str().unwrap().contains("batch"),
        "the calls that a message makes were counted: {calls}"
    );
}

#[test]
fn a_cached_open_of_a_legacy_handle_calls_no_driver() {
    let calls = no_calls("legacy");
    assert!(
        calls["note"].as_str().unwrap().ends_with("1 before them"),
        "the first open was counted: {calls}"
    );
}

#[test]
fn a_benchmark_that_cannot_run_says_so() {
    let nowhere = "/nowhere/report.json";
    for arguments in [
        &["handoff", "--devices", "2", "--device", "host"][..],
        &["--role", "{\"Nobody\":1}"],
        &["nothing"],
        &["idle", "--quick", "--device", "host", "--out", nowhere],
    ] {
        let output = run(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?}");
        assert!(said.to_lowercase().starts_with("error"), "{said}");
        assert!(!said.contains("panicked"), "{said}");
    }
}

#[test]
fn bandwidth_compares_each_direction_under_its_name_and_its_former_one() {
    for name in ["bandwidth", "dma"] {
        let (report, _) = measure(name, &[]);
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
