//! `warpipe gc`: what dead processes left in the domain, shown first, removed on demand.
//!
//! A name counts as dead if no process has its lock. The library removes its files under the same
//! locks as a claim of the name, and only if they are its own; so a name that is taken between the
//! look and the removal stays. This command removes nothing by itself.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::Metadata;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use rustix::fs::{Access, AtFlags, CWD};
use rustix::io::Errno;
use serde::{Serialize, Serializer};
use serde_json::json;
use warpipe::{Domain, Endpoint, EndpointName};

use crate::args::GcArgs;
use crate::exit::Exit;
use crate::observe::existing_domain;
use crate::output::{Output, Style, counted, printable, styled};

/// The widest column of names: a longer one moves its own line alone.
const LABEL_WIDTH_MAX: usize = 40;

/// The reason of a name that `--yes` could not remove.
const READ_ONLY: &str = "its directory may not be written: its mode, or a read-only file system";

/// The reason of a file that is not the library's.
const FOREIGN: &str = "not a file of warpipe's";

/// A name without an owner, or a file that is no name's.
#[derive(Debug, Serialize)]
struct Leftover {
    /// The name; `None` for a file of another program.
    #[serde(serialize_with = "as_text")]
    name: Option<EndpointName>,
    files: Vec<String>,
    /// Since the newest of the files was made or written.
    age_seconds: u64,
    state: State,
    /// Why it counts as dead, or is kept.
    reason: &'static str,
}

fn as_text<S: Serializer>(name: &Option<EndpointName>, to: S) -> Result<S::Ok, S::Error> {
    name.as_ref().map(EndpointName::as_str).serialize(to)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum State {
    /// Left by a dead process, and not removed.
    Dead,
    /// Removed by this command.
    Removed,
    /// Not removed: it may be another program's, or is in use by now.
    Kept,
}

/// Shows what dead processes left, and removes it with `--yes`.
pub fn run(args: &GcArgs) -> anyhow::Result<Exit> {
    let output = Output::new(args.json);
    let path = args.domain.or_environment()?;
    let domain = existing_domain(&path)?;
    let mut leftovers = domain.as_ref().map_or(Ok(Vec::new()), look)?;
    if let Some(least) = args.older_than {
        leftovers.retain(|leftover| Duration::from_secs(leftover.age_seconds) >= least);
    }
    if let Some(domain) = domain.filter(|_| args.yes) {
        leftovers.iter_mut().for_each(|it| remove(&domain, it));
    }
    report(output, &path, &leftovers, args.yes)?;
    Ok(match leftovers.iter().any(|it| it.reason == READ_ONLY) {
        true => Exit::System,
        false => Exit::Done,
    })
}

/// Names without an owner, sorted, and behind them files that are no name's.
fn look(domain: &Domain) -> anyhow::Result<Vec<Leftover>> {
    let mut files = Files::of(domain)?;
    let mut leftovers = Vec::new();
    for endpoint in domain.endpoints()? {
        let of_name = files.take(&endpoint.name);
        // A name that was released since its files were listed has none left.
        if endpoint.holder.is_some() || of_name.is_empty() {
            continue;
        }
        let kept = reason_to_keep(&endpoint, &of_name);
        leftovers.push(Leftover::new(Some(endpoint.name), &of_name, kept));
    }
    // A name that was taken or released meanwhile is no other program's.
    for endpoint in domain.endpoints()? {
        files.take(&endpoint.name);
    }
    for file in files.0 {
        if domain.path().join(&file.0).symlink_metadata().is_ok() {
            leftovers.push(Leftover::new(None, &[file], Some(FOREIGN)));
        }
    }
    Ok(leftovers)
}

impl Leftover {
    fn new(
        name: Option<EndpointName>,
        files: &[(OsString, Metadata)],
        kept: Option<&'static str>,
    ) -> Leftover {
        let mut names: Vec<String> = files
            .iter()
            .map(|(file, _)| file.to_string_lossy().into_owned())
            .collect();
        names.sort();
        Leftover {
            name,
            files: names,
            age_seconds: age(files),
            state: match kept {
                Some(_) => State::Kept,
                None => State::Dead,
            },
            reason: kept.unwrap_or("no process holds its lock"),
        }
    }
}

/// The files of the domain, by name. A file that vanishes meanwhile is left out.
struct Files(BTreeMap<OsString, Metadata>);

impl Files {
    fn of(domain: &Domain) -> anyhow::Result<Files> {
        let path = domain.path();
        let failed = || format!("{} cannot be read", path.display());
        let mut files = BTreeMap::new();
        let entries = match std::fs::read_dir(path) {
            // It was there a moment ago: its files went with it.
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Files(files)),
            entries => entries.with_context(failed)?,
        };
        for entry in entries {
            let entry = entry.with_context(failed)?;
            if let Ok(metadata) = entry.metadata() {
                files.insert(entry.file_name(), metadata);
            }
        }
        Ok(Files(files))
    }

    /// Takes out the files of a name.
    fn take(&mut self, name: &EndpointName) -> Vec<(OsString, Metadata)> {
        let found = name
            .files()
            .into_iter()
            .filter_map(|file| self.0.remove_entry(&OsString::from(file)));
        found.collect()
    }
}

