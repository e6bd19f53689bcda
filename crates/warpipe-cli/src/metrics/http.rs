//! HTTP/1.1, as much as a scraper needs: one GET for each connection.
//!
//! A client may send anything, or nothing: a request has limits of bytes and of time, after which
//! its connection is closed. Clients are answered beside each other, so one that is slow holds up
//! no other.

use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;

use crate::interrupt::{Interrupt, LOOK};
use crate::poll::poll;

/// The longest request, with its headers; also the most that is read behind one.
const REQUEST_BYTES_MAX: usize = 8192;

/// How long a client may take to send its request, and again to read the answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(2);

/// The most clients at a time. One more takes the place of the one that has the least time left.
const CLIENTS_MAX: usize = 64;

/// The most clients that are accepted before the others are looked at again.
const ACCEPTED_AT_ONCE: usize = CLIENTS_MAX / 4;

/// Answers until it is interrupted. `page` makes the body of each answer.
pub fn serve(
    listener: &TcpListener,
    interrupt: &Interrupt,
    mut page: impl FnMut() -> Result<String, String>,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let interrupted = interrupt.readable()?;
    let mut clients: Vec<Client> = Vec::new();
    while !interrupt.came() {
        let mut fds = vec![
            PollFd::new(&interrupted, PollFlags::IN),
            PollFd::new(listener, PollFlags::IN),
        ];
        fds.extend(clients.iter().map(|it| PollFd::new(&it.stream, it.wants())));
        // At most until the time of a client ends.
        let next = clients.iter().map(|client| client.deadline).min();
        poll(
            &mut fds,
            next.map(|next| next.saturating_duration_since(Instant::now())),
        )?;
        // Before others are accepted: what has come from these may be a request.
        answer(&mut clients, &mut page);
        accept(listener, &mut clients)?;
    }
    Ok(())
}

/// Goes on with each client. Those that ask at the same time get the same page: a look may take a
/// second, and so many clients would hold up the next ones, and the end of this program.
fn answer(clients: &mut Vec<Client>, page: &mut impl FnMut() -> Result<String, String>) {
    let (now, mut made) = (Instant::now(), None);
    let mut page = || made.get_or_insert_with(&mut *page).clone();
    clients.retain_mut(|client| {
        // A client that breaks off is its own affair.
        client.deadline > now && client.go_on(&mut page).unwrap_or(false)
    });
}

/// Accepts the clients that wait, up to a limit.
fn accept(listener: &TcpListener, clients: &mut Vec<Client>) -> io::Result<()> {
    for _ in 0..ACCEPTED_AT_ONCE {
        match listener.accept() {
            Ok((stream, _)) => {
                if clients.len() == CLIENTS_MAX {
                    let ends = clients.iter().enumerate();
                    let next = ends.min_by_key(|(_, client)| client.deadline);
                    next.map(|(at, _)| at).map(|at| clients.swap_remove(at));
                }
                clients.extend(Client::new(stream));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) if is_one_of(&error, SHORT) => {
                let before = clients.len();
                clients.retain(|client| !matches!(client.state, State::Asking(_)));
                if clients.len() == before {
                    // The listener stays readable.
                    std::thread::park_timeout(LOOK);
                }
                return Ok(());
            }
            Err(error) if is_one_of(&error, OF_THE_LISTENER) => return Err(error),
            // Of a connection that has ended meanwhile.
            Err(_) => {}
        }
    }
    Ok(())
}

/// There is no room for one more connection now.
const SHORT: &[Errno] = &[Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM];

/// No further connection could be accepted either. `accept` also reports the faults of a connection
/// and of the network below it.
const OF_THE_LISTENER: &[Errno] = &[Errno::BADF, Errno::INVAL, Errno::NOTSOCK];

fn is_one_of(error: &io::Error, faults: &[Errno]) -> bool {
    Errno::from_io_error(error).is_some_and(|errno| faults.contains(&errno))
}

/// One connection.
struct Client {
    stream: TcpStream,
    deadline: Instant,
    state: State,
}

enum State {
    /// What it has sent of its request.
    Asking(Vec<u8>),
    /// The answer, and how much of it was taken.
    Reading(Vec<u8>, usize),
    /// It has the answer. How much has come behind its request: a connection that is closed with
    /// unread bytes would be reset, and the answer with it.
    Leaving(usize),
}

impl Client {
    fn new(stream: TcpStream) -> io::Result<Client> {
        stream.set_nonblocking(true)?;
        Ok(Client {
            stream,
            deadline: Instant::now() + CLIENT_TIMEOUT,
            state: State::Asking(Vec::new()),
        })
    }

    fn wants(&self) -> PollFlags {
        match self.state {
            State::Asking(_) | State::Leaving(_) => PollFlags::IN,
            State::Reading(..) => PollFlags::OUT,
        }
    }

