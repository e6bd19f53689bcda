"""Workers: places that are always taken, standbys that are warm, deaths that are told, and nothing left at the end."""

import functools
import logging
import os
import pathlib
import select
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import places
import pytest
from conftest import DEVICE, LIMIT_SECONDS, until
from test_processes import kills, place  # noqa: F401

import warpipe
from warpipe.workers import PreloadError, Workers, WorkersFailedError

# The first workers of this process decide what its fork server has.
PRELOAD = ["numpy"]
HERE = pathlib.Path(__file__).parent


@pytest.fixture
def start(domain):
    """Starts workers that are closed at the end."""
    started = []

    def make(target, **options):
        started.append(Workers(target, domain=domain, preload=PRELOAD, **{"start_delay": 0.0, **options}))
        return started[-1]

    yield make
    for one in started:
        one.close()
        assert one.closed and one.processes == []


def living(workers):
    """The processes without those whose end is under way."""
    return [found for found in workers.processes if found.state != "ending"]


def worker_in(workers, place):
    """The process id of the worker in a place; None while there is none."""
    return next((found.pid for found in workers.processes if found.place == place and found.state == "working"), None)


def replaced(workers, place, pid):
    """Waits for another process in a place, and gives it."""
    until(lambda: worker_in(workers, place) not in (None, pid), "another worker")
    return worker_in(workers, place)


def kill_one(pid):
    os.kill(pid, signal.SIGKILL)


def gone(pidfds):
    """Waits for the end of processes that others have to reap."""
    for pidfd in pidfds:
        assert select.select([pidfd], [], [], LIMIT_SECONDS)[0], "a process is still there"
        os.close(pidfd)


def test_each_place_has_a_worker_that_was_warmed_up_and_standbys_wait(start, tmp_path, domain):
    workers = start(functools.partial(places.say_and_wait, str(tmp_path)), count=2, standby=1, warm=places.warm_up, name="embed")
    workers.wait_until_ready(LIMIT_SECONDS)
    states = [(found.place, found.state) for found in workers.processes]
    assert states == [(0, "working"), (1, "working"), (None, "standby")]
    for found in workers.processes[:2]:
        file = tmp_path / f"place-{found.place}-{found.pid}"
        until(lambda: file.exists() and file.read_text() == "True", "the work, with what warm() made")  # noqa: B023
    pids = [found.pid for found in workers.processes]
    expected = {"members/embed", f"members/embed/0/{pids[0]}", f"members/embed/1/{pids[1]}", f"members/embed/standby/{pids[2]}"}
    until(lambda: {one.name for one in domain.endpoints() if one.alive} == expected, "their names in the domain")
    commands = [pathlib.Path(f"/proc/{pid}/comm").read_text().strip() for pid in pids]
    assert commands == ["embed/0", "embed/1", "embed/standby"]
    assert workers.deaths == []


@kills
def test_a_killed_workers_place_goes_to_the_standby_and_a_new_standby_comes(start, caplog, domain):
    caplog.set_level(logging.WARNING)
    workers = start(places.wait_for_ever, count=2, standby=1, name="embed")
    workers.wait_until_ready(LIMIT_SECONDS)
    first, other, standby = (found.pid for found in living(workers))
    kill_one(first)
    assert replaced(workers, 0, first) == standby and worker_in(workers, 1) == other
    workers.wait_until_ready(LIMIT_SECONDS)
    newest = living(workers)[2]
    assert newest.state == "standby" and newest.pid not in (first, standby)
    until(lambda: workers.deaths, "its exit code")
    (death,) = workers.deaths
    assert (death.pid, death.place, death.state, death.exitcode, death.times) == (first, 0, "working", -signal.SIGKILL, 1)
    assert f"worker 0 of embed (process {first}) was killed by SIGKILL while it worked: death 1" in caplog.text
    # Its files in the domain are removed.
    until(lambda: all(one.alive for one in domain.endpoints()), "the end of the dead worker's name")


