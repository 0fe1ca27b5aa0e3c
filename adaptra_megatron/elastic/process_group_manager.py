# SPDX-License-Identifier: Apache-2.0
"""All fault-tolerant process groups of one process, and the torch groups behind them in each generation.

`process_group` has the rules that callers may rely on. Three mechanisms keep them. Operations outside of calls run on
new tensors, and their results are kept until the next commit (`fence.KeptResults`). Waits are divided into slices, so
that they notice the end of a generation. `leave` returns only once no operation of the generation can write any more
(`fence.Fence`).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.distributed.distributed_c10d import PrefixStore, _world

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.foreign_errors import is_of_device
from adaptra_megatron.common.gathering import nccl_group
from adaptra_megatron.common.layout import JobLayout
from adaptra_megatron.common.membership import START_VARIABLE, Departure, MembershipRecords
from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.elastic.failure_detection import StartupFailureMonitor
from adaptra_megatron.elastic.failure_errors import (
    EpochEndedError,
    LateRankError,
    UnrecoverableError,
    is_communication,
    of_backend,
)
from adaptra_megatron.elastic.fence import FENCE_S, Fence, FencedGroup, GlooSockets, KeptResults, connected_group
from adaptra_megatron.elastic.generation import FIRST, Generation
from adaptra_megatron.elastic.job_abort import end_after_error
from adaptra_megatron.elastic.process_group import CallbackWork, CompletedWork, FaultTolerantGroup, Launch, Pending
from adaptra_megatron.transport.gpu.cuda_device import DeviceThread

_CONNECT_S, _SEEN_S, _LOOKS_S = 60.0, 60.0, 0.1


def refuse_restarted(reroute: str, environment: Mapping[str, str] = os.environ) -> None:
    """Raise UnrecoverableError in a restarted rank if `reroute` (--adaptra-reroute) does not let ranks rejoin."""
    if environment.get(START_VARIABLE):
        raise UnrecoverableError(
            f"rank {environment['RANK']} has been started again (--max-restarts), but with --adaptra-reroute {reroute} "
            "it cannot join a job that runs: give all ranks --adaptra-reroute failures or all, or drop --max-restarts"
        )


def departure_to_replace(environment: Mapping[str, str] = os.environ) -> Departure | None:
    """Return the departure of this process's rank if the rank was restarted; None in the rank's first process.

    Raises UnrecoverableError if the launcher does not report the rank's departure in time, RuntimeError if the store
    cannot be reached.
    """
    if not environment.get(START_VARIABLE):
        return None
    rank, records = int(environment["RANK"]), MembershipRecords.of_rank(_CONNECT_S, environment)
    deadline_s = time.monotonic() + _SEEN_S
    while time.monotonic() < deadline_s:
        membership = records.newest()
        if membership is not None and rank not in membership.live:
            return membership.departure(rank)
        time.sleep(_LOOKS_S)
    raise UnrecoverableError(
        f"rank {rank} has been started again, but its launcher's coordinator has not seen the end of the one before "
        f"within {_SEEN_S:g} s; look at the launcher of node rank 0"
    )


Made = TypeVar("Made")

SLICE = timedelta(milliseconds=20)
"""Longest uninterrupted part of a wait: between two parts the set of live ranks is checked."""
_NAME = "adaptra"
_TURNED_OFF = (
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_DESYNC_DEBUG"),
    *("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_PROPAGATE_ERROR", "TORCH_NCCL_RETHROW_CUDA_ERRORS"),
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
)
"""Variables of torch's NCCL groups that are set to 0. With blocking waits, waits of streams would be waits of threads.
The watchdog would end the process when another rank or its own device fails, and before that write to the job's store
for good that a rank has failed, and wait for a minute (ProcessGroupNCCL.cpp)."""
_IN_DRIVER_S = 1.0
"""Time after which the training thread, should it not have left the generation, counts as blocked in the driver."""
_POLL_S = 1e-4


def live_groups(config: AdaptraConfig) -> FaultTolerantGroups | None:
    """Install and return this process's fault-tolerant groups; None if `config` does not ask for fault tolerance.

    Raises RuntimeError if torch.distributed has been initialised already, UnrecoverableError if this process is a
    restarted rank that cannot rejoin.
    """
    if not config.is_fault_tolerant:
        refuse_restarted(config.reroute)
        return None
    groups = FaultTolerantGroups(place := departure_to_replace())
    groups.install()
    if place is None:
        groups.early_watch = StartupFailureMonitor()
    return groups


class FaultTolerantGroups:
    """All fault-tolerant groups of this process. For the training thread, unless a method says otherwise.

    Construct it before torch.distributed is initialised.
    """

    def __init__(self, place: Departure | None = None) -> None:
        """Create the object; `install` puts it into torch. `place`: departure of the rank that this process replaces.

        With `place`, each group has this process as its only member until the rank is admitted: collectives return its
        own input.
        """
        self.place = place
        self.ended = threading.Event()
        """Set, from any thread, once the set of live ranks has changed; cleared by `enter`."""
        self.early_watch: StartupFailureMonitor | None = None
        """Ends the job if a member fails before `begin`."""
        self.stale = False
        """True if ranks have failed: parameters may not have been gathered from their shards. `gather_missed` resets
        it.
        """
        self.gather: Callable[[], None] = lambda: None
        """Gathers all parameters from the optimizer's shards."""
        self.before_leaving: list[Callable[[], None]] = []
        """Called by `leave` before it ends operations: they drop what holds communicators."""
        self._hooked: Callable[..., object] | None = None
        """`sys.excepthook` before this object's; None before groups are made."""
        self.when_uncaught: list[Callable[[BaseException], None]] = []
        """Called with an error that nothing has caught, once Python has printed it."""
        self.ignores_failed = False
        """See `ignoring_failed_members`."""
        self._groups: list[FaultTolerantGroup] = []
        self.rank = 0
        """Global rank of this process."""
        self._description = "group"
        self._natives: dict[tuple[FaultTolerantGroup, str], FencedGroup] = {}
        self._fence = Fence()
        self._timeout_s = 0.0
        self._store: Any = None
        self._control: ControlStore | None = None
        """Store in which groups meet; None before `begin`: the job's store."""
        self._generation = FIRST
        self._inside = False
        self._layout: JobLayout | None = None
        self._recover: Callable[[Exception], None] | None = None
        self.kept = KeptResults()
        """Results of operations outside of calls."""
        self.fence_s = FENCE_S
        """Longest wait of `leave`."""

    # What torch.distributed sees.

    def install(self) -> None:
        """Make every process group that is created from now on fault-tolerant. Raises RuntimeError if a group exists
        already.
        """
        if dist.is_initialized():
            raise RuntimeError(
                "--adaptra-reroute failures has to be given before torch.distributed is initialised: groups that exist "
                "do not survive failures of their members"
            )
        dist.Backend.register_backend(_NAME, self._create, extended_api=True, devices=["cpu", "cuda"])
        # Not setdefault: torchrun, and `adaptra launch` as torchrun, set TORCH_NCCL_ASYNC_ERROR_HANDLING to 1 (tear the
        # process down) where the user has set nothing.
        os.environ.update(dict.fromkeys(_TURNED_OFF, "0"))
        for name in ("init_process_group", "new_group"):
            self._replace(name)
        named = dist.get_backend

        @functools.wraps(named)
        def get_backend(*given: Any, **keywords: Any) -> Any:
            # Megatron decides by it where tensors are to be, and knows no other (dist_signal_handler.py, get_device).
            found = named(*given, **keywords)
            return ("nccl" if torch.cuda.is_available() else "gloo") if found == _NAME else found

        dist.get_backend = get_backend

    def _replace(self, name: str) -> None:
        original = getattr(dist, name)

        @functools.wraps(original)
        def made(*given: Any, **keywords: Any) -> Any:
            # All of these choose or configure torch's own backend, which is created later, per generation.
            for theirs in ("backend", "pg_options", "device_id"):
                keywords.pop(theirs, None)
            self._description = str(keywords.get("group_desc") or "group")
            if name == "init_process_group":
                given = given[1:]  # a backend
            result = original(*given, **keywords, backend=_NAME)
            if self._hooked is None:
                # Around torch's, which writes what those within it print once they have returned.
                self._hooked, sys.excepthook = sys.excepthook, self._uncaught
            return result

        setattr(dist, name, made)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Handle an error that nothing has caught, as `sys.excepthook`."""
        assert self._hooked is not None
        # Python's own report first: peers may end this job as soon as they see the notice.
        self._hooked(kind, error, trace)
        for each in self.when_uncaught:
            each(error)
        if isinstance(error, Exception) and sys._getframe().f_back is None:  # called as Python ends, not by a hook
            end_after_error()

    def _create(self, options: Any, _backend_options: Any) -> FaultTolerantGroup:
        """Create one group for torch's `_new_process_group_helper`, which uses a backend derived from ProcessGroup as
        the group.
        """
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        if not self._groups:
            # The first group is that of all ranks, in which the rank in the group is the global rank.
            self.rank, self._timeout_s = options.group_rank, options.timeout.total_seconds()
            self._store = options.store
        made = [group.description.partition("#")[0] for group in self._groups if group.ranks == tuple(ranks)]
        group = FaultTolerantGroup(self, ranks, self.rank, f"{self._description}#{made.count(self._description)}")
        if self.place is not None:
            # Megatron creates groups and runs collectives in set-up. A rejoining process does so alone: the others are
            # training.
            group.members, group.stand_ins = (self.rank,), dict.fromkeys(group.ranks, self.rank)
        self._groups.append(group)
        return group

    @property
    def is_inside(self) -> bool:
        """Return whether a call of Megatron's schedules is running."""
        return self._inside

    @property
    def is_whole(self) -> bool:
        """Return whether no rank has failed, or all have rejoined."""
        return not self._groups or self._groups[0].members == tuple(self._groups[0].ranks)

    @property
    def last_live(self) -> int | None:
        """The highest live rank of the last rank's stage; None before ranks may fail."""
        if self._layout is None:
            return None
        workers, live = self._layout.workers, self._groups[0].members
        stage = workers[max(workers)].cell.stage
        return max((rank for rank in live if workers[rank].cell.stage == stage), default=None)

    @property
    def device(self) -> torch.device:
        """Device of the tensors of barriers and of collectives of objects."""
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def interrupt(self) -> None:
        """End the waits of the training thread, from any thread, as the set of live ranks has changed."""
        self.ended.set()
        if torch.cuda.is_available():
            DeviceThread(self._abort_late, "adaptra-interrupt").start()

    def _abort_late(self) -> None:
        # The training thread may be in the driver, behind a kernel that waits for a failed rank: no check ends that.
        time.sleep(_IN_DRIVER_S)
        if self.ended.is_set():  # else it has left, and the communicators are those of the next generation
            self._fence.abort()

    # What each generation puts behind them.

    def begin(self, layout: JobLayout, control: ControlStore, recover: Callable[[Exception], None]) -> None:
        """Survive failures of members from now on.

        `recover` enters the next generation after an error; then a failed operation outside of calls is repeated. It
        raises if the job cannot go on.
        """
        if self.early_watch is not None:
            self.early_watch.close()
        self._layout, self._recover = layout, recover
        self._control = control

    def enter(self, generation: Generation, control: ControlStore) -> None:
        """Continue with the ranks of `generation`, after `leave`. `control`: the generation's part of the
        job's store.
        """
        assert self._layout is not None
        self._generation, self._control = generation.id, control
        for group in self._groups:
            _set_members(group, self._layout, generation.live)
        self.stale = True
        self.ended.clear()

    def lost_shards(self, live: frozenset[int]) -> list[tuple[int, ...]]:
        """Return the holders of each shard that no live rank holds, its owner first."""
        known: list[tuple[int, ...]] = [
            (group.ranks[place], group.ranks[holder])
            for group in self._groups
            for place, holder in enumerate(group.holders or ())
        ]
        known += [tuple(ranks) for group in self._groups if group.has_shards for ranks in (group.alike or {}).values()]
        return sorted({ranks for ranks in known if live.isdisjoint(ranks)})

    def leave(self) -> None:
        """End the pending operations of the present generation; return once none of them can write any more.

        Raises OperationStillRunsError under the conditions of `Fence.wait`.
        """
        for each in self.before_leaving:
            each()
        fence, self._fence = self._fence, Fence()
        self._natives.clear()
        fence.close()
        fence.wait(self.fence_s)

    def native(self, group: FaultTolerantGroup, device: torch.device) -> FencedGroup:
        """Return torch's own group of the present members. All members create it together at its first use."""
        key = group, device.type
        if key not in self._natives:
            members = tuple(group.members)
            # Bind this generation's arguments now: the thread may still run when the next generation has begun.
            make = functools.partial(self._make_native, group.description, members, device.type, self._control)
            with of_backend():
                native, sockets = interruptible(make, self.check, self._timeout_s, "a process group")
            self._natives[key] = self._fence.guarded(native, group.description, members, sockets)
        return self._natives[key]

    def _make_native(
        self, description: str, members: tuple[int, ...], device: str, control: ControlStore | None
    ) -> tuple[Any, GlooSockets | None]:
        """Create torch's group of `members`, which meet in `control`; for gloo, return its sockets too."""
        # The name follows from the members, so they find each other without a message.
        place = hashlib.blake2b(f"{description}/{members}/{device}".encode(), digest_size=12)
        name, rank = f"live/{place.hexdigest()}", members.index(self.rank)
        if control is None:
            store = PrefixStore(name, self._store.clone() if hasattr(self._store, "clone") else self._store)
        elif device == "cpu":
            with control.lent(name, self._timeout_s, sealed=False) as lent:
                return connected_group(lent, rank, len(members), self._timeout_s)
        else:
            store = control.unsealed(name)
        if device == "cpu":
            return connected_group(store, rank, len(members), self._timeout_s)
        group = nccl_group(store, rank, len(members), self._timeout_s)
        # It would connect in its first operation, in the training thread: no check of ours ends that wait if another
        # rank fails meanwhile (ProcessGroupNCCL.cpp, initNCCLComm).
        group.eager_connect_single_device(torch.device(device, torch.cuda.current_device()))
        return group, None

    # Operations.

    @contextmanager
    def call(self) -> Iterator[None]:
        """Mark a call of Megatron's schedules: a failed operation within raises, and is not repeated (rule 1 of
        process_group.py).
        """
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    @contextmanager
    def numbered_alive(self) -> Iterator[None]:
        """Number only live ranks, without gaps, within this context: for files that other programs read.

        This renumbers the group of all ranks and the groups of one stage's replicas. Groups within a replica keep their
        numbers.
        """
        assert self._layout is not None
        live = sorted({rank for group in self._groups for rank in group.members})
        places, known = {rank: place for place, rank in enumerate(live)}, _world.pg_group_ranks
        before = {group: known[group] for group in self._groups if group in known}
        for group, ranks in before.items():
            group.renumbered = not alike(group, self._layout)
            if group.renumbered:
                known[group] = {places[rank]: place for place, rank in enumerate(group.members)}
            else:
                # Failed ranks keep distinct, impossible numbers: torch requires an entry for each member.
                known[group] = {places.get(rank, -1 - rank): place for rank, place in ranks.items()}
        try:
            yield
        finally:
            for group, ranks in before.items():
                group.renumbered, known[group] = False, ranks

    @contextmanager
    def ignoring_failed_members(self) -> Iterator[None]:
        """Let gathers within this context leave the outputs of failed members unchanged. The caller must have set them
        before.
        """
        self.ignores_failed = True
        try:
            yield
        finally:
            self.ignores_failed = False

    def check(self) -> None:
        """Raise EpochEndedError once the set of live ranks has changed."""
        if self.ended.is_set():
            raise EpochEndedError(f"generation {self._generation} has ended: the set of live ranks has changed")

    def run(
        self,
        group: FaultTolerantGroup,
        outputs: Sequence[torch.Tensor],
        launch: Launch,
        *,
        renewed: bool = False,
        own_memory: bool = False,
        differs: bool = False,
    ) -> Work:
        """Run one collective operation. `outputs`: the tensors that it reads and changes.

        `renewed`: do not repeat the operation after a failure outside of calls, since `gather_missed` does.
        `own_memory`: see `_begin`. `differs`: each member has a result of its own, which no other can be given. Raises
        RuntimeError where this rank lacks one that another has.
        """
        device = outputs[0].device
        begin = functools.partial(self._begin, group, device, outputs, launch, in_place=renewed, own_memory=own_memory)
        if self._inside or self._layout is None:
            # Before the launch: with a failed member the operation would only end by its timeout, or when aborted.
            self.check()
            return Pending(self, begin(in_place=True))
        if renewed:
            while not self.stale and not self._done(begin):
                pass
            return CompletedWork()
        name = self._key(group)
        while not self._known(name, outputs):
            if self.stale and group is self._groups[0]:
                # Collectives over all ranks come at the same point on each, so all or none gather here. The training
                # may be at its end, without a further call that would gather.
                self.gather_missed()
                continue  # a rank may have failed meanwhile, and another may have the result
            if self._done(begin):
                break
        self.kept.keep(name, None if differs else outputs)
        return CompletedWork()

    def gather_missed(self) -> None:
        """Gather parameters again if a rank may have failed during the last gather, or fails during this one."""
        while self.stale:
            self.stale = False
            self.gather()

    def _begin(
        self,
        group: FaultTolerantGroup,
        device: torch.device,
        outputs: Sequence[torch.Tensor],
        launch: Launch,
        *,
        in_place: bool,
        own_memory: bool,
    ) -> Any:
        """Launch an operation; return its handle.

        Unless stated otherwise it writes into copies of `outputs`, which the waiting thread copies back. `in_place`:
        over NCCL it may write into `outputs`. `own_memory`: over gloo `launch` makes the copies itself.
        """
        native = self.native(group, device)
        if own_memory if native.is_gloo else in_place:
            return launch(native, list(outputs))
        # An abandoned operation may write at any time. It must write into memory that nobody reads: a waiting thread
        # copies the result only if the operation has succeeded.
        fresh = [output.detach().clone() for output in outputs]
        return CallbackWork(launch(native, fresh), functools.partial(_put, outputs, fresh))

    def _done(self, begin: Callable[[], Any]) -> bool:
        """Run an operation outside of calls; return False if a member failed, after entering the next generation."""
        try:
            self.check()
            self.wait_for(begin())
        except Exception as cause:
            self._go_on_after(cause)
            return False
        return True

    def _known(self, name: str, outputs: Sequence[torch.Tensor]) -> bool:
        """Return whether another rank has the operation's result, and copy it into `outputs`.

        If a rank fails meanwhile, enter the next generation and ask its ranks.
        """
        while True:
            try:
                return self.kept.known(name, outputs)
            except Exception as cause:
                self._go_on_after(cause)

    def _go_on_after(self, cause: Exception) -> None:
        """Enter the next generation after the error `cause`, which is being handled. Raise `cause` if it is this rank's
        own.
        """
        if is_of_device(cause) or not is_communication(cause):
            raise cause
        assert self._recover is not None
        traceback.clear_frames(cause.__traceback__)  # which hold handles of groups that are given up
        self._recover(cause)

    def wait_for(self, work: Any) -> None:
        """Wait for one of torch's handles.

        Raises EpochEndedError once the set of live ranks has changed, LateRankError after the job's timeout, and the
        errors of the operation.
        """
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                with of_backend():
                    # In slices: gloo's wait cannot be interrupted, and a failure elsewhere must end it.
                    work.wait(SLICE)
                break
            except RuntimeError:
                if work.is_completed():
                    with of_backend():
                        work.wait()  # which raises, unless it was the slice that had ended
                    break
            self.check()
            if time.monotonic() > deadline_s:
                raise LateRankError(f"timed out: a collective has taken longer than {self._timeout_s:g} s")
        # NCCL's wait returns when the current stream waits, not when the sum is there. Outside of calls the result must
        # be complete, as it may have to be sent to a rank that lacks it.
        if not self._inside:
            self.synchronize()

    def synchronize(self) -> None:
        """Wait until the device has finished all launched work. Raises EpochEndedError and LateRankError as
        `wait_for`.
        """
        if not torch.cuda.is_available():
            return
        # An event, not torch.cuda.synchronize(): that cannot be interrupted if a peer's kernel never ends.
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        deadline_s = time.monotonic() + self._timeout_s
        while not event.query():
            self.check()
            if time.monotonic() >= deadline_s:
                raise LateRankError(f"timed out: the device has not done its work within {self._timeout_s:g} s")
            time.sleep(_POLL_S)  # event.query holds the GIL, and links may have to send

    def operations(self) -> dict[str, int]:
        """Return the number of operations outside of calls since the last commit, by name of their group."""
        return self.kept.counts([self._key(group) for group in self._groups])

    def _key(self, group: FaultTolerantGroup) -> str:
        """Return a name that is equal for groups that are joined after failures, which are groups of the same stages
        and lanes.
        """
        if group.key is None:
            assert self._layout is not None
            joined = alike(group, self._layout)
            ranks = sorted(ranks[0] for ranks in joined.values()) or list(group.ranks)
            group.key = hashlib.blake2b(f"{group.description}/{ranks}".encode(), digest_size=12).hexdigest()
        return group.key


