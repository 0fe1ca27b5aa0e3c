# SPDX-License-Identifier: Apache-2.0
"""What deciding costs as jobs grow: CPU of training processes and of the job's store, time to a decision, memory.

    python benchmarks/control_plane.py [--ranks 64,1024,4096,16384] [--iterations 50] [--long 1000] [--together]
                                       [--output FILE]

Of one replica everything is real: a TCPStore served by a process of its own, the messages of all its ranks, the
leading rank and one that follows as processes of their own with the package's exchange, and the planner process. All
other ranks of the job are their requests to the store, of the same number and size, from a few client processes that
take turns: they show what the server does for requests, not what tens of thousands of connections cost it.

There are two kinds of iterations. In *busy* ones all replicas hand in and read at once, as fast as these get done,
all on the machine's few cores: they tell times from the last measurement to a decision, and what server and planner
process use. There, a training process's CPU time holds misses in caches that others have used up, which ranks with
cores of their own do not share. So it is looked at in *quiet* ones, too: the other replicas rest, and the iteration
has PERIOD_S, of which all that a rank does for the control plane is a small part. The table has both. A rank's CPU time
holds what it packs, sends and reads, in all of its threads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from control_plane_rank import (
    ITERATION_S,
    SECRET,
    connected,
    exchange_place,
    layout_for,
    measured,
    of_iteration,
    say,
)

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.handshake import connect
from adaptra_megatron.common.typed_messages import encoded
from adaptra_megatron.control.decisions import DELAY
from adaptra_megatron.control.exchange import decision_key
from adaptra_megatron.control.sidecar.planner_connections import CONNECT_S, PLANNER_KEY, address_of, framed, purpose_of

SHAPES = {64: (4, 8, 2), 1024: (8, 16, 8), 4096: (8, 16, 32), 16384: (8, 16, 128)}
"""By ranks: tensor lanes, stages, replicas."""
CLIENTS = 2
WARM_UP = 6
PERIOD_S = 0.5
"""From one quiet iteration to the next."""
LONG_RANKS, LONG_STEP = 16384, 100
"""Ranks of the job whose memory is looked at for long, and iterations between two looks."""


class Child:
    """A process of control_plane_rank.py."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, str(Path(__file__).with_name("control_plane_rank.py")), *map(str, arguments)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def say(self, word: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()

    def receive(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self) -> None:
        self.process.communicate(timeout=60)


class Used(NamedTuple):
    """CPU of processes, in seconds so far or in milliseconds per iteration; of training processes, without what the
    program itself takes."""

    leader: float
    follower: float
    planner: float
    server: float


class Resident(NamedTuple):
    """Memory of processes, in MB."""

    leader: float
    follower: float
    planner: float
    server: float


class Job:
    """The processes of one size, which run iteration after iteration."""

    def __init__(self, ranks: int, together: bool = False) -> None:
        self.lanes, self.stages, replicas = SHAPES[ranks]
        if together:
            self.lanes, replicas = self.lanes * replicas, 1
        self.server = Child("serve")
        port, together = int(self.server.receive()), self.lanes * self.stages
        self.trained = [Child("rank", port, self.lanes, self.stages, number) for number in (0, together - 1, together)]
        places = [(lane, stage) for stage in range(self.stages) for lane in range(self.lanes)][1:-1]
        self.templates = {place: measured(*place, self.stages) for place in places}
        self.unauthenticated = [
            Child("others", port, together, *range(1 + first, replicas, CLIENTS))
            for first in range(min(CLIENTS, replicas - 1))
        ]
        control = ControlStore(connected(port), SECRET, "bench")
        layout = layout_for(self.lanes, self.stages, 0)
        place = exchange_place(layout)
        self.store = control.client(place)
        self.seal_place, self.leader = control.seal(place).place, layout.leader
        self.links: dict[tuple[int, int], socket.socket] = {}
        """Connections to the planner process, by lane and stage."""
        self.iteration, self.planner_id = 0, 0
        self._used_s = [0.0, 0.0, 0.0]

    def busy(self) -> float:
        """An iteration of the whole job; seconds from the last measurement of one replica to its decision."""
        for child in self.unauthenticated:
            child.say(self.iteration)
        self._measure()
        last_s = time.perf_counter()
        while self.store.peek(decision_key(self.iteration + DELAY)) is None:
            time.sleep(0.001)
        took_s = time.perf_counter() - last_s
        for child in self.unauthenticated:
            child.receive()
        self.iteration += 1
        return took_s

    def quiet(self) -> None:
        """An iteration of one replica by itself."""
        until_s = time.perf_counter() + PERIOD_S
        self._measure()
        time.sleep(max(0.0, until_s - time.perf_counter()))
        self.iteration += 1

    def _measure(self) -> None:
        for child in self.trained:
            child.say(self.iteration)
        if not self.links:
            self.links = asyncio.run(self._connected())
        for place, template in self.templates.items():
            report = encoded(of_iteration(template, self.iteration))
            self.links[place].sendall(framed(self.iteration, report))
        said = [json.loads(child.receive()) for child in self.trained]
        self._used_s, self.planner_id = [one["cpu_s"] for one in said], said[0]["planner"] or 0

    async def _connected(self) -> dict[tuple[int, int], socket.socket]:
        """One connection for each rank that is no process, which this process takes decisions in by, too."""
        while (address := self.store.peek(PLANNER_KEY)) is None:
            await asyncio.sleep(0.1)
        links = {}
        for lane, stage in self.templates:
            connection = links[lane, stage] = socket.create_connection(address_of(address))
            connection.setblocking(False)
            purpose = purpose_of(self.seal_place, stage * self.lanes + lane, self.leader)
            await connect(connection, SECRET, purpose, CONNECT_S)
            connection.setblocking(True)
        threading.Thread(target=drain, args=(list(links.values()),), daemon=True).start()
        return links

    def used(self) -> Used:
        """By the end of the latest iteration's measurements."""
        leader_s, follower_s, idle_s = self._used_s
        return Used(leader_s - idle_s, follower_s - idle_s, cpu_s(self.planner_id), cpu_s(self.server.process.pid))

    def resident(self) -> Resident:
        """Right now."""
        leader, follower, _idle = (child.process.pid for child in self.trained)
        return Resident(*map(resident_mb, (leader, follower, self.planner_id, self.server.process.pid)))

    def slow(self) -> None:
        """One link is slow from now on."""
        self.templates[0, 1] = measured(0, 1, self.stages, slow=True)

    def end(self) -> None:
        for child in (*self.trained, *self.unauthenticated, self.server):
            child.end()