@kills
def test_a_killed_standby_is_replaced(start):
    workers = start(places.wait_for_ever, standby=1)
    workers.wait_until_ready(LIMIT_SECONDS)
    worker, standby = (found.pid for found in living(workers))
    kill_one(standby)
    until(lambda: workers.deaths, "its death")
    workers.wait_until_ready(LIMIT_SECONDS)
    assert worker_in(workers, 0) == worker and living(workers)[1].pid != standby
    assert (workers.deaths[0].place, workers.deaths[0].state) == (None, "standby")


@kills
def test_the_next_standby_waits_for_its_delay_and_an_empty_place_does_not(start):
    workers = start(places.wait_for_ever, standby=1, start_delay=2 * LIMIT_SECONDS)
    workers.wait_until_ready(LIMIT_SECONDS)
    first, standby = (found.pid for found in living(workers))
    kill_one(first)
    until(lambda: len(workers.deaths) == 1, "its death")
    assert [(found.pid, found.place) for found in living(workers)] == [(standby, 0)]
    kill_one(standby)
    replaced(workers, 0, standby)
    assert len(living(workers)) == 1


@kills
def test_a_child_that_a_worker_forked_does_not_hide_its_death(start, tmp_path):
    workers = start(functools.partial(places.leave_a_child, str(tmp_path)), standby=1)
    workers.wait_until_ready(LIMIT_SECONDS)
    first = worker_in(workers, 0)
    until(lambda: list(tmp_path.glob("child-*")), "its child")
    kill_one(first)
    replaced(workers, 0, first)
    until(lambda: len(list(tmp_path.glob("child-*"))) == 2, "the next worker's child")
    workers.close()
    for file in tmp_path.glob("child-*"):
        kill_one(int(file.name.partition("-")[2]))


def test_workers_that_always_fail_are_ended_and_the_reason_is_told(start, caplog):
    workers = start(functools.partial(places.fail, "no such model"), deaths_max=3, standby=1)
    with pytest.raises(WorkersFailedError, match=r"died 3 times .* in place 0.*raised ValueError: no such model") as failed:
        workers.wait(LIMIT_SECONDS)
    assert [death.times for death in failed.value.deaths] == [1, 2, 3]
    assert {(death.place, death.exitcode) for death in failed.value.deaths} == {(0, 1)}
    until(lambda: workers.processes == [], "the end of all")
    assert "death 3 within 60 s, all are ended at 3" in caplog.text
    with pytest.raises(WorkersFailedError):
        workers.wait_until_ready(LIMIT_SECONDS)


def test_workers_that_fail_a_few_times_are_started_anew(start, tmp_path):
    workers = start(functools.partial(places.fail_until, str(tmp_path), 3))
    workers.wait(LIMIT_SECONDS)
    assert [death.times for death in workers.deaths] == [1, 2, 3]


def test_a_death_while_it_warms_up_is_told_and_counted(start):
    with pytest.raises(WorkersFailedError, match="died 2 times .* before it had a place.*raised ValueError: no context"):
        start(places.wait_for_ever, warm=functools.partial(places.fail, "no context"), deaths_max=2).wait(LIMIT_SECONDS)


def test_a_warm_up_that_exits_is_a_death_whatever_its_code(start):
    with pytest.raises(WorkersFailedError, match="died 2 times .* before it had a place.*ended with code 0 while it warmed up"):
        start(places.wait_for_ever, warm=functools.partial(places.exit_with, 0), deaths_max=2).wait(LIMIT_SECONDS)


def test_standbys_that_cannot_be_started_end_no_worker(start, tmp_path, caplog):
    warm = functools.partial(places.exit_if_not_first, str(tmp_path))
    workers = start(places.wait_for_ever, warm=warm, standby=1, deaths_max=2)
    until(lambda: len(workers.deaths) >= 2, "the standbys' deaths")
    assert [found.state for found in living(workers)][0] == "working" and workers.deaths[1].times == 2
    assert "a standby of" in caplog.text and "the workers go on" in caplog.text
    with pytest.raises(warpipe.TimeoutError):
        workers.wait(0.1)


