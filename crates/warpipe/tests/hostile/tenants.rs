//! Users that share the endpoints of a third one: each is admitted where it is named, keeps to its
//! quota, and keeps no other one out. **This module is marked for unsafe**: it changes the users of
//! child processes.

use std::fs::Permissions;
use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

use super::publisher_handshake::hello;
use super::stage::{Guarded, LONG, Scratch, command, eventually, packet, role, send_raw};
use crate::{
    CreateOptions, Device, Domain, Error, Event, EventHandle, HandshakeFault, LimitFault, Member,
    MemberOptions, Members, MembersOptions, Memory, Pool, PoolClient, PoolOptions, PublishOptions,
    Publisher, PublisherOptions, Quota, Semaphore, Subscriber, Timeline,
};

const TENANT: u32 = 60_011;
const STRANGER: u32 = 60_012;
const FLOODER: u32 = 60_013;

/// The endpoints of a domain, one of each kind that admits other users.
struct Endpoints {
    _publisher: Publisher,
    _pool: Pool,
    _memory: (Memory, crate::Published),
    _timeline: Timeline,
    _semaphore: Semaphore,
    _member: Member,
    event: Event,
}

const NAMES: [&str; 6] = ["a", "pool", "memory", "timeline", "semaphore", "members/it"];

fn endpoints(domain: &Domain, uids: &[u32]) -> Endpoints {
    let device = &Device::host();
    let memory = Memory::allocate(device, 8).unwrap();
    let allow_uids = || uids.to_vec();
    let timeline = CreateOptions {
        allow_uids: allow_uids(),
        ..domain.on(device)
    };
    let timeline = Timeline::new("timeline", timeline).unwrap();
    timeline.signal_now(7, LONG).unwrap();
    let event = CreateOptions {
        allow_uids: allow_uids(),
        ..domain.on(device)
    };
    let event = Event::new(event).unwrap();
    event.record(&device.stream().unwrap(), LONG).unwrap();
    let publication = PublishOptions {
        allow_uids: allow_uids(),
        ..domain.options()
    };
    let published = memory.publish("memory", publication).unwrap();
    let publisher = PublisherOptions {
        allow_uids: allow_uids(),
        ..domain.on(device)
    };
    let pool = PoolOptions {
        allow_uids: allow_uids(),
        ..domain.on(device)
    };
    let semaphore = CreateOptions {
        allow_uids: allow_uids(),
        ..domain.on(device)
    };
    let member = MemberOptions {
        allow_uids: allow_uids(),
        ..domain.options()
    };
    Endpoints {
        _publisher: Publisher::new("a", publisher).unwrap(),
        _pool: Pool::new("pool", pool).unwrap(),
        _memory: (memory, published),
        _timeline: timeline,
        _semaphore: Semaphore::new("semaphore", 1, semaphore).unwrap(),
        _member: Member::new("it", member).unwrap(),
        event,
    }
}

/// Becomes the user that the parent named, and returns the parent's domain.
fn as_tenant() -> Domain {
    let uid: u32 = std::env::var("WARPIPE_HOSTILE_UID")
        .unwrap()
        .parse()
        .unwrap();
    // SAFETY: plain system calls; this process has one test and no other thread that depends on the
    // user.
    let codes = unsafe { [libc::setgid(uid), libc::setuid(uid)] };
    assert_eq!(codes, [0, 0]);
    Domain::of_user(std::env::var("WARPIPE_HOSTILE_PATH").unwrap(), 0).unwrap()
}

/// This test in a process of another user, with another role.
fn tenant(test: &str, scratch: &Scratch, uid: u32, role: &str) -> std::process::Command {
    let mut command = command(module_path!(), test, role);
    command
        .env("WARPIPE_HOSTILE_PATH", &scratch.path)
        .env("WARPIPE_HOSTILE_UID", uid.to_string())
        .stdout(Stdio::piped());
    command
}

