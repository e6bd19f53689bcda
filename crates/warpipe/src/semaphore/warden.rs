//! The creator's side: lets members in, and takes back what the dead leave behind.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::room::{CREATOR, Room};
use crate::backend::DeviceKind;
use crate::error::{Error, Result};
use crate::fork::PrivateFd;
use crate::rendezvous::{Answer, Caller, Desk, Ending, Keep, Refusal, decode};

/// What comes with the admission, beside the page's descriptor.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Welcome {
    /// The visitor's number.
    pub(super) member: u32,
    pub(super) permits: u32,
}

/// What a member asks: for a pidfd of another one, whose device its own streams are about to wait for.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct WhoIs {
    pub(super) member: u32,
}

/// The answer: the pidfd comes with it if the member is here. If not, it owes nothing any more.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Here(pub(super) bool);

/// Whose semaphore it is.
pub(super) struct Warden {
    room: Arc<Room>,
    page: PrivateFd,
    device: DeviceKind,
    /// Members that have been let in and are not gone. The lock also keeps sweeps apart; nothing of the driver is
    /// called under it.
    present: Mutex<BTreeSet<u32>>,
}

impl Warden {
    pub(super) fn new(room: Arc<Room>, page: PrivateFd, device: DeviceKind) -> Warden {
        Warden { room, page, device, present: Mutex::default() }
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

    fn answer(&self, desk: &Desk, _caller: &Caller, body: &[u8]) -> Result<Answer, Refusal> {
        let WhoIs { member } = decode(body, desk.name())?;
        let present = self.present();
        let pidfd = if present.contains(&member) { desk.pidfd_of(member.into())? } else { None };
        if pidfd.is_none() {
            self.sweep(&present);
        }
        Answer::new(&Here(pidfd.is_some()), Vec::from_iter(pidfd))
    }

    fn gone(&self, _desk: &Desk, caller: &Caller, _ending: Ending) {
        // After a goodbye, too: a member says it only when its devices have signalled all that it promised.
        let mut present = self.present();
        present.retain(|&member| u64::from(member) != caller.id);
        self.sweep(&present);
    }

    /// On the watcher's thread: atomics and wake-ups alone. What a dead member owes behind a living one's work comes
    /// due without anybody dying once more.
    fn tick(&self, _desk: &Desk, _now_ns: u64) {
        self.sweep(&self.present());
    }
}
