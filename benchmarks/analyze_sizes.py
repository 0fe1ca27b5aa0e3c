# SPDX-License-Identifier: Apache-2.0
"""How long `adaptra analyze` takes for large recordings, and how much memory: a part of benchmarks/results/analyze.md.

The recordings are made here: 1F1B without delays, and, of those that stand for Kineto's, operators as well.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from adaptra_megatron.schedule.classic import one_f_one_b
from adaptra_megatron.schedule.costs import uniform_costs
from adaptra_megatron.schedule.simulator import simulate

_OPERATOR = (
    '{{"ph": "X", "cat": "cpu_op", "name": "aten::empty_strided", "pid": 4001, "tid": 4001, "ts": {0}.125, "dur": 1.1, '
    '"args": {{"External id": {0}, "Record function id": 0, "Sequence number": {0}, "Fwd thread id": 0, '
    '"Ev Idx": {0}}}}},\n'
)
_ANALYSE = (
    "import resource, sys\nfrom adaptra_megatron.tools.cli.main import main\n"
    "status = main(['analyze', *sys.argv[1:], '--json', '--no-progress'])\n"
    "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')), file=sys.stderr)\n"
    "used = resource.getrusage(resource.RUSAGE_SELF)\n"
    "print(used.ru_utime + used.ru_stime, file=sys.stderr)\n"
    "sys.exit(status)"
)
"""Says the most memory it had, in KB (what getrusage says is at least what the process that began it had), and the
seconds of a core that it took."""
_ON_ONE_CORE = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
"""With one core it starts no processes, so that all work is in its own seconds."""


def events(stages: int, micro_batches: int, replica: int = 0) -> dict[int, list[dict[str, Any]]]:
    """The actions of a step, by stage."""
    costs = uniform_costs(
        stages, micro_batches, forward_s=0.01, backward_input_s=0.01, backward_weight_s=0.01, links={}
    )
    found = simulate(one_f_one_b(stages, micro_batches), costs)
    rows = zip(found.schedule.orders, found.start_s, found.end_s, strict=True)
    names = {"F": "forward", "B": "backward"}
    return {
        stage: [
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": f"{names[action.kind.value]} {action.micro_batch}",
                "pid": 4001,
                "tid": 4001,
                "ts": 1e6 * start_s,
                "dur": 1e6 * (end_s - start_s),
                "args": {"pp_rank": stage, "dp_rank": replica, "iteration": 0},
            }
            for action, start_s, end_s in zip(order, starts_s, ends_s, strict=True)
        ]
        for stage, (order, starts_s, ends_s) in enumerate(rows)
    }


def large(path: Path, actions: list[dict[str, Any]], nbytes: int) -> None:
    """A file of about `nbytes`, most of which are operators."""
    with path.open("w") as file:
        file.write('{"baseTimeNanoseconds": 1790857026000000000, "traceEvents": [\n')
        for number in range(nbytes // len(_OPERATOR.format(100_000))):
            file.write(_OPERATOR.format(number))
        file.write(",\n".join(map(json.dumps, actions)) + "]}\n")


class Taken(NamedTuple):
    """What an analysis took."""

    seconds: float
    cpu_s: float
    """Of the process itself."""
    gbytes: float
    """Of the process itself."""


def taken(path: Path, before: str = "") -> Taken:
    """What analysing `path` takes in a process that runs the code `before` first."""
    start = time.perf_counter()
    command = [sys.executable, "-c", before + _ANALYSE, str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    kbytes, cpu_s = done.stderr.split()[-2:]
    return Taken(time.perf_counter() - start, float(cpu_s), int(kbytes) / 1e6)


def recordings(directory: Path) -> Iterator[tuple[str, Path]]:
    """What to analyse, in words, and where it is."""
    one = directory / "one.json"
    large(one, events(1, 8)[0], 200 << 20)
    yield "one file of 200 MB", one
    four = directory / "four"
    four.mkdir()
    for stage, actions in events(4, 8).items():
        large(four / f"rank{stage}.json", actions, 200 << 20)
    yield "four of 200 MB", four
    many = directory / "many"
    many.mkdir()
    for replica in range(125):
        for stage, actions in events(8, 16, replica).items():
            (many / f"rank{8 * replica + stage}.json").write_text(json.dumps(actions))
    yield "1,000 of 7 KB: 8 stages, 125 replicas, 16 micro-batches", many


def sizes() -> list[str]:
    """The table."""
    lines = [
        "## Large recordings",
        "",
        "On a machine of two cores, which other work shared: so the table also has the seconds that one core computed,",
        "where one process reads all files. Of several large files, each is read by a process of its own that takes as",
        "much memory as one file does; that of the command itself is here.",
        "",
        "| files | s | s of a core | GB |",
        "|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as directory:
        for name, path in recordings(Path(directory)):
            found, alone = taken(path), taken(path, _ON_ONE_CORE)
            lines.append(f"| {name} | {found.seconds:.1f} | {alone.cpu_s:.1f} | {found.gbytes:.2f} |")
    return [*lines, ""]
