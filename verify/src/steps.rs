//! Every order of the steps of a few processes, with any of them killed at any step: breadth first,
//! each state once.
//!
//! A process is a row of *phases*: functions over the library's own code that get a number and
//! return the next one. The progress of a phase is the list of the results of its operations on
//! shared words, so a state is small: the words, and for each process its phase and that list. For
//! one more step, the phase is run from its beginning with the recorded results, executes the next
//! operation, and is unwound. Words that are never written make no steps; they are found by
//! repeated searches until no more are found.
//!
//! Shown: [`Model::is_wrong`] holds in no state, and from every state one can be reached in which
//! all live processes are done: none hangs, and nothing is lost on the way. Memory is sequentially
//! consistent here; loom covers weaker orders.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;

use crate::atomic::{self, Way};

/// The phase of a process that is done.
pub const DONE: u64 = u64::MAX;

/// The model to search.
pub trait Model {
    /// How many processes there are.
    fn processes(&self) -> usize;

    /// Runs a phase of a process and returns the next one, or [`DONE`].
    fn run(&self, process: usize, phase: u64, world: &World) -> u64;

    /// The phase that a process begins with.
    fn begin(&self, _process: usize) -> u64 {
        0
    }

    /// Whether a process may be killed.
    fn is_mortal(&self, process: usize) -> bool;

    /// The violation in a state, if any.
    fn is_wrong(&self, world: &World) -> Option<String>;
}

/// The queries of a phase that are no operation on a word.
#[derive(Debug, Clone, Default)]
pub struct World {
    /// The processes that have been killed.
    pub dead: Vec<bool>,
    /// Each process's phase.
    pub phases: Vec<u64>,
}

/// How a step ended.
enum Came {
    /// The phase is over.
    Over(u64),
    /// One operation was made.
    Stepped,
    /// It sleeps.
    Asleep,
}

/// The panic payload that unwinds a phase.
enum Stop {
    Stepped,
    Asleep,
}

/// The process that runs on this thread.
#[derive(Default)]
struct Run {
    /// The results of the phase's operations.
    returned: Vec<u64>,
    /// How many have been given back to it.
    replayed: usize,
    /// The one operation has been made.
    has_stepped: bool,
    /// A sleep ends by itself.
    time_is_up: bool,
    words: Words,
}

/// A word of the model's.
#[derive(Debug, Clone, Copy)]
struct Place {
    address: usize,
    bytes: usize,
    /// Its initial value.
    first: u64,
}

impl Place {
    fn value(&self) -> u64 {
        // SAFETY: a word of the model's, which lives as long as the search, on this thread alone.
        unsafe {
            match self.bytes {
                1 => u64::from(*(self.address as *const u8)),
                4 => u64::from(*(self.address as *const u32)),
                _ => *(self.address as *const u64),
            }
        }
    }

    fn set(&self, value: u64) {
        // SAFETY: as above.
        unsafe {
            match self.bytes {
                1 => *(self.address as *mut u8) = value as u8,
                4 => *(self.address as *mut u32) = value as u32,
                _ => *(self.address as *mut u64) = value,
            }
        }
    }
}

/// The shared words that are written at all.
#[derive(Default)]
struct Words {
    known: HashSet<usize>,
    places: Vec<Place>,
    has_grown: bool,
}

thread_local! {
    static RUN: RefCell<Run> = RefCell::default();
}

fn step(operation: impl FnOnce() -> u64) -> u64 {
    let known = RUN.with_borrow_mut(|run| {
        let known = run.returned.get(run.replayed).copied();
        run.replayed += 1;
        known
    });
    if let Some(value) = known {
        return value;
    }
    if RUN.with_borrow_mut(|run| std::mem::replace(&mut run.has_stepped, true)) {
        resume_unwind(Box::new(Stop::Stepped));
    }
    let value = operation();
    RUN.with_borrow_mut(|run| run.returned.push(value));
    value
}

/// An operation that only reads.
pub(crate) fn load(address: usize, operation: impl FnOnce() -> u64) -> u64 {
    let is_written = RUN.with_borrow(|run| run.words.known.contains(&address));
    // A word that is never written has the same value at every time.
    if is_written {
        step(operation)
    } else {
        operation()
    }
}

/// One that may write.
pub(crate) fn change(address: usize, bytes: usize, operation: impl FnOnce() -> u64) -> u64 {
    RUN.with_borrow_mut(|run| {
        let Words {
            known,
            places,
            has_grown,
        } = &mut run.words;
        if known.insert(address) {
            let place = Place {
                address,
                bytes,
                first: 0,
            };
            places.push(Place {
                first: place.value(),
                ..place
            });
            *has_grown = true;
        }
    });
    step(operation)
}

