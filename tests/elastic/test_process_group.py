# SPDX-License-Identifier: Apache-2.0
"""Rules of process groups that survive failures: what a failed member alone had is refused, and no wait is endless."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from megatron.core import timers
from torch.distributed import HashStore

from adaptra_megatron.common.layout import Cell, JobLayout, Worker
from adaptra_megatron.common.sealed_store import SealedStore
from adaptra_megatron.elastic import process_group_manager
from adaptra_megatron.elastic.failure_errors import EpochEndedError, LateRankError, is_communication
from adaptra_megatron.elastic.fence import Fence, FencedGroup, OperationStillRunsError
from adaptra_megatron.elastic.generation import Generation, GenerationId
from adaptra_megatron.elastic.process_group import COUNTS, FaultTolerantGroup, UnwrittenError
from adaptra_megatron.elastic.process_group_manager import FaultTolerantGroups

REPLICAS = 3


class Native:
    """Torch's own group of the live members, whose operations are done at once and change nothing."""

    is_gloo = True

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *_given: Done()


class Done:
    def wait(self, _timeout: timedelta) -> None:
        pass


class Stuck:
    """An operation whose peer neither comes nor fails; torch counts it as completed once it is aborted."""

    def __init__(self, *, aborted: bool = False) -> None:
        self._aborted = aborted

    def wait(self, _timeout: timedelta) -> None:
        raise RuntimeError("Timed out waiting 20ms for recv operation to complete")

    def is_completed(self) -> bool:
        return self._aborted


class OverNccl:
    """Torch's handle of an operation over NCCL that lasts longer than a slice: `WorkNCCL.wait` with a timeout."""

    aborted = False

    def wait(self, timeout: timedelta | None = None) -> None:
        self.aborted |= timeout is not None
        if self.aborted:
            raise RuntimeError("Some NCCL operations have failed or timed out.")

    def is_completed(self) -> bool:
        return self.aborted


def test_a_wait_for_an_operation_over_nccl_aborts_no_communicator() -> None:
    """It makes the stream wait. With a timeout torch aborts the communicator once that has passed."""
    noted: list[Any] = []
    work = OverNccl()
    native = SimpleNamespace(allreduce=lambda *_: work)
    group = FencedGroup(native, "data-parallel", (0, 1), None, lambda *found: noted.append(found))
    groups = FaultTolerantGroups()
    groups.wait_for(group.allreduce([torch.ones(1)]))
    assert not work.aborted
    assert noted == [(work, "allreduce of data-parallel over ranks 0, 1")]


def without_rank_1(
    *, replicas: int = REPLICAS, failed: tuple[int, ...] = (1,)
) -> tuple[FaultTolerantGroups, FaultTolerantGroup]:
    """The groups of rank 0 and the one of all data-parallel ranks, once rank 1 has failed, or those of `failed`."""
    groups = FaultTolerantGroups()
    groups._layout = JobLayout(0, {each: Worker(Cell(each, 0), 0, "host", "boot/net") for each in range(replicas)})
    group = FaultTolerantGroup(groups, range(replicas), 0, "data#0")
    groups._groups.append(group)
    groups.enter(Generation(GenerationId(1), frozenset(range(replicas)).difference(failed), frozenset()), None)  # type: ignore[arg-type]
    groups._natives[group, "cpu"] = Native()  # type: ignore[assignment]
    groups._timeout_s = 0.1
    return groups, group


def one() -> torch.Tensor:
    return torch.ones(REPLICAS)


def broadcast_of_rank_1(group: FaultTolerantGroup) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = 1
    group.broadcast([one()], options)


def product(group: FaultTolerantGroup) -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.PRODUCT
    group.allreduce([one()], options)


REFUSED: dict[str, Callable[[FaultTolerantGroup], object]] = {
    "broadcast of what a failed rank had": broadcast_of_rank_1,
    "product": product,
    "scatter": lambda group: group.scatter([one()], [[one()] * REPLICAS], dist.ScatterOptions()),
    "reduce-scatter": lambda group: group.reduce_scatter([one()], [[one()] * REPLICAS], dist.ReduceScatterOptions()),
    "all-to-all": lambda group: group.all_to_all_single(one(), one(), [], [], dist.AllToAllOptions()),
}


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in-a-call"])
@pytest.mark.parametrize("name", REFUSED)
def test_operations_that_need_a_failed_member_are_refused_as_this_rank_s_error(name: str, inside: bool) -> None:
    groups, group = without_rank_1()
    groups._inside = inside
    with pytest.raises(RuntimeError, match="data#0") as refusal:
        REFUSED[name](group)
    assert not is_communication(refusal.value), "or it would be repeated for ever"


