# SPDX-License-Identifier: Apache-2.0
"""All differences between the supported releases of Megatron-core, in one place, each detected by what the release has.

Releases that are accepted: `SUPPORTED` of patches/table.py; how to add one: docs/extending.md.

They are not detected by `__version__`: tags carry that of another release (core_v0.17.0 says 0.17.0rc0), and forks keep
it.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import megatron.core
import torch
from megatron.core import enums, parallel_state, process_groups_config
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import cuda_graphs, multi_token_prediction
from megatron.core.transformer.moe import moe_utils


@dataclass(frozen=True)
class Difference:
    """One difference: what changed, since which release, and how it is detected."""

    what: str
    since: str
    seen_by: str


DIFFERENCES = (
    Difference(
        "schedules and finalize_model_grads take `pg_collection`, a ProcessGroupCollection; before: "
        "`grad_finalize_pgs`, a GradFinalizeProcessGroups",
        "0.15",
        "the parameter of the schedule",
    ),
    Difference("schedules and finalize_model_grads take `force_all_reduce`", "0.16", "the parameter of the schedule"),
    Difference("backward_step takes no model_type", "0.17", "its parameters"),
    Difference("ModelType has no encoder_and_decoder", "0.17", "the attribute"),
    Difference(
        "CUDA graphs of layers can be dropped and captured again", "0.16", "`TECudaGraphHelper.delete_cuda_graphs`"
    ),
    Difference(
        "finalize_model_grads reads `tp_dp_cp` of the groups", "0.18", "the field of ProcessGroupCollection (from 0.16)"
    ),
    Difference(
        "auxiliary losses of experts are summed in `get_moe_metrics_tracker`; before: in "
        "`get_moe_layer_wise_logging_tracker`",
        "0.18",
        "the module transformer.moe.moe_logging",
    ),
    Difference(
        "the stream of experts' all-to-alls in combined 1F1B may have a high priority",
        "0.18",
        "the parameter of set_streams",
    ),
    Difference("schedules make the default groups in _build_default_pg_collection", "0.19", "the function"),
    Difference("the linear layers' autograd function takes ten inputs", "0.19", "the parameters of its forward"),
    Difference(
        "weights may be sharded and gathered per use (generalized tensor parallelism)", "0.19", "`gtp_remat_size`"
    ),
    Difference(
        "linear layers cast the gradient of their output to the type of their input (logits in fp32)",
        "0.20",
        "`input_dtype`",
    ),
)


@functools.cache
def _takes(function: Callable[..., Any], parameter: str) -> bool:
    # Also where a patch has replaced it: functools.wraps leads inspect to the original.
    return parameter in inspect.signature(function).parameters


def groups_keyword() -> str:
    """Return the keyword by which schedules receive process groups and pass them to finalize_model_grads."""
    newer = _takes(schedules.forward_backward_pipelining_without_interleaving, "pg_collection")
    return "pg_collection" if newer else "grad_finalize_pgs"


def default_groups() -> Any:
    """Return the process groups that stock's schedules use when none are given."""
    build = getattr(schedules, "_build_default_pg_collection", None)
    if build is not None:
        return build()
    if groups_keyword() == "pg_collection":
        groups = process_groups_config.ProcessGroupCollection()
    else:
        groups = process_groups_config.GradFinalizeProcessGroups()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    if "tp_dp_cp" in type(groups).__annotations__:
        groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return groups


def data_parallel_group(groups: Any) -> Any:
    """Return the group of this rank's peers in other replicas: those of the same stage and lane."""
    found = getattr(groups, "dp", None)
    return parallel_state.get_data_parallel_group() if found is None else found


def megatron_version() -> str:
    """Return the version of the imported megatron-core, which may differ from the installed one."""
    return str(megatron.core.__version__)


def finalize_gradients(
    config: Any, model_chunks: Sequence[torch.nn.Module], tokens: torch.Tensor | None, groups: Any, *, force: bool
) -> None:
    """Call the config's finalize_model_grads_func as stock's schedules do."""
    keywords = {groups_keyword(): groups}
    if _takes(schedules.forward_backward_pipelining_without_interleaving, "force_all_reduce"):
        keywords["force_all_reduce"] = force
    config.finalize_model_grads_func(model_chunks, tokens, **keywords)


