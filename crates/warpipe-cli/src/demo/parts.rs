//! The parts of the demo, in their order.

use std::time::Duration;

use serde_json::{Value, json};
use warpipe::clock;

use super::stage::{Id, Stage, number};
use super::{MEASURED, SMALL_BYTES, WARM_UP};
use crate::output::{Style, bytes, count, counted, duration, styled};

const MPS_NOTE: &str = concat!(
    "   an MPS daemon answers: a kill in the middle of a kernel would end all its clients,\n",
    "   so processes are killed while they have no work on the device",
);

/// The publisher and the subscribers that are now.
struct Processes {
    publisher: Id,
    subscribers: Vec<Id>,
}

/// Runs every part, ends the processes, and looks at what is left over.
pub fn perform(stage: &mut Stage) -> anyhow::Result<()> {
    announce(stage)?;
    let publisher = start_publisher(stage)?;
    let subscribers = (1..=stage.args.subscribers).map(|number| start_subscriber(stage, number));
    let mut processes = Processes {
        publisher,
        subscribers: subscribers.collect::<Result<_, _>>()?,
    };
    for id in processes.subscribers.iter().copied().chain([publisher]) {
        stage.wait(id, "ready")?;
    }
    stage.tell(&json!({ "event": "ready" }))?;
    for part in [latency, throughput, subscriber_death, publisher_death] {
        let figures = part(stage, &mut processes)?;
        stage.figures(figures)?;
    }
    end(stage)
}

fn start_publisher(stage: &mut Stage) -> anyhow::Result<Id> {
    stage.start("demo-publisher", "publisher")
}

fn start_subscriber(stage: &mut Stage, number: u32) -> anyhow::Result<Id> {
    stage.start("demo-subscriber", &format!("subscriber {number}"))
}

fn announce(stage: &mut Stage) -> anyhow::Result<()> {
    let (device, why) = (&stage.chosen.device, &stage.chosen.why);
    // `first GPU: NAME, UUID` names it already.
    let device = match why.starts_with("first GPU") {
        true => format!("the {why}"),
        false => format!("{device} ({why})"),
    };
    stage.line(styled(Style::Bold, &format!("warpipe demo on {device}")))?;
    if stage.is_mps {
        stage.line(MPS_NOTE)?;
    }
    Ok(())
}

fn heading(stage: &Stage, text: &str) -> anyhow::Result<()> {
    stage.line(format_args!("\n{}", styled(Style::Bold, text)))
}

/// Small tensors, one at a time: from the call that fills one until a subscriber's CPU knows that
/// its device has checked it.
fn latency(stage: &mut Stage, processes: &mut Processes) -> anyhow::Result<Value> {
    heading(stage, "1  latency: one item in flight")?;
    stage.order(processes.publisher, "one at a time");
    let latency = stage.wait(processes.subscribers[0], "latency")?;
    let [p50, p99] = ["p50_us", "p99_us"].map(|name| {
        let us = latency[name].as_f64().unwrap_or_default();
        duration(Duration::from_secs_f64(us / 1e6))
    });
    let (size, items) = (bytes(SMALL_BYTES), count(MEASURED));
    let how = format!("filled, sent, received, checked; {items} items of {size}");
    let text = format!("   hand-over   p50 {p50}   p99 {p99}   ({how})");
    stage.line(text)?;
    for &id in &processes.subscribers {
        let is_last = |counts: &Value| number(counts, "last") == WARM_UP + MEASURED;
        stage.wait_for(id, "counts", is_last)?;
    }
    Ok(latency)
}

