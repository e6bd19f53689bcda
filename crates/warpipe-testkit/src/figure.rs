//! A figure of a benchmark: the measurement, the floor, the ratio, and the target. The benchmarks
//! write figures, and the page of results reads them.

use serde::{Deserialize, Serialize};

/// The quantiles of a distribution, in nanoseconds.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Quantiles {
    /// The number of measurements.
    pub count: usize,
    /// The median.
    pub p50: u64,
    /// The quantile 0.9.
    pub p90: u64,
    /// The quantile 0.99.
    pub p99: u64,
    /// The quantile 0.999.
    pub p999: u64,
    /// The longest.
    pub max: u64,
}

impl Quantiles {
    /// Of single measurements; none of nothing.
    pub fn of(mut samples: Vec<u64>) -> Option<Quantiles> {
        samples.sort_unstable();
        let at = |permille: usize| {
            let rank = (samples.len() * permille).div_ceil(1000).max(1);
            samples.get(rank - 1).copied()
        };
        Some(Quantiles {
            count: samples.len(),
            p50: at(500)?,
            p90: at(900)?,
            p99: at(990)?,
            p999: at(999)?,
            max: *samples.last()?,
        })
    }

    /// Each with its name, for a table or a plot.
    pub fn named(&self) -> [(&'static str, u64); 5] {
        [
            ("p50", self.p50),
            ("p90", self.p90),
            ("p99", self.p99),
            ("p99.9", self.p999),
            ("max", self.max),
        ]
    }
}

/// The median; NaN of nothing.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// The target of a figure.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Wanted {
    /// `ours / floor` at most.
    RatioAtMost(f64),
    /// `ours / floor` at least.
    RatioAtLeast(f64),
    /// `ours - floor` at most, in the figure's unit.
    BesideFloorAtMost(f64),
    /// `ours` at most, in the figure's unit.
    AtMost(f64),
    /// No target: for information.
    Nothing,
}

/// One figure.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Figure {
    /// The benchmark that made it.
    pub bench: String,
    /// What was measured.
    pub name: String,
    /// The unit of `ours` and `floor`: `us`, `ns`, `%`, `GB/s`, `calls`.
    pub unit: String,
    /// The library's.
    pub ours: f64,
    /// The bare driver's.
    pub floor: Option<f64>,
    /// `ours / floor`.
    pub ratio: Option<f64>,
    /// The target.
    pub wanted: Wanted,
    /// None without a target.
    pub met: Option<bool>,
    /// The rounds' own figures, of which `ours` and `floor` are the medians.
    #[serde(default)]
    pub ours_rounds: Vec<f64>,
    /// Likewise.
    #[serde(default)]
    pub floor_rounds: Vec<f64>,
    /// Of single measurements, in nanoseconds, where they were made.
    pub ours_ns: Option<Quantiles>,
    /// Likewise.
    pub floor_ns: Option<Quantiles>,
    /// A remark for the reader.
    #[serde(default)]
    pub note: String,
}

impl Figure {
    /// From the rounds of both.
    pub fn new(bench: &str, name: impl Into<String>, unit: &str, ours: &[f64]) -> Figure {
        Figure {
            bench: bench.to_owned(),
            name: name.into(),
            unit: unit.to_owned(),
            ours: median(ours),
            floor: None,
            ratio: None,
            wanted: Wanted::Nothing,
            met: None,
            ours_rounds: ours.to_vec(),
            floor_rounds: Vec::new(),
            ours_ns: None,
            floor_ns: None,
            note: String::new(),
        }
    }

    /// The bare driver's rounds.
    pub fn beside(mut self, floor: &[f64]) -> Figure {
        let median = median(floor);
        self.floor = Some(median);
        self.ratio = (median > 0.0).then(|| self.ours / median);
        self.floor_rounds = floor.to_vec();
        self
    }

    /// The distributions of single measurements.
    pub fn spread(mut self, ours: Vec<u64>, floor: Vec<u64>) -> Figure {
        (self.ours_ns, self.floor_ns) = (Quantiles::of(ours), Quantiles::of(floor));
        self
    }

    /// Adds a remark.
    pub fn note(mut self, note: impl Into<String>) -> Figure {
        self.note = note.into();
        self
    }

    /// Judges the figure. A figure that could not be computed is not met.
    pub fn wanted(mut self, wanted: Wanted) -> Figure {
        self.wanted = wanted;
        self.met = match wanted {
            Wanted::RatioAtMost(limit) => Some(self.ratio.is_some_and(|ratio| ratio <= limit)),
            Wanted::RatioAtLeast(limit) => Some(self.ratio.is_some_and(|ratio| ratio >= limit)),
            Wanted::BesideFloorAtMost(limit) => {
                Some(self.floor.is_some_and(|floor| self.ours - floor <= limit))
            }
            Wanted::AtMost(limit) => Some(self.ours <= limit),
            Wanted::Nothing => None,
        };
        self
    }

    /// The target in words: `<= 1.1 x`. None without one.
    pub fn target(&self) -> Option<String> {
        match self.wanted {
            Wanted::RatioAtMost(limit) => Some(format!("<= {limit} x")),
            Wanted::RatioAtLeast(limit) => Some(format!(">= {limit} x")),
            Wanted::BesideFloorAtMost(limit) => Some(format!("<= floor + {limit} {}", self.unit)),
            Wanted::AtMost(limit) => Some(format!("<= {limit} {}", self.unit)),
            Wanted::Nothing => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_just_above_its_limit_is_not_met() {
        let figure = |ours: f64| {
            Figure::new("x", "y", "us", &[ours])
                .beside(&[10.0])
                .wanted(Wanted::RatioAtMost(1.1))
        };
        assert_eq!(figure(11.0).met, Some(true));
        assert_eq!(figure(11.01).met, Some(false));
        assert_eq!(
            Figure::new("x", "y", "us", &[1.0])
                .wanted(Wanted::RatioAtMost(1.1))
                .met,
            Some(false)
        );
        let rate = |ours: f64| {
            Figure::new("x", "y", "GB/s", &[ours])
                .beside(&[100.0])
                .wanted(Wanted::RatioAtLeast(0.98))
        };
        assert_eq!([rate(98.0).met, rate(97.9).met], [Some(true), Some(false)]);
        assert_eq!(
            Figure::new("x", "y", "us", &[f64::NAN])
                .wanted(Wanted::AtMost(1.0))
                .met,
            Some(false)
        );
    }

    #[test]
    fn one_bad_round_does_not_move_the_median() {
        assert_eq!(median(&[1.0, 2.0, 900.0]), 2.0);
        assert_eq!(median(&[1.0, 2.0, 3.0, 900.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn quantiles_are_ranks_of_the_sorted_samples() {
        let quantiles = Quantiles::of((1..=1000).rev().collect()).unwrap();
        assert_eq!(
            (quantiles.p50, quantiles.p99, quantiles.p999, quantiles.max),
            (500, 990, 999, 1000)
        );
        assert!(Quantiles::of(vec![]).is_none());
    }
}
