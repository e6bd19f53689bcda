//! The contents of tensors: a pattern that one kernel writes and another checks, on the device, in
//! any process. **This module is marked for unsafe**: it launches kernels on addresses.
//!
//! A sample's metadata describes its words ([`PayloadMark`]), so that every receiver can check it
//! alone.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use warpipe::{
    DType, Device, DevicePtr, Layout, Lease, Loan, Publisher, Sample, SampleMut, SlotHold, Stream,
};
use warpipe_kernels as kernels;

use crate::PATIENCE;

/// The words of a sample: `count` words of the pattern of `seed`, from the slot's first byte on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PayloadMark {
    /// The pattern's seed.
    pub seed: u64,
    /// How many words.
    pub count: u64,
    /// Where one more word lies, in bytes from the slot's first, that is the first word of the next
    /// seed's pattern; 0 for none. So the far end of a tensor is checked that is too large to be
    /// filled.
    pub tail: u64,
}

impl PayloadMark {
    /// The mark's length as metadata, in bytes.
    pub const BYTES: usize = 24;

    /// The mark as metadata.
    pub fn to_bytes(self) -> [u8; PayloadMark::BYTES] {
        let mut bytes = [0; PayloadMark::BYTES];
        bytes[..8].copy_from_slice(&self.seed.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.count.to_le_bytes());
        bytes[16..].copy_from_slice(&self.tail.to_le_bytes());
        bytes
    }

    /// The mark at the beginning of `metadata`.
    pub fn of(metadata: &[u8]) -> Option<PayloadMark> {
        let word = |at: usize| {
            Some(u64::from_le_bytes(
                metadata.get(at..at + 8)?.try_into().ok()?,
            ))
        };
        Some(PayloadMark {
            seed: word(0)?,
            count: word(8)?,
            tail: word(16)?,
        })
    }
}

/// A sample to be sent.
#[derive(Debug, Clone, Copy)]
pub struct Payload {
    /// Its words and what they are.
    pub mark: PayloadMark,
    /// How long its kernel waits before it writes them.
    pub slow: Duration,
}

impl Payload {
    /// `count` words of the pattern of `seed`, written at once.
    pub fn of(count: u64, seed: u64) -> Payload {
        Payload {
            mark: PayloadMark {
                seed,
                count,
                tail: 0,
            },
            slow: Duration::ZERO,
        }
    }

    /// The same, written late.
    pub fn slow(self, slow: Duration) -> Payload {
        Payload { slow, ..self }
    }

    /// Loans a slot, enqueues the kernel that fills it and marks the sample.
    ///
    /// # Errors
    /// Those of [`Publisher::loan`].
    pub fn loan(self, publisher: &Publisher, stream: &Stream) -> warpipe::Result<SampleMut> {
        let mut sample = publisher.loan(&Layout::contiguous(DType::U64, &[self.mark.count])?)?;
        self.fill(&mut sample, stream)?;
        Ok(sample)
    }

    /// Enqueues the kernel that fills a loan, and marks it.
    ///
    /// # Errors
    /// Those of a launch.
    ///
    /// # Panics
    /// If the loan is too short.
    pub fn fill(self, sample: &mut SampleMut, stream: &Stream) -> warpipe::Result<()> {
        let PayloadMark { seed, count, tail } = self.mark;
        let bytes = sample.layout().bytes();
        assert!(
            count * 8 <= bytes && (tail == 0 || tail + 8 <= bytes),
            "a case fills no more than it loaned"
        );
        sample.set_metadata(&self.mark.to_bytes())?;
        // SAFETY: the slot is this loan's alone and as long as both need (checked above); slots are
        // aligned, and the engine keeps them until the stream has passed these kernels.
        unsafe {
            if count > 0 {
                fill_words(stream, sample.slot_ptr(), count, seed, self.slow)?;
            }
            if tail > 0 {
                fill_words(stream, sample.slot_ptr() + tail, 1, seed + 1, self.slow)?;
            }
        }
        Ok(())
    }

    /// Loans, fills and sends. Returns the sequence number.
    ///
    /// # Errors
    /// Those of [`Publisher::loan`] and [`SampleMut::send`].
    pub fn send(self, publisher: &Publisher, stream: &Stream) -> warpipe::Result<u64> {
        Ok(self.loan(publisher, stream)?.send(stream)?)
    }
}

