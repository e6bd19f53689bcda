"""Memory of another library, pickled between processes: the half of ``warpipe.torch`` that knows no PyTorch.

A storage is memory with an owner that keeps it allocated. Pickled, it is a token: the name of a server of this process,
and the number of a share there, made anew by each pickling, as a share is opened once. Within one pickling a storage is
one object, which the pickler writes once: its views are views of one storage on the other side. Across picklings the
receiver knows a storage that it has open by the token's serial number.
"""

from __future__ import annotations

import multiprocessing
import os
import secrets
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

from . import _messages, _warpipe
from ._errors import Error, HandleError, NotExportableError, NotFoundError, PeerGoneError, TimeoutError
from ._unclaimed import Unclaimed

# Entries of storages that have gone are looked for beyond this number.
_KEPT = 128


class Options(NamedTuple):
    """The arguments of ``install``, which child processes take over."""

    copy: bool = True
    domain: str | None = None
    timeout: float = 60.0


class Token(NamedTuple):
    """A storage on its way."""

    server: str
    domain: str
    number: int
    """The share, which one process opens once."""
    serial: int
    """The storage, as long as any share of it lasts."""
    nbytes: int
    device: str
    """Its ``Device.uuid``."""
    what: str
    """The tensor that it was first pickled for, for errors."""
    pid: int
    process: str


class Source(Protocol):
    """A storage of this process, as its library describes it."""

    @property
    def key(self) -> object:
        """Equal for two sources of one storage, as long as one of them lives."""

    @property
    def storage(self) -> Any: ...
    @property
    def device(self) -> _warpipe.Device: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def stream(self) -> Any:
        """A stream: its work so far completes the contents. None if they are complete."""

    @property
    def what(self) -> str:
        """For errors."""

    @property
    def rebuild(self) -> Callable[[tuple[Any, ...]], Any]:
        """Makes the storage of a token's fields in the receiver."""

    def copied(self) -> Source:
        """A copy in memory that can be shared."""

    def warn(self, why: str) -> None:
        """Says that it is copied."""


class Opened(NamedTuple):
    """A storage that was made of opened memory."""

    storage: Any
    key: object
    live: Callable[[], Any]
    """The storage, or None once it has gone."""


class Received(NamedTuple):
    """What is known of a storage of another process that is open here."""

    token: Token
    key: object
    live: Callable[[], Any]
    watch: Callable[[], None]

    def check(self) -> None:
        try:
            self.watch()
        except PeerGoneError as error:
            said = "its memory went with the process; keep the sender running, or let it use expandable segments"
            raise _told(error, self.token, "cannot be used any more", said) from error


class Exported:
    """A storage that is being pickled, or is shared. Its shares hold it, and it holds the storage."""

    __slots__ = ("__weakref__", "serial", "source")

    def __init__(self, source: Source, serial: int) -> None:
        self.source, self.serial = source, serial

    def __reduce__(self) -> tuple[Any, ...]:
        """The pickler asks once in each pickling: further references to this object are written as such."""
        return self.source.rebuild, (tuple(TABLE.share(self)),)


class Share:
    """The one holder of a share's storage: it lives as long as the share does."""

    __slots__ = ("__weakref__", "exported")

    def __init__(self, exported: Exported) -> None:
        self.exported = exported


