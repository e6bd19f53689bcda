//! The text format of Prometheus, version 0.0.4. The names are a promise: docs/guide/observe.md
//! lists them.

use std::fmt::{Display, Write};

use crate::observe::{MemoryRow, Snapshot};

/// The metrics, without `warpipe_` before each name: name, type and help.
const METRICS: &str = "\
endpoint_up gauge 1 for a name with an owner that runs; 0 for one that is stopped, stalled or dead.
endpoint_items_total counter Samples sent, also by an endpoint without subscribers.
endpoint_bytes_total counter Bytes of these samples.
endpoint_dropped_total counter Samples that a policy kept from a subscriber.
endpoint_in_flight gauge Samples given to subscribers and not released.
endpoint_waiting gauge Jobs of a queue that no worker has.
endpoint_copied_total counter Tensors that were to be sent where they lie and were copied.
endpoint_peers gauge Subscribers, or clients.
endpoint_memory_bytes gauge Memory that the endpoint has allocated, or shares.
endpoint_memory_limit_bytes gauge Its limit; 0 for none.
endpoint_latency_seconds summary Time between sending and receiving, of samples that say when they were sent.
subscriber_lag gauge Samples that a subscriber was given and has not released.
subscriber_dropped_total counter Samples that a subscriber did not get because of its policy.
process_running gauge 1 for a process that runs; 0 for one that is stopped or stalled.
process_descriptors gauge Open descriptors.
process_memory_bytes gauge Memory that a process holds through warpipe, by device and by how it came to it.
process_slow_path_total counter Copies that were staged, and refusals for want of peer access.
memory_bytes gauge Memory of all observed processes, each region counted once.";

/// The page for one look.
pub fn page(snapshot: &Snapshot) -> String {
    let mut page = Page::default();
    for metric in METRICS.lines() {
        let mut words = metric.splitn(3, ' ');
        let [name, kind, help] = std::array::from_fn(|_| words.next().unwrap_or_default());
        page.head(name, kind, help);
        match name.split('_').next() {
            Some("endpoint") => endpoints(&mut page, name, snapshot),
            Some("subscriber") => subscribers(&mut page, name, snapshot),
            Some("process") => processes(&mut page, name, snapshot),
            _ => memory(&mut page, name, snapshot),
        }
    }
    page.0
}

