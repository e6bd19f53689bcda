//! Verdicts, as they come in.

use std::io;

use serde::Serialize;

use crate::exit::{Exit, fact_and_hint};
use crate::output::{Output, Style, styled};

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// It works.
    Ok,
    /// It is not there, and nothing is broken.
    No,
    /// It should work and does not.
    Failed,
}

/// One thing that was tried.
#[derive(Debug, Serialize)]
pub struct Check {
    check: &'static str,
    device: Option<String>,
    verdict: Verdict,
    detail: String,
    next: Option<String>,
}

impl Check {
    /// It worked; `detail` says what was done.
    pub fn ok(check: &'static str, detail: impl Into<String>) -> Check {
        Check {
            check,
            device: None,
            verdict: Verdict::Ok,
            detail: detail.into(),
            next: None,
        }
    }

    /// It is not there; `next` says how one would get it.
    pub fn no(check: &'static str, detail: impl Into<String>, next: impl Into<String>) -> Check {
        Check {
            verdict: Verdict::No,
            next: Some(next.into()),
            ..Check::ok(check, detail)
        }
    }

    /// It failed; `next` says what to do.
    pub fn failed(
        check: &'static str,
        detail: impl Into<String>,
        next: impl Into<String>,
    ) -> Check {
        Check {
            verdict: Verdict::Failed,
            ..Check::no(check, detail, next)
        }
    }

    /// The check of a trial's result. An error's own next step goes before `next`.
    pub fn from_result(check: &'static str, result: anyhow::Result<String>, next: &str) -> Check {
        match result {
            Ok(detail) => Check::ok(check, detail),
            Err(error) => {
                let (detail, own) = fact_and_hint(&error);
                Check::failed(check, detail, own.unwrap_or_else(|| next.to_owned()))
            }
        }
    }

    /// The same, where nothing is broken.
    pub fn but_no_fault(self) -> Check {
        Check {
            verdict: Verdict::No,
            ..self
        }
    }

    /// The same, of a device.
    pub fn of(self, device: &str) -> Check {
        Check {
            device: Some(device.to_owned()),
            ..self
        }
    }
}

#[derive(Serialize)]
struct Summary<'a> {
    check: &'static str,
    verdict: Verdict,
    working: &'a [String],
}

/// All verdicts so far.
#[derive(Debug)]
pub struct Report {
    output: Output,
    checks: Vec<Check>,
    working: Vec<String>,
}

impl Report {
    /// Nothing tried yet.
    pub fn new(output: Output) -> Report {
        Report {
            output,
            checks: Vec::new(),
            working: Vec::new(),
        }
    }

    /// A heading, for people.
    pub fn section(&self, title: &str) -> io::Result<()> {
        self.output.human(|| styled(Style::Bold, title))
    }

    /// Prints and keeps a verdict.
    pub fn add(&mut self, check: Check) -> anyhow::Result<()> {
        self.output.say(|| line(&check), &check)?;
        self.checks.push(check);
        Ok(())
    }

    /// The same for a check that leaves something behind.
    pub fn add_with<T>(&mut self, (check, value): (Check, Option<T>)) -> anyhow::Result<Option<T>> {
        self.add(check)?;
        Ok(value)
    }

    /// Counts `device` as working if none of its checks failed.
    pub fn judge(&mut self, device: &str) {
        let mut own = self
            .checks
            .iter()
            .filter(|check| check.device.as_deref() == Some(device));
        if own.all(|check| check.verdict != Verdict::Failed) {
            self.working.push(device.to_owned());
        }
    }

    /// The summary; well if any device works completely.
    pub fn finish(self) -> anyhow::Result<Exit> {
        let works = !self.working.is_empty();
        let verdict = if works { Verdict::Ok } else { Verdict::Failed };
        let summary = Summary {
            check: "summary",
            verdict,
            working: &self.working,
        };
        let failed = self
            .checks
            .iter()
            .filter(|check| check.verdict == Verdict::Failed)
            .count();
        let human = || {
            let working = if works {
                self.working.join(", ")
            } else {
                "nothing".to_owned()
            };
            let open = if failed > 0 {
                format!("; {failed} failed, see the next steps above")
            } else {
                String::new()
            };
            let verb = if self.working.len() > 1 {
                "work"
            } else {
                "works"
            };
            format!(
                "\n{} {verb} completely{open}",
                styled(Style::Bold, &working)
            )
        };
        self.output.say(human, &summary)?;
        Ok(if works { Exit::Done } else { Exit::Failed })
    }
}

fn line(check: &Check) -> String {
    let (style, word) = match check.verdict {
        Verdict::Ok => (Style::Green, "ok"),
        Verdict::No => (Style::Yellow, "no"),
        Verdict::Failed => (Style::Red, "failed"),
    };
    let next = check
        .next
        .as_ref()
        .map(|next| format!("\n{:36}next: {next}", ""))
        .unwrap_or_default();
    format!(
        "  {:<24}  {}  {}{next}",
        check.check,
        styled(style, &format!("{word:<6}")),
        check.detail
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_with_a_failed_check_does_not_count_as_working() {
        let mut report = Report::new(Output::new(true));
        report.checks.push(Check::ok("a", "").of("host"));
        report.checks.push(Check::ok("a", "").of("cuda:0"));
        report.checks.push(Check::failed("b", "", "").of("cuda:0"));
        report.judge("host");
        report.judge("cuda:0");
        assert_eq!(report.working, ["host"]);
    }
}
