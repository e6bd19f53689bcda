//! Stand-in for messages between processes, and for the detection of their deaths.

pub(crate) mod message {
    pub(crate) fn text(message: impl ToString) -> String {
        message.to_string()
    }
}

pub(crate) mod limits {
    #[derive(Debug)]
    pub(crate) struct QuotaPermit;
}

pub(crate) mod peer {
    use std::sync::atomic::AtomicBool;
    use std::sync::atomic::Ordering::SeqCst;

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) enum DeathEvidence {
        Proven,
    }

    #[derive(Debug, Default)]
    pub(crate) struct Process(AtomicBool);

    impl Process {
        pub(crate) fn prove(&self) {
            self.0.store(true, SeqCst);
        }

        pub(crate) fn shows(&self, _: DeathEvidence) -> bool {
            self.0.load(SeqCst)
        }
    }
}