/// Starts it, and waits until it has said `word`.
fn start(mut command: std::process::Command, word: &str) -> Guarded {
    let mut child = Guarded(command.spawn().unwrap());
    let stdout = BufReader::new(child.0.stdout.take().unwrap());
    let mut lines = stdout.lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains(word)), "no {word:?}");
    child
}

/// Asks again where a flood keeps the answer back for longer than a handshake may take.
fn patiently<T>(mut ask: impl FnMut() -> crate::Result<T>) -> crate::Result<T> {
    let (is_patient, start) = (role().as_deref() == Some("patient"), Instant::now());
    loop {
        match ask() {
            Err(Error::Handshake {
                fault: HandshakeFault::Silent(_),
                ..
            }) if is_patient && start.elapsed() < LONG => {}
            answer => return answer,
        }
    }
}

/// Uses one endpoint of each kind, and prints what came of it.
fn visit() {
    let (domain, device) = (&as_tenant(), &Device::host());
    let event: EventHandle = std::env::var("WARPIPE_HOSTILE_EVENT")
        .unwrap()
        .parse()
        .unwrap();
    let memory = std::env::var("WARPIPE_HOSTILE_TICKET").unwrap();
    let memory: crate::Ticket = memory.parse().unwrap();
    let results: [(&str, crate::Result<bool>); 7] = [
        (
            "a",
            patiently(|| Subscriber::open("a", domain.on(device), Duration::ZERO)).map(|_| true),
        ),
        ("pool", {
            patiently(|| PoolClient::open("pool", domain.on(device), Duration::ZERO))
                .and_then(|pool| pool.allocate(8, Duration::ZERO))
                .map(|block| block.bytes() == 8)
        }),
        (
            "memory",
            patiently(|| memory.open(device, Duration::ZERO)).map(|memory| memory.bytes() == 8),
        ),
        ("timeline", {
            patiently(|| Timeline::open("timeline", domain.on(device), Duration::ZERO))
                .and_then(|it| it.wait_host(7, LONG))
                .map(|()| true)
        }),
        ("semaphore", {
            patiently(|| Semaphore::open("semaphore", domain.on(device), Duration::ZERO))
                .and_then(|it| it.acquire_host(LONG))
                .map(|_| true)
        }),
        ("members/it", {
            let options = MembersOptions {
                keep_files: true,
                ..domain.options()
            };
            let watch = Members::new(options);
            watch.and_then(|watch| sees_a_member(&watch))
        }),
        (
            "event",
            patiently(|| Event::open(&event, domain.on(device), Duration::ZERO))
                .and_then(|event| event.synchronize(LONG))
                .map(|()| true),
        ),
    ];
    for (name, result) in results {
        match result {
            Ok(true) => println!("outcome: {name} works"),
            Ok(false) => println!("outcome: {name} is not there"),
            Err(Error::Refused { denied: true, .. }) => println!("outcome: {name} denied"),
            Err(error) => println!("outcome: {name} {error}"),
        }
    }
}

/// Whether the watch shows a member, at once or, where a flood keeps the member busy, later.
fn sees_a_member(watch: &Members) -> crate::Result<bool> {
    if watch.list()?.len() == 1 || role().as_deref() != Some("patient") {
        return Ok(watch.list()?.len() == 1);
    }
    watch.changes(LONG).map(|change| change.is_some())
}

/// What came of each kind, in the order of [`visit`].
fn visited(
    test: &str,
    scratch: &Scratch,
    (uid, role): (u32, &str),
    endpoints: &Endpoints,
) -> Vec<String> {
    let mut command = tenant(test, scratch, uid, role);
    let handle = endpoints.event.handle().unwrap();
    let ticket = endpoints._memory.1.ticket(..).unwrap();
    command
        .env("WARPIPE_HOSTILE_EVENT", handle.to_string())
        .env("WARPIPE_HOSTILE_TICKET", ticket.to_string());
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let outcomes: Vec<_> = text
        .lines()
        .filter_map(|line| Some(line.split_once("outcome: ")?.1.to_owned()))
        .collect();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(outcomes.len(), 7, "{text}\n{stderr}");
    outcomes
}

