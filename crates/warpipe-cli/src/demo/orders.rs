//! A child's orders: lines of its standard input, with or without a wait.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::protocol::{Event, Order};
use crate::output::Output;

/// The longest order, far beyond any that is given.
const BYTES_MAX: usize = 1 << 20;

/// The result of a look at the orders.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// This is to be done.
    Order(Order),
    /// Nothing new.
    Nothing,
    /// The demo is over.
    End,
}

/// Standard input, read a line at a time.
#[derive(Debug, Default)]
pub struct Orders {
    unread: Vec<u8>,
    is_over: bool,
}

impl Orders {
    /// The next order, waiting for it at most `limit`.
    pub fn next(&mut self, limit: Duration) -> anyhow::Result<Next> {
        self.next_of(std::io::stdin().as_fd(), limit)
    }

    fn next_of(&mut self, input: BorrowedFd<'_>, limit: Duration) -> anyhow::Result<Next> {
        loop {
            if let Some(end) = self.unread.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.unread.drain(..=end).collect();
                return Ok(Next::Order(
                    serde_json::from_slice(&line).context("an order that is none")?,
                ));
            }
            if self.is_over {
                return Ok(Next::End);
            }
            if !wait_for(&[input], limit)? {
                return Ok(Next::Nothing);
            }
            let mut buffer = [0; 4096];
            let read = rustix::io::retry_on_intr(|| rustix::io::read(input, &mut buffer))?;
            self.unread.extend_from_slice(&buffer[..read]);
            self.is_over = read == 0;
            anyhow::ensure!(self.unread.len() <= BYTES_MAX, "an order without an end");
        }
    }
}

/// Waits at most `limit` until something comes, an order or at `other`. False when nothing did.
pub fn wait_for_order_or(other: BorrowedFd<'_>, limit: Duration) -> anyhow::Result<bool> {
    wait_for(&[std::io::stdin().as_fd(), other], limit)
}

fn wait_for(descriptors: &[BorrowedFd<'_>], limit: Duration) -> anyhow::Result<bool> {
    let limit = Timespec {
        tv_sec: limit.as_secs() as _,
        tv_nsec: limit.subsec_nanos() as _,
    };
    let mut polled: Vec<_> = descriptors
        .iter()
        .map(|fd| PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN))
        .collect();
    match poll(&mut polled, Some(&limit)) {
        Err(rustix::io::Errno::INTR) => Ok(false),
        ready => Ok(ready? > 0),
    }
}

/// Waits at most `limit` until an order comes.
pub fn wait_for_order(limit: Duration) -> anyhow::Result<bool> {
    wait_for(&[std::io::stdin().as_fd()], limit)
}

/// Reports to the parent.
pub fn send_event(event: &Event) -> std::io::Result<()> {
    Output::new(true).say(String::new, event)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_come_in_turn_whole_and_then_the_end() {
        let (input, output) = rustix::pipe::pipe().unwrap();
        let mut orders = Orders::default();
        let mut next = || orders.next_of(input.as_fd(), Duration::ZERO).unwrap();
        let both = [Order::Pause, Order::Reach { number: 7 }]
            .map(|order| serde_json::to_string(&order).unwrap() + "\n");
        assert_eq!(next(), Next::Nothing);
        rustix::io::write(&output, (both[0].clone() + &both[1][..5]).as_bytes()).unwrap();
        assert_eq!((next(), next()), (Next::Order(Order::Pause), Next::Nothing));
        rustix::io::write(&output, &both[1].as_bytes()[5..]).unwrap();
        assert_eq!(next(), Next::Order(Order::Reach { number: 7 }));
        drop(output);
        assert_eq!((next(), next()), (Next::End, Next::End));
    }
}
