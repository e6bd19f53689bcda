//! Help, wrong usage, `doctor` and `ls`.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::support::{Running, World, device};

#[test]
fn an_error_that_nobody_reads_has_its_exit_code() {
    let world = World::new();
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = world.warpipe(&["weights", "ls", "--domain", "/proc/self/exe"]);
    assert_eq!(command.stderr(writer).status().unwrap().code(), Some(2));
}

/// The long words, and the option of another domain, are understood by every command.
#[test]
fn a_channel_in_another_domain_is_published_received_and_listed_by_its_folder() {
    let world = World::new();
    let (folder, file) = (world.path("other"), world.path("a.bin"));
    std::fs::write(&file, "abc").unwrap();
    let (folder, file) = (folder.to_str().unwrap(), file.to_str().unwrap());
    let publish = [
        "publish", "there", file, "--device", "host", "--domain", folder,
    ];
    let publisher = world.start(&publish);
    let subscribe = ["subscribe", "there", "--device", "host", "--domain", folder];
    let received = world.run(&subscribe);
    assert_eq!(received.code, Some(0), "{}", received.err);
    assert_eq!(publisher.end().code, Some(0));
    for command in ["ls", "gc", "members"] {
        let listed = world.run(&[command, "--domain", folder]);
        assert!(listed.out.starts_with(folder), "{command}: {}", listed.out);
    }
    let both = world.run(&["ls", "--domain", folder, "--all-users"]);
    assert_eq!(both.code, Some(2), "{}", both.err);
}

#[test]
fn every_command_explains_itself_and_its_exit_codes() {
    let world = World::new();
    for arguments in [
        &["--help"][..],
        &["demo", "--help"],
        &["pub", "--help"],
        &["sub", "--help"],
        &["doctor", "--help"],
        &["ls", "--help"],
        &["members", "--help"],
        &["weights", "--help"],
        &["weights", "serve", "--help"],
        &["weights", "ls", "--help"],
        &["weights", "drop", "--help"],
        &["weights", "verify", "--help"],
        &["completions", "--help"],
        &["man", "--help"],
    ] {
        let ended = world.run(arguments);
        assert_eq!(ended.code, Some(0), "{arguments:?}");
        for code in ["0    success", "3    no peer", "130  interrupted"] {
            assert!(
                ended.out.contains(code),
                "{arguments:?} does not say {code:?}"
            );
        }
    }
    for (command, detail) in [
        ("demo", "on the device"),
        ("pub", "Fortran order becomes strides"),
        ("sub", "'<V2'"),
        ("doctor", "verdict"),
    ] {
        assert!(
            world.run(&[command, "--help"]).out.contains(detail),
            "{command} does not explain {detail:?}"
        );
    }
    let help = world.run(&["--help"]).out;
    for command in [
        "demo",
        "pub",
        "sub",
        "doctor",
        "ls",
        "members",
        "weights",
        "WARPIPE_DOMAIN",
    ] {
        assert!(help.contains(command), "{command}");
    }
    assert!(
        !help.contains("demo-publisher") && !help.contains("-child"),
        "inner commands stay inside"
    );
}

/// Every subcommand that `--help` lists.
fn subcommands(world: &World) -> Vec<String> {
    let help = world.run(&["--help"]).out;
    let listed = help
        .lines()
        .skip_while(|line| *line != "Commands:")
        .skip(1)
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.split_whitespace().next());
    let names: Vec<String> = listed.map(str::to_owned).collect();
    assert!(names.len() > 8 && names.contains(&"pub".to_owned()));
    names
}

#[test]
fn each_shell_completes_every_subcommand_and_no_inner_one() {
    let world = World::new();
    for shell in ["bash", "zsh", "fish"] {
        let script = world.run(&["completions", shell]);
        assert_eq!((script.code, script.err.as_str()), (Some(0), ""));
        for name in subcommands(&world) {
            assert!(script.out.contains(&name), "{shell} lacks {name}");
        }
        for option in ["subscribers", "void-as", "follow", "verify", "quiet"] {
            assert!(script.out.contains(option), "{shell} lacks {option}");
        }
        assert!(
            !script.out.contains("demo-publisher") && !script.out.contains("-child"),
            "inner commands stay inside"
        );
    }
    let refused = world.run(&["completions", "tcsh"]);
    assert_eq!(refused.code, Some(2));
    assert!(refused.err.contains("bash, zsh, fish"), "{}", refused.err);
}

