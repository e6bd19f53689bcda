"""Weights under the names that their files have, for a module of transformers that has others: fused experts.

transformers 5 stores the experts of a mixture in one tensor, and its files have one for each expert. It converts them as it
loads them; here its own rules are applied to tensors that lie in published memory.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import _warpipe


@dataclasses.dataclass
class Conversion:
    """What a module's tensors are made of."""

    module: Any
    # For a name of the module, that of the same tensor in the weights.
    renamed: dict[str, str] = dataclasses.field(default_factory=dict)
    # For the first name that a rule makes, the rule, and the tensors that it takes with the pattern that took each.
    rules: dict[str, tuple[Any, list[tuple[str, str]]]] = dataclasses.field(default_factory=dict)
    # Tensors that rules make, without values.
    made: dict[str, Any] = dataclasses.field(default_factory=dict)

    def apply(self, tensor: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
        """The tensors that the rules make of what ``tensor`` gives for a name of the weights."""
        for first, (rule, sources) in self.rules.items():
            rule = copy.deepcopy(rule)
            for name, pattern in sources:
                rule.add_tensor(first, name, pattern, tensor(name))
            for target, values in rule.convert(first, model=self.module, config=self.module.config).items():
                yield target, values[0] if isinstance(values, list) else values

    def sources(self) -> set[str]:
        return {name for _, sources in self.rules.values() for name, _ in sources}


def is_transformers(module: Any) -> bool:
    modeling = sys.modules.get("transformers.modeling_utils")
    return modeling is not None and isinstance(module, modeling.PreTrainedModel)


def conversion(module: Any, places: Mapping[str, Any], views: Mapping[str, _warpipe.View]) -> Conversion:
    """How transformers makes the tensors of its module of these. Raises what its version raises."""
    rules = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(module)
    loading = importlib.import_module("transformers.core_model_loading")
    torch = importlib.import_module("torch")
    found = Conversion(module)
    renamings = [rule for rule in rules if isinstance(rule, loading.WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, loading.WeightConverter)]
    of_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    prefix = module.base_model_prefix
    # In this order the experts are numbered.
    for name in sorted(views, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, places)
        if target not in places and name in places:
            target, pattern = name, None
        if pattern is None:
            found.renamed[target] = name
        else:
            found.rules.setdefault(target, (of_pattern[pattern], []))[1].append((name, pattern))

    def empty(name: str) -> Any:
        view = views[name]
        return torch.empty_strided(view.shape, view.strides, dtype=getattr(torch, view.dtype), device="meta")

    with torch.no_grad():
        found.made = dict(found.apply(empty))
    return found
