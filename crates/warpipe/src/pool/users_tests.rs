//! The users of a pool, played by one process. The conformance suite and `hostile::tenants` have
//! processes of other users.

use std::collections::HashMap;
use std::sync::Barrier;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::tests::{MIB, Stage, WAIT, busy, eventually};
use super::*;
use crate::backend::Access;
use crate::backend::testing::{Holding, Wrapped};
use crate::ipc::{decode, encode};
use crate::lend::{LendReply, LendRequest};
use crate::{Error, LentBuffer};

const NO_WAIT: Duration = Duration::ZERO;

/// A pool of `limit` bytes, with these options.
fn stage(title: &str, limit: u64, options: impl FnOnce(PoolOptions) -> PoolOptions) -> Stage {
    let mut stage = Stage::new(title);
    let defaults = PoolOptions {
        memory_limit: limit,
        ..stage.domain.on(&stage.device)
    };
    stage.pool = Pool::new("users", options(defaults)).unwrap();
    stage
}

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// Another user than this process's.
fn tenant(number: u32) -> u32 {
    own_uid() + 1 + number
}

fn client(stage: &Stage) -> PoolClient {
    PoolClient::open("users", stage.domain.on(&stage.device), Duration::ZERO).unwrap()
}

/// The fields of a quota error: its user, bytes used and allowed, blocks used and allowed.
fn quota_error<T: std::fmt::Debug>(result: crate::Result<T>) -> (u32, u64, u64, u32, u32) {
    match result {
        Err(Error::Limit(LimitFault::Quota {
            uid,
            used,
            limit,
            blocks,
            blocks_max,
            ..
        })) => (uid, used, limit, blocks, blocks_max),
        other => panic!("{other:?}"),
    }
}

fn is_memory_limit<T>(result: &crate::Result<T>) -> bool {
    matches!(result, Err(Error::Limit(LimitFault::Memory { .. })))
}

#[test]
fn each_user_has_its_quota_of_bytes_and_of_blocks_and_the_pools_own_user_none() {
    let quota = Quota {
        bytes: 4 * MIB,
        blocks: 2,
    };
    let stage = stage("quota", 64 * MIB, |it| PoolOptions {
        user_quota: quota,
        ..it
    });
    let (a, b) = (tenant(0), tenant(1));
    let take = |uid, bytes| stage.pool.allocate_for(uid, bytes, NO_WAIT);
    let one = take(a, 3 * MIB).unwrap();
    assert_eq!(
        quota_error(take(a, MIB + 1)),
        (a, 3 * MIB, 4 * MIB, 1, 2),
        "bytes"
    );
    let two = take(a, MIB).unwrap();
    assert_eq!(quota_error(take(a, 1)), (a, 4 * MIB, 4 * MIB, 2, 2));
    let usage = stage.pool.usage(a);
    assert_eq!((usage.bytes, usage.blocks), (4 * MIB, 2));
    assert_eq!((usage.region_bytes, usage.quota), (4 * MIB, quota));
    drop(one);
    let (three, four) = (take(a, 1).unwrap(), take(b, 4 * MIB).unwrap());
    assert_eq!(
        quota_error(take(a, 1)),
        (a, MIB + 512, 4 * MIB, 2, 2),
        "blocks"
    );
    let error = take(a, 1).unwrap_err();
    assert!(error.to_string().contains(&format!("user {a}")), "{error}");
    assert!(error.hint().unwrap().contains("quota"), "{error:?}");
    let own: Vec<_> = (0..4)
        .map(|_| stage.pool.allocate(5 * MIB, Duration::ZERO).unwrap())
        .collect();
    drop((two, three, four, own));
    assert_eq!(stage.pool.usage(a).bytes + stage.pool.usage(b).bytes, 0);
}

