//! The demo while it runs, on a terminal.

use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::tally::Tally;
use crate::output::count;

/// A bar over the time, with the figures so far; on standard error, and only if that is a terminal.
#[derive(Debug)]
pub struct View {
    bar: ProgressBar,
    planned: Duration,
    started: Option<Instant>,
}

impl View {
    /// Draws nothing yet.
    pub fn new(planned: Duration, hidden: bool) -> View {
        let target = if hidden { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let bar = ProgressBar::with_draw_target(Some(planned.as_millis() as u64), target);
        if let Ok(style) = ProgressStyle::with_template("  {bar:30.cyan/dim}  {msg}") {
            bar.set_style(style.progress_chars("━━╌"));
        }
        bar.set_message("starting the processes");
        View { bar, planned, started: None }
    }

    /// Draws what is known.
    pub fn show(&mut self, tally: &Tally) {
        if tally.published.items == 0 {
            self.bar.tick();
            return;
        }
        let started = *self.started.get_or_insert_with(Instant::now);
        self.bar.set_position(started.elapsed().min(self.planned).as_millis() as u64);
        self.bar.set_message(format!(
            "{} items  {} verified  {:.2} GB/s",
            count(tally.published.items),
            count(tally.verified()),
            tally.visible_gb_per_s()
        ));
    }

    /// Leaves the terminal as it was.
    pub fn clear(&self) {
        self.bar.finish_and_clear();
    }
}
