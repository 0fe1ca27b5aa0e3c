# SPDX-License-Identifier: Apache-2.0
"""Several instances of Megatron's distributed optimizer (--num-distributed-optimizer-instances).

Each instance has all shards of the optimizer's state, over a part of the replicas: ranks that have the same place in
their instances have the same shard, and take the same steps with the same gradients (param_and_grad_buffer.py: reduced
and scattered within each instance, then all-reduced over the instances). So a shard survives its owner, and needs no
copy.

Where ranks have died, groups within an instance are joined over all instances: gradients are reduced over all that
live, which leaves nothing to add up over the instances; parameters are gathered from the lowest rank that has each
shard, and that one counts in gradient norms and writes the shard into checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from adaptra_megatron.epochs.live_groups import alike
from adaptra_megatron.job.layout import JobLayout

if TYPE_CHECKING:
    from adaptra_megatron.epochs.live_group import FaultTolerantGroup


class OptimizerInstance:
    """What one optimizer of an instance has in common with those of the others."""

    def __init__(self, optimizer: Any, layout: JobLayout) -> None:
        """Raises ValueError where instances are not made of whole replicas."""
        self._optimizer, self._rank = optimizer, layout.rank
        self._group: FaultTolerantGroup = optimizer.data_parallel_group
        instances = optimizer.ddp_config.num_distributed_optimizer_instances
        self._group.has_shards = True
        for group in (self._group, optimizer.get_grad_stats_parallel_group()):
            group.instances = instances
            alike(group, layout)
        for chunk in optimizer.model_chunks:
            for bucket_group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                over = bucket_group.inter_distributed_optimizer_instance_group
                over.adds_instances = True
                if list(over.ranks) != self._same:
                    raise ValueError(
                        f"--num-distributed-optimizer-instances {instances} does not divide the {layout.replicas} "
                        f"replicas, and ranks {list(over.ranks)} have parts of one replica's shards"
                    )

    @property
    def _same(self) -> list[int]:
        """Ranks that have this one's shard, by instance."""
        assert self._group.alike is not None
        return list(self._group.alike[self._rank])

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Number instances meanwhile as if those that live were all: the first writes what a checkpoint has."""
        before = self._optimizer.distributed_optimizer_instance_id
        live = [rank for rank in self._same if rank in self._group.members]
        self._optimizer.distributed_optimizer_instance_id = live.index(self._rank)
        try:
            yield
        finally:
            self._optimizer.distributed_optimizer_instance_id = before
