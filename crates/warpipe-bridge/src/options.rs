//! The options of a bridge, and which endpoints it may use.

use std::net::{IpAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

use warpipe::{Device, Domain, NAME_BYTES_MAX};

use crate::error::{Error, Result};
use crate::lane::WINDOW_MAX;
use crate::message::{PART_BYTES_MAX, PATTERNS_MAX, node_name};
use crate::pattern::{self, Pattern};

/// The action when the importer has no room for a sample. It acts at the exporter, which counts
/// what it leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Policy {
    /// The exporter receives nothing meanwhile, so its ring fills, and the publisher's own policy
    /// decides.
    Block,
    /// The oldest sample that the exporter holds is left out.
    DropOldest,
    /// The new sample is left out.
    DropNewest,
    /// The export of that name to that peer ends with an error.
    Fail,
}

/// The files of a TLS endpoint, in PEM.
#[derive(Debug, Clone, Default)]
pub struct Tls {
    /// This end's certificate.
    pub certificate: Option<PathBuf>,
    /// Its private key.
    pub key: Option<PathBuf>,
    /// The certificates of the authority that signed the peers'. With it, a listener admits only
    /// peers with a certificate of that authority.
    pub authority: Option<PathBuf>,
}

/// The options of a bridge. [`Bridge::open`](crate::Bridge::open) checks them.
#[derive(Debug, Clone)]
pub struct Options {
    /// The domain on this machine.
    pub domain: Domain,
    /// The device to which imported tensors go, and with which exported ones are read.
    pub device: Device,
    /// The name of this machine for people, and in `remote/HOST/NAME`.
    pub node: String,
    /// Endpoints to listen on: `tcp/127.0.0.1:7447`, `tls/0.0.0.0:7447`.
    pub listen: Vec<String>,
    /// Endpoints to connect to.
    pub connect: Vec<String>,
    /// Patterns of the names that are exported.
    pub export: Vec<String>,
    /// Patterns of the names that are imported.
    pub import: Vec<String>,
    /// Patterns of the queues of which peers may do jobs.
    pub export_queues: Vec<String>,
    /// Patterns of the peers' queues of which workers here do jobs.
    pub import_queues: Vec<String>,
    /// How long an unreachable peer keeps jobs, and the jobs of an unreachable peer are kept.
    pub lease: Duration,
    /// The action when an importer has no room.
    pub policy: Policy,
    /// Samples of a name that the exporter holds for a peer before the policy acts: fewer than the
    /// publisher's depth.
    pub held_max: usize,
    /// Parts that may be on their way to this end, for each name: 2 to 1024.
    pub window: u64,
    /// Bytes of a tensor in one part, 4 KiB to 4 MiB: sent by this end, and at most those of a part
    /// that it receives. Both bridges have the same.
    pub part_bytes: usize,
    /// Memory of this process for parts that have arrived and do not lie in their slots yet, of all
    /// names and queues together, in bytes. With many of them each has a smaller window, of two
    /// parts at least.
    pub receive_bytes_max: u64,
    /// The largest tensor, in bytes.
    pub tensor_bytes_max: u64,
    /// Device memory of each imported name, in bytes.
    pub memory_limit: u64,
    /// Samples of each imported name that its subscribers may have in flight.
    pub depth: u32,
    /// Samples of each imported name that a late subscriber gets first.
    pub history: u32,
    /// How long a silent link lasts before its host counts as unreachable.
    pub link_timeout: Duration,
    /// Peers at a time.
    pub peers_max: usize,
    /// The certificates.
    pub tls: Tls,
    /// Allows endpoints off loopback without TLS.
    pub insecure: bool,
}

impl Options {
    /// The defaults: nothing is exported, imported or listened to.
    pub fn new(domain: &Domain, device: &Device) -> Options {
        Options {
            domain: domain.clone(),
            device: device.clone(),
            node: "host".into(),
            listen: Vec::new(),
            connect: Vec::new(),
            export: Vec::new(),
            import: Vec::new(),
            export_queues: Vec::new(),
            import_queues: Vec::new(),
            lease: Duration::from_secs(30),
            policy: Policy::Block,
            held_max: 4,
            window: 32,
            part_bytes: 1 << 20,
            receive_bytes_max: 2 << 30,
            tensor_bytes_max: 4 << 30,
            memory_limit: 4 << 30,
            depth: 16,
            history: 0,
            link_timeout: Duration::from_secs(10),
            peers_max: 64,
            tls: Tls::default(),
            insecure: false,
        }
    }

