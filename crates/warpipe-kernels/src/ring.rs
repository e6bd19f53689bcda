//! Kernels on both sides of a [`KernelRing`](warpipe::KernelRing), and two that talk by bare words,
//! which rings are measured against.
//!
//! `ring.cu` is the source, `ring.ptx` what NVRTC 12.0 made of it. The word `index` of item `item`
//! is `(seed + item) * 0x9e3779b97f4a7c15 + index`. A launch stores the highest `WARPIPE_RING_...`
//! status of its waits in the word `statuses`, 0 at first.

mod host;

use std::ffi::CStr;

use warpipe::{DevicePtr, Kernel, Result, Stream};

use crate::BLOCK;

const TEXT: &str = concat!(include_str!("ring.ptx"), "\0");

/// A static, so that it has one address.
static MODULE: &CStr = match CStr::from_bytes_with_nul(TEXT.as_bytes()) {
    Ok(text) => text,
    Err(_) => panic!("ring.ptx holds a NUL byte; run `cargo xtask ptx`"),
};

static SEND: Kernel = Kernel::new(c"ring_send", MODULE, host::send);
static RECEIVE: Kernel = Kernel::new(c"ring_receive", MODULE, host::receive);
static PING: Kernel = Kernel::new(c"ring_ping", MODULE, host::ping);
static ECHO: Kernel = Kernel::new(c"ring_echo", MODULE, host::echo);
static DRAIN: Kernel = Kernel::new(c"ring_drain", MODULE, host::drain);
static BARE_DRAIN: Kernel = Kernel::new(c"bare_drain", MODULE, host::bare_drain);
static BARE_PING: Kernel = Kernel::new(c"bare_ping", MODULE, host::bare_ping);
static BARE_ECHO: Kernel = Kernel::new(c"bare_echo", MODULE, host::bare_echo);

/// Every kernel of this module.
pub static ALL: &[Kernel] = &[
    SEND, RECEIVE, PING, ECHO, DRAIN, BARE_PING, BARE_ECHO, BARE_DRAIN,
];

/// What a launch on a side of a ring does.
#[derive(Debug, Clone, Copy)]
pub struct Items {
    /// How many items, of all blocks together.
    pub count: u64,
    /// Words of each, at most as many as a slot has.
    pub words: u64,
    /// Decides their values.
    pub seed: u64,
}

/// `cuLaunchKernel` of `ring_send`: `blocks` blocks write items and publish them.
///
/// # Errors
/// [`warpipe::Error::Driver`].
///
/// # Safety
/// `params` is of a producer's ring for this stream, `statuses` one word that is used only
/// atomically until the kernel is done; `blocks` blocks run at the same time.
pub unsafe fn send(
    stream: &Stream,
    params: DevicePtr,
    items: Items,
    blocks: u32,
    statuses: DevicePtr,
) -> Result<()> {
    let args = [params, items.count, items.words, items.seed, statuses];
    // SAFETY: the arguments are what the kernel takes; the memory is the caller's promise.
    unsafe { stream.launch(&SEND, blocks, BLOCK, &args) }
}

/// `cuLaunchKernel` of `ring_receive`: `blocks` blocks wait for items, add how many words are wrong
/// to the word `errors`, and release them.
///
/// # Errors
/// [`warpipe::Error::Driver`].
///
/// # Safety
/// As for [`send`], with a consumer's ring; also of `errors`.
pub unsafe fn receive(
    stream: &Stream,
    params: DevicePtr,
    items: Items,
    blocks: u32,
    errors: DevicePtr,
    statuses: DevicePtr,
) -> Result<()> {
    let Items { count, words, seed } = items;
    let args = [params, count, words, seed, errors, statuses];
    // SAFETY: the arguments are what the kernel takes; the memory is the caller's promise.
    unsafe { stream.launch(&RECEIVE, blocks, BLOCK, &args) }
}

/// `cuLaunchKernel` of `ring_ping`: one block sends each item on the ring `out`, and waits for the
/// same on the ring `back`.
///
/// # Errors
/// [`warpipe::Error::Driver`].
///
/// # Safety
/// As for [`send`] and [`receive`].
pub unsafe fn ping(
    stream: &Stream,
    [out, back]: [DevicePtr; 2],
    items: Items,
    errors: DevicePtr,
    statuses: DevicePtr,
) -> Result<()> {
    let Items { count, words, seed } = items;
    let args = [out, back, count, words, seed, errors, statuses];
    // SAFETY: the arguments are what the kernel takes; the memory is the caller's promise.
    unsafe { stream.launch(&PING, 1, BLOCK, &args) }
}

