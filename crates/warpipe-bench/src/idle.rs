//! The CPU time of a subscriber that waits while nothing comes.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::time::{ClockId, clock_gettime};
use warpipe::{Error, Publisher, Subscriber};
use warpipe_testkit::figure::{Figure, Wanted};

use super::Role;
use super::peer_process::{Control, PeerProcess};
use super::setup::{BenchDomain, Setup};

const NAME: &str = "bench/idle";

/// The most that a subscriber which waits may add to a process that sleeps.
const PERCENT_MAX: f64 = 0.02;

pub fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    let wait = Duration::from_millis(if setup.quick { 500 } else { 2_000 });
    let _publisher = Publisher::new(NAME, setup.domain.on(&setup.device))?;
    let peer = PeerProcess::start(&Role::Idle(setup.place()))?;
    peer.control.send(&wait)?;
    let (asleep, waiting): (f64, f64) = peer.control.hear()?;
    peer.end()?;
    Ok(vec![
        Figure::new(
            "idle",
            "CPU of a process whose subscriber waits",
            "%",
            &[waiting],
        )
        .beside(&[asleep])
        .wanted(Wanted::BesideFloorAtMost(PERCENT_MAX))
        .note(format!(
            "over {wait:.1?}; the floor is the same process asleep in poll, before it subscribes"
        )),
    ])
}

/// The child's part.
pub fn sleep(place: &BenchDomain, control: &Control) -> anyhow::Result<()> {
    let wait: Duration = control.hear()?;
    let (device, domain) = place.open()?;
    let stream = device.stream()?;
    let limit = Timespec {
        tv_sec: wait.as_secs() as _,
        tv_nsec: wait.subsec_nanos() as _,
    };
    let asleep = percent(|| {
        poll(
            &mut [PollFd::from_borrowed_fd(
                control.socket().as_fd(),
                PollFlags::IN,
            )],
            Some(&limit),
        )?;
        Ok(())
    })?;
    let mut subscriber = Subscriber::open(NAME, domain.on(&device), Duration::ZERO)?;
    let waiting = percent(|| match subscriber.receive(&stream, wait) {
        Err(Error::Timeout { .. }) => Ok(()),
        other => anyhow::bail!("{other:?} instead of nothing"),
    })?;
    control.send(&(asleep, waiting))
}

/// The process's CPU time, of all its threads, as a share of the time that passes.
pub fn percent(work: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let (start, cpu) = (Instant::now(), cpu_time());
    work()?;
    Ok(100.0 * (cpu_time() - cpu).as_secs_f64() / start.elapsed().as_secs_f64())
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        time.tv_nsec.unsigned_abs() as u32,
    )
}
