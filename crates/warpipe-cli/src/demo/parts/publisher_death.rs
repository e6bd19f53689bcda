//! Part 4: the publisher is killed in the middle of a write, and another takes its place.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::{Value, json};
use warpipe::clock::now_ns;

use super::{Part, reach, wait_published};
use crate::demo::processes::Id;
use crate::demo::protocol::{Event, Order, Previous};
use crate::demo::stage::{Stage, Timeline};

pub const PART: Part = Part {
    event: "publisher_death",
    heading: |stage| {
        let when = if stage.is_busy() {
            "in the middle of a write"
        } else {
            "between two writes"
        };
        format!("death of the publisher: SIGKILL {when}")
    },
    run,
};

/// How long the next publisher publishes.
const STRETCH: Duration = Duration::from_millis(300);
/// Lines for as many survivors; of more, the first and the last.
const LINES_MAX: usize = 4;

/// A survivor's report.
#[derive(Debug, Default)]
struct Survivor {
    role: String,
    notified_ns: u64,
    /// The item that it discarded, and when.
    lost: Option<(u64, u64)>,
    /// The first item of the next publisher, and when; and what was before.
    first_after: u64,
    continued_ns: u64,
    previous: Option<Previous>,
}

fn run(stage: &mut Stage) -> anyhow::Result<Value> {
    let victim = stage.publisher;
    let pid = stage.pid(victim);
    let (complete, writing) = stop_in_write(stage, victim)?;
    let mut timeline = Timeline::new(stage.kill(victim)?);
    stage.line(match writing {
        Some(number) => {
            format!("   the publisher (process {pid}) has written half of item {number}, and is killed; from then on:")
        }
        None => format!("   the publisher (process {pid}) has completed item {complete}, and is killed; from then on:"),
    })?;
    let ids = stage.subscribers.clone();
    let mut survivors = Vec::new();
    for &id in &ids {
        let notified_ns = stage.wait(id, "its publisher has gone", gone)?;
        survivors.push(Survivor {
            role: stage.role(id),
            notified_ns,
            ..Survivor::default()
        });
    }
    say(&mut timeline, &survivors, "is notified", |survivor| {
        Some(survivor.notified_ns)
    });
    if writing.is_some() {
        for (&id, survivor) in ids.iter().zip(&mut survivors) {
            survivor.lost = Some(stage.wait(id, "it has discarded what is lost", lost)?);
        }
        for number in survivors
            .iter()
            .filter_map(|survivor| Some(survivor.lost?.0))
            .collect::<BTreeSet<_>>()
        {
            let text = format!("has discarded item {number} as lost; its stream goes on");
            say(&mut timeline, &survivors, &text, |survivor| {
                survivor
                    .lost
                    .filter(|lost| lost.0 == number)
                    .map(|lost| lost.1)
            });
        }
    }
    let started_ns = now_ns();
    stage.publisher = stage.start_publisher(ids.len())?;
    timeline.add(
        started_ns,
        format_args!(
            "a new publisher is started (process {})",
            stage.pid(stage.publisher)
        ),
    );
    timeline.print(stage)?;
    publish(stage)?;
    for (&id, survivor) in ids.iter().zip(&mut survivors) {
        let (number, at_ns, previous) =
            stage.wait(id, "it follows the new publisher", continued)?;
        (survivor.first_after, survivor.continued_ns) = (number, at_ns);
        survivor.previous = Some(previous);
    }
    let text = "has verified the new publisher's first item";
    say(&mut timeline, &survivors, text, |survivor| {
        Some(survivor.continued_ns)
    });
    timeline.print(stage)?;
    judge(stage, &survivors, pid, complete, writing);
    let (items, _) = wait_published(stage)?;
    reach(stage, items)?;
    Ok(json!({
        "pid": pid,
        "busy": stage.is_busy(),
        "complete": complete,
        "writing": writing,
        "started_ms": timeline.ms(started_ns),
        "survivors": survivors.iter().map(|survivor| figures(&timeline, survivor)).collect::<Vec<_>>(),
    }))
}

