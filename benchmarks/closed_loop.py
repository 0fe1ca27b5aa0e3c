# SPDX-License-Identifier: Apache-2.0
"""How fast the loop closes, and what it costs to have it: real processes on an emulated cluster, no GPU.

    python benchmarks/closed_loop.py [changes] [bandwidth] [healthy] [observe] [--output FILE]

changes    8 stages; one link after another turns slow, on both of its paths, and heals: speed from iteration to
           iteration, against the bounds
bandwidth  one direction of a link carries a tenth of what it did
healthy    links in order: adaptra with everything on, compared with the same order with nothing measured
observe    policy observe, compared with the same order with nothing measured

Compute is emulated (each F, B and W lasts a given time). All training is bitwise that of stock Megatron; see
`make closed-loop`. With --output, only the sections that were measured are replaced in FILE.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from adaptra_megatron.control.decisions import DELAY
from adaptra_megatron.schedule.bounds import lower_bound
from adaptra_megatron.schedule.classic import stock_order
from adaptra_megatron.schedule.costs import LinkCost, uniform_costs
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.transport.link_paths import Path as LinkPath
from testing.faults.network.link_faults import LinkFault
from testing.faults.network.link_story import LinkFaultScenario
from testing.jobs.fork_server import ForkServer
from testing.jobs.variants import Variant, VariantReport, run_variants

TIMEOUT_S = 280.0
SETTLED = 3
"""Iterations at the end of a spell whose median says how fast it is once all has settled."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """An emulated one: every action lasts `action_ms`."""

    stages: int
    micro_batches: int
    action_ms: float
    cap: int

    def arguments(self, iterations: int) -> tuple[str, ...]:
        """Arguments of a training."""
        return tuple(
            f"--pipeline-model-parallel-size {self.stages} --num-layers {self.stages} "
            f"--global-batch-size {self.micro_batches} --train-iters {iterations} --mock-data "
            f"--no-gradient-accumulation-fusion --hidden-size 32 --seq-length 16 "
            f"--emulate-compute-ms {','.join([f'{self.action_ms:g}'] * 3)}".split()
        )

    def bound_s(self, links: dict[tuple[int, int], LinkCost]) -> float:
        """No order within the cap takes less, with these links."""
        seconds = self.action_ms / 1e3
        costs = uniform_costs(
            self.stages,
            self.micro_batches,
            forward_s=seconds,
            backward_input_s=seconds,
            backward_weight_s=seconds,
            links=links,
            max_in_flight=self.cap,
        )
        return lower_bound(costs).seconds


CLUSTER = Cluster(stages=8, micro_batches=16, action_ms=20.0, cap=12)
SMALL = Cluster(stages=4, micro_batches=16, action_ms=10.0, cap=6)


def watched(cluster: Cluster, iterations: int, run: Path, *more: str) -> tuple[str, ...]:
    """Arguments of a training with adaptra and all that it can measure and tell."""
    return (
        *(*cluster.arguments(iterations), "--adaptra", "--adaptra-prometheus-port", "0"),
        *("--adaptra-trace-dir", str(run), "--adaptra-trace", "asked", *more),
    )


def adapting(cluster: Cluster, iterations: int, run: Path, *more: str) -> tuple[str, ...]:
    """The same, planned for within the cluster's memory."""
    return watched(cluster, iterations, run, "--adaptra-max-in-flight", str(cluster.cap), *more)


# --- changes


@dataclass(frozen=True)
class Spell:
    """One link slow both ways, from `onset` until `heal`; times are of pipelines, in seconds."""

    link: tuple[int, int]
    latency_ms: float
    onset: int
    heal: int

    def faults(self) -> list[LinkFault]:
        return [
            LinkFault(
                source=source,
                target=target,
                latency_s=self.latency_ms / 1e3,
                from_iteration=self.onset,
                until_iteration=self.heal,
                paths=frozenset(LinkPath),
            )
            for source, target in (self.link, self.link[::-1])
        ]

    def costs(self) -> dict[tuple[int, int], LinkCost]:
        return {ends: LinkCost(self.latency_ms / 1e3) for ends in (self.link, self.link[::-1])}


SPELLS = [
    Spell((3, 4), 60.0, 9, 19),
    Spell((6, 7), 60.0, 29, 39),
    Spell((0, 1), 30.0, 49, 59),
    Spell((1, 2), 100.0, 69, 79),
]
CHANGES_ITERATIONS = 89


