# SPDX-License-Identifier: Apache-2.0
"""What `adaptra analyze` says of three production jobs, and what was published: benchmarks/results/analyze.md.

    python benchmarks/analyze.py DIRECTORY

DIRECTORY holds trace-AR.parquet, trace-SE.parquet and trace-ST.parquet from the artifact of "Understanding Stragglers
in Large Model Training Using What-if Analysis" (OSDI '25; github.com/ByteDance-Seed/StragglerAnalysis, Apache-2.0).
Needs `pip install 'adaptra-megatron[traces]'`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from analyze_sizes import sizes

from adaptra_megatron.tools.recordings.reading import read_recording
from adaptra_megatron.tools.replay.analysis import Analysis, analyse
from adaptra_megatron.tools.replay.analysis_wording import sentences

RESULT = Path(__file__).resolve().parent / "results" / "analyze.md"


class Published(NamedTuple):
    """What the authors' own simulation says, from the results in their artifact."""

    prompt_s: float
    """Mean step without launch delays."""
    ideal_s: float
    slowdown: float
    workers_share: float
    last_stage_share: float


PUBLISHED = {
    "ST": Published(2.1727, 1.8433, 1.1787, 0.0314, 1.2194),
    "AR": Published(46.3364, 23.4847, 1.9730, 1.0017, -0.0012),
    "SE": Published(9.0666, 5.8975, 1.5374, 0.0251, 0.6877),
}

WHY = """\
Why not nearer. Mean steps without launch delays differ by 0.1 to 0.25%, ideals by less than 0.1%: here a message
or a collective has one transfer for all that take part in it, from the last arrival to the first end, and it is ideal
once all of them are. AR's M_W is 1.01 if it is ideal once one of them is, 0.99 as it stands; theirs lies between. Their
results rate a worker by its replica and its stage, here each worker is replayed by itself: SE's slowest two are 8.1 and
9.1 here, and with 8.1 and 27.1, as by the results in their artifact, M_W is 0.0247.
"""


def validation(analyses: dict[str, Analysis]) -> list[str]:
    lines = [
        "## Replays against the recordings",
        "",
        "Seconds of a whole step, from its first operation to its last one over all workers, collectives and optimizer",
        "included. With launch delays: transfers, computation and the time hosts took are the recording's, all waiting",
        "is worked out. A dependency that was missed would hide in launch delays; without them, where hosts take no",
        "time, steps come out shorter by what can hide there at most.",
        "",
        "| trace | steps | recorded, mean | replayed, mean | off by, of all steps | without launch delays |",
        "|---|---|---|---|---|---|",
    ]
    for name, analysis in analyses.items():
        found = analysis.stragglers
        errors = found.replay_errors
        without = statistics.fmean(found.prompt_s) / statistics.fmean(found.recorded_s) - 1.0
        lines.append(
            f"| {name} | {len(found.numbers)} | {statistics.fmean(found.recorded_s):.3f} "
            f"| {statistics.fmean(found.replayed_s):.3f} | {min(errors):+.3%} to {max(errors):+.3%} | {without:+.2%} |"
        )
    return [*lines, ""]


def published(analyses: dict[str, Analysis]) -> list[str]:
    lines = [
        "## Published answers",
        "",
        "Ours / theirs.",
        "",
        "| trace | step without launch delays | ideal step | slowdown | M_W | M_S |",
        "|---|---|---|---|---|---|",
    ]
    for name, analysis in analyses.items():
        found, theirs = analysis.stragglers, PUBLISHED[name]
        lines.append(
            f"| {name} | {statistics.fmean(found.prompt_s):.3f} / {theirs.prompt_s:.3f} "
            f"| {found.ideal_s:.3f} / {theirs.ideal_s:.3f} | {found.slowdown:.3f} / {theirs.slowdown:.3f} "
            f"| {found.workers_share:.3f} / {theirs.workers_share:.3f} "
            f"| {found.last_stage_share:.3f} / {theirs.last_stage_share:.3f} |"
        )
    return [*lines, "", *WHY.splitlines(), ""]


def remedies(analyses: dict[str, Analysis]) -> list[str]:
    lines = [
        "## What each remedy would bring",
        "",
        "A typical step (the median), on its own times, without launch delays; what comes before and after the",
        "pipelines stays. Backwards were not recorded in halves: taken for equal.",
        "",
        "| trace | remedy | step s | less | activations more per stage |",
        "|---|---|---|---|---|",
    ]
    for name, analysis in analyses.items():
        found = analysis.remedies
        lines.append(f"| {name}, step {found.step} | as it was | {found.now_s:.3f} | | |")
        lines += [
            f"| {name} | {remedy.title} | {remedy.seconds:.3f} | {found.gain(remedy):.1%} "
            f"| {f'{remedy.extra_activations:g}' if remedy.extra_activations else ''} |"
            for remedy in found.rows
        ]
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="where trace-AR.parquet, trace-SE.parquet, trace-ST.parquet are")
    directory = parser.parse_args().directory
    analyses, taken_s = {}, {}
    for name in PUBLISHED:
        start = time.process_time()
        analyses[name] = analyse(read_recording(directory / f"trace-{name}.parquet"))
        taken_s[name] = time.process_time() - start
    lines = ["# Production traces, analysed", "", "Written by `python benchmarks/analyze.py`.", ""]
    for table in (validation(analyses), published(analyses), remedies(analyses), sizes()):
        lines += table
    lines += ["## In words", ""]
    for name, analysis in analyses.items():
        lines += [f"{name} ({taken_s[name]:.1f} s on one core):", ""]
        lines += [*(f"- {sentence}" for sentence in sentences(analysis)), ""]
    text = "\n".join(lines).rstrip() + "\n"
    print(text)
    RESULT.write_text(text)


if __name__ == "__main__":
    main()