class Table:
    """The storages that this process shares, and those of others that it has open."""

    def __init__(self) -> None:
        self.options = Options()
        self.begin()

    def begin(self) -> None:
        """Starts empty. A forked child has none of its parent's servers."""
        self.lock = threading.RLock()
        # By the domain that was asked for, and the device.
        self.servers: dict[tuple[str | None, str], tuple[Any, str]] = {}
        self.exported: weakref.WeakValueDictionary[object, Exported] = weakref.WeakValueDictionary()
        # By server and number: for a process that is sent its own storage.
        self.shared: weakref.WeakValueDictionary[tuple[str, int], Share] = weakref.WeakValueDictionary()
        self.last_serial = 0
        self.unclaimed = Unclaimed()
        self.clients: dict[tuple[str, str], Any] = {}
        self.opened: dict[tuple[str, int], Received] = {}
        self.received_by_key: dict[object, Received] = {}
        self.limit = _KEPT

    # The sending side.

    def export(self, source: Source) -> Exported:
        """The object that stands for a storage in all picklings, as long as one is in progress or shared."""
        with self.lock:
            known = self.exported.get(source.key)
            if known is None:
                known = self.exported[source.key] = Exported(source, self._serial())
            return known

    def _serial(self) -> int:
        with self.lock:
            self.last_serial += 1
            return self.last_serial

    def share(self, exported: Exported) -> Token:
        """Makes a share for one receiver."""
        source = exported.source
        received = self.received(source.key)
        if received is not None:
            received.check()
            why = f"its memory is of process {received.token.pid} ({received.token.process})"
            return self._share_copy(source, NotExportableError(why))
        try:
            return self._share(exported)
        except (NotExportableError, HandleError) as error:
            return self._share_copy(source, error)

    def _share_copy(self, source: Source, why: Error) -> Token:
        if not self.options.copy:
            said = "cannot be given to another process"
            raise _told_here(why, source.what, said, "send a clone of it, or allow that with install(copy=True)") from why
        source.warn(str(why))
        # Another storage each time: what it is a copy of may have been written since.
        return self._share(Exported(source.copied(), self._serial()))

    def _share(self, exported: Exported) -> Token:
        source, share, message = exported.source, Share(exported), _messages.current()
        try:
            server, domain = self._server(source.device)
            # A call that an interrupt may come behind would lose the number.
            (number,) = map(partial(server.share, stream=source.stream), (source.address,), (source.nbytes,), (share,))
        except (NotExportableError, HandleError):
            raise
        except Error as error:
            raise _told_here(error, source.what, "cannot be sent", "") from error
        if message is not None:
            # First: as above.
            message.take_back.append((self._take_back, server, number))
        self.shared[server.name, number] = share
        self.unclaimed.note(server, number, message.pipe if message is not None else None)
        sender = multiprocessing.current_process().name
        return Token(
            server.name, domain, number, exported.serial, source.nbytes, source.device.uuid, source.what,
            os.getpid(), sender,
        )  # fmt: skip

    def _server(self, device: _warpipe.Device) -> tuple[Any, str]:
        """The server of a device's memory, and its domain: the receiver's own environment may name another one."""
        wanted = self.options.domain, device.uuid
        with self.lock:
            known = self.servers.get(wanted)
            if known is None:
                name = f"torch/{os.getpid()}-{secrets.token_hex(6)}"
                # The receiver may be in another folder.
                domain = os.path.abspath(self.options.domain or str(_warpipe.Domain().path))
                known = self.servers[wanted] = _warpipe._AllocationServer(name, device, domain), domain
            return known

    def _take_back(self, server: Any, number: int) -> None:
        self.unclaimed.forget(server, number)
        server.withdraw(number)

    # The receiving side.

    def open(self, token: Token, make: Callable[[Any], Opened]) -> Any:
        """The storage of a token: one that this process has, or one that ``make`` makes of the opened memory.

        An ``Unopened`` where a ``Pool`` reads a token that cannot be opened.
        """
        try:
            return self._open(token, make)
        except Exception as error:
            return _messages.unopened(error)

    def _open(self, token: Token, make: Callable[[Any], Opened]) -> Any:
        own = self.shared.get((token.server, token.number))
        if own is not None:
            self._own_server(token).withdraw(token.number)
            return own.exported.source.storage
        # Without the lock: the sender may wait for what another thread of this process shares.
        try:
            memory = self._client(token).open(token.number, self.options.timeout)
        except NotFoundError as error:
            storage = self._known(token)
            if storage is not None:
                # The same message, read again.
                return storage
            raise _told(error, token, "is not there", "a tensor has one receiver; put it once for each") from error
        except PeerGoneError as error:
            said = "keep the sender running until its tensors are received"
            raise _told(error, token, "went with its process", said) from error
        except TimeoutError as error:
            said = "see what its stream waits for, or give install() a longer timeout"
            raise _told(error, token, "is not complete", said) from error
        except Error as error:
            raise _told(error, token, "cannot be opened", "") from error
        with self.lock:
            storage = self._known(token)
            if storage is not None:
                # What was read behind the new share's stream holds for it. The share is released again.
                return storage
            opened = make(memory)
            received = Received(token, opened.key, opened.live, memory.watch())
            before = self.opened.get((token.server, token.serial))
            if before is not None and self.received_by_key.get(before.key) is before:
                del self.received_by_key[before.key]
            self.opened[token.server, token.serial] = self.received_by_key[opened.key] = received
            self._forget()
        return opened.storage

    def _known(self, token: Token) -> Any:
        known = self.opened.get((token.server, token.serial))
        return known and known.live()

    def received(self, key: object) -> Received | None:
        """What is known of a storage that came from another process."""
        found = self.received_by_key.get(key)
        return found if found is not None and found.live() is not None else None

    def _own_server(self, token: Token) -> Any:
        with self.lock:
            return next(server for server, _ in self.servers.values() if server.name == token.server)

    def _client(self, token: Token) -> Any:
        key = token.server, token.domain
        client = self.clients.get(key)
        if client is not None:
            return client
        try:
            client = _warpipe._AllocationClient(token.server, token.device, token.domain)
        except NotFoundError as error:
            raise PeerGoneError(str(error)) from error
        with self.lock:
            self.clients = {name: one for name, one in self.clients.items() if not one.is_owner_gone}
            return self.clients.setdefault(key, client)

    def _forget(self) -> None:
        if len(self.opened) > self.limit:
            # Of copies: a finalizer that runs meanwhile may receive something.
            self.opened = {key: one for key, one in list(self.opened.items()) if one.live() is not None}
            by_key = list(self.received_by_key.items())
            self.received_by_key = {key: one for key, one in by_key if one.live() is not None}
            self.limit = max(_KEPT, 2 * len(self.opened))

    def stats(self) -> dict[str, int]:
        """The numbers of all servers, added."""
        with self.lock:
            found = [server.stats() for server, _ in self.servers.values()]
        return {name: sum(one[name] for one in found) for name in ("unclaimed", "claimed", "bytes")}


def _told(error: Error, token: Token, how: str, next_step: str) -> Error:
    what = f"{token.what} of process {token.pid} ({token.process})"
    return _told_here(error, what, how, next_step)


def _told_here(error: Error, what: str, how: str, next_step: str) -> Error:
    said = f"{what} {how}: {error}"
    told = type(error)(f"{said}; {next_step}" if next_step else said)
    vars(told).update(vars(error))
    return told


def memory_for_copy(device: _warpipe.Device, nbytes: int) -> _warpipe.View:
    """Memory that can be shared. That of the host, which only tests share, has no descriptors in pieces."""
    if device.kind == "host":
        return _warpipe._allocate_plain(nbytes, device)
    return _warpipe.Memory.allocate(nbytes, device=device).view((nbytes,), "uint8")


TABLE = Table()
_messages.pipe_ends.append(lambda pipe: TABLE.unclaimed.pipe_ends(pipe))
os.register_at_fork(after_in_child=TABLE.begin)
