# SPDX-License-Identifier: Apache-2.0
"""Let a cell compute any replica's micro-batches: inputs before each forward, losses after the last one.

A replica's own iterator yields its micro-batches in order; micro-batches that are computed elsewhere are skipped. Data
of another replica's micro-batch come from that replica's share of the samples, which Megatron-LM's samplers
(megatron/training/datasets/data_samplers.py: MegatronPretrainingSampler) can compute on any rank.

Experts may span data-parallel ranks: these are lanes of one replica, with data and losses of their own. Micro-batch n
of a replica is then the n-th of each of its data-parallel ranks; each lane stands in for the same lane of the others.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.layout import Cell, JobLayout
from adaptra_megatron.common.typed_messages import packed, unpacked
from adaptra_megatron.elastic.failure_errors import LateRankError, of_script, owned
from adaptra_megatron.elastic.protocol_store import said_by_one
from adaptra_megatron.megatron.compat import data_parallel_group
from adaptra_megatron.megatron.computation import Input
from adaptra_megatron.megatron.megatron_call import PipelineCall
from adaptra_megatron.megatron.megatron_iteration import repeats_iteration
from adaptra_megatron.megatron.refusals import UnsupportedFeatureError
from adaptra_megatron.megatron.state.attempt_state import MicroBatchRandom
from adaptra_megatron.megatron.state.random_draws import DRAWS
from adaptra_megatron.schedule.routing.balance import balanced_replicas
from adaptra_megatron.transport.gpu.training_device import current_device


class MicroBatchSource(NamedTuple):
    """Source of any replica's micro-batches, by replica and number since the training began."""

    micro_batch: Callable[[int, int], Any]
    """Returns the data that the replica's iterator yields."""
    length: Callable[[int, int], float] | None = None
    """Returns the cost of computing it, in a unit of its own; None if costs are unknown."""


class Home(NamedTuple):
    """Data-parallel rank and number of a micro-batch."""

    share: int
    number: int
    """Number within its iteration."""


class MicroBatchFeed(Iterator[Any]):
    """Data iterator of one model chunk that yields the micro-batch selected for computation."""

    def __init__(self, own: Iterator[Any], share: int) -> None:
        """`own`: iterator of the training script. `share`: this rank's data-parallel rank."""
        self.own, self._share = own, share
        self._source = source_of(own)
        self._first = self._next = 0
        """Numbers, since the training began, of the first micro-batches of this iteration and of the next."""
        self._read: list[Any] = []
        """Items that `own` has yielded in this iteration."""
        self._reads = False
        """True once this stage has read data: stages in the middle do not."""
        self._taken = self._taken_before = 0
        """Number of items that `own` has yielded since the training began: now, and at the beginning of this iteration.
        If this stage has had no work so far, as after a restart, `own` is behind.
        """
        self._home = Home(share, 0)

    @property
    def routable(self) -> bool:
        """Return whether other replicas' micro-batches are available here."""
        return self._source is not None

    def lengths(self, shares: Sequence[Sequence[int]], micro_batches: int) -> list[list[float]] | None:
        """Return the relative costs of this iteration's micro-batches, [replica][number]; None if unknown.

        `shares`: data-parallel ranks of each replica, which compute in step.
        """
        if self._source is None or (length := self._source.length) is None:
            return None
        numbers = range(self._first, self._first + micro_batches)
        return [[max(length(share, number) for share in each) for number in numbers] for each in shares]

    def begin_iteration(self, own: Iterator[Any], *, repeated: bool) -> None:
        """Begin an iteration. `own`: the training script's iterator for it.

        `repeated`: whether it repeats the previous iteration, so that `own` yields the same data again.
        """
        self.own = own
        if self._next == self._first:
            return  # it is attempted again
        if repeated:
            self._next, self._taken = self._first, self._taken_before
        else:
            self._first, self._taken_before = self._next, self._taken

    def select(self, home: Home) -> None:
        """Select the micro-batch that is read next."""
        self._home = home

    def __next__(self) -> Any:
        self._reads = True
        if self._home.share == self._share:
            self._read_through(self._home.number)
            return self._read[self._home.number]
        assert self._source is not None, f"{self._home} was routed to share {self._share}, which cannot read it"
        return self._source.micro_batch(self._home.share, self._first + self._home.number)

    def end_iteration(self, micro_batches: int) -> None:
        """End the iteration: all of its micro-batches have been computed, here or elsewhere."""
        if self._reads:
            self._read_through(micro_batches - 1)
        self._next = self._first + micro_batches
        self._read.clear()

    def _read_through(self, number: int) -> None:
        while self._taken <= self._first + number:
            with of_script():
                found = next(self.own)
            self._read += [found] * (self._taken >= self._first)
            self._taken += 1