@kills
def test_a_start_that_fails_is_tried_again(start, monkeypatch, caplog):
    workers = start(places.wait_for_ever)
    workers.wait_until_ready(LIMIT_SECONDS)
    first, fail_times, starts = worker_in(workers, 0), [2], workers._start

    def failing_start():
        if fail_times[0]:
            fail_times[0] -= 1
            raise OSError(24, "Too many open files")
        return starts()

    monkeypatch.setattr(workers, "_start", failing_start)
    kill_one(first)
    replaced(workers, 0, first)
    assert caplog.text.count("no process could be started: OSError") == 2


def test_any_number_of_threads_may_close_and_wait(start):
    workers, raised = start(places.wait_for_ever, count=2), []

    def wait():
        try:
            workers.wait(LIMIT_SECONDS)
        except warpipe.ClosedError as closed:
            raised.append(closed)

    threads = [threading.Thread(target=wait) for _ in range(3)] + [threading.Thread(target=workers.close) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    assert len(raised) == 3 and workers.closed


def test_a_warm_up_that_hangs_is_ended(start):
    with pytest.raises(WorkersFailedError, match="was not ready within warm_timeout"):
        start(places.wait_for_ever, warm=places.hang, warm_timeout=0.5, deaths_max=1).wait(LIMIT_SECONDS)


def test_a_worker_whose_work_returns_has_finished_and_is_not_replaced(start):
    workers = start(places.return_at_once, count=2, standby=1)
    workers.wait(LIMIT_SECONDS)
    until(lambda: workers.processes == [], "the end of the standby")
    assert workers.deaths == []


def test_an_exit_code_says_whether_a_worker_has_finished(start):
    start(functools.partial(places.exit_with, 0)).wait(LIMIT_SECONDS)
    with pytest.raises(WorkersFailedError, match="ended with code 7 while it worked"):
        start(functools.partial(places.exit_with, 7), deaths_max=1).wait(LIMIT_SECONDS)


def test_at_the_end_workers_are_asked_first_and_then_killed(start, tmp_path):
    workers = start(functools.partial(places.say_at_the_end, str(tmp_path)), count=2)
    until(lambda: len(list(tmp_path.glob("working-*"))) == 2, "the work")
    workers.close()
    assert len(list(tmp_path.glob("ended-*"))) == 2
    deaf = start(functools.partial(places.ignore_everything, str(tmp_path)), grace=0.2)
    until(lambda: len(list(tmp_path.glob("working-*"))) == 3, "the work")
    deaf.close()
    assert workers.deaths == deaf.deaths == []


def test_two_workers_in_one_process_are_apart(start):
    one, two = start(places.wait_for_ever, name="one"), start(places.wait_for_ever, name="two")
    one.wait_until_ready(LIMIT_SECONDS)
    two.wait_until_ready(LIMIT_SECONDS)
    one.close()
    assert [found.state for found in two.processes] == ["working"]
    with pytest.raises(warpipe.NameTakenError):
        start(places.wait_for_ever, name="two")
    with pytest.raises(PreloadError, match="json: this process's fork server was started for other Workers"):
        Workers(places.wait_for_ever, preload=["numpy", "json"])


def test_arguments_that_would_fail_in_another_process_fail_at_once(start):
    def local():
        pass

    for wrong, said in (
        ({"target": local}, "target cannot be sent to another process .*top level of a module"),
        ({"target": places.hang, "warm": lambda: 1}, "warm cannot be sent"),
        ({"target": 3}, "a function, or MODULE:FUNCTION, and not a int"),
        ({"target": "places"}, "not of the form MODULE:FUNCTION"),
        ({"target": places.hang, "count": 0}, "count is 0"),
        ({"target": places.hang, "deaths_max": 0}, "deaths_max is 0"),
        ({"target": places.hang, "name": "n" * 41}, "longer than 40 bytes"),
    ):
        with pytest.raises(warpipe.ArgumentError, match=said):
            start(**wrong)
    with pytest.raises(WorkersFailedError, match="AttributeError.*nothing"):
        start("places:nothing", deaths_max=1).wait(LIMIT_SECONDS)


def test_a_forked_child_of_the_supervisor_ends_nothing_and_keeps_nothing(start):
    workers = start(places.wait_for_ever)
    workers.wait_until_ready(LIMIT_SECONDS)
    pid = worker_in(workers, 0)
    child = os.fork()
    if child == 0:
        try:
            workers.close()
            assert workers.closed
            workers.wait()
        except warpipe.ClosedError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert worker_in(workers, 0) == pid


def test_nothing_is_left_of_closed_workers(start):
    def count():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    # The fork server, and what the library opens once.
    start(places.return_at_once).wait(LIMIT_SECONDS)
    start(places.wait_for_ever).close()
    before = count()
    for _ in range(3):
        workers = start(places.wait_for_ever, count=2, standby=1)
        workers.wait_until_ready(LIMIT_SECONDS)
        workers.close()
    until(lambda: count() <= before, "the end of its descriptors and threads")


# Programs of their own: what becomes of a whole supervisor, and of its fork server.

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
    path.write_text(PROGRAM.format(here=str(HERE), domain=str(domain.path), target=target, options=options, before=before))
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
    return pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split() + [
        child for task in os.listdir(f"/proc/{pid}/task") if int(task) != pid
        for child in pathlib.Path(f"/proc/{pid}/task/{task}/children").read_text().split()
    ]


@kills
def test_workers_outlive_their_fork_server_and_are_replaced_by_a_new_ones(tmp_path, domain):
    program(tmp_path, domain, "places.wait_for_ever", "count=2")
    path = tmp_path / "program.py"
    path.write_text(path.read_text().replace("workers.wait()", f"""\
pid = workers.processes[0].pid
        server = int(open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[1])
        fd = os.pidfd_open(server)
        os.kill(server, signal.SIGKILL)
        import select
        select.select([fd], [], [])
        assert workers.processes[0].pid == pid and not workers.deaths
        os.kill(pid, signal.SIGKILL)
        while not workers.deaths: time.sleep(0.01)
        workers.wait_until_ready(60)
        print("replaced", workers.deaths[0].exitcode, workers.deaths[0].reason)
        server = int(open(f"/proc/{{workers.processes[0].pid}}/stat").read().rpartition(")")[2].split()[1])
        ends = [os.pidfd_open(found.pid) for found in workers.processes]
        os.kill(server, signal.SIGKILL)
    assert len(select.select(ends, [], [], 0)[0]) == 2, "it has waited for their end"
"""))
    ran = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert "replaced None ended with code 255, or with one that is lost because the fork server ended" in ran.stdout


def test_ctrl_c_ends_the_supervisor_and_no_worker_dies_of_it(tmp_path, domain):
    ran, pids, fork_server = started(
        program(tmp_path, domain, f"functools.partial(places.say_at_the_end, {str(tmp_path)!r})", "count=2"), stderr=subprocess.PIPE
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
    path.write_text(path.read_text().replace("with Workers(", "workers = Workers(").replace(") as workers:", ")")
                    .replace("        workers.wait()\n", "").replace("        ", "    "))
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
    assert "missing_parts: it cannot be imported: ModuleNotFoundError: No module named 'there_is_no_such_module'" in said
    assert "leaves: it cannot be imported: SystemExit: 3" in said and "good_grief: it cannot be imported" in said
    assert " good: " not in said


def test_a_module_that_leaves_a_thread_is_named(tmp_path, domain):
    modules = {"busy": "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True, name='poller').start()\n"}
    said = failing(tmp_path, domain, "preload=['numpy', 'busy', 'json']", modules=modules)
    assert "busy: it has started the thread 'poller', which a forked process does not have" in said
    assert "numpy:" not in said and "json:" not in said


def test_a_module_that_leaves_a_native_thread_is_named(tmp_path, domain):
    # A member of a domain has threads of the library.
    modules = {"joined": f"import warpipe\nmember = warpipe.Member.join('early', domain={str(domain.path)!r})\n"}
    said = failing(tmp_path, domain, "preload=['joined']", modules=modules)
    assert "joined: it has started" in said and "native threads" in said


def test_a_module_whose_thread_has_an_end_is_not_blamed(tmp_path, domain):
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
    path.write_text(path.read_text().replace("workers.wait()", f"""\
first, other = (process.pid for process in workers.processes)
        server = int(open(f"/proc/{{first}}/stat").read().rpartition(")")[2].split()[1])
        open({str(tmp_path / "fragile.py")!r}, "w").write("raise ValueError('broken now')")
        os.kill(server, signal.SIGKILL)
        os.kill(first, signal.SIGKILL)
        while len(workers.deaths) < 3: time.sleep(0.01)
        assert [process.pid for process in workers.processes if process.state == "working"] == [other]
        print(workers.deaths[1].reason)"""))
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
    said = failing(tmp_path, domain, "preload=['endless'], preload_timeout=1", modules={"endless": "import time\ntime.sleep(60)\n"})
    assert "the imports took longer than preload_timeout" in said and 'endless.py", line 2' in said


@pytest.mark.parametrize("order", ["no order", '{"modules": ["antigravity"], "path": [], "limit_seconds": 1, "supervisor": 1}'])
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


# The command.


def command(*arguments):
    return [sys.executable, "-m", "warpipe.workers", *arguments]


def environment(domain):
    return {**os.environ, "WARPIPE_DOMAIN": str(domain.path), "PYTHONPATH": str(HERE)}


def test_the_command_runs_workers_until_it_is_ended(tmp_path, domain):
    arguments = ["places:wait_for_ever", "--count", "2", "--standby", "1", "--preload", "numpy,json", "--warm", "places:warm_up", "--name", "m"]
    ran = subprocess.Popen(command(*arguments), env=environment(domain), cwd=tmp_path, stderr=subprocess.PIPE, text=True)
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
        ran = subprocess.run(command(*arguments), env=environment(domain), cwd=tmp_path, capture_output=True, text=True, timeout=120)
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
        ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *command("places:return_at_once")], env=environment(domain), cwd=tmp_path, timeout=60
    )
    assert ran.returncode == 0


