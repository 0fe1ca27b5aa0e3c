# SPDX-License-Identifier: Apache-2.0
"""A process group that survives failures of its members: Megatron holds one object, the groups behind it change.

If a member has failed, or fails while an operation is under way:

1. Inside a call of Megatron's schedules the operation, or `wait` on its handle, raises, and RecoveryManager repeats
   the whole call. Its outputs are undefined until then.
2. Outside of calls it returns one result, the same for all live members: it is repeated in the next generation, or
   copied from a rank that has the result (of at most MOST_KEPT_NBYTES; RuntimeError beyond). Handles are completed
   ones. Gathers of parameters from shards are repeated by all ranks together, at the next operation over all of them
   (`FaultTolerantGroups.gather_missed`).
3. A wait for members raises EpochEndedError once the set of live ranks has changed, LateRankError after the job's
   timeout, or the backend's error. None of them is an error of this rank (`failure_errors.is_communication`).
4. Sums, maxima and minima are over live members. Of a state that several of them hold, one addend counts.
5. What only failed members had is never made up: gathering it raises UnwrittenError. Broadcasts of it, scatter,
   all-to-all, other reductions, and reduce-scatter without shards raise RuntimeError. These errors end the job.
6. `size()` and `rank()` stay those of the start, but within `FaultTolerantGroups.numbered_alive`.
7. After `FaultTolerantGroups.leave`, no operation of an earlier generation writes into anything that Megatron reads.

Size and ranks stay, as data-parallel sizes, scalings and schedules count the whole job. Operations outside of calls are
repeated one by one, as Megatron-LM's training loop cannot be run again from its middle.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, Work
from torch.distributed.distributed_c10d import _world

if TYPE_CHECKING:
    from adaptra_megatron.elastic.process_group_manager import FaultTolerantGroups


class CompletedWork(Work):
    """A handle of an operation that has been carried out."""

    def wait(self, timeout: Any = None) -> bool:
        """Return True at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Do nothing: results can be used on any stream."""


class Pending(Work):
    """A handle of an operation under way inside a call; waiting for it ends with the epoch."""

    def __init__(self, groups: FaultTolerantGroups, work: Any) -> None:
        super().__init__()
        self._groups, self._work = groups, work

    def wait(self, timeout: Any = None) -> bool:
        """Wait as torch's does. Raises EpochEndedError once the set of live ranks has changed."""
        self._groups.wait_for(self._work)
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` would return without waiting."""
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Return whether it has ended well."""
        return bool(self._work.is_success())

    def synchronize(self) -> None:
        """Wait."""
        self.wait()


class CallbackWork:
    """Torch's handle of an operation, and what is to be done once it has been carried out."""

    def __init__(self, work: Any, act: Callable[[], object]) -> None:
        self._work, self._act = work, act
        self._acted = False

    def wait(self, *timeout: timedelta) -> None:
        self._work.wait(*timeout)
        if not self._acted:  # who waits again finds what has become of it since
            self._acted = True
            self._act()

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())


class CoalescedWork:
    """Torch's handles of operations that were launched together."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self, *timeout: timedelta) -> None:
        for work in self._works:
            work.wait(*timeout)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)


COUNTS = "adaptra_micro_batches"
"""Attribute of a tensor of gradients: how many micro-batches are in it, a tensor that is reduced with it
(megatron/state/conservation.py)."""

Launch = Callable[[Any, list[torch.Tensor]], Any]
"""Begins an operation of torch's own group of those that live, with these outputs; returns torch's handle. Outputs are
new each time that an operation is repeated: what an earlier try has left under way writes into others."""

_IGNORE_FAILED = frozenset({"megatron.core.timers", "megatron.training.dist_signal_handler"})
"""Modules whose outputs are set before they gather, and which take the parts of failed members for nothing: times of 0
(Timers._get_elapsed_time_all_ranks), no signal (all_gather_item)."""


class UnwrittenError(RuntimeError):
    """A collective would leave the parts of failed members in its output as memory held them before."""

    def __init__(self, group: str, missing: Sequence[int]) -> None:
        self.group, self.missing = group, tuple(missing)
        super().__init__(
            f"gathering over {group}: ranks {', '.join(map(str, missing))} have failed, and no other has their parts, "
            "so the output would hold whatever memory held before; reduce instead, or set the output and gather within "
            "FaultTolerantGroups.ignoring_failed_members()"
        )


def ignores_failed_members() -> bool:
    """Return whether the caller of a collective is known to set its output before, and to take no notice of parts that
    stay as they are."""
    frame = sys._getframe(1)
    while (caller := frame.f_back) is not None:
        name = str(caller.f_globals.get("__name__", ""))
        if not name.startswith(("torch.", "adaptra_megatron.", "testing.")):  # decorators that delay or fail calls
            return name in _IGNORE_FAILED
        frame = caller
    return False


_ProcessGroup: Any = dist.ProcessGroup  # whose stubs do not know that Python may derive from it


class FaultTolerantGroup(_ProcessGroup):  # type: ignore[misc]
    """One group of this process, whose methods torch.distributed calls. The rules stand above.

    Where ranks have failed, a group that spans stages of one replica is joined with those of the other replicas. For
    each stage the lowest live replica counts: after data-parallel reduction all of a stage hold the same. Groups within
    one of several optimizer instances are joined with those of the others in the same way, for each shard.
    """

    def __init__(self, groups: FaultTolerantGroups, ranks: Sequence[int], rank: int, description: str) -> None:
        """`ranks`: global ones. `rank`: this process's global one."""
        super().__init__(list(ranks).index(rank), len(ranks))
        self.ranks = tuple(ranks)
        self.members = self.ranks
        """Global ranks that take part in the present generation."""
        self.speaks = True
        """True where this rank's addend counts in sums."""
        self.stand_ins: dict[int, int] = {}
        """By global rank of the start: the one that has what it would have; none where that is lost."""
        self.holders: Sequence[int] | None = None
        """Where each member has a shard of what the group reduces and gathers: by place, that of the member which holds
        a copy of the shard."""
        self.alike: Mapping[int, Sequence[int]] | None = None
        """By member of a group that is joined with others where ranks have died: ranks that have what it has, itself
        among them, by replica. Empty for a group that is not; None: not looked up yet."""
        self.key: str | None = None
        """Its name among all ranks: see `FaultTolerantGroups._key`. None: not made yet."""
        self.instances = 1
        """Number of optimizer instances, where each has such a group of its own."""
        self.has_shards = False
        """True where members reduce and gather shards of their optimizer instance."""
        self.adds_instances = False
        """True where members add up what their optimizer instances have reduced. Where ranks have died, that has been
        reduced over all instances."""
        self.behalves: list[Callable[[torch.Tensor], object]] = []
        """Add to this rank's addend of the next sum what the dead would have added whose shards it has copies of."""
        self.renumbered = False
        """True while only live members are numbered: see `FaultTolerantGroups.numbered_alive`."""
        self._seen_as: int | None = None
        self.description = description
        self._groups = groups

    @property
    def whole(self) -> bool:
        """Return whether all that are numbered take part, and no others."""
        return self.renumbered or self.members == self.ranks

    @contextmanager
    def seen_as(self, place: int) -> Iterator[None]:
        """Number members as at the start meanwhile, this process by `place`."""
        before = self._seen_as
        self._seen_as = place
        try:
            yield
        finally:
            self._seen_as = before

    @property
    def place(self) -> int:
        """This process's place at the start."""
        return self.ranks.index(self._groups.rank)

    @property
    def stood_in_for(self) -> list[int]:
        """Places of dead members of whose shards this rank has the copy."""
        if self.holders is None:
            return []
        mine = [place for place, holder in enumerate(self.holders) if holder == self.place]
        return [place for place in mine if self.ranks[place] not in self.members]

    def rank(self) -> int:
        """Return this process's place: that of the start, or among those that live."""
        if self._seen_as is not None:
            return self._seen_as
        return self.members.index(self._groups.rank) if self.renumbered else super().rank()

    def size(self) -> int:
        """Return the number of members, of the start or of those that live."""
        return len(self.members) if self.renumbered and self._seen_as is None else len(self.ranks)

    @property
    def _device_types(self) -> list[torch.device]:
        # None while torch makes the group: from 2.15 on it would attach its flight recorder, which asks for the name of
        # a backend that the group has not.
        return [self._groups.device] if self in _world.pg_map else []

    def getBackendName(self) -> str:  # noqa: N802
        """Return the name under which torch has registered these groups."""
        return "adaptra"

    def _get_backend(self, device: torch.device) -> Any:
        return self._groups.native(self, device)

    def _run(
        self, outputs: Sequence[torch.Tensor], launch: Launch, *, renewed: bool = False, own_memory: bool = False
    ) -> Work:
        return self._groups.run(self, outputs, launch, renewed=renewed, own_memory=own_memory)

    def _place(self, rank: int) -> int:
        """The place, among those that take part, of the rank with place `rank` at the start."""
        stand_in = self.members[rank] if self.whole else self.stand_ins.get(self.ranks[rank])
        if stand_in is None:
            raise RuntimeError(f"rank {self.ranks[rank]} of {self.description} has died, and no other has what it had")
        return self.members.index(stand_in)

    def _reduced(self, tensors: Sequence[torch.Tensor], operation: Any) -> None:
        """Before an addition to which this rank has nothing to add."""
        known = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN)
        if not self.whole and not any(operation == each for each in known):
            raise RuntimeError(f"only sums, maxima and minima over {self.description} have a sense without the dead")
        if not self.speaks and operation == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.zero_()

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        """Sum, largest or smallest of what those that live have."""
        options = dist.AllreduceOptions() if opts is None else opts
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors

        behalves: list[Callable[[torch.Tensor], object]] = []
        if options.reduceOp == dist.ReduceOp.SUM:
            behalves, self.behalves = self.behalves, behalves

        def launch(native: Any, outputs: list[torch.Tensor]) -> Any:
            self._reduced(outputs, options.reduceOp)
            for add in behalves:
                add(outputs[0])
            return native.allreduce(outputs, options)

        return self._run(tensors, launch)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        """The same of several tensors."""
        options = dist.AllreduceCoalescedOptions() if opts is None else opts
        counts = counts_of(tensors)

        def launch(native: Any, outputs: list[torch.Tensor]) -> Any:
            if counts:
                return self._sum_counted(native, outputs[: len(tensors)], outputs[len(tensors) :], options.reduceOp)
            self._reduced(outputs, options.reduceOp)
            return native.allreduce_coalesced(outputs, options)

        return self._run([*tensors, *counts], launch, own_memory=bool(counts))

    def _sum_counted(
        self, native: Any, given: Sequence[torch.Tensor], counts: Sequence[torch.Tensor], operation: Any
    ) -> Any:
        """Reduce `given` in place, as one operation as torch's coalesced ones, and the `counts` of what is in them.

        On the CPU both are put in place together, by whom waits: an operation that nobody waits for, since its attempt
        has ended, changes neither. On a GPU the counts come behind `given` in the same queue.
        """
        on_cpu, options = native.is_gloo, dist.AllreduceOptions()
        if not on_cpu:
            self._reduced([*given, *counts], operation)
            coalesced = dist.AllreduceCoalescedOptions()
            coalesced.reduceOp = operation
            return [native.allreduce_coalesced(list(each), coalesced) for each in (given, counts)][-1]
        options.reduceOp = operation
        sums = [torch.cat([each.reshape(-1) for each in tensors]) for tensors in (given, counts)]
        self._reduced(sums, operation)

        def put_in_place() -> None:
            for tensors, flat in zip((given, counts), sums, strict=True):
                for each, part in zip(tensors, torch.split(flat, [each.numel() for each in tensors]), strict=True):
                    each.copy_(part.view_as(each))

        return CallbackWork(CoalescedWork([native.allreduce([each], options) for each in sums]), put_in_place)

    def reduce(self, tensors: list[torch.Tensor], opts: Any) -> Work:
        """As `allreduce`: those that do not ask for the result may get it."""
        options = dist.AllreduceOptions()
        options.reduceOp = opts.reduceOp
        kept = [tensor.clone() for tensor in tensors]
        work = self.allreduce(tensors, options)
        if opts.rootRank != self.rank():
            work.wait()
            for tensor, before in zip(tensors, kept, strict=True):
                tensor.copy_(before)
        return work

    def broadcast(self, tensors: Any, opts: Any) -> Work:
        """Broadcast from the root, or from a live rank with the same data. Raises RuntimeError if there is none."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        options = dist.BroadcastOptions()
        options.rootTensor = opts.rootTensor

        def launch(native: Any, outputs: list[torch.Tensor]) -> Any:
            options.rootRank = self._place(opts.rootRank)
            return native.broadcast(outputs, options)

        return self._run(tensors, launch)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        """Gather what the live members have."""
        return self._gathered(outputs[0], inputs[0], opts)

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [given], opts)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        """The same into one tensor. Where members have shards: the copies of those of the dead, from what their holders
        have in `output`; and where a member dies meanwhile, what has not been gathered is
        `FaultTolerantGroups.stale`."""
        return self.all_gather_single_coalesced([output], [given], opts)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """The same for several tensors."""
        gather = self._gathering(opts)

        def launch(native: Any, outputs: list[torch.Tensor]) -> Any:
            parts = [list(output.view(-1).chunk(self.size())) for output in outputs]
            return CoalescedWork(
                [gather(native, each, given.reshape(-1)) for each, given in zip(parts, inputs, strict=True)]
            )

        return self._run(outputs, launch, renewed=self.holders is not None or self.has_shards)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """The same, by its name before torch 2.13."""
        return self.all_gather_single_coalesced(outputs, inputs, opts)

    def _gathered(self, outputs: list[torch.Tensor], given: torch.Tensor, opts: Any) -> Work:
        gather = self._gathering(opts)
        return self._run(outputs, lambda native, found: gather(native, found, given))

    def _gathering(self, opts: Any) -> Callable[[Any, list[torch.Tensor], torch.Tensor], Any]:
        """Return what gathers a tensor of each member into one of as many outputs."""
        options = AllgatherOptions() if opts is None else opts
        # The frames of the caller are those of now: the operation may be repeated later.
        ignores = self.holders is not None or self._groups.ignores_failed or ignores_failed_members()

        def launch(native: Any, outputs: list[torch.Tensor], given: torch.Tensor) -> Any:
            if self.whole:
                return native.allgather([outputs], [given], options)
            missing = [rank for rank in self.ranks if rank not in self.stand_ins]
            if missing and not ignores:
                raise UnwrittenError(self.description, missing)
            found = [torch.empty_like(given) for _ in self.members]
            self._groups.wait_for(native.allgather([found], [given], options))
            for place, (rank, output) in enumerate(zip(self.ranks, outputs, strict=True)):
                if (stand_in := self.stand_ins.get(rank)) is not None:
                    output.copy_(found[self.members.index(stand_in)].view_as(output))
                elif self.holders is not None:
                    self._groups.wait_for(native.broadcast([output], self._from_holder(place)))
            return CompletedWork()

        return launch

    def _from_holder(self, place: int) -> dist.BroadcastOptions:
        assert self.holders is not None
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = self.members.index(self.ranks[self.holders[place]]), 0
        return options

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Work:
        """As `allgather`; those that do not ask for it get nothing."""
        found = outputs[0] if outputs else [torch.empty_like(inputs[0]) for _ in range(self.size())]
        return self._gathered(found, inputs[0], None)

    def barrier(self, opts: Any = None) -> Work:
        """Until all that live have come."""
        return self.allreduce([torch.zeros(1, device=self._groups.device)])

    def _whole_only(self, name: str, outputs: Sequence[torch.Tensor], launch: Launch) -> Work:
        def checked(native: Any, outputs: list[torch.Tensor]) -> Any:
            if not self.whole:
                raise RuntimeError(f"{name} over {self.description} cannot be done where members have died")
            return launch(native, outputs)

        return self._run(outputs, checked)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Work:
        """As torch's. Raises RuntimeError, as the following, where members have died."""
        return self._whole_only("scatter", outputs, lambda native, found: native.scatter(found, inputs, opts))

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Work:
        """As torch's."""
        return self._reduce_scatter_base(outputs[0], torch.stack(inputs[0]), opts)

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> Work:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> Work:
        """As torch's. Where members have shards: what this rank holds a copy of is reduced too, in `given`."""
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """The same for several tensors."""
        # Inputs are reduced in place.
        scatters, many = [self._scattering(opts) for _ in outputs], len(outputs)
        counts = [counts_of([each]) for each in inputs]

        def launch(native: Any, changed: list[torch.Tensor]) -> Any:
            pairs = zip(scatters, changed[:many], changed[many : 2 * many], counts, strict=True)
            return CoalescedWork([scatter(native, output, given, counted) for scatter, output, given, counted in pairs])

        return self._run([*outputs, *inputs, *itertools.chain(*counts)], launch, own_memory=all(counts))

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """The same, by its name before torch 2.13."""
        return self.reduce_scatter_single_coalesced(outputs, inputs, opts)

    def _scattering(self, opts: Any) -> Callable[[Any, torch.Tensor, torch.Tensor, list[torch.Tensor]], Any]:
        """Return what reduces a tensor and its counts over all members, and gives this one its part."""
        options = dist.AllreduceOptions()
        options.reduceOp = opts.reduceOp

        def launch(native: Any, output: torch.Tensor, given: torch.Tensor, counts: list[torch.Tensor]) -> Any:
            parts = given.view(self.size(), -1)
            if self.whole and not native.is_gloo:
                works = [native._reduce_scatter_base(output, given, opts)]
                if self.holders is not None:
                    held = parts[self.holders.index(self.place)]
                    works.append(self._handing_on(native, output.view(-1), held))
                works += [native.allreduce([each], options) for each in counts]
                return works[-1]  # of one queue
            kept = self.holders is None and not self.has_shards
            if not self.whole and kept:
                raise RuntimeError(f"reduce_scatter over {self.description} cannot be done where members have died")
            # As gloo does it itself, whose handle of this operation alone does not heed a timeout; and with all parts,
            # the rank that stands in for a dead one has its part.
            whole: torch.Tensor = parts.clone() if kept else parts
            if counts:
                summed = self._sum_counted(native, [whole], counts, opts.reduceOp)
            else:
                self._reduced([whole], opts.reduceOp)
                summed = native.allreduce([whole], options)
            return CallbackWork(summed, lambda: output.copy_(whole[self.rank()].view_as(output)))

        return launch

    def hand_on(self, given: torch.Tensor, received: torch.Tensor) -> Work:
        """Give `given`, flat, to the holder of this rank's shard, and receive what that of the held one gives."""
        return self._run([received], lambda native, found: self._handing_on(native, given, found[0]))

    def _handing_on(self, native: Any, given: torch.Tensor, received: torch.Tensor) -> Any:
        assert self.holders is not None
        to, frm = [0] * self.size(), [0] * self.size()
        to[self.holders[self.place]], frm[self.holders.index(self.place)] = given.numel(), received.numel()
        return native.alltoall_base(received, given, frm, to, dist.AllToAllOptions())

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Work:
        """As torch's."""
        return self._whole_only("alltoall", outputs, lambda native, found: native.alltoall(found, inputs, opts))

    def alltoall_base(
        self, output: torch.Tensor, given: torch.Tensor, output_splits: Any, input_splits: Any, opts: Any
    ) -> Work:
        """As torch's."""
        return self._whole_only(
            "alltoall",
            [output],
            lambda native, found: native.alltoall_base(found[0], given, output_splits, input_splits, opts),
        )

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, output_splits: Any, input_splits: Any, opts: Any
    ) -> Work:
        """As torch's."""
        return self.alltoall_base(output, given, output_splits, input_splits, opts)


def counts_of(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Return what is reduced together with `tensors`."""
    return [getattr(tensor, COUNTS) for tensor in tensors if hasattr(tensor, COUNTS)]
