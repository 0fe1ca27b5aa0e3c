# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's own pretrain_gpt.py, unmodified, started with one more flag: the same numbers to the bit."""

from __future__ import annotations

import itertools
import re
import subprocess
import sysconfig
import venv
from pathlib import Path

import pytest
from support.pretrain import (
    CHECKOUT,
    MOCK_DATA,
    NO_DROPOUT,
    command,
    compare_with_stock,
    needs_megatron_lm,
    pretrain,
    what_ran,
)
from support.processes import REPOSITORY, compare_dumps, run_ranks

from adaptra_megatron.tools.local_ranks.launch_ranks import free_port
from testing.training.corpus import write_corpus

pytestmark = needs_megatron_lm

PP2 = ("--pipeline-model-parallel-size", "2")
LAYOUTS = {
    "pp2": (2, PP2),
    "pp4": (4, ("--pipeline-model-parallel-size", "4")),
    "pp2-vpp2": (2, (*PP2, "--num-layers-per-virtual-pipeline-stage", "1", *NO_DROPOUT)),
    "pp2-dp2": (4, PP2),
    "pp2-tp2": (4, (*PP2, "--tensor-model-parallel-size", "2")),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Arguments for a real indexed dataset."""
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    assert write_corpus(prefix, limit_nbytes=200_000) > 100_000
    return ("--data-path", str(prefix), "--split", "90,10,0")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_mock_data(layout: str, tmp_path: Path) -> None:
    ranks, arguments = LAYOUTS[layout]
    compare_with_stock(ranks, tmp_path, *arguments, *MOCK_DATA)


def test_a_single_stage(tmp_path: Path) -> None:
    compare_with_stock(2, tmp_path, "--pipeline-model-parallel-size", "1", "--overlap-grad-reduce", *MOCK_DATA)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_indexed_dataset(layout: str, corpus: tuple[str, ...], tmp_path: Path) -> None:
    ranks, arguments = LAYOUTS[layout]
    compare_with_stock(ranks, tmp_path, *arguments, *corpus)


def test_the_three_ways_in_are_one(tmp_path: Path) -> None:
    pretrain(2, tmp_path / "flag", *PP2, *MOCK_DATA, "--adaptra")

    launcher, *rest = command(tmp_path / "module", *PP2, *MOCK_DATA)[1:]
    script = str(REPOSITORY / "testing" / "megatron" / "megatron_lm.py")
    run_ranks(2, ["-m", "adaptra_megatron", script, *rest], timeout_s=150, log_directory=tmp_path / "module-logs")

    importing = tmp_path / "script.py"
    importing.write_text(f"import adaptra_megatron.auto\nfrom {launcher} import main\nmain()\n")
    rest = command(tmp_path / "import", *PP2, *MOCK_DATA)[2:]
    run_ranks(2, [str(importing), *rest], timeout_s=150, log_directory=tmp_path / "import-logs")

    for way in ("module", "import"):
        assert compare_dumps(tmp_path / "flag", tmp_path / way) > 10_000
        assert what_ran(tmp_path / way)["adaptra"]["training_iterations"] == 4


def test_the_environment_turns_it_off_with_one_line_per_job(tmp_path: Path) -> None:
    results = pretrain(2, tmp_path / "off", *PP2, *MOCK_DATA, "--adaptra", ADAPTRA_DISABLE="1")
    assert [result.output.count("turned off by ADAPTRA_DISABLE") for result in results] == [1, 0]
    assert what_ran(tmp_path / "off")["adaptra"] is None


VARYING = re.compile(
    r"\[?\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?\]?|\d+\.\d+ (seconds|s)\b|(?<=s\): )\d+\.\d+|\(\d+\.\d+, \d+\.\d+\)"
    r"|^[IWE]\d{4} [\d:.]+ \d+ (?=\S+\.py:\d+\])|: \d+\.\d+$|(?<=port )\d+|\d{2,}\.\d{2,}|0x[0-9a-f]+"
)


def test_off_means_off(tmp_path: Path) -> None:
    """One environment, without and with our line in it: two runs of torchrun write the same, but for times."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    packages = Path(sysconfig.get_paths(vars={"base": str(environment), "platbase": str(environment)})["purelib"])
    (packages / "paths.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n{REPOSITORY}\n")
    logs, modules = [], []
    for installed in (False, True):
        if installed:
            (packages / "adaptra_megatron.pth").write_text((REPOSITORY / "adaptra_megatron.pth").read_text())
        logs.append(_torchrun(environment / "bin" / "python", tmp_path / "run", tmp_path))
        modules.append([what_ran(tmp_path / "run", rank)["modules"] for rank in range(2)])
    assert modules[0] == modules[1], "beyond those that the launcher itself imports"
    assert any("iteration        4/       4" in line for line in logs[0])
    different = [(before, after) for before, after in itertools.zip_longest(*logs) if before != after]
    assert not different


def _torchrun(interpreter: Path, dump: Path, directory: Path) -> list[str]:
    """The lines of a stock run's log, of all ranks, without times, ports and addresses."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
    torchrun += ["--redirects", "3", "--log-dir", str(directory / "torchrun")]
    done = subprocess.run(
        [interpreter, *torchrun, *command(dump, *PP2, *MOCK_DATA)],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=150,
        env={"PATH": f"{interpreter.parent}:/usr/local/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    logs = max((directory / "torchrun").iterdir(), key=lambda path: path.stat().st_mtime)
    lines = [line for path in logs.rglob("std*.log") for line in path.read_text().splitlines()]
    # Megatron's first run in a checkout compiles, the next ones need not. Sorted, because it prints members of sets.
    return sorted(VARYING.sub("VARIES", line) for line in lines if not line.startswith(("make: ", "g++ ")))
