# SPDX-License-Identifier: Apache-2.0
"""Set up torch.distributed and Megatron's process groups for a sequence of trainings in one set of processes."""

from __future__ import annotations

import argparse
import os
import random
from datetime import timedelta

import numpy
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel


def join_job(args: argparse.Namespace) -> int:
    """Initialise torch.distributed from the environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) unless it is
    already.

    Returns the number of processes. Raises ValueError if the environment lacks a variable, torch.distributed.DistError
    if the other processes do not come within --distributed-timeout-minutes.
    """
    if not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(args.distributed_backend, timeout=timedelta(minutes=args.distributed_timeout_minutes))
    return dist.get_world_size()


def set_up_groups(args: argparse.Namespace) -> None:
    """Create Megatron's process groups for the layout in `args`, replacing those of another layout. Collective."""
    layout = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
        args.expert_model_parallel_size,
    )
    chunks = args.virtual_pipeline_model_parallel_size
    if parallel_state.model_parallel_is_initialized():
        present = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_context_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
        )
        if present == layout and parallel_state.get_virtual_pipeline_model_parallel_world_size() == chunks:
            return
        dist.barrier()
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout[0],
        pipeline_model_parallel_size=layout[1],
        context_parallel_size=layout[2],
        expert_model_parallel_size=layout[3],
        virtual_pipeline_model_parallel_size=chunks,
        num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
        distributed_timeout_minutes=args.distributed_timeout_minutes,
        # With gloo as the job's backend these groups would only be there twice.
        create_gloo_process_groups=args.distributed_backend != "gloo",
    )


def seed_everything(seed: int) -> None:
    """Seed as Megatron's training loop does: another seed per stage, the same across data-parallel ranks."""
    stage_seed = seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(stage_seed)
    numpy.random.seed(stage_seed)
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(stage_seed)


def stage_of_rank(rank: int, *, world_size: int, stages: int) -> int:
    """Return the pipeline stage of a global rank in Megatron's default order (tp-cp-ep-dp-pp: the pipeline is
    outermost).
    """
    return rank // (world_size // stages)


def leave_job() -> None:
    """Destroy all process groups; a no-op if there are none. Collective."""
    if parallel_state.model_parallel_is_initialized():
        dist.barrier()
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
