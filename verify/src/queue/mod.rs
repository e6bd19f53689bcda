//! Stands for a queue: its books, its seats, how jobs are given out and what is written beside them are the library's.

pub(crate) mod desk;
#[path = "../../../crates/warpipe/src/queue/giving.rs"]
pub(crate) mod giving;
#[path = "../../../crates/warpipe/src/queue/ledger.rs"]
pub(crate) mod ledger;
#[path = "../../../crates/warpipe/src/queue/seat.rs"]
pub(crate) mod seat;
#[path = "../states/queue.rs"]
pub mod states;
#[path = "../../../crates/warpipe/src/queue/wire.rs"]
pub(crate) mod wire;

pub(crate) mod handle {
    #[derive(Debug)]
    pub(crate) struct JobResult(pub(crate) u64);

    impl JobResult {
        pub(crate) fn job(&self) -> u64 {
            self.0
        }
    }
}

pub(crate) mod loan {
    use super::desk::Sample;
    use super::wire::Ticket;

    #[derive(Debug)]
    pub(crate) struct Loan {
        pub(crate) sample: Sample,
        pub(crate) metadata: Vec<u8>,
        pub(crate) lease: Option<Ticket>,
    }

    impl Loan {
        pub(crate) fn new(sample: Sample) -> Loan {
            Loan { sample, metadata: Vec::new(), lease: None }
        }
    }
}

pub(crate) mod owner {
    use super::loan::Loan;
    use crate::error::Error;

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub(crate) enum Order {
        Submission,
        Completion,
    }

    #[derive(Debug)]
    pub(crate) struct SubmitError {
        pub(crate) error: Error,
        pub(crate) loan: Option<Box<Loan>>,
    }
}
