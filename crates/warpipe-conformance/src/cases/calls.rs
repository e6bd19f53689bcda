//! The number of driver calls.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use warpipe::{DType, Layout, Publisher, PublisherOptions};

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::fake_driver::FakeDriver;
use crate::graph::Graphs;

pub(super) const CASES: &[Case] = &[Case::new(
    "a send makes three driver calls",
    calls_of_a_send,
)];

const ROUNDS: u32 = 30;

fn calls_of_a_send(context: &Context) -> Result<()> {
    let fake_driver = FakeDriver::of(&context.settings)?;
    // The context is current on this thread, as in a program that uses CUDA itself.
    let _graphs = Graphs::of(context)?;
    let stream = context.stream()?;
    let layout = Layout::contiguous(DType::U64, &[1])?;
    let mut peer = context.peer()?;
    for name in ["alone", "followed"] {
        let options = PublisherOptions {
            depth: 2 * ROUNDS,
            ..context.domain.on(&context.device)
        };
        let publisher = Publisher::new(name, options)?;
        if name == "followed" {
            peer.subscribe(name)?;
            publisher.wait_for_subscribers(1, PATIENCE)?;
        }
        // The library's own threads call it, too: what a send needs is the least of many.
        let mut least: Option<BTreeMap<String, u64>> = None;
        for _ in 0..ROUNDS {
            let loan = publisher.loan(&layout)?;
            fake_driver.reset()?;
            loan.send(&stream)?;
            let calls = fake_driver.calls()?;
            let sum = |calls: &BTreeMap<String, u64>| calls.values().sum::<u64>();
            if least.as_ref().is_none_or(|least| sum(&calls) < sum(least)) {
                least = Some(calls);
            }
        }
        let least = least.unwrap_or_default();
        ensure!(least.values().sum::<u64>() == 3, "{name}: {least:?}");
    }
    peer.dismiss()
}
