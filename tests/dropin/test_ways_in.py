# SPDX-License-Identifier: Apache-2.0
"""The flag alone, `-m adaptra_megatron` and `import adaptra_megatron.auto`, in programs that know nothing of us."""

from __future__ import annotations

import json
from typing import Any

import pytest
from adaptra_megatron.patches import PATCHES, WATCHING_PATCHES
from support.start_up import STAND_IN, start

ALL_PATCHES = [patch.identity for patch in (*PATCHES, *WATCHING_PATCHES)]


def parsed(*command: str, **environment: str) -> Any:
    """What a parsing script tells about itself."""
    return json.loads(start(*command, **environment).stdout)


@pytest.mark.parametrize(
    ("command", "main"),
    [
        (["parse.py", "--adaptra", "--adaptra-policy", "observe"], "parse.py"),
        (["-m", "adaptra_megatron", "parse.py", "--adaptra-policy", "observe"], "parse.py"),
        (["auto_parse.py", "--adaptra-policy", "observe"], "auto_parse.py"),
    ],
    ids=["flag", "module", "import"],
)
def test_each_way_patches_once_the_flags_are_read(command: list[str], main: str) -> None:
    told = parsed(*command, ADAPTRA_DISABLE="0")
    assert told["patched"] == ALL_PATCHES
    assert told["policy"] == "observe"
    assert told["arguments"]["adaptra"] == "True"
    assert told["main"].endswith(main), "the script is the main program"
    assert told["argv"][0] == main
    assert told["path"] == str(STAND_IN)


def test_without_the_flag_nothing_of_ours_is_imported() -> None:
    told = parsed("parse.py")
    assert told["modules"] == []
    assert not [name for name in told["arguments"] if name.startswith("adaptra")]


def test_policy_off_patches_nothing() -> None:
    told = parsed("parse.py", "--adaptra", "--adaptra-policy", "off")
    assert told["patched"] == []
    assert "torch" not in told["modules"]


@pytest.mark.parametrize("command", [["parse.py", "--adaptra"], ["-m", "adaptra_megatron", "parse.py"]])
@pytest.mark.parametrize(("rank", "said"), [({}, 1), ({"RANK": "0"}, 1), ({"RANK": "1"}, 0)])
def test_the_environment_turns_it_off_and_the_flags_are_still_read(
    command: list[str], rank: dict[str, str], said: int
) -> None:
    done = start(*command, "--train-iters", "7", ADAPTRA_DISABLE="1", **rank)
    told = json.loads(done.stdout)
    assert told["patched"] == []
    assert "torch" not in told["modules"]
    assert told["arguments"]["train_iters"] == "7"
    assert done.stderr.count("turned off by ADAPTRA_DISABLE") == said, "once per job, though Megatron parses thrice"


@pytest.mark.parametrize(("enables", "said"), [(["--enables"], 0), ([], 1)])
def test_a_flag_that_megatrons_parser_has_not_read_is_not_ignored_in_silence(enables: list[str], said: int) -> None:
    done = start("own_parser.py", "--adaptra", *enables)
    assert done.stdout == f"replaced: {bool(enables)}\n"
    assert done.stderr.count("--adaptra is on the command line, but Megatron's own parser has not read it") == said


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
        (["--adaptra-policy", "observe"], "error: --adaptra-policy has no effect without --adaptra: add --adaptra"),
        (["--adaptra", "--adaptra-plan-csv", "parse.py"], "error: --adaptra-plan-csv parse.py: row 1, column 1: "),
        (["--adaptra", "--adaptra-costs", "parse.py"], "error: --adaptra-costs parse.py is not valid JSON: "),
        (["--adaptra", "--adaptra-interface", "eht0"], "error: --adaptra-interface: the network interface 'eht0' does"),
    ],
)
def test_what_cannot_be_is_refused_by_the_parser(flags: list[str], said: str) -> None:
    done = start("parse.py", *flags, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("usage: parse.py [-h]")
    assert said in done.stderr.splitlines()[-1]


def test_a_megatron_of_another_form_is_refused_when_it_is_imported() -> None:
    code = "import sys, types; sys.modules['megatron.training.arguments'] = types.ModuleType('arguments')"
    done = start("-c", f"{code}; import adaptra_megatron.auto", check=False)
    assert done.returncode == 1
    assert "BootstrapError: this Megatron has no arguments.add_megatron_arguments" in done.stderr


def test_importing_auto_after_megatron_is_refused() -> None:
    name = "megatron.core.pipeline_parallel.schedules"
    code = f"import sys, types; sys.modules['{name}'] = types.ModuleType('{name}'); import adaptra_megatron.auto"
    done = start("-c", code, check=False)
    assert "import adaptra_megatron.auto before anything of megatron" in done.stderr
    assert done.returncode == 1


def test_auto_after_the_flag_is_no_second_time() -> None:
    done = start("auto_parse.py", "--adaptra", "--help")
    assert done.stdout.count("\nadaptra:\n") == 1


@pytest.mark.parametrize("command", [["spawn.py", "--adaptra"], ["-m", "adaptra_megatron", "spawn.py"]])
def test_processes_of_the_script_start_as_ever(command: list[str]) -> None:
    found = json.loads(start(*command).stdout)
    assert "adaptra_megatron.bootstrap" in found["own"]
    assert found["spawn"] == [], "a spawned process has its own command line"
    assert found["fork"] == found["own"]


def test_other_programs_with_the_flag_see_none_of_it() -> None:
    told = start("-c", "import sys; print('torch' in sys.modules, sys.argv)", "--adaptra").stdout
    assert told == "False ['-c', '--adaptra']\n"


def test_the_module_says_how_it_is_used() -> None:
    assert start("-m", "adaptra_megatron", "--help").stdout.startswith("usage: python -m adaptra_megatron SCRIPT")
    assert start("-m", "adaptra_megatron", check=False).returncode == 2
