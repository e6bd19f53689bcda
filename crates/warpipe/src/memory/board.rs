//! Timeline words of one process: one per slot, reached when the work that filled the slot is done.

use super::page::Page;
use crate::backend::{DevicePtr, TimelineWord};
use crate::device::Device;
use crate::error::Result;
use crate::fork::PrivateFd;
use crate::link::closer::PeerFd;

/// A row of registered words.
#[derive(Debug)]
pub(crate) struct Board {
    page: Page,
}

impl Board {
    /// `words` words at zero, registered with the device.
    pub(crate) fn new(device: &Device, words: usize) -> Result<Board> {
        Ok(Board { page: Page::private(device, offset_of(words))? })
    }

    /// The same, which others may read and nobody else may write; and what they are given.
    pub(crate) fn published(device: &Device, words: usize) -> Result<(Board, PrivateFd)> {
        let (page, fd) = Page::publish(Some(device), offset_of(words))?;
        Ok((Board { page }, fd))
    }

    /// Another process's board, to be read.
    pub(crate) fn read(fd: PeerFd, bytes: u64, name: &str) -> Result<Board> {
        Ok(Board { page: Page::read(fd, usize::try_from(bytes).unwrap_or(usize::MAX), name)? })
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.page.bytes() as u64
    }

    /// How many words there are.
    pub(crate) fn words(&self) -> usize {
        self.page.bytes() / size_of::<TimelineWord>()
    }

    pub(crate) fn word(&self, index: usize) -> &TimelineWord {
        self.page.at(offset_of(index))
    }

    pub(crate) fn device_word(&self, index: usize) -> DevicePtr {
        self.page.device_ptr(offset_of(index)).unwrap_or_default()
    }
}

fn offset_of(index: usize) -> usize {
    index * size_of::<TimelineWord>()
}
