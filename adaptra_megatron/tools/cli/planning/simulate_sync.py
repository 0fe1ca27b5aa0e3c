# SPDX-License-Identifier: Apache-2.0
"""Define `adaptra simulate-sync`: the time of gradient synchronisation with a straggler, by algorithm and by mode."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

from adaptra_megatron.gradsync.all_reduce_algorithms import (
    ALGORITHMS,
    STOCK,
    AllReduceWire,
    choose,
    critical_delay_s,
    ring_s,
    stock_s,
)
from adaptra_megatron.gradsync.stragglar import has_stragglar
from adaptra_megatron.gradsync.sync_modes import Candidate, ModeKind, candidates
from adaptra_megatron.gradsync.sync_modes import choose as choose_mode
from adaptra_megatron.tools.cli.planning.inputs import (
    PER_SECOND,
    SECONDS,
    InputError,
    Value,
    ValueRange,
    argument_type,
    parsed_value,
)
from adaptra_megatron.tools.cli.terminal import print_table

_PREFIXES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_BYTES = {f"{prefix}B": float(factor) for prefix, factor in _PREFIXES.items()}
_MOST_REPLICAS = 64
"""Maximum number of replicas for which modes are simulated, update by update."""
_STALENESS = 4
"""Default of --adaptra-max-staleness."""
_EXAMPLES = """\
examples:
  --ranks 8 --size 1GiB --bandwidth 450GiB/s --latency 3us --delay 0..5ms/10
  --ranks 4,8,64 --size 64MiB,1GiB --bandwidth 100Gbit/s --latency 20us --delay 50ms --compute 1.2s --plot sync.png
"""


@dataclass(frozen=True)
class SyncPoint:
    """Results for one case."""

    ranks: int
    nbytes: int
    delay_s: float
    exposed_s: dict[str, float | None]
    """By algorithm: seconds from the arrival of the last rank; None if the algorithm does not support so many ranks."""
    iteration_s: dict[str, float | None]
    critical_delay_s: float | None
    """Delay from which on StragglAR is faster than a ring; None if it never is."""
    chosen: str
    chosen_nbytes: int
    """Bytes that `auto` gives to its algorithm; stock's all-reduce does the rest."""
    modes: dict[str, dict[str, float]]
    """By value of --adaptra-sync-mode: see `_modes`; empty without --compute, or for many replicas."""
    chosen_mode: str | None
    """Mode that `--adaptra-sync-mode auto` would choose."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `simulate-sync` to the commands of `adaptra`."""
    parser = commands.add_parser(
        "simulate-sync",
        help="time the synchronisation of gradients around a straggler",
        description="Time all-reduces of gradients from the arrival of the last replica, by a model of "
        "latency, bandwidth and delay; with --compute, also updates in each mode of --adaptra-sync-mode, as if "
        f"messages cost nothing, for up to {_MOST_REPLICAS} replicas.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EXAMPLES,
    )
    seconds = argument_type(lambda text: parsed_value(text, SECONDS))
    parser.add_argument("--ranks", required=True, type=argument_type(_ranks), metavar="N[,N...]", help="replicas")
    parser.add_argument(
        "--size", required=True, type=argument_type(_sizes), metavar="SIZE[,SIZE...]", help="of gradients, as 1GiB"
    )
    parser.add_argument(
        "--delay", required=True, type=seconds, metavar="VALUE", help="delay of the last replica; may be a range"
    )
    parser.add_argument(
        "--bandwidth",
        required=True,
        type=argument_type(lambda text: parsed_value(text, PER_SECOND)),
        metavar="VALUE",
        help="of each replica's link, each way, as 100Gbit/s",
    )
    parser.add_argument("--latency", default=0.0, type=seconds, metavar="VALUE", help="of a message (default: 0)")
    parser.add_argument(
        "--compute", default=0.0, type=seconds, metavar="VALUE", help="computation of the other replicas (default: 0)"
    )
    parser.add_argument(
        "--noise",
        default=0.0,
        type=argument_type(_noise),
        metavar="BATCHES",
        help="gradient noise scale, in batches of a replica, for modes (default: 0)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw it (needs matplotlib)")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    for name in ("bandwidth", "latency", "compute"):
        if isinstance(getattr(options, name), ValueRange):
            raise InputError(f"--{name} is a range, but only --delay may be one")
    if options.bandwidth <= 0.0:
        raise InputError("--bandwidth must be above 0")
    wire = AllReduceWire(options.latency, 1 / options.bandwidth)
    delays = _values(options.delay)
    points = [
        _point(ranks, nbytes, wire, delay_s, options)
        for ranks in options.ranks
        for nbytes in options.size
        for delay_s in delays
    ]
    if options.json:
        print(json.dumps({"points": [asdict(point) for point in points]}, allow_nan=False))
    else:
        _print_text(points)
    if options.plot is not None:
        _draw(points, options.plot)


