"""The end of the program, with open endpoints and with calls in progress."""

import subprocess
import sys

import pytest

LIMIT_SECONDS = 120.0

OPEN = """
import ctypes, sys, threading, time
import warpipe
domain, device = warpipe.Domain(sys.argv[1]), warpipe.Device(sys.argv[2])
where = dict(domain=domain, device=device)
publisher = warpipe.Publisher("a", timeout=1.0, **where)
subscriber = warpipe.Subscriber("a", **where)
publisher.wait_for_subscribers()

class Slow:
    # The interpreter ends slowly, so that other threads want it meanwhile. It has no names any more by then.
    def __del__(self, sleep=time.sleep):
        sleep(0.3)

def forever(work):
    def run():
        while True:
            try:
                work()
            except warpipe.Error:
                pass
    threading.Thread(target=run, daemon=True).start()
"""


def ends(tmp_path, device, program, limit=LIMIT_SECONDS):
    """Runs a program to its end. Returns what it wrote."""
    options = {"capture_output": True, "text": True, "timeout": limit}
    kind = f"cuda:{device.ordinal}" if device.kind == "cuda" else "host"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", OPEN + program, tmp_path / "domain", kind], **options)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


def test_the_program_ends_while_threads_wait(tmp_path, device):
    ends(tmp_path, device, """
queue = warpipe.Queue("q", **where)
worker = warpipe.Worker("q", **where)
timeline = warpipe.Timeline.create("t", **where)
semaphore = warpipe.Semaphore.create("s", 1, **where)
permit = semaphore.acquire()
forever(lambda: subscriber.receive(None).release())
forever(lambda: publisher.send(b"x"))
forever(lambda: worker.lease(None))
forever(lambda: timeline.wait(1, timeout=None))
forever(lambda: semaphore.acquire(timeout=None))
time.sleep(0.1)
sys.slow = Slow()
""")


@pytest.mark.parametrize("_time", range(4))
def test_the_program_ends_while_threads_wait_for_what_no_end_of_an_endpoint_ends(tmp_path, device, _time):
    ends(tmp_path, device, """
# The process ends slowly, when there is no interpreter any more.
process = ctypes.CDLL(None)
process.__cxa_atexit(process.usleep, ctypes.c_void_p(300_000), None)
watches = []
for number in range(4):
    forever(lambda: warpipe.weights.open("none", wait=None, **where))
    forever(lambda: warpipe.Subscriber("none", wait=None, **where))
    watches.append(warpipe.weights.watch("none", on=print, **where))
    # At any time one of them is about to look for signals.
    time.sleep(0.012)
""")


def test_the_program_ends_while_threads_have_python_run_below_a_call(tmp_path, device):
    ends(tmp_path, device, """
class Metadata(dict):
    def items(self):
        time.sleep(0)
        return super().items()

class NoTensor:
    def __array__(self, *_arguments, **_options):
        time.sleep(0)
        raise warpipe.LayoutError("none")

for _ in range(8):
    forever(lambda: publisher.send(b"x", metadata=Metadata(a=1)))
    forever(lambda: publisher.send(NoTensor()))
time.sleep(0.1)
sys.slow = Slow()
""")


def test_the_program_ends_while_callbacks_run_and_frames_are_held(tmp_path, device):
    ends(tmp_path, device, """
watch = warpipe.Members.watch(domain, on=lambda change: time.sleep(0.001))
members = [warpipe.Member.join(f"m{number}", domain=domain) for number in range(8)]
publisher.send(b"held")
frame = subscriber.receive()
class Cycle:
    pass
cycle = Cycle()
cycle.itself, cycle.held = cycle, (frame, frame.__dlpack__(), publisher, watch)
sys.modules["cycle"] = cycle
del watch, members, frame, cycle
sys.slow = Slow()
""")


def test_no_callback_begins_once_the_program_ends_and_one_that_runs_is_waited_for(tmp_path, device):
    said = ends(tmp_path, device, """
import atexit
begun = threading.Event()
def slow(change):
    begun.set()
    time.sleep(0.3)
    print("done", flush=True)
watch = warpipe.Members.watch(domain, on=slow)
members = [warpipe.Member.join(f"m{number}", domain=domain) for number in range(8)]
assert begun.wait(30)
""")
    assert 1 <= said.count("done") <= 2


def test_what_exits_use_is_still_there(tmp_path, device):
    said = ends(tmp_path, device, """
import atexit
publisher.send(b"late")
frame = subscriber.receive()
def leave():
    print(frame.tobytes().decode(), publisher.send(b"later", metadata={"a": 1}), subscriber.receive().metadata["a"])
    frame.release()
    subscriber.close()
    publisher.close()
atexit.register(leave)
""")
    assert said == "late 2 1\n"


def test_a_forked_child_ends_while_its_parent_is_inside_a_call(tmp_path, device):
    if device.kind == "cuda":
        pytest.skip("CUDA does not outlive a fork")
    ends(tmp_path, device, """
import os
class Metadata(dict):
    def items(self):
        time.sleep(0.2)
        return super().items()
forever(lambda: publisher.send(b"x", metadata=Metadata(a=1)))
time.sleep(0.05)
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""")