def backward_step(
    model: torch.nn.Module,
    input_tensor: torch.Tensor | None,
    output_tensor: torch.Tensor,
    output_gradient: torch.Tensor | None,
    config: Any,
) -> torch.Tensor | None:
    """Call Megatron's backward_step of one micro-batch through `model`; return the gradient of its input."""
    tensors = (input_tensor, output_tensor, output_gradient)
    with_type = _takes(schedules.backward_step, "model_type")
    rest = (schedules.get_model_type(model), config) if with_type else (config,)
    gradient: torch.Tensor | None = schedules.backward_step(*tensors, *rest)
    return gradient


def combined_step(config: Any, *given: Any, **keywords: Any) -> tuple[Any, Any, Any]:
    """Call Megatron's combined_forward_backward_step, on the streams of stock's schedule.

    Returns the output of the forward, its number of tokens, and the input gradient of the backward; None for a missing
    one.
    """
    # Imported here: only jobs with combined 1F1B need it.
    from megatron.core.pipeline_parallel import combined_1f1b

    priority = _takes(combined_1f1b.set_streams, "high_priority")
    combined_1f1b.set_streams(**({"high_priority": config.high_priority_a2a_comm_stream} if priority else {}))
    output, tokens, gradient = combined_1f1b.combined_forward_backward_step(*given, **keywords)
    return output, tokens, gradient


def is_encoder_decoder(model: torch.nn.Module) -> bool:
    """Return whether `model` is of the encoder-and-decoder type; False in releases without that type."""
    both = getattr(enums.ModelType, "encoder_and_decoder", None)
    return both is not None and schedules.get_model_type(model) == both


def captures_again() -> bool:
    """Return whether CUDA graphs of layers can be dropped and captured again."""
    return hasattr(getattr(cuda_graphs, "TECudaGraphHelper", None), "delete_cuda_graphs")


def has_sharded_weight(ctx: Any) -> bool:
    """Return whether the linear layer of this autograd context gathers its weight for each use."""
    return getattr(ctx, "gtp_remat_size", 1) > 1


def gradient_to_use(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
    """Return the output gradient of a linear layer as its backward uses it. `ctx`: its autograd context."""
    return grad_output.to(getattr(ctx, "input_dtype", grad_output.dtype))


def logged_sums() -> dict[tuple[str, ...], torch.Tensor]:
    """Return Megatron's sums for the log by name: auxiliary losses of experts, losses of multi-token prediction.

    They are Megatron's own tensors [layers], to which forwards add. Sums that no forward has created yet are missing.
    """
    sums: dict[tuple[str, ...], torch.Tensor] = {("experts", name): value for name, value in _expert_sums().items()}
    for name, value in multi_token_prediction.MTPLossLoggingHelper.tracker.items():
        if isinstance(value, torch.Tensor):
            sums["multi-token prediction", name] = value
    return sums


def mark_averaged(groups: Any) -> None:
    """Have Megatron not average `logged_sums` over data-parallel ranks again: a cell without micro-batches does not
    know the groups in which its peers would wait for it. `groups`: of the call.
    """
    tracker, lanes = multi_token_prediction.MTPLossLoggingHelper.tracker, getattr(groups, "cp", None)
    # That of multi-token prediction is over parts of sequences, too.
    tracker["avg_group"] = lanes if lanes is not None and lanes.size() > 1 else None
    if not _has_metrics_tracker():
        for entry in moe_utils.get_moe_layer_wise_logging_tracker().values():
            entry["reduce_group_has_dp"] = True


def average_group(known: Any) -> Any:
    """Return the group over which Megatron averages losses of multi-token prediction, as the last forward has set it.
    Where there was none, set it to the `known` one: peers of a cell without micro-batches average with it.
    """
    tracker = multi_token_prediction.MTPLossLoggingHelper.tracker
    if "values" in tracker and tracker.get("avg_group") is None:
        tracker["avg_group"] = known
    return tracker.get("avg_group")


@functools.cache
def _has_metrics_tracker() -> bool:
    return importlib.util.find_spec("megatron.core.transformer.moe.moe_logging") is not None


def _expert_sums() -> dict[str, torch.Tensor]:
    if not _has_metrics_tracker():
        return {name: entry["values"] for name, entry in moe_utils.get_moe_layer_wise_logging_tracker().items()}
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    return {name: entry.values for name, entry in get_moe_metrics_tracker().metrics.items()}
