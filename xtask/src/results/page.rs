//! Every figure, as `cargo xtask results --all` prints it.

use std::collections::BTreeSet;
use std::fmt::Write;

use warpipe_testkit::figure::{Figure, Wanted};

use super::report::{Bench, Contestant, Head, Python, Reports};
use super::targets;
use crate::Outcome;

/// The tables of `warpipe-bench`: a title, a sentence, and the benchmarks that stand there.
const TABLES: &[(&str, &str, &[&str])] = &[
    (
        "Channels on the device",
        "A round trip hands a tensor to another process and back, a kernel on each side. `pipeline` \
         and `fanout` give the time per item with 8 items in flight. The floor of `size` is the \
         round trip of 4 KiB.",
        &["handoff", "size", "pipeline", "fanout"],
    ),
    (
        "Channels on the CPU",
        "`send` is the CPU time of one send; its floor is the driver's call alone. Beside the driver's \
         calls: the floor is all calls that the loan, send, receive or release makes. `ring` hands over \
         128 bytes of host memory; its floor is a bare ring in shared memory. `idle` is the CPU \
         time of a process while its subscriber waits, and `subscribers` has many of them in one \
         process.",
        &["send", "ring", "host rings", "idle", "subscribers"],
    ),
    (
        "The host path beside others",
        "128 bytes of host memory from one process to another, and from one to several. All copy the \
         bytes into a slot, and out of it. `floor` is what the figure names: iceoryx2, or a bare ring \
         in shared memory without checks. `warpipe-comparison` measures it, and \
         `python -m warpipe.bench.host` measures Python's round trips.",
        &["host path", "python host"],
    ),
    (
        "The bridge beside Zenoh",
        "Tensors from a process to one of another domain through two bridges, over TCP on loopback. \
         The floor is Zenoh's own put and subscribe of the same bytes of host memory between the \
         same processes. A channel without a bridge, from the first process to the last one, is what \
         a bridge cannot outrun: its publisher uploads each tensor from host memory, too. The example \
         `bridge_bench` of `warpipe-bridge` measures it.",
        &["bridge"],
    ),
    (
        "Deaths",
        "The worst of all runs, from the SIGKILL, the end of the victim's child, or the call of \
         `exec`. Time-sliced the victim is killed in the middle of a kernel; under MPS it is idle, \
         because there the death of a client in a kernel ends all clients of the GPU.",
        &["death"],
    ),
    (
        "Queues, semaphores, memory",
        "The floor of `queue` is a pair of channels, that of `attach` the driver's import and \
         mapping, that of `bandwidth` the process's own memory, that of `legacy` the driver's open \
         and close.",
        &["queue", "semaphore", "attach", "legacy", "bandwidth"],
    ),
    (
        "Weights",
        "8 GiB of a model of transformers. The floor of the load is one copy from page-locked memory, \
         that of the opening the driver's import and mapping, that of a new version a bare device copy, \
         that of the next token one step, that of the others safetensors and `from_pretrained`. \
         `python -m warpipe.bench.weights` measures it.",
        &["weights"],
    ),
    (
        "Queues of PyTorch",
        "A round trip of a tensor through queues of `torch.multiprocessing` with \
         `warpipe.torch.install()`; the floor is the same without it, for each allocator of PyTorch's. \
         `python -m warpipe.bench.torch_queue` measures it.",
        &["torch_queue"],
    ),
    (
        "Kernel rings",
        "Two kernels that hand items over without a CPU. The floor of the round trips is two kernels \
         with a bare word and one slot each way, that of the slots a copy of the other process's \
         memory, without a ring and without a writer, and that of a replayed CUDA graph the same \
         kernels launched one by one.",
        &["kernel_ring"],
    ),
    (
        "Ready words: one kernel beside memory operations",
        "A send to more than four subscribers signals by one kernel instead of a batch of stream \
         memory operations. The floor is memory operations alone.",
        &["broadcast"],
    ),
    (
        "CPU time through C, and of the counters",
        "The floor of `c` is the same hand-over from Rust, that of `statistics` the same without the \
         counters' page.",
        &["c", "statistics"],
    ),
    (
        "Where a pair's processes run",
        "The round trip of `handoff` with both processes kept to the CPUs that the figure names.",
        &["placement"],
    ),
];