fn all(outcome: &str) -> Vec<String> {
    let names = NAMES.iter().chain(&["event"]);
    names.map(|name| format!("{name} {outcome}")).collect()
}

fn open_scratch() -> Option<Scratch> {
    if !rustix::process::geteuid().is_root() {
        println!("skipped: only root can become another user");
        return None;
    }
    let scratch = Scratch::new();
    std::fs::set_permissions(&scratch.path, Permissions::from_mode(0o755)).unwrap();
    Some(scratch)
}

#[test]
fn every_kind_of_endpoint_admits_the_users_that_it_names_and_no_others() {
    let test = "every_kind_of_endpoint_admits_the_users_that_it_names_and_no_others";
    if role().is_some() {
        return visit();
    }
    let Some(scratch) = open_scratch() else {
        return;
    };
    let named = endpoints(&scratch.domain, &[TENANT]);
    assert_eq!(
        visited(test, &scratch, (TENANT, "visitor"), &named),
        all("works")
    );
    let mut denied = all("denied");
    denied[5] = "members/it is not there".into();
    assert_eq!(
        visited(test, &scratch, (STRANGER, "visitor"), &named),
        denied
    );
    drop(named);
    // Also when nobody is named, and the socket's file is what keeps others out.
    let none = endpoints(&scratch.domain, &[]);
    assert_eq!(visited(test, &scratch, (TENANT, "visitor"), &none), denied);
}

/// Connects to every endpoint as fast as it can, from several threads, says nothing or half of what
/// is due, and keeps the connections as long as it has descriptors.
fn flood() {
    const EACH: usize = 4;
    let domain = as_tenant();
    let event = std::env::var("WARPIPE_HOSTILE_EVENT").unwrap();
    let names = NAMES.map(str::to_owned).into_iter().chain([event]);
    let files: Vec<_> = names.map(|name| file_of(&domain, &name)).collect();
    let flooded = std::sync::Barrier::new(EACH * files.len() + 1);
    std::thread::scope(|scope| {
        for number in 0..EACH * files.len() {
            let (file, flooded) = (&files[number % files.len()], &flooded);
            scope.spawn(move || {
                let mut kept: std::collections::VecDeque<OwnedFd> = Default::default();
                for count in 0_u64.. {
                    if count == 100 {
                        flooded.wait();
                    }
                    let socket =
                        rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None);
                    let Ok(socket) = socket else {
                        kept.pop_front();
                        continue;
                    };
                    // Waits for its turn in the backlog, as other connections do not.
                    let address = SocketAddrUnix::new(file.as_path()).unwrap();
                    if rustix::net::connect(&socket, &address).is_ok() {
                        // Without the descriptor of its lifeline, or without its end.
                        let whole = packet(&hello());
                        let _ = match count % 3 {
                            0 => Ok(()),
                            1 => send_raw(&socket, &whole, &[]),
                            _ => send_raw(&socket, &whole[..whole.len() / 2], &[]),
                        };
                        kept.push_back(socket);
                    }
                }
            });
        }
        flooded.wait();
        println!("outcome: flooding");
    });
}

fn file_of(domain: &Domain, name: &str) -> std::path::PathBuf {
    let name = crate::EndpointName::new(name).unwrap();
    domain.path().join(name.file("", ".sock"))
}