/// Why the files of a name without an owner stay, if they do.
fn reason_to_keep(endpoint: &Endpoint, files: &[(OsString, Metadata)]) -> Option<&'static str> {
    let own = rustix::process::geteuid().as_raw();
    let is_lock = |file: &OsString| file.to_string_lossy().ends_with(".lock");
    if files.iter().any(|(_, metadata)| metadata.uid() != own) {
        Some("of another user")
    } else if endpoint.foreign.is_some() {
        endpoint.foreign
    } else if !files.iter().any(|(file, _)| is_lock(file)) {
        // Its owner may be about to come: nothing proves a death.
        Some("a socket without a lock file, which the next owner of the name removes")
    } else {
        None
    }
}

/// Since the newest file was made or written. A clock that was set back makes it new.
fn age(files: &[(OsString, Metadata)]) -> u64 {
    let now = SystemTime::now();
    let ages = files.iter().filter_map(|(_, metadata)| {
        let changed = metadata.modified().ok()?;
        Some(now.duration_since(changed).unwrap_or_default().as_secs())
    });
    ages.min().unwrap_or(0)
}

fn remove(domain: &Domain, leftover: &mut Leftover) {
    let name = match &leftover.name {
        Some(name) if leftover.state == State::Dead => name,
        _ => return,
    };
    if domain.clean_name(name) {
        leftover.state = State::Removed;
        return;
    }
    leftover.state = State::Kept;
    leftover.reason = if may_be_written(domain.path()) {
        "in use again, removed already, or with a file of another program's"
    } else {
        READ_ONLY
    };
}

/// Whether this process may remove files of a directory. One that has vanished has none.
fn may_be_written(path: &Path) -> bool {
    let wanted = Access::WRITE_OK | Access::EXEC_OK;
    let refused = [Errno::ACCESS, Errno::PERM, Errno::ROFS];
    let asked = rustix::fs::accessat(CWD, path, wanted, AtFlags::EACCESS);
    !asked.is_err_and(|error| refused.contains(&error))
}

fn report(
    output: Output,
    path: &Path,
    leftovers: &[Leftover],
    is_removing: bool,
) -> anyhow::Result<()> {
    let count = |state| {
        let of_state = leftovers.iter().filter(|it| it.state == state);
        of_state.count()
    };
    let [removed, dead, kept] = [State::Removed, State::Dead, State::Kept].map(count);
    let path = path.display().to_string();
    output.human(|| styled(Style::Bold, &printable(&path)))?;
    let label = |leftover: &Leftover| match &leftover.name {
        Some(name) => printable(name.as_str()),
        None => printable(&leftover.files.join(" ")),
    };
    let widths = leftovers.iter().map(|it| label(it).chars().count());
    let width = widths.max().unwrap_or(0).min(LABEL_WIDTH_MAX);
    for leftover in leftovers {
        let state = match leftover.state {
            State::Dead => styled(Style::Yellow, "dead   "),
            State::Removed => styled(Style::Green, "removed"),
            State::Kept => styled(Style::Dim, "kept   "),
        };
        let line = || {
            let (label, age) = (label(leftover), time(leftover.age_seconds));
            format!("  {label:<width$}  {state}  {age:>8}   {}", leftover.reason)
        };
        output.say(line, leftover)?;
    }
    let summary = || match (leftovers.is_empty(), is_removing) {
        (true, _) => "nothing is left by dead processes".to_string(),
        (false, true) => format!("{removed} removed, {kept} kept"),
        (false, false) if dead == 0 => "no name of a dead process can be removed".to_string(),
        (false, false) => {
            let names = counted(dead, "name", "names");
            format!("{names} of dead processes; `warpipe gc --yes` removes what is shown as dead")
        }
    };
    let total = json!({ "removed": removed, "dead": dead, "kept": kept });
    output.say(summary, &total)?;
    Ok(())
}

/// An age in its largest unit.
fn time(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        3600..86_400 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_is_shown_in_its_largest_unit() {
        let shown: Vec<_> = [0, 59, 60, 3599, 3600, 86_399, 86_400 * 400]
            .map(time)
            .into();
        assert_eq!(
            shown,
            ["0 s", "59 s", "1 min", "59 min", "1 h", "23 h", "400 d"]
        );
    }
}
