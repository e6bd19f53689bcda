//! The parts of the demo, in their order.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use warpipe::clock;

use super::stage::{Id, Stage, Timeline, number};
use super::{Plant, latency};
use crate::output::{Style, bytes, count, counted, duration, styled};

/// How long the second publisher publishes.
const STRETCH: Duration = Duration::from_millis(300);
const MPS_NOTE: &str = concat!(
    "   an MPS daemon answers: a kill in the middle of a kernel would end all its clients,\n",
    "   so processes are killed while they have no work on the device",
);
/// Lines for as many subscribers; of more, the first and the last.
const LINES_MAX: usize = 4;

/// The publisher and the subscribers that are now.
struct Processes {
    publisher: Id,
    subscribers: Vec<Id>,
}

/// Runs every part, ends the processes, and looks at what is left over.
pub fn perform(stage: &mut Stage) -> anyhow::Result<()> {
    announce(stage)?;
    let publisher = stage.start_publisher()?;
    let subscribers = (1..=stage.args.subscribers).map(|number| stage.start_subscriber(number));
    let mut processes = Processes {
        publisher,
        subscribers: subscribers.collect::<Result<_, _>>()?,
    };
    for id in processes.subscribers.iter().copied().chain([publisher]) {
        stage.wait(id, "ready")?;
    }
    stage.tell(json!({ "event": "ready" }))?;
    for part in [latency, throughput, subscriber_death, publisher_death] {
        let figures = part(stage, &mut processes)?;
        stage.figures(figures)?;
    }
    end(stage)
}

fn announce(stage: &mut Stage) -> anyhow::Result<()> {
    // `first GPU: NAME, UUID` names it already.
    let device = match stage.why.starts_with("first GPU") {
        true => format!("the {}", stage.why),
        false => format!("{} ({})", stage.device, stage.why),
    };
    stage.line(styled(Style::Bold, &format!("warpipe demo on {device}")))?;
    let subscribers = counted(stage.args.subscribers as usize, "subscriber", "subscribers");
    let size = bytes(stage.item_bytes());
    let text = format!("   1 publisher and {subscribers}, each a process; tensors of {size}");
    stage.line(styled(Style::Dim, &text))?;
    if stage.is_mps {
        stage.line(MPS_NOTE)?;
    }
    Ok(())
}

fn heading(stage: &Stage, text: &str) -> anyhow::Result<()> {
    stage.line(format_args!("\n{}", styled(Style::Bold, text)))
}

/// Small tensors there and back, one at a time.
fn latency(stage: &mut Stage, processes: &mut Processes) -> anyhow::Result<Value> {
    heading(stage, "1  latency: one item in flight")?;
    latency::measure(stage, processes.publisher, processes.subscribers[0])
}

/// Large tensors to all subscribers, as fast as they are taken.
fn throughput(stage: &mut Stage, processes: &mut Processes) -> anyhow::Result<Value> {
    let subscribers = counted(processes.subscribers.len(), "subscriber", "subscribers");
    let size = bytes(stage.item_bytes());
    let title = format!("2  throughput: tensors of {size} to {subscribers}");
    heading(stage, &title)?;
    let begun_ns = clock::now_ns();
    stage.order(processes.publisher, "publish");
    let end_ns = begun_ns + stage.args.seconds.as_nanos() as u64;
    let (mut verified, mut last_ns, mut wrong) = (0, 0, 0);
    for &id in &processes.subscribers {
        let counts = stage.wait_for(id, "counts", |counts| number(counts, "last_ns") >= end_ns)?;
        verified += number(&counts, "verified");
        wrong += number(&counts, "wrong") + number(&counts, "gaps");
        last_ns = last_ns.max(number(&counts, "last_ns"));
    }
    let claim = "every subscriber verified every tensor";
    stage.claim(claim, wrong == 0, || {
        format!("{wrong} items held wrong words, or came out of order")
    });
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
    let when = match is_busy {
        true => "in the middle of its work",
        false => "while it holds samples",
    };
    heading(stage, &format!("3  death of a subscriber: SIGKILL {when}"))?;
    let (publisher, number_of_victim) = (processes.publisher, processes.subscribers.len());
    let victim = processes.subscribers[number_of_victim - 1];
    let (role, pid) = (stage.role(victim), stage.pid(victim));
    stage.order(publisher, &format!("watch {pid}"));
    stage.wait(publisher, "watching")?;
    stage.order(victim, if is_busy { "hold and work" } else { "hold" });
    let held = stage.wait(victim, "held")?["numbers"].take();
    let held: Vec<u64> = serde_json::from_value(held)?;
    let killed_ns = stage.kill(victim)?;
    let mut timeline = Timeline::new(killed_ns);
    let items: Vec<String> = held.iter().map(u64::to_string).collect();
    let items = items.join(" and ");
    let text =
        format!("   {role} (process {pid}) holds items {items}, and is killed; from then on:");
    stage.line(text)?;

    let notified_ns = stage.time_of(publisher, "gone")?;
    timeline.add(notified_ns, "the publisher is notified");
    let started_ns = clock::now_ns();
    let next = stage.start_subscriber(number_of_victim as u32)?;
    processes.subscribers[number_of_victim - 1] = next;
    let text = format!("a new {role} is started (process {})", stage.pid(next));
    timeline.add(started_ns, text);
    let released_ns = stage.time_of(publisher, "released")?;
    timeline.add(released_ns, "the slots that it held are released");
    let first = stage.wait(next, "first")?;
    let (first, first_ns) = (number(&first, "number"), number(&first, "at_ns"));
    let text = format!("the new {role} has verified its first item, {first}");
    timeline.add(first_ns, text);
    timeline.print(stage)?;
    let claim = "the publisher was notified, and released the dead subscriber's slots";
    let holds = killed_ns < notified_ns && notified_ns <= released_ns;
    stage.claim(claim, holds, || {
        let [notified, released] = [notified_ns, released_ns].map(|at_ns| timeline.ms(at_ns));
        format!("notified after {notified} ms, released after {released} ms")
    });
    let claim = "a new subscriber continued with an item that was sent after the kill";
    stage.claim(claim, held.iter().all(|&held| first > held), || {
        format!("its first item is {first}")
    });
    let others = &processes.subscribers[..number_of_victim - 1];
    let others = verified_between(stage, others, killed_ns, first_ns)?;
    Ok(json!({
        "event": "subscriber_death", "pid": pid, "busy": is_busy, "held": held, "others": others,
        "notified_ms": timeline.ms(notified_ns), "released_ms": timeline.ms(released_ns),
        "started_ms": timeline.ms(started_ns), "first_verified_ms": timeline.ms(first_ns), "first_item": first,
    }))
}

