"""The transport's half for GPUs over a stand-in for the driver, which `WARPIPE_FAKE_DRIVER` names the folder of. Each test is a
process of its own: PyTorch has no use for that driver."""

import os
import pathlib
import subprocess
import sys

import pytest

FOLDER = os.environ.get("WARPIPE_FAKE_DRIVER")
pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="declared skip: no WARPIPE_FAKE_DRIVER (cargo xtask engines --ray has it)"
)


@pytest.mark.parametrize(
    "promise",
    ["contents_are_waited_for", "an_abort_ends_the_wait", "a_killed_source_ends_the_wait_and_leaves_what_was_received"],
)
def test_over_the_fake_driver(promise, tmp_path):
    program = pathlib.Path(__file__).with_name("over_fake_driver.py")
    environment = {**os.environ, "LD_LIBRARY_PATH": FOLDER, "WARPIPE_DOMAIN": str(tmp_path / "domain")}
    ended = subprocess.run([sys.executable, program, promise], env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
