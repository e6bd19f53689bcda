"""Published weights and PyTorch's modules: given in place of a module's tensors, or copied into them."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from . import _warpipe
from ._conversion import Conversion, conversion, is_transformers
from ._errors import ArgumentError, CopyWarning, NotATensorError, WeightsMismatchError
from ._tensors import is_lazy, like
from ._warpipe import SharedWeights

# As many names of each kind are in a message; the exception's attributes have all.
_NAMES_TOLD = 20
_OWN_NAMES = (
    "weights.publish(name, model.state_dict()), where model is the module with its weights (of transformers, after "
    "from_pretrained)"
)


def attach(
    module: Any,
    name: str | SharedWeights,
    *,
    device: Any = None,
    domain: Any = None,
    wait: float | None = 0.0,
    strict: bool = True,
    replace: bool = False,
    buffers: str = "share",
    meta_buffers: bool = False,
) -> SharedWeights:
    """Gives a ``torch.nn.Module`` the tensors of published weights, in place of its parameters and buffers; returns the
    weights, with their ``version``.

    The module may have been built in ``on_meta``: nothing of it is allocated or copied. Names, shapes and element types
    are compared before anything is changed. Names of the module that are one tensor (tied weights) share one; the
    weights need one of those names. Parameters are of the class that they had, with the attributes that they had
    (``weight_loader``), and do not require gradients afterwards. With ``strict=False`` missing and unexpected names are
    left out. ``name`` may be weights that are open.

    With ``replace=True`` the module takes what the weights have, as an engine published it after it had processed its
    weights: parameters that it lacks are added to its submodules, and those of other shapes or types are replaced.

    Buffers may only be read, as parameters; with ``buffers="copy"`` the module has copies of its own, for buffers that it
    writes (batch normalisation, scales of an engine). Buffers that are not persistent are in no state dict and stay as
    they are.

    What would stay on the ``meta`` device has no values, and is an error, also with ``strict=False``. With
    ``meta_buffers=True`` buffers stay there, to be computed before the module is called.

    A model of transformers takes weights under the names of its files, too. What transformers then makes of several tensors,
    as fused experts, is memory of this process, and a ``CopyWarning`` says how much.

    Raises ``WeightsMismatchError``, which tells of all names, ``NotATensorError``, ``ArgumentError``, and as ``open``.
    """
    if buffers not in ("share", "copy"):
        raise ArgumentError(f'buffers is {buffers!r}; give "share" or "copy"')
    torch = importlib.import_module("torch")
    if not isinstance(module, torch.nn.Module):
        said = f"a {type(module).__name__} is no module"
        raise NotATensorError(f"{said}; give a torch.nn.Module, or use weights.load, which gives a dict of tensors")
    weights = _opened(name, device, domain, wait)
    places = _places(module)
    found = _Found(weights, *_converted(module, places, weights))
    plan = _compared(places, found, replace=replace)
    added = _added(module, plan, found) if replace else {}
    if not strict:
        plan.missing, plan.unexpected = [], []
    left = _left_on_meta(module, {*plan.taken, *added}, plan.missing, meta_buffers)
    plan.check(found, left)
    tensors = found.tensors([*plan.taken.values(), *added])
    _give(places, plan, tensors, copies=buffers == "copy", added=added)
    return weights


def copy_into(
    target: Any,
    name: str | SharedWeights,
    *,
    device: Any = None,
    domain: Any = None,
    wait: float | None = 0.0,
    strict: bool = True,
) -> SharedWeights:
    """Copies published weights into the tensors of a module, or of a mapping of names to tensors, for engines that own
    their memory; returns the weights, with their ``version``.

    The tensors stay where they are: captured graphs, compiled modules and pointers read the new values. Names, shapes and
    element types are compared before anything is copied. Tied weights are as for ``attach``, and so are names of a model
    of transformers. With ``strict=False`` missing and unexpected names are left out. The copies run on PyTorch's current
    stream of each tensor's device, and are done when this returns. If it is interrupted, a part may have been copied.

    Tensors that ``attach`` gave may not be written, and are an error.

    Raises ``WeightsMismatchError``, which tells of all names, ``NotATensorError``, and as ``open``.
    """
    torch = importlib.import_module("torch")
    is_module = isinstance(target, torch.nn.Module)
    if not is_module and not hasattr(target, "items"):
        said = f"a {type(target).__name__} is neither a module nor a mapping of names to tensors"
        raise NotATensorError(f"{said}; give the module, or its state_dict()")
    weights = _opened(name, device, domain, wait)
    places = _places(target) if is_module else {full: (None, full, tensor) for full, tensor in target.items()}
    for full, (_, _, tensor) in places.items():
        if not isinstance(tensor, torch.Tensor):
            raise NotATensorError(f"{full!r} is a {type(tensor).__name__}; give PyTorch's tensors to copy into")
    found = _Found(weights, *_converted(target, places, weights))
    plan = _compared(places, found, replace=False)
    # A module that was moved since has memory of its own.
    read_only = {address for tensor, address in _attached().items() if tensor.data_ptr() == address}
    for full in plan.taken:
        tensor = places[full][2]
        refused = _not_writable(tensor)
        if refused is None and tensor.data_ptr() in read_only:
            refused = "is memory of weights, which attach gave it: attach the new version, or follow it"
        if refused is not None:
            plan.refused[full] = refused
    if not strict:
        plan.missing, plan.unexpected = [], []
    plan.check(found, [])
    given = found.tensors(plan.taken.values(), tells=False)
    once = {id(places[full][2]): (places[full][2], given[source]) for full, source in plan.taken.items()}
    _copy(torch, weights, list(once.values()))
    return weights


def _opened(name: str | SharedWeights, device: Any, domain: Any, wait: float | None) -> SharedWeights:
    if isinstance(name, SharedWeights):
        return name
    shared: SharedWeights = _warpipe._open_weights(name, device, domain, wait)
    return shared


class _Found:
    """The tensors of weights by the names that a module has for them."""

    def __init__(self, weights: SharedWeights, converted: Conversion | None, refused: str | None) -> None:
        self.weights, self.converted, self.refused = weights, converted, refused
        renamed = {name: name for name in weights.keys()} if converted is None else converted.renamed
        made: dict[str, Any] = {} if converted is None else converted.made
        self._shared, self._made = renamed, made

    def names(self) -> list[str]:
        return [*self._shared, *self._made]

    def __contains__(self, name: str) -> bool:
        return name in self._shared or name in self._made

    def like(self, name: str) -> Any:
        """A tensor of the shape and the type of that one."""
        return self._made[name] if name in self._made else self.weights[self._shared[name]]

    def is_same(self, name: str, other: str) -> bool:
        """Whether two names have the same values. Without hashes, those of one tensor have."""
        if name == other or not (name in self._shared and other in self._shared):
            return name == other
        ours, theirs = self._shared[name], self._shared[other]
        hashes = self.weights.content_hash(ours), self.weights.content_hash(theirs)
        if None in hashes:
            return self.weights.offset(ours) == self.weights.offset(theirs)
        return hashes[0] == hashes[1]

    def tensors(self, wanted: Iterable[str], *, tells: bool = True) -> dict[str, Any]:
        """PyTorch's tensors for these names: where they lie, or made as transformers makes them."""
        torch = importlib.import_module("torch")
        names = set(wanted)
        shared = {name: source for name, source in self._shared.items() if name in names}
        given = _tensors(self.weights, dict.fromkeys(shared.values()), lambda view: view.torch())
        tensors = {name: given[source] for name, source in shared.items()}
        if self.converted is not None and self._made:
            with torch.no_grad():
                made = dict(self.converted.apply(lambda name: self.weights[name].torch()))
            tensors.update((name, tensor) for name, tensor in made.items() if name in names)
            if tells:
                self._tell_of_copies(made)
        return tensors

    def _tell_of_copies(self, made: dict[str, Any]) -> None:
        assert self.converted is not None
        size = sum(tensor.nbytes for tensor in made.values())
        said = (
            f"{len(made)} tensors of the module ({size} bytes) are made of {len(self.converted.sources())} of the weights "
            f"{self.weights.name!r}, and are memory of this process alone; to share them, publish the module's own "
            f"tensors: {_OWN_NAMES}"
        )
        warnings.warn(said, CopyWarning, stacklevel=4)


