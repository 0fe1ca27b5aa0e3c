# SPDX-License-Identifier: Apache-2.0
"""Megatron's distributed checkpoints: model, optimizer, schedule of the learning rate, iteration."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing

LATEST = "latest_checkpointed_iteration.txt"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be read; the message names the file and the remedy."""


def _sharded_state(model: list[Any], optimizer: Any, scheduler: Any, *, is_loading: bool) -> dict[str, Any]:
    names = ["model"] if len(model) == 1 else [f"model{index}" for index in range(len(model))]
    state: dict[str, Any] = {name: chunk.sharded_state_dict() for name, chunk in zip(names, model, strict=True)}
    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    state["optimizer"] = optimizer.sharded_state_dict(dict(state), is_loading=is_loading, metadata=metadata)
    state["opt_param_scheduler"] = scheduler.state_dict()
    return state


def save_checkpoint(args: argparse.Namespace, model: list[Any], optimizer: Any, scheduler: Any, iteration: int) -> None:
    """Write `iter_NNNNNNN` under --save, then name it as the latest. Collective.

    Raises:
        OSError: the directory cannot be written. The latest checkpoint stays the one before.
    """
    directory = Path(args.save) / f"iter_{iteration:07d}"
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = _sharded_state(model, optimizer, scheduler, is_loading=False)
    state["iteration"] = iteration
    dist_checkpointing.save(state, str(directory))
    dist.barrier()
    if dist.get_rank() == 0:
        (Path(args.save) / LATEST).write_text(f"{iteration}\n")
    dist.barrier()


def load_checkpoint(args: argparse.Namespace, model: list[Any], optimizer: Any, scheduler: Any) -> int:
    """Read the latest checkpoint under --load. Returns the number of iterations it was trained for. Collective.

    Raises:
        CheckpointError: there is none.
    """
    latest = Path(args.load) / LATEST
    if not latest.is_file():
        raise CheckpointError(f"there is no checkpoint in {args.load} (no file {latest}): leave --load out to start")
    directory = Path(args.load) / f"iter_{int(latest.read_text()):07d}"
    # A distributed optimizer lays its state out at the first step; the plan to load needs the layout.
    state = _sharded_state(model, optimizer, scheduler, is_loading=True)
    state["iteration"] = 0
    loaded = dist_checkpointing.load(state, str(directory))
    for index, chunk in enumerate(model):
        chunk.load_state_dict(loaded["model" if len(model) == 1 else f"model{index}"])
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["opt_param_scheduler"])
    return int(loaded["iteration"])
