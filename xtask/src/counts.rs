//! How many checks passed, failed and were skipped, and how each tool says so.

use std::fmt;
use std::ops::AddAssign;

/// The counts of a step, or of all of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Checks that held.
    pub passed: u64,
    /// Checks that did not.
    pub failed: u64,
    /// Checks that were not made.
    pub skipped: u64,
}

/// The format in which a tool prints its counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// The exit code is the whole result: one check.
    ExitCode,
    /// `Summary [ 0.1s] 3 tests run: 2 passed, 1 failed, 0 skipped`.
    Nextest,
    /// `test result: ok. 2 passed; 0 failed; 1 ignored; ...`, once for each program.
    CargoTest,
    /// `2 passed, 0 failed, 1 skipped`, alone on the last line.
    LastLine,
}

impl Counts {
    /// One check that held.
    pub const ONE_PASSED: Counts = Counts {
        passed: 1,
        failed: 0,
        skipped: 0,
    };
    /// One check that did not.
    pub const ONE_FAILED: Counts = Counts {
        passed: 0,
        failed: 1,
        skipped: 0,
    };

    /// One check that was not made.
    pub const ONE_SKIPPED: Counts = Counts {
        passed: 0,
        failed: 0,
        skipped: 1,
    };

    /// The counts of a program from its lines and its exit. A program that failed has at least one
    /// failed check, and one that says no counts where it should has failed, whatever its exit code
    /// says.
    pub fn of(dialect: Dialect, lines: &[String], success: bool) -> Counts {
        let told = match dialect {
            Dialect::ExitCode => success.then_some(Counts::ONE_PASSED),
            Dialect::Nextest => lines.iter().rev().find_map(|line| nextest_summary(line)),
            Dialect::CargoTest => sum(lines.iter().filter_map(|line| cargo_test_result(line))),
            Dialect::LastLine => lines
                .iter()
                .rev()
                .find(|line| !line.trim().is_empty())
                .and_then(|line| bare(line)),
        };
        match told {
            Some(counts) if success || counts.failed > 0 => counts,
            Some(counts) => Counts {
                failed: 1,
                ..counts
            },
            None => Counts::ONE_FAILED,
        }
    }
}

/// Lines shown behind one that names a failure: its first reasons.
const REASONS: usize = 12;
/// Lines shown of one program that failed.
const FAILURES_MAX: usize = 80;

/// The lines of a program that failed which name its failures, each with its first reasons: the end
/// of the report repeats them, where a reader of a long output looks first. The last lines, if none
/// does.
pub fn failures(lines: &[String]) -> Vec<String> {
    let mut shown = Vec::new();
    let mut next = 0;
    for (at, line) in lines.iter().enumerate() {
        if names_failure(line) && at >= next && !shown.contains(line) {
            let reasons = lines[at + 1..].iter().take(REASONS);
            next = at + 1 + reasons.take_while(|line| !names_success(line)).count();
            shown.extend_from_slice(&lines[at..next]);
        }
    }
    if shown.is_empty() {
        shown = lines[lines.len().saturating_sub(REASONS)..].to_vec();
    }
    shown.truncate(FAILURES_MAX);
    shown
}

/// Whether a line begins a failure, as the conformance suite, pytest, nextest, the standard test
/// program or a compiler says it.
fn names_failure(line: &str) -> bool {
    let line = line.trim_start();
    [
        "FAILED ",
        "ERROR ",
        "FAIL [",
        "TIMEOUT [",
        "SIGABRT [",
        "SIGSEGV [",
        "error",
    ]
    .iter()
    .any(|word| line.starts_with(word))
        || line.ends_with("... FAILED")
        || line.contains(" panicked at ")
}

/// Whether a line says that something else has passed, or was skipped.
fn names_success(line: &str) -> bool {
    let line = line.trim_start();
    ["ok ", "skipped ", "PASS [", "SKIP ["]
        .iter()
        .any(|word| line.starts_with(word))
        || line.ends_with("... ok")
}