def source_of(iterator: Any) -> MicroBatchSource | None:
    """Return the source of all replicas' micro-batches behind `iterator`; None if there is none.

    Supported are adaptra_megatron.routable_data, and iterators of torch's DataLoader over Megatron's sequential
    sampler, also inside Megatron's RerunDataIterator.
    """
    while iterator is not None:
        if (given := getattr(iterator, "micro_batch", None)) is not None:
            length = getattr(iterator, "length", None)
            return MicroBatchSource(owned(given), None if length is None else owned(length))
        sampler = getattr(iterator, "_index_sampler", None)  # torch.utils.data.dataloader._BaseDataLoaderIter
        if sampler is not None:
            return MicroBatchSource(owned(SampledShares(sampler, iterator))) if _is_sequential(sampler) else None
        iterator = getattr(iterator, "iterable", None)  # megatron.core.rerun_state_machine.RerunDataIterator
    return None


def _is_sequential(sampler: Any) -> bool:
    """Return whether `SampledShares` can compute a sampler's samples. The shuffling sampler has no attributes with the
    start and end of a share.
    """
    if not hasattr(sampler, "get_start_end_idx") or not hasattr(sampler, "micro_batch_times_data_parallel_size"):
        return False
    return next(iter(sampler), None) == _samples(sampler, sampler.data_parallel_rank, 0)


def _samples(sampler: Any, replica: int, number: int) -> list[int]:
    """Return the sample indices of a replica's micro-batch: each global batch is split among all replicas."""
    sampler = copy.copy(sampler)
    sampler.data_parallel_rank = replica
    start, end = sampler.get_start_end_idx()
    first = sampler.consumed_samples + number * sampler.micro_batch_times_data_parallel_size
    return list(range(first + start, first + end))


class SampledShares:
    """Other replicas' shares of a data loader's samples. Reads only routed micro-batches, without worker processes."""

    def __init__(self, sampler: Any, loader: Any) -> None:
        """`loader`: torch's iterator of a DataLoader, for its data set and collate function."""
        self._sampler, self._dataset, self._collate = sampler, loader._dataset, loader._collate_fn

    def __call__(self, replica: int, number: int) -> Any:
        """Return the `number`-th micro-batch of `replica`."""
        return self._collate([self._dataset[index] for index in _samples(self._sampler, replica, number)])


# Brings losses home: each replica hands its training script those of its own micro-batches.

Reports = Mapping[str, torch.Tensor]
"""Last result of a loss function: tensors of numbers by name, with the same shapes for all micro-batches."""


_MOST_NBYTES = 1 << 16


class _Form(NamedTuple):
    """Names, shapes and dtypes that all loss reports share."""

    names: list[str]
    shapes: list[list[int]]
    dtypes: list[str]
    """dtypes as torch prints them."""


def form_of(reports: Any) -> bytes | None:
    """Return names, shapes and dtypes of reports, for processes without one; None if `reports` is no dictionary of
    tensors.
    """
    if not isinstance(reports, Mapping) or not all(isinstance(each, torch.Tensor) for each in reports.values()):
        return None
    values = reports.values()
    return packed(_Form([*reports], [[*each.shape] for each in values], [str(each.dtype) for each in values]))


