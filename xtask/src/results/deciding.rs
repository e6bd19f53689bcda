//! BENCHMARKS.md: the figures by which a user decides. `page` prints all others.

use std::fmt::Write;

use super::page::{Row, folder_name, introduction, python_mode, quantity, ratios, rows, wrapped};
use super::quotes::picture_says;
use super::report::{Engines, Reports};
use super::targets;
use crate::Outcome;

/// A figure as its benchmark names it (without the place, `one device` or `two devices`), and as a user asks for it.
struct Pick {
    question: &'static str,
    bench: &'static str,
    name: &'static str,
}

const fn pick(question: &'static str, bench: &'static str, name: &'static str) -> Pick {
    Pick {
        question,
        bench,
        name,
    }
}

const GPU: [&str; 3] = ["time-sliced", "MPS", "two GPUs, time-sliced"];

/// What processes on a GPU do.
const ON_GPU: &[Pick] = &[
    pick(
        "round trip, a kernel on each side",
        "handoff",
        "kernel -> kernel, PLACE, sent",
    ),
    pick(
        "the same, with the host as reader",
        "handoff",
        "kernel -> copy to host, PLACE, sent",
    ),
    pick(
        "an item of a stream, 8 in flight",
        "pipeline",
        "per item, 8 in flight, PLACE",
    ),
    pick(
        "an item for 4 subscribers",
        "fanout",
        "per item, kernels, 4 subscribers",
    ),
    pick(
        "CPU time of a send to 1",
        "send",
        "CPU of a send, 1 subscribers",
    ),
    pick(
        "CPU time of a send to 64",
        "send",
        "CPU of a send, 64 subscribers",
    ),
    pick(
        "a job to a worker and its result back",
        "queue",
        "one job to a worker and back",
    ),
    pick(
        "a semaphore there and back, kernel to kernel",
        "semaphore",
        "there and back, kernel to kernel, two processes",
    ),
    pick(
        "reading another process's memory",
        "bandwidth",
        "reading an import, PLACE, 256 MiB",
    ),
    pick("opening 1 GiB by ticket", "attach", "by ticket, 1 GiB"),
    pick(
        "8 bytes there and back between running kernels",
        "kernel_ring",
        "8 bytes there and back between two kernels, PLACE",
    ),
    pick(
        "a hand-over through C, beside Rust",
        "c",
        "CPU of a hand-over through C",
    ),
    pick(
        "a queue of PyTorch, 4 KiB, beside PyTorch's own",
        "torch_queue",
        "4 KiB, segments, PLACE: a round trip, beside PyTorch's",
    ),
    pick(
        "the same, 64 MiB",
        "torch_queue",
        "64 MiB, segments, PLACE: a round trip, beside PyTorch's",
    ),
    pick(
        "the same, 1 GiB, memory of `warpipe.torch.pool()`",
        "torch_queue",
        "1 GiB, pool, PLACE: a round trip, beside PyTorch's",
    ),
    pick(
        "publisher killed: its subscriber knows",
        "death",
        "publisher killed mid-kernel: kill -> receive() returns PeerGone",
    ),
    pick(
        "publisher killed: a stream that waits goes on",
        "death",
        "publisher killed mid-kernel: kill -> the stuck stream is free, SampleLost",
    ),
    pick(
        "subscriber killed: its slots are lent again",
        "death",
        "subscriber killed mid-kernel: kill -> its slots are lent again",
    ),
    pick(
        "load of 7.6 GiB from files",
        "weights",
        "load of the files, the device open",
    ),
    pick(
        "opening a model that is there",
        "weights",
        "open, with a context there",
    ),
    pick(
        "a new version in two engines, by copy",
        "weights",
        "new version in two engines, by copy, hash=device",
    ),
    pick(
        "a new version in two engines, in place",
        "weights",
        "new version in two engines, in place, hash=device",
    ),
    pick(
        "the same by torch.multiprocessing",
        "weights",
        "new version in two engines, torch.multiprocessing, two engines that copy",
    ),
    pick(
        "killed in a step: the next token, KV cache kept",
        "weights",
        "kill in a step until the next token, with the KV cache kept",
    ),
    pick(
        "killed in a request: its answer by a standby",
        "weights",
        "kill in a request until its answer by a standby",
    ),
    pick(
        "killed: another worker's first token",
        "weights",
        "kill of a worker until another one's first token",
    ),
    pick(
        "memory with 4 workers, beside 4 copies",
        "weights",
        "GPU memory with 4 workers, beside a copy for each",
    ),
];