/// What the other subscribers did between two times.
fn verified_between(
    stage: &mut Stage,
    ids: &[Id],
    from_ns: u64,
    until_ns: u64,
) -> anyhow::Result<Vec<Value>> {
    let mut all = Vec::new();
    for (index, &id) in ids.iter().enumerate() {
        let (mut before, mut apart_ns) = (0, 0);
        let last = stage.wait_for(id, "counts", |counts| {
            match number(counts, "last_ns") < from_ns {
                true => before = number(counts, "verified"),
                false => apart_ns = apart_ns.max(number(counts, "apart_ns")),
            }
            number(counts, "last_ns") >= until_ns
        })?;
        let (verified, gaps) = (number(&last, "verified") - before, number(&last, "gaps"));
        let role = stage.role(id);
        if index < LINES_MAX {
            let items = counted(verified as usize, "item", "items");
            let apart = duration(Duration::from_nanos(apart_ns));
            let how = match gaps {
                0 => "went on without a gap",
                _ => "went on WITH A GAP",
            };
            let text = format!("{how}: {items} verified meanwhile, at most {apart} apart");
            stage.line(format_args!("   {role} {text}"))?;
        }
        let claim = "the other subscribers went on without a gap";
        stage.claim(claim, verified > 0 && gaps == 0, || {
            format!("{role}: {verified} items meanwhile, {gaps} out of order")
        });
        all.push(json!({ "role": role, "verified": verified, "apart_ms": apart_ns as f64 / 1e6 }));
    }
    if ids.len() > LINES_MAX {
        stage.line(format_args!("   and so did {} more", ids.len() - LINES_MAX))?;
    }
    Ok(all)
}

