//! Users that share a GPU through one pool, and are kept apart: quotas, writes outside a block, a
//! death in the middle of the work, a flood of connections.
//!
//! A broker owns a pool that admits two other users, each with a quota. The *steady* tenant works
//! on its block from beginning to end, and checks every word of it. The *faulty* user meanwhile
//! makes one mistake after the other, each in a process of its own: it asks for more than its
//! quota; it writes behind the end of its region, and the MMU stops it; it is killed while its
//! device writes; it opens connections as fast as it can. The steady tenant notices nothing, its
//! clients are admitted, and the memory of the faulty ones comes back, and is zero for the next
//! user.
//!
//! **This module is marked for unsafe**: it launches kernels on device memory, one of them on
//! purpose behind its end, and changes the user of a process.
//!
//! Started by root, since it starts processes of other users:
//!
//! ```text
//! cargo build -p warpipe --example tenants && sudo target/debug/examples/tenants
//! ```
//!
//! It ends with `ok: 2 users kept to their quotas; 1 write outside was stopped, 1 death cleaned up,
//! 1 flood unnoticed; all words right in N rounds`, and for another user than root with
//! `ok: skipped: only root can start processes of other users`. It is skipped, too, where an MPS
//! daemon is there: all clients of one are ended by a write outside, or by a kill.

mod stage;

use std::fs::Permissions;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use rustix::process::{Signal, set_parent_process_death_signal};
use stage::{Outcome, PATIENCE, Stage, ensure, play_after};
use warpipe::backend::DeviceKind;
use warpipe::{Error, ErrorKind, LentBuffer, LimitFault, Pool, PoolClient, PoolOptions, Quota};

const NAME: &str = "shared";
/// Users without other processes.
const STEADY: u32 = 61_401;
const FAULTY: u32 = 61_402;
/// Each user's quota: one region.
const BYTES: u64 = 2 << 20;
const WORDS: u64 = BYTES / 8;
/// The rounds of the steady tenant that each mistake, and the flood, is given.
const ROUNDS: u64 = 5;

fn main() -> ExitCode {
    play_after(&[], become_tenant, |stage, folder| match stage.role() {
        "" => broker(stage),
        "steady" => steady(stage),
        "greedy" => greedy(stage),
        "trespasser" => trespass(stage),
        "doomed" => be_killed(stage),
        "flooder" => flood(&folder),
        other => Err(format!("there is no role {other:?}").into()),
    })
}

/// Becomes the role's user, before the device is opened. Returns the domain's folder, which that
/// user may connect in, also where it may not walk the path to it.
fn become_tenant(stage: &mut Stage) -> Outcome<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::open(stage.domain.path(), flags, Mode::empty())?;
    let uid = match stage.role() {
        "" => return Ok(folder),
        "steady" => STEADY,
        _ => FAULTY,
    };
    // SAFETY: plain system calls. This process has one thread.
    let codes = unsafe {
        [
            libc::setgroups(0, std::ptr::null()),
            libc::setgid(uid),
            libc::setuid(uid),
        ]
    };
    ensure(codes == [0; 3], || format!("it cannot become user {uid}"))?;
    // The change of the user has cleared it.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    Ok(folder)
}

fn open_pool(stage: &Stage) -> Outcome<PoolClient> {
    Ok(PoolClient::open(
        NAME,
        stage.domain.on(&stage.device),
        Duration::ZERO,
    )?)
}

/// Says that it has come this far.
fn say(line: &str) -> Outcome {
    Ok(writeln!(std::io::stdout(), "{line}")?)
}

/// Connects, allocates its whole quota, writes it, checks it, and lets it go, until its standard
/// input ends.
fn steady(stage: &Stage) -> Outcome<String> {
    let (over, is_over) = channel::<()>();
    std::thread::spawn(move || {
        let _over = over;
        let _ = std::io::stdin().read(&mut [0]);
    });
    let stream = stage.device.stream()?;
    for round in 1_u64.. {
        let block = open_pool(stage)?.allocate(BYTES, PATIENCE)?;
        block.used_on(&stream);
        // SAFETY: the block is this process's, and has WORDS words.
        unsafe { warpipe_kernels::fill(&stream, block.ptr(), WORDS, round)? };
        stream.synchronize(PATIENCE)?;
        let bytes = block.to_vec(PATIENCE)?;
        let wrong = bytes
            .chunks_exact(8)
            .zip(0_u64..)
            .filter(|(word, index)| **word != warpipe_kernels::pattern(round, *index).to_ne_bytes())
            .count();
        ensure(wrong == 0, || {
            format!("{wrong} words are wrong in round {round}")
        })?;
        block.free(&stream)?;
        stream.synchronize(PATIENCE)?;
        say(&format!("round {round}"))?;
        if is_over.try_recv() == Err(std::sync::mpsc::TryRecvError::Disconnected) {
            return Ok(format!("all words right in {round} rounds"));
        }
    }
    unreachable!("the rounds have no end")
}

