//! What other threads of a publisher can do while one thread's send is held up by the driver.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::testing::{Holding, Wrapped};
use crate::device::Device;
use crate::domain::Domain;
use crate::error::Error;
use crate::stream::Stream;
use crate::tensor::Layout;
use crate::{Publisher, Subscriber};

const LONG: Duration = Duration::from_secs(60);

/// A publisher on a device whose calls can be held up.
struct Stage {
    folder: PathBuf,
    domain: Domain,
    wrapped: Arc<Wrapped<Holding>>,
    device: Device,
}

impl Stage {
    fn new(title: &str) -> Stage {
        let folder = std::env::temp_dir().join(format!("warpipe-core-{title}-{}", std::process::id()));
        let wrapped = Wrapped::new(Device::host().backend().clone(), Holding::default());
        let device = Device::from_backend(wrapped.clone());
        Stage { domain: Domain::at(&folder).unwrap(), folder, wrapped, device }
    }

    fn hook(&self) -> &Holding {
        self.wrapped.hook()
    }

    fn publisher(&self) -> Publisher {
        Publisher::builder("a").domain(&self.domain).device(&self.device).build().unwrap()
    }

    /// One whose own calls nothing holds up.
    fn subscriber(&self) -> Subscriber {
        Subscriber::builder("a").domain(&self.domain).device(&Device::host()).build().unwrap()
    }

    fn stream(&self) -> Stream {
        self.device.stream().unwrap()
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

fn layout() -> Layout {
    Layout::bytes_only(8).unwrap()
}

#[test]
fn a_send_waits_for_another_threads_as_long_as_it_is_told_to_and_gives_the_loan_back_unharmed() {
    let stage = Stage::new("turn");
    let (publisher, mut subscriber) = (stage.publisher(), stage.subscriber());
    let (first, second, receiving) = (stage.stream(), stage.stream(), Device::host().stream().unwrap());
    let mut other = publisher.loan(&layout()).unwrap();
    other.write(&second, &[2; 8]).unwrap();
    stage.hook().hold("batch");
    let other = std::thread::scope(|scope| {
        let sending = scope.spawn(|| publisher.send_bytes(&first, &[1; 8]));
        stage.hook().wait_for(1);
        let timeouts = [Duration::ZERO, Duration::from_millis(20)];
        let other = timeouts.into_iter().fold(other, |other, timeout| {
            let room = other.wait_for_room(timeout).unwrap_err();
            assert!(matches!(room, Error::Timeout { .. }), "{room}");
            let unsent = other.send_timeout(&second, timeout).unwrap_err();
            assert!(matches!(unsent.error, Error::Timeout { waited, .. } if waited == timeout), "{unsent}");
            *unsent.sample.unwrap()
        });
        stage.hook().let_go();
        other.wait_for_room(LONG).unwrap();
        assert_eq!(sending.join().unwrap().unwrap(), 1);
        other
    });
    assert_eq!(other.send_timeout(&second, LONG).unwrap(), 2);
    for sequence in [1, 2] {
        let sample = subscriber.receive(&receiving).unwrap();
        assert_eq!((sample.sequence(), sample.to_vec(LONG).unwrap()), (sequence, vec![sequence as u8; 8]));
        sample.finish(LONG).unwrap();
    }
}
