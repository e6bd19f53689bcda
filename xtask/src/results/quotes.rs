//! The figures that the README quotes, and the check that pages for users quote no other.

use std::fmt::Write;

use super::page::{folder_name, python_mode, quantity, ratios, wrapped};
use warpipe_testkit::figure::Figure;

use super::report::Reports;
use crate::Outcome;

/// The places of the README that are made from the reports.
const FIGURES: &str = "figures";
const DEMO: &str = "demo";

/// The roles of contestants, as `warpipe.bench` names them: a tensor that lies in a slot, and one
/// that is copied into it.
const LOAN: &str = "ours";
const COPIED: &str = "ours, copied";

const TWO_GPUS: &str = "two GPUs";

/// Units of what is measured.
const UNITS: &[&str] = &["us", "ns", "ms", "GB/s", "frames/s"];

/// Limits of the code, and no measurements.
const LIMITS: &[&str] = &["within 50 ms", "every 200 ms", "after 100 ms"];

/// The README with its made places replaced.
pub fn readme(old: &str, reports: &Reports, picture: &str) -> Outcome<String> {
    let text = replaced(old, FIGURES, &figures(reports, picture)?)?;
    replaced(&text, DEMO, &demo(reports))
}

fn replaced(text: &str, name: &str, content: &str) -> Outcome<String> {
    let (begin, end) = markers(name);
    let parts = text
        .split_once(&begin)
        .and_then(|(before, rest)| Some((before, rest.split_once(&end)?.1)));
    let (before, after) =
        parts.ok_or_else(|| format!("README.md lacks the lines {begin} and {end}"))?;
    Ok(format!("{before}{begin}\n{content}{end}{after}"))
}

fn markers(name: &str) -> (String, String) {
    (
        format!("<!-- results: {name} -->"),
        format!("<!-- end of {name} -->"),
    )
}

/// A row of the README's table: a job, the time that it takes, and that of the usual way.
struct Quote {
    job: String,
    ours: String,
    instead: String,
}

fn figures(reports: &Reports, picture: &str) -> Outcome<String> {
    let folder = folder_name(reports);
    let mut text = format!(
        "![{}](results/{folder}/{picture})\n\n",
        picture_says(reports)
    );
    let gpu = &reports.head()?.gpu;
    let _ = writeln!(
        text,
        "| on an {gpu} | warpipe | instead |\n| --- | --- | --- |"
    );
    for Quote { job, ours, instead } in quoted(reports) {
        let _ = writeln!(text, "| {job} | {ours} | {instead} |");
    }
    text.push('\n');
    text += &wrapped(
        "[BENCHMARKS.md](BENCHMARKS.md): each figure beside its floor or its peer, and the known gaps.",
    );
    text.push('\n');
    Ok(text)
}

/// Of what was measured alone.
fn quoted(reports: &Reports) -> Vec<Quote> {
    let mut quotes = Vec::new();
    let sync = |way| weights_figure(reports, &format!("new version in two engines, {way}"));
    if let (Some(copy), Some(lying), Some(rival)) = (
        sync("by copy, hash=device"),
        sync("in place, hash=device"),
        sync("torch.multiprocessing, two engines that copy"),
    ) {
        quotes.push(Quote {
            job: "new weights, 7.7 GiB, in two engines".into(),
            ours: format!(
                "{} in place, {} by copy",
                quantity(lying.ours, &lying.unit),
                quantity(copy.ours, &copy.unit)
            ),
            instead: format!(
                "`torch.multiprocessing`: {}",
                quantity(rival.ours, &rival.unit)
            ),
        });
    }
    let kept = "kill in a step until the next token, with the KV cache kept";
    if let Some(figure) = weights_figure(reports, kept) {
        let step = figure.floor.map(|floor| quantity(floor, &figure.unit));
        quotes.push(Quote {
            job: "`kill -9` of a decoder: the next token, from a standby with its KV cache".into(),
            ours: quantity(figure.ours, &figure.unit),
            instead: step.map_or(String::new(), |step| format!("without a kill: {step}")),
        });
    }
    for (role, bytes, job) in [
        (LOAN, 1 << 20, "a PyTorch tensor of 1 MiB there and back"),
        (COPIED, 1 << 30, "1 GiB, copied by `send`: loses"),
    ] {
        if let Some((mode, mine, theirs)) = python_trip(reports, role, bytes) {
            quotes.push(Quote {
                job: format!("{job} ({mode})"),
                ours: quantity(mine, "us"),
                instead: format!("`torch.multiprocessing`: {}", quantity(theirs, "us")),
            });
        }
    }
    let mut on_one_gpu = hand_over(reports);
    on_one_gpu.retain(|(mode, _)| *mode != TWO_GPUS);
    // Under MPS where that was measured: the time of the hand-over, and not of the time slices.
    if let Some((mode, figure)) = on_one_gpu.pop() {
        quotes.push(Quote {
            job: format!("a round trip, kernel to kernel ({mode})"),
            ours: quantity(figure.ours, &figure.unit),
            instead: figure.floor.map_or(String::new(), |floor| {
                format!("bare driver calls: {}", quantity(floor, &figure.unit))
            }),
        });
    }
    if let Some(figure) = gone(reports) {
        quotes.push(Quote {
            job: "`kill -9` of a publisher: its subscriber knows (slowest run)".into(),
            ours: quantity(figure.ours, &figure.unit),
            instead: "-".into(),
        });
    }
    quotes
}

