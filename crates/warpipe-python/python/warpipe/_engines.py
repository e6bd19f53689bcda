"""What the load formats of engines share: which weights an engine can take, and those that are offered."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import resource
from typing import Any

from . import _transfer, _warpipe, weights
from ._errors import NotFoundError, WeightsMismatchError

# How long a new keeper may take to check the version of other processes.
TAKEOVER_SECONDS = 120.0
# More than the pieces that a version may have.
_DESCRIPTORS = 65_536
# What a checkpoint's folder has that decides its tensors.
_FILES = (".safetensors", ".bin", ".pt", ".gguf", ".json")

_log = logging.getLogger(__name__)


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


def offered(name: str, *, device: Any, domain: Any, starts_keeper: bool) -> Any:
    """The version that there is, taken over by a new keeper if the last one has died; or None."""
    try:
        return weights.open(name, device=device, domain=domain)
    except (NotFoundError, TimeoutError):
        is_held = _transfer.is_held(name, domain=domain)
    if starts_keeper:
        _transfer.keep(name, domain=domain)
    if not is_held:
        return None
    try:
        return weights.open(name, device=device, domain=domain, wait=TAKEOVER_SECONDS)
    except (NotFoundError, TimeoutError) as error:
        _log.warning("The weights %r are not taken over from the processes that have them: %s", name, error)
        return None


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
    raise WeightsMismatchError(f"{said}; give another name in --model-loader-extra-config, or none")
