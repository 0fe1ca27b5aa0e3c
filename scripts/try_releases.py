#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs tests/dropin on each supported release of Megatron-LM and writes what came of it into docs/versions.md.

    scripts/try_releases.py --python 3.11=.venv/bin/python --python 3.12=.venv312/bin/python
    scripts/try_releases.py --apart --python 3.11=.venv-latest/bin/python --release core_v0.16.1

Sources are fetched into build/. What is not run, for want of an interpreter or because others were asked for, keeps its
place in the table.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from pathlib import Path

from markdown_table import markdown_table

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "versions.md"
RECORD = ROOT / "docs" / "versions.json"
BEGIN, END = "<!-- made by scripts/try_releases.py -->\n", "<!-- until here -->\n"

RELEASES = {
    "core_v0.14.0": "3.11",
    "core_v0.15.3": "3.11",
    "core_v0.16.1": "3.11",
    "core_v0.17.1": "3.12",
    "core_v0.18.2": "3.12",
    "core_v0.19.0": "3.12",
    "0.19.2": "3.12",
    "main": "3.12",
}
"""With the Python that each is tried on: Megatron-LM asks for 3.12 from 0.17 on."""
SCRIPTS = {"0.19.2": "core_v0.19.0"}
"""Releases that are tried from megatron-core's wheel, and with the scripts of which tag."""

TESTS = ("gpt", "features", "layouts", "logging", "spread_sequences", "mtp")
"""Files tests/dropin/test_pretrain_*.py."""
REASON_LENGTH = 100

Outcomes = dict[str, str]
"""By test: "passed", or why not."""


