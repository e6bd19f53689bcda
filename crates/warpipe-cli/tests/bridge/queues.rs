//! Queues with jobs that another machine does.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use warpipe::{DType, Device, Domain, Error, Layout, Queue, QueueOptions, Worker};

use super::support::{PATIENCE, Running};
use super::{LONG, Pair, kills};

const SLICE: Duration = Duration::from_millis(50);

fn queue(domain: &Domain) -> Queue {
    // A killed bridge is a dead worker: an attempt.
    Queue::new(
        "jobs",
        QueueOptions {
            limit: 4096,
            max_attempts: 1000,
            ..domain.on(&Device::host())
        },
    )
    .unwrap()
}

/// A worker of the queue, once it is there.
fn worker(domain: &Domain) -> Worker {
    Worker::open("jobs", domain.on(&Device::host()), LONG).unwrap()
}

/// Starts the bridge that gives jobs of `near` away, or the one that takes them in `far`.
fn start(pair: &Pair, is_exporter: bool) -> Running {
    start_with(pair, is_exporter, "jobs", "1")
}

/// Starts the bridge that gives jobs of `near` away, with one limit of its own.
fn start_limited_exporter(pair: &Pair, limit: &str, mebibytes: &str) -> Running {
    let exporter = ["bridge", "--name", "near", "--export-queue", "jobs"];
    let own = [
        "--listen",
        &pair.endpoint,
        "--device",
        "host",
        limit,
        mebibytes,
    ];
    pair.near.start(&[&exporter[..], &own].concat())
}

/// As [`start`], for the queues of a pattern, and with a limit on the silence of the link.
fn start_with(pair: &Pair, is_exporter: bool, queues: &str, link_timeout: &str) -> Running {
    let common = [
        "--device",
        "host",
        "--lease",
        "1",
        "--link-timeout",
        link_timeout,
        "--json",
    ];
    let own = if is_exporter {
        [
            "bridge",
            "--name",
            "near",
            "--export-queue",
            queues,
            "--listen",
            &pair.endpoint,
        ]
    } else {
        [
            "bridge",
            "--name",
            "far",
            "--import-queue",
            queues,
            "--connect",
            &pair.endpoint,
        ]
    };
    let world = if is_exporter { &pair.near } else { &pair.far };
    world.start(&[&own[..], &common].concat())
}

/// Does jobs of `name`: the result has each byte plus one, and the input's layout and metadata.
struct Doing {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Doing {
    fn start(domain: &Domain, name: &'static str) -> Doing {
        let (domain, is_over) = (domain.clone(), Arc::new(AtomicBool::new(false)));
        let stop = is_over.clone();
        let work = move || {
            let device = Device::host();
            let stream = device.stream().unwrap();
            while !stop.load(Ordering::Relaxed) {
                let Ok(mut worker) = Worker::open(name, domain.on(&device), Duration::ZERO) else {
                    // The queue is not there, or its bridge was killed.
                    std::thread::park_timeout(SLICE);
                    continue;
                };
                while !stop.load(Ordering::Relaxed) {
                    let lease = match worker.lease(&stream, SLICE) {
                        Ok(lease) => lease,
                        Err(Error::Timeout { .. }) => continue,
                        Err(_) => break,
                    };
                    let mut bytes = lease.to_vec(LONG).unwrap();
                    if bytes == b"bad" {
                        let _ = lease.reject("the input is bad");
                        continue;
                    }
                    bytes
                        .iter_mut()
                        .for_each(|byte| *byte = byte.wrapping_add(1));
                    let Ok(mut output) = lease.output(lease.layout()) else {
                        break;
                    };
                    output.write(&stream, &bytes).unwrap();
                    output.set_metadata(lease.metadata()).unwrap();
                    let _ = lease.complete(output, &stream);
                }
            }
        };
        Doing {
            is_over,
            thread: Some(std::thread::spawn(work)),
        }
    }
}

impl Drop for Doing {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        let _ = self.thread.take().unwrap().join();
    }
}

#[test]
fn workers_of_another_machine_do_jobs_and_each_result_has_its_bytes_and_layout() {
    let pair = Pair::new();
    let (near, far) = pair.domains();
    let (queue, stream) = (queue(&near), Device::host().stream().unwrap());
    let _bridges = (start(&pair, true), start(&pair, false));
    let _doing = (Doing::start(&far, "jobs"), Doing::start(&far, "jobs"));
    let layout = Layout::strided(DType::F32, &[2, 3], &[4, 1], 1).unwrap();
    let submit = |number: u8| {
        let mut input = queue.loan(&layout).unwrap();
        let bytes = vec![number; layout.bytes() as usize];
        input.write(&stream, &bytes).unwrap();
        input.set_metadata(&[number]).unwrap();
        queue.submit(input, &stream).map_err(Error::from).unwrap()
    };
    let jobs: Vec<_> = (0..50).map(submit).collect();
    for (number, job) in (0..).zip(jobs) {
        let result = job.wait(&stream, LONG).unwrap();
        assert_eq!(
            (result.layout(), result.metadata()),
            (&layout, &[number][..])
        );
        assert_eq!(
            result.to_vec(LONG).unwrap(),
            vec![number + 1; layout.bytes() as usize]
        );
    }
    let bad = queue.submit_bytes(b"bad", &stream).unwrap();
    let error = bad.wait(&stream, LONG).unwrap_err().to_string();
    assert!(
        error.contains("the input is bad") && error.contains("far"),
        "{error}"
    );
}