def _converted(
    module: Any, places: Mapping[str, Any], weights: SharedWeights
) -> tuple[Conversion | None, str | None]:
    """How transformers makes a model's tensors of those of files, if these have other names, or why it does not."""
    held = set(weights.keys())
    if held <= places.keys() or places.keys() <= held or not is_transformers(module):
        return None, None
    try:
        return conversion(module, places, dict(weights.items())), None
    except Exception as error:  # whatever this version of transformers lacks, or its rules refuse
        return None, f"transformers does not convert them: {type(error).__name__}: {error}"


@dataclasses.dataclass
class _Plan:
    """What a module and weights have in common, and how they differ."""

    # For a name of the module, that of the tensor that it gets.
    taken: dict[str, str] = dataclasses.field(default_factory=dict)
    missing: list[str] = dataclasses.field(default_factory=list)
    unexpected: list[str] = dataclasses.field(default_factory=list)
    different: dict[str, str] = dataclasses.field(default_factory=dict)
    # Tensors of the module that take no values, whatever the weights have.
    refused: dict[str, str] = dataclasses.field(default_factory=dict)

    def check(self, found: _Found, left: list[str]) -> None:
        if self.different or self.refused or self.missing or self.unexpected or left:
            raise _mismatch(found, self, left)


def _compared(places: Mapping[str, tuple[Any, str, Any]], found: _Found, *, replace: bool) -> _Plan:
    plan = _Plan(unexpected=[full for full in found.names() if full not in places])
    # Names of one tensor of the module, by its identity.
    tied: dict[int, list[str]] = {}
    for full, (_, _, tensor) in places.items():
        tied.setdefault(id(tensor), []).append(full)
    for names in tied.values():
        held = [full for full in names if full in found]
        if not held:
            plan.missing += names
            continue
        plan.taken.update(dict.fromkeys(names, held[0]))
        for full in held:
            difference = None if replace else _difference(places[full][2], found.like(full))
            if difference is None and not found.is_same(full, held[0]):
                if replace:
                    plan.taken[full] = full
                else:
                    difference = f"is one tensor with {held[0]!r} in the module, and another one in the weights"
            if difference is not None:
                plan.different[full] = difference
    return plan


