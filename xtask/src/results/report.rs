//! The reports under `results/<gpu>/`: what `run` of the GPU bundle leaves, of one commit.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;
use warpipe_testkit::figure::Figure;

use super::targets;
use crate::Outcome;

/// Where a report comes from.
#[derive(Debug, Clone, Deserialize)]
pub struct Head {
    pub commit: String,
    pub gpu: String,
    pub driver: String,
    /// UTC, ISO 8601.
    pub date: String,
    /// `timesliced` or `mps`, followed by `-x2` where two GPUs took part.
    pub mode: String,
}

impl Head {
    /// How the processes share the GPU, in words.
    pub fn sharing(&self) -> &'static str {
        if self.mode.starts_with("mps") {
            "MPS"
        } else {
            "time-sliced"
        }
    }

    /// Time-sliced before MPS, one GPU before two.
    fn order(&self) -> (bool, String) {
        (self.mode.starts_with("mps"), self.mode.clone())
    }
}

/// What all reports but the engines' say.
#[derive(Debug, Deserialize)]
struct Common {
    head: Head,
    #[serde(default)]
    quick: bool,
}

impl Common {
    fn check(&self, path: &Path) -> Outcome<()> {
        let (commit, path) = (&self.head.commit, path.display());
        let is_digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if commit.len() < 7 || !commit.bytes().all(is_digit) {
            return Err(format!(
                "{path}: '{commit}' is no commit; measure with a bundle that was built from a clean tree"
            ));
        }
        match self.quick {
            true => Err(format!("{path} is of a quick run: its figures mean little")),
            false => Ok(()),
        }
    }
}

/// A report of `warpipe-bench`, or of another program with figures alone.
#[derive(Debug, Deserialize)]
pub struct Bench {
    pub head: Head,
    /// Its name: `host`, or a GPU's.
    #[serde(default)]
    pub device: String,
    pub devices: u32,
    pub cpus: u32,
    /// Peers that the machine lacks.
    #[serde(default)]
    pub not_installed: Vec<String>,
    pub figures: Vec<Figure>,
}

/// The round trip of one contestant at one size.
#[derive(Debug, Deserialize)]
pub struct Contestant {
    pub contestant: String,
    /// `ours`, `usual` (the way to beat) or another.
    pub role: String,
    pub place: String,
    pub bytes: u64,
    pub status: String,
    pub reason: String,
    pub chained_us: Option<f64>,
    pub awaited_ns: Option<Awaited>,
}

/// The quantile of round trips that the CPU waited for.
#[derive(Debug, Deserialize)]
pub struct Awaited {
    pub p50: u64,
    pub p90: u64,
    pub p99: u64,
    pub max: u64,
}

/// The Rust library's own round trip, measured in the same run.
#[derive(Debug, Deserialize)]
pub struct Rust {
    #[serde(default)]
    pub figures: Vec<Figure>,
}

/// A report of `python -m warpipe.bench`.
#[derive(Debug, Deserialize)]
pub struct Python {
    pub head: Head,
    devices: u32,
    pub python: String,
    pub packages: BTreeMap<String, Option<String>>,
    pub contestants: Vec<Contestant>,
    pub rust: Rust,
    pub figures: Vec<Figure>,
}

/// A report of `python -m warpipe.bench.vllm`: a model of its own, in an engine of its own.
#[derive(Debug, Deserialize)]
pub struct Engines {
    pub commit: String,
    pub device: String,
    pub packages: BTreeMap<String, Option<String>>,
    /// The length of the model.
    pub gib: f64,
    pub beside: Vec<Beside>,
}

/// A figure beside the engine's own, of the same run.
#[derive(Debug, Deserialize)]
pub struct Beside {
    pub question: String,
    pub unit: String,
    pub theirs: f64,
    pub ours: f64,
}

/// The printed output of one `warpipe demo`.
#[derive(Debug, Deserialize)]
pub struct Demo {
    pub head: Head,
    pub output: Vec<String>,
}

/// All reports of one commit on one kind of GPU.
#[derive(Debug)]
pub struct Reports {
    /// `results/<gpu>`.
    pub folder: PathBuf,
    pub bench: Vec<Bench>,
    pub python: Vec<Python>,
    pub demo: Vec<Demo>,
    /// May be of another commit than the others.
    pub engines: Vec<Engines>,
    /// The parts of `run` that left a report, each with its mode.
    pub parts: BTreeSet<(String, String)>,
}

/// Leaves out what a run with several GPUs measured on one of them, where a run with one did so.
fn count_one_device_once(reports: &mut [Python]) {
    const PLACE: &str = "one device";
    let single = reports.iter().filter(|report| report.devices == 1);
    let measured: Vec<String> = single.map(|report| report.head.sharing().into()).collect();
    let again = |report: &&mut Python| {
        report.devices > 1 && measured.iter().any(|mode| mode == report.head.sharing())
    };
    for report in reports.iter_mut().filter(again) {
        report.contestants.retain(|row| row.place != PLACE);
        report.figures.retain(|figure| !figure.name.contains(PLACE));
    }
}

