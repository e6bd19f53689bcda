"""LMCache's daemon and its adapter, with KV memory by descriptors over the fake driver."""

import os
import signal
import socket
import subprocess
import sys

import msgspec
import pytest
from processes import MODULES, environment, until

CHUNK = 256
TOKENS = list(range(2 * CHUNK))
# Two chunks of 16 blocks.
BLOCKS, OTHERS = list(range(1, 33)), list(range(64, 96))


def registered(worker):
    return worker.ask("status")["registered_gpu_ids"]


def other_process(place, code, *arguments, **more):
    """A program with the place's environment, and what it has said."""
    command = [*more.pop("prefix", ()), sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=environment(place.folder), capture_output=True, text=True, timeout=120, **more)


def test_lmcache_finds_and_loads_the_entry_point(place):
    code = """
from lmcache.v1.platform import _DEVICE_REGISTRY
spec = _DEVICE_REGISTRY["warpipe"]
print(type(spec).__module__, spec.device_type, spec.is_available())
"""
    found = other_process(place, code)
    assert found.stdout.split() == ["warpipe_lmcache.device", "cuda", "False"], found.stderr


@pytest.mark.parametrize("scheme", ["tcp", "grpc"])
def test_kv_memory_is_registered_by_descriptors_stored_and_loaded(place, scheme):
    if scheme == "grpc":
        pytest.importorskip("grpc", reason="declared skip: no grpcio")
    daemon = place.daemon("--transport", "zmq" if scheme == "tcp" else scheme)
    worker = place.worker(scheme=scheme)
    nbytes = worker.ask("register", 3, 128)
    assert registered(worker) == [worker.instance]
    mapped, held = daemon.mappings()
    assert mapped >= nbytes and held == 3
    worker.ask("fill", BLOCKS, 5)
    assert worker.ask("store", "a", TOKENS, BLOCKS)
    until(lambda: worker.ask("lookup", "b", TOKENS) == 2, "the chunks are stored")
    assert worker.ask("retrieve", "c", TOKENS, OTHERS)
    assert worker.ask("values", OTHERS) == [5, 6, 7]
    worker.ask("unregister")
    assert registered(worker) == []
    assert daemon.mappings() == (0, 0)


def test_another_worker_has_what_the_first_one_stored(place):
    place.daemon()
    first, second = place.worker("first"), place.worker("second")
    first.ask("register", 2, 64), second.ask("register", 2, 64)
    first.ask("fill", BLOCKS, 3)
    assert first.ask("store", "a", TOKENS, BLOCKS)
    first.kill()
    until(lambda: second.ask("retrieve", "b", TOKENS, BLOCKS), "the chunks are there")
    assert second.ask("values", BLOCKS) == [3, 4]


def test_a_killed_workers_memory_is_released_at_once(place):
    daemon, watcher = place.daemon(), place.worker("watcher")
    for turn in range(3):
        worker = place.worker(f"worker{turn}")
        worker.ask("register", 3, 256)
        assert daemon.mappings()[0] > 0
        worker.kill()
        until(lambda: daemon.mappings() == (0, 0), "the daemon has let go of the memory")
        until(lambda: registered(watcher) == [], "LMCache has forgotten the instance")
        assert watcher.ask("status")["warpipe"]["instances"] == {}
    assert list((place.folder / "domain" / "lmcache.fds").iterdir()) == []


def test_a_killed_workers_memory_is_released_whatever_its_folder_is(place):
    daemon, watcher = place.daemon(), place.worker("watcher")
    first, second = place.worker("first"), place.worker("second")
    first.ask("register", 2, 64), second.ask("register", 2, 64)
    # No socket is used in such a folder.
    os.chmod(place.folder / "domain" / "lmcache.fds", 0o750)
    first.ask("unregister")
    assert registered(watcher) == [second.instance]
    second.kill()
    until(lambda: registered(watcher) == [] and daemon.mappings() == (0, 0), "the daemon has let go of the memory")


