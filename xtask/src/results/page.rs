//! Every figure, as `cargo xtask results --all` prints it.

use std::collections::BTreeSet;
use std::fmt::Write;

use warpipe_testkit::figure::{Figure, Wanted};

use super::report::{Bench, Contestant, Head, Python, Reports};
use super::targets;
use crate::Outcome;

/// The benchmarks that use no GPU.
const OF_HOST: [&str; 4] = ["ring", "host rings", "host path", "python host"];

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
    let rows = rows(reports);
    let mut text = String::new();
    introduction(&mut text, reports, reports.head()?);
    parts(&mut text, reports);
    figures(&mut text, &rows);
    contestants(&mut text, reports);
    distributions(&mut text, reports, &rows);
    text += &targets::taken_out();
    Ok(text)
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

/// The figures that miss their targets.
pub fn missed(reports: &Reports) -> Vec<&Figure> {
    let figures = rows(reports).into_iter().map(|row| row.figure);
    figures.filter(|figure| figure.met == Some(false)).collect()
}

/// Every figure, once for each mode: of the report with the fewest GPUs.
pub fn rows(reports: &Reports) -> Vec<Row<'_>> {
    let of_benches = reports.bench.iter().flat_map(|report| {
        let figures = report.figures.iter();
        figures.map(|figure| (mode_of(figure, report), figure))
    });
    let of_python = reports.python.iter().flat_map(|report| {
        let figures = report.figures.iter();
        figures.map(|figure| (report.head.sharing().to_owned(), figure))
    });
    let mut seen = BTreeSet::new();
    let mut is_new = |mode: &str, figure: &Figure| {
        seen.insert((figure.bench.clone(), figure.name.clone(), mode.to_owned()))
    };
    let mut rows = Vec::new();
    for (mode, figure) in of_benches.chain(of_python) {
        if is_new(&mode, figure) {
            rows.push(Row { mode, figure });
        }
    }
    rows
}

fn mode_of(figure: &Figure, report: &Bench) -> String {
    let head = &report.head;
    let is_of_host = OF_HOST.contains(&&*figure.bench) || figure.name.contains("host rings");
    if is_of_host || report.device == "host" {
        "host".into()
    } else if figure.name.contains("two devices") {
        format!("two GPUs, {}", head.sharing())
    } else {
        head.sharing().into()
    }
}

fn figures(text: &mut String, rows: &[Row]) {
    let of = |met| {
        rows.iter()
            .filter(|row| row.figure.met == Some(met))
            .count()
    };
    let (missed, met) = (of(false), of(true));
    let _ = write!(
        text,
        "\n## Figures\n\n{missed} of {} targets are not met.\n\n\
         | figure | mode | ours | floor | ratio | wanted |\n| --- | --- | --- | --- | --- | --- |\n",
        missed + met
    );
    for Row { mode, figure } in rows {
        let floor = figure.floor.map(|floor| quantity(floor, &figure.unit));
        let (ours, floor) = (
            quantity(figure.ours, &figure.unit),
            floor.unwrap_or_default(),
        );
        let ratio = figure.ratio.map_or(String::new(), number);
        let (bench, name, wanted) = (&figure.bench, &figure.name, wanted(figure));
        let _ = writeln!(
            text,
            "| {bench}: {name} | {mode} | {ours} | {floor} | {ratio} | {wanted} |"
        );
    }
}

/// Python's round trips and their rivals'.
fn contestants(text: &mut String, reports: &Reports) {
    let versions: BTreeSet<String> = reports.python.iter().map(versions).collect();
    let _ = write!(
        text,
        "\n## Round trips from Python\n\n{}\n\n\
         | contestant | bytes | mode | chained | awaited |\n| --- | --- | --- | --- | --- |\n",
        joined(versions.iter().map(String::as_str))
    );
    for report in &reports.python {
        for row in &report.contestants {
            let (name, bytes, mode) = (&row.contestant, row.bytes, python_mode(report, &row.place));
            let [chained, awaited] = match microseconds(row) {
                Some(both) => both.map(|us| quantity(us, "us")),
                None => [format!("{}: {}", row.status, row.reason), String::new()],
            };
            let _ = writeln!(
                text,
                "| {name} | {bytes} | {mode} | {chained} | {awaited} |"
            );
        }
    }
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
        assert!(page.contains("<= 1.2 x, **not met**, by 25.0 %"), "{page}");
        assert!(
            page.contains("| bench | **not measured** | measured | **not measured** | measured |")
        );
    }

    #[test]
    fn each_figure_and_a_lacking_peer_are_named() {
        let mut host = report("timesliced", 1, &[figure("novel", "something")]);
        host["not_installed"] = serde_json::json!(["pyzmq"]);
        let page = page_of(&[("host-bench-timesliced.json", host)]);
        assert!(page.contains("| novel: something |"), "{page}");
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
