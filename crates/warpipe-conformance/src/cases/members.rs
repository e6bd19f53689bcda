//! Members of a domain, and the reports about them.

use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use warpipe::{
    Change, Error, Member, MemberInfo, MemberOptions, Members, MembersOptions, NameFault, PeerState,
};
use warpipe_testkit::{eventually, pidfd, wait_readable};

use super::Case;
use crate::PATIENCE;
use crate::context::Context;
use crate::peer::{Order, Peer, PublisherPlan};

pub(super) const CASES: &[Case] = &[
    Case::new(
        "a member is reported once when it joins and once when it leaves",
        joined_and_left,
    ),
    Case::new(
        "a stopped member is stalled, then recovered, and never dead",
        stopped_and_on,
    ),
    Case::new(
        "a killed member's death is reported once, with its proof, and its endpoints are removed",
        killed,
    )
    .ends_clients(),
    Case::new(
        "each member that one killed process was is reported dead once",
        killed_as_many,
    )
    .ends_clients(),
    Case::new(
        "files of a member that died unwatched are removed by the next watch, with no change",
        unwatched,
    )
    .ends_clients(),
    Case::new("a clean-up runs on its member's death alone", clean_ups).ends_clients(),
    Case::new(
        "a living member's name is taken, and a dead one's is free at once",
        taken_and_free,
    )
    .ends_clients(),
    Case::new(
        "a member that was stopped before the first listing is listed as stalled",
        stopped_before,
    ),
    Case::new(
        "a foreign file under a member's name neither blocks the listing nor appears in it",
        foreign_files,
    ),
    Case::new(
        "two watches see the same changes, and the end of one does not affect the other",
        two_watches,
    )
    .ends_clients(),
];

/// The next change of a watch.
fn next(members: &Members) -> Result<Change> {
    members.changes(PATIENCE)?.context("no change was reported")
}

/// The next change, which must be this one of this member.
fn expect(members: &Members, kind: &str, name: &str) -> Result<MemberInfo> {
    let change = next(members)?;
    ensure!(
        kind_of(&change) == kind && change.member().name == name,
        "{change:?} where {kind} of {name} is due"
    );
    Ok(change.member().clone())
}

/// As [`expect`], with a heartbeat that may stall and recover before, on a machine that has much to
/// do.
fn expect_end(members: &Members, kind: &str, name: &str) -> Result<MemberInfo> {
    loop {
        let change = next(members)?;
        match kind_of(&change) {
            "stalled" | "recovered" => {}
            found if found == kind && change.member().name == name => {
                return Ok(change.member().clone());
            }
            _ => bail!("{change:?} where {kind} of {name} is due"),
        }
    }
}

fn kind_of(change: &Change) -> &'static str {
    match change {
        Change::Joined(_) => "joined",
        Change::Stalled(_) => "stalled",
        Change::Recovered(_) => "recovered",
        Change::Left(_) => "left",
        Change::Died(_) => "died",
        _ => "unknown",
    }
}

/// A watch reports a further member only after all that came before: with it, no more reports about
/// the others come.
fn nothing_more(members: &Members, context: &Context) -> Result<()> {
    let last = Member::new("last", context.domain.options())?;
    expect_end(members, "joined", "last")?;
    drop(last);
    expect_end(members, "left", "last").map(drop)
}

fn member(context: &Context, name: &str) -> Result<Peer> {
    let mut peer = context.peer()?;
    join(&mut peer, name)?;
    Ok(peer)
}

fn join(peer: &mut Peer, name: &str) -> Result<()> {
    peer.ask(&Order::Join {
        name: name.into(),
        role: format!("{name}'s role"),
    })
    .map(drop)
}

