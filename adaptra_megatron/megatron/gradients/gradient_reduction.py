# SPDX-License-Identifier: Apache-2.0
"""Replace the start of Megatron's gradient reductions by sums that work around a straggler
(--adaptra-gradient-sync), which run behind the computation, in a thread, in the order in which they begin.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import queue
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.gathering import gather
from adaptra_megatron.gradsync.all_reduce_algorithms import ALGORITHMS
from adaptra_megatron.gradsync.peer_messages import Peers
from adaptra_megatron.gradsync.replica_sums import ReplicaSums
from adaptra_megatron.megatron.feature_refusals import sharded_gradients_error
from adaptra_megatron.megatron.refusals import UnsupportedFeatureError
from adaptra_megatron.transport.gpu.cuda_device import DeviceThread


class Handle:
    """Handle of a task in the background, with the methods that Megatron uses of torch's."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def wait(self) -> None:
        """Wait until the task is complete, and make later GPU work wait for it. Raises the task's error.

        Needs no deadline: each exchange in it has one.
        """
        done = self._future.result()
        if done is not None:
            torch.cuda.current_stream().wait_event(done)


class Background:
    """Daemon thread that runs tasks in order. It starts with the first task."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._streams: dict[torch.device, Any] = {}

    def begin(self, task: Callable[[], None], device: torch.device) -> Handle:
        """Run `task` in the thread. On `device`, its work runs after everything launched so far."""
        if device.type == "cpu":
            return self._submit(task)
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        ready: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record(torch.cuda.current_stream(device))
        return self._submit(functools.partial(self._run_on_gpu, task, ready, self._streams[device]))

    def _submit(self, task: Callable[[], Any]) -> Handle:
        if self._thread is None:
            self._thread = DeviceThread(self._run, "adaptra-gradients")
            self._thread.start()
        future: Future[Any] = Future()
        self._tasks.put((task, future))
        return Handle(future)

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, future = item
            try:
                future.set_result(task())
            except BaseException as error:  # raised by the handle's wait
                future.set_exception(error)

    @staticmethod
    def _run_on_gpu(task: Callable[[], None], ready: Any, stream: Any) -> Any:
        with torch.cuda.device(stream.device), torch.cuda.stream(stream):
            stream.wait_event(ready)
            task()
            done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
        return done

    def close(self) -> None:
        """End the thread after the tasks that have begun. Does not wait for it."""
        self._tasks.put(None)


class _Token(NamedTuple):
    """Entry of one member; the first member's token names the group's part of the job's store."""

    token: str


class _Replicas:
    """One group of replicas, and the sums over it."""

    def __init__(self, sums: ReplicaSums) -> None:
        self.sums = sums
        self._reduced: list[Any] = []

    def place(self, bucket_group: Any) -> int:
        """Return the number of bucket groups that were reduced before this one in this iteration.

        Each is reduced once per iteration. The order is constant only from the second iteration on.
        """
        if any(each is bucket_group for each in self._reduced):
            self._reduced = []
        self._reduced.append(bucket_group)
        return len(self._reduced) - 1


class GradientReduction:
    """Reductions over this process's groups of replicas: for dense parameters, and for experts'."""

    def __init__(self, mode: str, timeout_s: float | None) -> None:
        """`mode`: see `ReplicaSums`. `timeout_s`: longest wait for a replica; None: the timeout of the job's store."""
        self._mode, self._timeout_s = mode, timeout_s
        self._groups: dict[tuple[int, ...], _Replicas] = {}
        self._background = Background()

    @property
    def used(self) -> dict[str, int]:
        """Return the number of bucket-group reductions in which each algorithm was used."""
        return dict(sum((each.sums.used for each in self._groups.values()), Counter[str]()))

    def start(self, stock: Callable[..., Any], bucket_group: Any, *given: Any, **keywords: Any) -> None:
        """Start a reduction in place of Megatron's `_ParamAndGradBucketGroup.start_grad_sync` (`stock`).

        Gradients are checked and scaled as in stock (param_and_grad_buffer.py). With --overlap-grad-reduce the sums run
        during the computation, and the bucket group gets a handle; else they are complete on return. With several
        instances of the distributed optimizer, Megatron reduces within each instance, and this sums the shards over
        instances.

        Raises UnsupportedFeatureError with a single instance, whose gradients are reduced by shards; PeerError if a
        replica fails.
        """
        settings = bucket_group.ddp_config
        sharded = settings.use_distributed_optimizer
        if sharded and not _has_instances(bucket_group):
            raise sharded_gradients_error(self._mode)
        replicas = _summed_over(bucket_group)
        if replicas.size() == 1:
            stock(bucket_group, *given, **keywords)
            return
        # As stock: in the first iteration finish_grad_sync starts each group, also one that is started already.
        if bucket_group.is_first_batch and bucket_group.grad_reduce_handle is not None:
            return
        assert bucket_group.grad_reduce_handle is None, "two reductions of a bucket group at once"
        reduced = None
        if sharded:
            with one_instance(bucket_group):
                stock(bucket_group, *given, **keywords)
            # The sum over instances needs the sum within this one: the task waits for it, not this thread.
            reduced, bucket_group.grad_reduce_handle = bucket_group.grad_reduce_handle, None
            values = _shards(bucket_group)
        else:
            check_gradients(bucket_group)
            prepare_gradients(bucket_group)
            values = [bucket.grad_data for bucket in bucket_group.buckets]
        group = self._group(replicas, values[0].device)
        # In stock ReduceOp.AVG divides then; otherwise the scaling factor of the gradients has the divisor.
        divisor = replicas.size() if settings.average_in_collective else 1
        task = functools.partial(_reduce, group.sums, values, group.place(bucket_group), divisor, reduced)
        if settings.overlap_grad_reduce:
            bucket_group.grad_reduce_handle = self._background.begin(task, values[0].device)
        else:
            task()

    def finish(self, stock: Callable[..., Any], bucket_group: Any, *given: Any, **keywords: Any) -> None:
        """Finish a reduction in place of Megatron's `finish_grad_sync` (`stock`).

        With several optimizer instances stock would wait for a stream that has no work; so it waits for the handle, as
        with one instance.
        """
        with one_instance(bucket_group) if _has_instances(bucket_group) else contextlib.nullcontext():
            stock(bucket_group, *given, **keywords)

    def close(self) -> None:
        """End the thread."""
        self._background.close()

    def _group(self, replicas: Any, device: torch.device) -> _Replicas:
        """Return the sums over a process group. The first call is collective over the group; all ranks call in the same
        order.
        """
        ranks = tuple(dist.get_process_group_ranks(replicas))
        if ranks not in self._groups:
            running = [name for name, each in ALGORITHMS.items() if each.supports(len(ranks))]
            if self._mode not in ("auto", *running):
                raise UnsupportedFeatureError(
                    f"--adaptra-gradient-sync {self._mode} does not run with {len(ranks)} replicas: it needs "
                    f"{ALGORITHMS[self._mode].needs}. Use {' or '.join(('auto', *running))}"
                )
            token = gather(_Token(secrets.token_hex(16)), replicas)[0].token
            control = ControlStore.of_job(token)
            timeout_s = control.timeout_s if self._timeout_s is None else self._timeout_s
            peers = Peers.meet(control, "sums", ranks, dist.get_rank(), timeout_s, device)
            self._groups[ranks] = _Replicas(ReplicaSums(peers, self._mode))
        return self._groups[ranks]


