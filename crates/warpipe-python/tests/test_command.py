"""The command ``warpipe``, as pip installs it and as ``python -m warpipe``: the program of the crate ``warpipe-cli``."""

import importlib.metadata
import json
import os
import pathlib
import signal
import subprocess
import sys
import sysconfig

import pytest

import warpipe

from conftest import DEVICE, LIMIT_SECONDS

MODULE = [sys.executable, "-m", "warpipe"]
SCRIPT = [str(pathlib.Path(sysconfig.get_path("scripts")) / "warpipe")]
# Some tests are carried to a machine on which the package lies in a folder and pip has installed nothing.
WAYS = [MODULE] + ([SCRIPT] if os.path.exists(SCRIPT[0]) else [])


@pytest.fixture
def run(tmp_path):
    """Starts the command in a domain of its own."""
    started = []

    def start(arguments, way=MODULE, **options):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL, **options}
        environment = {**os.environ, "WARPIPE_DOMAIN": str(tmp_path / "domain")}
        started.append(subprocess.Popen([*way, *arguments], text=True, env=environment, **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def ended(process):
    """Exit code, output and errors."""
    out, err = process.communicate(timeout=10 * LIMIT_SECONDS)
    return process.returncode, out, err


def test_the_version_is_one_everywhere(run):
    assert warpipe.__version__ == importlib.metadata.version("warpipe")
    for way in WAYS:
        assert ended(run(["--version"], way)) == (0, f"warpipe {warpipe.__version__}\n", "")


def test_help_is_that_of_one_command_line(run):
    said = [ended(run(["--help"], way)) for way in WAYS]
    assert said[0][0] == 0 and "Usage: warpipe <COMMAND>" in said[0][1]
    assert said[1:] == said[:-1]


def test_exit_codes_and_messages_are_those_of_the_program(run):
    assert ended(run(["ls", "--json"])) == (0, "", "")
    code, out, err = ended(run(["sub", "../x", "--device", DEVICE]))
    assert (code, out) == (2, "") and err.startswith("warpipe: ") and "\n  next: " in err
    code, out, err = ended(run(["sub", "nobody", "--device", DEVICE, "--timeout", "0.2"]))
    assert code == 3 and err.startswith("warpipe: ") and "Traceback" not in err
    assert ended(run([]))[0] == 2


def test_files_that_python_names_cannot_encode_reach_the_command(run, tmp_path):
    name = os.fsencode(tmp_path) + b"/\xff.npy"
    with open(name, "wb") as file:
        file.write(b"nonsense")
    code, out, err = ended(run(["pub", "a", name, "--device", DEVICE]))
    assert (code, out) == (5, "") and "Traceback" not in err, err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_wait_in_order(run, tmp_path, number):
    file = tmp_path / "a.bin"
    file.write_bytes(b"a")
    process = run(["pub", "a", str(file), "--device", DEVICE, "--json"])
    assert json.loads(process.stdout.readline())["event"] == "listening"
    process.send_signal(number)
    code, _, err = ended(process)
    assert code == 130 and "Traceback" not in err, err
    assert ended(run(["ls", "--json"])) == (0, "", ""), "the name is gone"


def test_a_reader_that_goes_away_ends_the_command_quietly(run):
    reading, writing = os.pipe()
    process = run(["doctor", "--json"], stdout=writing)
    os.close(writing)
    with os.fdopen(reading) as reader:
        assert json.loads(reader.readline())
    assert ended(process) == (0, None, "")


def test_a_closed_standard_output_is_no_file_of_the_command(run, tmp_path):
    file = tmp_path / "a.bin"
    file.write_bytes(b"seven")
    publisher = run(["pub", "a", str(file), "--device", DEVICE, "--json"])
    assert json.loads(publisher.stdout.readline())["event"] == "listening"
    saved = tmp_path / "saved"
    shell = ["sh", "-c", 'exec "$@" >&-', "sh", *MODULE]
    subscriber = run(["sub", "a", "--device", DEVICE, "--save", str(saved), "--json"], shell)
    assert ended(subscriber)[0] == 0
    assert [path.read_bytes() for path in saved.iterdir()] == [b"seven"]
    assert ended(publisher)[0] == 0


def test_the_children_of_a_command_are_the_command_too(run, tmp_path):
    # A folder of that name in the working directory is not the package.
    (tmp_path / "warpipe").mkdir()
    (tmp_path / "warpipe" / "__init__.py").write_text("raise SystemExit('the wrong package')")
    options = ["--device", DEVICE, "--seconds", "0.2", "--megabytes", "1", "--json"]
    for way in WAYS[-1:]:
        code, out, err = ended(run(["demo", *options], way, cwd=tmp_path if way is not MODULE else None))
        assert code == 0, out + err
        result = [json.loads(line) for line in out.splitlines()][-1]
        assert result["event"] == "result" and result["ok"]
