//! Loans of memory that is no slot: tensors that are sent where they lie. **This module is marked
//! for unsafe**: it exports memory that other allocators own.

use super::{Publisher, PublisherCore, SampleMut};
use crate::backend::DevicePtr;
use crate::error::{Error, Result};
use crate::memory::Published;
use crate::memory::legacy::LegacyHandle;
use crate::pubsub::entry::Metadata;
use crate::pubsub::place::Place;
use crate::tensor::Layout;

impl Publisher {
    /// A loan of published memory, from byte `offset` on: what is there is sent where it lies,
    /// without a copy, when the loan is [sent](SampleMut::send). Subscribers map all of the memory,
    /// with the access that the publication gives, when they receive a first sample in it.
    ///
    /// `owner` is kept until the loan is discarded, or no subscriber reads the tensor any more:
    /// each has released it, and its streams are past it, or is proven dead. Then it is dropped, on
    /// a thread of the library or in a call on the publisher. Where the publisher is dropped
    /// before, the owner is kept on. Let nothing write the tensor meanwhile, and keep the
    /// publication: a subscriber that has not opened the memory needs it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use warpipe::{DType, Device, Domain, Layout, Memory, Publisher, Subscriber};
    /// # let folder = std::env::temp_dir().join(format!("warpipe-loan-in-{}", std::process::id()));
    /// # let (domain, device) = (Domain::at(&folder)?, Device::host());
    /// # let (stream, wait) = (device.stream()?, Duration::from_secs(5));
    /// let publisher = Publisher::new("a", domain.on(&device))?;
    /// let mut subscriber = Subscriber::open("a", domain.on(&device), Duration::ZERO)?;
    ///
    /// let memory = Memory::allocate(&device, 4096)?;
    /// memory.write(&stream, 512, &[1, 2, 3, 4, 5, 6])?; // or a kernel of yours
    /// let published = memory.publish("a/memory", domain.options())?;
    /// let layout = Layout::contiguous(DType::U8, &[2, 3])?;
    /// publisher.loan_in(&published, 512, &layout, memory)?.send(&stream)?;
    ///
    /// let sample = subscriber.receive(&stream, wait)?;
    /// assert!(sample.info().is_in_place);
    /// assert_eq!(sample.to_vec(wait)?, [1, 2, 3, 4, 5, 6]);
    /// # drop((sample, published, publisher, subscriber)); std::fs::remove_dir_all(folder).ok();
    /// # Ok::<(), warpipe::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Argument`] for bytes that do not lie in the memory, and for memory of another
    /// device or domain than the publisher's; as [`loan`](Self::loan).
    pub fn loan_in(
        &self,
        memory: &Published,
        offset: u64,
        layout: &Layout,
        owner: impl Send + 'static,
    ) -> Result<SampleMut> {
        let (place, ptr) = self.core.get()?.place_in(memory, offset, layout)?;
        // A loan can be written: its memory stays mapped as long as its slot is held.
        let owner = (owner, memory.memory().clone());
        self.lend_in_place(&place, ptr, layout, Box::new(owner))
    }

    /// As [`loan_in`](Self::loan_in), of memory of another allocator (`cudaMalloc`), by a
    /// [`LegacyHandle`], with its limits: the memory is gone when this process is, and subscribers,
    /// of this user alone, can also write it. `ptr` is the address of the first of
    /// `layout.bytes()` bytes.
    ///
    /// # Errors
    /// As [`LegacyHandle::export`] and [`loan`](Self::loan).
    ///
    /// # Safety
    /// The allocation stays as long as `owner` lives, and as long as a subscriber has it open,
    /// which may be as long as that is attached: see [`LegacyHandle::export`].
    pub unsafe fn loan_at(
        &self,
        ptr: DevicePtr,
        layout: &Layout,
        owner: impl Send + 'static,
    ) -> Result<SampleMut> {
        // SAFETY: the caller's promise; the owner is kept until no subscriber reads the tensor.
        let handle =
            unsafe { LegacyHandle::export(&self.core.get()?.device, ptr, layout.bytes()) }?;
        let place = Place::Legacy(&handle.to_bytes());
        self.lend_in_place(&place, ptr, layout, Box::new(owner))
    }

