//! `warpipe members`: the members of the domain, and their changes.

use serde_json::{Value, json};
use warpipe::{Change, Domain, MemberInfo, Members, MembersOptions, PeerState};

use crate::args::MembersArgs;
use crate::exit::Exit;
use crate::interrupt::{Interrupt, LOOK};
use crate::observe::{existing_domain, missing};
use crate::output::{Output, Style, column, printable, styled};

/// Lists the members, and follows them if asked to. It removes no files of dead members.
pub fn run(args: &MembersArgs) -> anyhow::Result<Exit> {
    let output = Output::new(args.json);
    let interrupt = Interrupt::install()?;
    let path = args.domain.or_environment()?;
    let domain = match existing_domain(&path)? {
        Some(domain) => domain,
        // Members to come are seen in the directory.
        None if args.follow => Domain::at(&path)?,
        None => {
            output.human(|| printable(&missing(&path)))?;
            return Ok(Exit::Done);
        }
    };
    let options = MembersOptions {
        keep_files: true,
        ..domain.options()
    };
    let members = Members::new(options)?;
    let listed = members.list()?;
    let title = format!("{}: {} members", domain.path().display(), listed.len());
    output.human(|| styled(Style::Bold, &title))?;
    let names = column(listed.iter().map(|member| member.name.as_str()));
    let roles = column(listed.iter().map(|member| member.role.as_str()));
    for member in &listed {
        output.say(|| line(member, names, roles), &row("member", member))?;
    }
    while args.follow && !interrupt.came() {
        let is_listed =
            |info: &MemberInfo| listed.iter().any(|it| it.generation == info.generation);
        let change = match members.changes(LOOK)? {
            Some(Change::Joined(info)) if is_listed(&info) => continue,
            Some(change) => change,
            None => continue,
        };
        let (event, style) = event_of(&change);
        let text = || {
            let event = styled(style, &format!("{event:<9}"));
            format!("  {event}  {}", line(change.member(), 0, 0).trim())
        };
        output.say(text, &row(event, change.member()))?;
    }
    Ok(interrupt.exit())
}

/// `event` is `member` for a line of the list, else the change.
fn row(event: &str, member: &MemberInfo) -> Value {
    let endpoints = member.endpoints.iter().map(|name| name.as_str());
    json!({
        "event": event, "name": member.name, "role": member.role,
        "pid": member.pid, "uid": member.uid, "state": state_of(member).0,
        "silent_seconds": member.silent_for.as_secs_f64(),
        "endpoints": endpoints.collect::<Vec<_>>(),
    })
}

fn line(member: &MemberInfo, names: usize, roles: usize) -> String {
    let (state, style) = state_of(member);
    let (name, role, pid) = (&member.name, printable(&member.role), member.pid);
    let silent = member.silent_for.as_secs_f64();
    let state = styled(style, &format!("{state:<7}"));
    format!("  {name:<names$}  {role:<roles$}  {state}  process {pid}  silent for {silent:.1} s")
}

fn state_of(member: &MemberInfo) -> (&'static str, Style) {
    match member.state {
        PeerState::Alive => ("alive", Style::Green),
        PeerState::Stalled => ("stalled", Style::Yellow),
        PeerState::Suspect => ("suspect", Style::Yellow),
        PeerState::Leaving => ("left", Style::Dim),
        PeerState::Dead => ("dead", Style::Red),
        _ => ("unknown", Style::Dim),
    }
}

fn event_of(change: &Change) -> (&'static str, Style) {
    match change {
        Change::Joined(_) => ("joined", Style::Green),
        Change::Stalled(_) => ("stalled", Style::Yellow),
        Change::Recovered(_) => ("recovered", Style::Green),
        Change::Left(_) => ("left", Style::Dim),
        Change::Died(_) => ("died", Style::Red),
        _ => ("changed", Style::Dim),
    }
}
