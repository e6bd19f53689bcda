"""Whole programs with workers: what becomes of a supervisor, of its fork server, and of the command."""

import contextlib
import os
import pathlib
import select
import signal
import subprocess
import sys

import pytest
from conftest import DEVICE, LIMIT_SECONDS, until
from test_processes import kills

import warpipe

HERE = pathlib.Path(__file__).parent


def gone(pidfds):
    """Waits for the end of processes that others have to reap."""
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], LIMIT_SECONDS)[0], "a process is still there"
        os.close(pidfd)


PROGRAM = """
import functools, logging, os, signal, sys, time
sys.path.insert(0, {here!r})
from warpipe.workers import Workers
import places
{before}
if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    with Workers({target}, domain={domain!r}, {options}) as workers:
        workers.wait_until_ready(60)
        print(*[found.pid for found in workers.processes], flush=True)
        workers.wait()
"""


def program(tmp_path, domain, target, options="count=1", before=""):
    path = tmp_path / "program.py"
    path.write_text(
        PROGRAM.format(here=str(HERE), domain=str(domain.path), target=target, options=options, before=before)
    )
    return [sys.executable, str(path)]


def started(command, **options):
    """A program, and the pidfds of its supervisor's workers and of their fork server."""
    ran = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, **options)
    pids = [int(pid) for pid in ran.stdout.readline().split()]
    assert pids, "it did not begin"
    (fork_server,) = {int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in pids}
    return ran, pids, fork_server


@kills
@pytest.mark.parametrize("case", ["they wait", "they take no signal", "a forked child of the supervisor lives on"])
def test_all_processes_end_with_a_supervisor_that_is_killed(tmp_path, domain, case):
    is_deaf = case == "they take no signal"
    work = f"functools.partial(places.ignore_everything, {str(tmp_path)!r})" if is_deaf else "places.wait_for_ever"
    command = program(tmp_path, domain, work, "count=2, standby=1")
    if case.startswith("a forked child"):
        path = pathlib.Path(command[1])
        fork = "if os.fork() == 0: os.close(1); time.sleep(60); os._exit(0)\n        workers.wait()"
        path.write_text(path.read_text().replace("workers.wait()", fork))
    ran, pids, fork_server = started(command)
    if is_deaf:
        until(lambda: len(list(tmp_path.glob("working-*"))) == 2, "the work")
    # The program waits now, its child is forked.
    until(lambda: len(children(ran.pid)) == (3 if case.startswith("a forked child") else 2), "its children")
    # The fork server lives as long as any process has its descriptors, and a forked child has them.
    ends_with_it = pids if case.startswith("a forked child") else [*pids, fork_server]
    pidfds = [os.pidfd_open(pid) for pid in ends_with_it]
    ran.kill()
    gone(pidfds)
    # Also a forked child.
    os.killpg(ran.pid, signal.SIGKILL)
    ran.wait(LIMIT_SECONDS)


def children(pid):
    """The processes that a process has started and not waited for."""
    found = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for task in os.listdir(f"/proc/{pid}/task"):
        # A thread may have ended meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if int(task) != pid:
                found += pathlib.Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    return found


@kills
def test_workers_outlive_their_fork_server_and_are_replaced_by_a_new_ones(tmp_path, domain):
    program(tmp_path, domain, "places.wait_for_ever", "count=2")
    path = tmp_path / "program.py"
    path.write_text(
        path.read_text().replace(
            "workers.wait()",
            """\
pid = workers.processes[0].pid
        server = int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
        fd = os.pidfd_open(server)
        os.kill(server, signal.SIGKILL)
        import select
        select.select([fd], [], [])
        assert workers.processes[0].pid == pid and not workers.deaths
        os.kill(pid, signal.SIGKILL)
        while not workers.deaths: time.sleep(0.01)
        workers.wait_until_ready(60)
        print("replaced", workers.deaths[0].exitcode, workers.deaths[0].reason)
        server = int(open(f"/proc/{workers.processes[0].pid}/stat").read().rpartition(")")[2].split()[1])
        ends = [os.pidfd_open(found.pid) for found in workers.processes]
        os.kill(server, signal.SIGKILL)
    assert len(select.select(ends, [], [], 0)[0]) == 2, "it has waited for their end"
""",
        )
    )
    ran = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "replaced None ended with code 255, or with one that is lost because the fork server ended" in ran.stdout


def test_ctrl_c_ends_the_supervisor_and_no_worker_dies_of_it(tmp_path, domain):
    ran, pids, fork_server = started(
        program(tmp_path, domain, f"functools.partial(places.say_at_the_end, {str(tmp_path)!r})", "count=2"),
        stderr=subprocess.PIPE,
    )
    until(lambda: len(list(tmp_path.glob("working-*"))) == 2, "the work")
    pidfds = [os.pidfd_open(pid) for pid in (*pids, fork_server)]
    # As a terminal does, to all processes of the group.
    os.killpg(ran.pid, signal.SIGINT)
    _, said = ran.communicate(timeout=LIMIT_SECONDS)
    gone(pidfds)
    assert "KeyboardInterrupt" in said and "death" not in said and said.count("Traceback") == 1, said
    assert len(list(tmp_path.glob("ended-*"))) == 2


