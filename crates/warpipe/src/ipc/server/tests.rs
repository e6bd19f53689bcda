use std::sync::mpsc::{Sender, channel};

use super::*;
use crate::ipc::ClientSession;
use crate::ipc::domain::{Domain, EndpointName};

/// While it admits a client, the client's connection is evicted as idle.
struct SlowHandler(Mutex<Sender<Disconnected>>);

impl RequestHandler for SlowHandler {
    fn on_connect(
        &self,
        server_core: &ServerCore,
        _: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        // As a tick does.
        server_core.lock().retain(|_, connection| {
            !matches!(connection.phase, ConnectionPhase::Handshaking { .. })
        });
        Ok(OutgoingReply::default())
    }

    fn on_request(
        &self,
        _: &ServerCore,
        _: &ClientInfo,
        _: &[u8],
    ) -> Result<OutgoingReply, Rejection> {
        Ok(OutgoingReply::default())
    }

    fn holds_anything(&self, _: &ClientInfo) -> bool {
        true
    }

    fn on_disconnect(&self, _: &ServerCore, _: &ClientInfo, disconnected: Disconnected) {
        let _ = self.0.lock().unwrap().send(disconnected);
    }
}

#[test]
fn a_handshake_does_not_time_out_because_this_process_stood_still() {
    let folder = std::env::temp_dir().join(format!("warpipe-server-frozen-{}", std::process::id()));
    let (domain, name) = (
        Domain::at(&folder).unwrap(),
        EndpointName::new("kept").unwrap(),
    );
    let at = Address {
        domain: &domain,
        name: &name,
        kind: Kind::Timeline,
    };
    let server = IpcServer::open(
        &at,
        AccessPolicy::default(),
        Arc::new(SlowHandler(Mutex::new(channel().0))),
    )
    .unwrap();
    let client = domain.connect(&name, Duration::ZERO).unwrap();
    let server_core = server.server_core();
    let mut backoff = crate::stream::Backoff::default();
    while server_core.lock().is_empty() {
        backoff.pause();
    }
    for connection in server_core.lock().values() {
        let ConnectionPhase::Handshaking { clock } = &connection.phase else {
            panic!("it has said nothing")
        };
        clock.freeze(100 * HANDSHAKE_TIMEOUT);
    }
    // The client stood still, too, and sends its `OpenSession` when both go on.
    server_core.on_tick(0);
    assert_eq!(server_core.lock().len(), 1);
    drop((client, server));
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn a_client_evicted_while_it_is_admitted_is_disconnected_and_not_forgotten() {
    let folder = std::env::temp_dir().join(format!("warpipe-server-mute-{}", std::process::id()));
    let (domain, name) = (
        Domain::at(&folder).unwrap(),
        EndpointName::new("kept").unwrap(),
    );
    let at = Address {
        domain: &domain,
        name: &name,
        kind: Kind::Timeline,
    };
    let (tx, rx) = channel();
    let server = IpcServer::open(
        &at,
        AccessPolicy::default(),
        Arc::new(SlowHandler(Mutex::new(tx))),
    )
    .unwrap();
    let session = ClientSession::attach(&at, None, &[], Duration::ZERO);
    assert!(session.is_err(), "its session is over before it began");
    assert_eq!(
        rx.recv_timeout(Duration::from_secs(10)),
        Ok(Disconnected::Closed)
    );
    drop(server);
    let _ = std::fs::remove_dir_all(folder);
}
