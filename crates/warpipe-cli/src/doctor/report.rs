//! Verdicts, as they come in.

use std::io;

use serde::Serialize;
use serde_json::json;
use warpipe::{DeviceFault, Error};

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
        Check::no(check, detail, next).but(Verdict::Failed)
    }

    fn but(self, verdict: Verdict) -> Check {
        Check { verdict, ..self }
    }

    /// The check of a trial's result. An error's own next step goes before `next`.
    pub fn from_result(check: &'static str, result: anyhow::Result<String>, next: &str) -> Check {
        match result {
            Ok(detail) => Check::ok(check, detail),
            Err(error) => {
                let (detail, own) = fact_and_hint(&error);
                // There is no such hardware, and nothing is broken.
                let is_absent = matches!(
                    error.downcast_ref(),
                    Some(Error::Device {
                        fault: DeviceFault::NoDriver | DeviceFault::NoGpu | DeviceFault::OutOfReach,
                        ..
                    })
                );
                let check = Check::no(check, detail, own.unwrap_or_else(|| next.to_owned()));
                match is_absent {
                    true => check,
                    false => check.but(Verdict::Failed),
                }
            }
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
        let (verdict, exit) = match self.working.is_empty() {
            false => (Verdict::Ok, Exit::Done),
            true => (Verdict::Failed, Exit::Failed),
        };
        let failed = self.checks.iter();
        let failed = failed.filter(|check| check.verdict == Verdict::Failed);
        let failed = failed.count();
        let human = || {
            let working = match self.working.len() {
                0 => "nothing".to_owned(),
                _ => self.working.join(", "),
            };
            let open = match failed {
                0 => String::new(),
                _ => format!("; {failed} failed, see the next steps above"),
            };
            let verb = match self.working.len() {
                2.. => "work",
                _ => "works",
            };
            let working = styled(Style::Bold, &working);
            format!("\n{working} {verb} completely{open}")
        };
        let summary = json!({ "check": "summary", "verdict": verdict, "working": self.working });
        self.output.say(human, &summary)?;
        Ok(exit)
    }
}

fn line(check: &Check) -> String {
    let (style, word) = match check.verdict {
        Verdict::Ok => (Style::Green, "ok"),
        Verdict::No => (Style::Yellow, "no"),
        Verdict::Failed => (Style::Red, "failed"),
    };
    let (name, verdict) = (check.check, styled(style, &format!("{word:<6}")));
    let mut line = format!("  {name:<24}  {verdict}  {}", check.detail);
    if let Some(next) = &check.next {
        line += &format!("\n{:36}next: {next}", "");
    }
    line
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
