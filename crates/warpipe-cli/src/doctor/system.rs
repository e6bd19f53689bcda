//! Checks that do not depend on a device: descriptors, seeing a process die, the domain, MPS.

use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::process::{Resource, getrlimit};
use warpipe::nvtx::{self, State};
use warpipe::{DeviceId, Domain};

use super::report::Check;
use crate::cpus::{self, Neighbours};
use crate::exit::hint;
use crate::output;
use crate::process;

/// More descriptors than a publisher with 32 subscribers and a few regions needs.
const DESCRIPTORS_WANTED: usize = 512;

/// Opens descriptors, all at once, and closes them again.
pub fn descriptors() -> Check {
    let name = "file descriptors";
    let mut open = Vec::new();
    let refused = loop {
        if open.len() == DESCRIPTORS_WANTED {
            break None;
        }
        match eventfd(0, EventfdFlags::CLOEXEC) {
            Ok(descriptor) => open.push(descriptor),
            Err(error) => break Some(error),
        }
    };
    let limit = getrlimit(Resource::Nofile)
        .current
        .map_or("none".to_owned(), |limit| limit.to_string());
    let detail = format!("opened {} at once (soft limit {limit})", open.len());
    match refused {
        None => Check::ok(name, detail),
        Some(error) => Check::failed(
            name,
            format!("{detail}, then {error}"),
            format!("raise the limit with `ulimit -n 4096`; {DESCRIPTORS_WANTED} were tried"),
        ),
    }
}

/// Whether peers would learn at once that this process's device is quiet, now that its driver has
/// been started.
pub fn lifeline() -> Check {
    let stats = warpipe::process_stats();
    let when = match stats.is_proof_prompt {
        true => "as soon as the device is quiet",
        false => "when the process is gone: CUDA was there first",
    };
    let orphaned = stats.orphaned;
    Check::ok(
        "proof of death",
        format!("{when}; {orphaned} peers left a child that holds their files"),
    )
}

/// Starts a process and sees it end through its pidfd.
pub fn death() -> Check {
    let seen = || -> anyhow::Result<String> {
        let mut child = process::child_of_this("doctor-child");
        let mut child = child.stdin(Stdio::null()).spawn()?;
        let started = Instant::now();
        match process::wait(&mut child, Duration::from_secs(10)) {
            Ok(Some(_)) => Ok(format!(
                "a child's end was seen through its pidfd after {}",
                output::duration(started.elapsed())
            )),
            Ok(None) => {
                process::end(&mut child, Duration::ZERO)?;
                anyhow::bail!("a child's end was not seen within 10 s")
            }
            Err(error) => {
                child.wait()?;
                Err(error.into())
            }
        }
    };
    Check::from_result(
        "see a process die",
        seen(),
        "use Linux 5.4 or newer, and a sandbox that allows pidfd_open",
    )
}

/// Opens the domain: creates its directory if need be, and checks its owner.
pub fn domain(opened: &warpipe::Result<Domain>) -> Check {
    let name = "domain directory";
    match opened {
        Ok(domain) => {
            let path = domain.path().display();
            Check::ok(name, format!("{path} is private to this user"))
        }
        Err(error) => {
            let next = "set WARPIPE_DOMAIN to a directory of your own";
            let next = hint(error).unwrap_or_else(|| next.to_owned());
            Check::failed(name, error.to_string(), next)
        }
    }
}

/// Loads what the environment names for a profiler.
pub fn profiler() -> Check {
    let name = "profiler ranges";
    match nvtx::state() {
        State::Off => Check::ok(
            name,
            "off: neither NVTX_INJECTION64_PATH nor WARPIPE_NVTX=1 asks for them",
        ),
        State::On { library } => {
            Check::ok(name, format!("send and receive are reported to {library}"))
        }
        State::Failed(error) => Check::no(name, error.to_string(), hint(error).unwrap_or_default()),
        _ => Check::ok(name, "of a kind that this program does not know"),
    }
}

/// Knocks at the control pipe of an MPS daemon.
pub fn mps() -> Check {
    let control = mps_control();
    let place = control.display();
    match knock(&control) {
        Ok(()) => {
            let text = "low latency, and one client's fault ends them all";
            Check::ok("MPS", format!("a daemon answers at {place}: {text}"))
        }
        Err(error) => Check::no(
            "MPS",
            format!("no daemon answers at {place} ({error}): processes share a GPU in time slices"),
            "for hand-overs between kernels on one GPU in 10 us instead of 290, start `nvidia-cuda-mps-control -d`",
        ),
    }
}

/// Whether this process may run beside the GPU: its CPUs, and those of the GPU's NUMA node.
pub fn cpus(gpu: &DeviceId) -> Check {
    let beside = cpus::beside(Path::new("/"), &gpu.to_string());
    cpus_of(beside.as_ref(), &cpus::allowed())
}

fn cpus_of(beside: Option<&Neighbours>, allowed: &[usize]) -> Check {
    let name = "CPUs beside it";
    let may = cpus::listed(allowed);
    let Some(beside) = beside else {
        let text = "not shown by the driver here";
        return Check::ok(name, format!("{text}; this process may use CPUs {may}"));
    };
    let Some(node) = beside.node else {
        let text = "no NUMA node is nearer";
        return Check::ok(name, format!("{text}; this process may use CPUs {may}"));
    };
    let near = cpus::listed(&beside.cpus);
    let detail = format!("NUMA node {node}, CPUs {near}; this process may use CPUs {may}");
    let is_near = |cpu: &&usize| beside.cpus.contains(cpu);
    match allowed.iter().filter(is_near).count() {
        0 => Check::no(
            name,
            format!("{detail}, all of them on another node: hand-overs take longer"),
            format!(
                "start the processes with `taskset -c {near}` or `numactl --cpunodebind={node}`; \
                 give a container these CPUs (`--cpuset-cpus={near}`)"
            ),
        ),
        count if count == allowed.len() => Check::ok(name, detail),
        _ => Check::ok(
            name,
            format!("{detail}; `taskset -c {near}` keeps a process beside the GPU"),
        ),
    }
}

