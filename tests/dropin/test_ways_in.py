# SPDX-License-Identifier: Apache-2.0
"""The flag alone, `-m adaptra_megatron` and `import adaptra_megatron.auto`, in programs that know nothing of us."""

from __future__ import annotations

import json
from typing import Any

import pytest
from adaptra_megatron.patches import CAPTURE_PATCHES, PATCHES, WATCHING_PATCHES
from support.start_up import STAND_IN, start

ALL_PATCHES = [patch.identity for patch in (*PATCHES, *WATCHING_PATCHES, *CAPTURE_PATCHES)]


def parsed(*command: str, **environment: str) -> Any:
    """What a parsing script tells about itself."""
    return json.loads(start(*command, **environment).stdout)


OBSERVED = ["--adaptra-policy", "observe"]


@pytest.mark.parametrize(
    ("command", "main", "environment"),
    [
        (["parse.py", "--adaptra", *OBSERVED], "parse.py", {"ADAPTRA": "0", "ADAPTRA_ARGS": "--adaptra-policy off"}),
        (["-m", "adaptra_megatron", "parse.py", *OBSERVED], "parse.py", {}),
        (["-m", "adaptra_megatron", "-m", "parse", *OBSERVED], "parse.py", {}),
        (["auto_parse.py", *OBSERVED], "auto_parse.py", {}),
        (["parse.py", *OBSERVED], "parse.py", {"ADAPTRA": "1", "ADAPTRA_ARGS": "--adaptra-policy=off"}),
    ],
    ids=["flag", "script", "module", "import", "environment"],
)
def test_each_way_patches_once_the_flags_are_read(command: list[str], main: str, environment: dict[str, str]) -> None:
    reported = parsed(*command, ADAPTRA_DISABLE="0", **environment)
    assert reported["patched"] == ALL_PATCHES
    assert reported["policy"] == "observe"
    assert reported["arguments"]["adaptra"] == "True"
    assert reported["main"].endswith(main), "the script is the main program"
    assert reported["argv"][0].endswith(main)
    assert reported["path"] == str(STAND_IN)


def test_without_the_flag_nothing_of_ours_is_imported() -> None:
    reported = parsed("parse.py")
    assert reported["modules"] == []
    assert not [name for name in reported["arguments"] if name.startswith("adaptra")]


def test_policy_off_patches_nothing() -> None:
    reported = parsed("parse.py", "--adaptra", "--adaptra-policy", "off")
    assert reported["patched"] == []
    assert "torch" not in reported["modules"]


@pytest.mark.parametrize("command", [["parse.py", "--adaptra"], ["-m", "adaptra_megatron", "parse.py"]])
@pytest.mark.parametrize(("rank", "said"), [({}, 1), ({"RANK": "0"}, 1), ({"RANK": "1"}, 0)])
def test_the_environment_turns_it_off_and_the_flags_are_still_read(
    command: list[str], rank: dict[str, str], said: int
) -> None:
    done = start(*command, "--train-iters", "7", ADAPTRA_DISABLE="1", **rank)
    reported = json.loads(done.stdout)
    assert reported["patched"] == []
    assert "torch" not in reported["modules"]
    assert reported["arguments"]["train_iters"] == "7"
    assert done.stderr.count("turned off by ADAPTRA_DISABLE") == said, "once per job, though Megatron parses thrice"


@pytest.mark.parametrize(("enables", "said"), [(["--enables"], 0), ([], 1)])
def test_a_flag_that_megatrons_parser_has_not_read_is_not_ignored_in_silence(enables: list[str], said: int) -> None:
    done = start("own_parser.py", "--adaptra", *enables)
    assert done.stdout == f"replaced: {bool(enables)}\n"
    assert done.stderr.count("--adaptra is on the command line, but Megatron's own parser has not read it") == said


def test_flags_in_the_environment_that_nothing_reads_are_not_ignored_in_silence() -> None:
    done = start("own_parser.py", ADAPTRA_ARGS="--adaptra-policy observe")
    assert done.stdout == "replaced: False\n"
    assert done.stderr.count("ADAPTRA_ARGS is in the environment, but Megatron's own parser has not read it") == 1


def test_the_environment_turns_it_on_where_no_parser_of_megatrons_runs() -> None:
    """As in an actor of Ray, whose command line is Ray's."""
    done = start("own_parser.py", "--node-ip-address=10.0.0.7", ADAPTRA="1")
    assert done.stdout == "replaced: True\n"


@pytest.mark.parametrize("trainer", ["ranks.py", "actors.py"])
def test_trainers_that_start_ranks_or_actors_hand_it_on_by_the_environment(trainer: str) -> None:
    """As `megatron sft` of ms-swift and the executors of NeMo-Run start torchrun, and slime and verl their actors."""
    environment = {"ADAPTRA": "1"} if trainer == "ranks.py" else {}
    assert start(f"trainers/{trainer}", **environment).stdout.splitlines() == ["replaced: True"] * 2


