//! The progress of a load, on standard error: a bar on a terminal, else a line for each tenth.

use std::io::{self, IsTerminal};

use crate::output::bytes;

const BAR_CELLS: u64 = 30;

/// How progress is shown.
#[derive(Debug)]
pub enum Progress {
    Hidden,
    Bar { is_drawn: bool },
    Lines { last_tenth: Option<u64> },
}

impl Progress {
    pub fn new(is_hidden: bool) -> Progress {
        if is_hidden {
            Progress::Hidden
        } else if io::stderr().is_terminal() {
            Progress::Bar { is_drawn: false }
        } else {
            Progress::Lines { last_tenth: None }
        }
    }

    /// The text that shows that `done` of `total` bytes have been read, if it is time for one.
    pub fn text(&mut self, done: u64, total: u64) -> Option<String> {
        let text = format!("{} of {}", bytes(done), bytes(total));
        match self {
            Progress::Hidden => None,
            Progress::Bar { is_drawn } => {
                *is_drawn = true;
                let bar = bar(done, total);
                Some(format!("\r  loading  [{bar}]  {text}\x1b[K"))
            }
            Progress::Lines { last_tenth } => {
                let tenth = share_of(10, done, total);
                let is_due = last_tenth.is_none_or(|last| tenth > last);
                is_due.then(|| {
                    *last_tenth = Some(tenth);
                    format!("  loading  {:>3} %  {text}\n", tenth * 10)
                })
            }
        }
    }

    /// The text that removes the bar, so that the next line begins at the left.
    pub fn end(&mut self) -> Option<String> {
        match self {
            Progress::Bar { is_drawn } => std::mem::take(is_drawn).then(|| "\r\x1b[K".to_owned()),
            _ => None,
        }
    }
}

/// How many of `parts` parts are done.
fn share_of(parts: u64, done: u64, total: u64) -> u64 {
    let share = u128::from(parts) * u128::from(done) / u128::from(total.max(1));
    share.min(u128::from(parts)) as u64
}

fn bar(done: u64, total: u64) -> String {
    let full = share_of(BAR_CELLS, done, total) as usize;
    let rest = BAR_CELLS as usize - full;
    format!("{}{}", "#".repeat(full), "-".repeat(rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_fills_with_the_bytes_and_never_overflows() {
        assert_eq!(bar(0, 4), "-".repeat(30));
        assert_eq!(bar(1, 2), format!("{}{}", "#".repeat(15), "-".repeat(15)));
        for (done, total) in [(4, 4), (5, 4), (u64::MAX, u64::MAX)] {
            assert_eq!(bar(done, total), "#".repeat(30));
        }
        assert_eq!(share_of(10, 0, 0), 0);
    }
}
