# SPDX-License-Identifier: Apache-2.0
"""All process groups of one process that outlive their members, and what stands behind them in each epoch.

Inside a call of Megatron's schedules an operation that loses a member raises, and the call is attempted again. Outside
of calls each has a number, its result is kept, and it is repeated: by what another rank has kept if any has it, for
then some rank may have gone on with it, or else among those that live. So all ranks see one result of each.

Results are kept from one commit to the next: a rank that commits call n has seen all others come to the end of their
attempts at n, so all of them have done what comes before n. Replicas may be several operations apart, since what they
do between commits need not join them.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work
from torch.distributed.distributed_c10d import PrefixStore, _world

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.epochs.early_watch import EarlyWatch
from adaptra_megatron.epochs.errors import EpochEndedError, LateRankError, is_communication, of_backend
from adaptra_megatron.epochs.handles import Done, Pending
from adaptra_megatron.epochs.live_group import LiveGroup
from adaptra_megatron.epochs.places import place_to_take, refuse_newcomer
from adaptra_megatron.job.control_store import ControlStore
from adaptra_megatron.job.layout import JobLayout
from adaptra_megatron.job.membership import Departure
from adaptra_megatron.job.process_groups import epoch_group, nccl_group

Made = TypeVar("Made")

SLICE = timedelta(milliseconds=20)
"""For how long a wait looks away from the set of live ranks."""
MOST_KEPT_NBYTES = 16 << 20
"""Largest results of one operation that are kept."""
_NAME = "adaptra"

Results = Mapping[str, Sequence[bytes] | None]
"""By "<group>/<number of commits>/<number of the operation since then>": bytes of each output; None where that was too
much to keep."""


def live_groups(config: AdaptraConfig) -> LiveGroups | None:
    """Those of this process, in place from now on, where `config` asks for training that outlives ranks.

    Raises RuntimeError where torch.distributed has been initialised already, UnrecoverableError where this process has
    been started again and cannot take part.
    """
    if not config.outlives_ranks:
        refuse_newcomer(config.reroute)
        return None
    groups = LiveGroups(place := place_to_take())
    groups.install()
    if place is None:
        groups.early_watch = EarlyWatch()
    return groups


class LiveGroups:
    """Made before torch.distributed is initialised. For the training thread, but where said."""

    def __init__(self, place: Departure | None = None) -> None:
        """`place`: that this process takes in a job that has begun. Until it is admitted, its groups have it alone for
        a member, which gets from the others what it has itself."""
        self.place = place
        self.ended = threading.Event()
        """Set, from any thread, once the set of live ranks has changed; cleared by `enter`."""
        self.early_watch: EarlyWatch | None = None
        """Until members are outlived."""
        self.stale = False
        """Set where members have died: what was to be gathered of shards may not have been, until it is gathered again
        in a call."""
        self._groups: list[LiveGroup] = []
        self.rank = 0
        """This process's global one."""
        self._description = "group"
        self._natives: dict[tuple[LiveGroup, str], Any] = {}
        self._timeout_s = 0.0
        self._store: Any = None
        self._control: ControlStore | None = None
        """Where groups meet; None: in the job's store, before there is anything to outlive."""
        self._epoch = 0
        self._inside = False
        self._layout: JobLayout | None = None
        self._recover: Callable[[Exception], None] | None = None
        self._commits = 0
        """Since this rank, or the last one that was started again, takes part."""
        self._kept: dict[str, list[bytes] | None] = {}
        self._others: Results = {}
        self._undo: list[Callable[[], None]] = []

    # What torch.distributed sees.

    def install(self) -> None:
        """Have every process group that is made from now on be one of these. Raises RuntimeError if there is any."""
        if dist.is_initialized():
            raise RuntimeError(
                "--adaptra-reroute failures has to be given before torch.distributed is initialised: groups that exist "
                "do not outlive their members"
            )
        dist.Backend.register_backend(_NAME, self._create, extended_api=True, devices=["cpu", "cuda"])
        # By a watchdog of its own, torch would end this process for another's death.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        for name in ("init_process_group", "new_group"):
            self._replace(name)

    def uninstall(self) -> None:
        """Let torch.distributed make its own groups again."""
        if self.early_watch is not None:
            self.early_watch.close()
        while self._undo:
            self._undo.pop()()
        delattr(dist.Backend, _NAME.upper())
        dist.Backend.backend_list.remove(_NAME)

    def _replace(self, name: str) -> None:
        original = getattr(dist, name)

        @functools.wraps(original)
        def made(*given: Any, **keywords: Any) -> Any:
            for theirs in ("backend", "pg_options", "device_id"):
                keywords.pop(theirs, None)
            self._description = str(keywords.get("group_desc") or "group")
            if name == "init_process_group":
                given = given[1:]  # a backend
            return original(*given, **keywords, backend=_NAME)

        setattr(dist, name, made)
        self._undo.append(lambda: setattr(dist, name, original))

    def _create(self, options: Any, _backend_options: Any) -> LiveGroup:
        """What torch's `_new_process_group_helper` takes for the process group itself, as it is a subclass."""
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        if not self._groups:
            self.rank, self._timeout_s = options.group_rank, options.timeout.total_seconds()
            self._store = options.store
        made = [group.description.partition("#")[0] for group in self._groups if group.ranks == tuple(ranks)]
        group = LiveGroup(self, ranks, self.rank, f"{self._description}#{made.count(self._description)}")
        if self.place is not None:
            group.members, group.stand_ins = (self.rank,), dict.fromkeys(group.ranks, self.rank)
        self._groups.append(group)
        return group

    @property
    def device(self) -> torch.device:
        """Where collectives of objects and barriers have their tensors."""
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    # What each epoch puts behind them.

    def begin(self, layout: JobLayout, control: ControlStore, recover: Callable[[Exception], None]) -> None:
        """Outlive members from now on. `recover`: goes on in the next epoch, in which an operation outside of calls
        that has failed is repeated, or raises."""
        if self.early_watch is not None:
            self.early_watch.close()
        self._layout, self._recover = layout, recover
        self._control = control

    def enter(self, epoch: int, control: ControlStore, live: frozenset[int], results: Results) -> None:
        """Go on with the `live` ranks. `results`: what any of them has kept."""
        assert self._layout is not None
        self.leave()
        self._epoch, self._control, self._others = epoch, control, results
        for group in self._groups:
            _set_members(group, self._layout, live)
        self.stale = True
        self.ended.clear()

    def number_anew(self) -> None:
        """All that have met have done all operations so far, and those who join them have numbered none."""
        self.committed()
        self._commits = 0

    def lost_shards(self, live: frozenset[int]) -> list[tuple[int, ...]]:
        """Ranks that do not live and had the same shard, which no other has: its owner first."""
        known: list[tuple[int, ...]] = [
            (group.ranks[place], group.ranks[holder])
            for group in self._groups
            for place, holder in enumerate(group.holders or ())
        ]
        known += [tuple(ranks) for group in self._groups if group.has_shards for ranks in (group.alike or {}).values()]
        return sorted({ranks for ranks in known if live.isdisjoint(ranks)})

    def leave(self) -> None:
        """Give up what the present epoch's groups have under way: closed connections wake the members at once.

        Not in this thread, which would wait for gloo's own to end.
        """
        natives, self._natives = self._natives, {}
        # No name here may be the last to hold one of gloo's.
        for native in [each for each in natives.values() if not isinstance(each, dist.ProcessGroupGloo)]:
            native.abort()
        threading.Thread(target=natives.clear, name="adaptra-leave", daemon=True).start()

    def native(self, group: LiveGroup, device: torch.device) -> Any:
        """Torch's own group of those that take part, made when first needed, by all of them."""
        key = group, device.type
        if key not in self._natives:
            with of_backend():
                self._natives[key] = interruptible(
                    lambda: self._make_native(group, device.type), self.check, self._timeout_s, "a process group"
                )
        return self._natives[key]

    def _make_native(self, group: LiveGroup, device: str) -> Any:
        members, place = list(group.members), hashlib.blake2b(digest_size=12)
        place.update(f"{group.description}/{group.members}/{device}".encode())
        name = f"live/{place.hexdigest()}"
        if self._control is None:
            store = PrefixStore(name, self._store.clone() if hasattr(self._store, "clone") else self._store)
            if device == "cpu":
                timeout = timedelta(seconds=self._timeout_s)
                return dist.ProcessGroupGloo(store, members.index(self.rank), len(members), timeout)
            return nccl_group(store, members.index(self.rank), len(members), self._timeout_s)
        if device == "cpu":
            return epoch_group(self._control, name, members, self.rank, self._timeout_s)
        store = self._control.unsealed(name)
        return nccl_group(store, members.index(self.rank), len(members), self._timeout_s)

    # Operations.

    @contextmanager
    def call(self) -> Iterator[None]:
        """A call of Megatron's schedules: what fails raises, and is not repeated by itself."""
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    @contextmanager
    def numbered_alive(self) -> Iterator[None]:
        """Number ranks meanwhile as if those that live were all, for what is written for others to read: in the group
        of all, and in those of one stage in several replicas. Within a replica, stages and lanes keep their numbers.
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
                known[group] = {places.get(rank, -1 - rank): place for rank, place in ranks.items()}
        try:
            yield
        finally:
            for group, ranks in before.items():
                group.renumbered, known[group] = False, ranks

    def check(self) -> None:
        """Raise EpochEndedError once the set of live ranks has changed."""
        if self.ended.is_set():
            raise EpochEndedError(f"epoch {self._epoch} has ended: the set of live ranks has changed")

    def run(
        self, group: LiveGroup, outputs: Sequence[torch.Tensor], launch: Callable[[Any], Any], *, renewed: bool = False
    ) -> Work:
        """Carry an operation out. `outputs`: what it changes, and reads. `renewed`: where it fails outside of calls it
        is not repeated, for all do it again while they are `stale`."""
        device = outputs[0].device
        if self._inside or self._layout is None:
            self.check()
            return Pending(self, launch(self.native(group, device)))
        if renewed:
            while not self.stale and not self._done(launch, group, device):
                pass
            return Done()
        place = f"{self._key(group)}/{self._commits}/{group.operations}"
        group.operations += 1
        before = [output.clone() for output in outputs]
        while not self._known(place, outputs) and not self._done(launch, group, device):
            for output, given in zip(outputs, before, strict=True):
                output.copy_(given)
        self._keep(place, outputs)
        return Done()

    def _done(self, launch: Callable[[Any], Any], group: LiveGroup, device: torch.device) -> bool:
        """Carry an operation outside of calls out; False if it lost a member, and the next epoch has begun."""
        try:
            self.check()
            self.wait_for(launch(self.native(group, device)))
        except Exception as cause:
            if not is_communication(cause):
                raise
            assert self._recover is not None
            self._recover(cause)
            return False
        return True

    def wait_for(self, work: Any) -> None:
        """Wait for torch's handle. Raises EpochEndedError once the set of live ranks has changed, LateRankError after
        the job's timeout, and what the operation raises."""
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            try:
                with of_backend():
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
        if not self._inside:
            self.synchronize()

    def synchronize(self) -> None:
        """Wait until the device has done what was launched. Raises EpochEndedError as all waits."""
        if not torch.cuda.is_available():
            return
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        while not event.query():
            self.check()

    # What is kept of operations outside of calls.

    def committed(self) -> None:
        """All live ranks have done all operations so far. Those of joined groups count on from the same: one optimizer
        instance may have gathered for a checkpoint what the others need not."""
        self._kept.clear()
        self._others = {}
        self._commits += 1
        for group in self._groups:
            group.operations = 0

    def kept(self) -> Results:
        """Results of the operations since the last commit."""
        return dict(self._kept)

    def _known(self, place: str, outputs: Sequence[torch.Tensor]) -> bool:
        if place not in self._others:
            return False
        found = self._others[place]
        if found is None:
            raise RuntimeError(f"the result of {place} is lost: it has more than {MOST_KEPT_NBYTES >> 20} MiB")
        for output, packet in zip(outputs, found, strict=True):
            flat = torch.frombuffer(bytearray(packet), dtype=torch.uint8)
            output.copy_(flat.view(output.dtype).view(output.shape) if output.numel() else output)
        return True

    def _keep(self, place: str, outputs: Sequence[torch.Tensor]) -> None:
        if sum(output.nbytes for output in outputs) > MOST_KEPT_NBYTES:
            self._kept[place] = None
            return
        flat = [output.detach().cpu().contiguous().reshape(-1) for output in outputs]
        self._kept[place] = [each.view(torch.uint8).numpy().tobytes() if each.numel() else b"" for each in flat]

    def _key(self, group: LiveGroup) -> str:
        """Equal for groups that are joined where ranks have died: those of the same stages and lanes of replicas."""
        assert self._layout is not None
        joined = alike(group, self._layout)
        return f"{group.description}/{sorted(ranks[0] for ranks in joined.values()) or list(group.ranks)}"


def interruptible(make: Callable[[], Made], check: Callable[[], None], timeout_s: float, what: str) -> Made:
    """What `make` makes (`what`, in words), in a thread that is left to itself if `check` raises meanwhile, or after
    `timeout_s`. Raises as both, and LateRankError."""
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
    threading.Thread(target=work, name="adaptra-interruptible", daemon=True).start()
    while not done.wait(SLICE.total_seconds()):
        check()
        if time.monotonic() > deadline_s:
            raise LateRankError(f"timed out: {what} has not been made within {timeout_s:g} s")
    if isinstance(found[0], Exception):
        raise found[0]
    made: Made = found[0]
    return made


def alike(group: LiveGroup, layout: JobLayout) -> Mapping[int, Sequence[int]]:
    """See `LiveGroup.alike`: joined are groups between stages of one replica, and those of an optimizer instance."""
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


def _set_members(group: LiveGroup, layout: JobLayout, live: frozenset[int]) -> None:
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