fn endpoints(page: &mut Page, name: &str, snapshot: &Snapshot) {
    for it in &snapshot.endpoints {
        if name == "endpoint_up" {
            let is_up = matches!(it.state, "live" | "unobserved");
            page.value(
                name,
                &[("name", &it.name), ("state", &it.state)],
                u8::from(is_up),
            );
            continue;
        }
        // Nothing else is known of an endpoint that is not observed.
        let Some(kind) = &it.kind else {
            continue;
        };
        let labels: [Label<'_>; 2] = [("name", &it.name), ("kind", kind)];
        let value = match name {
            "endpoint_peers" => it.peers,
            "endpoint_memory_bytes" => it.memory,
            "endpoint_memory_limit_bytes" => it.memory_max,
            // The others are of samples.
            _ if !it.has_samples() => continue,
            "endpoint_items_total" => it.items,
            "endpoint_bytes_total" => it.bytes,
            "endpoint_dropped_total" => it.dropped,
            "endpoint_in_flight" => it.in_flight,
            "endpoint_waiting" => it.waiting,
            "endpoint_copied_total" => it.copied.as_ref().map_or(0, |copied| copied.count),
            "endpoint_latency_seconds" => {
                let seconds = it.latency_ns as f64 / 1e9;
                page.value(&format!("{name}_sum"), &labels, seconds);
                page.value(&format!("{name}_count"), &labels, it.timed);
                continue;
            }
            _ => continue,
        };
        page.value(name, &labels, value);
    }
}

fn subscribers(page: &mut Page, name: &str, snapshot: &Snapshot) {
    for endpoint in &snapshot.endpoints {
        for (number, it) in endpoint.subscribers.iter().enumerate() {
            let labels: [Label<'_>; 4] = [
                ("name", &endpoint.name),
                ("subscriber", &number),
                ("pid", &it.pid),
                ("state", &it.state),
            ];
            match name {
                "subscriber_lag" => page.value(name, &labels, it.lag),
                "subscriber_dropped_total" => page.value(name, &labels[..3], it.dropped),
                _ => {}
            }
        }
    }
}

fn processes(page: &mut Page, name: &str, snapshot: &Snapshot) {
    for it in &snapshot.processes {
        let pid: Label<'_> = ("pid", &it.pid);
        match name {
            "process_running" => {
                let is_running = it.state == "running";
                page.value(name, &[pid, ("command", &it.command)], u8::from(is_running));
            }
            "process_descriptors" => page.value(name, &[pid], it.descriptors),
            "process_slow_path_total" => {
                for taken in &it.slow_paths {
                    page.value(name, &[pid, ("path", &taken.path)], taken.count);
                }
            }
            "process_memory_bytes" => {
                for (device, role, bytes) in [
                    ("cuda", "owned", it.gpu_owned),
                    ("cuda", "imported", it.gpu_imported),
                    ("host", "owned", it.host_owned),
                    ("host", "imported", it.host_imported),
                    ("cuda", "kept", it.gpu_kept),
                    ("host", "kept", it.host_kept),
                ] {
                    page.value(name, &[pid, ("device", &device), ("role", &role)], bytes);
                }
            }
            _ => {}
        }
    }
}

fn memory(page: &mut Page, name: &str, snapshot: &Snapshot) {
    let state_of = |it: &MemoryRow| match (it.owner, it.keepers.is_empty()) {
        (Some(_), _) => "owned",
        (None, false) => "kept",
        (None, true) => "borrowed",
    };
    for state in ["owned", "kept", "borrowed"] {
        let regions = snapshot.memory.iter().filter(|it| state_of(it) == state);
        let bytes = regions.map(|it| it.bytes).fold(0, u64::saturating_add);
        page.value(name, &[("state", &state)], bytes);
    }
}

/// A label's name and value.
type Label<'a> = (&'static str, &'a dyn Display);

/// The text, as it grows. All names begin with `warpipe_`.
#[derive(Default)]
struct Page(String);

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let name = format!("warpipe_{name}");
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn value(&mut self, name: &str, labels: &[Label<'_>], value: impl Display) {
        let labels = labels
            .iter()
            .map(|(label, value)| format!("{label}=\"{}\"", escaped(&value.to_string())));
        let labels: Vec<String> = labels.collect();
        let _ = writeln!(self.0, "warpipe_{name}{{{}}} {value}", labels.join(","));
    }
}

/// A label's value: a process chooses its own name.
fn escaped(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::observe::SlowPathRow;
    use crate::top::tests::sample;

    #[test]
    fn each_metric_has_one_help_and_one_type_and_no_value_twice() {
        let page = page(&sample());
        let mut seen = std::collections::BTreeSet::new();
        for line in page.lines() {
            let key = match line.strip_prefix('#') {
                Some(_) => line.split(' ').take(3).collect::<Vec<_>>().join(" "),
                None => {
                    let (key, value) = line.rsplit_once(' ').unwrap();
                    assert!(value.parse::<f64>().is_ok(), "{line}");
                    key.to_owned()
                }
            };
            assert!(seen.insert(key), "twice: {line}");
        }
        assert!(page.contains(
            "warpipe_endpoint_items_total{name=\"camera/front\",kind=\"publisher\"} 1234\n"
        ));
        assert!(
            page.contains("warpipe_memory_bytes{state=\"borrowed\"} 4096\n"),
            "{page}"
        );
    }

    #[test]
    fn every_metric_has_a_value_where_there_is_one_of_each() {
        let mut snapshot = sample();
        snapshot.processes[0].slow_paths.push(SlowPathRow {
            path: "staged_upload",
            reason: "",
            count: 1,
            bytes: 1,
        });
        let page = page(&snapshot);
        for metric in METRICS.lines() {
            let name = metric.split(' ').next().unwrap();
            let has_value = |line: &str| line.starts_with(&format!("warpipe_{name}"));
            assert!(page.lines().any(has_value), "{name} has no value");
        }
    }

    #[test]
    fn an_endpoint_that_counts_no_samples_has_no_count_of_them() {
        let mut snapshot = sample();
        let lidar = &mut snapshot.endpoints[1];
        (lidar.depth, lidar.kind) = (0, Some("pool".into()));
        let page = page(&snapshot);
        let of_lidar: Vec<_> = page
            .lines()
            .filter(|line| line.contains("name=\"lidar\",kind"))
            .filter_map(|line| line.split('{').next())
            .collect();
        assert_eq!(
            of_lidar,
            [
                "warpipe_endpoint_peers",
                "warpipe_endpoint_memory_bytes",
                "warpipe_endpoint_memory_limit_bytes"
            ]
        );
    }

    #[test]
    fn the_names_in_the_guide_are_those_of_the_page() {
        let guide = include_str!("../../../../docs/guide/observe.md");
        for line in page(&sample())
            .lines()
            .filter(|line| line.starts_with("# TYPE"))
        {
            let name = line.split(' ').nth(2).unwrap();
            assert!(
                guide.contains(&format!("`{name}`")),
                "{name} is not in the guide"
            );
        }
    }

    #[test]
    fn a_name_with_quotes_stays_one_label() {
        assert_eq!(escaped("a\"b\\c\nd"), "a\\\"b\\\\c\\nd");
    }
}
