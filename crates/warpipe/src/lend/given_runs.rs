//! The *runs* that a lender's clients may have mapped: a pool's regions, and allocations of other
//! code ([`pieces`](crate::memory::pieces)). Each client is notified when the lender no longer has
//! a run; a stopped one reads nothing, and is notified when it goes on.

use std::collections::{HashMap, HashSet};
use std::sync::Mutex;

use crate::mutex::LockUnpoisoned;

/// Never held during a driver call, or while a client is told.
#[derive(Debug, Default)]
pub(crate) struct GivenRuns {
    clients: Mutex<HashMap<u64, ClientRuns>>,
}

/// The runs of one client, each until it is told of the end.
#[derive(Debug, Default)]
struct ClientRuns {
    held: HashSet<u32>,
    ended: Vec<u32>,
}

impl GivenRuns {
    /// A connected client may map this run from now on.
    pub(crate) fn give(&self, client: u64, number: u32) {
        self.clients
            .locked()
            .entry(client)
            .or_default()
            .held
            .insert(number);
    }

    /// Whether a connected client may map this run, and has not been told of its end.
    pub(crate) fn has(&self, client: u64, number: u32) -> bool {
        let clients = self.clients.locked();
        clients
            .get(&client)
            .is_some_and(|given| given.held.contains(&number))
    }

    /// The client is told of nothing any more.
    pub(crate) fn forget(&self, client: u64) {
        self.clients.locked().remove(&client);
    }

    /// The lender no longer has this run.
    pub(crate) fn end(&self, number: u32) {
        for given in self.clients.locked().values_mut() {
            if given.held.remove(&number) {
                given.ended.push(number);
            }
        }
    }

    /// Calls `tell` for each client and ended run of which it was not told; false says that it
    /// cannot be told now.
    pub(crate) fn tell(&self, tell: impl Fn(u64, u32) -> bool) {
        let mut due = vec![];
        for (&client, given) in self.clients.locked().iter_mut() {
            if !given.ended.is_empty() {
                due.push((client, std::mem::take(&mut given.ended)));
            }
        }
        for (client, mut ended) in due {
            let told = ended.iter().take_while(|&&number| tell(client, number));
            let untold = ended.split_off(told.count());
            if let Some(given) = self.clients.locked().get_mut(&client) {
                given.ended.extend(untold);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    #[test]
    fn a_client_is_told_of_each_end_that_concerns_it_also_if_it_is_stopped_meanwhile() {
        let (ends, told) = (GivenRuns::default(), RefCell::new(vec![]));
        for (client, number) in [(1, 10), (1, 11), (1, 11), (2, 11), (3, 10)] {
            ends.give(client, number);
        }
        [10, 11, 12].into_iter().for_each(|number| ends.end(number));
        ends.forget(3);
        let tell_up_to = |room: usize| {
            ends.tell(|client, number| {
                let mut told = told.borrow_mut();
                let has_room = told.len() < room;
                if has_room {
                    told.push((client, number));
                }
                has_room
            });
        };
        tell_up_to(1);
        ends.end(11);
        assert_eq!(told.borrow().len(), 1);
        tell_up_to(9);
        tell_up_to(9);
        let mut told = told.into_inner();
        told.sort_unstable();
        assert_eq!(told, [(1, 10), (1, 11), (2, 11)]);
    }
}
