//! The same names on another machine: a bridge carries the samples of publishers from one
//! [`Domain`](warpipe::Domain) to another over [Zenoh](https://zenoh.io).
//!
//! The exporter is an ordinary subscriber of the name, and the importer an ordinary publisher of it
//! in the other domain; neither end's programs change. Order and the publisher's numbers are kept,
//! only data that is proven complete leaves the machine, and a gap in the numbers counts what is
//! missing. `docs/design/bridge.md` draws the messages and says what each failure does.
//!
//! ```no_run
//! use warpipe::{Device, Domain};
//! use warpipe_bridge::{Bridge, Options};
//!
//! let mut options = Options::new(&Domain::from_environment()?, &Device::host());
//! options.listen.push("tcp/127.0.0.1:7447".into());
//! options.export.push("camera/**".into());
//! let bridge = Bridge::open(options)?; // until it is dropped
//! # Ok::<(), warpipe_bridge::Error>(())
//! ```
#![deny(missing_docs)]

mod bridge;
mod control;
mod error;
mod exporter;
#[cfg(test)]
mod hostile;
mod importer;
mod lane;
mod message;
mod options;
mod pattern;
mod queue_exporter;
mod queue_importer;
mod session;
mod status;

pub use bridge::Bridge;
pub use error::{Error, Result};
pub use options::{Options, Policy, Tls};
pub use status::{Direction, Notice, RemoteName, STATUS_PREFIX, Status};
