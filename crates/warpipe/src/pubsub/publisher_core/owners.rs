//! The owners of tensors that are sent where they lie, each until the sample's slot is free: no
//! subscriber reads the tensor any more, and no stream of this process has work on it. They are
//! foreign code: none is dropped under the publisher's lock.

use std::sync::Arc;

use crate::memory::arena::{Arena, SlotId};

#[derive(Default)]
pub(super) struct Owners {
    list: Vec<Owner>,
    /// Has a clone for each owner that is not dropped yet.
    count: Arc<()>,
}

/// An owner: dropped before it counts as dropped.
pub(super) struct Owner {
    _owner: Box<dyn Send>,
    slot: SlotId,
    serial: u64,
    _counted: Arc<()>,
}

impl Owners {
    /// Keeps an owner until `slot`, which is on loan, is free.
    pub(super) fn add(&mut self, slot: SlotId, owner: Box<dyn Send>, arena: &Arena) {
        self.list.push(Owner {
            _owner: owner,
            slot,
            serial: arena.serial(slot),
            _counted: self.count.clone(),
        });
    }

    /// Takes out those with slots that are free, for the caller to drop without the lock.
    pub(super) fn take_free(&mut self, arena: &Arena) -> Vec<Owner> {
        let is_free = |owner: &mut Owner| arena.serial(owner.slot) != owner.serial;
        self.list.extract_if(.., is_free).collect()
    }

    /// How many are not dropped yet.
    pub(super) fn count(&self) -> usize {
        Arc::strong_count(&self.count) - 1
    }
}
