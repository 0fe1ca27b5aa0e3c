# SPDX-License-Identifier: Apache-2.0
"""Processes of benchmarks/control_plane.py, which take a line of input for each iteration and answer with one:

control_plane_rank.py serve
control_plane_rank.py rank PORT LANES STAGES NUMBER
control_plane_rank.py others PORT RANKS REPLICA...
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.layout import Introduction, JobLayout, layout_of
from adaptra_megatron.control.deciders.plan_state import Layout
from adaptra_megatron.control.decisions import DELAY, TelemetrySection
from adaptra_megatron.control.exchange import PlanExchange, decision_key, exchange_place
from adaptra_megatron.control.measurements import StageMeasurement, stage_measurement
from adaptra_megatron.control.sidecar.planner_client import Begin, PlannerClient
from adaptra_megatron.telemetry.action_records import ActionRecord
from adaptra_megatron.transport.link_paths import Path as LinkPath
from adaptra_megatron.transport.message_keys import Direction, MessageKey, MessageTimes
from adaptra_megatron.transport.setup.host_placement import listen_tcp

SECRET = b"s" * 32
ITERATION_S, MICRO_BATCHES, ACTION_S = 10.0, 32, 0.1
LOOKS = 8
"""One rank of so many looks into the store for a decision that its training waits for."""
SLOW_S = 0.5
"""Delay of a link that turns slow: five actions."""

Recorded = tuple[Sequence[ActionRecord], tuple[Sequence[MessageTimes], Sequence[MessageTimes]]]
"""One rank's actions, and messages sent and received."""


def layout_for(lanes: int, stages: int, rank: int) -> JobLayout:
    """One replica: ranks of a stage are neighbours."""
    introductions = [
        Introduction(stage * lanes + lane, lane, stage, [stage * lanes], "host", f"boot{stage}/net", "bench")
        for stage in range(stages)
        for lane in range(lanes)
    ]
    return layout_of(introductions, rank)


def recorded(stage: int, stages: int, slow: bool = False) -> Recorded:
    """One rank's iteration; every action lasts ACTION_S. `slow`: whether what comes from the stage before is late."""
    records, sent, received = [], [], []
    for micro_batch in range(MICRO_BATCHES):
        begin_s = 3 * ACTION_S * micro_batch + ACTION_S * stage
        for place, kind in enumerate("FIW"):
            at_s = begin_s + place * ACTION_S
            records.append(ActionRecord(0, stage, kind, 0, micro_batch, at_s, at_s, at_s + ACTION_S))
        for direction, target, source in (
            (Direction.ACTIVATION, stage + 1, stage - 1),
            (Direction.GRADIENT, stage - 1, stage + 1),
        ):
            key = MessageKey(0, direction, 0, micro_batch)
            out_s = begin_s + ACTION_S
            if 0 <= target < stages:
                sent.append(MessageTimes(key, target, out_s, out_s, 1 << 24, LinkPath.DEVICE))
            if 0 <= source < stages:
                in_s = out_s + ACTION_S * (source - stage) + 1e-3
                in_s += SLOW_S if slow and direction is Direction.ACTIVATION else 0.0
                received.append(MessageTimes(key, source, -1.0, in_s, 1 << 24, LinkPath.DEVICE))
    return records, (sent, received)


def measured(lane: int, stage: int, stages: int, slow: bool = False) -> StageMeasurement:
    """The same, as it is handed in."""
    return stage_measurement(lane, stage, MICRO_BATCHES, *recorded(stage, stages, slow), 0.0)


def of_iteration(template: StageMeasurement, iteration: int) -> StageMeasurement:
    """The same in another iteration."""
    return replace(template, iteration=iteration, clock_offset_s=ITERATION_S * iteration)


def connected(port: int) -> TCPStore:
    """A client of the store."""
    return TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))


class Silent:
    """Keeps no events."""

    def log(self, event: Any) -> None:
        pass


def serve() -> None:
    """The process of the store: says its port, and ends with its input."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    say(store.port)
    sys.stdin.read()


def rank(port: int, lanes: int, stages: int, number: int) -> None:
    """A training process, but for the training: a line of input is an iteration that it has measured.

    After the last rank, one that does all of this but exchange anything: what this program itself takes.
    """
    idle = number == lanes * stages
    job = layout_for(lanes, stages, number - idle)
    control, planner = ControlStore(connected(port), SECRET, "bench"), None
    if job.rank == job.leader:
        seal = control.seal(exchange_place(job))
        begin = Begin(
            secret=SECRET.hex(),
            place=seal.place,
            reporters=tuple(job.reporters),
            layout=Layout(stages=stages, chunks=1, group_size=None),
            measures_memory=False,
            policy="adapt",
            max_in_flight=2.0 * stages,
            plan_csv=None,
            costs_json=None,
            paths=None,
            log_level=0,
        )
        listener, _address = listen_tcp("127.0.0.1")
        planner = PlannerClient(begin, listener, Silent(), lambda: 0, TelemetrySection)
    exchange = PlanExchange(control, job, planner, 60.0)
    lane, stage = job.workers[job.rank].lane, job.cell.stage
    records, times = recorded(stage, stages)
    measurement = measured(lane, stage, stages)
    for line in sys.stdin:
        iteration = int(line)
        if not idle:
            if iteration >= DELAY:
                exchange.decision(iteration)
            exchange.early_decision(iteration + 1)
            measurement = stage_measurement(lane, stage, MICRO_BATCHES, records, times, 0.0)
        measurement = of_iteration(measurement, iteration)
        if not idle:
            exchange.post(iteration, measurement)
        say(json.dumps({"cpu_s": time.process_time(), "planner": None if planner is None else planner.process_id}))
    exchange.close()


def others(port: int, ranks: int, replicas: Sequence[int]) -> None:
    """All requests of other replicas' ranks; a line of input is an iteration of theirs."""
    store, decision = connected(port), b"d" * 4096
    for line in sys.stdin:
        iteration = int(line)
        for replica in replicas:
            place = f"other/{replica}/"
            store.set(place + decision_key(iteration), decision)
            for _ in range(0, ranks, LOOKS):
                store.compare_set(place + decision_key(iteration), "?", "?")
            store.delete_key(place + decision_key(iteration))
        say("done")


def say(text: object) -> None:
    """A line of output, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(role: str, *numbers: int) -> None:
    """The process of one role."""
    if role == "serve":
        serve()
    elif role == "rank":
        rank(*numbers)
    else:
        port, ranks, *replicas = numbers
        others(port, ranks, replicas)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