/// The parts of `run` with reports of figures alone, by the beginning of their files' names.
const BENCHES: &[&str] = &[
    "bench-",
    "comparison-",
    "bridge-bench-",
    "host-bench-",
    "weights-bench-",
    "torch-queue-bench-",
];

/// A report's kind, by its file's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Bench,
    Python,
    Demo,
    Engines,
}

impl Kind {
    /// None of a file that is no report of a measurement.
    pub fn of(path: &Path) -> Option<Kind> {
        let name = path.file_name()?.to_str()?;
        match name.strip_suffix(".json")? {
            name if name.starts_with("python-bench-") => Some(Kind::Python),
            name if BENCHES.iter().any(|bench| name.starts_with(bench)) => Some(Kind::Bench),
            name if name.starts_with("demo-") => Some(Kind::Demo),
            name if name.starts_with("vllm-bench") => Some(Kind::Engines),
            _ => None,
        }
    }
}

impl Reports {
    /// Reads all reports of `folder`. An error if they are of several commits, GPUs or drivers.
    pub fn read(folder: &Path) -> Outcome<Reports> {
        let mut reports = Reports {
            folder: folder.to_owned(),
            bench: Vec::new(),
            python: Vec::new(),
            demo: Vec::new(),
            engines: Vec::new(),
            parts: BTreeSet::new(),
        };
        for path in files(folder)? {
            let Some(kind) = Kind::of(&path) else {
                continue;
            };
            if kind != Kind::Engines {
                let common: Common = parse(&path)?;
                common.check(&path)?;
                reports.parts.extend(part_of(&path, &common.head));
            }
            match kind {
                Kind::Bench => reports.bench.push(parse(&path)?),
                Kind::Python => reports.python.push(parse(&path)?),
                Kind::Demo => reports.demo.push(parse(&path)?),
                Kind::Engines => reports.engines.push(parse(&path)?),
            }
        }
        reports
            .bench
            .sort_by_key(|report| (report.devices, report.head.order()));
        reports.python.sort_by_key(|report| report.head.order());
        count_one_device_once(&mut reports.python);
        reports.demo.sort_by_key(|report| report.head.order());
        reports.check_one_commit()?;
        targets::take_out(&mut reports);
        Ok(reports)
    }

    /// The heads of all reports.
    pub fn heads(&self) -> impl Iterator<Item = &Head> {
        let bench = self.bench.iter().map(|report| &report.head);
        let python = self.python.iter().map(|report| &report.head);
        bench
            .chain(python)
            .chain(self.demo.iter().map(|report| &report.head))
    }

    /// The head that stands for all of them.
    pub fn head(&self) -> Outcome<&Head> {
        let weights = self.weights_head().map(std::ptr::from_ref);
        let others = self
            .heads()
            .find(|head| Some(std::ptr::from_ref(*head)) != weights);
        others.or(self.weights_head()).ok_or_else(|| {
            format!(
                "{} holds no report; see CONTRIBUTING.md, Measurements",
                self.folder.display()
            )
        })
    }

    /// The head of the report of `warpipe.bench.weights`, a program with peers and floors of its own: it may be of
    /// another commit than the others, which the pages say then.
    pub fn weights_head(&self) -> Option<&Head> {
        let of_weights = |report: &&Bench| {
            let mut figures = report.figures.iter();
            !report.figures.is_empty() && figures.all(|figure| figure.bench == "weights")
        };
        self.bench
            .iter()
            .find(of_weights)
            .map(|report| &report.head)
    }

    fn check_one_commit(&self) -> Outcome<()> {
        let first = self.head()?;
        let weights = self.weights_head().map(std::ptr::from_ref);
        let other = self.heads().find(|head| {
            let is_weights = weights == Some(std::ptr::from_ref(*head));
            (&head.gpu, &head.driver) != (&first.gpu, &first.driver)
                || (head.commit != first.commit && !is_weights)
        });
        match other {
            None => Ok(()),
            Some(other) => Err(format!(
                "{} holds reports of several commits or machines: {} on {} (driver {}) and {} on \
                 {} (driver {}); keep those of one",
                self.folder.display(),
                first.commit,
                first.gpu,
                first.driver,
                other.commit,
                other.gpu,
                other.driver
            )),
        }
    }
}

/// `bench-mps-x2.json` is of the part `bench` in the mode `mps-x2`.
fn part_of(path: &Path, head: &Head) -> Option<(String, String)> {
    let name = path.file_stem()?.to_str()?;
    let part = name.strip_suffix(&head.mode)?.strip_suffix('-')?;
    Some((part.to_owned(), head.mode.clone()))
}

