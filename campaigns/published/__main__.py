# SPDX-License-Identifier: Apache-2.0
"""The published cases again: all of them simulated, and those of 7B and 14B with one slow link in real processes.

    python -m campaigns.published [--simulated | --cases 'single/7B/*' ...] [--again] [--output FILE]

Each real case is one job of one to three minutes; what it measured is kept in --directory, and measured again only with
--again, so that a few cases can be run at a time on a machine that is quiet for a few minutes only. What the tables
compare, and how it is modelled, is in docs/published.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path

from campaigns.published import plots, real_report, report
from campaigns.published.cases import Case, UnknownCaseError, load_cases, select_cases
from campaigns.published.real import RealCase, run_case
from campaigns.published.simulated import simulate_case
from testing.jobs.fork_server import ForkServer

REAL_CASES = ("single/7B/*", "single/14B/*")
EIGHT_STAGES = "single-8-stages"


def real_cases() -> tuple[Case, ...]:
    """The published cases of one slow link, and those of 7B again with eight stages of its inner stages' times."""
    found = select_cases(load_cases(), REAL_CASES)
    return (*found, *(eight_stages(case) for case in found if case.stages == 4))


def eight_stages(case: Case) -> Case:
    """The same link of a pipeline of eight: the first stages, two more of each inner one, and the last."""
    first, second, third, last = case.model.stages
    model = dataclasses.replace(case.model, stages=(first, second, third, second, third, second, third, last))
    links = tuple((0, 1) if link == (0, 1) else (6, 7) for link in case.links)
    return dataclasses.replace(case, experiment=EIGHT_STAGES, model=model, links=links)


def measure(cases: Sequence[Case], directory: Path, *, again: bool) -> None:
    """Run those that have not been run, or all of them `again`."""
    directory.mkdir(parents=True, exist_ok=True)
    due = [case for case in cases if again or not _file(case, directory).exists()]
    if not due:
        return
    started_s = time.monotonic()
    with ForkServer() as server:
        for case in due:
            measured = run_case(case, server)
            _file(case, directory).write_text(json.dumps(measured.to_json(), indent=1) + "\n")
            print(
                f"[{time.monotonic() - started_s:4.0f} s] {real_report.markdown([measured]).splitlines()[-1]}",
                flush=True,
            )


def _file(case: Case, directory: Path) -> Path:
    return directory / f"{case.name.replace('/', '-')}.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["*"], metavar="NAME", help="shell patterns of the real cases")
    parser.add_argument("--simulated", action="store_true", help="simulate all cases, and run none")
    parser.add_argument("--again", action="store_true", help="run cases that have been run before")
    parser.add_argument("--directory", type=Path, default=Path("build/published"), help="keeps what was measured")
    parser.add_argument(
        "--output", type=Path, default=None, help="also write the tables to this file, and plots next to it"
    )
    arguments = parser.parse_args()
    cases = () if arguments.simulated else real_cases()
    if cases:
        try:
            measure(select_cases(cases, arguments.cases), arguments.directory, again=arguments.again)
        except UnknownCaseError as error:
            parser.error(str(error))
    files = [_file(case, arguments.directory) for case in cases]
    real = [RealCase.from_json(json.loads(file.read_text())) for file in files if file.exists()]
    simulated = [simulate_case(case) for case in load_cases()]
    text = "# Published cases\n"
    if real:
        text += f"\n## Real processes\n\n{real_report.markdown(real)}\n![](published-real.png)\n"
    text += f"\n## Simulated\n\n{report.markdown(simulated)}\nThe cases with one slow link:\n\n![](published.png)\n"
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text)
        if real:
            plots.draw_real(real, arguments.output.with_name("published-real.png"))
        one_link = [each for each in simulated if each.case.experiment == "single"]
        plots.draw(one_link, arguments.output.with_name("published.png"))


if __name__ == "__main__":
    main()