def _put(outputs: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]) -> None:
    """Copy the results of an operation into its outputs, unseen by autograd. An output may be part of a later input."""
    for output, found in reversed(list(zip(outputs, fresh, strict=True))):
        output.data.copy_(found)


def interruptible(make: Callable[[], Made], check: Callable[[], None], timeout_s: float, what: str) -> Made:
    """Return the result of `make`, called in another thread. `what` names the result in errors.

    If `check` raises meanwhile, or after `timeout_s` (LateRankError), the thread is abandoned: `make` must not read
    anything that another generation changes. Raises the errors of `make` and `check`.
    """
    found: list[Any] = []
    done = threading.Event()
    device = torch.cuda.current_device() if torch.cuda.is_available() else None

    def work() -> None:
        try:
            if device is not None:  # each thread has its own
                torch.cuda.set_device(device)
            found.append(make())
        except Exception as cause:
            found.append(cause)
        done.set()

    deadline_s = time.monotonic() + timeout_s
    DeviceThread(work, "adaptra-interruptible").start()
    while not done.wait(SLICE.total_seconds()):
        check()
        if time.monotonic() > deadline_s:
            raise LateRankError(f"timed out: {what} has not been made within {timeout_s:g} s")
    if isinstance(found[0], Exception):
        raise found[0]
    made: Made = found[0]
    return made


