//! The semaphore: members take permits, give them back after work of their devices, and are killed
//! at any step; the creator sweeps after them. All on the library's [`SemaphorePage`].

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use super::page::{CREATOR, SemaphorePage, WaitProgress, WaitSlot, bytes_for};
use crate::atomic::AtomicU64;
use crate::verify::page;
use crate::verify::steps::{self, DONE, Model, World};

/// A member's next step, in the highest byte of its phase; below it the permit or the place, below
/// that the value that it owes, or the hand-overs that it has seen.
const TRIES: u64 = 0;
const BEGINS_WAIT: u64 = 1;
const SERVES: u64 = 2;
const LOOKS: u64 = 3;
const SLEEPS: u64 = 4;
const GIVES_UP: u64 = 5;
const HAS: u64 = 6;
const USES: u64 = 7;
const PROMISES: u64 = 8;
const HANDS_ON: u64 = 9;
const OWES: u64 = 10;

/// The creator has swept when all others were done: it ticks as long as there is a semaphore.
const LAST: u64 = 1 << 48;

fn phase(kind: u64, at: u32, value: u64) -> u64 {
    kind << 56 | u64::from(at) << 32 | value
}

/// A semaphore, its creator, which is process 0, and its members.
pub struct Semaphore {
    room: SemaphorePage,
    members: Vec<Patience>,
    /// The phases that all begin with.
    begin: Vec<u64>,
    /// By member, and 0 for the creator: the permit that it takes itself to have, and 1.
    holding: Vec<AtomicU64>,
    /// Whether the creator takes back what the dead had.
    sweeps: Sweeps,
}

/// When the creator sweeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sweeps {
    /// After each death.
    Proven,
    /// After no death, as if there were no monitor.
    Never,
    /// Before the death, as if a silent member were dead.
    Early,
}

/// How long a member waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Patience {
    /// Until it has a permit.
    Waits,
    /// It lines up, and may leave at any time.
    GivesUp,
    /// Not at all.
    Tries,
}

impl Semaphore {
    pub fn new(members: &[Patience], permits: u32, sweeps: Sweeps) -> Semaphore {
        let room = SemaphorePage::new(page(bytes_for(permits)), permits);
        let holding = (0..=members.len()).map(|_| AtomicU64::new(0)).collect();
        let begin = vec![0; members.len() + 1];
        Semaphore {
            room,
            members: members.to_vec(),
            begin,
            holding,
            sweeps,
        }
    }

    /// A holder that is handing its permit on to one that waits, while a third one tries to take
    /// one.
    pub fn handing_on() -> Semaphore {
        let mut semaphore = Semaphore::new(
            &[Patience::Waits, Patience::Waits, Patience::Tries],
            1,
            Sweeps::Proven,
        );
        let permit = semaphore.room.take_free(1, 0).expect("a free permit");
        let place = semaphore.room.begin_wait(2).expect("a free place");
        semaphore.begin = vec![
            0,
            phase(HANDS_ON, permit, 0),
            phase(LOOKS, place.index, place.handed),
            TRIES,
        ];
        semaphore
    }

    fn member(&self, me: u32, now: u64) -> u64 {
        let (kind, at, value) = (now >> 56, (now >> 32 & 0xffff) as u32, now & 0xffff_ffff);
        let place = WaitSlot {
            index: at,
            handed: value,
        };
        let (room, patience) = (&self.room, self.members[me as usize - 1]);
        match kind {
            TRIES if !room.has_waiters() => match room.take_free(me, 0) {
                Some(permit) => phase(HAS, permit, 0),
                None if patience == Patience::Tries => DONE,
                None => phase(BEGINS_WAIT, 0, 0),
            },
            TRIES if patience == Patience::Tries => DONE,
            TRIES => phase(BEGINS_WAIT, 0, 0),
            BEGINS_WAIT => {
                let place = room.begin_wait(me).expect("there are places for all");
                phase(SERVES, place.index, place.handed)
            }
            SERVES => {
                room.match_waiters(me);
                phase(LOOKS, at, value)
            }
            LOOKS => {
                let next = if patience == Patience::GivesUp {
                    GIVES_UP
                } else {
                    SLEEPS
                };
                self.after(room.check_wait(place, me), phase(next, at, value))
            }
            SLEEPS => {
                room.sleep(place, Duration::MAX, || false);
                phase(LOOKS, at, value)
            }
            GIVES_UP => self.after(room.cancel_wait(place, me), DONE),
            HAS => {
                self.holding[me as usize].store(u64::from(at) + 1, SeqCst);
                phase(USES, at, 0)
            }
            USES => {
                self.holding[me as usize].store(0, SeqCst);
                phase(PROMISES, at, 0)
            }
            // Its stream waits for the work of the previous holder.
            PROMISES => phase(HANDS_ON, at, room.promise(at, me)),
            HANDS_ON => {
                room.hand_on(at, me);
                phase(OWES, at, value)
            }
            // Its device had nothing to do.
            _ if value == 0 => DONE,
            _ if !room.word(at).reached(value - 1) => now,
            _ => {
                room.word(at).store(value);
                DONE
            }
        }
    }

