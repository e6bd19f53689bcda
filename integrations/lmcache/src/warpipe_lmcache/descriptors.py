"""Descriptors of KV memory, from the worker that has the memory to the daemon that maps it.

A worker is a member of warpipe's domain, and answers requests at a socket in a folder of the domain: for the descriptor of
an export id, and for registrations that a daemon asked it to keep for the next daemon. One request and one reply a
connection, each a packet. Both sides check that the other one is of the same user; no PID namespace is shared.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import stat
import struct
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import msgspec
import warpipe

logger = logging.getLogger("lmcache.warpipe")

ROLE = "lmcache-worker"
_PREFIX = "lmcache/"
_FOLDER = "lmcache.fds"
# Of a packet. The kernel's default limit of a socket's buffer is 208 KiB.
_PACKET_BYTES_MAX = 160 << 10
_TENSORS_MAX = 4096
_KEPT_MAX = 64
_WORKERS_MAX = 1024
# Seconds that a peer has for its part: enough for a process that another one keeps from the CPU.
_PATIENCE = 2.0


class DescriptorError(RuntimeError):
    """A descriptor that no worker has, or that cannot be passed on."""


class _Packet(msgspec.Struct, forbid_unknown_fields=True):
    """A request to a worker."""


class Fetch(_Packet, tag="fetch"):
    """Asks for the descriptor of an export id: the reply has it, or is empty."""

    export_id: bytes


class Keep(_Packet, tag="keep"):
    """Asks to keep a registration, in the place of the instance's last one."""

    daemon: str
    instance: int
    payloads: list[bytes]


class Forget(_Packet, tag="forget"):
    """Asks to drop a registration."""

    daemon: str
    instance: int


class Recall(_Packet, tag="recall"):
    """Asks for the kept registration of the next instance above ``after``: the reply is a ``Keep``, or empty."""

    daemon: str
    after: int


_requests = msgspec.msgpack.Decoder(Fetch | Keep | Forget | Recall)
_kept = msgspec.msgpack.Decoder(Keep)


def _decoded(decoder: msgspec.msgpack.Decoder[Any], packet: bytes) -> Any:
    """What a peer has sent. Raises ``DescriptorError``."""
    try:
        return decoder.decode(packet)
    # The last two of text that is no UTF-8, and of depth.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DescriptorError(f"a packet of {len(packet)} bytes cannot be read: {error}") from error