impl AddAssign for Counts {
    fn add_assign(&mut self, other: Counts) {
        self.passed = self.passed.saturating_add(other.passed);
        self.failed = self.failed.saturating_add(other.failed);
        self.skipped = self.skipped.saturating_add(other.skipped);
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} passed, {} failed, {} skipped",
            self.passed, self.failed, self.skipped
        )
    }
}

fn sum(all: impl Iterator<Item = Counts>) -> Option<Counts> {
    all.fold(None, |total, counts| {
        let mut total = total.unwrap_or_default();
        total += counts;
        Some(total)
    })
}

fn nextest_summary(line: &str) -> Option<Counts> {
    let (head, list) = line
        .trim_start()
        .strip_prefix("Summary [")?
        .split_once(" run: ")?;
    head.contains("test")
        .then(|| read_list(&without_parentheses(list), ','))?
}

fn cargo_test_result(line: &str) -> Option<Counts> {
    let (_, list) = line
        .trim_start()
        .strip_prefix("test result: ")?
        .split_once(". ")?;
    let counted = list
        .split(';')
        .filter(|part| !part.contains("measured") && !part.contains("filtered"));
    let counted: Vec<&str> = counted
        .filter(|part| !part.contains("finished in"))
        .collect();
    read_list(&counted.join(";"), ';')
}

fn bare(line: &str) -> Option<Counts> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [_, "passed,", _, "failed,", _, "skipped"] = words.as_slice() else {
        return None;
    };
    read_list(line, ',')
}

/// Reads `2 passed, 1 failed, ...`. A word that nobody knows counts as failed: better a false alarm
/// than a miss.
fn read_list(list: &str, separator: char) -> Option<Counts> {
    let mut counts = Counts::default();
    for part in list
        .split(separator)
        .map(str::trim)
        .filter(|part| !part.is_empty())
    {
        let (number, word) = part.split_once(' ')?;
        let number: u64 = number.parse().ok()?;
        match word.trim() {
            "passed" => counts.passed += number,
            "skipped" | "ignored" => counts.skipped += number,
            _ => counts.failed += number,
        }
    }
    Some(counts)
}

