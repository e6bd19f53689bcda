//! A hand-over through the C interface, compared with the same one through Rust.
//!
//! Publisher and subscriber are in this process and take turns in bursts, so that neither waits:
//! the difference is the interface's own work (its table of objects, streams by their raw handle,
//! checked structures). One message is a loan, a send, a receive, a look at the sample's
//! description, and a release.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::time::Instant;

use anyhow::ensure;
use warpipe::{DType, DeviceKind, Layout, Publisher, PublisherOptions, Stream, Subscriber};
use warpipe_c::warpipe_status::WARPIPE_OK;
use warpipe_c::{
    warpipe_device, warpipe_domain, warpipe_layout, warpipe_loan, warpipe_publisher,
    warpipe_publisher_options, warpipe_sample, warpipe_sample_info, warpipe_status,
    warpipe_subscriber, warpipe_subscriber_options,
};
use warpipe_testkit::figure::{Figure, Wanted, median};

use super::setup::{PATIENCE, Setup};

/// Messages between two looks at the stream: its queue must not fill up.
const BURST: usize = 16;

/// The budget of a hand-over beside Rust's.
const BESIDE_NS: f64 = 100.0;

pub fn run(setup: &Setup) -> anyhow::Result<Vec<Figure>> {
    let mut rust = Rust::open(setup)?;
    let mut c = C::open(setup)?;
    let bursts = setup.times(4000) / BURST + 1;
    let (mut through_c, mut through_rust) = (Vec::new(), Vec::new());
    for round in 0..=setup.rounds() {
        let (mut of_c, mut of_rust) = (Vec::new(), Vec::new());
        for _ in 0..bursts {
            of_rust.push(rust.burst()?);
            of_c.push(c.burst()?);
        }
        if round > 0 {
            through_c.push(median(&of_c));
            through_rust.push(median(&of_rust));
        }
    }
    let beside = median(&through_c) - median(&through_rust);
    Ok(vec![
        Figure::new("c", "CPU of a hand-over through C", "ns", &through_c)
            .beside(&through_rust)
            .wanted(Wanted::BesideFloorAtMost(BESIDE_NS))
            .note(format!(
                "beside Rust's, one process, loan to release: {beside:.0} ns"
            )),
    ])
}

/// Nanoseconds a message.
fn each(start: Instant) -> f64 {
    start.elapsed().as_nanos() as f64 / BURST as f64
}

struct Rust {
    stream: Stream,
    publisher: Publisher,
    subscriber: Subscriber,
    layout: Layout,
}

impl Rust {
    fn open(setup: &Setup) -> anyhow::Result<Rust> {
        let name = "bench/c/rust";
        let options = PublisherOptions {
            depth: 2 * BURST as u32,
            ..setup.domain.on(&setup.device)
        };
        let publisher = Publisher::new(name, options)?;
        let subscriber = Subscriber::open(
            name,
            setup.domain.on(&setup.device),
            std::time::Duration::ZERO,
        )?;
        publisher.wait_for_subscribers(1, PATIENCE)?;
        Ok(Rust {
            stream: setup.device.stream()?,
            publisher,
            subscriber,
            layout: Layout::contiguous(DType::F32, &[16, 64])?,
        })
    }

    fn burst(&mut self) -> anyhow::Result<f64> {
        let start = Instant::now();
        for _ in 0..BURST {
            self.publisher.loan(&self.layout)?.send(&self.stream)?;
        }
        let mut sum = 0u64;
        for _ in 0..BURST {
            let sample = self.subscriber.receive(&self.stream, PATIENCE)?;
            sum = sum.wrapping_add(sample.ptr() ^ sample.sequence());
            drop(sample.release()?);
        }
        std::hint::black_box(sum);
        let took = each(start);
        self.stream.synchronize(PATIENCE)?;
        Ok(took)
    }
}

/// The same by pointers, as a program in C has them.
struct C {
    device: *mut warpipe_device,
    domain: *mut warpipe_domain,
    stream: *mut c_void,
    publisher: *mut warpipe_publisher,
    subscriber: *mut warpipe_subscriber,
    layout: warpipe_layout,
}

fn check(status: warpipe_status) -> anyhow::Result<()> {
    ensure!(status == WARPIPE_OK, "{status:?}: {}", message());
    Ok(())
}

fn message() -> String {
    // SAFETY: a text that stays until this thread's next call that fails.
    let text = unsafe { std::ffi::CStr::from_ptr(warpipe_c::warpipe_error_message()) };
    text.to_string_lossy().into_owned()
}

