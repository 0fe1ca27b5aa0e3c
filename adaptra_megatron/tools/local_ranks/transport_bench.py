# SPDX-License-Identifier: Apache-2.0
"""Define the benchmark of the host path's transports: request, start of two processes, and report as table and
picture. `bench_rank` measures, and needs torch."""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from adaptra_megatron.tools.local_ranks.launch_ranks import run_ranks
from adaptra_megatron.transport.host_settings import HostSettings, usable_cores
from adaptra_megatron.transport.wires.wire_registry import WIRES

KIBIBYTE, MEBIBYTE, GIBIBYTE = 1 << 10, 1 << 20, 1 << 30
TRANSPORTS = tuple(WIRES)
MOST_NBYTES = GIBIBYTE
RANKS = 2
_RANK_MODULE = "adaptra_megatron.tools.local_ranks.bench_rank"


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """Measurements to make."""

    transports: tuple[str, ...] = TRANSPORTS
    sizes: tuple[int, ...] = (4 * KIBIBYTE, MEBIBYTE, 16 * MEBIBYTE, 64 * MEBIBYTE)
    """Bytes of a message."""
    rounds: int = 5
    lanes: int = field(default_factory=lambda: min(HostSettings.lanes, usable_cores()))
    """TCP connections, also of iperf3; at most the number of cores."""


@dataclass(frozen=True)
class MeasuredTransport:
    """Results for one transport and message size. Each list has one value per round, measured one after the other."""

    transport: str
    nbytes: int
    gb_per_s: list[float]
    """10**9 bytes per second, of messages posted one after the other, until the last is acknowledged."""
    one_way_us: list[float]
    """Half a round trip, from posting until the thread that waits for the message runs."""
    yardsticks: dict[str, list[float]] = field(default_factory=dict)
    """Limits of the transport in GB/s, by name."""


@dataclass
class BenchReport:
    """All results."""

    measured: list[MeasuredTransport] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """One line per measurement that was left out, and why."""

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> BenchReport:
        loaded = json.loads(text)
        return cls([MeasuredTransport(**entry) for entry in loaded["measured"]], loaded["left_out"])


def run_on_this_host(request: BenchRequest, *, timeout_s: float) -> BenchReport:
    """Measure between two processes of this host. Raises LaunchError if one fails or time runs out."""
    with tempfile.TemporaryDirectory(prefix="adaptra-bench-") as name:
        directory = Path(name)
        wanted, found = directory / "request.json", directory / "report.json"
        wanted.write_text(json.dumps(asdict(request)))
        argv = ["-m", _RANK_MODULE, str(wanted), str(found)]
        run_ranks(RANKS, argv, timeout_s=timeout_s, log_directory=directory / "logs")
        return BenchReport.from_json(found.read_text())


def request_from_json(text: str) -> BenchRequest:
    """Decode a request that `run_on_this_host` has written."""
    loaded: dict[str, Any] = json.loads(text)
    return BenchRequest(transports=tuple(loaded.pop("transports")), sizes=tuple(loaded.pop("sizes")), **loaded)


def spelled_size(nbytes: int) -> str:
    """Format a size, such as "4 KiB"."""
    for unit, name in ((GIBIBYTE, "GiB"), (MEBIBYTE, "MiB"), (KIBIBYTE, "KiB")):
        if nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def markdown(report: BenchReport, request: BenchRequest) -> str:
    """Return the report as a GitHub table."""
    lines = [
        f"Medians of {request.rounds} rounds on {os.cpu_count()} cores. Throughput is of messages posted one after the "
        "other, until the last is",
        "acknowledged; one way is half a round trip, from posting until the waiting thread at the other end runs. Each "
        "ratio",
        "is of two measurements right after one another, with the lowest and the highest of them.",
        "",
        "| transport | message | GB/s | one way us (lowest..highest) | yardstick | its GB/s | ratio (of rounds) |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in report.measured:
        ours = (
            f"| {row.transport} | {spelled_size(row.nbytes)} | {statistics.median(row.gb_per_s):.2f} | "
            f"{statistics.median(row.one_way_us):.1f} ({min(row.one_way_us):.1f}..{max(row.one_way_us):.1f})"
        )
        lines += [f"{ours} | {_compared(row.gb_per_s, name, limits)} |" for name, limits in row.yardsticks.items()]
        if not row.yardsticks:
            lines.append(f"{ours} | - | - | - |")
    lines += ["", *(f"- {line}" for line in report.left_out)] if report.left_out else []
    return "\n".join(lines) + "\n"


def _compared(ours: Sequence[float], name: str, limits: Sequence[float]) -> str:
    ratios = [mine / its for mine, its in zip(ours, limits, strict=True)]
    return (
        f"{name} | {statistics.median(limits):.2f} | "
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})"
    )


def draw(report: BenchReport, path: Path) -> None:
    """Draw throughput and latency over the message size. Raises ImportError if matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter
    except ImportError as error:
        raise ImportError("the plot needs matplotlib: pip install 'adaptra-megatron[plot]'") from error
    figure = Figure(figsize=(10, 4), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    throughput, latency = figure.subplots(1, 2)
    for color, transport in enumerate(dict.fromkeys(row.transport for row in report.measured)):
        rows = sorted((row for row in report.measured if row.transport == transport), key=lambda row: row.nbytes)
        sizes, style = [row.nbytes for row in rows], {"color": f"C{color}", "marker": "o"}
        throughput.plot(sizes, [statistics.median(row.gb_per_s) for row in rows], label=transport, **style)
        latency.plot(sizes, [statistics.median(row.one_way_us) for row in rows], **style)
        names = dict.fromkeys(name for row in rows for name in row.yardsticks)
        for name, line in zip(names, itertools.cycle((":", "--")), strict=False):
            points = [(row.nbytes, statistics.median(row.yardsticks[name])) for row in rows if name in row.yardsticks]
            throughput.plot(*zip(*points, strict=True), label=name, color=f"C{color}", linestyle=line, marker=".")
    latency.set_yscale("log")
    for axes, label in ((throughput, "GB/s"), (latency, "one way, us")):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda nbytes, _position: spelled_size(int(nbytes))))
        axes.set_xlabel("message")
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path)
