# SPDX-License-Identifier: Apache-2.0
"""A process group that survives failures of its members: Megatron holds one object, while the groups behind it change.

If a member has failed, or fails during an operation:

1. Inside a call of Megatron's schedules the operation, or `wait` on its handle, raises, and RecoveryManager repeats the
   whole call. Until then the outputs are undefined.
2. Outside of calls the operation returns one result, the same for all live members: it is repeated in the next
   generation, or the result is copied from a rank that has it (up to MOST_KEPT_NBYTES). Beyond that, and where each
   member has a result of its own (scatter, reduce-scatter, all-to-all), a rank that lacks it raises RuntimeError. Its
   handle is complete when the operation returns. Gathers of parameters from shards are repeated by all ranks together,
   at the next operation over all of them (`FaultTolerantGroups.gather_missed`).
3. A wait for members raises EpochEndedError once the set of live ranks has changed, LateRankError after the job's
   timeout, or the backend's error. None of them is an error of this rank (`failure_errors.is_communication`).
4. Sums, maxima and minima are over live members. If several members hold the same state, it is added once. So are
   means outside of calls, by the number of what was added; inside of one they would be those of other micro-batches.
5. Data that only failed members had is never made up. Gathering it raises UnwrittenError. Broadcasts of it, scatter,
   all-to-all, other reductions, and reduce-scatter without shards raise RuntimeError. These errors end the job.
6. `size()` and `rank()` keep their initial values, except within `FaultTolerantGroups.numbered_alive`.
7. After `FaultTolerantGroups.leave`, no operation of an earlier generation writes into memory that Megatron reads.

Size and ranks are kept because data-parallel sizes, scalings and schedules count the whole job. Operations outside of
calls are repeated one by one because Megatron-LM's training loop cannot be restarted in its middle.
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
    """Handle of a completed operation."""

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
    """Handle of an operation in progress inside a call. The end of the generation ends its waits."""

    def __init__(self, groups: FaultTolerantGroups, work: Any) -> None:
        super().__init__()
        self._groups, self._work = groups, work

    def wait(self, timeout: Any = None) -> bool:
        """Wait as torch's does. Raises EpochEndedError once the set of live ranks has changed."""
        self._groups.wait_for(self._work)
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once."""
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Return whether the operation has succeeded."""
        return bool(self._work.is_success())

    def synchronize(self) -> None:
        """Wait, as `wait` does: results are then usable on any stream."""
        self.wait()


class CallbackWork:
    """One of torch's handles, with a function to call once the operation is complete."""

    def __init__(self, work: Any, act: Callable[[], object]) -> None:
        self._work, self._act = work, act
        self._acted = False

    def wait(self, *timeout: timedelta) -> None:
        self._work.wait(*timeout)
        # Once: a second wait must not overwrite outputs that have been changed since.
        if not self._acted:
            self._act()
            self._acted = True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())


class CoalescedWork:
    """Handles of several operations that were launched together."""

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
"""Attribute of a gradient: a tensor, its number of micro-batches, reduced with it (megatron/state/conservation.py)."""

Launch = Callable[[Any, list[torch.Tensor]], Any]
"""Launches an operation on torch's own group, given the outputs; returns torch's handle.

A repeated operation gets new outputs, since a pending earlier try may still write into its own.
"""

_IGNORE_FAILED = frozenset({"megatron.core.timers", "megatron.training.dist_signal_handler"})
"""Modules that set their outputs before they gather, and read the defaults of failed members as nothing: times of 0
(Timers._get_elapsed_time_all_ranks), no signal (all_gather_item).
"""


class UnwrittenError(RuntimeError):
    """A gather would leave the outputs of failed members uninitialised."""

    def __init__(self, group: str, missing: Sequence[int]) -> None:
        self.group, self.missing = group, tuple(missing)
        super().__init__(
            f"gathering over {group}: ranks {', '.join(map(str, missing))} have failed, and no other has their parts, "
            "so the output would hold whatever memory held before; reduce instead, or set the output and gather within "
            "FaultTolerantGroups.ignoring_failed_members()"
        )


def ignores_failed_members() -> bool:
    """Return whether the collective's caller is known to set the outputs of failed members beforehand."""
    # torch.distributed's own frames lie between Megatron and this one, those of what it deprecates, and maybe our
    # decorators: the first frame beyond them is the caller.
    frame = sys._getframe(1)
    while (caller := frame.f_back) is not None:
        name = str(caller.f_globals.get("__name__", ""))
        if not name.startswith(("torch.", "typing_extensions", "adaptra_megatron.", "testing.")):
            return name in _IGNORE_FAILED
        frame = caller
    return False