def test_means_are_over_the_live_outside_of_calls_and_refused_inside() -> None:
    groups, group = without_rank_1()
    options, given = dist.AllreduceOptions(), one()
    options.reduceOp = dist.ReduceOp.AVG
    group.allreduce([given], options).wait()
    assert torch.equal(given, one() / 2)
    groups._inside = True
    with pytest.raises(RuntimeError, match="means only outside of calls"):
        group.allreduce([given], options)


def test_means_of_gradients_are_over_all_replicas_and_their_counts_are_sums() -> None:
    groups, group = without_rank_1()
    groups._inside = True
    options, given, count = dist.AllreduceCoalescedOptions(), one(), torch.ones(1, dtype=torch.int32)
    setattr(given, COUNTS, count)
    options.reduceOp = dist.ReduceOp.AVG
    group.allreduce_coalesced([given], options).wait()
    assert torch.equal(given, one() / REPLICAS)
    assert count.item() == 1


def parts_of(whole: torch.Tensor) -> list[torch.Tensor]:
    return list(whole.chunk(REPLICAS))


GATHERS: dict[str, Callable[[FaultTolerantGroup, torch.Tensor], object]] = {
    "list": lambda group, whole: group.allgather([parts_of(whole)], [torch.zeros(1)]),
    "one tensor, by torch's oldest name": lambda group, whole: group._allgather_base(whole, torch.zeros(1)),
    "one tensor": lambda group, whole: group.all_gather_single(whole, torch.zeros(1)),
    "coalesced": lambda group, whole: group.all_gather_single_coalesced([whole], [torch.zeros(1)]),
    "coalesced, by its older name": lambda group, whole: group.allgather_into_tensor_coalesced(
        [whole], [torch.zeros(1)]
    ),
    "at the root": lambda group, whole: group.gather([parts_of(whole)], [torch.zeros(1)], None),
    "at another root": lambda group, _: group.gather([], [torch.zeros(1)], None),
}


@pytest.mark.parametrize("name", GATHERS)
def test_gathering_what_a_failed_rank_had_is_refused_unless_its_part_is_ignored(name: str) -> None:
    groups, group = without_rank_1()
    whole = torch.full((REPLICAS,), -1.0)
    with pytest.raises(UnwrittenError) as refusal:
        GATHERS[name](group, whole)
    assert (refusal.value.group, refusal.value.missing) == ("data#0", (1,))
    assert not is_communication(refusal.value)
    with groups.ignoring_failed_members():
        GATHERS[name](group, whole)
    assert whole[1].item() == -1.0


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "in-a-call"])
def test_parameters_are_gathered_into_place_over_nccl(inside: bool) -> None:
    """As copies of all parameters would cost time and memory in each iteration."""
    groups, group = without_rank_1(failed=())
    groups._inside = inside
    gathered: list[torch.Tensor] = []

    def gather(output: torch.Tensor, given: torch.Tensor, _options: object) -> Any:
        gathered.append(output.copy_(given.repeat(REPLICAS)))
        return Done()

    groups._natives[group, "cpu"] = SimpleNamespace(is_gloo=False, _allgather_base=gather)  # type: ignore[assignment]
    whole = [torch.zeros(REPLICAS), torch.zeros(2 * REPLICAS)]
    group.all_gather_single_coalesced(whole, [torch.ones(1), torch.full((2,), 2.0)]).wait()
    assert [each.tolist() for each in whole] == [[1.0] * REPLICAS, [2.0] * 2 * REPLICAS]
    assert [each is output for each, output in zip(gathered, whole, strict=True)] == [inside] * 2


def called_in(module: str, act: Callable[[], object]) -> Callable[[], object]:
    """`act`, called by code of a module of this name."""
    called: Callable[[], object] = eval("lambda: act()", {"__name__": module, "act": act})
    return called


