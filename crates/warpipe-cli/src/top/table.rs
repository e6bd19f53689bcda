//! The three tables: columns, and rows of cells with texts and colours.

use std::time::Duration;

use super::view::Tab;
use crate::observe::{EndpointRow, MemoryRow, ProcessRow, Rate, Snapshot, SubscriberRow, style_of};
use crate::output::{self, Style};

/// A column. Numbers are on the right of theirs.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    pub title: &'static str,
    /// The width; 0 takes what the others leave.
    pub width: u16,
    pub is_number: bool,
}

const fn text(title: &'static str, width: u16) -> Column {
    Column {
        title,
        width,
        is_number: false,
    }
}

const fn number(title: &'static str, width: u16) -> Column {
    Column {
        is_number: true,
        ..text(title, width)
    }
}

const ENDPOINTS: &[Column] = &[
    text("NAME", 0),
    text("KIND", 10),
    text("STATE", 10),
    number("PID", 8),
    number("RATE/s", 10),
    number("BYTES/s", 10),
    number("LATENCY", 9),
    number("FLIGHT", 7),
    number("DROPS", 8),
    number("PEERS", 6),
    number("MEMORY", 10),
];

const PROCESSES: &[Column] = &[
    text("COMMAND", 0),
    number("PID", 8),
    text("STATE", 8),
    number("FDS", 6),
    number("ENDPOINTS", 10),
    number("GPU OWN", 10),
    number("GPU OTHERS", 11),
    number("HOST OWN", 10),
    number("HOST OTHERS", 12),
];

const MEMORY: &[Column] = &[
    text("ENDPOINT", 0),
    text("DEVICE", 12),
    number("BYTES", 10),
    number("OWNER", 8),
    number("SHARED BY", 10),
    text("BORROWERS", 24),
];

/// The columns of a table.
pub fn columns(tab: Tab) -> &'static [Column] {
    match tab {
        Tab::Endpoints => ENDPOINTS,
        Tab::Processes => PROCESSES,
        Tab::Memory => MEMORY,
    }
}

/// One cell.
#[derive(Debug, Clone, Default)]
pub struct Cell {
    pub text: String,
    /// The number to sort by.
    pub sort: Option<f64>,
    pub style: Style,
}

/// One row, and lines below it.
#[derive(Debug, Clone)]
pub struct Row {
    pub cells: Vec<Cell>,
    pub details: Vec<Cell>,
}

/// A table, ready to be drawn.
#[derive(Debug, Clone)]
pub struct Table {
    pub columns: &'static [Column],
    pub rows: Vec<Row>,
    pub sorted_by: usize,
    pub is_reversed: bool,
}

impl Table {
    /// The rows of a look, not yet filtered or sorted.
    pub fn of(tab: Tab, snapshot: &Snapshot) -> Table {
        let rows = match tab {
            Tab::Endpoints => snapshot.endpoints.iter().map(endpoint_row).collect(),
            Tab::Processes => snapshot.processes.iter().map(process_row).collect(),
            Tab::Memory => snapshot.memory.iter().map(memory_row).collect(),
        };
        Table {
            columns: columns(tab),
            rows,
            sorted_by: 0,
            is_reversed: false,
        }
    }
}

impl Row {
    /// Whether a cell has this text, in small letters.
    pub fn has(&self, wanted: &str) -> bool {
        let mut cells = self.cells.iter().chain(&self.details);
        cells.any(|cell| cell.text.to_lowercase().contains(wanted))
    }
}

impl Cell {
    pub fn text(text: impl Into<String>) -> Cell {
        Cell {
            text: text.into(),
            ..Cell::default()
        }
    }

    fn number(text: String, sort: f64) -> Cell {
        Cell {
            sort: Some(sort),
            ..Cell::text(text)
        }
    }

    pub fn style(self, style: Style) -> Cell {
        Cell { style, ..self }
    }
}

/// What is not known.
fn unknown() -> Cell {
    Cell::text("-").style(Style::Dim)
}