const ONE_GPU: [&str; 2] = ["time-sliced", "MPS"];
const ALL_MODES: [&str; 4] = [
    "time-sliced",
    "MPS",
    "two GPUs, time-sliced",
    "two GPUs, MPS",
];

/// The modes in which a benchmark has figures, as a table names them.
fn modes_due(bench: &str) -> &'static [&'static str] {
    match bench {
        "handoff" | "pipeline" | "bandwidth" | "kernel_ring" | "torch_queue" => &ALL_MODES,
        "ring" | "host rings" | "host path" | "python host" => &["host"],
        // A kill ends all clients of MPS.
        "weights" => &["time-sliced"],
        "bridge" => &["host", "time-sliced"],
        _ => &ONE_GPU,
    }
}

const MODES: [&str; 4] = ["timesliced", "mps", "timesliced-x2", "mps-x2"];

/// The parts of `run` with a report, and in how many of the modes, from the first, it is due.
const PARTS: [(&str, usize); 9] = [
    ("bench", 4),
    ("python-bench", 4),
    ("torch-queue-bench", 4),
    ("weights-bench", 1),
    ("comparison", 1),
    ("host-bench", 1),
    ("bridge-bench", 1),
    ("bridge-bench-host", 1),
    ("demo", 1),
];

/// One row of a table of figures.
pub struct Row<'a> {
    pub mode: String,
    pub figure: &'a Figure,
}

/// The whole page.
pub fn page(reports: &Reports) -> Outcome<String> {
    let head = reports.head()?;
    let rows = rows(reports);
    let mut text = String::new();
    introduction(&mut text, reports, head);
    parts(&mut text, reports);
    pictures(&mut text, reports);
    not_met(&mut text, reports, &rows);
    for (title, sentence, benches) in TABLES {
        let rows: Vec<&Row> = rows
            .iter()
            .filter(|row| benches.contains(&table_of(row.figure)))
            .collect();
        let _ = write!(text, "\n## {title}\n\n{}\n", wrapped(sentence));
        if !rows.is_empty() {
            table(&mut text, &rows);
        }
        not_measured(&mut text, benches, &rows);
    }
    let others: Vec<&Row> = rows.iter().filter(|row| !is_listed(row.figure)).collect();
    if !others.is_empty() {
        text += "\n## Other figures\n";
        table(&mut text, &others);
    }
    python(&mut text, reports);
    distributions(&mut text, reports, &rows);
    text += &targets::taken_out();
    Ok(text)
}

/// Whether one of the tables has it.
fn is_listed(figure: &Figure) -> bool {
    let mut tables = TABLES.iter();
    tables.any(|(_, _, benches)| benches.contains(&table_of(figure)))
}

/// Which part of `run` was measured in which mode.
fn parts(text: &mut String, reports: &Reports) {
    *text += "\n## Measured\n\n";
    let _ = writeln!(text, "| part of `run` | {} |", MODES.join(" | "));
    *text += "| --- | --- | --- | --- | --- |\n";
    for (part, due) in PARTS {
        let cells = MODES.iter().enumerate().map(|(index, mode)| {
            let measured = (part.to_owned(), (*mode).to_owned());
            match reports.parts.contains(&measured) {
                true => "measured",
                false if index < due => "**not measured**",
                false => "",
            }
        });
        let cells: Vec<&str> = cells.collect();
        let _ = writeln!(text, "| {part} | {} |", cells.join(" | "));
    }
    let lacking = reports
        .bench
        .iter()
        .flat_map(|report| &report.not_installed);
    let lacking: BTreeSet<&str> = lacking.map(String::as_str).collect();
    if !lacking.is_empty() {
        let _ = writeln!(
            text,
            "\nNot installed there, so not measured: {}.",
            joined(lacking)
        );
    }
}

