# SPDX-License-Identifier: Apache-2.0
"""Four replicas reduce the gradients of Megatron's DistributedDataParallel, with counts of micro-batches and without.

Each case is checked on every rank, which prints its name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from testing.megatron.megatron_on_cpu import install

RANKS, MICRO_BATCHES = 4, 3


class Model(torch.nn.Module):
    """Weights that fill buckets exactly or not, and those of experts."""

    def __init__(self, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shared in (("dense", True), ("expert", False)):
            weight = torch.nn.Parameter(torch.randn(width, width, generator=generator))
            weight.allreduce = shared  # type: ignore[attr-defined]
            self.register_parameter(name, weight)

    def forward(self, data: torch.Tensor) -> torch.Tensor:
        return torch.tanh(data @ self.dense) @ self.expert


class Training:
    """One model, and what stands in for a call of Megatron's schedules."""

    def __init__(self, width: int, dtype: torch.dtype, settings: dict[str, Any], *, counted: bool) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer import TransformerConfig

        from adaptra_megatron.megatron.state.conservation import Conservation

        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        with_buckets = DistributedDataParallelConfig(**settings, bucket_size=1)
        self.model = DistributedDataParallel(config, with_buckets, Model(width).to(dtype))
        self.conservation = Conservation() if counted else None
        self.call: Any = SimpleNamespace(model_chunks=[self.model], micro_batches=MICRO_BATCHES, stage=1)
        if self.conservation is not None:
            self.conservation.begin([self.model])
        self._width, self._dtype = width, dtype
        self._overlap = with_buckets.overlap_grad_reduce

    def compute(self, skipped: int | None = None) -> None:
        """All micro-batches. `skipped`: the one that is computed nowhere."""
        generator = torch.Generator().manual_seed(7 + dist.get_rank())
        for micro_batch in range(MICRO_BATCHES):
            data = torch.randn(2, self._width, generator=generator).to(self._dtype)
            if micro_batch != skipped:
                with self.model.no_sync():
                    if self.conservation is not None:
                        self.conservation.count(self.model)
                    self.model(data).square().sum().backward()
        if self._overlap:
            self.model.start_grad_sync()

    def iterate(self, skipped: int | None = None) -> list[torch.Tensor]:
        """An iteration; this rank's reduced gradients."""
        self.model.zero_grad_buffer()
        self.compute(skipped)
        self.model.finish_grad_sync()
        return self.gradients()

    def gradients(self) -> list[torch.Tensor]:
        """Those that an optimizer of this rank would take."""
        found = []
        for group in self.groups:
            for bucket in group.buckets:
                shards = bucket.grad_data[None]
                if group.ddp_config.use_distributed_optimizer:
                    shards = bucket.grad_data.view(group.intra_distributed_optimizer_instance_size, -1)
                rank = getattr(group, "intra_distributed_optimizer_instance_rank", 0)
                found.append(shards[rank].clone())
        return found

    @property
    def groups(self) -> list[Any]:
        """Bucket groups."""
        return [*self.model.bucket_groups, *self.model.expert_parallel_bucket_groups]

    def verify(self) -> Any:
        """What the counts say."""
        assert self.conservation is not None
        return self.conservation.verify(self.call)


def raised(act: Callable[[], object]) -> Any:
    """The error that `act` raises on all ranks."""
    from adaptra_megatron.megatron.state.conservation import MiscountedGradientsError

    try:
        act()
    except MiscountedGradientsError as error:
        return error
    raise AssertionError("a wrong count was not found")


def check(name: str, width: int, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
    """Counts are right, change no bit, and show what is wrong."""
    stock, counted = (Training(width, dtype, settings, counted=each) for each in (False, True))
    for _ in range(2):  # from the second on, Megatron knows which gradients come
        expected, found = stock.iterate(), counted.iterate()
        assert counted.verify().buckets == len(expected) == 2
        assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True)), name
    assert any(float(each.norm()) > 0 for each in expected)

    counted.iterate(skipped=1 if dist.get_rank() == 1 else None)
    error = raised(counted.verify)  # of dense weights, which all ranks have
    assert (error.stage, error.chunk, error.bucket) == (1, 0, 0)
    assert error.describe().startswith("stage 1, chunk 0, bucket 0: gradients hold 11 of 12 micro-batches"), error

    counted.compute()  # again, without setting gradients to 0 before
    counted.model.finish_grad_sync()
    assert raised(counted.verify).found > RANKS * MICRO_BATCHES

    if settings.get("overlap_grad_reduce") and settings.get("num_distributed_optimizer_instances", 1) == 1:
        check_late(counted, expected)
    dist.barrier()
    sys.stdout.write(f"CHECKED {name}\n")


def check_late(training: Training, expected: list[torch.Tensor]) -> None:
    """Reductions of an attempt that was given up: what nobody waits for changes nothing, and what is put in place late
    is found."""
    for waited in (False, True):
        training.model.zero_grad_buffer()
        training.compute()
        late = [group.grad_reduce_handle for group in training.groups]
        for group in training.groups:
            group.grad_reduce_handle = None
        dist.barrier()
        training.model.zero_grad_buffer()
        if waited:
            for handle in late:
                handle.wait()
        training.compute()
        training.model.finish_grad_sync()
        if waited:
            assert raised(training.verify).found == (RANKS + 1) * RANKS * MICRO_BATCHES
        else:
            training.verify()
            assert all(torch.equal(*pair) for pair in zip(expected, training.gradients(), strict=True))
        for handle in late:
            handle.wait()


def main(instances: int) -> None:
    """All cases. `instances`: of the distributed optimizer; 1: with experts at two ranks each."""
    from adaptra_megatron.elastic.process_group_manager import FaultTolerantGroups

    FaultTolerantGroups().install()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    install()
    from megatron.core import parallel_state

    from patches.rank_failure_patches import FAULT_TOLERANCE_PATCHES

    (patch,) = (each for each in FAULT_TOLERANCE_PATCHES if each.identity == "gradient-counts")
    owner, attribute = patch.owner()
    setattr(owner, attribute, patch.replace(getattr(owner, attribute), None))  # type: ignore[arg-type]
    sharded, overlapped = {"use_distributed_optimizer": True}, {"overlap_grad_reduce": True}
    if instances > 1:
        parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
        check("instances", 32, **sharded, num_distributed_optimizer_instances=instances)
        return
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    check("plain", 24)
    check("plain, overlapped", 24, **overlapped)
    check("plain, bf16", 24, torch.bfloat16)
    check("sharded with padding", 24, **sharded)
    check("sharded, filled exactly", 32, **sharded, **overlapped)
    check("sharded, bf16", 32, torch.bfloat16, **sharded)


if __name__ == "__main__":
    main(int(sys.argv[1]))