    /// Goes on as far as it can without waiting. False at the end.
    fn go_on(&mut self, page: &mut impl FnMut() -> Result<String, String>) -> io::Result<bool> {
        loop {
            match self.step(page) {
                Ok(false) => return Ok(false),
                Ok(true) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// One read or write, which does not wait.
    fn step(&mut self, page: &mut impl FnMut() -> Result<String, String>) -> io::Result<bool> {
        let mut some = [0; 1024];
        match &mut self.state {
            State::Asking(request) => {
                let count = self.stream.read(&mut some)?;
                request.extend_from_slice(&some[..count]);
                if count == 0 || is_whole(request) || request.len() > REQUEST_BYTES_MAX {
                    let answer = respond(request, page);
                    self.state = State::Reading(answer.into_bytes(), 0);
                    self.deadline = Instant::now() + CLIENT_TIMEOUT;
                }
            }
            State::Reading(answer, taken) => {
                *taken += self.stream.write(&answer[*taken..])?;
                if *taken == answer.len() {
                    self.stream.shutdown(Shutdown::Write)?;
                    self.state = State::Leaving(0);
                }
            }
            State::Leaving(behind) => {
                let count = self.stream.read(&mut some)?;
                *behind += count;
                return Ok(count > 0 && *behind <= REQUEST_BYTES_MAX);
            }
        }
        Ok(true)
    }
}

/// Whether the empty line has come. What lies behind it, a body, is not looked at. Lines may end
/// without a carriage return, as those of people do.
fn is_whole(request: &[u8]) -> bool {
    let has = |end: &[u8]| request.windows(end.len()).any(|it| it == end);
    has(b"\r\n\r\n") || has(b"\n\n")
}

/// The whole answer to a request.
fn respond(request: &[u8], page: &mut impl FnMut() -> Result<String, String>) -> String {
    let (status, body) = answer_to(request, page);
    let kind = match status {
        "200 OK" => "text/plain; version=0.0.4; charset=utf-8",
        _ => "text/plain; charset=utf-8",
    };
    let length = body.len();
    let body = match request.starts_with(b"HEAD ") {
        true => String::new(),
        false => body,
    };
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n{body}"
    )
}

/// The status, and the body that a GET gets.
fn answer_to(
    request: &[u8],
    page: &mut impl FnMut() -> Result<String, String>,
) -> (&'static str, String) {
    if request.len() > REQUEST_BYTES_MAX {
        let status = "431 Request Header Fields Too Large";
        return (status, "too long\n".into());
    }
    let mut lines = request.split(|&byte| byte == b'\r' || byte == b'\n');
    let line = lines.next().unwrap_or_default();
    let words: Vec<&[u8]> = line.split(|&byte| byte == b' ').collect();
    let (method, path) = match words[..] {
        [method, path, version] if version.starts_with(b"HTTP/1.") => (method, path),
        _ => return ("400 Bad Request", "no request of HTTP/1\n".into()),
    };
    if method != b"GET" && method != b"HEAD" {
        return ("405 Method Not Allowed", "only GET and HEAD\n".into());
    }
    if path.split(|&byte| byte == b'?').next() != Some(b"/metrics") {
        return ("404 Not Found", "the metrics are at /metrics\n".into());
    }
    match page() {
        Ok(body) => ("200 OK", body),
        Err(error) => ("503 Service Unavailable", format!("{error}\n")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(request: &[u8]) -> String {
        let response = respond(request, &mut || Ok("a 1\n".into()));
        response.split(' ').nth(1).unwrap().to_owned()
    }

    #[test]
    fn clients_that_ask_at_the_same_time_get_one_page() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let mut all: Vec<_> = (0..40)
            .map(|_| TcpStream::connect(address).unwrap())
            .collect();
        for asking in &mut all {
            asking.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        }
        let accepted = all.iter().map(|_| listener.accept().unwrap().0);
        let mut clients: Vec<_> = accepted.map(|it| Client::new(it).unwrap()).collect();
        for client in &clients {
            poll(&mut [PollFd::new(&client.stream, PollFlags::IN)], None).unwrap();
        }
        let mut looks = 0;
        answer(&mut clients, &mut || {
            looks += 1;
            Ok("a 1\n".into())
        });
        drop(clients);
        assert_eq!(looks, 1);
        for mut asking in all {
            let mut text = String::new();
            asking.read_to_string(&mut text).unwrap();
            assert!(text.ends_with("\r\n\r\na 1\n"), "{text}");
        }
    }

    #[test]
    fn a_request_gets_the_page_or_the_status_that_says_why_not() {
        let whole = respond(b"GET /metrics HTTP/1.1\r\n\r\n", &mut || Ok("a 1\n".into()));
        assert!(whole.starts_with("HTTP/1.1 200 OK\r\n") && whole.ends_with("\r\n\r\na 1\n"));
        assert!(whole.contains("Content-Length: 4\r\n"));
        let head = respond(
            b"HEAD /metrics HTTP/1.1\r\n\r\n",
            &mut || Ok("a 1\n".into()),
        );
        assert!(head.contains("Content-Length: 4\r\n") && head.ends_with("\r\n\r\n"));
        for (request, wanted) in [
            (&b"GET /metrics?x=1 HTTP/1.0\r\n\r\n"[..], "200"),
            (b"GET /metrics HTTP/1.0\n\n", "200"),
            (b"GET / HTTP/1.1\r\n\r\n", "404"),
            (b"POST /metrics HTTP/1.1\r\n\r\n", "405"),
            (b"GET /metrics\r\n\r\n", "400"),
            (b"", "400"),
            (b"\0\xff\x1b[2J", "400"),
            (&[b'a'; REQUEST_BYTES_MAX + 1], "431"),
        ] {
            assert_eq!(status(request), wanted, "{request:?}");
        }
        let failed = respond(b"GET /metrics HTTP/1.1\r\n\r\n", &mut || Err("gone".into()));
        assert!(failed.starts_with("HTTP/1.1 503 "));
    }
}
