//! A program on a pseudo-terminal, and the screen that it draws.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::time::Instant;

use rustix::fs::{Mode, OFlags};
use rustix::process::Signal;
use rustix::pty::OpenptFlags;
use rustix::termios::{OptionalActions, Termios, Winsize, tcgetattr, tcsetattr, tcsetwinsize};
use warpipe_testkit::ChildProcess;

use super::PATIENCE;

/// A terminal that its user has closed.
pub fn hung_up() -> OwnedFd {
    let keyboard = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    rustix::pty::grantpt(&keyboard).unwrap();
    rustix::pty::unlockpt(&keyboard).unwrap();
    let path = rustix::pty::ptsname(&keyboard, Vec::new()).unwrap();
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).unwrap()
}

/// A program, its terminal, and what the terminal shows.
pub struct OnTerminal {
    child: ChildProcess,
    /// The side of the terminal's user.
    keyboard: OwnedFd,
    /// The side of the program, kept so that its modes can be read when the program has ended.
    line: OwnedFd,
    before: Termios,
    screen: Screen,
}

impl OnTerminal {
    pub fn start(mut command: Command, columns: u16, rows: u16) -> OnTerminal {
        let keyboard = rustix::pty::openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        rustix::pty::grantpt(&keyboard).unwrap();
        rustix::pty::unlockpt(&keyboard).unwrap();
        let path = rustix::pty::ptsname(&keyboard, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let line = rustix::fs::open(path, flags, Mode::empty()).unwrap();
        set_size(&keyboard, columns, rows);
        let before = tcgetattr(&line).unwrap();
        let side = || Stdio::from(File::from(line.try_clone().unwrap()));
        command.stdin(side()).stdout(side()).stderr(side());
        // A job of its own: a stop of its group is none of the test's.
        command.process_group(0);
        OnTerminal {
            child: ChildProcess::start(&mut command).unwrap(),
            keyboard,
            before,
            screen: Screen::new(columns, rows),
            line,
        }
    }

    pub fn press(&self, keys: &str) {
        rustix::io::write(&self.keyboard, keys.as_bytes()).unwrap();
    }

    pub fn signal(&self, signal: Signal) {
        self.child.signal(signal).unwrap();
    }

    /// Waits until the program is stopped, and says whether the terminal is as it was before.
    pub fn until_stopped(&mut self) -> bool {
        let stat = format!("/proc/{}/stat", self.child.pid().as_raw_nonzero());
        let is_stopped = || {
            let stat = std::fs::read_to_string(&stat).unwrap();
            stat.rsplit(')').next().unwrap().starts_with(" T")
        };
        assert!(warpipe_testkit::eventually(PATIENCE, is_stopped));
        self.read_all();
        self.is_restored()
    }

    /// The modes that a shell sets while it has the terminal.
    pub fn set_modes_of_a_shell(&self) {
        tcsetattr(&self.line, OptionalActions::Now, &self.before).unwrap();
    }

    /// Gives the terminal another size, as a window's user does.
    pub fn resize(&mut self, columns: u16, rows: u16) {
        set_size(&self.keyboard, columns, rows);
        self.screen = Screen::new(columns, rows);
        self.signal(Signal::WINCH);
    }

    /// Loses what the screen shows, as a shell does that uses it meanwhile.
    pub fn wipe(&mut self) {
        let (columns, rows) = (self.screen.cells[0].len(), self.screen.cells.len());
        self.screen = Screen::new(columns as u16, rows as u16);
    }

    /// Reads on until the screen is as wanted, and returns its lines.
    pub fn until(&mut self, is_so: impl Fn(&[String]) -> bool) -> Vec<String> {
        let start = Instant::now();
        loop {
            let lines = self.screen.lines();
            if is_so(&lines) {
                return lines;
            }
            assert!(
                start.elapsed() < PATIENCE,
                "the screen stays so: {lines:#?}"
            );
            assert!(self.read(), "the program has ended: {lines:#?}");
        }
    }

    /// Waits for the program's end, and says whether the terminal is as it was before.
    pub fn end(mut self) -> (ExitStatus, bool, Vec<String>) {
        let status = self.child.wait(PATIENCE).unwrap();
        self.read_all();
        let lines = self.screen.lines();
        (status, self.is_restored(), lines)
    }

    fn is_restored(&self) -> bool {
        let after = tcgetattr(&self.line).unwrap();
        after.local_modes == self.before.local_modes
            && after.input_modes == self.before.input_modes
            && after.output_modes == self.before.output_modes
            && !self.screen.is_other
            && self.screen.has_cursor
    }

    /// Reads what is there.
    fn read_all(&mut self) {
        let now = std::time::Duration::ZERO;
        while warpipe_testkit::wait_readable(&self.keyboard, now).unwrap() && self.read() {}
    }

    fn read(&mut self) -> bool {
        warpipe_testkit::wait_readable(&self.keyboard, PATIENCE).unwrap();
        let mut bytes = [0; 4096];
        match rustix::io::read(&self.keyboard, &mut bytes) {
            Ok(count @ 1..) => {
                self.screen.take(&bytes[..count]);
                true
            }
            _ => false,
        }
    }
}

fn set_size(terminal: &OwnedFd, columns: u16, rows: u16) {
    let size = Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    tcsetwinsize(terminal, size).unwrap();
}

/// As much of a terminal as the command uses.
struct Screen {
    cells: Vec<Vec<char>>,
    at: (usize, usize),
    unread: Vec<u8>,
    is_other: bool,
    has_cursor: bool,
}

impl Screen {
    fn new(columns: u16, rows: u16) -> Screen {
        Screen {
            cells: vec![vec![' '; columns.into()]; rows.into()],
            at: (0, 0),
            unread: Vec::new(),
            is_other: false,
            has_cursor: true,
        }
    }

