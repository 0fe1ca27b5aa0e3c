# SPDX-License-Identifier: Apache-2.0
"""The closed loop at work: a training whose links turn slow, move and heal at random, and what its log says of it.

    python -m campaigns.closed_loop [--iterations 200] [--stages 8] [--seed 1] [--host-transport shm]

The same training runs twice in one set of processes: stock Megatron in peace, and adaptra under a random story. The
numbers must be equal to the bit, all ranks of a replica must have run the same plan in every iteration, and the event
log must tell the story: every change of a link, no other, and a reason for every change of plans. Directory: one log
per rank, the story, the run (`adaptra report DIRECTORY/run`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from adaptra_megatron.telemetry.event_log import read_events
from adaptra_megatron.telemetry.events import LinkDetection, PlanSwitched, StampedEvent
from adaptra_megatron.tools.local_ranks.launch_ranks import Echo, LaunchError
from campaigns.story_check import check_agreement, check_story
from testing.faults.network.link_story import LinkFaultScenario, random_story
from testing.jobs.fork_server import ForkServer, ForkServerError
from testing.jobs.variants import Variant, VariantReport, run_variants

BUSY_ACTIONS = 0.25
"""An operation that ended so much of its time too late says that the machine was too busy."""


@dataclass(frozen=True, kw_only=True)
class Campaign:
    """One training under one story."""

    seed: int = 1
    stages: int = 8
    tensor_parallel: int = 1
    data_parallel: int = 1
    micro_batches: int = 16
    iterations: int = 200
    action_ms: float = 20.0
    """F, input gradient and W of every stage, emulated."""
    cap: float = 12.0
    """Activations a stage may hold."""
    host_transport: str = "off"
    """With another, links have two paths, and every other spell strikes both."""
    more: tuple[str, ...] = ()
    """Further arguments of the run with adaptra."""

    @property
    def pipelines(self) -> int:
        """Parallel ones, each with links of its own."""
        return self.tensor_parallel * self.data_parallel

    @property
    def world_size(self) -> int:
        """Processes."""
        return self.pipelines * self.stages

    @property
    def replicas(self) -> list[list[int]]:
        """The ranks of each, which agree on plans: pipelines are neighbours, those of a replica first."""
        of_stages = range(0, self.world_size, self.pipelines)
        firsts = range(0, self.pipelines, self.tensor_parallel)
        return [[at + first + lane for at in of_stages for lane in range(self.tensor_parallel)] for first in firsts]

    def story(self) -> LinkFaultScenario:
        """What happens."""
        return random_story(
            self.seed,
            iterations=self.iterations,
            stages=self.stages,
            micro_batches=self.micro_batches,
            action_s=self.action_ms / 1e3,
            pipelines=range(self.pipelines) if self.pipelines > 1 else None,
            host_share=0.0 if self.host_transport == "off" else 0.5,
        )

    def arguments(self) -> tuple[str, ...]:
        """Arguments of the training, with and without adaptra."""
        text = (
            f"--tensor-model-parallel-size {self.tensor_parallel} --pipeline-model-parallel-size {self.stages} "
            f"--num-layers {self.stages} --global-batch-size {self.micro_batches * self.data_parallel} "
            f"--mock-data --no-gradient-accumulation-fusion --hidden-size 32 --seq-length 16 "
            f"--train-iters {self.iterations}"
        )
        return tuple(text.split())

    def adaptra_arguments(self, story: Path, run: Path) -> tuple[str, ...]:
        """Further arguments of the training with adaptra."""
        text = (
            f"--emulate-compute-ms {','.join([f'{self.action_ms:g}'] * 3)} --adaptra "
            f"--adaptra-max-in-flight {self.cap:g} --adaptra-host-transport {self.host_transport}"
        )
        files = "--emulate-link-story", str(story), "--adaptra-trace-dir", str(run), "--adaptra-trace", "asked"
        return (*text.split(), *files, *self.more)


@dataclass(frozen=True)
class CampaignReport:
    """What came out of it."""

    story: LinkFaultScenario
    stock: VariantReport
    ours: VariantReport
    events: list[StampedEvent]
    busy: set[int]
    """Iterations in which this machine was too busy for what it emulates."""
    problems: list[str]
    """Empty if everything held."""

    def summary(self) -> str:
        """What happened, in a few lines."""
        said = [entry for entry in self.events if isinstance(entry.event, LinkDetection)]
        switches = [entry for entry in self.events if isinstance(entry.event, PlanSwitched)]
        turns = self.story.turns()
        onsets = sum(turn.fault is not None for turn in turns)
        return (
            f"{self.story.iterations} iterations, {onsets} onsets and {len(turns) - onsets} recoveries of links, "
            f"{len(self.story.bursts)} bursts of jitter, {len(self.story.pauses)} pauses: {len(said)} findings, "
            f"{len(switches)} switches of plans; {self.ours.elements_compared:,} numbers equal to stock's; median "
            f"iteration {median(self.ours.pipeline_seconds) * 1e3:.0f} ms; the machine was too busy in "
            f"{len(self.busy)} of them"
        )


def run_campaign(
    campaign: Campaign,
    directory: Path,
    server: ForkServer | None = None,
    *,
    timeout_s: float,
    echo: Echo | None = None,
) -> CampaignReport:
    """Run it in `directory` and judge it. Raises LaunchError if a rank fails, or time runs out."""
    directory.mkdir(parents=True, exist_ok=True)
    story, story_path, run = campaign.story(), directory / "story.json", directory / "run"
    story.write(story_path)
    arguments = campaign.arguments()
    stock, ours = run_variants(
        campaign.world_size,
        [
            Variant("stock", arguments),
            Variant("adaptra", (*arguments, *campaign.adaptra_arguments(story_path, run)), like="stock"),
        ],
        timeout_s=timeout_s,
        server=server,
        directory=directory,
        echo=echo,
    )
    events = read_events(run)
    problems = [f"not as stock: {line}" for line in ours.differences]
    if not ours.elements_compared:
        problems.append("nothing was compared with stock")
    problems += [*_not_struck(campaign, story, ours), *check_agreement(ours.plans, events, campaign.replicas)]
    busy = {i for i, late_s in enumerate(ours.lateness_s) if late_s > BUSY_ACTIONS * campaign.action_ms / 1e3}
    problems += check_story(story, events, busy, ours.lateness_s)
    return CampaignReport(story, stock, ours, events, busy, problems)


def _not_struck(campaign: Campaign, story: LinkFaultScenario, ours: VariantReport) -> list[str]:
    """Proof that the story took place."""
    links = {f"{fault.source}>{fault.target}" for fault in story.faults}
    problems = [f"no message over {link} was delayed" for link in sorted(links) if not ours.links_struck.get(link)]
    expected = len(story.pauses) * campaign.pipelines
    if ours.pauses != expected:
        problems.append(f"{ours.pauses} pauses were made instead of {expected}")
    return problems


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status: 1 if something did not hold."""
    args = _parser().parse_args(argv)
    campaign = Campaign(
        seed=args.seed,
        stages=args.stages,
        iterations=args.iterations,
        host_transport=args.host_transport,
        more=tuple(args.more.split()),
    )
    with ForkServer() as server:
        try:
            report = run_campaign(campaign, args.output, server, timeout_s=args.timeout_s, echo=_say)
        except (LaunchError, ForkServerError, OSError) as error:
            sys.stderr.write(f"the campaign failed: {error}\n")
            return 1
    for problem in report.problems:
        sys.stderr.write(f"{problem}\n")
    _say(report.summary())
    _say(f"{'NOT everything' if report.problems else 'everything'} held; see adaptra report {args.output / 'run'}")
    return 1 if report.problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m campaigns.closed_loop", allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--host-transport", choices=["off", "shm", "tcp"], default="off")
    parser.add_argument("--more", default="", help="further arguments of the run with adaptra")
    parser.add_argument("--timeout-s", type=float, default=1200.0)
    parser.add_argument("--output", type=Path, default=Path("build/closed_loop"))
    return parser


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