def test_a_worker_that_ends_without_unregistering_is_released(place):
    daemon, watcher, worker = place.daemon(), place.worker("watcher"), place.worker()
    worker.ask("register", 2, 64)
    worker.process.stdin.close()
    worker.process.wait(60)
    until(lambda: registered(watcher) == [] and daemon.mappings() == (0, 0), "the daemon has let go of the memory")


def test_workers_that_are_killed_at_any_time_leave_nothing(place):
    daemon, watcher = place.daemon(), place.worker("watcher")
    watcher.ask("register", 1, 64)
    rest = daemon.mappings()
    workers = [place.worker(f"worker{number}") for number in range(4)]
    for number, worker in enumerate(workers):
        # In the middle of its registration, or of a transfer, a little later each time.
        worker.send("register", 4, 128)
        for turn in range(number):
            worker.send("store", f"{number}.{turn}", list(range(turn * CHUNK, (turn + 2) * CHUNK)), BLOCKS)
        if number:
            worker.reply()
        worker.kill()
    until(lambda: registered(watcher) == [watcher.instance] and daemon.mappings() == rest, "nothing is left")
    watcher.ask("fill", BLOCKS, 1)
    assert watcher.ask("store", "a", [7] * CHUNK, BLOCKS)


def test_memory_stays_mapped_until_the_transfers_of_its_registration_are_over(place):
    daemon, watcher, worker = place.daemon(), place.worker("watcher"), place.worker(FAKE_CUDA_DELAY_US="600000000")
    worker.ask("register", 1, 64)
    mapped = daemon.mappings()
    worker.ask("submit", "a", TOKENS, BLOCKS)
    until(lambda: watcher.ask("status")["warpipe"]["transfers"] == 1, "the daemon waits for the worker's stream")
    # As an engine does that is shut down; its reply is not held up.
    worker.ask("unregister")
    watcher.ask("register", 1, 64)
    assert watcher.ask("status")["warpipe"]["transfers"] == 1
    assert daemon.mappings()[0] == 2 * mapped[0]
    watcher.ask("unregister")
    # The wait ends with its worker.
    worker.kill()
    until(lambda: registered(watcher) == [] and daemon.mappings() == (0, 0), "the daemon has let go of the memory")


def test_a_transfer_whose_event_nobody_can_wait_for_is_answered(place):
    """LMCache answers nothing to a request that failed by an error, and an engine waits for the answer without a limit."""
    place.daemon()
    worker = place.worker()
    worker.ask("register", 2, 128)
    worker.ask("fill", BLOCKS, 1)
    assert worker.ask("store", "a", TOKENS, BLOCKS, True) is False
    assert not worker.ask("lookup", "b", TOKENS)
    assert worker.ask("store", "c", TOKENS, BLOCKS)
    until(lambda: worker.ask("lookup", "d", TOKENS) == 2, "the chunks are there")
    assert worker.ask("retrieve", "e", TOKENS, OTHERS, True) is False
    assert worker.ask("retrieve", "f", TOKENS, OTHERS)
    assert worker.ask("values", OTHERS) == [1, 2]


def test_an_interrupted_daemon_ends_in_the_middle_of_a_wait(place):
    daemon, worker = place.daemon(), place.worker(FAKE_CUDA_DELAY_US="600000000")
    worker.ask("register", 1, 64)
    worker.ask("submit", "a", TOKENS, BLOCKS)
    # It answers other requests while its thread for transfers waits for the worker's stream.
    until(lambda: worker.ask("status")["warpipe"]["transfers"] == 1, "the daemon waits")
    os.kill(daemon.pid, signal.SIGINT)
    daemon.process.wait(60)
    assert "MPCacheServer closed" in daemon.log.read_text()


