//! BENCHMARKS.md, from the reports.

use std::collections::BTreeSet;
use std::fmt::Write;

use warpipe_testkit::figure::Figure;

use super::report::{Contestant, Head, Python, Reports};
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
         in shared memory without checks. `warpipe-comparison` measures it.",
        &["host path"],
    ),
    (
        "The bridge beside Zenoh",
        "Tensors from a process to one of another domain through two bridges, over TCP on loopback. \
         The floor is Zenoh's own put and subscribe of the same bytes of host memory between the \
         same processes, with the bridges' settings. The example `bridge_bench` of `warpipe-bridge` \
         measures it.",
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
         that of the opening the driver's import and mapping, that of the others safetensors and \
         `from_pretrained`. `python -m warpipe.bench.weights` measures it.",
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
         memory, without a ring and without a writer.",
        &["kernel_ring"],
    ),
    (
        "Ready words: one kernel beside a batch of writes",
        "A send to more than four subscribers signals by one kernel instead of a batch of stream \
         memory operations. The floor is the batch.",
        &["broadcast"],
    ),
];

/// One row of a table of figures.
struct Row<'a> {
    mode: String,
    figure: &'a Figure,
}

/// The whole page.
pub fn page(reports: &Reports) -> Outcome<String> {
    let head = reports.head()?;
    let rows = rows(reports);
    let mut text = String::new();
    introduction(&mut text, reports, head);
    not_met(&mut text, reports, &rows);
    for (title, sentence, benches) in TABLES {
        let rows: Vec<&Row> = rows
            .iter()
            .filter(|row| benches.contains(&table_of(row.figure)))
            .collect();
        let _ = write!(text, "\n## {title}\n\n{}\n", wrapped(sentence));
        if rows.is_empty() {
            text += "\nNot measured at this commit.\n";
        } else {
            table(&mut text, &rows);
        }
    }
    python(&mut text, reports);
    Ok(text)
}

fn introduction(text: &mut String, reports: &Reports, head: &Head) {
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
        head.commit,
        joined(days),
        joined(modes),
    );
    *text += "\n`warpipe-bench all` measures the figures on your machine, and `python -m warpipe.bench` \
              those of\nPython. [CONTRIBUTING.md](CONTRIBUTING.md#measurements) says how to make this \
              page.\n";
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

/// The number of targets that are not met.
pub fn count_not_met(reports: &Reports) -> usize {
    let rows = rows(reports);
    let missed = rows.iter().filter(|row| row.figure.met == Some(false));
    let python = python_figures(reports).filter(|(_, figure)| figure.met == Some(false));
    missed.count() + python.count()
}

/// Every figure of `warpipe-bench`, once for each mode: of the report with the fewest GPUs.
fn rows(reports: &Reports) -> Vec<Row<'_>> {
    let mut seen = BTreeSet::new();
    let mut rows = Vec::new();
    for report in &reports.bench {
        for figure in &report.figures {
            let mode = mode_of(figure, &report.head);
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

fn mode_of(figure: &Figure, head: &Head) -> String {
    if ["ring", "host rings", "host path"].contains(&table_of(figure)) {
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
        Some(false) => format!("{limit}, **not met**"),
        _ => limit,
    }
}

fn quantity(value: f64, unit: &str) -> String {
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
