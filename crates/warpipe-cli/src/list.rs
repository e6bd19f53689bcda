//! `warpipe ls`: the names in the domain, or in those of all users, and their holders.

#[cfg(feature = "bridge")]
mod remote;

use std::path::{Path, PathBuf};

use anyhow::bail;
use serde_json::json;
use warpipe::{Domain, Endpoint};

use crate::args::LsArgs;
use crate::exit::Exit;
use crate::observe::{Source, existing_domain, missing, text};
use crate::output::{Output, Style, column, counted, printable, styled};

/// Lists them, living or left by the dead.
pub fn run(args: &LsArgs) -> anyhow::Result<Exit> {
    let output = Output::new(args.json);
    if args.all_users {
        return list_all(output);
    }
    let path = args.domain.or_environment()?;
    if args.verbose {
        let snapshot = Source::new(path)?.look()?;
        output.say(|| text::all(&snapshot), &snapshot)?;
        return Ok(Exit::Done);
    }
    let Some(domain) = existing_domain(&path)? else {
        output.human(|| printable(&missing(&path)))?;
        return Ok(Exit::Done);
    };
    let endpoints = domain.endpoints()?;
    list(output, &domain, &endpoints, None)?;
    #[cfg(feature = "bridge")]
    remote::list(output, &domain, &endpoints)?;
    Ok(Exit::Done)
}

/// Lists the domains of all users. A domain that cannot be read is told on the error stream.
fn list_all(output: Output) -> anyhow::Result<Exit> {
    if !rustix::process::geteuid().is_root() {
        bail!(
            "only root may read the domains of other users; run `sudo warpipe ls --all-users`, or `warpipe ls` for your own"
        );
    }
    let (mut found, mut failed) = (0, None);
    for (uid, path) in domain_folders() {
        // The folder has to be its user's: others could make one in `/tmp` under that name.
        match Domain::of_user(&path, uid).and_then(|domain| Ok((domain.endpoints()?, domain))) {
            Ok((endpoints, domain)) => {
                found += 1;
                list(output, &domain, &endpoints, Some(uid))?;
            }
            Err(error) => {
                eprintln!("{}", printable(&error.to_string()));
                failed = Some(error);
            }
        }
    }
    match failed {
        Some(error) if found == 0 => Err(error.into()),
        _ => Ok(Exit::Done),
    }
}

/// The folders that are the default domains of users, by the numbers in their names.
fn domain_folders() -> Vec<(u32, PathBuf)> {
    let entries = |folder: &str| {
        let entries = std::fs::read_dir(folder).into_iter().flatten();
        entries.filter_map(Result::ok).map(|entry| entry.path())
    };
    let number = |path: &Path, prefix: &str| {
        let name = path.file_name()?.to_str()?;
        name.strip_prefix(prefix)?.parse::<u32>().ok()
    };
    let of_sessions = entries("/run/user")
        .filter_map(|path| Some((number(&path, "")?, path.join("warpipe"))))
        .filter(|(_, path)| path.symlink_metadata().is_ok());
    let temporary = entries("/tmp").filter_map(|path| Some((number(&path, "warpipe-")?, path)));
    let mut folders: Vec<_> = of_sessions.chain(temporary).collect();
    folders.sort();
    folders
}

fn list(
    output: Output,
    domain: &Domain,
    endpoints: &[Endpoint],
    uid: Option<u32>,
) -> anyhow::Result<()> {
    output.human(|| {
        let user = uid.map_or_else(String::new, |uid| format!(" (user {uid})"));
        let path = printable(&domain.path().display().to_string());
        let names = counted(endpoints.len(), "name", "names");
        styled(Style::Bold, &format!("{path}{user}: {names}"))
    })?;
    let width = column(endpoints.iter().map(|endpoint| endpoint.name.as_str()));
    for endpoint in endpoints {
        let (name, holder) = (endpoint.name.as_str(), endpoint.holder.as_ref());
        let text = || {
            let (style, state, rest) = match (holder, endpoint.foreign) {
                (Some(holder), _) => (Style::Green, "live", holder.to_string()),
                (None, Some(found)) => {
                    let rest = format!("{found}, which no owner of the name removes");
                    (Style::Red, "foreign", rest)
                }
                (None, None) => {
                    let rest = "left by a dead process; the next owner takes it over";
                    (Style::Yellow, "stale", rest.to_owned())
                }
            };
            let state = styled(style, &format!("{state:<7}"));
            format!("  {name:<width$}  {state}  {rest}")
        };
        let mut row = json!({
            "name": name, "live": holder.is_some(), "pid": holder.and_then(|holder| holder.pid),
        });
        // Of a file that is no endpoint's, and with `--all-users`, alone.
        if let Some(foreign) = endpoint.foreign {
            row["foreign"] = foreign.into();
        }
        if let Some(uid) = uid {
            row["uid"] = uid.into();
        }
        output.say(text, &row)?;
    }
    Ok(())
}