fn state(state: &str) -> Cell {
    Cell::text(state).style(style_of(state))
}

fn count(number: u64) -> Cell {
    Cell::number(output::count(number), number as f64)
}

fn bytes(number: u64) -> Cell {
    Cell::number(output::bytes(number), number as f64)
}

fn pid(pid: Option<i32>) -> Cell {
    pid.map_or_else(unknown, |pid| {
        Cell::number(pid.to_string(), -f64::from(pid))
    })
}

fn endpoint_row(endpoint: &EndpointRow) -> Row {
    let if_so = |is_so: bool, cell: Cell| if is_so { cell } else { unknown() };
    let known = |cell| if_so(endpoint.kind.is_some(), cell);
    // An endpoint without samples, as a pool, does not count any: a 0 would say that it is idle.
    let of_samples = |cell| if_so(endpoint.has_samples(), cell);
    let rate = endpoint.rate.filter(|_| endpoint.has_samples());
    let per_second = |of: fn(&Rate) -> f64, text: fn(f64) -> String| {
        rate.map_or_else(unknown, |rate| Cell::number(text(of(&rate)), of(&rate)))
    };
    let latency = rate.and_then(|rate| rate.latency_ns);
    let drops = match endpoint.dropped {
        0 => Style::Plain,
        _ => Style::Yellow,
    };
    // The jobs of a queue that no worker has.
    let backlog = endpoint.backlog();
    let backlog = backlog.map(|(text, style)| Cell::text(text).style(style));
    let subscribers = endpoint.subscribers.iter().map(subscriber);
    Row {
        cells: vec![
            Cell::text(&endpoint.name),
            endpoint.kind.as_deref().map_or_else(unknown, Cell::text),
            state(endpoint.state),
            pid(endpoint.pid),
            per_second(|rate| rate.items_per_second, |rate| format!("{rate:.1}")),
            per_second(
                |rate| rate.bytes_per_second,
                |rate| output::bytes(rate as u64),
            ),
            latency.map_or_else(unknown, |ns| {
                Cell::number(output::duration(Duration::from_nanos(ns)), ns as f64)
            }),
            of_samples(count(endpoint.in_flight)),
            of_samples(count(endpoint.dropped).style(drops)),
            known(count(endpoint.peers)),
            // Not every endpoint without samples says which memory it shares.
            known(if_so(
                endpoint.has_samples() || endpoint.memory > 0,
                bytes(endpoint.memory),
            )),
        ],
        details: backlog.into_iter().chain(subscribers).collect(),
    }
}

fn subscriber(it: &SubscriberRow) -> Cell {
    let SubscriberRow {
        pid, lag, dropped, ..
    } = it;
    let behind = it.behind.map_or("-".to_owned(), output::count);
    let text = format!(
        "process {pid}  {:<9}  lag {lag}  behind {behind}  dropped {dropped}  silent {:.1} s",
        it.state, it.silent_seconds
    );
    Cell::text(text).style(style_of(it.state))
}

fn process_row(process: &ProcessRow) -> Row {
    Row {
        cells: vec![
            Cell::text(&process.command),
            pid(Some(process.pid)),
            state(process.state),
            count(process.descriptors as u64),
            count(process.endpoints as u64),
            bytes(process.gpu_owned),
            bytes(process.gpu_imported),
            bytes(process.host_owned),
            bytes(process.host_imported),
        ],
        details: Vec::new(),
    }
}

fn memory_row(memory: &MemoryRow) -> Row {
    let borrowers: Vec<String> = memory.borrowers.iter().map(i32::to_string).collect();
    let owner = match memory.owner.or(memory.keepers.first().copied()) {
        None => Cell::text("none").style(Style::Yellow),
        owner => pid(owner),
    };
    Row {
        cells: vec![
            memory.endpoint.as_deref().map_or_else(unknown, Cell::text),
            Cell::text(&memory.device),
            bytes(memory.bytes),
            owner,
            count(memory.borrowers.len() as u64),
            Cell::text(borrowers.join(" ")),
        ],
        details: Vec::new(),
    }
}
