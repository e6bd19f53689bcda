//! Stand-in for a queue: its job table, its sessions, the delivery of jobs and their metadata are
//! the library's.

#[path = "../../../crates/warpipe/src/queue/delivery.rs"]
pub(crate) mod delivery;
pub(crate) mod dispatcher;
#[path = "../../../crates/warpipe/src/queue/job_table.rs"]
pub(crate) mod job_table;
#[path = "../states/queue.rs"]
pub mod states;
#[path = "../../../crates/warpipe/src/queue/wire.rs"]
pub(crate) mod wire;
#[path = "../../../crates/warpipe/src/queue/worker_leases.rs"]
pub(crate) mod worker_leases;
#[path = "../../../crates/warpipe/src/queue/worker_session.rs"]
pub(crate) mod worker_session;

pub(crate) mod job_result {
    #[derive(Debug)]
    pub(crate) struct JobResult(pub(crate) u64);

    impl JobResult {
        pub(crate) fn job(&self) -> u64 {
            self.0
        }
    }
}

pub(crate) mod loan {
    use super::dispatcher::Sample;
    use super::wire::DeliveryTag;

    #[derive(Debug)]
    pub(crate) struct Loan {
        pub(crate) sample: Sample,
        pub(crate) metadata: Vec<u8>,
        pub(crate) lease: Option<DeliveryTag>,
    }

    impl Loan {
        pub(crate) fn new(sample: Sample) -> Loan {
            Loan {
                sample,
                metadata: Vec::new(),
                lease: None,
            }
        }
    }
}

pub(crate) mod owner {
    use super::loan::Loan;
    use crate::error::Error;

    #[derive(Debug)]
    pub(crate) struct SubmitError {
        pub(crate) error: Error,
        pub(crate) loan: Option<Box<Loan>>,
    }
}
