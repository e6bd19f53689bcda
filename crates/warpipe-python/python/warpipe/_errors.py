"""The exceptions of warpipe: one tree under ``Error``, with a class for each variant of the Rust library's ``enum Error``.

A variant's faults have classes of their own where Python has a family for them (``TimeoutError``, ``ConnectionError``,
``PermissionError``, ``LookupError``, ...), to which they then belong, too, or where programs tell them apart (the ends of a
job); other faults are attributes. Messages end with the next step, in Python's words.
"""

from __future__ import annotations

import builtins
import errno
import os
import threading
from typing import Any


class Error(Exception):
    """The base of everything that warpipe raises.

    Attribute: ``error_kind``, what a program can do next, as the Rust library's ``ErrorKind`` in snake case:
    ``"peer_gone"``, ``"timeout"``, ``"limit_reached"``, ...
    """

    __module__ = "warpipe"

    error_kind: str = "invalid_input"

    def __str__(self) -> str:
        # An ``OSError`` with a number would have another text than its message.
        return str(self.args[0]) if len(self.args) == 1 else super().__str__()

    def __reduce__(self) -> Any:
        if not isinstance(self, OSError):
            return super().__reduce__()
        return type(self), self.args, {**vars(self), "errno": self.errno, "strerror": self.strerror}


# Devices and the system.


class DeviceError(Error):
    """A device that is missing, cannot be used, or failed. Attribute: ``fault``, the name of the Rust library's
    ``DeviceFault``: ``"NoDriver"``, ``"OldDriver"``, ``"NoGpu"``, ``"Reset"``, ``"NotShareable"``, ``"OutOfReach"``, ..."""

    fault: str | None = None


class DevicePermissionError(DeviceError, PermissionError):
    """The driver is there but this user may not open its device files."""


class NoSuchDeviceError(DeviceError, LookupError):
    """No device answers to what was asked for."""


class DriverError(DeviceError):
    """A call of the driver failed. Attributes: ``call``, ``code`` (the ``CUresult``), ``driver_name``."""

    call: str
    code: int
    driver_name: str


class CapturingError(DeviceError):
    """A stream is being captured into a CUDA graph, which would record the call instead of doing it. Nothing was done: call
    it outside of ``torch.cuda.graph``, or on another stream."""


class DeviceMemoryError(DeviceError, MemoryError):
    """The device has no room for an allocation. Attribute: ``nbytes``."""

    nbytes: int


class SystemCallError(Error, OSError):
    """A call of the operating system failed. Attributes: ``call``, ``code`` (the errno)."""

    call: str

    @property
    def code(self) -> int | None:
        return self.errno

    @code.setter
    def code(self, code: int | None) -> None:
        self.errno, self.strerror = code, None if code is None else os.strerror(code)


# Names.


class InvalidNameError(Error, ValueError):
    """A name that no endpoint may have. Attribute: ``endpoint``."""

    endpoint: str


class DomainError(Error):
    """A domain directory that cannot be trusted or used."""


class ForeignFileError(Error, FileExistsError):
    """Something that is not warpipe's stands where an endpoint's file should be."""


class NameTakenError(Error):
    """The name is held by a live endpoint. Attributes: ``endpoint``, ``pid`` (None if unknown)."""

    endpoint: str
    pid: int | None


# Links and peers.


class ConnectionError(Error, builtins.ConnectionError):
    """A link that cannot be made, or has ended. Attribute: ``endpoint``."""

    endpoint: str


class AccessDeniedError(ConnectionError, PermissionError):
    """The endpoint's owner does not let this user in."""


class HandshakeError(ConnectionError):
    """The two sides could not agree on a link."""


class ProtocolError(ConnectionError):
    """A peer wrote into a link what no correct peer writes."""


class PeerGoneError(ConnectionError, ConnectionResetError):
    """The process that owned an endpoint, or exported memory, has gone. Attributes: ``kind`` (what it owned: ``"publisher"``,
    ``"queue"``, ``"timeline"``, ``"legacy memory"``, ...), ``pid``, ``graceful`` (whether it closed; otherwise it died)."""

    kind: str
    pid: int
    graceful: bool


class SampleLostError(ConnectionError):
    """A frame's sender died or gave up before its data was complete. Attributes: ``sequence``, ``pid``."""

    sequence: int
    pid: int


class LinkClosedError(ConnectionError):
    """The link has ended and its peer may live: this side has closed it, for a reason that was told when it happened,
    or the publisher has closed this subscriber's link alone, or a kernel ring has stopped."""


class NotFoundError(ConnectionError, ConnectionRefusedError):
    """No endpoint has this name. Attributes: ``kind`` (what was looked for), ``was_there`` (its owner has died)."""

    kind: str
    was_there: bool


class OtherKindError(ConnectionError):
    """Something else is kept under this name. Attributes: ``kind`` (what was wanted), ``found``."""

    kind: str
    found: str


class RefusedError(ConnectionError):
    """The owner let this process in and refused what it asked."""


class TicketExpiredError(ConnectionError, ConnectionResetError):
    """What a ticket names is not there any more."""


class EventLostError(Error, builtins.ConnectionError):
    """An event's recorder died before its work was done. Attributes: ``event``, ``pid``."""

    event: str
    pid: int


# Waits and limits.


class TimeoutError(Error, builtins.TimeoutError):
    """A wait ran out. Attribute: ``waited``, in seconds."""

    waited: float


class FullError(Error):
    """A subscriber has no room and the policy is to fail. Attributes: ``endpoint``, ``depth``."""

    endpoint: str
    depth: int


class EventLimitError(Error):
    """This process has as many interprocess events as it may have. Attribute: ``limit``."""

    limit: int


