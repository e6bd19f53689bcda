//! Links that need more than loopback: TLS with certificates, and a network that is cut.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{Sender, channel};

use rustix::process::Signal;
use warpipe::{Device, Subscriber};
use warpipe_testkit::ChildProcess;

use super::support::{PATIENCE, Running, World};
use super::{LONG, Pair, publish_until_next, publish_until_received, publisher, subscriber};

/// Runs a program of the system. Says whether it is there and did it.
fn succeeds(program: &str, arguments: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null());
    let status = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// An authority and one certificate of it for 127.0.0.1.
struct Certificates {
    authority: PathBuf,
    certificate: PathBuf,
    key: PathBuf,
}

impl Certificates {
    /// `None` if there is no `openssl`.
    fn make(world: &World, title: &str) -> Option<Certificates> {
        if !succeeds("openssl", &["version"]) {
            println!("skipped: TLS needs certificates, which the command openssl makes");
            return None;
        }
        let path = |name: &str| world.path(&format!("{title}-{name}"));
        let text = |path: &Path| path.to_str().unwrap().to_owned();
        let extensions = world.write(
            &format!("{title}.ext"),
            b"basicConstraints=critical,CA:FALSE\nsubjectAltName=IP:127.0.0.1\n",
        );
        let [authority, authority_key] = [path("ca.pem"), path("ca.key")];
        let [certificate, key, request] = [path("peer.pem"), path("peer.key"), path("peer.csr")];
        let curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"];
        let made = |arguments: &[&str]| assert!(succeeds("openssl", arguments), "{arguments:?}");
        let new = |rest: &[&str]| made(&[&["req", "-nodes"], &curve[..], rest].concat());
        let [ca, ca_key] = [text(&authority), text(&authority_key)];
        let [peer, peer_key, csr] = [text(&certificate), text(&key), text(&request)];
        new(&[
            "-x509",
            "-days",
            "2",
            "-subj",
            "/CN=authority",
            "-keyout",
            &ca_key,
            "-out",
            &ca,
        ]);
        new(&["-subj", "/CN=bridge", "-keyout", &peer_key, "-out", &csr]);
        made(&[
            "x509",
            "-req",
            "-days",
            "2",
            "-in",
            &csr,
            "-CA",
            &ca,
            "-CAkey",
            &ca_key,
            "-CAcreateserial",
            "-extfile",
            &text(&extensions),
            "-out",
            &peer,
        ]);
        Some(Certificates {
            authority,
            certificate,
            key,
        })
    }

    /// The options of a bridge with this certificate, which trusts `authority`.
    fn options(&self, authority: &Path) -> Vec<String> {
        let files = [&self.certificate, &self.key, authority];
        let options = ["--cert", "--key", "--ca"].into_iter().zip(files);
        options
            .flat_map(|(option, file)| [option.to_owned(), file.to_str().unwrap().to_owned()])
            .collect()
    }
}

fn parts(options: &[String]) -> Vec<&str> {
    options.iter().map(String::as_str).collect()
}

#[test]
fn over_tls_the_holder_of_a_certificate_of_the_authority_imports() {
    let mut pair = Pair::new();
    let Some(certificates) = Certificates::make(&pair.near, "good") else {
        return;
    };
    pair.endpoint = pair.endpoint.replace("tcp/", "tls/");
    let (near, far) = pair.domains();
    let publisher = publisher(&near);
    let options = certificates.options(&certificates.authority);
    let _bridges = (
        pair.exporter(&parts(&options)),
        pair.importer(&parts(&options)),
    );
    publish_until_received(&publisher, &mut subscriber(&far));
}

