//! Finding GPUs, and what they can do with each other's memory.

use warpipe::backend::cuda;
use warpipe::{Access, Device};

use super::memory::Scratch;
use super::report::{Check, Report};

/// More than any host has; keeps the pairs few.
const GPUS_MAX: u32 = 16;

/// Loads the driver and opens every GPU.
pub fn find(report: &mut Report) -> anyhow::Result<Vec<(String, Device)>> {
    report.section("CUDA driver")?;
    let count = match cuda::device_count() {
        Ok(count) => count,
        Err(error) => {
            let next = "see nvidia-smi";
            report.add(Check::from_result("driver", Err(error.into()), next))?;
            return Ok(Vec::new());
        }
    };
    report.add(Check::ok("driver", format!("loaded; GPUs listed: {count}")))?;
    let mut gpus = Vec::new();
    for ordinal in 0..count.min(GPUS_MAX) {
        let name = format!("cuda:{ordinal}");
        let opened = Device::cuda(ordinal).map(|gpu| {
            let info = gpu.info();
            let memory = crate::output::bytes(info.memory_bytes);
            let text = format!("{}, {memory}, {}", info.name, info.id);
            gpus.push((name.clone(), gpu));
            text
        });
        let opened = opened.map_err(anyhow::Error::from);
        report.add(Check::from_result("open", opened, "see nvidia-smi").of(&name))?;
    }
    Ok(gpus)
}

/// Maps memory of each GPU on each other one and reads it there.
pub fn peers(report: &mut Report, gpus: &[(String, Device)]) -> anyhow::Result<()> {
    if gpus.len() < 2 {
        let check = Check::no("peer access", "there is one GPU", "nothing to do");
        return report.add(check);
    }
    for owner in gpus {
        for reader in gpus.iter().filter(|reader| reader.0 != owner.0) {
            report.add(peer(owner, reader))?;
        }
    }
    Ok(())
}

fn peer((owner_name, owner): &(String, Device), (reader_name, reader): &(String, Device)) -> Check {
    let tried = || -> anyhow::Result<u64> {
        let owned = Scratch::allocate(owner)?;
        owned.fill(&owner.stream()?)?;
        let imported = owned.import(reader, Access::Read)?;
        imported.wrong_words(&reader.stream()?)
    };
    let name = "peer access";
    let between = format!("{owner_name} -> {reader_name}");
    match tried() {
        Ok(0) => Check::ok(name, format!("{between}: mapped, and read right")),
        Ok(wrong) => {
            let detail = format!("{between}: {wrong} words read wrong");
            Check::failed(name, detail, "see nvidia-smi -q")
        }
        Err(error) => {
            let next = "put both ends on one GPU";
            Check::from_result(name, Err(error.context(between)), next)
        }
    }
}
