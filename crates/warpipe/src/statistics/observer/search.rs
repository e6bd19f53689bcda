//! Finds the pages among the descriptors of other processes.
//!
//! How many descriptors a process has is its own choice: with a shared table of descriptors a user
//! has millions of links in `/proc` for the price of a few processes. So a look reads a limited
//! number of links of each user, takes turns between users, and the next look goes on where this
//! one ended. A page that was found is read without a search.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::mem::MaybeUninit;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags, RawDir, SeekFrom};
use rustix::io::Errno;

use super::super::layout::FILE_LINK;
use super::{Observation, Process, Refusal, Unreadable, read_descriptor};

/// How long a process in which no page was found is not searched again.
const SEARCH_AGAIN: Duration = Duration::from_secs(2);

/// The most links of one user's processes that are read in one look.
const LINKS_PER_USER: usize = 65_536;

/// The most links of a process that are read in its turn.
const LINKS_PER_TURN: usize = 1024;

/// What a turn costs beside the links, as a number of links.
const TURN_COST: usize = 4;

/// How long the searches of one look may take, over all users.
const LOOK_TIME: Duration = Duration::from_secs(1);

/// What is known of the page of a process.
#[derive(Debug, Clone, Copy)]
enum Known {
    /// The descriptor's number.
    At(i32),
    /// There was none at that time.
    Nowhere(Instant),
    /// There is none before this position in the directory of its descriptors.
    NotBefore(u64),
}

/// Finds and reads the pages of this user's processes; root finds those of all users.
#[derive(Debug)]
pub struct Observer {
    /// What the looks so far have found.
    known: HashMap<i32, Known>,
    links_per_user: usize,
}

impl Default for Observer {
    fn default() -> Observer {
        Observer {
            known: HashMap::new(),
            links_per_user: LINKS_PER_USER,
        }
    }
}

/// The processes of a user that are to be searched, and the links that this look may read.
struct Turns {
    waiting: VecDeque<i32>,
    links_left: usize,
}

impl Observer {
    /// An observer that has found nothing yet.
    pub fn new() -> Observer {
        Observer::default()
    }

    /// Looks at every process that this one may look into. A look takes a limited time, whatever
    /// other users' processes do.
    pub fn observe(&mut self) -> Observation {
        self.look_at(visible_processes())
    }

    /// Looks at one process of this user's alone.
    #[cfg(test)]
    pub(crate) fn observe_one(&mut self, pid: i32) -> Observation {
        let user = rustix::process::geteuid().as_raw();
        self.look_at(vec![(pid, user)])
    }

    /// Looks at these processes, each with its user.
    fn look_at(&mut self, processes: Vec<(i32, u32)>) -> Observation {
        let present: HashMap<i32, u32> = processes.into_iter().collect();
        self.known.retain(|pid, _| present.contains_key(pid));
        let mut observation = Observation::default();
        let mut users: BTreeMap<u32, Turns> = BTreeMap::new();
        for (&pid, &uid) in &present {
            match self.known.get(&pid) {
                Some(Known::Nowhere(when)) if when.elapsed() < SEARCH_AGAIN => continue,
                Some(&Known::At(fd)) => match read_descriptor(pid, fd) {
                    Err(Refusal::Other) => {}
                    read => {
                        observation.note(pid, read);
                        continue;
                    }
                },
                _ => {}
            }
            let turns = users.entry(uid).or_insert_with(|| Turns {
                waiting: VecDeque::new(),
                links_left: self.links_per_user,
            });
            turns.waiting.push_back(pid);
        }
        self.take_turns(users.into_values().collect(), &mut observation);
        observation.processes.sort_unstable_by_key(|it| it.pid);
        observation.unreadable.sort_unstable_by_key(|it| it.pid);
        observation
    }

    fn take_turns(&mut self, mut users: Vec<Turns>, observation: &mut Observation) {
        let start = Instant::now();
        for user in &mut users {
            // Those that have been searched least come first: one with few descriptors does not
            // wait for one with many.
            let waiting = user.waiting.make_contiguous();
            waiting.sort_unstable_by_key(|&pid| (self.position(pid), pid));
        }
        while start.elapsed() < LOOK_TIME {
            let mut is_over = true;
            for user in &mut users {
                if user.links_left == 0 {
                    continue;
                }
                let Some(pid) = user.waiting.pop_front() else {
                    continue;
                };
                is_over = false;
                let limit = user.links_left.min(LINKS_PER_TURN);
                let read = self.search(pid, limit, observation);
                user.links_left = user.links_left.saturating_sub(read + TURN_COST);
                if let Some(Known::NotBefore(_)) = self.known.get(&pid) {
                    user.waiting.push_back(pid);
                }
            }
            if is_over {
                break;
            }
        }
        observation.unsearched = users.iter().map(|user| user.waiting.len()).sum();
    }

    fn position(&self, pid: i32) -> u64 {
        match self.known.get(&pid) {
            Some(&Known::NotBefore(position)) => position,
            _ => 0,
        }
    }