#[test]
fn a_quota_for_one_user_replaces_that_of_all_and_may_be_the_own_users() {
    let quota = |bytes| Quota {
        bytes,
        ..Quota::default()
    };
    let stage = stage("override", 64 * MIB, |it| PoolOptions {
        user_quota: quota(2 * MIB),
        quota_for: HashMap::from([(tenant(0), quota(6 * MIB)), (own_uid(), quota(3 * MIB))]),
        ..it
    });
    let own = stage.pool.allocate(MIB, Duration::ZERO).unwrap();
    let client = client(&stage);
    let lent = client.allocate(MIB, Duration::ZERO).unwrap();
    for result in [
        stage.pool.allocate(MIB + 1, Duration::ZERO).map(drop),
        client.allocate(MIB + 1, Duration::ZERO).map(drop),
    ] {
        assert_eq!(
            quota_error(result),
            (own_uid(), 2 * MIB, 3 * MIB, 2, u32::MAX),
            "the owner's process and its user's other ones have one quota"
        );
    }
    let rich = stage.pool.allocate_for(tenant(0), 6 * MIB, NO_WAIT);
    let poor = stage.pool.allocate_for(tenant(1), 3 * MIB, NO_WAIT);
    assert_eq!(quota_error(poor).2, 2 * MIB);
    drop((rich.unwrap(), own, lent));
}

#[test]
fn a_client_over_its_quota_waits_for_blocks_of_its_user_and_not_for_ever() {
    let quota = Quota {
        bytes: 2 * MIB,
        blocks: 1,
    };
    let stage = stage("wait", 64 * MIB, |it| PoolOptions {
        quota_for: HashMap::from([(own_uid(), quota)]),
        ..it
    });
    let (one, other) = (client(&stage), client(&stage));
    let held = one.allocate(MIB, Duration::ZERO).unwrap();
    let brief = Duration::from_millis(20);
    assert_eq!(quota_error(other.allocate(MIB, brief)).1, MIB);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| other.allocate(MIB, WAIT).map(drop));
        let owner = scope.spawn(|| stage.pool.allocate(MIB, WAIT).map(drop));
        drop(held);
        waiting.join().unwrap().unwrap();
        owner.join().unwrap().unwrap();
    });
    // More than the quota is never there: no wait.
    let too_much = other.allocate(2 * MIB + 1, Duration::MAX);
    assert_eq!(quota_error(too_much).2, 2 * MIB);
}

#[test]
fn nothing_is_allocated_with_a_quota_of_zero_and_no_length_overflows_one() {
    for quota in [
        Quota {
            bytes: 0,
            ..Quota::default()
        },
        Quota {
            blocks: 0,
            ..Quota::default()
        },
    ] {
        let stage = stage("zero", 64 * MIB, |it| PoolOptions {
            user_quota: quota,
            quota_for: HashMap::from([(own_uid(), quota)]),
            ..it
        });
        for bytes in [1, MIB, u64::MAX - 511, u64::MAX] {
            for uid in [own_uid(), tenant(0)] {
                let result = stage.pool.allocate_for(uid, bytes, Duration::MAX);
                assert_eq!(quota_error(result).0, uid);
            }
            quota_error(client(&stage).allocate(bytes, Duration::MAX));
        }
        assert_eq!(stage.pool.stats().regions, 0);
    }
    let least = Quota {
        bytes: 1,
        ..Quota::default()
    };
    let limited = stage("one", 64 * MIB, |it| PoolOptions {
        user_quota: least,
        ..it
    });
    // A block takes 512 bytes, and this is one more than the quota.
    assert_eq!(
        quota_error(limited.pool.allocate_for(tenant(0), 1, NO_WAIT)).2,
        1
    );
    let most = Quota {
        bytes: u64::MAX,
        ..Quota::default()
    };
    let unlimited = stage("most", 4 * MIB, |it| PoolOptions {
        user_quota: most,
        ..it
    });
    let held = unlimited
        .pool
        .allocate_for(tenant(0), MIB, NO_WAIT)
        .unwrap();
    for bytes in [u64::MAX, u64::MAX - 511, 1 << 62, 5 * MIB] {
        let result = unlimited.pool.allocate_for(tenant(0), bytes, NO_WAIT);
        assert!(is_memory_limit(&result), "{bytes}: {result:?}");
    }
    drop(held);
}

