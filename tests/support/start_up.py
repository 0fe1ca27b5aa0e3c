# SPDX-License-Identifier: Apache-2.0
"""Programs started as a user starts them, with the line of adaptra_megatron.pth in force."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

STAND_IN = Path(__file__).parents[1] / "dropin" / "stand_in"
"""Holds a megatron.training that merges with the installed megatron.core, and scripts that use it."""


def check_start_up_line() -> None:
    """Fail unless this interpreter's environment has the line: without it the flag alone does nothing."""
    path = Path(sysconfig.get_path("purelib"), "adaptra_megatron.pth")
    assert path.is_file(), f"there is no {path}: this environment was made before it was shipped; run make install"


def start(*arguments: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with `arguments` in the stand-in's directory, without what turns us on or off in this process."""
    check_start_up_line()
    ours = ("ADAPTRA", "ADAPTRA_ARGS", "ADAPTRA_DISABLE", "PYTHONPATH")
    inherited = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=STAND_IN,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert not check or done.returncode == 0, f"{arguments}: exit status {done.returncode}\n{done.stdout}{done.stderr}"
    return done
