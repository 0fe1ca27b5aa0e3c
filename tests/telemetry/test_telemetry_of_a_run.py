# SPDX-License-Identifier: Apache-2.0
"""Everything that a run tells, seen from outside while it runs: endpoint, traces on demand, log, Megatron's writers."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import urllib.request
from pathlib import Path

import pytest

from adaptra_megatron.telemetry.event_log import read_events
from adaptra_megatron.telemetry.trace import read_trace, trace_path
from adaptra_megatron.tools.cli.main import main as adaptra
from adaptra_megatron.tools.local_ranks.launch_ranks import free_port, run_ranks
from testing.faults.holds import HELD_S
from testing.jobs.fork_server import ForkServer
from testing.waiting import until

STAGES, MICRO_BATCHES, ITERATIONS, ONSET, HELD, LATENCY_S = 3, 6, 36, 12, 26, 0.16
MESSAGE_NBYTES = 4 * 16 * 32
PROGRAM = Path(__file__).with_name("telemetry_ranks.py")


@pytest.mark.timeout(520)
def test_a_run_tells_what_it_does_while_it_runs(fork_server: ForkServer, tmp_path: Path) -> None:
    """The planner is waited for, and the run waits in iteration HELD until the link is known to be slow: then nothing
    here depends on how fast the machine is, but how slow other links are."""
    port, run, scalars, seen = free_port(), tmp_path / "run", tmp_path / "scalars.json", tmp_path / "seen"
    arguments = (
        f"--pipeline-model-parallel-size {STAGES} --num-layers {STAGES} --global-batch-size {MICRO_BATCHES} "
        f"--mock-data --no-gradient-accumulation-fusion --hidden-size 32 --seq-length 16 --train-iters {ITERATIONS} "
        f"--emulate-compute-ms 8,8,8 --emulate-prompt-planner --emulate-hold {HELD}:{seen} "
        f"--emulate-slow-link 0>1:latency_ms={1e3 * LATENCY_S:g},from={ONSET} --adaptra "
        f"--adaptra-host-transport off --adaptra-max-in-flight 5 --adaptra-prometheus-port {port} "
        f"--adaptra-trace-dir {run} --adaptra-trace asked --adaptra-profile-ranges"
    )
    job = threading.Thread(
        target=run_ranks,
        args=(STAGES, [str(PROGRAM), str(scalars), *arguments.split()]),
        kwargs={"timeout_s": 240, "server": fork_server, "log_directory": tmp_path / "logs"},
    )
    job.start()
    try:
        metrics = until(lambda: _that_names_the_slow_link(_scrape(port)), lambda: _scrape(port), HELD_S)
        asking = threading.Thread(target=adaptra, args=(["trace", str(run), "--request", "next-2"],))
        asking.start()
        request = run / "requests" / "next-2"
        until(lambda: request.exists() or not asking.is_alive(), limit_s=HELD_S)
        seen.touch()
        asking.join()
    finally:
        job.join(timeout=240)
    _check_metrics(metrics)
    _check_traces(run, tmp_path / "trace.json")
    written = json.loads(scalars.read_text())
    _check_ranges(written.pop("ranges"))
    _check_scalars(written)


def _that_names_the_slow_link(text: str) -> str:
    """Return `text` if it reports the link as slow by more than LATENCY_S, else "". A busy machine may have made it
    slow by less before."""
    ends = {"from": "0", "to": "1"}
    is_slow = _value(text, "adaptra_link_state", **ends, state="slow") == 1.0
    latency_s = _value(text, "adaptra_link_latency_seconds", **ends)
    transfer_s = _transfer_s(latency_s, _value(text, "adaptra_link_bandwidth_bytes_per_second", **ends))
    return text if is_slow and transfer_s > LATENCY_S else ""


def _transfer_s(latency_s: float, bandwidth: float) -> float:
    """Seconds of a message: what is measured. Arrivals that are spaced by chance tell a bandwidth (bytes per second, -1
    where none is reported), which takes its part of it."""
    return latency_s + max(0.0, MESSAGE_NBYTES / bandwidth)


def _scrape(port: int) -> str:
    """What the port serves; "" where the run has not opened its port yet, or ends meanwhile."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
        return page.read().decode()
    return ""