/// The mode, our time and that of the fastest usual way: under MPS where that was measured.
fn python_trip(reports: &Reports, role: &str, bytes: u64) -> Option<(String, f64, f64)> {
    let mut trips = reports.python.iter().flat_map(|report| {
        let rows = report
            .contestants
            .iter()
            .filter(move |row| row.role == role && row.bytes == bytes && row.status == "measured");
        rows.filter_map(move |row| {
            let [(mine, theirs), _] = ratios(report, row)?;
            Some((python_mode(report, &row.place), mine, theirs))
        })
    });
    let trips: Vec<_> = trips.by_ref().collect();
    let under_mps = trips.iter().find(|(mode, ..)| mode == "MPS");
    under_mps.or(trips.first()).cloned()
}

/// What the picture shows, in words: of what was measured alone.
pub fn picture_says(reports: &Reports) -> &'static str {
    match weights_figure(reports, "new version in two engines, by copy, hash=device") {
        Some(_) => "Round trips, new weights in two engines, and the times after a SIGKILL",
        None => "Round trips, and the times after a SIGKILL",
    }
}

/// A figure of `warpipe.bench.weights`, by its name there.
pub fn weights_figure<'a>(reports: &'a Reports, name: &str) -> Option<&'a Figure> {
    let mut figures = reports.bench.iter().flat_map(|report| &report.figures);
    figures.find(|figure| figure.bench == "weights" && figure.name == name)
}

/// The round trip of each mode.
fn hand_over(reports: &Reports) -> Vec<(&'static str, &Figure)> {
    let mut trips: Vec<(&'static str, &Figure)> = Vec::new();
    for report in &reports.bench {
        let found = report.figures.iter().filter(|figure| {
            figure.bench == "handoff" && figure.name.starts_with("kernel -> kernel")
        });
        for figure in found {
            let mode = if figure.name.contains("two devices") {
                TWO_GPUS
            } else {
                report.head.sharing()
            };
            if trips.iter().all(|(seen, _)| *seen != mode) {
                trips.push((mode, figure));
            }
        }
    }
    trips
}

fn gone(reports: &Reports) -> Option<&Figure> {
    let figures = reports.bench.iter().flat_map(|report| &report.figures);
    figures
        .filter(|figure| figure.bench == "death")
        .find(|figure| {
            let measured = figure.name.split_once("killed mid-kernel: kill -> ");
            // The second is the name of the same row in the reports up to 2026-11-22.
            measured.is_some_and(|(_, end)| {
                ["receive() returns PeerGone", "PublisherGone"].contains(&end)
            })
        })
}

/// The part of the demo in which the publisher is killed, as one subscriber sees it.
fn demo(reports: &Reports) -> String {
    let gpu = reports.demo.first().map(|demo| demo.head.gpu.as_str());
    let gpu = gpu.map_or(String::new(), |gpu| format!("   # {gpu}, in part"));
    let mut text = format!("```console\n$ cargo run --release -- demo{gpu}\n");
    let lines = reports.demo.first().map(|demo| demo.output.as_slice());
    let lines = lines.unwrap_or_default();
    let part = lines
        .iter()
        .skip_while(|line| !line.contains("death of the publisher"))
        .take_while(|line| !line.is_empty());
    for line in part.filter(|line| line.contains("is killed") || line.contains("subscriber 2")) {
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text += "```\n";
    text
}

/// An error for each line that quotes a measured figure outside of the places that are made.
pub fn check_no_other_figure(name: &str, text: &str) -> Outcome<()> {
    let mut made = false;
    for (index, line) in text.lines().enumerate() {
        if line.starts_with("<!-- results: ") {
            made = true;
        } else if line.starts_with("<!-- end of ") {
            made = false;
        } else if !made && let Some(figure) = measured(line) {
            return Err(format!(
                "{name}:{}: \"{figure}\" is a figure that no report vouches for; link to \
                 BENCHMARKS.md instead, or name a limit of the code in LIMITS of \
                 xtask/src/results/quotes.rs",
                index + 1
            ));
        }
    }
    Ok(())
}

/// The first number with a unit of time or rate.
fn measured(line: &str) -> Option<String> {
    let mut line = line.to_owned();
    for limit in LIMITS {
        line = line.replace(limit, "");
    }
    let words: Vec<&str> = line
        .split(|character: char| character.is_whitespace() || "(),;:|".contains(character))
        .filter(|word| !word.is_empty())
        .collect();
    words.windows(2).find_map(|pair| {
        let (number, unit) = (pair[0], pair[1].trim_end_matches('.'));
        let is_number = number.ends_with(|character: char| character.is_ascii_digit());
        let is_ratio = unit == "times" && number.contains('.');
        (is_number && (UNITS.contains(&unit) || is_ratio)).then(|| format!("{number} {unit}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_outside_of_the_made_places_is_found() {
        let quoted = "A round trip takes 11.4 us.";
        assert!(check_no_other_figure("x", quoted).is_err());
        assert!(check_no_other_figure("x", "| 1.02 times (MPS)").is_err());
        assert!(check_no_other_figure("x", "Ctrl-C ends a wait within 50 ms, 3 times").is_ok());
        let made = format!("<!-- results: demo -->\n{quoted}\n<!-- end of demo -->\n");
        assert!(check_no_other_figure("x", &made).is_ok());
        assert!(check_no_other_figure("x", &format!("{made}{quoted}")).is_err());
    }

    #[test]
    fn only_the_lines_between_the_markers_are_replaced() {
        let old = "a\n<!-- results: demo -->\nold\n<!-- end of demo -->\nb\n";
        let new = replaced(old, DEMO, "new\n").unwrap();
        assert_eq!(
            new,
            "a\n<!-- results: demo -->\nnew\n<!-- end of demo -->\nb\n"
        );
        assert!(replaced("a\n", DEMO, "new\n").is_err());
    }
}
