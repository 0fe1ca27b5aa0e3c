# SPDX-License-Identifier: Apache-2.0
"""One call of Megatron's forward_backward function, with its arguments in one form for both schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.transformer_layer import BaseTransformerLayer

from adaptra_megatron.megatron.compat import default_groups, groups_keyword
from adaptra_megatron.megatron.refusals import UnsupportedFeatureError, combines, refuse_unsupported
from adaptra_megatron.schedule.classic import check_groups
from adaptra_megatron.schedule.ir import Place, Placement, interleaved


@dataclass(frozen=True, kw_only=True)
class PipelineCall:
    """Arguments of `forward_backward_pipelining_with(out)_interleaving`, of any release, one entry per chunk."""

    config: Any
    """Megatron's ModelParallelConfig / TransformerConfig."""
    interleaved: bool
    forward_step_func: Callable[..., Any]
    data_iterators: list[Iterator[Any] | None]
    model_chunks: list[torch.nn.Module]
    micro_batches: int
    message_shape: tuple[int, ...] | None
    """Shape [sequence, micro-batch, hidden] of messages between stages; None if it varies."""
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None
    force_all_reduce: bool
    pipeline_group: torch.distributed.ProcessGroup
    groups: Any
    """Megatron's collection of process groups: see compat.default_groups."""

    @property
    def stage(self) -> int:
        return self.pipeline_group.rank()

    @property
    def stages(self) -> int:
        return self.pipeline_group.size()

    @property
    def chunks(self) -> int:
        return len(self.model_chunks)

    @property
    def message_nbytes(self) -> int:
        """Size of messages between stages; 0 if it varies."""
        return math.prod(self.message_shape) * int(self.config.pipeline_dtype.itemsize) if self.message_shape else 0

    @property
    def group_size(self) -> int | None:
        """Return Megatron's micro-batch group size per virtual pipeline stage; None with one virtual stage per
        stage.
        """
        return self.config.microbatch_group_size_per_vp_stage if self.chunks > 1 else None

    @property
    def combines(self) -> bool:
        """Whether Megatron trains with combined 1F1B."""
        return combines(self.config)

    @property
    def placement(self) -> Placement:
        """Megatron's own placement, which its model chunks are built for."""
        return interleaved(self.stages, self.chunks)

    @property
    def last_place(self) -> Place:
        """Return the stage and chunk that compute the loss."""
        return self.placement.places[-1]

    @property
    def holds_last_stage(self) -> bool:
        return self.stage == self.last_place.stage


def config_of(model: torch.nn.Module | list[torch.nn.Module]) -> Any:
    """Return Megatron's ModelParallelConfig of a model chunk, or of a list of them, whatever wraps them."""
    return schedules.get_model_config(model[0] if isinstance(model, list) else model)


def pipeline_call(arguments: Mapping[str, Any], *, interleaved: bool) -> PipelineCall:
    """Convert the keyword arguments of a stock schedule.

    Raises UnsupportedFeatureError for features that the executor cannot run, ValueError as stock does for contradictory
    arguments.
    """
    model = arguments["model"]
    iterator = arguments["data_iterator"]
    model_chunks = list(model) if isinstance(model, list) else [model]
    data_iterators = list(iterator) if isinstance(iterator, list) else [iterator]
    if not interleaved and len(model_chunks) != 1:
        raise ValueError(f"the schedule without interleaving runs 1 model chunk per stage, got {len(model_chunks)}")
    config = config_of(model_chunks[0])
    refuse_unsupported(config, model_chunks, arguments)
    pipeline_group, groups = _process_groups(arguments)
    if pipeline_group.size() < 2:
        raise UnsupportedFeatureError(
            "--adaptra: a schedule for pipelines was called with a pipeline of 1 stage; take the schedule that "
            "get_forward_backward_func returns for it"
        )
    micro_batches, chunks = arguments["num_microbatches"], len(model_chunks)
    if chunks > 1:
        check_groups(pipeline_group.size(), micro_batches, chunks, config.microbatch_group_size_per_vp_stage)
    if len(data_iterators) != chunks:
        raise ValueError(f"{chunks} model chunks need as many data iterators, got {len(data_iterators)}")
    return PipelineCall(
        config=config,
        interleaved=interleaved,
        forward_step_func=arguments["forward_step_func"],
        data_iterators=data_iterators,
        model_chunks=model_chunks,
        micro_batches=micro_batches,
        message_shape=message_shape(arguments, config, groups, interleaved=interleaved),
        forward_only=bool(arguments.get("forward_only", False)),
        collect_non_loss_data=bool(arguments.get("collect_non_loss_data", False)),
        first_val_step=arguments.get("first_val_step"),
        force_all_reduce=bool(arguments.get("force_all_reduce", False)),
        pipeline_group=pipeline_group,
        groups=groups,
    )