def test_a_stopped_worker_keeps_its_registration_and_holds_nobody_up(place):
    daemon, other, worker = place.daemon(), place.worker("other"), place.worker()
    worker.ask("register", 2, 64)
    os.kill(worker.pid, signal.SIGSTOP)
    other.ask("register", 2, 64)
    other.ask("fill", BLOCKS, 1)
    assert other.ask("store", "a", TOKENS, BLOCKS)
    assert sorted(registered(other)) == sorted([worker.instance, other.instance])
    os.kill(worker.pid, signal.SIGCONT)
    worker.ask("fill", BLOCKS, 2)
    assert worker.ask("store", "b", list(range(1000, 1000 + CHUNK)), BLOCKS)
    assert daemon.process.poll() is None


def test_what_a_killed_worker_had_not_finished_is_not_stored(place):
    """Its stream reaches the event long after the kill: with CUDA's events the store would read it as complete."""
    place.daemon()
    watcher, worker = place.worker("watcher"), place.worker(FAKE_CUDA_DELAY_US="600000000")
    worker.ask("register", 2, 64), watcher.ask("register", 2, 64)
    worker.ask("fill", BLOCKS, 1)
    worker.ask("submit", "a", TOKENS, BLOCKS)
    until(
        lambda: watcher.ask("status")["warpipe"]["transfers"] or watcher.ask("lookup", "begun", TOKENS),
        "the daemon has begun with the store",
    )
    worker.kill()
    until(lambda: registered(watcher) == [watcher.instance], "the worker's registration has ended")
    assert not watcher.ask("lookup", "b", TOKENS)
    # The same tokens can be stored by another one.
    watcher.ask("fill", BLOCKS, 9)
    assert watcher.ask("store", "c", TOKENS, BLOCKS)
    until(lambda: watcher.ask("lookup", "d", TOKENS) == 2, "the chunks are there")


def test_a_restarted_daemon_has_the_registrations_of_living_workers(place):
    daemon = place.daemon()
    first, second, dead = place.worker("first"), place.worker("second"), place.worker("dead")
    for worker in (first, second, dead):
        worker.ask("register", 2, 128)
    first.ask("fill", BLOCKS, 4)
    assert first.ask("store", "a", TOKENS, BLOCKS)
    for turn in range(2):
        daemon.kill()
        dead.kill()
        daemon = place.daemon()
        assert sorted(registered(first)) == sorted([first.instance, second.instance])
        # With its memory, where it was.
        assert daemon.mappings()[0] > 0
        # Both have a moment without their daemon, when it refuses one ping.
        until(lambda: first.ask("store", f"b{turn}", TOKENS, BLOCKS), "the worker has its daemon again")
        until(lambda: second.ask("retrieve", f"c{turn}", TOKENS, OTHERS), "the other one, too")
        assert second.ask("values", OTHERS) == [4, 5]
    assert len(os.listdir(place.folder / "domain" / "lmcache.fds")) == 2


def test_requests_that_the_dead_daemon_had_come_to_an_end(place):
    daemon, worker = place.daemon(), place.worker()
    worker.ask("register", 2, 64)
    worker.ask("fill", BLOCKS, 1)
    assert worker.ask("store", "a", TOKENS, BLOCKS)
    os.kill(daemon.pid, signal.SIGSTOP)
    worker.ask("submit", "pending", TOKENS, BLOCKS)
    daemon.kill()
    place.daemon()
    # The adapter sees the new daemon refuse one ping, and gives up what has no answer to come.
    until(lambda: worker.ask("finished")[0] == ["pending"], "the engine has its request back")
    until(lambda: worker.ask("store", "b", TOKENS, BLOCKS), "and its daemon")


def test_an_engine_outlives_the_daemon_whose_first_answer_it_has(place):
    """The answer names an event that nobody can open any more."""
    daemon, worker = place.daemon(), place.worker()
    worker.ask("register", 2, 64)
    worker.ask("fill", BLOCKS, 1)
    worker.ask("submit", "answered", TOKENS, BLOCKS)
    until(lambda: worker.ask("replied", "answered"), "the daemon's answer")
    daemon.kill()
    # At once: later the adapter has seen that its daemon is gone, and looks at no answer.
    done = worker.ask("finished")[0]
    place.daemon()
    until(lambda: "answered" in (done or worker.ask("finished")[0]), "the engine has its request back")
    until(lambda: worker.ask("store", "b", TOKENS, BLOCKS), "and its daemon")


