//! A wait for a publisher that Ctrl-C interrupts.

use std::time::{Duration, Instant};

use warpipe::{Device, Domain, Error, HandshakeFault, Subscriber};

use crate::interrupt::{Interrupt, LOOK};

/// Subscribes to `name` as soon as it is published, within `patience`; none when interrupted
/// before.
pub fn attach(
    name: &str,
    device: &Device,
    reconnect: bool,
    patience: Duration,
    interrupt: &Interrupt,
) -> warpipe::Result<Option<Subscriber>> {
    let domain = Domain::from_environment()?;
    let deadline = Instant::now() + patience;
    loop {
        let builder = Subscriber::builder(name)
            .domain(&domain)
            .device(device)
            .reconnect(reconnect);
        match builder.wait_for_publisher(Some(LOOK)).build() {
            Ok(subscriber) => return Ok(Some(subscriber)),
            Err(error) if is_passing(&error) && interrupt.came() => return Ok(None),
            Err(error) if is_passing(&error) && Instant::now() < deadline => {}
            Err(error) => return Err(error),
        }
    }
}

/// There is no publisher yet, or it is just closing.
fn is_passing(error: &Error) -> bool {
    use HandshakeFault::{Closed, Silent};
    matches!(
        error,
        Error::Timeout { .. }
            | Error::NotFound { .. }
            | Error::Handshake {
                fault: Closed | Silent(_),
                ..
            }
    )
}