/// The hardware queues that the streams of one process share, by what the environment asks for.
pub fn queues() -> Check {
    queues_of(
        std::env::var_os("CUDA_DEVICE_MAX_CONNECTIONS"),
        mps_answers(),
    )
}

fn queues_of(asked: Option<std::ffi::OsString>, mps: bool) -> Check {
    let name = "hardware queues";
    let next = "set CUDA_DEVICE_MAX_CONNECTIONS=8 for processes with streams that wait for other processes, or call \
                `sample.finish(timeout)` before such a stream gets more work";
    let Some(asked) = asked else {
        let few = "an MPS client has fewer than 8 by default: a stream that waits may hold up others of its process";
        return if mps {
            Check::no(name, few, next)
        } else {
            Check::ok(name, "the driver's own number: 8")
        };
    };
    match asked.to_str().and_then(|asked| asked.parse::<u32>().ok()) {
        Some(count) if count >= 8 => {
            Check::ok(name, format!("{count}, by CUDA_DEVICE_MAX_CONNECTIONS"))
        }
        Some(count) => {
            let detail = format!(
                "CUDA_DEVICE_MAX_CONNECTIONS={count}: a stream that waits may hold up the other streams of its process"
            );
            Check::no(name, detail, next)
        }
        None => Check::no(
            name,
            format!("CUDA_DEVICE_MAX_CONNECTIONS is {asked:?}, which is no number"),
            next,
        ),
    }
}

/// Whether a daemon is there, so that this process's GPU work goes through it.
pub fn mps_answers() -> bool {
    knock(&mps_control()).is_ok()
}

/// Whether a daemon with this folder of pipes is there.
pub fn mps_answers_at(pipes: &Path) -> bool {
    knock(&pipes.join("control")).is_ok()
}

fn mps_control() -> PathBuf {
    let directory =
        std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").map_or("/tmp/nvidia-mps".into(), PathBuf::from);
    directory.join("control")
}

fn knock(control: &Path) -> io::Result<()> {
    if std::fs::metadata(control)?.file_type().is_fifo() {
        // Opening a pipe for writing without waiting fails where nobody reads it.
        let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
        return std::fs::OpenOptions::new()
            .write(true)
            .custom_flags(flags)
            .open(control)
            .map(drop);
    }
    match UnixStream::connect(control) {
        // A socket of another type: newer daemons listen for packets.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::PROTOTYPE.raw_os_error()) => {
            knock_packets(control)
        }
        other => other.map(drop),
    }
}

fn knock_packets(control: &Path) -> io::Result<()> {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let address = SocketAddrUnix::new(control)?;
    let knock = |kind| {
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
        rustix::net::connect(&socket, &address)
    };
    Ok(knock(SocketType::SEQPACKET).or_else(|_| knock(SocketType::DGRAM))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_hardware_queues_are_named_with_the_setting_that_gives_more() {
        let few = |asked: Option<&str>, mps| {
            let check = serde_json::to_value(queues_of(asked.map(Into::into), mps)).unwrap();
            assert!(
                check["next"].is_null()
                    || check["next"]
                        .as_str()
                        .unwrap()
                        .contains("CUDA_DEVICE_MAX_CONNECTIONS=8")
            );
            check["verdict"] == "no"
        };
        assert!(!few(None, false) && !few(Some("8"), true) && !few(Some("32"), false));
        assert!(
            few(None, true)
                && few(Some("1"), false)
                && few(Some("7"), true)
                && few(Some("many"), false)
        );
    }

    #[test]
    fn cpus_of_another_node_than_the_gpu_are_named_with_the_command_that_moves_there() {
        let beside = Neighbours {
            node: Some(1),
            cpus: vec![4, 5, 6, 7],
        };
        let check = |beside: Option<&Neighbours>, allowed: &[usize]| {
            let check = serde_json::to_value(cpus_of(beside, allowed)).unwrap();
            (
                check["verdict"].as_str().unwrap().to_owned(),
                format!("{} {}", check["detail"], check["next"]),
            )
        };
        let (verdict, said) = check(Some(&beside), &[0, 1, 2, 3]);
        assert_eq!(verdict, "no");
        for words in [
            "NUMA node 1, CPUs 4-7",
            "may use CPUs 0-3",
            "taskset -c 4-7",
        ] {
            assert!(said.contains(words), "{said}");
        }
        assert!(said.contains("numactl --cpunodebind=1"), "{said}");
        let (verdict, said) = check(Some(&beside), &[3, 4]);
        assert!(verdict == "ok" && said.contains("taskset -c 4-7"), "{said}");
        let (verdict, said) = check(Some(&beside), &[5, 6]);
        assert!(verdict == "ok" && !said.contains("taskset"), "{said}");
        let nowhere = Neighbours {
            node: None,
            cpus: vec![0],
        };
        assert_eq!(check(Some(&nowhere), &[1]).0, "ok");
        assert_eq!(check(None, &[1]).0, "ok");
    }

    #[test]
    fn an_mps_pipe_answers_only_while_somebody_listens() {
        let directory = tempfile::tempdir().unwrap();
        let control = directory.path().join("control");
        assert!(knock(&control).is_err(), "nothing there");
        let listener = std::os::unix::net::UnixListener::bind(&control).unwrap();
        assert!(knock(&control).is_ok());
        drop(listener);
        assert!(knock(&control).is_err(), "what a dead daemon left behind");
    }
}
