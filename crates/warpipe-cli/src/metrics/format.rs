//! The text format of Prometheus, version 0.0.4. The names are a promise: docs/guide/observe.md
//! lists them.

use std::fmt::Write;

use crate::observe::{EndpointRow, MemoryRow, ProcessState, Snapshot};

/// A metric: its name, type and help.
struct Metric(&'static str, &'static str, &'static str);

/// The value of a metric for an endpoint.
type Value = fn(&EndpointRow) -> u64;

/// The metrics of an observed endpoint that sends samples, with their values.
const SAMPLES: [(Metric, Value); 5] = [
    (
        Metric(
            "warpipe_endpoint_items_total",
            "counter",
            "Samples sent, also by an endpoint without subscribers.",
        ),
        |it| it.items,
    ),
    (
        Metric(
            "warpipe_endpoint_bytes_total",
            "counter",
            "Bytes of these samples.",
        ),
        |it| it.bytes,
    ),
    (
        Metric(
            "warpipe_endpoint_dropped_total",
            "counter",
            "Samples that a policy kept from a subscriber.",
        ),
        |it| it.dropped,
    ),
    (
        Metric(
            "warpipe_endpoint_in_flight",
            "gauge",
            "Samples given to subscribers and not released.",
        ),
        |it| it.in_flight,
    ),
    (
        Metric(
            "warpipe_endpoint_waiting",
            "gauge",
            "Jobs of a queue that no worker has.",
        ),
        |it| it.waiting,
    ),
];

/// Those of any observed endpoint.
const ENDPOINT: [(Metric, Value); 3] = [
    (
        Metric(
            "warpipe_endpoint_peers",
            "gauge",
            "Subscribers, or clients.",
        ),
        |it| it.peers,
    ),
    (
        Metric(
            "warpipe_endpoint_memory_bytes",
            "gauge",
            "Memory that the endpoint has allocated, or shares.",
        ),
        |it| it.memory,
    ),
    (
        Metric(
            "warpipe_endpoint_memory_limit_bytes",
            "gauge",
            "Its limit; 0 for none.",
        ),
        |it| it.memory_max,
    ),
];

/// The page for one look.
pub fn page(snapshot: &Snapshot) -> String {
    let mut page = Page::default();
    endpoints(&mut page, snapshot);
    copies(&mut page, snapshot);
    subscribers(&mut page, snapshot);
    processes(&mut page, snapshot);
    memory(&mut page, snapshot);
    page.0
}

fn endpoints(page: &mut Page, snapshot: &Snapshot) {
    page.head(&Metric(
        "warpipe_endpoint_up",
        "gauge",
        "1 for a name with an owner that runs; 0 for one that is stopped, stalled or dead.",
    ));
    for endpoint in &snapshot.endpoints {
        let is_up = matches!(endpoint.state.name(), "live" | "unobserved");
        let labels = [
            ("name", endpoint.name.as_str()),
            ("state", endpoint.state.name()),
        ];
        page.value("warpipe_endpoint_up", &labels, u64::from(is_up));
    }
    for (metric, value) in &SAMPLES {
        page.head(metric);
        for endpoint in snapshot.endpoints.iter().filter(|it| it.has_samples()) {
            page.value(metric.0, &endpoint_labels(endpoint), value(endpoint));
        }
    }
    for (metric, value) in &ENDPOINT {
        page.head(metric);
        for endpoint in snapshot.endpoints.iter().filter(|it| it.kind.is_some()) {
            page.value(metric.0, &endpoint_labels(endpoint), value(endpoint));
        }
    }
    page.head(&Metric(
        "warpipe_endpoint_latency_seconds",
        "summary",
        "Time between sending and receiving, of samples that say when they were sent.",
    ));
    for endpoint in snapshot.endpoints.iter().filter(|it| it.has_samples()) {
        let labels = endpoint_labels(endpoint);
        let seconds = endpoint.latency_ns as f64 / 1e9;
        page.value("warpipe_endpoint_latency_seconds_sum", &labels, seconds);
        page.value(
            "warpipe_endpoint_latency_seconds_count",
            &labels,
            endpoint.timed,
        );
    }
}

fn copies(page: &mut Page, snapshot: &Snapshot) {
    page.head(&Metric(
        "warpipe_endpoint_copied_total",
        "counter",
        "Tensors that were to be sent where they lie and were copied.",
    ));
    for endpoint in snapshot.endpoints.iter().filter(|it| it.has_samples()) {
        let count = endpoint.copied.as_ref().map_or(0, |it| it.count);
        page.value(
            "warpipe_endpoint_copied_total",
            &endpoint_labels(endpoint),
            count,
        );
    }
}

fn endpoint_labels(endpoint: &EndpointRow) -> [(&'static str, &str); 2] {
    [
        ("name", endpoint.name.as_str()),
        ("kind", endpoint.kind.as_deref().unwrap_or("unknown")),
    ]
}

fn subscribers(page: &mut Page, snapshot: &Snapshot) {
    let metrics = [
        Metric(
            "warpipe_subscriber_lag",
            "gauge",
            "Samples that a subscriber was given and has not released.",
        ),
        Metric(
            "warpipe_subscriber_dropped_total",
            "counter",
            "Samples that a subscriber did not get because of its policy.",
        ),
    ];
    for (at, metric) in metrics.iter().enumerate() {
        page.head(metric);
        for endpoint in &snapshot.endpoints {
            for (index, it) in endpoint.subscribers.iter().enumerate() {
                let (pid, index) = (it.pid.to_string(), index.to_string());
                let labels = [
                    ("name", endpoint.name.as_str()),
                    ("subscriber", &index),
                    ("pid", &pid),
                    ("state", it.state),
                ];
                let labels = if at == 0 { &labels[..] } else { &labels[..3] };
                page.value(metric.0, labels, [it.lag, it.dropped][at]);
            }
        }
    }
}

fn processes(page: &mut Page, snapshot: &Snapshot) {
    page.head(&Metric(
        "warpipe_process_running",
        "gauge",
        "1 for a process that runs; 0 for one that is stopped or stalled.",
    ));
    for process in &snapshot.processes {
        let pid = process.pid.to_string();
        let labels = [("pid", pid.as_str()), ("command", &process.command)];
        let is_running = process.state == ProcessState::Running;
        page.value("warpipe_process_running", &labels, u64::from(is_running));
    }
    page.head(&Metric(
        "warpipe_process_descriptors",
        "gauge",
        "Open descriptors.",
    ));
    for process in &snapshot.processes {
        let pid = process.pid.to_string();
        let labels = [("pid", pid.as_str())];
        page.value(
            "warpipe_process_descriptors",
            &labels,
            process.descriptors as u64,
        );
    }
    page.head(&Metric(
        "warpipe_process_memory_bytes",
        "gauge",
        "Memory that a process holds through warpipe, by device and by how it came to it.",
    ));
    for process in &snapshot.processes {
        let pid = process.pid.to_string();
        for (device, role, bytes) in [
            ("cuda", "owned", process.gpu_owned),
            ("cuda", "imported", process.gpu_imported),
            ("host", "owned", process.host_owned),
            ("host", "imported", process.host_imported),
            ("cuda", "kept", process.gpu_kept),
            ("host", "kept", process.host_kept),
        ] {
            let labels = [("pid", pid.as_str()), ("device", device), ("role", role)];
            page.value("warpipe_process_memory_bytes", &labels, bytes);
        }
    }
    page.head(&Metric(
        "warpipe_process_slow_path_total",
        "counter",
        "Copies that were staged, and refusals for want of peer access.",
    ));
    for process in &snapshot.processes {
        let pid = process.pid.to_string();
        for taken in &process.slow_paths {
            let labels = [("pid", pid.as_str()), ("path", taken.path)];
            page.value("warpipe_process_slow_path_total", &labels, taken.count);
        }
    }
}

fn memory(page: &mut Page, snapshot: &Snapshot) {
    page.head(&Metric(
        "warpipe_memory_bytes",
        "gauge",
        "Memory of all observed processes, each region counted once.",
    ));
    let state_of = |it: &MemoryRow| match it {
        it if it.owner.is_some() => "owned",
        it if it.is_kept() => "kept",
        _ => "borrowed",
    };
    for state in ["owned", "kept", "borrowed"] {
        let regions = snapshot.memory.iter().filter(|it| state_of(it) == state);
        let bytes = regions.map(|it| it.bytes).fold(0, u64::saturating_add);
        page.value("warpipe_memory_bytes", &[("state", state)], bytes);
    }
}

/// The text, as it grows.
#[derive(Default)]
struct Page(String);

impl Page {
    fn head(&mut self, Metric(name, kind, help): &Metric) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn value(&mut self, name: &str, labels: &[(&str, &str)], value: impl std::fmt::Display) {
        let labels: Vec<String> = labels
            .iter()
            .map(|(label, value)| format!("{label}=\"{}\"", escaped(value)))
            .collect();
        let _ = writeln!(self.0, "{name}{{{}}} {value}", labels.join(","));
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