    /// Reads at most `limit` links of a process. Returns how many it has read.
    fn search(&mut self, pid: i32, limit: usize, observation: &mut Observation) -> usize {
        let mut read = 0;
        let from = self.position(pid);
        let known = match find_page(pid, from, limit, &mut read) {
            Ok(Found::Page(fd, page)) => {
                let known = page.is_ok().then_some(Known::At(fd));
                observation.note(pid, page);
                known.unwrap_or(Known::Nowhere(Instant::now()))
            }
            Ok(Found::NotBefore(position)) => Known::NotBefore(position),
            // It has ended, or may not be looked into.
            Ok(Found::Nothing) | Err(_) => Known::Nowhere(Instant::now()),
        };
        self.known.insert(pid, known);
        read
    }
}

impl Observation {
    fn note(&mut self, pid: i32, read: Result<Process, Refusal>) {
        match read {
            Ok(process) => self.processes.push(process),
            Err(Refusal::Bad(reason)) => self.unreadable.push(Unreadable { pid, reason }),
            Err(Refusal::Other) => {}
        }
    }
}

/// The end of a search.
enum Found {
    /// The descriptor's number, and what it says.
    Page(i32, Result<Process, Refusal>),
    /// None before this position; there are more.
    NotBefore(u64),
    Nothing,
}

/// Searches the descriptors of a process for one that has the name of a page and is one, or
/// pretends to be: from a position in the directory on, until `limit` links are `read`.
fn find_page(pid: i32, from: u64, limit: usize, read: &mut usize) -> Result<Found, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(format!("/proc/{pid}/fd"), flags, Mode::empty())?;
    // Positions in this directory are the numbers of descriptors, and go on after any change.
    rustix::fs::seek(&directory, SeekFrom::Start(from))?;
    let mut space = [MaybeUninit::uninit(); 4096];
    let mut entries = RawDir::new(&directory, &mut space);
    while let Some(entry) = entries.next() {
        let entry = entry?;
        let number = entry.file_name().to_str().ok();
        let Some(fd) = number.and_then(|name| name.parse().ok()) else {
            continue;
        };
        let mut target = [MaybeUninit::uninit(); FILE_LINK.len() + 1];
        let link = rustix::fs::readlinkat_raw(&directory, entry.file_name(), &mut target[..]);
        *read += 1;
        if link.is_ok_and(|(target, _)| target == FILE_LINK.as_bytes()) {
            match read_descriptor(pid, fd) {
                Err(Refusal::Other) => {}
                page => return Ok(Found::Page(fd, page)),
            }
        }
        if *read >= limit {
            return Ok(Found::NotBefore(entry.next_entry_cookie()));
        }
    }
    Ok(Found::Nothing)
}

/// The processes that this one may look into, each with its user.
fn visible_processes() -> Vec<(i32, u32)> {
    let own = rustix::process::geteuid();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let processes = entries.filter_map(|entry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        Some((pid, entry.metadata().ok()?.uid()))
    });
    processes
        .filter(|&(_, uid)| own.is_root() || uid == own.as_raw())
        .collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::{Command, Stdio};

    use super::*;
    use crate::statistics::{EndpointRow, tests::words};

    /// A process with many descriptors, that waits for the end of its input.
    fn crowded(descriptors: usize) -> warpipe_testkit::ChildProcess {
        let mut command = Command::new("cat");
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        let open = move || {
            for _ in 0..descriptors {
                // SAFETY: duplicates a number of this forked child, which the program that it
                // becomes does not know.
                if unsafe { libc::dup(2) } < 0 {
                    return Err(std::io::Error::last_os_error());
                }
            }
            Ok(())
        };
        // SAFETY: the closure makes system calls alone.
        unsafe { command.pre_exec(open) };
        warpipe_testkit::ChildProcess::start(&mut command).unwrap()
    }

    #[test]
    fn a_look_reads_a_limited_number_of_links_of_each_user_and_the_next_one_goes_on() {
        let _row = EndpointRow::open(&words("statistics/searched"));
        let own = std::process::id() as i32;
        let crowd = [crowded(900), crowded(900)];
        let pids = crowd.each_ref().map(|it| it.pid().as_raw_nonzero().get());
        let mut observer = Observer {
            links_per_user: 500,
            ..Observer::default()
        };
        let mut look = |processes: &[(i32, u32)]| {
            let seen = observer.look_at(processes.to_vec());
            let found: Vec<i32> = seen.processes.iter().map(|it| it.pid).collect();
            (found, seen.unsearched)
        };
        // Another user's crowd hides nobody.
        let all = [(pids[0], 1), (pids[1], 1), (own, 2)];
        assert_eq!(look(&all), (vec![own], 2));
        assert_eq!(look(&all), (vec![own], 2));
        // 1,800 links, of which 500 are read in a look.
        assert_eq!(look(&all), (vec![own], 1));
        assert_eq!(look(&all), (vec![own], 0));
        // Nor does one process of a user hide the others of that user for long.
        let mut observer = Observer {
            links_per_user: 500,
            ..Observer::default()
        };
        let mine = [(pids[0], 1), (own, 1)];
        let found = (0..3).any(|_| !observer.look_at(mine.to_vec()).processes.is_empty());
        assert!(found);
    }
}
