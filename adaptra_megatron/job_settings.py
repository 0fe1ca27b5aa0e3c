# SPDX-License-Identifier: Apache-2.0
"""A job's settings by the names of Megatron's configs, whatever they came in: a command line, a document, objects."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_DEEPEST = 6
"""Levels of objects within objects: a NeMo recipe has the model's settings on its fourth."""

RENAMED: dict[str, tuple[str, Any]] = {
    "disable_bias_linear": ("add_bias_linear", False),
    "no_gradient_accumulation_fusion": ("gradient_accumulation_fusion", False),
    "disable_tp_comm_bulk_wgrad": ("tp_comm_bulk_wgrad", False),
    "disable_tp_comm_bulk_dgrad": ("tp_comm_bulk_dgrad", False),
    "disable_tp_comm_overlap_ag": ("tp_comm_overlap_ag", False),
    "recompute_activations": ("recompute_granularity", "selective"),
}
"""Flags of Megatron-LM that turn another setting: to what."""
SAME = {"num_experts": "num_moe_experts", "fp8_format": "fp8", "fp4_format": "fp4"}
"""Flags whose setting has another name."""


def settings_of_command_line(words: Sequence[str]) -> SimpleNamespace:
    """The settings in Megatron-LM's flags, and in those of a fork, which its parser would not know.

    A flag's setting has its name; what follows it up to the next flag is its value, and True where nothing does.
    """
    found: dict[str, Any] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            name = flag.replace("-", "_")
            found[name] = [_value(value)] if equals else []
        elif name is not None:
            found[name].append(_value(word))
    settings = {
        name: True if not values else values[0] if len(values) == 1 else values for name, values in found.items()
    }
    for flag, (setting, value) in RENAMED.items():
        if settings.pop(flag, False):
            settings[setting] = value
    for flag, setting in SAME.items():
        if flag in settings:
            settings[setting] = settings[flag]
    return _complete(settings)


def settings_of_document(document: Mapping[str, Any]) -> SimpleNamespace:
    """The settings in a JSON object, those of objects within it among them."""
    found: dict[str, Any] = {}
    for name, value in document.items():
        if isinstance(value, Mapping):
            found.update(vars(settings_of_document(value)))
        else:
            found[name] = value
    return _complete(found)


def settings_of_objects(root: Any) -> SimpleNamespace:
    """The settings in configurations within configurations: Megatron-Bridge's ConfigContainer, NeMo's recipes.

    Where two have a setting of one name, that of the outer one counts.
    """
    found: dict[str, Any] = {}
    level, seen = [root], {id(root)}
    for _ in range(_DEEPEST):
        inner = []
        for each in level:
            for name, value in _fields(each).items():
                if _fields(value) and not isinstance(value, type):
                    if id(value) not in seen:
                        seen.add(id(value))
                        inner.append(value)
                else:
                    found.setdefault(name, value)
        level = inner
    return _complete(found)


def _fields(each: Any) -> Mapping[str, Any]:
    """What `each` is made of, if it is a configuration."""
    if hasattr(each, "__arguments__"):  # of fiddle, by which NeMo writes recipes
        return {str(name): value for name, value in each.__arguments__.items()}
    if dataclasses.is_dataclass(each) and not isinstance(each, type):
        return dict(vars(each))
    return {}


def _complete(settings: dict[str, Any]) -> SimpleNamespace:
    settings.setdefault("pipeline_model_parallel_size", 1)
    return SimpleNamespace(**settings)


def _value(word: str) -> Any:
    if not _NUMBER.fullmatch(word):
        return {"true": True, "false": False, "none": None}.get(word.lower(), word)
    return float(word) if re.search(r"[.eE]", word) else int(word)
