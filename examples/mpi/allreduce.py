"""MPI ranks add up arrays by reading each other's device memory; when one is killed, the others go on without it.

    pip install mpi4py mpich
    mpirun -n 4 python allreduce.py [--device cuda] [--nbytes 4194304] [--rounds 11]
    mpirun -disable-auto-cleanup -n 4 python allreduce.py --kill 2

MPI starts the processes and carries a text for each: the ticket of the rank's memory. Then each rank maps the memory of its
left neighbour, and a ring exchange and a ring all-reduce read it where it lies. Timelines order the reads: streams wait for
each other, and no CPU does until the end of a round. Every result is checked, and MPI moves the same bytes beside it.

With ``--kill`` a rank kills itself in the middle of an all-reduce. The others say which rank died, release its memory, and
reduce again in a smaller ring, without MPI. Such a run measures nothing.
"""

import argparse
import os
import secrets
import signal
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mpi4py
import numpy as np
from ranks import LIMIT_SECONDS, Keeper, RankLost, Ranks
from ring import FLOAT_BYTES, Ring

import warpipe

# The process that keeps a rank's death from the launcher is no rank, and ranks that have lost one cannot finalise MPI.
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI  # noqa: E402


def inputs(rank: int, number: int, count: int) -> Any:
    """The input of a rank in a round: whole numbers, so that sums are exact in any order."""
    return (np.arange(count, dtype=np.float32) % 251) + np.float32(rank + number % 7)


def check_exchange(ring: Ring, number: int) -> None:
    found = ring.inbox.view(ring.count * len(ring.members), "float32").numpy()
    assert np.array_equal(found, inputs(ring.left, number, found.size)), "the inbox holds the left neighbour's input"


def check_sum(ring: Ring, number: int) -> None:
    found = ring.memory.view(ring.count * len(ring.members), "float32").numpy()
    expected = sum(inputs(rank, number, found.size) for rank in ring.members)
    assert np.array_equal(found, expected), "every rank holds the sum that NumPy computes"


def mpi_exchange(node: MPI.Comm, ring: Ring) -> None:
    """The same as ``Ring.exchange``, by MPI: straight between the buffers on the host, through host memory on a GPU."""
    on_host = ring.device.kind == "host"
    sent = ring.memory.numpy()
    received = ring.inbox.numpy() if on_host else np.empty_like(sent)
    node.Sendrecv(sent, (node.rank + 1) % node.size, recvbuf=received, source=(node.rank - 1) % node.size)
    if not on_host:
        ring.inbox.copy_from(received)


def mpi_all_reduce(node: MPI.Comm, ring: Ring) -> None:
    """The same as ``Ring.all_reduce``, by MPI."""
    total = ring.memory.view(ring.count * len(ring.members), "float32")
    array = total.numpy()
    node.Allreduce(MPI.IN_PLACE, array)
    if ring.device.kind != "host":
        total.copy_from(array)


def measure(node: MPI.Comm, ring: Ring, rounds: int) -> None:
    """Runs each of them ``rounds`` times by turns, checks every result, and prints the medians of the slowest ranks."""
    tasks: list[tuple[str, Callable[[], None], Callable[[MPI.Comm, Ring], None], Callable[[Ring, int], None]]] = [
        ("exchange", ring.exchange, mpi_exchange, check_exchange),
        ("all-reduce", ring.all_reduce, mpi_all_reduce, check_sum),
    ]
    for name, by_warpipe, by_mpi, check in tasks:
        seconds = np.zeros((2, rounds))
        ways: list[Callable[[], None]] = [by_warpipe, partial(by_mpi, node, ring)]
        for number in range(rounds):
            for way, run in enumerate(ways):
                ring.fill(inputs(node.rank, number, ring.count * node.size))
                node.Barrier()
                start = time.perf_counter()
                run()
                seconds[way, number] = time.perf_counter() - start
                check(ring, number)
                node.Barrier()
        slowest = np.empty_like(seconds)
        node.Reduce(seconds, slowest, op=MPI.MAX)
        if node.rank == 0:
            ours, theirs = (statistics.median(times) * 1e6 for times in slowest)
            print(
                f"{name} of {ring.memory.nbytes} bytes: warpipe {ours:.0f} us, MPI {theirs:.0f} us,"
                f" MPI/warpipe {theirs / ours:.2f} (medians of {rounds})",
                flush=True,
            )


