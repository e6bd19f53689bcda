//! The terminal: raw mode, the other screen, frames as ECMA-48 sequences, and its restoring.

use std::fmt::Write;
use std::io;
use std::sync::Mutex;

use rustix::termios::{self, OptionalActions, Termios};

use super::draw::{Frame, Span};
use crate::output::{is_colour_wanted, write_out};

/// The other screen, no cursor, and no further line for what does not fit into one.
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J";

/// Plain text, lines as long as they are, the cursor, and the screen from before.
const LEAVE: &[u8] = b"\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l";

const CLEAR: &str = "\x1b[0m\x1b[2J";

/// The screen for a terminal that does not say its size.
const SIZE: (u16, u16) = (80, 24);

/// The larger screens are drawn in part: a terminal may claim any size.
const SIZE_MAX: (u16, u16) = (1000, 500);

/// The modes of the terminal before this program changed them. A panic restores them, too.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// The terminal in raw mode. Dropping it restores what was there before.
pub struct Screen {
    /// The lines that it shows; none after it was taken over or has another size.
    shown: Vec<String>,
    size: (u16, u16),
}

impl Screen {
    /// Takes over the terminal of standard input and output.
    pub fn enter() -> io::Result<Screen> {
        *lock() = Some(termios::tcgetattr(io::stdin())?);
        let mut screen = Screen {
            shown: Vec::new(),
            size: (0, 0),
        };
        screen.take()?;
        Ok(screen)
    }

    /// Takes the terminal over, again after a stop: a shell has set its modes meanwhile.
    pub fn take(&mut self) -> io::Result<()> {
        let Some(mut raw) = lock().clone() else {
            return Ok(());
        };
        raw.make_raw();
        termios::tcsetattr(io::stdin(), OptionalActions::Flush, &raw)?;
        self.shown.clear();
        write_out(ENTER)
    }

    /// Gives the terminal back for the time of a stop.
    pub fn give_back(&self) {
        if let Some(before) = &*lock() {
            leave(before);
        }
    }

    /// Its columns and lines.
    pub fn size(&self) -> (u16, u16) {
        let size = termios::tcgetwinsize(io::stdout()).map(|size| (size.ws_col, size.ws_row));
        let (columns, rows) = size.ok().filter(|&(x, y)| x > 0 && y > 0).unwrap_or(SIZE);
        (columns.min(SIZE_MAX.0), rows.min(SIZE_MAX.1))
    }

    /// Shows a frame of this size: the lines that have changed go out in one write.
    pub fn show(&mut self, frame: &Frame, size: (u16, u16)) -> io::Result<()> {
        let mut changes = String::new();
        if size != self.size {
            self.shown.clear();
            self.size = size;
            changes += CLEAR;
        }
        let has_colours = is_colour_wanted();
        let lines = frame.lines.iter().enumerate();
        let lines: Vec<String> = lines
            .map(|(y, spans)| line(y + 1, frame.width, spans, has_colours))
            .collect();
        for (y, line) in lines.iter().enumerate() {
            if self.shown.get(y) != Some(line) {
                changes += line;
            }
        }
        self.shown = lines;
        write_out(changes.as_bytes())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

/// Restores the terminal, once.
pub fn restore() {
    if let Some(before) = lock().take() {
        leave(&before);
    }
}

fn leave(before: &Termios) {
    let _ = write_out(LEAVE);
    let _ = termios::tcsetattr(io::stdin(), OptionalActions::Flush, before);
}

fn lock() -> std::sync::MutexGuard<'static, Option<Termios>> {
    BEFORE
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Line `row` of the screen, from 1: blanks, and over them each span at its place. A wide letter
/// moves no span behind it.
fn line(row: usize, width: u16, spans: &[Span], has_colours: bool) -> String {
    let mut line = format!("\x1b[{row};1H\x1b[0m{}", " ".repeat(width.into()));
    for Span { x, text, style } in spans {
        let style = style.sequence(has_colours);
        let _ = write!(line, "\x1b[{row};{}H{style}{text}", x + 1);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::output::Style;

    #[test]
    fn a_terminal_without_colours_gets_the_other_styles() {
        for (has_colours, wanted) in [(true, "\x1b[0;1;31mx"), (false, "\x1b[0;1mx")] {
            let (text, style) = ("x".to_owned(), Style::Red);
            let drawn = line(1, 1, &[Span { x: 0, text, style }], has_colours);
            assert!(drawn.contains(wanted), "{drawn:?}");
        }
    }
}