def test_a_program_that_ends_without_closing_its_workers_ends_them(tmp_path, domain):
    program(tmp_path, domain, "places.wait_for_ever")
    path = tmp_path / "program.py"
    path.write_text(
        path.read_text()
        .replace("with Workers(", "workers = Workers(")
        .replace(") as workers:", ")")
        .replace("        workers.wait()\n", "")
        .replace("        ", "    ")
    )
    ran = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and ran.stderr == "", ran.stderr
    assert not any(pathlib.Path(f"/proc/{pid}").exists() for pid in ran.stdout.split())


def failing(tmp_path, domain, options, before="", modules=None):
    """What a program says that does not begin."""
    for name, text in (modules or {}).items():
        (tmp_path / f"{name}.py").write_text(text)
    command = program(tmp_path, domain, "places.wait_for_ever", options, before)
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode != 0, ran.stdout
    return ran.stderr


def test_a_module_that_cannot_be_preloaded_is_named_with_its_error(tmp_path, domain):
    modules = {"missing_parts": "import there_is_no_such_module\n", "leaves": "raise SystemExit(3)\n", "good": ""}
    said = failing(tmp_path, domain, "preload=['good', 'missing_parts', 'leaves', 'good_grief']", modules=modules)
    assert (
        "missing_parts: it cannot be imported: ModuleNotFoundError: No module named 'there_is_no_such_module'" in said
    )
    assert "leaves: it cannot be imported: SystemExit: 3" in said and "good_grief: it cannot be imported" in said
    assert " good: " not in said


def test_a_module_that_leaves_a_thread_is_named(tmp_path, domain):
    modules = {
        "busy": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True, name='poller').start()\n"
    }
    said = failing(tmp_path, domain, "preload=['numpy', 'busy', 'json']", modules=modules)
    assert "busy: it has started the thread 'poller', which a forked process does not have" in said
    assert "numpy:" not in said and "json:" not in said


def test_a_module_that_leaves_a_native_thread_is_named_in_a_warning_and_workers_start(tmp_path, domain):
    # A member of a domain has threads of the library.
    (tmp_path / "joined.py").write_text(
        f"import warpipe\nmember = warpipe.Member.join('early', domain={str(domain.path)!r})\n"
    )
    command = program(tmp_path, domain, "places.return_at_once", "preload=['numpy', 'joined', 'json']")
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "preload 'joined' has started" in ran.stderr and "native threads" in ran.stderr
    assert "'numpy'" not in ran.stderr and "'json'" not in ran.stderr


def test_a_module_with_a_thread_that_ends_is_not_blamed(tmp_path, domain):
    (tmp_path / "brief.py").write_text("import _thread, time\n_thread.start_new_thread(time.sleep, (0.3,))\n")
    command = program(tmp_path, domain, "places.return_at_once", "preload=['brief']")
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.skipif(DEVICE == "host", reason="there is no driver to initialise")
def test_a_module_that_uses_cuda_is_named(tmp_path, domain):
    modules = {"early": "import ctypes\nassert ctypes.CDLL('libcuda.so.1').cuInit(0) == 0\n"}
    said = failing(tmp_path, domain, "preload=['numpy', 'early', 'json']", modules=modules)
    assert "early: it has initialised CUDA, which does not survive a fork" in said
    assert "numpy:" not in said and "json:" not in said


def test_a_fork_server_that_ran_before_is_told(tmp_path, domain):
    before = "if __name__ == '__main__':\n    import multiprocessing.forkserver\n    multiprocessing.forkserver.ensure_running()"
    said = failing(tmp_path, domain, "preload=['json']", before=before)
    assert "json: this process's fork server ran before" in said


@kills
def test_a_preload_that_breaks_later_ends_no_worker(tmp_path, domain):
    (tmp_path / "fragile.py").write_text("")
    program(tmp_path, domain, "places.wait_for_ever", "count=2, preload=['fragile'], deaths_max=3")
    path = tmp_path / "program.py"
    path.write_text(
        path.read_text().replace(
            "workers.wait()",
            f"""\
first, other = (process.pid for process in workers.processes)
        server = int(open(f"/proc/{{first}}/stat").read().rpartition(")")[2].split()[1])
        open({str(tmp_path / "fragile.py")!r}, "w").write("raise ValueError('broken now')")
        os.kill(server, signal.SIGKILL)
        os.kill(first, signal.SIGKILL)
        while len(workers.deaths) < 3: time.sleep(0.01)
        assert [process.pid for process in workers.processes if process.state == "working"] == [other]
        print(workers.deaths[1].reason)""",
        )
    )
    ran = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "fragile: it cannot be imported: ValueError: broken now" in ran.stdout