def test_a_worker_that_was_stopped_at_the_restart_registers_itself(place):
    daemon, worker = place.daemon(), place.worker()
    worker.ask("register", 2, 64)
    worker.ask("fill", BLOCKS, 1)
    assert worker.ask("store", "a", TOKENS, BLOCKS)
    os.kill(worker.pid, signal.SIGSTOP)
    daemon.kill()
    place.daemon()
    os.kill(worker.pid, signal.SIGCONT)
    until(lambda: worker.ask("store", "b", TOKENS, BLOCKS), "the worker has its daemon again")
    assert registered(worker) == [worker.instance]


def test_a_withdrawn_registration_does_not_come_back(place):
    daemon, worker = place.daemon(), place.worker()
    worker.ask("register", 2, 64)
    worker.ask("unregister")
    daemon.kill()
    place.daemon()
    assert registered(worker) == []


def test_a_second_registration_counts_after_a_restart(place):
    """LMCache's heartbeat registers an instance that the daemon knows, with new descriptors."""
    daemon, worker = place.daemon(), place.worker()
    worker.ask("register", 2, 64)
    for _ in range(3):
        assert worker.ask("again")
    export_ids, _ = worker.ask("served")
    assert len(export_ids) == 4
    daemon.kill()
    daemon = place.daemon()
    assert registered(worker) == [worker.instance]
    worker.kill()
    until(lambda: daemon.mappings() == (0, 0), "the daemon has let go of the memory")


@pytest.mark.parametrize("options", [["--pid", "--fork"], ["--pid", "--fork", "--ipc", "--mount", "--mount-proc"]])
def test_a_worker_in_another_pid_namespace(place, options):
    prefix = ["unshare", *options]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("declared skip: unshare is not permitted here")
    daemon, watcher = place.daemon(), place.worker("watcher")
    worker = place.worker(prefix=prefix)
    worker.ask("register", 2, 128)
    worker.ask("fill", BLOCKS, 8)
    assert worker.ask("store", "a", TOKENS, BLOCKS)
    until(lambda: worker.ask("retrieve", "b", TOKENS, OTHERS), "the chunks are there")
    assert worker.ask("values", OTHERS) == [8, 9]
    daemon.kill()
    daemon = place.daemon()
    assert registered(watcher) == [worker.instance]
    worker.kill()
    until(lambda: registered(watcher) == [] and daemon.mappings() == (0, 0), "the daemon has let go of the memory")


@pytest.mark.parametrize(
    ("of", "lies"),
    [
        ("nobody's", [{}]),
        (
            "a tensor's that is not registered",
            [
                {"alloc_size": 1 << 40},
                {"alloc_size": 1 << 12, "nbytes": 1 << 12},
                {"alloc_size": 1 << 40, "alloc_offset": 1 << 30},
                {"kind": "fabric", "fabric_blob": ""},
            ],
        ),
        ("a registered tensor's", [{"alloc_size": 1 << 40, "alloc_offset": 1 << 30}, {}]),
    ],
)
def test_hostile_registrations_are_refused_and_leave_nothing(place, of, lies):
    daemon, worker = place.daemon(), place.worker()
    worker.ask("register", 2, 64)
    rest = daemon.mappings()
    for fields in lies:
        if of == "nobody's":
            export_id = "00" * 16
        else:
            export_id = worker.ask("served")[0][0] if of == "a registered tensor's" else worker.ask("wrap")
        # LMCache logs an error of a registration, and answers nothing.
        assert worker.ask("ask", 77, {**fields, "export_id": export_id}, 3) is False
        assert registered(worker) == [worker.instance]
        assert daemon.mappings() == rest
    worker.ask("fill", BLOCKS, 1)
    assert worker.ask("store", "a", TOKENS, BLOCKS)


