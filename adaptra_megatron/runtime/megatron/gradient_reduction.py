# SPDX-License-Identifier: Apache-2.0
"""What stands in for the start of Megatron's reductions of gradients, where sums around a straggler were asked for."""

from __future__ import annotations

import functools
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from adaptra_megatron.data_parallel.background import Background
from adaptra_megatron.data_parallel.peers import Peers
from adaptra_megatron.data_parallel.replica_sums import ReplicaSums
from adaptra_megatron.job.control_store import ControlStore
from adaptra_megatron.job.gathering import gather
from adaptra_megatron.runtime.megatron.refusals import UnsupportedFeatureError, refuse_sharded_gradients
from adaptra_megatron.schedule.all_reduce.stragglar import MOST_RANKS, has_stragglar


class _Token(NamedTuple):
    """Entry of a member, of which the first one's names the group's place in the job's store."""

    token: str


class _Replicas:
    """One group of them."""

    def __init__(self, sums: ReplicaSums) -> None:
        self.sums = sums
        self._reduced: list[Any] = []

    def begins_iteration(self, bucket_group: Any) -> bool:
        """Return whether the reduction of this bucket group is the first of an iteration.

        Each is reduced once in an iteration, in an order that the first iteration does not have yet.
        """
        first = not self._reduced or any(each is bucket_group for each in self._reduced)
        self._reduced = [bucket_group] if first else [*self._reduced, bucket_group]
        return first


class GradientReduction:
    """All groups of replicas that this process is in: those of dense parameters, and of experts'."""

    def __init__(self, mode: str, timeout_s: float | None) -> None:
        """`mode`: see `ReplicaSums`. `timeout_s`: longest wait for a replica; None: that of the job's store."""
        self._mode, self._timeout_s = mode, timeout_s
        self._groups: dict[tuple[int, ...], _Replicas] = {}
        self._background = Background()

    @property
    def used(self) -> dict[str, int]:
        """How many reductions of bucket groups each algorithm had a part in."""
        return dict(sum((each.sums.used for each in self._groups.values()), Counter[str]()))

    def start(self, stock: Callable[..., Any], bucket_group: Any, *given: Any, **keywords: Any) -> None:
        """As Megatron's `_ParamAndGradBucketGroup.start_grad_sync` (param_and_grad_buffer.py), which is `stock`.

        Gradients are checked and scaled as there. With --overlap-grad-reduce the sums are made behind the computation,
        and the bucket group gets a handle; else they are made when this returns. Raises UnsupportedFeatureError for a
        distributed optimizer, whose gradients are not summed up as a whole, PeerError when a replica fails.
        """
        settings = bucket_group.ddp_config
        if settings.use_distributed_optimizer:
            refuse_sharded_gradients(self._mode)
        if bucket_group.data_parallel_group.size() == 1:
            stock(bucket_group, *given, **keywords)
            return
        if bucket_group.is_first_batch and bucket_group.grad_reduce_handle is not None:
            return
        assert bucket_group.grad_reduce_handle is None, "two reductions of a bucket group at once"
        check_gradients(bucket_group)
        for bucket in bucket_group.buckets:
            if bucket.gradient_scaling_factor != 1.0:
                bucket.grad_data *= bucket.gradient_scaling_factor
        group = self._group(bucket_group)
        values = [bucket.grad_data for bucket in bucket_group.buckets]
        divisor = bucket_group.data_parallel_group.size() if settings.average_in_collective else 1
        task = functools.partial(_reduce, group.sums, values, divisor, measures=group.begins_iteration(bucket_group))
        if settings.overlap_grad_reduce:
            bucket_group.grad_reduce_handle = self._background.begin(task, values[0].device)
        else:
            task()

    def close(self) -> None:
        """End the thread."""
        self._background.close()

    def _group(self, bucket_group: Any) -> _Replicas:
        """Those of a bucket group. The first time collective over its replicas, which come to it in the same order."""
        ranks = tuple(dist.get_process_group_ranks(bucket_group.data_parallel_group))
        if ranks not in self._groups:
            if self._mode == "stragglar" and not has_stragglar(len(ranks)):
                raise UnsupportedFeatureError(
                    f"--adaptra-gradient-sync stragglar does not run with {len(ranks)} replicas: it needs at most "
                    f"{MOST_RANKS}, or a power of two. Use auto or hidden"
                )
            token = gather(_Token(secrets.token_hex(16)), bucket_group.data_parallel_group)[0].token
            control = ControlStore.of_job(token)
            timeout_s = control.timeout_s if self._timeout_s is None else self._timeout_s
            device = bucket_group.buckets[0].grad_data.device
            peers = Peers.meet(control, "sums", ranks, dist.get_rank(), timeout_s, device)
            self._groups[ranks] = _Replicas(ReplicaSums(peers, self._mode))
        return self._groups[ranks]


def _reduce(sums: ReplicaSums, values: Sequence[torch.Tensor], divisor: int, *, measures: bool) -> None:
    sums.sum_up(values, measures=measures)
    if divisor != 1:
        for each in values:
            each /= divisor


def check_gradients(bucket_group: Any) -> None:
    """Check them as Megatron's `start_grad_sync` does where its settings say so. Raises what Megatron's check does."""
    settings = bucket_group.ddp_config
    if settings.check_for_nan_in_grad or settings.check_for_large_grads:
        bucket_group.check_grads(
            check_for_nan_or_inf=settings.check_for_nan_in_grad,
            check_for_large=settings.check_for_large_grads,
        )