#[test]
fn bash_takes_the_completion_script() {
    let world = World::new();
    let script = world.run(&["completions", "bash"]).out;
    let asked = "COMP_WORDS=(warpipe mem); COMP_CWORD=1; _warpipe warpipe mem warpipe; \
                 echo \"${COMPREPLY[@]}\"";
    let output = Command::new("bash")
        .args(["--norc", "-c", &format!("{script}\n{asked}")])
        .output()
        .unwrap();
    assert_eq!(crate::support::text(&output), "members\n", "{output:?}");
}

#[test]
fn the_manual_has_a_page_for_every_subcommand() {
    let world = World::new();
    let folder = world.path("man");
    std::fs::create_dir(&folder).unwrap();
    let out = folder.to_str().unwrap();
    assert_eq!(world.run(&["man", "--out", out]).code, Some(0));
    let main = std::fs::read_to_string(folder.join("warpipe.1")).unwrap();
    assert_eq!(world.run(&["man"]).out, main);
    for name in subcommands(&world).iter().filter(|name| *name != "help") {
        assert!(main.contains(&format!("warpipe\\-{name}(1)")), "{name}");
        let page = std::fs::read_to_string(folder.join(format!("warpipe-{name}.1"))).unwrap();
        assert!(page.contains(&format!("warpipe\\-{name}")), "{page}");
        assert_eq!(world.run(&["man", name]).out, page);
        assert!(page.contains("success"), "{name} does not say exit codes");
    }
    for name in ["serve", "ls", "drop", "verify"] {
        let page = std::fs::read_to_string(folder.join(format!("warpipe-weights-{name}.1")));
        let page = page.unwrap();
        assert_eq!(world.run(&["man", &format!("weights-{name}")]).out, page);
        assert!(page.contains("success"), "{name} does not say exit codes");
    }
    assert!(
        !main.contains("demo\\-publisher"),
        "inner commands stay inside"
    );
    for (arguments, expected) in [
        (&["man", "demo-publisher"][..], "completions, man"),
        (&["man", "--out", "/nonexistent/man"], "existing directory"),
    ] {
        let refused = world.run(arguments);
        assert!(refused.err.contains(expected), "{refused:?}");
        assert_ne!(refused.code, Some(0));
    }
}

#[test]
fn the_version_is_that_of_the_crate() {
    let world = World::new();
    let expected = concat!("warpipe ", env!("CARGO_PKG_VERSION"), "\n");
    assert_eq!(world.run(&["--version"]).out, expected);
    assert_eq!(world.run(&["demo", "--version"]).code, Some(0));
}

#[test]
fn wrong_usage_ends_with_2_and_says_what_would_be_right() {
    let world = World::new();
    let file = world.write("a.bin", b"a");
    let file = file.to_str().unwrap();
    let cases: &[(&[&str], &str)] = &[
        (&[], "Usage"),
        (&["pub"], "required"),
        (&["demo", "--device", "gpu"], "cuda:N"),
        (&["demo", "--subscribers", "0"], "1..=32"),
        (&["demo", "--seconds", "0"], "a number above 0"),
        (&["sub", "x", "--count", "0"], "count"),
        (&["pub", "x", file, "--rate", "0"], "samples a second"),
        (&["pub", "x", file, "--void-as", "float7"], "bfloat16"),
        (&["pub", "../x", file], "use a-z A-Z 0-9"),
        (&["sub", "a//b"], "use a-z A-Z 0-9"),
        (&["sub", "", "--timeout", "1"], "use a-z A-Z 0-9"),
    ];
    for (arguments, expected) in cases {
        let ended = world.run(arguments);
        assert_eq!(
            (ended.code, ended.out.as_str()),
            (Some(2), ""),
            "{arguments:?}: {ended:?}"
        );
        assert!(ended.err.contains(expected), "{arguments:?}: {}", ended.err);
    }
}