fn figures(timeline: &Timeline, survivor: &Survivor) -> Value {
    json!({
        "role": survivor.role,
        "notified_ms": timeline.ms(survivor.notified_ns),
        "lost": survivor.lost.map(|(number, _)| number),
        "lost_ms": survivor.lost.map(|(_, at_ns)| timeline.ms(at_ns)),
        "continued_ms": timeline.ms(survivor.continued_ns),
        "last_before": survivor.previous.map(|previous| previous.last),
        "first_after": survivor.first_after,
    })
}

fn gone(event: &Event) -> Option<u64> {
    if let Event::PublisherGone { at_ns } = event {
        Some(*at_ns)
    } else {
        None
    }
}

fn lost(event: &Event) -> Option<(u64, u64)> {
    if let Event::Lost { number, at_ns } = event {
        Some((*number, *at_ns))
    } else {
        None
    }
}

fn continued(event: &Event) -> Option<(u64, u64, Previous)> {
    match event {
        Event::First {
            number,
            at_ns,
            after: Some(previous),
        } => Some((*number, *at_ns, *previous)),
        _ => None,
    }
}

/// Has the publisher stop, and the subscribers wait for the item that it does not complete.
fn stop_in_write(stage: &mut Stage, victim: Id) -> anyhow::Result<(u64, Option<u64>)> {
    stage.order(
        victim,
        &Order::StopInWrite {
            busy: stage.is_busy(),
        },
    )?;
    let (complete, writing) =
        stage.wait(victim, "it has stopped in a write", |event| match event {
            Event::Stopped { complete, writing } => Some((*complete, *writing)),
            _ => None,
        })?;
    if let Some(number) = writing {
        let subscribers = stage.subscribers.clone();
        subscribers
            .iter()
            .try_for_each(|&id| stage.order(id, &Order::Await { number }))?;
        for id in subscribers {
            stage.wait(id, "its stream waits", |event| {
                (*event == Event::Waiting).then_some(())
            })?;
        }
    }
    Ok((complete, writing))
}

/// Has the next publisher publish as soon as the survivors follow it.
fn publish(stage: &mut Stage) -> anyhow::Result<()> {
    stage.wait_ready(&[stage.publisher])?;
    let milliseconds = Some(STRETCH.as_millis() as u64);
    stage.order(
        stage.publisher,
        &Order::Publish {
            milliseconds,
            items: stage.args.items,
        },
    )
}

/// A line for each survivor, or of many for the first and the last.
fn say(
    timeline: &mut Timeline,
    survivors: &[Survivor],
    text: &str,
    when: impl Fn(&Survivor) -> Option<u64>,
) {
    let mut reports: Vec<_> = survivors
        .iter()
        .filter_map(|survivor| Some((when(survivor)?, &survivor.role)))
        .collect();
    if reports.len() <= LINES_MAX {
        return reports
            .into_iter()
            .for_each(|(at_ns, role)| timeline.add(at_ns, format_args!("{role} {text}")));
    }
    reports.sort();
    timeline.add(
        reports[0].0,
        format_args!("the first of {} subscribers {text}", reports.len()),
    );
    timeline.add(
        reports[reports.len() - 1].0,
        format_args!("the last of them {text}"),
    );
}

fn judge(stage: &mut Stage, survivors: &[Survivor], pid: u32, complete: u64, writing: Option<u64>) {
    for survivor in survivors {
        let Survivor {
            role,
            lost,
            first_after,
            previous,
            ..
        } = survivor;
        let last = previous.map_or(0, |previous| previous.last);
        stage.claim(
            "nothing was lost that was complete",
            last == complete,
            || {
                format!(
                    "{role} verified everything up to item {last}, and item {complete} was complete"
                )
            },
        );
        let discarded = lost.map(|(number, _)| number);
        stage.claim(
            "what was not complete was discarded, and nothing else",
            discarded == writing,
            || format!("{role} discarded {discarded:?}, and {writing:?} was being written"),
        );
        let follows =
            previous.is_some_and(|previous| previous.pid == pid as i32 && !previous.graceful);
        stage.claim(
            "every survivor followed the next publisher",
            follows && *first_after == 1,
            || format!("{role} followed {previous:?} with item {first_after}"),
        );
    }
}