def test_a_thread_that_converts_an_argument_of_its_first_call_is_stopped_at_the_end(tmp_path, device):
    ends(tmp_path, device, """
begun = threading.Event()
class Metadata(dict):
    def items(self):
        begun.set()
        while True:
            time.sleep(0.001)
threading.Thread(target=lambda: publisher.send(b"x", metadata=Metadata(a=1)), daemon=True).start()
begun.wait()
""")


def test_another_interpreter_of_the_process_is_refused_in_words():
    name = "_xxsubinterpreters" if sys.version_info < (3, 13) else "_interpreters"
    pytest.importorskip(name)
    inner = f"""
import sys
sys.path = {sys.path!r}
try:
    import warpipe
except ImportError as error:
    assert "interpreter" in str(error), error
else:
    raise AssertionError("imported")
"""
    # In a process of its own: PyGILState_Check() is always true after Py_NewInterpreter(), and PyTorch computes no
    # gradients then.
    program = f"""
import {name} as interpreters
other = interpreters.create()
assert interpreters.run_string(other, {inner!r}) is None
interpreters.destroy(other)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr


BELOW = """
begun = threading.Barrier(2)

class Endless:
    # Python that runs below a call of ours and does not come back.
    def wait(self, *_arguments, **_options):
        begun.wait()
        while True:
            time.sleep(0.001)

    __float__ = __array__ = __fspath__ = __str__ = wait

def run():
    publisher.name, publisher.closed
    CALL

threading.Thread(target=run, daemon=True).start()
begun.wait()
sys.slow = Slow()
"""


@pytest.mark.parametrize("call", [
    "subscriber.receive(Endless())", "publisher.wait_for_subscribers(1, Endless())", "publisher.send(Endless())",
    "warpipe.Domain(Endless())", "warpipe.Member.join('m', domain=Endless())", "warpipe.Stream(Endless())",
    "held = warpipe.Members.watch(domain, on=Endless().wait), warpipe.Member.join('m', domain=domain); time.sleep(1e6)",
])
def test_the_program_ends_while_a_thread_does_not_come_back_from_python_below_a_call(tmp_path, device, call):
    ends(tmp_path, device, BELOW.replace("CALL", call))


def test_the_program_ends_while_threads_get_errors(tmp_path, device):
    ends(tmp_path, device, """
for _ in range(8):
    forever(lambda: subscriber.receive(0))
    forever(lambda: warpipe.Ticket("none"))
    forever(lambda: warpipe.Device("none"))
time.sleep(0.1)
sys.slow = Slow()
""")


def test_a_forked_child_ends_whatever_threads_of_its_parent_were_doing(tmp_path, device):
    if device.kind == "cuda":
        pytest.skip("CUDA does not outlive a fork")
    ends(tmp_path, device, """
import os, signal
queue, timeline = warpipe.Queue("q", **where), warpipe.Timeline.create("t", **where)
for _ in range(2):
    forever(subscriber.try_receive)
    forever(lambda: (publisher.memory_in_use, timeline.value, queue.state))
for _ in range(60):
    if (child := os.fork()) == 0:
        # One that hangs is ended, and its parent sees it.
        signal.alarm(30)
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
""", limit=5 * LIMIT_SECONDS)


def test_daemon_threads_that_learn_of_the_end_by_an_error_say_nothing(tmp_path, device):
    ends(tmp_path, device, """
queue = warpipe.Queue("q", **where)
worker = warpipe.Worker("q", **where)
def lease():
    for one in worker:
        pass
def receive():
    for one in subscriber:
        pass
def send():
    while True:
        publisher.send(b"x")
def result():
    queue.submit(b"x").result()
for work in (lease, receive, send, result) * 2:
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.1)
sys.slow = Slow()
""")


def test_other_errors_of_threads_are_told_also_at_the_end(tmp_path, device):
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        ends(tmp_path, device, """
import atexit
go = threading.Event()
def divide():
    go.wait()
    1 / 0
thread = threading.Thread(target=divide, daemon=True)
thread.start()
class Late:
    def __del__(self):
        go.set()
        thread.join(5)
sys.late = Late()
atexit.unregister(warpipe._warpipe._end)
warpipe._warpipe._end()
go.set()
thread.join()
""")


def test_a_callback_of_a_job_that_runs_at_the_end_runs_to_its_end(tmp_path, device):
    assert ends(tmp_path, device, """
queue = warpipe.Queue("q", **where)
worker = warpipe.Worker("q", **where)
begun = threading.Event()
def callback(handle):
    begun.set()
    time.sleep(1.0)
    print("done")
queue.submit(b"x").add_done_callback(callback)
worker.lease().complete()
begun.wait()
""") == "done\n"


def test_an_error_of_a_late_finalizer_is_what_it_is(tmp_path, device):
    assert ends(tmp_path, device, """
import builtins
publisher.close()
class Late:
    def __del__(self, send=publisher.send, ValueError=ValueError, print=print, type=type):
        try:
            send(b"x")
        except ValueError as error:
            print(type(error).__name__, flush=True)
late = Late()
# Cleared last of all.
builtins._late = late
del late
""") == "ClosedError\n"


def test_a_permit_that_a_daemon_thread_holds_leaves_no_files_of_its_semaphore(tmp_path, device):
    ends(tmp_path, device, """
semaphore = warpipe.Semaphore.create("s", 1, **where)
held = threading.Event()
def hold():
    with semaphore.acquire():
        held.set()
        threading.Event().wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
publisher.close(); subscriber.close()
""")
    assert [path.name for path in (tmp_path / "domain").iterdir()] == []