def _value(text: str, name: str, **labels: str) -> float:
    """Value of the only line with that name and these labels; -1 if there is none."""
    lines = [line for line in text.splitlines() if re.match(rf"{name}({{| )", line)]
    lines = [line for line in lines if all(f'{label}="{value}"' in line for label, value in labels.items())]
    return float(lines[0].split()[-1]) if len(lines) == 1 else -1.0


def _check_metrics(text: str) -> None:
    """The leading rank serves its figures while the link is slow."""
    assert _value(text, "adaptra_iterations_total", rank="0", stage="0") > ONSET
    assert 0.0 < _value(text, "adaptra_iteration_seconds") < HELD_S
    assert 0.0 < _value(text, "adaptra_bubble_ratio") < 1.0
    assert _value(text, "adaptra_link_state", **{"from": "1", "to": "0"}) == 1.0, "in one state"


def _check_traces(run: Path, output: Path) -> None:
    """Two iterations in a row, of every rank, after the link had turned slow; and a file for Perfetto of them."""
    traced = [{record.iteration for record in read_trace(trace_path(run, rank)).records} for rank in range(STAGES)]
    assert traced[0] == traced[1] == traced[2]
    first, second = sorted(traced[0])
    assert ONSET < first == second - 1 < ITERATIONS
    assert adaptra(["trace", str(run), "-o", str(output)]) == 0
    names = [entry.get("name", "") for entry in json.loads(output.read_text())["traceEvents"]]
    assert sum(name.startswith("F") for name in names) >= 2 * STAGES * MICRO_BATCHES
    kinds = [entry.event.name for entry in read_events(run)]
    assert kinds.count("run_started") == kinds.count("run_ended") == STAGES
    assert {"link", "plan", "switch"} <= set(kinds)


def _check_ranges(names: list[str]) -> None:
    """Names in the last rank's last iteration, as torch.profiler saw it."""
    for number in range(MICRO_BATCHES):
        expected = ("F {}", "receive activation {} from rank 1", "wait for activation {}")
        for name in (*expected, "send gradient {} to rank 1"):
            assert f"adaptra {name.format(number)}" in names, f"no range {name.format(number)!r} in {names}"
        split = {f"adaptra I {number}", f"adaptra W {number}"} <= set(names)
        assert split != (f"adaptra B {number}" in names), f"backward {number}: {names}"


def _check_scalars(written: dict[str, list[list[object]]]) -> None:
    """Every other iteration, under Megatron's number, the same to both writers; the link shows."""
    curves: dict[str, dict[int, float]] = {}
    for tag, value, step in written["tensorboard"]:
        curves.setdefault(str(tag), {})[int(str(step))] = float(str(value))
    steps = list(range(2, ITERATIONS + 1, 2))
    assert list(curves["adaptra/iteration_time_s"]) == steps
    assert curves["adaptra/plan_number"][ITERATIONS] >= 2
    latency_s, bandwidth = (curves.get(f"adaptra/link_0_to_1/{tag}", {}) for tag in ("latency_s", "bandwidth_bytes_s"))
    transfer_s = {step: _transfer_s(value_s, bandwidth.get(step, -1.0)) for step, value_s in latency_s.items()}
    assert min(value_s for step, value_s in transfer_s.items() if step <= ONSET) < LATENCY_S < transfer_s[ITERATIONS]
    assert curves["adaptra/links_not_healthy"][ITERATIONS] >= 1
    assert all(0.0 < share < 1.0 for share in curves["adaptra/bubble_fraction"].values())
    to_wandb = {int(str(step)): values for values, step in written["wandb"]}
    assert list(to_wandb) == steps
    assert to_wandb[ITERATIONS] == {tag: curve[ITERATIONS] for tag, curve in curves.items() if ITERATIONS in curve}
