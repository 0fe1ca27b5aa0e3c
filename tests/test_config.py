# SPDX-License-Identifier: Apache-2.0
"""Settings are checked at birth, and the flags say what they take."""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from adaptra_megatron.common.ports import PortRange
from adaptra_megatron.config import (
    HOST_TRANSPORTS,
    OPTIONS,
    POLICIES,
    AdaptraConfig,
    ConfigError,
    add_adaptra_arguments,
    config_from_arguments,
)
from adaptra_megatron.transport.device_session.communicator_config import CommunicatorConfig

PLAN = "0F0,0B0\n1F0,1B0\n"
COSTS = '{"stages": 2, "micro_batches": 1, "forward_s": 1, "backward_input_s": 1, "backward_weight_s": 1}'


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    path = tmp_path / "plan.csv"
    path.write_text(PLAN)
    return path


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    path.write_text(COSTS)
    return path


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    assert add_adaptra_arguments(parser) is parser
    return parser


def test_defaults_are_valid_and_settings_do_not_change() -> None:
    config = AdaptraConfig()
    assert config.policy == "adapt"
    with pytest.raises(FrozenInstanceError):
        config.policy = "off"  # type: ignore[misc]
    with pytest.raises(TypeError):
        AdaptraConfig("adapt")  # type: ignore[misc]


@pytest.mark.parametrize("policy", ["", "Adapt", "on", None])
def test_unknown_policy_is_refused(policy: Any) -> None:
    with pytest.raises(ConfigError, match=f"--adaptra-policy is {policy!r}.*off, observe, adapt"):
        AdaptraConfig(policy=policy)


CONTEXTS: dict[str, dict[str, Any]] = {
    "off": {"policy": "off"},
    "observe": {"policy": "observe", "host_transport": "off"},
    "adapt": {"host_transport": "off"},
    "fixed plan": {"plan_csv": "plan", "host_transport": "off"},
    "given costs": {"costs_json": "costs", "host_transport": "off"},
    "host path": {},
    "tcp": {"host_transport": "tcp"},
    "observed host path": {"policy": "observe", "host_transport": "shm"},
}
MEASURED = {"observe", "adapt", "host path", "tcp", "observed host path"}
ADAPTED = {"adapt", "host path", "tcp"}
FIXED = {"fixed plan", "given costs"}
EVERY = MEASURED | FIXED
ACCEPTED: dict[str, tuple[Any, set[str], str]] = {
    "plan_csv": ("plan", ADAPTED, "policy|costs"),
    "costs_json": ("costs", ADAPTED, "policy|costs"),
    "max_in_flight": (8.0, ADAPTED | FIXED, "policy"),
    "memory_fraction": (0.5, MEASURED, "plan-csv or --adaptra-costs"),
    "trace_dir": (Path("run"), EVERY, ""),
    "trace": ("asked", set(), "trace-dir"),
    "prometheus_port": (9400, EVERY, ""),
    "prometheus_address": ("0.0.0.0", set(), "prometheus-port"),
    "otel": (True, EVERY, ""),
    "timeout_s": (5.0, EVERY, ""),
    "host_transport": ("shm", EVERY, ""),
    "rnics": (("mlx5_0",), {"host path"}, "host-transport"),
    "interface": ("lo", EVERY, ""),
    "port_range": (PortRange(20000, 20127), EVERY, ""),
    "path": ("host", {"host path", "tcp", "observed host path"}, "host-transport"),
    "queue_model": ("shared", EVERY, ""),
    "dispatch": ("online", ADAPTED | FIXED, "policy"),
    "reroute": ("stragglers", {"host path", "tcp"}, "policy|plan-csv or --adaptra-costs|host-transport"),
    "gradient_sync": ("auto", EVERY, ""),
    "sync_mode": ("auto", EVERY, ""),
    "max_staleness": (2, set(), "sync-mode"),
    "straggler_monitor": ("off", EVERY, ""),
    "host_policy": ("pin", EVERY, ""),
    "profile_ranges": (True, EVERY, ""),
    "staggered_optimizer": (True, ADAPTED | FIXED, "policy"),
}
"""For each option: a value that is not its default, the contexts in which it means something, and the flag named
where it does not."""


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", [option.name for option in OPTIONS if option.name != "policy"])
def test_what_would_have_no_effect_is_refused(name: str, context: str, plan: Path, costs: Path) -> None:
    value, accepted, named = ACCEPTED[name]
    files = {"plan": plan, "costs": costs}
    around = {key: files.get(setting, setting) for key, setting in CONTEXTS[context].items()}
    value = files.get(value, value) if isinstance(value, str) else value
    if context in accepted or name in around:
        AdaptraConfig(**around | {name: value})
        return
    with pytest.raises(ConfigError, match=f"^--adaptra-.*--adaptra-({'policy' if context == 'off' else named})"):
        AdaptraConfig(**around | {name: value})


