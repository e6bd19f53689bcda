//! The text format of Prometheus, version 0.0.4. The names are a promise: docs/guide/observe.md
//! lists them.

use std::fmt::{Display, Write};

use crate::observe::{EndpointRow, MemoryRow, ProcessState, Snapshot};

/// The value of a metric for an endpoint.
type Value = fn(&EndpointRow) -> u64;

/// The metrics of an observed endpoint that sends samples: name, type, help and value.
const SAMPLES: [(&str, &str, &str, Value); 6] = [
    (
        "endpoint_items_total",
        "counter",
        "Samples sent, also by an endpoint without subscribers.",
        |it| it.items,
    ),
    (
        "endpoint_bytes_total",
        "counter",
        "Bytes of these samples.",
        |it| it.bytes,
    ),
    (
        "endpoint_dropped_total",
        "counter",
        "Samples that a policy kept from a subscriber.",
        |it| it.dropped,
    ),
    (
        "endpoint_in_flight",
        "gauge",
        "Samples given to subscribers and not released.",
        |it| it.in_flight,
    ),
    (
        "endpoint_waiting",
        "gauge",
        "Jobs of a queue that no worker has.",
        |it| it.waiting,
    ),
    (
        "endpoint_copied_total",
        "counter",
        "Tensors that were to be sent where they lie and were copied.",
        |it| it.copied.as_ref().map_or(0, |copied| copied.count),
    ),
];

/// Those of any observed endpoint.
const ENDPOINT: [(&str, &str, &str, Value); 3] = [
    (
        "endpoint_peers",
        "gauge",
        "Subscribers, or clients.",
        |it| it.peers,
    ),
    (
        "endpoint_memory_bytes",
        "gauge",
        "Memory that the endpoint has allocated, or shares.",
        |it| it.memory,
    ),
    (
        "endpoint_memory_limit_bytes",
        "gauge",
        "Its limit; 0 for none.",
        |it| it.memory_max,
    ),
];

/// The page for one look.
pub fn page(snapshot: &Snapshot) -> String {
    let mut page = Page::default();
    endpoints(&mut page, snapshot);
    subscribers(&mut page, snapshot);
    processes(&mut page, snapshot);
    memory(&mut page, snapshot);
    page.0
}

fn endpoints(page: &mut Page, snapshot: &Snapshot) {
    page.head(
        "endpoint_up",
        "gauge",
        "1 for a name with an owner that runs; 0 for one that is stopped, stalled or dead.",
    );
    for it in &snapshot.endpoints {
        let state = it.state.name();
        let is_up = matches!(state, "live" | "unobserved");
        let labels: [Label<'_>; 2] = [("name", &it.name), ("state", &state)];
        page.value("endpoint_up", &labels, u64::from(is_up));
    }
    let observed = || snapshot.endpoints.iter().filter(|it| it.kind.is_some());
    let with_samples = || snapshot.endpoints.iter().filter(|it| it.has_samples());
    for (name, kind, help, value) in SAMPLES {
        page.head(name, kind, help);
        with_samples().for_each(|it| page.value(name, &endpoint_labels(it), value(it)));
    }
    for (name, kind, help, value) in ENDPOINT {
        page.head(name, kind, help);
        observed().for_each(|it| page.value(name, &endpoint_labels(it), value(it)));
    }
    page.head(
        "endpoint_latency_seconds",
        "summary",
        "Time between sending and receiving, of samples that say when they were sent.",
    );
    for it in with_samples() {
        let (labels, seconds) = (endpoint_labels(it), it.latency_ns as f64 / 1e9);
        page.value("endpoint_latency_seconds_sum", &labels, seconds);
        page.value("endpoint_latency_seconds_count", &labels, it.timed);
    }
}

fn endpoint_labels(endpoint: &EndpointRow) -> [Label<'_>; 2] {
    // Never without a kind: only observed endpoints have these metrics.
    let kind: &dyn Display = endpoint.kind.as_ref().map_or(&"unknown", |kind| kind);
    [("name", &endpoint.name), ("kind", kind)]
}

fn subscribers(page: &mut Page, snapshot: &Snapshot) {
    let all = snapshot.endpoints.iter().flat_map(|endpoint| {
        let numbered = endpoint.subscribers.iter().enumerate();
        numbered.map(move |(number, it)| (endpoint, number, it))
    });
    page.head(
        "subscriber_lag",
        "gauge",
        "Samples that a subscriber was given and has not released.",
    );
    for (endpoint, number, it) in all.clone() {
        let labels: [Label<'_>; 4] = [
            ("name", &endpoint.name),
            ("subscriber", &number),
            ("pid", &it.pid),
            ("state", &it.state),
        ];
        page.value("subscriber_lag", &labels, it.lag);
    }
    page.head(
        "subscriber_dropped_total",
        "counter",
        "Samples that a subscriber did not get because of its policy.",
    );
    for (endpoint, number, it) in all {
        let labels: [Label<'_>; 3] = [
            ("name", &endpoint.name),
            ("subscriber", &number),
            ("pid", &it.pid),
        ];
        page.value("subscriber_dropped_total", &labels, it.dropped);
    }
}

fn processes(page: &mut Page, snapshot: &Snapshot) {
    page.head(
        "process_running",
        "gauge",
        "1 for a process that runs; 0 for one that is stopped or stalled.",
    );
    for it in &snapshot.processes {
        let is_running = it.state == ProcessState::Running;
        let labels: [Label<'_>; 2] = [("pid", &it.pid), ("command", &it.command)];
        page.value("process_running", &labels, u64::from(is_running));
    }
    page.head("process_descriptors", "gauge", "Open descriptors.");
    for it in &snapshot.processes {
        page.value("process_descriptors", &[("pid", &it.pid)], it.descriptors);
    }
    page.head(
        "process_memory_bytes",
        "gauge",
        "Memory that a process holds through warpipe, by device and by how it came to it.",
    );
    for it in &snapshot.processes {
        for (device, role, bytes) in [
            ("cuda", "owned", it.gpu_owned),
            ("cuda", "imported", it.gpu_imported),
            ("host", "owned", it.host_owned),
            ("host", "imported", it.host_imported),
            ("cuda", "kept", it.gpu_kept),
            ("host", "kept", it.host_kept),
        ] {
            let labels: [Label<'_>; 3] = [("pid", &it.pid), ("device", &device), ("role", &role)];
            page.value("process_memory_bytes", &labels, bytes);
        }
    }
    page.head(
        "process_slow_path_total",
        "counter",
        "Copies that were staged, and refusals for want of peer access.",
    );
    for it in &snapshot.processes {
        for taken in &it.slow_paths {
            let labels: [Label<'_>; 2] = [("pid", &it.pid), ("path", &taken.path)];
            page.value("process_slow_path_total", &labels, taken.count);
        }
    }
}

fn memory(page: &mut Page, snapshot: &Snapshot) {
    page.head(
        "memory_bytes",
        "gauge",
        "Memory of all observed processes, each region counted once.",
    );
    let state_of = |it: &MemoryRow| match (it.owner, it.keepers.is_empty()) {
        (Some(_), _) => "owned",
        (None, false) => "kept",
        (None, true) => "borrowed",
    };
    for state in ["owned", "kept", "borrowed"] {
        let regions = snapshot.memory.iter().filter(|it| state_of(it) == state);
        let bytes = regions.map(|it| it.bytes).fold(0, u64::saturating_add);
        page.value("memory_bytes", &[("state", &state)], bytes);
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