fn pictures(text: &mut String, reports: &Reports) {
    let folder = folder_name(reports);
    if !reports.pictures.is_empty() {
        let links = reports.pictures.iter().map(|name| {
            let stem = name.trim_end_matches(".svg");
            format!("[{stem}](results/{folder}/{name})")
        });
        let links: Vec<String> = links.collect();
        let _ = writeln!(text, "\nDistributions as pictures:\n{}.", links.join(",\n"));
    }
}

/// Names the modes in which a benchmark of the table has no figure.
fn not_measured(text: &mut String, benches: &[&str], rows: &[&Row]) {
    let mut missing = Vec::new();
    for bench in benches {
        let is_there = |mode: &str| {
            let mut rows = rows.iter();
            rows.any(|row| table_of(row.figure) == *bench && row.mode == mode)
        };
        let due = modes_due(bench).iter();
        let modes: Vec<&str> = due.copied().filter(|mode| !is_there(mode)).collect();
        if !modes.is_empty() {
            missing.push(format!("`{bench}` ({})", modes.join("; ")));
        }
    }
    if !missing.is_empty() {
        let said = format!("Not measured at this commit: {}.", missing.join(", "));
        let _ = writeln!(text, "\n{}", wrapped(&said));
    }
}

/// The quantiles of single measurements, in microseconds.
fn distributions(text: &mut String, reports: &Reports, rows: &[Row]) {
    *text += "\n## Distributions\n\n";
    *text += &wrapped(
        "Single measurements, in microseconds: of the figures above that have them, and of Python's \
         awaited round trips at 1 MiB.",
    );
    *text += "\n\n| figure | mode | p50 | p90 | p99 | p99.9 | max |\n";
    *text += "| --- | --- | --- | --- | --- | --- | --- |\n";
    let us = |ns: u64| number(ns as f64 / 1e3);
    for Row { mode, figure } in rows {
        for (side, quantiles) in [("ours", &figure.ours_ns), ("floor", &figure.floor_ns)] {
            if let Some(found) = quantiles {
                let cells = found.named().map(|(_, ns)| us(ns)).join(" | ");
                let (bench, name) = (&figure.bench, &figure.name);
                let _ = writeln!(text, "| {bench}: {name}, {side} | {mode} | {cells} |");
            }
        }
    }
    for report in &reports.python {
        for row in report.contestants.iter().filter(|row| row.bytes == 1 << 20) {
            if let Some(found) = &row.awaited_ns {
                let [p50, p90, p99, max] = [found.p50, found.p90, found.p99, found.max].map(us);
                let mode = python_mode(report, &row.place);
                let name = &row.contestant;
                let _ = writeln!(
                    text,
                    "| python: {name} | {mode} | {p50} | {p90} | {p99} | | {max} |"
                );
            }
        }
    }
}

pub fn introduction(text: &mut String, reports: &Reports, head: &Head) {
    let days: BTreeSet<&str> = reports
        .heads()
        .map(|head| head.date.split('T').next().unwrap_or_default())
        .collect();
    let modes: BTreeSet<&str> = reports.heads().map(|head| head.mode.as_str()).collect();
    let cpus: BTreeSet<String> = reports
        .bench
        .iter()
        .map(|report| report.cpus.to_string())
        .collect();
    let folder = folder_name(reports);
    *text += "<!-- Made by `cargo xtask results` from the reports below. Do not edit. -->\n\n";
    *text += "# Benchmarks\n\n";
    *text += &wrapped(
        "Each figure is the median of several rounds, unless its table says otherwise. Its floor is \
         the same work done with bare driver calls and words in shared memory, without the library, \
         measured in turns with it in the same run. Compare ratios, not times: `ratio` is ours \
         divided by the floor.",
    );
    let _ = write!(
        text,
        "\n\n| | |\n| --- | --- |\n| GPU | {} |\n| driver | {} |\n| CPU cores | {} |\n| commit | {} \
         |\n| date | {} |\n| modes | {} |\n| reports | [results/{folder}](results/{folder}) |\n",
        head.gpu,
        head.driver,
        joined(cpus.iter().map(String::as_str)),
        commits(reports, head),
        joined(days),
        joined(modes),
    );
    *text += "\n`warpipe-bench all` measures the figures on your machine, and `python -m warpipe.bench` \
              those of\nPython. [CONTRIBUTING.md](CONTRIBUTING.md#measurements) says how to make this \
              page.\n";
}