def test_a_registration_that_fails_after_its_memory_was_mapped_leaves_nothing(place):
    daemon, worker = place.daemon(STANDIN_EVENTS="none"), place.worker()
    worker.send("register", 2, 64)
    until(lambda: "no events here" in daemon.log.read_text(), "LMCache's error")
    until(lambda: daemon.mappings() == (0, 0), "the daemon has let go of the memory")


def stand_beside(place, name, monkeypatch):
    """The path of a worker's socket, from its folder: whole, it would be too long for an address."""
    monkeypatch.chdir(place.folder / "domain" / "lmcache.fds")
    return name.removeprefix("lmcache/")


def test_a_worker_outlives_whatever_its_socket_is_sent(place, monkeypatch):
    place.daemon()
    worker = place.worker()
    worker.ask("register", 2, 64)
    path = stand_beside(place, worker.ask("served")[1], monkeypatch)
    packets = [
        b"", b"\xff" * 100, b"x" * 200_000, msgspec.msgpack.encode({"type": "fetch"}),
        msgspec.msgpack.encode({"type": "fetch", "export_id": "text"}),
        msgspec.msgpack.encode({"type": "exec", "code": "1"}),
        msgspec.msgpack.encode({"type": "keep", "daemon": "d", "instance": "1", "payloads": []}),
    ]  # fmt: skip
    for packet in packets:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.settimeout(60)
            peer.connect(path)
            try:
                peer.send(packet)
                assert peer.recv(1) == b""
            except OSError:
                pass  # longer than the socket's buffer, or refused at once
    for instance in range(100):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
            peer.settimeout(60)
            peer.connect(path)
            peer.send(msgspec.msgpack.encode({"type": "keep", "daemon": "d", "instance": instance, "payloads": []}))
            # 63 beside the daemon's own.
            assert peer.recv(1) == (b"+" if instance < 63 else b"")
    # Connections that say nothing hold it up for a moment each, and end.
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
    for peer in silent:
        peer.connect(path)
    worker.ask("again")
    for peer in silent:
        peer.close()
    assert registered(worker) == [worker.instance]


