//! Reports of figures, for display and as JSON.

use std::path::Path;
use std::time::SystemTime;
use std::{fs, io};

use anyhow::Context;
use serde::Serialize;
use warpipe_testkit::figure::{Figure, Quantiles};

use super::setup::Setup;

pub fn heading(setup: &Setup) {
    let info = setup.device.info();
    println!(
        "device: {} ({}), {}: {}",
        info.name, info.id, setup.mode, setup.why
    );
    if setup.quick {
        println!("quick: this shows that everything runs; the figures mean little");
    }
}

/// One figure, as soon as it is there.
pub fn figure(figure: &Figure) {
    println!("\n{}: {}", figure.bench, figure.name);
    println!("  {}", comparison(figure));
    for (side, quantiles) in [("ours", &figure.ours_ns), ("floor", &figure.floor_ns)] {
        if let Some(quantiles) = quantiles {
            println!("  {side:<5} {}", spread(quantiles));
        }
    }
    if !figure.note.is_empty() {
        println!("  {}", figure.note);
    }
}

fn comparison(figure: &Figure) -> String {
    let mut text = format!("ours {:.3} {}", figure.ours, figure.unit);
    if let Some(floor) = figure.floor {
        text += &format!(", floor {floor:.3} {}", figure.unit);
    }
    if let Some(ratio) = figure.ratio {
        text += &format!(", ratio {ratio:.3}");
    }
    if let Some(wanted) = figure.target() {
        text += &format!(", wanted {wanted}: {}", verdict(figure));
    }
    text
}

fn verdict(figure: &Figure) -> &'static str {
    match figure.met {
        Some(true) => "met",
        Some(false) => "NOT MET",
        None => "",
    }
}

fn spread(quantiles: &Quantiles) -> String {
    let each = quantiles
        .named()
        .map(|(name, ns)| format!("{name} {:.2}", ns as f64 / 1e3));
    format!("{} us, of {}", each.join("  "), quantiles.count)
}

/// All of them under each other.
pub fn table(figures: &[Figure]) {
    let number = |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.3}"));
    let row = |figure: &Figure| {
        [
            format!("{}: {}", figure.bench, figure.name),
            format!("{:.3} {}", figure.ours, figure.unit),
            number(figure.floor),
            number(figure.ratio),
            figure.target().unwrap_or_default(),
            verdict(figure).to_owned(),
        ]
    };
    let heads = ["figure", "ours", "floor", "ratio", "wanted", ""].map(str::to_owned);
    let rows: Vec<[String; 6]> = std::iter::once(heads)
        .chain(figures.iter().map(row))
        .collect();
    let width = |column: usize| {
        rows.iter()
            .map(|row| row[column].chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: [usize; 6] = std::array::from_fn(width);
    println!();
    for [name, ours, floor, ratio, wanted, verdict] in &rows {
        let [a, b, c, d, e, _] = widths;
        println!("{name:<a$}  {ours:>b$}  {floor:>c$}  {ratio:>d$}  {wanted:<e$}  {verdict}");
    }
}

#[derive(Serialize)]
struct Report<'a> {
    version: &'static str,
    /// Seconds since 1970.
    time: u64,
    device: &'a str,
    device_id: String,
    why: &'a str,
    mode: &'a str,
    devices: u32,
    quick: bool,
    cpus: usize,
    figures: &'a [Figure],
}

pub fn write(path: &Path, setup: &Setup, figures: &[Figure]) -> anyhow::Result<()> {
    let info = setup.device.info();
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        time: SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .map_or(0, |since| since.as_secs()),
        device: &info.name,
        device_id: info.id.to_string(),
        why: &setup.why,
        mode: &setup.mode,
        devices: if setup.second.is_some() { 2 } else { 1 },
        quick: setup.quick,
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
        figures,
    };
    let mut text = serde_json::to_string_pretty(&report)?;
    text.push('\n');
    replace(path, &text).with_context(|| format!("cannot write {}", path.display()))
}

/// Replaces a file at once: a reader never sees a part. A link (`/dev/stdout`), a pipe or a device
/// is written to, and stays.
fn replace(path: &Path, text: &str) -> io::Result<()> {
    if fs::symlink_metadata(path).is_ok_and(|found| !found.is_file()) {
        return fs::write(path, text);
    }
    let partial = path.with_extension("partial");
    fs::write(&partial, text)?;
    fs::rename(&partial, path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_replaces_a_file_and_is_written_through_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::os::unix::fs::symlink(at("file.json"), at("link.json")).unwrap();
        for (name, text) in [
            ("file.json", "first"),
            ("file.json", "second"),
            ("link.json", "third"),
        ] {
            replace(&at(name), text).unwrap();
            assert_eq!(fs::read_to_string(at("file.json")).unwrap(), text);
        }
        assert!(at("link.json").is_symlink());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }
}
