//! HTTP/1.1, as much as a scraper needs: one GET for each connection, one connection at a time.
//!
//! A client may send anything, or nothing: a request has limits of bytes and of time, after which
//! its connection is closed. Others wait in the backlog meanwhile.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};

use crate::interrupt::Interrupt;

/// The longest request, with its headers.
const REQUEST_BYTES_MAX: usize = 8192;

/// How long a client may take to send its request, and again to read the answer.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(2);

/// Answers until it is interrupted. `page` makes the body of each answer.
pub fn serve(
    listener: &TcpListener,
    interrupt: &Interrupt,
    mut page: impl FnMut() -> Result<String, String>,
) -> io::Result<()> {
    listener.set_nonblocking(true)?;
    let interrupted = interrupt.readable()?;
    while !interrupt.came() {
        let mut fds = [
            PollFd::new(listener, PollFlags::IN),
            PollFd::new(&interrupted, PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        match listener.accept() {
            // A client that breaks off is its own affair.
            Ok((client, _)) => drop(answer(client, &mut page)),
            Err(error) if is_passing(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Whether the next connection may be accepted all the same.
fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionReset, Interrupted, WouldBlock};
    matches!(
        error.kind(),
        WouldBlock | Interrupted | ConnectionAborted | ConnectionReset
    )
}

fn answer(
    mut client: TcpStream,
    page: &mut impl FnMut() -> Result<String, String>,
) -> io::Result<()> {
    client.set_nonblocking(false)?;
    let request = read_request(&mut client)?;
    let response = respond(&request, page);
    let (mut rest, start) = (response.as_bytes(), Instant::now());
    // A client that reads a byte at a time gets no more time than others.
    while !rest.is_empty() {
        client.set_write_timeout(Some(left(start)?))?;
        let count = client.write(rest)?;
        rest = &rest[count..];
    }
    client.shutdown(std::net::Shutdown::Write)
}

/// The rest of a client's time.
fn left(start: Instant) -> io::Result<Duration> {
    let left = CLIENT_TIMEOUT.saturating_sub(start.elapsed());
    match left.is_zero() {
        true => Err(io::ErrorKind::TimedOut.into()),
        false => Ok(left),
    }
}

/// Reads up to the empty line. What lies behind it, a body, is not read.
fn read_request(client: &mut TcpStream) -> io::Result<Vec<u8>> {
    let (mut request, start) = (Vec::new(), Instant::now());
    let mut some = [0; 1024];
    loop {
        client.set_read_timeout(Some(left(start)?))?;
        let count = client.read(&mut some)?;
        request.extend_from_slice(&some[..count]);
        let is_whole = request.windows(4).any(|four| four == b"\r\n\r\n");
        if count == 0 || is_whole || request.len() > REQUEST_BYTES_MAX {
            return Ok(request);
        }
    }
}

/// The whole answer to a request.
fn respond(request: &[u8], page: &mut impl FnMut() -> Result<String, String>) -> String {
    const METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";
    const TEXT: &str = "text/plain; charset=utf-8";
    if request.len() > REQUEST_BYTES_MAX {
        return response(
            "431 Request Header Fields Too Large",
            TEXT,
            "too long\n",
            true,
        );
    }
    let line = request
        .split(|&byte| byte == b'\r')
        .next()
        .unwrap_or_default();
    let words: Vec<&[u8]> = line.split(|&byte| byte == b' ').collect();
    let (method, path) = match words[..] {
        [method, path, version] if version.starts_with(b"HTTP/1.") => (method, path),
        _ => return response("400 Bad Request", TEXT, "no request of HTTP/1\n", true),
    };
    let has_body = match method {
        b"GET" => true,
        b"HEAD" => false,
        _ => return response("405 Method Not Allowed", TEXT, "only GET and HEAD\n", true),
    };
    match path.split(|&byte| byte == b'?').next() {
        Some(b"/metrics") => match page() {
            Ok(body) => response("200 OK", METRICS, &body, has_body),
            Err(error) => response(
                "503 Service Unavailable",
                TEXT,
                &format!("{error}\n"),
                has_body,
            ),
        },
        _ => response(
            "404 Not Found",
            TEXT,
            "the metrics are at /metrics\n",
            has_body,
        ),
    }
}

fn response(status: &str, kind: &str, body: &str, has_body: bool) -> String {
    let length = body.len();
    let body = if has_body { body } else { "" };
    format!(
        "HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n{body}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(request: &[u8]) -> String {
        let response = respond(request, &mut || Ok("a 1\n".into()));
        response.split(' ').nth(1).unwrap().to_owned()
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
