//! The picture of the README: round trips beside the floor and torch.multiprocessing, new weights in
//! two engines beside PyTorch's own way, and the times after a SIGKILL. Drawn as SVG from the reports.

use std::fmt::Write;

use super::page::{commits, is_ours, microseconds, number, python_mode, ratios};
use super::quotes::weights_figure;
use super::report::{Head, Python, Reports};
use crate::Outcome;

const WIDTH: u32 = 920;
/// Where bars begin, and the longest one.
const BARS_AT: f64 = 310.0;
const BAR_MAX: f64 = 500.0;
const ROW: u32 = 26;

const OURS: &str = "#1f6feb";
const FLOOR: &str = "#8b949e";
const OTHER: &str = "#d29922";

/// One bar.
struct Bar {
    label: String,
    value: f64,
    color: &'static str,
}

/// A title and bars of one scale.
struct Chart {
    title: String,
    unit: &'static str,
    bars: Vec<Bar>,
}

/// The whole picture.
pub fn svg(reports: &Reports) -> Outcome<String> {
    let head = reports.head()?;
    let all = [
        round_trips(reports, head),
        syncs(reports, head),
        failovers(reports, head),
        deaths(reports, head),
    ];
    let charts: Vec<Chart> = all
        .into_iter()
        .filter(|chart| !chart.bars.is_empty())
        .collect();
    if charts.is_empty() {
        return Err(format!(
            "{} has neither a round trip nor a death to draw",
            reports.folder.display()
        ));
    }
    let rows: u32 = charts.iter().map(|chart| chart.bars.len() as u32 + 2).sum();
    let height = rows * ROW + ROW;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{height}\" \
         viewBox=\"0 0 {WIDTH} {height}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"white\"/>\n"
    );
    let mut y = ROW;
    for chart in &charts {
        draw(&mut text, chart, &mut y);
    }
    let source = format!(
        "{}, driver {}, commit {}",
        head.gpu,
        head.driver,
        commits(reports, head)
    );
    let _ = writeln!(
        text,
        "<text x=\"16\" y=\"{}\" font-size=\"11\" fill=\"#57606a\">{}</text>\n</svg>",
        height - 10,
        escaped(&source)
    );
    Ok(text)
}

fn draw(text: &mut String, chart: &Chart, y: &mut u32) {
    let _ = writeln!(
        text,
        "<text x=\"16\" y=\"{y}\" font-size=\"15\" font-weight=\"bold\">{}</text>",
        escaped(&chart.title)
    );
    let largest = chart.bars.iter().map(|bar| bar.value).fold(0.0, f64::max);
    for Bar {
        label,
        value,
        color,
    } in &chart.bars
    {
        *y += ROW;
        let length = (value / largest * BAR_MAX).max(1.0);
        let (baseline, top, label_at) = (*y, *y - 14, BARS_AT - 8.0);
        let _ = writeln!(
            text,
            "<text x=\"{label_at}\" y=\"{baseline}\" text-anchor=\"end\">{}</text>\
             <rect x=\"{BARS_AT}\" y=\"{top}\" width=\"{length:.1}\" height=\"18\" fill=\"{color}\"/>\
             <text x=\"{:.1}\" y=\"{baseline}\">{} {}</text>",
            escaped(label),
            BARS_AT + length + 6.0,
            number(*value),
            chart.unit
        );
    }
    *y += 2 * ROW;
}

/// Of Python where it was measured, of the Rust library otherwise.
fn round_trips(reports: &Reports, head: &Head) -> Chart {
    let mut bars = Vec::new();
    for report in &reports.python {
        for place in ["one device", "two devices"] {
            bars.extend(python_bars(report, place));
        }
    }
    let mut title = "Round trip of a PyTorch tensor of 1 MiB in a slot, from Python".to_owned();
    if bars.is_empty() {
        title = "Round trip of a tensor between two processes, in Rust".to_owned();
        for report in &reports.bench {
            let figures = report.figures.iter();
            let trips = figures.filter(|figure| {
                figure.bench == "handoff" && figure.name.starts_with("kernel -> kernel")
            });
            for figure in trips {
                let mode = report.head.sharing();
                bars.push(bar(format!("warpipe, {mode}"), figure.ours, OURS));
                let floor = figure
                    .floor
                    .map(|floor| bar(format!("bare driver calls, {mode}"), floor, FLOOR));
                bars.extend(floor);
            }
        }
    }
    Chart {
        title: format!("{title} ({})", head.gpu),
        unit: "us",
        bars,
    }
}