/// That of all reports, and where it differs that of the weights' report.
pub fn commits(reports: &Reports, head: &Head) -> String {
    let weights = reports.weights_head();
    match weights.filter(|weights| weights.commit != head.commit) {
        None => head.commit.clone(),
        Some(weights) => format!("{}; weights: {}", head.commit, weights.commit),
    }
}

fn not_met(text: &mut String, reports: &Reports, rows: &[Row]) {
    let judged = rows.iter().filter(|row| row.figure.met.is_some()).count();
    let missed: Vec<&Row> = rows
        .iter()
        .filter(|row| row.figure.met == Some(false))
        .collect();
    let python: Vec<(&Python, &Figure)> = python_figures(reports)
        .filter(|(_, figure)| figure.met == Some(false))
        .collect();
    let python_judged = python_figures(reports)
        .filter(|(_, figure)| figure.met.is_some())
        .count();
    let _ = write!(
        text,
        "\n## Not met\n\n{} of {} targets are not met.\n",
        missed.len() + python.len(),
        judged + python_judged
    );
    if !missed.is_empty() {
        table(text, &missed);
    }
    if !python.is_empty() {
        python_table(text, &python);
    }
}

/// Every figure with a target or without, each once for each mode.
pub fn all(reports: &Reports) -> Vec<&Figure> {
    let figures = rows(reports).into_iter().map(|row| row.figure);
    figures
        .chain(python_figures(reports).map(|(_, figure)| figure))
        .collect()
}

/// The figures that miss their targets.
pub fn missed(reports: &Reports) -> Vec<&Figure> {
    let mut figures = all(reports);
    figures.retain(|figure| figure.met == Some(false));
    figures
}

/// Every figure of `warpipe-bench`, once for each mode: of the report with the fewest GPUs.
pub fn rows(reports: &Reports) -> Vec<Row<'_>> {
    let mut seen = BTreeSet::new();
    let mut rows = Vec::new();
    for report in &reports.bench {
        for figure in &report.figures {
            let mode = mode_of(figure, report);
            if seen.insert((figure.bench.clone(), figure.name.clone(), mode.clone())) {
                rows.push(Row { mode, figure });
            }
        }
    }
    rows
}

/// The benchmark under which a figure is listed. The rings on the host are a part of `fanout`.
fn table_of(figure: &Figure) -> &str {
    if figure.name.contains("host rings") {
        "host rings"
    } else {
        &figure.bench
    }
}

fn mode_of(figure: &Figure, report: &Bench) -> String {
    let head = &report.head;
    if modes_due(table_of(figure)) == ["host"] || report.device == "host" {
        "host".into()
    } else if figure.name.contains("two devices") {
        format!("two GPUs, {}", head.sharing())
    } else {
        head.sharing().into()
    }
}

fn table(text: &mut String, rows: &[&Row]) {
    *text += "\n| figure | mode | ours | floor | ratio | wanted |\n| --- | --- | --- | --- | --- | --- |\n";
    for Row { mode, figure } in rows {
        let floor = figure
            .floor
            .map_or(String::new(), |floor| quantity(floor, &figure.unit));
        let ratio = figure.ratio.map_or(String::new(), number);
        let _ = writeln!(
            text,
            "| {}: {} | {mode} | {} | {floor} | {ratio} | {} |",
            figure.bench,
            figure.name,
            quantity(figure.ours, &figure.unit),
            wanted(figure)
        );
    }
}

