# SPDX-License-Identifier: Apache-2.0
"""What a machine with one GPU can show of the host path; writes a report and fails where it contradicts a promise.

    python benchmarks/gpu.py [--output benchmarks/results/gpu_<device>.md] [--parts head_of_line throughput training]

Parts: computation behind a stalled transfer, on either path (`gpu_head_of_line.py`); throughput from device to device
beside the copies it is made of (`gpu_throughput.py`); four stages that share the GPU, trained over the host path and
compared bitwise with stock Megatron (`gpu_training.py`, needs megatron-core).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gpu_head_of_line
import gpu_throughput
import gpu_training
import torch

from adaptra_megatron.emulation.launch import LaunchError, run_ranks


class Part(NamedTuple):
    """A program that all ranks run, and what is made of its report."""

    ranks: int
    program: str
    table: Callable[[Any], str]
    failures: Callable[[Any], list[str]]
    timeout_s: float


PARTS = {
    "head_of_line": Part(2, gpu_head_of_line.__file__, gpu_head_of_line.table, gpu_head_of_line.failures, 180.0),
    "throughput": Part(2, gpu_throughput.__file__, gpu_throughput.table, lambda report: [], 240.0),
    "training": Part(4, gpu_training.__file__, gpu_training.table, gpu_training.failures, 300.0),
}


def run(part: Part) -> tuple[str, list[str]]:
    """Table and failures of a part."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.json")
        run_ranks(part.ranks, [part.program, str(report)], timeout_s=part.timeout_s, log_directory=directory)
        found = json.loads(report.read_text())
    return part.table(found), part.failures(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch finds no GPU: nothing can be measured here")
        return 2
    device = torch.cuda.get_device_name(0)
    texts = [f"# Host path on one {device}", "", f"Written by `scripts/gpu_check.sh`; torch {torch.__version__}.", ""]
    problems = []
    for name in arguments.parts:
        if name == "training" and importlib.util.find_spec("megatron") is None:
            problems.append("training was left out: megatron-core is not installed (pip install megatron-core==0.16.1)")
            continue
        try:
            text, failed = run(PARTS[name])
        except LaunchError as error:
            problems.append(f"{name}: {error}")
            continue
        texts.append(text)
        problems += [f"{name}: {failure}" for failure in failed]
        print(text, flush=True)
    named = re.sub(r"\W+", "_", device).strip("_").lower()
    output = arguments.output or Path(__file__).with_name("results") / f"gpu_{named}.md"
    output.write_text("\n".join(texts))
    print(f"written: {output}")
    for problem in problems:
        print(f"NOT SHOWN: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
