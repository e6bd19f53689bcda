"""What the load formats of engines share: which weights an engine can take, and those that are offered."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import logging
import os
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from . import _transfer, _warpipe, weights
from ._errors import NotFoundError, WeightsMismatchError

_log = logging.getLogger(__name__)
# So many digits of a name say which model it is of.
_BEGIN = 8
# More than the pieces that a version may have.
_DESCRIPTORS = 65_536
# What a checkpoint's folder has that decides its tensors.
_FILES = (".safetensors", ".bin", ".pt", ".gguf", ".json")


def device() -> str:
    """This process's device, by PyTorch."""
    cuda = importlib.import_module("torch").cuda
    return f"cuda:{cuda.current_device()}" if cuda.is_available() else "host"


def gpu() -> str:
    """Which one that is, in all processes. Memory of another GPU can be opened, too, and is read across a link at each
    step: engines of two GPUs do not share."""
    return str(_warpipe.Device(device()).uuid)


def place_of(model: str) -> str:
    """One name for all ways to write a local folder; a model's id as it is."""
    return os.path.realpath(model) if os.path.isdir(model) else model


def settings_of(hf_config: Any) -> dict[str, Any]:
    """A configuration of transformers without what says where it was found."""
    found = dict(hf_config.to_dict()) if hasattr(hf_config, "to_dict") else {}
    found.pop("_name_or_path", None)
    return found


def digest(of: Any) -> str:
    return hashlib.sha256(json.dumps(of, sort_keys=True, default=str).encode()).hexdigest()[:32]


def checkpoint(folder: str) -> str | None:
    """Of a local folder: the sizes and the times of its files."""
    if not os.path.isdir(folder):
        return None
    files = sorted(entry.name for entry in os.scandir(folder) if entry.name.endswith(_FILES))
    states = [os.stat(os.path.join(folder, name)) for name in files]
    return digest([(name, state.st_size, state.st_mtime_ns) for name, state in zip(files, states, strict=True)])


@dataclass
class Options:
    """What ``--model-loader-extra-config`` says of this package's part."""

    name: str | None
    domain: Any
    starts_keeper: bool
    load_format: str
    allow_uids: tuple[int, ...]
    is_of_another: bool
    """Another user's: this process opens weights there, and publishes none."""

    @classmethod
    def taken_from(cls, extra: dict[str, Any]) -> Options:
        """Leaves what is for the loader that reads the files."""
        path, owner = extra.pop("domain", None), extra.pop("owner", None)
        is_of_another = owner is not None and int(owner) != os.geteuid()
        return cls(
            extra.pop("name", None), _warpipe.Domain(path, owner=int(owner)) if is_of_another else path,
            bool(extra.pop("keeper", True)), extra.pop("load_format", "auto"),
            tuple(int(uid) for uid in extra.pop("allow_uids", ())), is_of_another,
        )  # fmt: skip

    @contextlib.contextmanager
    def turn(self, name: str, clock: _transfer.Clock | None = None) -> Iterator[Any]:
        """Gives the version that is offered, or None: then no other process loads the same until this one is outside."""
        clock = clock or _transfer.Clock()
        if self.is_of_another:
            yield self._opened(name)
            return
        with _transfer.one_at_a_time(name, domain=self.domain):
            clock.end("turn")
            shared = _transfer.offered(
                name, device=device(), domain=self.domain, starts_keeper=self.starts_keeper, allow_uids=self.allow_uids
            )
            clock.end("open")
            if shared is None:
                tell_of_others(name, self.domain)
            yield shared

    def _opened(self, name: str) -> Any:
        try:
            return weights.open(name, device=device(), domain=self.domain, wait=_transfer.TAKEOVER_SECONDS)
        except (NotFoundError, TimeoutError) as error:
            said = f"the user whose domain is {os.fspath(self.domain)} offers no weights {name!r}"
            step = f"start an engine of that user before, with the extra config allow_uids: [{os.geteuid()}]"
            raise NotFoundError(f"{said}; {step}") from error


def own_name(about: dict[str, Any], *places: str) -> str:
    """A name for weights that were given none: of the model at those ``places``, and of everything."""
    begin = digest([about["model"], *(about[key] for key in places)])[:_BEGIN]
    return f"{about['engine']}/{begin}-{about['key']}"


def tell_of_others(name: str, domain: Any) -> None:
    """Weights of the same model with other settings, or of files that have changed since, take memory until their keeper
    ends: the process that starts the engine may not know of them."""
    begin, dash, _ = name.partition("-")
    if not dash or len(begin.rpartition("/")[2]) != _BEGIN:
        return
    kept = (other for other in _transfer.kept(domain) if other.startswith(f"{begin}-"))
    # The processes that have a version open have names below it.
    others = sorted(other for other in kept if other != name and other.count("/") == name.count("/"))
    if others:
        step = "; ".join(f"warpipe weights drop {other}" for other in others)
        _log.warning("Other weights of this model are kept on this GPU; if no engine needs them: %s", step)


def allow_descriptors() -> None:
    """A version in place has a descriptor for each segment of PyTorch's. A keeper that this process starts may have as
    many."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, _DESCRIPTORS)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def check_identity(name: str, about: dict[str, Any], metadata: Any) -> None:
    """A name that was given may be another model's. ``about["key"]`` is the hash of all the rest."""
    found = metadata if isinstance(metadata, dict) else {}
    if found.get("key") == about["key"]:
        return
    differences = [f"{key} is {about[key]!r} here, and {found.get(key)!r} there" for key in about if found.get(key) != about[key]]
    said = f"the weights {name!r} are no version for this engine: {'; '.join(differences)}"
    step = f"give another name in --model-loader-extra-config, or none; or end these: warpipe weights drop {name}"
    raise WeightsMismatchError(f"{said}; {step}")


def check_ranks(groups: Iterable[Any], shared: Any) -> None:
    """Sees that the ranks of an engine have the versions of one ``send`` of a trainer, or all of them what the files have.

    ``groups`` are those of the ranks that are started together: each has a ``world_size`` and a ``cpu_group``. All ranks
    call this.
    """
    mine = shared.metadata.get(_transfer.SEND) if isinstance(shared.metadata, dict) else None
    gather = importlib.import_module("torch.distributed").all_gather_object
    for group in groups:
        if group.world_size == 1:
            continue
        found: list[Any] = [None] * group.world_size
        gather(found, (shared.name, shared.version, mine), group=group.cpu_group)
        if len({send for *_, send in found}) > 1:
            told = ", ".join(f"{name} {version}" for name, version, _ in found)
            said = f"the ranks' weights are of several updates of a trainer: {told}"
            drop = "; ".join(f"warpipe weights drop {name}" for name, *_ in found)
            step = f"start again, as a trainer may have been between two of them; if that does not help: {drop}, and have it send anew"
            raise WeightsMismatchError(f"{said}; {step}")
