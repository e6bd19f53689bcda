//! The other process of a benchmark: this program again, with a socket to its parent as standard
//! input.

use std::io::{IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Stdio;

use anyhow::{Context, bail, ensure};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};
use rustix::process::Signal;
use serde::Serialize;
use serde::de::DeserializeOwned;
use warpipe_testkit::{ChildProcess, this_program, wait_readable};

use super::PATIENCE;

/// The longest message: the single measurements of a long benchmark.
const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// A process that plays a role. Killed and reaped when dropped.
#[derive(Debug)]
pub struct PeerProcess {
    child: ChildProcess,
    pub control: Control,
}

impl PeerProcess {
    /// Starts it.
    pub fn start(role: &impl Serialize) -> anyhow::Result<PeerProcess> {
        let (ours, theirs) = UnixStream::pair().context("socketpair")?;
        let mut command = this_program();
        command.args(["--role", &serde_json::to_string(role)?]);
        command
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null());
        let child = ChildProcess::start(&mut command)
            .context("cannot start the benchmark's other process")?;
        Ok(PeerProcess {
            child,
            control: Control::new(ours)?,
        })
    }

    pub fn pid(&self) -> i32 {
        self.child.pid().as_raw_pid()
    }

    /// `pidfd_open`: readable once the process is dead.
    pub fn pidfd(&self) -> anyhow::Result<OwnedFd> {
        Ok(self.child.pidfd()?)
    }

    /// SIGKILL. It is still to be reaped.
    pub fn kill(&self) -> anyhow::Result<()> {
        Ok(self.child.signal(Signal::KILL)?)
    }

    /// Waits for its end, which must be a good one.
    pub fn end(mut self) -> anyhow::Result<()> {
        let status = self.child.wait(PATIENCE)?;
        ensure!(
            status.success(),
            "the benchmark's other process failed: {status}"
        );
        Ok(())
    }
}

/// Messages and descriptors between the two. For the times between measurements, not for within.
#[derive(Debug)]
pub struct Control {
    socket: UnixStream,
}

impl Control {
    fn new(socket: UnixStream) -> anyhow::Result<Control> {
        socket.set_read_timeout(Some(PATIENCE))?;
        socket.set_write_timeout(Some(PATIENCE))?;
        Ok(Control { socket })
    }

    /// A child's end. The child dies with its parent, and leaves no core file.
    pub fn inherited() -> anyhow::Result<Control> {
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        let stdin = std::io::stdin().as_fd().try_clone_to_owned()?;
        let socket = UnixStream::from(stdin);
        socket
            .peer_addr()
            .context("a role is played for a parent, which passes a socket as standard input")?;
        Control::new(socket)
    }

    pub fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Sends one message.
    pub fn send(&self, message: &impl Serialize) -> anyhow::Result<()> {
        let body = serde_json::to_vec(message)?;
        ensure!(
            body.len() <= MESSAGE_BYTES_MAX,
            "a message of {} bytes",
            body.len()
        );
        (&self.socket).write_all(&(body.len() as u32).to_le_bytes())?;
        (&self.socket).write_all(&body)?;
        Ok(())
    }

    /// Receives one.
    pub fn hear<T: DeserializeOwned>(&self) -> anyhow::Result<T> {
        let lost = "the benchmark's other process has gone or hangs";
        let mut length = [0; 4];
        (&self.socket).read_exact(&mut length).context(lost)?;
        let length = u32::from_le_bytes(length) as usize;
        ensure!(length <= MESSAGE_BYTES_MAX, "a message of {length} bytes");
        let mut body = vec![0; length];
        (&self.socket).read_exact(&mut body).context(lost)?;
        Ok(serde_json::from_slice(&body)?)
    }

    /// Passes a descriptor on.
    pub fn send_fd(&self, fd: BorrowedFd<'_>) -> anyhow::Result<()> {
        let fds = [fd];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        ensure!(
            ancillary.push(SendAncillaryMessage::ScmRights(&fds)),
            "no room for a descriptor"
        );
        rustix::net::sendmsg(
            &self.socket,
            &[IoSlice::new(b"d")],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        )?;
        Ok(())
    }

    /// Takes one in.
    pub fn receive_fd(&self) -> anyhow::Result<OwnedFd> {
        ensure!(
            wait_readable(self.socket(), PATIENCE)?,
            "no descriptor came"
        );
        let mut byte = [0u8];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        rustix::net::recvmsg(
            &self.socket,
            &mut [IoSliceMut::new(&mut byte)],
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC,
        )?;
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(mut fds) = message
                && let Some(fd) = fds.next()
            {
                return Ok(fd);
            }
        }
        bail!("the benchmark's other process has gone")
    }
}