fn python(text: &mut String, reports: &Reports) {
    *text += "\n## Python\n\n";
    if reports.python.is_empty() {
        *text += "Not measured at this commit.\n";
        return;
    }
    *text += &wrapped(
        "A round trip of a PyTorch tensor between two processes with a kernel on each side. All \
         launch the same kernel in the same way. Chained: the CPU waits for the last of 100 trips. \
         Awaited: the CPU waits for each trip (median). torch.multiprocessing is the faster of its \
         ways; `ratio` is its time divided by ours.",
    );
    let versions: BTreeSet<String> = reports.python.iter().map(versions).collect();
    let _ = write!(
        text,
        "\n\nVersions: {}.\n",
        joined(versions.iter().map(String::as_str))
    );
    *text += "\n| size | mode | warpipe, chained | torch.multiprocessing | ratio | warpipe, awaited | \
              torch.multiprocessing | ratio |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n";
    for report in &reports.python {
        for ours in report.contestants.iter().filter(|row| is_ours(row)) {
            python_row(text, report, ours);
        }
    }
    *text += "\nThe other ways at 1 MiB:\n\n| contestant | mode | chained | awaited |\n| --- | --- | --- | --- \
              |\n";
    for report in &reports.python {
        let others = report.contestants.iter().filter(|row| row.bytes == 1 << 20);
        for row in others.filter(|row| !is_ours(row) && row.role != "usual") {
            let (chained, awaited) = match (row.chained_us, &row.awaited_ns) {
                (Some(chained), Some(awaited)) => (
                    quantity(chained, "us"),
                    quantity(awaited.p50 as f64 / 1e3, "us"),
                ),
                _ => (format!("{}: {}", row.status, row.reason), String::new()),
            };
            let mode = python_mode(report, &row.place);
            let _ = writeln!(
                text,
                "| {} | {mode} | {chained} | {awaited} |",
                row.contestant
            );
        }
    }
    let beside: Vec<(&Python, &Figure)> = python_figures(reports)
        .filter(|(_, figure)| figure.name.contains("beside Rust"))
        .collect();
    if !beside.is_empty() {
        *text += "\nPython's round trip beside the Rust library's in the same run (the floor):\n";
        python_table(text, &beside);
    }
}

fn python_row(text: &mut String, report: &Python, ours: &Contestant) {
    let Some(ratios) = ratios(report, ours) else {
        return;
    };
    let size = match ours.bytes {
        bytes if bytes >= 1 << 30 => format!("{} GiB", bytes >> 30),
        bytes if bytes >= 1 << 20 => format!("{} MiB", bytes >> 20),
        bytes => format!("{} KiB", bytes >> 10),
    };
    let [chained, awaited] = ratios.map(|(mine, theirs)| {
        format!(
            "{} | {} | {}",
            quantity(mine, "us"),
            quantity(theirs, "us"),
            number(theirs / mine)
        )
    });
    let mode = python_mode(report, &ours.place);
    let _ = writeln!(text, "| {size} | {mode} | {chained} | {awaited} |");
}

fn python_table(text: &mut String, figures: &[(&Python, &Figure)]) {
    *text += "\n| figure | mode | ours | beside | ratio | wanted |\n| --- | --- | --- | --- | --- | --- |\n";
    for (report, figure) in figures {
        let _ = writeln!(
            text,
            "| python: {} | {} | {} | {} | {} | {} |",
            figure.name,
            report.head.sharing(),
            quantity(figure.ours, &figure.unit),
            figure
                .floor
                .map_or(String::new(), |floor| quantity(floor, &figure.unit)),
            figure.ratio.map_or(String::new(), number),
            wanted(figure)
        );
    }
}

fn python_figures(reports: &Reports) -> impl Iterator<Item = (&Python, &Figure)> {
    reports
        .python
        .iter()
        .flat_map(|report| report.figures.iter().map(move |figure| (report, figure)))
}

/// The contestant that stands for warpipe: a loan, filled in place.
pub fn is_ours(row: &Contestant) -> bool {
    row.role == "ours" && row.status == "measured"
}

