//! The author of a lock file: the process that wrote it, as it knows itself.

use std::sync::OnceLock;

use serde::{Deserialize, Serialize};

use crate::fork::per_process::PerProcess;

/// The start of a lock file, before its author.
const LOCK_MARK: &str = "warpipe ";

/// The longest lock file: the mark, two numbers of at most 10 places, a blank, the end of the line.
pub(super) const LOCK_BYTES_MAX: usize = 32;

/// A process's number, and the PID namespace in which it counts. In another namespace the same
/// number is another process: each container's first process has number 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct Author {
    pub(crate) pid: i32,
    /// The inode of `/proc/self/ns/pid`; 0 where it cannot be read.
    pub(crate) namespace: u64,
}

impl Author {
    /// This process.
    pub(crate) fn own() -> Author {
        Author::seen(std::process::id() as i32)
    }

    /// The process with this number in this PID namespace.
    pub(crate) fn seen(pid: i32) -> Author {
        static NAMESPACE: PerProcess<OnceLock<u64>> = PerProcess::new();
        let read = || rustix::fs::stat("/proc/self/ns/pid").map_or(0, |stat| stat.st_ino);
        Author {
            pid,
            namespace: *NAMESPACE.get().get_or_init(read),
        }
    }

    /// The process's number, if it counts in this PID namespace.
    pub(super) fn pid_here(self) -> Option<i32> {
        (self == Author::seen(self.pid)).then_some(self.pid)
    }

    /// Every line has the same length, so a death in the middle of a write leaves no mixture of two
    /// authors.
    pub(super) fn line(self) -> String {
        format!("{LOCK_MARK}{:<10} {:<10}\n", self.pid, self.namespace)
    }

    pub(super) fn parse(text: &[u8]) -> Option<Author> {
        let text = std::str::from_utf8(text)
            .ok()
            .filter(|text| text.len() <= LOCK_BYTES_MAX)?;
        let mut numbers = text
            .strip_prefix(LOCK_MARK)?
            .trim_end()
            .split(' ')
            .filter(|number| !number.is_empty());
        let pid = numbers.next()?.parse().ok().filter(|&pid| pid > 0)?;
        let namespace = numbers
            .next()
            .map_or(Some(0), |number| number.parse().ok())?;
        numbers
            .next()
            .is_none()
            .then_some(Author { pid, namespace })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_its_author_and_other_texts_are_refused() {
        let most = Author {
            pid: i32::MAX,
            namespace: u64::from(u32::MAX),
        };
        for author in [
            Author::own(),
            most,
            Author {
                pid: 1,
                namespace: 0,
            },
        ] {
            assert!(
                author.line().len() <= LOCK_BYTES_MAX && author.line().len() == most.line().len()
            );
            assert_eq!(Author::parse(author.line().as_bytes()), Some(author));
        }
        assert_eq!(
            Author::parse(b"warpipe 7\n"),
            Some(Author {
                pid: 7,
                namespace: 0
            })
        );
        for text in [
            "",
            "warpipe ",
            "warpipe 0 1\n",
            "warpipe -1 1\n",
            "warpipe 1 x\n",
            "warpipe 1 2 3\n",
            "other 1 2\n",
        ] {
            assert_eq!(Author::parse(text.as_bytes()), None, "{text:?}");
        }
        assert_eq!(
            Author::parse(format!("{}{:30}", Author::own().line(), "").as_bytes()),
            None
        );
    }

    #[test]
    fn a_number_of_another_namespace_is_no_process_here() {
        let own = Author::own();
        assert_eq!(own.pid_here(), Some(own.pid));
        assert_eq!(
            Author {
                namespace: own.namespace + 1,
                ..own
            }
            .pid_here(),
            None
        );
    }
}
