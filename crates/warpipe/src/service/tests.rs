//! A server whose links to living clients fail, or come to nothing.

use std::path::PathBuf;
use std::time::Duration;

use super::{Client, Server, clients_of};
use crate::channel::{Publisher, Subscriber};
use crate::device::Device;
use crate::domain::Domain;
use crate::error::Error;
use crate::stream::Stream;

const SOON: Duration = Duration::from_secs(10);

struct Place {
    folder: PathBuf,
    domain: Domain,
    device: Device,
    stream: Stream,
}

impl Place {
    fn new(name: &str) -> Place {
        let folder = std::env::temp_dir().join(format!("warpipe-service-{name}-{}", std::process::id()));
        let device = Device::host();
        Place { domain: Domain::at(&folder).unwrap(), stream: device.stream().unwrap(), folder, device }
    }

    fn server(&self) -> Server {
        Server::builder("upper").domain(&self.domain).device(&self.device).build().unwrap()
    }

    fn client(&self) -> Client {
        Client::builder("upper").domain(&self.domain).device(&self.device).build().unwrap()
    }

    fn serves(&self, server: &mut Server, client: &Client) {
        let mut input = client.loan(&crate::Layout::bytes_only(8).unwrap()).unwrap();
        input.write(&self.stream, b"question").unwrap();
        let pending = client.request(input, &self.stream, 2 * SOON).unwrap();
        server.accept(&self.stream, SOON).unwrap().reply(&self.stream).unwrap();
        drop(pending.wait(&self.stream).unwrap());
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

#[test]
fn a_living_client_whose_link_failed_is_attached_to_again() {
    let place = Place::new("again");
    let (mut server, client) = (place.server(), place.client());
    place.serves(&mut server, &client);
    client.queue.turn_all_away("for a test");
    // Its end is seen, and nothing else has come.
    while server.clients() > 0 {
        let idle = server.accept(&place.stream, Duration::from_millis(1));
        assert!(matches!(idle, Err(Error::Timeout { .. })), "{idle:?}");
    }
    place.serves(&mut server, &client);
}

#[test]
fn a_client_that_has_no_room_is_not_asked_again_at_once() {
    let place = Place::new("full");
    let name = format!("{}00000001", clients_of("upper"));
    let full = Publisher::builder(&name).domain(&place.domain).device(&place.device).subscribers_max(1);
    let full = full.build().unwrap();
    let other = Subscriber::builder(&name).domain(&place.domain).device(&place.device).build().unwrap();
    let mut server = place.server();
    let accept = |server: &mut Server| server.accept(&place.stream, Duration::from_millis(1)).map(drop);
    while server.refused() == 0 {
        assert!(matches!(accept(&mut server), Err(Error::Timeout { .. })));
    }
    // Its own attempt has put something new into the directory.
    assert!(matches!(accept(&mut server), Err(Error::Timeout { .. })));
    assert_eq!(server.under_way(), 0, "it tries as often as it can");
    drop((other, full));
}
