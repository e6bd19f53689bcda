//! More threads at once than a table of objects with a part for each would have room for.

use std::sync::{Arc, Barrier};
use std::thread;

const THREADS: usize = 4_300;
const STACK_BYTES: usize = 128 * 1024;

/// Opens a device, waits for the others, and closes it.
fn open_and_close(others: &Barrier) {
    let device = get!(warpipe_device_open(c"host".as_ptr()));
    others.wait();
    ok!(warpipe_close(device));
}

#[test]
fn thousands_of_threads_have_objects_at_once() {
    let others = Arc::new(Barrier::new(THREADS));
    let threads = (0..THREADS).map(|_| {
        let others = others.clone();
        let thread = thread::Builder::new().stack_size(STACK_BYTES);
        thread.spawn(move || open_and_close(&others))
    });
    let threads: Vec<_> = threads.collect();
    for thread in threads {
        thread.expect("a thread").join().expect("no call failed");
    }
}