#[test]
fn a_queue_whose_name_is_taken_has_the_name_of_its_machine_before_it() {
    let pair = Pair::new();
    let (near, far) = pair.domains();
    let (queue, taken) = (queue(&near), self::queue(&far));
    let stream = Device::host().stream().unwrap();
    let _bridges = (start(&pair, true), start(&pair, false));
    let _doing = Doing::start(&far, "remote/near/jobs");
    let job = queue.submit_bytes(&[1], &stream).unwrap();
    assert_eq!(job.wait(&stream, LONG).unwrap().to_vec(LONG).unwrap(), [2]);
    drop(taken);
}

#[test]
fn a_job_of_an_unreachable_machine_goes_back_when_its_lease_ends_and_has_one_outcome() {
    let pair = Pair::new();
    let (near, far) = pair.domains();
    let (queue, stream) = (queue(&near), Device::host().stream().unwrap());
    let (_exporter, importer) = (start(&pair, true), start(&pair, false));
    let mut there = worker(&far);
    let job = queue.submit_bytes(&[7], &stream).unwrap();
    let held = there.lease(&stream, LONG).unwrap();
    importer.stop();
    let _doing = Doing::start(&near, "jobs");
    let result = job.wait(&stream, LONG).unwrap();
    assert_eq!((result.to_vec(LONG).unwrap(), result.attempt), (vec![8], 1));
    // The late result finds no job.
    importer.signal(Signal::CONT);
    let mut output = held.output(&Layout::bytes_only(1).unwrap()).unwrap();
    output.write(&stream, &[0]).unwrap();
    let _ = held.complete(output, &stream);
    assert!(queue.next_result(&stream, SLICE).is_err());
}

#[test]
fn every_job_has_one_right_outcome_while_both_bridges_are_killed_at_random() {
    let pair = Pair::new();
    let (near, far) = pair.domains();
    let (queue, stream) = (queue(&near), Device::host().stream().unwrap());
    let _doing = (Doing::start(&far, "jobs"), Doing::start(&far, "jobs"));
    let mut bridges = [false, true].map(|which| Some(start(&pair, which)));
    let mut rng = fastrand::Rng::with_seed(11);
    let mut jobs = Vec::new();
    for _ in 0..kills() {
        for _ in 0..12 {
            let number = jobs.len() as u64;
            let job = queue.submit_bytes(&number.to_le_bytes(), &stream).unwrap();
            jobs.push((number, job));
        }
        // Some moment: before any job of this round is done, at the first one, or later.
        for _ in 0..rng.u32(1..30) {
            let (_, job) = &jobs[jobs.len() - rng.usize(1..=12)];
            if job.is_done().unwrap() {
                break;
            }
            std::thread::park_timeout(SLICE);
        }
        let which = rng.usize(..2);
        let killed = bridges[which].take().unwrap();
        killed.signal(Signal::KILL);
        killed.end();
        bridges[which] = Some(start(&pair, which == 1));
    }
    let begun = Instant::now();
    for (number, job) in jobs {
        let result = job.wait(&stream, LONG).unwrap();
        let expected: Vec<u8> = number.to_le_bytes().map(|byte| byte.wrapping_add(1)).into();
        assert_eq!(result.to_vec(LONG).unwrap(), expected);
        assert!(begun.elapsed() < 4 * PATIENCE, "job {number}");
    }
    let again = queue.next_result(&stream, SLICE);
    assert!(matches!(again, Err(Error::Timeout { .. })), "{again:?}");
}

#[test]
fn a_job_of_a_machine_that_can_be_reached_does_not_go_back_when_workers_there_leave() {
    let pair = Pair::new();
    let (near, far) = pair.domains();
    // A carrier of the bridge gets no second job while it has one.
    let options = QueueOptions {
        prefetch: 1,
        ..near.on(&Device::host())
    };
    let queue = Queue::new("jobs", options).unwrap();
    let stream = Device::host().stream().unwrap();
    let _bridges = [true, false].map(|which| start_with(&pair, which, "jobs", "600"));
    let lease = || {
        let mut worker = worker(&far);
        let job = queue.submit_bytes(&[1], &stream).unwrap();
        let lease = worker.lease(&stream, LONG).unwrap();
        (job, lease, worker)
    };
    let ((first, leased, leaves), (second, held, _stays)) = (lease(), lease());
    leased.complete(None, &stream).unwrap();
    let _ = first.wait(&stream, LONG).unwrap();
    drop(leaves);
    let _doing = Doing::start(&near, "jobs");
    // More than twice the lease.
    let waited = second.wait(&stream, Duration::from_millis(2500));
    assert!(matches!(waited, Err(Error::Timeout { .. })), "{waited:?}");
    let mut output = held.output(&Layout::bytes_only(1).unwrap()).unwrap();
    output.write(&stream, &[9]).unwrap();
    held.complete(output, &stream).unwrap();
    assert_eq!(
        second.wait(&stream, LONG).unwrap().to_vec(LONG).unwrap(),
        [9]
    );
}

