# SPDX-License-Identifier: Apache-2.0
"""Read a job's settings by the names of Megatron's configs, from a command line, a document or objects."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_FROM_ENVIRONMENT = re.compile(r"\$\{([A-Z_][A-Z0-9_]*):-?(.*)\}")
"""A variable and its default, as in recipes of Primus: `${PRIMUS_TP:1}`."""
_DEEPEST = 6
"""Maximum nesting of objects: a NeMo recipe has the model's settings at the fourth level."""

RENAMED: dict[str, tuple[str, Any]] = {
    "disable_bias_linear": ("add_bias_linear", False),
    "disable_tp_comm_overlap_ag": ("tp_comm_overlap_ag", False),
    "recompute_activations": ("recompute_granularity", "selective"),
}
"""Flags of Megatron-LM that change a setting of another name, and its value. --no-X and --disable-X turn X off, too."""
SAME = {
    "num_experts": "num_moe_experts",
    "fp8_format": "fp8",
    "fp4_format": "fp4",
    "fsdp": "use_megatron_fsdp",
    **{f"activations_checkpoint_{name}": f"recompute_{name}" for name in ("granularity", "method", "num_layers")},
    "num_micro_batches_with_partial_activation_checkpoints": "num_microbatches_with_partial_activation_checkpoints",
    "ub_tp_comm_overlap": "tp_comm_overlap",
}
"""Flags, and settings of NeMo 2's strategy (`fsdp`) and NeMo 1's models, that Megatron's configs name otherwise."""
NEMO_1 = ("megatron_amp_O2", "mcore_gpt", "activations_checkpoint_granularity")
"""Settings by which recipes of NeMo 1 are known: there alone `bias` and `transformer_engine` are the model's."""
TUNERS = ("peft_scheme", "peft", "recipe", "tuner_type", "train_type", "sft_type")
"""Settings that name what is trained: of NeMo 1, of Megatron-Bridge and Primus, of ms-swift."""
ADAPTERS = re.compile(r"lora|dora|adapter|p-?tuning|ia3|boft|bone|_peft", re.IGNORECASE)
"""Parts of what they name where layers are frozen, and adapters of them trained."""
ADAPTER_SECTION = re.compile(r"(\w+\.)*(Canonical|VLM)?(LoRA|DoRA)|lora|peft")
"""Sections about adapters, by their names or their classes."""
ADAPTER_SIZES = ("rank", "dim")
FREEZING = ("freeze_LM", "freeze_llm", "freeze_language_model")
"""Settings of Megatron-LM's, ms-swift's and Megatron-Bridge's models of text and images."""
APPLIED_LATER = ("CommOverlap", "MixedPrecision")
"""Parts of the names of classes (of Megatron-Bridge and of NeMo) whose settings, where they have any, replace those of
the model when training begins."""
ANYWHERE = ("use_megatron_fsdp",)
"""Settings that two configurations of Megatron-Bridge have (`dist`, `ddp`), and that are on where either says so."""
SIZES = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
    *("context_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size"),
)
COUNTS = (
    *("num_layers", "mtp_num_layers", "num_moe_experts", "recompute_num_layers", "fp8_amax_history_len"),
    *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
    *("gtp_weight_remat_size", "expert_gtp_weight_remat_size", "num_distributed_optimizer_instances"),
    *("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"),
)
RATES = ("hidden_dropout", "attention_dropout", "moe_input_jitter_eps", "moe_router_force_biased")
"""SIZES, COUNTS and RATES: settings that rules compare with numbers."""


