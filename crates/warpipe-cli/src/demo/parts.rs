//! The parts of the demo, in their order.

use std::time::Duration;

use anyhow::Context;
use serde_json::{Value, json};
use warpipe::clock;

use super::stage::{Id, Stage};
use super::{MEASURED, SMALL_BYTES, WARM_UP};
use crate::output::{Style, bytes, count, counted, duration, styled};

const MPS_NOTE: &str = concat!(
    "   an MPS daemon answers: a kill in the middle of a kernel would end all its clients,\n",
    "   so processes are killed while they have no work on the device",
);

/// Runs every part, ends the processes, and looks at what is left over.
pub fn perform(stage: &mut Stage) -> anyhow::Result<()> {
    stage.line(stage.chosen.title("warpipe demo"))?;
    if stage.is_mps {
        stage.line(MPS_NOTE)?;
    }
    stage.publisher = stage.start("demo-publisher", "publisher")?;
    for _ in 0..stage.args.subscribers {
        stage.start_subscriber()?;
    }
    for id in 0..=stage.subscribers.len() {
        stage.wait(id, "ready")?;
    }
    stage.output.json_only(&json!({ "event": "ready" }))?;
    for part in [latency, throughput, subscriber_death, publisher_death] {
        let figures = part(stage)?;
        stage.figures(figures)?;
    }
    end(stage)
}

fn heading(stage: &Stage, text: &str) -> anyhow::Result<()> {
    stage.line(format_args!("\n{}", styled(Style::Bold, text)))
}

/// Small tensors, one at a time: from the call that fills one until a subscriber's CPU knows that
/// its device has checked it.
fn latency(stage: &mut Stage) -> anyhow::Result<Value> {
    heading(stage, "1  latency: one item in flight")?;
    stage.order(stage.publisher, "one at a time");
    for id in stage.subscribers.clone() {
        stage.wait_until(id, "last", |last| last == WARM_UP + MEASURED)?;
    }
    let ns = ["p50_ns", "p99_ns"].map(|name| stage.number(stage.subscribers[0], name));
    let [p50, p99] = ns.map(|ns| duration(Duration::from_nanos(ns)));
    let (size, items) = (bytes(SMALL_BYTES), count(MEASURED));
    let how = format!("filled, sent, received, checked; {items} items of {size}");
    let text = format!("   hand-over   p50 {p50}   p99 {p99}   ({how})");
    stage.line(text)?;
    let us = ns.map(|ns| ns as f64 / 1e3);
    Ok(json!({ "event": "latency", "p50_us": us[0], "p99_us": us[1] }))
}

