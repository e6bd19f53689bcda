//! A reader that takes each new version at the addresses of the one before.
//!
//! A captured graph, a compiled module and a raw pointer hold addresses, and a version has other
//! memory than its predecessor. So the memory of the next version is mapped where that of the
//! present one was, once the device is past the work that reads it: a few calls of the driver,
//! however long the memory is, and no copy.

use std::sync::Arc;
use std::time::Duration;

use super::held::{KnownParts, PartialVersion};
use super::manifest::Manifest;
use super::mapped::placed;
use super::shared::{HeldVersion, SharedInner, SharedWeights};
use crate::error::{Error, HandshakeFault, Result, WeightsFault};
use crate::stream::Stream;
use crate::wait::Wait;

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
/// # let keeper = Keeper::new("llama", domain.options())?;
/// # let layout = Layout::contiguous(DType::U8, &[3])?;
/// # let publish = |bytes| Weights::from_bytes(&device, [("bias", layout, bytes)])?.publish(&domain, "llama", wait);
/// let first = publish(&b"abc"[..])?;
/// let shared = SharedWeights::open("llama", domain.on(&device), wait)?;
/// let mut follower = shared.follow();
/// let bias = follower.weights().tensor("bias").expect("it was published");
///
/// let second = publish(&b"xyz"[..])?;
/// let stream = device.stream()?; // that of the engine's work
/// assert_eq!(follower.update(&stream, wait)?, Some(2));
/// assert_eq!(bias.memory.to_vec(wait)?, b"xyz");
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
    pub fn follow(mut self) -> Follower {
        self.claim();
        Follower { weights: self }
    }

    /// Has the mappings to itself, before any are used: versions that this process opens later, or has
    /// open, are mapped elsewhere.
    #[doc(hidden)] // For the Python package.
    pub fn claim(&mut self) {
        if let Some(SharedInner {
            mapped,
            version,
            places,
            ..
        }) = Arc::get_mut(&mut self.inner)
            && let Some(mapped) = Arc::get_mut(mapped)
        {
            mapped.claim(&version.device, placed(&version.held, places).1);
        } else {
            // Its clones may know the addresses.
            self.inner.mapped.claim_in_place();
        }
    }

    /// The next version, without waiting for it: for [`Follower::take_held`].
    ///
    /// # Errors
    /// As [`newer`](Self::newer).
    #[doc(hidden)] // For the Python package.
    pub fn hold_newer(&self, wait: &Wait<'_>) -> Result<HeldVersion> {
        let now = &wait.cancellable_within(Duration::ZERO);
        self.inner.owner_process.check()?;
        let HeldVersion {
            held,
            domain,
            name,
            device,
            ..
        } = &self.inner.version;
        let known = |_: &PartialVersion| {
            let mut known = KnownParts::default();
            known.add_version(held);
            known
        };
        let after = held.version.number;
        let found = HeldVersion::after(domain, name, device, after, now, &known);
        let (keeper, mut next) = found?;
        next.places_in(&held.manifest)?;
        next.hold(&keeper, now)?;
        Ok(next)
    }
}

impl HeldVersion {
    /// Its number.
    #[doc(hidden)]
    pub fn number(&self) -> u64 {
        self.held.version.number
    }

    /// For each of its parts the part of the former version in whose place it can be.
    fn places_in(&self, former: &Manifest) -> Result<Vec<u32>> {
        let placed = former.places_of(&self.held.manifest);
        placed.map_err(|difference| {
            Error::Weights(WeightsFault::Mismatch {
                name: self.name.to_string(),
                version: self.number(),
                difference: Box::new(difference),
            })
        })
    }
}

impl Follower {
    /// The version that lies at the addresses now, with its content hashes.
    pub fn weights(&self) -> &SharedWeights {
        &self.weights
    }

    /// Takes the newest version, if there is a later one now, at the same addresses, and returns its
    /// number. None if there is none, also while the name has no keeper, or one that is stopped: nothing
    /// waits for a publisher .
    ///
    /// # Errors
    /// As [`take`](Self::take) and [`newer`](SharedWeights::newer).
    pub fn update<'w>(
        &mut self,
        stream: &Stream,
        wait: impl Into<Wait<'w>>,
    ) -> Result<Option<u64>> {
        let wait = &wait.into();
        stream.check_usable(self.weights.device())?;
        self.weights.inner.owner_process.check()?;
        if !self.weights.is_whole() {
            // An earlier call could not.
            let present = self.weights.clone();
            self.take(&present, stream, wait)?;
        }
        match self.weights.hold_newer(wait) {
            Ok(next) => self.take_held(&next, stream, wait).map(Some),
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
    /// Waits until `stream` has done the work that it was given, and the
    /// streams that the [memory](super::SharedTensor::memory) has recorded. Work that they are
    /// given afterwards reads the new version; work that runs meanwhile on another stream may not
    /// touch the weights. Between two versions the addresses have no memory for a moment.
    ///
    /// The version is taken whole or not at all. After an error the former one is there.
    ///
    /// # Errors
    /// [`Error::Weights`] for a version with other names, shapes, element types or offsets;
    /// [`Error::Timeout`] when the streams are not idle in time, or other weights that this process
    /// has open share memory that has to change, and addresses of it were asked for before
    /// [`follow`](SharedWeights::follow); [`Error::State`] and [`Error::Argument`] for `stream`;
    /// [`Error::Argument`] for weights of another name, domain or device, and when another follower
    /// has taken a version at these addresses; [`Error::State`]. [`Error::Driver`] when the driver
    /// refused to map the new memory; if it then also refused the former one, the tensors have
    /// none, or that of both, and an access may fault, until a later call of this or of
    /// [`update`](Self::update) succeeds, whatever it returns.
    #[doc(hidden)] // For the Python package.
    pub fn take<'w>(
        &mut self,
        next: &SharedWeights,
        stream: &Stream,
        wait: impl Into<Wait<'w>>,
    ) -> Result<u64> {
        self.take_held(&next.inner.version, stream, wait)
    }

    /// As [`take`](Self::take), of a version that is mapped nowhere.
    ///
    /// # Errors
    /// As [`take`](Self::take).
    #[doc(hidden)] // For the Python package.
    pub fn take_held<'w>(
        &mut self,
        next: &HeldVersion,
        stream: &Stream,
        wait: impl Into<Wait<'w>>,
    ) -> Result<u64> {
        let wait = &wait.into();
        let present = &self.weights.inner;
        present.owner_process.check()?;
        stream.check_usable(&present.device)?;
        let place = |it: &HeldVersion| {
            let device = it.device.info().id;
            (it.name.to_string(), it.domain.path().to_owned(), device)
        };
        if place(present) != place(next) {
            let allowed = "weights of the same name, domain and device";
            return Err(Error::argument("next", &next.name, allowed));
        }
        let former = next.places_in(&present.held.manifest)?.into_iter();
        let places: Vec<u32> = former.map(|part| present.places[part as usize]).collect();
        stream.synchronize(wait)?;
        for memory in &present.mapped.memory {
            memory.mapping.wait_idle(wait)?;
        }
        // SAFETY: the streams that work on it were waited for above; that no other work does is what
        // this asks of its caller.
        unsafe {
            let former = placed(&present.held, &present.places);
            present
                .mapped
                .replace(former, placed(&next.held, &places), wait)
        }?;
        self.weights = SharedWeights::of(present.mapped.clone(), places, next.clone());
        Ok(next.number())
    }
}