#[test]
fn a_user_that_floods_every_endpoint_with_connections_keeps_no_other_user_out() {
    let test = "a_user_that_floods_every_endpoint_with_connections_keeps_no_other_user_out";
    match role().as_deref() {
        Some("flooder") => return flood(),
        Some(_) => return visit(),
        None => {}
    }
    let Some(scratch) = open_scratch() else {
        return;
    };
    let endpoints = endpoints(&scratch.domain, &[TENANT, FLOODER]);
    let event = scratch.domain.endpoints().unwrap();
    let event = event
        .iter()
        .find(|endpoint| endpoint.name.as_str().starts_with("events/"));
    let mut flooder = tenant(test, &scratch, FLOODER, "flooder");
    flooder.env("WARPIPE_HOSTILE_EVENT", event.unwrap().name.as_str());
    let flooder = start(flooder, "flooding");
    for _ in 0..3 {
        let visited = visited(test, &scratch, (TENANT, "patient"), &endpoints);
        assert_eq!(visited, all("works"));
    }
    drop(flooder);
    let visited = visited(test, &scratch, (FLOODER, "patient"), &endpoints);
    assert_eq!(visited, all("works"));
}

/// A pool that admits the tenant, which may have one block at a time.
fn pool_of_one_block(scratch: &Scratch) -> Pool {
    let quota = Quota {
        bytes: 4096,
        blocks: 1,
    };
    Pool::new(
        "pool",
        PoolOptions {
            allow_uids: vec![TENANT],
            user_quota: quota,
            ..scratch.domain.on(&Device::host())
        },
    )
    .unwrap()
}

fn open_pool(domain: &Domain) -> crate::Result<PoolClient> {
    PoolClient::open("pool", domain.on(&Device::host()), Duration::ZERO)
}

#[test]
fn a_client_counts_for_the_user_that_connected_whatever_it_becomes_later() {
    let test = "a_client_counts_for_the_user_that_connected_whatever_it_becomes_later";
    if role().is_some() {
        let domain = Domain::at(std::env::var("WARPIPE_HOSTILE_PATH").unwrap()).unwrap();
        let client = super::users::as_user(TENANT, || open_pool(&domain)).unwrap();
        // Root again, the pool's own user, which has no quota.
        let block = client.allocate(4096, Duration::ZERO).unwrap();
        let over = client.allocate(8, Duration::ZERO).unwrap_err();
        assert!(
            matches!(over, Error::Limit(LimitFault::Quota { uid: TENANT, .. })),
            "{over}"
        );
        println!("outcome: has a block");
        std::io::stdin().read_line(&mut String::new()).unwrap();
        drop(block);
        return;
    }
    let Some(scratch) = open_scratch() else {
        return;
    };
    let pool = pool_of_one_block(&scratch);
    let mut command = tenant(test, &scratch, TENANT, "client");
    command.stdin(Stdio::piped());
    let client = start(command, "has a block");
    assert_eq!(pool.usage(TENANT).bytes, 4096);
    assert_eq!(pool.usage(0).bytes, 0);
    // And killed with it.
    drop(client);
    eventually("its block is back", || pool.usage(TENANT).blocks == 0);
}

#[test]
fn a_group_admits_processes_with_it_as_their_effective_group_and_no_supplementary_members() {
    let test =
        "a_group_admits_processes_with_it_as_their_effective_group_and_no_supplementary_members";
    if let Some(role) = role() {
        let (own, other) = match role.as_str() {
            "effective" => (FLOODER, STRANGER),
            _ => (STRANGER, FLOODER),
        };
        // SAFETY: plain system calls, as in `as_tenant`.
        let codes = unsafe {
            [
                libc::setgroups(1, &other),
                libc::setgid(own),
                libc::setuid(TENANT),
            ]
        };
        assert_eq!(codes, [0; 3]);
        let domain = Domain::of_user(std::env::var("WARPIPE_HOSTILE_PATH").unwrap(), 0).unwrap();
        match open_pool(&domain) {
            Ok(_) => println!("outcome: admitted"),
            Err(Error::Refused { denied: true, .. }) => println!("outcome: denied"),
            Err(other) => println!("outcome: {other}"),
        }
        return;
    }
    let Some(scratch) = open_scratch() else {
        return;
    };
    let options = PoolOptions {
        allow_gids: vec![FLOODER],
        ..scratch.domain.on(&Device::host())
    };
    let _pool = Pool::new("pool", options).unwrap();
    for (role, outcome) in [("effective", "admitted"), ("supplementary", "denied")] {
        let output = tenant(test, &scratch, TENANT, role).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            text.contains(&format!("outcome: {outcome}")),
            "{role}: {text}"
        );
    }
}

