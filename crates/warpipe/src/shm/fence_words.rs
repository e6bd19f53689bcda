//! *Fence words*: timeline words of one process, one per slot, each reached when the work that
//! filled the slot is done.

use crate::backend::{DevicePtr, TimelineWord};
use crate::device::Device;
use crate::error::Result;
use crate::fork::CloseOnForkFd;
use crate::runtime::closer::PeerFd;
use crate::shm::page::SharedPage;

/// A row of registered words.
#[derive(Debug)]
pub(crate) struct FenceWords {
    page: SharedPage,
}

impl FenceWords {
    /// `words` words at zero, registered with the device.
    pub(crate) fn new(device: &Device, words: usize) -> Result<FenceWords> {
        Ok(FenceWords {
            page: SharedPage::private(device, offset_of(words))?,
        })
    }

    /// As [`new`](Self::new), with words that other processes may read and none may write. Returns
    /// the descriptor for them, too.
    pub(crate) fn published(device: &Device, words: usize) -> Result<(FenceWords, CloseOnForkFd)> {
        let (page, fd) = SharedPage::publish(Some(device), offset_of(words))?;
        Ok((FenceWords { page }, fd))
    }

    /// Another process's words, read-only.
    pub(crate) fn read(fd: PeerFd, bytes: u64, name: &str) -> Result<FenceWords> {
        Ok(FenceWords {
            page: SharedPage::read(fd, usize::try_from(bytes).unwrap_or(usize::MAX), name)?,
        })
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
