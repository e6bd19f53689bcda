//! What waits for the control thread. Each peer has its share: one that floods keeps out no other.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::message::{Hello, Id, Purpose};

/// Events of one peer that may wait.
const EVENTS_PER_PEER_MAX: usize = 256;

/// A message that the control thread serves.
#[derive(Debug, PartialEq)]
pub(crate) enum Event {
    Hello(Hello),
    Begin {
        lane: Id,
        purpose: Purpose,
    },
    /// A peer waits for a source of this machine.
    Waits {
        name: String,
        generation: Id,
    },
    /// A source of a peer has ended.
    Gone {
        name: String,
        generation: Id,
    },
}

/// What has changed since the last look.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub(crate) struct News {
    /// The bridges that are present.
    pub(crate) presence: bool,
    /// A lane's thread has ended.
    pub(crate) done: bool,
    /// The bridge ends.
    pub(crate) stop: bool,
}

impl News {
    fn is_any(self) -> bool {
        self.presence || self.done || self.stop
    }
}

#[derive(Debug, Default)]
pub(crate) struct Inbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    events: VecDeque<(Id, Event)>,
    /// How many of them each peer has.
    counts: HashMap<Id, usize>,
    news: News,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does not wait. False if too many of that peer are waiting. The caller admits as many senders
    /// as there are places.
    pub(crate) fn put(&self, from: Id, event: Event) -> bool {
        let mut state = self.lock();
        let count = state.counts.entry(from).or_default();
        if *count >= EVENTS_PER_PEER_MAX {
            return false;
        }
        *count += 1;
        state.events.push_back((from, event));
        drop(state);
        self.changed.notify_one();
        true
    }

    /// Tells of something that has changed.
    pub(crate) fn tell(&self, change: impl FnOnce(&mut News)) {
        change(&mut self.lock().news);
        self.changed.notify_one();
    }

    /// What has changed, and the next event, at the latest after `timeout`.
    pub(crate) fn next(&self, timeout: Duration) -> (News, Option<(Id, Event)>) {
        let waits = |state: &mut State| state.events.is_empty() && !state.news.is_any();
        let waited = self.changed.wait_timeout_while(self.lock(), timeout, waits);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let event = state.events.pop_front();
        if let Some((from, _)) = &event
            && let Some(count) = state.counts.get_mut(from)
        {
            *count -= 1;
            if *count == 0 {
                state.counts.remove(from);
            }
        }
        (std::mem::take(&mut state.news), event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_floods_keeps_out_no_other_and_gets_its_places_back() {
        let inbox = Inbox::default();
        let begin = |number: u8| Event::Begin {
            lane: [number; 16],
            purpose: Purpose::Jobs { name: "a".into() },
        };
        let mut taken = 0;
        for _ in 0..10_000 {
            taken += usize::from(inbox.put([1; 16], begin(1)));
            inbox.tell(|news| news.presence = true);
        }
        assert_eq!(taken, EVENTS_PER_PEER_MAX);
        assert!(inbox.put([2; 16], begin(2)));
        let news = News {
            presence: true,
            ..News::default()
        };
        // The flood of tokens keeps back no event.
        assert_eq!(
            inbox.next(Duration::ZERO),
            (news, Some(([1; 16], begin(1))))
        );
        for _ in 1..EVENTS_PER_PEER_MAX {
            assert!(inbox.next(Duration::ZERO).1.is_some());
        }
        assert_eq!(
            inbox.next(Duration::ZERO),
            (News::default(), Some(([2; 16], begin(2))))
        );
        assert_eq!(inbox.next(Duration::ZERO), (News::default(), None));
        assert!(inbox.lock().counts.is_empty());
        assert!(inbox.put([1; 16], begin(1)));
    }
}