/// The input of a job: `count` words of the pattern of `seed`, written after `slow` by a kernel.
///
/// # Errors
/// Those of a loan or a launch.
pub fn fill_input(
    mut loan: Loan,
    seed: u64,
    slow: Duration,
    stream: &Stream,
) -> warpipe::Result<Loan> {
    let count = loan.layout().bytes() / 8;
    loan.set_metadata(&seed.to_le_bytes())?;
    // SAFETY: the slot is this loan's alone and that long; the engine keeps it until the stream has
    // passed the kernel.
    unsafe { fill_words(stream, loan.slot_ptr(), count, seed, slow)? };
    Ok(loan)
}

/// The layout of a job's input of `count` words.
///
/// # Errors
/// More words than there are addresses.
pub fn input_layout(count: u64) -> warpipe::Result<Layout> {
    Layout::contiguous(DType::U64, &[count])
}

/// The work of every job: the checksum of its input's words, by a kernel that takes at least
/// `slow`.
///
/// # Errors
/// Those of a loan or a launch.
pub fn work(lease: &Lease, slow: Duration) -> warpipe::Result<Loan> {
    let stream = lease.stream();
    let mut output = lease.output(&Layout::contiguous(DType::U64, &[1])?)?;
    output.set_metadata(lease.metadata())?;
    if !slow.is_zero() {
        kernels::spin(stream, slow)?;
    }
    output.write(stream, &[0; 8])?;
    // SAFETY: the input is that long and lent until it is released behind this kernel, as is the
    // output, which is one word and this lease's alone.
    unsafe {
        kernels::checksum(
            stream,
            lease.slot_ptr(),
            lease.layout().bytes() / 8,
            output.slot_ptr(),
        )?
    };
    Ok(output)
}

/// The result of [`work`] on [`fill_input`].
pub fn result_of(count: u64, seed: u64) -> Vec<u8> {
    let words: Vec<u64> = (0..count)
        .map(|index| kernels::pattern(seed, index))
        .collect();
    kernels::checksum_of(&words).to_le_bytes().to_vec()
}

/// Enqueues `fill`, or `slow_fill` where it shall be late.
///
/// # Safety
/// `words` names `count` words that are writable, and written by nothing else, until the kernel is
/// done.
pub unsafe fn fill_words(
    stream: &Stream,
    words: DevicePtr,
    count: u64,
    seed: u64,
    slow: Duration,
) -> warpipe::Result<()> {
    // SAFETY: the caller's promise.
    unsafe {
        if slow.is_zero() {
            kernels::fill(stream, words, count, seed)
        } else {
            kernels::slow_fill(stream, words, count, seed, slow)
        }
    }
}

/// Counters in registered host memory, into which `check` kernels add the wrong words they see.
#[derive(Debug)]
pub struct ErrorCounters {
    device: Device,
    page: *mut u8,
    address: DevicePtr,
    next: usize,
}

// SAFETY: the page is written by device work and read by `wrong_words`, both atomically, from any
// thread.
unsafe impl Send for ErrorCounters {}

/// A check that was enqueued.
#[derive(Debug, Clone, Copy)]
#[must_use = "what a check found is asked of the tally"]
pub struct Check(usize);

impl ErrorCounters {
    const BYTES: usize = 64 << 10;
    const COUNTERS: usize = ErrorCounters::BYTES / 8;
    const PAGE: std::alloc::Layout =
        match std::alloc::Layout::from_size_align(ErrorCounters::BYTES, 4096) {
            Ok(layout) => layout,
            Err(_) => panic!("64 KiB aligned to a page is a layout"),
        };

    /// Counters at zero. At most 8192 checks may be on their way at once.
    ///
    /// # Errors
    /// Those of registering the memory.
    pub fn new(device: &Device) -> warpipe::Result<ErrorCounters> {
        // SAFETY: the layout is not empty.
        let page = unsafe { std::alloc::alloc_zeroed(ErrorCounters::PAGE) };
        assert!(!page.is_null(), "64 KiB of memory");
        // SAFETY: page-aligned memory that is freed only after `unregister` (see `Drop`).
        match unsafe { device.backend().register(page, ErrorCounters::BYTES) } {
            Ok(address) => Ok(ErrorCounters {
                device: device.clone(),
                page,
                address,
                next: 0,
            }),
            Err(error) => {
                // SAFETY: allocated above with this layout.
                unsafe { std::alloc::dealloc(page, ErrorCounters::PAGE) };
                Err(error)
            }
        }
    }

    /// The device address of the counters: registered host memory.
    pub fn address(&self) -> DevicePtr {
        self.address
    }

