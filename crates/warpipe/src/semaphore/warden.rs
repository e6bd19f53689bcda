//! The creator's side: lets members in, and takes back what the dead leave behind.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::room::{CREATOR, Room};
use super::signals::Signals;
use super::survivor::Survivor;
use crate::backend::DeviceKind;
use crate::error::{Error, Result};
use crate::fork::PrivateFd;
use crate::link::seal;
use crate::rendezvous::{Answer, Caller, Desk, Ending, Keep, Refusal, decode};

/// What comes with the admission, beside the page's descriptor.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Welcome {
    /// The visitor's number.
    pub(super) member: u32,
    pub(super) permits: u32,
}

/// What a member asks about another one, whose device its own streams are about to wait for.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Ask {
    /// A page to share with it, and its process; answered with [`Here`].
    Page { member: u32 },
    /// That page is mapped here, and can be given to the other one, too. Answered with nothing.
    Mapped { member: u32 },
}

/// Whether the member is here: then a page comes with the answer, and pidfd and lifeline of it unless it is
/// the creator. If it is not, it
/// owes nothing any more.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Here(pub(super) bool);

/// What the creator tells a member that has not asked.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Notice {
    /// This member's streams are to wait for yours: map and seal the page that comes with it, and signal there.
    Serve { member: u32 },
    /// This member is here no more.
    Gone { member: u32 },
}

/// A page for two members, and what tells of the other one's death.
pub(super) struct Offer<F> {
    pub(super) page: F,
    /// Its pidfd and lifeline; none of the creator's.
    pub(super) process: Option<[F; 3]>,
}

/// Whose semaphore it is.
#[derive(Debug)]
pub(super) struct Warden {
    room: Arc<Room>,
    page: PrivateFd,
    device: DeviceKind,
    /// Members that have been let in and are not gone. The lock also keeps sweeps apart; nothing of the driver is
    /// called under it.
    present: Mutex<BTreeSet<u32>>,
    /// The creator's own.
    signals: Arc<Signals>,
    survivor: Arc<Survivor>,
    /// By who asked: pages that it has not mapped yet, and whose signals they are for. One for each.
    offers: Mutex<HashMap<u32, (u32, PrivateFd)>>,
}

impl Warden {
    pub(super) fn new(
        room: Arc<Room>,
        page: PrivateFd,
        device: DeviceKind,
        signals: Arc<Signals>,
        survivor: Arc<Survivor>,
    ) -> Warden {
        Warden { room, page, device, present: Mutex::default(), signals, survivor, offers: Mutex::default() }
    }

    fn offers(&self) -> MutexGuard<'_, HashMap<u32, (u32, PrivateFd)>> {
        self.offers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a page for `asker`, whose streams are to wait for those of `member`. None if that is not here.
    pub(super) fn offer(&self, desk: &Desk, asker: u32, member: u32) -> Result<Option<Offer<PrivateFd>>> {
        let process = match member {
            CREATOR => None,
            _ => {
                let present = self.present();
                let process = if present.contains(&member) { desk.process_of(member.into()) } else { None };
                let Some(process) = process else {
                    self.sweep(&present);
                    return Ok(None);
                };
                Some(process.relay().map_err(|e| Error::os("fcntl(F_DUPFD)", "a member's lifeline", e))?)
            }
        };
        let page = seal::memfd(c"warpipe-words", super::signals::bytes_for(self.room.permits()) as u64)?;
        let copy = PrivateFd::duplicate(&page).map_err(|e| Error::os("fcntl(F_DUPFD)", "a page of two members", e))?;
        self.offers().insert(asker, (member, copy));
        Ok(Some(Offer { page, process }))
    }

    /// The asker has mapped its page: the other one can have it, too.
    pub(super) fn forward(&self, desk: &Desk, asker: u32, member: u32) -> Result<(), Refusal> {
        let offered = self.offers().remove(&asker).filter(|(of, _)| *of == member);
        let (_, page) = offered.ok_or_else(|| Refusal("it was offered no such page".into()))?;
        if member == CREATOR {
            return Ok(self.signals.serve(asker, page.into())?);
        }
        let is_told = desk.tell(member.into(), Answer::new(&Notice::Serve { member: asker }, vec![page])?);
        if is_told { Ok(()) } else { Err(Refusal(format!("member {member} does not answer"))) }
    }

    fn present(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.present.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn sweep(&self, present: &BTreeSet<u32>) {
        self.room.sweep(|member| member == CREATOR || present.contains(&member));
    }
}

impl Keep for Warden {
    fn admit(&self, _desk: &Desk, caller: &Caller, _body: &[u8]) -> Result<Answer, Refusal> {
        if caller.device.map(|device| device.kind) != Some(self.device) {
            let text = format!("it is for {:?} devices; open it on a device of that kind", self.device);
            return Err(Refusal(text));
        }
        let member = u32::try_from(caller.id).ok().filter(|&member| member < CREATOR);
        let member = member.ok_or_else(|| Refusal("it has had all the members it can count; create it anew".into()))?;
        let page =
            PrivateFd::duplicate(&self.page).map_err(|e| Error::os("fcntl(F_DUPFD)", "the semaphore's page", e))?;
        let answer = Answer::new(&Welcome { member, permits: self.room.permits() }, vec![page])?;
        self.present().insert(member);
        Ok(answer)
    }

    fn answer(&self, desk: &Desk, caller: &Caller, body: &[u8]) -> Result<Answer, Refusal> {
        let asker = u32::try_from(caller.id).unwrap_or(CREATOR);
        match decode(body, desk.name())? {
            Ask::Page { member } => {
                let offer = self.offer(desk, asker, member)?;
                let is_here = Here(offer.is_some());
                let fds = offer.into_iter();
                let fds =
                    fds.flat_map(|Offer { page, process }| [page].into_iter().chain(process.into_iter().flatten()));
                Answer::new(&is_here, fds.collect())
            }
            Ask::Mapped { member } => {
                self.forward(desk, asker, member)?;
                Ok(Answer::default())
            }
        }
    }

    /// Its permits stay with it: what its device does under them may still go on.
    fn orphaned(&self, _desk: &Desk, caller: &Caller) {
        if let Ok(member) = u32::try_from(caller.id) {
            self.survivor.bury(member);
        }
    }

    /// What its page says, which the process may go on to use only if it breaks the rules.
    fn holds(&self, caller: &Caller) -> bool {
        u32::try_from(caller.id).is_ok_and(|member| self.room.has(member))
    }

    fn gone(&self, desk: &Desk, caller: &Caller, _ending: Ending) {
        // After a goodbye, too: a member says it only when its devices have signalled all that it promised.
        let mut present = self.present();
        present.retain(|&member| u64::from(member) != caller.id);
        self.sweep(&present);
        let others: Vec<u32> = present.iter().copied().collect();
        drop(present);
        let Ok(member) = u32::try_from(caller.id) else { return };
        self.offers().remove(&member);
        self.survivor.forget(member);
        for other in others {
            // One that does not read what it is sent keeps a page that says nothing any more.
            let _ = Answer::new(&Notice::Gone { member }, vec![]).map(|notice| desk.tell(other.into(), notice));
        }
    }

    /// On the watcher's thread: atomics and wake-ups alone. What a dead member owes behind a living one's work comes
    /// due without anybody dying once more.
    fn tick(&self, _desk: &Desk, _now_ns: u64) {
        self.sweep(&self.present());
    }
}
