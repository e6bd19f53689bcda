//! The results of a run, for display and as JSON.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// How a case ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// The behaviour holds.
    Passed,
    /// It does not, or the case did not end.
    Failed,
    /// It could not be tried here; the reason says why.
    Skipped,
}

/// The result that a case's process leaves for the runner.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CaseResult {
    /// How it ended.
    pub outcome: Outcome,
    /// Why it failed or was skipped.
    pub reason: String,
    /// The figures that it measured.
    pub figures: BTreeMap<String, Value>,
}

impl CaseResult {
    /// A failure that the case's process could not report itself.
    pub fn failed(reason: String) -> CaseResult {
        CaseResult {
            outcome: Outcome::Failed,
            reason,
            figures: BTreeMap::new(),
        }
    }

    /// A case that was not tried, for this reason.
    pub fn skipped(reason: &str) -> CaseResult {
        CaseResult {
            outcome: Outcome::Skipped,
            reason: reason.to_string(),
            figures: BTreeMap::new(),
        }
    }
}

/// One case in the report.
#[derive(Debug, Clone, Serialize)]
pub struct Line {
    /// The behaviour.
    pub name: String,
    /// Wall time.
    pub seconds: f64,
    /// How it ended.
    #[serde(flatten)]
    pub result: CaseResult,
}

/// The whole run.
#[derive(Debug, Clone, Serialize)]
pub struct Report {
    /// `host` or `cuda`.
    pub backend: &'static str,
    /// The device's name.
    pub device: String,
    /// The driver's version, if known.
    pub driver: Option<String>,
    /// When the run began, UTC, ISO 8601.
    pub date: String,
    /// The seed of all random numbers.
    pub seed: u64,
    /// Whether it was the long mode.
    pub long: bool,
    /// The cases.
    pub cases: Vec<Line>,
}

impl Report {
    /// How many cases ended so.
    pub fn count(&self, outcome: Outcome) -> usize {
        self.cases
            .iter()
            .filter(|line| line.result.outcome == outcome)
            .count()
    }

    /// The last line of the output.
    pub fn summary(&self) -> String {
        let [passed, failed, skipped] =
            [Outcome::Passed, Outcome::Failed, Outcome::Skipped].map(|o| self.count(o));
        format!("{passed} passed, {failed} failed, {skipped} skipped")
    }
}

/// The version that the kernel's module or the driver's library reports:
/// `/proc/driver/nvidia/version`.
pub fn driver_version() -> Option<String> {
    let text = std::fs::read_to_string("/proc/driver/nvidia/version").ok()?;
    let line = text.lines().find(|line| line.starts_with("NVRM"))?;
    line.split_whitespace()
        .find(|word| word.starts_with(|c: char| c.is_ascii_digit()) && word.contains('.'))
        .map(Into::into)
}

/// A time in seconds since 1970 as `2026-01-31T23:59:59Z`.
pub fn utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let (mut year, mut left) = (1970, days);
    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    while left >= 365 + u64::from(is_leap(year)) {
        left -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let lengths = [
        31,
        28 + u64::from(is_leap(year)),
        31,
        30,
        31,
        30,
        31,
        31,
        30,
        31,
        30,
        31,
    ];
    let mut month = 0;
    while left >= lengths[month] {
        left -= lengths[month];
        month += 1;
    }
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!(
        "{year:04}-{:02}-{:02}T{hour:02}:{minute:02}:{second:02}Z",
        month + 1,
        left + 1
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_right_around_leap_days() {
        assert_eq!(utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(utc(1_709_251_199), "2024-02-29T23:59:59Z");
        assert_eq!(utc(4_107_542_399), "2100-02-28T23:59:59Z");
        assert_eq!(utc(4_107_542_400), "2100-03-01T00:00:00Z");
    }
}
