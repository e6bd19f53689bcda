"""Runs a program of ``examples/mpi`` with one rank that does something at one point: ``POINT RANK ACTION PROGRAM ARGUMENTS``.

The points: ``before`` the rank publishes its memory, ``published`` (but no ticket of it is out yet), ``opened`` (all
tickets are), and ``reducing``, in the middle of the first all-reduce.
"""

import os
import pathlib
import runpy
import signal
import sys

point, rank, action, program, *arguments = sys.argv[1:]
sys.path.insert(0, str(pathlib.Path(program).parent))
import ring  # noqa: E402

made, opened, agreed = ring.Ring.__init__, ring.Ring.open, ring.Ring._agree


def reach(here: str) -> None:
    # MPI_Init is too late to ask MPI, and this the launcher says.
    if (here, os.environ["PMI_RANK"]) == (point, rank):
        print(f"at {here}: pid {os.getpid()}", flush=True)
        os.kill(os.getpid(), getattr(signal, action))


def make(self, *given, **options):
    reach("before")
    made(self, *given, **options)
    reach("published")


def open_all(self, *given):
    opened(self, *given)
    reach("opened")


def agree(self):
    reach("reducing")
    agreed(self)


ring.Ring.__init__, ring.Ring.open, ring.Ring._agree = make, open_all, agree
inner = runpy.run_path(program, run_name="inner")
sys.exit(inner["main"](arguments))
