# SPDX-License-Identifier: Apache-2.0
"""When Megatron's own start of a reduction runs, when none, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from adaptra_megatron.megatron.gradients.gradient_reduction import (
    GradientReduction,
    _Replicas,
    prepare_gradients,
)
from adaptra_megatron.megatron.refusals import UnsupportedFeatureError


def bucket_group(*, replicas: int, **settings: Any) -> Any:
    """As much of Megatron's as is looked at before anything is reduced."""
    return SimpleNamespace(
        ddp_config=SimpleNamespace(use_distributed_optimizer=False, **settings),
        data_parallel_group=SimpleNamespace(size=lambda: replicas),
        is_first_batch=True,
        grad_reduce_handle="begun",
    )


def test_one_replica_is_left_to_stock() -> None:
    called: list[Any] = []
    group = bucket_group(replicas=1)
    GradientReduction("stragglar", None).start(lambda *given, **named: called.append((given, named)), group, True)
    assert called == [((group, True), {})]


def test_what_the_first_batch_has_begun_is_not_begun_again() -> None:
    def never(*given: Any) -> None:
        raise AssertionError("stock's")

    reduction = GradientReduction("stragglar", None)
    reduction.start(never, bucket_group(replicas=4))
    assert reduction.used == {}


def test_sharded_gradients_are_refused_where_the_command_line_did_not_show_them() -> None:
    group = bucket_group(replicas=4)
    group.ddp_config.use_distributed_optimizer = True
    with pytest.raises(UnsupportedFeatureError, match="--adaptra-gradient-sync hidden .*distributed optimizer"):
        GradientReduction("hidden", None).start(print, group)


def test_a_number_of_replicas_without_a_plan_is_refused_with_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda replicas: list(range(65)))
    said = "stragglar does not run with 65 replicas: it needs at most 64, or a power of two. Use auto or hidden$"
    with pytest.raises(UnsupportedFeatureError, match=said):
        GradientReduction("stragglar", None)._group("replicas", torch.device("cpu"))


def test_gradients_that_are_accumulated_elsewhere_are_summed_up_too() -> None:
    """Megatron from 0.17 on has some of them in another type; the factor is that of what is in the buffer."""
    buffer = torch.zeros(3)
    elsewhere = SimpleNamespace(main_grad=torch.tensor([2.0, 4.0], dtype=torch.float64))
    elsewhere.main_grad_copy_in_grad_buffer = buffer[:2]
    without = SimpleNamespace(main_grad=torch.ones(1))
    bucket = SimpleNamespace(
        grad_data=buffer, gradient_scaling_factor=0.5, params_with_extra_main_grads=[elsewhere, without]
    )
    prepare_gradients(SimpleNamespace(buckets=[bucket]))
    assert buffer.tolist() == [1.0, 2.0, 0.0]


@dataclass(frozen=True)
class Settings:
    """As much of DistributedDataParallelConfig."""

    num_distributed_optimizer_instances: int
    overlap_grad_reduce: bool = True


@pytest.mark.parametrize("instances", [1, 2])
def test_the_end_of_a_reduction_waits_as_for_one_instance(instances: int) -> None:
    """For several, Megatron waits for a stream on which our sums are not."""
    group = SimpleNamespace(ddp_config=Settings(instances))
    if instances > 1:
        group.inter_distributed_optimizer_instance_group = "the others"
    seen: list[Settings] = []
    GradientReduction("auto", None).finish(lambda called: seen.append(called.ddp_config), group)
    assert seen == [Settings(1)]
    assert group.ddp_config == Settings(instances)


def test_an_iteration_begins_with_whichever_bucket_group_comes_again() -> None:
    """In the first iteration chunks are reduced in another order than in those with hooks."""
    replicas, (one, two, three) = _Replicas(SimpleNamespace()), "123"  # type: ignore[arg-type]
    order = [one, two, three, three, two, one, three, two, one]
    assert [replicas.place(each) for each in order] == [0, 1, 2] * 3
