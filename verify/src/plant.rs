//! Planted faults: one operation of the library's own source, found by its text, is weakened while
//! a model runs. A model that does not notice is worth nothing.

use std::cell::RefCell;
use std::panic::Location;
use std::path::Path;
use std::sync::Once;
use std::sync::atomic::Ordering;

/// Which kind of operation, where a line holds several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Op {
    Load,
    Store,
    /// A swap, a compare-and-swap, an addition and the like.
    Rmw,
    Fence,
    /// The call that wakes the sleeper.
    Wake,
}

/// How it is weakened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// It has this ordering.
    Order(Ordering),
    /// It does not happen; one that gives a value reads it.
    Omitted,
    /// It is two: a look and a store. Not one step.
    Split,
    /// It gives this value.
    Says(u64),
}

/// A fault to plant.
#[derive(Debug, Clone, Copy)]
pub struct Plant {
    /// The file, below `src/` of the library or of the C interface.
    pub file: &'static str,
    /// Text of the line, or of each such line.
    pub line: &'static str,
    pub op: Op,
    pub effect: Effect,
}

/// A plant that has found its lines.
struct Planted {
    plant: Plant,
    lines: Vec<u32>,
}

thread_local! {
    static PLANTED: RefCell<Option<Planted>> = const { RefCell::new(None) };
}

/// Takes the plant out again.
pub struct Uproot(());

impl Drop for Uproot {
    fn drop(&mut self) {
        PLANTED.with(|planted| planted.take());
    }
}

/// Panics of a thread with a plant are what is wanted, and not printed.
fn hush() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let tell = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if PLANTED
                .try_with(|planted| planted.borrow().is_none())
                .unwrap_or(true)
            {
                tell(panic);
            }
        }));
    });
}

impl Plant {
    /// Plants it for this thread.
    ///
    /// # Panics
    /// When the library has no such line any more: then the plant is to be written anew, as it
    /// proves nothing.
    pub fn sow(self) -> Uproot {
        let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
        let text = ["warpipe/src", "warpipe-c/src"]
            .iter()
            .find_map(|sources| std::fs::read_to_string(crates.join(sources).join(self.file)).ok())
            .expect("a file of one of the two");
        let lines = (1..)
            .zip(text.lines())
            .filter(|(_, line)| line.contains(self.line));
        let lines: Vec<u32> = lines.map(|(number, _)| number).collect();
        assert!(
            !lines.is_empty(),
            "{} has no line with {:?} any more; write the plant anew",
            self.file,
            self.line
        );
        hush();
        PLANTED.with(|planted| planted.replace(Some(Planted { plant: self, lines })));
        Uproot(())
    }
}

/// The change of an operation.
pub(crate) fn effect(at: &Location<'_>, op: Op) -> Option<Effect> {
    PLANTED.with_borrow(|planted| {
        let Planted { plant, lines } = planted.as_ref()?;
        let is_it = plant.op == op && lines.contains(&at.line()) && at.file().ends_with(plant.file);
        is_it.then_some(plant.effect)
    })
}
