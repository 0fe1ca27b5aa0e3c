# SPDX-License-Identifier: Apache-2.0
"""Show the progress of the demonstration's trainings, from the lines that the last rank writes."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TextIO

from testing.demo.demo_setup import DemoSetup

_ITERATION = re.compile(
    r"iteration\s+(?P<number>\d+)/.*elapsed time per iteration \(ms\): (?P<ms>[\d.]+).*lm loss: (?P<loss>\S+)"
)


class Step(NamedTuple):
    """One finished iteration."""

    run: str
    number: int
    """Counted from 1, as Megatron does."""
    milliseconds: float
    loss: float
    slow: bool


Show = Callable[[Step], None]


@dataclass
class ProgressReader:
    """Parses the last rank's log into steps. An iteration number that decreases belongs to the next run."""

    setup: DemoSetup
    runs: Sequence[str]
    show: Show
    _run: int = 0
    _number: int = 0

    def __call__(self, line: str) -> None:
        """Read one line; ignore any that reports no iteration."""
        found = _ITERATION.search(line)
        if found is None:
            return
        number = int(found["number"])
        if number <= self._number:
            self._run += 1
        self._number = number
        slow = number > self.setup.slow_from
        self.show(Step(self.runs[self._run], number, float(found["ms"]), float(found["loss"]), slow))


@contextlib.contextmanager
def progress(setup: DemoSetup, runs: Sequence[str], output: TextIO) -> Iterator[ProgressReader]:
    """Show progress bars on a terminal if rich is installed, else a line per iteration."""
    if output.isatty() and importlib.util.find_spec("rich") is not None:
        with _bars(setup, runs, output) as show:
            yield ProgressReader(setup, runs, show)
        return

    def show_line(step: Step) -> None:
        output.write(
            f"  {step.run:8} iteration {step.number:3}/{setup.iterations}   {_link_state(setup, step):22}"
            f"{step.milliseconds:8,.0f} ms   loss {step.loss:.4f}\n"
        )
        output.flush()

    yield ProgressReader(setup, runs, show_line)


def _link_state(setup: DemoSetup, step: Step) -> str:
    return f"{setup.link} +{1e3 * setup.latency_s:g} ms" if step.slow else f"{setup.link} healthy"


@contextlib.contextmanager
def _bars(setup: DemoSetup, runs: Sequence[str], output: TextIO) -> Iterator[Show]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        TextColumn("  {task.description:8}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
    )
    with Progress(*columns, console=Console(file=output)) as bars:
        tasks = {run: bars.add_task(run, total=setup.iterations, state="") for run in runs}

        def show(step: Step) -> None:
            colour = "red" if step.slow else "green"
            state = f"[{colour}]{_link_state(setup, step)}[/]   {step.milliseconds:,.0f} ms   loss {step.loss:.4f}"
            bars.update(tasks[step.run], completed=step.number, state=state)

        yield show
