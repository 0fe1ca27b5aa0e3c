# SPDX-License-Identifier: Apache-2.0
"""Predict what --adaptra would do for a job, from its settings and the tables that the run itself applies.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.megatron.feature_refusals import errors_of_flags, ranks_of_replica
from adaptra_megatron.megatron.gradients.split_rules import SplitRule, expected_layers, rule_for
from adaptra_megatron.megatron.refusals import (
    combines,
    generates,
    graphs_of,
    kept_in_order,
    offloads,
    pipeline_stages,
    refused_of,
    remedy_of,
)
from adaptra_megatron.megatron.state.random_draws import flags_drawn_in_other_order, shares_amax_history
from adaptra_megatron.transport.gpu.hardware_queues import CONNECTIONS, hardware_queues

STARTS, LESS, REFUSED = "starts", "starts with less", "refused"


class Feature(NamedTuple):
    """Effect of one feature of the job on --adaptra."""

    name: str
    effect: str
    """`refused`: the job does not start. `less`: it starts, with less of --adaptra. `runs`: it starts, with a side
    effect.
    """
    reason: str
    remedy: str


@dataclass(frozen=True)
class Prospects:
    """Verdict on a job: whether it would start, and which features it would get."""

    verdict: str
    split: str
    """Which linear layers have split backwards: `all`, `some` or `none`."""
    split_layers: int
    layers: int
    per: str
    """Scope of the two numbers above: `model`, or `layer` if the number of layers is unknown."""
    features: list[Feature]
    paths: str
    device: str


def prospects_of(settings: Any) -> Prospects:
    """Return the prospects of a job. `settings`: by the names of Megatron's arguments or configs, with those of
    --adaptra.
    """
    stages = pipeline_stages(settings)
    layers = expected_layers(settings)
    whole = {layer.name: rule for layer in layers if (rule := rule_for(layer.facts)) is not None}
    features = [*_refused(settings)]
    in_order = kept_in_order(settings) if getattr(settings, "adaptra_policy", "adapt") == "observe" else []
    runs = not any(feature.effect == REFUSED for feature in features)
    forwards_alone = getattr(settings, "forward_only", None) is True or generates(settings)
    adapts = getattr(settings, "adaptra_policy", "adapt") == "adapt"
    splits = runs and stages != 1 and not forwards_alone and adapts
    if runs and stages == 1:
        features.append(Feature("a pipeline of 1 stage", "less", "there is no order to adapt", "none"))
    elif runs and forwards_alone:
        name = "forwards alone (forward_only, or a script that generates text)"
        features.append(Feature(name, "less", "not trained: no backward moves", "none"))
    features += [
        Feature(name, "less", "observed only: stock's schedule runs, and its actions are not timed", "none")
        for name in in_order
    ]
    if runs:
        features += _rerouted(settings)
    if splits:
        features += [
            *_combined(settings),
            *_whole(whole),
            *_captured(settings),
            *_offloaded(settings),
            *_recompute(settings),
            *_twice(settings),
            *_draws(settings),
        ]
    split = sum(layer.number for layer in layers if layer.name not in whole) if splits else 0
    total = sum(layer.number for layer in layers)
    effects = {feature.effect for feature in features}
    return Prospects(
        verdict=REFUSED if REFUSED in effects else LESS if "less" in effects else STARTS,
        split="all" if split == total else "some" if split else "none",
        split_layers=split,
        layers=total,
        per="model" if getattr(settings, "num_layers", None) else "layer",
        features=features,
        paths=_paths(settings),
        device=_device(settings),
    )


def _refused(settings: Any) -> list[Feature]:
    found = [Feature(each.feature, REFUSED, each.reason, remedy_of(each)) for each in refused_of(settings)]
    if found:
        return found
    return [Feature(error.what, REFUSED, error.why, "see the reason") for error in errors_of_flags(settings)]


def _rerouted(settings: Any) -> list[Feature]:
    reroute = getattr(settings, "adaptra_reroute", "off")
    if reroute == "off":
        return []
    reason = f"takes two replicas, {2 * ranks_of_replica(settings)} ranks or more: with fewer the job does not start"
    return [Feature(f"--adaptra-reroute {reroute}", "runs", reason, "none")]


def _whole(whole: dict[str, SplitRule]) -> list[Feature]:
    by_rule: dict[SplitRule, list[str]] = {}
    for name, rule in whole.items():
        by_rule.setdefault(rule, []).append(name)
    return [Feature(f"whole backward of {', '.join(names)}", "less", *rule[1:]) for rule, names in by_rule.items()]


def _recompute(settings: Any) -> list[Feature]:
    if getattr(settings, "recompute_granularity", None) != "full":
        return []
    method, number = getattr(settings, "recompute_method", None), getattr(settings, "recompute_num_layers", None)
    if method == "block" and number == 0:
        return [Feature("--recompute-granularity full", "runs", "no layer is recomputed: block, 0 layers", "none")]
    reason = (
        "I recomputes a layer and W computes its weight gradients; on GPUs backwards run whole until memory has been "
        "measured, and where no memory is left for a W that waits"
    )
    return [Feature("--recompute-granularity full", "runs", reason, "--adaptra-memory-fraction for more room")]


def _combined(settings: Any) -> list[Feature]:
    if not combines(settings):
        return []
    reason = "plans choose where to combine forwards and backwards, and stages keep to a plan that combines any"
    return [Feature("combined 1F1B (--overlap-moe-expert-parallel-comm)", "runs", reason, "none")]


def _captured(settings: Any) -> list[Feature]:
    if graphs_of(settings) == "none":
        return []
    reason = (
        "layers are captured in the plan's order, and again for each plan that moves their forwards or backwards, "
        "which is charged to it; every stage keeps to the plan"
    )
    return [Feature("CUDA graphs (--cuda-graph-impl transformer_engine)", "runs", reason, "none")]


def _offloaded(settings: Any) -> list[Feature]:
    if not offloads(settings):
        return []
    reason = "the plan's order is recorded, and again for another one, in the iteration that runs; stages keep to it"
    return [Feature("activation offloading (--fine-grained-activation-offloading)", "runs", reason, "none")]


def _twice(settings: Any) -> list[Feature]:
    if not getattr(settings, "mtp_num_layers", None):
        return []
    reason = "gradients of the output layer, which is used several times, are added up as autograd does"
    return [Feature("multi-token prediction (--mtp-num-layers)", "runs", reason, "none")]


def _draws(settings: Any) -> list[Feature]:
    chunks = 2 if _has_chunks(settings) else 1
    reason = "random numbers are drawn in another order than stock's: equal in distribution, not bit for bit"
    found = [
        Feature(flag, "runs", reason, "--adaptra-policy observe keeps stock's order")
        for flag in flags_drawn_in_other_order(settings, chunks)
    ]
    if shares_amax_history(settings, chunks):
        reason = "scales depend on how chunks alternate: close to stock's, not bit for bit once the window is full"
        found.append(Feature("--fp8-amax-compute-algo max", "runs", reason, "--fp8-amax-compute-algo most_recent"))
    return found


def _has_chunks(settings: Any) -> bool:
    of_layers = ("num_layers_per_virtual_pipeline_stage", "pipeline_model_parallel_layout")
    of_chunks = ("virtual_pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank")
    return any(getattr(settings, name, None) for name in of_layers) or any(
        (getattr(settings, name, None) or 0) > 1 for name in of_chunks
    )


def _paths(settings: Any) -> str:
    path = getattr(settings, "adaptra_path", AdaptraConfig.path)
    return {"auto": "device path and host path", "device": "device path", "host": "host path"}.get(path, path)


def _device(settings: Any) -> str:
    """Return the kind of device by Megatron's rule: tensor or context parallelism needs one queue (before
    Blackwell).
    """
    asked = os.environ.get(CONNECTIONS)
    sizes = (getattr(settings, f"{kind}_parallel_size", 1) or 1 for kind in ("tensor_model", "context"))
    one = hardware_queues() == 1 if asked is not None else any(size > 1 for size in sizes)
    return f"one hardware queue ({CONNECTIONS}=1)" if one else "several hardware queues"


def counts(all_of: Sequence[Prospects]) -> tuple[Counter[str], Counter[str]]:
    """Count verdicts, and splits of the jobs that start."""
    return Counter(each.verdict for each in all_of), Counter(each.split for each in all_of if each.verdict != REFUSED)