/// Microseconds of ours and of the fastest usual way, chained and awaited.
pub fn ratios(report: &Python, ours: &Contestant) -> Option<[(f64, f64); 2]> {
    let usual: Vec<[f64; 2]> = report
        .contestants
        .iter()
        .filter(|row| {
            (row.role.as_str(), &row.place, row.bytes) == ("usual", &ours.place, ours.bytes)
        })
        .filter_map(microseconds)
        .collect();
    let mine = microseconds(ours)?;
    let best = |way: usize| usual.iter().map(|row| row[way]).min_by(f64::total_cmp);
    Some([(mine[0], best(0)?), (mine[1], best(1)?)])
}

/// Chained and awaited.
pub fn microseconds(row: &Contestant) -> Option<[f64; 2]> {
    Some([row.chained_us?, row.awaited_ns.as_ref()?.p50 as f64 / 1e3])
}

pub fn python_mode(report: &Python, place: &str) -> String {
    match place {
        "two devices" => format!("two GPUs, {}", report.head.sharing()),
        _ => report.head.sharing().into(),
    }
}

fn versions(report: &Python) -> String {
    let packages = report
        .packages
        .iter()
        .filter_map(|(name, version)| Some(format!("{name} {}", version.as_ref()?)));
    let all = std::iter::once(format!("Python {}", report.python)).chain(packages);
    all.collect::<Vec<_>>().join(", ")
}

fn wanted(figure: &Figure) -> String {
    let limit = figure.target().unwrap_or_default();
    match figure.met {
        Some(false) => format!("{limit}, **not met**{}", missed_by(figure)),
        _ => limit,
    }
}

/// `, by 7 %`: how far a figure is from its target.
fn missed_by(figure: &Figure) -> String {
    let share = |part: f64| format!(", by {} %", number(100.0 * part));
    let distance = |over: f64| format!(", by {}", quantity(over, &figure.unit));
    match (figure.wanted, figure.ratio, figure.floor) {
        (Wanted::RatioAtMost(limit), Some(ratio), _) => share(ratio / limit - 1.0),
        (Wanted::RatioAtLeast(limit), Some(ratio), _) => share(1.0 - ratio / limit),
        (Wanted::BesideFloorAtMost(limit), _, Some(floor)) => distance(figure.ours - floor - limit),
        (Wanted::AtMost(limit), _, _) => distance(figure.ours - limit),
        _ => String::new(),
    }
}

pub fn quantity(value: f64, unit: &str) -> String {
    format!("{} {unit}", number(value))
}

/// Three or four digits of a value.
pub fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 1000.0 => thousands(value.round() as i64),
        size if size >= 10.0 => format!("{value:.1}"),
        size if size >= 1.0 || size == 0.0 => format!("{value:.2}"),
        _ => format!("{value:.3}"),
    }
}

fn thousands(value: i64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn joined<'a>(words: impl IntoIterator<Item = &'a str>) -> String {
    words.into_iter().collect::<Vec<_>>().join(", ")
}

