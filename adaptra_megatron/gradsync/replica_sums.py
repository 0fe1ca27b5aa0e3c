# SPDX-License-Identifier: Apache-2.0
"""Sum over the replicas of one group, by the requested algorithm or the fastest one.

The fastest one depends on which replica arrives last, by how much, and how reliably. No clocks are compared: all
replicas leave a synchronisation at about the same time, so the one that spent the shortest time in it came last.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import torch

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.gradsync.all_reduce_algorithms import ALGORITHMS, STOCK, AlgorithmChoice, AllReduceWire, choose
from adaptra_megatron.gradsync.peer_messages import Peers
from adaptra_megatron.gradsync.straggler_all_reduce import StragglerAllReduce

logger = logger_of(__name__)


PERSISTENT = 4
"""Number of successive synchronisations at which a replica must come last before its delay is used.

If three replicas come last at random, one does so four times in a row once in 27 synchronisations. The mean cost is
less than 1% of an all-reduce.
"""
_KEPT = 9


class Lateness:
    """Measurements of one group of replicas. All replicas get the same numbers, and so agree."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._latest: deque[tuple[int, float]] = deque(maxlen=PERSISTENT)
        self._latencies_s: deque[float] = deque(maxlen=_KEPT)
        self._bytes_s: deque[float] = deque(maxlen=_KEPT)

    def saw(self, waits_s: Sequence[float], latency_s: float, stock_nbytes: int) -> None:
        """Record one synchronisation. `waits_s`: seconds that each replica spent in it, by index.

        `latency_s`: of a message. `stock_nbytes`: bytes that a library's all-reduce summed in it; 0 if it did not sum
        all.
        """
        last, delay_s = last_arrival(waits_s)
        self._latest.append((last, delay_s))
        self._latencies_s.append(latency_s)
        if stock_nbytes:
            steps_s = 2 * (self._ranks - 1) * latency_s
            per_byte = max(0.0, waits_s[last] - steps_s) / stock_nbytes
            self._bytes_s.append(per_byte * self._ranks / (2 * (self._ranks - 1)))

    @property
    def last(self) -> int:
        """Index of the replica that came last to the latest synchronisation; before the first, the last index."""
        return self._latest[-1][0] if self._latest else self._ranks - 1

    @property
    def sure_delay_s(self) -> float:
        """Return the minimum delay of the last replica over the latest `PERSISTENT` synchronisations; 0 if it was not
        always the same replica.
        """
        if len(self._latest) < PERSISTENT or len({last for last, _ in self._latest}) > 1:
            return 0.0
        return min(delay_s for _, delay_s in self._latest)

    @property
    def wire(self) -> AllReduceWire | None:
        """Return the median measurements; None before a library's all-reduce was measured."""
        return AllReduceWire(median(self._latencies_s), median(self._bytes_s)) if self._bytes_s else None


def last_arrival(waits_s: Sequence[float]) -> tuple[int, float]:
    """Return the index of the last of at least two replicas, and its delay after all others in seconds."""
    last = min(range(len(waits_s)), key=waits_s.__getitem__)
    return last, min(wait_s for index, wait_s in enumerate(waits_s) if index != last) - waits_s[last]


class _Waited(NamedTuple):
    """Measurement of one sum."""

    place: int
    seconds: float
    """Time that this replica spent in it."""
    stock_nbytes: int
    """See `Lateness.saw`."""


class ReplicaSums:
    """Sums of one replica. All replicas make the same calls in the same order, and so make the same choices."""

    def __init__(self, peers: Peers, mode: str) -> None:
        """`mode`: a name in `ALGORITHMS`, applied around the replica that came last before; or "auto": by the model."""
        self._peers, self._mode = peers, mode
        self._lateness: defaultdict[int, Lateness] = defaultdict(lambda: Lateness(peers.size))
        """Lateness by place in the iteration."""
        self._waited: list[_Waited] = []
        """Measurements that have not been shared yet."""
        self._chosen: defaultdict[int, str] = defaultdict(lambda: STOCK)
        self._plans: dict[tuple[str, int, int], StragglerAllReduce] = {}
        self.used: Counter[str] = Counter()
        """Number of synchronisations in which each algorithm was used."""

    def sum_up(self, values: Sequence[torch.Tensor], place: int) -> None:
        """Replace `values`, contiguous tensors [n], by their sums over all replicas.

        `place`: number of earlier sums in this iteration. At each of them another replica may be late, by another time.
        The measurement of a sum is used one iteration later for the first one, else two. Raises PeerError if a replica
        fails.
        """
        device, nbytes = values[0].device, sum(each.nbytes for each in values)
        if device.type == "cuda":
            # This replica is here once its gradients are, and not when it has launched what computes them.
            torch.cuda.current_stream(device).synchronize()
        begun_s = time.monotonic()
        choice = self._choice(nbytes, place)
        left = choice.nbytes if choice.algorithm != STOCK else 0
        for tensor in values:
            # The same on all replicas, for sizes are.
            part = min(tensor.numel(), left // tensor.element_size())
            if part:
                self._around_straggler(choice.algorithm, tensor[:part], self._lateness[place])
            if part < tensor.numel():
                self._peers.all_reduce(tensor[part:])
            left -= part * tensor.element_size()
        self._peers.settle()
        self.used[choice.algorithm] += 1
        stock_nbytes = nbytes if choice.algorithm == STOCK else 0
        self._waited.append(_Waited(place, time.monotonic() - begun_s, stock_nbytes))
        if place == 0:
            self._share(device)

    def _choice(self, nbytes: int, place: int) -> AlgorithmChoice:
        if self._mode != "auto":
            return AlgorithmChoice(self._mode, nbytes, 0.0)
        lateness = self._lateness[place]
        if lateness.wire is None:
            return AlgorithmChoice(STOCK, nbytes, 0.0)
        choice = choose(self._peers.size, nbytes, lateness.wire, lateness.sure_delay_s)
        if choice.algorithm != self._chosen[place] and self._peers.index == 0:
            logger.log(
                logging.DEBUG if place else logging.INFO,
                "gradients of bucket %d are summed up by %s from now on: replica %d of %d comes %.1f ms after all "
                "others",
                place,
                choice.algorithm,
                lateness.last,
                self._peers.size,
                1e3 * lateness.sure_delay_s,
            )
        self._chosen[place] = choice.algorithm
        return choice

    def _around_straggler(self, name: str, values: torch.Tensor, lateness: Lateness) -> None:
        algorithm, ranks = ALGORITHMS[name], self._peers.size
        chunks = algorithm.chunks(ranks, values.nbytes, lateness.wire)
        key = name, lateness.last, chunks
        if key not in self._plans:
            self._plans[key] = StragglerAllReduce(self._peers, algorithm.plan(ranks, chunks), lateness.last)
        self._plans[key](values)

    def _share(self, device: torch.device) -> None:
        """Run two rounds among replicas that have met: the first shares the times, the second is timed itself."""
        waited, self._waited = self._waited, []
        shared = self._shared([each.seconds for each in waited], device)
        begun_s = time.monotonic()
        self._shared([0.0], device)
        latencies_s = self._shared([(time.monotonic() - begun_s) / (self._peers.size - 1)], device)
        for number, each in enumerate(waited):
            waits_s = [own[number] for own in shared]
            self._lateness[each.place].saw(waits_s, min(latencies_s)[0], each.stock_nbytes)

    def _shared(self, values: Sequence[float], device: torch.device) -> list[list[float]]:
        """Return the `values` of each replica; all have equally many."""
        own = torch.tensor(values, dtype=torch.float64, device=device)
        return [each.tolist() for each in self._peers.gather(own)]
