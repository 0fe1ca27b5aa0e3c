# SPDX-License-Identifier: Apache-2.0
"""From a parsed command line to patches in force, within one process."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from adaptra_megatron.patches import PATCHES, PatchError, application, enable, in_force

from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.engine import enabling
from adaptra_megatron.engine.bootstrap import BRIDGE, MegatronHooks
from adaptra_megatron.engine.enabling import Enabling, refuse
from adaptra_megatron.schedule.classic import one_f_one_b
from adaptra_megatron.schedule.csv_format import schedule_to_csv


@pytest.mark.parametrize(
    ("environment", "waits"),
    [({}, []), ({"RANK": "8", "LOCAL_RANK": "0"}, [5.0]), ({"RANK": "3", "LOCAL_RANK": "3"}, [10.0])],
)
def test_what_is_refused_is_left_to_the_first_rank_to_say(
    environment: dict[str, str],
    waits: list[float],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    waited: list[float] = []
    monkeypatch.setattr(enabling, "time", SimpleNamespace(sleep=waited.append))
    with pytest.raises(SystemExit) as exit_:
        refuse("script", "no such interface")
    assert (waited, exit_.value.code) == (waits, 2)
    assert capsys.readouterr().err == "script: error: no such interface\n"


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    yield
    applied = in_force()
    if applied is not None:
        applied.undo()


def parser_of(enabling: Enabling) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="script", allow_abbrev=False)
    parser.add_argument("--inprocess-restart", action="store_true")
    parser.add_argument("--pipeline-model-parallel-size", type=int, default=2)
    return enabling.extend(parser)


def test_parsing_twice_patches_once() -> None:
    """As Megatron does for in-job and in-process restarts: unknown arguments are ignored the first time."""
    enabling = Enabling(requested=False)
    parser_of(enabling).parse_known_args(["--adaptra", "--more"])
    first = in_force()
    assert first is not None
    parser_of(enabling).parse_args(["--adaptra"])
    assert in_force() is first


def test_patches_that_cannot_be_applied_are_an_error_of_the_parser(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(application, "PATCHES", [dataclasses.replace(PATCHES[0], versions=">=99")])
    with pytest.raises(SystemExit) as exit_:
        parser_of(Enabling(requested=True)).parse_args([])
    assert exit_.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("script: error: patch schedule-1f1b is written for megatron-core >=99, but")


@pytest.mark.parametrize(
    ("version", "lacks_clone", "remedy"),
    [
        ("2.7.0a0+79aa17489c.nv25.4", True, "take a newer image of NVIDIA's, 25.08 or later"),
        ("2.8.0a0+5228986c39.nv25.6", True, "take a newer image of NVIDIA's, 25.08 or later"),
        ("2.7.1+cu128", False, "pip install 'torch>=2.8.0a0'"),
    ],
)
def test_a_torch_that_is_too_old_is_refused_at_once(
    version: str,
    lacks_clone: bool,
    remedy: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    if lacks_clone:
        monkeypatch.delattr(torch.distributed.Store, "clone")
    with pytest.raises(SystemExit) as exit_:
        parser_of(Enabling(requested=True)).parse_args([])
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("script: error: --adaptra needs torch 2.8 or later")
    assert f"{version} is installed: {remedy}" in line
    with pytest.raises(PatchError, match="needs torch 2.8 or later"):
        enable(AdaptraConfig())
    assert in_force() is None


def test_features_that_arguments_show_are_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser_of(Enabling(requested=True)).parse_args(["--inprocess-restart"])
    said = "--adaptra does not run with in-process restarts (--inprocess-restart)"
    assert f"script: error: {said}" in capsys.readouterr().err
    assert in_force() is None


def test_a_single_stage_is_enabled_whatever_else_is_on() -> None:
    parser_of(Enabling(requested=True)).parse_args(["--pipeline-model-parallel-size", "1", "--inprocess-restart"])
    assert in_force() is not None


def test_a_plan_for_another_pipeline_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.csv"
    plan.write_text(schedule_to_csv(one_f_one_b(4, 4)))
    with pytest.raises(SystemExit):
        parser_of(Enabling(requested=True)).parse_args(["--adaptra-plan-csv", str(plan)])
    assert f"--adaptra-plan-csv {plan} is a plan for 4 stages, but this pipeline has 2" in capsys.readouterr().err
    assert in_force() is None


class TestWithoutMegatronsParser:
    def test_flags_are_found_among_others(self) -> None:
        Enabling(requested=True).decide_without_parser(["train", "--lr", "1", "--adaptra-policy", "observe", "--x=2"])
        applied = in_force()
        assert applied is not None
        assert applied.config == AdaptraConfig(policy="observe")

    def test_a_program_that_patched_by_itself_is_left_alone(self) -> None:
        own = enable(AdaptraConfig(max_in_flight=3))
        Enabling(requested=True).decide_without_parser(["--adaptra-policy", "observe"])
        assert in_force() is own

    def test_it_is_decided_once(self) -> None:
        enabling = Enabling(requested=True)
        parser_of(enabling).parse_args(["--adaptra-policy", "off"])
        enabling.decide_without_parser([])
        assert in_force() is None

    @pytest.mark.parametrize(
        ("line", "environment", "said"),
        [
            ("--adaptra", {}, 1),
            ("--adaptra", {"RANK": "0", "SLURM_PROCID": "7"}, 1),
            ("--adaptra", {"RANK": "1"}, 0),
            ("--adaptra", {"SLURM_PROCID": "1"}, 0),
            ("--adaptra", {"ADAPTRA_DISABLE": "1"}, 0),
            ("--adaptra-trace-dir run", {}, 0),
        ],
    )
    def test_a_flag_without_effect_is_warned_of_once(
        self,
        line: str,
        environment: dict[str, str],
        said: int,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        enabling = Enabling(requested=False)
        monkeypatch.delitem(sys.modules, "adaptra_megatron.patches")
        for _iteration in range(2):
            enabling.decide_without_parser(line.split())
        assert caplog.text.count("nothing has been patched: stock Megatron runs") == said

    def test_what_is_refused_is_told_as_megatron_bridge_validates_its_settings(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A stand-in of megatron.bridge.training.config (0.3.1 to 0.6), whose recipes never pass Megatron's parser:
        pretrain() has them validated before anything is initialized."""

        @dataclasses.dataclass
        class Provider:
            pipeline_model_parallel_size: int = 4
            cuda_graph_impl: str = "none"

        @dataclasses.dataclass
        class ConfigContainer:
            model: Provider = dataclasses.field(default_factory=Provider)
            validated: int = 0

            def validate(self) -> None:
                self.validated += 1

        monkeypatch.setattr(sys, "argv", ["train.py", "--recipe", "x", "--adaptra-max-in-flight", "6"])
        module = ModuleType(BRIDGE)
        module.ConfigContainer = ConfigContainer  # type: ignore[attr-defined]
        hooks = MegatronHooks()
        hooks.requested = True
        hooks._hook_bridge(module)
        refused = ConfigContainer(Provider(cuda_graph_impl="local"))
        with pytest.raises(SystemExit) as exit_:
            refused.validate()
        assert (exit_.value.code, refused.validated) == (2, 1)
        assert "--adaptra does not run with CUDA graphs of layers that Megatron makes itself" in capsys.readouterr().err
        assert in_force() is None
        hooks = MegatronHooks()
        hooks.requested = True
        accepted = ConfigContainer()
        hooks._hook_bridge(module)
        ConfigContainer.validate(accepted)
        applied = in_force()
        assert applied is not None
        assert applied.config == AdaptraConfig(max_in_flight=6)

    def test_a_program_that_has_our_modules_decides_by_itself(self, caplog: pytest.LogCaptureFixture) -> None:
        Enabling(requested=False).decide_without_parser(["--adaptra", "--adaptra-policy", "off"])
        assert caplog.text == ""
        assert in_force() is None