class MemoryLimitError(Error, MemoryError):
    """The publisher's memory limit leaves no room. Attributes: ``endpoint``, ``nbytes``, ``used``, ``limit``."""

    endpoint: str
    nbytes: int
    used: int
    limit: int


class QuotaExceededError(Error, MemoryError):
    """The quota of a pool's user leaves no room. Attributes: ``endpoint``, ``uid``, ``nbytes``, ``used`` and ``limit``
    (bytes), ``blocks``, ``blocks_max``."""

    endpoint: str
    uid: int
    nbytes: int
    used: int
    limit: int
    blocks: int
    blocks_max: int


# Arguments and use.


class ArgumentError(Error, ValueError):
    """An argument outside its stated range."""


class WrongDeviceError(ArgumentError):
    """A tensor that lies on another device than the endpoint's memory."""


class LayoutError(Error, ValueError):
    """A tensor layout that cannot be, or does not fit."""


class DTypeError(LayoutError, TypeError):
    """An element type that cannot be sent, or that a framework lacks."""


class NotATensorError(Error, TypeError):
    """An object that is no tensor."""


class HandleError(Error, ValueError):
    """A ticket, or a handle of an event or of memory, that cannot be used. Attribute: ``what``, ``"ticket"``, ``"event handle"``
    or ``"legacy handle"``."""

    what: str


class EventNotRecordedError(Error, RuntimeError):
    """An event that was never recorded: there is nothing to wait for. Attribute: ``event``."""

    event: str


class MetadataError(Error, ValueError):
    """Metadata that is too large, or no JSON object."""


class ExportError(Error, BufferError):
    """Memory that cannot be handed out, or taken in, as it was asked for."""


class NotExportableError(ExportError):
    """Memory of a kind that another process cannot open by the handle that was asked for. Attributes: ``ptr``, ``kind`` (what it is, in words)."""

    ptr: int
    kind: str


class ClosedError(Error, ValueError):
    """An endpoint that is used after it was closed."""

    error_kind: str = "invalid_state"


class ReleasedError(Error, ValueError):
    """A frame or a loan that is used after it was given back."""

    error_kind: str = "invalid_state"


class ForkedError(Error, RuntimeError):
    """An object that was made before a ``fork`` is used in the child."""


class CopyWarning(UserWarning):
    """A tensor that was to be sent where it lies is copied. The message says why."""

    __module__ = "warpipe"


# Queues and services.


class QueueFullError(Error):
    """A queue has as many jobs as it may have. Attributes: ``endpoint``, ``limit``, ``waited`` (seconds)."""

    endpoint: str
    limit: int
    waited: float


class JobError(Error):
    """A job, or a request, that came to no result. Attributes: ``endpoint``, ``job`` (its number)."""

    endpoint: str
    job: int


class DeadLetteredError(JobError):
    """Every attempt at a job failed. Attribute: ``reasons``, one for each attempt, the first first."""

    reasons: list[str]


class RejectedError(JobError):
    """The worker or server that had the job said that it is not to be done. Attribute: ``reason``."""

    reason: str


class DeadlinePassedError(JobError, builtins.TimeoutError):
    """The deadline of a request has passed."""


class NoSuchJobError(JobError, LookupError):
    """The job is not in its queue any more: its outcome was taken, or it was cancelled."""


class QueueClosedError(ClosedError):
    """The queue was shut, or closed, in this process. Attribute: ``endpoint``."""

    endpoint: str


# Weights.


class WeightsFileError(Error, ValueError):
    """A file of weights is damaged, truncated, or none; or a description is too long. Attribute: ``path``."""

    path: str


class WeightsDamagedError(Error):
    """Tensors of published weights are not what their publisher wrote. Attributes: ``endpoint``, ``version``, ``tensors``
    (their names)."""

    endpoint: str
    version: int
    tensors: list[str]


class WeightsUnhashedError(Error):
    """Published weights have no content hashes to compare. Attributes: ``endpoint``, ``version``."""

    endpoint: str
    version: int


class WeightsMismatchError(Error, ValueError):
    """Weights and a module have other tensors. Nothing of the module was changed.

    Attributes: ``missing`` (names that the weights lack), ``unexpected`` (names that the module lacks), ``different``
    (for each name, how the two differ), ``uncomputed`` (other parameters and buffers that would stay on ``meta``, without
    values).
    """

    missing: list[str]
    unexpected: list[str]
    different: dict[str, str]
    uncomputed: list[str]


for _class in list(globals().values()):
    if isinstance(_class, type) and issubclass(_class, Error):
        _class.__module__ = "warpipe"
del _class


def _number(number: int, *classes: Any) -> None:
    """Gives errors that are ``OSError``s by their meaning the number that the system has for that."""
    for one in classes:
        one.errno, one.strerror = number, os.strerror(number)


_number(errno.ECONNABORTED, ConnectionError, EventLostError)
_number(errno.ECONNREFUSED, NotFoundError)
_number(errno.ECONNRESET, PeerGoneError, TicketExpiredError)
_number(errno.EACCES, AccessDeniedError, DevicePermissionError)
_number(errno.EEXIST, ForeignFileError)
_number(errno.ETIMEDOUT, TimeoutError, DeadlinePassedError)


def _end_quietly() -> None:
    """The program ends, and its endpoints are closed: daemon threads that learn it by an error stop there."""
    usual = threading.excepthook

    def told(raised: Any) -> None:
        thread = raised.thread
        if not (thread is not None and thread.daemon and isinstance(raised.exc_value, Error)):
            usual(raised)

    threading.excepthook = told
