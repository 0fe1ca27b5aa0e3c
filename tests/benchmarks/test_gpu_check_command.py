# SPDX-License-Identifier: Apache-2.0
"""The command that checks GPUs survives what its checks do, says what it saw of each, and how it ended."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest
from gpu_check import __main__ as command
from gpu_check import building
from gpu_check.building import BuildError
from gpu_check.findings import NOT_OK, NOT_RUN, OK, Finding, exit_status
from gpu_check.plan import NCCL, first_call, second_call
from gpu_check.watchdog import Check, watch
from support.processes import REPOSITORY

PATHS = {"PYTHONPATH": str(Path(__file__).parent)}
MACHINE = command.Machine("NVIDIA H200", "90", "2.11", "13.0")


def check(behaviour: str, limit_s: float = 30.0, **more: object) -> Check:
    return Check("T", "all is well", "behaving", "builtins:object", limit_s, (behaviour,), environment=PATHS, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("behaviour", "verdicts", "last_promise", "last_seen"),
    [
        ("fine", [OK, NOT_RUN], "it flies", "no wings"),
        ("wrong", [NOT_OK], "it works", "it did not"),
        ("crash", [NOT_OK], "it does not crash", "died of SIGSEGV"),
        ("fail", [NOT_OK], "all is well", "exited with 1 (ValueError: made to fail)"),
        ("garbage", [OK, NOT_OK, NOT_OK, NOT_OK, OK], "it still works", "it did"),
        ("silent", [NOT_OK], "all is well", "nothing was reported"),
    ],
)
def test_whatever_a_check_does_it_has_its_lines(
    tmp_path: Path, behaviour: str, verdicts: list[str], last_promise: str, last_seen: str
) -> None:
    findings, log = watch(check(behaviour), tmp_path / "check")
    assert [finding.verdict for finding in findings] == verdicts
    assert findings[-1].promise == last_promise
    assert last_seen in findings[-1].seen
    assert bool(log) == (behaviour in ("crash", "fail"))


@pytest.mark.parametrize(("behaviour", "promise"), [("hang_somewhere", "it ends"), ("hang_deaf", "it returns")])
def test_a_check_that_hangs_is_killed_and_its_stacks_are_shown(tmp_path: Path, behaviour: str, promise: str) -> None:
    begun_s = time.monotonic()
    findings, log = watch(check(behaviour, limit_s=4.0), tmp_path / "check")
    assert time.monotonic() - begun_s < 20.0
    assert (findings[-1].promise, findings[-1].verdict) == (promise, NOT_OK)
    assert re.search(r"after \d+ s: rank 0 killed", findings[-1].seen)
    assert f"in {behaviour}" in log, "its stack"
    assert len(findings) == (2 if behaviour == "hang_somewhere" else 1), "what was seen before counts"


@pytest.mark.parametrize(
    ("behaviour", "ends_within_s", "verdict", "seen"),
    [
        ("fail_slowly", 30.0, OK, "all had ended"),
        ("fail_slowly", 0.5, NOT_OK, "all had ended"),
        ("fine", 30.0, NOT_OK, "as if nothing had failed"),
    ],
)
def test_what_is_to_fail_is_timed(
    tmp_path: Path, behaviour: str, ends_within_s: float, verdict: str, seen: str
) -> None:
    found, _log = watch(check(behaviour, ends_within_s=ends_within_s), tmp_path / "check")
    assert found[-1].verdict == verdict
    assert seen in found[-1].seen


def test_checks_that_lack_something_or_have_no_time_are_left_out_with_the_reason() -> None:
    answers: list[tuple[Sequence[Finding], str]] = []
    checks = [check("fine", needs=("wings",)), check("fine")]
    lacking = {"wings": "none were carried in"}
    found = command.run_checks(checks, lacking, time.monotonic() + 1.0, lambda *what: answers.append(what))
    assert [(each.verdict, each.seen) for each in found] == [(NOT_RUN, lacking["wings"]), (NOT_RUN, "no time was left")]
    assert [findings for findings, _log in answers] == [[each] for each in found]


def test_the_exit_status_says_whether_all_was_shown() -> None:
    shown, not_shown, left_out = (Finding("T", "", "", verdict) for verdict in (OK, NOT_OK, NOT_RUN))
    assert exit_status([shown]) == 0
    assert exit_status([shown, not_shown, left_out]) == 1
    assert exit_status([shown, left_out]) == exit_status([]) == 2


def test_a_call_writes_its_table_with_what_crashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "first_call", lambda: (check("fine"), check("crash")))
    monkeypatch.setattr(command, "prepare", lambda *_: ({}, None))
    output = tmp_path / "table.md"
    assert command.main(["first", "--output", str(output)], probe=lambda: MACHINE) == 1
    page = output.read_text()
    assert page.startswith("# GPU checks, first call, on one NVIDIA H200\n")
    assert "| T | it works | it did | ok |" in page
    assert "| T | it flies | no wings | not run |" in page
    assert re.search(r"\| T \| it does not crash \| after \d+ s: rank 0 died of SIGSEGV \| not ok \|", page)
    assert "Fatal Python error: Segmentation fault" in page
    assert "1 of 3 lines are not ok" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "checks"),
    [
        (["first"], {"T0", "T1", "T2", "T3", "first"}),
        (["second", "--only", "T2", "T4", "T5", "T6"], {"T2", "T4", "T5", "T6"}),
        (["second", "--only", "T7"], {"T7"}),
    ],
    ids=["first", "second", "training"],
)
def test_every_step_runs_on_stand_ins(tmp_path: Path, arguments: list[str], checks: set[str]) -> None:
    """What a minute on a GPU would be lost to is found here. `needs` count for nothing: all of it runs."""
    output = tmp_path / "table.md"
    command_line = [str(REPOSITORY / "scripts/gpu_check.sh"), *arguments, "--dry-run", "--output", str(output)]
    subprocess.run(command_line, env=os.environ | {"PYTHON": sys.executable}, check=True, timeout=300)
    rows = [line.split(" | ") for line in output.read_text().splitlines() if line.startswith(("| T", "| first"))]
    assert {row[0].strip("| ").split(",")[0] for row in rows} == checks
    failed = {(row[0].strip("| "), row[2].partition(":")[0]) for row in rows if row[3].startswith("not ok")}
    assert {(name, seen) for name, seen in failed if not re.match(AS_STAND_INS_DO.get(name, "$"), seen)} == set()


AS_STAND_INS_DO = {
    "T0": "0 passed",
    "T2, lazy loading": "it failed",
    "T2, eager loading": "it failed",
    "T4, arrivals": r"sender \d+ ms late",
    "T6, stalls": r"computation of [\d.]+ ms took [\d.]+ ms",
    "T6, shm": r"[\d.]+ (GB/s|us)",
    "T6, tcp": r"[\d.]+ (GB/s|us)",
    "T6, ring": r"[\d.]+ of [\d.]+ GB/s",
    "T7, host path": "links with two paths sent",
    "T7, NCCL": r"messages went by \['WaitingThreadTransport'\]",
}
"""Without a GPU nothing passes, one of the calls is made to fail, trainings are over gloo, where a busy host may have a
link take the other path, and times and rates are those of a CPU that other tests keep busy."""


def test_arguments_that_make_no_sense_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = (["third"], ["second", "--nccl", "/nowhere"], ["first", "--only", "T4"], ["second", "--only", "T1"])
    for arguments in wrong:
        with pytest.raises(SystemExit) as ended:
            command.main(arguments, probe=lambda: MACHINE)
        assert ended.value.code == 2
    assert "no check of the second call" in capsys.readouterr().err


def test_without_a_gpu_nothing_is_run(capsys: pytest.CaptureFixture[str]) -> None:
    """torch of this machine is asked, in a process of its own."""
    assert command.main(["first"]) == 2
    assert "finds no GPU" in capsys.readouterr().out


def test_a_torch_that_fails_is_lacking(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(command, "PROBE", "raise ImportError('libcudart.so.13')")
    assert command.main(["first"]) == 2
    assert "torch cannot be asked" in capsys.readouterr().out


def test_what_cannot_be_built_is_lacking_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "BUILD", tmp_path)
    commands = [["true"], ["sh", "-c", "echo no header; false"]], [["touch", str(tmp_path / "linked")]]
    monkeypatch.setattr(building, "native_commands", lambda compiler: commands)
    monkeypatch.setattr(command, "kernel_command", lambda *_: ["true"])
    until_s = time.monotonic() + 30.0
    lacking, library = command.prepare(MACHINE, None, False, until_s)
    assert library is None
    assert command.KERNELS_NEEDED not in lacking
    assert "sh exited with 1" in lacking[command.NATIVE]
    assert not (tmp_path / "linked").exists()
    nothing = tmp_path / "nccl.tar"
    with tarfile.open(nothing, "w") as archive:
        archive.addfile(tarfile.TarInfo("README"), io.BytesIO())
    assert "no sources of NCCL" in command.prepare(MACHINE, nothing, True, until_s)[0][NCCL]
    monkeypatch.setattr(command, "kernel_command", lambda *_: ["no-such-nvcc"])
    assert "No such file" in command.prepare(MACHINE, nothing, True, until_s)[0][command.KERNELS_NEEDED]
    assert "No such file" in command.prepare(MACHINE, nothing, False, until_s)[0][command.KERNELS_NEEDED]


def test_nccl_is_built_from_a_tarball(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "BUILD", tmp_path / "build")
    monkeypatch.setattr(building, "cuda_home", lambda nvcc: "/cuda")
    built = f"$(BUILDDIR)/lib/{building.NCCL_LIBRARY}"
    makefile = f"src.build:\n\tmkdir -p $(BUILDDIR)/lib\n\techo '$(CUDA_HOME) $(ONLY_FUNCS)' > {built}\n"
    archive = tmp_path / "nccl.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        for name, text in (("nccl/Makefile", makefile), ("nccl/makefiles/version.mk", "")):
            member = tarfile.TarInfo(name)
            member.size = len(text)
            file.addfile(member, io.BytesIO(text.encode()))
    library = building.build_nccl(archive, "nvcc", "90", time.monotonic() + 30.0)
    assert library.read_text() == f"/cuda {building.NCCL_FUNCTIONS}\n"
    assert building.build_nccl(library, "nvcc", "90", time.monotonic()) == library


def test_builds_end_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "BUILD", tmp_path)
    with pytest.raises(BuildError, match="no more time"):
        building.run_all([["sh", "-c", "sleep 60 & sleep 60"]], time.monotonic() + 0.2)
    with pytest.raises(BuildError, match="no-such-compiler"):
        building.run_all([["no-such-compiler"]], time.monotonic() + 1.0)


def test_native_parts_are_those_of_setup_py() -> None:
    compiling, linking = building.native_commands("c++")
    assert sorted(Path(each[-1]).name.partition(".")[0] for each in linking) == ["_device", "_native", "_ring"]
    objects = [word for each in linking for word in each if word.endswith(".o")]
    assert objects == [each[-1] for each in compiling]
    assert len(set(objects)) == len(list(REPOSITORY.glob("csrc/**/*.cpp")))
    setup = (REPOSITORY / "setup.py").read_text()
    for folder, target in building.NATIVE.items():
        name, room = target.removeprefix("adaptra_megatron/").replace("/", "."), folder.removeprefix("csrc/")
        assert f'extension("{name}", "{room}"' in setup


@pytest.mark.parametrize("calls", [first_call(), second_call(Path("/libnccl.so.2"))], ids=["first", "second"])
def test_every_check_of_the_plan_can_be_started_and_fits_in_its_call(calls: tuple[Check, ...]) -> None:
    for each in calls:
        owner, _colon, name = each.machine.partition(":")
        assert callable(getattr(import_module(owner), name))
        module = import_module(each.module)
        assert callable(module.run)
        if hasattr(module, "PARTS"):
            assert each.arguments[0] in module.PARTS
    assert len({each.name for each in calls}) == len(calls)
    expected_s = sum(each.limit_s for each in calls) / 2
    assert expected_s + 60.0 < command.CALL_S, "half of what they may take at most, and the building"


def test_only_what_goes_by_nccl_gets_the_other_nccl() -> None:
    preloaded = {each.name for each in second_call(Path("/libnccl.so.2")) if "LD_PRELOAD" in each.environment}
    assert preloaded == {each.name for each in second_call(None) if NCCL in each.needs}


def test_patches_are_found_where_the_package_is_not_installed() -> None:
    program = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "ditable" not in getattr(finder, "__module__", "")]
import importlib.util
assert importlib.util.find_spec("adaptra_megatron.patches") is None
from gpu_check.t7_training import import_patches
import_patches()
from adaptra_megatron.patches import enable
print(enable.__module__)
"""
    paths = ":".join(str(REPOSITORY / folder) for folder in ("", "benchmarks", "scripts"))
    found = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert found.stdout.startswith("adaptra_megatron.patches")
