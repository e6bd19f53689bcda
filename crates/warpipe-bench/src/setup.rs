//! The surroundings of a benchmark: device, private domain, and size.

use std::path::{Path, PathBuf};

use anyhow::Context;
use serde::{Deserialize, Serialize};
use warpipe::{Device, Domain};
pub use warpipe_bench::PATIENCE;
use warpipe_cli::device_arg::{ChosenDevice, DeviceArg};
use warpipe_cli::mps_answers;
use warpipe_testkit::{TempDir, temporary_folder};

use super::BenchArgs;

/// Samples that may be in flight, in every benchmark that keeps the device busy.
pub const IN_FLIGHT: u32 = 8;

/// Where one process of a benchmark works.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BenchDomain {
    pub device: DeviceArg,
    pub domain: PathBuf,
}

impl BenchDomain {
    /// Opens both, with every kernel loaded: loading can wait for a stream that waits.
    pub fn open(&self) -> anyhow::Result<(Device, Domain)> {
        let device = self.device.open()?.device;
        warpipe_kernels::preload(&device)?;
        Ok((device, Domain::at(&self.domain)?))
    }
}

/// Everything that the benchmarks share.
#[derive(Debug)]
pub struct Setup {
    pub device: Device,
    pub choice: DeviceArg,
    pub why: String,
    /// The second GPU, where two were asked for.
    pub second: Option<DeviceArg>,
    pub quick: bool,
    pub mode: String,
    pub domain: Domain,
    folder: TempDir,
}

impl Setup {
    pub fn new(args: &BenchArgs) -> anyhow::Result<Setup> {
        let ChosenDevice { device, why } = args.device.open()?;
        let choice = DeviceArg::of(&device);
        let second = match (args.devices, choice) {
            (2, DeviceArg::Cuda(first)) => Some(DeviceArg::Cuda(u32::from(first == 0))),
            (2, _) => anyhow::bail!("two devices need two GPUs; the device is the host ({why})"),
            _ => None,
        };
        warpipe_kernels::preload(&device)?;
        let folder = temporary_folder().context("a folder for the domain")?;
        let domain = Domain::at(folder.path().join("domain"))?;
        let mode = args
            .mode
            .clone()
            .unwrap_or_else(|| sharing(choice == DeviceArg::Host).to_owned());
        Ok(Setup {
            device,
            choice,
            why,
            second,
            quick: args.quick,
            mode,
            domain,
            folder,
        })
    }

    pub fn is_host(&self) -> bool {
        self.choice == DeviceArg::Host
    }

    /// Whether the death of one process takes the others' work with it.
    pub fn is_mps(&self) -> bool {
        !self.is_host() && mps_answers()
    }

    /// Where this process works, or another one like it.
    pub fn place(&self) -> BenchDomain {
        self.place_on(self.choice)
    }

    /// The same on another device.
    pub fn place_on(&self, device: DeviceArg) -> BenchDomain {
        BenchDomain {
            device,
            domain: self.domain_path(),
        }
    }

    fn domain_path(&self) -> PathBuf {
        let path: &Path = self.folder.path();
        path.join("domain")
    }

    /// How often floor and ours take turns.
    pub fn rounds(&self) -> usize {
        if self.quick { 2 } else { 7 }
    }

    /// `full` iterations, or a few of them.
    pub fn times(&self, full: usize) -> usize {
        if self.quick {
            (full / 20).clamp(10, 100)
        } else {
            full
        }
    }
}

fn sharing(is_host: bool) -> &'static str {
    match (is_host, mps_answers()) {
        (true, _) => "host",
        (false, true) => "mps",
        (false, false) => "time-sliced",
    }
}
