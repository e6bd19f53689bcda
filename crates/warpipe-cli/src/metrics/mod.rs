//! `warpipe metrics`: the counts of a domain for Prometheus.

mod format;
mod http;

use std::net::TcpListener;

use anyhow::anyhow;

use crate::announcer::Announcer;
use crate::args::MetricsArgs;
use crate::exit::{Exit, UsageError};
use crate::interrupt::Interrupt;
use crate::observe::Source;

/// Answers until it is interrupted.
pub fn run(args: &MetricsArgs) -> anyhow::Result<Exit> {
    let interrupt = Interrupt::install()?;
    if !args.listen.ip().is_loopback() && !args.any_address {
        return Err(UsageError(format!(
            "{} is no loopback address, and every machine that reaches it could read the names of \
             this domain; use 127.0.0.1 or [::1], or add --any-address",
            args.listen
        ))
        .into());
    }
    // It need not exist: a server may be started before the first endpoint.
    let mut source = Source::new(args.domain.or_environment()?)?;
    source.look()?;
    let listener = TcpListener::bind(args.listen).map_err(|error| {
        anyhow!(
            "{} cannot be listened on: {error}; choose another port with --listen (0 takes a free one)",
            args.listen
        )
    })?;
    let address = listener.local_addr()?;
    let announcer = Announcer::start(false)?;
    announcer.human(|| format!("http://{address}/metrics"));
    let page = || match source.look() {
        Ok(snapshot) => Ok(format::page(&snapshot)),
        Err(error) => Err(format!("{error:#}")),
    };
    http::serve(&listener, &interrupt, page)?;
    Ok(Exit::Interrupted)
}
