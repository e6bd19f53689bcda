//! How far the names were sent to each home, so that a new run of the bridge there gets nothing
//! again.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use super::crowded;
use crate::exporter::Sent;

/// Homes and names of which it is known.
const SENT_MAX: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct SentBook {
    entries: HashMap<(u64, String), Entry>,
    /// Of the last lane.
    number: u64,
}

#[derive(Debug)]
struct Entry {
    /// A lane has it too, while it lives.
    sent: Arc<Mutex<Sent>>,
    /// The number of the last lane that had it.
    used: u64,
}

impl SentBook {
    /// The entry of a name and a home, for a lane. If there is no room for a new one, one without a
    /// lane is forgotten, of a home that cannot be reached if there is one: of the home with the
    /// most of them, the one that was used least recently. So a home that takes many places loses
    /// its own.
    pub(super) fn open(
        &mut self,
        home: u64,
        name: &str,
        reachable: &HashSet<u64>,
    ) -> Arc<Mutex<Sent>> {
        self.number += 1;
        let key = (home, name.to_owned());
        if self.entries.len() >= SENT_MAX && !self.entries.contains_key(&key) {
            let idle = || {
                let entries = self.entries.iter();
                entries.filter(|(_, entry)| Arc::strong_count(&entry.sent) == 1)
            };
            let far = idle().filter(|(key, _)| !reachable.contains(&key.0));
            let far = crowded(far.map(|(key, entry)| (key, entry.used)));
            let victim = far.or_else(|| crowded(idle().map(|(key, entry)| (key, entry.used))));
            if let Some(victim) = victim {
                self.entries.remove(&victim);
            }
        }
        let entry = self.entries.entry(key).or_insert_with(|| Entry {
            sent: Arc::default(),
            used: 0,
        });
        entry.used = self.number;
        entry.sent.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(sent: &Arc<Mutex<Sent>>) {
        sent.lock().unwrap().sequence = 7;
    }

    #[test]
    fn without_room_the_home_with_the_most_entries_loses_its_oldest_one() {
        let (mut book, reachable) = (SentBook::default(), HashSet::from([1, 3]));
        // A reachable home, one that is not, and one that takes all the other places.
        for home in [1, 2] {
            for number in 0..16 {
                set(&book.open(home, &number.to_string(), &reachable));
            }
        }
        let live = book.open(9, "live", &reachable);
        set(&live);
        for number in 0..SENT_MAX + 16 {
            set(&book.open(9, &number.to_string(), &reachable));
        }
        assert_eq!(book.entries.len(), SENT_MAX);
        let mut is_known = |home: u64, name: &str| {
            let sent = book.open(home, name, &reachable);
            sent.lock().unwrap().sequence == 7
        };
        for home in [1, 2] {
            for number in 0..16 {
                assert!(is_known(home, &number.to_string()), "{home} {number}");
            }
        }
        // A live lane's stays, and of the others the last ones.
        assert!(is_known(9, "live") && is_known(9, &(SENT_MAX + 15).to_string()));
        assert!(!is_known(9, "0"));
    }

    #[test]
    fn entries_of_reachable_homes_go_last_and_those_of_lanes_never() {
        let (mut book, reachable) = (SentBook::default(), HashSet::from([1]));
        let lanes: Vec<_> = (0..SENT_MAX - 2)
            .map(|number| book.open(1, &number.to_string(), &reachable))
            .collect();
        set(&book.open(1, "idle", &reachable));
        set(&book.open(2, "far", &reachable));
        let new = book.open(1, "new", &reachable);
        assert!(!book.entries.contains_key(&(2, "far".into())));
        assert!(book.entries.contains_key(&(1, "idle".into())));
        let newer = book.open(1, "newer", &reachable);
        assert!(!book.entries.contains_key(&(1, "idle".into())));
        // Nothing is idle: the lanes themselves are bounded.
        book.open(1, "newest", &reachable);
        assert_eq!(book.entries.len(), SENT_MAX + 1);
        drop((lanes, new, newer));
    }
}