def _reduce(sums: ReplicaSums, values: Sequence[torch.Tensor], place: int, divisor: int, reduced: Any) -> None:
    """Sum `values` over replicas, once the operation `reduced` that computes them has ended (None: it has already)."""
    if reduced is not None:
        reduced.wait()
    sums.sum_up(values, place)
    if divisor != 1:
        for each in values:
            each /= divisor


def _has_instances(bucket_group: Any) -> bool:
    """Return whether the distributed optimizer has several instances, even while `one_instance` hides the setting."""
    return getattr(bucket_group, "inter_distributed_optimizer_instance_group", None) is not None


def _summed_over(bucket_group: Any) -> Any:
    """Return the group over which gradients, or shards of them, are summed here."""
    sharded = bucket_group.ddp_config.use_distributed_optimizer
    return bucket_group.inter_distributed_optimizer_instance_group if sharded else bucket_group.data_parallel_group


@contextlib.contextmanager
def one_instance(bucket_group: Any) -> Iterator[None]:
    """Make Megatron reduce within one instance of the distributed optimizer, as if there were no others."""
    settings = bucket_group.ddp_config
    # A copy: the bucket groups of a chunk share their settings.
    bucket_group.ddp_config = dataclasses.replace(settings, num_distributed_optimizer_instances=1)
    try:
        yield
    finally:
        bucket_group.ddp_config = settings


def _shards(bucket_group: Any) -> list[torch.Tensor]:
    """Return this rank's shard of each bucket, where Megatron writes the sums within its instance."""
    shards, own = bucket_group.cached_grad_buffer_shard_list, bucket_group.intra_distributed_optimizer_instance_rank
    for index, bucket in enumerate(bucket_group.buckets):
        if shards[index] is None:  # where it is set to reduce buckets as a whole
            size = bucket_group.intra_distributed_optimizer_instance_size
            shards[index] = list(bucket.grad_data.chunk(size))
    return [shard[own] for shard in shards]


def prepare_gradients(bucket_group: Any) -> None:
    """Copy gradients into the buckets and scale them, as Megatron's `start_grad_sync` does."""
    for bucket in bucket_group.buckets:
        # From 0.17 on gradients may be accumulated elsewhere, in another type; `finish_grad_sync` puts sums there.
        for parameter in getattr(bucket, "params_with_extra_main_grads", ()):
            if getattr(parameter, "main_grad_copy_in_grad_buffer", None) is not None:
                parameter.main_grad_copy_in_grad_buffer.copy_(parameter.main_grad)
    for bucket in bucket_group.buckets:
        if bucket.gradient_scaling_factor != 1.0:
            bucket.grad_data *= bucket.gradient_scaling_factor


def check_gradients(bucket_group: Any) -> None:
    """Check gradients as Megatron's `start_grad_sync` does with these settings. Raises the error of Megatron's
    check.
    """
    settings = bucket_group.ddp_config
    if settings.check_for_nan_in_grad or settings.check_for_large_grads:
        bucket_group.check_grads(
            check_for_nan_or_inf=settings.check_for_nan_in_grad,
            check_for_large=settings.check_for_large_grads,
        )
