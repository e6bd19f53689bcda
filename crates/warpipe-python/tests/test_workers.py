"""Workers: places that are always taken, standbys that are warm, deaths that are told, and nothing left at the end."""

import functools
import logging
import multiprocessing.forkserver
import os
import pathlib
import signal
import threading
import time

import numpy as np
import places
import pytest
from conftest import LIMIT_SECONDS, until
from test_processes import kills, place  # noqa: F401

import warpipe
from warpipe.workers import PreloadError, Workers, WorkersFailedError

# The first workers of this process decide what its fork server has.
PRELOAD = ["numpy"]


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
    """The processes that have not begun to end."""
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


def test_each_place_has_a_worker_that_was_warmed_up_and_standbys_wait(start, tmp_path, domain):
    workers = start(
        functools.partial(places.say_and_wait, str(tmp_path)), count=2, standby=1, warm=places.warm_up, name="embed"
    )
    workers.wait_until_ready(LIMIT_SECONDS)
    states = [(found.place, found.state) for found in workers.processes]
    assert states == [(0, "working"), (1, "working"), (None, "standby")]
    for found in workers.processes[:2]:
        file = tmp_path / f"place-{found.place}-{found.pid}"
        until(lambda: file.exists() and file.read_text() == "True", "the work, with what warm() made")  # noqa: B023
    pids = [found.pid for found in workers.processes]
    expected = {
        "members/embed",
        f"members/embed/0/{pids[0]}",
        f"members/embed/1/{pids[1]}",
        f"members/embed/standby/{pids[2]}",
    }
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
    assert (death.pid, death.place, death.state, death.exitcode, death.times) == (
        first,
        0,
        "working",
        -signal.SIGKILL,
        1,
    )
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
@pytest.mark.parametrize("leave", [places.leave_a_child, places.leave_a_child_of_a_library])
def test_a_child_that_a_worker_forked_does_not_hide_its_death(start, tmp_path, leave):
    workers = start(functools.partial(leave, str(tmp_path)), standby=1)
    workers.wait_until_ready(LIMIT_SECONDS)
    first = worker_in(workers, 0)
    until(lambda: list(tmp_path.glob("child-*")), "its child")
    kill_one(first)
    replaced(workers, 0, first)
    until(lambda: len(list(tmp_path.glob("child-*"))) == 2, "the next worker's child")
    workers.close()
    for file in tmp_path.glob("child-*"):
        kill_one(int(file.name.partition("-")[2]))


def test_work_that_returns_in_a_forked_child_too_ends_both_well(start, tmp_path):
    start(functools.partial(places.fork_and_return, str(tmp_path))).wait(LIMIT_SECONDS)
    assert (tmp_path / "code").read_text() == "0"


def test_workers_that_always_fail_are_ended_and_the_reason_is_told(start, caplog):
    workers = start(functools.partial(places.fail, "no such model"), deaths_max=3, standby=1)
    with pytest.raises(
        WorkersFailedError, match=r"died 3 times .* in place 0.*raised ValueError: no such model"
    ) as failed:
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
    with pytest.raises(
        WorkersFailedError, match="died 2 times .* before it had a place.*raised ValueError: no context"
    ):
        start(places.wait_for_ever, warm=functools.partial(places.fail, "no context"), deaths_max=2).wait(LIMIT_SECONDS)


def test_a_warm_up_that_exits_is_a_death_whatever_its_code(start):
    with pytest.raises(
        WorkersFailedError, match="died 2 times .* before it had a place.*ended with code 0 while it warmed up"
    ):
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

    threads = [threading.Thread(target=wait) for _ in range(3)] + [
        threading.Thread(target=workers.close) for _ in range(3)
    ]
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


def test_no_exit_code_is_lost_while_other_threads_look_at_processes(start):
    is_over = threading.Event()

    def look():
        while not is_over.is_set():
            multiprocessing.active_children()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        workers = start(functools.partial(places.exit_with, 7), count=2, deaths_max=None)
        for number in range(60):
            until(lambda: len(workers.deaths) > number, "a death")  # noqa: B023
    finally:
        is_over.set()
        looking.join()
    assert {death.exitcode for death in workers.deaths} == {7}


def test_work_that_has_returned_is_not_started_again_before_the_exit_code_is_there(start, tmp_path, monkeypatch):
    started, start_one = [], Workers._start
    monkeypatch.setattr(Workers, "_start", lambda workers: started.append(workers) or start_one(workers))
    file = tmp_path / "go"
    workers = start(functools.partial(places.return_when_there, str(file)))
    workers.wait_until_ready(LIMIT_SECONDS)
    # The exit code comes from the fork server.
    server = multiprocessing.forkserver._forkserver._forkserver_pid
    os.kill(server, signal.SIGSTOP)
    try:
        file.touch()
        until(lambda: workers.processes[0].state == "ending", "the end of the worker")
    finally:
        os.kill(server, signal.SIGCONT)
    workers.wait(LIMIT_SECONDS)
    workers.close()
    assert len(started) == 1


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
            with pytest.raises(warpipe.ClosedError, match="another process"):
                workers.wait()
            # Nor has it a fork server: it is no child of this process.
            with pytest.raises(WorkersFailedError, match="no child of this process, which was forked"):
                start(places.wait_for_ever)
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


# With a service.


@kills
def test_a_request_that_a_killed_worker_held_is_answered_by_the_warm_standby(
    start, tmp_path, place, domain, open_client
):  # noqa: F811
    with warpipe.weights.keep("scale", domain=domain):
        scale = np.full(1, 3, np.float32)
        warpipe.weights.publish("scale", {"scale": scale}, device=place[1], domain=domain, wait=LIMIT_SECONDS).close()
        workers = start(
            functools.partial(places.serve, str(tmp_path)),
            standby=1,
            warm=functools.partial(places.open_server, *place),
            deaths_max=None,
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
