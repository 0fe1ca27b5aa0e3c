# SPDX-License-Identifier: Apache-2.0
"""What looking for stragglers costs as jobs grow: CPU time in training processes, and in the judge's.

    python benchmarks/straggler_watch.py [--cells 8,128,2048] [--looks 12]

The real thread of the rank that has the judge, the judge's real process, and a connection from one client process for
each other cell. A look every second, at reports of as many iterations as there are between two looks at the job's own
pace where iterations last 10 s; figures are of one look, and of one such iteration. First all come at once, then one
cell is late, of the lowest rank's stage, so that the hosts of both are read.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import psutil
import torch.distributed as dist
from planner_connections import connected, raise_limit

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.layout import Cell, JobLayout, Worker
from adaptra_megatron.common.typed_messages import encoded
from adaptra_megatron.control.detector.straggler_arrivals import Row
from adaptra_megatron.control.detector.straggler_causes import HostFigures
from adaptra_megatron.control.sidecar.planner_connections import address_of, framed
from adaptra_megatron.control.stragglers import straggler_watch as watches
from adaptra_megatron.control.stragglers.straggler_reports import ADDRESS_KEY, PLACE, CellReport, ReportPace
from adaptra_megatron.telemetry.events import Event
from adaptra_megatron.telemetry.scalars import ArrivalFigures
from adaptra_megatron.transport.setup.host_placement import listen_tcp

ITERATION_S, LOOK_S, LATE = 10.0, 1.0, 0.1
SAID_S, COUNT = 0.1, 4
"""What iterations are said to last, so that looks are not rarer here; and those between two looks at the job's pace."""
STAGES = 16


class Telemetry:
    """Counts what is found."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def log(self, event: Event) -> None:
        """See RunTelemetry."""
        self.events.append(event)

    def arrivals(self, figures: ArrivalFigures) -> None:
        """See RunTelemetry."""


class Job:
    """All cells: the lowest rank's own thread, and what stands for those of all others."""

    def __init__(self, cells: int, least_s: float, per_cell_s: float) -> None:
        stages = min(STAGES, cells // 2)
        self._late_rank = cells - stages  # of stage 0, as the lowest rank is
        workers = {
            rank: Worker(Cell(rank // stages, rank % stages), 0, f"node{rank}", f"boot{rank}/net")
            for rank in range(cells)
        }
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        control = ControlStore(store, b"s" * 32, "job")
        self.pace_s = max(least_s, per_cell_s * cells)
        watches.FIRST_S = watches.LEAST_S = LOOK_S
        watches.PER_CELL_S = 0.0
        self.workers, self.telemetry, self._iteration = workers, Telemetry(), 0
        self._kept: dict[int, list[Row]] = {rank: [] for rank in workers}
        layout = JobLayout(0, workers, "token")
        self.watch = watches.StragglerWatch(layout, control, self.telemetry, "off", lambda: listen_tcp("127.0.0.1")[0])
        for iteration in range(watches.JUDGED_FROM):
            self.watch.add(Row(iteration, SAID_S, 0.01 * SAID_S, SAID_S / 2))
        self._iteration = watches.JUDGED_FROM
        client = control.client(PLACE)
        while (entry := client.peek(ADDRESS_KEY)) is None:
            time.sleep(0.05)
        place = control.seal(PLACE).place
        self.links = asyncio.run(connected(address_of(entry), cells, control.secret, place))
        (self.judge,) = psutil.Process().children()

    def look(self, number: int, late: float) -> tuple[float, float]:
        """CPU seconds of the lowest rank's thread and of the judge's process for one look at reports of all cells."""
        iterations = range(self._iteration, self._iteration + COUNT)
        self._iteration += COUNT
        begun = self._used()
        for rank, kept in self._kept.items():
            wait_s = SAID_S * (0.01 if rank == self._late_rank else 0.01 + late)
            rows = [Row(iteration, SAID_S * (1 + late), wait_s, SAID_S / 2) for iteration in iterations]
            kept.extend(rows)
            del kept[: -3 * COUNT]
            if rank:
                report = CellReport(rows=tuple(kept), host=HostFigures(others_cpu=0.1) if late else None)
                self.links[rank - 1].sendall(framed(number, encoded(report)))
            else:
                for row in rows:
                    self.watch.add(row)
        time.sleep(LOOK_S)
        ended = self._used()
        return ended[0] - begun[0], ended[1] - begun[1]

    def _used(self) -> tuple[float, float]:
        times = self.judge.cpu_times()
        thread = self.watch._thread.ident
        assert thread is not None
        return time.clock_gettime(time.pthread_getcpuclockid(thread)), times.user + times.system


def rows(cells: int, looks: int, least_s: float, per_cell_s: float) -> Iterator[tuple[str, ...]]:
    """A line of the table without a straggler, and one with it."""
    job = Job(cells, least_s, per_cell_s)
    for late, named in ((0.0, "none"), (LATE, "one cell")):
        found = [job.look(number, late) for number in range(looks)][looks // 3 :]
        rank_s, judge_s = (statistics.median(each) for each in zip(*found, strict=True))
        pause_s = ReportPace(first_s=LOOK_S, most_s=job.pace_s).pause_s(job.pace_s, ITERATION_S * (1 + late), ())
        iterations = pause_s / ITERATION_S
        yield (
            *(f"{cells:,}", named, f"{pause_s:.0f} s", f"{1e3 * rank_s:.2f} ms"),
            *(f"{1e3 * rank_s / iterations:.2f} ms", f"{1e3 * judge_s:.0f} ms", f"{len(job.telemetry.events)}"),
        )
    job.watch.close()


def main(argv: Sequence[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--cells", default="8,128,2048")
    parser.add_argument("--looks", type=int, default=12)
    args = parser.parse_args(argv)
    raise_limit()
    least_s, per_cell_s = watches.LEAST_S, watches.PER_CELL_S
    head = ("cells", "late", "a look every", "lowest rank, CPU per look", "per iteration", "judge per look", "events")
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for cells in map(int, args.cells.split(",")):
        for row in rows(cells, args.looks, least_s, per_cell_s):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