/// Asks for more than its quota.
fn greedy(stage: &Stage) -> Outcome<String> {
    let pool = open_pool(stage)?;
    let _all = pool.allocate(BYTES, PATIENCE)?;
    for timeout in [Duration::ZERO, Duration::from_millis(50)] {
        let more = pool.allocate(8, timeout).map(drop);
        let is_refused = matches!(
            more,
            Err(Error::Limit(LimitFault::Quota {
                uid: FAULTY,
                used: BYTES,
                limit: BYTES,
                ..
            }))
        );
        ensure(is_refused, || format!("beyond its quota it got {more:?}"))?;
    }
    Ok("got its quota, and no byte more".into())
}

/// Writes one word behind the end of its region. On the host this ends the process (`SIGSEGV`), on
/// a GPU its context alone (`CUDA_ERROR_ILLEGAL_ADDRESS`).
fn trespass(stage: &Stage) -> Outcome<String> {
    let stream = stage.device.stream()?;
    let block = open_pool(stage)?.allocate(BYTES, PATIENCE)?;
    block.used_on(&stream);
    let behind = first_unmapped(block.ptr() + BYTES)?;
    // SAFETY: none. The word is not this process's, nor any other's: the MMU stops the write. That
    // is what this example is there to show.
    let written = unsafe { warpipe_kernels::fill(&stream, behind, 1, 666) }
        .and_then(|()| stream.synchronize(PATIENCE));
    match written {
        Err(error) if error.kind() == ErrorKind::DeviceFailed => {
            // The context is lost, and with it every call that would tidy up.
            say(&format!("stopped: {error}"))?;
            std::process::exit(0)
        }
        other => Err(format!("it wrote behind its region: {other:?}").into()),
    }
}

/// The first address from `start` on at which this process has nothing mapped.
fn first_unmapped(start: u64) -> Outcome<u64> {
    let maps = std::fs::read_to_string("/proc/self/maps")?;
    let mut address = start;
    for line in maps.lines() {
        let range = line
            .split_once(' ')
            .and_then(|(range, _)| range.split_once('-'));
        let (from, to) = range.ok_or("a line of /proc/self/maps")?;
        let (from, to) = (u64::from_str_radix(from, 16)?, u64::from_str_radix(to, 16)?);
        if (from..to).contains(&address) {
            address = to;
        }
    }
    Ok(address)
}

/// Begins to write its block, and is killed.
fn be_killed(stage: &Stage) -> Outcome<String> {
    let stream = stage.device.stream()?;
    let block: LentBuffer = open_pool(stage)?.allocate(BYTES, PATIENCE)?;
    block.used_on(&stream);
    // SAFETY: the block is this process's, and has WORDS words.
    unsafe {
        warpipe_kernels::fill(&stream, block.ptr(), WORDS, 666)?;
        stream.synchronize(PATIENCE)?;
        warpipe_kernels::slow_fill(&stream, block.ptr(), WORDS, 667, Duration::from_secs(10))?
    };
    say("writing")?;
    std::thread::park_timeout(PATIENCE);
    Err("nothing killed it".into())
}

/// Opens connections as fast as it can, keeps as many as it may, and sends nothing.
fn flood(folder: &OwnedFd) -> Outcome<String> {
    let path = format!("/proc/self/fd/{}/{NAME}.sock", folder.as_raw_fd());
    let address = SocketAddrUnix::new(path.as_str())?;
    let mut kept = std::collections::VecDeque::new();
    for count in 0_u64.. {
        match rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None) {
            Ok(socket) => {
                rustix::net::connect(&socket, &address)?;
                kept.push_back(socket);
            }
            // Out of descriptors.
            Err(_) => drop(kept.pop_front()),
        }
        if count == 500 {
            say("flooding")?;
        }
    }
    unreachable!("the flood has no end")
}

/// A process of another user, and what it says. Killed when it is dropped.
struct Tenant {
    role: &'static str,
    child: Child,
    lines: Receiver<String>,
}

