"""New weights from a trainer to engines that run, whatever the engine: what its adapters share.

An engine joins and cuts the tensors of a checkpoint when it loads them. ``recorded`` notes each of these copies, and the
engine publishes them with its parameters. A ``Trainer`` does the same copies into memory of its own and publishes that as
the next version of each rank; a ``Receiver`` takes the version between two steps, at the addresses of the last one. So no
engine copies or cuts anything, no rank has more than its part, and a version is there whole or not at all.
"""

from __future__ import annotations

import base64
import bisect
import contextlib
import fcntl
import hashlib
import importlib
import itertools
import json
import logging
import os
import subprocess
import sys
import time
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import _warpipe, weights
from ._errors import ArgumentError, DomainError, NotFoundError, WeightsMismatchError

_PLAN = "plan"
# The key of a version's metadata that all ranks' versions of one ``send`` have the same value of.
SEND = "send"
# How long a new keeper may take to check the version of other processes.
TAKEOVER_SECONDS = 120.0
_LOOK_SECONDS = 0.05
# As many names are in a message.
_NAMES_TOLD = 8

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Copy:
    """A part of a checkpoint's tensor, and the part of an engine's that it is copied to, in elements."""

    target: str
    target_at: int
    target_strides: tuple[int, ...]
    source: str
    source_at: int
    source_strides: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass
class Plan:
    """How the tensors of a checkpoint become those of an engine's rank."""

    copies: list[Copy] = field(default_factory=list)
    sources: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The shape of each tensor of the checkpoint."""
    opaque: list[str] = field(default_factory=list)
    """Tensors of the engine that something else than copies made: no trainer can write them."""
    _of_source: dict[str, list[Copy]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def packed(self) -> str:
        """As text, for the metadata of a version. A model with many experts has tens of thousands of copies, which differ from
        each other by little: of each number there is the difference to the last copy's, and of each tuple its place in a
        list."""
        targets = {name: number for number, name in enumerate(dict.fromkeys(one.target for one in self.copies))}
        sources = {name: number for number, name in enumerate(self.sources)}
        tuples: dict[tuple[int, ...], int] = {}

        def places(of: Iterable[tuple[int, ...]]) -> list[int]:
            return [tuples.setdefault(one, len(tuples)) for one in of]

        columns = [
            _differences([targets[one.target] for one in self.copies]),
            _differences([one.target_at for one in self.copies]),
            places(one.target_strides for one in self.copies),
            _differences([sources[one.source] for one in self.copies]),
            _differences([one.source_at for one in self.copies]),
            places(one.source_strides for one in self.copies),
            places(one.shape for one in self.copies),
        ]
        shapes = places(self.sources.values())
        whole = {
            "targets": list(targets), "sources": list(sources), "shapes": shapes, "columns": columns, "tuples": list(tuples),
            "opaque": self.opaque,
        }  # fmt: skip
        return base64.b64encode(zlib.compress(json.dumps(whole, separators=(",", ":")).encode(), 9)).decode()

    @classmethod
    def unpacked(cls, text: str) -> Plan:
        whole = json.loads(zlib.decompress(base64.b64decode(text)))
        targets, sources, tuples = whole["targets"], whole["sources"], [tuple(one) for one in whole["tuples"]]
        # The tuples' columns are the others.
        numbers = [column if at in (2, 5, 6) else itertools.accumulate(column) for at, column in enumerate(whole["columns"])]
        copies = [
            Copy(targets[target], at, tuples[strides], sources[source], source_at, tuples[source_strides], tuples[shape])
            for target, at, strides, source, source_at, source_strides, shape in zip(*numbers, strict=True)
        ]
        shapes = [tuples[shape] for shape in whole["shapes"]]
        return cls(copies, dict(zip(sources, shapes, strict=True)), whole["opaque"])

    def of(self, source: str) -> Sequence[Copy]:
        """The copies of a tensor of the checkpoint."""
        if not self._of_source:
            for one in self.copies:
                self._of_source.setdefault(one.source, []).append(one)
        return self._of_source.get(source, ())

    def covered(self) -> dict[str, int]:
        """How many elements of each tensor are copied."""
        counted: dict[str, int] = {}
        for one in self.copies:
            counted[one.target] = counted.get(one.target, 0) + _count(one.shape)
        return counted


class Clock(dict[str, float]):
    """Seconds of each step of what was done, by its name."""

    def __init__(self) -> None:
        super().__init__()
        self._last = time.perf_counter()

    def end(self, step: str) -> None:
        """Names the time since the last step ended."""
        now = time.perf_counter()
        self[step] = self.get(step, 0.0) + now - self._last
        self._last = now

    def add(self, steps: Iterable[tuple[str, float]]) -> None:
        """Steps that a call has timed, until now."""
        for step, seconds in steps:
            self[step] = self.get(step, 0.0) + seconds
        self._last = time.perf_counter()


def _differences(numbers: Sequence[int]) -> list[int]:
    return [number - last for last, number in zip([0, *numbers], numbers, strict=False)]


def _count(shape: Sequence[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


class Recorder:
    """Notes how a checkpoint's tensors are copied into others: ``with recorder: load(recorder.watched(pairs))``.

    ``plan(tensors)`` is for tensors that lie where they lay: one that was moved or computed anew is opaque.
    """

    def __init__(self, targets: Mapping[str, Any]) -> None:
        self._torch = importlib.import_module("torch")
        mode = importlib.import_module("torch.utils._python_dispatch").TorchDispatchMode
        recorder = self

        class Mode(mode):  # type: ignore[misc, valid-type]
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
            ) -> Any:
                recorder._note(func, args, kwargs or {})
                return func(*args, **(kwargs or {}))

        self._mode = Mode()
        self._constant = (self._torch.ops.aten.fill_.Scalar, self._torch.ops.aten.zero_.default)
        self._targets, self._sources = _Places(), _Places()
        for name, tensor in targets.items():
            self._targets.add(name, tensor)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._copies: list[Copy] = []
        self._opaque: set[str] = set()

    def watched(self, pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The pairs of names and tensors of a checkpoint, as they are."""
        for name, tensor in pairs:
            self._sources.add(name, tensor)
            self._shapes[name] = tuple(tensor.shape)
            yield name, tensor

    def __enter__(self) -> Recorder:
        self._mode.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._mode.__exit__(*exception)

    def plan(self, tensors: Mapping[str, Any]) -> Plan:
        """The copies into those of the targets that are still these tensors."""
        # Of several names of one tensor the copies have one.
        known = self._targets.begins()
        moved = {name for name, tensor in tensors.items() if tensor.numel() and tensor.data_ptr() not in known}
        lie = {tensor.data_ptr() for tensor in tensors.values()}
        moved |= {name for address, name in known.items() if address not in lie}
        opaque = self._opaque | moved
        copies = [one for one in self._copies if one.target not in opaque]
        return Plan(copies, self._shapes, sorted(opaque))

    def _note(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if func is self._torch.ops.aten.copy_.default:
            self._note_copy(args[0], args[1])
            return
        if func in self._constant and (found := self._targets.find(args[0])):
            begin, end, _, dtype = found
            # Padding, which every version has. One element alone may be a checkpoint's.
            if end - begin > dtype.itemsize:
                return
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[number] if number < len(args) else kwargs.get(argument.name)
            for tensor in written if isinstance(written, (list, tuple)) else (written,):
                if isinstance(tensor, self._torch.Tensor) and (found := self._targets.find(tensor)):
                    self._opaque.add(found[2])

    def _note_copy(self, into: Any, given: Any) -> None:
        target = self._targets.find(into)
        if target is None:
            return
        begin, _, name, dtype = target
        source = self._sources.find(given)
        if source is None or source[3] != given.dtype or dtype != into.dtype or into.shape != given.shape:
            self._opaque.add(name)
            return
        self._copies.append(
            Copy(
                name, (into.data_ptr() - begin) // into.element_size(), tuple(into.stride()),
                source[2], (given.data_ptr() - source[0]) // given.element_size(), tuple(given.stride()),
                tuple(into.shape),
            )
        )  # fmt: skip


class _Places:
    """Which tensor lies where, of those that were added last."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._found: dict[int, tuple[int, int, str, Any]] = {}
        self._alive: dict[int, Any] = {}
        self._reference = importlib.import_module("torch.multiprocessing.reductions").StorageWeakRef

    def add(self, name: str, tensor: Any) -> None:
        if tensor.is_meta or not tensor.numel():
            return
        begin, end = tensor.data_ptr(), tensor.data_ptr() + _span(tensor)
        first = bisect.bisect_left(self._begins, begin)
        # They do not overlap: one of them may reach in from below.
        first -= first > 0 and self._found[self._begins[first - 1]][1] > begin
        last = bisect.bisect_left(self._begins, end)
        for other in self._begins[first:last]:
            del self._found[other], self._alive[other]
        self._begins[first:last] = [begin]
        self._found[begin] = begin, end, name, tensor.dtype
        self._alive[begin] = self._reference(tensor.untyped_storage())

    def find(self, tensor: Any) -> tuple[int, int, str, Any] | None:
        """What a tensor is a part of: where that begins and ends, its name and its type."""
        if tensor.is_meta or not tensor.numel():
            return None
        address = tensor.data_ptr()
        index = bisect.bisect_right(self._begins, address) - 1
        if index < 0:
            return None
        found = self._found[self._begins[index]]
        # What lies there after its end is another tensor.
        return found if address < found[1] and not self._alive[found[0]].expired() else None

    def begins(self) -> dict[int, str]:
        return {begin: name for begin, (_, _, name, _) in self._found.items()}


def _span(tensor: Any) -> int:
    """The bytes from a tensor's first element to behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * int(tensor.element_size())


def ranks(name: str, count: int) -> list[str]:
    """The names of the weights of ``count`` ranks."""
    return [name] if count == 1 else [f"{name}/{rank}of{count}" for rank in range(count)]


class Trainer:
    """Publishes a trainer's tensors to the engines that hold the weights of these names, one for each rank.

    >>> trainer = Trainer(ranks("policy", 2))                              # doctest: +SKIP
    >>> trainer.send(model.named_parameters())                            # doctest: +SKIP
    [2, 2]

    The engines' own version says how its tensors are made of the checkpoint's. Where a name has no version yet, or one
    that no engine published, the tensors are published as they are, under the names that they have.

    ``devices`` has the device of each rank: with several ranks ``cuda:0``, ``cuda:1`` and so on, unless it is given. A
    keeper that has died is replaced; ``allow_uids`` are the users that the new one admits.
    """

    def __init__(
        self,
        names: str | Sequence[str],
        *,
        devices: Sequence[Any] | None = None,
        domain: Any = None,
        wait: float | None = 60.0,
        allow_uids: Iterable[int] = (),
    ) -> None:
        self.names = [names] if isinstance(names, str) else list(names)
        usual: list[Any] = [None] if len(self.names) == 1 else [f"cuda:{rank}" for rank in range(len(self.names))]
        self._devices = usual if devices is None else list(devices)
        if len(self._devices) != len(self.names):
            raise ArgumentError(f"devices has {len(self._devices)} devices for {len(self.names)} names; give one for each")
        self._domain, self._wait, self._allow_uids = domain, wait, tuple(allow_uids)
        self._plans: dict[str, tuple[str, Plan]] = {}
        # While it is open, this process has the last version for the next keeper.
        self._published: dict[str, Any] = {}
        # Of whole versions that this trainer published last.
        self._layouts: dict[str, _Layout] = {}
        self.took: dict[str, float] = {}
        """Seconds of each step of the last ``send``."""

    def send(
        self,
        tensors: Mapping[str, Any] | Iterable[tuple[str, Any]],
        *,
        changed: bool = False,
        same_layout: bool = True,
        hash: str = "later",
    ) -> list[int]:
        """Publishes tensors as the next version of each rank, and returns their numbers.

        All tensors of the checkpoint are expected, unless ``changed``: then the others are those of the version that is
        offered. Each is copied within the device as it comes, so an iterable may gather one after the other, and the version
        lies at the addresses of the last one in engines with captured graphs. With ``changed`` and ``same_layout=False`` the
        others are shared (``base=`` of ``publish``), and nothing but what changed is copied.

        An engine reads the version once it is told its number. Until this returns, and if this process dies before, the
        last version is offered, whole.

        Tensors that the engine's checkpoint lacks are left out, and a warning lists them. When all have come, this raises
        ``WeightsMismatchError`` if one of the checkpoint's did not, or has another shape, or if one that ``changed`` is not
        of it; and as ``weights.publish``.
        """
        torch = importlib.import_module("torch")
        pairs: Iterable[tuple[str, Any]] = tensors.items() if isinstance(tensors, Mapping) else tensors
        # An iterable may gather each tensor, and gives it up when the next one comes.
        is_kept = changed or isinstance(tensors, Mapping)
        clock = Clock()
        with torch.no_grad():
            given: dict[str, Any] = dict(pairs) if changed else {}
            clock.end("gather")
            made = [
                self._begin(name, device, given if changed else None, same_layout, is_kept, clock)
                for name, device in zip(self.names, self._devices, strict=True)
            ]
            for name, tensor in given.items() if changed else pairs:
                clock.end("gather")
                for one in made:
                    one.take(name, tensor.detach())
                del tensor
                clock.end("copies")
            clock.end("gather")
            for one in made:
                one.check()
            # Of several ranks, an engine that starts in between finds that it has not the same versions.
            send = {SEND: uuid.uuid4().hex} if len(made) > 1 else {}
            numbers = [self._publish(one, send, hash, clock) for one in made]
        self.took = dict(clock)
        return numbers

    def _begin(
        self, name: str, device: Any, changed: dict[str, Any] | None, same_layout: bool, is_kept_elsewhere: bool,
        clock: Clock,
    ) -> _Next:
        """Memory for the next version of a rank."""
        known = None if changed is not None else self._layouts.get(name)
        former = self._published.get(name)
        alone = None if same_layout else changed
        shares = alone is not None or (changed is not None and name not in self._plans)
        if shares and former is not None:
            # A version has the hashes of its base that are there, and no later ones.
            former.wait_for_hashes(self._wait)
            clock.end("hashes of the last version")
        if known is None:
            base = offered(name, device=device, domain=self._domain, allow_uids=self._allow_uids)
        else:
            base = None
            keep(name, domain=self._domain, allow_uids=self._allow_uids)
        metadata = known.metadata if known is not None else None if base is None else base.metadata
        plan = self._plan(name, metadata)
        clock.end("open the last version")
        if plan is None:
            arena = None if is_kept_elsewhere else Arena(device)
            base = None if changed is None else base
            return _Next(name, device, None, None, metadata, base, changed is None, arena=arena)
        only = None if alone is None else {one.target for one in plan.copies if one.source in alone}
        layout = known or _Layout.of(base, plan, only)
        made = layout.memory(plan, changed, base)
        clock.end("memory")
        base = None if only is None else base
        return _Next(name, layout.device, plan, layout, metadata, base, changed is None, made)

    def _publish(self, following: _Next, send: dict[str, str], hash: str, clock: Clock) -> int:
        name, former = following.name, self._published.get(following.name)
        check_keeper(name, domain=self._domain)
        metadata = {**(following.metadata or {}), **send} if send else following.metadata
        clock.end("keeper")
        published, phases = weights.publish_in_phases(
            name, following.tensors, device=following.device, domain=self._domain, wait=self._wait, hash=hash,
            metadata=metadata, base=following.base, zero_copy="require" if following.is_complete else False,
        )  # fmt: skip
        clock.add(phases)
        following.tensors.clear()
        self._published[name] = published
        if former is not None:
            former.close()
        if following.layout is None or not following.is_whole:
            self._layouts.pop(name, None)
        else:
            # The next one is made without opening this one.
            self._layouts[name] = following.layout
        clock.end("close")
        return int(published.version)

    def _plan(self, name: str, metadata: Any) -> Plan | None:
        packed = metadata.get(_PLAN) if isinstance(metadata, dict) else None
        if packed is None:
            return None
        if self._plans.get(name, ("", None))[0] != packed:
            self._plans[name] = packed, Plan.unpacked(packed)
        return self._plans[name][1]

    def close(self) -> None:
        """Gives up this process's part of the versions. What is offered stays."""
        for published in self._published.values():
            published.close()
        self._published.clear()


@dataclass
class _Next:
    """The next version of a rank, as its tensors come."""

    name: str
    device: Any
    plan: Plan | None
    """Without one the tensors are published as they are."""
    layout: _Layout | None
    metadata: Any
    base: Any
    """Has the tensors that the version shares."""
    is_whole: bool
    tensors: dict[str, Any] = field(default_factory=dict)
    arena: Arena | None = None
    """For tensors that are not kept by another."""
    came: set[str] = field(default_factory=set)
    unexpected: list[str] = field(default_factory=list)
    different: dict[str, str] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether the tensors lie where they are to be published."""
        return self.plan is not None or self.arena is not None

    def take(self, name: str, tensor: Any) -> None:
        if self.plan is None:
            self.tensors[name] = tensor if self.arena is None else self.arena.copied(tensor)
            return
        shape = self.plan.sources.get(name)
        if shape is None:
            self.unexpected.append(name)
        elif tuple(tensor.shape) != shape:
            self.different[name] = f"is {list(tensor.shape)} here, and {list(shape)} in the engine's checkpoint"
        else:
            self.came.add(name)
            self._copy(self.plan.of(name), tensor)

    def _copy(self, copies: Sequence[Copy], tensor: Any) -> None:
        # As the checkpoint's tensors lay when their copies were noted.
        source = tensor if tensor.is_contiguous() else tensor.contiguous()
        for one in copies:
            into = self.tensors.get(one.target)
            if into is not None:
                into = into.as_strided(one.shape, one.target_strides, into.storage_offset() + one.target_at)
                part = source.as_strided(one.shape, one.source_strides, source.storage_offset() + one.source_at)
                # The host's memory may be written again once this returns.
                into.copy_(part, non_blocking=source.is_cuda)

    def check(self) -> None:
        """Refuses tensors that the plan cannot take."""
        if self.plan is None:
            return
        known = self.came | self.different.keys()
        needed = {one.source for one in self.plan.copies} if self.is_whole else set()
        missing = [source for source in self.plan.sources if source in needed and source not in known]
        parts = []
        if self.plan.opaque:
            told = f"the engine computed these when it loaded them: {_listed(self.plan.opaque)}"
            parts.append(f"{told}; start the engines with --load-format auto, and each copies and quantizes its own")
        if missing:
            parts.append(f"the trainer lacks {_listed(missing)}")
        if self.unexpected and self.is_whole and not missing and not self.different:
            # As the second name of tied weights, or the head of a critic: the engine has no use for them.
            said = f"the checkpoint of the weights {self.name!r} lacks {_listed(self.unexpected)}, which no engine gets"
            warnings.warn(said, stacklevel=3)
        elif self.unexpected:
            parts.append(f"the engine's checkpoint lacks {_listed(self.unexpected)}")
        if self.different:
            parts.append(_listed([f"{source} {how}" for source, how in self.different.items()]))
        if not parts:
            return
        step = "give the tensors under the names of the engine's checkpoint, or changed=True for some of them"
        said = f"these tensors are no version of the weights {self.name!r}: {'; '.join([*parts, step])}"
        error = WeightsMismatchError(said)
        error.missing, error.unexpected, error.different = missing, self.unexpected, self.different
        error.uncomputed = list(self.plan.opaque)
        raise error


class Arena:
    """Memory for tensors that come one after the other: they are published where they lie."""

    # The first memory, and the longest: each is as long as all before.
    _LEAST, _MOST = 2 << 20, 512 << 20

    def __init__(self, device: Any) -> None:
        self._device = device
        self._flat: Any = None
        self._at = self._all = 0

    def copied(self, tensor: Any) -> Any:
        if not tensor.numel():
            return tensor
        nbytes = tensor.numel() * tensor.element_size()
        if self._flat is None or self._at + nbytes > self._flat.numel():
            length = max(nbytes, min(max(self._all, self._LEAST), self._MOST))
            if self._device is None and tensor.is_cuda:
                self._device = f"cuda:{tensor.device.index}"
            self._flat, self._at = _warpipe.Memory.allocate(length, device=self._device).torch(), 0
            self._all += length
        made = self._flat[self._at : self._at + nbytes].view(tensor.dtype).view(tensor.shape)
        self._at += -(-nbytes // 512) * 512
        return made.copy_(tensor, non_blocking=tensor.is_cuda)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMES_TOLD} more" if len(names) > _NAMES_TOLD else ""
    return ", ".join(names[:_NAMES_TOLD]) + more


@dataclass
class _Layout:
    """Where an engine's tensors lie in the memory of a version, or those of a part of it side by side."""

    device: Any
    metadata: Any
    nbytes: int
    places: list[tuple[str, tuple[int, ...], Any, tuple[int, ...], int]]
    """Of each tensor the name, the shape, the type, the strides and the first byte."""
    rest: dict[str, Any]
    """Copies of the tensors that no version of a trainer has as a whole: buffers."""

    @classmethod
    def of(cls, base: Any, plan: Plan, only: set[str] | None) -> _Layout:
        """That of a version; of the tensors of ``only``, if it is given."""
        places, rest, at = [], {}, 0
        covered = plan.covered()
        whole = {base.offset(name) for name, view in base.items() if covered.get(name) == _count(view.shape)}
        for name, view in base.items():
            if only is not None and name not in only:
                continue
            tensor = view.torch()
            place = base.offset(name) if only is None else at
            at += -(-view.nbytes // 512) * 512
            places.append((name, tuple(tensor.shape), tensor.dtype, tuple(tensor.stride()), place))
            # Another name of a tensor that is copied has its memory.
            if base.offset(name) not in whole:
                rest[name] = tensor.clone()
        return cls(base.device, base.metadata, base.nbytes if only is None else at, places, rest)

    def memory(self, plan: Plan, changed: Mapping[str, Any] | None, base: Any) -> dict[str, Any]:
        """The tensors in new memory. Those that no tensor of the trainer will fill, as all do unless ``changed`` has the
        ones that there are, have the values of the last version."""
        memory = _warpipe.Memory.allocate(max(self.nbytes, 1), device=self.device)
        flat = memory.torch()
        of_type: dict[Any, Any] = {}
        made = {}
        for name, shape, dtype, strides, place in self.places:
            if dtype not in of_type:
                size = dtype.itemsize
                of_type[dtype] = size, flat[: flat.numel() // size * size].view(dtype)
            size, whole = of_type[dtype]
            made[name] = whole.as_strided(shape, strides, place // size)
        partial = set() if changed is None else {one.target for one in plan.copies if one.source not in changed}
        anew = {one.target for one in plan.copies} - partial - set(self.rest)
        written = {place for name, *_, place in self.places if name in anew}
        for name, *_, place in self.places:
            tensor = made[name]
            if place not in written and tensor.numel():
                tensor.copy_(self.rest[name] if name in self.rest and base is None else base[name].torch(), non_blocking=True)
        return made


class Receiver:
    """Weights of an engine that takes new versions between two steps.

    ``give`` gives the engine a version that does not fit at the addresses of the last one. Without it such a version is
    an error, as with captured graphs, which have the addresses.
    """

    def __init__(
        self, shared: Any, give: Callable[[Any], None] | None = None, *, domain: Any = None
    ) -> None:
        self._follower = shared.follow()
        self._give, self._domain = give, domain
        self.took: dict[str, float] = {}
        """Seconds of each step of the last update."""

    @property
    def version(self) -> int:
        return int(self._follower.version)

    @property
    def weights(self) -> Any:
        return self._follower.weights

    def update(self, version: int | None = None, *, stream: Any = None, timeout: float | None = 60.0) -> int:
        """Takes the newest version, of number ``version`` at least, and returns its number. Work of other streams than
        ``stream`` may not read the weights meanwhile.

        Raises ``WeightsMismatchError`` for a version of other tensors, or of another layout without ``give``, and
        ``TimeoutError``; the former version is there then.
        """
        self.took = clock = Clock()
        self._take(stream, timeout, clock)
        while version is not None and self.version < version:
            # It is offered by now, unless its keeper is being replaced.
            waited = self.weights.newer(timeout)
            clock.end("wait for a keeper")
            self._take(stream, timeout, clock)
            del waited
        return self.version

    def _take(self, stream: Any, timeout: float | None, clock: Clock) -> None:
        try:
            clock.add(self._follower.weights._update(stream, timeout)[1])
        except WeightsMismatchError:
            if self._give is None:
                raise
            shared = self.weights
            found = weights.open(shared.name, device=shared.device, domain=self._domain, wait=timeout)
            if found.version == shared.version:
                raise
            self._give(found)
            self._follower = found.follow()
            clock.end("another layout")


def with_plan(metadata: dict[str, Any], plan: Plan | None) -> dict[str, Any]:
    """The metadata of a version that a ``Trainer`` can follow with the next one."""
    return metadata if plan is None else {**metadata, _PLAN: plan.packed()}


def kept(domain: Any = None) -> list[str]:
    """The names that a process has, as a keeper has."""
    return [one.name for one in _domain(domain).endpoints() if one.alive]


def is_kept(name: str, *, domain: Any = None) -> bool:
    return name in kept(domain)


def is_held(name: str, *, domain: Any = None) -> bool:
    """Whether a process has a version of the name open, which the next keeper takes over."""
    return any(one.name.startswith(f"{name}/held-") and one.alive for one in _domain(domain).endpoints())


# The keepers that this process has started, by their names and domains, each with what it says of its errors.
_started: dict[tuple[str, str], tuple[subprocess.Popen[bytes], int]] = {}


def keep(name: str, *, domain: Any = None, allow_uids: Iterable[int] = ()) -> None:
    """Starts a process that keeps a name, unless there is one: ``warpipe weights serve --name NAME``, which
    ``warpipe weights drop NAME`` ends. It outlives this process. Callers wait for it as for any keeper."""
    if is_kept(name, domain=domain):
        return
    place = os.fspath(_domain(domain))
    # Not what lies in this process's directory.
    command = [sys.executable, "-P", "-m", "warpipe", "weights", "serve", "--name", name, "--quiet", "--json", "--domain", place]
    for uid in allow_uids:
        command += ["--allow-uid", str(uid)]
    null, said = subprocess.DEVNULL, os.memfd_create("warpipe-keeper")
    # A signal to this process's group is not for it.
    process = subprocess.Popen(command, stdin=null, stdout=null, stderr=said, start_new_session=True)
    former = _started.pop((name, place), None)
    if former is not None:
        os.close(former[1])
    _started[name, place] = process, said


def check_keeper(name: str, *, domain: Any = None) -> None:
    """Waits until a keeper that this process has started is there.

    Raises ``NotFoundError`` with what it said, if it has ended.
    """
    place = os.fspath(_domain(domain))
    process, said = _started.get((name, place), (None, -1))
    while process is not None and not is_kept(name, domain=domain):
        try:
            code = process.wait(_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        if is_kept(name, domain=domain):
            # Another process was faster.
            break
        words = os.pread(said, 1 << 12, 0).decode(errors="replace").strip() or "it said nothing"
        told = f"the keeper of the weights {name!r}, which this process started, ended with {code}: {words}"
        raise NotFoundError(f"{told}; start one by hand to see more: warpipe weights serve --name {name} --domain {place}")


def offered(name: str, *, device: Any, domain: Any, starts_keeper: bool = True, allow_uids: Iterable[int] = ()) -> Any:
    """The version that there is, taken over by a new keeper if the last one has died; or None."""
    try:
        return weights.open(name, device=device, domain=domain)
    except (NotFoundError, TimeoutError):
        held = is_held(name, domain=domain)
    if starts_keeper:
        keep(name, domain=domain, allow_uids=allow_uids)
    if not held:
        return None
    if starts_keeper:
        check_keeper(name, domain=domain)
    try:
        return weights.open(name, device=device, domain=domain, wait=TAKEOVER_SECONDS)
    except (NotFoundError, TimeoutError) as error:
        _log.warning("The weights %r are not taken over from the processes that have them: %s", name, error)
        return None


@contextlib.contextmanager
def one_at_a_time(name: str, *, domain: Any = None) -> Iterator[None]:
    """One process of the domain is inside for a name; the others wait until it leaves, or dies."""
    path = _domain(domain).path / f".loads-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise DomainError(f"{path} cannot be made: {error.strerror}; see the domain's directory, or give another domain") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("Another process loads the weights %r; this one waits until it has published them, or is dead", name)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _domain(domain: Any) -> _warpipe.Domain:
    return domain if isinstance(domain, _warpipe.Domain) else _warpipe.Domain(domain)