@kills
def test_a_fork_server_that_imports_ends_with_a_supervisor_that_is_killed(tmp_path, domain):
    text = f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n"
    (tmp_path / "endless.py").write_text(text)
    ran = subprocess.Popen(program(tmp_path, domain, "places.wait_for_ever", "preload=['endless']"))
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), "the import")
    pidfd = os.pidfd_open(int((tmp_path / "pid").read_text()))
    ran.kill()
    ran.wait(LIMIT_SECONDS)
    gone([pidfd])


def test_a_preload_that_hangs_is_ended_and_its_line_is_shown(tmp_path, domain):
    said = failing(
        tmp_path, domain, "preload=['endless'], preload_timeout=1", modules={"endless": "import time\ntime.sleep(60)\n"}
    )
    assert "the imports took longer than preload_timeout" in said and 'endless.py", line 2' in said


@pytest.mark.parametrize(
    "order", ["no order", '{"modules": ["antigravity"], "path": [], "limit_seconds": 1, "supervisor": 1}']
)
def test_an_order_for_a_fork_server_that_another_process_inherits_is_nothing_to_it(order):
    code = "import os, warpipe.workers; print(dict(os.environ).get('_WARPIPE_WORKERS_PRELOAD'), warpipe.workers._preload.report)"
    given = {**os.environ, "_WARPIPE_WORKERS_PRELOAD": order}
    ran = subprocess.run([sys.executable, "-c", code], env=given, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "None None\n"), ran.stderr


def test_a_program_without_a_guard_is_told_to_have_one(tmp_path, domain):
    program(tmp_path, domain, "places.wait_for_ever", "deaths_max=1")
    path = tmp_path / "program.py"
    path.write_text(path.read_text().replace('if __name__ == "__main__":', "if True:"))
    ran = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert ran.returncode != 0 and "put them under `if __name__ == '__main__':`" in ran.stderr
    assert "before it had begun" in ran.stderr


@pytest.mark.parametrize("way", ["-c", "-"])
def test_a_program_that_no_file_has_is_told_to_be_one(tmp_path, domain, way):
    program(tmp_path, domain, "work", "deaths_max=1", "def work(): pass")
    text = (tmp_path / "program.py").read_text()
    arguments, given = (["-c", text], "") if way == "-c" else (["-"], text)
    ran = subprocess.run([sys.executable, *arguments], input=given, capture_output=True, text=True, timeout=120)
    assert ran.returncode != 0 and "ArgumentError" in ran.stderr and "in a file" in ran.stderr, ran.stderr
    # Work of a module needs no file of the program, unless the interpreter says that there is one.
    text = text.replace("Workers(work", "Workers(places.return_at_once").replace("deaths_max=1", "count=1")
    text = text.replace("workers.wait_until_ready(60)", "pass")
    arguments, given = (["-c", text], "") if way == "-c" else (["-"], text)
    ran = subprocess.run([sys.executable, *arguments], input=given, capture_output=True, text=True, timeout=120)
    if way == "-c":
        assert ran.returncode == 0, ran.stderr
    else:
        assert ran.returncode != 0 and "ArgumentError" in ran.stderr, ran.stderr


# The command.


def command(*arguments):
    return [sys.executable, "-m", "warpipe.workers", *arguments]


def environment(domain):
    path = os.pathsep.join([str(HERE), *sys.path])
    return {**os.environ, "WARPIPE_DOMAIN": str(domain.path), "PYTHONPATH": path}


def test_the_command_runs_workers_until_it_is_ended(tmp_path, domain):
    arguments = [
        "places:wait_for_ever",
        "--count",
        "2",
        "--standby",
        "1",
        "--preload",
        "numpy,json",
        "--warm",
        "places:warm_up",
        "--name",
        "m",
    ]
    ran = subprocess.Popen(
        command(*arguments), env=environment(domain), cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    expected = ["supervisor", "standby", "worker", "worker"]
    with warpipe.Members.watch(domain, clean=False) as members:
        until(lambda: sorted(one.role for one in members.list()) == sorted(expected), "its members")
        pidfds = [os.pidfd_open(one.pid) for one in members.list()]
        ran.send_signal(signal.SIGTERM)
        assert ran.wait(LIMIT_SECONDS) == 128 + signal.SIGTERM, ran.stderr.read()
    gone(pidfds)
    assert ran.stderr.read() == ""


def test_the_command_says_why_it_cannot_begin_and_why_it_ends(tmp_path, domain):
    def run(*arguments):
        ran = subprocess.run(
            command(*arguments), env=environment(domain), cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        return ran.returncode, ran.stderr

    assert run("places:return_at_once", "--count", "2") == (0, "")
    code, said = run("no_module:work")
    assert code == 1 and "no_module: it cannot be imported" in said
    code, said = run("places:no_function", "--deaths-max", "1")
    assert code == 1 and "no_function" in said and said.count("have been ended") == 1
    code, said = run("places")
    assert code == 1 and "error: target 'places' is not of the form MODULE:FUNCTION" in said


def test_the_command_runs_without_standard_streams(tmp_path, domain):
    ran = subprocess.run(
        ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *command("places:return_at_once")],
        env=environment(domain),
        cwd=tmp_path,
        timeout=60,
    )
    assert ran.returncode == 0
