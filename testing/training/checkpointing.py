# SPDX-License-Identifier: Apache-2.0
"""Write and read Megatron's distributed checkpoints: model, optimizer, learning-rate schedule, random state,
iteration.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.filesystem import FileSystemReader

from testing.megatron.checkpoint_writers import slowed

LATEST = "latest_checkpointed_iteration.txt"
_LASTS_S = 3600.0
"""Longer than any training of a test."""


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read or written; the message names the cause and the remedy."""


def check_can_save() -> None:
    """Raise CheckpointError if the first save would hang: without psutil Megatron's writer processes exit unnoticed."""
    if importlib.util.find_spec("psutil") is None:
        raise CheckpointError("--save needs psutil, which Megatron's checkpoint writer uses: pip install psutil")


def _sharded_state(model: list[Any], optimizer: Any, scheduler: Any, *, is_loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {name: chunk.sharded_state_dict() for name, chunk in _named_chunks(model)}
    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    state["optimizer"] = optimizer.sharded_state_dict(dict(state), is_loading=is_loading, metadata=metadata)
    state["opt_param_scheduler"] = scheduler.state_dict()
    # As megatron/training/checkpointing.py: get_rng_state, by stage and tensor lane; context-parallel lanes have one.
    sizes = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    place = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    replica = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    state["rng_state"] = ShardedObject("rng_state", _rng_state(), sizes, place, replica_id=replica)
    return state


def _named_chunks(model: list[Any]) -> list[tuple[str, Any]]:
    """Return the chunks under Megatron's checkpoint names, unwrapped."""
    chunks = unwrap_model(model)
    return [("model" if len(chunks) == 1 else f"model{index}", chunk) for index, chunk in enumerate(chunks)]


def _rng_state() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "tracker": dict(get_cuda_rng_tracker().get_states())}


def save_checkpoint(
    args: argparse.Namespace,
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
    iteration: int,
    queue: AsyncCallsQueue | None = None,
) -> None:
    """Write `iter_NNNNNNN` under --save, then name it as the latest. Collective. `queue`: writes in the background.

    Raises OSError if the directory cannot be written; the latest checkpoint then stays the previous one.
    """

    def name_it() -> None:
        if dist.get_rank() == 0:
            (Path(args.save) / LATEST).write_text(f"{iteration}\n")

    directory = Path(args.save) / f"iter_{iteration:07d}"
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = _sharded_state(model, optimizer, scheduler, is_loading=False)
    state["iteration"] = iteration
    request = dist_checkpointing.save(state, str(directory), async_sharded_save=queue is not None)
    dist.barrier()
    if queue is None:
        name_it()
    else:
        dies = functools.partial(_dies, args.emulate_death_at_save, iteration)
        dies("scheduling")
        request.add_finalize_fn(lambda: dies("finalizing"))
        request.add_finalize_fn(name_it)
        late_s = _LASTS_S if iteration == args.emulate_lasting_write else args.emulate_write_ms / 1e3
        queue.schedule_async_request(slowed(request, late_s))
    dist.barrier()


def _dies(deaths: Sequence[str], iteration: int, point: str) -> None:
    # The rank of the start: in checkpoints after failures, ranks have other numbers.
    if f"{os.environ['RANK']}:{iteration}:{point}" in deaths:
        os.kill(os.getpid(), signal.SIGKILL)


def unreadable(directory: Path) -> list[str]:
    """Return what is missing of the newest checkpoint in `directory`, which is to be complete at any time."""
    if not (directory / LATEST).exists():
        return []  # not one has been written yet
    newest = directory / f"iter_{int((directory / LATEST).read_text()):07d}"
    try:
        metadata = FileSystemReader(newest).read_metadata()
    except OSError as cause:
        return [f"{newest.name} cannot be read: {cause}"]
    ends: dict[str, int] = {}
    for part in metadata.storage_data.values():
        ends[part.relative_path] = max(ends.get(part.relative_path, 0), part.offset + part.length)
    sizes = {name: (newest / name).stat().st_size if (newest / name).exists() else 0 for name in ends}
    return [
        f"{newest.name}: {name} has {sizes[name]} of {end} bytes" for name, end in ends.items() if sizes[name] < end
    ]


def load_checkpoint(args: argparse.Namespace, model: list[Any], optimizer: Any, scheduler: Any) -> int:
    """Read the latest checkpoint under --load; return the number of iterations it was trained for. Collective.

    Its layout (ranks, stages, chunks) must equal this run's. Raises CheckpointError if there is no checkpoint.
    """
    latest = Path(args.load) / LATEST
    if not latest.is_file():
        raise CheckpointError(f"there is no checkpoint in {args.load} (no file {latest}): leave --load out to start")
    directory = Path(args.load) / f"iter_{int(latest.read_text()):07d}"
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    distributed = [part for part in parts if isinstance(part, DistributedOptimizer)]
    for part in distributed:
        # Its state, and with it the plan to load, only exists after a step.
        part._init_optimizer_states_with_dummy_values()
    state = _sharded_state(model, optimizer, scheduler, is_loading=True)
    state["iteration"] = 0
    loaded = dist_checkpointing.load(state, str(directory))
    for name, chunk in _named_chunks(model):
        chunk.load_state_dict(loaded[name])
    with torch.no_grad():  # in 32 bits, shards of the optimizer are views of parameters
        optimizer.load_state_dict(loaded["optimizer"])
    for part in distributed:
        # With torch's Adam, Megatron 0.16.1 restores the dummy step's count, in one tensor that all parameters share
        # and count up. Every iteration is a step: nothing is skipped without a loss scale.
        for state in part.optimizer.state.values() if isinstance(part.optimizer, torch.optim.AdamW) else ():
            state["step"] = torch.tensor(float(loaded["iteration"]))
    scheduler.load_state_dict(loaded["opt_param_scheduler"])
    torch.set_rng_state(loaded["rng_state"]["torch"])
    get_cuda_rng_tracker().set_states(loaded["rng_state"]["tracker"])
    return int(loaded["iteration"])
