//! Standard output: lines for people, or one JSON object a line for programs.

use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use serde::Serialize;

use crate::interrupt::{self, LOOK};
use crate::poll::poll;

/// The most bytes of a write: so many fit into a pipe that has any room.
const PIPE_BUF: usize = 4096;

/// Where results go. Errors and progress go to standard error.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    json: bool,
}

impl Output {
    /// For people, or as JSON.
    pub fn new(json: bool) -> Output {
        Output { json }
    }

    /// One thing to say, in whichever form was asked for.
    pub fn say(self, human: impl FnOnce() -> String, json: &impl Serialize) -> io::Result<()> {
        if self.json {
            self.json_line(json)
        } else {
            self.line(&human())
        }
    }

    /// A line that only people want.
    pub fn human(self, text: impl FnOnce() -> String) -> io::Result<()> {
        if self.json {
            Ok(())
        } else {
            self.line(&text())
        }
    }

    /// A line that only programs want.
    pub fn json_only(self, json: &impl Serialize) -> io::Result<()> {
        if self.json {
            self.json_line(json)
        } else {
            Ok(())
        }
    }

    fn json_line(self, json: &impl Serialize) -> io::Result<()> {
        self.line(&serde_json::to_string(json)?)
    }

    fn line(self, text: &str) -> io::Result<()> {
        write_out(format!("{text}\n").as_bytes())
    }
}

/// Writes to standard output. A reader that is stopped or hangs is waited for until a signal asks for
/// an end, which [`Interrupt`](crate::interrupt::Interrupt) notes.
pub fn write_out(bytes: &[u8]) -> io::Result<()> {
    // With its kind, by which a reader that went away and an interrupt are told apart.
    write_unless(interrupt::came, io::stdout().as_fd(), bytes).map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("standard output cannot be written: {error}"),
        )
    })
}

/// The same for standard output or standard error. A reader is not waited for once `is_over`.
///
/// # Errors
/// [`io::ErrorKind::Interrupted`]: it is over, and there is no room.
pub fn write_unless(
    is_over: impl Fn() -> bool,
    to: BorrowedFd<'_>,
    mut bytes: &[u8],
) -> io::Result<()> {
    // Not through the buffers of `std`: the end of the process would wait for what is left in them.
    while !bytes.is_empty() {
        let is_last_try = is_over();
        let limit = if is_last_try { Duration::ZERO } else { LOOK };
        let mut room = [PollFd::from_borrowed_fd(to, PollFlags::OUT)];
        if !poll(&mut room, Some(limit))? {
            if is_last_try {
                return Err(io::ErrorKind::Interrupted.into());
            }
            continue;
        }
        match rustix::io::write(to, &bytes[..bytes.len().min(PIPE_BUF)]) {
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::INTR | Errno::AGAIN) => {}
            // Closed by whoever started this program: nobody wants it.
            Err(Errno::BADF) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Emphasis on a terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Style {
    #[default]
    Plain,
    Bold,
    Dim,
    Underlined,
    Reversed,
    /// All is well.
    Green,
    /// Stopped, stalled, absent.
    Yellow,
    /// Wrong, dead, left by the dead.
    Red,
}

impl Style {
    /// The sequence that sets the style (ECMA-48, SGR), with or without its colour.
    pub fn sequence(self, has_colours: bool) -> &'static str {
        match (self, has_colours) {
            (Style::Bold, _) | (Style::Red, false) => "\x1b[0;1m",
            (Style::Dim, _) => "\x1b[0;2m",
            (Style::Underlined, _) => "\x1b[0;4m",
            (Style::Reversed, _) => "\x1b[0;7m",
            (Style::Green, true) => "\x1b[0;32m",
            (Style::Yellow, true) => "\x1b[0;33m",
            (Style::Red, true) => "\x1b[0;1;31m",
            (Style::Plain, _) | (Style::Green | Style::Yellow, false) => "\x1b[0m",
        }
    }
}

/// `text` in a style, where standard output is a terminal and `NO_COLOR` is not set.
pub fn styled(style: Style, text: &str) -> String {
    if !io::stdout().is_terminal() || !is_colour_wanted() {
        return text.to_owned();
    }
    format!("{}{text}\x1b[0m", style.sequence(true))
}

/// Whether `NO_COLOR` is not set, or empty (<https://no-color.org>).
pub fn is_colour_wanted() -> bool {
    std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// A text from a peer or a file, fit for a terminal: control characters are escaped.
pub fn printable(text: &str) -> String {
    text.chars()
        .flat_map(|letter| {
            let plain = !letter.is_control()
                && !matches!(letter, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
            if plain {
                vec![letter]
            } else {
                letter.escape_unicode().collect()
            }
        })
        .collect()
}

/// The width of a column of these texts.
pub fn column<'a>(texts: impl Iterator<Item = &'a str>) -> usize {
    texts.map(str::len).max().unwrap_or(0)
}

/// A count of something, for people.
pub fn counted(number: usize, one: &str, many: &str) -> String {
    let noun = if number == 1 { one } else { many };
    format!("{} {noun}", count(number as u64))
}

/// `1234567` as `1,234,567`.
pub fn count(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Bytes in binary units: `16.0 MiB`.
pub fn bytes(number: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if number < 1024 {
        return format!("{number} B");
    }
    let power = (number.ilog2() / 10) as usize;
    format!(
        "{:.1} {}",
        number as f64 / (1u64 << (10 * power)) as f64,
        UNITS[power - 1]
    )
}

/// A duration in the unit that fits: `12.3 us`.
pub fn duration(duration: Duration) -> String {
    let ns = duration.as_nanos();
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{:.1} us", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.2} ms", ns as f64 / 1e6),
        _ => format!("{:.2} s", duration.as_secs_f64()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_written_for_people() {
        assert_eq!(
            ["0", "999", "1,000", "12,345,678"],
            [0, 999, 1000, 12_345_678]
                .map(count)
                .each_ref()
                .map(String::as_str)
        );
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(16 << 20), "16.0 MiB");
        assert_eq!(bytes(u64::MAX), "16.0 EiB");
        assert_eq!(duration(Duration::from_nanos(12_340)), "12.3 us");
        assert_eq!(duration(Duration::from_millis(1500)), "1.50 s");
    }

    #[test]
    fn a_peer_cannot_steer_the_terminal() {
        assert_eq!(printable("a\x1b[31mb\r\nü"), "a\\u{1b}[31mb\\u{d}\\u{a}ü");
        assert!(!printable("x\u{202e}y").contains('\u{202e}'));
    }
}
