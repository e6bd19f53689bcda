"""Model weights in memory that outlives its processes: one copy on a device, for any number of readers.

>>> import warpipe
>>> keeper = warpipe.weights.keep("llama")                             # doctest: +SKIP
>>> warpipe.weights.publish("llama", model.state_dict()).version       # doctest: +SKIP
1
>>> tensors = warpipe.weights.load("llama", wait=60)                   # doctest: +SKIP

A keeper has a name, and offers the newest version of its weights. ``publish`` copies tensors into one memory, or takes
them where they lie, and hands it to the keeper. ``load``, ``open`` and ``attach`` map it read only in any number of processes: nothing is copied. Readers
go on when the keeper or the publisher ends. A version's memory is free when the last process that has it open ends.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from . import _warpipe
from ._attach import _giving, _tensors, attach, copy_into
from ._errors import ArgumentError, CopyWarning, NotATensorError
from ._members import apart
from ._objects import _no_pickle
from ._tensors import IN_PLACE, is_lazy, like
from ._warpipe import Keeper, PublishedWeights, SharedWeights
from ._watch import Watch

__all__ = [
    "Follower",
    "Keeper",
    "PublishedWeights",
    "SharedWeights",
    "Watch",
    "attach",
    "copy_into",
    "keep",
    "load",
    "on_meta",
    "open",
    "publish",
    "verify",
    "watch",
]

# DLPack's number of the kind of device.
_DLPACK_CUDA = 2


def open(name: str, *, device: Any = None, domain: Any = None, wait: float | None = 0.0) -> SharedWeights:
    """Opens the version that is offered under ``name``, mapped read only on ``device``.

    Waits up to ``wait`` seconds (None: no limit) for a keeper and a version, also while the keeper is replaced. A
    version that is open in this process already is the same memory.

    Raises ``NotFoundError`` when no keeper has the name, ``TimeoutError`` when it offers no version,
    ``InvalidNameError``, ``OtherKindError``, ``AccessDeniedError``, ``DeviceError``.
    """
    shared: SharedWeights = _warpipe._open_weights(name, device, domain, wait)
    return shared


def load(name: str, *, device: Any = None, domain: Any = None, wait: float | None = 0.0) -> dict[str, Any]:
    """All tensors of the version that is offered under ``name``: a ``torch.Tensor`` for each name, or a ``View`` where
    PyTorch is not installed.

    Each starts at a multiple of 512 bytes of one mapped memory; nothing is copied. The names of tied weights have one
    tensor. The memory stays mapped as long as any of the tensors lives. It may only be read: NumPy and CuPy enforce
    that; PyTorch ignores it, and a write faults.

    Raises as ``open``.
    """
    weights = open(name, device=device, domain=domain, wait=wait)
    has_torch = importlib.util.find_spec("torch") is not None
    return _tensors(weights, weights.keys(), lambda view: view.torch() if has_torch else view)


@contextlib.contextmanager
def on_meta(device: Any = None, *, least: int = 0) -> Iterator[None]:
    """Modules that this thread builds inside have their parameters on PyTorch's ``meta`` device, where they allocate
    nothing, and buffers with their values: for ``attach``.

    >>> with warpipe.weights.on_meta("cuda"):                              # doctest: +SKIP
    ...     model = transformers.AutoModelForCausalLM.from_config(config)

    In ``with torch.device("meta")`` the buffers have no values either, and those that are not persistent come from no
    weights (``inv_freq`` of rotary embeddings). Here each is computed where the module makes it, then moved to ``device``
    if there is one, as PyTorch names it. Parameters are made on PyTorch's default device and replaced as soon as the
    module has them, before they are initialised, by ones of the same class with the same attributes. Those of fewer than
    ``least`` elements stay as the module makes them, with their values.

    Raises ``ImportError`` without PyTorch.
    """
    torch = importlib.import_module("torch")
    hooks = importlib.import_module("torch.nn.modules.module")
    thread = threading.get_ident()
    # A parameter that several modules are given stays one.
    made = importlib.import_module("torch.utils.weak").WeakIdKeyDictionary()

    def applies() -> bool:
        return threading.get_ident() == thread and not getattr(_giving, "is_on", False)

    def parameter(_module: Any, _name: str, given: Any) -> Any:
        if not applies() or given is None or given.is_meta or is_lazy(given) or given.numel() < least:
            return None
        if given not in made:
            made[given] = like(given, given.detach().to("meta"), requires_grad=given.requires_grad)
            # What is set on the parameter later, as loaders do, is set on the one that the module has.
            made[given].__dict__ = given.__dict__
        return made[given]

    def buffer(_module: Any, _name: str, given: Any) -> Any:
        if not applies() or given is None or given.is_meta or device is None:
            return None
        return given.to(device)

    with contextlib.ExitStack() as registered:
        registered.callback(hooks.register_module_parameter_registration_hook(parameter).remove)
        registered.callback(hooks.register_module_buffer_registration_hook(buffer).remove)
        yield


def publish(
    name: str,
    state_dict: Mapping[str, Any],
    *,
    device: Any = None,
    domain: Any = None,
    wait: float | None = 10.0,
    zero_copy: bool | str = False,
    hash: str = "device",
    layout: str = "as_is",
    metadata: Any = None,
    base: int | PublishedWeights | SharedWeights | None = None,
) -> PublishedWeights:
    """Copies tensors into one new memory on ``device``, and hands it to the keeper of ``name`` as its next version.

    ``state_dict`` has a tensor of any framework for each name: of the host, or of the device, where the copies run on the
    current stream of the tensors' framework (``cuMemcpyDtoDAsync``). Without ``device`` it is that of the first GPU
    tensor, else ``Device()``. Strides are kept: a transposed tensor is transposed for its readers. Tensors with gaps
    become row-major, and with ``layout="row_major"`` all do. Names of the same tensor (tied weights) are stored once. The
    tensors may be changed as soon as this returns. Waits up to ``wait`` seconds (None: no limit) for the keeper to exist
    and to answer.

    ``hash`` says when the content hashes are computed, by which ``verify`` and the next keeper check the version. With
    ``"device"`` the device computes them before the version is offered; with ``"later"`` afterwards, on a thread of this
    process: see ``PublishedWeights.wait_for_hashes``. With ``"none"`` there are none, and a keeper that takes over does not
    offer the version.

    ``metadata`` is anything that JSON has (no NaN), up to 1 MiB: readers have it as ``SharedWeights.metadata``.

    With ``base`` the version has all tensors of another one but those that ``state_dict`` gives: they are neither copied
    nor hashed, and readers see one whole version. It is what ``publish`` returned, or open weights, or the number of the
    version that the keeper offers. Its memory is kept as long as a process has this version.

    With ``zero_copy=True`` tensors are published where they lie if they lie in ``warpipe.torch.pool()``, in PyTorch's
    expandable segments or in ``Memory``. The others are copied, and a ``CopyWarning`` says why; with
    ``zero_copy="require"`` that is an error. Such a tensor must not be written any more: its readers would see that, and
    its hash would not be right. Its memory is kept allocated until no process has the version: until another one is
    offered, and each reader and publisher of this one has closed it or is dead. Readers map all of the segments' pieces
    that a tensor lies in, and see what else lies there. Each process that has the version has a descriptor for each piece
    (``ulimit -n``).

    The result has the ``version`` and the bytes that were ``copied``. While it is open, this process is one of those that a new keeper takes the version
    over from; readers do not need it. After ``TimeoutError``, ``PeerGoneError`` and an interrupt the version may have
    been published.

    Raises ``NotFoundError`` when no keeper has the name, ``TimeoutError``, ``PeerGoneError``, ``RefusedError``,
    ``NotATensorError``, ``DTypeError``, ``LayoutError``, ``WrongDeviceError``, ``ArgumentError``, ``InvalidNameError``,
    ``DeviceError``; ``NotExportableError``, ``SystemCallError`` with ``"require"``.
    """
    return publish_in_phases(
        name, state_dict, device=device, domain=domain, wait=wait, zero_copy=zero_copy, hash=hash, layout=layout,
        metadata=metadata, base=base, stacklevel=3,
    )[0]  # fmt: skip


def publish_in_phases(
    name: str,
    state_dict: Mapping[str, Any],
    *,
    device: Any = None,
    domain: Any = None,
    wait: float | None = None,
    zero_copy: bool | str = False,
    hash: str = "device",
    layout: str = "as_is",
    metadata: Any = None,
    base: int | PublishedWeights | SharedWeights | None = None,
    stacklevel: int = 2,
) -> tuple[PublishedWeights, list[tuple[str, float]]]:
    """As ``publish``, with the seconds of each of its steps."""
    if zero_copy not in (True, False, "require"):
        raise ArgumentError(f'zero_copy is {zero_copy!r}; give True, False or "require"')
    if not hasattr(state_dict, "items"):
        said = f"a {type(state_dict).__name__} is no mapping of names to tensors"
        raise NotATensorError(f"{said}; give a dict: a module's state_dict(), or dict(module.named_parameters())")
    json_text = b"" if metadata is None else json.dumps(metadata, allow_nan=False).encode()
    if layout not in ("as_is", "row_major"):
        raise ArgumentError(f"layout is {layout}; allowed is 'as_is' or 'row_major'")
    is_number = type(base) is int and 0 <= base < 1 << 64
    if not (base is None or is_number or isinstance(base, (PublishedWeights, SharedWeights))):
        raise ArgumentError(f"base is {base!r}; allowed is a version's number, what `publish` returned, or open weights")
    names, tensors = _lists(state_dict)
    if device is None:
        device = _first_gpu(tensors)
    options = (device, domain, wait, zero_copy, hash, layout == "row_major", json_text, base)
    published, count, refused, phases = _warpipe._publish_weights(name, names, tensors, *options)
    if refused:
        more = f" (and {len(refused) - 1} others)" if len(refused) > 1 else ""
        said = f"{len(refused)} of {count} tensors are copied: {refused[0]}{more}; {IN_PLACE}"
        warnings.warn(said, CopyWarning, stacklevel=stacklevel)
    return published, phases


def _first_gpu(tensors: list[Any]) -> str | None:
    """The GPU of the first tensor that lies on one."""
    for tensor in tensors:
        # One of PyTorch says so sooner.
        if getattr(tensor, "is_cuda", True) and hasattr(tensor, "__dlpack_device__"):
            said = tensor.__dlpack_device__()
            if isinstance(said, tuple) and len(said) == 2 and said[0] == _DLPACK_CUDA:
                return f"cuda:{said[1]}"
    return None


def _lists(state_dict: Mapping[str, Any]) -> tuple[list[str], list[Any]]:
    """Names and tensors apart: a pair for each of many tensors keeps the garbage collector busy."""
    names, tensors = [], []
    for name, tensor in state_dict.items():
        if not isinstance(name, str):
            raise TypeError(f"the name {name!r} is a {type(name).__name__}; names of tensors are texts")
        names.append(name)
        tensors.append(tensor)
    return names, tensors


def keep(
    name: str, *, domain: Any = None, allow_uids: Iterable[int] = (), allow_gids: Iterable[int] = ()
) -> Keeper:
    """Keeps the versions of a name in this process: descriptors alone, without a device. Run it where little can fail.

    It asks every process that holds a version of the name, at most 20 s. The newest becomes its ``candidate``, which is
    offered once ``verify`` has been called in a process with a device; or a new version is published.

    ``allow_uids``, ``allow_gids``: users and groups that may open the weights beside this process's own user. They get
    the memory itself, and could write to it. The domain's folder has to let them pass (``chmod 711``).

    Raises ``NameTakenError``, ``InvalidNameError``, ``ForeignFileError``, ``DomainError``.
    """
    kept: Keeper = apart(_warpipe._keep_weights, name, domain, list(allow_uids), list(allow_gids))
    return kept


def verify(name: str, *, device: Any = None, domain: Any = None, wait: float | None = 0.0) -> int:
    """Compares the content hashes of the version that a new keeper took over, and has the keeper offer it if they are
    right. Without such a candidate, those of the version that is offered. Returns its number. It reads all of the memory.
    Waits up to ``wait`` seconds (None: no limit) for a version, and for hashes that its publisher computes later.

    Raises ``WeightsDamagedError``, and ``WeightsUnhashedError`` for a version that has no hashes to compare: a candidate
    is dropped then, and an older one may take its place; ``TimeoutError`` when the keeper has no version; as ``open``.
    """
    return _warpipe._verify_weights(name, device, domain, wait)


def watch(
    name: str,
    *,
    device: Any = None,
    domain: Any = None,
    after: int = 0,
    on: Callable[[SharedWeights], object] | None = None,
) -> Watch:
    """Follows the versions of a name after number ``after``, the one that is offered first: ``for weights in watch(name):``,
    ``async for``, or ``changes(timeout)``; with ``on`` each is given to this function, on a thread of its own.

    It goes on while the keeper is replaced, and with ``on`` after an error, which is logged (logger ``warpipe``). Close it
    to end it.

    Raises ``DomainError``, ``DeviceError``.
    """
    return Watch(name, device=device, domain=domain, after=after, on=on)


def _values(self: SharedWeights) -> list[_warpipe.View]:
    """The tensors, in the order of ``keys``.

    Raises ``ClosedError``.
    """
    return [self[name] for name in self.keys()]


def _items(self: SharedWeights) -> list[tuple[str, _warpipe.View]]:
    """The names with the tensors, in the order of ``keys``.

    Raises ``ClosedError``.
    """
    return [(name, self[name]) for name in self.keys()]


def _get(self: SharedWeights, name: str, default: Any = None, /) -> Any:
    """The tensor of that name, or ``default`` if there is none.

    Raises ``ClosedError``.
    """
    return self[name] if name in self else default


def _given_metadata(self: SharedWeights) -> Any:
    """What the publisher gave with the version; None if it gave nothing.

    Raises ``ClosedError``.
    """
    text = self._metadata()
    return json.loads(text) if text else None


class Follower:
    """Weights with later versions that come in at the same addresses: tensors, captured CUDA graphs, compiled
    modules and raw pointers that have them stay valid, and read the new version.

    ``weights.follow()`` gives it. All objects of the version in this process are of the same memory:
    they follow, too.
    """

    def __init__(self, weights: SharedWeights) -> None:
        weights._follow()
        self._weights = weights

    @property
    def weights(self) -> SharedWeights:
        """The weights, of the version that lies at the addresses now."""
        return self._weights

    @property
    def version(self) -> int:
        """The number of that version."""
        return self._weights.version

    def update(self, stream: Any = None, *, timeout: float | None = 10.0) -> int | None:
        """Takes the newest version, if there is a later one now, at the same addresses; returns its number, or None if there
        is none, also while the name has no keeper. Between steps of an engine, call it with the stream of its work.

        It waits, up to ``timeout`` seconds (None: no limit), until the work is done that ``stream`` (None: the current streams
        of PyTorch and CuPy) was given, and the streams on which tensors of the weights were made. Later work reads the new
        version. Work on any other stream may not touch the weights meanwhile: for a moment the addresses have no memory. The
        new version is taken whole or not at all: after an error, and after Ctrl-C, the former one is there.

        Raises ``WeightsMismatchError`` for a version with other names, shapes, element types or offsets, before anything is
        changed; ``TimeoutError`` when the work is not done in time, or when other weights that this process has open share
        memory that has to change; ``CapturingError``, ``ArgumentError`` for ``stream``; ``ClosedError``; as ``open``.
        """
        version: int | None
        # As items of receivers are taken.
        ((version, _),) = map(self.weights._update, (stream,), (timeout,))
        return version

    def __repr__(self) -> str:
        return f'Follower("{self._weights.name}", version={self.version})'

    __reduce__ = _no_pickle("follow them in the other process: `warpipe.weights.open(name).follow()`")


def _follow(self: SharedWeights) -> Follower:
    """Later versions come in at the addresses of this one: see ``Follower``.

    Raises ``ClosedError``.
    """
    return Follower(self)


def _complete() -> None:
    """Makes open weights a mapping."""
    weights: Any = SharedWeights
    weights.values, weights.items, weights.get, weights.follow = _values, _items, _get, _follow
    weights.__iter__ = lambda self: iter(self.keys())
    weights.metadata = property(_given_metadata)


_complete()