def test_another_users_process_gets_no_descriptor(place, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("declared skip: only root has a second user at hand")
    place.daemon()
    worker = place.worker()
    worker.ask("register", 1, 64)
    served, name = worker.ask("served")
    path = stand_beside(place, name, monkeypatch)
    # As if the folder let it pass.
    os.chmod(".", 0o711)
    os.chmod(path, 0o777)
    code = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
peer.settimeout(60)
peer.connect(sys.argv[1])
try:
    peer.send(bytes.fromhex(sys.argv[2]))
    data, fds, _, _ = socket.recv_fds(peer, 100, 4)
except OSError as error:
    data, fds = b"", []
print(len(data), len(fds))
"""
    packet = msgspec.msgpack.encode({"type": "fetch", "export_id": bytes.fromhex(served[0])})
    found = other_process(place, code, path, packet.hex())
    assert found.stdout.split() == ["0", "0"], found.stderr
    assert "65534" in worker.log.read_text()


def test_a_lying_worker_gives_a_daemon_nothing_to_map(place):
    """A socket in the folder that answers everything: with a file, with too many, or with another daemon's registration."""
    code = """
import os, socket, sys, warpipe, msgspec
member = warpipe.Member.join("lmcache/" + "0" * 32, "lmcache-worker")
folder = os.path.join(os.environ["WARPIPE_DOMAIN"], "lmcache.fds")
os.makedirs(folder, 0o700, exist_ok=True)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
os.chdir(folder)
listener.bind("0" * 32)
listener.listen()
print("there", flush=True)
null = os.open("/dev/null", os.O_RDWR)
lie = msgspec.msgpack.encode({"type": "keep", "daemon": "another", "instance": 3, "payloads": [b"x"]})
while True:
    peer, _ = listener.accept()
    with peer:
        request = peer.recv(1 << 20)
        if b"recall" in request:
            peer.send(lie)
        elif request:
            socket.send_fds(peer, [b"+"], [null, null, null])
"""
    liar = subprocess.Popen([sys.executable, "-c", code], env=environment(place.folder), stdout=subprocess.PIPE, text=True)
    try:
        assert liar.stdout.readline() == "there\n"
        daemon, worker = place.daemon(), place.worker()
        assert "another registration" in daemon.log.read_text()
        held = len(os.listdir(f"/proc/{daemon.pid}/fd"))
        for instance in range(3):
            assert worker.ask("ask", instance, {"export_id": "11" * 16}, 3) is False
        assert registered(worker) == []
        assert len(os.listdir(f"/proc/{daemon.pid}/fd")) == held
        assert daemon.mappings() == (0, 0)
    finally:
        liar.kill()
        liar.wait()
        liar.stdout.close()


def test_events_of_strangers_are_refused(place):
    daemon, worker = place.daemon(), place.worker()
    worker.ask("register", 1, 64)
    code = """
import lmcache
from warpipe_standin import StandinEvents
events = StandinEvents()
for handle in (b"", b"stub", b"1:elsewhere", b"1:lmcache/../x", b"1:lmcache/none", b"0:lmcache/a", b"9" * 19 + b":lmcache/a",
               b"-1:lmcache/a", b"\\xff" * 64, b"1" * 100000):
    try:
        events.import_event(handle, "cpu").wait()
    except Exception as error:
        print(type(error).__name__)
"""
    found = other_process(place, code)
    names = found.stdout.split()
    assert len(names) == 10 and set(names) <= {"ValueError", "NotFoundError", "InvalidNameError"}, found.stdout + found.stderr
    assert daemon.process.poll() is None


def test_a_dead_recorders_event_is_not_complete(place):
    recorder = """
import sys, lmcache, torch
from warpipe_standin import StandinEvents
events = StandinEvents()
stream = torch.standin.current_stream()
event = events.create_event("cpu")
events.record_event(event, stream)
events.synchronize_event(event, "cpu")
print(events.export_event(event, "cpu").decode(), flush=True)
sys.stdin.read()
"""
    reader = """
import sys, lmcache, warpipe
from warpipe_standin import StandinEvents
events = StandinEvents()
value, _, name = sys.argv[1].partition(":")
done = events.import_event(f"{value}:{name}".encode(), "cpu")
never = events.import_event(f"{int(value) + 1}:{name}".encode(), "cpu")
print(events.query_event(done), events.query_event(never), flush=True)
sys.stdin.readline()
print(events.query_event(done), events.query_event(never), flush=True)
events.wait_event(done, None)
try:
    events.wait_event(never, None)
except warpipe.PeerGoneError:
    print("PeerGoneError", flush=True)
"""

    def run(code, *arguments):
        command, pipe = [sys.executable, "-c", code, *arguments], subprocess.PIPE
        return subprocess.Popen(command, env=environment(place.folder), stdin=pipe, stdout=pipe, text=True)

    with run(recorder) as first:
        handle = first.stdout.readline().strip()
        with run(reader, handle) as second:
            assert second.stdout.readline().split() == ["True", "False"]
            first.kill()
            first.wait()
            second.stdin.write("\n")
            second.stdin.flush()
            assert second.stdout.readline().split() == ["True", "False"]
            assert second.stdout.readline().strip() == "PeerGoneError"


def test_a_daemon_without_the_module_says_so(place):
    daemon, worker = place.daemon(modules=[MODULES[0], MODULES[2]]), place.worker()
    worker.send("register", 1, 64)
    until(lambda: "--server-module" in daemon.log.read_text(), "the daemon's log names the next step")
    assert daemon.process.poll() is None