/// `cuLaunchKernel` of `ring_echo`: one block sends `count` items of the ring `incoming` back on
/// the ring `out`.
///
/// # Errors
/// [`warpipe::Error::Driver`].
///
/// # Safety
/// As for [`ping`].
pub unsafe fn echo(
    stream: &Stream,
    [incoming, out]: [DevicePtr; 2],
    items: Items,
    statuses: DevicePtr,
) -> Result<()> {
    let args = [incoming, out, items.count, items.words, statuses];
    // SAFETY: the arguments are what the kernel takes; the memory is the caller's promise.
    unsafe { stream.launch(&ECHO, 1, BLOCK, &args) }
}

/// `cuLaunchKernel` of `ring_drain`: `blocks` blocks copy items to `places`, each to a place of its
/// own of `items.words` words, and release them. The words are an even number; `items.seed` is not
/// used.
///
/// # Errors
/// [`warpipe::Error::Driver`].
///
/// # Safety
/// As for [`receive`]; nothing else uses the places until the kernel is done.
pub unsafe fn drain(
    stream: &Stream,
    params: DevicePtr,
    items: Items,
    blocks: u32,
    places: DevicePtr,
    statuses: DevicePtr,
) -> Result<()> {
    let args = [params, items.count, items.words, places, statuses];
    // SAFETY: the arguments are what the kernel takes; the memory is the caller's promise.
    unsafe { stream.launch(&DRAIN, blocks, BLOCK, &args) }
}

/// `cuLaunchKernel` of `bare_drain`: the copies of [`drain`] without a ring, from `slots` items that
/// lie at `from`, over and over.
///
/// # Errors
/// [`warpipe::Error::Driver`].
///
/// # Safety
/// The memory is valid until the kernel is done, and nothing else uses the places.
pub unsafe fn bare_drain(
    stream: &Stream,
    (from, slots): (DevicePtr, u64),
    items: Items,
    blocks: u32,
    places: DevicePtr,
) -> Result<()> {
    let args = [from, slots, items.count, items.words, places];
    // SAFETY: the arguments are what the kernel takes; the memory is the caller's promise.
    unsafe { stream.launch(&BARE_DRAIN, blocks, BLOCK, &args) }
}

/// The memory of a bare hand-over.
#[derive(Debug, Clone, Copy)]
pub struct Bare {
    /// The word on which this side spins, in its own memory. 0 at first.
    pub mine: DevicePtr,
    /// The word on which the other side spins.
    pub theirs: DevicePtr,
    /// The slot that the side which begins writes.
    pub out: DevicePtr,
    /// The slot that the other side writes.
    pub back: DevicePtr,
}

/// `cuLaunchKernel` of `bare_ping`: as [`ping`], by two words and two slots alone; `items.seed` is
/// 0. A wait that ends after `looks` looks adds 2^32 to the word `errors`.
///
/// # Errors
/// [`warpipe::Error::Driver`].
///
/// # Safety
/// The memory is valid until the kernel is done, the words are used only atomically.
pub unsafe fn bare_ping(
    stream: &Stream,
    bare: Bare,
    items: Items,
    errors: DevicePtr,
    looks: u64,
) -> Result<()> {
    let Bare {
        mine,
        theirs,
        out,
        back,
    } = bare;
    let args = [
        mine,
        theirs,
        out,
        back,
        items.count,
        items.words,
        errors,
        looks,
    ];
    // SAFETY: the arguments are what the kernel takes; the memory is the caller's promise.
    unsafe { stream.launch(&BARE_PING, 1, BLOCK, &args) }
}

/// `cuLaunchKernel` of `bare_echo`: the other side of [`bare_ping`].
///
/// # Errors
/// [`warpipe::Error::Driver`].
///
/// # Safety
/// As for [`bare_ping`].
pub unsafe fn bare_echo(stream: &Stream, bare: Bare, items: Items, looks: u64) -> Result<()> {
    let Bare {
        mine,
        theirs,
        out,
        back,
    } = bare;
    let args = [mine, theirs, out, back, items.count, items.words, looks];
    // SAFETY: the arguments are what the kernel takes; the memory is the caller's promise.
    unsafe { stream.launch(&BARE_ECHO, 1, BLOCK, &args) }
}