_ProcessGroup: Any = dist.ProcessGroup  # whose stubs do not know that Python may derive from it


class FaultTolerantGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group whose methods torch.distributed calls. The module's docstring has the rules.

    After failures, a group that spans stages of one replica is joined with the same groups of other replicas. Each
    stage is then represented by its lowest live replica, since after data-parallel reduction all replicas of a stage
    hold the same values. Groups within one optimizer instance are joined across instances in the same way, for each
    shard.
    """

    def __init__(self, groups: FaultTolerantGroups, ranks: Sequence[int], rank: int, description: str) -> None:
        """`ranks`: global ranks of the members. `rank`: global rank of this process."""
        super().__init__(list(ranks).index(rank), len(ranks))
        self.ranks = tuple(ranks)
        self.members = self.ranks
        """Global ranks of the present generation's members."""
        self.speaks = True
        """True if this rank's addend counts in sums."""
        self.stand_ins: dict[int, int] = {}
        """Live rank that holds the same data as each original member, by global rank; failed members without one are
        absent.
        """
        self.holders: Sequence[int] | None = None
        """If the group reduces and gathers shards: index of the member that holds the copy of each member's shard. Else
        None.
        """
        self.alike: Mapping[int, Sequence[int]] | None = None
        """Ranks that hold the same data as each member, itself included, in order of replicas. Empty for a group that
        is never joined with others; None before the first use.
        """
        self.key: str | None = None
        """Name of the group, equal on all ranks: see `FaultTolerantGroups._key`. None before its first use."""
        self.instances = 1
        """Number of optimizer instances, if each has a group of this kind."""
        self.has_shards = False
        """True if members reduce and gather the shards of their optimizer instance."""
        self.adds_instances = False
        """True if the group sums over optimizer instances. After failures there is nothing left to sum: the reduction
        within each instance already spans all instances.
        """
        self.behalves: list[Callable[[torch.Tensor], object]] = []
        """Functions that add the addends of failed members, whose shards this rank holds copies of, to its next sum."""
        self.renumbered = False
        """True while only live members are numbered: see `FaultTolerantGroups.numbered_alive`."""
        self._seen_as: int | None = None
        self.description = description
        self._groups = groups

    @property
    def whole(self) -> bool:
        """Return whether the group consists of exactly its numbered members."""
        return self.renumbered or self.members == self.ranks

    @contextmanager
    def seen_as(self, place: int) -> Iterator[None]:
        """Use the original numbers within this context, and `place` as this process's rank in the group."""
        before = self._seen_as
        self._seen_as = place
        try:
            yield
        finally:
            self._seen_as = before

    @property
    def place(self) -> int:
        """Return this process's original rank in the group."""
        return self.ranks.index(self._groups.rank)

    @property
    def stood_in_for(self) -> list[int]:
        """Return the original ranks of failed members whose shards this rank holds copies of."""
        if self.holders is None:
            return []
        mine = [place for place, holder in enumerate(self.holders) if holder == self.place]
        return [place for place in mine if self.ranks[place] not in self.members]

    def rank(self) -> int:
        """Return this process's rank in the group: the original one or, if renumbered, that among live members."""
        if self._seen_as is not None:
            return self._seen_as
        return self.members.index(self._groups.rank) if self.renumbered else super().rank()

    def size(self) -> int:
        """Return the original number of members or, if renumbered, the number of live ones."""
        return len(self.members) if self.renumbered and self._seen_as is None else len(self.ranks)

    @property
    def _device_types(self) -> list[torch.device]:
        # Empty while torch creates the group: from 2.15 on it would attach its flight recorder, which asks for the name
        # of a backend that this group does not have.
        return [self._groups.device] if self in _world.pg_map else []

    def getBackendName(self) -> str:  # noqa: N802
        """Return the backend name that these groups are registered with in torch."""
        return "adaptra"

    def _get_backend(self, device: torch.device) -> Any:
        return self._groups.native(self, device)

    def _run(self, outputs: Sequence[torch.Tensor], launch: Launch, **how: bool) -> Work:
        return self._groups.run(self, outputs, launch, **how)

    def _place(self, rank: int) -> int:
        """Return the present rank in the group of the member with original rank `rank`, or of the member that
        represents it.
        """
        stand_in = self.members[rank] if self.whole else self.stand_ins.get(self.ranks[rank])
        if stand_in is None:
            raise RuntimeError(
                f"rank {self.ranks[rank]} of {self.description} has failed, and no live one has its data"
            )
        return self.members.index(stand_in)

    def _reduced(self, tensors: Sequence[torch.Tensor], operation: Any) -> None:
        """Check that `operation` can be reduced, and zero the tensors if this rank's addend does not count."""
        known = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN)
        if not self.whole and not any(operation == each for each in known):
            raise RuntimeError(
                f"over {self.description}, whose members have failed, only sums, maxima and minima can be made; means "
                "only outside of calls"
            )
        # Several replicas of one stage hold the same norm or flag: one of them adds it, the others add 0. Maxima and
        # minima of equal values need no such care.
        if not self.speaks and operation == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.zero_()

    def allreduce(self, tensors: Any, opts: Any = None) -> Work:
        """Reduce over the live members: sum, maximum, minimum or, outside of calls, mean."""
        options = dist.AllreduceOptions() if opts is None else opts
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        averages = options.reduceOp == dist.ReduceOp.AVG and not self._groups.is_inside
        behalves: list[Callable[[torch.Tensor], object]] = []
        if options.reduceOp == dist.ReduceOp.SUM:
            # They are for one sum only. `launch` keeps them, as the sum may be repeated in the next generation.
            behalves, self.behalves = self.behalves, behalves

        def launch(native: Any, outputs: list[torch.Tensor]) -> Any:
            if averages and not self.whole:
                return self._averaged(native, outputs)
            self._reduced(outputs, options.reduceOp)
            for add in behalves:
                add(outputs[0])
            return native.allreduce(outputs, options)

        return self._run(tensors, launch)

    def _averaged(self, native: Any, outputs: list[torch.Tensor]) -> Any:
        """Replace tensors by their means over the live members."""
        self._reduced(outputs, dist.ReduceOp.SUM)
        added = len(set(self.stand_ins.values()))

        def divide() -> None:
            for each in outputs:
                each /= added

        return CallbackWork(native.allreduce(outputs, dist.AllreduceOptions()), divide)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        """Reduce several tensors over the live members."""
        options = dist.AllreduceCoalescedOptions() if opts is None else opts
        counts = counts_of(tensors)
        scale = self._sum_means(options) if counts else None

        def launch(native: Any, outputs: list[torch.Tensor]) -> Any:
            if scale is not None:
                scale(outputs[: len(tensors)])
                return self._sum_counted(native, outputs[: len(tensors)], outputs[len(tensors) :], options.reduceOp)
            self._reduced(outputs, options.reduceOp)
            return native.allreduce_coalesced(outputs, options)

        return self._run([*tensors, *counts], launch, own_memory=bool(counts))

    def _sum_means(self, options: Any) -> Callable[[Sequence[torch.Tensor]], object]:
        """Turn means of gradients over all replicas into sums, whose addends must first be passed to the result.

        Means over the live ones would be too large: they have computed the failed ones' micro-batches, too. The counts
        of these are summed with the same `options`.
        """
        if options.reduceOp != dist.ReduceOp.AVG:
            return lambda addends: None
        options.reduceOp = dist.ReduceOp.SUM
        # Before the sum, as NCCL does (enqueue.cc, hostToDevRedOp).
        return lambda addends: torch._foreach_div_(list(addends), self.size())

    def _sum_counted(
        self, native: Any, given: Sequence[torch.Tensor], counts: Sequence[torch.Tensor], operation: Any
    ) -> Any:
        """Reduce `given` in place, in one operation like torch's coalesced ones, together with their `counts`.

        On the CPU the waiting thread writes both in place together: an operation of an abandoned attempt, which nobody
        waits for, changes neither. On a GPU the counts follow `given` in the same queue.
        """
        # Gradients and counts differ in type, and gloo reduces one type at a time.
        on_cpu, options = native.is_gloo, dist.AllreduceOptions()
        if not on_cpu:
            self._reduced([*given, *counts], operation)
            coalesced = dist.AllreduceCoalescedOptions()
            coalesced.reduceOp = operation
            # Both are in NCCL's one queue: the handle of the last one covers both.
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
        """Reduce over the live members; only the root's tensors change."""
        options = dist.AllreduceOptions()
        options.reduceOp = opts.reduceOp
        # An all-reduce: if the root fails, a live rank must have the result. Other ranks get their inputs back, as
        # after torch's reduce.
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
            # At each launch, as the root's stand-in may differ in the next generation.
            options.rootRank = self._place(opts.rootRank)
            return native.broadcast(outputs, options)

        return self._run(tensors, launch)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        """Gather the tensors of all members; rule 5 applies to those of failed members."""
        return self._gathered(outputs[0], inputs[0], opts)

    def _allgather_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [given], opts)

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Work:
        """Gather the tensors of all members into one.

        If members have shards, the shard of a failed member comes from its holder. If a member fails meanwhile,
        parameters are `FaultTolerantGroups.stale`.
        """
        return self.all_gather_single_coalesced([output], [given], opts)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Gather several tensors, each as `all_gather_single`."""
        options = AllgatherOptions() if opts is None else opts
        gather = self._gathering(options)

        def launch(native: Any, outputs: list[torch.Tensor]) -> Any:
            if self.whole and not native.is_gloo:
                # Into place: parts in a list NCCL would gather into further memory, and torch copy from there.
                pairs = zip(outputs, inputs, strict=True)
                return CoalescedWork([native._allgather_base(each, given, options) for each, given in pairs])
            parts = [list(output.view(-1).chunk(self.size())) for output in outputs]
            return CoalescedWork(
                [gather(native, each, given.reshape(-1)) for each, given in zip(parts, inputs, strict=True)]
            )

        return self._run(outputs, launch, renewed=self.holders is not None or self.has_shards)

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Do as `all_gather_single_coalesced`, which had this name before torch 2.13."""
        return self.all_gather_single_coalesced(outputs, inputs, opts)

    def _gathered(self, outputs: list[torch.Tensor], given: torch.Tensor, opts: Any) -> Work:
        gather = self._gathering(opts)
        return self._run(outputs, lambda native, found: gather(native, found, given))

    def _gathering(self, opts: Any) -> Callable[[Any, list[torch.Tensor], torch.Tensor], Any]:
        """Return a function that gathers one tensor of each member into as many outputs."""
        options = AllgatherOptions() if opts is None else opts
        # Now, not in `launch`: the operation may be repeated later, when the caller's frames are gone.
        ignores = self.holders is not None or self._groups.ignores_failed or ignores_failed_members()

        def launch(native: Any, outputs: list[torch.Tensor], given: torch.Tensor) -> Any:
            if self.whole:
                return native.allgather([outputs], [given], options)
            missing = [rank for rank in self.ranks if rank not in self.stand_ins]
            if missing and not ignores:
                raise UnwrittenError(self.description, missing)
            # torch's group has only the live members, in another order than the outputs: gather them apart, then
            # distribute.
            found = [torch.empty_like(given) for _ in self.members]
            self._groups.wait_for(native.allgather([found], [given], options))
            for place, (rank, output) in enumerate(zip(self.ranks, outputs, strict=True)):
                if (stand_in := self.stand_ins.get(rank)) is not None:
                    output.copy_(found[self.members.index(stand_in)].view_as(output))
                # The shard of a failed owner: the holder of its copy has stepped it, and has it in its own output.
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
        """Gather the tensors of all members at the root."""
        found = outputs[0] if outputs else [torch.empty_like(inputs[0]) for _ in range(self.size())]
        return self._gathered(found, inputs[0], None)

    def barrier(self, opts: Any = None) -> Work:
        """Wait until all live members have called this."""

        def launch(native: Any, outputs: list[torch.Tensor]) -> Any:
            # Without a tensor: gloo's thread needs Python to release one, and aborts the process if Python ends then.
            return native.barrier(dist.BarrierOptions()) if native.is_gloo else native.allreduce(outputs)

        work = self._run([torch.zeros(1, device=self._groups.device)], launch)
        if self._groups.is_inside:
            # As over NCCL: what follows may be files, not kernels.
            work.wait()
            self._groups.synchronize()
        return work

    def _whole_only(self, name: str, outputs: Sequence[torch.Tensor], launch: Launch) -> Work:
        def checked(native: Any, outputs: list[torch.Tensor]) -> Any:
            if not self.whole:
                raise RuntimeError(f"{name} over {self.description} cannot be done after members have failed")
            return launch(native, outputs)

        return self._run(outputs, checked, differs=True)

    def scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Work:
        """Scatter as torch does. Raises RuntimeError if members have failed."""
        return self._whole_only("scatter", outputs, lambda native, found: native.scatter(found, inputs, opts))

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any) -> Work:
        """Reduce and scatter as torch does. Raises RuntimeError if members have failed and have no shards."""
        return self._reduce_scatter_base(outputs[0], torch.stack(inputs[0]), opts)

    def _reduce_scatter_base(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> Work:
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> Work:
        """Reduce one tensor and scatter it; with shards, also reduce the part that this rank holds a copy of."""
        return self.reduce_scatter_single_coalesced([output], [given], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Reduce and scatter several tensors, each as `reduce_scatter_single`."""
        # Inputs are reduced in place.
        counts, many = [counts_of([each]) for each in inputs], len(outputs)
        scale = self._sum_means(opts) if all(counts) else None
        scatters = [self._scattering(opts) for _ in outputs]

        def launch(native: Any, changed: list[torch.Tensor]) -> Any:
            if scale is not None:
                scale(changed[many : 2 * many])
            pairs = zip(scatters, changed[:many], changed[many : 2 * many], counts, strict=True)
            return CoalescedWork([scatter(native, output, given, counted) for scatter, output, given, counted in pairs])

        changed = [*outputs, *inputs, *itertools.chain(*counts)]
        return self._run(changed, launch, own_memory=all(counts), differs=True)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Do as `reduce_scatter_single_coalesced`, which had this name before torch 2.13."""
        return self.reduce_scatter_single_coalesced(outputs, inputs, opts)

    def _scattering(self, opts: Any) -> Callable[[Any, torch.Tensor, torch.Tensor, list[torch.Tensor]], Any]:
        """Return a function that reduces a tensor and its counts over all members, and writes this member's part."""
        options = dist.AllreduceOptions()
        options.reduceOp = opts.reduceOp

        def launch(native: Any, output: torch.Tensor, given: torch.Tensor, counts: list[torch.Tensor]) -> Any:
            parts = given.view(self.size(), -1)
            if self.whole and not native.is_gloo:
                works = [native._reduce_scatter_base(output, given, opts)]
                if self.holders is not None:
                    held = parts[self.holders.index(self.place)]
                    # The copy's holder needs the same reduced gradients as the owner, to take the same step.
                    works.append(self._handing_on(native, output.view(-1), held))
                works += [native.allreduce([each], options) for each in counts]
                return works[-1]  # of one queue
            kept = self.holders is None and not self.has_shards
            if not self.whole and kept:
                raise RuntimeError(f"reduce_scatter over {self.description} cannot be done after members have failed")
            # An all-reduce, as gloo itself implements reduce_scatter, but gloo's handle of that ignores timeouts. Since
            # every rank gets all parts, the stand-in of a failed rank also has that rank's part.
            whole: torch.Tensor = parts.clone() if kept else parts
            if counts:
                summed = self._sum_counted(native, [whole], counts, opts.reduceOp)
            else:
                self._reduced([whole], opts.reduceOp)
                summed = native.allreduce([whole], options)
            return CallbackWork(summed, lambda: output.copy_(whole[self.rank()].view_as(output)))

        return launch

    def hand_on(self, given: torch.Tensor, received: torch.Tensor) -> Work:
        """Send `given` [n] to the holder of this rank's shard, and receive the shard that this rank holds a copy of."""
        return self._run([received], lambda native, found: self._handing_on(native, given, found[0]), differs=True)

    def _handing_on(self, native: Any, given: torch.Tensor, received: torch.Tensor) -> Any:
        assert self.holders is not None
        to, frm = [0] * self.size(), [0] * self.size()
        to[self.holders[self.place]], frm[self.holders.index(self.place)] = given.numel(), received.numel()
        return native.alltoall_base(received, given, frm, to, dist.AllToAllOptions())

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any) -> Work:
        """Exchange as torch does. Raises RuntimeError if members have failed."""
        return self._whole_only("alltoall", outputs, lambda native, found: native.alltoall(found, inputs, opts))

    def alltoall_base(
        self, output: torch.Tensor, given: torch.Tensor, output_splits: Any, input_splits: Any, opts: Any
    ) -> Work:
        """Exchange parts of one tensor as torch does. Raises RuntimeError if members have failed."""
        return self._whole_only(
            "alltoall",
            [output],
            lambda native, found: native.alltoall_base(found[0], given, output_splits, input_splits, opts),
        )

    def all_to_all_single(
        self, output: torch.Tensor, given: torch.Tensor, output_splits: Any, input_splits: Any, opts: Any
    ) -> Work:
        """Do as `alltoall_base`, by its newer name."""
        return self.alltoall_base(output, given, output_splits, input_splits, opts)


def counts_of(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Return the micro-batch counts that are reduced together with `tensors`."""
    return [getattr(tensor, COUNTS) for tensor in tensors if hasattr(tensor, COUNTS)]