/// Large tensors to all subscribers, as fast as they are taken.
fn throughput(stage: &mut Stage) -> anyhow::Result<Value> {
    let subscribers = counted(stage.subscribers.len(), "subscriber", "subscribers");
    let size = bytes(stage.args.item_bytes());
    let title = format!("2  throughput: tensors of {size} to {subscribers}");
    heading(stage, &title)?;
    let (before, begun_ns) = (stage.total("verified"), clock::now_ns());
    stage.order(stage.publisher, "watch");
    stage.order(stage.publisher, "publish");
    let end_ns = begun_ns + stage.args.seconds.as_nanos() as u64;
    let mut last_ns = 0;
    for id in stage.subscribers.clone() {
        last_ns = last_ns.max(stage.wait_until(id, "last_ns", |last| last >= end_ns)?);
    }
    let verified = stage.total("verified") - before;
    let wrong = stage.total("wrong") + stage.total("gaps");
    let detail = format!("{wrong} items held wrong words, or came out of order");
    stage.claim("every subscriber verified every tensor", wrong == 0, detail);
    let seconds = last_ns.saturating_sub(begun_ns) as f64 / 1e9;
    let rate = (verified * stage.args.item_bytes()) as f64 / seconds / 1e9;
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
fn subscriber_death(stage: &mut Stage) -> anyhow::Result<Value> {
    let is_busy = stage.is_busy();
    let (when, order) = match is_busy {
        true => ("in the middle of its work", "hold and work"),
        false => ("while it holds samples", "hold"),
    };
    heading(stage, &format!("3  death of a subscriber: SIGKILL {when}"))?;
    let victim = stage.subscribers.pop().context("no subscriber")?;
    let (role, pid) = (stage.role(victim), stage.pid(victim));
    stage.order(victim, order);
    stage.wait(victim, "holds")?;
    stage.kill(victim)?;
    let held: Vec<u64> = serde_json::from_value(stage.said(victim, "held").clone())?;
    let verified = |&id| (id, stage.number(id, "verified"));
    let others: Vec<_> = stage.subscribers.iter().map(verified).collect();
    let text = format!("{role} (process {pid}) holds {held:?}, and is killed; from then on:");
    stage.line(format_args!("   {text}"))?;

    let notified_ms = stage.wait_ms(stage.publisher, "gone_ns", "the publisher is notified")?;
    let text = "the slots that it held are released";
    let released_ms = stage.wait_ms(stage.publisher, "released_ns", text)?;
    let started_ns = clock::now_ns();
    stage.start_subscriber()?;
    let next = stage.subscribers[others.len()];
    let text = format!("a new {role} is started (process {})", stage.pid(next));
    let started_ms = stage.moment(started_ns, text)?;
    let first = stage.wait(next, "first")?;
    let first_ns = stage.number(next, "first_ns");
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
        stage.wait_until(id, "last_ns", |last_ns| last_ns >= until_ns)?;
        let verified = stage.number(id, "verified") - before;
        let gaps = stage.number(id, "gaps");
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
fn publisher_death(stage: &mut Stage) -> anyhow::Result<Value> {
    let is_busy = stage.is_busy();
    let (when, order) = match is_busy {
        true => ("in the middle of a write", "stop in a write"),
        false => ("between two writes", "stop"),
    };
    heading(stage, &format!("4  death of the publisher: SIGKILL {when}"))?;
    let victim = stage.publisher;
    let pid = stage.pid(victim);
    stage.order(victim, order);
    let complete = stage.wait(victim, "complete")?;
    let writing = stage.said(victim, "writing").as_u64();
    for id in stage.subscribers.clone() {
        stage.wait_until(id, "taken", |item| item == writing.unwrap_or(complete))?;
    }
    stage.kill(victim)?;
    let what = match writing {
        Some(writing) => format!("has written half of item {writing}"),
        None => format!("has completed item {complete}"),
    };
    let text = format!("the publisher (process {pid}) {what}, and is killed; from then on:");
    stage.line(format_args!("   {text}"))?;
    let ids = stage.subscribers.clone();
    let mut survivors = vec![json!({}); ids.len()];
    for (&id, survivor) in ids.iter().zip(&mut survivors) {
        let role = stage.role(id);
        let text = format!("{role} is notified");
        survivor["notified_ms"] = stage.wait_ms(id, "gone_ns", &text)?.into();
        if let Some(writing) = writing {
            let text = format!("{role} has discarded item {writing} as lost; its stream goes on");
            survivor["lost_ms"] = stage.wait_ms(id, "lost_ns", &text)?.into();
            survivor["lost"] = stage.said(id, "lost_item").clone();
        }
    }
    stage.reap(victim)?;
    let started_ns = clock::now_ns();
    stage.publisher = stage.start("demo-publisher", "publisher")?;
    let started = stage.pid(stage.publisher);
    let text = format!("a new publisher is started (process {started})");
    let started_ms = stage.moment(started_ns, text)?;
    stage.wait(stage.publisher, "ready")?;
    stage.order(stage.publisher, "publish");
    for (&id, survivor) in ids.iter().zip(&mut survivors) {
        stage.wait_until(id, "before", |before| before == u64::from(pid))?;
        let (role, first) = (stage.role(id), stage.wait(id, "first")?);
        let last = stage.number(id, "last_before");
        let text = format!("{role} has verified the new publisher's first item");
        survivor["continued_ms"] = stage.wait_ms(id, "first_ns", &text)?.into();
        survivor["role"] = role.clone().into();
        survivor["last_before"] = last.into();
        survivor["first_after"] = first.into();
        let detail = format!("{role} verified up to item {last} of {complete} complete ones");
        let claim = "nothing was lost that was complete";
        stage.claim(claim, last == complete, detail);
        let claim = "what was not complete was discarded, and nothing else";
        let detail = format!("{role}: {survivor}, and {writing:?} was being written");
        stage.claim(claim, survivor["lost"].as_u64() == writing, detail);
        let claim = "every survivor followed the next publisher";
        let detail = format!("{role} followed with item {first}");
        stage.claim(claim, first == 1, detail);
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
    if stage.args.has_plant("leftover") {
        std::fs::write(stage.domain.join("planted"), "")?;
    }
    let left = std::fs::read_dir(&stage.domain)?.collect::<Result<Vec<_>, _>>()?;
    stage.claim("nothing is left over", left.is_empty(), format!("{left:?}"));
    Ok(())
}
