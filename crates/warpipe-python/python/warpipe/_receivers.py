"""What subscribers, workers and servers can do beside the native half: wait in an event loop; and a subscriber's surface."""

from __future__ import annotations

from types import EllipsisType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from . import _warpipe
from ._errors import PeerGoneError
from ._loop import next_of

if TYPE_CHECKING:
    from ._tuples import PeerState
    from ._warpipe import _DeviceLike, _DomainLike, _StreamLike, _Timeout


_Item = TypeVar("_Item")


class Receiver(_warpipe._Receiver, Generic[_Item]):
    """From which ``async for`` takes, and which an ``async with`` block closes.

    The interpreter runs signals' handlers behind each call of a native function, and one that raises there loses what the
    function gave. It runs none behind an iterator's step: so items are taken.
    """

    if TYPE_CHECKING:

        def _next(self, timeout: _Timeout) -> _Item: ...
        def _last(self, waited: float | None, /) -> _Item: ...
        def _try(self) -> _Item | None: ...
        def __next__(self) -> _Item: ...

    def _take(self, timeout: _Timeout) -> _Item:
        (item,) = map(self._next, (timeout,))
        return item

    def _look(self) -> _Item | None:
        item: _Item | None
        (item,) = map(_warpipe._Receiver._try, (self,))
        return item

    async def _next_async(self, timeout: _Timeout = ...) -> _Item:
        return await next_of(self, self._look, self._last, self._limit(timeout))

    def __iter__(self) -> Self:
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _Item:
        """The next item; the iteration ends where the one without ``async`` does."""
        try:
            return await self._next_async(self._iteration)
        except PeerGoneError as gone:
            if gone.graceful:
                raise StopAsyncIteration from None
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        self.close()


class Subscriber(Receiver[_warpipe.Sample]):
    """Receives the tensors of one publisher: ``for frame in Subscriber("camera/front"):``,
    ``receive()``, or ``async for``.

    ``device``: the device it reads with (default: the first GPU, else the host). ``wait``: seconds
    to wait for a publisher of the name, None for no limit (default: not at all). ``reconnect``:
    follow the next publisher of the name when this one ends. ``timeout``: seconds that a receive,
    or each step of an iteration, waits (None: no limit; by default 10 for a receive, and no limit
    for an iteration). ``spin``: seconds that it polls before it sleeps (default: 20 us).
    ``orphan_timeout``: seconds after which streams that wait for a dead publisher go
    on, where a child that it forked keeps its device work running; the samples that they waited for
    are lost. ``stream``: the stream to receive on; by default one of its own, and every array made
    of a frame orders its own stream after the data.

    One thread at a time receives; other threads wait. Frames may be used on any thread.

    Raises ``NotFoundError``, ``OtherKindError``, ``HandshakeError``, ``AccessDeniedError``,
    ``DeviceError``.
    """

    def __new__(
        cls,
        name: str,
        *,
        domain: _DomainLike | None = None,
        device: _DeviceLike | None = None,
        wait: float | None = 0.0,
        reconnect: bool = False,
        timeout: float | None | EllipsisType = ...,
        spin: float | None = None,
        handshake_timeout: float = 5.0,
        orphan_timeout: float = 30.0,
        stream: _StreamLike | None = None,
    ) -> Self:
        place = (name, domain, device, wait, timeout, spin, handshake_timeout, stream)
        return super().__new__(cls, "subscriber", *place, reconnect=reconnect, orphan_timeout=orphan_timeout)

    @property
    def name(self) -> str:
        """Its publisher's name."""
        return self._name

    @property
    def publisher_state(self) -> PeerState | None:
        """The state of its publisher: ``"alive"``, ``"stalled"``, ``"leaving"``, ``"suspect"``, ``"dead"``; None without
        a publisher.

        Raises ``ClosedError``.
        """
        state: PeerState | None = self._facts()[0]
        return state

    @property
    def publisher_pid(self) -> int | None:
        """The publisher's process id; None without a publisher.

        Raises ``ClosedError``.
        """
        pid: int | None = self._facts()[1]
        return pid

    @property
    def dropped(self) -> int:
        """Frames that it did not get because of the publisher's policy.

        Raises ``ClosedError``.
        """
        dropped: int = self._facts()[2]
        return dropped

    def receive(self, timeout: _Timeout = ...) -> _warpipe.Sample:
        """Waits for the next frame, at most ``timeout`` seconds (default: the subscriber's; None: no limit).

        Raises ``TimeoutError``; ``PeerGoneError`` once all its completed frames have been received (not with
        ``reconnect``); for a tensor that was sent in place ``SampleLostError``, ``HandleError``, ``TicketExpiredError``,
        and, of a publisher that is stopped, ``HandshakeError``: the frame stays the next; ``LinkClosedError``,
        ``ProtocolError``, ``ClosedError``, ``DriverError``.
        """
        return self._take(timeout)

    def try_receive(self) -> _warpipe.Sample | None:
        """The next frame if there is one, else None; also while another thread waits for one.

        Raises as ``receive``, without the timeout.
        """
        return self._look()

    async def receive_async(self, timeout: _Timeout = ...) -> _warpipe.Sample:
        """Waits for the next frame in the running event loop: ``receive`` for asyncio.

        ``timeout`` is in seconds (default: the subscriber's; None: as long as it takes). The loop sleeps in its poller
        until the subscriber's descriptor says that a frame may be there. Cancelling it loses no frame.

        Raises as ``receive``.
        """
        return await self._next_async(timeout)


Subscriber.__module__ = "warpipe"
