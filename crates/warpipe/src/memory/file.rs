//! Tickets in files: written whole or not at all, and readable by their owner alone.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::inotify;

use super::ticket::Ticket;
use crate::error::{Error, HandleFault, Result};
use crate::ipc::domain::watch::Inotify;
use crate::ipc::handle::TEXT_BYTES_MAX;
use crate::ipc::message;
use crate::os::above_standard;
use crate::os::without_size_signal;
use crate::wait::Wait;

/// The longest sleep between two reads while a reader waits. A notification of the directory wakes
/// it earlier.
const LOOK: Duration = Duration::from_millis(100);

/// A file under construction, removed unless it gets its name.
struct TemporaryFile<'a>(Option<&'a Path>);

impl Drop for TemporaryFile<'_> {
    fn drop(&mut self) {
        self.0
            .into_iter()
            .for_each(|path| drop(std::fs::remove_file(path)));
    }
}

impl Ticket {
    /// Writes the ticket to a file of mode 0600, in one piece (`rename(2)`): a reader finds all of
    /// it, or the previous file.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use warpipe::{Domain, Ticket};
    /// # let folder = std::env::temp_dir().join(format!("warpipe-file-{}", std::process::id()));
    /// # let ticket = Ticket::to(&Domain::at(&folder)?, "weights")?;
    /// let path = folder.join("weights.ticket");
    /// ticket.write_file(&path)?;
    /// assert_eq!(Ticket::read_file(&path, Duration::ZERO)?, ticket);
    /// # std::fs::remove_dir_all(folder).ok();
    /// # Ok::<(), warpipe::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn write_file(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let failed =
            |call| move |e| Error::os(call, format!("the ticket file {}", path.display()), e);
        let (new, file) = temporary_of(path, failed("open"))?;
        let mut temporary = TemporaryFile(Some(&new));
        // Above the standard numbers, so that output of this program cannot get into the file.
        let file = above_standard(file.into()).map_err(std::io::Error::from);
        let mut file = File::from(file.map_err(failed("fcntl(F_DUPFD_CLOEXEC)"))?);
        without_size_signal(|| file.write_all(format!("{self}\n").as_bytes()))
            .map_err(failed("write"))?;
        std::fs::rename(&new, path).map_err(failed("rename"))?;
        temporary.0 = None;
        Ok(())
    }

    /// Reads a ticket from a file, and waits for the file to appear (`inotify(7)`). Its directory
    /// must exist.
    ///
    /// # Errors
    /// [`Error::Os`] when the file cannot be read, also when there is none after a wait of zero;
    /// [`Error::Timeout`]; [`Error::Handle`] when it holds no ticket.
    pub fn read_file<'w>(path: impl AsRef<Path>, wait: impl Into<Wait<'w>>) -> Result<Ticket> {
        let (path, wait) = (path.as_ref(), wait.into());
        if wait.limit().is_zero() {
            return Ticket::read_present_file(path);
        }
        // Before the first read, so that an arrival in between is not missed.
        let arrivals = arrivals(path)?;
        loop {
            match Ticket::read_present_file(path) {
                Err(Error::Os { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {}
                found => return found,
            }
            let left = wait.slice();
            if left.is_zero() {
                return Err(wait.timed_out(|| format!("the ticket file {}", path.display())));
            }
            match &arrivals {
                Some(arrivals) => {
                    message::wait_readable(arrivals.as_fd(), left.min(LOOK));
                    arrivals.drain();
                }
                None => std::thread::sleep(left.min(LOOK)),
            }
        }
    }

    fn read_present_file(path: &Path) -> Result<Ticket> {
        let failed =
            |call| move |e| Error::os(call, format!("the ticket file {}", path.display()), e);
        // Without blocking on the writer, should the file be a FIFO.
        let file = File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map_err(failed("open"))?;
        if !file.metadata().map_err(failed("fstat"))?.is_file() {
            return Err(no_text());
        }
        let mut bytes = Vec::new();
        file.take(TEXT_BYTES_MAX as u64 + 1)
            .read_to_end(&mut bytes)
            .map_err(failed("read"))?;
        String::from_utf8(bytes).map_err(|_| no_text())?.parse()
    }
}

/// A descriptor that becomes readable when a file appears in the same directory, if this user may
/// have another inotify instance.
fn arrivals(path: &Path) -> Result<Option<Inotify>> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let wanted = inotify::WatchFlags::MOVED_TO | inotify::WatchFlags::CLOSE_WRITE;
    Inotify::new(folder, wanted, format!("watching {}", folder.display()))
}