    fn lend_in_place(
        &self,
        place: &Place<'_>,
        address: DevicePtr,
        layout: &Layout,
        owner: Box<dyn Send>,
    ) -> Result<SampleMut> {
        self.core.drop_free_owners();
        let metadata = Metadata::new(&place.to_bytes())?;
        let mut loan = self.loan(&Layout::bytes_only(0)?)?;
        self.core.keep(loan.slot, owner);
        loan.head_bytes = metadata.as_bytes().len() as u16;
        (loan.metadata, loan.address, loan.layout) = (metadata, address, *layout);
        Ok(loan)
    }

    /// Keeps no history any more, and with it no tensor that no subscriber has.
    ///
    /// # Errors
    /// [`Error::State`].
    #[doc(hidden)] // For the Python package.
    pub fn end_history(&self) -> Result<()> {
        self.core.get()?.end_history();
        Ok(())
    }
}

impl PublisherCore {
    /// The place, and the address here, of a tensor from byte `offset` of published memory on.
    fn place_in<'m>(
        &self,
        memory: &'m Published,
        offset: u64,
        layout: &Layout,
    ) -> Result<(Place<'m>, DevicePtr)> {
        let range = memory.memory().part(offset, layout.bytes())?;
        if range.device().info().id != self.device.info().id {
            let device = format!("on {}", range.device().info().id);
            let allowed = "on the publisher's device";
            return Err(Error::argument("memory", device, allowed));
        }
        if self.domain_identity() != Some(memory.domain().identity()) {
            let domain = format!("published in {}", memory.domain().path().display());
            let allowed = "in the publisher's domain";
            return Err(Error::argument("memory", domain, allowed));
        }
        let place = Place::Published {
            name: memory.name(),
            incarnation: memory.incarnation(),
            offset,
        };
        Ok((place, range.ptr()))
    }
}

impl SampleMut {
    /// Adds a part that lies in published memory, from byte `offset` on, and is sent where it lies:
    /// see [`Publisher::loan_in`], also for `owner`.
    ///
    /// # Errors
    /// As [`Publisher::loan_in`] and [`Publisher::loan_parts`]; [`Error::Argument`] for a loan of
    /// one tensor; [`Error::State`].
    pub fn add_part_in(
        &mut self,
        name: &str,
        memory: &Published,
        offset: u64,
        layout: &Layout,
        owner: impl Send + 'static,
    ) -> Result<()> {
        self.core.owner_process.check()?;
        let (place, ptr) = self.core.place_in(memory, offset, layout)?;
        self.add_part(name, layout, ptr, Some(place))?;
        let owner = (owner, memory.memory().clone());
        self.core.keep(self.slot, Box::new(owner));
        Ok(())
    }

    /// Adds a part in memory of another allocator, which is sent where it lies: see
    /// [`Publisher::loan_at`], also for `owner`.
    ///
    /// # Errors
    /// As [`Publisher::loan_at`] and [`add_part_in`](Self::add_part_in).
    ///
    /// # Safety
    /// As [`Publisher::loan_at`].
    pub unsafe fn add_part_at(
        &mut self,
        name: &str,
        ptr: DevicePtr,
        layout: &Layout,
        owner: impl Send + 'static,
    ) -> Result<()> {
        self.core.owner_process.check()?;
        // SAFETY: the caller's promise; the owner is kept until no subscriber reads the tensor.
        let handle = unsafe { LegacyHandle::export(&self.core.device, ptr, layout.bytes()) }?;
        let place = Place::Legacy(&handle.to_bytes());
        self.add_part(name, layout, ptr, Some(place))?;
        self.core.keep(self.slot, Box::new(owner));
        Ok(())
    }
}
