"""Queues and services: the surfaces of the native half, and waits in an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

from . import _warpipe
from ._errors import ArgumentError, PeerGoneError
from ._loop import end_of, found
from ._receivers import Receiver

if TYPE_CHECKING:
    from ._tuples import MemoryUse
    from ._warpipe import _DeviceLike, _DomainLike, _Metadata, _StreamLike, _Timeout

_log = logging.getLogger("warpipe")

# Every change rings: this is for what no ring tells.
_PATIENCE_SECONDS = 1.0


async def outcome_of(future: _warpipe._Future) -> _warpipe.JobResult:
    """Waits for a job's result, or a reply, in the running event loop. Cancelling it loses nothing."""
    end = future.deadline_ns / 1e9 if isinstance(future, _warpipe.Pending) else float("inf")
    while True:
        outcome = await found(future._queue, future._watch, future._poll, end, _PATIENCE_SECONDS, future.done)
        if outcome is not None:
            return outcome
        # At its deadline the next look raises; until then it is a rounding's time away.
        await asyncio.sleep(0)


def step(awaited: _warpipe._Future, how: str, *arguments: Any) -> Any:
    """A step of a task that was made of what is awaited. Each task has a wait of its own."""
    waits: dict[asyncio.Task[Any] | None, Coroutine[Any, Any, _warpipe.JobResult]] = awaited._waits
    if how == "close":
        for wait in waits.values():
            wait.close()
        waits.clear()
        return None
    task = asyncio.current_task()
    if task not in waits:
        waits[task] = outcome_of(awaited)
    wait = waits[task]
    try:
        return getattr(wait, how)(*arguments)
    except BaseException:
        # Over, with its result or without.
        del waits[task]
        raise


async def next_result(results: _warpipe.Results) -> _warpipe.JobResult:
    """The next of a queue's results, in the running event loop."""
    end = end_of(results._timeout)

    def look() -> _warpipe.JobResult | Literal[False] | None:
        # As items of receivers are taken.
        (come,) = map(_warpipe.Results._poll, (results,))
        return come

    result: _warpipe.JobResult | Literal[False] | None
    result = await found(results._queue, results._watch, look, end, _PATIENCE_SECONDS)
    if result is None:
        result = _last_of(results)
    if result is False:
        raise StopAsyncIteration
    return result


def _last_of(results: _warpipe.Results) -> _warpipe.JobResult | Literal[False]:
    # One step, or none: a coroutine cannot raise `StopIteration`.
    for result in map(_warpipe.Results._last, (results,)):
        return result
    return False


