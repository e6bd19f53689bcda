//! The C interface's table of objects: each object is dropped once, when nothing uses it, and each
//! entry holds one.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::Model;
use crate::atomic::AtomicU64;
use crate::verify::handle::Table;

pub const SHARED: Model = Model {
    name: "an object is whole until its last user has left it",
    bound: 4,
    body: shared,
};
pub const ALONE: Model = Model {
    name: "an object that is locked is used by one thread",
    bound: 4,
    body: alone,
};
pub const TAKEN: Model = Model {
    name: "an object is taken or dropped, and once",
    bound: 4,
    body: taken,
};
pub const PUT_BACK: Model = Model {
    name: "an object that is put back behind its end is dropped",
    bound: 4,
    body: put_back,
};
pub const REUSED: Model = Model {
    name: "an entry holds one object",
    bound: 4,
    body: reused,
};

/// An object's `life` while it is whole.
const WHOLE: u64 = 7;
const DROPPED: u64 = 9;

/// The words of the objects of a model, made before its threads are.
struct Words {
    life: [AtomicU64; 5],
    /// How often the first object was used alone.
    uses: AtomicU64,
    key: AtomicU64,
}

struct Object {
    words: Arc<Words>,
    number: usize,
}

impl Object {
    fn check(&self) {
        assert_eq!(self.words.life[self.number].load(Relaxed), WHOLE);
    }

    /// Counts in two steps, as one that is alone may: how many uses that was.
    fn use_alone(&self) -> u64 {
        self.check();
        let uses = self.words.uses.load(Relaxed);
        self.words.uses.store(uses + 1, Relaxed);
        1
    }
}

impl Drop for Object {
    fn drop(&mut self) {
        let before = self.words.life[self.number].swap(DROPPED, Relaxed);
        assert_eq!(before, WHOLE, "dropped once");
    }
}

type Objects = &'static Table<Object>;

/// A table of three entries that have been used and are free, and the words.
fn table() -> (Objects, Arc<Words>) {
    let words = Arc::new(Words {
        life: Default::default(),
        uses: AtomicU64::new(0),
        key: AtomicU64::new(0),
    });
    words.uses.touch();
    words.key.touch();
    words.life.iter().for_each(AtomicU64::touch);
    let table: Objects = Box::leak(Box::new(Table::new()));
    let keys = [0, 1, 2].map(|number| insert(table, &words, number));
    assert!(keys.iter().all(|&key| table.close(key)));
    (table, words)
}

fn insert(table: Objects, words: &Arc<Words>, number: usize) -> u64 {
    words.life[number].store(WHOLE, Relaxed);
    let object = Object {
        words: words.clone(),
        number,
    };
    table.reserve().expect("entries are free").fill(object)
}

/// What became of the objects that no thread has any more.
fn lives(words: &Words) -> [u64; 5] {
    [0, 1, 2, 3, 4].map(|number| words.life[number].load(Relaxed))
}

fn shared() {
    let (table, words) = table();
    let theirs = words.clone();
    let thread = loom::thread::spawn(move || {
        let key = theirs.key.load(Relaxed);
        if let Ok(found) = table.get(key) {
            found.check();
        }
    });
    let key = insert(table, &words, 0);
    words.key.store(key, Relaxed);
    assert!(table.close(key));
    thread.join().expect("the user");
    assert_eq!(lives(&words)[0], DROPPED);
}

fn alone() {
    let (table, words) = table();
    let key = insert(table, &words, 0);
    let use_it = move || table.lock(key).map_or(0, |locked| locked.use_alone());
    let thread = loom::thread::spawn(move || {
        let used = use_it();
        let found = table.get(key).map(|found| found.check());
        (used, found.is_ok())
    });
    let used = use_it() + use_it();
    let (theirs, has_found) = thread.join().expect("the other user");
    assert!(
        used + theirs > 0 || has_found,
        "each refused because of the other"
    );
    assert_eq!(words.uses.load(Relaxed), used + theirs);
    assert_eq!(lives(&words)[0], WHOLE);
    assert!(table.close(key));
}

/// The key of an entry that is filled again is not looked at here: loom lets the one that closed it
/// read its own, older change of the state although it has seen that the entry is free.
fn taken() {
    let (table, words) = table();
    let key = insert(table, &words, 0);
    let thread = loom::thread::spawn(move || {
        let Ok(mut locked) = table.lock(key) else {
            return false;
        };
        let object = locked.take();
        object.check();
        locked.put_back(object);
        let object = locked.take();
        drop(locked);
        object.check();
        true
    });
    let has_closed = table.close(key);
    let has_taken = thread.join().expect("the taker");
    assert!(has_closed || has_taken);
    assert_eq!(lives(&words)[0], DROPPED);
    assert!(table.get(key).is_err());
}

fn put_back() {
    let (table, words) = table();
    let key = insert(table, &words, 0);
    let thread = loom::thread::spawn(move || {
        if let Ok(mut locked) = table.lock(key) {
            let object = locked.take();
            object.check();
            locked.put_back(object);
        }
    });
    assert!(table.close(key));
    thread.join().expect("the taker");
    assert_eq!(lives(&words)[0], DROPPED);
}

fn reused() {
    let (table, words) = table();
    let theirs = words.clone();
    let thread = loom::thread::spawn(move || insert(table, &theirs, 0));
    let first = insert(table, &words, 1);
    let second = insert(table, &words, 2);
    table.lock(first).ok().expect("it is open").close();
    let third = insert(table, &words, 3);
    let fourth = insert(table, &words, 4);
    let other = thread.join().expect("the other");
    for (key, number) in [(other, 0), (second, 2), (third, 3), (fourth, 4)] {
        let found = table.get(key).ok().expect("it is open");
        assert_eq!(found.number, number);
        found.check();
    }
    assert!(table.get(first).is_err());
}