/// Ours, the floor of the same run, and the fastest usual way, for tensors of 1 MiB.
fn python_bars(report: &Python, place: &str) -> Vec<Bar> {
    let ours = report
        .contestants
        .iter()
        .find(|row| is_ours(row) && row.place == place && row.bytes == 1 << 20);
    let Some(ours) = ours else {
        return Vec::new();
    };
    let mode = python_mode(report, place);
    let floor =
        report.rust.figures.iter().find(|figure| {
            figure.name.starts_with("kernel -> kernel") && figure.name.contains(place)
        });
    let mut bars = Vec::new();
    if let Some([mine, _]) = microseconds(ours) {
        bars.push(bar(format!("warpipe, {mode}"), mine, OURS));
    }
    if let Some(floor) = floor.and_then(|figure| figure.floor) {
        bars.push(bar(format!("bare driver calls, {mode}"), floor, FLOOR));
    }
    if let Some([(_, theirs), _]) = ratios(report, ours) {
        bars.push(bar(format!("torch.multiprocessing, {mode}"), theirs, OTHER));
    }
    bars
}

/// New weights from a trainer until two engines have them.
fn syncs(reports: &Reports, head: &Head) -> Chart {
    let rows = [
        ("in place, hash=device", "warpipe, in place", OURS),
        ("by copy, hash=device", "warpipe, by copy", OURS),
        (
            "torch.multiprocessing, two engines that copy",
            "torch.multiprocessing",
            OTHER,
        ),
    ];
    let found = rows.map(|(way, label, color)| {
        let figure = weights_figure(reports, &format!("new version in two engines, {way}"))?;
        Some((bar(label.to_owned(), figure.ours, color), figure.floor))
    });
    let found: Vec<_> = found.into_iter().flatten().collect();
    let floor = found.iter().find_map(|(_, floor)| *floor);
    let floor = floor.map(|floor| bar("bare device copy".to_owned(), floor, FLOOR));
    Chart {
        title: format!(
            "New weights, 7.7 GiB, from the trainer's call until two engines have them ({})",
            head.gpu
        ),
        unit: "ms",
        bars: found.into_iter().map(|(bar, _)| bar).chain(floor).collect(),
    }
}

/// A process with a model of 7.6 GiB that is killed.
fn failovers(reports: &Reports, head: &Head) -> Chart {
    let rows = [
        (
            "kill in a step until the next token, with the KV cache kept",
            "next token, KV cache kept",
        ),
        (
            "kill in a request until its answer by a standby",
            "answer of 32 tokens, by a standby",
        ),
        (
            "kill of a worker until another one's first token",
            "first token, no standby",
        ),
    ];
    let found = rows.map(|(name, label)| {
        let figure = weights_figure(reports, name)?;
        Some(bar(label.to_owned(), figure.ours, OURS))
    });
    Chart {
        title: format!(
            "After kill -9 of a process with a model of 7.6 GiB ({})",
            head.gpu
        ),
        unit: "ms",
        bars: found.into_iter().flatten().collect(),
    }
}

/// The victims that are killed in the middle of a kernel.
fn deaths(reports: &Reports, head: &Head) -> Chart {
    let labels = [
        ("-> receive() returns PeerGone", "subscriber gets PeerGone"),
        // The same row, in the reports up to 2026-11-22.
        ("-> PublisherGone", "subscriber gets PeerGone"),
        ("-> subscribers() reports", "publisher lists the death"),
        (
            "-> its slots are lent again",
            "the dead subscriber's slots are lent again",
        ),
        ("SampleLost", "stream that waits for the dead continues"),
    ];
    let figures = reports
        .bench
        .iter()
        .flat_map(|report| &report.figures)
        .filter(|figure| figure.bench == "death" && figure.name.contains("killed mid-kernel: "));
    let mut bars: Vec<Bar> = Vec::new();
    for figure in figures {
        let label = labels.iter().find(|(end, _)| figure.name.contains(end));
        if let Some(&(_, label)) = label
            && bars.iter().all(|bar| bar.label != label)
        {
            bars.push(bar(label.to_owned(), figure.ours, OURS));
        }
    }
    Chart {
        title: format!(
            "After a SIGKILL in the middle of a kernel, the slowest of all runs ({})",
            head.gpu
        ),
        unit: "ms",
        bars,
    }
}

fn bar(label: String, value: f64, color: &'static str) -> Bar {
    Bar {
        label,
        value,
        color,
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}