#[test]
fn clients_of_one_user_that_race_and_are_killed_keep_to_one_quota_and_return_it() {
    let test = "clients_of_one_user_that_race_and_are_killed_keep_to_one_quota_and_return_it";
    if role().is_some() {
        let client = open_pool(&as_tenant()).unwrap();
        for round in 0_u64.. {
            match client.allocate(1 + round % 4096, Duration::from_millis(1)) {
                Ok(block) => drop(block),
                Err(Error::Limit(LimitFault::Quota { uid: TENANT, .. })) => {}
                Err(other) => panic!("{other}"),
            }
            if round == 10 {
                println!("outcome: racing");
            }
        }
        return;
    }
    let Some(scratch) = open_scratch() else {
        return;
    };
    let pool = pool_of_one_block(&scratch);
    for round in 0..10 {
        let racers: Vec<_> = (0..3)
            .map(|_| start(tenant(test, &scratch, TENANT, "racer"), "racing"))
            .collect();
        let before = pool.stats().allocations;
        eventually("they go on", || {
            let usage = pool.usage(TENANT);
            assert!(usage.blocks <= 1 && usage.bytes <= 4096, "{usage:?}");
            assert!(usage.region_bytes <= 2 << 20, "{usage:?}");
            pool.stats().allocations >= before + 20 + round
        });
        drop(racers);
        eventually("what they had is back", || {
            (pool.usage(TENANT).blocks, pool.stats().peers) == (0, 0)
        });
    }
}

#[test]
fn root_is_a_user_like_others_to_an_endpoint_of_another_user() {
    let test = "root_is_a_user_like_others_to_an_endpoint_of_another_user";
    if role().is_some() {
        let domain = as_tenant();
        let domain = Domain::at(domain.path().join("own")).unwrap();
        let quota = Quota {
            bytes: 0,
            ..Quota::default()
        };
        let options = || domain.on(&Device::host());
        let admits = PoolOptions {
            allow_uids: vec![0],
            user_quota: quota,
            ..options()
        };
        let _pools = [("closed", options()), ("pool", admits)]
            .map(|(name, options)| Pool::new(name, options).unwrap());
        println!("outcome: ready");
        std::io::stdin().read_line(&mut String::new()).unwrap();
        return;
    }
    let Some(scratch) = open_scratch() else {
        return;
    };
    let own = scratch.path.join("own");
    std::fs::create_dir(&own).unwrap();
    std::fs::set_permissions(&own, Permissions::from_mode(0o755)).unwrap();
    std::os::unix::fs::chown(&own, Some(TENANT), Some(TENANT)).unwrap();
    let mut command = tenant(test, &scratch, TENANT, "owner");
    command.stdin(Stdio::piped());
    let _owner = start(command, "ready");
    let domain = Domain::of_user(own, TENANT).unwrap();
    let closed = PoolClient::open("closed", domain.on(&Device::host()), Duration::ZERO).map(drop);
    assert!(
        matches!(closed, Err(Error::Refused { denied: true, .. })),
        "{closed:?}"
    );
    let over = open_pool(&domain)
        .unwrap()
        .allocate(1, Duration::ZERO)
        .map(drop);
    assert!(
        matches!(
            over,
            Err(Error::Limit(LimitFault::Quota {
                uid: 0,
                limit: 0,
                ..
            }))
        ),
        "{over:?}"
    );
}
