//! The names that bridges carry, from the status that each publishes.

use std::time::Duration;

use serde_json::json;
use warpipe::{Device, Domain, Endpoint, Subscriber};
use warpipe_bridge::{Direction, RemoteName, STATUS_PREFIX, Status};

use crate::output::{Output, Style, printable, styled};

/// A bridge publishes its status each second; one that stands still is waited for no longer.
const TIMEOUT: Duration = Duration::from_secs(2);
/// More than the status of a bridge with all names that it may carry.
const STATUS_BYTES_MAX: u64 = 64 << 20;

/// Lists the remote names of each bridge in the domain. A bridge that does not say them is named on
/// the error stream.
pub(super) fn list(output: Output, domain: &Domain, endpoints: &[Endpoint]) -> anyhow::Result<()> {
    let is_bridge = |endpoint: &&Endpoint| {
        endpoint.holder.is_some() && endpoint.name.as_str().starts_with(STATUS_PREFIX)
    };
    for endpoint in endpoints.iter().filter(is_bridge) {
        let bridge = endpoint.name.as_str();
        match status(domain, bridge) {
            Ok(status) => {
                for remote in &status.names {
                    let mut row = json!(remote);
                    // The endpoint of the bridge.
                    row["bridge"] = bridge.into();
                    output.say(|| line(remote), &row)?;
                }
            }
            Err(error) => eprintln!("{bridge}: {}", printable(&error.to_string())),
        }
    }
    Ok(())
}

fn status(domain: &Domain, bridge: &str) -> anyhow::Result<Status> {
    let device = Device::host();
    let mut subscriber = Subscriber::open(bridge, domain.on(&device), Duration::ZERO)?;
    let sample = subscriber.receive(&device.stream()?, TIMEOUT)?;
    let bytes = sample.layout().bytes();
    anyhow::ensure!(
        bytes <= STATUS_BYTES_MAX,
        "its status has {bytes} bytes; a bridge's has at most {STATUS_BYTES_MAX}"
    );
    Ok(serde_json::from_slice(&sample.to_vec(TIMEOUT)?)?)
}

fn line(remote: &RemoteName) -> String {
    let way = match remote.direction {
        Direction::From => "from",
        _ => "to",
    };
    let state = if remote.reachable {
        styled(Style::Green, "reachable")
    } else {
        styled(Style::Yellow, "unreachable")
    };
    let (name, node) = (printable(&remote.name), printable(&remote.node));
    let head = format!("  {name} {way} {node}  {state}   ");
    let RemoteName { rate, credit, .. } = remote;
    head + &match remote.workers {
        Some(workers) => format!(
            "queue, {workers} workers at the end that does its jobs, {rate:.1} jobs/s, credit {credit}"
        ),
        None => format!(
            "{rate:.1} tensors/s, credit {credit}, {} missing, {} dropped",
            remote.missing, remote.dropped
        ),
    }
}