fn joined_and_left(context: &Context) -> Result<()> {
    let early = member(context, "early")?;
    let members = Members::new(context.domain.options())?;
    ensure!(
        members.list()?.len() == 1,
        "a present member is listed at once: {:?}",
        members.list()?
    );
    let reported = expect(&members, "joined", "early")?;
    ensure!(
        reported.role == "early's role" && reported.pid == early.id() as i32,
        "{reported:?}"
    );
    let mut peer = member(context, "worker/1")?;
    let reported = expect_end(&members, "joined", "worker/1")?;
    ensure!(
        reported.pid == peer.id() as i32 && reported.since_ns > 0,
        "{reported:?}"
    );
    peer.publish(PublisherPlan::of("frames"))?;
    let listed = members.list()?;
    let names: Vec<&str> = listed.iter().map(|member| member.name.as_str()).collect();
    ensure!(names == ["early", "worker/1"], "listed are {names:?}");
    let held: Vec<&str> = listed[1]
        .endpoints
        .iter()
        .map(|name| name.as_str())
        .collect();
    ensure!(held == ["frames", "members/worker/1"], "it holds {held:?}");
    peer.ask(&Order::Leave)?;
    let left = expect_end(&members, "left", "worker/1")?;
    ensure!(
        left.generation == reported.generation,
        "the same incarnation"
    );
    join(&mut peer, "worker/1")?;
    let again = expect_end(&members, "joined", "worker/1")?;
    ensure!(
        again.generation != reported.generation,
        "another incarnation"
    );
    peer.dismiss()?;
    expect_end(&members, "left", "worker/1")?;
    early.dismiss()?;
    expect_end(&members, "left", "early")?;
    nothing_more(&members, context)
}

fn stopped_and_on(context: &Context) -> Result<()> {
    let members = Members::new(context.domain.options())?;
    let peer = member(context, "sleepy")?;
    expect(&members, "joined", "sleepy")?;
    for _ in 0..2 {
        peer.stop()?;
        let reported = expect(&members, "stalled", "sleepy")?;
        ensure!(
            reported.state == PeerState::Stalled
                && reported.silent_for >= Duration::from_millis(900),
            "{reported:?}"
        );
        ensure!(
            members.list()?[0].state == PeerState::Stalled,
            "{:?}",
            members.list()?
        );
        peer.go_on()?;
        let reported = expect(&members, "recovered", "sleepy")?;
        ensure!(reported.state == PeerState::Alive, "{reported:?}");
    }
    peer.dismiss()?;
    expect_end(&members, "left", "sleepy")?;
    nothing_more(&members, context)
}

fn killed(context: &Context) -> Result<()> {
    let members = Members::new(context.domain.options())?;
    for _ in 0..3 {
        let mut peer = member(context, "mortal")?;
        peer.publish(PublisherPlan::of("its/frames"))?;
        expect_end(&members, "joined", "mortal")?;
        let proof = pidfd(peer.pid())?;
        peer.strike()?;
        let reported = expect_end(&members, "died", "mortal")?;
        // Its lifeline ends with its last file, a moment before the process is to be reaped.
        ensure!(
            wait_readable(&proof, PATIENCE)?,
            "it is reported dead while it lives"
        );
        ensure!(
            reported.state == PeerState::Dead && reported.pid == peer.id() as i32,
            "{reported:?}"
        );
        let left: Vec<&str> = reported
            .endpoints
            .iter()
            .map(|name| name.as_str())
            .collect();
        ensure!(left == ["its/frames", "members/mortal"], "it left {left:?}");
        let files = || std::fs::read_dir(context.domain.path()).map_or(0, Iterator::count);
        let is_clean = warpipe_testkit::eventually(PATIENCE, || files() == 0);
        ensure!(is_clean, "{} files are left", files());
        peer.ended()?;
    }
    ensure!(members.list()?.is_empty(), "nobody is left");
    nothing_more(&members, context)
}

fn killed_as_many(context: &Context) -> Result<()> {
    const MANY: usize = 40;
    let members = Members::new(context.domain.options())?;
    let mut peer = context.peer()?;
    let names: Vec<String> = (0..MANY)
        .map(|number| format!("soul-{number:02}"))
        .collect();
    for name in &names {
        join(&mut peer, name)?;
        expect_end(&members, "joined", name)?;
    }
    let witness = Member::new("witness", context.domain.options())?;
    expect_end(&members, "joined", "witness")?;
    peer.kill()?;
    let mut dead = Vec::new();
    while dead.len() < MANY {
        match next(&members)? {
            Change::Died(member) => dead.push(member.name),
            Change::Stalled(_) | Change::Recovered(_) => {}
            other => bail!("{other:?} of a killed process"),
        }
    }
    dead.sort();
    ensure!(dead == names, "reported dead are {dead:?}");
    ensure!(
        members.list()?.len() == 1,
        "the witness is left: {:?}",
        members.list()?
    );
    drop(witness);
    expect_end(&members, "left", "witness")?;
    nothing_more(&members, context)
}

