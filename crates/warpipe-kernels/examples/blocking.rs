use std::os::fd::AsFd;
use std::time::{Duration, Instant};
use warpipe::backend::*;
use warpipe::*;
fn main() {
    let d = Device::cuda(0).unwrap();
    let b = d.backend().clone();
    let st = d.stream().unwrap();
    let layout = std::alloc::Layout::from_size_align(65536, 65536).unwrap();
    let mem = unsafe { std::alloc::alloc_zeroed(layout) };
    let mem2 = unsafe { std::alloc::alloc_zeroed(layout) };
    let mem3 = unsafe { std::alloc::alloc_zeroed(layout) };
    let dp = unsafe { b.register(mem, 65536).unwrap() };
    unsafe { b.register(mem3, 65536).unwrap() };
    let g = b.granularity();
    let spare = b.allocate(g).unwrap();
    let exported = b.allocate(g).unwrap();
    let fd = unsafe { b.export(&exported).unwrap() };
    let word = unsafe { &*(mem as *const TimelineWord) };
    let mut turn = 0u64;
    let mut stuck = |name: &str, f: &mut dyn FnMut()| {
        turn += 1;
        let v = turn;
        unsafe { b.batch(st.raw(), &[StreamOp::Wait { word: dp, value: v }]).unwrap() };
        let w: &'static TimelineWord = unsafe { &*(mem as *const TimelineWord) };
        let h = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            w.store(v);
        });
        let t = Instant::now();
        f();
        let e = t.elapsed();
        h.join().unwrap();
        st.synchronize(Duration::from_secs(5)).unwrap();
        println!(
            "behind a stuck stream, {name}: {:.3} ms{}",
            e.as_secs_f64() * 1e3,
            if e > Duration::from_millis(200) { "  BLOCKS" } else { "" }
        );
    };
    let _ = word;
    stuck("nothing", &mut || {});
    stuck("cuMemHostRegister", &mut || unsafe {
        b.register(mem2, 65536).unwrap();
    });
    stuck("cuMemHostUnregister", &mut || unsafe { b.unregister(mem3).unwrap() });
    stuck("allocate (cuMemCreate+map+access)", &mut || {
        b.allocate(g).unwrap();
    });
    stuck("import+map", &mut || {
        b.import(fd.as_fd(), g, Access::Read, d.info().id).unwrap();
    });
    stuck("export", &mut || unsafe {
        b.export(&exported).unwrap();
    });
    stuck("release (unmap+free)", &mut || unsafe { b.release(spare).unwrap() });
    stuck("create_stream", &mut || {
        std::mem::forget(d.stream().unwrap());
    });
    let mut s2 = Some(d.stream().unwrap());
    stuck("destroy other stream", &mut || {
        s2.take();
    });
    stuck("event create+record+query", &mut || unsafe {
        let e = b.create_event().unwrap();
        b.record_event(e, st.raw()).unwrap();
        b.query_event(e).unwrap();
        b.destroy_event(e).unwrap();
    });
    stuck("preload kernels (first load)", &mut || warpipe_kernels::preload(&d).unwrap());
    let s3 = d.stream().unwrap();
    stuck("launch on another stream", &mut || {
        unsafe { warpipe_kernels::touch(&s3, exported.ptr, 8).unwrap() };
        s3.synchronize(Duration::from_secs(5)).unwrap();
    });
    let mut buf = vec![1u8; 4096];
    stuck("download on another stream", &mut || unsafe { b.download(s3.raw(), &mut buf, exported.ptr).unwrap() });
    stuck("upload pageable on another stream", &mut || unsafe {
        b.upload(s3.raw(), exported.ptr, &buf.clone()).unwrap()
    });
    stuck("upload 4K pageable on the stuck stream", &mut || unsafe {
        b.upload(st.raw(), exported.ptr, &vec![2u8; 4096]).unwrap()
    });
    stuck("upload 8M pageable on the stuck stream", &mut || unsafe {
        b.upload(st.raw(), exported.ptr, &vec![2u8; 1 << 20]).unwrap()
    });
}
