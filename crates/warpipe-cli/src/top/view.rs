//! What `top` shows and how keys change that: no terminal, no clock.

use std::cmp::Ordering;

use super::keys::Key;
use super::table::{Cell, Table, columns};
use crate::observe::Snapshot;

/// The longest filter.
const FILTER_MAX: usize = 80;

/// One of the three tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Tab {
    #[default]
    Endpoints,
    Processes,
    Memory,
}

impl Tab {
    pub const ALL: [Tab; 3] = [Tab::Endpoints, Tab::Processes, Tab::Memory];

    pub fn title(self) -> &'static str {
        match self {
            Tab::Endpoints => "endpoints",
            Tab::Processes => "processes",
            Tab::Memory => "memory",
        }
    }
}

/// The order of a table's rows.
#[derive(Debug, Clone, Copy, Default)]
struct Order {
    column: usize,
    is_reversed: bool,
}

/// The state of the screen.
#[derive(Debug, Default)]
pub struct View {
    pub tab: Tab,
    orders: [Order; 3],
    filter: String,
    is_typing: bool,
    pub is_paused: bool,
    /// The first line of the table's body that is shown.
    first: usize,
    /// How many lines the last frame had room for.
    page: usize,
    pub snapshot: Snapshot,
    /// Why the last look failed.
    pub fault: Option<String>,
}

/// What a key asks of the loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    Stay,
    Quit,
    Suspend,
}

impl View {
    /// Takes in a look, or why there is none.
    pub fn update(&mut self, look: Result<Snapshot, String>) {
        match look {
            Ok(_) if self.is_paused => {}
            Ok(snapshot) => (self.snapshot, self.fault) = (snapshot, None),
            Err(fault) => {
                // What has vanished must not look as if it were there.
                self.snapshot = Snapshot {
                    domain: std::mem::take(&mut self.snapshot.domain),
                    ..Snapshot::default()
                };
                self.fault = Some(fault);
            }
        }
    }

    /// Follows a key.
    pub fn press(&mut self, key: Key) -> Wish {
        match key {
            Key::Interrupt => return Wish::Quit,
            Key::Suspend => return Wish::Suspend,
            _ => {}
        }
        if self.is_typing {
            self.type_filter(key);
            return Wish::Stay;
        }
        match key {
            Key::Char('q') => return Wish::Quit,
            Key::Char('1') => self.show(Tab::Endpoints),
            Key::Char('2') => self.show(Tab::Processes),
            Key::Char('3') => self.show(Tab::Memory),
            Key::Tab => self.show(Tab::ALL[(self.tab as usize + 1) % Tab::ALL.len()]),
            Key::Char('s') => {
                let columns = columns(self.tab).len();
                let order = &mut self.orders[self.tab as usize];
                order.column = (order.column + 1) % columns;
            }
            Key::Char('r') => {
                let order = &mut self.orders[self.tab as usize];
                order.is_reversed = !order.is_reversed;
            }
            Key::Char('/') => self.is_typing = true,
            Key::Char(' ') => self.is_paused = !self.is_paused,
            Key::Escape => self.filter.clear(),
            Key::Up => self.first = self.first.saturating_sub(1),
            Key::Down => self.first = self.first.saturating_add(1),
            Key::PageUp => self.first = self.first.saturating_sub(self.page),
            Key::PageDown => self.first = self.first.saturating_add(self.page),
            Key::Home => self.first = 0,
            Key::End => self.first = usize::MAX,
            _ => {}
        }
        Wish::Stay
    }

    fn type_filter(&mut self, key: Key) {
        match key {
            Key::Enter => self.is_typing = false,
            Key::Escape => {
                self.is_typing = false;
                self.filter.clear();
            }
            Key::Backspace => {
                self.filter.pop();
            }
            Key::Char(letter) if self.filter.len() < FILTER_MAX && !letter.is_control() => {
                self.filter.push(letter);
            }
            _ => {}
        }
        self.first = 0;
    }

    fn show(&mut self, tab: Tab) {
        (self.tab, self.first) = (tab, 0);
    }

    /// The rows of the table that is shown, filtered and sorted.
    pub fn table(&self) -> Table {
        let mut table = Table::of(self.tab, &self.snapshot);
        let wanted = self.filter.to_lowercase();
        table
            .rows
            .retain(|row| wanted.is_empty() || row.has(&wanted));
        let order = self.orders[self.tab as usize];
        table.rows.sort_by(|a, b| {
            let ordering = compare(
                &a.cells[order.column],
                &b.cells[order.column],
                order.is_reversed,
            );
            // The first column decides among equals, in the same direction each time.
            ordering.then_with(|| compare(&a.cells[0], &b.cells[0], false))
        });
        table.sorted_by = order.column;
        table.is_reversed = order.is_reversed;
        table
    }

    /// The first of `lines` lines, of rows and their details, that a frame with room for `page`
    /// shows.
    pub fn scroll(&mut self, lines: usize, page: usize) -> usize {
        self.page = page.max(1);
        self.first = self.first.min(lines.saturating_sub(self.page));
        self.first
    }

    /// The filter, if there is one or one is being typed.
    pub fn filter(&self) -> Option<(&str, bool)> {
        (self.is_typing || !self.filter.is_empty()).then_some((&self.filter, self.is_typing))
    }
}

/// Numbers from the largest on, texts in alphabetical order, or the reverse; unknown numbers last.
fn compare(a: &Cell, b: &Cell, is_reversed: bool) -> Ordering {
    let known = match (a.sort, b.sort) {
        (Some(a), Some(b)) => b.total_cmp(&a),
        (Some(_), None) => return Ordering::Less,
        (None, Some(_)) => return Ordering::Greater,
        (None, None) => a.text.cmp(&b.text),
    };
    if is_reversed { known.reverse() } else { known }
}