/// What needs no GPU.
const ON_HOST: &[Pick] = &[
    pick(
        "128 bytes one way, beside iceoryx2",
        "host path",
        "128 bytes one way, polling, not pinned, beside iceoryx2",
    ),
    pick(
        "the same, a receiver that sleeps",
        "host path",
        "128 bytes one way, receiver asleep, not pinned, beside iceoryx2",
    ),
    pick(
        "128 bytes to 4 subscribers, beside iceoryx2",
        "host path",
        "128 bytes pipelined, 4 subscribers, polling, not pinned, beside iceoryx2",
    ),
    pick(
        "1 MiB through two bridges, beside Zenoh",
        "bridge",
        "1 MiB behind each other",
    ),
    pick(
        "64 MiB through two bridges, beside Zenoh",
        "bridge",
        "64 MiB behind each other",
    ),
];

/// The whole page.
pub fn page(reports: &Reports, picture: &str) -> Outcome<String> {
    let head = reports.head()?;
    let all = rows(reports);
    let mut text = String::new();
    introduction(&mut text, reports, head);
    let folder = folder_name(reports);
    let _ = writeln!(
        text,
        "\n![{}](results/{folder}/{picture})",
        picture_says(reports)
    );
    text += "\n## On a GPU\n\n";
    let modes = measured_modes(&all);
    text += &head_of(" ", &modes);
    let mut missing: Vec<&str> = Vec::new();
    for pick in ON_GPU {
        let cells: Vec<String> = modes.iter().map(|mode| cell(&all, pick, mode)).collect();
        if cells.iter().any(|cell| !cell.is_empty()) {
            let _ = writeln!(text, "| {} | {} |", pick.question, cells.join(" | "));
        } else {
            missing.push(pick.question);
        }
    }
    missing.extend(GPU.iter().filter(|mode| !modes.contains(mode)));
    if !missing.is_empty() {
        let said = format!("Not measured at this commit: {}.", missing.join("; "));
        let _ = writeln!(text, "\n{}", wrapped(&said));
    }
    python(&mut text, reports, &modes);
    reports
        .engines
        .iter()
        .for_each(|report| engines(&mut text, report));
    text += "\n## On the host\n\n| | ours, and beside the floor |\n| --- | --- |\n";
    for pick in ON_HOST {
        let _ = writeln!(text, "| {} | {} |", pick.question, cell(&all, pick, "host"));
    }
    text += "\n## Known gaps\n\n";
    text += &wrapped(
        "`(!)` marks a missed target. These are all of them, with the ratios of the figures that miss; \
         `cargo xtask results --all` prints every figure, with its floor, its target and its distribution.",
    );
    text += "\n\n";
    text += &targets::gaps(reports)?;
    Ok(text)
}

/// The modes in which anything was measured.
fn measured_modes(all: &[Row]) -> Vec<&'static str> {
    let is_measured = |mode: &&str| all.iter().any(|row| row.mode == *mode);
    GPU.into_iter().filter(is_measured).collect()
}

/// The head of a table with a column for each mode.
fn head_of(first: &str, modes: &[&str]) -> String {
    format!(
        "|{first}| {} |\n| --- |{}\n",
        modes.join(" | "),
        " --- |".repeat(modes.len())
    )
}

/// `290.5 us, 1.02 x`, or nothing where it was not measured.
fn cell(all: &[Row], pick: &Pick, mode: &str) -> String {
    let place = if mode.starts_with("two GPUs") {
        "two devices"
    } else {
        "one device"
    };
    let name = pick.name.replace("PLACE", place);
    let mut found = all.iter().filter(|row| row.mode == mode);
    let Some(row) = found.find(|row| row.figure.bench == pick.bench && row.figure.name == name)
    else {
        return String::new();
    };
    let figure = row.figure;
    let ratio = figure.floor.filter(|floor| *floor > 0.0);
    let ratio = ratio.map_or(String::new(), |floor| {
        format!(", {:.2} x", figure.ours / floor)
    });
    let mark = if figure.met == Some(false) {
        " (!)"
    } else {
        ""
    };
    format!("{}{ratio}{mark}", quantity(figure.ours, &figure.unit))
}

