//! A queue with a worker, and their calls.

use std::ffi::CStr;

use warpipe_c::*;

use super::{Fixture, LONG, bytes_layout, leased, none, zeroed};

/// A queue, and a worker that is attached to it.
pub struct Jobs {
    pub queue: *mut warpipe_queue,
    pub worker: *mut warpipe_worker,
    pub fixture: Fixture,
}

impl Jobs {
    pub fn new() -> Jobs {
        Jobs::with(options!(warpipe_queue_options {}))
    }

    pub fn with(options: warpipe_queue_options) -> Jobs {
        let fixture = Fixture::new();
        let queue = create_queue(&fixture, c"jobs", options);
        let options = options!(warpipe_worker_options {
            domain: fixture.domain,
            device: fixture.device,
        });
        let worker = get!(warpipe_worker_open(c"jobs".as_ptr(), &options));
        ok!(warpipe_queue_wait_for_workers(queue, 1, LONG));
        Jobs {
            queue,
            worker,
            fixture,
        }
    }

    pub fn submit(&self, bytes: &[u8]) -> *mut warpipe_job {
        let (loan, stream) = (self.loan(bytes), self.fixture.stream);
        get!(warpipe_queue_submit(
            self.queue,
            loan,
            stream,
            WARPIPE_USUAL_TIMEOUT
        ))
    }

    pub fn loan(&self, bytes: &[u8]) -> *mut warpipe_loan {
        let layout = bytes_layout(bytes.len() as u64);
        let loan = get!(warpipe_queue_loan(self.queue, &layout));
        self.fixture.write(loan, bytes);
        loan
    }

    /// The next lease and its input.
    pub fn lease_and_input(&self) -> (*mut warpipe_lease, *mut warpipe_sample) {
        let (worker, stream) = (self.worker, self.fixture.stream);
        leased(|lease, input| ok!(warpipe_worker_lease(worker, stream, LONG, lease, input)))
    }

    /// The next lease, with its input released, and the number of the attempt.
    pub fn attempt(&self) -> (u32, *mut warpipe_lease) {
        let (lease, input) = self.lease_and_input();
        let asked = info(input);
        ok!(warpipe_sample_release(input, none()));
        (asked.attempt, lease)
    }

    /// As [`Jobs::attempt`], without the number.
    pub fn lease(&self) -> *mut warpipe_lease {
        self.attempt().1
    }

    pub fn output(&self, lease: *const warpipe_lease, bytes: &[u8]) -> *mut warpipe_loan {
        let layout = bytes_layout(bytes.len() as u64);
        let loan = get!(warpipe_lease_output(lease, &layout));
        self.fixture.write(loan, bytes);
        loan
    }

    pub fn complete(&self, lease: *mut warpipe_lease) {
        ok!(warpipe_lease_complete(
            lease,
            none(),
            self.fixture.stream,
            WARPIPE_USUAL_TIMEOUT
        ));
    }

    pub fn wait(&self, job: *const warpipe_job) -> *mut warpipe_sample {
        get!(warpipe_job_wait(job, self.fixture.stream, LONG))
    }

    /// The number of the next result, which is released.
    pub fn next(&self) -> u64 {
        let mut sample = none();
        let mut job = 0;
        let stream = self.fixture.stream;
        ok!(warpipe_queue_next_result(
            self.queue,
            stream,
            LONG,
            &mut sample,
            &mut job
        ));
        ok!(warpipe_sample_finish(sample, LONG));
        job
    }

    pub fn state(&self) -> warpipe_queue_state {
        let mut state = zeroed();
        ok!(warpipe_queue_get_state(self.queue, &mut state, none(), 0));
        state
    }

    pub fn close(self) {
        ok!(warpipe_close(self.worker));
        ok!(warpipe_close(self.queue));
    }
}

pub fn create_queue(
    fixture: &Fixture,
    name: &CStr,
    options: warpipe_queue_options,
) -> *mut warpipe_queue {
    let options = warpipe_queue_options {
        domain: fixture.domain,
        device: fixture.device,
        ..options
    };
    get!(warpipe_queue_create(name.as_ptr(), &options))
}

pub fn info(sample: *const warpipe_sample) -> warpipe_sample_info {
    get!(warpipe_sample_get_info(sample))
}

pub fn own_pid() -> i32 {
    std::process::id() as i32
}