impl Tenant {
    fn start(stage: &Stage, role: &'static str) -> Outcome<Tenant> {
        let mut command = stage.command(role)?;
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let stdout = BufReader::new(child.stdout.take().ok_or("its output")?);
        let (tell, lines) = channel();
        std::thread::spawn(move || {
            let lines = stdout.lines().map_while(Result::ok);
            lines
                .take_while(|line| tell.send(line.clone()).is_ok())
                .for_each(drop);
        });
        Ok(Tenant { role, child, lines })
    }

    /// Waits for a line that begins with this.
    fn expect(&self, start: &str) -> Outcome<String> {
        let until = Instant::now() + PATIENCE;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let line = self.lines.recv_timeout(left);
            let line = line.map_err(|_| format!("the {} never said {start:?}", self.role))?;
            if line.starts_with(start) {
                return Ok(line);
            }
        }
    }

    /// Waits for some more rounds of the steady tenant, from now on.
    fn expect_rounds(&self) -> Outcome {
        self.lines.try_iter().for_each(drop);
        (0..ROUNDS).try_for_each(|_| self.expect("round").map(drop))
    }

    /// Its end, and its last line.
    fn end(mut self) -> Outcome<(ExitStatus, String)> {
        drop(self.child.stdin.take());
        let mut last = String::new();
        while let Ok(line) = self.lines.recv_timeout(PATIENCE) {
            last = line;
        }
        Ok((self.child.wait()?, last))
    }

    fn kill(&mut self) -> Outcome {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Tenant {
    fn drop(&mut self) {
        let _ = self.kill();
    }
}

/// The control file of an MPS daemon.
fn mps_control() -> PathBuf {
    let folder = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY");
    let folder = folder.map_or_else(|| "/tmp/nvidia-mps".into(), PathBuf::from);
    folder.join("control")
}

fn broker(stage: &Stage) -> Outcome<String> {
    if !rustix::process::geteuid().is_root() {
        return Ok("skipped: only root can start processes of other users".into());
    }
    if stage.device.info().id.kind == DeviceKind::Cuda && mps_control().exists() {
        return Ok(format!(
            "skipped: {} is there, and one fault ends the GPU work of all MPS clients",
            mps_control().display()
        ));
    }
    std::fs::set_permissions(stage.domain.path(), Permissions::from_mode(0o755))?;
    let quota = Quota {
        bytes: BYTES,
        blocks: 16,
    };
    let options = PoolOptions {
        memory_limit: 2 * BYTES,
        allow_uids: vec![STEADY, FAULTY],
        user_quota: quota,
        ..stage.domain.on(&stage.device)
    };
    let pool = Pool::new(NAME, options)?;
    let steady = Tenant::start(stage, "steady")?;
    steady.expect_rounds()?;

    let (status, last) = Tenant::start(stage, "greedy")?.end()?;
    ensure(status.success(), || {
        format!("the greedy one: {status}, {last}")
    })?;

    let (status, last) = Tenant::start(stage, "trespasser")?.end()?;
    let is_stopped = status.signal() == Some(libc::SIGSEGV) || last.starts_with("stopped");
    ensure(is_stopped, || format!("the trespasser: {status}, {last}"))?;
    steady.expect_rounds()?;

    let mut doomed = Tenant::start(stage, "doomed")?;
    doomed.expect("writing")?;
    ensure(pool.usage(FAULTY).bytes == BYTES, || {
        format!("of a block that is written: {:?}", pool.usage(FAULTY))
    })?;
    doomed.kill()?;
    // The other user has its quota in use. So there is room when the death is proven, not before.
    let block = pool.allocate(BYTES, PATIENCE)?;
    let bytes = block.to_vec(PATIENCE)?;
    ensure(bytes.iter().all(|&byte| byte == 0), || {
        "memory of the dead was not cleared".into()
    })?;
    drop(block);
    steady.expect_rounds()?;

    let flooder = Tenant::start(stage, "flooder")?;
    flooder.expect("flooding")?;
    steady.expect_rounds()?;
    drop(flooder);

    let (status, last) = steady.end()?;
    ensure(status.success(), || {
        format!("the steady one: {status}, {last}")
    })?;
    let rounds = last.trim_start_matches("steady: ");
    Ok(format!(
        "2 users kept to their quotas; 1 write outside was stopped, 1 death cleaned up, 1 flood unnoticed; {rounds}"
    ))
}
