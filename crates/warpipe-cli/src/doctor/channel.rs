//! A whole channel on one device: a name taken, a subscriber attached, a tensor sent, checked and
//! given back.

use std::time::Duration;

use anyhow::{Context, ensure};
use warpipe::{Device, Domain, Error, Layout, Publisher, PublisherOptions, Subscriber};

use super::report::Check;
use crate::output;

const PATIENCE: Duration = Duration::from_secs(10);
const BYTES: u64 = 1 << 20;

/// Binds an endpoint in the domain, connects to it, and sends one tensor through.
pub fn channel(device: &Device, domain: Option<&Domain>) -> Check {
    let name = "channel";
    match domain {
        None => Check::failed(
            name,
            "not tried: there is no domain",
            "mend the domain directory first, see above",
        ),
        Some(domain) => Check::from_result(name, round(device, domain), "look at the checks above"),
    }
}

fn round(device: &Device, domain: &Domain) -> anyhow::Result<String> {
    let endpoint = format!("doctor/{}", std::process::id());
    let options = PublisherOptions {
        timestamps: true,
        ..domain.on(device)
    };
    let publisher = Publisher::new(&endpoint, options).context("binding")?;
    let mut subscriber =
        Subscriber::open(&endpoint, domain.on(device), Duration::ZERO).context("connecting")?;
    publisher.wait_for_subscribers(1, PATIENCE)?;
    let (here, there) = (device.stream()?, device.stream()?);
    let sample = publisher.loan(&Layout::bytes_only(BYTES)?)?;
    // SAFETY: the slot is this loan's until it is sent, and the send is ordered behind the kernel.
    unsafe { warpipe_kernels::fill(&here, sample.ptr(), BYTES / 8, super::memory::SEED) }?;
    sample.send(&here).map_err(Error::from).context("sending")?;
    let received = subscriber.receive(&there, PATIENCE).context("receiving")?;
    let latency = warpipe::clock::now_ns().saturating_sub(
        received
            .info()
            .sent_at_ns
            .context("the sample has no time")?,
    );
    let data = received.to_vec(PATIENCE)?;
    received.finish(PATIENCE)?;
    let due =
        (0..).flat_map(|index| warpipe_kernels::pattern(super::memory::SEED, index).to_le_bytes());
    ensure!(
        data.len() as u64 == BYTES && data.iter().copied().eq(due.take(data.len())),
        "the tensor arrived changed"
    );
    let latency = output::duration(Duration::from_nanos(latency));
    Ok(format!(
        "name bound, subscriber connected, {} sent and checked, {latency} to its arrival",
        output::bytes(BYTES)
    ))
}