class Queue(_warpipe._Jobs):
    """Gives each job to one worker, and gets each job's result once, even if processes die: see ``Worker``.

    ``name``: as a publisher's. ``device``: the device of the inputs' memory (default: the first GPU, else the host).
    ``prefetch``: jobs that one worker may hold at once, 1 to 256. ``max_attempts``: how often a job is tried before it
    is dead-lettered. ``lease_timeout``: seconds that a worker may hold jobs without answering any; then they go to
    other workers (None: wait for its death). ``order``: of ``results()``, ``"submission"`` or ``"completion"``.
    ``limit``: the most jobs without a taken outcome. ``submit_timeout``: seconds to wait for room, and for memory
    (None: no limit). ``memory_limit``: bytes of device memory for inputs.

    Any number of threads may use it. ``close()``, the end of a ``with`` block, or dropping it closes it: unfinished
    jobs are discarded.

    Raises ``InvalidNameError``, ``NameTakenError``, ``ForeignFileError``, ``DomainError``, ``ArgumentError``,
    ``DeviceError``.
    """

    def __new__(
        cls,
        name: str,
        *,
        domain: _DomainLike | None = None,
        device: _DeviceLike | None = None,
        prefetch: int = 2,
        max_attempts: int = 3,
        lease_timeout: float | None = None,
        order: Literal["submission", "completion"] = "submission",
        limit: int = 1 << 20,
        submit_timeout: float | None = 5.0,
        memory_limit: int = 4 << 30,
        workers_max: int = 256,
        spin: float | None = None,
        handshake_timeout: float = 5.0,
    ) -> Self:
        if order not in ("submission", "completion"):
            raise ArgumentError(f'order is "{order}"; allowed is "submission" or "completion"')
        jobs = (prefetch, max_attempts, lease_timeout, limit, memory_limit, spin, submit_timeout, submit_timeout)
        last = (order == "completion", workers_max, handshake_timeout)
        return super().__new__(cls, False, name, domain, device, *jobs, *last)

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    def submit(
        self,
        tensor: Any,
        *,
        metadata: _Metadata | None = None,
        stream: _StreamLike | None = None,
        timeout: _Timeout = ...,
    ) -> _warpipe.JobHandle:
        """Submits a job: copies a tensor into the queue's memory, as ``Publisher.send`` does, or takes a ``loan`` of
        this queue without a copy. Waits for room, at most ``timeout`` seconds (default: the queue's; None: no limit),
        and neither for a worker nor for the device.

        ``metadata``: a dict (as JSON) or any buffer, at most 200 bytes, for the worker.

        Raises ``QueueFullError``; ``TimeoutError`` if the driver blocks another thread's ``submit``;
        ``NotATensorError``, ``DTypeError``, ``LayoutError``, ``WrongDeviceError``, ``MetadataError``;
        ``MemoryLimitError``, ``QueueClosedError``, ``DriverError``.
        """
        handle: _warpipe.JobHandle
        (handle,) = map(self._submit, (tensor,), (metadata,), (stream,), (timeout,))
        return handle

    def results(self, timeout: float | None = None, *, follow: bool = False) -> _warpipe.Results:
        """Iterates, with ``for`` or ``async for``, over the results that no handle has taken, in the queue's ``order``.
        It ends when there is no job left; with ``follow``, only once ``shutdown`` was called, too, so that another
        thread may go on submitting. Each is waited for at most ``timeout`` seconds (None: no limit). A job that was
        dead-lettered or rejected raises in its place; the same iterator can go on with the others.

        Raises ``DeadLetteredError``, ``RejectedError``, ``TimeoutError``, ``ClosedError``.
        """
        return self._results(timeout, follow)

    def drain(self, timeout: float | None = None) -> None:
        """Waits until every job is done or dead-lettered, at most ``timeout`` seconds (None: no limit). The outcomes
        can still be taken.

        Raises ``TimeoutError``, ``ClosedError``.
        """
        self._drain(timeout)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False, timeout: float | None = None) -> None:
        """Accepts no more jobs, as ``concurrent.futures.Executor.shutdown``. Once every job is done or dead-lettered,
        the queue's name is free and the workers' loops end: ``for lease in worker`` stops, and ``lease()`` raises
        ``PeerGoneError`` with ``graceful``. Until then workers may still attach. Outcomes can be taken until the queue
        is closed.

        ``wait``: wait for that, at most ``timeout`` seconds (None: no limit). ``cancel_futures``: cancel the jobs that
        no worker holds.

        Raises ``TimeoutError`` (the queue is shut all the same), ``ClosedError``.
        """
        self._shutdown(wait, cancel_futures, timeout)

    def wait_for_workers(self, count: int = 1, timeout: float | None = 10.0) -> None:
        """Waits until there are ``count`` workers, at most ``timeout`` seconds (None: no limit).

        Raises ``TimeoutError``, ``ClosedError``.
        """
        self._wait_for("worker", count, timeout)

    @property
    def memory_in_use(self) -> MemoryUse:
        """Device memory allocated for inputs so far and its limit, in bytes: a ``MemoryUse``.

        Raises ``ClosedError``.
        """
        return self._memory_in_use


class Worker(Receiver[_warpipe.Lease]):
    """Takes jobs of a ``Queue`` and answers each: ``for lease in Worker("jobs"):``, ``lease()``, or ``async for``.

    ``device``: the device it works with, and of the results' memory (default: the first GPU, else the host). ``wait``:
    seconds to wait until the queue exists, None for no limit (default: not at all). ``timeout``: seconds to wait for a
    job (default: None, no limit). ``answer_timeout``: seconds that an answer may wait for the owner to release earlier
    results, and for memory. ``memory_limit``: bytes of device memory for results. ``stream``: the stream to lease on;
    by default one of its own, and every array made of a lease orders its own stream after the data.

    One thread at a time leases; other threads wait. Leases may be used on any thread. ``close()``, or the end of a
    ``with`` block: jobs that it has not leased go to other workers; leased jobs can still be answered.

    Raises ``NotFoundError``, ``OtherKindError``, ``HandshakeError``, ``AccessDeniedError``, ``DeviceError``.
    """

    def __new__(
        cls,
        queue: str,
        *,
        domain: _DomainLike | None = None,
        device: _DeviceLike | None = None,
        wait: float | None = 0.0,
        timeout: float | None = None,
        answer_timeout: float | None = 10.0,
        spin: float | None = None,
        memory_limit: int = 4 << 30,
        handshake_timeout: float = 5.0,
        stream: _StreamLike | None = None,
    ) -> Self:
        place = (queue, domain, device, wait, timeout, spin, handshake_timeout, stream)
        return super().__new__(cls, "worker", *place, answer_timeout=answer_timeout, memory_limit=memory_limit)

    @property
    def queue(self) -> str:
        """The queue's name."""
        return self._name

    def lease(self, timeout: _Timeout = ...) -> _warpipe.Lease:
        """Waits for the next job, at most ``timeout`` seconds (default: the worker's; None: no limit).

        Raises ``TimeoutError``; ``PeerGoneError``, which is ``graceful`` after the queue's ``shutdown`` or ``close``;
        ``LinkClosedError`` when the queue, which lives, has ended this worker's link; ``ProtocolError``,
        ``ClosedError``, ``DriverError``.
        """
        return self._take(timeout)

    def try_lease(self) -> _warpipe.Lease | None:
        """The next job if there is one, else None; also while another thread waits for one.

        Raises as ``lease``, without the timeout.
        """
        return self._look()

    async def lease_async(self, timeout: _Timeout = ...) -> _warpipe.Lease:
        """Waits for the next job in the running event loop: ``lease`` for asyncio.

        ``timeout`` is in seconds (default: the worker's; None: as long as it takes). Cancelling it loses no job.

        Raises as ``lease``.
        """
        return await self._next_async(timeout)