    fn counter(&self, index: usize) -> &std::sync::atomic::AtomicU64 {
        // SAFETY: the index is below COUNTERS, the memory is zeroed, aligned and lives as long as
        // self.
        unsafe { &*self.page.cast::<std::sync::atomic::AtomicU64>().add(index) }
    }

    /// Enqueues a check of `count` words at `words` against the pattern of `seed`.
    ///
    /// # Safety
    /// `words` names `count` words that stay mapped until the kernel is done.
    ///
    /// # Errors
    /// Those of a launch.
    pub unsafe fn check(
        &mut self,
        stream: &Stream,
        words: DevicePtr,
        count: u64,
        seed: u64,
    ) -> warpipe::Result<Check> {
        let index = self.next % ErrorCounters::COUNTERS;
        self.next += 1;
        self.counter(index)
            .store(0, std::sync::atomic::Ordering::Release);
        if count > 0 {
            let errors = self.address + 8 * index as u64;
            // SAFETY: the words are the caller's promise; the counter is ours and only added to.
            unsafe { kernels::check(stream, words, count, seed, errors)? };
        }
        Ok(Check(index))
    }

    /// Enqueues the check of a sample by its [`PayloadMark`], behind the wait for its data. A
    /// sample without a mark has none.
    ///
    /// # Errors
    /// A mark that claims more than the tensor has, or those of a launch.
    pub fn check_sample(&mut self, sample: &Sample) -> Result<Option<Check>> {
        self.check_sample_on(sample, &sample.stream().clone())
    }

    /// [`check_sample`](Self::check_sample) on another stream, which the sample is to be released
    /// behind.
    ///
    /// # Errors
    /// As there.
    pub fn check_sample_on(&mut self, sample: &Sample, stream: &Stream) -> Result<Option<Check>> {
        let Some(PayloadMark { seed, count, tail }) = PayloadMark::of(sample.metadata()) else {
            return Ok(None);
        };
        let end = count
            .saturating_mul(8)
            .max(if tail == 0 { 0 } else { tail.saturating_add(8) });
        ensure!(
            end <= sample.layout().bytes(),
            "a mark of more words than the tensor has"
        );
        // SAFETY: the words lie in the sample's slot, which stays mapped until its release behind
        // these checks is done; the counter is ours and only added to.
        unsafe {
            let check = self.check(stream, sample.slot_ptr(), count, seed)?;
            if tail > 0 {
                kernels::check(
                    stream,
                    sample.slot_ptr() + tail,
                    1,
                    seed + 1,
                    self.address + 8 * check.0 as u64,
                )?;
            }
            Ok(Some(check))
        }
    }

    /// Enqueues a check of words that a hold keeps mapped until the stream has passed it.
    ///
    /// # Errors
    /// Those of a launch.
    pub fn check_words(
        &mut self,
        stream: &Stream,
        words: DevicePtr,
        count: u64,
        seed: u64,
        _hold: &SlotHold,
    ) -> warpipe::Result<Check> {
        // SAFETY: the hold keeps the slot's memory mapped, and the case keeps the hold until the
        // stream is synchronised.
        unsafe { self.check(stream, words, count, seed) }
    }

    /// How many wrong words a check saw. The stream must have passed it.
    pub fn wrong_words(&self, check: Check) -> u64 {
        self.counter(check.0)
            .load(std::sync::atomic::Ordering::Acquire)
    }

    /// Checks a sample, releases it, and says how many of its words were wrong.
    ///
    /// # Errors
    /// [`warpipe::Error::Lost`] and the others of [`Sample::finish`]; those of
    /// [`check_sample`](Self::check_sample).
    pub fn finish(&mut self, sample: Sample) -> Result<u64> {
        let stream = sample.stream().clone();
        let check = self
            .check_sample(&sample)?
            .context("the sample's metadata begins with a mark")?;
        sample.finish(PATIENCE)?;
        stream.synchronize(PATIENCE)?;
        Ok(self.wrong_words(check))
    }
}

impl Drop for ErrorCounters {
    fn drop(&mut self) {
        // SAFETY: registered in `new`, once; every user synchronises the streams of its checks
        // before it ends, and a case that failed ends its process instead of reusing the memory.
        unsafe {
            // Beside a stream that is blocked on purpose it stays, rather than wait for that
            // stream.
            let backend = self.device.backend();
            if backend.unregister(self.page).is_ok() {
                std::alloc::dealloc(self.page, ErrorCounters::PAGE);
            }
        }
    }
}
