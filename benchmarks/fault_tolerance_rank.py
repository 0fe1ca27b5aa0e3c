# SPDX-License-Identifier: Apache-2.0
"""A rank of benchmarks/fault_tolerance.py: what counting micro-batches adds to an iteration.

    fault_tolerance_rank.py WIDTH MICRO_BATCHES SHARDED

Two layers of WIDTH x WIDTH parameters in Megatron's DistributedDataParallel, in two buckets. Iterations without
computation, in turn with counts and without: microseconds of this thread's CPU time, and of time, that counts add.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from testing.megatron.megatron_on_cpu import install

ITERATIONS, WARM = 60, 10


def iterate(model: Any, conservation: Any, call: Any) -> tuple[float, float]:
    """CPU seconds and seconds from the first backward to what may be committed."""
    dist.barrier()
    begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
    if conservation is not None:
        for _ in range(call.micro_batches):
            conservation.count(model)
    model.finish_grad_sync()
    if conservation is not None:
        conservation.verify(call)
    return time.thread_time() - begun_cpu_s, time.perf_counter() - begun_s


def main(width: int, micro_batches: int, *, sharded: bool) -> None:
    from adaptra_megatron.elastic.process_group_manager import FaultTolerantGroups

    FaultTolerantGroups().install()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    install()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    from adaptra_megatron.megatron.state.conservation import Conservation

    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    settings = DistributedDataParallelConfig(bucket_size=1, use_distributed_optimizer=sharded)
    with_counts, without = (
        DistributedDataParallel(
            config, settings, torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(2)))
        )
        for _ in range(2)
    )
    conservation, call = (
        Conservation(),
        SimpleNamespace(model_chunks=[with_counts], micro_batches=micro_batches, stage=0),
    )
    conservation.begin([with_counts])
    added = []
    for number in range(ITERATIONS):
        with_counts.zero_grad_buffer()
        for counted in conservation._chunks.values():
            counted.counts.zero_()
        pair = [(with_counts, conservation), (without, None)]
        found = {each[1] is None: iterate(*each, call) for each in (pair if number % 2 else reversed(pair))}
        added.append([1e6 * (a - b) for a, b in zip(found[False], found[True], strict=True)])
    cpu_us, us = (median(each) for each in zip(*added[WARM:], strict=True))
    sys.stdout.write(f"ADDED {json.dumps([cpu_us, us])}\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sharded=sys.argv[3] == "sharded")