@pytest.mark.parametrize("reroute", ["failures", "all"])
def test_sums_around_a_straggler_do_not_survive_failures(reroute: str) -> None:
    with pytest.raises(ConfigError, match=f"--adaptra-gradient-sync hidden .*--adaptra-reroute {reroute} .*drop one"):
        AdaptraConfig(gradient_sync="hidden", reroute=reroute)
    AdaptraConfig(gradient_sync="hidden", reroute="stragglers")


@pytest.mark.parametrize(
    ("other", "flag"),
    [
        ({"straggler_monitor": "off"}, "--adaptra-straggler-monitor off"),
        ({"sync_mode": "auto"}, "another --adaptra-sync-mode"),
        ({"reroute": "all"}, "--adaptra-reroute failures or all"),
    ],
)
def test_a_host_policy_needs_the_monitor(other: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=f"--adaptra-host-policy observe .*{flag}"):
        AdaptraConfig(host_policy="observe", **other)


@pytest.mark.parametrize(
    ("other", "flag"),
    [
        ({"reroute": "stragglers"}, "--adaptra-reroute stragglers"),
        ({"reroute": "failures"}, "--adaptra-reroute failures"),
        ({"gradient_sync": "auto"}, "--adaptra-gradient-sync auto"),
        ({"staggered_optimizer": True}, "--adaptra-staggered-optimizer"),
    ],
)
def test_replicas_that_do_not_wait_go_together_with_no_other_remedy(other: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=f"--adaptra-sync-mode x-order .*{flag} .*drop one of the two"):
        AdaptraConfig(sync_mode="x-order", **other)


def test_no_gradient_may_be_less_late_than_by_one_update() -> None:
    with pytest.raises(ConfigError, match="--adaptra-max-staleness is 0; it must be at least 1"):
        AdaptraConfig(sync_mode="auto", max_staleness=0)
    assert AdaptraConfig(sync_mode="auto", max_staleness=2).max_staleness == 2


def test_a_plan_and_costs_exclude_each_other(plan: Path, costs: Path) -> None:
    with pytest.raises(ConfigError, match="--adaptra-plan-csv .* and --adaptra-costs exclude each other"):
        AdaptraConfig(plan_csv=plan, costs_json=costs)


@pytest.mark.parametrize("reroute", ["stragglers", "failures", "all"])
def test_routes_and_staggered_steps_exclude_each_other(reroute: str) -> None:
    with pytest.raises(ConfigError, match=f"--adaptra-reroute {reroute}.* --adaptra-staggered-optimizer .*drop one"):
        AdaptraConfig(reroute=reroute, staggered_optimizer=True)


@pytest.mark.parametrize("policy", ["off", "observe"])
@pytest.mark.parametrize("given", [{"plan_csv": Path("plan")}, {"costs_json": Path("costs")}, {"max_in_flight": 1.0}])
def test_a_plan_needs_the_policy_that_runs_it(policy: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"--adaptra-policy {policy} keeps stock's; use --adaptra-policy adapt"):
        AdaptraConfig(policy=policy, **given)


