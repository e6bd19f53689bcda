//! A reader that takes each new version at the addresses of the one before.
//!
//! A captured graph, a compiled module and a raw pointer hold addresses, and a version has other
//! memory than its predecessor. So the memory of the next version is mapped where that of the
//! present one was, once the device is past the work that reads it: a few calls of the driver,
//! however long the memory is, and no copy.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::shared::{HeldPart, Lying, Mapped, SharedInner, SharedWeights, parts};
use crate::error::{Error, HandshakeFault, Result};
use crate::stream::Stream;

/// Weights whose later versions come in at the same addresses: pointers, captured graphs and
/// compiled code that have them stay valid, and read the new version.
///
/// ```
/// # use std::time::Duration;
/// # use warpipe::weights::{Keeper, SharedWeights, Weights};
/// # use warpipe::{DType, Device, Domain, Layout};
/// # let folder = std::env::temp_dir().join(format!("warpipe-follower-{}", std::process::id()));
/// # let (domain, device) = (Domain::at(&folder)?, Device::host());
/// # let wait = Duration::from_secs(5);
/// # let keeper = Keeper::builder("llama").domain(&domain).build()?;
/// # let layout = Layout::contiguous(DType::U8, &[3])?;
/// # let publish = |bytes| Weights::from_bytes(&device, [("bias", layout, bytes)])?.publish(&domain, "llama", wait);
/// let first = publish(&b"abc"[..])?;
/// let opener = SharedWeights::opener("llama").domain(&domain).device(&device);
/// let mut follower = opener.open()?.follow();
/// let bias = follower.weights().tensor("bias").expect("it was published");
///
/// let second = publish(&b"xyz"[..])?;
/// let stream = device.stream()?; // that of the engine's work
/// assert_eq!(follower.update(&stream, wait)?, Some(2));
/// assert_eq!(bias.memory().to_vec(wait)?, b"xyz");
/// # drop((bias, follower, first, second, keeper)); std::fs::remove_dir_all(folder).ok();
/// # Ok::<(), warpipe::Error>(())
/// ```
#[derive(Debug)]
pub struct Follower {
    weights: SharedWeights,
}

impl SharedWeights {
    /// Follows the versions of this name at this version's addresses. The clones and the tensors of
    /// this object keep their addresses, too, and read each version that is taken.
    pub fn follow(self) -> Follower {
        Follower { weights: self }
    }
}

impl Follower {
    /// The version that lies at the addresses now, with its content hashes.
    pub fn weights(&self) -> &SharedWeights {
        &self.weights
    }

    /// Takes the newest version, if there is a later one now, at the same addresses, and returns its
    /// number. None if there is none, also while the name has no keeper, or one that is stopped: nothing
    /// waits for a publisher ([`version_after`](crate::Opener::version_after) does).
    ///
    /// # Errors
    /// As [`take`](Self::take) and [`newer`](SharedWeights::newer).
    pub fn update(&mut self, stream: &Stream, timeout: Duration) -> Result<Option<u64>> {
        stream.check_usable(self.weights.device())?;
        self.weights.inner.owner_process.check()?;
        if !self.weights.is_whole() {
            // An earlier call could not.
            let present = self.weights.clone();
            self.take(&present, stream, timeout)?;
        }
        match self.weights.newer(Duration::ZERO) {
            Ok(next) => self.take(&next, stream, timeout).map(Some),
            Err(Error::Timeout { .. } | Error::NotFound { .. } | Error::PeerGone { .. }) => {
                Ok(None)
            }
            // The keeper is stopped, or ends.
            Err(Error::Handshake {
                fault: HandshakeFault::Silent(_) | HandshakeFault::Closed,
                ..
            }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Takes another version of the same name, which is open in this process, at the addresses of
    /// this one, and returns its number.
    ///
    /// Waits, at most `timeout`, until `stream` has done the work that it was given, and the
    /// streams that the [memory](super::SharedTensor::memory) has recorded. Work that they are
    /// given afterwards reads the new version; work that runs meanwhile on another stream may not
    /// touch the weights. Between two versions the addresses have no memory for a moment.
    ///
    /// The version is taken whole or not at all. After an error the former one is there.
    ///
    /// # Errors
    /// [`Error::WeightsMismatch`] for a version with other names, shapes, element types or offsets;
    /// [`Error::Timeout`] when the streams are not idle in time; [`Error::Capturing`] and
    /// [`Error::Argument`] for `stream`; [`Error::Argument`] for weights of another name, domain or
    /// device, and when another follower has taken a version at these addresses; [`Error::Forked`].
    /// [`Error::Driver`] when the driver refused to map the new memory; if it then also refused the
    /// former one, the tensors have none, or that of both, and an access may fault, until a later call
    /// of this or of [`update`](Self::update) succeeds, whatever it returns.
    pub fn take(
        &mut self,
        next: &SharedWeights,
        stream: &Stream,
        timeout: Duration,
    ) -> Result<u64> {
        let start = Instant::now();
        let left = || timeout.saturating_sub(start.elapsed());
        let (present, next) = (&self.weights.inner, &next.inner);
        present.owner_process.check()?;
        stream.check_usable(&present.device)?;
        let place = |it: &SharedInner| {
            let device = it.device.info().id;
            (it.name.to_string(), it.domain.path().to_owned(), device)
        };
        if place(present) != place(next) {
            let allowed = "weights of the same name, domain and device";
            return Err(Error::argument("next", &next.name, allowed));
        }
        let number = next.held.version.number;
        if let Some(difference) = present.manifest.difference(&next.manifest) {
            return Err(Error::WeightsMismatch {
                name: next.name.to_string(),
                version: number,
                difference: Box::new(difference),
            });
        }
        stream.synchronize(left())?;
        for memory in &present.mapped.memory {
            memory.wait_idle(left())?;
        }
        present.mapped.exchange(present, next)?;
        self.weights = SharedWeights {
            inner: Arc::new(SharedInner {
                mapped: present.mapped.clone(),
                begins: present.begins.clone(),
                manifest: next.manifest.clone(),
                held: next.held.clone(),
                holder: next.holder.clone(),
                domain: next.domain.clone(),
                name: next.name.clone(),
                device: next.device.clone(),
                owner_process: next.owner_process,
            }),
        };
        Ok(number)
    }
}

impl Mapped {
    /// Maps the memory of `next` in place of that of `former`; all of it, or none.
    fn exchange(&self, former: &SharedInner, next: &SharedInner) -> Result<()> {
        let mut lies = self.lies();
        let number = lies.number;
        if number != former.held.version.number {
            return Err(Error::argument(
                "weights",
                format!("version {}", former.held.version.number),
                format!("version {number}, which another follower took at these addresses"),
            ));
        }
        if let Err(error) = self.map(next) {
            // The first failure is the one to report.
            lies.is_whole = self.map(former).is_ok();
            return Err(error);
        }
        *lies = Lying {
            number: next.held.version.number,
            is_whole: true,
        };
        Ok(())
    }

    fn map(&self, version: &SharedInner) -> Result<()> {
        let parts = parts(&version.held, &version.manifest);
        for (memory, part) in self.memory.iter().zip(parts) {
            let HeldPart {
                fds,
                shape,
                identity,
                lease,
            } = part;
            // SAFETY: `update` has waited for the streams that work on it; that no other work does
            // is what it asks of its caller.
            unsafe { memory.replace(&fds, &shape, identity, lease) }?;
        }
        Ok(())
    }
}