/// Connects `client` with `server`, and reports when both directions have ended.
fn forward(client: TcpStream, server: SocketAddr, ended: Sender<()>) {
    let server = TcpStream::connect(server).unwrap();
    let copy = |mut from: TcpStream, mut to: TcpStream| {
        let mut buffer = [0; 4096];
        while let Ok(count @ 1..) = from.read(&mut buffer) {
            if to.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        // The end goes on to the other side, and ends the other direction.
        let _ = to.shutdown(std::net::Shutdown::Both);
        let _ = from.shutdown(std::net::Shutdown::Both);
    };
    let back = (server.try_clone().unwrap(), client.try_clone().unwrap());
    let back = std::thread::spawn(move || copy(back.0, back.1));
    copy(client, server);
    back.join().unwrap();
    let _ = ended.send(());
}

#[test]
fn a_peer_with_a_certificate_of_another_authority_is_turned_away_each_time() {
    let mut pair = Pair::new();
    let Some(good) = Certificates::make(&pair.near, "good") else {
        return;
    };
    let Some(strange) = Certificates::make(&pair.near, "strange") else {
        return;
    };
    let address = pair.endpoint.trim_start_matches("tcp/").parse().unwrap();
    pair.endpoint = format!("tls/{address}");
    let (near, far) = pair.domains();
    let publisher = publisher(&near);
    let admitted = good.options(&good.authority);
    let mut exporter = pair.exporter(&parts(&admitted));
    exporter.wait_for_line("the bridge is open");
    // The stranger's way, on which each end of a connection is seen: an admitted one would stay.
    let between = TcpListener::bind("127.0.0.1:0").unwrap();
    let way = format!("tls/{}", between.local_addr().unwrap());
    let (ended, ends) = channel();
    std::thread::spawn(move || {
        for client in between.incoming().map_while(Result::ok) {
            let ended = ended.clone();
            std::thread::spawn(move || forward(client, address, ended));
        }
    });
    let options = strange.options(&good.authority);
    let stranger = ["bridge", "--device", "host", "--name", "stranger"];
    let stranger = [&stranger[..], &["--import", "**", "--connect", &way]].concat();
    let elsewhere = World::new();
    let _stranger = elsewhere.start(&[&stranger[..], &parts(&options)].concat());
    for _ in 0..3 {
        ends.recv_timeout(LONG).unwrap();
    }
    let _importer = pair.importer(&parts(&admitted));
    publish_until_received(&publisher, &mut subscriber(&far));
    let said = exporter.wait_for_line("reached");
    assert!(!said.contains("stranger"), "{said}");
}

/// Two network namespaces with one cable between them, as long as this lives.
struct Cable {
    near: ChildProcess,
    far: ChildProcess,
}

impl Cable {
    /// `None` without the right to make a namespace, or without the tools.
    fn lay() -> Option<Cable> {
        let tools = succeeds("unshare", &["-n", "ip", "link"]) && succeeds("nsenter", &["-V"]);
        if !tools {
            println!(
                "skipped: no right to make a network namespace, or no unshare, nsenter and ip"
            );
            return None;
        }
        // Each says that it is there once it is in its namespace.
        let room = || {
            let mut command = Command::new("unshare");
            command.args(["-n", "sh", "-c", "echo there; exec sleep 3600"]);
            command.stdin(Stdio::null()).stdout(Stdio::piped());
            let mut child = ChildProcess::start(&mut command).unwrap();
            let mut said = [0; 6];
            child.take_stdout().unwrap().read_exact(&mut said).unwrap();
            child
        };
        let cable = Cable {
            near: room(),
            far: room(),
        };
        let [near, far] = [&cable.near, &cable.far].map(pid);
        let made = [
            "-t", &near, "-n", "ip", "link", "add", "bridge", "type", "veth", "peer", "name",
            "bridge", "netns", &far,
        ];
        if !succeeds("nsenter", &made) {
            println!("skipped: the kernel has no veth devices");
            return None;
        }
        for (room, address) in [(&near, "10.7.0.1/24"), (&far, "10.7.0.2/24")] {
            for command in [
                &["ip", "addr", "add", address, "dev", "bridge"][..],
                &["ip", "link", "set", "bridge", "up"],
            ] {
                let whole = [&["-t", room, "-n"], command].concat();
                assert!(succeeds("nsenter", &whole), "{whole:?}");
            }
        }
        Some(cable)
    }

    /// Starts a command of `world` in a namespace.
    fn start(room: &ChildProcess, world: &World, arguments: &[&str]) -> Running {
        let inner = world.warpipe(arguments);
        let mut command = Command::new("nsenter");
        command
            .args(["-t", &pid(room), "-n"])
            .arg(inner.get_program());
        command.args(inner.get_args());
        for (name, value) in inner.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        Running::start(command)
    }

    fn set(&self, state: &str) {
        let near = pid(&self.near);
        let whole = ["-t", &near, "-n", "ip", "link", "set", "bridge", state];
        assert!(succeeds("nsenter", &whole), "{whole:?}");
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for room in [&mut self.near, &mut self.far] {
            let _ = room.signal(Signal::KILL);
            let _ = room.wait(PATIENCE);
        }
    }
}

fn pid(child: &ChildProcess) -> String {
    child.pid().as_raw_nonzero().to_string()
}

#[test]
fn a_network_that_is_cut_ends_no_publisher_and_samples_come_again_with_a_gap_when_it_is_back() {
    let Some(cable) = Cable::lay() else { return };
    let mut pair = Pair::new();
    pair.endpoint = "tcp/10.7.0.1:7447".into();
    let (near, far) = pair.domains();
    let publisher = publisher(&near);
    let off_loopback = ["--insecure", "--link-timeout", "1", "--json"];
    let exporting = pair.exporting(&off_loopback);
    let importing = pair.importing(&off_loopback);
    let _exporter = Cable::start(&cable.near, &pair.near, &exporting);
    let mut importer = Cable::start(&cable.far, &pair.far, &importing);
    // It does not reconnect: the same link of the same publisher goes on.
    let mut once = Subscriber::open("camera/front", far.on(&Device::host()), LONG).unwrap();
    let before = publish_until_received(&publisher, &mut once);
    cable.set("down");
    importer.wait_for_line("is unreachable");
    let stream = Device::host().stream().unwrap();
    for _ in 0..3 {
        publisher.send_bytes(&stream, b"unseen").unwrap();
    }
    cable.set("up");
    publish_until_next(&publisher, &mut once, before);
}