fn unwatched(context: &Context) -> Result<()> {
    let mut peer = member(context, "forgotten")?;
    peer.publish(PublisherPlan::of("its/frames"))?;
    peer.kill()?;
    let files = || std::fs::read_dir(context.domain.path()).map_or(0, Iterator::count);
    ensure!(
        files() == 4,
        "a socket and a lock of each name are left, not {} files",
        files()
    );
    let options = MembersOptions {
        keep_files: true,
        ..context.domain.options()
    };
    let looking = Members::new(options)?;
    ensure!(
        files() == 4 && looking.list()?.is_empty(),
        "a listing removes nothing"
    );
    drop(looking);
    let members = Members::new(context.domain.options())?;
    ensure!(files() == 0, "{} files are left", files());
    nothing_more(&members, context)
}

fn clean_ups(context: &Context) -> Result<()> {
    let (call, called) = channel();
    let (changes, received) = channel();
    let mut first = true;
    let panics_once = move |change: &Change| {
        drop(changes.send(change.clone()));
        if std::mem::take(&mut first) {
            panic!("a callback that panics");
        }
    };
    let members = Members::with_callback(context.domain.options(), panics_once)?;
    ensure!(
        matches!(members.changes(Duration::ZERO), Err(Error::Argument { .. })),
        "the callbacks have the changes"
    );
    for name in ["victim", "leaver"] {
        let call = call.clone();
        members.on_death_of(name, move |of| drop(call.send(of.name.clone())))?;
    }
    members.on_death_of("victim", |_| panic!("a clean-up that panics"))?;
    let mut victim = member(context, "victim")?;
    let leaver = member(context, "leaver")?;
    expect_changes(&received, &["joined leaver", "joined victim"])?;
    victim.kill()?;
    leaver.dismiss()?;
    expect_changes(&received, &["died victim", "left leaver"])?;
    let heard: Vec<String> = called.try_iter().collect();
    ensure!(heard == ["victim"], "clean-ups ran for {heard:?}");
    // It was for one death: the next of that name is another matter.
    let mut victim = member(context, "victim")?;
    expect_changes(&received, &["joined victim"])?;
    victim.kill()?;
    expect_changes(&received, &["died victim"])?;
    ensure!(called.try_recv().is_err(), "a clean-up ran twice");
    Ok(())
}

/// Receives as many changes as are due, which must be these, in any order. Heartbeats may stall
/// and recover.
fn expect_changes(received: &Receiver<Change>, due: &[&str]) -> Result<()> {
    let mut found = Vec::new();
    while found.len() < due.len() {
        let change = received
            .recv_timeout(PATIENCE)
            .context("no callback came")?;
        if !matches!(change, Change::Stalled(_) | Change::Recovered(_)) {
            found.push(format!("{} {}", kind_of(&change), change.member().name));
        }
    }
    found.sort();
    ensure!(found == due, "the changes were {found:?}");
    Ok(())
}

fn taken_and_free(context: &Context) -> Result<()> {
    let members = Members::new(context.domain.options())?;
    let mut peer = member(context, "only")?;
    expect(&members, "joined", "only")?;
    match Member::new(
        "only",
        MemberOptions {
            role: "impostor".into(),
            ..context.domain.options()
        },
    ) {
        Err(Error::Name(NameFault::Taken { name, holder })) => {
            ensure!(
                name == "members/only" && holder.pid == Some(peer.id() as i32),
                "{name} is held by {holder}"
            );
        }
        other => bail!("a living member's name gave {other:?}"),
    }
    // While the watch clears up after each, its successor is there already.
    for _ in 0..20 {
        peer.strike()?;
        wait_readable(pidfd(peer.pid())?, PATIENCE)?;
        let options = MemberOptions {
            role: "heir".into(),
            ..context.domain.options()
        };
        let heir = Member::new("only", options).context("a dead member's name")?;
        drop(heir);
        peer = context.peer()?;
        join(&mut peer, "only")?;
    }
    peer.dismiss()
}

