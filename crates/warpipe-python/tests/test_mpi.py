"""``examples/mpi`` under ``mpirun``, with more ranks than cores, and with ranks that are killed or stopped."""

import contextlib
import importlib.util
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from test_processes import kills

HERE = pathlib.Path(__file__).parent
# In the repository, and in the bundle for a GPU machine.
PLACES = [HERE / path for path in ("../../../examples/mpi", "../mpi")]


def find_mpirun():
    """The launcher of MPICH, which the wheel `mpich` brings; that of another MPI starts no ranks of it."""
    found = shutil.which("mpirun", path=f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        return None
    told = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=60, check=False).stdout
    return found if "HYDRA" in told else None


MPIRUN = find_mpirun()
LIMIT_SECONDS = 120.0

pytestmark = pytest.mark.skipif(
    MPIRUN is None or not importlib.util.find_spec("mpi4py") or not any(place.exists() for place in PLACES),
    reason="MPICH or the examples are not here: pip install mpi4py mpich",
)


@pytest.fixture
def mpirun(device, tmp_path):
    """Starts ranks of the example; the fault is of ``mpi_faults.py``."""
    program = str(next(place / "allreduce.py" for place in PLACES if place.exists()))

    def start(ranks, *options, launcher=(), fault=()):
        command = [MPIRUN, *launcher, "-n", str(ranks), sys.executable]
        command += [str(HERE / "mpi_faults.py"), *fault, program] if fault else [program]
        # Ranks that share a core: MPICH's collectives in shared memory would spin, each for a time slice.
        environment = {**os.environ, "MPIR_CVAR_POSIX_NUM_COLLS_THRESHOLD": "1000000000"}
        environment["WARPIPE_DOMAIN"] = str(tmp_path / "domain")
        arguments = ["--device", device.kind, "--rounds", "3", "--nbytes", "300000", *options]
        return subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        )

    return start


def outcome(job):
    said, _ = job.communicate(timeout=LIMIT_SECONDS)
    return job.returncode, said


@pytest.fixture
def ring(device, tmp_path):
    """Compiles the program in C++, and starts ranks of it."""
    source = next((place / "ring.cpp" for place in PLACES if (place / "ring.cpp").exists()), None)
    compiler = MPIRUN and shutil.which("mpicxx", path=f"{pathlib.Path(MPIRUN).parent}:{os.environ['PATH']}")
    tree = os.environ.get("WARPIPE_TEST_C_TREE")
    if source is None or compiler is None or tree is None:
        pytest.skip("no mpicxx, or WARPIPE_TEST_C_TREE names no install tree of the C library")
    program = str(tmp_path / "ring")
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-pedantic", f"-I{tree}/include", f"-L{tree}/lib", "-lwarpipe"]
    subprocess.run([compiler, str(source), *flags, f"-Wl,-rpath,{tree}/lib", "-o", program], check=True, timeout=300)

    def start(ranks, *options):
        command = [MPIRUN, "-disable-auto-cleanup", "-n", str(ranks), program, "--device", device.kind, *options]
        environment = {**os.environ, "WARPIPE_DOMAIN": str(tmp_path / "domain")}
        return outcome(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        )

    return start


@kills
def test_ranks_in_cpp_copy_each_others_memory_and_say_which_died(ring):
    for ranks in (1, 4):
        assert ring(ranks) == (0, f"rank 0: ok: {ranks} ranks have copied each other's memory\n")
    code, said = ring(4, "--kill", "1")
    assert code == 0, said
    for rank in (0, 2, 3):
        assert re.search(rf"^rank {rank}: rank 1 \(pid [1-9]\d*\) has died$", said, re.MULTILINE), said
        assert f"rank {rank}: ok: goes on without rank 1\n" in said
    assert ring(2, "--kill", "2")[0] == ring(2, "--kill", "x")[0] == ring(1, "--what")[0] == 2


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_read_each_others_memory(mpirun, ranks):
    code, said = outcome(mpirun(ranks))
    assert code == 0, said
    assert f"ok: {ranks} ranks read each other's memory" in said
    assert re.search(r"all-reduce of \d+ bytes: warpipe \d+ us, MPI \d+ us", said)


@kills
@pytest.mark.parametrize(("ranks", "victim"), [(4, 2), (2, 0)])
def test_survivors_say_which_rank_died_and_go_on_without_it(mpirun, ranks, victim):
    code, said = outcome(mpirun(ranks, "--kill", str(victim), launcher=["-disable-auto-cleanup"]))
    assert code == 0, said
    survivors = [rank for rank in range(ranks) if rank != victim]
    for rank in survivors:
        assert re.search(rf"^rank {rank}: rank {victim} \(pid [1-9]\d*\) has died$", said, re.MULTILINE), said
        assert re.search(rf"^rank {rank}: released [1-9]\d* bytes, .*; it holds 0$", said, re.MULTILINE), said
        assert f"rank {rank}: ok: ranks [{victim}] have died, and the sums of ranks {survivors} are right" in said
    assert f"rank {survivors[victim % len(survivors)]}: the ticket of rank {victim} opens nothing" in said


@kills
@pytest.mark.parametrize("point", ["before", "published"])
def test_a_rank_that_dies_before_its_ticket_is_out_ends_the_job(mpirun, point):
    # The others wait within MPI, which has no way to say so.
    launcher = ["-disable-auto-cleanup"]
    code, said = outcome(mpirun(3, "--kill", "0", launcher=launcher, fault=[point, "1", "SIGKILL"]))
    assert code != 0, said
    assert f"at {point}: pid " in said and "ok:" not in said


@kills
def test_two_ranks_may_die(mpirun):
    launcher = ["-disable-auto-cleanup"]
    code, said = outcome(mpirun(4, "--kill", "0", "--nbytes", "100000", launcher=launcher, fault=["reducing", "1", "SIGKILL"]))
    # The second death was not asked for.
    assert code != 0, said
    for rank in (2, 3):
        assert f"rank {rank}: ok: ranks [0, 1] have died, and the sums of ranks [2, 3] are right" in said


@kills
def test_a_killed_rank_ends_a_job_that_does_not_ask_otherwise(mpirun):
    code, said = outcome(mpirun(3, fault=["reducing", "1", "SIGKILL"]))
    assert code != 0 and "ok:" not in said, said


def continue_when_stopped(pid):
    """A rank says that it will stop before it does, and a signal to continue before that is lost."""
    end = time.monotonic() + LIMIT_SECONDS
    while pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        assert time.monotonic() < end, "the rank did not stop"
        time.sleep(0.01)
    os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("point", ["before", "reducing"])
def test_a_stopped_rank_is_waited_for(mpirun, point):
    job = mpirun(3, fault=[point, "1", "SIGSTOP"])
    said, pid, continued = "", None, False
    for line in job.stdout:
        said += line
        pid = int(line.split()[-1]) if line.startswith(f"at {point}: pid ") else pid
        if pid and point == "before" and not continued:
            continue_when_stopped(pid)
            continued = True
        elif pid and "has stalled" in line:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    assert job.wait(LIMIT_SECONDS) == 0, said
    assert pid and "ok: 3 ranks" in said


@pytest.mark.parametrize("options", [["--kill", "3"], ["--kill", "-1"], ["--nbytes", "1"], ["--rounds", "0"], ["--what"]])
def test_a_wrong_argument_is_refused(mpirun, options):
    code, said = outcome(mpirun(2, *options))
    assert code == 2 and (options[0] in said or "--what" in said) and "Traceback" not in said, said
