//! Part 3: a subscriber is killed while it holds samples, and another takes its place.

use std::time::Duration;

use serde_json::{Value, json};

use warpipe::clock::now_ns;

use super::{Part, list, plural, publish_on};
use crate::demo::processes::Id;
use crate::demo::protocol::{Event, Order};
use crate::demo::stage::{Stage, Timeline};
use crate::output::duration;

pub const PART: Part = Part {
    event: "subscriber_death",
    heading: |stage| {
        let when = if stage.is_busy() {
            "in the middle of its work"
        } else {
            "while it holds samples"
        };
        format!("death of a subscriber: SIGKILL {when}")
    },
    run,
};

/// Lines for as many other subscribers.
const LINES_MAX: usize = 4;

fn run(stage: &mut Stage) -> anyhow::Result<Value> {
    let number = stage.subscribers.len();
    let victim = stage.subscribers[number - 1];
    let others = stage.others(victim);
    publish_on(stage)?;
    let held = hold(stage, victim)?;
    let (role, pid) = (stage.role(victim), stage.pid(victim));
    stage.order(
        stage.publisher,
        &Order::Watch {
            pid: pid as i32,
            numbers: held.clone(),
        },
    )?;
    stage.wait(stage.publisher, "it watches", |event| {
        (*event == Event::Watching).then_some(())
    })?;
    let mut timeline = Timeline::new(stage.kill(victim)?);
    stage.line(format_args!(
        "   {role} (process {pid}) holds items {}, and is killed; from then on:",
        list(&held)
    ))?;

    let notified_ns = of_publisher(stage, gone)?;
    timeline.add(notified_ns, "the publisher is notified");
    let started_ns = now_ns();
    let next = stage.start_subscriber(number)?;
    stage.subscribers[number - 1] = next;
    timeline.add(
        started_ns,
        format_args!("a new {role} is started (process {})", stage.pid(next)),
    );
    let released_ns = of_publisher(stage, released)?;
    timeline.add(
        released_ns,
        format_args!(
            "the {} that it held are released",
            plural(held.len(), "slot")
        ),
    );
    let lent_ns = of_publisher(stage, lent_again)?;
    timeline.add(lent_ns, "and lent again");
    let early = stage.take(next, first_item);
    if early.is_none() {
        timeline.print(stage)?;
    }
    let (first, first_ns) = early.map_or_else(
        || stage.wait(next, "its first item is verified", first_item),
        Ok,
    )?;
    timeline.add(
        first_ns,
        format_args!("the new {role} has verified its first item, {first}"),
    );
    timeline.print(stage)?;

    let ms = [notified_ns, released_ns, lent_ns].map(|at_ns| timeline.ms(at_ns));
    stage.claim(
        "the publisher was notified, then released the dead subscriber's slots and lent them again",
        timeline.killed_ns < notified_ns && notified_ns <= released_ns && released_ns <= lent_ns,
        || format!("after {ms:?} ms"),
    );
    stage.claim(
        "a new subscriber continued with an item that was sent after the kill",
        held.iter().all(|&held| first > held),
        || format!("its first item is {first}, the dead one held {held:?}"),
    );
    let others = meanwhile(stage, &others, timeline.killed_ns, first_ns)?;
    Ok(json!({
        "pid": pid,
        "busy": stage.is_busy(),
        "held": held,
        "notified_ms": ms[0],
        "released_ms": ms[1],
        "lent_again_ms": ms[2],
        "others": others,
        "started_ms": timeline.ms(started_ns),
        "first_verified_ms": timeline.ms(first_ns),
        "first_item": first,
    }))
}

fn gone(event: &Event) -> Option<u64> {
    if let Event::SubscriberGone { at_ns } = event {
        Some(*at_ns)
    } else {
        None
    }
}

fn released(event: &Event) -> Option<u64> {
    if let Event::Released { at_ns } = event {
        Some(*at_ns)
    } else {
        None
    }
}

fn lent_again(event: &Event) -> Option<u64> {
    if let Event::LentAgain { at_ns } = event {
        Some(*at_ns)
    } else {
        None
    }
}

fn first_item(event: &Event) -> Option<(u64, u64)> {
    if let Event::First { number, at_ns, .. } = event {
        Some((*number, *at_ns))
    } else {
        None
    }
}

/// Has a subscriber keep the items that it receives. Returns them.
fn hold(stage: &mut Stage, victim: Id) -> anyhow::Result<Vec<u64>> {
    stage.order(
        victim,
        &Order::Hold {
            busy: stage.is_busy(),
        },
    )?;
    let (numbers, counts) = stage.wait(victim, "it holds samples", |event| match event {
        Event::Held { numbers, counts } => Some((numbers.clone(), *counts)),
        _ => None,
    })?;
    stage.record(victim, counts);
    Ok(numbers)
}

fn of_publisher(stage: &mut Stage, pick: fn(&Event) -> Option<u64>) -> anyhow::Result<u64> {
    stage.wait(
        stage.publisher,
        "what becomes of the killed subscriber's slots",
        pick,
    )
}

/// The work of the other subscribers between two times.
fn meanwhile(
    stage: &mut Stage,
    others: &[Id],
    from_ns: u64,
    until_ns: u64,
) -> anyhow::Result<Vec<Value>> {
    others
        .iter()
        .try_for_each(|&id| stage.order(id, &Order::Since { from_ns, until_ns }))?;
    let mut all = Vec::new();
    for (index, &id) in others.iter().enumerate() {
        let (verified, apart_ns, gaps) = stage.wait(id, "it went on", |event| match event {
            Event::Went {
                verified,
                apart_ns,
                gaps,
            } => Some((*verified, *apart_ns, *gaps)),
            _ => None,
        })?;
        let role = stage.role(id);
        let apart = Duration::from_nanos(apart_ns);
        if index < LINES_MAX {
            let (items, apart) = (plural(verified as usize, "item"), duration(apart));
            let went = format!("{items} verified meanwhile, at most {apart} apart");
            let how = if gaps == 0 {
                "went on without a gap"
            } else {
                "went on WITH A GAP"
            };
            stage.line(format_args!("   {role} {how}: {went}"))?;
        }
        stage.claim(
            "the other subscribers went on without a gap",
            verified > 0 && gaps == 0,
            || format!("{role} verified {verified} items meanwhile, {gaps} were out of order"),
        );
        all.push(json!({ "role": role, "verified": verified, "apart_ms": apart_ns as f64 / 1e6 }));
    }
    if let Some(more) = others.len().checked_sub(LINES_MAX).filter(|&more| more > 0) {
        stage.line(format_args!("   and so did {more} more"))?;
    }
    Ok(all)
}