@pytest.mark.parametrize("caller", ["megatron.core.timers", "megatron.training.dist_signal_handler"])
def test_callers_that_set_the_output_before_may_lack_a_part(caller: str) -> None:
    _, group = without_rank_1()
    whole = torch.full((REPLICAS,), -1.0)
    gather = functools.partial(group.allgather, [parts_of(whole)], [torch.zeros(1)])
    by_torch = called_in("torch.distributed.distributed_c10d", gather)
    called_in(caller, by_torch)()
    assert whole[1].item() == -1.0
    with pytest.raises(UnwrittenError):
        called_in(f"{caller}_of_another", called_in(caller, called_in("a.script", by_torch)))()


def test_megatrons_timers_are_such_a_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    _, group = without_rank_1()
    monkeypatch.setattr(dist, "get_world_size", lambda: REPLICAS)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    monkeypatch.setattr(timers, "dist_all_gather_func", group._allgather_base)
    assert timers.Timers(0, "max")._get_elapsed_time_all_ranks(["forward"], False, False)[1].item() == 0.0


def test_size_and_rank_stay_those_of_the_start() -> None:
    _, group = without_rank_1()
    assert (group.size(), group.rank(), group.members) == (REPLICAS, 0, (0, 2))


def test_a_wait_for_a_member_that_neither_comes_nor_fails_ends_after_the_timeout() -> None:
    groups, _ = without_rank_1()
    with pytest.raises(LateRankError, match=r"longer than 0\.1 s"):
        groups.wait_for(Stuck())


def test_a_wait_ends_with_its_generation() -> None:
    groups, _ = without_rank_1()
    groups.ended.set()
    with pytest.raises(EpochEndedError, match="generation 1 has ended"):
        groups.wait_for(Stuck())


class StuckNative:
    """Torch's own group over NCCL."""

    def __init__(self, *, aborted: bool) -> None:
        self.allreduce = functools.partial(Stuck, aborted=aborted)

    def abort(self) -> None:
        pass


def stuck_fence(*, aborted: bool) -> Fence:
    fence = Fence()
    for name, members in (("data#0", (0, 2)), ("tensor#4", (2, 3)), ("unused", (2,))):
        group = fence.guarded(StuckNative(aborted=aborted), name, members, None)
        if name != "unused":
            group.allreduce()
    fence.close()
    for abort in fence._aborts.values():
        abort.join(20.0)
    return fence


class AbortedAfter:
    """A communicator over NCCL whose kernels are queued behind those of another one, or whose abort fails."""

    def __init__(self, other: threading.Event | None = None, error: str = "") -> None:
        self.aborted = threading.Event()
        self._other, self._error = other, error

    def abort(self) -> None:
        if self._error:
            raise RuntimeError(self._error)
        if self._other is not None:
            assert self._other.wait(30.0)
        self.aborted.set()


def test_communicators_are_aborted_at_once_and_none_keeps_the_others() -> None:
    behind = AbortedAfter()
    natives = AbortedAfter(behind.aborted), behind
    fence = Fence()
    for number, native in enumerate(natives):
        fence.guarded(native, f"data#{number}", (0, 1), None)
    fence.close()
    fence.wait(20.0)
    assert all(native.aborted.is_set() for native in natives)


def test_a_communicator_that_cannot_be_aborted_ends_this_rank_alone() -> None:
    fence, other = Fence(), AbortedAfter()
    fence.guarded(AbortedAfter(error="unhandled cuda error"), "data#0", (0, 1), None)
    fence.guarded(other, "data#1", (0, 1), None)
    fence.close()
    with pytest.raises(OperationStillRunsError, match=r"data#0 over ranks 0, 1 \(unhandled cuda error\)"):
        fence.wait(20.0)
    assert other.aborted.is_set()
    fence = Fence()
    fence.guarded(AbortedAfter(threading.Event()), "data#2", (0, 1), None)
    fence.close()
    with pytest.raises(OperationStillRunsError, match="the abort of the communicator of data#2 over ranks 0, 1"):
        fence.wait(0.1)


def test_a_training_thread_in_the_driver_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, native = FaultTolerantGroups(), AbortedAfter()
    groups._fence.guarded(native, "data#0", (0, 1), None)
    in_driver = threading.Event()
    monkeypatch.setattr(process_group_manager, "time", SimpleNamespace(sleep=lambda _: in_driver.wait(20.0)))
    groups.interrupt()
    assert not native.aborted.wait(0.2), "on CPUs each wait has checks"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    groups.interrupt()
    groups.ended.clear()  # as it enters the next generation
    in_driver.set()
    assert not native.aborted.wait(0.2), "those of the next generation go on"
    groups.interrupt()
    assert native.aborted.wait(20.0)