#[test]
fn a_pattern_that_matches_many_names_of_publishers_still_finds_the_queue() {
    let pair = Pair::new();
    let (near, far) = pair.domains();
    let publisher = |number: u32| {
        warpipe::Publisher::new(&format!("camera/{number}"), near.on(&Device::host())).unwrap()
    };
    let _publishers: Vec<_> = (0..20).map(publisher).collect();
    let (queue, stream) = (queue(&near), Device::host().stream().unwrap());
    let _bridges = [true, false].map(|which| start_with(&pair, which, "**", "600"));
    let _doing = Doing::start(&far, "jobs");
    let job = queue.submit_bytes(&[1], &stream).unwrap();
    assert_eq!(job.wait(&stream, LONG).unwrap().to_vec(LONG).unwrap(), [2]);
}

#[test]
fn a_job_or_a_result_that_one_end_does_not_take_fails_with_the_reason_and_others_are_done() {
    let pair = Pair::new();
    let (near, far) = pair.domains();
    let queue = Queue::new(
        "jobs",
        QueueOptions {
            max_attempts: 1,
            ..near.on(&Device::host())
        },
    )
    .unwrap();
    let stream = Device::host().stream().unwrap();
    let _exporter = start_limited_exporter(&pair, "--tensor-max", "1");
    let _importer = start(&pair, false);
    let mut worker = worker(&far);
    let does = |worker: &mut Worker, bytes: u64| {
        let lease = worker.lease(&stream, LONG).unwrap();
        let output = lease.output(&Layout::bytes_only(bytes).unwrap()).unwrap();
        lease.complete(output, &stream).unwrap();
    };
    let long = queue.submit_bytes(b"a long result", &stream).unwrap();
    does(&mut worker, (1 << 20) + 1);
    let error = long.wait(&stream, LONG).unwrap_err().to_string();
    assert!(error.contains("its result has 1048577 bytes"), "{error}");
    let large = queue.submit_bytes(&[0; (1 << 20) + 1], &stream).unwrap();
    let error = large.wait(&stream, LONG).unwrap_err().to_string();
    assert!(error.contains("1048577 bytes are more"), "{error}");
    let short = queue.submit_bytes(b"a short result", &stream).unwrap();
    does(&mut worker, 1 << 20);
    assert_eq!(short.wait(&stream, LONG).unwrap().layout().bytes(), 1 << 20);
}

#[test]
fn results_that_their_owner_does_not_take_hold_up_no_result_of_another_job() {
    let pair = Pair::new();
    let (near, far) = pair.domains();
    // Results come in the order of the jobs: the owner waits for the first.
    let options = QueueOptions {
        limit: 4096,
        ..near.on(&Device::host())
    };
    let queue = Queue::new("jobs", options).unwrap();
    let stream = Device::host().stream().unwrap();
    let _exporter = start_limited_exporter(&pair, "--memory", "4");
    let _importer = start(&pair, false);
    let layout = Layout::bytes_only(1 << 20).unwrap();
    let (mut slow, mut fast) = (worker(&far), worker(&far));
    let jobs: Vec<_> = (0..16)
        .map(|number| queue.submit_bytes(&[number], &stream).unwrap())
        .collect();
    let first = slow.lease(&stream, LONG).unwrap();
    let is_over = AtomicBool::new(false);
    let do_all = |worker: &mut Worker| {
        let stream = Device::host().stream().unwrap();
        while !is_over.load(Ordering::Relaxed) {
            if let Ok(lease) = worker.lease(&stream, SLICE) {
                let output = lease.output(&layout).unwrap();
                let _ = lease.complete(output, &stream);
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| do_all(&mut fast));
        // So many results that their memory at the exporter is full.
        let start = Instant::now();
        while queue.state().unwrap().finished < 4 && start.elapsed() < PATIENCE / 4 {
            std::thread::park_timeout(SLICE);
        }
        let output = first.output(&layout).unwrap();
        first.complete(output, &stream).unwrap();
        scope.spawn(|| do_all(&mut slow));
        let results = jobs.into_iter().map(|job| job.wait(&stream, LONG));
        let lengths: Vec<_> = results
            .map(|result| result.map(|it| it.layout().bytes()))
            .collect();
        is_over.store(true, Ordering::Relaxed);
        for length in lengths {
            assert_eq!(length.unwrap(), 1 << 20);
        }
    });
}