def recomputed_spans(config: Any, model_chunks: Sequence[torch.nn.Module]) -> int:
    """Return the number of layer spans that a backward recomputes, the maximum over chunks; 0 without recomputation.

    With --recompute-granularity full, `uniform` recomputes all layers in spans of several, `block` the first layers of
    each chunk one by one. Primus names the layers instead (recompute_layer_ids).
    """
    if getattr(config, "recompute_granularity", None) != "full":  # a ModelParallelConfig alone has none
        return 0
    layers = max(map(_layers, model_chunks))
    named, number = getattr(config, "recompute_layer_ids", None), config.recompute_num_layers or 0
    if named is not None:
        return min(layers, len(named))
    return min(layers, number) if config.recompute_method == "block" else math.ceil(layers / max(1, number))


def work_of(model_chunks: Sequence[torch.nn.Module]) -> tuple[str, ...]:
    """Return a description of each chunk's work, equal for chunks with about the same amount."""
    parts = {"mtp": "mtp", "pre_process": "embedding", "post_process": "loss"}

    def words(model: torch.nn.Module) -> str:
        has = {name for module in model.modules() for name in parts if getattr(module, name, False)}
        return ", ".join([f"{_layers(model)} layers", *(word for name, word in parts.items() if name in has)])

    return tuple(map(words, model_chunks))


def _layers(model: torch.nn.Module) -> int:
    return sum(isinstance(module, BaseTransformerLayer) for module in model.modules())


def shared_groups(config: Any, groups: Any) -> list[list[int]]:
    """Return the global ranks of each group whose collectives this rank joins inside F, B and W.

    `groups`: those that the model was built with.
    """

    def known(*names: str) -> list[Any]:
        return [group for name in names if (group := getattr(groups, name, None)) is not None]

    found = known("tp", "cp")
    if getattr(config, "num_moe_experts", None):
        found += known("ep", "expt_tp", "tp_ep") or [
            parallel_state.get_expert_model_parallel_group(),
            parallel_state.get_expert_tensor_parallel_group(),
        ]
        if "global_aux_loss" in getattr(config, "moe_router_load_balancing_type", ""):
            found += known("tp_dp_cp") or [
                parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
            ]
    if getattr(config, "fp8", None) and getattr(config, "fp8_recipe", None) == "delayed":  # amax of each F and B
        found.append(
            parallel_state.get_amax_reduction_group(
                with_context_parallel=True, tp_only_amax_red=getattr(config, "tp_only_amax_red", False)
            )
        )
    return [torch.distributed.get_process_group_ranks(group) for group in found]


def _process_groups(arguments: Mapping[str, Any]) -> tuple[torch.distributed.ProcessGroup, Any]:
    """Return the pipeline's group, and the collection for finalize_model_grads, as stock builds them."""
    keyword = groups_keyword()
    communicator, groups = arguments.get("p2p_communicator"), arguments.get(keyword)
    if (communicator is None) != (groups is None):
        raise ValueError(f"pass p2p_communicator and {keyword} together, or neither")
    if communicator is not None and groups is not None:
        if not isinstance(communicator, P2PCommunicator):
            raise UnsupportedFeatureError(
                f"--adaptra replaces point-to-point communication between the stages of one pipeline; "
                f"a {type(communicator).__name__} joins several models. Drop --adaptra for this model"
            )
        return communicator.pp_group, groups
    groups = default_groups()
    return groups.pp, groups


def message_shape(
    arguments: Mapping[str, Any], config: Any, groups: Any, *, interleaved: bool
) -> tuple[int, ...] | None:
    """Return the shape of messages between stages, from the `arguments` of stock's schedule; None if shapes differ
    between messages.
    """
    # What a stage of multi-token prediction alone hands on has a sequence per prediction; stock sends shapes, too.
    if config.variable_seq_lengths or getattr(config, "mtp_standalone", False):
        return None
    shapes = schedules.get_tensor_shapes(
        seq_length=arguments["seq_length"],
        micro_batch_size=arguments["micro_batch_size"],
        decoder_seq_length=None if interleaved else arguments.get("decoder_seq_length"),  # stock ignores it there
        config=config,
        tp_group=groups.tp,
        cp_group=groups.cp,
    )
    return tuple(shapes[0])