/// Whether it is the picture of a report beside it.
pub fn is_picture(path: &Path) -> bool {
    let report = path.with_extension("json");
    path.extension().is_some_and(|end| end == "svg")
        && Kind::of(&report).is_some()
        && report.exists()
}

/// The files of a folder, sorted.
pub fn files(folder: &Path) -> Outcome<Vec<PathBuf>> {
    let unreadable =
        |error: std::io::Error| format!("{} cannot be read: {error}", folder.display());
    let entries = fs::read_dir(folder).map_err(unreadable)?;
    let mut files = entries
        .map(|entry| entry.map(|entry| entry.path()).map_err(unreadable))
        .collect::<Outcome<Vec<_>>>()?;
    files.sort();
    Ok(files)
}

fn parse<T: DeserializeOwned>(path: &Path) -> Outcome<T> {
    let text = fs::read_to_string(path)
        .map_err(|error| format!("{} cannot be read: {error}", path.display()))?;
    serde_json::from_str(&text).map_err(|error| {
        format!(
            "{} is no report of the bundle's `run`: {error}",
            path.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(commit: &str) -> Head {
        Head {
            commit: commit.into(),
            gpu: "NVIDIA H200".into(),
            driver: "580".into(),
            date: "2026-11-22T00:00:00Z".into(),
            mode: "mps".into(),
        }
    }

    fn demos(commits: &[&str]) -> Reports {
        let demo = |commit: &&str| Demo {
            head: head(commit),
            output: Vec::new(),
        };
        Reports {
            folder: "results/h200".into(),
            bench: Vec::new(),
            python: Vec::new(),
            demo: commits.iter().map(demo).collect(),
            engines: Vec::new(),
            parts: BTreeSet::new(),
        }
    }

    #[test]
    fn what_two_gpus_measured_on_one_is_left_out_where_one_gpu_measured_it() {
        let report = |mode: &str, devices: u32| -> Python {
            let rows = ["one device", "two devices"].map(|place| {
                serde_json::json!({
                    "contestant": "warpipe", "role": "ours", "kernel": "direct", "place": place,
                    "bytes": 4096, "status": "measured", "reason": ""
                })
            });
            let head = serde_json::json!({
                "commit": "0123456", "gpu": "H200", "driver": "580",
                "date": "2026-11-22T00:00:00Z", "mode": mode
            });
            let report = serde_json::json!({
                "head": head, "quick": false, "devices": devices, "python": "3.12",
                "packages": {}, "contestants": rows, "rust": {"figures": []}, "figures": []
            });
            serde_json::from_value(report).unwrap()
        };
        let mut reports = [
            report("timesliced", 1),
            report("timesliced-x2", 2),
            report("mps-x2", 2),
        ];
        count_one_device_once(&mut reports);
        let rows = reports.map(|report| report.contestants.len());
        assert_eq!(rows, [2, 1, 2]);
    }

    #[test]
    fn reports_of_two_commits_are_refused() {
        assert_eq!(demos(&["0123456", "0123456"]).check_one_commit(), Ok(()));
        assert!(demos(&["0123456", "0123457"]).check_one_commit().is_err());
        assert!(demos(&[]).check_one_commit().is_err());
    }

    #[test]
    fn a_report_of_a_modified_tree_or_a_quick_run_is_refused() {
        let check = |commit, quick| {
            let head = head(commit);
            Common { head, quick }.check(Path::new("demo-mps.json"))
        };
        assert!(check("0123456789ab", false).is_ok());
        assert!(check("0123456789ab-modified", false).is_err());
        assert!(check("unknown", false).is_err());
        assert!(check("0123456789ab", true).is_err());
    }

    #[test]
    fn the_name_of_a_file_says_the_part_of_run_and_its_mode() {
        let mode = "mps-x2";
        let head = Head {
            mode: mode.into(),
            ..head("0123456")
        };
        let part = |name: &str| part_of(Path::new(name), &head);
        assert_eq!(
            part("r/python-bench-mps-x2.json"),
            Some(("python-bench".into(), mode.into()))
        );
        assert_eq!(part("r/bench-mps.json"), None);
    }

    #[test]
    fn the_name_of_a_file_says_the_kind_of_its_report() {
        let kind = |name: &str| Kind::of(Path::new(name));
        assert_eq!(kind("r/bench-mps.json"), Some(Kind::Bench));
        assert_eq!(kind("r/weights-bench-mps.json"), Some(Kind::Bench));
        assert_eq!(kind("r/python-bench-mps-x2.json"), Some(Kind::Python));
        assert_eq!(kind("r/python-bench-mps.svg"), None);
        assert_eq!(kind("r/conformance-mps.json"), None);
    }
}