def fetch(release: str, interpreter: Path) -> Path:
    """The release's sources."""
    directory = ROOT / "build" / f"megatron-lm-{release}"
    tag = SCRIPTS.get(release, release)
    subprocess.run([ROOT / "scripts" / "fetch_megatron_lm.sh", tag, directory, interpreter], check=True)
    if release in SCRIPTS:
        wheel = ROOT / "build" / f"megatron-core-{release}"
        pip = (interpreter, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade")
        subprocess.run([*pip, "--target", wheel, f"megatron-core=={release}"], check=True)
        shutil.copytree(wheel / "megatron", directory / "megatron", dirs_exist_ok=True)
    return directory


def torch_of(interpreter: Path) -> str:
    command = [interpreter, "-c", "import torch; print(torch.__version__.partition('+')[0])"]
    return f"torch {subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()}"


def tried(checkout: Path, release: str) -> str:
    """When the release is tried, and which commit where its name is a branch's."""
    if release != "main":
        return str(datetime.date.today())
    git = ["git", "-C", str(checkout), "rev-parse", "--short=8", "HEAD"]
    commit = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    return f"{datetime.date.today()} ({commit})"


def outcomes(checkout: Path, interpreter: Path, chosen: str) -> Outcomes:
    """What each test came to; of those that pytest's -k `chosen` chooses."""
    report = checkout.parent / f"{checkout.name}.xml"
    environment = {**os.environ, "MEGATRON_LM": str(checkout)}
    files = [f"tests/dropin/test_pretrain_{name}.py" for name in TESTS]
    subprocess.run(
        [interpreter, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", "-k", chosen, *files],
        cwd=ROOT,
        env=environment,
        check=False,  # tests that fail are what is to be found out
    )
    found: Outcomes = {}
    for case in ElementTree.parse(report).iter("testcase"):
        problems = [child for child in case if child.tag in ("failure", "error", "skipped")]
        found[case.attrib["name"]] = _reason(problems[0]) if problems else "passed"
    return found


def _reason(problem: ElementTree.Element) -> str:
    """A refusal or the first error that the ranks' logs show, or else the test's own message."""
    refusals = re.findall(r"pretrain_gpt\.py: error: (.*?)(?:; |$)", problem.text or "", re.MULTILINE)
    if refusals:
        return f"refused: {refusals[0]}"
    if late := re.search(r"still ran after \d+ s", problem.text or ""):
        return late[0]
    errors = re.findall(r"\[rank\d+\]: (\S*(?:Error|Exception)\b.*)", problem.text or "")
    text = errors[0] if errors else problem.attrib.get("message", problem.tag)
    return " ".join(text.split())[:REASON_LENGTH]


def table(record: Mapping[str, Outcomes], days: Mapping[str, list[str]]) -> str:
    """One row per test and outcome, with its cases, one column per release; on which days these were run; reasons."""
    releases = [each for release in RELEASES for each in sorted(record) if each.partition(", ")[0] == release]
    tests = list(dict.fromkeys(test for release in releases for test in record[release]))
    head = ["", *(release.removeprefix("core_v") for release in releases)]
    cases: dict[tuple[str, ...], list[str]] = {}
    notes: list[str] = []
    for test in tests:
        cells = []
        for release in releases:
            outcome = record[release].get(test, _whatever_the_test(record[release]))
            if outcome not in ("passed", "not run"):
                if outcome not in notes:
                    notes.append(outcome)
                outcome = f"{'refused' if outcome.startswith('refused') else 'no'} ({notes.index(outcome) + 1})"
            cells.append("equal" if outcome == "passed" else outcome)
        name, _, case = test.removeprefix("test_").replace("_", " ").removesuffix("]").partition("[")
        cases.setdefault((name, *cells), []).append(case)
    rows = [[": ".join(filter(None, (name, ", ".join(each)))), *cells] for (name, *cells), each in cases.items()]
    rows.insert(0, ["run on", *(", ".join(days[release]) for release in releases)])
    numbered = [f"{number}. `{note}`" for number, note in enumerate(notes, 1)]
    return "\n".join([markdown_table(head, rows), "", *numbered]) + "\n"


def _whatever_the_test(found: Outcomes) -> str:
    """What a test that was not run came to: a release that is refused at start is refused with any arguments."""
    outcomes = set(found.values())
    only = outcomes.pop() if len(outcomes) == 1 else ""
    return only if only.startswith("refused") else "not run"


def kept() -> tuple[dict[str, Outcomes], dict[str, list[str]]]:
    """By release (and torch's, where that stands apart), all that has ever been found out, and when."""
    record = json.loads(RECORD.read_text()) if RECORD.is_file() else {"outcomes": {}, "days": {}}
    return record["outcomes"], record["days"]


def keep(release: str, found: Outcomes, when: str, *, whole: bool) -> None:
    """Add to what is kept, which another such run may have written to; in its place where all tests were run."""
    record, days = kept()
    record[release] = found if whole else {**record.get(release, {}), **found}
    days[release] = [when] if whole else sorted({*days.get(release, []), when})
    RECORD.write_text(json.dumps({"outcomes": record, "days": days}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], metavar="VERSION=INTERPRETER", help="3.11=...")
    parser.add_argument("--release", action="append", choices=list(RELEASES), help="only these")
    parser.add_argument("--apart", action="store_true", help="keep it in a column of its own, by torch's release")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="only these tests, as for pytest")
    options = parser.parse_args()
    given = (one.partition("=") for one in options.python)
    interpreters = {version: Path(path).absolute() for version, _, path in given}
    for release, version in RELEASES.items():
        if version not in interpreters or (options.release and release not in options.release):
            continue
        print(f"== {release}, Python {version}", flush=True)
        interpreter = interpreters[version]
        checkout = fetch(release, interpreter)
        found = outcomes(checkout, interpreter, options.k)
        column = f"{release}, {torch_of(interpreter)}" if options.apart else release
        keep(column, found, tried(checkout, release), whole=not options.k)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + table(*kept()) + "\n" + END + rest.partition(END)[2])
    return 0


if __name__ == "__main__":
    sys.exit(main())
