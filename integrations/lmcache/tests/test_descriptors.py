"""A worker's descriptors without LMCache and without a GPU."""

import contextlib
import gc
import os
import select
import signal
import socket
import threading

import msgspec
import pytest
import torch
import warpipe

from warpipe_lmcache import descriptors
from warpipe_lmcache.descriptors import DescriptorError, DescriptorServer, Keep, Workers


@pytest.fixture
def server(tmp_path):
    server = DescriptorServer(tmp_path / "domain")
    yield server
    server.close()


def inode(fd):
    return os.fstat(fd).st_ino


def add(server, number, tensor):
    """Serves a new file under an id, and its inode."""
    fd = os.memfd_create("tensor")
    try:
        server.add(number.to_bytes(16, "big"), fd, tensor)
        return inode(fd)
    finally:
        os.close(fd)


def held():
    """The descriptors of such files that this process has."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:tensor")
    return found


def fetch(workers, number):
    fd, name = workers.fetch(number.to_bytes(16, "big"))
    try:
        assert not os.get_inheritable(fd)
        return inode(fd), name
    finally:
        os.close(fd)


def test_a_descriptor_is_fetched_by_its_id_as_often_as_it_is_asked_for(server, tmp_path):
    tensors = [torch.zeros(4), torch.zeros(4)]
    made = [add(server, number, tensor) for number, tensor in enumerate(tensors)]
    workers = Workers(tmp_path / "domain")
    for _ in range(3):
        assert [fetch(workers, number) for number in range(2)] == [(found, server.name) for found in made]
    with pytest.raises(DescriptorError, match="no worker"):
        workers.fetch(b"?" * 16)


def test_a_freed_tensor_takes_its_descriptor_with_it(server, tmp_path):
    tensor = torch.zeros(4)
    view = tensor[:2]
    add(server, 1, view)
    assert held() == 1
    # The wrapper of a storage, and a view, may go before the storage.
    del view
    gc.collect()
    fetch(Workers(tmp_path / "domain"), 1)
    del tensor
    gc.collect()
    with pytest.raises(DescriptorError):
        fetch(Workers(tmp_path / "domain"), 1)
    assert held() == 0


def test_a_tensor_has_its_last_two_descriptors(server, tmp_path):
    tensor, workers = torch.zeros(4), Workers(tmp_path / "domain")
    made = [add(server, number, tensor) for number in range(5)]
    for number in range(3):
        with pytest.raises(DescriptorError):
            fetch(workers, number)
    assert [fetch(workers, number)[0] for number in (3, 4)] == made[3:]


def test_a_forked_child_frees_tensors_whatever_its_parents_threads_did(server):
    tensor = torch.zeros(4)
    add(server, 1, tensor)
    holds, forked = threading.Event(), threading.Event()

    def hold():
        with server._lock:
            holds.set()
            forked.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holds.wait(60)
    child = os.fork()
    if child == 0:
        del tensor
        gc.collect()
        os._exit(held())
    forked.set()
    thread.join(60)
    with open(os.pidfd_open(child), "rb", buffering=0) as ended:
        if not select.select([ended], [], [], 10)[0]:
            os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == 0
    assert held() == 1


def test_a_full_table_is_refused_and_has_room_again(server, monkeypatch):
    monkeypatch.setattr(descriptors, "_TENSORS_MAX", 2)
    tensors = [torch.zeros(4) for _ in range(2)]
    for number, tensor in enumerate(tensors):
        add(server, number, tensor)
    other = torch.zeros(4)
    with pytest.raises(DescriptorError, match="free some"):
        add(server, 2, other)
    del tensors, tensor
    gc.collect()
    add(server, 2, other)


def test_registrations_are_kept_by_daemon_and_instance(server, tmp_path):
    workers = Workers(tmp_path / "domain")
    for instance in (5, 3, 2**62):
        workers.keep(server.name, Keep("a", instance, [b"first"]))
    workers.keep(server.name, Keep("a", 3, [b"second", b""]))
    workers.keep(server.name, Keep("b", 4, []))
    workers.forget(server.name, "a", 5)
    kept = [(found.instance, found.payloads) for found in workers.recall(server.name, "a")]
    assert kept == [(3, [b"second", b""]), (2**62, [b"first"])]
    with pytest.raises(DescriptorError, match="more than a worker keeps"):
        workers.keep(server.name, Keep("a", 6, [b"x" * 200_000]))


def not_utf_8(tag):
    packet = msgspec.msgpack.encode({"type": tag, "daemon": "?", "instance": 1, "payloads": []})
    return packet.replace(b"?", b"\xff")


# An unknown field before the tag, with arrays in arrays.
DEEP = b"\x82\xa1a" + b"\x91" * 100_000


@pytest.mark.parametrize("packet", [not_utf_8("keep"), DEEP], ids=["text", "depth"])
def test_a_worker_answers_after_a_packet_that_cannot_be_read(server, tmp_path, packet):
    workers = Workers(tmp_path / "domain")
    with workers._connection(server.name) as peer:
        peer.send(packet)
        assert peer.recv(1) == b""
    workers.keep(server.name, Keep("a", 1, []))


@contextlib.contextmanager
def liar(tmp_path, answer):
    """The name of a worker that answers as it likes, once a connection."""
    domain, serial = warpipe.Domain(tmp_path / "domain"), "0" * 32
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with descriptors._folder(domain, make=True) as folder:
        listener.bind(os.fspath(folder / serial))
    listener.listen()

    def serve():
        with contextlib.suppress(OSError):
            while True:
                with listener.accept()[0] as peer:
                    peer.send(answer(peer.recv(1 << 20)))

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield "lmcache/" + serial
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)
        listener.close()


@pytest.mark.parametrize("packet", [not_utf_8("keep"), DEEP, b"", b"\xff"], ids=["text", "depth", "nothing", "no map"])
def test_an_answer_that_cannot_be_read_is_an_error_of_its_worker(tmp_path, packet):
    with liar(tmp_path, lambda request: packet) as name, pytest.raises(DescriptorError, match="cannot be read"):
        list(Workers(tmp_path / "domain").recall(name, "a"))


def test_a_registration_that_a_worker_refuses_to_keep_is_an_error(server, tmp_path, monkeypatch):
    monkeypatch.setattr(descriptors, "_KEPT_MAX", 1)
    workers = Workers(tmp_path / "domain")
    workers.keep(server.name, Keep("a", 1, []))
    with pytest.raises(DescriptorError, match="did not keep"):
        workers.keep(server.name, Keep("a", 2, []))


def test_a_worker_that_has_ever_more_registrations_is_an_error(tmp_path):
    def next_one(request):
        after = msgspec.msgpack.decode(request)["after"]
        return msgspec.msgpack.encode(Keep("a", after + 1, []))

    with liar(tmp_path, next_one) as name, pytest.raises(DescriptorError, match="more registrations"):
        for number, _ in enumerate(Workers(tmp_path / "domain").recall(name, "a")):
            assert number < descriptors._KEPT_MAX


def test_a_folder_that_others_can_enter_is_refused(tmp_path):
    server = DescriptorServer(tmp_path / "domain")
    os.chmod(tmp_path / "domain" / "lmcache.fds", 0o770)
    with pytest.raises(DescriptorError, match="this user alone"):
        Workers(tmp_path / "domain").fetch(b"0" * 16)
    with pytest.raises(DescriptorError, match="this user alone"):
        DescriptorServer(tmp_path / "domain")
    os.chmod(tmp_path / "domain" / "lmcache.fds", 0o700)
    server.close()


def test_a_link_in_the_place_of_the_folder_is_refused(tmp_path):
    os.makedirs(tmp_path / "elsewhere", 0o700)
    os.makedirs(tmp_path / "domain", 0o700)
    os.symlink(tmp_path / "elsewhere", tmp_path / "domain" / "lmcache.fds")
    with pytest.raises((DescriptorError, OSError)):
        DescriptorServer(tmp_path / "domain")
    assert os.listdir(tmp_path / "elsewhere") == []


def test_sockets_of_dead_workers_are_swept_and_those_of_living_ones_stay(server, tmp_path):
    workers = Workers(tmp_path / "domain")
    child = os.fork()
    if child == 0:
        os._exit(0 if DescriptorServer(tmp_path / "domain").name else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(workers.names()) == 2
    workers.sweep()
    assert workers.names() == [server.name]