#[test]
fn a_released_block_counts_until_its_stream_is_past_it() {
    let quota = Quota {
        bytes: 2 * MIB,
        blocks: 1,
    };
    let stage = stage("fenced", 64 * MIB, |it| PoolOptions {
        user_quota: quota,
        ..it
    });
    let (stream, go) = busy(&stage.device);
    let take = |timeout| stage.pool.allocate_for(tenant(0), MIB, timeout);
    take(NO_WAIT).unwrap().free(&stream).unwrap();
    assert_eq!(quota_error(take(NO_WAIT)).3, 1);
    drop(go);
    drop(take(WAIT).unwrap());
}

#[test]
fn requests_at_the_same_time_never_exceed_a_quota_together() {
    let quota = Quota {
        bytes: 3 * MIB,
        blocks: 1,
    };
    let stage = stage("race", 1024 * MIB, |it| PoolOptions {
        user_quota: quota,
        quota_for: HashMap::from([(own_uid(), quota)]),
        ..it
    });
    let clients = [client(&stage), client(&stage)];
    let (is_over, together) = (AtomicBool::new(false), Barrier::new(4));
    let watch = |uid| {
        let usage = stage.pool.usage(uid);
        let is_within = usage.bytes <= quota.bytes
            && usage.blocks <= quota.blocks
            && usage.region_bytes <= 4 * MIB;
        is_over.fetch_or(!is_within, Relaxed);
    };
    std::thread::scope(|scope| {
        for number in 0..4_usize {
            let (stage, clients, together, watch) = (&stage, &clients, &together, &watch);
            scope.spawn(move || {
                for round in 0..50_u64 {
                    together.wait();
                    let bytes = (1 + (round + number as u64) % 3) * MIB;
                    // Two threads as clients of the own user, two for another one.
                    match number {
                        0 | 1 => {
                            let block = clients[number].allocate(bytes, Duration::ZERO);
                            watch(own_uid());
                            drop(block);
                        }
                        _ => {
                            let block = stage.pool.allocate_for(tenant(0), bytes, NO_WAIT);
                            watch(tenant(0));
                            drop(block);
                        }
                    }
                }
            });
        }
    });
    assert!(!is_over.into_inner());
    let usage = stage.pool.usage(tenant(0));
    assert_eq!((usage.bytes, usage.blocks), (0, 0));
    assert!(usage.region_bytes > 0, "it had some");
}

#[test]
fn no_region_ever_holds_blocks_of_two_users() {
    let stage = stage("regions", 24 * MIB, |it| it);
    let (mut random, mut held) = (7_u64, Vec::new());
    let mut has_removed = false;
    for _ in 0..600 {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let uid = tenant((random >> 33) as u32 % 3);
        let bytes = (random >> 40) % (3 * MIB) + 1;
        match stage.pool.allocate_for(uid, bytes, NO_WAIT) {
            Ok(block) => held.push((uid, block)),
            Err(Error::Limit(LimitFault::Memory { .. })) => held.clear(),
            Err(other) => panic!("{other}"),
        }
        let mut state = stage.pool.allocator().lock();
        let slots: Vec<_> = state.owned.keys().copied().collect();
        let mut of_users = std::collections::HashMap::new();
        for slot in slots {
            let (user, region) = (state.user_of(slot), state.arena.slot(slot).region);
            assert_eq!(*of_users.entry(region).or_insert(user), user);
            let ptr = state.address(slot);
            // The block's own user, whatever the books say.
            let (owner, _) = held.iter().find(|(_, block)| block.ptr() == ptr).unwrap();
            assert_eq!(*owner, user);
        }
        has_removed |= state.users.has_removed();
    }
    assert!(has_removed, "no user was in another's way");
}