def _added(module: Any, plan: _Plan, found: _Found) -> dict[str, tuple[Any, str]]:
    """Owner and attribute of each tensor that the module lacks; what can be added is not unexpected any more."""
    torch = importlib.import_module("torch")
    added: dict[str, tuple[Any, str]] = {}
    for full in plan.unexpected:
        prefix, _, last = full.rpartition(".")
        try:
            owner = module.get_submodule(prefix)
        except AttributeError:
            continue
        there = owner.__dict__.get(last, owner._buffers.get(last))
        known = [*owner._buffers, *owner._parameters, *owner.__dict__]
        is_taken = hasattr(owner, last) and last not in known
        if is_taken or not (there is None or isinstance(there, torch.Tensor)):
            plan.different[full] = "is an attribute of the module that is no tensor"
        else:
            added[full] = (owner, last)
    plan.unexpected = [full for full in plan.unexpected if full not in added and full not in plan.different]
    return added


def _give(
    places: Mapping[str, tuple[Any, str, Any]],
    plan: _Plan,
    tensors: dict[str, Any],
    *,
    copies: bool,
    added: dict[str, tuple[Any, str]],
) -> None:
    """Gives a module its tensors. What needs memory is made before the module changes."""
    torch = importlib.import_module("torch")
    # One object for all names of a tensor of the module: its ties stay.
    given: dict[tuple[int, str], Any] = {}
    into = []
    for full, source in plan.taken.items():
        old, new, key = places[full][2], tensors[source], (id(places[full][2]), source)
        if key in given:
            continue
        if isinstance(old, torch.nn.Parameter):
            given[key] = like(old, new)
        elif not copies:
            given[key] = new
        elif old.device == new.device and _difference(old, new) is None and _not_writable(old) is None:
            given[key] = old
            into.append((old, new))
        else:
            given[key] = new.clone()
    for full, (owner, last) in added.items():
        is_buffer = last in owner._buffers
        new = tensors[full].clone() if is_buffer and copies else tensors[full]
        given[id(owner), full] = new if is_buffer else torch.nn.Parameter(new, requires_grad=False)
    with torch.inference_mode():
        for old, new in into:
            old.copy_(new)
    with _as_given():
        for full, source in plan.taken.items():
            owner, last, old = places[full]
            setattr(owner, last, given[id(old), source])
        for full, (owner, last) in added.items():
            setattr(owner, last, given[id(owner), full])
    ours = {tensor.data_ptr() for tensor in tensors.values()}
    for new in given.values():
        if new.numel() and new.data_ptr() in ours:
            _attached()[new] = new.data_ptr()


@functools.cache
def _attached() -> Any:
    """Tensors of modules that are memory of weights, with their addresses there: nothing may write them."""
    return importlib.import_module("torch.utils.weak").WeakIdKeyDictionary()


# Copies that were still running when their wait was interrupted, and what they read: it stays mapped.
_unfinished: list[tuple[_warpipe.Stream, Any]] = []


def _copy(torch: Any, weights: SharedWeights, pairs: list[tuple[Any, Any]]) -> None:
    """Copies tensors into others on the current streams, and waits: what is read may be unmapped afterwards."""
    _unfinished[:] = [one for one in _unfinished if not one[0].is_idle()]
    streams: list[_warpipe.Stream] = []
    devices = {tensor.device for pair in pairs for tensor in pair if tensor.is_cuda}
    try:
        with torch.inference_mode(), torch._C.DisableTorchFunctionSubclass():
            for into, given in pairs:
                into.copy_(given, non_blocking=True)
    finally:
        for device in devices:
            stream = _warpipe.Stream(str(device))
            stream.wait_for(torch.cuda.current_stream(device))
            streams.append(stream)
        for stream in streams:
            try:
                stream.synchronize(None)
            except BaseException:
                _unfinished.extend((one, pairs) for one in streams)
                raise


