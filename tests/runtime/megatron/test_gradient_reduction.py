# SPDX-License-Identifier: Apache-2.0
"""When Megatron's own start of a reduction runs, when none, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from adaptra_megatron.runtime.megatron.gradient_reduction import GradientReduction, _Replicas
from adaptra_megatron.runtime.megatron.refusals import UnsupportedFeatureError


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


def test_an_iteration_begins_with_whichever_bucket_group_comes_again() -> None:
    """In the first iteration chunks are reduced in another order than in those with hooks."""
    replicas, (one, two, three) = _Replicas(SimpleNamespace()), "123"  # type: ignore[arg-type]
    order = [one, two, three, three, two, one, three, two, one]
    assert [replicas.place(each) for each in order] == [0, 1, 2] * 3
