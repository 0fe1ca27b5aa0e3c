# SPDX-License-Identifier: Apache-2.0
"""Iterations of stock Megatron and of plans on the model of GPUs, by how their hardware queues work.

    python benchmarks/device_queues.py [--output benchmarks/results/device_queues.md]

Calls are recorded from Megatron's own schedules and from the real executor, and played on tests/support/device_model.
Whether NCCL's trailing wait holds up a queue is known of no GPU yet, so each case is played with and without. Only what
is planned for is chosen as training does: by `Layout`, and with one queue by the path that is the default there.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path as FilePath
from statistics import mean
from typing import NamedTuple

sys.path[:0] = [str(FilePath(__file__).parents[1] / each) for each in ("tests", "scripts")]

from markdown_table import markdown_table  # noqa: E402
from support.device_model import Device, Rank, Threads, play  # noqa: E402
from support.device_model.from_megatron import record_stock  # noqa: E402
from support.device_model.from_runtime import Iteration, Job  # noqa: E402
from support.device_model.threads import record_by_host  # noqa: E402

from adaptra_megatron.control.deciders.path_decider import Setting, choose  # noqa: E402
from adaptra_megatron.control.decisions import LinkName  # noqa: E402
from adaptra_megatron.control.detector.observations import LinkEstimate, State  # noqa: E402
from adaptra_megatron.schedule.costs import Costs, LinkCost, uniform_costs  # noqa: E402
from adaptra_megatron.schedule.planner import plan  # noqa: E402
from adaptra_megatron.transport.gpu.hardware_queues import ENOUGH_QUEUES  # noqa: E402
from adaptra_megatron.transport.link_paths import Path  # noqa: E402

ACTION_S, DEVICE, HOST = 10e-3, LinkCost(0.0, 0.5e-3), LinkCost(1.5e-3, 1e-3)
SLOW_S, SLOW_LINK = 30e-3, (1, 2)
SEEDS = 5
"""Which streams share one of eight queues is drawn by lot."""


PAGE = """# Hardware queues: stock and plans on the model of GPUs

`python benchmarks/device_queues.py`. No GPU was used: calls of stock Megatron-core (the faster of its two ways to
send, where it has two) and of the executor are played on a model of GPUs (`tests/support/device_model`). F, I and W
take 10 ms each, a message 0.5 ms by the device path, 1 ms of the link and 1.5 ms more by the host path; one slow:
from stage 1 to 2 each takes 30 ms more, by either path. *Trailing waits hold*: whether the wait that NCCL puts behind
each of its kernels holds up a hardware queue, which is known of no GPU yet. With one queue plans reckon that it does,
so the host path is taken. With 8 or 32 queues it is drawn by lot which streams share one: means of 5 draws. Messages of
a slow link leave the device path as they do in training: NCCL carries one at a time, and with 8 queues a receive that
stands for longer than an action may hold up computation. *Other path*: all messages by the path that is not taken;
with one queue, planned for what the device does.
Where trailing waits hold, no plan by the device path is faster than stock in one queue: without the host path such
jobs run Megatron's own schedule.