#[test]
fn a_region_without_blocks_makes_room_for_another_user_who_reads_zeros() {
    let stage = stage("pass", 4 * MIB, |it| it);
    let (client, stream) = (client(&stage), stage.device.stream().unwrap());
    // Two regions, both mapped by the client.
    let blocks = [(); 2].map(|()| client.allocate(2 * MIB, Duration::ZERO).unwrap());
    for block in &blocks {
        block.write(&stream, 0, &vec![0xA5; 2 << 20]).unwrap();
    }
    let whole = stage.pool.allocate_for(tenant(0), 3 * MIB, NO_WAIT);
    assert!(is_memory_limit(&whole), "both regions have blocks");
    let [one, two] = blocks;
    one.free(&stream).unwrap();
    let half = stage.pool.allocate_for(tenant(0), 3 * MIB, NO_WAIT);
    assert!(is_memory_limit(&half), "one region is not enough");
    assert_eq!(stage.pool.stats().regions, 2, "and so it stays");
    two.free(&stream).unwrap();
    let used = client.session().mapped_runs().len();
    let theirs = stage.pool.allocate_for(tenant(0), 3 * MIB, WAIT);
    assert_eq!(used, 2);
    assert_eq!(theirs.unwrap().to_vec(WAIT).unwrap(), vec![0; 3 << 20]);
    assert!(
        eventually(|| client.session().mapped_runs().is_empty()),
        "a client unmaps what it cannot use any more"
    );
    // The way back. The user's region is free again, and now in this client's way.
    let again = client.allocate(3 * MIB, WAIT).unwrap();
    assert_eq!(again.to_vec(WAIT).unwrap(), vec![0; 3 << 20]);
    assert_eq!(stage.pool.usage(tenant(0)).region_bytes, 0);
}

#[test]
fn a_mapping_that_a_client_keeps_reaches_nothing_of_the_next_user() {
    let stage = stage("kept", 2 * MIB, |it| it);
    let (client, stream) = (client(&stage), stage.device.stream().unwrap());
    let block = client.allocate(2 * MIB, Duration::ZERO).unwrap();
    block.write(&stream, 0, &[7; 8]).unwrap();
    // Against the pool's notice, and with all that its mapping reaches.
    let [kept] = &client.session().mapped_runs()[..] else {
        panic!("one region");
    };
    let kept = kept.slice(0, 2 * MIB, crate::Access::ReadWrite, &"kept".into());
    let kept = kept.unwrap();
    block.free(&stream).unwrap();
    let theirs = stage.pool.allocate_for(tenant(0), 2 * MIB, WAIT).unwrap();
    theirs.write(&stream, 0, &[1; 8]).unwrap();
    stream.synchronize(WAIT).unwrap();
    assert_eq!(kept.to_vec(WAIT).unwrap()[..8], [7; 8]);
    kept.write(&stream, 0, &[2; 8]).unwrap();
    stream.synchronize(WAIT).unwrap();
    assert_eq!(theirs.to_vec(WAIT).unwrap()[..8], [1; 8]);
}

#[test]
fn a_client_that_says_released_and_goes_on_writing_damages_blocks_of_its_own_user_alone() {
    let stage = stage("lying", 4 * MIB, |it| it);
    let (client, stream) = (client(&stage), stage.device.stream().unwrap());
    let block = client.allocate(MIB, Duration::ZERO).unwrap();
    // The value that releases it: the first of the session's, in its first word that is no flag.
    client.session().words().word(1).store(1);
    assert!(eventually(|| stage.pool.usage(own_uid()).blocks == 0));
    let theirs = [(); 2].map(|()| stage.pool.allocate_for(tenant(0), MIB, WAIT).unwrap());
    block.write(&stream, 0, &vec![0xEE; 1 << 20]).unwrap();
    stream.synchronize(WAIT).unwrap();
    for theirs in theirs {
        assert_eq!(theirs.to_vec(WAIT).unwrap(), vec![0; 1 << 20]);
    }
}