def test_synchronous_operations_over_nccl_return_handles() -> None:
    """torch returns none where the caller is to be made to wait, and ours wait with checks."""

    def allreduce(_tensors: Any, options: Any) -> Any:
        return OverNccl() if options.asyncOp else None

    group = FencedGroup(SimpleNamespace(allreduce=allreduce), "data", (0, 1), None, lambda *_: None)
    options = dist.AllreduceOptions()
    options.asyncOp = False
    FaultTolerantGroups().wait_for(group.allreduce([torch.ones(1)], options))


def test_a_barrier_in_a_call_holds_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron writes that a checkpoint is complete after one."""
    groups, group = without_rank_1()
    monkeypatch.setattr(groups, "native", lambda *_: Native())
    waited: list[bool] = []
    monkeypatch.setattr(groups, "synchronize", lambda: waited.append(groups.is_inside))
    with groups.call():
        group.barrier()
    assert waited == [True]


@pytest.mark.parametrize("is_gloo", [True, False])
def test_a_barrier_leaves_no_tensor_to_a_thread_of_gloo(is_gloo: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script often ends after one, and releasing a tensor in another thread needs Python."""
    groups, group = without_rank_1()
    launched: list[str] = []

    def launch(name: str) -> Callable[..., Any]:
        return lambda *_given: launched.append(name) or Done()

    native = SimpleNamespace(is_gloo=is_gloo, barrier=launch("barrier"), allreduce=launch("allreduce"))
    monkeypatch.setattr(groups, "native", lambda *_: native)
    group.barrier()
    assert launched == ["barrier" if is_gloo else "allreduce"]


def test_an_operation_that_does_not_end_is_named() -> None:
    said = r"^allreduce of data#0 over ranks 0, 2 has not ended [0-9.]+ s after"
    with pytest.raises(OperationStillRunsError, match=said):
        stuck_fence(aborted=False).wait(0.1)


def test_a_kernel_that_does_not_end_is_reported_with_the_last_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = threading.Event()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: ends.wait(60.0))
    last = "allreduce of data#0 over ranks 0, 2; allreduce of tensor#4 over ranks 2, 3"
    said = rf"^an unknown kernel on device 3 \(launched last over NCCL: {last}\) has not ended [0-9.]+ s after"
    with pytest.raises(OperationStillRunsError, match=said):
        stuck_fence(aborted=True).wait(0.1)
    with pytest.raises(OperationStillRunsError, match=r"launched last over NCCL: nothing"):
        Fence().wait(0.1)
    ends.set()
    stuck_fence(aborted=True).wait(60.0)


def test_a_device_that_hangs_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def record(self) -> None:
            pass

        def query(self) -> bool:
            return False

    groups, _ = without_rank_1()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    with pytest.raises(LateRankError, match="the device has not done its work within 0.1 s"):
        groups.synchronize()
    groups.ended.set()
    with pytest.raises(EpochEndedError):
        groups.synchronize()


@pytest.mark.parametrize("ends", ["it fails, too", "it never comes"])
def test_a_result_is_not_expected_of_a_holder_that_has_failed(ends: str) -> None:
    """Rank 2 was to give a result of the generation before; then the operation is carried out among those that live."""

    class NeverThere:
        def peek(self, _key: str) -> None:
            return None

    groups, group = without_rank_1()
    causes: list[Exception] = []

    def recover(cause: Exception) -> None:
        causes.append(cause)
        groups.ended.clear()
        groups.kept.look_nowhere()

    groups._recover = recover
    groups.kept.found_with({groups._key(group): 2}, cast(Any, NeverThere()), 0.1, groups.check)
    if ends == "it fails, too":
        groups.ended.set()
    given = one()
    group.allreduce([given], dist.AllreduceOptions()).wait()
    assert [type(cause) for cause in causes] == [EpochEndedError if ends == "it fails, too" else LateRankError]
    assert groups.operations() == {groups._key(group): 1}
    assert torch.equal(given, one())


