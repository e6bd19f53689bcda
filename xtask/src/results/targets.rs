//! The judgement on each missed target: a gap that users are told of, or a target that decides nothing. A missed
//! target that is neither is an error of `cargo xtask results`.

use std::fmt::Write;

use warpipe_testkit::figure::{Figure, Wanted};

use super::page::{missed, wrapped};
use super::report::Reports;
use crate::Outcome;

/// Figures, by their benchmark and a part of their names.
struct Figures {
    bench: &'static str,
    name: &'static str,
}

impl Figures {
    fn has(&self, figure: &Figure) -> bool {
        figure.bench == self.bench && figure.name.contains(self.name)
    }
}

const fn figures(bench: &'static str, name: &'static str) -> Figures {
    Figures { bench, name }
}

/// A target that is missed, and that a user should know of.
struct Gap {
    figures: Figures,
    what: &'static str,
    beside: &'static str,
    remark: &'static str,
}

const GAPS: &[Gap] = &[
    Gap {
        figures: figures("pipeline", "per item"),
        what: "An item of a stream, under MPS and across two GPUs",
        beside: "bare driver calls",
        remark: "Signal and wait are two calls of the driver, where the floor needs one \
                 ([decisions](docs/design/decisions.md#order)).",
    },
    Gap {
        figures: figures("handoff", "copy to host, two devices"),
        what: "A round trip that the host of another GPU reads",
        beside: "bare driver calls",
        remark: "With a kernel as reader the target is met.",
    },
    Gap {
        figures: figures("fanout", "per item, kernels"),
        what: "An item for 4 or 8 subscribers, time-sliced",
        beside: "bare driver calls",
        remark: "Under MPS the target is met.",
    },
    Gap {
        figures: figures("send", "CPU beside the driver's calls"),
        what: "The CPU time of a send or a receive",
        beside: "the driver's calls alone",
        remark: "A send to 64 subscribers writes 64 entries.",
    },
    Gap {
        figures: figures("c", "hand-over through C"),
        what: "A hand-over through C",
        beside: "the same from Rust",
        remark: "Each call looks its objects up in a table, so a wrong pointer is an error.",
    },
    Gap {
        figures: figures("python", "warpipe from Python beside Rust"),
        what: "A round trip from Python, under MPS",
        beside: "the same from Rust",
        remark: "Time-sliced the target is met.",
    },
    Gap {
        figures: figures("torch_queue", "beside PyTorch's"),
        what: "PyTorch's own queues, with `warpipe.torch.install()`",
        beside: "without it",
        remark: "[The guide](docs/guide/pytorch.md) says what it gives for that.",
    },
    Gap {
        figures: figures("weights", "load of the files, the device open"),
        what: "The load of a model's files",
        beside: "one copy of the bytes from page-locked memory, which reads no file",
        remark: "",
    },
    Gap {
        figures: figures("weights", "new version in two engines"),
        what: "A trainer's version in two engines, by copy, or in place with hashes by the device",
        beside: "one copy by the device",
        remark: "`hash=\"device\"` reads all bytes once more; in place with `later` or `none` the target is met.",
    },
    Gap {
        figures: figures("bridge", "behind each other"),
        what: "Tensors of a GPU through two bridges",
        beside: "Zenoh with host memory",
        remark: "4 KiB behind each other lose most; on the host the target is met.",
    },
];

/// Targets that are taken out of the reports, each with the reason why it decides nothing.
const DECIDE_NOTHING: &[(Figures, &str)] = &[
    (
        figures("fanout", "host rings"),
        "no program could trust the floor, a ring without checks; iceoryx2 is the peer that users have",
    ),
    (
        figures("ring", "128 bytes one way, host, polling"),
        "no program could trust the floor, a ring without checks; iceoryx2 is the peer that users have",
    ),
    (
        figures("idle", "CPU of a process whose subscriber waits"),
        "a twentieth of a percent of one CPU",
    ),
    (
        figures("attach", "by ticket, 1 GiB"),
        "memory is opened once, in half a millisecond",
    ),
    (
        figures("weights", "open, with a context there"),
        "a model is opened once, in three milliseconds",
    ),
    (
        figures(
            "kernel_ring",
            "1 MiB slots written, and copied by the consumer, one device",
        ),
        "writer and reader share one device's memory, and the floor has no writer",
    ),
];

