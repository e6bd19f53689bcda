//! Finding GPUs, and what they can do with each other's memory.

use warpipe::backend::cuda;
use warpipe::{Access, Device, Error};

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
            report.add(absent(error))?;
            return Ok(Vec::new());
        }
    };
    report.add(Check::ok("driver", format!("loaded; GPUs listed: {count}")))?;
    let mut gpus = Vec::new();
    for ordinal in 0..count.min(GPUS_MAX) {
        let name = format!("cuda:{ordinal}");
        match Device::cuda(ordinal) {
            Ok(gpu) => {
                let info = gpu.info();
                let memory = crate::output::bytes(info.memory_bytes);
                report.add(
                    Check::ok("open", format!("{}, {memory}, {}", info.name, info.id)).of(&name),
                )?;
                gpus.push((name, gpu));
            }
            Err(error) => {
                report.add(
                    Check::from_result("open", Err(error.into()), "see nvidia-smi").of(&name),
                )?;
            }
        }
    }
    Ok(gpus)
}

/// No driver and no GPU are no fault; a driver that does not work is.
fn absent(error: Error) -> Check {
    let nothing_broken = matches!(error, Error::NoDriver { .. } | Error::NoDevice { .. });
    let check = Check::from_result("driver", Err(error.into()), "see nvidia-smi");
    if nothing_broken {
        check.but_no_fault()
    } else {
        check
    }
}

/// Maps memory of each GPU on each other one and reads it there.
pub fn peers(report: &mut Report, gpus: &[(String, Device)]) -> anyhow::Result<()> {
    if gpus.len() < 2 {
        return report.add(Check::no(
            "peer access",
            "there is one GPU",
            "nothing to do",
        ));
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
    let between = format!("{owner_name} -> {reader_name}");
    match tried() {
        Ok(0) => Check::ok("peer access", format!("{between}: mapped, and read right")),
        Ok(wrong) => Check::failed(
            "peer access",
            format!("{between}: {wrong} words read wrong"),
            "see nvidia-smi -q",
        ),
        Err(error) => {
            let apart = matches!(
                error.downcast_ref::<Error>(),
                Some(Error::PeerAccess { .. })
            );
            let check = Check::from_result(
                "peer access",
                Err(error.context(between)),
                "put both ends on one GPU",
            );
            if apart { check.but_no_fault() } else { check }
        }
    }
}