class Client(_warpipe._Jobs):
    """Sends requests to the servers of a service: ``call`` waits for the reply, ``request`` returns a ``Pending``.

    ``service``: as a publisher's name, at most 40 bytes. ``device``: the device of the requests' memory (default: the
    first GPU, else the host). ``timeout``: seconds within which a reply must come (None: no limit). ``max_attempts``:
    how many servers may fail or die on a request before it is dead-lettered. ``prefetch``: requests that one server may
    hold. ``lease_timeout``: seconds that a server may hold requests without answering any; then they go to other
    servers. ``limit``: the most requests without a reply. ``memory_limit``: bytes of device memory for requests.
    ``loan_timeout``: seconds to wait for memory that is in use.

    Any number of threads may use it. A server need not exist yet.

    Raises ``InvalidNameError``, ``DomainError``, ``ArgumentError``, ``DeviceError``.
    """

    def __new__(
        cls,
        service: str,
        *,
        domain: _DomainLike | None = None,
        device: _DeviceLike | None = None,
        timeout: float | None = 10.0,
        max_attempts: int = 3,
        prefetch: int = 2,
        lease_timeout: float | None = None,
        limit: int = 1 << 20,
        memory_limit: int = 4 << 30,
        loan_timeout: float | None = 5.0,
        spin: float | None = None,
    ) -> Self:
        jobs = (prefetch, max_attempts, lease_timeout, limit, memory_limit, spin, timeout, loan_timeout)
        return super().__new__(cls, True, service, domain, device, *jobs, False, 0, 0.0)

    @property
    def service(self) -> str:
        """The service's name."""
        return self._name

    def call(
        self,
        tensor: Any,
        *,
        metadata: _Metadata | None = None,
        stream: _StreamLike | None = None,
        timeout: _Timeout = ...,
    ) -> _warpipe.JobResult:
        """Sends a request and waits for the reply, which must come within ``timeout`` seconds (default: the client's;
        None: no limit): see ``request``.

        Raises as ``request`` and ``Pending.result``.
        """
        return self.request(tensor, metadata=metadata, stream=stream, timeout=timeout).result()

    def request(
        self,
        tensor: Any,
        *,
        metadata: _Metadata | None = None,
        stream: _StreamLike | None = None,
        timeout: _Timeout = ...,
    ) -> _warpipe.Pending:
        """Sends a request. Its reply must come within ``timeout`` seconds (default: the client's; None: no limit); no
        server begins with it later. A tensor is copied, as ``Publisher.send`` does; a ``loan`` of this client is sent
        without a copy. ``metadata``: a dict (as JSON) or any buffer, at most 200 bytes, for the server.

        Raises ``QueueFullError``; ``NotATensorError``, ``DTypeError``, ``LayoutError``, ``WrongDeviceError``,
        ``MetadataError``; ``MemoryLimitError``, ``ClosedError``, ``DriverError``.
        """
        pending: _warpipe.Pending
        (pending,) = map(self._submit, (tensor,), (metadata,), (stream,), (timeout,))
        return pending

    def wait_for_servers(self, count: int = 1, timeout: float | None = 10.0) -> None:
        """Waits until there are ``count`` servers, at most ``timeout`` seconds (None: no limit).

        Raises ``TimeoutError``, ``ClosedError``.
        """
        self._wait_for("server", count, timeout)