    fn after(&self, look: WaitProgress, waiting: u64) -> u64 {
        match look {
            WaitProgress::Granted { permit, .. } => phase(HAS, permit, 0),
            WaitProgress::Waiting => waiting,
            WaitProgress::Lost => panic!("a place is its waiter's"),
        }
    }

    /// Its phase records the members that have been swept.
    fn creator(&self, swept: u64, world: &World) -> u64 {
        let bits = |is: &dyn Fn(usize) -> bool| {
            (1..=self.members.len())
                .filter(|&member| is(member))
                .map(|member| 1u64 << member)
                .sum::<u64>()
        };
        let seen = steps::ask(|| {
            let done = bits(&|member| world.phases[member] == DONE || world.dead[member]);
            done << 32 | bits(&|member| world.dead[member])
        });
        let (done, dead) = (seen >> 32, seen & 0xffff_ffff);
        let all = bits(&|_| true);
        let gone = match self.sweeps {
            Sweeps::Proven => dead,
            Sweeps::Never => 0,
            // The last one is still there.
            Sweeps::Early => dead | 1 << self.members.len(),
        };
        let is_news = gone & !swept != 0;
        if !is_news && done == all && swept & LAST != 0 {
            return DONE;
        }
        if !is_news && done != all {
            // A tick, when no process can make a step.
            steps::wait(|| {
                bits(&|member| world.phases[member] == DONE || world.dead[member]) == done
            });
            let dead_now = steps::ask(|| bits(&|member| world.dead[member]));
            if dead_now != dead {
                return swept;
            }
        }
        for member in 1..=self.members.len() {
            if dead & 1 << member != 0 {
                self.holding[member].store(0, SeqCst);
            }
        }
        self.room
            .sweep(|member| (member as usize) > self.members.len() || gone & 1 << member == 0);
        swept | gone | if done == all { LAST } else { 0 }
    }
}

impl Model for Semaphore {
    fn processes(&self) -> usize {
        1 + self.members.len()
    }

    fn run(&self, process: usize, phase: u64, world: &World) -> u64 {
        if process == 0 {
            self.creator(phase, world)
        } else {
            self.member(process as u32, phase)
        }
    }

    fn begin(&self, process: usize) -> u64 {
        self.begin[process]
    }

    fn is_mortal(&self, process: usize) -> bool {
        process > 0
    }

    fn is_wrong(&self, world: &World) -> Option<String> {
        let held: Vec<u64> = self
            .holding
            .iter()
            .map(|held| held.load(SeqCst))
            .filter(|&held| held != 0)
            .collect();
        let mut different = held.clone();
        different.sort_unstable();
        different.dedup();
        if different.len() != held.len() {
            return Some(format!("a permit has two holders: {held:?}"));
        }
        let is_over = world
            .phases
            .iter()
            .zip(&world.dead)
            .all(|(&phase, &dead)| phase == DONE || dead);
        if is_over {
            let permits = self.room.permits();
            if self.room.available() != permits {
                return Some(format!(
                    "{} of {permits} permits are left",
                    self.room.available()
                ));
            }
            let members = (1..=self.members.len() as u32).chain([CREATOR]);
            if self.room.has_waiters() || members.into_iter().any(|member| self.room.holds(member))
            {
                return Some("a place is left occupied".into());
            }
            let is_due = |permit| !self.room.word(permit).reached(self.room.due(permit));
            if (0..permits).any(is_due) {
                return Some("somebody owes a signal that nobody stores".into());
            }
        }
        None
    }
}
