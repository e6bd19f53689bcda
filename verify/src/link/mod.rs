//! Stands for the link: the ring and its entries are the library's.

#[path = "../../../crates/warpipe/src/link/entry.rs"]
pub(crate) mod entry;
#[path = "../../../crates/warpipe/src/link/ring.rs"]
pub(crate) mod ring;
pub(crate) mod segment;

pub(crate) mod proof {
    use crate::stream::Stream;

    #[derive(Debug, Default)]
    pub(crate) struct Streams;

    impl Streams {
        pub(crate) fn note(&self, _: &Stream) {}
    }
}

pub(crate) mod wake {
    /// Whoever sleeps on it looks at other words.
    #[derive(Debug, Default)]
    pub(crate) struct Bell;

    impl Bell {
        pub(crate) fn ring(&self) {}
    }
}

pub(crate) mod message {
    pub(crate) fn text(message: impl ToString) -> String {
        message.to_string()
    }
}

pub(crate) mod pulse {
    use std::time::Duration;

    /// The clock of a queue's leases is the model's.
    #[derive(Debug, Default)]
    pub(crate) struct Uptime;

    impl Uptime {
        pub(crate) fn ran(&self) -> Duration {
            crate::queue::states::now()
        }
    }
}

pub(crate) mod watcher {
    pub(crate) const TICK: std::time::Duration = std::time::Duration::from_millis(100);

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) enum Next {
        Stop,
    }

    pub(crate) trait Watched: Send + Sync {
        fn on_ready(&self, tag: u64) -> Next;
    }

    #[derive(Debug)]
    pub(crate) struct Watcher;

    impl Watcher {
        pub(crate) fn bury(&self, remains: Box<dyn Send>) {
            drop(remains);
        }
    }
}

pub(crate) mod peer {
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::SeqCst;

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) enum Sign {
        Proven,
    }

    #[derive(Debug, Default)]
    pub(crate) struct Process(AtomicBool);

    impl Process {
        pub(crate) fn prove(&self) {
            self.0.store(true, SeqCst);
        }

        pub(crate) fn shows(&self, _: Sign) -> bool {
            self.0.load(SeqCst)
        }
    }
}