{table}
"""


class Case(NamedTuple):
    """A pipeline."""

    name: str
    stages: int
    micro_batches: int
    chunks: int
    cap: int

    def costs(self, link: LinkCost, *, slow: bool, queue: str = "separate") -> Costs:
        """With all links like `link`; `slow`: but that from stage 1 to 2, which is slower by as much on either path."""
        ring = {(a, b % self.stages) for a in range(self.stages) for b in (a + 1, a - 1)}
        links = {ends: link._replace(rendezvous=link == DEVICE) for ends in ring}
        if slow:
            links[SLOW_LINK] = links[SLOW_LINK]._replace(latency_s=link.latency_s + SLOW_S)
        return dataclasses.replace(
            uniform_costs(
                self.stages,
                self.micro_batches,
                chunks=self.chunks,
                forward_s=ACTION_S,
                backward_input_s=ACTION_S,
                backward_weight_s=ACTION_S,
                links=links,
                max_in_flight=self.cap,
            ),
            shared_queue=queue != "separate",
            serial_queue=queue == "serial",
        )


CASES = (
    Case("4 stages, 8 micro-batches", 4, 8, 1, 7),
    Case("8 stages, 24 micro-batches", 8, 24, 1, 12),
    Case("4 stages of 2 chunks, 8 micro-batches", 4, 8, 2, 14),
)


def played_ms(threads: list[Threads], device: Device) -> float:
    """Mean over the seeds that make a difference."""
    ranks = {Rank(0, stage): each for stage, each in enumerate(threads)}
    outcomes = [play(ranks, device, seed) for seed in range(1 if device.queues == 1 else SEEDS)]
    assert not any(outcome.deadlock for outcome in outcomes), outcomes
    return 1e3 * mean(outcome.makespan_s for outcome in outcomes)


def stock_ms(case: Case, device: Device, *, slow: bool) -> float:
    """The faster of the two ways in which Megatron sends, where it has two."""
    costs = case.costs(DEVICE, slow=slow)
    return min(
        played_ms([{"training": record_stock(stage, costs, overlap=overlap)} for stage in range(case.stages)], device)
        for overlap in ({False, case.chunks > 1})
    )


def leaves(case: Case, queues: int) -> bool:
    """Return whether training has messages of the slow link leave the device path for the host path."""
    known = {}
    for path, link in ((Path.DEVICE, DEVICE), (Path.HOST, HOST)):
        slow = case.costs(link, slow=True).link(*SLOW_LINK)
        known[path] = LinkEstimate(
            latency_s=slow.latency_s,
            bandwidth_bytes_per_s=1 / slow.occupancy_s,
            transfer_s=slow.latency_s + slow.occupancy_s,
            nbytes=1,
            state=State.SLOW,
            since_iteration=0,
            measured_iteration=0,
            reason="it is slow",
            clock_correction_s=0.0,
        )
    setting = Setting(
        preferred=Path.DEVICE,
        micro_batches=case.micro_batches,
        action_s=ACTION_S,
        period_s=3 * ACTION_S * case.chunks,
        device_blocks=queues < ENOUGH_QUEUES,
        rendezvous=True,
    )
    return choose(LinkName(0, *SLOW_LINK), Path.DEVICE, known, setting) is not None


def chosen_ms(case: Case, device: Device, *, slow: bool) -> tuple[float, str]:
    """As planned for queues of their own, with the slow link's messages by the path that training takes; which."""
    if not slow or not leaves(case, device.queues):
        return ours_ms(case, device, DEVICE, slow=slow, queue="separate"), "device"
    costs, by_host = (case.costs(link, slow=True) for link in (DEVICE, HOST))
    costs = dataclasses.replace(costs, links={**costs.links, SLOW_LINK: by_host.links[SLOW_LINK]})
    job = Job(iterations=(Iteration(schedule=plan(costs).schedule, costs=costs, planned_for=costs),))
    threads = [record_by_host(job, stage, [SLOW_LINK]) for stage in range(case.stages)]
    return played_ms(threads, device), "device, the slow link's by the host path"


def ours_ms(case: Case, device: Device, link: LinkCost, *, slow: bool, queue: str) -> float:
    """As planned for such a queue."""
    costs = case.costs(link, slow=slow, queue=queue)
    job = Job(iterations=(Iteration(schedule=plan(costs).schedule, costs=costs, planned_for=costs),))
    stages = range(case.stages)
    if link == HOST:
        return played_ms([record_by_host(job, stage) for stage in stages], device)
    return played_ms([{"training": job.record(stage)} for stage in stages], device)


def rows() -> list[list[str]]:
    """One per case, links and device."""
    found = []
    for case in CASES:
        for slow in (False, True):
            for queues in (1, 8, 32):
                for trailing in (False, True):
                    device = Device(queues=queues, trailing_waits=trailing)
                    stock = stock_ms(case, device, slow=slow)
                    name = [case.name, "one slow" if slow else "healthy", str(queues), "yes" if trailing else "no"]
                    if queues == 1:
                        queue = "serial" if trailing else "shared"
                        ours, path = ours_ms(case, device, HOST, slow=slow, queue="serial"), "host"
                        other = ours_ms(case, device, DEVICE, slow=slow, queue=queue)
                    else:
                        ours, path = chosen_ms(case, device, slow=slow)
                        other = ours_ms(case, device, HOST, slow=slow, queue="separate")
                    figures = [f"{stock:.0f}", f"{ours:.0f} ({path})", f"{ours / stock:.2f}", f"{other:.0f}"]
                    found.append([*name, *figures])
                    print(*found[-1], sep=" | ", file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=FilePath, default=None, help="also write the table to this file")
    arguments = parser.parse_args()
    header = [
        "pipeline",
        "links",
        "queues",
        "trailing waits hold",
        "stock, ms",
        "ours, ms",
        "ratio",
        "by the other path",
    ]
    text = markdown_table(header, rows())
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(PAGE.format(table=text))


if __name__ == "__main__":
    main()
