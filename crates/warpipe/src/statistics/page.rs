//! The page of this process, and its rows.

use std::sync::Mutex;
use std::sync::atomic::Ordering::{Relaxed, Release};
use std::sync::atomic::{AtomicU64, fence};

use rustix::process::{Resource, getrlimit};

use super::layout::{FILE_NAME, MAGIC, PAGE_BYTES, Table, VERSION, header};
use crate::fork::per_process::PerProcess;
use crate::fork::{CloseOnForkFd, OwnerProcess};
use crate::origin::ProcessOrigin;
use crate::shm::page::{SharedPage, UnsealedPage};

/// The page's words. A process that has made a page keeps it to its end: rows point into it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Words(&'static SharedPage);

/// The page, and which of its rows are free.
#[derive(Debug, Default)]
pub(super) struct Page {
    mapped: Option<Mapped>,
    free: [Vec<u32>; 3],
    ends: [u32; 3],
}

#[derive(Debug)]
struct Mapped {
    words: Words,
    /// Observers open it.
    _fd: CloseOnForkFd,
}

/// The page of each process: a forked child makes its own.
static PAGE: PerProcess<Mutex<Page>> = PerProcess::new();

/// A row of this process's page. Dropping it frees the row. Its methods do nothing where the process
/// has no page or the table had no room, and in a forked child: the page is its parent's.
#[derive(Debug)]
pub(super) struct Row<const N: usize> {
    words: Option<&'static [AtomicU64; N]>,
    table: Table,
    index: u32,
    owner_process: OwnerProcess,
}

impl Page {
    /// Maps and seals a page. `None` where the process may not have one: it lacks a descriptor, or
    /// memory, or files of that length, or the kernel is older than the seal.
    fn map() -> Option<Mapped> {
        // A file beyond the limit would raise SIGXFSZ, which ends a process.
        let limit = getrlimit(Resource::Fsize).current;
        if limit.is_some_and(|limit| limit < PAGE_BYTES as u64) {
            return None;
        }
        let origin = ProcessOrigin::here().ok()?;
        let page = UnsealedPage::named(FILE_NAME, PAGE_BYTES).ok()?;
        let (page, fd) = page.seal_alone().ok()?;
        let words = Words(Box::leak(Box::new(page)));
        for (word, value) in [
            (header::VERSION, VERSION),
            (header::PID, origin.pid as u64),
            (header::NAMESPACE, origin.namespace),
            (header::STARTED, origin.started),
        ] {
            words.store(word, value);
        }
        words.at(header::MAGIC).store(MAGIC, Release);
        Some(Mapped { words, _fd: fd })
    }

    fn take(&mut self, table: Table) -> Option<(Words, u32)> {
        if self.mapped.is_none() {
            self.mapped = Page::map();
        }
        let words = self.mapped.as_ref()?.words;
        let free = &mut self.free[table as usize];
        let end = &mut self.ends[table as usize];
        if let Some(index) = free.pop() {
            return Some((words, index));
        }
        if *end as usize == table.rows_max() {
            words.at(header::UNLISTED).fetch_add(1, Relaxed);
            return None;
        }
        *end += 1;
        words.store(header::ENDS + table as usize, u64::from(*end));
        Some((words, *end - 1))
    }
}

impl Words {
    fn at(self, word: usize) -> &'static AtomicU64 {
        self.0.at(8 * word)
    }

    fn store(self, word: usize, value: u64) {
        self.at(word).store(value, Relaxed);
    }

    /// Notes that this process runs.
    pub(super) fn beat(self, now_ns: u64) {
        self.store(header::BEAT, now_ns);
    }

    /// Several threads may do so: each word is of some moment, and the next tick writes them again.
    pub(super) fn write_slow_paths(self, counts: &[[u64; 2]]) {
        for (at, &value) in counts.as_flattened().iter().enumerate() {
            self.store(header::SLOW_PATHS + at, value);
        }
    }
}

impl<const N: usize> Row<N> {
    /// A row of `table`, in which `fill` stores the words.
    pub(super) fn open(table: Table, fill: impl FnOnce(&Row<N>)) -> Row<N> {
        assert_eq!(N, table.row_words());
        let mut row = Row::unlisted(table);
        let Some((page, index)) = PAGE.lock().take(table) else {
            return row;
        };
        let words: &[AtomicU64; N] = page.0.at(8 * (table.start() + index as usize * N));
        (row.words, row.index) = (Some(words), index);
        // An observer that reads one of the new words sees that the row was free before.
        fence(Release);
        words[1..].iter().for_each(|word| word.store(0, Relaxed));
        fill(&row);
        words[0].store(words[0].load(Relaxed).wrapping_add(1), Release);
        row
    }

    /// No row of the page.
    pub(super) fn unlisted(table: Table) -> Row<N> {
        Row {
            words: None,
            table,
            index: 0,
            owner_process: OwnerProcess::current(),
        }
    }

    #[inline]
    fn own_words(&self) -> Option<&'static [AtomicU64; N]> {
        self.words.filter(|_| self.owner_process.is_current())
    }

    #[inline]
    pub(super) fn store(&self, word: usize, value: u64) {
        if let Some(words) = self.own_words() {
            words[word].store(value, Relaxed);
        }
    }

    /// Adds to some words. Each has one writer at a time, so this is a load and a store.
    #[inline]
    pub(super) fn add<const M: usize>(&self, to: [(usize, u64); M]) {
        if let Some(words) = self.own_words() {
            for (word, by) in to {
                words[word].store(words[word].load(Relaxed).wrapping_add(by), Relaxed);
            }
        }
    }

    pub(super) fn store_all(&self, first: usize, values: &[u64]) {
        for (at, &value) in values.iter().enumerate() {
            self.store(first + at, value);
        }
    }

    /// Its index and its first word, if it is in the page.
    pub(super) fn place(&self) -> Option<(u32, u64)> {
        let words = self.words?;
        Some((self.index, words[0].load(Relaxed)))
    }
}

impl<const N: usize> Drop for Row<N> {
    fn drop(&mut self) {
        if let Some(words) = self.own_words() {
            let mut page = PAGE.lock();
            words[0].store(words[0].load(Relaxed).wrapping_add(1), Release);
            page.free[self.table as usize].push(self.index);
        }
    }
}

/// This process's page, if it has one.
pub(super) fn own() -> Option<Words> {
    Some(PAGE.lock().mapped.as_ref()?.words)
}
