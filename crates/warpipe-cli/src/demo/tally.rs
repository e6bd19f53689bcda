//! What the demo's parent knows, and whether it is good.

use std::time::Duration;

use serde::Serialize;

use super::crew::{Ending, Member};
use super::event::{Event, Published, Received};
use crate::output::{Style, bytes, count, duration, printable, styled, table};
use crate::process;
use crate::statistics::Histogram;

/// The first member of the crew.
pub const PUBLISHER: usize = 0;

/// Everything told so far. Subscribers are members 1 to N.
#[derive(Debug)]
pub struct Tally {
    pub item_bytes: u64,
    pub published: Published,
    pub received: Vec<Received>,
    latency: Histogram,
    failures: Vec<String>,
}

/// For programs.
#[derive(Debug, Serialize)]
pub struct Summary<'a> {
    event: &'static str,
    ok: bool,
    interrupted: bool,
    device: &'a str,
    why: &'a str,
    subscribers: usize,
    item_bytes: u64,
    items: u64,
    verified: u64,
    wrong: u64,
    dropped: u64,
    seconds: f64,
    visible_gb_per_s: f64,
    latency_p50_us: Option<f64>,
    latency_p99_us: Option<f64>,
    failures: &'a [String],
}

impl Tally {
    /// Nothing told yet.
    pub fn new(subscribers: usize, item_bytes: u64) -> Tally {
        Tally {
            item_bytes,
            published: Published::default(),
            received: vec![Received::default(); subscribers],
            latency: Histogram::default(),
            failures: Vec::new(),
        }
    }

    /// Takes in a line of a member.
    pub fn note(&mut self, member: usize, event: Event) {
        let subscriber = member.checked_sub(1).and_then(|index| self.received.get_mut(index));
        match (event, subscriber) {
            (Event::Published(published), None) => self.published = published,
            (Event::Received(counts), Some(received)) => *received = counts,
            (Event::Finished { counts, latency }, Some(received)) => {
                *received = counts;
                self.latency.merge(&latency);
            }
            (event, _) => self.fail(format!("process {member} said what it never says: {event:?}")),
        }
    }

    /// Takes in how a member ended.
    pub fn ended(&mut self, member: &Member, ending: &Ending) {
        if ending.status.success() {
            return;
        }
        let why = process::ending(ending.status);
        let complaint = printable(&ending.complaint.lines().collect::<Vec<_>>().join(" "));
        let said = if complaint.is_empty() { String::new() } else { format!(": {complaint}") };
        self.fail(format!("{} (process {}) {why}{said}", member.role, member.pid));
    }

    /// Something that must not happen did.
    pub fn fail(&mut self, failure: String) {
        self.failures.push(failure);
    }

    /// Items that arrived whole, over all subscribers.
    pub fn verified(&self) -> u64 {
        self.received.iter().map(|received| received.verified).sum()
    }

    fn wrong(&self) -> u64 {
        self.received.iter().map(|received| received.wrong).sum()
    }

    fn dropped(&self) -> u64 {
        self.received.iter().map(|received| received.dropped).sum()
    }

    fn due(&self) -> u64 {
        self.published.items * self.received.len() as u64
    }

    /// From the first send to the last check.
    pub fn elapsed(&self) -> Duration {
        let last_ns = self.received.iter().map(|received| received.last_ns).max().unwrap_or(0);
        Duration::from_nanos(last_ns.saturating_sub(self.published.first_ns))
    }

    /// Billions of bytes a second that subscribers could see without a copy.
    pub fn visible_gb_per_s(&self) -> f64 {
        let seconds = self.elapsed().as_secs_f64();
        let seen = (self.verified() as f64) * self.item_bytes as f64;
        if self.published.first_ns == 0 || seconds == 0.0 { 0.0 } else { seen / seconds / 1e9 }
    }

    /// Whether every item reached every subscriber whole, and every process ended well.
    pub fn is_good(&self) -> bool {
        self.failures.is_empty() && self.wrong() == 0 && self.published.items > 0 && self.verified() == self.due()
    }

