//! Draws a view into a frame.

use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use ratatui_core::style::{Color, Modifier, Style};

use super::table::{Cell, Column, Row, Tone};
use super::view::{Tab, View};
use crate::output::{self, printable};

/// Lines above and below the rows.
const HEAD_LINES: u16 = 3;
const FOOT_LINES: u16 = 1;

/// The least width of the column that takes what the others leave.
const NAME_MIN: u16 = 16;

/// One line of a table's body: the unit by which it scrolls.
enum Line<'a> {
    Row(&'a Row),
    Detail(&'a Cell),
}

/// Draws the whole screen. A screen of any size is drawn: columns that have no room are left out.
pub fn draw(view: &mut View, buffer: &mut Buffer) {
    let area = buffer.area;
    buffer.reset();
    if area.width == 0 || area.height == 0 {
        return;
    }
    let table = view.table();
    summary(view, table.rows.len(), buffer, line(area, 0));
    tabs(view, buffer, line(area, 1));
    let widths = widths(table.columns, area.width);
    titles(&table, &widths, buffer, line(area, 2));
    let body = area.height.saturating_sub(HEAD_LINES + FOOT_LINES);
    let lines: usize = table.rows.iter().map(|row| 1 + row.details.len()).sum();
    let first = view.scroll(lines, usize::from(body));
    let lines = table.rows.iter().flat_map(|row| {
        let details = row.details.iter().map(Line::Detail);
        std::iter::once(Line::Row(row)).chain(details)
    });
    for (y, shown) in (HEAD_LINES..HEAD_LINES + body).zip(lines.skip(first)) {
        let area = line(area, y);
        match shown {
            Line::Row(shown) => row(shown, table.columns, &widths, buffer, area),
            Line::Detail(detail) => put(buffer, area, 4, detail, usize::from(area.width)),
        }
    }
    footer(view, buffer, line(area, area.height - 1));
}

/// One line of the screen; empty below its end.
fn line(area: Rect, y: u16) -> Rect {
    if y >= area.height {
        return Rect::new(area.x, area.bottom(), 0, 0);
    }
    Rect::new(area.x, area.y + y, area.width, 1)
}

fn summary(view: &View, rows: usize, buffer: &mut Buffer, area: Rect) {
    let snapshot = view.snapshot();
    let sum = |of: fn(&crate::observe::ProcessRow) -> u64| {
        let numbers = snapshot.processes.iter().map(of);
        output::bytes(numbers.fold(0, u64::saturating_add))
    };
    let text = format!(
        "{}  {}  {}  {}  GPU {}  host {}{}",
        printable(&snapshot.domain),
        output::counted(rows, "row", "rows"),
        output::counted(snapshot.endpoints.len(), "endpoint", "endpoints"),
        output::counted(snapshot.processes.len(), "process", "processes"),
        sum(|process| process.gpu_owned),
        sum(|process| process.host_owned),
        if view.is_paused() { "  paused" } else { "" },
    );
    write(
        buffer,
        area,
        0,
        &text,
        Style::new().add_modifier(Modifier::BOLD),
    );
}

fn tabs(view: &View, buffer: &mut Buffer, area: Rect) {
    let mut x = 0;
    for (number, tab) in Tab::ALL.into_iter().enumerate() {
        let style = match tab == view.tab() {
            true => Style::new().add_modifier(Modifier::REVERSED),
            false => style_of(Tone::Dim),
        };
        x = write(
            buffer,
            area,
            x,
            &format!(" {} {} ", number + 1, tab.title()),
            style,
        ) + 1;
    }
    let note = view
        .fault()
        .or(view.snapshot().notes.first().map(String::as_str));
    if let Some(note) = note {
        write(buffer, area, x, &printable(note), style_of(Tone::Alarm));
    }
}

/// The widths of the columns, 0 for one that has no room.
fn widths(columns: &[Column], all: u16) -> Vec<u16> {
    let mut left = all.saturating_sub(NAME_MIN);
    let mut widths: Vec<u16> = columns
        .iter()
        .map(|column| {
            let needed = if column.width == 0 {
                0
            } else {
                column.width + 1
            };
            let fits = needed <= left;
            // One that does not fit ends the list: the rest are less important.
            left = if fits { left - needed } else { 0 };
            if fits { column.width } else { 0 }
        })
        .collect();
    if let Some(name) = columns.iter().position(|column| column.width == 0) {
        widths[name] = NAME_MIN.min(all) + left;
    }
    widths
}

fn titles(table: &super::table::Table, widths: &[u16], buffer: &mut Buffer, area: Rect) {
    let titles = table.columns.iter().enumerate().map(|(at, column)| {
        let mark = match (at == table.sorted_by, table.is_reversed) {
            (true, false) => "▼",
            (true, true) => "▲",
            _ => "",
        };
        Cell {
            text: format!("{}{mark}", column.title),
            ..Cell::default()
        }
    });
    let titles = Row {
        cells: titles.collect(),
        details: Vec::new(),
    };
    row(&titles, table.columns, widths, buffer, area);
    buffer.set_style(area, Style::new().add_modifier(Modifier::UNDERLINED));
}

fn row(row: &Row, columns: &[Column], widths: &[u16], buffer: &mut Buffer, area: Rect) {
    let mut x = 0;
    for ((cell, column), &width) in row.cells.iter().zip(columns).zip(widths) {
        if width == 0 {
            continue;
        }
        let length = u16::try_from(cell.text.chars().count()).unwrap_or(u16::MAX);
        let indent = if column.is_number {
            width.saturating_sub(length)
        } else {
            0
        };
        put(buffer, area, x + indent, cell, usize::from(width));
        x += width + 1;
    }
}

fn footer(view: &View, buffer: &mut Buffer, area: Rect) {
    let style = style_of(Tone::Dim);
    match view.filter() {
        Some((filter, is_typing)) => {
            let mark = if is_typing { "_" } else { "" };
            let text = format!(
                "filter: {}{mark}   Enter keeps it, Esc clears it",
                printable(filter)
            );
            write(buffer, area, 0, &text, style);
        }
        None => {
            let text = "Tab table  arrows scroll  s sort  r reverse  / filter  space pause  q quit";
            write(buffer, area, 0, text, style);
        }
    }
}

fn put(buffer: &mut Buffer, area: Rect, x: u16, cell: &Cell, width: usize) {
    if x < area.width {
        let left = usize::from(area.width - x).min(width);
        let style = style_of(cell.tone);
        buffer.set_stringn(area.x + x, area.y, &cell.text, left, style);
    }
}

/// Writes a text, cut at the line's end, and returns the column behind it.
fn write(buffer: &mut Buffer, area: Rect, x: u16, text: &str, style: Style) -> u16 {
    if x >= area.width {
        return x;
    }
    let left = usize::from(area.width - x);
    buffer.set_stringn(area.x + x, area.y, text, left, style).0 - area.x
}

fn style_of(tone: Tone) -> Style {
    match tone {
        Tone::Plain => Style::new(),
        Tone::Good => Style::new().fg(Color::Green),
        Tone::Warning => Style::new().fg(Color::Yellow),
        Tone::Alarm => Style::new().fg(Color::Red).add_modifier(Modifier::BOLD),
        Tone::Dim => Style::new().add_modifier(Modifier::DIM),
    }
}