class Server(Receiver[_warpipe.Lease]):
    """Takes the requests of all clients of a service, together with its other servers, and answers each, a ``Lease``:
    ``for request in Server("embed"):``, ``accept()``, or ``async for``. It finds new clients by itself.

    ``device``: the device it works with, and of the replies' memory (default: the first GPU, else the host).
    ``timeout``: seconds to wait for a request (default: None, no limit). ``answer_timeout``: seconds that a reply may
    wait for the client to release earlier ones, and for memory. ``memory_limit``: bytes of device memory for the
    replies to one client. ``handshake_timeout``: the limit of a client's handshake in seconds. ``clients_max``: the
    most clients at once. ``stream``: the stream to accept on; by default one of its own, and every array made of a
    request orders its own stream after the data.

    One thread at a time accepts; other threads wait. Requests may be used on any thread. ``close()``, or the end of a
    ``with`` block: requests that it has not accepted go to other servers.

    Raises ``InvalidNameError``, ``DomainError``, ``DeviceError``.
    """

    def __new__(
        cls,
        service: str,
        *,
        domain: _DomainLike | None = None,
        device: _DeviceLike | None = None,
        timeout: float | None = None,
        answer_timeout: float | None = 10.0,
        spin: float | None = None,
        memory_limit: int = 4 << 30,
        handshake_timeout: float = 5.0,
        clients_max: int = 256,
        stream: _StreamLike | None = None,
    ) -> Self:
        place = (service, domain, device, None, timeout, spin, handshake_timeout, stream)
        return super().__new__(
            cls, "server", *place, answer_timeout=answer_timeout, memory_limit=memory_limit, clients_max=clients_max
        )

    @property
    def service(self) -> str:
        """The service's name."""
        return self._name

    @property
    def clients(self) -> int:
        """How many clients it is attached to. It attaches to new clients while it waits for requests.

        Raises ``ClosedError``.
        """
        clients: int = self._facts()[2]
        return clients

    def accept(self, timeout: _Timeout = ...) -> _warpipe.Lease:
        """Waits for the next request of any client, at most ``timeout`` seconds (default: the server's; None: no
        limit); clients take turns. A request after its deadline is not delivered.

        Raises ``TimeoutError``, ``SystemCallError``, ``ClosedError``, ``DriverError``.
        """
        return self._take(timeout)

    def try_accept(self) -> _warpipe.Lease | None:
        """The next request if there is one, else None; also while another thread waits for one. It attaches to new
        clients as ``accept`` does.

        Raises as ``accept``, without the timeout.
        """
        return self._look()

    async def accept_async(self, timeout: _Timeout = ...) -> _warpipe.Lease:
        """Waits for the next request of any client in the running event loop: ``accept`` for asyncio.

        ``timeout`` is in seconds (default: the server's; None: as long as it takes). Cancelling it loses no request.

        Raises as ``accept``.
        """
        return await self._next_async(timeout)


for _one in (Queue, Worker, Client, Server):
    _one.__module__ = "warpipe"


def _leave_lease(
    self: _warpipe.Lease,
    kind: type[BaseException] | None,
    error: BaseException | None,
    _trace: TracebackType | None,
    /,
) -> bool:
    """An exception that fails the attempt is logged, and ends the block alone: it is the job's, and the next job is
    another one. Interrupts go on, as does what is raised once the job has its answer."""
    if self.is_answered:
        self.release()
        return False
    is_failed = kind is not None and issubclass(kind, Exception)
    # Where the owner is gone, its jobs are, too: a server goes on, and a worker's next wait raises.
    with contextlib.suppress(PeerGoneError):
        if kind is None:
            self.fail("its worker left it without an answer")
        elif is_failed:
            self.fail(f"{kind.__name__}: {'' if error is None else error}".encode(errors="replace").decode())
        else:
            self.requeue()
    if is_failed:
        _log.error("attempt %d of job %d failed", self.attempt, self.job, exc_info=error)
    return is_failed


def _leave_loan(
    self: _warpipe.Loan,
    kind: type[BaseException] | None,
    _error: BaseException | None,
    _trace: TracebackType | None,
    /,
) -> None:
    """A result is completed, and a sample sent. Any other loan goes back, and each if the block raised."""
    if not self.released:
        if kind is not None:
            self.discard()
        elif isinstance(self, _warpipe.Output):
            self._lease.complete(self)
        elif isinstance(self, _warpipe.SampleMut):
            self.send()
        else:
            self.discard()


def _complete() -> None:
    """Gives the native classes these methods."""
    lease: Any = _warpipe.Lease
    lease.__exit__ = _leave_lease
    results: Any = _warpipe.Results
    results.__iter__ = results.__aiter__ = lambda self: self
    results.__anext__ = next_result
    loan: Any = _warpipe.Loan
    loan.__exit__ = _leave_loan


_complete()
