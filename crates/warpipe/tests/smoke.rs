use std::time::Duration;
use warpipe::*;
#[test]
fn one_process() {
    let dir = std::env::temp_dir().join(format!("wp-smoke-{}", std::process::id()));
    let domain = Domain::at(&dir).unwrap();
    let device = Device::host();
    let p = Publisher::builder("a/b").domain(&domain).device(&device).build().unwrap();
    let mut s = Subscriber::builder("a/b").domain(&domain).device(&device).build().unwrap();
    let stream = device.stream().unwrap();
    p.wait_for_subscribers(1, Duration::from_secs(2)).unwrap();
    for i in 0..1000u32 {
        p.send_bytes(&stream, &i.to_le_bytes()).unwrap();
        let x = s.receive(&stream).unwrap();
        assert_eq!(x.to_vec(Duration::from_secs(1)).unwrap(), i.to_le_bytes());
        x.finish(Duration::from_secs(1)).unwrap();
    }
    println!("{:?}", p.subscribers());
    drop(p);
    println!("{:?}", s.receive(&stream).unwrap_err());
    drop(s);
    std::fs::remove_dir(&dir).unwrap();
}
