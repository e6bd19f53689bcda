//! The CPUs beside a GPU, as Linux and the NVIDIA driver list them in files.

use std::fs;
use std::io::Read;
use std::path::Path;

use rustix::thread::{CpuSet, sched_getaffinity};

/// More bytes than any list of CPUs or any GPU's page has.
const FILE_BYTES_MAX: u64 = 16 << 10;
/// More folders than any host has GPUs.
const GPUS_MAX: usize = 64;

/// A GPU's place among the CPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Neighbours {
    /// The GPU's NUMA node; none where the machine has no nodes, the firmware names none, or no CPU
    /// belongs to it.
    pub node: Option<u32>,
    /// The CPUs of that node.
    pub cpus: Vec<usize>,
}

/// The place of the GPU with this UUID (`GPU-...`), by the files under `root`, which is `/` but in
/// tests. None where the driver or the kernel does not show it.
pub fn beside(root: &Path, uuid: &str) -> Option<Neighbours> {
    let gpus = fs::read_dir(root.join("proc/driver/nvidia/gpus")).ok()?;
    let gpus = gpus.take(GPUS_MAX).filter_map(Result::ok);
    let gpu = gpus.map(|gpu| gpu.path()).find(|gpu| {
        let page = read(&gpu.join("information")).unwrap_or_default();
        let mut words = page.split_whitespace();
        words.any(|word| word.eq_ignore_ascii_case(uuid))
    })?;
    let device = root.join("sys/bus/pci/devices").join(gpu.file_name()?);
    let node = read(&device.join("numa_node"))?;
    // -1 where there is none.
    let node = node.trim().parse::<i64>().ok()?;
    let cpus = parsed(&read(&device.join("local_cpulist"))?)?;
    Some(Neighbours {
        node: u32::try_from(node).ok().filter(|_| !cpus.is_empty()),
        cpus,
    })
}

/// The CPUs that share this one's core, itself included.
pub fn siblings(root: &Path, cpu: usize) -> Vec<usize> {
    let path = format!("sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
    read(&root.join(path))
        .and_then(|list| parsed(&list))
        .unwrap_or_else(|| vec![cpu])
}

/// The CPUs that this thread may use.
pub fn allowed() -> Vec<usize> {
    let set = sched_getaffinity(None).unwrap_or_default();
    (0..CpuSet::MAX_CPU)
        .filter(|&cpu| set.is_set(cpu))
        .collect()
}

/// `0-3,8`: as Linux writes it and `taskset -c` reads it.
pub fn listed(cpus: &[usize]) -> String {
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for &cpu in cpus {
        match ranges.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => ranges.push((cpu, cpu)),
        }
    }
    let ranges = ranges.iter().map(|(first, last)| match first == last {
        true => first.to_string(),
        false => format!("{first}-{last}"),
    });
    ranges.collect::<Vec<_>>().join(",")
}

/// The numbers of such a list, rising; none of nonsense.
fn parsed(list: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for range in list.trim().split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
        if last >= CpuSet::MAX_CPU {
            return None;
        }
        cpus.extend(first..=last);
    }
    cpus.sort_unstable();
    cpus.dedup();
    Some(cpus)
}

fn read(path: &Path) -> Option<String> {
    let mut text = String::new();
    let file = fs::File::open(path).ok()?;
    file.take(FILE_BYTES_MAX).read_to_string(&mut text).ok()?;
    Some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "GPU-66616b65-2d63-7564-612d-677075000000";

    /// A machine's files, of one GPU with these lines of its device's.
    fn machine(node: &str, cpus: &str) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let pages = "proc/driver/nvidia/gpus";
        write(
            &format!("{pages}/0000:18:00.0/information"),
            "Model: other\nGPU UUID: GPU-0\n",
        );
        let page = format!(
            "Model: \t\t NVIDIA H100\nGPU UUID: \t {}\n",
            UUID.to_uppercase()
        );
        write(&format!("{pages}/0000:9a:00.0/information"), &page);
        let device = "sys/bus/pci/devices/0000:9a:00.0";
        write(&format!("{device}/numa_node"), node);
        write(&format!("{device}/local_cpulist"), cpus);
        root
    }

    #[test]
    fn the_gpu_with_the_uuid_is_found_among_others() {
        let found = beside(machine("1\n", "4-5,12-13\n").path(), UUID);
        let cpus = vec![4, 5, 12, 13];
        assert_eq!(
            found,
            Some(Neighbours {
                node: Some(1),
                cpus
            })
        );
        assert_eq!(beside(machine("1\n", "4\n").path(), "GPU-1"), None);
    }

    #[test]
    fn a_machine_without_nodes_or_with_one_without_cpus_or_with_nonsense_is_no_fault() {
        for (node, cpus) in [("-1\n", "0-1\n"), ("1\n", "\n"), ("1\n", "3-2\n")] {
            let found = beside(machine(node, cpus).path(), UUID);
            assert_eq!(found.map(|found| found.node), Some(None), "{node}, {cpus}");
        }
        for (node, cpus) in [
            ("one", "0"),
            ("0", "0-99999999999"),
            ("0", "a-b"),
            ("0", "3-4096"),
        ] {
            assert_eq!(
                beside(machine(node, cpus).path(), UUID),
                None,
                "{node}, {cpus}"
            );
        }
        assert_eq!(beside(Path::new("/nowhere"), UUID), None);
    }

    #[test]
    fn a_list_is_read_and_written_as_linux_writes_it() {
        for list in ["", "0", "0-3", "0-3,8,10-11"] {
            assert_eq!(listed(&parsed(list).unwrap()), list);
        }
        assert_eq!(parsed("2,0-1,1\n"), Some(vec![0, 1, 2]));
        assert_eq!(siblings(Path::new("/nowhere"), 7), [7]);
    }
}