def drain(links: Sequence[socket.socket]) -> None:
    """Take in what comes."""
    waiting = select.epoll()
    for link in links:
        waiting.register(link, select.EPOLLIN)
    by_descriptor = {link.fileno(): link for link in links}
    while by_descriptor:
        for descriptor, _ in waiting.poll():
            if not by_descriptor[descriptor].recv(1 << 16):
                waiting.unregister(descriptor)
                del by_descriptor[descriptor]


def cpu_s(process_id: int) -> float:
    """What a process has used."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mb(process_id: int) -> float:
    """Memory of a process."""
    pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


@dataclass(frozen=True)
class Row:
    """What was measured of one size: milliseconds of CPU per iteration, and seconds to a decision."""

    ranks: int
    quiet: Used
    busy: Used
    unchanged_s: float
    slow_s: float
    iterations: int


def run(ranks: int, iterations: int, together: bool) -> Row:
    """A job of one size: as many quiet iterations as busy ones, and then a link turns slow."""
    job, turns = Job(ranks, together), iterations // 2
    for _ in range(WARM_UP):
        job.quiet()
    quiet = each_ms(job, turns, job.quiet)
    for _ in range(WARM_UP):
        job.busy()
    took_s: list[float] = []
    busy = each_ms(job, turns, lambda: took_s.append(job.busy()))
    job.slow()
    slow_s = job.busy()
    job.end()
    return Row(ranks, quiet, busy, statistics.median(took_s), slow_s, turns)


def each_ms(job: Job, turns: int, iteration: Callable[[], object]) -> Used:
    """Milliseconds of CPU per iteration: of training processes the median, for other work of the machine hits some
    iterations; of the others the mean, for the kernel counts theirs in ticks."""
    used = [job.used()]
    for _ in range(turns):
        iteration()
        used.append(job.used())
    typical, mean = (
        Used(*(1e3 * over([after - before for before, after in pairwise(each)]) for each in zip(*used, strict=True)))
        for over in (statistics.median, statistics.fmean)
    )
    return Used(typical.leader, typical.follower, mean.planner, mean.server)


def table(rows: Sequence[Row]) -> str:
    """As Markdown."""
    head = (
        "| ranks | leading rank, CPU per iteration: quiet (busy) | others: quiet (busy) | planner process | "
        "store's server | of a core at 10 s | decision, nothing changes | decision, a link turns slow | iterations |"
    )
    lines = [head, "|" + "---|" * 9]
    lines += [
        f"| {row.ranks:,} | {row.quiet.leader:.2f} ms ({row.busy.leader:.2f}) | "
        f"{row.quiet.follower:.2f} ms ({row.busy.follower:.2f}) | {row.busy.planner:.0f} ms | "
        f"{row.busy.server:.0f} ms | {row.busy.server / ITERATION_S / 10:.1f}% | {row.unchanged_s:.3f} s | "
        f"{row.slow_s:.3f} s | {row.iterations} |"
        for row in rows
    ]
    return "\n".join(lines)


def memory(iterations: int) -> str:
    """Resident memory over many iterations, as Markdown."""
    job = Job(LONG_RANKS)
    lines = ["| iteration | " + " | ".join(Resident._fields) + " |", "|---" * (1 + len(Resident._fields)) + "|"]
    for number in range(1, iterations + 1):
        job.busy()
        if number % LONG_STEP == 0:
            lines.append(f"| {number} | " + " | ".join(f"{each:.1f} MB" for each in job.resident()) + " |")
            say(lines[-1])
    job.end()
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--ranks", default="64,1024,4096,16384")
    parser.add_argument("--iterations", type=int, default=50, help="of each size, half of them quiet")
    parser.add_argument("--long", type=int, default=1000, help="iterations in which memory is looked at; 0: none")
    parser.add_argument(
        "--together", action="store_true", help="one planner process for all ranks, as with --adaptra-reroute"
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args(argv)
    rows = []
    for ranks in map(int, filter(None, args.ranks.split(","))):
        rows.append(run(ranks, args.iterations, args.together))
        say(table(rows[-1:]))
    found = table(rows)
    if args.long:
        found += "\n\n" + memory(args.long)
    if args.output is not None:
        args.output.write_text(found + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