def test_a_process_that_only_parses_says_so() -> None:
    """As the driver of a trainer on Ray."""
    reported = start("parse.py", "--adaptra").stderr
    assert "is on" not in reported.replace('"is on"', "")
    assert reported.count("this process has read that adaptra is asked for, and ran no iteration") == 1
    assert "ADAPTRA=1" in reported


def test_help_shows_the_flags_in_one_group() -> None:
    shown = start("parse.py", "--adaptra", "--help").stdout
    before, ours = shown.split("\nadaptra:\n")
    assert "network size:" in before
    assert "--adaptra-policy {off,observe,adapt}" in ours
    assert "--adaptra" not in before.partition("options:")[2]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--adaptra", "--adaptra-policy", "sideways"], "argument --adaptra-policy: invalid choice: 'sideways'"),
        (["--adaptra", "--adaptra-timeout-s", "-1"], "error: --adaptra-timeout-s is -1.0; it must be above 0"),
        (
            ["--adaptra-policy", "observe"],
            "error: --adaptra-policy has no effect without --adaptra: add it, or set ADAPTRA=1",
        ),
        (["--adaptra", "--adaptra-plan-csv", "parse.py"], "error: --adaptra-plan-csv parse.py: row 1, column 1: "),
        (["--adaptra", "--adaptra-costs", "parse.py"], "error: --adaptra-costs parse.py is not valid JSON: "),
        (["--adaptra", "--adaptra-interface", "eht0"], "error: --adaptra-interface: the network interface 'eht0' does"),
    ],
)
def test_what_cannot_be_is_refused_by_the_parser(flags: list[str], said: str) -> None:
    done = start("parse.py", *flags, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("parse.py: error: ")
    assert said in line


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--adaptra-policy sideways", "ADAPTRA_ARGS: error: argument --adaptra-policy: invalid choice: 'sideways'"),
        ("--train-iters 7", "ADAPTRA_ARGS: error: unrecognized arguments: --train-iters 7"),
        ("--adaptra-trace-dir 'runs", "ADAPTRA_ARGS: error: No closing quotation in"),
    ],
)
def test_what_cannot_be_in_the_environment_is_one_line(flags: str, said: str) -> None:
    done = start("parse.py", check=False, ADAPTRA="1", ADAPTRA_ARGS=flags)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(said)


def test_a_megatron_of_another_form_is_refused_when_it_is_imported() -> None:
    code = "import sys, types; sys.modules['megatron.training.arguments'] = types.ModuleType('arguments')"
    done = start("-c", f"{code}; import adaptra_megatron.auto", check=False)
    assert done.returncode == 1
    assert "BootstrapError: this Megatron has no arguments.add_megatron_arguments" in done.stderr


def test_importing_auto_after_megatron_patches_at_once() -> None:
    """As verl's external_lib and callbacks of Megatron-Bridge do; by then others have bound the function by name."""
    code = (
        "from megatron.core.pipeline_parallel.schedules import get_forward_backward_func\n"
        "import adaptra_megatron.auto\n"
        "from megatron.core import parallel_state\n"
        "parallel_state.set_pipeline_model_parallel_world_size(2)\n"
        "print(get_forward_backward_func().adaptra_applied.config.policy)\n"
    )
    assert start("-c", code, *OBSERVED).stdout == "observe\n"


def test_auto_after_the_flag_is_no_second_time() -> None:
    done = start("auto_parse.py", "--adaptra", "--help")
    assert done.stdout.count("\nadaptra:\n") == 1


@pytest.mark.parametrize("command", [["spawn.py", "--adaptra"], ["-m", "adaptra_megatron", "spawn.py"]])
def test_processes_of_the_script_start_as_ever(command: list[str]) -> None:
    found = json.loads(start(*command).stdout)
    assert "adaptra_megatron.engine.bootstrap" in found["own"]
    assert found["spawn"] == [], "a spawned process has its own command line"
    assert found["fork"] == found["own"]


def test_other_programs_with_the_flag_see_none_of_it() -> None:
    reported = start("-c", "import sys; print('torch' in sys.modules, sys.argv)", "--adaptra").stdout
    assert reported == "False ['-c', '--adaptra']\n"


def test_the_module_says_how_it_is_used() -> None:
    assert start("-m", "adaptra_megatron", "--help").stdout.startswith("usage: python -m adaptra_megatron SCRIPT")
    for words in ([], ["-m"], ["-x", "parse.py"]):
        assert start("-m", "adaptra_megatron", *words, check=False).returncode == 2
