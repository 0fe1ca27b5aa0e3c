# SPDX-License-Identifier: Apache-2.0
"""`adaptra --print-completion`: shells complete commands and flags; without the package that is for it, one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from adaptra_megatron.tools.cli.main import main


def test_without_the_package_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit, match="2"):
        main(["--print-completion", "bash"])
    assert "needs the package shtab: pip install 'adaptra-megatron[completion]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "found"), [(["sim"], {"simulate", "simulate-sync"}), (["plan", "--slow-l"], {"--slow-link"})]
)
def test_bash_completes_commands_and_their_flags(
    words: list[str], found: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit, match="0"):
        main(["--print-completion", "bash"])
    (tmp_path / "completion.sh").write_text(capsys.readouterr().out)
    script = f"""
        source {tmp_path}/completion.sh
        function=$(complete -p adaptra | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        COMP_WORDS=(adaptra {" ".join(words)}) COMP_CWORD={len(words)}
        $function adaptra {words[-1]} {(["adaptra", *words])[-2]}
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=20, check=True)
    assert set(done.stdout.split()) == found, done.stderr