    fn lines(&self) -> Vec<String> {
        let lines = self
            .cells
            .iter()
            .map(|line| line.iter().collect::<String>());
        lines.map(|line| line.trim_end().to_owned()).collect()
    }

    fn take(&mut self, bytes: &[u8]) {
        self.unread.extend_from_slice(bytes);
        let bytes = std::mem::take(&mut self.unread);
        let mut rest = &bytes[..];
        while let Some((&first, behind)) = rest.split_first() {
            if first != 0x1b {
                self.put(first);
                rest = behind;
                continue;
            }
            let end = behind
                .iter()
                .skip(1)
                .position(|byte| (0x40..0x7f).contains(byte));
            let Some(end) = end.map(|end| end + 2) else {
                break;
            };
            self.obey(&behind[1..end]);
            rest = &behind[end..];
        }
        self.unread = rest.to_vec();
    }

    fn put(&mut self, byte: u8) {
        match byte {
            b'\r' => self.at.0 = 0,
            b'\n' => self.at.1 += 1,
            byte => {
                assert!(!byte.is_ascii_control(), "byte {byte} on the screen");
                if let Some(cell) = self
                    .cells
                    .get_mut(self.at.1)
                    .and_then(|it| it.get_mut(self.at.0))
                {
                    *cell = byte.into();
                }
                self.at.0 += 1;
            }
        }
    }

    fn obey(&mut self, sequence: &[u8]) {
        match std::str::from_utf8(sequence).unwrap() {
            "?1049h" => self.is_other = true,
            "?1049l" => {
                *self = Screen {
                    has_cursor: self.has_cursor,
                    ..Screen::new(self.cells[0].len() as u16, self.cells.len() as u16)
                }
            }
            "?25h" => self.has_cursor = true,
            "?25l" => self.has_cursor = false,
            // Lines that are too long are cut, here always.
            "?7l" | "?7h" => {}
            "2J" => self.cells.iter_mut().for_each(|line| line.fill(' ')),
            style if style.ends_with('m') => {}
            place if place.ends_with('H') => {
                let (row, column) = place.trim_end_matches('H').split_once(';').unwrap();
                let number = |text: &str| text.parse::<usize>().unwrap() - 1;
                self.at = (number(column), number(row));
            }
            other => panic!("a sequence that the command does not use: {other:?}"),
        }
    }
}