#[test]
fn a_domain_that_others_may_write_to_is_refused() {
    let world = World::new();
    let domain = world.path("domain");
    std::fs::create_dir(&domain).unwrap();
    std::fs::set_permissions(&domain, std::fs::Permissions::from_mode(0o777)).unwrap();
    for arguments in [&["ls"][..], &["sub", "x", "--device", "host"]] {
        let ended = world.run(arguments);
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert!(
            ended.err.contains("next: ") && ended.err.contains("0700"),
            "{}",
            ended.err
        );
    }
}

#[test]
fn a_name_that_is_taken_is_refused_with_its_holder() {
    let world = World::new();
    let (device, file) = (device(), world.write("a.bin", b"a"));
    let arguments = [
        "pub",
        "camera/front",
        file.to_str().unwrap(),
        "--device",
        &device,
        "--json",
    ];
    let mut first = world.start(&arguments);
    first.wait_for("listening", 1);
    let second = world.run(&arguments);
    assert_eq!(second.code, Some(2), "{second:?}");
    assert!(second.err.contains("is held by process"), "{}", second.err);
    let listed = world.run(&["ls", "--json"]);
    let row = &listed.json()[0];
    assert_eq!(
        (&row["name"], &row["live"]),
        (&"camera/front".into(), &true.into()),
        "{listed:?}"
    );
    assert!(world.run(&["ls"]).out.contains("camera/front"));
    first.signal(rustix::process::Signal::TERM);
    assert_eq!(first.end().code, Some(130));
    assert!(
        world.run(&["ls", "--json"]).out.is_empty(),
        "a publisher that ends takes its name with it"
    );
}

/// A default domain of a user without processes, in the folder where `ls --all-users` looks.
struct DomainOf(u32);

impl DomainOf {
    /// Users of this test's process alone: the same test may run elsewhere on the machine, or have
    /// been killed there.
    fn make(ordinal: u32) -> Self {
        let domain = Self(1_000_000_000 + 2 * std::process::id() + ordinal);
        let _ = std::fs::remove_dir_all(domain.path());
        std::fs::create_dir(domain.path()).unwrap();
        domain
    }

    fn path(&self) -> std::path::PathBuf {
        format!("/tmp/warpipe-{}", self.0).into()
    }
}

impl Drop for DomainOf {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(self.path());
    }
}

#[test]
fn root_lists_the_domains_of_all_users_and_others_are_told_why_not() {
    use std::os::unix::process::CommandExt;
    let world = World::new();
    if !rustix::process::geteuid().is_root() {
        let refused = world.run(&["ls", "--all-users"]);
        assert_eq!(refused.code, Some(7), "{refused:?}");
        assert!(refused.err.contains("only root"), "{}", refused.err);
        return println!("skipped: only root can list the domains of others");
    }
    let (user, liar) = (DomainOf::make(0), DomainOf::make(1));
    // The second is not its user's: root made it, as anybody may in `/tmp`.
    std::os::unix::fs::chown(user.path(), Some(user.0), Some(user.0)).unwrap();
    let listener = std::os::unix::net::UnixListener::bind(user.path().join("x.sock"));
    drop(listener.unwrap());
    let listed = world.run(&["ls", "--all-users", "--json"]);
    assert_eq!(listed.code, Some(0), "{listed:?}");
    let rows = listed.json();
    let row = rows.iter().find(|row| row["uid"] == user.0).unwrap();
    assert_eq!((&row["name"], &row["live"]), (&"x".into(), &false.into()));
    assert!(
        listed.err.contains(&format!("warpipe-{}", liar.0)),
        "{}",
        listed.err
    );
    let text = world.run(&["ls", "--all-users"]).out;
    assert!(text.contains(&format!("(user {})", user.0)), "{text}");

    // The program itself may lie where another user cannot run it.
    let program = user.path().join("warpipe");
    std::fs::copy(env!("CARGO_BIN_EXE_warpipe"), &program).unwrap();
    let mut command = std::process::Command::new(&program);
    command.args(["ls", "--all-users"]).uid(user.0).gid(user.0);
    let refused = command.output().unwrap();
    let error = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(7), "{error}");
    assert!(error.contains("only root"), "{error}");
}

#[test]
fn a_killed_publisher_is_listed_as_stale() {
    let world = World::new();
    let (device, file) = (device(), world.write("a.bin", b"a"));
    let mut publisher = world.start(&[
        "pub",
        "x",
        file.to_str().unwrap(),
        "--device",
        &device,
        "--json",
    ]);
    publisher.wait_for("listening", 1);
    publisher.signal(rustix::process::Signal::KILL);
    publisher.end();
    assert_eq!(world.run(&["ls", "--json"]).json()[0]["live"], false);
}