#[test]
fn a_region_with_an_open_lend_stays_its_users() {
    let stage = stage("lend", 2 * MIB, |it| it);
    let stream = stage.device.stream().unwrap();
    let block = stage.pool.allocate(MIB, Duration::ZERO).unwrap();
    block.write(&stream, 0, b"lent").unwrap();
    stream.synchronize(WAIT).unwrap();
    let ticket = block.lend(crate::Access::Read).unwrap();
    let lent = LentBuffer::open(&ticket, &stage.device, Duration::ZERO).unwrap();
    drop(block);
    let early = stage
        .pool
        .allocate_for(tenant(0), 1, Duration::from_millis(20));
    assert!(is_memory_limit(&early), "{early:?}");
    assert_eq!(&lent.to_vec(WAIT).unwrap()[..4], b"lent");
    drop(lent);
    let theirs = stage.pool.allocate_for(tenant(0), 2 * MIB, WAIT).unwrap();
    assert_eq!(theirs.to_vec(WAIT).unwrap(), vec![0; 2 << 20]);
}

#[test]
fn a_block_for_another_user_is_not_opened_by_this_one() {
    let stage = stage("ticket-of-another", 64 * MIB, |it| it);
    let block = stage.pool.allocate_for(tenant(0), 8, NO_WAIT).unwrap();
    let ticket = block.lend(crate::Access::Read).unwrap();
    let error = LentBuffer::open(&ticket, &stage.device, Duration::ZERO).unwrap_err();
    let Error::Refused {
        denied: true,
        text: detail,
        ..
    } = &error
    else {
        panic!("{error}");
    };
    assert!(
        detail.contains(&format!("of user {}", tenant(0))),
        "{detail}"
    );
    assert!(
        detail.contains(&format!("allocate_for({}", own_uid())),
        "{detail}"
    );
    assert_eq!(stage.pool.stats().lent_bytes, 0);
    // The control.
    let own = stage.pool.allocate_for(own_uid(), 8, NO_WAIT).unwrap();
    LentBuffer::open(
        &own.lend(crate::Access::Read).unwrap(),
        &stage.device,
        Duration::ZERO,
    )
    .unwrap();
}

#[test]
fn what_the_pools_owner_left_in_a_users_region_is_cleared_for_the_user() {
    let stage = stage("left", 2 * MIB, |it| it);
    let allocator = stage.pool.allocator();
    let stream = stage.device.stream().unwrap();
    let block = stage.pool.allocate_for(own_uid(), MIB, NO_WAIT).unwrap();
    block.write(&stream, 0, b"left").unwrap();
    block.free(&stream).unwrap();
    stream.synchronize(WAIT).unwrap();
    for (uid, expected) in [(own_uid(), b"left"), (tenant(0), &[0; 4])] {
        let block = stage.pool.allocate_for(uid, MIB, WAIT).unwrap();
        assert_eq!(&block.to_vec(WAIT).unwrap()[..4], expected);
    }
    assert!(allocator.lock().users.has_removed());
}

#[test]
fn a_user_without_blocks_can_have_its_whole_quota_in_one_block_whatever_it_had_before() {
    let quota = Quota {
        bytes: 8 * MIB,
        ..Quota::default()
    };
    // The pool has room for the quota, and then for no more than that.
    for limit in [64 * MIB, 8 * MIB] {
        let stage = stage("whole", limit, |it| PoolOptions {
            user_quota: quota,
            quota_for: HashMap::from([(own_uid(), quota)]),
            ..it
        });
        let client = client(&stage);
        for whole in [7 * MIB, 8 * MIB] {
            let parts = [(); 4].map(|()| client.allocate(2 * MIB, Duration::ZERO).unwrap());
            let all_are_used = client.allocate(whole, Duration::ZERO);
            assert_eq!(quota_error(all_are_used).1, 8 * MIB);
            let [first, others @ ..] = parts;
            drop(others);
            let one_is_used = client.allocate(whole, Duration::from_millis(20));
            assert_eq!(quota_error(one_is_used).1, 2 * MIB);
            drop(first);
            let block = client.allocate(whole, WAIT).unwrap();
            assert!(stage.pool.usage(own_uid()).region_bytes <= 8 * MIB);
            drop(block);
        }
        let tenants = [(); 4].map(|()| stage.pool.allocate_for(tenant(0), 2 * MIB, WAIT).unwrap());
        drop(tenants);
        drop(stage.pool.allocate_for(tenant(0), 8 * MIB, WAIT).unwrap());
    }
}

