//! `--device`: which device to use, and why that one.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use serde_json::json;
use warpipe::{Device, DeviceId, DeviceKind};

use crate::output::{Output, Style, styled};

/// The value of `--device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeviceArg {
    /// The first GPU if there is one, else the host.
    Auto,
    /// The host backend.
    Host,
    /// The GPU of this ordinal.
    Cuda(u32),
}

/// A device, and for people why it was taken.
#[derive(Debug)]
pub struct ChosenDevice {
    pub device: Device,
    pub why: String,
}

impl ChosenDevice {
    /// A line for people: that `name` uses the device, and why.
    pub(crate) fn title(&self, name: &str) -> String {
        styled(
            Style::Bold,
            &format!("{name} on {} ({})", self.device, self.why),
        )
    }

    /// Says that the endpoint `name` is used on the device.
    pub(crate) fn announce(&self, name: &str, output: Output) -> std::io::Result<()> {
        let (device, why) = (self.device.to_string(), &self.why);
        let listening = json!({ "event": "listening", "name": name, "device": device, "why": why });
        output.say(|| self.title(name), &listening)
    }
}

impl DeviceArg {
    /// Opens the device.
    pub fn open(self) -> warpipe::Result<ChosenDevice> {
        let device = match self {
            DeviceArg::Auto => {
                let preferred = Device::preferred();
                // How to get a GPU is for `doctor` to say.
                let why = preferred.why.split(" (libcuda").next();
                return Ok(ChosenDevice {
                    device: preferred.device,
                    why: why.unwrap_or_default().to_owned(),
                });
            }
            DeviceArg::Host => Device::host(),
            DeviceArg::Cuda(ordinal) => Device::cuda(ordinal)?,
        };
        let why = format!("asked for with --device {self}");
        Ok(ChosenDevice { device, why })
    }

    /// Opens the device, and for `auto` the one with this identity, on which some memory lies.
    pub fn open_for(self, owner: DeviceId) -> warpipe::Result<Device> {
        match (self, owner.kind) {
            (DeviceArg::Auto, DeviceKind::Host) => Ok(Device::host()),
            (DeviceArg::Auto, _) => Device::by_uuid(owner.uuid),
            _ => Ok(self.open()?.device),
        }
    }

    /// The choice that names an open device, for a child process of the same environment.
    pub fn of(device: &Device) -> DeviceArg {
        match device.info().id.kind {
            DeviceKind::Host => DeviceArg::Host,
            _ => DeviceArg::Cuda(device.info().ordinal),
        }
    }
}

impl fmt::Display for DeviceArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceArg::Auto => f.write_str("auto"),
            DeviceArg::Host => f.write_str("host"),
            DeviceArg::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl FromStr for DeviceArg {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceArg, String> {
        let wrong = || format!("{text:?} is no device; say auto, host, cuda or cuda:N (N from 0)");
        match text {
            "auto" => Ok(DeviceArg::Auto),
            "host" => Ok(DeviceArg::Host),
            "cuda" => Ok(DeviceArg::Cuda(0)),
            _ => {
                let ordinal = text.strip_prefix("cuda:").ok_or_else(wrong)?;
                ordinal.parse().map(DeviceArg::Cuda).map_err(|_| wrong())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_named_as_it_is_read() {
        for choice in [
            DeviceArg::Auto,
            DeviceArg::Host,
            DeviceArg::Cuda(0),
            DeviceArg::Cuda(12),
        ] {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        assert_eq!("cuda".parse(), Ok(DeviceArg::Cuda(0)));
        for wrong in [
            "",
            "gpu",
            "cuda:",
            "cuda:-1",
            "cuda:x",
            "cuda:4294967296",
            "host:0",
        ] {
            assert!(
                wrong.parse::<DeviceArg>().unwrap_err().contains("cuda:N"),
                "{wrong}"
            );
        }
    }
}