#[test]
fn a_file_that_is_no_endpoints_is_listed_as_foreign_and_not_as_stale() {
    let world = World::new();
    let domain = world.path("domain");
    drop(warpipe::Domain::at(&domain).unwrap());
    std::os::unix::fs::symlink("/nowhere", domain.join("link.lock")).unwrap();
    std::fs::create_dir(domain.join("folder.sock")).unwrap();
    std::fs::write(domain.join("text.lock"), "somebody's").unwrap();
    let fifo = Command::new("mkfifo")
        .arg(domain.join("fifo.sock"))
        .status();
    assert!(fifo.unwrap().success());
    let kinds = [
        ("fifo", "a FIFO"),
        ("folder", "a directory"),
        ("link", "a symlink"),
        ("text", "a file with somebody else's contents"),
    ];
    let rows = world.run(&["ls", "--json"]).json();
    let found = rows.iter().map(|row| {
        assert_eq!(row["live"], false);
        (
            row["name"].as_str().unwrap(),
            row["foreign"].as_str().unwrap(),
        )
    });
    assert_eq!(found.collect::<Vec<_>>(), kinds);
    for arguments in [&["ls"][..], &["ls", "-v"]] {
        let text = world.run(arguments).out;
        assert!(
            !text.contains("stale") && !text.contains("takes it over"),
            "{text}"
        );
        for (name, kind) in kinds {
            let line = text.lines().find(|line| line.contains(name)).unwrap();
            assert!(line.contains("foreign") && line.contains(kind), "{line}");
        }
    }
    let device = device();
    let file = world.write("a.bin", b"a");
    let refused = world.run(&["pub", "link", file.to_str().unwrap(), "--device", &device]);
    assert!(refused.err.contains("a symlink"), "{refused:?}");
}

#[test]
fn a_limit_of_file_sizes_is_an_error_that_names_it() {
    let world = World::new();
    let file = world.write("a.bin", &[7; 1 << 20]);
    let mut command = Command::new("sh");
    let script = format!(
        "ulimit -f 2048; exec '{}' pub x '{}' --device host",
        env!("CARGO_BIN_EXE_warpipe"),
        file.display()
    );
    command
        .args(["-c", &script])
        .env("WARPIPE_DOMAIN", world.path("domain"));
    // Its links have room, and a region has not.
    let _subscriber = world.start(&["sub", "x", "--device", "host"]);
    let ended = Running::start(command).end();
    assert_eq!(ended.code, Some(7), "{ended:?}");
    assert!(ended.err.contains("ulimit -f"), "{ended:?}");
}

#[test]
fn an_empty_domain_variable_counts_as_none_and_a_relative_one_is_refused() {
    let world = World::new();
    for arguments in [
        &["ls"][..],
        &["gc"],
        &["top", "--once"],
        &["weights", "ls"],
        &["members"],
    ] {
        let mut command = world.warpipe(arguments);
        let ended = Running::start({
            command
                .env("WARPIPE_DOMAIN", "relative")
                .current_dir(world.path(""));
            command
        });
        let ended = ended.end();
        assert_eq!(ended.code, Some(2), "{arguments:?} {ended:?}");
        assert!(ended.err.contains("absolute path"), "{ended:?}");
        let mut command = world.warpipe(arguments);
        command
            .env("WARPIPE_DOMAIN", "")
            .env("XDG_RUNTIME_DIR", world.path(""));
        let ended = Running::start(command).end();
        assert_eq!(ended.code, Some(0), "{arguments:?} {ended:?}");
    }
    assert!(!world.path("relative").exists());
}

#[test]
fn a_publisher_nobody_subscribes_to_says_so() {
    let world = World::new();
    let file = world.write("a.bin", b"a");
    let ended = world.run(&[
        "pub",
        "x",
        file.to_str().unwrap(),
        "--device",
        &device(),
        "--timeout",
        "0.3",
        "--json",
    ]);
    assert_eq!(ended.code, Some(3), "{ended:?}");
    assert!(ended.events("sent").is_empty());
}

