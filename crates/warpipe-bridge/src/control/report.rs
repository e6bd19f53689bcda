//! The status of a bridge, published in its domain for `warpipe ls`.

use std::collections::HashSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use warpipe::{Policy, Publisher, PublisherOptions};

use super::Control;
use crate::error::{Error, Result};
use crate::lane::LaneCounts;
use crate::status::{Direction, RemoteName, STATUS_PREFIX, Status};

/// The rate of a lane between two looks.
#[derive(Debug, Default)]
pub(super) struct Meter {
    tensors: u64,
    rate: f64,
}

impl Meter {
    pub(super) fn read(&mut self, counts: &LaneCounts, elapsed: Duration) -> f64 {
        let tensors = counts.tensors.load(Ordering::Relaxed);
        self.rate = (tensors - self.tensors) as f64 / elapsed.as_secs_f64().max(0.001);
        self.tensors = tensors;
        self.rate
    }
}

impl Control {
    /// Makes and publishes the status.
    pub(super) fn tell_status(&mut self, elapsed: Duration) {
        let mut status = Status {
            node: self.options.node.clone(),
            refused: self.shared.refused.load(Ordering::Relaxed),
            ..Status::default()
        };
        let mut live = Vec::new();
        for peer in self.peers.values_mut() {
            let Some(known) = &peer.hello else { continue };
            let node = known.hello.node.clone();
            status.peers.push(node.clone());
            for (name, lane) in &mut peer.exports {
                let counts = &lane.sender.counts;
                let rate = lane.meter.read(counts, elapsed);
                status
                    .names
                    .push(remote_name(name, &node, Direction::To, counts, rate));
            }
            for lane in &mut peer.imports {
                let counts = &lane.receiver.counts;
                let rate = lane.meter.read(counts, elapsed);
                status.names.push(remote_name(
                    &lane.import.local_name(),
                    &node,
                    Direction::From,
                    counts,
                    rate,
                ));
                live.push(Arc::as_ptr(&lane.import));
            }
        }
        let live: HashSet<_> = live.into_iter().collect();
        for import in self.imports.values().map(|kept| &kept.import) {
            if !live.contains(&Arc::as_ptr(import)) && import.is_published() {
                let counts = LaneCounts::default();
                let (name, node) = (import.local_name(), &import.node);
                let mut name = remote_name(&name, node, Direction::From, &counts, 0.0);
                name.reachable = false;
                status.names.push(name);
            }
        }
        status.names.extend(self.queue_rows(elapsed));
        status.names.sort_by(|a, b| a.name.cmp(&b.name));
        // Without it `warpipe ls` shows less; the bridge goes on.
        let _ = self.publish_status(&status);
        *self
            .shared
            .status
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = status;
    }

    fn publish_status(&mut self, status: &Status) -> Result<()> {
        if self.status.is_none() {
            let host = warpipe::Device::host();
            let publisher = Publisher::new(
                &format!("{STATUS_PREFIX}{}", std::process::id()),
                PublisherOptions {
                    policy: Policy::DropOldest,
                    depth: 2,
                    history: 1,
                    memory_limit: 64 << 20,
                    ..self.options.domain.on(&host)
                },
            )?;
            self.status = Some((publisher, host.stream()?));
        }
        let text =
            serde_json::to_vec(status).map_err(|error| Error::zenoh("write its status", error))?;
        if let Some((publisher, stream)) = &self.status {
            publisher.send_bytes(stream, &text)?;
        }
        Ok(())
    }
}

fn remote_name(
    name: &str,
    node: &str,
    direction: Direction,
    counts: &LaneCounts,
    rate: f64,
) -> RemoteName {
    RemoteName {
        name: name.into(),
        node: node.into(),
        direction,
        reachable: true,
        tensors: counts.tensors.load(Ordering::Relaxed),
        bytes: counts.bytes.load(Ordering::Relaxed),
        rate,
        workers: None,
        credit: counts.credit.load(Ordering::Relaxed),
        dropped: counts.dropped.load(Ordering::Relaxed),
        missing: counts.missing.load(Ordering::Relaxed),
        repeated: counts.repeated.load(Ordering::Relaxed),
    }
}
