# SPDX-License-Identifier: Apache-2.0
"""What a rank of a check runs: python -m gpu_check.child REPORT CHECK MODULE MACHINE ARGUMENTS..."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from gpu_check.findings import Report


def main(report: str, check: str, module: str, machine: str, *arguments: str) -> None:
    """Make the machine and run the check on it."""
    owner, _colon, name = machine.partition(":")
    import_module(module).run(getattr(import_module(owner), name)(), Report(Path(report), check), *arguments)


if __name__ == "__main__":
    main(*sys.argv[1:])
