//! Job control: whether a process is stopped, its group, its session, and the terminal's foreground.

/// The job that a process belongs to, from `/proc/PID/stat` (proc(5)).
///
/// A number is 0 where its process is outside this PID namespace: a container's first program
/// belongs to a group and a session from outside. getpgrp(2) and getsid(2) return that 0, too,
/// which is no process id.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Job {
    /// By a signal or a debugger.
    pub is_stopped: bool,
    pub parent: i32,
    pub group: i32,
    pub session: i32,
    /// The foreground group of the session's terminal; -1 without a terminal.
    pub foreground: i32,
}

impl Job {
    pub fn of_this_process() -> Option<Job> {
        Job::read("self")
    }

    /// The job of a process; none where it is not seen.
    pub fn of(process: i32) -> Option<Job> {
        Job::read(&process.to_string())
    }

    fn read(process: &str) -> Option<Job> {
        let stat = std::fs::read(format!("/proc/{process}/stat")).ok()?;
        Job::parse(&String::from_utf8_lossy(&stat))
    }

    fn parse(stat: &str) -> Option<Job> {
        // Behind the name, which may contain anything, come the state and the numbers.
        let (_, rest) = stat.rsplit_once(')')?;
        let mut fields = rest.split_ascii_whitespace();
        let is_stopped = matches!(fields.next()?, "T" | "t");
        let mut number = || fields.next()?.parse::<i32>().ok();
        let [parent, group, session] = [number()?, number()?, number()?];
        let _terminal = number()?;
        Some(Job {
            is_stopped,
            parent,
            group,
            session,
            foreground: number()?,
        })
    }

    /// Whether this is the job that the terminal's keys reach, as Ctrl-C.
    pub fn is_foreground(&self) -> bool {
        self.group == self.foreground
    }
}

#[cfg(test)]
mod tests {
    use super::Job;

    #[test]
    fn a_job_is_read_behind_a_name_with_brackets_and_spaces() {
        let job = Job::parse("71 (a) S 1 2) T 7 0 0 34816 -1 4194304 1").unwrap();
        assert_eq!((job.parent, job.group, job.session), (7, 0, 0));
        assert!(job.is_stopped && !job.is_foreground());
        assert!(
            Job::parse("71 (a) T 7 70 70 34816 70 4194304")
                .unwrap()
                .is_foreground()
        );
        for cut in [
            "",
            "71 (a",
            "71 (a) T",
            "71 (a) T 7 70 70",
            "71 (a) T x 70 70 1 70",
        ] {
            assert_eq!(Job::parse(cut), None, "{cut}");
        }
    }

    #[test]
    fn this_process_has_the_parent_that_the_kernel_names() {
        let job = Job::of_this_process().unwrap();
        assert_eq!(Job::of(std::process::id().cast_signed()), Some(job));
        assert_eq!(
            job.parent,
            std::os::unix::process::parent_id().cast_signed()
        );
    }
}