/// Large tensors to all subscribers, as fast as they are taken.
fn throughput(stage: &mut Stage, processes: &mut Processes) -> anyhow::Result<Value> {
    let subscribers = counted(processes.subscribers.len(), "subscriber", "subscribers");
    let size = bytes(stage.item_bytes());
    let title = format!("2  throughput: tensors of {size} to {subscribers}");
    heading(stage, &title)?;
    let (before, begun_ns) = (stage.total("verified"), clock::now_ns());
    stage.order(processes.publisher, "watch");
    stage.order(processes.publisher, "publish");
    let end_ns = begun_ns + stage.args.seconds.as_nanos() as u64;
    let (mut verified, mut last_ns, mut wrong) = (0, 0, 0);
    for &id in &processes.subscribers {
        let counts = stage.wait_for(id, "counts", |counts| number(counts, "last_ns") >= end_ns)?;
        verified += number(&counts, "verified");
        wrong += number(&counts, "wrong") + number(&counts, "gaps");
        last_ns = last_ns.max(number(&counts, "last_ns"));
    }
    let verified = verified - before;
    let detail = format!("{wrong} items held wrong words, or came out of order");
    stage.claim("every subscriber verified every tensor", wrong == 0, detail);
    let seconds = last_ns.saturating_sub(begun_ns) as f64 / 1e9;
    let rate = (verified * stage.item_bytes()) as f64 / seconds / 1e9;
    let how = "(bytes x subscribers / time), no byte copied";
    stage.line(format_args!("   {rate:.2} GB/s made visible {how}"))?;
    let (tensors, where_to) = (count(verified), "every word, on the device");
    let text = format!("   {tensors} tensors verified in {seconds:.2} s, {where_to}");
    stage.line(text)?;
    Ok(json!({
        "event": "throughput", "verified": verified, "seconds": seconds, "visible_gb_per_s": rate,
    }))
}

/// A subscriber is killed while it holds samples, and another takes its place.
fn subscriber_death(stage: &mut Stage, processes: &mut Processes) -> anyhow::Result<Value> {
    let is_busy = stage.is_busy();
    let (when, order) = match is_busy {
        true => ("in the middle of its work", "hold and work"),
        false => ("while it holds samples", "hold"),
    };
    heading(stage, &format!("3  death of a subscriber: SIGKILL {when}"))?;
    let (publisher, last) = (processes.publisher, processes.subscribers.len() - 1);
    let victim = processes.subscribers[last];
    let (role, pid) = (stage.role(victim), stage.pid(victim));
    stage.order(victim, order);
    let held = stage.wait(victim, "held")?["numbers"].take();
    let held: Vec<u64> = serde_json::from_value(held)?;
    stage.kill(victim)?;
    let verified = |&id| (id, number(stage.said(id, "counts"), "verified"));
    let others: Vec<_> = processes.subscribers[..last].iter().map(verified).collect();
    let text = format!("{role} (process {pid}) holds {held:?}, and is killed; from then on:");
    stage.line(format_args!("   {text}"))?;

    let notified_ns = stage.time_of(publisher, "gone")?;
    let notified_ms = stage.moment(notified_ns, "the publisher is notified")?;
    let released_ns = stage.time_of(publisher, "released")?;
    let released_ms = stage.moment(released_ns, "the slots that it held are released")?;
    let started_ns = clock::now_ns();
    let next = start_subscriber(stage, last as u32 + 1)?;
    processes.subscribers[last] = next;
    let text = format!("a new {role} is started (process {})", stage.pid(next));
    let started_ms = stage.moment(started_ns, text)?;
    let first = stage.wait(next, "first")?;
    let (first, first_ns) = (number(&first, "number"), number(&first, "at_ns"));
    let text = format!("the new {role} has verified its first item, {first}");
    let first_verified_ms = stage.moment(first_ns, text)?;
    let claim = "a new subscriber continued with an item that was sent after the kill";
    let holds = held.iter().all(|&held| first > held);
    stage.claim(claim, holds, format!("its first item is {first}"));
    Ok(json!({
        "event": "subscriber_death", "pid": pid, "busy": is_busy, "held": held,
        "notified_ms": notified_ms, "released_ms": released_ms, "started_ms": started_ms,
        "first_verified_ms": first_verified_ms, "first_item": first,
        "others": verified_until(stage, &others, first_ns)?,
    }))
}

/// What the other subscribers have done until a time, beyond what they had verified before.
fn verified_until(
    stage: &mut Stage,
    others: &[(Id, u64)],
    until_ns: u64,
) -> anyhow::Result<Vec<Value>> {
    let mut all = Vec::new();
    for &(id, before) in others {
        let counts = stage.wait_for(id, "counts", |it| number(it, "last_ns") >= until_ns)?;
        let verified = number(&counts, "verified") - before;
        let gaps = number(&counts, "gaps");
        let (role, items) = (stage.role(id), counted(verified as usize, "item", "items"));
        let how = match gaps {
            0 => "went on without a gap",
            _ => "went on WITH A GAP",
        };
        stage.line(format_args!("   {role} {how}: {items} verified meanwhile"))?;
        let claim = "the other subscribers went on without a gap";
        let detail = format!("{role}: {verified} items meanwhile, {gaps} out of order");
        stage.claim(claim, verified > 0 && gaps == 0, detail);
        all.push(json!({ "role": role, "verified": verified }));
    }
    Ok(all)
}

