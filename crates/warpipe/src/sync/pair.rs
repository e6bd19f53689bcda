//! The pages that the owner of an object shares with each of the other processes alone: the other
//! process makes the page and sends it with a request, the owner maps and seals it, and the reply
//! comes when the owner's words in it are current.

use std::os::fd::AsFd;

use serde::Serialize;

use crate::device::Device;
use crate::error::Result;
use crate::ipc::{ClientSession, encode};
use crate::shm::page::{SharedPage, UnsealedPage};
use crate::wait::Wait;

/// Makes a page of `bytes` bytes and shares it with the owner of `session`, which `request` tells
/// what it is for.
pub(super) fn share<'w>(
    session: &ClientSession,
    device: &Device,
    bytes: usize,
    request: &impl Serialize,
    wait: impl Into<Wait<'w>>,
) -> Result<SharedPage> {
    let draft = UnsealedPage::create(bytes)?;
    session.request_with(&encode(request)?, Some(draft.as_fd()), wait)?;
    let page = draft.confirm(device, session.name())?;
    match session.has_hung_up() {
        // An owner that ended while the driver took its time counts as none.
        true => Err(session.owner_gone()),
        false => Ok(page),
    }
}