def _not_writable(tensor: Any) -> str | None:
    """Why nothing can be copied into a tensor."""
    if is_lazy(tensor):
        return "has no shape in the module yet: call the module once before"
    if tensor.is_meta:
        return "is on meta in the module, and has no memory: give it some with module.to_empty(), or use attach"
    if str(tensor.layout) != "torch.strided":
        return f"has the layout {tensor.layout} in the module: give plain tensors"
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "is expanded in the module, with several elements in one place: give its contiguous()"
    return None


_giving = threading.local()


@contextlib.contextmanager
def _as_given() -> Iterator[None]:
    """What this thread gives to modules inside is what they get, in a block of ``on_meta``, too."""
    _giving.is_on = True
    try:
        yield
    finally:
        _giving.is_on = False


def _tensors(
    weights: SharedWeights, names: Iterable[str], make: Callable[[_warpipe.View], Any]
) -> dict[str, Any]:
    """A tensor for each name, and one for all names of the same tensor."""
    made: dict[Any, Any] = {}
    tensors = {}
    for name in names:
        view = weights[name]
        place = (weights.offset(name), view.shape, view.dtype) if view.nbytes else name
        if place not in made:
            made[place] = make(view)
        tensors[name] = made[place]
    return tensors


def _left_on_meta(module: Any, taken: set[str], missing: list[str], meta_buffers: bool) -> list[str]:
    """Parameters and buffers, persistent or not, that get no values; those that are missing are told of as such."""
    told = taken.union(missing)
    left = []
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for last, tensor in [*owner._parameters.items(), *({} if meta_buffers else owner._buffers).items()]:
            full = f"{prefix}.{last}" if prefix else last
            if tensor is not None and tensor.is_meta and full not in told:
                left.append(full)
    return sorted(left)


def _places(module: Any) -> dict[str, tuple[Any, str, Any]]:
    """Each name that a module's ``state_dict`` has: its owner, its attribute there, its tensor."""
    places = {}
    for prefix, owner in module.named_modules(remove_duplicate=False):
        passing = owner._non_persistent_buffers_set
        buffers = {last: tensor for last, tensor in owner._buffers.items() if last not in passing}
        for last, tensor in [*owner._parameters.items(), *buffers.items()]:
            if tensor is not None:
                places[f"{prefix}.{last}" if prefix else last] = (owner, last, tensor)
    return places


def _difference(wanted: Any, found: Any) -> str | None:
    """How a tensor of a module and one of the weights differ."""
    if is_lazy(wanted):
        return "has no shape in the module yet: it is lazy"
    dtype, theirs = (str(one.dtype).removeprefix("torch.") for one in (wanted, found))
    ours = tuple(wanted.shape)
    if (ours, dtype) == (tuple(found.shape), theirs):
        return None
    return f"is {dtype} {list(ours)} in the module, and {theirs} {list(found.shape)} in the weights"


def _mismatch(found: _Found, plan: _Plan, left: list[str]) -> WeightsMismatchError:
    def listed(names: list[str]) -> str:
        more = f" and {len(names) - _NAMES_TOLD} more" if len(names) > _NAMES_TOLD else ""
        return ", ".join(names[:_NAMES_TOLD]) + more

    parts = []
    if plan.missing:
        parts.append(f"the weights lack {listed(plan.missing)}")
    if plan.unexpected:
        parts.append(f"the module lacks {listed(plan.unexpected)}")
    if plan.different:
        parts.append(listed([f"{name} {how}" for name, how in plan.different.items()]))
    if parts and found.refused is not None:
        parts.append(found.refused)
    steps = []
    if parts:
        steps.append(f"publish the weights of this model under its own names, {_OWN_NAMES}, or build the module for them")
    if parts and not plan.different:
        steps.append("strict=False leaves such names out")
    if plan.refused:
        parts.append(listed([f"{name} {why}" for name, why in plan.refused.items()]))
    if left:
        parts.append(f"these would stay on meta, without values, for the weights lack them: {listed(left)}")
        steps.append(
            "build the module in warpipe.weights.on_meta(), which computes its buffers; publish its parameters, or give "
            "them values before; or compute buffers afterwards and give attach(..., meta_buffers=True)"
        )
    weights = found.weights
    said = f"version {weights.version} of the weights {weights.name!r} does not fit the module: {'; '.join([*parts, *steps])}"
    error = WeightsMismatchError(said)
    error.missing, error.unexpected, error.different = plan.missing, plan.unexpected, {**plan.refused, **plan.different}
    error.uncomputed = left
    return error