def _point(ranks: int, nbytes: int, wire: AllReduceWire, delay_s: float, options: argparse.Namespace) -> SyncPoint:
    compute_s: float = options.compute
    chosen = choose(ranks, nbytes, wire, delay_s)
    exposed_s = {
        "ring": ring_s(ranks, nbytes, wire),
        STOCK: stock_s(ranks, nbytes, wire),
        **{
            name: each.exposed_s(ranks, nbytes, wire, delay_s) if each.supports(ranks) else None
            for name, each in ALGORITHMS.items()
        },
        "auto": chosen.exposed_s,
    }
    iteration_s = {name: None if each is None else compute_s + delay_s + each for name, each in exposed_s.items()}
    critical_s = critical_delay_s(ranks, nbytes, wire) if has_stragglar(ranks) else math.inf
    critical = critical_s if math.isfinite(critical_s) else None
    modes, chosen_mode = _modes(ranks, compute_s, delay_s, options.noise)
    return SyncPoint(
        ranks,
        nbytes,
        delay_s,
        exposed_s,
        iteration_s,
        critical,
        chosen.algorithm,
        chosen.nbytes,
        {str(each.mode): {**each.pace._asdict(), "progress_s": each.progress_s} for each in modes},
        chosen_mode,
    )


@lru_cache
def _modes(ranks: int, compute_s: float, delay_s: float, noise: float) -> tuple[tuple[Candidate, ...], str | None]:
    """Return the modes for replicas of which one is late, and the one that would be chosen. Of each mode: seconds per
    update, gradients per update, their staleness, and seconds for the progress of one synchronous update."""
    if compute_s == 0.0 or ranks > _MOST_REPLICAS:
        return (), None
    times_s = [compute_s] * (ranks - 1) + [compute_s + delay_s]
    kinds = tuple(ModeKind)
    chosen = choose_mode(times_s, kinds, _STALENESS, noise)
    return tuple(candidates(times_s, kinds, _STALENESS, noise)), str(chosen.mode)


def _print_text(points: Sequence[SyncPoint]) -> None:
    names = tuple(points[0].exposed_s)
    print("seconds from the arrival of the last replica (stock: the best that a library can do), and of the iteration")
    rows = []
    for point in points:
        known = ("-" if seconds is None else f"{seconds:.6g}" for seconds in point.exposed_s.values())
        part = "" if point.chosen_nbytes == point.nbytes else f" ({point.chosen_nbytes / point.nbytes:.0%})"
        iteration_s = point.iteration_s["auto"]
        rows.append(
            (
                str(point.ranks),
                str(point.nbytes),
                f"{point.delay_s:.6g}",
                *known,
                f"{point.chosen}{part}",
                f"{point.iteration_s[STOCK]:.6g}",
                f"{iteration_s:.6g}",
            )
        )
    print_table(
        ("replicas", "bytes", "delay (s)", *names, "auto runs", "iteration, stock", "iteration, auto"),
        rows,
    )

    shown = {(point.ranks, point.delay_s): point for point in points if point.modes}
    if shown:
        print("\nmodes of --adaptra-sync-mode, by computation alone; progress is that of one synchronous update")
        print_table(
            ("replicas", "delay (s)", "mode", "s per update", "gradients", "staleness", "s per progress", "auto"),
            [
                (
                    str(ranks),
                    f"{delay_s:.6g}",
                    mode,
                    *(f"{value:.4g}" for value in figures.values()),
                    "x" if mode == point.chosen_mode else "",
                )
                for (ranks, delay_s), point in shown.items()
                for mode, figures in point.modes.items()
            ],
        )


def _draw(points: Sequence[SyncPoint], path: Path) -> None:
    """Draw a panel per number of replicas and size: exposed seconds over the delay. Raises InputError without
    matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("--plot needs matplotlib: pip install 'adaptra-megatron[plot]'") from error
    panels: dict[tuple[int, int], list[SyncPoint]] = {}
    for point in points:
        panels.setdefault((point.ranks, point.nbytes), []).append(point)
    figure = Figure(figsize=(5 * len(panels), 4), layout="constrained")
    for axes, ((ranks, nbytes), shown) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
    ):
        for name in shown[0].exposed_s:
            known = [(point.delay_s, seconds) for point in shown if (seconds := point.exposed_s[name]) is not None]
            if known:
                axes.plot(*zip(*known, strict=True), label=name, marker=".", linestyle="--" if name == "auto" else "-")
        axes.set(title=f"{ranks} replicas, {nbytes / 2**20:g} MiB", xlabel="delay (s)", ylabel="exposed (s)")
        axes.set_ylim(bottom=0)
        axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise InputError(f"--plot {path}: {error}") from error


def _values(value: Value) -> list[float]:
    return value.values if isinstance(value, ValueRange) else [value]


def _noise(text: str) -> float:
    noise = float(text)
    if not noise >= 0:
        raise ValueError("is no noise scale: it is at least 0")
    return noise


def _ranks(text: str) -> list[int]:
    found = [int(part) if part.isascii() and part.isdecimal() else 0 for part in text.split(",")]
    if not all(2 <= ranks <= 1 << 20 for ranks in found):
        raise ValueError("is no list of numbers of replicas, each from 2 to 1048576")
    return found


def _sizes(text: str) -> list[int]:
    found = []
    for part in text.split(","):
        value = parsed_value(part, _BYTES)
        if isinstance(value, ValueRange) or not 1 <= value <= 2**60:
            raise ValueError(f"has {part!r}, which is no size from 1B to 2**60 bytes")
        found.append(round(value))
    return found
