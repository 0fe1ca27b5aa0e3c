# SPDX-License-Identifier: Apache-2.0
"""Do what Megatron's schedules do before and after the actions of an iteration, and with each output that has been
sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import rerun_state_machine
from megatron.core.pipeline_parallel import schedules

from adaptra_megatron.megatron.compat import finalize_gradients
from adaptra_megatron.megatron.megatron_call import PipelineCall


def repeats_iteration() -> bool:
    """Return whether Megatron repeats the previous iteration with its data and random states, to check a suspicious
    result.

    The answer is equal on all ranks (megatron/core/rerun_state_machine.py:
    RerunStateMachine.should_run_forward_backward).
    """
    # Not by get_rerun_state_machine, which makes one where the script has none.
    machine = rerun_state_machine._GLOBAL_RERUN_STATE_MACHINE
    return machine is not None and machine.state is rerun_state_machine.RerunState.RERUNNING_IN_PLACE


@contextmanager
def iteration(call: PipelineCall) -> Iterator[Any]:
    """Do what stock does before its first and after its last action; yield the embedding module for
    `finish_gradients`.
    """
    config, embedding = call.config, None
    if config.finalize_model_grads_func is not None and not call.forward_only:
        model = call.model_chunks if call.interleaved else call.model_chunks[0]
        embedding = schedules.clear_embedding_activation_buffer(config, model, call.holds_last_stage)
    if config.timers is None:
        yield embedding
        return
    config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    yield embedding
    # Not after an error: it waits for the device, which may wait for a rank that has failed.
    config.timers("forward-backward").stop()


def free_content(call: PipelineCall, output: torch.Tensor) -> None:
    """Free the memory of an output that the transport has taken over: autograd needs only its graph."""
    schedules.deallocate_output_tensor(output, call.config.deallocate_pipeline_outputs)


def finish_gradients(call: PipelineCall, tokens: torch.Tensor, embedding: Any, *, degraded: bool = False) -> None:
    """Do what stock does after the last action of a training iteration.

    `tokens`: their number in all micro-batches computed here, a scalar tensor. `degraded`: whether cells are dead, so
    that stages differ in their number of replicas.
    """
    config = call.config
    if config.finalize_model_grads_func is None:
        return
    schedules.finish_embedding_wgrad_compute(config, embedding, call.holds_last_stage, call.groups.tp)
    counted = tokens if config.calculate_per_token_loss else None
    if counted is None or not degraded:
        finalize_gradients(config, call.model_chunks, counted, call.groups, force=call.force_all_reduce)
        return
    finalize_gradients(config, call.model_chunks, None, call.groups, force=call.force_all_reduce)
    _divide_by_tokens(call, counted)


def _divide_by_tokens(call: PipelineCall, tokens: torch.Tensor) -> None:
    """Do the last step of finalize_model_grads: divide by the tokens of the last stage's live cells."""
    # Stock broadcasts along each pipeline, then sums over each stage's replicas (finalize_model_grads). With dead cells
    # stages differ in replicas, and the sum of a stage would miss some: it comes first, at the last stage.
    if call.holds_last_stage:
        dist.all_reduce(tokens, group=call.groups.dp_cp)
    dist.broadcast(tokens, src=dist.get_process_group_ranks(call.pipeline_group)[-1], group=call.pipeline_group)
    if tokens > 0:
        for chunk in call.model_chunks:
            chunk.scale_gradients(1.0 / tokens)  # type: ignore[operator]