def test_a_gather_that_a_second_failure_interrupts_is_done_again_before_the_operation_over_all_ranks() -> None:
    """Others had ended theirs, and gather again as they come to that operation: one that did not would wait there."""
    groups, group = without_rank_1()
    done: list[str] = []

    def recover(_cause: Exception) -> None:
        groups.enter(Generation(GenerationId(2), frozenset({0}), frozenset()), None)  # type: ignore[arg-type]
        groups._natives[group, "cpu"] = Native()  # type: ignore[assignment]

    def operate(name: str, *, renewed: bool) -> None:
        def launch(*_given: Any) -> Any:
            done.append(name)
            if len(done) == 1:
                raise EpochEndedError("rank 2 has failed, too")
            return Done()

        groups.run(group, [one()], launch, renewed=renewed)

    groups._recover = recover
    groups.gather = lambda: operate("gather", renewed=True)
    operate("sum", renewed=False)
    assert done == ["gather", "gather", "sum"]


def test_a_result_that_others_have_after_a_failure_in_a_gather_is_taken_from_them() -> None:
    """They had ended the operation before which this rank gathers: to carry it out once more would pair it with their
    next."""
    store, launched = SealedStore(HashStore(), bytes(32), "here"), list[str]()
    groups, group = without_rank_1()
    group.broadcast([2 * one()], dist.BroadcastOptions())
    groups.kept.publish(store, [groups._key(group)])
    groups, group = without_rank_1()
    groups.gather = lambda: groups.kept.found_with({groups._key(group): 2}, store, 0.1, groups.check)
    given = one()
    groups.run(group, [given], lambda *_given: launched.append("again"))
    assert not launched
    assert torch.equal(given, 2 * one())


def test_a_rank_that_fails_while_others_connect_over_nccl_holds_none_of_them_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connects, ends = threading.Event(), threading.Event()

    class Connecting:
        def eager_connect_single_device(self, device: torch.device) -> None:
            assert device == torch.device("cuda", 3)
            connects.set()
            ends.wait(60.0)

    groups, group = without_rank_1()
    groups._store, groups._timeout_s = HashStore(), 60.0
    monkeypatch.setattr(process_group_manager, "nccl_group", lambda *_given: Connecting())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    threading.Thread(target=lambda: connects.wait(60.0) and groups.ended.set()).start()
    with pytest.raises(EpochEndedError):
        groups.native(group, torch.device("cuda"))
    assert connects.is_set()
    ends.set()


@pytest.mark.parametrize("name", ["scatter", "reduce-scatter", "all-to-all"])
def test_a_result_that_differs_by_rank_is_taken_from_no_other(name: str) -> None:
    """A rank of another group has failed; rank 1 has ended the operation, and rank 0 has not."""
    store = SealedStore(HashStore(), bytes(32), "here")
    groups, group = without_rank_1(failed=())
    REFUSED[name](group)
    groups.kept.publish(store, [groups._key(group)])
    groups, group = without_rank_1(failed=())
    groups.kept.found_with({groups._key(group): 1}, store, 0.1, groups.check)
    with pytest.raises(RuntimeError, match=r"operation 0 of \w+ is lost: .*differs between ranks") as lost:
        REFUSED[name](group)
    assert not is_communication(lost.value)


@pytest.fixture
def uninstalled(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Puts back after the test what fault-tolerant groups change when they are installed.

    torchrun and `adaptra launch` set the variable to 1 in every rank: tear the process down once a peer has failed.
    """
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.setattr(dist.Backend, "register_backend", lambda *_given, **_keywords: None)
    for name in ("init_process_group", "new_group", "get_backend"):
        monkeypatch.setattr(dist, name, getattr(dist, name))
    return monkeypatch


@pytest.mark.parametrize("backend", ["adaptra", "fake"])
def test_megatron_sees_a_backend_that_it_knows(backend: str, uninstalled: pytest.MonkeyPatch) -> None:
    uninstalled.setattr(dist, "get_backend", lambda group=None: backend)
    FaultTolerantGroups().install()
    assert dist.get_backend() == ("gloo" if backend == "adaptra" else backend)


@pytest.mark.usefixtures("uninstalled")
def test_torchs_watchdog_ends_no_live_rank_whatever_the_launcher_has_set() -> None:
    FaultTolerantGroups().install()
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
