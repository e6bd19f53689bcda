//! Stand-in for the links between a queue and its workers: answers come one after the other, their
//! data later.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use crate::error::{Error, Result};
use crate::pubsub::entry::Violation;
use crate::queue::dispatcher::Sample;

pub(crate) use crate::queue::dispatcher::SendError;

/// The outcome of an answer's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Data {
    UnderWay,
    Complete,
    Lost,
}

/// A worker's link of answers.
#[derive(Debug, Default)]
pub(crate) struct Line {
    pub(crate) answers: VecDeque<(Vec<u8>, Rc<RefCell<Data>>)>,
    /// It ended; the flag says whether gracefully.
    pub(crate) end: Option<bool>,
    pub(crate) is_proven_dead: bool,
}

#[derive(Debug)]
pub(crate) struct Replies(pub(crate) Rc<RefCell<Line>>);

impl Replies {
    pub(crate) fn take(&self) -> Result<Option<RawSample>> {
        let mut line = self.0.borrow_mut();
        match (line.answers.pop_front(), line.end) {
            (Some((metadata, data)), _) => Ok(Some(RawSample { metadata, data })),
            (None, Some(graceful)) => Err(Error::PeerGone { graceful }),
            (None, None) => Ok(None),
        }
    }

    pub(crate) fn fail(&self, wrong: Violation) -> Error {
        panic!("an honest worker is told that {wrong:?} breaks the protocol");
    }

    pub(crate) fn is_sender_dead(&self) -> bool {
        self.0.borrow().is_proven_dead
    }

    pub(crate) fn may_have_news(&self) -> bool {
        true
    }

    pub(crate) fn set_asleep(&self, _: bool) {}
}

#[derive(Debug)]
pub(crate) struct RawSample {
    metadata: Vec<u8>,
    data: Rc<RefCell<Data>>,
}

impl RawSample {
    pub(crate) fn metadata(&self) -> &[u8] {
        &self.metadata
    }

    pub(crate) fn make_room(&mut self) {}

    pub(crate) fn is_complete(&self) -> Result<bool> {
        match *self.data.borrow() {
            Data::UnderWay => Ok(false),
            Data::Complete => Ok(true),
            Data::Lost => Err(Error::Argument("the data was never complete".into())),
        }
    }
}

/// As the library's.
pub(crate) enum Forwarded {
    At(u64),
    NoRoom,
    NotYet,
}

/// A job's input, kept until its outcome.
#[derive(Debug)]
pub(crate) struct RetainedSlot(pub(crate) Sample);

impl RetainedSlot {
    pub(crate) fn forward(
        &self,
        id: u64,
        told: &crate::pubsub::entry::Metadata,
    ) -> Result<Forwarded> {
        self.0.forward(id, told)
    }
}
