//! The parts of the demo, in their order.

mod ending;
mod latency;
mod publisher_death;
mod subscriber_death;
mod throughput;

use serde_json::{Value, json};

use super::processes::Id;
use super::protocol::{Counts, Event, Order};
use super::stage::Stage;
use crate::output::{Style, bytes, count, styled};

/// One part: its name for programs, its heading for people, and what it does. It returns its
/// figures.
pub struct Part {
    event: &'static str,
    heading: fn(&Stage) -> String,
    run: fn(&mut Stage) -> anyhow::Result<Value>,
}

/// All of them.
pub const ALL: [Part; 4] = [
    latency::PART,
    throughput::PART,
    subscriber_death::PART,
    publisher_death::PART,
];

/// Starts the processes, runs every part, ends the processes, and looks at what is left over.
pub fn perform(stage: &mut Stage) -> anyhow::Result<()> {
    announce(stage)?;
    start(stage)?;
    for (index, part) in ALL.iter().enumerate() {
        let heading = format!("{}  {}", index + 1, (part.heading)(stage));
        stage.line(format_args!("\n{}", styled(Style::Bold, &heading)))?;
        let figures = (part.run)(stage)?;
        stage.figures(part.event, figures)?;
    }
    ending::run(stage)
}

fn announce(stage: &mut Stage) -> anyhow::Result<()> {
    // `first GPU: NAME, UUID` names it already.
    let device = match stage.why.starts_with("first GPU") {
        true => format!("the {}", stage.why),
        false => format!("{} ({})", stage.device, stage.why),
    };
    stage.line(styled(Style::Bold, &format!("warpipe demo on {device}")))?;
    let processes = format!(
        "1 publisher and {}, each a process",
        plural(stage.args.subscribers as usize, "subscriber")
    );
    stage.line(styled(
        Style::Dim,
        &format!("   {processes}; tensors of {}", bytes(stage.item_bytes())),
    ))?;
    if stage.is_mps {
        stage.line(
            "   an MPS daemon answers: a kill in the middle of a kernel would end all its clients,",
        )?;
        stage.line("   so processes are killed while they have no work on the device")?;
    }
    let figures = json!({
        "device": stage.device,
        "why": stage.why,
        "mps": stage.is_mps,
        "subscribers": stage.args.subscribers,
        "item_bytes": stage.item_bytes(),
    });
    stage.figures("demo", figures)
}

fn start(stage: &mut Stage) -> anyhow::Result<()> {
    let subscribers = stage.args.subscribers as usize;
    stage.publisher = stage.start_publisher(subscribers)?;
    for number in 1..=subscribers {
        let id = stage.start_subscriber(number)?;
        stage.subscribers.push(id);
    }
    let all: Vec<Id> = stage
        .subscribers
        .iter()
        .copied()
        .chain([stage.publisher])
        .collect();
    stage.wait_ready(&all)
}

/// Publishes until ordered otherwise.
fn publish_on(stage: &mut Stage) -> anyhow::Result<()> {
    stage.order(
        stage.publisher,
        &Order::Publish {
            milliseconds: None,
            items: None,
        },
    )
}

/// Has every subscriber check everything up to an item. Their counts.
fn reach(stage: &mut Stage, number: u64) -> anyhow::Result<Vec<Counts>> {
    let subscribers = stage.subscribers.clone();
    subscribers
        .iter()
        .try_for_each(|&id| stage.order(id, &Order::Reach { number }))?;
    let mut all = Vec::new();
    for id in subscribers {
        let counts = stage.wait(id, "it has checked everything", |event| match event {
            Event::Reached { counts } => Some(*counts),
            _ => None,
        })?;
        stage.record(id, counts);
        all.push(counts);
    }
    Ok(all)
}

/// Waits until a publisher's stretch is over: the last item's number, and when the first was sent.
fn wait_published(stage: &mut Stage) -> anyhow::Result<(u64, u64)> {
    stage.wait(stage.publisher, "it has published", |event| match event {
        Event::Published { items, first_ns } => Some((*items, *first_ns)),
        _ => None,
    })
}

fn plural(number: usize, noun: &str) -> String {
    if number == 1 {
        format!("1 {noun}")
    } else {
        format!("{} {noun}s", count(number as u64))
    }
}

/// `4, 5 and 6`.
fn list(numbers: &[u64]) -> String {
    let words: Vec<String> = numbers.iter().map(u64::to_string).collect();
    match words.split_last() {
        Some((last, before)) if !before.is_empty() => format!("{} and {last}", before.join(", ")),
        _ => words.concat(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_listed_as_people_do() {
        assert_eq!(
            [list(&[]), list(&[4]), list(&[4, 5, 6])],
            ["", "4", "4, 5 and 6"]
        );
        assert_eq!(
            [plural(1, "item"), plural(2000, "item")],
            ["1 item", "2,000 items"]
        );
    }
}