def die() -> None:
    Keeper.tell("killed")
    os.kill(os.getpid(), signal.SIGKILL)


def reduce_rounds(ring: Ring, rounds: int, victim: int) -> bool:
    """Reduces ``rounds`` times; the victim dies in the middle. Gives whether no rank was lost."""
    ranks = ring.ranks
    try:
        if ring.ticket is None:
            ring.open(ring.ticket_by_name())
        for number in range(rounds):
            ring.fill(inputs(ranks.rank, number, ring.count * len(ring.members)))
            ring.exchange()
            check_exchange(ring, number)
            ring.all_reduce(die if (ranks.rank, number) == (victim, rounds // 2) else None)
            check_sum(ring, number)
    except RankLost:
        return False
    except warpipe.PeerGoneError:
        ranks.await_loss(ring.members)
        return False
    return True


def reduce_in_smaller_rings(ranks: Ranks, ring: Ring, rounds: int, victim: int) -> list[int]:
    """Reduces, and after each death again in a ring of the ranks that are left, until one ring has done all its rounds.
    Gives that ring's members."""
    while not reduce_rounds(ring, rounds, victim):
        device, nbytes, left = ring.device, ring.nbytes, ring.left
        ticket, held = ring.ticket, device.bytes_held
        ring.close()
        # Also the dead one's: no process has it now.
        ranks.until(lambda: device.bytes_held == 0, "all memory is released")
        ranks.say(f"released {held} bytes, which it had allocated or mapped; it holds {device.bytes_held}")
        if ticket is not None and ranks.lost.get(left) == "died":
            try:
                ticket.open(device=device)
                raise AssertionError("a ticket of a dead rank opens nothing")
            except (warpipe.TicketExpiredError, warpipe.NotFoundError) as error:
                ranks.say(f"the ticket of rank {left} opens nothing: {error}")
        ring = Ring(ranks, [rank for rank in range(ranks.size) if rank not in ranks.lost], device, nbytes)
    members = ring.members
    ring.close()
    return members


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default=None, help="host, cuda or cuda:N; the first GPU by default, else the host")
    parser.add_argument("--nbytes", type=int, default=4 << 20, help="memory of each rank (default: 4 MiB)")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--kill", type=int, default=None, metavar="RANK", help="this rank kills itself half-way")
    options = parser.parse_args(arguments)
    if options.nbytes < FLOAT_BYTES or options.rounds < 1:
        parser.error(f"--nbytes is at least {FLOAT_BYTES}, and --rounds at least 1")
    if options.kill is not None and not Keeper.is_here():
        return Keeper.run()
    # MPI's own waits have no limit.
    signal.alarm(int(LIMIT_SECONDS))
    MPI.Init()
    # The ranks of this machine.
    node = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    if options.kill is not None and not (0 <= options.kill < node.size and node.size > 1):
        if node.rank == 0:
            print(f"--kill {options.kill}: there is no such rank beside others, of {node.size}", file=sys.stderr)
        MPI.Finalize()
        return 2
    device = warpipe.Device(options.device)
    # One name for the job: the domain may have other jobs' names.
    job = node.bcast(f"mpi-{secrets.token_hex(4)}" if node.rank == 0 else None)
    ranks = Ranks(job, node.rank, node.size)
    ring = Ring(ranks, list(range(node.size)), device, options.nbytes)
    tickets = node.allgather(str(ring.published.ticket()))
    ring.open(warpipe.Ticket(tickets[ring.left]))
    if node.rank == 0:
        print(f"{node.size} ranks on {device} ({device.why}); sums by {ring.arrays}", flush=True)
    node.Barrier()
    signal.alarm(0)
    if options.kill is None:
        measure(node, ring, options.rounds)
        ring.close()
        node.Barrier()
        ranks.close()
        MPI.Finalize()
        if ranks.rank == 0:
            print(f"ok: {ranks.size} ranks read each other's memory; every exchange and every sum is right")
        return 0
    # From here on nothing waits within MPI.
    Keeper.tell("survivable")
    members = reduce_in_smaller_rings(ranks, ring, options.rounds, options.kill)
    ranks.close()
    dead = sorted(rank for rank, how in ranks.lost.items() if how == "died")
    ranks.say(f"ok: ranks {dead} have died, and the sums of ranks {members} are right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