/// The most temporary files of dead writers that are skipped.
const TEMPORARIES_MAX: u64 = 64;

/// A new file beside `path`, under a name that no other writer takes. A killed writer may have left
/// its temporary file under the same number: in a container, each run of a program mostly has the
/// same process id.
fn temporary_of(path: &Path, failed: impl Fn(std::io::Error) -> Error) -> Result<(PathBuf, File)> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let name = path
        .file_name()
        .ok_or_else(|| Error::argument("path", path.display(), "the path of a file"))?;
    let mut options = File::options();
    options
        .write(true)
        .create_new(true)
        .mode(0o600)
        .custom_flags(libc::O_NOFOLLOW);
    let mut attempts = 0;
    loop {
        attempts += 1;
        let mut temporary = std::ffi::OsString::from(".");
        temporary.push(name);
        temporary.push(format!(
            ".{}-{}.new",
            std::process::id(),
            COUNT.fetch_add(1, Ordering::Relaxed)
        ));
        let temporary = path.with_file_name(temporary);
        match options.open(&temporary) {
            Ok(file) => return Ok((temporary, file)),
            Err(error)
                if error.kind() == std::io::ErrorKind::AlreadyExists
                    && attempts < TEMPORARIES_MAX => {}
            Err(error) => return Err(failed(error)),
        }
    }
}

/// The error of a file that cannot hold a ticket.
fn no_text() -> Error {
    let wanted = "a ticket";
    Error::handle("ticket", HandleFault::NoHandle(wanted))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::Domain;

    struct Folder(PathBuf, Ticket);

    impl Folder {
        fn new(title: &str) -> Folder {
            let path =
                std::env::temp_dir().join(format!("warpipe-ticket-{title}-{}", std::process::id()));
            let ticket = Ticket::to(&Domain::at(&path).unwrap(), "weights").unwrap();
            Folder(path, ticket)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn a_file_is_its_owners_alone_and_leaves_no_draft() {
        let Folder(path, ticket) = &Folder::new("private");
        let file = path.join("a");
        ticket.write_file(&file).unwrap();
        ticket.write_file(&file).unwrap();
        assert_eq!(
            std::fs::metadata(&file).unwrap().permissions().mode() & 0o777,
            0o600
        );
        assert_eq!(std::fs::read_dir(path).unwrap().count(), 1);
        assert!(
            ticket.write_file(path).is_err(),
            "a directory is in the way"
        );
        assert_eq!(std::fs::read_dir(path).unwrap().count(), 1);
    }

    #[test]
    fn a_waiter_for_a_file_reads_it_when_it_appears() {
        let folder = Folder::new("wait");
        let file = folder.0.join("late");
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| Ticket::read_file(&file, Duration::from_secs(20)));
            folder.1.write_file(&file).unwrap();
            assert_eq!(waiting.join().unwrap().unwrap(), folder.1);
        });
        let absent = Ticket::read_file(folder.0.join("never"), Duration::from_millis(10));
        assert!(matches!(absent, Err(Error::Timeout { .. })), "{absent:?}");
    }

    #[test]
    fn a_text_that_is_no_ticket_is_a_typed_error() {
        let Folder(path, _) = &Folder::new("garbage");
        let file = path.join("garbage");
        for bytes in [
            &b""[..],
            b"\xff\xfe",
            b"warpipe-ticket:zz",
            &[b'x'; TEXT_BYTES_MAX + 1],
        ] {
            std::fs::write(&file, bytes).unwrap();
            assert!(
                matches!(
                    Ticket::read_file(&file, Duration::ZERO),
                    Err(Error::Handle { what: "ticket", .. })
                ),
                "{bytes:?}"
            );
        }
        assert!(matches!(
            Ticket::read_file(path, Duration::ZERO),
            Err(Error::Handle { what: "ticket", .. } | Error::Os { .. })
        ));
        assert!(matches!(
            Ticket::read_file(path.join("none"), Duration::ZERO),
            Err(Error::Os { .. })
        ));
    }

    #[test]
    fn a_dead_writers_temporary_file_with_our_number_is_skipped() {
        let Folder(path, ticket) = &Folder::new("stale");
        let file = path.join("weights.ticket");
        // Other tests may open descriptors meanwhile; some of these numbers are still next.
        let stale = |number: u64| {
            path.join(format!(
                ".weights.ticket.{}-{number}.new",
                std::process::id()
            ))
        };
        (0..32).for_each(|number| std::fs::write(stale(number), "cut sho").unwrap());
        ticket.write_file(&file).unwrap();
        assert_eq!(Ticket::read_file(&file, Duration::ZERO).unwrap(), *ticket);
    }
}