def test_saying_what_happens_anyway_is_no_contradiction() -> None:
    AdaptraConfig(policy="observe", dispatch="planned")
    AdaptraConfig(dispatch="planned")
    AdaptraConfig(trace="all", path="device", host_transport="off")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "the CSV holds no action"),
        ("stage,action\n", "row 1, column 1: 'stage' is no action"),
        ("0F0,0B0\n1F0\n", "stage 1 B.* is missing"),
        ("1F0,1B0\n1B1,0F0,0B0\n", "is in rank 0's row"),
        ("1F0,1B0\n0F0,0B0\n", r"it places virtual stages on stages \[1, 0\]"),
        ("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n", r"stages \[0, 1, 1, 0\], but Megatron .* v modulo 2, .* not run$"),
        ("0F0,0F1,0F2,0B0,0B1,0B2\n1F0,1F1,1F2,1B0,1B1,1B2\n", "makes the stage hold 3 activations, its cap is 2"),
        ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", "deadlock"),
    ],
)
def test_plans_that_no_pipeline_can_run_are_refused(plan: Path, text: str, said: str) -> None:
    plan.write_text(text)
    with pytest.raises(ConfigError, match=f"^--adaptra-plan-csv {plan}: .*{said}"):
        AdaptraConfig(plan_csv=plan, max_in_flight=2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", " is not valid JSON: Expecting value"),
        ("{" * 3, " is not valid JSON"),
        ("[" * 100_000, " is not valid JSON: maximum recursion depth"),
        ("[]", ": costs must be a JSON object"),
        ("{}", ": .*stages"),
        (COSTS.replace('"forward_s": 1', '"forward_s": -1'), ": forward_s of stage 0"),
        (COSTS.replace("stages", "phases"), ": .*'phases'"),
        (COSTS.replace("{", '{"placement": [1, 0], "chunks": 1, '), r": it places virtual stages on stages \[1, 0\]"),
    ],
)
def test_costs_of_nothing_are_refused(costs: Path, text: str, said: str) -> None:
    costs.write_text(text)
    with pytest.raises(ConfigError, match=f"^--adaptra-costs {costs}{said}"):
        AdaptraConfig(costs_json=costs)


@pytest.mark.parametrize("given", ["plan_csv", "costs_json"])
def test_files_that_are_no_text_are_refused(given: str, tmp_path: Path) -> None:
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=f"{path} cannot be read as text"):
        AdaptraConfig(**{given: path})


@pytest.mark.parametrize(("given", "flag"), [("plan_csv", "--adaptra-plan-csv"), ("costs_json", "--adaptra-costs")])
def test_files_must_be_there(given: str, flag: str, tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ConfigError, match=f"{flag}: there is no file {path}"):
            AdaptraConfig(**{given: path})


@pytest.mark.parametrize("cap", [0, 0.999, -1, math.inf, math.nan])
def test_a_cap_has_room_for_one_activation(cap: float) -> None:
    with pytest.raises(ConfigError, match=f"--adaptra-max-in-flight is {cap}; .* at least 1 activation"):
        AdaptraConfig(max_in_flight=cap)
    AdaptraConfig(max_in_flight=1)
    AdaptraConfig(max_in_flight=1.5)


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.001, math.nan])
def test_no_more_memory_is_used_than_there_is(fraction: float) -> None:
    with pytest.raises(ConfigError, match=f"--adaptra-memory-fraction is {fraction}; it must be above 0 and at most 1"):
        AdaptraConfig(memory_fraction=fraction)
    AdaptraConfig(memory_fraction=1.0)


@pytest.mark.parametrize("timeout_s", [0, -1.0, math.inf, math.nan])
def test_timeouts_are_positive_and_end(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match=f"--adaptra-timeout-s is {timeout_s}; it must be above 0"):
        AdaptraConfig(timeout_s=timeout_s)
    AdaptraConfig(timeout_s=0.001)


def test_flags_make_the_settings(parser: argparse.ArgumentParser, plan: Path, costs: Path) -> None:
    arguments = parser.parse_args(
        f"--adaptra --adaptra-plan-csv {plan} --adaptra-max-in-flight 12 "
        "--adaptra-trace-dir traces --adaptra-timeout-s 2.5".split()
    )
    assert arguments.adaptra is True
    assert config_from_arguments(arguments) == AdaptraConfig(
        policy="adapt", plan_csv=plan, max_in_flight=12.0, trace_dir=Path("traces"), timeout_s=2.5
    )
    arguments = parser.parse_args(["--adaptra-costs", str(costs)])
    assert config_from_arguments(arguments) == AdaptraConfig(costs_json=costs)
    with pytest.raises(ConfigError, match="--adaptra-timeout-s is 0.0"):
        config_from_arguments(parser.parse_args(["--adaptra-timeout-s", "0"]))