#[test]
fn free_regions_of_every_user_make_room_for_a_block_that_needs_them_all() {
    let stage = stage("all", 8 * MIB, |it| it);
    let take = |uid, bytes, timeout| stage.pool.allocate_for(uid, bytes, timeout);
    let own = [(); 2].map(|()| take(own_uid(), 2 * MIB, NO_WAIT).unwrap());
    let theirs = [(); 2].map(|()| take(tenant(0), 2 * MIB, NO_WAIT).unwrap());
    drop((own, theirs));
    drop(take(own_uid(), 8 * MIB, WAIT).unwrap());
    assert_eq!(stage.pool.usage(own_uid()).region_bytes, 8 * MIB);
}

/// A session at the pool, for requests that [`PoolClient`] does not make.
fn session(stage: &Stage) -> crate::Result<crate::ipc::ClientSession> {
    let name = crate::EndpointName::new("users")?;
    let at = crate::ipc::Address {
        domain: &stage.domain,
        name: &name,
        kind: crate::Kind::Pool,
    };
    let (session, _) = crate::ipc::ClientSession::attach(&at, None, &[], NO_WAIT)?;
    session.observe(std::sync::Arc::new(Ignorant))?;
    Ok(session)
}

struct Ignorant;

impl crate::ipc::SessionObserver for Ignorant {}

#[test]
fn a_session_that_closes_while_it_has_blocks_keeps_its_place_until_it_has_none() {
    let stage = stage("places", 64 * MIB, |it| PoolOptions { peers_max: 2, ..it });
    let ask = crate::ipc::encode(&LendRequest::Memory(PoolRequest::Block { bytes: 1 })).unwrap();
    for _ in 0..2 {
        let session = session(&stage).unwrap();
        session.request(&ask, WAIT).unwrap();
    }
    let allocator = stage.pool.allocator();
    let have_left = || {
        let mut state = allocator.lock();
        state.borrowers.len() == 2 && state.borrowers.all().all(|it| it.is_leaving())
    };
    assert!(eventually(have_left));
    // The pool's thread has ended both sessions when it answers this.
    for _ in 0..3 {
        let refused = session(&stage).map(drop);
        assert!(
            matches!(
                refused,
                Err(Error::Handshake {
                    fault: crate::HandshakeFault::Full { .. },
                    ..
                })
            ),
            "{refused:?}"
        );
    }
    allocator.lock().borrowers.all().for_each(|it| {
        let word = it.page().word(1);
        word.store(1);
    });
    assert_eq!(stage.pool.usage(own_uid()).blocks, 0);
    drop([(); 2].map(|()| session(&stage).unwrap()));
}

#[test]
fn a_block_that_is_granted_to_a_client_that_has_been_dropped_comes_back() {
    let stage = stage("dropped", 64 * MIB, |it| it);
    let client = client(&stage);
    let held = stage.pool.allocator().lock();
    let asked = std::cell::Cell::new(false);
    // Called off when the request has been sent.
    let gave_up = client.allocate(
        MIB,
        crate::Wait::at_most(WAIT).unless(&|| asked.replace(true)),
    );
    assert!(matches!(gave_up, Err(Error::Timeout { .. })), "{gave_up:?}");
    drop(client);
    drop(held);
    let is_back = || {
        let stats = stage.pool.stats();
        (stats.allocations, stats.peers) == (1, 0)
    };
    assert!(eventually(is_back), "{:?}", stage.pool.stats());
    assert_eq!(stage.pool.usage(own_uid()).blocks, 0);
}