/// Drops remarks such as `(1 slow, 2 flaky)`, because their tests are counted already.
fn without_parentheses(text: &str) -> String {
    let mut depth = 0u32;
    let outside = text.chars().filter(|&character| {
        match character {
            '(' => depth += 1,
            ')' => {
                depth = depth.saturating_sub(1);
                return false;
            }
            _ => {}
        }
        depth == 0
    });
    outside.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<String> {
        text.lines().map(str::to_owned).collect()
    }

    fn counts(passed: u64, failed: u64, skipped: u64) -> Counts {
        Counts {
            passed,
            failed,
            skipped,
        }
    }

    #[test]
    fn a_nextest_summary_is_read_with_its_remarks_left_out() {
        let text = "        PASS [   0.2s] warpipe a_test\n────────────\n     Summary [   1.234s] 12 tests run: 10 passed (1 slow, 2 flaky), 2 failed, 3 skipped\n        FAIL [   0.1s] other";
        assert_eq!(
            Counts::of(Dialect::Nextest, &lines(text), false),
            counts(10, 2, 3)
        );
        let one = lines("     Summary [   0.010s] 1 test run: 1 passed, 0 skipped");
        assert_eq!(Counts::of(Dialect::Nextest, &one, true), counts(1, 0, 0));
    }

    #[test]
    fn nextest_tests_that_hang_or_do_not_start_are_failures() {
        let text = lines(
            "     Summary [  60.0s] 5/9 tests run: 2 passed, 1 failed, 1 timed out, 1 exec failed, 4 skipped",
        );
        assert_eq!(Counts::of(Dialect::Nextest, &text, false), counts(2, 3, 4));
    }

    #[test]
    fn cargo_test_results_are_summed_over_all_programs() {
        let text = "running 3 tests\ntest result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 7 filtered out; finished in 0.01s\n\ntest result: FAILED. 2 passed; 4 failed; 0 ignored; 0 measured; 0 filtered out; finished in 2.00s";
        assert_eq!(
            Counts::of(Dialect::CargoTest, &lines(text), false),
            counts(5, 4, 1)
        );
    }

    #[test]
    fn only_the_last_line_counts_where_that_is_the_agreement() {
        let text = lines("9 passed, 9 failed, 9 skipped\n5 passed, 0 failed, 2 skipped\n\n");
        assert_eq!(Counts::of(Dialect::LastLine, &text, true), counts(5, 0, 2));
        let cut = lines("5 passed, 0 failed, 2 skipped\nthread 'main' panicked");
        assert_eq!(
            Counts::of(Dialect::LastLine, &cut, true),
            Counts::ONE_FAILED
        );
    }

    #[test]
    fn a_program_that_fails_is_never_counted_as_clean() {
        assert_eq!(
            Counts::of(
                Dialect::LastLine,
                &lines("5 passed, 0 failed, 0 skipped"),
                false
            ),
            counts(5, 1, 0)
        );
        assert_eq!(
            Counts::of(
                Dialect::CargoTest,
                &lines("error: could not compile"),
                false
            ),
            Counts::ONE_FAILED
        );
        assert_eq!(
            Counts::of(Dialect::ExitCode, &[], false),
            Counts::ONE_FAILED
        );
    }

    #[test]
    fn each_failure_is_shown_once_with_its_first_reasons_and_nothing_that_passed() {
        let mut text =
            lines("     ok   0.10 s  one\n FAILED   0.20 s  two (a reason)\n    | word 0");
        text.extend((1..100).map(|number| format!("    | word {number}")));
        text.extend(lines(
            "     ok   0.10 s  three\n    FAIL [ 0.1s] four\nits reason\n    PASS [ 0.1s] five",
        ));
        text.extend(lines(&"passes\n".repeat(REASONS)));
        text.extend(lines("    FAIL [ 0.1s] four"));
        let shown = failures(&text);
        assert_eq!(shown[..2], text[1..3]);
        assert_eq!(shown.len(), 1 + REASONS + 2);
        assert_eq!(
            shown[1 + REASONS..][..2],
            lines("    FAIL [ 0.1s] four\nits reason")
        );
    }

    #[test]
    fn a_program_that_names_no_failure_shows_its_last_lines() {
        let text = lines(
            &(0..100)
                .map(|number| format!("line {number}\n"))
                .collect::<String>(),
        );
        assert_eq!(failures(&text), text[100 - REASONS..]);
        assert_eq!(failures(&[]), Vec::<String>::new());
    }

    #[test]
    fn a_program_that_exits_well_and_tells_no_counts_has_failed() {
        for dialect in [Dialect::Nextest, Dialect::CargoTest, Dialect::LastLine] {
            assert_eq!(
                Counts::of(dialect, &lines("all good"), true),
                Counts::ONE_FAILED,
                "{dialect:?}"
            );
        }
        assert_eq!(Counts::of(Dialect::ExitCode, &[], true), Counts::ONE_PASSED);
    }

    #[test]
    fn a_line_that_only_resembles_counts_is_not_one() {
        for line in [
            "3 passed",
            "x passed, 0 failed, 0 skipped",
            "-1 passed, 0 failed, 0 skipped",
            "passed, failed,",
        ] {
            assert_eq!(bare(line), None, "{line}");
        }
        assert_eq!(nextest_summary("Summary [1s] nothing was run: oddly"), None);
        assert_eq!(cargo_test_result("test result: ok"), None);
    }

    #[test]
    fn the_last_line_reads_back_as_what_was_written() {
        assert_eq!(bare(&counts(1, 2, 3).to_string()), Some(counts(1, 2, 3)));
    }
}