@pytest.mark.parametrize("transport", HOST_TRANSPORTS)
def test_every_host_transport_has_a_flag(parser: argparse.ArgumentParser, transport: str) -> None:
    assert config_from_arguments(parser.parse_args(["--adaptra-host-transport", transport])).host_transport == transport
    with pytest.raises(ConfigError, match="--adaptra-host-transport is 'verbatim'; it must be one of off, auto"):
        AdaptraConfig(host_transport="verbatim")


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_has_a_flag(parser: argparse.ArgumentParser, policy: str) -> None:
    assert config_from_arguments(parser.parse_args(["--adaptra-policy", policy])).policy == policy


def test_without_flags_adaptra_is_off_and_the_defaults_are_those_of_the_settings(
    parser: argparse.ArgumentParser,
) -> None:
    arguments = parser.parse_args([])
    assert arguments.adaptra is False
    assert config_from_arguments(arguments) == AdaptraConfig()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--adaptra-policy sometimes", "invalid choice: 'sometimes'"),
        ("--adaptra-timeout-s soon", "invalid float value"),
        ("--adaptra-max-in-flight many", "invalid float value"),
        ("--adaptra-costs", "expected one argument"),
        ("--adaptra-cost x", "unrecognized arguments"),
    ],
)
def test_wrong_flags_are_refused(
    parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    with pytest.raises(SystemExit):
        parser.parse_args(line.split())
    assert said in capsys.readouterr().err


def test_help_has_a_group_of_its_own_and_names_units(parser: argparse.ArgumentParser) -> None:
    (group,) = [group for group in parser._action_groups if group.title == "adaptra"]
    flags = {action.option_strings[0]: action for action in group._group_actions}
    assert set(flags) == {
        "--adaptra",
        "--adaptra-policy",
        "--adaptra-plan-csv",
        "--adaptra-costs",
        "--adaptra-max-in-flight",
        "--adaptra-memory-fraction",
        "--adaptra-trace-dir",
        "--adaptra-trace",
        "--adaptra-prometheus-port",
        "--adaptra-prometheus-address",
        "--adaptra-otel",
        "--adaptra-timeout-s",
        "--adaptra-host-transport",
        "--adaptra-path",
        "--adaptra-queue-model",
        "--adaptra-dispatch",
        "--adaptra-reroute",
        "--adaptra-gradient-sync",
        "--adaptra-sync-mode",
        "--adaptra-max-staleness",
        "--adaptra-straggler-monitor",
        "--adaptra-host-policy",
        "--adaptra-profile-ranges",
        "--adaptra-staggered-optimizer",
        "--adaptra-rnics",
        "--adaptra-interface",
        "--adaptra-port-range",
    }
    assert all(action.help for action in flags.values())
    assert flags["--adaptra-timeout-s"].metavar == "SECONDS"
    assert "activations (of one model chunk and micro-batch)" in str(flags["--adaptra-max-in-flight"].help)
    for policy in POLICIES:
        assert f"{policy}:" in str(flags["--adaptra-policy"].help)
    assert "--adaptra-timeout-s SECONDS" in parser.format_help()


def test_importing_the_settings_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'megatron', 'numpy'}"
    code = f"import sys, adaptra_megatron, adaptra_megatron.config; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_rnics_are_named_in_order(parser: argparse.ArgumentParser) -> None:
    flags = ["--adaptra-host-transport", "verbs", "--adaptra-rnics", "mlx5_1,mlx5_0"]
    assert config_from_arguments(parser.parse_args(flags)).rnics == ("mlx5_1", "mlx5_0")
    assert config_from_arguments(parser.parse_args([])).rnics == ()


def test_a_range_of_ports_is_parsed_once(parser: argparse.ArgumentParser, capsys: pytest.CaptureFixture[str]) -> None:
    given = config_from_arguments(parser.parse_args(["--adaptra-port-range", "20000-20127"]))
    assert given.port_range == PortRange(20000, 20127)
    assert config_from_arguments(parser.parse_args([])).port_range is None
    with pytest.raises(SystemExit):
        parser.parse_args(["--adaptra-port-range", "20127-20000"])
    assert "argument --adaptra-port-range: the ports 20127-20000 are no range" in capsys.readouterr().err


@pytest.mark.parametrize("rnics", [("mlx5_0", "mlx5_0"), ("mlx5_0", ""), ("",)])
def test_rnics_without_a_name_or_named_twice_are_refused(rnics: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="--adaptra-rnics is .*it must be different names"):
        AdaptraConfig(host_transport="verbs", rnics=rnics)