/// The publisher is killed in the middle of a write, and another takes its place.
fn publisher_death(stage: &mut Stage, processes: &mut Processes) -> anyhow::Result<Value> {
    let is_busy = stage.is_busy();
    let (when, order) = match is_busy {
        true => ("in the middle of a write", "stop in a write"),
        false => ("between two writes", "stop"),
    };
    heading(stage, &format!("4  death of the publisher: SIGKILL {when}"))?;
    let victim = processes.publisher;
    let pid = stage.pid(victim);
    stage.order(victim, order);
    let stopped = stage.wait(victim, "stopped")?;
    let (complete, writing) = (number(&stopped, "complete"), stopped["writing"].as_u64());
    if is_busy {
        for &id in &processes.subscribers {
            stage.wait(id, "waiting")?;
        }
    }
    stage.kill(victim)?;
    let what = match writing {
        Some(writing) => format!("has written half of item {writing}"),
        None => format!("has completed item {complete}"),
    };
    let text = format!("the publisher (process {pid}) {what}, and is killed; from then on:");
    stage.line(format_args!("   {text}"))?;
    let mut survivors: Vec<_> = processes.subscribers.iter().map(|_| json!({})).collect();
    for (&id, survivor) in processes.subscribers.iter().zip(&mut survivors) {
        let (role, at_ns) = (stage.role(id), stage.time_of(id, "gone")?);
        survivor["notified_ms"] = stage.moment(at_ns, format!("{role} is notified"))?.into();
        if let Some(writing) = writing {
            let lost = stage.wait(id, "lost")?;
            let text = format!("{role} has discarded item {writing} as lost; its stream goes on");
            survivor["lost_ms"] = stage.moment(number(&lost, "at_ns"), text)?.into();
            survivor["lost"] = lost["number"].clone();
        }
        survivor["role"] = role.into();
    }
    stage.reap(victim)?;
    let started_ns = clock::now_ns();
    processes.publisher = start_publisher(stage)?;
    let started = stage.pid(processes.publisher);
    let text = format!("a new publisher is started (process {started})");
    let started_ms = stage.moment(started_ns, text)?;
    stage.wait(processes.publisher, "ready")?;
    stage.order(processes.publisher, "publish");
    for (&id, survivor) in processes.subscribers.iter().zip(&mut survivors) {
        // Not the first item of the publisher before.
        let first = stage.wait_for(id, "first", |first| first["before"] == pid)?;
        let (role, last) = (stage.role(id), number(&first, "last"));
        let text = format!("{role} has verified the new publisher's first item");
        survivor["continued_ms"] = stage.moment(number(&first, "at_ns"), text)?.into();
        survivor["last_before"] = last.into();
        survivor["first_after"] = first["number"].clone();
        let detail = format!("{role} verified up to item {last} of {complete} complete ones");
        let claim = "nothing was lost that was complete";
        stage.claim(claim, last == complete, detail);
        let claim = "what was not complete was discarded, and nothing else";
        let detail = format!("{role}: {survivor}, and {writing:?} was being written");
        stage.claim(claim, survivor["lost"].as_u64() == writing, detail);
        let claim = "every survivor followed the next publisher";
        let detail = format!("{role} followed with {first}");
        stage.claim(claim, first["number"] == 1, detail);
    }
    Ok(json!({
        "event": "publisher_death", "pid": pid, "busy": is_busy, "complete": complete,
        "writing": writing, "started_ms": started_ms, "survivors": survivors,
    }))
}

/// Ends all processes, and checks the claims that hold then.
fn end(stage: &mut Stage) -> anyhow::Result<()> {
    stage.end_all()?;
    let (wrong, gaps) = (stage.total("wrong"), stage.total("gaps"));
    let detail = format!("{wrong} items held wrong words, {gaps} came out of order");
    let claim = "every item was right, and came in its turn";
    stage.claim(claim, wrong + gaps == 0, detail);
    if stage.args.plant.as_deref() == Some("leftover") {
        std::fs::write(stage.domain.join("planted"), "")?;
    }
    let left = std::fs::read_dir(&stage.domain)?.collect::<Result<Vec<_>, _>>()?;
    stage.claim("nothing is left over", left.is_empty(), format!("{left:?}"));
    Ok(())
}