/// The publisher is killed in the middle of a write, and another takes its place.
fn publisher_death(stage: &mut Stage, processes: &mut Processes) -> anyhow::Result<Value> {
    let is_busy = stage.is_busy();
    let when = match is_busy {
        true => "in the middle of a write",
        false => "between two writes",
    };
    heading(stage, &format!("4  death of the publisher: SIGKILL {when}"))?;
    let victim = processes.publisher;
    let pid = stage.pid(victim);
    stage.order(victim, if is_busy { "stop in a write" } else { "stop" });
    let stopped = stage.wait(victim, "stopped")?;
    let (complete, writing) = (number(&stopped, "complete"), stopped["writing"].as_u64());
    if is_busy {
        for &id in &processes.subscribers {
            stage.wait(id, "waiting")?;
        }
    }
    let killed_ns = stage.kill(victim)?;
    let mut timeline = Timeline::new(killed_ns);
    let what = match writing {
        Some(writing) => format!("has written half of item {writing}"),
        None => format!("has completed item {complete}"),
    };
    let text = format!("   the publisher (process {pid}) {what}, and is killed; from then on:");
    stage.line(text)?;
    let notified = all(stage, &processes.subscribers, "gone")?;
    say(&mut timeline, stage, &notified, "is notified");
    let mut lost = Vec::new();
    if let Some(writing) = writing {
        lost = all(stage, &processes.subscribers, "lost")?;
        let text = format!("has discarded item {writing} as lost; its stream goes on");
        say(&mut timeline, stage, &lost, &text);
    }
    stage.reap(victim)?;
    let started_ns = clock::now_ns();
    processes.publisher = stage.start_publisher()?;
    let started = stage.pid(processes.publisher);
    let text = format!("a new publisher is started (process {started})");
    timeline.add(started_ns, text);
    timeline.print(stage)?;
    stage.wait(processes.publisher, "ready")?;
    stage.order(processes.publisher, "publish");
    let mut first = Vec::new();
    for &id in &processes.subscribers {
        // Not the first item of the publisher before.
        let found = stage.wait_for(id, "first", |first| !first["before"].is_null())?;
        first.push((id, found));
    }
    let text = "has verified the new publisher's first item";
    say(&mut timeline, stage, &first, text);
    timeline.print(stage)?;
    publish_for(stage, processes)?;

    let mut survivors = Vec::new();
    for (index, (id, first)) in first.iter().enumerate() {
        let role = stage.role(*id);
        let last = number(first, "last");
        let discarded = lost.get(index).map(|lost| number(&lost.1, "number"));
        let claim = "nothing was lost that was complete";
        stage.claim(claim, last == complete, || {
            format!("{role} verified up to item {last}, and item {complete} was complete")
        });
        let claim = "what was not complete was discarded, and nothing else";
        stage.claim(claim, discarded == writing, || {
            format!("{role} discarded {discarded:?}, and {writing:?} was being written")
        });
        let follows = first["before"] == json!([pid, false]) && first["number"] == 1;
        let claim = "every survivor followed the next publisher";
        stage.claim(claim, follows, || format!("{role} followed with {first}"));
        survivors.push(json!({
            "role": role, "notified_ms": timeline.ms(number(&notified[index].1, "at_ns")), "lost": discarded,
            "lost_ms": lost.get(index).map(|lost| timeline.ms(number(&lost.1, "at_ns"))),
            "continued_ms": timeline.ms(number(first, "at_ns")), "last_before": last, "first_after": first["number"],
        }));
    }
    Ok(json!({
        "event": "publisher_death", "pid": pid, "busy": is_busy, "complete": complete, "writing": writing,
        "started_ms": timeline.ms(started_ns), "survivors": survivors,
    }))
}

/// Lets the publisher go on, and waits until all that it has sent is verified.
fn publish_for(stage: &mut Stage, processes: &Processes) -> anyhow::Result<()> {
    let until = Instant::now() + STRETCH;
    let first = processes.subscribers[0];
    stage.wait_for(first, "counts", |_| Instant::now() >= until)?;
    stage.order(processes.publisher, "pause");
    stage.wait(processes.publisher, "paused")?;
    Ok(())
}

/// The next event of this name of each.
fn all(stage: &mut Stage, ids: &[Id], event: &str) -> anyhow::Result<Vec<(Id, Value)>> {
    ids.iter()
        .map(|&id| Ok((id, stage.wait(id, event)?)))
        .collect()
}

/// A line for each survivor, or of many for the first and the last.
fn say(timeline: &mut Timeline, stage: &Stage, events: &[(Id, Value)], text: &str) {
    let mut reports: Vec<_> = events
        .iter()
        .map(|(id, event)| (number(event, "at_ns"), stage.role(*id)))
        .collect();
    reports.sort();
    match reports.as_slice() {
        [first, .., last] if reports.len() > LINES_MAX => {
            let many = reports.len();
            timeline.add(
                first.0,
                format_args!("the first of {many} subscribers {text}"),
            );
            timeline.add(last.0, format_args!("the last of them {text}"));
        }
        all => all
            .iter()
            .for_each(|(at_ns, role)| timeline.add(*at_ns, format_args!("{role} {text}"))),
    }
}

/// Ends all processes, and checks the claims that hold then.
fn end(stage: &mut Stage) -> anyhow::Result<()> {
    stage.end_all()?;
    let (wrong, gaps) = (stage.total("wrong"), stage.total("gaps"));
    stage.claim("every word was right", wrong == 0, || {
        format!("{wrong} items held wrong words")
    });
    stage.claim("every item came in its turn", gaps == 0, || {
        format!("{gaps} items came out of order")
    });
    let killed = stage.killed();
    stage.claim("two processes were killed", killed == 2, || {
        format!("{killed} were")
    });
    if stage.is_planted(Plant::Leftover) {
        std::fs::write(stage.domain.join("planted"), "")?;
    }
    let mut left = Vec::new();
    for (role, extra) in stage.leftovers() {
        let Some(extra) = extra else {
            left.push(format!("{role} did not look"));
            continue;
        };
        let kinds = ["descriptors", "mappings", "bytes of device memory"];
        let more = kinds.iter().filter(|kind| number(&extra, kind) > 0);
        left.extend(more.map(|kind| format!("{} {kind} of the {role}", number(&extra, kind))));
    }
    let files = files(&stage.domain)?.into_iter();
    left.extend(files.map(|file| format!("the file {file}")));
    stage.claim("nothing is left over", left.is_empty(), || left.join(", "));
    Ok(())
}

/// The names of what lies in a folder, and in the folders in it.
fn files(folder: &std::path::Path) -> std::io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        names.push(entry.file_name().to_string_lossy().into_owned());
        if entry.file_type()?.is_dir() {
            names.extend(files(&entry.path())?);
        }
    }
    Ok(names)
}
