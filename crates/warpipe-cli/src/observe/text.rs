//! A look as lines of text.

use super::MemoryRow;
use super::process::{ProcessRow, SlowPathRow};
use super::snapshot::{EndpointRow, Snapshot, style_of};
use crate::output::{self, Style, column, printable, styled};

/// The longest path that a process's name may have beside it.
const NAME_WIDTH_MAX: usize = 40;

/// One line for an endpoint, and one for each of its subscribers.
fn endpoint(endpoint: &EndpointRow, width: usize) -> Vec<String> {
    let (name, state) = (&endpoint.name, endpoint.state);
    let width = width.min(NAME_WIDTH_MAX);
    let mut text = format!(
        "  {name:<width$}  {}",
        styled(style_of(state), &format!("{state:<10}"))
    );
    let holder = endpoint
        .pid
        .map_or(String::new(), |pid| format!("  process {pid}"));
    match (&endpoint.kind, state) {
        (Some(kind), _) => {
            text += &format!("  {kind}{holder}");
            // Not every endpoint without samples says which memory it shares.
            if endpoint.has_samples() || endpoint.memory > 0 {
                text += &format!("  memory {}", output::bytes(endpoint.memory));
            }
        }
        (None, "stale") => text += "  left by a dead process",
        (None, "foreign") => {
            let found = endpoint.foreign.unwrap_or("a foreign file");
            text += &format!("  {found}, which no owner of the name removes");
        }
        (None, _) => {
            text += &format!(
                "{holder}  its statistics cannot be read: it is another user's, in another PID \
                 namespace, or without a page"
            );
        }
    }
    if endpoint.has_samples() {
        let (in_flight, dropped) = (endpoint.in_flight, output::count(endpoint.dropped));
        text += &format!("  in flight {in_flight}  dropped {dropped}");
    }
    if let Some(rate) = endpoint.rate.filter(|_| endpoint.has_samples()) {
        let bytes = output::bytes(rate.bytes_per_second as u64);
        text += &format!("  {:.1}/s  {bytes}/s", rate.items_per_second);
        if let Some(ns) = rate.latency_ns {
            let latency = output::duration(std::time::Duration::from_nanos(ns));
            text += &format!("  latency {latency}");
        }
    }
    let subscribers = endpoint.subscribers.iter().map(|it| {
        let state = styled(style_of(it.state), &format!("{:<9}", it.state));
        let (pid, lag, dropped) = (it.pid, it.lag, output::count(it.dropped));
        format!("      process {pid}  {state}  lag {lag}  dropped {dropped}")
    });
    let backlog = endpoint.backlog();
    let backlog = backlog.map(|(said, style)| styled(style, &format!("      {said}")));
    let copied = endpoint.copied.iter().map(slow_path);
    let lines = std::iter::once(text).chain(backlog).chain(copied);
    lines.chain(subscribers).collect()
}

/// One line for a slow path.
fn slow_path(taken: &SlowPathRow) -> String {
    let SlowPathRow { reason, count, .. } = taken;
    let times = output::count(*count);
    let mut text = styled(Style::Yellow, &format!("      {times} x"));
    if taken.bytes > 0 {
        text += &format!("  {}", output::bytes(taken.bytes));
    }
    text + &format!("  {reason}")
}

/// One line for a region of memory.
fn memory(memory: &MemoryRow) -> String {
    let MemoryRow {
        device,
        borrowers,
        keepers,
        ..
    } = memory;
    let list = |pids: &[i32]| {
        let pids: Vec<String> = pids.iter().map(i32::to_string).collect();
        pids.join(", ")
    };
    let bytes = output::bytes(memory.bytes);
    let mut text = format!("  {bytes:>10}  {device}");
    match memory.owner {
        Some(owner) => text += &format!("  process {owner}"),
        None if keepers.is_empty() => {
            text += &styled(Style::Yellow, "  no owner: its importers alone keep it");
        }
        None => {}
    }
    if !keepers.is_empty() {
        text += &format!("  kept by process {}", list(keepers));
    }
    if let Some(name) = &memory.endpoint {
        text += &format!("  {name}");
    }
    if !borrowers.is_empty() {
        let many = borrowers.len();
        text += &format!("  shared by {many} (process {})", list(borrowers));
    }
    text
}

/// One line for a process, and one for each particular of it.
fn process(process: &ProcessRow) -> Vec<String> {
    let mut lines = vec![format!(
        "  {:>8}  {:<16}  {:<8}  {} descriptors  GPU {} own, {} of others  host {} own, {} of others",
        process.pid,
        process.command,
        process.state,
        process.descriptors,
        output::bytes(process.gpu_owned),
        output::bytes(process.gpu_imported),
        output::bytes(process.host_owned),
        output::bytes(process.host_imported),
    )];
    let kept = process.gpu_kept.saturating_add(process.host_kept);
    if kept > 0 {
        lines.push(format!(
            "      keeps {} without mapping it",
            output::bytes(kept)
        ));
    }
    lines.extend(process.slow_paths.iter().map(slow_path));
    lines
}

/// Everything of a look.
pub fn all(snapshot: &Snapshot) -> String {
    let domain = printable(&snapshot.domain);
    let title = |text: String| styled(Style::Bold, &text);
    let names = output::counted(snapshot.endpoints.len(), "name", "names");
    let mut lines = vec![title(format!("{domain}: {names}"))];
    let width = column(snapshot.endpoints.iter().map(|it| it.name.as_str()));
    for row in &snapshot.endpoints {
        lines.extend(endpoint(row, width));
    }
    let (own, others): (Vec<_>, Vec<_>) = snapshot.processes.iter().partition(|it| it.is_in_domain);
    let processes = output::counted(own.len(), "process", "processes");
    lines.push(title(format!("in this domain: {processes}")));
    own.into_iter().for_each(|it| lines.extend(process(it)));
    if !others.is_empty() {
        let processes = output::counted(others.len(), "process", "processes");
        lines.push(title(format!("in other domains, or in none: {processes}")));
        others.into_iter().for_each(|it| lines.extend(process(it)));
    }
    let regions = output::counted(snapshot.memory.len(), "region", "regions");
    lines.push(title(format!("memory of all these processes: {regions}")));
    lines.extend(snapshot.memory.iter().map(memory));
    lines.extend(snapshot.notes.iter().map(|note| printable(note)));
    lines.join("\n")
}
