//! Finding GPUs, and what they can do with each other's memory.

use warpipe::backend::{Access, cuda};
use warpipe::{Device, Error};

use super::memory::Scratch;
use super::report::{Check, Report, split_next};

/// More than any host has; keeps the pairs few.
const GPUS_MAX: u32 = 16;

/// Loads the driver and opens every GPU.
pub fn find(report: &mut Report) -> anyhow::Result<Vec<(String, Device)>> {
    report.section("CUDA driver")?;
    let count = match cuda::device_count() {
        Ok(count) => count,
        Err(error) => {
            report.add(absent(&error))?;
            return Ok(Vec::new());
        }
    };
    report.add(Check::ok("driver", format!("loaded; it lists {count} GPUs")))?;
    let mut gpus = Vec::new();
    for ordinal in 0..count.min(GPUS_MAX) {
        let name = format!("cuda:{ordinal}");
        match Device::cuda(ordinal) {
            Ok(gpu) => {
                let info = gpu.info();
                let memory = crate::output::bytes(info.memory_bytes);
                report.add(Check::ok("open", format!("{}, {memory}, {}", info.name, info.id)).of(&name))?;
                gpus.push((name, gpu));
            }
            Err(error) => {
                let (detail, next) = split_next(&error.to_string(), "see nvidia-smi");
                report.add(Check::failed("open", detail, next).of(&name))?;
            }
        }
    }
    Ok(gpus)
}

/// No driver and no GPU are no fault; a driver that does not work is.
fn absent(error: &Error) -> Check {
    let (detail, next) = split_next(&error.to_string(), "see nvidia-smi");
    match error {
        Error::NoDriver { .. } | Error::NoDevice { .. } => Check::no("driver", detail, next),
        _ => Check::failed("driver", detail, next),
    }
}

/// Maps memory of each GPU on each other one and reads it there.
pub fn peers(report: &mut Report, gpus: &[(String, Device)]) -> anyhow::Result<()> {
    if gpus.len() < 2 {
        return report.add(Check::no("peer access", "there is one GPU", "nothing to do"));
    }
    for (owner_name, owner) in gpus {
        for (reader_name, reader) in gpus.iter().filter(|(name, _)| name != owner_name) {
            report.add(peer(owner, reader).of(&format!("{owner_name} -> {reader_name}")))?;
        }
    }
    Ok(())
}

fn peer(owner: &Device, reader: &Device) -> Check {
    let tried = || -> anyhow::Result<u64> {
        let owned = Scratch::allocate(owner)?;
        owned.fill(&owner.stream()?)?;
        let imported = owned.import(reader, Access::Read)?;
        imported.wrong_words(&reader.stream()?)
    };
    match tried() {
        Ok(0) => Check::ok("peer access", "memory of the one, mapped and read on the other"),
        Ok(wrong) => Check::failed("peer access", format!("{wrong} words read wrong"), "report the machine: see nvidia-smi -q"),
        Err(error) => {
            let (detail, next) = split_next(&format!("{error:#}"), "put both ends on one GPU");
            match error.downcast_ref::<Error>() {
                Some(Error::PeerAccess { .. }) => Check::no("peer access", detail, next),
                _ => Check::failed("peer access", detail, next),
            }
        }
    }
}
