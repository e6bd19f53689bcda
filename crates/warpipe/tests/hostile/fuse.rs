//! A file of a FUSE file system with a server that does not answer. **This module is marked for unsafe**:
//! it mounts.
//!
//! Every query of such a file (`fstat`, `fstatfs`, `poll`, `ioctl`, a read) waits until the
//! connection ends, which it does with the last descriptor of `/dev/fuse`. Another process has that
//! descriptor, and ends after two minutes at the latest: this process could not be killed while it
//! waits in a `close` for itself.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{CWD, Mode, OFlags};

use super::stage::Guarded;

/// The opcodes that are answered: `linux/fuse.h`.
const INIT: u32 = 26;
const OPEN: u32 = 14;

/// Whether `close` of a file also queries the server, and waits for it.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Closing {
    Returns,
    Hangs,
}

/// A silent server's file.
pub(super) struct Silent {
    /// Until the server is silent.
    device: Option<File>,
    /// Has the connection.
    _guardian: Guarded,
    path: PathBuf,
}

impl Silent {
    /// Mounts it over a file of a scratch directory. `None`, with the reason, where that is not
    /// permitted.
    pub(super) fn new() -> Option<Silent> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path =
            std::env::temp_dir().join(format!("warpipe-silent-{}-{number}", std::process::id()));
        let device = File::options().read(true).write(true).open("/dev/fuse");
        let mounted = device.and_then(|device| {
            File::create(&path)?;
            let guardian = Command::new("sleep")
                .arg("120")
                .stdin(device.try_clone()?)
                .stdout(Stdio::null())
                .spawn();
            let guardian = Guarded(guardian?);
            mount(&device, &path).map(|()| (device, guardian))
        });
        match mounted {
            Ok((device, guardian)) => Some(Silent {
                device: Some(device),
                _guardian: guardian,
                path,
            }),
            Err(error) => {
                let _ = std::fs::remove_file(&path);
                println!("skipped: no FUSE file system can be mounted here: {error}");
                None
            }
        }
    }

    /// Opens `count` descriptors of it. From then on the server is silent, and the file has no
    /// name.
    pub(super) fn open(&mut self, count: usize, closing: Closing) -> Vec<OwnedFd> {
        let device = self.device.take().unwrap();
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let open = || rustix::fs::openat(CWD, &self.path, flags, Mode::empty()).unwrap();
        std::thread::scope(|scope| {
            let opens = count + usize::from(closing == Closing::Returns);
            let server = scope.spawn(move || serve(&device, opens, closing));
            let files = (0..count).map(|_| open()).collect();
            if closing == Closing::Returns {
                // A `close` is asked once, and not again: the server does not know the request.
                drop(open());
            }
            server.join().unwrap();
            self.unmount();
            files
        })
    }

    /// A descriptor without any access: it needs no server.
    pub(super) fn locate(&self) -> OwnedFd {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        rustix::fs::openat(CWD, &self.path, flags, Mode::empty()).unwrap()
    }

    /// Files that are open stay so.
    fn unmount(&self) {
        let path = std::ffi::CString::new(self.path.as_os_str().as_encoded_bytes()).unwrap();
        // SAFETY: reads the path, which lives across the call.
        unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
        let _ = std::fs::remove_file(&self.path);
    }

    /// Ends the connection: every waiting query gets an error.
    pub(super) fn abort(self) {}
}

impl Drop for Silent {
    fn drop(&mut self) {
        self.unmount();
    }
}

/// Answers until it has been opened `opens` times, and, where `close` returns, has got an unknown
/// request.
fn serve(mut device: &File, mut opens: usize, closing: Closing) {
    let (mut request, mut closes) = (vec![0; 1 << 17], usize::from(closing == Closing::Returns));
    while opens + closes > 0 {
        let length = device.read(&mut request).unwrap();
        assert!(length >= 40);
        let word = |at: usize| u32::from_le_bytes(request[at..at + 4].try_into().unwrap());
        let (error, body) = match word(4) {
            INIT => (0, init()),
            OPEN => {
                opens -= 1;
                (0, vec![0; 16])
            }
            _ => {
                closes = 0;
                (-libc::ENOSYS, vec![])
            }
        };
        let mut answer = (16 + body.len() as u32).to_le_bytes().to_vec();
        answer.extend(error.to_le_bytes());
        answer.extend(&request[8..16]);
        answer.extend(body);
        device.write_all(&answer).unwrap();
    }
}

/// `struct fuse_init_out` of version 7.31.
fn init() -> Vec<u8> {
    let mut body: Vec<u8> = [7u32, 31, 0, 0]
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect();
    body.extend([1, 0, 1, 0]);
    body.extend(4096u32.to_le_bytes());
    body.resize(64, 0);
    body
}

fn mount(device: &File, path: &Path) -> std::io::Result<()> {
    let options = format!(
        "fd={},rootmode=100000,user_id=0,group_id=0,allow_other",
        device.as_raw_fd()
    );
    let [path, options] = [path.as_os_str().as_encoded_bytes(), options.as_bytes()]
        .map(|text| std::ffi::CString::new(text).expect("no zeros in it"));
    // SAFETY: reads four strings, which live across the call.
    let code = unsafe {
        libc::mount(
            c"silent".as_ptr(),
            path.as_ptr(),
            c"fuse".as_ptr(),
            0,
            options.as_ptr().cast(),
        )
    };
    if code == 0 {
        Ok(())
    } else {
        Err(std::io::Error::last_os_error())
    }
}