/// A sleep as long as something is so, or until the time is up, which it is when nobody can do
/// anything else.
pub fn wait(is_so: impl FnOnce() -> bool) {
    step(|| {
        if is_so() && !RUN.with_borrow(|run| run.time_is_up) {
            resume_unwind(Box::new(Stop::Asleep));
        }
        0
    });
}

/// What a phase learns of the [`World`], which may change while it runs.
pub fn ask(about: impl FnOnce() -> u64) -> u64 {
    step(about)
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Process {
    At { phase: u64, returned: Rc<[u64]> },
    Dead,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    words: Rc<[u64]>,
    processes: Vec<Process>,
}

impl State {
    fn world(&self) -> World {
        let phase = |process: &Process| {
            if let Process::At { phase, .. } = process {
                *phase
            } else {
                DONE
            }
        };
        World {
            dead: self
                .processes
                .iter()
                .map(|process| *process == Process::Dead)
                .collect(),
            phases: self.processes.iter().map(phase).collect(),
        }
    }

    fn is_done(&self) -> bool {
        self.processes
            .iter()
            .all(|process| matches!(process, Process::Dead | Process::At { phase: DONE, .. }))
    }
}

/// The result of a search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    pub states: usize,
    pub steps: usize,
}

/// Searches all states. `make` makes a model with fresh words, the same each time but for where
/// they lie.
///
/// # Errors
/// The violation, and the steps to it.
pub fn search<M: Model>(
    make: impl Fn() -> M,
    deaths: usize,
    states_max: usize,
) -> Result<Found, String> {
    let model = make();
    atomic::set(Way::Steps);
    RUN.with_borrow_mut(|run| *run = Run::default());
    let result = loop {
        let result = Search::new(&model, deaths, states_max).run();
        let has_grown = RUN.with_borrow_mut(|run| std::mem::take(&mut run.words.has_grown));
        if !has_grown || result.as_ref().is_err_and(|error| !error.is_empty()) {
            break result;
        }
    };
    RUN.with_borrow_mut(|run| *run = Run::default());
    atomic::set(Way::Plain);
    result
}

struct Search<'a, M> {
    model: &'a M,
    deaths: usize,
    states_max: usize,
    numbers: HashMap<State, u32>,
    /// From which state each was reached first, and by what.
    from: Vec<(u32, String)>,
    /// The states that reach each state in one step.
    reached_from: Vec<Vec<u32>>,
    open: VecDeque<(u32, State)>,
    done: Vec<u32>,
    steps: usize,
}

