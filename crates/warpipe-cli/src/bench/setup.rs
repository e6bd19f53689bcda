//! The surroundings of a benchmark: device, private domain, and size.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use warpipe::{Device, DeviceKind, Domain};

use super::BenchArgs;

/// Far more than any step takes: only a hang reaches it.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Samples that may be in flight, in every benchmark that keeps the device busy.
pub const IN_FLIGHT: u32 = 8;

/// The devices as they are asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum DeviceKindArg {
    /// The host backend.
    Host,
    /// NVIDIA GPUs.
    Cuda,
}

/// A device that another process can open, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Choice {
    Host,
    Cuda(u32),
}

impl Choice {
    pub fn open(self) -> warpipe::Result<Device> {
        match self {
            Choice::Host => Ok(Device::host()),
            Choice::Cuda(ordinal) => Device::cuda(ordinal),
        }
    }
}

/// Where one process of a benchmark works.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct BenchDomain {
    pub device: Choice,
    pub domain: PathBuf,
}

impl BenchDomain {
    /// Opens both, with every kernel loaded: loading can wait for a stream that waits.
    pub fn open(&self) -> anyhow::Result<(Device, Domain)> {
        let device = self.device.open()?;
        warpipe_kernels::preload(&device)?;
        Ok((device, Domain::at(&self.domain)?))
    }
}

/// Everything that the benchmarks share.
#[derive(Debug)]
pub struct Setup {
    pub device: Device,
    pub choice: Choice,
    pub why: String,
    /// The second GPU, where two were asked for.
    pub second: Option<Choice>,
    pub quick: bool,
    pub mode: String,
    pub domain: Domain,
    folder: TempDir,
}

impl Setup {
    pub fn new(args: &BenchArgs) -> anyhow::Result<Setup> {
        let (device, why) = match args.device {
            None => {
                let preferred = Device::preferred();
                (preferred.device, preferred.why)
            }
            Some(DeviceKindArg::Host) => (Device::host(), "as asked".to_owned()),
            Some(DeviceKindArg::Cuda) => (Device::cuda(0)?, "as asked".to_owned()),
        };
        let is_host = device.info().id.kind == DeviceKind::Host;
        let choice = if is_host {
            Choice::Host
        } else {
            Choice::Cuda(0)
        };
        let second = match (args.devices, is_host) {
            (2, false) => Some(Choice::Cuda(1)),
            (2, true) => anyhow::bail!("two devices need two GPUs; the device is the host ({why})"),
            _ => None,
        };
        warpipe_kernels::preload(&device)?;
        let folder = tempfile::tempdir().context("a folder for the domain")?;
        let domain = Domain::at(folder.path().join("domain"))?;
        let mode = args
            .mode
            .clone()
            .unwrap_or_else(|| sharing(is_host).to_owned());
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
        self.choice == Choice::Host
    }

    /// Whether the death of one process takes the others' work with it.
    pub fn is_mps(&self) -> bool {
        !self.is_host() && has_mps()
    }

    /// Where this process works, or another one like it.
    pub fn place(&self) -> BenchDomain {
        self.place_on(self.choice)
    }

    /// The same on another device.
    pub fn place_on(&self, device: Choice) -> BenchDomain {
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

fn has_mps() -> bool {
    crate::doctor::system::mps_answers()
}

fn sharing(is_host: bool) -> &'static str {
    match (is_host, has_mps()) {
        (true, _) => "host",
        (false, true) => "mps",
        (false, false) => "time-sliced",
    }
}