@pytest.mark.parametrize("transport", ["off", "shm", "tcp"])
def test_rnics_need_a_transport_that_uses_them(transport: str) -> None:
    with pytest.raises(ConfigError, match=f"--adaptra-host-transport {transport} uses none; use verbs or auto"):
        AdaptraConfig(host_transport=transport, rnics=("mlx5_0",))
    AdaptraConfig(host_transport="auto", rnics=("mlx5_0",))


def test_an_interface_is_one_of_this_host(parser: argparse.ArgumentParser) -> None:
    flags = ["--adaptra-host-transport", "tcp", "--adaptra-interface", "lo"]
    assert config_from_arguments(parser.parse_args(flags)).interface == "lo"
    assert config_from_arguments(parser.parse_args([])).interface is None
    with pytest.raises(ConfigError, match="--adaptra-interface is ''; it must be the name"):
        AdaptraConfig(host_transport="tcp", interface="")
    with pytest.raises(ConfigError, match="--adaptra-interface: the network interface 'eht0' does not exist; .* lo "):
        AdaptraConfig(host_transport="tcp", interface="eht0")


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({}, False),
        ({"host_transport": "auto"}, False),
        ({"host_transport": "shm"}, True),
        ({"path": "host"}, True),
        ({"interface": "lo"}, True),
        ({"rnics": ("mlx5_0",)}, True),
    ],
)
def test_settings_of_the_host_path_need_it(settings: dict[str, Any], needed: bool) -> None:
    assert AdaptraConfig(**settings).needs_host_path is needed


def test_communicators_are_configured_as_megatrons_are(tmp_path: Path) -> None:
    """By the entry "pp" of --nccl-communicator-config-path, which Megatron's own process group would have."""
    file = tmp_path / "nccl.yaml"

    def configured(text: str | None) -> CommunicatorConfig:
        parser = add_adaptra_arguments(argparse.ArgumentParser())
        arguments = parser.parse_args([])
        if text is not None:
            file.write_text(text)
            arguments.nccl_communicator_config_path = str(file)
        return config_from_arguments(arguments).communicators

    assert configured(None) == configured("dp_cp:\n  max_ctas: 8\n") == CommunicatorConfig()
    given = (
        "pp:\n  max_ctas: 4\n  min_ctas: 3\n  cga_cluster_size: 1\n  net_name: IB\n  is_high_priority_stream: true\n"
    )
    assert configured(given) == CommunicatorConfig(max_ctas=4, min_ctas=3, cga_cluster_size=1, net_name="IB")
    assert configured("pp:\n  min_ctas: 5\n") == CommunicatorConfig(min_ctas=5)
    for wrong in ("pp:\n  max_ctas: 0\n", "pp:\n  max_ctas: 1\n  min_ctas: 2\n", "- pp\n", "pp: {\n", ""):
        with pytest.raises(ConfigError, match=f"--nccl-communicator-config-path {file}"):
            configured(wrong)


def test_traces_are_of_all_iterations_or_of_those_asked_for(parser: argparse.ArgumentParser) -> None:
    config = config_from_arguments(parser.parse_args(["--adaptra-trace-dir", "run", "--adaptra-trace", "asked"]))
    assert (config.trace_dir, config.trace) == (Path("run"), "asked")
    with pytest.raises(ConfigError, match="--adaptra-trace asked needs .*give --adaptra-trace-dir too"):
        AdaptraConfig(trace="asked")
    with pytest.raises(ConfigError, match="--adaptra-trace is 'some'; it must be one of all, asked"):
        AdaptraConfig(trace="some", trace_dir=Path("run"))


@pytest.mark.parametrize("port", [-1, 65536])
def test_figures_are_served_at_a_port(parser: argparse.ArgumentParser, port: int) -> None:
    flags = ["--adaptra-prometheus-port", "9400", "--adaptra-prometheus-address", "0.0.0.0"]
    config = config_from_arguments(parser.parse_args(flags))
    assert (config.prometheus_port, config.prometheus_address) == (9400, "0.0.0.0")
    with pytest.raises(ConfigError, match=f"--adaptra-prometheus-port is {port}; it must be a port"):
        AdaptraConfig(prometheus_port=port)