#[test]
fn a_session_gets_no_descriptor_of_a_region_that_it_was_lent_no_block_of() {
    let stage = stage("uninvited", 64 * MIB, |it| it);
    let session = session(&stage).unwrap();
    let descriptors = |session: &crate::ipc::ClientSession, run| {
        let pieces = encode(&LendRequest::<()>::Pieces { run, first: 0 }).unwrap();
        let reply = session.request(&pieces, WAIT).unwrap();
        let answer = decode::<LendReply<()>>(&reply.body, "it").unwrap();
        assert_eq!(matches!(answer, LendReply::Pieces), !reply.fds.is_empty());
        reply.fds.len()
    };
    let theirs = stage.pool.allocate_for(tenant(0), MIB, NO_WAIT).unwrap();
    let client = client(&stage);
    let own = client.allocate(MIB, NO_WAIT).unwrap();
    // The tenant's region, this user's, and none.
    let all = |session| [0, 1, 2].map(|run| descriptors(session, run));
    assert_eq!(all(&session), [0, 0, 0], "nothing was lent to it");
    assert_eq!(all(client.session().ipc()), [0, 1, 0]);
    drop((theirs, own));
}

#[test]
fn a_wait_for_a_block_that_is_being_cleared_can_be_cancelled_and_the_block_comes_back() {
    let stage = stage("cancelled", 2 * MIB, |it| it);
    let allocator = stage.pool.allocator();
    // The region goes back to the device, whose next one is not trusted to be zeroed.
    drop(stage.pool.allocate_for(tenant(0), 2 * MIB, WAIT).unwrap());
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let until_told = move || assert!(wait.recv().is_err());
    allocator.scrubber.call(until_told).unwrap();
    let client = client(&stage);
    let looks = std::cell::Cell::new(0);
    let cancelled = || {
        looks.set(looks.get() + 1);
        looks.get() > 4
    };
    let wait = crate::Wait::at_most(WAIT).unless(&cancelled);
    let gave_up = client.allocate(2 * MIB, wait).map(drop);
    assert!(matches!(gave_up, Err(Error::Timeout { .. })), "{gave_up:?}");
    assert!(looks.get() > 4, "it is asked while the block is cleared");
    drop(go);
    drop(client.allocate(2 * MIB, WAIT).unwrap());
}

#[test]
fn an_import_that_the_driver_holds_up_delays_no_block_of_another_region() {
    let stage = stage("held-up", 64 * MIB, |it| it);
    let hook = Wrapped::new(stage.device.backend().clone(), Holding::default());
    let device = crate::Device::from_backend(hook.clone());
    let client = PoolClient::open("users", stage.domain.on(&device), Duration::ZERO).unwrap();
    let first = client.allocate(MIB, NO_WAIT).unwrap();
    hook.hook().hold("import");
    std::thread::scope(|scope| {
        let held_up = scope.spawn(|| client.allocate(8 * MIB, WAIT).map(drop));
        hook.hook().wait_for(1);
        let (tell, told) = std::sync::mpsc::channel();
        let other = client.clone();
        let meanwhile = scope.spawn(move || {
            let block = other.allocate(4096, NO_WAIT);
            let _ = tell.send(block.map(drop));
        });
        let block = told.recv_timeout(WAIT);
        hook.hook().unblock();
        block.expect("the lock is free").unwrap();
        meanwhile.join().unwrap();
        held_up.join().unwrap().unwrap();
    });
    drop(first);
}

#[test]
fn no_word_of_a_peer_claims_a_block_that_was_lent_to_another_user() {
    let stage = stage("foreign-words", 64 * MIB, |it| it);
    let client = client(&stage);
    let block = stage.pool.allocate_for(tenant(0), MIB, NO_WAIT).unwrap();
    let ticket = block.lend(Access::ReadWrite).unwrap();
    let words = client.session().words();
    for word in 0..WORDS as usize {
        words.word(word).store(ticket.wanted().id | 1 << 61);
    }
    let pieces = encode(&LendRequest::<()>::Pieces { run: 0, first: 0 }).unwrap();
    let reply = client.session().ipc().request(&pieces, WAIT).unwrap();
    assert_eq!(
        reply.fds.len(),
        0,
        "a descriptor of the other user's region"
    );
    assert_eq!(stage.pool.stats().lent_bytes, 0);
    drop(block);
    assert_eq!(stage.pool.usage(tenant(0)).blocks, 0);
}
