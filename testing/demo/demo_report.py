# SPDX-License-Identifier: Apache-2.0
"""Report the demonstration's results: a summary for programs, tables for people, and whether its claims hold."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from testing.demo.demo_setup import DemoSetup
from testing.jobs.variants import VariantReport


@dataclass(frozen=True, kw_only=True)
class HalvesTime:
    """Median seconds of an iteration before and after the link turned slow."""

    healthy_s: float
    slow_s: float

    @property
    def slow_down(self) -> float:
        return self.slow_s / self.healthy_s


@dataclass(frozen=True, kw_only=True)
class DemoReport:
    """The two runs of `setup`: stock Megatron, and the same with --adaptra, compared bit for bit."""

    setup: DemoSetup
    stock: VariantReport
    adaptra: VariantReport

    @property
    def stock_time(self) -> HalvesTime:
        return self._time(self.stock)

    @property
    def adaptra_time(self) -> HalvesTime:
        return self._time(self.adaptra)

    @property
    def lower_bound(self) -> HalvesTime:
        return HalvesTime(healthy_s=self.setup.lower_bound_s(slow=False), slow_s=self.setup.lower_bound_s(slow=True))

    @property
    def losses_equal(self) -> bool:
        """Return whether both runs report the loss of every iteration, with bitwise equal values."""
        stock, adaptra = self.stock.losses, self.adaptra.losses
        return len(stock) == len(adaptra) == self.setup.iterations and all(map(_same_bits, stock, adaptra))

    @property
    def overruns(self) -> float:
        """Return the larger of both runs' fractions of actions whose real work exceeded the emulated time."""
        return max(self.stock.overruns, self.adaptra.overruns)

    def typical_slow_iteration(self, report: VariantReport) -> int:
        """Return the iteration (from 0) whose time is the median of the slow half, for the picture."""
        slow = range(self.setup.slow_from, self.setup.iterations)
        ordered = sorted(slow, key=lambda iteration: report.iteration_seconds[iteration])
        return ordered[(len(ordered) - 1) // 2]

    def problems(self) -> list[str]:
        """Return why the demonstration fails or proves nothing; empty if it holds."""
        found = [] if self.losses_equal else ["the losses of the two runs are not equal"]
        found += [f"adaptra differs from stock: {difference}" for difference in self.adaptra.differences]
        if not self.adaptra.elements_compared:
            found.append("no parameter was compared")
        for report in (self.stock, self.adaptra):
            if not sum(report.links_struck.values()):
                found.append(f"{self.setup.link} was never slow in the {report.name} run")
        return found

    def summary(self, *, png: Path, trace: Path) -> dict[str, Any]:
        """Return the content of summary.json; times are median seconds per iteration."""
        times = {"stock": self.stock_time, "adaptra": self.adaptra_time, "lower_bound": self.lower_bound}
        return {
            **{name: {"healthy_s": time.healthy_s, "slow_s": time.slow_s} for name, time in times.items()},
            "losses_equal": self.losses_equal,
            "iterations": self.setup.iterations,
            "png": png.as_posix(),
            "trace": trace.as_posix(),
        }

    def iteration_table(self) -> str:
        """Return a table of all iterations: state of the link, both times, both losses."""
        lines = ["  iteration   link        stock ms   adaptra ms    stock loss   adaptra loss"]
        rows = zip(
            self.stock.iteration_seconds,
            self.adaptra.iteration_seconds,
            self.stock.losses,
            self.adaptra.losses,
            strict=True,
        )
        for number, (stock_s, adaptra_s, stock_loss, adaptra_loss) in enumerate(rows):
            state = "slow" if number >= self.setup.slow_from else "healthy"
            verdict = "same" if _same_bits(stock_loss, adaptra_loss) else "DIFFERENT"
            lines.append(
                f"  {number + 1:9}   {state:8}{1e3 * stock_s:12,.0f} {1e3 * adaptra_s:12,.0f}"
                f" {stock_loss:13.6f}  {adaptra_loss:13.6f}   {verdict}"
            )
        return "\n".join(lines)

    def time_table(self) -> str:
        """Return median times before and after the slowdown, relative to stock and to the bound."""
        slow_title = f"+{1e3 * self.setup.latency_s:g} ms"
        stock, adaptra, bound = self.stock_time, self.adaptra_time, self.lower_bound
        return "\n".join(
            [
                f"  {'':20}{self.setup.link + ' healthy':>20}{slow_title:>14}{'slow-down':>14}",
                _time_row("stock 1F1B", stock),
                _time_row("adaptra", adaptra),
                _time_row("proven lower bound", bound),
                _factor_row("stock / adaptra", stock, adaptra),
                _factor_row("adaptra / bound", adaptra, bound),
            ]
        )

    def _time(self, report: VariantReport) -> HalvesTime:
        seconds, slow_from = report.iteration_seconds, self.setup.slow_from
        return HalvesTime(healthy_s=median(seconds[:slow_from]), slow_s=median(seconds[slow_from:]))


def _same_bits(left: float, right: float) -> bool:
    return left.hex() == right.hex()


def _time_row(name: str, time: HalvesTime) -> str:
    return f"  {name:20}{1e3 * time.healthy_s:17,.0f} ms{1e3 * time.slow_s:11,.0f} ms{time.slow_down:12.2f} x"


def _factor_row(name: str, time: HalvesTime, base: HalvesTime) -> str:
    return f"  {name:20}{time.healthy_s / base.healthy_s:18.2f} x{time.slow_s / base.slow_s:12.2f} x"
