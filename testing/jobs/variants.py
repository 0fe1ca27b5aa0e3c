# SPDX-License-Identifier: Apache-2.0
"""Several trainings one after another in one set of processes, compared bitwise where they should be equal.

    reports = run_variants(4, [
        Variant("stock", (*layout, "--train-iters", "20")),
        Variant("ours", (*layout, "--train-iters", "20", "--adaptra"), like="stock"),
    ], timeout_s=120)
    check_equal(reports)

Starting processes and importing Megatron costs far more than training a tiny model: this pays it once.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptra_megatron.tools.local_ranks.launch_ranks import Echo, run_ranks

if TYPE_CHECKING:
    from testing.jobs.fork_server import ForkServer

SHOWN_DIFFERENCES = 5
"""Most differences reported per rank."""


@dataclass(frozen=True)
class Variant:
    """One training: arguments of `scripts/train_gpt.py`, and an earlier variant whose results it must reproduce."""

    name: str
    argv: tuple[str, ...]
    like: str | None = None
    nearly: bool = False
    """True if its results need only be close to those of `like`, as sums are added in another order."""
    plan_to: str | None = None
    """File that gets the schedule of its last iteration, for a later variant to run."""


@dataclass
class VariantReport:
    """Results of one variant over all ranks."""

    name: str
    like: str | None
    elements_compared: int = 0
    """Tensor elements compared with those of `like`, summed over ranks; 0 without `like`."""
    differences: list[str] = field(default_factory=list)
    """Up to 5 lines for each rank that is not bitwise equal to `like`; empty if all are."""
    distances: dict[str, float] = field(default_factory=dict)
    """Relative norm of the differences to `like`, by kind of number, on the worst rank; if it need only be close."""
    fingerprints: list[str] = field(default_factory=list)
    """Digest of each rank's parameters, bitwise."""
    losses: list[float] = field(default_factory=list)
    evaluation_losses: list[float] = field(default_factory=list)
    iteration_seconds: list[float] = field(default_factory=list)
    """Per iteration, of the slowest rank."""
    pipeline_seconds: list[float] = field(default_factory=list)
    """Per iteration: time from the first stage's start to the last rank's end of forward_backward."""
    periods_s: list[float] = field(default_factory=list)
    """Per iteration: time from its beginning to the next one's, on the first rank."""
    links_struck: dict[str, int] = field(default_factory=dict)
    """Messages that emulated slow links delayed, by `<source stage>><target stage>`, summed over ranks."""
    pauses: int = 0
    """Number of scripted pauses of all ranks."""
    plans: list[list[Any]] = field(default_factory=list)
    """By rank, per iteration: the number of the plan, and a fingerprint of its schedule; no ranks for stock."""
    path_flaps: int = 0
    """Number of forced changes of preferred path, over all ranks."""
    adaptra: list[dict[str, Any]] = field(default_factory=list)
    """`AdaptraRuntime.summary()` of each rank; empty for stock."""
    worst_overrun_s: float = 0.0
    """Largest excess of an operation's real work over its emulated time."""
    lateness_s: list[float] = field(default_factory=list)
    """Per iteration: worst lateness of an emulated operation, over all ranks; empty without emulation."""
    overruns: float = 0.0
    """Fraction of operations whose real work took longer than emulated."""


def run_variants(
    world_size: int,
    variants: Sequence[Variant],
    *,
    timeout_s: float,
    server: ForkServer | None = None,
    directory: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    echo: Echo | None = None,
    program: Sequence[str] = ("-m", __name__),
) -> list[VariantReport]:
    """Train all variants in one set of `world_size` processes, in order.

    `timeout_s`: for all of them together. `server`: fork the ranks from it. `directory`: for logs and report; None: a
    temporary one. `env`: added to the ranks' environment. `program`: of a rank, with another way to `_main`. Raises
    LaunchError if a rank failed (its log names the variant) or time ran out, ValueError if names are not unique or
    `like` names no earlier variant.
    """
    names = [variant.name for variant in variants]
    if len(set(names)) != len(names):
        raise ValueError(f"variants need names of their own: {names}")
    for index, variant in enumerate(variants):
        if variant.like is not None and variant.like not in names[:index]:
            raise ValueError(f"variant {variant.name!r} is like {variant.like!r}, which is none of {names[:index]}")
    place = Path(tempfile.mkdtemp(prefix="adaptra-variants-") if directory is None else directory)
    place.mkdir(parents=True, exist_ok=True)
    request, report = place / "variants.json", place / "report.json"
    request.write_text(json.dumps([asdict(variant) for variant in variants], indent=1))
    report.unlink(missing_ok=True)
    run_ranks(
        world_size,
        [*program, str(request), str(report)],
        timeout_s=timeout_s,
        env=env,
        log_directory=place,
        server=server,
        echo=echo,
    )
    return [VariantReport(**entry) for entry in json.loads(report.read_text())]


