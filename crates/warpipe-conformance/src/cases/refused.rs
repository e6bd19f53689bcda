//! Each primitive after the driver refuses one call, once: any call of any function, with any code.
//!
//! The call returns a typed error, or the library tries again; later work is complete, comes once,
//! and leaves nothing behind.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use warpipe_testkit::{Rng, eventually, pick};

use super::Case;
use crate::context::Context;
use crate::fake_driver::FakeDriver;
use crate::workload::{KINDS, Kind, Site, Workload, is_refusal};

macro_rules! cases {
    ($($name:literal: $function:ident = $kind:literal;)*) => {
        pub(super) const CASES: &[Case] = &[$(Case::new($name, $function).limit(300).long(3600)),*];

        $(fn $function(context: &Context) -> Result<()> {
            matrix(context, $kind)
        })*
    };
}

cases! {
    "a channel loses, tears and leaks nothing if the driver refuses any one call":
        channel = "channel";
    "a queue does every job once and leaks nothing if the driver refuses any one call":
        queue = "queue";
    "a service answers every request once and leaks nothing if the driver refuses any one call":
        service = "service";
    "a pool keeps every block and leaks nothing if the driver refuses any one call":
        pool = "pool";
    "shared memory works the next time and leaks nothing if the driver refuses any one call":
        memory = "memory";
    "legacy memory works the next time and leaks nothing if the driver refuses any one call":
        legacy = "legacy handle";
    "a timeline continues and leaks nothing if the driver refuses any one call":
        timeline = "timeline";
    "an event continues and leaks nothing if the driver refuses any one call":
        event = "event";
    "a semaphore keeps every permit and leaks nothing if the driver refuses any one call":
        semaphore = "semaphore";
}

/// No memory, a capture somewhere in the process, and an unknown error.
const CODES: [i32; 3] = [2, 900, 999];
/// Turns in which the refusal may come.
const TURNS: u64 = 3;
/// Cells that are tried of each primitive's matrix, but for the long mode.
const SHORT: usize = 40;
/// How long anything may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often one refusal may be reported: by the call, by the ended link, by the new peer that
/// was refused.
const REPORTS_MAX: u64 = 3;
/// Failed cells that are named.
const NAMED: usize = 100;

/// One refusal: this call of this function, with this code.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Cell {
    function: String,
    call: u64,
    code: i32,
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} with {}", self.function, self.call, self.code)
    }
}

/// The outcomes of the cells.
#[derive(Debug, Default)]
struct Sum {
    refusals: u64,
    reports: u64,
    failed: Vec<String>,
}

fn matrix(context: &Context, name: &str) -> Result<()> {
    let kind = *KINDS
        .iter()
        .find(|kind| kind.name == name)
        .context("a primitive")?;
    let fake_driver = Arc::new(FakeDriver::of(&context.settings)?);
    let twin = Arc::new(context.twin());
    let site = Site {
        context: twin,
        name: "refused".into(),
        fake_driver: Some(fake_driver.clone()),
        patience: PATIENCE,
    };
    let all = cells(context, kind, &site, &fake_driver)?;
    let chosen = choose(&all, context);
    let under_way = watch_over(&all);
    let (mut sum, mut seeds) = (Sum::default(), 1000..);
    for cell in &chosen {
        *under_way.lock().unwrap_or_else(PoisonError::into_inner) =
            (Some(cell.clone()), Instant::now());
        if let Err(error) = refuse(
            context,
            kind,
            &site,
            &fake_driver,
            cell,
            &mut seeds,
            &mut sum,
        ) {
            eprintln!("{cell}: {error:#}");
            sum.failed.push(format!("{cell}: {error:#}"));
        }
        ensure!(sum.failed.len() < NAMED, "{}", sum.failed.join("; "));
    }
    fake_driver.reset()?;
    context.figure("cells", all.len());
    context.figure("refusals", sum.refusals);
    context.figure("reports", sum.reports);
    ensure!(sum.failed.is_empty(), "{}", sum.failed.join("; "));
    ensure!(sum.refusals > 0, "nothing was refused");
    Ok(())
}

/// Every call that the workload makes while nothing is refused.
fn cells(
    context: &Context,
    kind: Kind,
    site: &Site,
    fake_driver: &FakeDriver,
) -> Result<Vec<Cell>> {
    let guard = context.guard();
    fake_driver.reset()?;
    let mut workload = kind.open(site.clone())?;
    (1..=TURNS).try_for_each(|turn| workload.turn(turn))?;
    workload.audit()?;
    drop(workload);
    guard.settles()?;
    let mut cells = Vec::new();
    for (function, calls) in fake_driver.calls()? {
        for call in 1..=calls {
            cells.extend(CODES.map(|code| Cell {
                function: function.clone(),
                call,
                code,
            }));
        }
    }
    Ok(cells)
}