def reports_like(form: bytes, device: torch.device) -> Reports:
    """Return uninitialised reports of a form. Raises ValueError for an invalid form."""
    names, shapes, dtypes = unpacked(form, _Form, _MOST_NBYTES)
    known = {str(each): each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    return {
        name: torch.empty(shape, dtype=known[dtype], device=device)
        for name, shape, dtype in zip(names, shapes, dtypes, strict=True)
    }


def brought_home(
    computed: Mapping[Home, Reports],
    wanted: Sequence[int],
    shares: int,
    micro_batches: int,
    like: Reports,
    add_up: Callable[[torch.Tensor], None],
) -> Sequence[Reports]:
    """Return the reports of all micro-batches of the `wanted` shares, in order, from the ranks that computed them.

    `computed`: reports of this rank. `like`: any report, for names, shapes and dtypes. `add_up`: sums a float64 tensor
    [shares, micro_batches, numbers] over the data-parallel ranks of the last stage, in place. Each entry is set by one
    rank and 0 elsewhere, so the sums equal the reports bit for bit.
    """
    shapes = {name: value.shape for name, value in like.items()}
    numbers = torch.zeros(shares, micro_batches, sum(shape.numel() for shape in shapes.values()), dtype=torch.float64)
    for home, reports in computed.items():
        flat = [reports[name].detach().reshape(-1).to("cpu", torch.float64) for name in shapes]
        numbers[home.share, home.number] = torch.cat(flat)
    add_up(numbers)
    return [_unpacked(row, like) for share in wanted for row in numbers[share]]


def _unpacked(row: torch.Tensor, like: Reports) -> dict[str, Any]:
    parts = torch.split(row, [value.numel() for value in like.values()])
    return {
        name: part.reshape(value.shape).to(value.device, value.dtype)
        for (name, value), part in zip(like.items(), parts, strict=True)
    }


def set_cast_anew(call: PipelineCall, routed: bool) -> None:
    """Have Transformer Engine cast weights anew in each forward, recomputed ones, too, and add all weight gradients.

    Else it uses the weights that a first micro-batch has cast, those of an earlier iteration where none is the first,
    and the gradients of a first one overwrite main_grad (linear.py, accumulate_wgrad_into_param_main_grad), even if
    others were added before. `routed`: False restores Megatron's configuration.
    """
    layers: Iterator[Any] = (layer for chunk in call.model_chunks for layer in chunk.modules())
    for layer in layers:
        if hasattr(layer, "is_first_microbatch"):
            layer.disable_parameter_transpose_cache = routed or call.config.disable_parameter_transpose_cache


class RoutableInputs:
    """Inputs and losses of one rank, for the life of the job. Used in training, and in evaluation if ranks may fail."""

    def __init__(
        self,
        call: PipelineCall,
        control: ControlStore,
        layout: JobLayout,
        timeout_s: float,
        *,
        swap: bool = True,
        joins: bool = False,
        fails: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """All ranks of the job construct this with their first training iteration.

        `swap`: whether whole micro-batches are swapped between replicas if their lengths are known. `joins`: whether
        this process is rejoining. `fails`: whether ranks may fail. `check`: raises once one has. Raises
        UnsupportedFeatureError if replicas cannot compute each other's micro-batches, or ranks disagree on lengths;
        RuntimeError if replica 0 does not come in time.
        """
        self._peers = data_parallel_group(call.groups)
        ranks = dist.get_process_group_ranks(self._peers)
        self._shares = shares_of(ranks, layout)
        """Data-parallel ranks of each replica."""
        place = self._shares[layout.cell.replica].index(ranks.index(layout.rank))
        self._stand_ins = [each[place] for each in self._shares]
        """Data-parallel rank of this lane in each replica."""
        self._layout, self._control, self._timeout_s = layout, control, timeout_s
        replica = layout.cell.replica
        self._all_feeds: dict[bool, list[MicroBatchFeed | None]] = {}
        """Entries for training (False), and for the latest evaluation's iterators (True)."""
        self._feeds = self._feeds_of(call)
        self._random: MicroBatchRandom | None = None
        # An attempt that a failure interrupts leaves lanes at different draws, also those of a script's own layers.
        if fails or any(draw.is_on(call.config) for draw in DRAWS):
            self._random = MicroBatchRandom.agreed(control, layout, timeout_s, says=replica == 0 and not joins)
        self._iteration, self._routed, self._micro_batches = 0, False, call.micro_batches
        self._reported: tuple[int, ...] = (self._stand_ins[replica],)
        lengths = self._lengths() if swap else None
        self.swaps = lengths is not None
        """True if lengths are known, so that whole micro-batches are swapped between replicas."""
        self.swapped = 0
        """Number of other replicas' micro-batches that this one has computed by swaps."""
        self._instead: list[int] | None = None
        """Job-wide number of the micro-batch computed in place of each one; None if nothing is swapped."""
        if not joins:
            self._check_agreed(lengths)
        if receives_wait(call) and not self.swaps:
            raise UnsupportedFeatureError(
                "--adaptra-reroute does not route with --variable-seq-lengths on GPUs: a receive of unknown size waits "
                "for a header, and routed orders do not place that wait. Hand in an adaptra_megatron.routable_data "
                "with `length`, by which whole micro-batches are swapped instead, or drop one of the two"
            )
        self._losses_of: list[Home] = []
        """Micro-batches whose losses were computed here, in order."""
        self._like: Any = None
        """Report of some loss function; None before the first."""
        self._check, self._says_form = check, True
        """True until this rank has published the form of reports, for ranks that have seen none: routes may leave a
        restarted rank without work, or one in whose first iteration another rank fails."""

    @property
    def routable(self) -> bool:
        """Return whether other replicas' data are available to this rank, if its stage reads data."""
        return all(feed is None or feed.routable for feed in self._feeds)

    def begin(
        self,
        call: PipelineCall,
        iteration: int,
        *,
        routed: bool,
        slowness: Sequence[float] = (),
        dead: frozenset[Cell] = frozenset(),
    ) -> None:
        """Begin an attempt at an iteration. All arguments are the same on all ranks.

        `routed`: whether micro-batches have job-wide numbers. `slowness`: of each replica; empty: all are alike.
        `dead`: cells that get no work. Raises UnsupportedFeatureError if dead cells' data are not available here.
        """
        repeated = not call.forward_only and repeats_iteration()
        self._iteration = self._iteration if repeated else iteration
        if routed != self._routed:
            set_cast_anew(call, routed)
        self._routed, self._micro_batches = routed, call.micro_batches
        self._last_place = call.last_place
        self._losses_of.clear()
        self._feeds = self._feeds_of(call)
        for feed, own in zip(self._feeds, call.data_iterators, strict=True):
            if feed is not None and own is not None:
                feed.begin_iteration(own, repeated=repeated)
        self._reported = tuple(self._stand_ins[replica] for replica in self._reported_replicas(dead))
        if dead and not self.routable:
            raise UnsupportedFeatureError(
                f"--adaptra-reroute: the {'evaluation' if call.forward_only else 'training'} data iterator of rank "
                f"{self._layout.rank} cannot say what dead replicas would have read; hand in an "
                "adaptra_megatron.routable_data"
            )
        if call.forward_only:
            self._instead = None
        else:
            self._swap(slowness)

    def __call__(self, chunk: int, micro_batch: int) -> Input:
        """Return the input of the next forward, of `micro_batch`."""
        job = micro_batch if self._routed else self._layout.cell.replica * self._micro_batches + micro_batch
        if self._instead is not None:
            job = self._instead[job]
        replica, number = divmod(job, self._micro_batches)
        home = Home(self._stand_ins[replica], number)
        if self._random is not None:
            self._random.begin(self._iteration, *home, chunk)
        if (self._layout.cell.stage, chunk) == self._last_place:
            self._losses_of.append(home)
        if (feed := self._feeds[chunk]) is not None:
            feed.select(home)
        # The place, not the home's number: Transformer Engine's CUDA graphs are replayed in the order of their capture.
        return Input(feed, micro_batch % self._micro_batches, self._routed)

    def end(self, losses: list[Any], *, losses_moved: bool) -> list[Any]:
        """Return the losses for the training script, from the `losses` computed here and elsewhere.

        The result covers this replica, and replicas whose last stage is dead if this rank reports for them.
        `losses_moved`: whether any route led to another replica's cell of the last stage. Raises LateRankError if one
        of the losses is missing.
        """
        if self._layout.cell.stage != self._last_place.stage:
            return losses
        self._like = losses[0] if losses else self._like
        computed = dict(zip(self._losses_of, losses, strict=True))
        if not losses_moved and self._instead is None:
            return [computed[home] for home in sorted(computed)]
        form = form_of(losses[0]) if losses and self._says_form else None
        if form is not None or self._like is None:
            self._share_form(form)
        shares = sum(map(len, self._shares))
        return list(brought_home(computed, self._reported, shares, self._micro_batches, self._like, self._add_up))

    def _share_form(self, form: bytes | None) -> None:
        """Publish the form of reports; if it is unknown here, wait until a cell of the last stage publishes it.

        Raises LateRankError if none does, and the errors of `check`.
        """
        with self._control.lent("reports", self._timeout_s) as store:
            try:
                form = said_by_one(store, "form", form, self._timeout_s, self._check)
            except TimeoutError as cause:
                raise LateRankError(
                    f"timed out: no cell of the last stage has computed micro-batches within {self._timeout_s:g} s "
                    "(--adaptra-timeout-s); look at the first rank whose log stops"
                ) from cause
        self._says_form = False
        self._like = self._like or reports_like(form, current_device())

    def ended(self) -> None:
        """Release the iteration's micro-batches, since it will not be attempted again."""
        for feed in self._feeds:
            if feed is not None:
                feed.end_iteration(self._micro_batches)

    def _feeds_of(self, call: PipelineCall) -> list[MicroBatchFeed | None]:
        """Return the data feed of each chunk. Evaluations may have new iterators."""
        found = self._all_feeds.get(call.forward_only)
        if found is None or (call.forward_only and _owners(found) != list(map(id, call.data_iterators))):
            share = self._stand_ins[self._layout.cell.replica]
            found = [None if own is None else MicroBatchFeed(own, share) for own in call.data_iterators]
            self._all_feeds[call.forward_only] = found
        return found

    def _reported_replicas(self, dead: frozenset[Cell]) -> tuple[int, ...]:
        """Return the replicas whose losses this rank returns: its own; on the lowest live one, also those of failed
        cells.
        """
        replica, last = self._layout.cell.replica, self._last_place.stage
        replicas = range(self._layout.replicas)
        orphans = [each for each in replicas if Cell(each, last) in dead]
        loss_reporter = next((each for each in replicas if each not in orphans), None)
        return (replica, *orphans) if replica == loss_reporter else (replica,)

    def _lengths(self) -> list[list[float]] | None:
        feed = next((feed for feed in self._feeds if feed is not None), None)
        return None if feed is None else feed.lengths(self._shares, self._micro_batches)

    def _check_agreed(self, lengths: list[list[float]] | None) -> None:
        """Raise UnsupportedFeatureError unless all ranks know the same lengths.

        If only some ranks swapped micro-batches, the inputs of one micro-batch would meet the labels of another.
        """
        layout, mine = self._layout, hashlib.blake2b(repr(lengths).encode(), digest_size=16).digest()
        store = self._control.client("lengths")
        store.set_timeout(timedelta(seconds=self._timeout_s))
        if layout.rank == layout.leader:
            store.set("first", mine)
        if store.get("first") != mine:
            says = "no lengths, unlike" if lengths is None else "other lengths than"
            raise UnsupportedFeatureError(
                f"--adaptra-reroute: for the first iteration's micro-batches the data iterator of rank {layout.rank} "
                f"says {says} that of rank {layout.leader}: hand in an adaptra_megatron.routable_data with the same "
                "`length` on every rank, also where no data are read, or one without on all"
            )

    def _swap(self, slowness: Sequence[float]) -> None:
        """Assign the iteration's micro-batches to replicas, the same way on every rank."""
        self._instead, count, replica = None, self._micro_batches, self._layout.cell.replica
        if not self.swaps or (lengths := self._lengths()) is None:
            return
        dealt = balanced_replicas(lengths, slowness)
        instead = [job for row in dealt for job in row]
        if any(job // count != place // count for place, job in enumerate(instead)):
            self._instead = instead
            self.swapped += sum(job // count != replica for job in dealt[replica])

    def _add_up(self, numbers: torch.Tensor) -> None:
        on_device = numbers.to(current_device())
        dist.all_reduce(on_device, group=self._peers)
        numbers.copy_(on_device)


def _owners(feeds: Sequence[MicroBatchFeed | None]) -> list[int]:
    return [id(None if feed is None else feed.own) for feed in feeds]


def receives_wait(call: PipelineCall) -> bool:
    """Return whether a receive of unknown size makes a GPU wait for a header, which routed orders do not allow for."""
    return call.message_shape is None and current_device().type == "cuda"


def shares_of(ranks: Sequence[int], layout: JobLayout) -> list[list[int]]:
    """Return the data-parallel ranks of each replica, from the global `ranks` of the group of this rank.

    Raises UnsupportedFeatureError if there is no other replica.
    """
    if layout.replicas == 1:
        one = "there is one"
        if len(ranks) > 1:
            one = f"all {len(ranks)} meet in each forward: their experts span all of them, or a loss is a global one"
        raise UnsupportedFeatureError(
            f"--adaptra-reroute moves micro-batches between data-parallel replicas, and {one}. Drop it"
        )
    shares: list[list[int]] = [[] for _ in range(layout.replicas)]
    for share, rank in enumerate(ranks):
        shares[layout.workers[rank].cell.replica].append(share)
    lanes = [[layout.workers[ranks[share]].lane for share in each] for each in shares]
    assert lanes == lanes[:1] * len(lanes), f"lanes differ between replicas: {lanes}"
    return shares