def check_equal(reports: Sequence[VariantReport]) -> None:
    """Raise ResultsDifferError, naming variants and first differences, unless each variant equals its `like`.

    Also raised if nothing was compared.
    """
    from testing.results import ResultsDifferError

    compared = [report for report in reports if report.like is not None]
    if not compared:
        raise ResultsDifferError("no variant names another that it must be like: nothing was compared")
    problems = []
    for report in compared:
        if not report.elements_compared:
            problems.append(f"{report.name}: nothing was compared with {report.like}")
        problems += [f"{report.name} is not {report.like}: {line}" for line in report.differences]
    if problems:
        raise ResultsDifferError("\n".join(problems))


def _main(argv: Sequence[str]) -> None:
    """Train the variants of the file `argv[0]` on one rank; rank 0 writes the reports to `argv[1]`."""
    import logging

    from testing.megatron.megatron_on_cpu import install

    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logger = logging.getLogger("adaptra_megatron")
    logger.setLevel(logging.INFO)
    install(with_fused_weight_gradient=True)
    import torch.distributed as dist

    from testing.results import differences, fingerprint, relative_distances
    from testing.training.process_groups import leave_job
    from testing.training.train import train
    from testing.training.training_arguments import parse_arguments

    variants = [Variant(**entry) for entry in json.loads(Path(argv[0]).read_text())]
    kept: dict[str, Any] = {}
    reports = []
    for index, variant in enumerate(variants):
        if int(dist.get_rank() if dist.is_initialized() else 0) == 0:
            logger.info("variant %s: %s", variant.name, " ".join(variant.argv))
        args = parse_arguments(["--emulate-cpu", "--distributed-backend", "gloo", *variant.argv])
        result = train(args)
        tensors = result.tensors()
        found: list[str] = []
        distances: dict[str, float] = {}
        elements = 0
        if variant.like is not None:
            expected = kept[variant.like]
            found = [] if variant.nearly else differences(expected, tensors)
            distances = relative_distances(expected, tensors) if variant.nearly else {}
            elements = sum(tensor.numel() for tensor in expected.values())
        parts: list[Any] = [None] * dist.get_world_size()
        mine = {"result": result.figures(), "differences": found[:SHOWN_DIFFERENCES], "elements": elements}
        mine |= {"distances": distances, "fingerprint": fingerprint(result.parameters)}
        dist.all_gather_object(parts, mine)
        reports.append(_merge(variant, parts))
        if variant.plan_to is not None and dist.get_rank() == 0:
            Path(variant.plan_to).write_text(reports[-1].adaptra[0]["schedule_csv"])
        dist.barrier()
        if any(later.like == variant.name for later in variants[index + 1 :]):
            kept[variant.name] = tensors
    if dist.get_rank() == 0:
        Path(argv[1]).write_text(json.dumps([asdict(report) for report in reports], indent=1))
    leave_job()


def _merge(variant: Variant, parts: Sequence[dict[str, Any]]) -> VariantReport:
    """Merge the parts of all ranks into one report."""
    results = [part["result"] for part in parts]
    report = VariantReport(variant.name, variant.like)
    report.elements_compared = sum(part["elements"] for part in parts)
    report.differences = [f"rank {rank}: {line}" for rank, part in enumerate(parts) for line in part["differences"]]
    sorts = {sort for part in parts for sort in part["distances"]}
    report.distances = {sort: max(part["distances"].get(sort, 0.0) for part in parts) for sort in sorted(sorts)}
    report.fingerprints = [part["fingerprint"] for part in parts]
    report.losses = results[-1]["losses"]
    report.evaluation_losses = results[-1]["evaluation_losses"]
    report.adaptra = [result["adaptra"] for result in results if result["adaptra"]]
    report.iteration_seconds = [max(times) for times in zip(*(r["iteration_seconds"] for r in results), strict=True)]
    report.worst_overrun_s = max(result["compute"].get("worst_overrun_s", 0.0) for result in results)
    calls = sum(result["compute"].get("calls", 0) for result in results)
    report.overruns = sum(result["compute"].get("overruns", 0) for result in results) / max(calls, 1)
    report.lateness_s = [max(late) for late in zip(*(r["lateness_s"] for r in results), strict=True)]
    spans = zip(*(result["forward_backward_s"] for result in results), strict=True)
    report.pipeline_seconds = [max(left for _, left in ranks) - ranks[0][0] for ranks in spans]
    begun_s = [entered for entered, _ in results[0]["forward_backward_s"]]
    report.periods_s = [later - earlier for earlier, later in pairwise(begun_s)]
    report.path_flaps = sum(result["path_flaps"] for result in results)
    report.pauses = sum(result["pauses"] for result in results)
    report.plans = [result["plans"] for result in results if result["plans"]]
    report.links_struck = _sum(result["links_struck"] for result in results)
    return report


def _sum(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


if __name__ == "__main__":
    _main(sys.argv[1:])
