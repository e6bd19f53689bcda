//! The bridges that are present: those of which a token has come and a session is connected.

use std::collections::{HashMap, HashSet};

use crate::message::Id;

/// Tokens between two looks without a session that is known to be connected.
const HEARD_MAX: usize = 4096;

/// Tokens come on Zenoh's threads, and which sessions are connected is asked by the control thread.
/// A token comes after its session was connected, so one without a session in a later answer is
/// no bridge's: a session may declare any number of tokens, and takes one place.
#[derive(Debug, Default)]
pub(crate) struct Present {
    connected: HashSet<Id>,
    /// Each with a number that is another one when it comes back.
    here: HashMap<Id, u64>,
    /// Until the next look.
    heard: HashMap<Id, u64>,
    /// Of the last token.
    number: u64,
}

impl Present {
    /// A token has come.
    pub(crate) fn came(&mut self, bridge: Id) {
        self.number += 1;
        if self.connected.contains(&bridge) {
            self.here.entry(bridge).or_insert(self.number);
        } else if self.heard.len() < HEARD_MAX {
            self.heard.entry(bridge).or_insert(self.number);
        }
    }

    /// A token has gone, with the link or without it.
    pub(crate) fn went(&mut self, bridge: &Id) {
        self.here.remove(bridge);
        self.heard.remove(bridge);
    }

    /// A token was among those that were asked for. Says whether it is news.
    pub(crate) fn found(&mut self, bridge: Id) -> bool {
        let is_news = self.connected.contains(&bridge) && !self.here.contains_key(&bridge);
        if is_news {
            self.came(bridge);
        }
        is_news
    }

    /// The number of the last token: to be read before it is asked which sessions are connected.
    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    /// Which sessions are connected, as asked after token `until` had come.
    pub(crate) fn settle(&mut self, connected: HashSet<Id>, until: u64) {
        let here = &mut self.here;
        self.heard.retain(|bridge, number| {
            let is_connected = connected.contains(bridge);
            if is_connected {
                here.entry(*bridge).or_insert(*number);
            }
            !is_connected && *number > until
        });
        self.here
            .retain(|bridge, number| *number > until || connected.contains(bridge));
        self.connected = connected;
    }

    /// The bridges, each with the number of its presence.
    pub(crate) fn here(&self) -> &HashMap<Id, u64> {
        &self.here
    }

    /// Whether the messages of a sender count.
    pub(crate) fn is_here(&self, bridge: &Id) -> bool {
        self.here.contains_key(bridge)
    }

    /// Whether all tokens have to be asked for, and come to [`Present::found`]: a connected session
    /// has none. It was left out, or the session came back before Zenoh saw the end of the last one,
    /// and then no token comes.
    pub(crate) fn is_incomplete(&self) -> bool {
        let mut connected = self.connected.iter();
        connected.any(|session| !self.here.contains_key(session))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Id = [1; 16];

    fn fake(number: u64) -> Id {
        let mut id = [0xff; 16];
        id[..8].copy_from_slice(&number.to_le_bytes());
        id
    }

    fn settle(present: &mut Present, connected: &[Id]) {
        let until = present.number();
        present.settle(connected.iter().copied().collect(), until);
    }

    #[test]
    fn a_bridge_is_here_while_it_has_a_token_and_its_session_is_connected() {
        let mut present = Present::default();
        present.came(A);
        assert!(!present.is_here(&A));
        settle(&mut present, &[A]);
        assert!(present.is_here(&A));
        present.went(&A);
        assert!(!present.is_here(&A));
        // Without a session: for good, also when that session is connected later.
        present.came(A);
        present.went(&A);
        present.came(fake(1));
        settle(&mut present, &[A]);
        settle(&mut present, &[A, fake(1)]);
        assert!(present.here().is_empty());
        // The link is lost and comes back before Zenoh sees the token's end: none comes again. What
        // is asked for while there is no session finds nothing.
        present.came(A);
        settle(&mut present, &[]);
        assert!(!present.is_here(&A) && !present.found(A));
        settle(&mut present, &[]);
        settle(&mut present, &[A]);
        assert!(!present.is_here(&A) && present.is_incomplete());
        assert!(present.found(A) && present.is_here(&A) && !present.found(A));
        assert!(!present.is_incomplete());
    }

    #[test]
    fn a_bridge_that_goes_and_comes_back_between_two_looks_has_another_number() {
        let mut present = Present::default();
        present.came(A);
        settle(&mut present, &[A]);
        let before = present.here()[&A];
        // Within one look, before the connected sessions are asked for and after.
        present.went(&A);
        present.came(A);
        let until = present.number();
        let between = present.here()[&A];
        present.went(&A);
        present.came(A);
        present.settle(HashSet::new(), until);
        assert!(present.here()[&A] > between && between > before);
        let last = present.here()[&A];
        settle(&mut present, &[A]);
        assert_eq!(present.here()[&A], last);
    }

    #[test]
    fn tokens_without_a_session_take_no_place_however_many_come() {
        let mut present = Present::default();
        for number in 0..3 * HEARD_MAX as u64 {
            present.came(fake(number));
        }
        // It was left out, and is found.
        present.came(A);
        settle(&mut present, &[A]);
        assert!(present.here().is_empty() && present.is_incomplete());
        assert!(present.heard.is_empty());
        for number in 0..3 * HEARD_MAX as u64 {
            assert!(!present.found(fake(number)));
        }
        assert!(present.found(A) && !present.is_incomplete());
        assert_eq!(present.here().keys().collect::<Vec<_>>(), [&A]);
        // Known to be connected, it needs no room among them.
        present.went(&A);
        for number in 0..2 * HEARD_MAX as u64 {
            present.came(fake(number));
        }
        present.came(A);
        assert!(present.is_here(&A));
    }
}