impl<'a, M: Model> Search<'a, M> {
    fn new(model: &'a M, deaths: usize, states_max: usize) -> Search<'a, M> {
        Search {
            model,
            deaths,
            states_max,
            numbers: HashMap::new(),
            from: Vec::new(),
            reached_from: Vec::new(),
            open: VecDeque::new(),
            done: Vec::new(),
            steps: 0,
        }
    }

    /// An empty error: there are words that were not known before, so it is to be done again.
    fn run(mut self) -> Result<Found, String> {
        let begin = |index| Process::At {
            phase: self.model.begin(index),
            returned: [].into(),
        };
        let processes = (0..self.model.processes()).map(begin).collect();
        let words: Vec<u64> =
            RUN.with_borrow(|run| run.words.places.iter().map(|place| place.first).collect());
        self.enter(
            State {
                words: words.into(),
                processes,
            },
            0,
            "the beginning".into(),
        )?;
        while let Some((number, state)) = self.open.pop_front() {
            self.expand(number, &state)?;
            if RUN.with_borrow(|run| run.words.has_grown) {
                // What was read from these words so far was no step.
                self.restore(&[]);
                return Err(String::new());
            }
        }
        self.check_ends()?;
        Ok(Found {
            states: self.numbers.len(),
            steps: self.steps,
        })
    }

    fn expand(&mut self, number: u32, state: &State) -> Result<(), String> {
        let mut can_go_on = false;
        let mut sleepers = Vec::new();
        for (index, process) in state.processes.iter().enumerate() {
            let Process::At { phase, returned } = process else {
                continue;
            };
            if *phase == DONE {
                continue;
            }
            match self.make_step(number, state, index, *phase, returned, false)? {
                None => sleepers.push((index, *phase, returned.clone())),
                Some(next) => {
                    // One that looks in vain does not get further by it.
                    can_go_on |= next != *state;
                    self.enter(next, number, format!("process {index} in phase {phase:#x}"))?;
                }
            }
        }
        // Time passes when nobody can do anything else: the limits of sleeps are far longer than
        // any step.
        if !can_go_on {
            for (index, phase, returned) in sleepers {
                if let Some(next) = self.make_step(number, state, index, phase, &returned, true)? {
                    self.enter(next, number, format!("process {index} wakes up by itself"))?;
                }
            }
        }
        let dead = state
            .processes
            .iter()
            .filter(|process| **process == Process::Dead)
            .count();
        for (index, process) in state.processes.iter().enumerate() {
            let lives = matches!(process, Process::At { phase, .. } if *phase != DONE);
            if lives && dead < self.deaths && self.model.is_mortal(index) {
                let mut next = state.clone();
                next.processes[index] = Process::Dead;
                self.enter(next, number, format!("process {index} is killed"))?;
            }
        }
        Ok(())
    }

    fn make_step(
        &mut self,
        number: u32,
        state: &State,
        index: usize,
        phase: u64,
        returned: &Rc<[u64]>,
        time_is_up: bool,
    ) -> Result<Option<State>, String> {
        self.restore(&state.words);
        RUN.with_borrow_mut(|run| {
            (run.replayed, run.has_stepped, run.time_is_up) = (0, false, time_is_up);
            run.returned.clear();
            run.returned.extend_from_slice(returned);
        });
        self.steps += 1;
        let world = state.world();
        let came = match catch_unwind(AssertUnwindSafe(|| self.model.run(index, phase, &world))) {
            Ok(next) => Came::Over(next),
            Err(stop) => match stop.downcast_ref::<Stop>() {
                Some(Stop::Stepped) => Came::Stepped,
                Some(Stop::Asleep) => Came::Asleep,
                None => {
                    let text = stop.downcast_ref::<String>().map(String::as_str);
                    let text = text
                        .or(stop.downcast_ref::<&str>().copied())
                        .unwrap_or("it panicked");
                    return Err(format!("{text}\n{}", self.way(number)));
                }
            },
        };
        let process = match came {
            Came::Asleep => return Ok(None),
            Came::Over(phase) => Process::At {
                phase,
                returned: [].into(),
            },
            Came::Stepped => {
                let returned = RUN.with_borrow(|run| run.returned.as_slice().into());
                Process::At { phase, returned }
            }
        };
        let mut next = State {
            words: self.snapshot(),
            processes: state.processes.clone(),
        };
        next.processes[index] = process;
        Ok(Some(next))
    }

    fn enter(&mut self, state: State, from: u32, how: String) -> Result<(), String> {
        if let Some(&number) = self.numbers.get(&state) {
            self.reached_from[number as usize].push(from);
            return Ok(());
        }
        let number = self.numbers.len() as u32;
        self.numbers.insert(state.clone(), number);
        self.from.push((from, how));
        self.reached_from.push(vec![from]);
        self.restore(&state.words);
        // Loads here make no step.
        atomic::set(Way::Plain);
        let wrong = self.model.is_wrong(&state.world());
        atomic::set(Way::Steps);
        if let Some(wrong) = wrong {
            return Err(format!("{wrong}\n{}", self.way(number)));
        }
        if self.numbers.len() > self.states_max {
            return Err(format!("more than {} states", self.states_max));
        }
        if state.is_done() {
            self.done.push(number);
        }
        self.open.push_back((number, state));
        Ok(())
    }

    fn way(&self, number: u32) -> String {
        let mut way = Vec::new();
        let mut at = number;
        while at != 0 {
            let (from, how) = &self.from[at as usize];
            way.push(how.as_str());
            at = *from;
        }
        way.reverse();
        // Steps of one process in a row are one line.
        let mut lines: Vec<(&str, u32)> = Vec::new();
        for how in way {
            match lines.last_mut() {
                Some((last, count)) if *last == how => *count += 1,
                _ => lines.push((how, 1)),
            }
        }
        lines
            .iter()
            .map(|(how, count)| format!("  {how}: {count}\n"))
            .collect()
    }

    /// From every state there is a way to one in which all live processes are done.
    fn check_ends(&mut self) -> Result<(), String> {
        let mut can_end = vec![false; self.numbers.len()];
        let mut open = std::mem::take(&mut self.done);
        while let Some(number) = open.pop() {
            if !std::mem::replace(&mut can_end[number as usize], true) {
                open.extend(&self.reached_from[number as usize]);
            }
        }
        match can_end.iter().position(|can| !can) {
            None => Ok(()),
            Some(number) => {
                let way = self.way(number as u32);
                Err(format!("somebody hangs for ever\n{way}"))
            }
        }
    }

    fn restore(&self, words: &[u64]) {
        RUN.with_borrow(|run| {
            for (index, place) in run.words.places.iter().enumerate() {
                place.set(words.get(index).copied().unwrap_or(place.first));
            }
        });
    }

    fn snapshot(&self) -> Rc<[u64]> {
        RUN.with_borrow(|run| run.words.places.iter().map(Place::value).collect())
    }
}