    pub(crate) fn check(&self) -> Result<Patterns> {
        in_range("held_max", self.held_max as u64, 1, 1024)?;
        in_range("window", self.window, 2, WINDOW_MAX)?;
        in_range(
            "part_bytes",
            self.part_bytes as u64,
            4096,
            PART_BYTES_MAX as u64,
        )?;
        in_range(
            "receive_bytes_max",
            self.receive_bytes_max,
            2 * self.part_bytes as u64,
            1 << 50,
        )?;
        in_range("peers_max", self.peers_max as u64, 1, 1024)?;
        in_range(
            "link_timeout (ms)",
            self.link_timeout.as_millis() as u64,
            500,
            600_000,
        )?;
        in_range("lease (ms)", self.lease.as_millis() as u64, 500, 86_400_000)?;
        let queues = [&self.export_queues, &self.import_queues];
        for list in [&self.export, &self.import].into_iter().chain(queues) {
            in_range("patterns", list.len() as u64, 0, PATTERNS_MAX as u64)?;
        }
        for endpoint in self.listen.iter().chain(&self.connect) {
            check_endpoint(endpoint, self.insecure)?;
        }
        in_range(
            "endpoints",
            (self.listen.len() + self.connect.len()) as u64,
            1,
            64,
        )?;
        in_range(
            "node",
            node_name(&self.node).len() as u64,
            1,
            NAME_BYTES_MAX as u64 / 2,
        )?;
        Ok(Patterns {
            export: pattern::all(&self.export)?,
            import: pattern::all(&self.import)?,
            export_queues: pattern::all(&self.export_queues)?,
            import_queues: pattern::all(&self.import_queues)?,
        })
    }
}

/// The checked patterns of the options.
#[derive(Debug)]
pub(crate) struct Patterns {
    pub(crate) export: Vec<Pattern>,
    pub(crate) import: Vec<Pattern>,
    pub(crate) export_queues: Vec<Pattern>,
    pub(crate) import_queues: Vec<Pattern>,
}

fn in_range(option: &'static str, found: u64, least: u64, most: u64) -> Result<()> {
    if (least..=most).contains(&found) {
        return Ok(());
    }
    Err(Error::Option {
        option,
        found: found.to_string(),
        allowed: format!("{least} to {most}"),
    })
}

/// Refuses what Zenoh would read as more than an address, and plain text off loopback.
fn check_endpoint(endpoint: &str, insecure: bool) -> Result<()> {
    let refuse = |reason| {
        Err(Error::Endpoint {
            endpoint: endpoint.into(),
            reason,
        })
    };
    // `?` and `#` begin metadata and options in Zenoh's endpoints: they could undo what is set here.
    if endpoint.contains(['?', '#']) {
        return refuse("has options of its own");
    }
    let Some((protocol, address)) = endpoint.split_once('/') else {
        return refuse("has no protocol");
    };
    let port = address
        .rsplit_once(':')
        .map(|(_, port)| port.parse::<u16>());
    if !matches!(port, Some(Ok(_))) {
        return refuse("has no port");
    }
    match protocol {
        "tls" => Ok(()),
        "tcp" if insecure || is_loopback(address) => Ok(()),
        "tcp" => Err(Error::Insecure {
            endpoint: endpoint.into(),
        }),
        _ => refuse("is neither tcp/ nor tls/"),
    }
}

/// Whether every address of that name is one of loopback.
fn is_loopback(address: &str) -> bool {
    let Ok(addresses) = address.to_socket_addrs() else {
        return false;
    };
    let mut addresses = addresses.map(|address| address.ip()).peekable();
    addresses.peek().is_some() && addresses.all(|ip: IpAddr| ip.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_text_off_loopback_needs_the_word_insecure() {
        assert!(check_endpoint("tcp/127.0.0.1:7447", false).is_ok());
        assert!(check_endpoint("tcp/[::1]:7447", false).is_ok());
        for off in ["tcp/0.0.0.0:7447", "tcp/192.0.2.1:7447", "tcp/[::]:7447"] {
            assert!(
                matches!(check_endpoint(off, false), Err(Error::Insecure { .. })),
                "{off}"
            );
            assert!(check_endpoint(off, true).is_ok());
        }
        assert!(check_endpoint("tls/0.0.0.0:7447", false).is_ok());
    }

    #[test]
    fn an_endpoint_brings_no_options_and_no_other_protocol() {
        for wrong in [
            "tcp/127.0.0.1:1#so=1",
            "udp/127.0.0.1:1",
            "127.0.0.1:1",
            "tcp/127.0.0.1",
        ] {
            let error = check_endpoint(wrong, true).unwrap_err();
            assert!(matches!(error, Error::Endpoint { .. }), "{wrong}");
        }
    }

    #[test]
    fn options_out_of_range_are_refused() {
        let folder = warpipe_testkit::temporary_folder().unwrap();
        let mut options = Options::new(
            &Domain::at(folder.path().join("d")).unwrap(),
            &Device::host(),
        );
        assert!(matches!(
            options.check(),
            Err(Error::Option {
                option: "endpoints",
                ..
            })
        ));
        options.listen.push("tcp/127.0.0.1:0".into());
        options.check().unwrap();
        options.window = 1;
        assert!(matches!(
            options.check(),
            Err(Error::Option {
                option: "window",
                ..
            })
        ));
        options.window = 2;
        options.receive_bytes_max = (2 << 20) - 1;
        assert!(matches!(
            options.check(),
            Err(Error::Option {
                option: "receive_bytes_max",
                ..
            })
        ));
    }
}