    /// For programs.
    pub fn summary<'a>(&'a self, device: &'a str, why: &'a str, interrupted: bool) -> Summary<'a> {
        let microseconds = |permille| self.latency.quantile(permille).map(|latency| latency.as_nanos() as f64 / 1e3);
        Summary {
            event: "result",
            ok: self.is_good(),
            interrupted,
            device,
            why,
            subscribers: self.received.len(),
            item_bytes: self.item_bytes,
            items: self.published.items,
            verified: self.verified(),
            wrong: self.wrong(),
            dropped: self.dropped(),
            seconds: self.elapsed().as_secs_f64(),
            visible_gb_per_s: self.visible_gb_per_s(),
            latency_p50_us: microseconds(500),
            latency_p99_us: microseconds(990),
            failures: &self.failures,
        }
    }

    /// For people.
    pub fn table(&self, device: &str, why: &str, interrupted: bool) -> String {
        let rows = [
            ("device", format!("{device} ({why})")),
            (
                "items",
                format!(
                    "{} of {}, to {} subscribers",
                    count(self.published.items),
                    bytes(self.item_bytes),
                    self.received.len()
                ),
            ),
            ("verified", format!("{} of {}, every word, on the device", count(self.verified()), count(self.due()))),
            ("made visible", format!("{:.2} GB/s (bytes x subscribers / time), no copy", self.visible_gb_per_s())),
            ("latency", self.latencies()),
            ("dropped", count(self.dropped())),
            ("time", duration(self.elapsed())),
        ];
        format!("{}\n{}", table(&rows), self.verdict(interrupted))
    }

    fn latencies(&self) -> String {
        match (self.latency.quantile(500), self.latency.quantile(990)) {
            (Some(p50), Some(p99)) => {
                format!("p50 {}, p99 {} (send to verified, under full load)", duration(p50), duration(p99))
            }
            _ => "nothing arrived".to_owned(),
        }
    }

    fn verdict(&self, interrupted: bool) -> String {
        let mut lines: Vec<String> = self.failures.iter().map(|failure| red(failure)).collect();
        if self.wrong() > 0 {
            lines.push(red(&format!("{} items held wrong words or came out of order", count(self.wrong()))));
        }
        if interrupted {
            lines.push(styled(Style::Yellow, "  interrupted: the figures are those until then"));
        } else if self.is_good() {
            lines.push(styled(Style::Green, "  every checksum held, every process ended well"));
        } else if lines.is_empty() {
            lines.push(red("not everything that was sent was verified"));
        }
        lines.join("\n")
    }
}

fn red(text: &str) -> String {
    styled(Style::Red, &format!("  failed: {text}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(items: u64, verified: [u64; 2], wrong: u64) -> Tally {
        let mut tally = Tally::new(2, 1 << 20);
        tally.note(PUBLISHER, Event::Published(Published { items, first_ns: 1_000_000_000 }));
        for (index, verified) in verified.into_iter().enumerate() {
            let counts = Received { verified, wrong, dropped: 0, last_ns: 2_000_000_000 };
            tally.note(index + 1, Event::Finished { counts, latency: Histogram::default() });
        }
        tally
    }

    #[test]
    fn it_is_good_only_if_everything_arrived_whole() {
        assert!(told(5, [5, 5], 0).is_good());
        assert!(!told(5, [5, 4], 0).is_good(), "one is missing");
        assert!(!told(5, [5, 5], 1).is_good(), "one is wrong");
        assert!(!told(0, [0, 0], 0).is_good(), "nothing was sent");
        let mut tally = told(5, [5, 5], 0);
        tally.fail("subscriber 1 was killed".into());
        assert!(!tally.is_good() && tally.table("host", "asked for", false).contains("subscriber 1 was killed"));
    }

    #[test]
    fn what_was_made_visible_counts_every_subscriber() {
        let tally = told(500, [500, 500], 0);
        assert_eq!(tally.visible_gb_per_s(), 1000.0 * 1_048_576.0 / 1e9);
    }

    #[test]
    fn a_line_from_the_wrong_process_is_a_failure() {
        let mut tally = told(5, [5, 5], 0);
        tally.note(2, Event::Published(Published::default()));
        assert!(!tally.is_good());
    }
}