/// Takes the targets that decide nothing out of the reports.
pub fn take_out(reports: &mut Reports) {
    let of_benches = reports
        .bench
        .iter_mut()
        .flat_map(|report| &mut report.figures);
    for figure in of_benches {
        if DECIDE_NOTHING
            .iter()
            .any(|(figures, _)| figures.has(figure))
        {
            figure.wanted = Wanted::Nothing;
            figure.met = None;
        }
    }
}

/// The gaps, with the ratios of the figures that miss their targets.
pub fn gaps(reports: &Reports) -> Outcome<String> {
    let missed: Vec<&Figure> = missed(reports);
    if let Some(figure) = missed
        .iter()
        .find(|figure| GAPS.iter().all(|gap| !gap.figures.has(figure)))
    {
        return Err(format!(
            "{}: {} misses its target: judge it in xtask/src/results/targets.rs, as a gap that users are told of or as \
             a target that decides nothing",
            figure.bench, figure.name
        ));
    }
    let mut text = String::new();
    for gap in GAPS {
        let ratios = missed.iter().filter(|figure| gap.figures.has(figure));
        let ratios: Vec<f64> = ratios.filter_map(|figure| figure.ratio).collect();
        let [Some(least), Some(most)] =
            [f64::min, f64::max].map(|of| ratios.iter().copied().reduce(of))
        else {
            continue;
        };
        let range = match format!("{least:.2}") == format!("{most:.2}") {
            true => format!("{most:.2}"),
            false => format!("{least:.2} to {most:.2}"),
        };
        let said = format!(
            "- **{}**: {range} times {}. {}",
            gap.what, gap.beside, gap.remark
        );
        let _ = writeln!(text, "{}", wrapped(&said).replace('\n', "\n  "));
    }
    Ok(text)
}

/// The targets that were taken out, for `--all`.
pub fn taken_out() -> String {
    let mut text = "\n## Targets taken out\n\n".to_owned();
    for (figures, reason) in DECIDE_NOTHING {
        let _ = writeln!(text, "- {}, {}: {reason}.", figures.bench, figures.name);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::super::page::rows;
    use super::*;

    fn reports(figures: &[Figure]) -> Reports {
        let folder = warpipe_testkit::temporary_folder().unwrap();
        let report = serde_json::json!({
            "head": {"commit": "0123456", "gpu": "H100", "driver": "580", "date": "2026-11-22T00:00:00Z", "mode": "mps"},
            "quick": false, "device": "H100", "devices": 1, "cpus": 2, "figures": figures
        });
        std::fs::write(folder.path().join("bench-mps.json"), report.to_string()).unwrap();
        Reports::read(folder.path()).unwrap()
    }

    fn missing(bench: &str, name: &str, ours: f64) -> Figure {
        Figure::new(bench, name, "us", &[ours])
            .beside(&[1.0])
            .wanted(Wanted::RatioAtMost(1.1))
    }

    #[test]
    fn a_missed_target_that_nobody_has_judged_is_an_error() {
        let error = gaps(&reports(&[missing("novel", "something", 2.0)])).unwrap_err();
        assert!(
            error.contains("novel: something misses its target"),
            "{error}"
        );
    }

    #[test]
    fn a_gap_names_the_ratios_of_the_figures_that_miss() {
        let one = |place: &str, ours| missing("pipeline", &format!("per item, {place}"), ours);
        let met = missing("pipeline", "per item, none", 1.0);
        let text = gaps(&reports(&[
            one("one device", 1.5),
            one("two devices", 2.5),
            met,
        ]))
        .unwrap();
        assert!(
            text.contains("1.50 to 2.50 times bare driver calls"),
            "{text}"
        );
        assert_eq!(text.matches("- **").count(), 1, "{text}");
    }

    #[test]
    fn each_judgement_is_of_a_figure_that_the_reports_have() {
        let reports = Reports::read(
            &super::super::current(&crate::workspace::Workspace::find().unwrap()).unwrap(),
        )
        .unwrap();
        let all = rows(&reports);
        let judged = GAPS.iter().map(|gap| &gap.figures);
        for figures in judged.chain(DECIDE_NOTHING.iter().map(|(figures, _)| figures)) {
            let (bench, name) = (figures.bench, figures.name);
            assert!(
                all.iter().any(|row| figures.has(row.figure)),
                "{bench}: {name}"
            );
        }
    }

    #[test]
    fn a_target_that_decides_nothing_is_not_missed() {
        let read = reports(&[missing(
            "idle",
            "CPU of a process whose subscriber waits",
            9.0,
        )]);
        assert_eq!(gaps(&read).unwrap(), "");
        assert!(missed(&read).is_empty());
    }
}