# With a service.


@kills
def test_a_request_that_a_killed_worker_held_is_answered_by_the_warm_standby(start, tmp_path, place, domain, open_client):  # noqa: F811
    with warpipe.weights.keep("scale", domain=domain):
        scale = np.full(1, 3, np.float32)
        warpipe.weights.publish("scale", {"scale": scale}, device=place[1], domain=domain, wait=LIMIT_SECONDS).close()
        workers = start(
            functools.partial(places.serve, str(tmp_path)), standby=1, warm=functools.partial(places.open_server, *place), deaths_max=None
        )
        workers.wait_until_ready(LIMIT_SECONDS)
        client, values = open_client(), places.arrays()
        for _ in range(3):
            victim, standby = (found.pid for found in living(workers))
            with client.call(values) as reply:
                assert reply.metadata["pid"] == victim and reply.numpy().tolist() == (values * 3).tolist()
            pending = client.request(values, metadata={"hang": True})
            until((tmp_path / f"accepted-{victim}").exists, "the worker's hang")
            begun = time.monotonic()
            kill_one(victim)
            with pending.result(LIMIT_SECONDS) as reply:
                print(f"{(time.monotonic() - begun) * 1e3:.1f} ms from the kill to the right answer")
                assert (reply.metadata["pid"], reply.attempt) == (standby, 2)
                assert reply.numpy().tolist() == (values * 3).tolist()
            workers.wait_until_ready(LIMIT_SECONDS)
