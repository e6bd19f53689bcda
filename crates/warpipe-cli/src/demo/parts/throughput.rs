//! Part 2: large tensors to all subscribers, as fast as they are taken.

use serde_json::{Value, json};

use super::{Part, plural, reach, wait_published};
use crate::demo::protocol::{Counts, Order};
use crate::demo::stage::{Claim, Stage};
use crate::output::{bytes, count};

pub const PART: Part = Part {
    event: "throughput",
    heading,
    run,
};

fn heading(stage: &Stage) -> String {
    let subscribers = plural(stage.subscribers.len(), "subscriber");
    format!(
        "throughput: tensors of {} to {subscribers}",
        bytes(stage.item_bytes())
    )
}

fn run(stage: &mut Stage) -> anyhow::Result<Value> {
    let milliseconds = u64::try_from(stage.args.seconds.as_millis()).ok();
    stage.order(
        stage.publisher,
        &Order::Publish {
            milliseconds,
            items: stage.args.items,
        },
    )?;
    let (items, first_ns) = wait_published(stage)?;
    let all = reach(stage, items)?;
    let Claim {
        claim,
        holds,
        detail,
    } = judge(items, &all);
    stage.claim(claim, holds, || detail);
    let verified: u64 = all.iter().map(|counts| counts.verified).sum();
    let last_ns = all.iter().map(|counts| counts.last_ns).max().unwrap_or(0);
    let seconds = last_ns.saturating_sub(first_ns) as f64 / 1e9;
    let rate = rate(verified * stage.item_bytes(), seconds);
    let due = items * all.len() as u64;
    stage.line(format_args!(
        "   {rate:.2} GB/s made visible (bytes x subscribers / time), no byte copied"
    ))?;
    let took = format!("{} tensors in {seconds:.2} s", count(items));
    let verified_of = format!(
        "{} of {} verified, every word, on the device",
        count(verified),
        count(due)
    );
    stage.line(format_args!("   {took}; {verified_of}"))?;
    Ok(
        json!({ "items": items, "verified": verified, "seconds": seconds, "visible_gb_per_s": rate }),
    )
}

fn rate(bytes: u64, seconds: f64) -> f64 {
    if seconds > 0.0 {
        bytes as f64 / seconds / 1e9
    } else {
        0.0
    }
}

fn judge(items: u64, all: &[Counts]) -> Claim {
    let is_whole = |counts: &Counts| {
        (counts.verified, counts.wrong, counts.gaps, counts.lost) == (items, 0, 0, 0)
    };
    let bad: Vec<String> = all
        .iter()
        .enumerate()
        .filter(|(_, counts)| !is_whole(counts))
        .map(|(index, counts)| {
            let Counts {
                verified,
                wrong,
                gaps,
                lost,
                ..
            } = counts;
            format!(
                "subscriber {} of {items} items: {verified} verified, {wrong} with wrong words, \
                 {gaps} out of order, {lost} lost",
                index + 1
            )
        })
        .collect();
    let claim = "every subscriber verified every tensor";
    Claim {
        claim,
        holds: items > 0 && bad.is_empty(),
        detail: bad.join("; "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_holds_only_if_everything_arrived_whole_at_each() {
        let whole = Counts {
            verified: 5,
            ..Counts::default()
        };
        assert!(judge(5, &[whole, whole]).holds);
        assert!(!judge(0, &[Counts::default()]).holds, "nothing was sent");
        for bad in [
            Counts {
                verified: 4,
                ..whole
            },
            Counts { wrong: 1, ..whole },
            Counts { gaps: 1, ..whole },
            Counts { lost: 1, ..whole },
        ] {
            let claim = judge(5, &[whole, bad]);
            assert!(
                !claim.holds && claim.detail.starts_with("subscriber 2 of 5 items"),
                "{}",
                claim.detail
            );
        }
    }

    #[test]
    fn what_was_made_visible_counts_bytes_a_second() {
        assert_eq!((rate(2_000_000_000, 0.5), rate(1, 0.0)), (4.0, 0.0));
    }
}
