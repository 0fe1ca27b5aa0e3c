# SPDX-License-Identifier: Apache-2.0
"""Ranks die at the worst moments of trainings: what the others come to, compared with the training without deaths.

    python -m campaigns.deaths [--runs 300 | --seconds 3600] [--seed 1] [--output build/deaths]

Each run trains a small GPT in one of several layouts while one to three ranks kill themselves, whatever they do at that
moment: actions, messages, collectives, commits, optimizer steps, meetings after the death before; some at nearly the
same moment, some as their reduction of gradients starts, some while another rank's reduction is late. Where all of the
model and of its optimizer lives, the rest must come to the same losses and parameters, to the bit; else all must end,
and say why.

In many of the runs ranks that have died are started again, and from a random iteration on each waits until all stand
ready. Ranks die again there, and as others are admitted: rejoining ranks, those that admit them, the one that sends the
state. In the end all are in place, but for those that died in the last iterations, with the same numbers.

In most runs collectives, requests to the job's store, starts of threads, messages and interruptions are late at random,
many a little or few for long. No run may leave a process behind. Exit status: 0 if everything held, 1 if not.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from adaptra_megatron.tools.local_ranks.launch_ranks import LaunchError, RankResult
from campaigns.death_stories import Story, story
from campaigns.dying_trainings import KILLED, LAYOUTS, LOST, SHARDED, Layout, left_behind, pauses_s, problems, train
from testing.faults.operation_board import LATE, UNDER_WAY, read_deaths, read_lateness
from testing.jobs.fault_tolerant_jobs import Host
from testing.jobs.fork_server import ForkServer

RESTARTS = 8
"""How often each rank is started again: one that is not admitted as another dies, too, and all lanes of a cell."""


@dataclass
class Tally:
    """What has happened in all runs."""

    counts: Counter[str] = field(default_factory=Counter)
    redone_s: list[float] = field(default_factory=list)
    """See `pauses_s`."""
    admitted_s: list[float] = field(default_factory=list)
    """For how long the others waited for rejoining ranks."""
    problems: list[str] = field(default_factory=list)
    """Each with the run that it is of, whose logs are kept."""
    wrong: int = 0
    """Runs with problems."""

    def add(self, layout: Layout, script: Story, results: Sequence[RankResult], host: Host, directory: Path) -> None:
        """Count a run."""
        self.counts["deaths"] += sum(each.exit_code == KILLED for each in host.endings)
        self.counts["restarts"] += sum(each.start > 0 for each in host.endings)
        self.counts["with restarts"] += bool(script.back)
        self.counts["with the distributed optimizer"] += SHARDED in layout.flags
        self.counts["with all ranks at the end"] += not any(result.returncode for result in results)
        self.counts["that lost something"] += any(LOST in result.output for result in results)
        deaths = read_deaths(directory)
        self.counts["operations under way as a rank died"] += sum(each[UNDER_WAY] for each in deaths)
        self.counts["operations late as a rank died"] += sum(each[LATE] for each in deaths)
        self.counts["deaths with either"] += sum(each[UNDER_WAY] + each[LATE] > 0 for each in deaths)
        for kind, count in read_lateness(directory).items():
            self.counts[f"late {kind}"] += count
        self.redone_s += pauses_s(results)
        texts = (result.output for result in results)
        self.admitted_s += [float(found) for text in texts for found in re.findall(r"back, after ([0-9.]+) s", text)]

    def summary(self, runs: int) -> str:
        """One line."""
        counted = ", ".join(f"{count} {what}" for what, count in self.counts.items())
        times = [
            f"{what} {median(times):.2f} s (median), {max(times):.2f} s at most"
            for what, times in (("redone after", self.redone_s), ("admitted after", self.admitted_s))
            if times
        ]
        return "; ".join([f"{runs} runs: {counted}", *times, f"{self.wrong} wrong"])

    def row(self, seed: int, runs: int) -> str:
        """That of the table in benchmarks/results/deaths_campaign.md."""
        names = [
            *("deaths", "restarts", "with restarts", "with the distributed optimizer", "with all ranks at the end"),
            *("that lost something", "operations under way as a rank died", "operations late as a rank died"),
            "deaths with either",
        ]
        times = [
            f"{median(each):.2f}, {max(each):.2f}" if each else "none" for each in (self.redone_s, self.admitted_s)
        ]
        return " | ".join(["", *map(str, (seed, runs, *(self.counts[name] for name in names), *times, self.wrong)), ""])


def campaign(
    runs: int,
    seed: int,
    directory: Path,
    server: ForkServer,
    say: Callable[[str], object],
    seconds: float | None = None,
) -> list[str]:
    """Run it, for `seconds` or that many `runs`; all problems, each with the run that it is of, whose logs are kept."""
    chosen, tally, done, deadline_s = random.Random(seed), Tally(), 0, time.monotonic() + (seconds or 0.0)
    for run in itertools.count() if seconds is not None else range(runs):
        if seconds is not None and time.monotonic() > deadline_s:
            break
        number = run % len(LAYOUTS)
        layout, peace = LAYOUTS[number], directory / f"peace{number}"
        if not peace.exists():
            results = train(layout, peace, server)
            assert not any(result.returncode for result in results), f"{layout} fails without deaths"
        script = story(run, layout, chosen)
        wrong = one_run(layout, script, directory / f"run{run}", peace, server, tally)
        tally.problems += [f"run {run}, {layout}, {script}: {each}" for each in wrong]
        tally.wrong += bool(wrong)
        say(f"run {run}, layout {number}: {script}: {wrong or 'as without deaths'}")
        done += 1
    say(tally.summary(done))
    say(tally.row(seed, done).strip())
    return tally.problems


def one_run(layout: Layout, script: Story, place: Path, peace: Path, server: ForkServer, tally: Tally) -> list[str]:
    """One training; what is wrong with it. Its logs are kept where something is."""
    host = Host(layout.world_size, restarts=RESTARTS if script.back else 0)
    try:
        results = train(layout, place, server, script.deaths, late=script.late, back=script.back, host=host)
    except LaunchError as hung:
        wrong, results = [str(hung).splitlines()[0]], hung.results
    else:
        wrong = problems(layout, peace, place, results, script.struck(layout))
    wrong += left_behind(place)
    tally.add(layout, script, results, host, place)
    if not wrong:
        shutil.rmtree(place)
    return wrong


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m campaigns.deaths", allow_abbrev=False)
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--seconds", type=float, help="run until the time is up, whatever --runs says")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("build/deaths"))
    arguments = parser.parse_args(argv)
    shutil.rmtree(arguments.output, ignore_errors=True)
    with ForkServer() as server:
        found = campaign(arguments.runs, arguments.seed, arguments.output, server, _say, arguments.seconds)
    sys.stdout.write("".join(f"{problem}\n" for problem in found))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
