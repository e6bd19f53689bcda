"""``python -m warpipe.workers MODULE:FUNCTION``: runs a function in worker processes until it is ended."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from typing import NoReturn

from .. import Error
from ..__main__ import _open_standard_streams
from ._reports import PreloadError, WorkersFailedError
from ._supervisor import Workers


class _Ended(BaseException):
    """A signal that ends this process."""

    def __init__(self, number: int) -> None:
        self.number = number


def _end(number: int, _frame: object) -> NoReturn:
    raise _Ended(number)


def main(arguments: list[str] | None = None) -> int:
    """Runs workers as the arguments say, and returns the exit code."""
    options = _parser().parse_args(arguments)
    _open_standard_streams()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    module = options.target.partition(":")[0]
    preload = [name for text in options.preload for name in text.split(",") if name]
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _end)
        with Workers(
            options.target,
            count=options.count,
            standby=options.standby,
            # Its module is imported in each process in any case.
            preload=[*preload, *([module] if module not in preload else [])],
            warm=options.warm,
            name=options.name,
            deaths_max=options.deaths_max,
            deaths_within=options.deaths_within,
            start_delay=options.start_delay,
            preload_timeout=options.preload_timeout,
            warm_timeout=options.warm_timeout,
            grace=options.grace,
        ) as workers:
            workers.wait()
    except _Ended as ended:
        return 128 + ended.number
    except (PreloadError, WorkersFailedError):
        # It was logged when it happened.
        return 1
    except Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m warpipe.workers", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument(
        "target", metavar="MODULE:FUNCTION", help="the work; called with the result of --warm, if given"
    )
    parser.add_argument("--count", type=int, default=1, help="how many work (default 1)")
    parser.add_argument("--standby", type=int, default=0, help="how many more are warmed up and wait (default 0)")
    parser.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="MODULES",
        help="modules that the fork server imports, with commas between them; that of FUNCTION is one",
    )
    parser.add_argument("--warm", metavar="MODULE:FUNCTION", help="called in each process before it is ready")
    parser.add_argument("--name", help="shown in `warpipe ls` and `top` (default: the function's and the process id)")
    parser.add_argument("--deaths-max", type=int, default=5, help="deaths in one place that end all (default 5)")
    parser.add_argument(
        "--deaths-within", type=float, default=60.0, metavar="SECONDS", help="the time in which they count (default 60)"
    )
    parser.add_argument(
        "--start-delay",
        type=float,
        default=0.5,
        metavar="SECONDS",
        help="from a takeover to the start of the next standby (default 0.5)",
    )
    parser.add_argument(
        "--preload-timeout", type=float, default=300.0, metavar="SECONDS", help="the limit of the imports (default 300)"
    )
    parser.add_argument(
        "--warm-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="the limit of a process's start (default 300)",
    )
    parser.add_argument(
        "--grace", type=float, default=5.0, metavar="SECONDS", help="from SIGTERM to SIGKILL at the end (default 5)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