def alike(group: FaultTolerantGroup, layout: JobLayout) -> Mapping[int, Sequence[int]]:
    """Return `FaultTolerantGroup.alike` of a group, computed once.

    Groups that span stages of one replica are joined, and groups within one optimizer instance.
    """
    if group.alike is None:
        workers = [layout.workers[rank] for rank in group.ranks]
        within = len({worker.cell.replica for worker in workers}) == 1 < len({worker.cell.stage for worker in workers})
        group.alike = {}
        if group.instances > 1 or (within and layout.replicas > 1):
            period = layout.replicas // group.instances if group.instances > 1 else 1
            found = defaultdict[tuple[int, int, int], list[int]](list)
            places = {
                rank: (each.cell.stage, each.lane, each.cell.replica % period) for rank, each in layout.workers.items()
            }
            for rank in sorted(places, key=lambda each: layout.workers[each].cell.replica):
                found[places[rank]].append(rank)
            group.alike = {rank: found[places[rank]] for rank in group.ranks}
    return group.alike


def _set_members(group: FaultTolerantGroup, layout: JobLayout, live: frozenset[int]) -> None:
    joined = alike(group, layout)
    whole = live.issuperset(layout.workers)
    if group.adds_instances and not whole:
        live = frozenset([layout.rank])
    if not joined or whole:
        group.members = tuple(rank for rank in group.ranks if rank in live)
        group.speaks, group.stand_ins = True, {rank: rank for rank in group.members}
        return
    group.members = tuple(sorted(live.intersection(itertools.chain(*joined.values()))))
    group.stand_ins = {rank: next(each for each in ranks if each in live) for rank, ranks in joined.items()}
    # Of what is the same one addend counts; gradients, of which each rank has those of its micro-batches, all do.
    group.speaks = group.has_shards or layout.rank in group.stand_ins.values()
