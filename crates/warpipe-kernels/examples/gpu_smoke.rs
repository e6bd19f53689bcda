use std::io::Write;
use std::time::{Duration, Instant};
use warpipe::*;
const S: Duration = Duration::from_secs(10);
fn dev(i: u32) -> Device {
    if std::env::var("HOST").is_ok() { Device::host() } else { Device::cuda(i).unwrap() }
}
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let dir = std::env::var("WARPIPE_DOMAIN").unwrap_or_else(|_| {
        let d = format!("/tmp/wps-{}", std::process::id());
        unsafe { std::env::set_var("WARPIPE_DOMAIN", &d) };
        d
    });
    let domain = Domain::at(&dir).unwrap();
    match a.get(1).map(|s| s.as_str()) {
        Some("sub") => sub(&domain, &a[2]),
        Some("pong") => pong(&domain, a[2].parse().unwrap()),
        _ => parent(&domain, a.get(1).and_then(|x| x.parse().ok()).unwrap_or(0)),
    }
}
fn sub(domain: &Domain, mode: &str) {
    let d = dev(0);
    warpipe_kernels::preload(&d).unwrap();
    let st = d.stream().unwrap();
    let mut s = Subscriber::builder("data").domain(domain).device(&d).wait_for_publisher(Some(S)).build().unwrap();
    let raw = d.backend().allocate(d.backend().granularity()).unwrap();
    println!("attached");
    std::io::stdout().flush().unwrap();
    let mut n = 0u64;
    loop {
        match s.receive(&st) {
            Ok(x) => {
                let words = x.layout().bytes() / 8;
                unsafe { warpipe_kernels::check(&st, x.ptr(), words, x.sequence(), raw.ptr).unwrap() };
                n += 1;
                if mode == "hold" && n == 5 {
                    println!("holding");
                    std::io::stdout().flush().unwrap();
                    std::thread::sleep(Duration::from_secs(60));
                }
                match x.finish(S) {
                    Ok(()) => {}
                    Err(e) => println!("finish: {e}"),
                }
            }
            Err(e) => {
                println!("end after {n}: {e}");
                break;
            }
        }
    }
    st.synchronize(S).unwrap();
    let mut e = [0u8; 8];
    unsafe { d.backend().download(st.raw(), &mut e, raw.ptr).unwrap() };
    println!("wrong words: {} dropped {} held {}", u64::from_le_bytes(e), s.dropped(), d.backend().bytes_held());
}
fn pong(domain: &Domain, i: u32) {
    let d = dev(i);
    warpipe_kernels::preload(&d).unwrap();
    let st = d.stream().unwrap();
    let p = Publisher::builder("pong").domain(domain).device(&d).build().unwrap();
    let mut s =
        Subscriber::builder("ping").domain(domain).device(&d).wait_for_publisher(Some(S)).spin(S).build().unwrap();
    p.wait_for_subscribers(1, S).unwrap();
    let l = Layout::bytes_only(4096).unwrap();
    loop {
        let Ok(x) = s.receive(&st) else { break };
        let o = p.loan(&l).unwrap();
        unsafe { warpipe_kernels::touch(&st, o.ptr(), 8).unwrap() };
        o.send(&st).unwrap();
        drop(x);
    }
}
fn parent(domain: &Domain, second: u32) {
    let t = Instant::now();
    let d = dev(0);
    warpipe_kernels::preload(&d).unwrap();
    println!("device {d:?} opened in {:?}", t.elapsed());
    let st = d.stream().unwrap();
    let me = std::env::current_exe().unwrap();
    let spawn = |args: &[&str]| std::process::Command::new(&me).args(args).spawn().unwrap();
    {
        let p = Publisher::builder("data").domain(domain).device(&d).memory_limit(1 << 30).build().unwrap();
        let mut c1 = spawn(&["sub", "x"]);
        let mut c2 = spawn(&["sub", "hold"]);
        p.wait_for_subscribers(2, S).unwrap();
        let l = Layout::bytes_only(8 << 20).unwrap();
        let t = Instant::now();
        for i in 1..=200u64 {
            let o = p.loan(&l).unwrap();
            unsafe { warpipe_kernels::slow_fill(&st, o.ptr(), 1 << 20, i, Duration::from_micros(200)).unwrap() };
            if i == 15 {
                c2.kill().unwrap();
                println!("killed holder");
            }
            let seq = o.send(&st).unwrap();
            assert_eq!(seq, i);
        }
        println!("200 x 8MiB in {:?}; {:?}", t.elapsed(), p.subscribers());
        drop(p);
        println!("{:?}", c1.wait());
        let _ = c2.wait();
        println!("held {}", d.backend().bytes_held());
    }
    { // kill publisher's view: SampleLost
    }
    let p = Publisher::builder("ping").domain(domain).device(&d).build().unwrap();
    let mut c = spawn(&["pong", &second.to_string()]);
    let mut s =
        Subscriber::builder("pong").domain(domain).device(&d).wait_for_publisher(Some(S)).spin(S).build().unwrap();
    p.wait_for_subscribers(1, S).unwrap();
    let l = Layout::bytes_only(4096).unwrap();
    for round in 0..6 {
        let n = 1000;
        let t = Instant::now();
        let (mut cpu_send, mut cpu_launch, mut cpu_recv, mut cpu_fin) = (0u128, 0u128, 0u128, 0u128);
        for _ in 0..n {
            let o = p.loan(&l).unwrap();
            let t0 = Instant::now();
            unsafe { warpipe_kernels::touch(&st, o.ptr(), 8).unwrap() };
            let t1 = Instant::now();
            o.send(&st).unwrap();
            let t2 = Instant::now();
            let x = s.receive(&st).unwrap();
            let t3 = Instant::now();
            drop(x);
            cpu_launch += (t1 - t0).as_nanos();
            cpu_send += (t2 - t1).as_nanos();
            cpu_recv += (t3 - t2).as_nanos();
            cpu_fin += t3.elapsed().as_nanos();
        }
        st.synchronize(S).unwrap();
        println!(
            "round {round}: RT {:.2} us; cpu launch {} send {} recv {} fin {} ns",
            t.elapsed().as_secs_f64() * 1e6 / n as f64,
            cpu_launch / n,
            cpu_send / n,
            cpu_recv / n,
            cpu_fin / n
        );
    }
    drop(p);
    let _ = c.wait();
    // bare driver costs
    use warpipe::backend::StreamOp;
    let words = d.backend().allocate(d.backend().granularity()).unwrap();
    let fd = std::fs::File::create("/tmp/wps-x").unwrap();
    drop(fd);
    let layout = std::alloc::Layout::from_size_align(65536, 65536).unwrap();
    let mem = unsafe { std::alloc::alloc_zeroed(layout) };
    let dp = unsafe { d.backend().register(mem, 65536).unwrap() };
    for n in [1usize, 2, 4, 6, 7, 8, 16, 32, 64] {
        let mut best = (f64::MAX, f64::MAX);
        for r in 1..20u64 {
            let ops: Vec<StreamOp> = (0..n).map(|i| StreamOp::Signal { word: dp + 16 * i as u64, value: r }).collect();
            let t = Instant::now();
            for _ in 0..50 {
                unsafe { d.backend().batch(st.raw(), &ops).unwrap() }
            }
            let cpu = t.elapsed().as_secs_f64() * 1e6 / 50.0;
            st.synchronize(S).unwrap();
            let gpu = t.elapsed().as_secs_f64() * 1e6 / 50.0;
            best = (best.0.min(cpu), best.1.min(gpu));
        }
        println!("batch of {n} signals: cpu {:.2} us, total {:.2} us", best.0, best.1);
    }
    let t = Instant::now();
    for _ in 0..1000 {
        unsafe { warpipe_kernels::touch(&st, words.ptr, 8).unwrap() };
    }
    println!("launch {:?}", t.elapsed() / 1000);
    st.synchronize(S).unwrap();
    std::fs::remove_dir_all(domain.path()).ok();
}