fn stopped_before(context: &Context) -> Result<()> {
    let peer = member(context, "asleep")?;
    peer.stop()?;
    let members = Members::new(context.domain.options())?;
    let listed = members.list()?;
    ensure!(listed.len() == 1, "listed are {listed:?}");
    let MemberInfo {
        name,
        pid,
        state,
        role,
        ..
    } = &listed[0];
    ensure!(name == "asleep" && *pid == peer.id() as i32, "{listed:?}");
    ensure!(
        *state == PeerState::Stalled && role.is_empty(),
        "{listed:?}"
    );
    ensure!(
        members.changes(Duration::ZERO)?.is_none(),
        "no change of a member that has not answered"
    );
    peer.go_on()?;
    let reported = expect(&members, "joined", "asleep")?;
    ensure!(reported.role == "asleep's role", "{reported:?}");
    peer.dismiss()?;
    expect_end(&members, "left", "asleep").map(drop)
}

fn foreign_files(context: &Context) -> Result<()> {
    let at = |name: &str| context.domain.path().join(format!("members+{name}.sock"));
    let listen = |path: &PathBuf, kind: SocketType| -> Result<_> {
        let socket = rustix::net::socket(AddressFamily::UNIX, kind, None)?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        if kind != SocketType::DGRAM {
            rustix::net::listen(&socket, 4)?;
        }
        Ok(socket)
    };
    let (silent, stream, datagram) = (at("silent"), at("stream"), at("datagram"));
    let sockets = [
        listen(&silent, SocketType::SEQPACKET)?,
        listen(&stream, SocketType::STREAM)?,
        listen(&datagram, SocketType::DGRAM)?,
    ];
    let (file, folder, link) = (at("file"), at("folder"), at("link"));
    std::fs::write(&file, "not a socket")?;
    std::fs::create_dir(&folder)?;
    std::os::unix::fs::symlink("/dev/zero", &link)?;
    // Of this library, and no member.
    let publisher = context.publisher("members/camera")?;
    let members = Members::new(context.domain.options())?;
    let real = member(context, "real")?;
    expect(&members, "joined", "real")?;
    // A silent member has timed out by the end of a whole further stall interval.
    real.stop()?;
    expect(&members, "stalled", "real")?;
    real.go_on()?;
    expect(&members, "recovered", "real")?;
    let listed = members.list()?;
    ensure!(
        listed.len() == 1 && listed[0].name == "real",
        "listed are {listed:?}"
    );
    // Two sockets of other types, and the publisher.
    ensure!(
        eventually(PATIENCE, || members.overlooked() == 3),
        "{} are overlooked",
        members.overlooked()
    );
    match Member::new("silent", context.domain.options()) {
        Err(Error::Name(NameFault::Foreign { .. })) => {}
        other => bail!("a foreign name gave {other:?}"),
    }
    let present = [&silent, &stream, &datagram, &file, &folder, &link]
        .iter()
        .all(|path| path.symlink_metadata().is_ok());
    ensure!(present, "a foreign file is gone");
    real.dismiss()?;
    expect_end(&members, "left", "real")?;
    drop((sockets, publisher));
    std::fs::remove_dir(&folder)?;
    [silent, stream, datagram, file, link]
        .iter()
        .try_for_each(std::fs::remove_file)?;
    nothing_more(&members, context)
}

fn two_watches(context: &Context) -> Result<()> {
    let (one, other) = (
        Members::new(context.domain.options())?,
        Members::new(context.domain.options())?,
    );
    let mut peer = member(context, "seen")?;
    let generations = [&one, &other]
        .map(|watch| expect(watch, "joined", "seen").map(|reported| reported.generation));
    let [first, second] = generations;
    ensure!(first? == second?, "both see the same incarnation");
    drop(one);
    let polled = eventually(PATIENCE, || other.list().is_ok_and(|list| list.len() == 1));
    ensure!(polled, "the other watch still lists it");
    peer.kill()?;
    ensure!(
        wait_readable(&other, PATIENCE)?,
        "its descriptor signals a change"
    );
    expect_end(&other, "died", "seen")?;
    nothing_more(&other, context)?;
    ensure!(
        !wait_readable(&other, Duration::ZERO)?,
        "its descriptor is silent when everything was taken"
    );
    Ok(())
}
