//! What a channel does when somebody dies.

use super::Case;

pub(super) const CASES: &[Case] = &[];