#[test]
fn a_reader_that_goes_away_ends_the_command_quietly() {
    let world = World::new();
    let binary = env!("CARGO_BIN_EXE_warpipe");
    let script = format!("'{binary}' doctor --json | head -n 1");
    let output = Command::new("sh")
        .args(["-c", &script])
        .env("WARPIPE_DOMAIN", world.path("domain"))
        .output()
        .unwrap();
    assert_eq!(crate::support::text(&output).lines().count(), 1);
    assert!(
        output.stderr.is_empty(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn a_program_that_ignores_its_childrens_ends_may_start_a_command_that_has_children() {
    let world = World::new();
    let arguments = [
        "demo",
        "--device",
        "host",
        "--seconds",
        "0.1",
        "--megabytes",
        "1",
    ];
    let ended = Running::start(world.by_shell("trap '' CHLD", &arguments)).end();
    assert_eq!(ended.code, Some(0), "{ended:?}");
}

#[test]
fn the_doctor_finds_the_host_backend_working_completely() {
    let world = World::new();
    let ended = world.run(&["doctor", "--json"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let checks = ended.json();
    for name in [
        "shared memory",
        "read-only mapping",
        "stream memory operations",
        "channel",
    ] {
        let check = checks
            .iter()
            .find(|check| check["check"] == name && check["device"] == "host");
        assert_eq!(check.unwrap()["verdict"], "ok", "{name}: {ended:?}");
    }
    let summary = checks.last().unwrap();
    assert_eq!(summary["check"], "summary");
    assert!(
        summary["working"]
            .as_array()
            .unwrap()
            .contains(&"host".into()),
        "{summary}"
    );
    let unexplained = checks
        .iter()
        .find(|check| check["verdict"] == "failed" && check["next"].as_str().is_none());
    assert_eq!(unexplained, None, "what fails says what to do");
}

#[test]
fn the_doctor_says_what_to_do_about_too_few_descriptors() {
    let world = World::new();
    let mut command = Command::new("sh");
    let script = format!(
        "ulimit -n 100; exec '{}' doctor --json",
        env!("CARGO_BIN_EXE_warpipe")
    );
    command
        .args(["-c", &script])
        .env("WARPIPE_DOMAIN", world.path("domain"));
    let ended = Running::start(command).end();
    let check = ended
        .json()
        .into_iter()
        .find(|check| check["check"] == "file descriptors")
        .unwrap();
    assert_eq!(check["verdict"], "failed", "{ended:?}");
    assert!(
        check["next"].as_str().unwrap().contains("ulimit -n"),
        "{check}"
    );
}

#[test]
fn the_doctor_says_why_a_profiler_gets_no_ranges() {
    let world = World::new();
    let mut command = world.warpipe(&["doctor", "--json"]);
    command.env("NVTX_INJECTION64_PATH", "/nowhere/profiler.so");
    let ended = Running::start(command).end();
    let check = ended
        .json()
        .into_iter()
        .find(|line| line["check"] == "profiler ranges")
        .expect("it is looked at");
    assert_eq!(check["verdict"], "no", "{check}");
    assert!(
        check["detail"]
            .as_str()
            .unwrap()
            .contains("/nowhere/profiler.so cannot be loaded"),
        "{check}"
    );
    assert!(
        check["next"]
            .as_str()
            .unwrap()
            .contains("NVTX_INJECTION64_PATH"),
        "{check}"
    );
}

#[test]
fn an_output_that_cannot_be_written_is_an_error_that_names_it() {
    let world = World::new();
    let full = std::fs::File::options()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let output = world.warpipe(&["ls"]).stdout(full).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(7), "{said}");
    assert!(said.contains("standard output cannot be written"), "{said}");
}

#[test]
#[cfg(not(feature = "bridge"))]
fn a_command_without_the_bridge_says_how_to_get_it() {
    let world = World::new();
    for arguments in [
        &["bridge"][..],
        &["bridge", "--help"],
        &["bridge", "--listen", "tcp/127.0.0.1:0", "--export", "**"],
    ] {
        let refused = world.run(arguments);
        assert_eq!(
            (refused.code, refused.out.as_str()),
            (Some(2), ""),
            "{refused:?}"
        );
        assert!(refused.err.contains("--features bridge"), "{refused:?}");
    }
}
