# SPDX-License-Identifier: Apache-2.0
"""One call of Megatron's forward_backward function, with its arguments brought into one form for both schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from adaptra_megatron.runtime.compat import default_groups, groups_keyword
from adaptra_megatron.runtime.refusals import UnsupportedFeatureError, refuse_single_stage, refuse_unsupported


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
    """[sequence, micro-batch, hidden] of what travels between stages; None when it varies."""
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
    def group_size(self) -> int | None:
        """Megatron's micro-batch group size per virtual pipeline stage; None without interleaving."""
        return self.config.microbatch_group_size_per_vp_stage if self.interleaved else None

    @property
    def holds_last_stage(self) -> bool:
        return self.stage == self.stages - 1


def pipeline_call(arguments: Mapping[str, Any], *, interleaved: bool) -> PipelineCall:
    """Bring the keyword arguments of a stock schedule into one form.

    Raises UnsupportedFeatureError for what the executor cannot run, ValueError as stock does for arguments that
    contradict each other.
    """
    model = arguments["model"]
    iterator = arguments["data_iterator"]
    model_chunks = list(model) if isinstance(model, list) else [model]
    data_iterators = list(iterator) if isinstance(iterator, list) else [iterator]
    if len(data_iterators) != len(model_chunks):
        raise ValueError(f"{len(model_chunks)} model chunks need as many data iterators, got {len(data_iterators)}")
    if not interleaved and len(model_chunks) != 1:
        raise ValueError(f"the schedule without interleaving runs 1 model chunk per stage, got {len(model_chunks)}")
    config = schedules.get_model_config(model_chunks[0])
    refuse_unsupported(config, model_chunks, arguments)
    pipeline_group, groups = _process_groups(arguments)
    if pipeline_group.size() < 2:
        raise refuse_single_stage()
    return PipelineCall(
        config=config,
        interleaved=interleaved,
        forward_step_func=arguments["forward_step_func"],
        data_iterators=data_iterators,
        model_chunks=model_chunks,
        micro_batches=arguments["num_microbatches"],
        message_shape=_message_shape(arguments, config, groups),
        forward_only=bool(arguments.get("forward_only", False)),
        collect_non_loss_data=bool(arguments.get("collect_non_loss_data", False)),
        first_val_step=arguments.get("first_val_step"),
        force_all_reduce=bool(arguments.get("force_all_reduce", False)),
        pipeline_group=pipeline_group,
        groups=groups,
    )


def _process_groups(arguments: Mapping[str, Any]) -> tuple[torch.distributed.ProcessGroup, Any]:
    """The pipeline's group and the collection that finalize_model_grads gets, as stock builds them."""
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


def _message_shape(arguments: Mapping[str, Any], config: Any, groups: Any) -> tuple[int, ...] | None:
    if config.variable_seq_lengths:
        return None
    shapes = schedules.get_tensor_shapes(
        seq_length=arguments["seq_length"],
        micro_batch_size=arguments["micro_batch_size"],
        decoder_seq_length=arguments.get("decoder_seq_length"),
        config=config,
        tp_group=groups.tp,
        cp_group=groups.cp,
    )
    return tuple(shapes[0])
