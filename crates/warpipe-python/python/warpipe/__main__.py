"""The command ``warpipe``, also as ``python -m warpipe``: the command line of the Rust crate ``warpipe-cli``."""

from __future__ import annotations

import os
import signal
import sys

from ._warpipe import _run_command


def main() -> int:
    """Runs the command line of this process, and returns its exit code."""
    # Python's own handler would only note the signal, and no Python code runs that could act on it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    _open_standard_streams()
    return _run_command(["warpipe", *sys.argv[1:]], sys.executable)


def _open_standard_streams() -> None:
    """Opens the null device in place of a closed standard stream, so that no file of a command gets its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


if __name__ == "__main__":
    sys.exit(main())