class DescriptorServer:
    """A worker's half: the descriptors of its KV memory, one thread that answers, and the member that shows its life.

    A descriptor is kept as long as its tensor's storage, so that a daemon's successor can ask for it again.
    """

    def __init__(self, domain: Any = None) -> None:
        self._domain = warpipe.Domain(domain)
        serial = uuid.uuid4().hex
        self.name = _PREFIX + serial
        # Also taken by the finalizer of a storage, which may run in any line that holds it.
        self._lock = threading.RLock()
        self._descriptors: dict[bytes, int] = {}
        # By address: the ids of a storage's tensors, the newest two of each. The last registration may still have the older.
        self._exported: dict[tuple[int, int], deque[bytes]] = {}
        self._kept: dict[tuple[str, int], Keep] = {}
        self._closed = threading.Event()
        # First the member: a socket without one is of a dead process.
        self._member = warpipe.Member.join(self.name, ROLE, domain=self._domain)
        self._listener = _socket()
        try:
            with _folder(self._domain, make=True) as folder:
                self._listener.bind(os.fspath(folder / serial))
        except BaseException:
            self._member.close()
            raise
        self._listener.listen(64)
        os.register_at_fork(after_in_child=self._leave)
        threading.Thread(target=self._serve, name="warpipe-lmcache", daemon=True).start()

    def add(self, export_id: bytes, fd: int, tensor: Any) -> None:
        """Serves a duplicate of ``fd`` under ``export_id`` until the storage of ``tensor`` is freed.

        Raises ``DescriptorError``, ``OSError``.
        """
        storage, place = tensor.untyped_storage(), (tensor.data_ptr(), tensor.nbytes)
        with self._lock:
            ids = self._exported.get(place)
            if ids is None:
                if len(self._exported) >= _TENSORS_MAX:
                    raise DescriptorError(f"this worker serves {_TENSORS_MAX} tensors already; free some of them first")
                ids = self._exported[place] = deque()
                weakref.finalize(storage, self._drop, place).atexit = False
            self._descriptors[export_id] = os.dup(fd)
            ids.append(export_id)
            if len(ids) > 2:
                os.close(self._descriptors.pop(ids.popleft()))

    def _leave(self) -> None:
        """In a forked child: it would keep the socket open after this process's death, and has no thread that gives the lock
        back."""
        self._listener.close()
        self._lock = threading.RLock()

    def _drop(self, place: tuple[int, int]) -> None:
        with self._lock:
            for export_id in self._exported.pop(place, ()):
                os.close(self._descriptors.pop(export_id))

    def close(self) -> None:
        """Ends the service; daemons unregister what this worker has registered."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        _remove(self._domain, self.name)
        self._member.close()
        for place in list(self._exported):
            self._drop(place)

    def _serve(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                # Without a free descriptor ``accept`` fails at once, again and again.
                if not self._closed.wait(0.1):
                    logger.warning("no connection of a daemon was accepted: %s", error)
                continue
            with connection:
                try:
                    self._answer(connection)
                except (OSError, DescriptorError) as error:
                    logger.warning("a request for KV memory was refused: %s", error)

    def _answer(self, connection: socket.socket) -> None:
        _check_user(connection)
        connection.settimeout(_PATIENCE)
        request = _decoded(_requests, connection.recv(_PACKET_BYTES_MAX))
        with self._lock:
            match request:
                case Fetch(export_id):
                    fd = self._descriptors.get(export_id)
                    # Under the lock, so that the descriptor is not closed meanwhile. A new socket's buffer has room.
                    socket.send_fds(connection, [b"+"], [fd]) if fd is not None else connection.send(b"-")
                case Keep(daemon, instance):
                    if (daemon, instance) not in self._kept and len(self._kept) >= _KEPT_MAX:
                        raise DescriptorError(f"this worker keeps {_KEPT_MAX} registrations already")
                    self._kept[daemon, instance] = request
                    connection.send(b"+")
                case Forget(daemon, instance):
                    self._kept.pop((daemon, instance), None)
                    connection.send(b"+")
                case Recall(daemon, after):
                    found = min((i for d, i in self._kept if d == daemon and i > after), default=None)
                    connection.send(b"-" if found is None else msgspec.msgpack.encode(self._kept[daemon, found]))


class Workers:
    """The daemon's half: the workers of a domain, by the sockets in its folder."""

    def __init__(self, domain: Any = None) -> None:
        self._domain = warpipe.Domain(domain)

    def names(self) -> list[str]:
        """The workers that have a socket, also those that have died since."""
        try:
            with _folder(self._domain) as folder:
                found = sorted(os.listdir(folder))
        except FileNotFoundError:
            return []
        return [_PREFIX + serial for serial in found[:_WORKERS_MAX]]

    def fetch(self, export_id: bytes, skip: Container[str] = ()) -> tuple[int, str]:
        """The descriptor of an export id, and the worker that has it. All workers but those of ``skip`` are asked at once.

        Raises ``DescriptorError`` when none has it.
        """
        with contextlib.ExitStack() as stack, selectors.DefaultSelector() as waiting:
            for name in self.names():
                with contextlib.suppress(OSError):
                    if name not in skip:
                        connection = stack.enter_context(self._asked(name, Fetch(export_id)))
                        waiting.register(connection, selectors.EVENT_READ, name)
            deadline = time.monotonic() + _PATIENCE
            while waiting.get_map() and (ready := waiting.select(max(0.0, deadline - time.monotonic()))):
                for key, _ in ready:
                    waiting.unregister(key.fileobj)
                    with contextlib.suppress(OSError):
                        fd = _received(key.fileobj)  # type: ignore[arg-type]
                        if fd is not None:
                            return fd, key.data
        raise DescriptorError(f"no worker of the domain {self._domain.path} has the descriptor {export_id.hex()}")

    def keep(self, name: str, registration: Keep) -> None:
        """Has a worker keep a registration. Raises ``OSError``, ``DescriptorError``."""
        if self._ask(name, registration) != b"+":
            raise DescriptorError(f"worker {name} did not keep the registration; its log says why")

    def forget(self, name: str, daemon: str, instance: int) -> None:
        """Has a worker drop a registration. Raises ``OSError``, ``DescriptorError``."""
        self._ask(name, Forget(daemon, instance))

    def recall(self, name: str, daemon: str) -> Iterator[Keep]:
        """The registrations that a worker keeps for a daemon. Raises ``OSError``, ``DescriptorError``."""
        after, left = -1, _KEPT_MAX
        while (answer := self._ask(name, Recall(daemon, after))) != b"-":
            kept = _decoded(_kept, answer)
            if not left:
                raise DescriptorError(f"worker {name} has more registrations than the {_KEPT_MAX} that a worker keeps")
            left -= 1
            if kept.daemon != daemon or kept.instance <= after:
                raise DescriptorError(f"worker {name} answered with another registration than it was asked for")
            after = kept.instance
            yield kept

    def remove(self, name: str) -> None:
        """Removes the socket of a worker that has died."""
        _remove(self._domain, name)

    def sweep(self) -> None:
        """Removes the sockets that dead workers left while no daemon ran: nobody listens there any more."""
        for name in self.names():
            try:
                self._connection(name).close()
            except ConnectionRefusedError:
                self.remove(name)
            except OSError:
                pass

    def _connection(self, name: str) -> socket.socket:
        connection = _socket()
        try:
            connection.settimeout(_PATIENCE)
            with _folder(self._domain) as folder:
                connection.connect(os.fspath(folder / name.removeprefix(_PREFIX)))
            _check_user(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    def _asked(self, name: str, request: _Packet) -> socket.socket:
        packet = msgspec.msgpack.encode(request)
        if len(packet) > _PACKET_BYTES_MAX:
            raise DescriptorError(f"{len(packet)} bytes are more than a worker keeps, {_PACKET_BYTES_MAX}")
        connection = self._connection(name)
        try:
            connection.send(packet)
        except BaseException:
            connection.close()
            raise
        return connection

    def _ask(self, name: str, request: _Packet) -> bytes:
        with self._asked(name, request) as connection:
            return connection.recv(_PACKET_BYTES_MAX)


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _remove(domain: warpipe.Domain, name: str) -> None:
    """Removes a worker's socket."""
    with contextlib.suppress(OSError, DescriptorError), _folder(domain) as folder:
        (folder / name.removeprefix(_PREFIX)).unlink()


@contextlib.contextmanager
def _folder(domain: warpipe.Domain, *, make: bool = False) -> Iterator[Path]:
    """The folder of the sockets, which is this user's alone, by a path that fits into a socket's address.

    Raises ``DescriptorError``, ``OSError``.
    """
    folder = Path(domain.path, _FOLDER)
    if make:
        folder.mkdir(mode=0o700, exist_ok=True)
    directory = os.open(folder, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(directory)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise DescriptorError(f"{folder} is not a folder of this user alone; remove it, or choose another WARPIPE_DOMAIN")
        yield Path(f"/proc/self/fd/{directory}")
    finally:
        os.close(directory)


def _received(connection: socket.socket) -> int | None:
    """The descriptor of an answer, if it has one. ``socket.recv_fds`` would leave it open over ``exec`` (Python 3.11)."""
    room, flags = socket.CMSG_LEN(struct.calcsize("i")), socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
    for level, kind, data in connection.recvmsg(1, room, flags)[1]:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and len(data) == struct.calcsize("i"):
            return struct.unpack("i", data)[0]  # type: ignore[no-any-return]
    return None


def _check_user(connection: socket.socket) -> None:
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.geteuid():
        raise PermissionError(f"the peer is of user {uid}, not of {os.geteuid()}")