/// An engine with its own loader and its own transfer, and with this library's.
fn engines(text: &mut String, report: &Engines) {
    let version = report
        .packages
        .get("vllm")
        .cloned()
        .flatten()
        .unwrap_or_default();
    let _ = writeln!(text, "\n## vLLM {version}\n");
    *text += &wrapped(&format!(
        "A model of {:.1} GiB on an {} (commit {}): vLLM's own loader and CUDA IPC transfer, and `warpipe.vllm`, in \
         one run.",
        report.gib, report.device, report.commit
    ));
    *text += "\n\n| | vLLM's own | warpipe | ratio |\n| --- | --- | --- | --- |\n";
    for row in &report.beside {
        let [theirs, ours] = [row.theirs, row.ours].map(|value| quantity(value, &row.unit));
        let ratio = row.ours / row.theirs;
        let _ = writeln!(
            text,
            "| {} | {theirs} | {ours} | {ratio:.2} |",
            row.question
        );
    }
}

/// Round trips from Python, each beside the fastest way of PyTorch's own.
fn python(text: &mut String, reports: &Reports, modes: &[&str]) {
    const ROWS: [(&str, &str, u64); 4] = [
        ("1 MiB in a slot", "ours", 1 << 20),
        ("1 GiB in a slot", "ours", 1 << 30),
        ("1 MiB copied by `send`", "ours, copied", 1 << 20),
        ("1 GiB copied by `send`", "ours, copied", 1 << 30),
    ];
    if reports.python.is_empty() {
        return;
    }
    *text += "\n## Round trips from Python, beside `torch.multiprocessing`\n\n";
    text.push_str(&head_of(" a tensor ", modes));
    for (name, role, bytes) in ROWS {
        let cell = |mode: &&str| python_cell(reports, role, bytes, mode).unwrap_or_default();
        let cells: Vec<String> = modes.iter().map(cell).collect();
        let _ = writeln!(text, "| {name} | {} |", cells.join(" | "));
    }
}

/// `33.3 us, 0.08 x`, or nothing where it was not measured.
fn python_cell(reports: &Reports, role: &str, bytes: u64, mode: &str) -> Option<String> {
    reports.python.iter().find_map(|report| {
        let mut rows = report.contestants.iter();
        let row = rows.find(|row| {
            (row.role.as_str(), row.bytes, row.status.as_str()) == (role, bytes, "measured")
                && python_mode(report, &row.place) == mode
        })?;
        let [(mine, theirs), _] = ratios(report, row)?;
        Some(format!("{}, {:.2} x", quantity(mine, "us"), mine / theirs))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Workspace;

    #[test]
    fn an_engines_figures_stand_beside_its_own() {
        let report = serde_json::json!({
            "commit": "1234567", "device": "NVIDIA H100", "packages": {"vllm": "0.24.0", "torch": null}, "gib": 7.09,
            "beside": [{"question": "`load_model`", "unit": "ms", "theirs": 1000.0, "ours": 250.0}],
        });
        let mut text = String::new();
        engines(&mut text, &serde_json::from_value(report).unwrap());
        assert!(text.contains("## vLLM 0.24.0"), "{text}");
        assert!(
            text.contains("A model of 7.1 GiB on an NVIDIA H100 (commit 1234567)"),
            "{text}"
        );
        assert!(
            text.contains("| `load_model` | 1,000 ms | 250.0 ms | 0.25 |"),
            "{text}"
        );
    }

    #[test]
    fn every_figure_of_the_page_is_one_that_a_benchmark_reports() {
        let root = Workspace::find().unwrap().root;
        let found = std::fs::read_dir(root.join("results")).unwrap();
        let mut folders = found.map(|entry| entry.unwrap().path());
        let folder = folders.find(|path| !path.ends_with("history")).unwrap();
        let reports = Reports::read(&folder).unwrap();
        let all = rows(&reports);
        let is_there = |pick: &&Pick| all.iter().any(|row| row.figure.bench == pick.bench);
        for pick in ON_GPU.iter().chain(ON_HOST).filter(is_there) {
            let modes = GPU.iter().chain(&["host"]);
            let measured = modes
                .filter(|mode| !cell(&all, pick, mode).is_empty())
                .count();
            // Its parts are measured one by one, and the page says which of them are missing.
            let has_parts = pick.bench == "weights";
            assert!(measured > 0 || has_parts, "{}: {}", pick.bench, pick.name);
        }
    }
}
