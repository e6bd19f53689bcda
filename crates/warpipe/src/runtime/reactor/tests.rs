use super::*;

struct DropRecorder(Arc<Mutex<Vec<Option<String>>>>);

/// The kernel's name of this thread.
fn thread_name() -> Option<String> {
    let name = std::fs::read_to_string("/proc/thread-self/comm").ok()?;
    Some(name.trim_end().to_string())
}

impl Drop for DropRecorder {
    fn drop(&mut self) {
        self.0.lock().unwrap().push(thread_name());
    }
}

struct Stuck(mpsc::Receiver<()>);

impl Drop for Stuck {
    fn drop(&mut self) {
        let _ = self.0.recv();
    }
}

#[test]
fn the_caller_of_defer_drop_drops_nothing_while_the_reaper_is_held_up() {
    const COUNT: usize = 10_000;
    let reactor = Reactor::start(OVERDUE_AFTER).unwrap();
    let (go, wait) = mpsc::channel();
    let dropped = Arc::new(Mutex::new(Vec::new()));
    reactor.defer_drop(Box::new(Stuck(wait)));
    (0..COUNT).for_each(|_| reactor.defer_drop(Box::new(DropRecorder(dropped.clone()))));
    assert!(dropped.lock().unwrap().is_empty());
    drop(go);
    let start = Instant::now();
    while dropped.lock().unwrap().len() < COUNT {
        assert!(start.elapsed() < Duration::from_secs(10));
        std::thread::yield_now();
    }
    assert!(
        dropped
            .lock()
            .unwrap()
            .iter()
            .all(|name| name.as_deref() == Some("warpipe-reaper"))
    );
}

fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(10), "{what}");
        std::thread::yield_now();
    }
}

#[test]
fn a_fence_thread_that_is_held_up_holds_up_no_other_thread() {
    let reactor = Reactor::start(OVERDUE_AFTER).unwrap();
    let ((go, wait), (stopped_tx, stopped)) = (mpsc::channel::<()>(), mpsc::channel());
    reactor.drop_after(move || {
        stopped_tx.send(()).unwrap();
        let _ = wait.recv();
        DropReadiness::Ready
    });
    stopped.recv_timeout(Duration::from_secs(10)).unwrap();
    // The caller does not wait for it either.
    reactor.drop_after(|| true);
    assert_eq!(reactor.counts(), (2, 0));
    let (tx, rx) = mpsc::channel();
    reactor.run_on_control_thread(Box::new(move || tx.send(()).unwrap()));
    assert_eq!(rx.recv_timeout(Duration::from_secs(10)), Ok(()));
    drop(go);
    eventually("it goes on", || reactor.counts() == (0, 0));
}

#[test]
fn a_child_forked_while_another_thread_starts_the_reactor_starts_its_own() {
    let own = || {
        Reactor::running().is_none()
            && Reactor::of_process().is_ok()
            && Reactor::running().is_some()
    };
    crate::hostile::while_locked(&CURRENT, || crate::hostile::in_a_forked_child(own));
}

#[test]
fn a_drop_that_waits_for_a_late_device_is_counted_and_dropped_when_it_is_done() {
    let reactor = Reactor::start(Duration::ZERO).unwrap();
    let (readiness, (tx, rx)) = (
        Arc::new(Mutex::new(DropReadiness::Held)),
        mpsc::channel::<()>(),
    );
    let (found, looks) = (readiness.clone(), Arc::new(AtomicU64::new(0)));
    let counted = looks.clone();
    reactor.drop_after(move || {
        let _owned = &tx;
        counted.fetch_add(1, Ordering::Relaxed);
        *found.lock().unwrap()
    });
    // It has waited for longer than the limit, and no device is at fault.
    eventually("it is looked at with the ticks", || {
        looks.load(Ordering::Relaxed) > 1
    });
    assert_eq!(reactor.counts(), (1, 0));
    *readiness.lock().unwrap() = DropReadiness::Busy;
    eventually("it is counted", || reactor.counts() == (1, 1));
    assert_eq!(rx.try_recv(), Err(mpsc::TryRecvError::Empty), "it is kept");
    *readiness.lock().unwrap() = DropReadiness::Ready;
    assert_eq!(
        rx.recv_timeout(Duration::from_secs(10)),
        Err(mpsc::RecvTimeoutError::Disconnected),
        "dropped"
    );
    eventually("it is counted no more", || reactor.counts() == (0, 0));
}

struct Target(#[expect(dead_code)] DropRecorder);

impl EventSource for Target {
    fn on_ready(&self, _tag: u64) -> Next {
        Next::Stop
    }
}

#[test]
fn of_two_owners_that_give_up_at_once_the_thread_of_the_library_never_drops() {
    let reactor = Reactor::start(OVERDUE_AFTER).unwrap();
    let dropped = Arc::new(Mutex::new(Vec::new()));
    let (tx, rx) = mpsc::channel::<(Arc<Target>, Arc<AtomicU64>)>();
    let user = std::thread::Builder::new()
        .name("user".into())
        .spawn(move || {
            for (target, step) in rx {
                step.store(1, Ordering::Release);
                warpipe_testkit::spin_until(|| step.load(Ordering::Acquire) == 2);
                drop(target);
            }
        });
    const COUNT: usize = 10_000;
    for round in 0..COUNT {
        let target = Arc::new(Target(DropRecorder(dropped.clone())));
        let step = Arc::new(AtomicU64::new(0));
        tx.send((target.clone(), step.clone())).unwrap();
        let target: Arc<dyn EventSource> = target;
        while step.load(Ordering::Acquire) != 1 {
            std::thread::yield_now();
        }
        step.store(2, Ordering::Release);
        (0..round % 16).for_each(|_| std::hint::spin_loop());
        reactor.drop_on_reaper(target);
    }
    drop(tx);
    user.unwrap().join().unwrap();
    eventually("all are dropped", || dropped.lock().unwrap().len() == COUNT);
    let own = thread_name();
    let wrong = dropped
        .lock()
        .unwrap()
        .iter()
        .filter(|by| **by == own)
        .count();
    assert_eq!(
        wrong, 0,
        "dropped by the thread that was to leave it to the reaper"
    );
}

#[test]
fn a_deferral_that_panicked_is_kept_and_not_called_again() {
    let reactor = Reactor::start(OVERDUE_AFTER).unwrap();
    let (calls, rounds) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (counted, (tx, rx)) = (calls.clone(), mpsc::channel::<()>());
    reactor.drop_after(move || -> bool {
        let _owned = &tx;
        counted.fetch_add(1, Ordering::Relaxed);
        panic!("on purpose");
    });
    eventually("it is called", || calls.load(Ordering::Relaxed) > 0);
    let counted = rounds.clone();
    reactor.drop_after(move || counted.fetch_add(1, Ordering::Relaxed) == 3);
    eventually("others are polled", || rounds.load(Ordering::Relaxed) == 4);
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    assert_eq!(rx.try_recv(), Err(mpsc::TryRecvError::Empty), "it is kept");
}