/// The name of the folder below `results/`.
pub fn folder_name(reports: &Reports) -> String {
    let name = reports.folder.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

/// A paragraph of lines of at most 100 columns.
pub fn wrapped(paragraph: &str) -> String {
    let (mut text, mut column) = (String::new(), 0);
    for word in paragraph.split_whitespace() {
        let width = word.chars().count();
        if column > 0 && column + 1 + width > 100 {
            text.push('\n');
            column = 0;
        } else if column > 0 {
            text.push(' ');
            column += 1;
        }
        text += word;
        column += width;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(mode: &str) -> serde_json::Value {
        serde_json::json!({
            "commit": "0123456", "gpu": "H100", "driver": "580", "date": "2026-11-22T00:00:00Z",
            "mode": mode
        })
    }

    fn figure(bench: &str, name: &str) -> Figure {
        Figure::new(bench, name, "us", &[1.5])
            .beside(&[1.0])
            .wanted(Wanted::RatioAtMost(1.2))
    }

    fn report(mode: &str, devices: u32, figures: &[Figure]) -> serde_json::Value {
        serde_json::json!({
            "head": head(mode), "quick": false, "device": "H100", "devices": devices, "cpus": 2,
            "figures": figures
        })
    }

    /// The page of the reports with these files' names.
    fn page_of(files: &[(&str, serde_json::Value)]) -> String {
        let folder = warpipe_testkit::temporary_folder().unwrap();
        for (name, report) in files {
            std::fs::write(folder.path().join(name), report.to_string()).unwrap();
        }
        page(&Reports::read(folder.path()).unwrap()).unwrap()
    }

    #[test]
    fn what_was_measured_with_one_gpu_and_with_two_stands_in_rows_of_its_own() {
        let ring = |place: &str| figure("kernel_ring", &format!("8 bytes, {place}"));
        let page = page_of(&[
            ("bench-mps.json", report("mps", 1, &[ring("one device")])),
            (
                "bench-mps-x2.json",
                report("mps-x2", 2, &[ring("two devices")]),
            ),
        ]);
        assert!(
            page.contains("| kernel_ring: 8 bytes, one device | MPS | 1.50 us"),
            "{page}"
        );
        assert!(
            page.contains("8 bytes, two devices | two GPUs, MPS | 1.50 us"),
            "{page}"
        );
        let missing = "`kernel_ring` (time-sliced; two GPUs, time-sliced)";
        assert!(page.contains(missing), "{page}");
        assert!(page.contains("<= 1.2 x, **not met**, by 25.0 %"), "{page}");
        assert!(
            page.contains("| bench | **not measured** | measured | **not measured** | measured |")
        );
    }

    #[test]
    fn a_figure_of_no_table_and_a_lacking_peer_are_named() {
        let mut host = report("timesliced", 1, &[figure("novel", "something")]);
        host["not_installed"] = serde_json::json!(["pyzmq"]);
        let page = page_of(&[("host-bench-timesliced.json", host)]);
        assert!(
            page.contains("## Other figures") && page.contains("| novel: something |"),
            "{page}"
        );
        assert!(page.contains("not measured: pyzmq."), "{page}");
    }

    #[test]
    fn the_bridge_on_the_host_is_told_from_the_one_with_a_gpu() {
        let bridge = [figure("bridge", "1 MiB one way")];
        let mut host = report("timesliced", 1, &bridge);
        host["device"] = "host".into();
        let page = page_of(&[
            ("bridge-bench-host-timesliced.json", host),
            (
                "bridge-bench-timesliced.json",
                report("timesliced", 1, &bridge),
            ),
        ]);
        assert!(page.contains("| bridge: 1 MiB one way | host |"), "{page}");
        assert!(
            page.contains("| bridge: 1 MiB one way | time-sliced |"),
            "{page}"
        );
    }

    #[test]
    fn a_missed_target_says_by_how_much() {
        let by = |wanted, ours: f64| {
            let figure = Figure::new("x", "y", "us", &[ours]).beside(&[10.0]);
            missed_by(&figure.wanted(wanted))
        };
        assert_eq!(by(Wanted::RatioAtMost(1.1), 22.0), ", by 100.0 %");
        assert_eq!(by(Wanted::RatioAtLeast(0.9), 4.5), ", by 50.0 %");
        assert_eq!(by(Wanted::BesideFloorAtMost(2.0), 15.0), ", by 3.00 us");
        assert_eq!(by(Wanted::AtMost(10.0), 15.0), ", by 5.00 us");
        let unknown = Figure::new("x", "y", "us", &[1.0]).wanted(Wanted::RatioAtMost(1.1));
        assert_eq!(missed_by(&unknown), "");
    }

    #[test]
    fn a_number_has_three_or_four_digits() {
        let numbers = [12_345.6, 288.25, 14.649, 1.0338, 0.0641, 0.0].map(number);
        assert_eq!(
            numbers,
            ["12,346", "288.2", "14.6", "1.03", "0.064", "0.00"]
        );
    }

    #[test]
    fn a_paragraph_keeps_to_100_columns() {
        let text = wrapped(&"word ".repeat(50));
        assert!(text.lines().all(|line| line.len() <= 100));
        assert_eq!(text.split_whitespace().count(), 50);
    }
}