def changes(server: ForkServer, directory: Path) -> str:
    """Every spell by itself, from health to health."""
    faults = tuple(fault for spell in SPELLS for fault in spell.faults())
    LinkFaultScenario(iterations=CHANGES_ITERATIONS, spells=faults).write(directory / "story.json")
    variant = Variant(
        "adaptra",
        adapting(CLUSTER, CHANGES_ITERATIONS, directory / "run", "--emulate-link-story", str(directory / "story.json")),
    )
    (report,) = run_variants(CLUSTER.stages, [variant], timeout_s=TIMEOUT_S, server=server, directory=directory)
    seconds = report.pipeline_seconds
    healthy_bound_s = CLUSTER.bound_s({})
    lines = [
        "| slow link, latency | healthy | 1st, 2nd slow iteration | 3rd: new plan | settled | settled / bound | "
        "3rd / settled | switch / neighbours | healed: 1st, 2nd | 3rd: plan back | 3rd / healthy | "
        "switch / neighbours |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    thirds, returns, switches = [], [], []
    for spell in SPELLS:
        healthy_s = median(seconds[spell.onset - SETTLED : spell.onset])
        settled_s = median(seconds[spell.heal - SETTLED : spell.heal])
        third, back = spell.onset + DELAY, spell.heal + DELAY
        well_s = median(seconds[back + SETTLED : back + 2 * SETTLED])
        thirds.append(seconds[third] / settled_s)
        returns.append(seconds[back] / well_s)
        around = [seconds[at] / max(seconds[at - 1], seconds[at + 1]) for at in (third, back)]
        switches += around
        lines.append(
            f"| {spell.link[0]} - {spell.link[1]}, {spell.latency_ms:g} ms | {_ms(healthy_s)} | "
            f"{_ms(*seconds[spell.onset : third])} | {_ms(seconds[third])} | {_ms(settled_s)} | "
            f"{settled_s / CLUSTER.bound_s(spell.costs()):.3f} | {thirds[-1]:.3f} | {around[0]:.3f} | "
            f"{_ms(*seconds[spell.heal : back])} | {_ms(seconds[back])} | {returns[-1]:.3f} | {around[1]:.3f} |"
        )
    healthy_s = median(seconds[SPELLS[0].onset - SETTLED : SPELLS[0].onset])
    return "\n".join(
        [
            f"{_cluster(CLUSTER)} One job; a link turns slow both ways and on both paths, heals ten iterations "
            "later, and then another does. Milliseconds of the forward_backward function over all ranks. The plan of "
            "an onset in iteration k is in force in k + 2, so two iterations are slow; the bound is that of the cap "
            "and the link's latency.",
            "",
            *lines,
            "",
            f"Medians: 3rd iteration / settled {median(thirds):.3f} (worst {max(thirds):.3f}); 3rd iteration after the "
            f"healing / healthy {median(returns):.3f} (worst {max(returns):.3f}); a switching iteration / the longer "
            f"of its neighbours {median(switches):.3f} (worst {max(switches):.3f}); healthy / bound "
            f"{healthy_s / healthy_bound_s:.3f}.",
        ]
    )


# --- bandwidth

USUAL_MS, LOST_MS = 3.0, 30.0
BANDWIDTH_ONSET, BANDWIDTH_ITERATIONS = 9, 19


def bandwidth(server: ForkServer, directory: Path) -> str:
    """A message takes 30 ms instead of 3, one way, on a link in the middle; both ways in turn."""
    lines = [
        "| direction | before | 1st, 2nd iteration after | settled | bound | settled / bound | "
        "without a new plan / bound |",
        "|---|---|---|---|---|---|---|",
    ]
    for source, target in ((3, 4), (4, 3)):
        link = f"--emulate-slow-link {source}>{target}:"
        slow = (
            f"{link}occupancy_ms={USUAL_MS:g},until={BANDWIDTH_ONSET},path=both "
            f"{link}occupancy_ms={LOST_MS:g},from={BANDWIDTH_ONSET},path=both"
        )
        run = directory / f"{source}-{target}"
        variant = Variant("adaptra", adapting(CLUSTER, BANDWIDTH_ITERATIONS, run / "run", *slow.split()))
        (report,) = run_variants(CLUSTER.stages, [variant], timeout_s=TIMEOUT_S, server=server, directory=run)
        seconds = report.pipeline_seconds
        before_s = median(seconds[BANDWIDTH_ONSET - SETTLED : BANDWIDTH_ONSET])
        settled_s = median(seconds[BANDWIDTH_ONSET + DELAY + 1 :])
        bound_s = CLUSTER.bound_s({(source, target): LinkCost(occupancy_s=LOST_MS / 1e3)})
        struck = seconds[BANDWIDTH_ONSET : BANDWIDTH_ONSET + DELAY]
        lines.append(
            f"| {source} -> {target} | {_ms(before_s)} | {_ms(*struck)} | {_ms(settled_s)} | {_ms(bound_s)} | "
            f"{settled_s / bound_s:.3f} | {median(struck) / bound_s:.3f} |"
        )
    return "\n".join(
        [
            f"{_cluster(CLUSTER)} A message occupies the link for {LOST_MS:g} ms instead of {USUAL_MS:g} ms. The bound "
            "counts occupancies.",
            "",
            *lines,
        ]
    )


# --- healthy and observe

ROUNDS, ROUND_ITERATIONS, WARM_UP = 3, 20, 8


def healthy(server: ForkServer, directory: Path) -> str:
    """In turns: adaptra, and the order that it ended with, from a file."""
    ours_s, fixed_s, _ = _in_turns(server, directory, SMALL, "--adaptra-max-in-flight", str(SMALL.cap))
    return (
        f"{_cluster(SMALL)} Adaptra with everything on (timers, detector, exchange, planner, event log, traces on "
        f"demand, Prometheus) against the order that it found, from a file and with nothing on, {ROUNDS} times in "
        f"turns in one job: median iteration {_ms(ours_s)} ms against {_ms(fixed_s)} ms, **{ours_s / fixed_s:.4f}**."
    )


def observe(server: ForkServer, directory: Path) -> str:
    """In turns: stock's order, watched, and from a file."""
    observing_s, fixed_s, reports = _in_turns(server, directory, SMALL, "--adaptra-policy", "observe")
    stock = schedule_to_csv(stock_order(SMALL.stages, SMALL.micro_batches, 1, None))
    assert {each.adaptra[0]["schedule_csv"] for each in reports} == {stock}, "the order is not stock's"
    return (
        f"{_cluster(SMALL)} Policy observe with everything on against the same order (stock's 1F1B) from a file with "
        f"nothing on, {ROUNDS} times in turns in one job: median iteration {_ms(observing_s)} ms against "
        f"{_ms(fixed_s)} ms, **{observing_s / fixed_s:.4f}**."
    )


def _in_turns(
    server: ForkServer, directory: Path, cluster: Cluster, *more: str
) -> tuple[float, float, list[VariantReport]]:
    """Median seconds of an iteration of adaptra's last order, by adaptra and from a file; the reports of adaptra."""
    variants = []
    for number in range(ROUNDS):
        csv = str(directory / f"plan{number}.csv")
        ours = watched(cluster, ROUND_ITERATIONS, directory / f"run{number}", *more)
        fixed = (*cluster.arguments(ROUND_ITERATIONS), "--adaptra", "--adaptra-plan-csv", csv)
        variants += [Variant(f"ours{number}", ours, plan_to=csv), Variant(f"fixed{number}", fixed)]
    reports = run_variants(cluster.stages, variants, timeout_s=TIMEOUT_S, server=server, directory=directory / "turns")
    times_s: dict[str, list[float]] = {"ours": [], "fixed": []}
    for report in reports:
        final = report.plans[0][-1][1]
        times_s[report.name.rstrip("0123456789")] += [
            seconds
            for iteration, seconds in enumerate(report.iteration_seconds)
            if iteration >= WARM_UP and report.plans[0][iteration][1] == final
        ]
    return median(times_s["ours"]), median(times_s["fixed"]), reports[::2]


def _cluster(cluster: Cluster) -> str:
    return (
        f"{cluster.stages} stages, {cluster.micro_batches} micro-batches, F = B = W = {cluster.action_ms:g} ms, at "
        f"most {cluster.cap} activations in flight."
    )


def _ms(*seconds: float) -> str:
    return ", ".join(f"{value * 1e3:.0f}" for value in seconds)


SECTIONS = {"changes": changes, "bandwidth": bandwidth, "healthy": healthy, "observe": observe}
HEAD = """\
# The closed loop, measured

Real processes on two cores, over gloo, compute emulated: `python benchmarks/closed_loop.py`.
"""
TITLES = {
    "changes": "A link turns slow, and heals",
    "bandwidth": "A link loses nine tenths of its bandwidth, one way",
    "healthy": "What it costs while links are healthy",
    "observe": "What observing costs",
}


def replaced(text: str, title: str, section: str) -> str:
    """`text` of a result file with the section of that title replaced, or added at the end."""
    whole = f"## {title}\n\n{section}\n"
    pattern = re.compile(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)
    if pattern.search(text):
        return pattern.sub(lambda _: f"{whole}\n", text).rstrip() + "\n"
    return f"{text.rstrip()}\n\n{whole}".lstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"some of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--output", type=Path, default=None, help="also write what was measured into this file")
    arguments = parser.parse_args()
    for name in arguments.sections or SECTIONS:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as directory, ForkServer() as server:
            section = SECTIONS[name](server, Path(directory))
        print(f"## {TITLES[name]} [{time.monotonic() - started:.0f} s]\n\n{section}\n", flush=True)
        if arguments.output is not None:
            text = arguments.output.read_text() if arguments.output.exists() else HEAD
            arguments.output.write_text(replaced(text, TITLES[name], section))


if __name__ == "__main__":
    main()
