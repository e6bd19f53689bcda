//! Draws a view into a frame.

use super::table::{Cell, Column, Row, Table};
use super::view::{Tab, View};
use crate::output::{self, Style, printable};

/// Lines above and below the rows.
const HEAD_LINES: u16 = 3;
const FOOT_LINES: u16 = 1;

/// The least width of the column that takes what the others leave.
const NAME_MIN: u16 = 16;

const KEYS: &str = "Tab table  arrows scroll  s sort  r reverse  / filter  space pause  q quit";

/// A text at a column of a line.
#[derive(Debug, Clone)]
pub struct Span {
    pub x: u16,
    pub text: String,
    pub style: Style,
}

/// A screen of lines. Of spans that overlap, the later one is seen.
#[derive(Debug, Clone)]
pub struct Frame {
    pub width: u16,
    pub lines: Vec<Vec<Span>>,
}

impl Frame {
    /// Writes a text into line `y` from column `x` on, cut after `width` letters and at the line's
    /// end, and returns the column behind it. Outside of the frame nothing is written.
    fn put(&mut self, x: u16, y: u16, width: u16, text: &str, style: Style) -> u16 {
        let room = self.width.saturating_sub(x).min(width);
        let Some(line) = self.lines.get_mut(usize::from(y)).filter(|_| room > 0) else {
            return x;
        };
        let text: String = printable(text).chars().take(room.into()).collect();
        let end = x + text.chars().count() as u16;
        line.push(Span { x, text, style });
        end
    }

    /// Writes the cells of a row. Numbers are on the right of their columns.
    fn put_row(&mut self, y: u16, cells: &[Cell], columns: &[Column], widths: &[u16]) {
        let mut x = 0;
        for ((cell, column), &width) in cells.iter().zip(columns).zip(widths) {
            if width == 0 {
                continue;
            }
            let length = u16::try_from(cell.text.chars().count()).unwrap_or(u16::MAX);
            let indent = match column.is_number {
                true => width.saturating_sub(length),
                false => 0,
            };
            self.put(x + indent, y, width, &cell.text, cell.style);
            x += width + 1;
        }
    }
}

/// One line of a table's body: the unit by which it scrolls.
enum Line<'a> {
    Row(&'a Row),
    Detail(&'a Cell),
}

/// Draws the whole screen. A screen of any size is drawn: columns that have no room are left out.
pub fn draw(view: &mut View, width: u16, height: u16) -> Frame {
    let mut frame = Frame {
        width,
        lines: vec![Vec::new(); height.into()],
    };
    let table = view.table();
    let summary = summary(view, table.rows.len());
    frame.put(0, 0, width, &summary, Style::Bold);
    tabs(view, &mut frame);
    let widths = widths(table.columns, width);
    titles(&table, &widths, &mut frame);
    let body = height.saturating_sub(HEAD_LINES + FOOT_LINES);
    let lines: usize = table.rows.iter().map(|row| 1 + row.details.len()).sum();
    let first = view.scroll(lines, usize::from(body));
    let lines = table.rows.iter().flat_map(|row| {
        let details = row.details.iter().map(Line::Detail);
        std::iter::once(Line::Row(row)).chain(details)
    });
    for (y, shown) in (HEAD_LINES..HEAD_LINES + body).zip(lines.skip(first)) {
        match shown {
            Line::Row(row) => frame.put_row(y, &row.cells, table.columns, &widths),
            Line::Detail(Cell { text, style, .. }) => {
                frame.put(4, y, width, text, *style);
            }
        }
    }
    let footer = match view.filter() {
        Some((filter, is_typing)) => {
            let mark = if is_typing { "_" } else { "" };
            format!("filter: {filter}{mark}   Enter keeps it, Esc clears it")
        }
        None => KEYS.to_owned(),
    };
    frame.put(0, height.saturating_sub(1), width, &footer, Style::Dim);
    frame
}

fn summary(view: &View, rows: usize) -> String {
    let snapshot = &view.snapshot;
    let sum = |of: fn(&crate::observe::ProcessRow) -> u64| {
        let numbers = snapshot.processes.iter().map(of);
        output::bytes(numbers.fold(0, u64::saturating_add))
    };
    format!(
        "{}  {}  {}  {}  GPU {}  host {}{}",
        snapshot.domain,
        output::counted(rows, "row", "rows"),
        output::counted(snapshot.endpoints.len(), "endpoint", "endpoints"),
        output::counted(snapshot.processes.len(), "process", "processes"),
        sum(|process| process.gpu_owned),
        sum(|process| process.host_owned),
        if view.is_paused { "  paused" } else { "" },
    )
}

fn tabs(view: &View, frame: &mut Frame) {
    let mut x = 0;
    for (number, tab) in Tab::ALL.into_iter().enumerate() {
        let style = match tab == view.tab {
            true => Style::Reversed,
            false => Style::Dim,
        };
        let title = format!(" {} {} ", number + 1, tab.title());
        x = frame.put(x, 1, u16::MAX, &title, style) + 1;
    }
    let note = view.fault.as_ref().or(view.snapshot.notes.first());
    if let Some(note) = note {
        frame.put(x, 1, u16::MAX, note, Style::Red);
    }
}

/// The widths of the columns, 0 for one that has no room.
fn widths(columns: &[Column], all: u16) -> Vec<u16> {
    let mut left = all.saturating_sub(NAME_MIN);
    let width = |column: &Column| {
        let needed = match column.width {
            0 => 0,
            width => width + 1,
        };
        let fits = needed <= left;
        // One that does not fit ends the list: the rest are less important.
        left = if fits { left - needed } else { 0 };
        if fits { column.width } else { 0 }
    };
    let mut widths: Vec<u16> = columns.iter().map(width).collect();
    if let Some(name) = columns.iter().position(|column| column.width == 0) {
        widths[name] = NAME_MIN.min(all) + left;
    }
    widths
}

fn titles(table: &Table, widths: &[u16], frame: &mut Frame) {
    let style = Style::Underlined;
    let y = HEAD_LINES - 1;
    frame.put(0, y, u16::MAX, &" ".repeat(frame.width.into()), style);
    let titles = table.columns.iter().enumerate().map(|(at, column)| {
        let mark = match (at == table.sorted_by, table.is_reversed) {
            (true, false) => "▼",
            (true, true) => "▲",
            _ => "",
        };
        Cell::text(format!("{}{mark}", column.title)).style(style)
    });
    let titles: Vec<Cell> = titles.collect();
    frame.put_row(y, &titles, table.columns, widths);
}
