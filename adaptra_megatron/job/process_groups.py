# SPDX-License-Identifier: Apache-2.0
"""Process groups made by their members alone, at any time."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from adaptra_megatron.job.control_store import ControlStore


def epoch_group(control: ControlStore, name: str, ranks: Sequence[int], rank: int, timeout_s: float) -> Any:
    """A gloo group of `ranks` (global ones) in the epoch of `control`; all of them call this at about the same time.

    `name`: of this group alone within the epoch. Members are addressed by their index in `ranks`. Raises RuntimeError
    when one does not come within `timeout_s`.
    """
    make: Any = dist.ProcessGroupGloo
    with control.lent(name, timeout_s, sealed=False) as store:
        return make(store, ranks.index(rank), len(ranks), timedelta(seconds=timeout_s))


def gloo_group(store: Any, rank: int, size: int, timeout: timedelta, devices: Sequence[Any]) -> Any:
    """A gloo group with one worker thread, whose connections are made by `devices`.

    Of two, as torch's groups have, torch 2.13 frees one string twice: docs/upstream/torch_gloo_double_free.md.
    """
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._threads, options._timeout = list(devices), 1, timeout
    return gloo(store, rank, size, options)


def nccl_group(store: Any, rank: int, size: int, timeout_s: float) -> Any:
    """An NCCL group of `size` processes that meet in `store`, of which this is number `rank`."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupNCCL(store, rank, size, options)
