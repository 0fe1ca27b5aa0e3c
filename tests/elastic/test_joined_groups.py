# SPDX-License-Identifier: Apache-2.0
"""Who takes part, and counts, in groups of optimizer instances once ranks have died."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from adaptra_megatron.common.layout import Cell, JobLayout, Worker
from adaptra_megatron.elastic.generation import Generation, GenerationId
from adaptra_megatron.elastic.process_group import FaultTolerantGroup
from adaptra_megatron.elastic.process_group_manager import FaultTolerantGroups, alike
from adaptra_megatron.megatron.state.shard_copies import OptimizerInstance

REPLICAS, STAGES = 4, 2


def layout(rank: int, lanes: int = 1) -> JobLayout:
    """Lanes innermost, then replicas, then stages."""
    places = {
        each: (Cell(each // lanes % REPLICAS, each // lanes // REPLICAS), each % lanes)
        for each in range(REPLICAS * STAGES * lanes)
    }
    return JobLayout(rank, {each: Worker(cell, lane, "host", "boot/net") for each, (cell, lane) in places.items()})


class Instances:
    """The groups of one rank, of instances of two replicas each."""

    def __init__(self, rank: int, across: list[int] | None = None, lanes: int = 1) -> None:
        self.layout, self.groups = layout(rank, lanes), FaultTolerantGroups()
        self.groups.rank, stage, first = rank, rank // 4 * 4, rank // 2 % 2 * 2

        def group(*ranks: int) -> FaultTolerantGroup:
            self.groups._groups.append(FaultTolerantGroup(self.groups, ranks, rank, "group"))
            return self.groups._groups[-1]

        self.shards = group(stage + first, stage + first + 1)
        self.statistics = group(first, first + 1, 4 + first, 5 + first)
        self.sums = group(*(across or [stage + rank % 2, stage + rank % 2 + 2]))
        bucket_group = SimpleNamespace(inter_distributed_optimizer_instance_group=self.sums)
        chunk = SimpleNamespace(bucket_groups=[bucket_group], expert_parallel_bucket_groups=[])
        self.optimizer: Any = SimpleNamespace(
            data_parallel_group=self.shards,
            get_grad_stats_parallel_group=lambda: self.statistics,
            ddp_config=SimpleNamespace(num_distributed_optimizer_instances=2),
            model_chunks=[chunk],
            distributed_optimizer_instance_id=rank // 2 % 2,
        )
        self.instance = OptimizerInstance(self.optimizer, self.layout)

    def without(self, *dead: int) -> Instances:
        self.groups._layout = self.layout
        live = frozenset(self.layout.workers).difference(dead)
        self.groups.enter(Generation(GenerationId(1), live, frozenset()), cast(Any, None))
        return self


def test_while_all_live_each_instance_has_its_groups() -> None:
    found = Instances(2).without()
    assert [each.members for each in (found.shards, found.statistics, found.sums)] == [(2, 3), (2, 3, 6, 7), (0, 2)]
    assert found.statistics.speaks


def test_without_a_rank_all_that_live_reduce_gradients_and_each_shard_counts_once() -> None:
    found = Instances(2).without(0)
    assert found.shards.members == (1, 2, 3)
    assert found.shards.stand_ins == {2: 2, 3: 1}
    assert found.shards.speaks, "its micro-batches' gradients are its own"
    assert found.sums.members == (2,), "all instances have added up already"
    assert found.statistics.members == (1, 2, 3, 4, 5, 6, 7)
    assert found.statistics.stand_ins == {2: 2, 3: 1, 6: 4, 7: 5}
    assert [Instances(rank).without(0).statistics.speaks for rank in range(1, 8)] == [True, True, False, True, True] + [
        False
    ] * 2


def test_groups_of_all_instances_have_their_results_in_one_place() -> None:
    keys = {rank: Instances(rank).without() for rank in range(8)}
    assert len({each.groups._key(each.shards) for each in keys.values()}) == STAGES
    assert len({each.groups._key(each.statistics) for each in keys.values()}) == 1


def test_a_shard_is_lost_with_all_its_owners() -> None:
    assert not Instances(1).groups.lost_shards(frozenset(range(8)) - {0, 3})
    assert Instances(1).groups.lost_shards(frozenset(range(8)) - {0, 2}) == [(0, 2)]


def test_the_first_instance_that_lives_writes_what_a_checkpoint_has() -> None:
    found = Instances(2).without(0)
    with found.instance.saving():
        assert found.optimizer.distributed_optimizer_instance_id == 0
    assert found.optimizer.distributed_optimizer_instance_id == 1
    with Instances(2).without(1).instance.saving():
        assert found.optimizer.distributed_optimizer_instance_id == 1


def test_instances_within_a_replica_are_refused() -> None:
    with pytest.raises(ValueError, match=r"instances 2 does not divide the 4 replicas, and ranks \[0, 1\] have parts"):
        Instances(0, across=[0, 1])


def test_groups_within_a_replica_are_joined_without_instances_too() -> None:
    group = FaultTolerantGroup(FaultTolerantGroups(), (1, 5), 1, "pipeline")
    assert alike(group, layout(1)) == {1: [0, 1, 2, 3], 5: [4, 5, 6, 7]}
    assert not alike(FaultTolerantGroup(FaultTolerantGroups(), (0, 1, 2, 3), 1, "replicas"), layout(1))
