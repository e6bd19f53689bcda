//! The figures that the README quotes, and the check that pages for users quote no other.

use std::fmt::Write;

use super::page::{count_not_met, folder_name, number, ratios, wrapped};
use warpipe_testkit::figure::Figure;

use super::report::{Contestant, Reports};
use crate::Outcome;

/// The places of the README that are made from the reports.
const FIGURES: &str = "figures";
const DEMO: &str = "demo";

/// The roles of contestants, as `warpipe.bench` names them: a tensor that lies in a slot, and one
/// that is copied into it.
const LOAN: &str = "ours";
const COPIED: &str = "ours, copied";

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

fn figures(reports: &Reports, picture: &str) -> Outcome<String> {
    let folder = folder_name(reports);
    let mut text = format!(
        "![{}](results/{folder}/{picture})\n\n",
        picture_says(reports)
    );
    let mut sentences = String::new();
    let gpu = &reports.head()?.gpu;
    if let Some(ratios) = hand_over(reports) {
        let _ = write!(
            sentences,
            "On an {gpu}, a round trip between two processes (`warpipe-bench handoff`) takes {ratios} times \
             as long as by bare driver calls. "
        );
    }
    if let Some((least, most)) = python_ratios(reports, LOAN) {
        let _ = write!(
            sentences,
            "In Python (`warpipe.bench`) a tensor in a slot goes there and back {} to {} times as fast as by \
             `torch.multiprocessing`",
            number(least),
            number(most)
        );
        if let Some((least, most)) = python_ratios(reports, COPIED) {
            let _ = write!(
                sentences,
                ", one that `send` copies {} to {} times: a long copy loses",
                number(least),
                number(most)
            );
        }
        sentences += ". ";
    }
    if let Some((least, most)) = queue_ratios(reports) {
        let _ = write!(
            sentences,
            "PyTorch's own queues take {} to {} times their usual time with `warpipe.torch.install()`. ",
            number(least),
            number(most)
        );
    }
    let sync = |way| weights_figure(reports, &format!("new version in two engines, {way}"));
    let rival = sync("torch.multiprocessing, two engines that copy");
    if let (Some(copy), Some(lying), Some(rival)) = (
        sync("by copy, hash=device"),
        sync("in place, hash=device"),
        rival,
    ) {
        let _ = write!(
            sentences,
            "New weights, 7.7 GiB, are in two engines {} ms after the trainer's call, by copy, and {} ms in \
             place; by `torch.multiprocessing` after {} ms (`warpipe.bench.weights`). ",
            number(copy.ours),
            number(lying.ours),
            number(rival.ours)
        );
    }
    let kept = "kill in a step until the next token, with the KV cache kept";
    if let Some(figure) = weights_figure(reports, kept) {
        let _ = write!(
            sentences,
            "{} ms after the SIGKILL of a decoder, a standby that has its KV cache mapped gives the next \
             token. ",
            number(figure.ours)
        );
    }
    if let Some(figure) = gone(reports) {
        let _ = write!(
            sentences,
            "After the SIGKILL of a publisher, its subscriber knows within {} {} in the slowest \
             run. ",
            number(figure.ours),
            figure.unit
        );
    }
    let _ = write!(
        sentences,
        "[BENCHMARKS.md](BENCHMARKS.md) has the figures by which to decide, and the {} targets that are \
         not met.",
        count_not_met(reports)
    );
    text += &wrapped(&sentences);
    text.push('\n');
    Ok(text)
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

/// `1.03 (time-sliced), 1.00 (MPS)`.
fn hand_over(reports: &Reports) -> Option<String> {
    let mut parts: Vec<String> = Vec::new();
    for report in &reports.bench {
        let trips = report.figures.iter().filter(|figure| {
            figure.bench == "handoff" && figure.name.starts_with("kernel -> kernel")
        });
        for figure in trips {
            let mode = if figure.name.contains("two devices") {
                "two GPUs"
            } else {
                report.head.sharing()
            };
            if parts.iter().all(|part| !part.contains(mode)) {
                parts.push(format!("{} ({mode})", number(figure.ratio?)));
            }
        }
    }
    (!parts.is_empty()).then(|| parts.join(", "))
}

/// The least and the greatest ratio of all sizes, modes and places, of the contestants with a role.
fn python_ratios(reports: &Reports, role: &str) -> Option<(f64, f64)> {
    let all = reports.python.iter().flat_map(|report| {
        let of_role = move |row: &&Contestant| row.role == role && row.status == "measured";
        let ours = report.contestants.iter().filter(of_role);
        ours.filter_map(|row| ratios(report, row)).flatten()
    });
    least_and_most(all.map(|(mine, theirs)| theirs / mine))
}

/// The least and the greatest ratio of PyTorch's queues with and without the library's tensors.
fn queue_ratios(reports: &Reports) -> Option<(f64, f64)> {
    let figures = reports.bench.iter().flat_map(|report| &report.figures);
    let trips = figures.filter(|figure| figure.bench == "torch_queue");
    least_and_most(trips.filter_map(|figure| Some(figure.ours / figure.floor?)))
}

fn least_and_most(all: impl Iterator<Item = f64> + Clone) -> Option<(f64, f64)> {
    let least = all.clone().min_by(f64::total_cmp)?;
    Some((least, all.max_by(f64::total_cmp)?))
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
