//! The terminal: raw mode, the other screen, cells as ECMA-48 sequences, and its restoring.

use std::io::{self, Write};
use std::sync::Mutex;

use ratatui_core::backend::{Backend, ClearType, WindowSize};
use ratatui_core::buffer::Cell;
use ratatui_core::layout::{Position, Size};
use ratatui_core::style::{Color, Modifier};
use rustix::termios::{self, OptionalActions, Termios};

use crate::output::{is_colour_wanted, write_out};

/// The other screen, and no cursor.
const ENTER: &[u8] = b"\x1b[?1049h\x1b[?25l\x1b[2J";

/// The cursor, plain text, and the screen from before.
const LEAVE: &[u8] = b"\x1b[0m\x1b[?25h\x1b[?1049l";

/// The screen for a terminal that does not say its size.
const SIZE: (u16, u16) = (80, 24);

/// The larger screens are drawn in part: a terminal may claim any size.
const SIZE_MAX: (u16, u16) = (1000, 500);

/// The modes of the terminal before this program changed them. A panic restores them, too.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// The terminal in raw mode. Dropping it restores what was there before.
pub struct Screen(());

impl Screen {
    /// Takes over the terminal of standard input and output.
    pub fn enter() -> io::Result<Screen> {
        *lock() = Some(termios::tcgetattr(io::stdin())?);
        let screen = Screen(());
        screen.take()?;
        Ok(screen)
    }

    /// Takes the terminal over, again after a stop: a shell has set its modes meanwhile.
    pub fn take(&self) -> io::Result<()> {
        let Some(mut raw) = lock().clone() else {
            return Ok(());
        };
        raw.make_raw();
        termios::tcsetattr(io::stdin(), OptionalActions::Flush, &raw)?;
        write_out(ENTER)
    }

    /// Gives the terminal back for the time of a stop.
    pub fn give_back(&self) {
        if let Some(before) = &*lock() {
            leave(before);
        }
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

/// Standard output, as frames are drawn on it. A frame goes out in one write.
pub struct Output {
    frame: Vec<u8>,
    has_colours: bool,
}

impl Output {
    pub fn new() -> Output {
        Output {
            frame: Vec::new(),
            has_colours: is_colour_wanted(),
        }
    }
}

impl Backend for Output {
    type Error = io::Error;

    fn draw<'a, I>(&mut self, content: I) -> io::Result<()>
    where
        I: Iterator<Item = (u16, u16, &'a Cell)>,
    {
        let mut next = None;
        let mut style = None;
        for (x, y, cell) in content {
            if next != Some((x, y)) {
                write!(self.frame, "\x1b[{};{}H", y + 1, x + 1)?;
            }
            let colour = if self.has_colours {
                cell.fg
            } else {
                Color::Reset
            };
            let wanted = (colour, cell.modifier);
            if style != Some(wanted) {
                write_style(&mut self.frame, wanted.0, wanted.1)?;
                style = Some(wanted);
            }
            self.frame.extend_from_slice(cell.symbol().as_bytes());
            // A wide letter takes two cells, and the terminal's cursor is then elsewhere.
            next = cell.symbol().is_ascii().then_some((x + 1, y));
        }
        self.frame.extend_from_slice(b"\x1b[0m");
        Ok(())
    }

    fn hide_cursor(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn show_cursor(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn get_cursor_position(&mut self) -> io::Result<Position> {
        Ok(Position::ORIGIN)
    }

    fn set_cursor_position<P: Into<Position>>(&mut self, _: P) -> io::Result<()> {
        Ok(())
    }

    fn clear(&mut self) -> io::Result<()> {
        self.frame.extend_from_slice(b"\x1b[0m\x1b[2J");
        Ok(())
    }

    fn clear_region(&mut self, _: ClearType) -> io::Result<()> {
        self.clear()
    }

    fn size(&self) -> io::Result<Size> {
        let size = termios::tcgetwinsize(io::stdout()).map(|size| (size.ws_col, size.ws_row));
        let (columns, rows) = size.ok().filter(|&(x, y)| x > 0 && y > 0).unwrap_or(SIZE);
        Ok(Size::new(columns.min(SIZE_MAX.0), rows.min(SIZE_MAX.1)))
    }

    fn window_size(&mut self) -> io::Result<WindowSize> {
        Ok(WindowSize {
            columns_rows: self.size()?,
            pixels: Size::ZERO,
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        write_out(&self.frame)?;
        self.frame.clear();
        Ok(())
    }
}

fn write_style(frame: &mut Vec<u8>, color: Color, modifier: Modifier) -> io::Result<()> {
    frame.extend_from_slice(b"\x1b[0");
    for (flag, code) in [
        (Modifier::BOLD, 1),
        (Modifier::DIM, 2),
        (Modifier::UNDERLINED, 4),
        (Modifier::REVERSED, 7),
    ] {
        if modifier.contains(flag) {
            write!(frame, ";{code}")?;
        }
    }
    let code = match color {
        Color::Red => Some(31),
        Color::Green => Some(32),
        Color::Yellow => Some(33),
        _ => None,
    };
    if let Some(code) = code {
        write!(frame, ";{code}")?;
    }
    frame.push(b'm');
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_without_colours_gets_the_other_styles() {
        let mut cell = Cell::new("x");
        (cell.fg, cell.modifier) = (Color::Red, Modifier::BOLD);
        for (has_colours, wanted) in [(true, "\x1b[0;1;31mx"), (false, "\x1b[0;1mx")] {
            let mut output = Output {
                frame: Vec::new(),
                has_colours,
            };
            output.draw([(0, 0, &cell)].into_iter()).unwrap();
            let drawn = String::from_utf8(output.frame).unwrap();
            assert!(drawn.contains(wanted), "{drawn:?}");
        }
    }
}
