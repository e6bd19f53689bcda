"""The transport, as Ray calls it.

``extract_tensor_transport_metadata`` is called in the source, in the thread that ran the task, or beside the event loop of an
actor with ``async`` methods; the receiving calls in an actor's thread for transfers, or in the thread of a ``ray.get``;
``garbage_collect`` in the source, and in the driver at any moment, within other calls too; ``abort_transport`` in a thread of
its own while a receive waits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import warpipe
from ray._private.ray_constants import RDT_FETCH_FAIL_TIMEOUT_SECONDS
from ray._private.worker import global_worker
from ray.experimental.rdt.tensor_transport_manager import CommunicatorMetadata, FetchRequest, TensorTransportManager

from ._arrays import library, nbytes
from ._errors import ReceiveAbortedError, SourceGoneError
from ._source import Metadata, Offer, machine, offer, timeline_of

# A wait sees an abort in between.
_SLICE_SECONDS = 0.02
# Connections to sources that are kept for their next objects.
_KEPT_CONNECTIONS = 64


@dataclass(frozen=True)
class Connection:
    """What a receiver has of a source beside its blocks: with it the next block is opened in a fifth of the time."""

    device: warpipe.Device
    client: warpipe.PoolClient
    timeline: warpipe.Timeline | None


@dataclass
class Fetch(FetchRequest):
    """A receive: its memory is open, and may not be complete."""

    metadata: Metadata = field(default_factory=lambda: Metadata([]))
    target_buffers: list[Any] | None = None
    connection: Connection | None = None


class Transport(TensorTransportManager):
    """Ray makes one in each process. Receivers may only read."""

    writable = False

    def __init__(self) -> None:
        # What Ray has not collected yet. The pools limit it.
        self._offers: dict[str, Offer] = {}
        # The receives in progress, by their objects.
        self._receiving: dict[str, list[threading.Event]] = {}
        # Those used last come last.
        self._connections: OrderedDict[tuple[str, str, str], Connection] = OrderedDict()
        self._lock = threading.RLock()

    def tensor_transport_backend(self) -> str:
        return "WARPIPE"

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        # Ray has registered it there. A question would cost a task.
        return True

    def get_communicator_metadata(self, src_actor: Any, dst_actor: Any, backend: str | None = None) -> CommunicatorMetadata:
        return CommunicatorMetadata()

    # In the source.

    def extract_tensor_transport_metadata(self, obj_id: str, rdt_object: list[Any]) -> Metadata:
        # Ray asks again when the reply of a task was lost.
        known = self._offers.get(obj_id)
        if known is None:
            try:
                known = self._offers[obj_id] = offer(rdt_object, self.writable)
            except BaseException:
                # Ray has stored the tensors before this call. It frees those alone that it has metadata of.
                store = global_worker.rdt_manager.rdt_store
                if store.has_object(obj_id):
                    store.pop_object(obj_id)
                raise
        return known.metadata

    def send_multiple_tensors(self, tensors: Any, tensor_transport_metadata: Any, communicator_metadata: Any) -> None:
        raise NotImplementedError("the receiver opens the source's memory, so the source sends nothing")

    def garbage_collect(self, obj_id: str, tensor_transport_meta: Any, tensors: list[Any]) -> None:
        # Without a lock: Ray calls this whenever a reference is dropped.
        self._offers.pop(obj_id, None)

    # In the receiver.

    def recv_multiple_tensors(
        self, obj_id: str, tensor_transport_metadata: Any, communicator_metadata: Any, target_buffers: list[Any] | None = None
    ) -> list[Any]:
        fetch = self.fetch_multiple_tensors(obj_id, tensor_transport_metadata, communicator_metadata, target_buffers)
        return self.wait_fetch_complete(fetch, RDT_FETCH_FAIL_TIMEOUT_SECONDS)

    def fetch_multiple_tensors(
        self, obj_id: str, tensor_transport_metadata: Any, communicator_metadata: Any, target_buffers: list[Any] | None = None
    ) -> Fetch:
        """Opens the memory. Raises ``SourceGoneError``, ``ArgumentError``, ``DeviceError``, and as ``LentBuffer.open``."""
        metadata = tensor_transport_metadata
        if not metadata.tensor_meta:
            return Fetch(obj_id, [], metadata, target_buffers)
        if metadata.machine != machine():
            said = "the tensors lie on another node, and memory is shared on one"
            raise warpipe.ArgumentError(f"{said}; place both actors on one node, or use NIXL between nodes")
        try:
            connection = self._connection(metadata) if metadata.tickets else None
            tensors = _opened(metadata, connection)
        except _GONE as error:
            raise _gone(metadata, error) from error
        return Fetch(obj_id, tensors, metadata, target_buffers, connection)

    def wait_fetch_complete(self, fetch_request: Any, timeout: float = -1) -> list[Any]:
        """Waits for the contents, and copies them to the target buffers, if there are any. Without a limit, ``timeout`` is -1.

        Raises ``SourceGoneError``, ``ReceiveAbortedError``, ``TimeoutError``.
        """
        fetch: Fetch = fetch_request
        self._wait(fetch, None if timeout < 0 else time.monotonic() + timeout)
        if fetch.target_buffers is None:
            return fetch.tensors
        with_type = library(fetch.metadata.library)
        for target, tensor in zip(fetch.target_buffers, fetch.tensors, strict=True):
            with_type.copy(target, tensor)
        return fetch.target_buffers

    def abort_transport(self, obj_id: str, communicator_metadata: Any) -> None:
        with self._lock:
            for aborted in self._receiving.get(obj_id, ()):
                aborted.set()

    def _wait(self, fetch: Fetch, end: float | None) -> None:
        value = fetch.metadata.complete
        timeline = fetch.connection.timeline if fetch.connection else None
        if value is None or timeline is None:
            return
        try:
            # As a rule it is.
            if timeline.check(value):
                return
            with self._abortable(fetch.obj_id) as aborted:
                while not timeline.check(value):
                    if aborted.is_set():
                        said = f"process {fetch.metadata.pid} did not complete object {fetch.obj_id} in time"
                        raise ReceiveAbortedError(f"{said}; see what its stream waits for, or give Ray a longer time")
                    left = _SLICE_SECONDS if end is None else min(_SLICE_SECONDS, end - time.monotonic())
                    try:
                        timeline.wait(value, timeout=max(left, 0.0))
                    except warpipe.TimeoutError:
                        if end is not None and time.monotonic() >= end:
                            raise
        except _GONE as error:
            raise _gone(fetch.metadata, error) from error

    @contextlib.contextmanager
    def _abortable(self, obj_id: str) -> Iterator[threading.Event]:
        aborted = threading.Event()
        with self._lock:
            self._receiving.setdefault(obj_id, []).append(aborted)
        try:
            yield aborted
        finally:
            with self._lock:
                waiting = self._receiving[obj_id]
                waiting.remove(aborted)
                if not waiting:
                    del self._receiving[obj_id]

    def _connection(self, metadata: Metadata) -> Connection:
        key = metadata.domain, metadata.pool, metadata.device
        with self._lock:
            found = self._connections.get(key)
            if found is not None and (found.timeline is not None or metadata.complete is None):
                self._connections.move_to_end(key)
                return found
        found = _connected(metadata)
        with self._lock:
            if key not in self._connections:
                self._drop_gone()
            self._connections[key] = found
            self._connections.move_to_end(key)
            if len(self._connections) > _KEPT_CONNECTIONS:
                # A receive that goes on holds it.
                self._connections.popitem(last=False)
        return found

    def _drop_gone(self) -> None:
        """Drops the connections to sources that have ended."""
        with self._lock:
            for key, one in list(self._connections.items()):
                if one.client.is_owner_gone:
                    del self._connections[key]


class WritableTransport(Transport):
    """The same, with memory that receivers may write."""

    writable = True


def _connected(metadata: Metadata) -> Connection:
    domain, device = metadata.domain, library(metadata.library).opener(metadata.device)
    client = warpipe.PoolClient.open(metadata.pool, domain=domain, device=device)
    if metadata.complete is None:
        return Connection(device, client, None)
    return Connection(device, client, warpipe.Timeline.open(timeline_of(metadata.pool), domain=domain, device=device))


def _opened(metadata: Metadata, connection: Connection | None) -> list[Any]:
    """The tensors, over the memory of their source. They hold their blocks."""
    with_type = library(metadata.library)
    device = connection.device if connection else with_type.opener(metadata.device)
    blocks = [warpipe.LentBuffer.open(ticket, device=device) for ticket in metadata.tickets]
    tensors = []
    for (shape, dtype), place in zip(metadata.tensor_meta, metadata.places, strict=True):
        dtype, item = with_type.dtype(dtype)
        length = nbytes(shape, item)
        if length == 0:
            tensors.append(with_type.empty(shape, dtype, device))
        elif place is None:
            raise warpipe.ArgumentError(f"process {metadata.pid} has said no place of {length} bytes; create the object again")
        else:
            number, at = place
            tensors.append(with_type.over(blocks[number].view((length,), "uint8", at), dtype, shape))
    return tensors


# What a source that has ended is to warpipe.
_GONE = (warpipe.PeerGoneError, warpipe.NotFoundError, warpipe.TicketExpiredError)


def _gone(metadata: Metadata, error: Exception) -> SourceGoneError:
    said = f"process {metadata.pid}, which made the object, does not offer it any more: {error}"
    return SourceGoneError(f"{said}; create the object again")
