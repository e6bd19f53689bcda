//! Lines of text between two processes, over a pipe or a pair of sockets. No line is awaited for
//! longer than [`PATIENCE`].

use std::fmt::Display;
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Outcome, PATIENCE, ensure};

/// The longest line that is accepted.
const LINE_BYTES_MAX: usize = 1 << 16;

/// One end of the pipe.
pub struct Talk {
    pipe: File,
    unread: Vec<u8>,
}

impl Talk {
    /// Talks over this pipe or socket.
    pub fn over(pipe: impl Into<OwnedFd>) -> Talk {
        Talk {
            pipe: File::from(pipe.into()),
            unread: Vec::new(),
        }
    }

    /// Talks with the process that started this one, over standard input.
    pub fn with_parent() -> Outcome<Talk> {
        Ok(Talk::over(std::io::stdin().as_fd().try_clone_to_owned()?))
    }

    /// Writes a line.
    pub fn tell(&mut self, line: impl Display) -> Outcome {
        Ok(self.pipe.write_all(format!("{line}\n").as_bytes())?)
    }

    /// Reads the next line; `None` when the other side has closed its end.
    pub fn hear_or_end(&mut self) -> Outcome<Option<String>> {
        loop {
            if let Some(end) = self.unread.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                return Ok(Some(String::from_utf8(line)?.trim_end().to_owned()));
            }
            ensure(self.unread.len() <= LINE_BYTES_MAX, || {
                "a line came that has no end".into()
            })?;
            let limit = Timespec {
                tv_sec: PATIENCE.as_secs() as i64,
                tv_nsec: 0,
            };
            let ready = poll(&mut [PollFd::new(&self.pipe, PollFlags::IN)], Some(&limit))?;
            ensure(ready > 0, || {
                format!("the other process said nothing for {PATIENCE:?}")
            })?;
            let mut part = [0; 4096];
            match self.pipe.read(&mut part)? {
                0 => return Ok(None),
                bytes => self.unread.extend(&part[..bytes]),
            }
        }
    }

    /// Reads the next line, which must come.
    pub fn hear(&mut self) -> Outcome<String> {
        Ok(self
            .hear_or_end()?
            .ok_or("the other process ended before it had said all")?)
    }

    /// Reads the next line, which must be this one.
    pub fn expect(&mut self, line: &str) -> Outcome {
        let heard = self.hear()?;
        ensure(heard == line, || {
            format!("the other process said {heard:?}, not {line:?}")
        })
    }
}
