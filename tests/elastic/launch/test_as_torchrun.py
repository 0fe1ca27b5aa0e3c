# SPDX-License-Identifier: Apache-2.0
"""Ranks of `adaptra launch` find what they find under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adaptra_megatron.tools.local_ranks.launch_ranks import free_port

_DUMP = """
import json, os, sys
with open(f"{sys.argv[1]}-{os.environ['RANK']}", "w") as file:
    json.dump({"environment": dict(os.environ), "arguments": sys.argv[2:], "-u": sys.stdout.write_through}, file)
sys.stdout.write(f"said by {os.environ['RANK']}\\n")  # in one piece: Python is unbuffered, and ranks share the output
"""
_MODULES = {"torchrun": "torch.distributed.run", "adaptra": "adaptra_megatron.tools.cli"}
_OWN = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RUN_ID", "MASTER_PORT"}
"""Variables with values of each run, where the command line gives none."""


def dumped(directory: Path, launcher: str, options: list[str]) -> tuple[list[dict[str, Any]], str]:
    """What each of two ranks finds, and what the terminal shows."""
    (directory / "dump.py").write_text(_DUMP)
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    command = [sys.executable, "-m", _MODULES[launcher], *["launch"] * (launcher == "adaptra"), "--nproc-per-node", "2"]
    script = [str(directory / "dump.py"), str(directory / launcher), "--of-the-script", "local ${local_rank}"]
    done = subprocess.run(
        [*command, *options, *script],
        env=environment,
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60.0,
    )
    assert done.returncode == 0, done.stdout
    return [json.loads((directory / f"{launcher}-{rank}").read_text()) for rank in range(2)], done.stdout


@pytest.mark.parametrize("kind", ["alone", "named"])
def test_environment_arguments_and_logs_are_torchruns(tmp_path: Path, kind: str) -> None:
    named = ["--rdzv-id", "of-test", "--role", "trainer", "--master-addr", "127.0.0.1", "--tee", "1:3", "--log-dir"]
    own = _OWN if kind == "alone" else _OWN - {"TORCHELASTIC_RUN_ID"}
    found, shown, logs = {}, {}, {}
    for launcher in _MODULES:
        directory = tmp_path / f"logs-{launcher}"
        options = [*named, str(directory), "--master-port", str(free_port())] if kind == "named" else []
        ranks, shown[launcher] = dumped(tmp_path, launcher, options)
        for rank in ranks:
            assert own <= rank["environment"].keys()
        found[launcher] = [
            {**rank, "environment": {name: value for name, value in rank["environment"].items() if name not in own}}
            for rank in ranks
        ]
        logs[launcher] = sorted("/".join(path.parts[-3:]) for path in directory.rglob("*.log"))
    assert found["adaptra"] == found["torchrun"]
    assert len(found["adaptra"][0]["environment"]) > 15
    assert [rank["arguments"][1] for rank in found["adaptra"]] == ["local 0", "local 1"]
    lines = {launcher: {line for line in text.splitlines() if "said by" in line} for launcher, text in shown.items()}
    assert lines["adaptra"] == lines["torchrun"]
    assert lines["adaptra"] == {"said by 0", "[trainer1]:said by 1" if kind == "named" else "said by 1"}
    assert logs["adaptra"] == logs["torchrun"]
    assert logs["adaptra"] == (["attempt_0/1/stderr.log", "attempt_0/1/stdout.log"] if kind == "named" else [])
