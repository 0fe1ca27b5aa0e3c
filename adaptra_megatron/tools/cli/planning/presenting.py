# SPDX-License-Identifier: Apache-2.0
"""Share the parts of `adaptra plan` and `adaptra simulate`: the costs they take, and how one answer is shown."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from adaptra_megatron.tools.cli.planning.cells import add_cell_options
from adaptra_megatron.tools.cli.planning.changed_costs import add_what_if_options
from adaptra_megatron.tools.cli.planning.comparison import Comparison
from adaptra_megatron.tools.cli.planning.cost_inputs import PlanInput
from adaptra_megatron.tools.cli.planning.drawings import add_drawing_options, draw
from adaptra_megatron.tools.cli.planning.inputs import count
from adaptra_megatron.tools.cli.planning.job_outcome import JobOutcome, PlanningOutcome
from adaptra_megatron.tools.cli.progress import add_progress_option

WHERE_COSTS_ARE = """\
COSTS is a JSON file (docs/costs.md; - is stdin), the directory that a run was given by --adaptra-trace-dir (the costs
of its latest plan, or of --plan N), one of its events-*.jsonl, or a trace as `adaptra analyze` takes it.
"""


class PresentedAnswer(Protocol):
    """Answer to a question."""

    def document(self) -> dict[str, Any]:
        """For JSON."""

    def print_text(self) -> None:
        """For people."""


def add_shared_options(parser: argparse.ArgumentParser) -> None:
    """Add the costs and every option that both commands have."""
    parser.add_argument("costs", type=Path, metavar="COSTS", help="file of costs, run, event log or trace")
    parser.add_argument("--plan", type=int, metavar="N", help="of a run: whose costs to take (default: the latest's)")
    parser.add_argument(
        "--pipeline-size",
        type=count,
        metavar="COUNT",
        help="of a trace of many ranks: stages, where it does not say it",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, of errors, too")
    parser.add_argument("--stages", action="store_true", help="also print a line for each stage")
    add_progress_option(parser)
    add_what_if_options(parser)
    add_drawing_options(parser)
    add_cell_options(parser)


def present(
    outcome: PlanningOutcome | JobOutcome,
    comparison: Comparison,
    given: PlanInput,
    options: argparse.Namespace,
    answers: Sequence[PresentedAnswer] = (),
) -> None:
    """Print one answer, with what it compares with, and draw what is wanted. Raises InputError as `draw`."""
    if options.json:
        document = {**outcome.document(), "comparison": comparison.document()}
        for answer in answers:
            document |= answer.document()
        draw(comparison, given.name, options)
        print(json.dumps(document, allow_nan=False))
        return
    outcome.print_text(comparison, per_stage=options.stages)
    for answer in answers:
        answer.print_text()
    draw(comparison, given.name, options)