def settings_of_command_line(words: Sequence[str]) -> SimpleNamespace:
    """Return the settings in Megatron-LM's flags, and in the flags of forks, which Megatron-LM's parser would reject.

    A setting has the name of its flag. Its value is the words up to the next flag, or True if there are none.
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
    return _complete(
        {name: True if not values else values[0] if len(values) == 1 else values for name, values in found.items()}
    )


def settings_of_objects(root: Any) -> SimpleNamespace:
    """Return the settings in nested configurations of Megatron-Bridge and NeMo, or in documents.

    If two configurations have a setting of the same name, the outer one counts unless it is None. Exceptions are
    configurations that are applied later, and settings that are on wherever they occur.
    """
    found: dict[str, Any] = {}
    later: dict[str, Any] = {}
    level, seen = [("", root)], {id(root)}
    for _ in range(_DEEPEST):
        inner: list[tuple[str, Any]] = []
        for place, each in level:
            is_later = any(part in _class_name(place, each) for part in APPLIED_LATER)
            fields = _fields(each)
            if "enabled" in fields and found.get(place) is None:  # as Bridge's `inprocess_restart`
                found[place] = fields["enabled"]
            if place and _value(str(fields.get("enabled"))) is False:
                continue  # what a section that is off says counts for nothing, as in NeMo-RL's `fp8_cfg`
            if _is_of_adapters(place, each, fields):
                found["frozen_layers"] = True
            for name, value in fields.items():
                configurations = [
                    one for one in (value if isinstance(value, (list, tuple)) else [value]) if _fields(one)
                ]
                inner += [(name, one) for one in configurations if id(one) not in seen]
                seen.update(map(id, configurations))
                if is_later and value is not None:
                    later.setdefault(name, value)
                elif not configurations and (
                    found.get(name) is None or (name in ANYWHERE and _value(str(value)) is True)
                ):
                    found[name] = value
        level = inner
    return _complete({**found, **later})


def check_numbers(settings: SimpleNamespace) -> None:
    """Raise ValueError, naming the setting, for a value that is no number although rules compare it with one."""
    for name, value in vars(settings).items():
        if value is None:
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if name in SIZES and not (is_number and isinstance(value, int) and value > 0):
            raise ValueError(f"{name} must be a whole number above 0, got {value!r}")
        if name in COUNTS and not (is_number and isinstance(value, int) and value >= 0):
            raise ValueError(f"{name} must be a whole number, 0 or above, got {value!r}")
        if name in RATES and not is_number:
            raise ValueError(f"{name} must be a number, got {value!r}")


def _class_name(place: str, each: Any) -> str:
    """Return the class name of a configuration; in a document, its target or its key."""
    if isinstance(each, Mapping):
        return str(each.get("_target_") or place.title().replace("_", ""))
    made_by = getattr(each, "__fn_or_cls__", type(each))  # fiddle's
    return str(getattr(made_by, "__name__", ""))


def _is_of_adapters(place: str, each: Any, fields: Mapping[str, Any]) -> bool:
    """Return whether a configuration describes adapters that are trained in place of the layers. A size of 0, verl's
    default, means no adapters.
    """
    if not any(ADAPTER_SECTION.fullmatch(name) for name in (place, _class_name(place, each))):
        return False
    return any(_value(str(fields[name])) not in (None, 0) for name in ADAPTER_SIZES if name in fields)


def _fields(each: Any) -> Mapping[str, Any]:
    """Return the fields of `each` if it is a configuration."""
    if hasattr(each, "__arguments__"):  # of fiddle, by which NeMo writes recipes
        return {str(name): value for name, value in each.__arguments__.items()}
    if isinstance(each, Mapping):
        return {str(name).lstrip("-").replace("-", "_"): value for name, value in each.items()}
    if dataclasses.is_dataclass(each) and not isinstance(each, type):
        return dict(vars(each))
    return {}


def _complete(settings: dict[str, Any]) -> SimpleNamespace:
    """Return the settings with flags replaced by the settings that they change, and words by their values."""
    settings = {name: _value(value) if isinstance(value, str) else value for name, value in settings.items()}
    for name, value in list(settings.items()):
        if name not in (*SIZES, *COUNTS) and isinstance(value, str) and value.startswith("${"):
            del settings[name]  # a reference to what is not said here
    precision = str(settings.get("mixed_precision", ""))  # Bridge's name of one, as bf16_with_mxfp8_mixed
    for kind in ("fp8", "fp4"):
        if kind in precision:
            settings[kind] = settings.get(kind) or precision
    for name, value in list(settings.items()):
        negated = name.removeprefix("no_").removeprefix("disable_")
        setting, to = RENAMED.get(name, (negated, False))
        if setting != name and value is True:
            settings[setting] = to
        elif name in SAME and value is not None:
            settings[SAME[name]] = value
    if any(name in settings for name in NEMO_1):
        settings.setdefault("add_bias_linear", settings.get("bias", True))
        settings.setdefault("transformer_impl", "transformer_engine" if settings.get("transformer_engine") else "local")
    if settings.get("activation_checkpointing") is False:  # NeMo-RL's, without which the others count for nothing
        settings["recompute_granularity"] = None
    if _freezes(settings):
        settings["frozen_layers"] = True
    settings.setdefault("pipeline_model_parallel_size", 1)
    return SimpleNamespace(**settings)


def _freezes(settings: Mapping[str, Any]) -> bool:
    """Return whether the model's own linear layers are not trained."""
    named = [value for name in TUNERS if isinstance(value := settings.get(name), str)]
    if named:
        adapters = any(map(ADAPTERS.search, named))
    else:
        adapters = any(bool(settings.get(name)) for name in ("peft", "lora_rank", "lora_r"))
    return adapters or any(settings.get(name) is True for name in FREEZING)


def _value(word: str) -> Any:
    if variable := _FROM_ENVIRONMENT.fullmatch(word):
        word = os.environ.get(variable[1], variable[2])
    if not _NUMBER.fullmatch(word):
        return {"true": True, "false": False, "none": None, "null": None}.get(word.lower(), word)
    return float(word) if re.search(r"[.eE]", word) else int(word)