/// Some of each function's, whatever their numbers.
fn choose(all: &[Cell], context: &Context) -> Vec<Cell> {
    if context.settings.long {
        return all.to_vec();
    }
    let mut rng: Rng = context.rng();
    let mut functions: Vec<&str> = all.iter().map(|cell| cell.function.as_str()).collect();
    functions.dedup();
    let of = |name: &str| {
        all.iter()
            .filter(|cell| cell.function == name)
            .collect::<Vec<_>>()
    };
    let mut chosen: Vec<Cell> = Vec::new();
    for index in 0..SHORT.min(all.len()) {
        let cell = (*pick(&mut rng, &of(functions[index % functions.len()]))).clone();
        if !chosen.contains(&cell) {
            chosen.push(cell);
        }
    }
    chosen
}

type UnderWay = Arc<Mutex<(Option<Cell>, Instant)>>;

/// Ends the process, and names the cell, when one does not come to an end.
fn watch_over(all: &[Cell]) -> UnderWay {
    let under_way: UnderWay = Arc::new(Mutex::new((None, Instant::now())));
    let watched = Arc::downgrade(&under_way);
    let count = all.len();
    std::thread::spawn(move || {
        while let Some(under_way) = watched.upgrade() {
            let (cell, since) = under_way
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clone();
            drop(under_way);
            if let Some(cell) = cell
                && since.elapsed() > 5 * PATIENCE
            {
                eprintln!("{cell}, one of {count}, does not come to an end");
                std::process::abort();
            }
            std::thread::park_timeout(PATIENCE / 10);
        }
    });
    under_way
}

/// Opens, again where that was refused. A name may be taken for a moment after its last owner.
fn open(kind: Kind, site: &Site, reports: &mut u64) -> Result<Box<dyn Workload>> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let error = match kind.open(site.clone()) {
            Ok(workload) => return Ok(workload),
            Err(error) => error,
        };
        let is_taken = matches!(
            error.downcast_ref(),
            Some(warpipe::Error::Name(warpipe::NameFault::Taken { .. }))
        );
        let is_over = Instant::now() >= deadline || *reports >= REPORTS_MAX;
        ensure!(!is_over && is_refusal(&error), error.context("opening it"));
        *reports += u64::from(!is_taken);
        std::thread::park_timeout(Duration::from_millis(1));
    }
}

/// 1 if a call was refused, 0 if all went well.
fn count_refused(turn: Result<()>) -> Result<u64> {
    match turn {
        Err(error) if is_refusal(&error) => Ok(1),
        other => other.map(|()| 0),
    }
}

fn has_failed(fake_driver: &FakeDriver, cell: &Cell) -> bool {
    fake_driver
        .failed(&cell.function)
        .is_ok_and(|failed| failed > 0)
}

fn refuse(
    context: &Context,
    kind: Kind,
    site: &Site,
    fake_driver: &FakeDriver,
    cell: &Cell,
    seeds: &mut impl Iterator<Item = u64>,
    sum: &mut Sum,
) -> Result<()> {
    let guard = context.guard();
    fake_driver.reset()?;
    fake_driver.fail(&cell.function, cell.call, cell.code)?;
    let mut seed = || seeds.next().context("a number");
    let mut reports = 0;
    let mut workload = open(kind, site, &mut reports)?;
    for _ in 0..TURNS {
        reports += count_refused(workload.turn(seed()?))?;
    }
    if fake_driver.failed(&cell.function)? == 0 {
        // It comes while everything is dropped; or not at all, where threads took turns in another
        // order.
        drop(workload);
        eventually(PATIENCE, || {
            guard.is_settled() || has_failed(fake_driver, cell)
        });
        sum.refusals += fake_driver.failed(&cell.function)?;
        fake_driver.reset()?;
        workload = open(kind, site, &mut reports).context("again")?;
    } else {
        sum.refusals += 1;
        fake_driver.reset()?;
    }
    // Only the next call may report the refusal.
    let mut well = 0;
    while well < 2 {
        let is_refused =
            count_refused(workload.turn(seed()?)).context("when nothing is refused any more")?;
        (well, reports) = if is_refused == 0 {
            (well + 1, reports)
        } else {
            (0, reports + is_refused)
        };
        ensure!(
            reports <= REPORTS_MAX,
            "one refusal was reported {reports} times"
        );
    }
    sum.reports += reports;
    workload.audit().context("at the end")?;
    drop(workload);
    guard.settles()
}