impl C {
    fn open(setup: &Setup) -> anyhow::Result<C> {
        let info = setup.device.info();
        let name = match info.id.kind {
            DeviceKind::Cuda => format!("cuda:{}\0", info.ordinal),
            _ => "host\0".to_string(),
        };
        let path = format!("{}\0", setup.domain.path().display());
        let mut c = C {
            device: null_mut(),
            domain: null_mut(),
            stream: null_mut(),
            publisher: null_mut(),
            subscriber: null_mut(),
            layout: zeroed(),
        };
        let endpoint = c"bench/c/c".as_ptr();
        // SAFETY: each address is that of a live place of its type, each text ends with a zero, and
        // the options name objects that live.
        unsafe {
            check(warpipe_c::warpipe_device_open(
                name.as_ptr().cast(),
                &mut c.device,
            ))?;
            check(warpipe_c::warpipe_domain_open(
                path.as_ptr().cast(),
                &mut c.domain,
            ))?;
            check(warpipe_c::warpipe_stream_create(c.device, &mut c.stream))?;
            let publishing = warpipe_publisher_options {
                size: size_of::<warpipe_publisher_options>(),
                domain: c.domain,
                device: c.device,
                depth: 2 * BURST as u32,
                ..zeroed()
            };
            check(warpipe_c::warpipe_publisher_create(
                endpoint,
                &publishing,
                &mut c.publisher,
            ))?;
            let subscribing = warpipe_subscriber_options {
                size: size_of::<warpipe_subscriber_options>(),
                domain: c.domain,
                device: c.device,
                ..zeroed()
            };
            check(warpipe_c::warpipe_subscriber_open(
                endpoint,
                &subscribing,
                &mut c.subscriber,
            ))?;
            let shape = [16u64, 64];
            let float = warpipe_c::warpipe_dtype::WARPIPE_FLOAT32 as u32;
            check(warpipe_c::warpipe_layout_contiguous(
                float,
                shape.as_ptr(),
                2,
                &mut c.layout,
            ))?;
        }
        let limit = PATIENCE.as_nanos() as u64;
        check(warpipe_c::warpipe_publisher_wait_for_subscribers(
            c.publisher,
            1,
            limit,
        ))?;
        Ok(c)
    }

    fn burst(&mut self) -> anyhow::Result<f64> {
        let limit = PATIENCE.as_nanos() as u64;
        let start = Instant::now();
        let mut sum = 0u64;
        // SAFETY: each address is that of a live place of its type; the stream lives as long as the
        // endpoints.
        unsafe {
            for _ in 0..BURST {
                let mut loan: *mut warpipe_loan = null_mut();
                check(warpipe_c::warpipe_publisher_loan(
                    self.publisher,
                    &self.layout,
                    &mut loan,
                ))?;
                check(warpipe_c::warpipe_loan_send(
                    loan,
                    self.stream,
                    warpipe_c::WARPIPE_USUAL_TIMEOUT,
                    null_mut(),
                ))?;
            }
            for _ in 0..BURST {
                let mut sample: *mut warpipe_sample = null_mut();
                check(warpipe_c::warpipe_subscriber_receive(
                    self.subscriber,
                    self.stream,
                    limit,
                    &mut sample,
                ))?;
                let mut info: warpipe_sample_info = zeroed();
                check(warpipe_c::warpipe_sample_get_info(sample, &mut info))?;
                sum = sum.wrapping_add(info.data ^ info.sequence);
                check(warpipe_c::warpipe_sample_release(sample, null_mut()))?;
            }
        }
        std::hint::black_box(sum);
        let took = each(start);
        // SAFETY: a stream of the device.
        check(unsafe { warpipe_c::warpipe_stream_synchronize(self.device, self.stream, limit) })?;
        Ok(took)
    }
}

impl Drop for C {
    fn drop(&mut self) {
        // Errors have no reader here.
        let _ = warpipe_c::warpipe_close(self.subscriber.cast());
        let _ = warpipe_c::warpipe_close(self.publisher.cast());
        let _ = warpipe_c::warpipe_stream_destroy(self.device, self.stream);
        let _ = warpipe_c::warpipe_close(self.device.cast());
        let _ = warpipe_c::warpipe_close(self.domain.cast());
    }
}

/// A structure of numbers and pointers with all of them 0.
fn zeroed<T: Plain>() -> T {
    // SAFETY: `Plain` says that zeros are valid.
    unsafe { std::mem::zeroed() }
}

/// # Safety
/// Zero bytes are a valid value.
unsafe trait Plain: Copy {}
// SAFETY: numbers.
unsafe impl Plain for warpipe_layout {}
// SAFETY: numbers, pointers and a `bool`.
unsafe impl Plain for warpipe_sample_info {}
// SAFETY: numbers and pointers.
unsafe impl Plain for warpipe_publisher_options {}
// SAFETY: numbers and pointers.
unsafe impl Plain for warpipe_subscriber_options {}
