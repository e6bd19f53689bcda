//! Loans of several tensors, which are sent as one sample.

use super::{Publisher, SampleMut};
use crate::backend::DevicePtr;
use crate::error::{Error, Result};
use crate::pubsub::entry::Metadata;
use crate::pubsub::parts::{self, PART_NAME_BYTES_MAX, PARTS_MAX, Part, listed};
use crate::pubsub::place::Place;
use crate::stream::Stream;
use crate::tensor::Layout;
use crate::wait::Wait;

impl Publisher {
    /// A loan of several tensors, which are sent as one sample: they lie in one slot, each at a
    /// multiple of 256 bytes, and one signal says that all are complete. More can be
    /// [added](SampleMut::add_part_in) where they lie. The loan's own layout is that of the slot's
    /// bytes.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use warpipe::{
    /// #     DType, Device, Domain, Layout, Publisher, Subscriber,
    /// #     SubscriberOptions,
    /// # };
    /// # let folder = std::env::temp_dir().join(format!("warpipe-parts-{}", std::process::id()));
    /// # let (domain, device) = (Domain::at(&folder)?, Device::host());
    /// # let (stream, wait) = (device.stream()?, Duration::from_secs(5));
    /// let publisher = Publisher::new("a", domain.on(&device))?;
    /// let mut subscriber = Subscriber::open("a", domain.on(&device), Duration::ZERO)?;
    ///
    /// let image = Layout::contiguous(DType::U8, &[2, 3])?;
    /// let depth = Layout::contiguous(DType::F32, &[2])?;
    /// let mut loan = publisher.loan_parts(&[("image", image), ("depth", depth)])?;
    /// loan.write_part(&stream, "image", &[1, 2, 3, 4, 5, 6])?; // or a kernel of yours
    /// loan.write_part(&stream, "depth", &[0; 8])?;
    /// loan.send(&stream)?;
    ///
    /// let sample = subscriber.receive(&stream, wait)?;
    /// assert_eq!(sample.part("image")?.layout.shape(), [2, 3]);
    /// assert_eq!(sample.part_to_vec("image", wait)?, [1, 2, 3, 4, 5, 6]);
    /// # drop((sample, publisher, subscriber)); std::fs::remove_dir_all(folder).ok();
    /// # Ok::<(), warpipe::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) for more than
    /// [`PARTS_MAX`](crate::PARTS_MAX) parts, names that are alike, empty or longer than
    /// [`PART_NAME_BYTES_MAX`](crate::PART_NAME_BYTES_MAX), what has no room in the 4,096 bytes of
    /// a sample's metadata, and more than `i64::MAX` bytes; as [`loan`](Self::loan).
    pub fn loan_parts(&self, parts: &[(&str, Layout)]) -> Result<SampleMut> {
        self.lend_parts(parts, None)
    }

    /// [`loan_parts`](Self::loan_parts) with `wait` in place of the loan's timeout.
    ///
    /// # Errors
    /// As [`loan_parts`](Self::loan_parts).
    #[doc(hidden)] // For the Python package.
    pub fn loan_parts_within<'w>(
        &self,
        parts: &[(&str, Layout)],
        wait: impl Into<Wait<'w>>,
    ) -> Result<SampleMut> {
        self.lend_parts(parts, Some(&wait.into()))
    }

    fn lend_parts(&self, parts: &[(&str, Layout)], wait: Option<&Wait<'_>>) -> Result<SampleMut> {
        let (offsets, bytes) = parts::lay_out_parts(parts.iter().map(|(_, layout)| layout))?;
        // Parts in place may follow, and each keeps an owner.
        self.core.drop_free_owners();
        let mut loan = self.lend(&Layout::bytes_only(bytes)?, wait)?;
        loan.parts = Some(Vec::with_capacity(parts.len()));
        for ((name, layout), offset) in parts.iter().zip(offsets) {
            loan.add_part(name, layout, loan.slot_ptr() + offset, None)?;
        }
        Ok(loan)
    }
}

impl SampleMut {
    /// Its parts, in the order in which they were added; none of a loan of one tensor.
    pub fn parts(&self) -> &[Part] {
        self.parts.as_deref().unwrap_or_default()
    }

    /// The part of this name.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is none.
    pub fn part(&self, name: &str) -> Result<&Part> {
        parts::find(self.parts(), name)
    }

    /// [`write`](Self::write), of one part.
    ///
    /// # Errors
    /// As [`write`](Self::write) and [`part`](Self::part).
    pub fn write_part(&mut self, stream: &Stream, name: &str, bytes: &[u8]) -> Result<()> {
        let part = self.part(name)?;
        let (layout, address) = (part.layout, part.slot_ptr);
        self.write_at(stream, (address, &layout), bytes)
    }

    /// Adds a part to the list, which is the head of the metadata.
    pub(super) fn add_part(
        &mut self,
        name: &str,
        layout: &Layout,
        address: DevicePtr,
        place: Option<Place<'_>>,
    ) -> Result<()> {
        let Some(parts) = &mut self.parts else {
            let allowed = "one of `loan_parts`";
            return Err(Error::argument("loan", "of one tensor", allowed));
        };
        if !parts::is_name(name) {
            let allowed = format!("1 to {PART_NAME_BYTES_MAX} bytes, none of them 0");
            return Err(Error::argument("part", format!("{name:?}"), allowed));
        }
        if parts.iter().any(|part| *part.name == *name) || parts.len() >= PARTS_MAX {
            let allowed = format!("at most {PARTS_MAX} parts, each with a name of its own");
            let found = format!("{name:?} behind {} others", parts.len());
            return Err(Error::argument("part", found, allowed));
        }
        let is_in_place = place.is_some();
        let listed = listed(name, layout, place);
        let (head, user) = self.metadata.as_bytes().split_at(self.head_bytes.into());
        // The count, which is one byte.
        let mut list = vec![parts.len() as u8 + 1];
        list.extend(head.iter().skip(1).chain(&listed));
        self.metadata = Metadata::behind(&list, user)?;
        self.head_bytes = list.len() as u16;
        parts.push(Part::new(name, layout, address, is_in_place));
        Ok(())
    }
}
