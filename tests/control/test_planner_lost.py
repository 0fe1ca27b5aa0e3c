# SPDX-License-Identifier: Apache-2.0
"""Ranks of a replica that lose the planner process, cannot reach it, or lose the leading rank: no training waits."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.made_up.job import ControlOver, layout
from support.made_up.measured_job import MeasuredJob
from torch.distributed import HashStore

from adaptra_megatron.common.typed_messages import encoded
from adaptra_megatron.control.deciders.plan_state import Layout
from adaptra_megatron.control.decisions import DELAY, Decision, TelemetrySection
from adaptra_megatron.control.exchange import DecisionPublisher, PlanExchange, exchange_place
from adaptra_megatron.control.sidecar import planner_client as keeper
from adaptra_megatron.control.sidecar import planner_connections
from adaptra_megatron.control.sidecar.planner_client import Begin, PlannerClient
from adaptra_megatron.control.sidecar.planner_connections import MOST_AWAITED, PLANNER_KEY, Address
from adaptra_megatron.telemetry.events import Event
from adaptra_megatron.transport.setup.host_placement import listen_tcp
from testing.waiting import until

STAGES = 4
PATIENCE_S = 60.0
Reach = Callable[[Address], Address]


class Silent:
    def log(self, event: Event) -> None:
        pass


class Misled(ControlOver):
    """The control of a rank to which the planner process seems to be elsewhere."""

    def __init__(self, store: Any, seems: Address) -> None:
        super().__init__(store)
        self._seems, self.misled = seems, 0

    def client(self, place: str, within_s: float | None = None) -> Any:
        client = super().client(place, within_s)
        peek = client.peek

        def misleading(key: str) -> bytes | None:
            found: bytes | None = peek(key)
            if key != PLANNER_KEY or found is None:
                return found
            self.misled += 1
            return encoded(self._seems)

        client.peek = misleading  # type: ignore[method-assign]
        return client


class Replica:
    """A pipeline of four ranks, which run iteration after iteration in this thread."""

    def __init__(self, seems: Address | None = None) -> None:
        """`seems`: where the planner process seems to be to the last rank."""
        store, self.job = HashStore(), MeasuredJob()
        controls = [ControlOver(store) for _ in range(STAGES)]
        if seems is not None:
            controls[-1] = Misled(store, seems)
        ranks = list(range(STAGES))
        layouts = [layout([ranks], rank) for rank in ranks]
        place = controls[0].seal(exchange_place(layouts[0])).place
        begin = Begin(
            secret=controls[0].secret.hex(),
            place=place,
            reporters=tuple(ranks),
            layout=Layout(stages=STAGES, chunks=1, group_size=None),
            measures_memory=False,
            policy="adapt",
            max_in_flight=8.0,
            plan_csv=None,
            costs_json=None,
            paths=None,
            log_level=logging.INFO,
            waits_s=0.1,
        )
        self.planner = PlannerClient(begin, listen_tcp("127.0.0.1")[0], Silent(), lambda: 0, TelemetrySection)
        self.controls = controls
        self.exchanges = [
            PlanExchange(control, each, self.planner if each.rank == 0 else None, PATIENCE_S)
            for control, each in zip(controls, layouts, strict=True)
        ]
        self.iteration = 0

    def run(self, latency_s: float, *, published: bool = True) -> Decision:
        """The next iteration, in which messages of one link take so long; the decision that all ranks run it by.
        `published`: whether the planner's own is waited for."""
        iteration, decisions = self.iteration, []
        if iteration >= DELAY:
            if published:
                said = f"nothing is decided for iteration {iteration}"
                until(lambda: self.exchanges[0].early_decision(iteration) is not None, said, PATIENCE_S)
            decisions = [exchange.decision(iteration) for exchange in self.exchanges]
            assert all(decision == decisions[0] for decision in decisions)
        for exchange, measurement in zip(self.exchanges, self.job.measure(latency_s), strict=True):
            exchange.post(iteration, measurement)
        self.iteration += 1
        return decisions[0] if decisions else Decision(0)

    def close(self) -> None:
        for exchange in reversed(self.exchanges):
            exchange.close()


@pytest.fixture
def replica() -> Iterator[Callable[..., Replica]]:
    made: list[Replica] = []

    def make(seems: Address | None = None) -> Replica:
        made.append(Replica(seems))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_plans_are_made_again_once_the_planner_process_has_been_killed(replica: Callable[..., Replica]) -> None:
    four = replica()
    while four.run(0.0).number == 0:
        assert four.iteration < 10, "nothing is planned"
    first = four.planner.process_id
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until_s = time.monotonic() + PATIENCE_S
    while four.planner.process_id in (None, first):  # another one is started after a pause, not at once
        assert time.monotonic() < until_s, "no other planner process is started"
        assert four.run(0.0).number == 1, "what runs is kept"
    taken_over = four.iteration
    while four.run(4.0).number == 1:
        assert four.iteration < taken_over + 40, "the one that took over plans nothing"


def test_a_rank_that_cannot_connect_says_so_once_and_all_train_on(
    replica: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused, and as a firewall does: no answer."""
    monkeypatch.setattr(keeper, "LATE_S", 0.2)
    monkeypatch.setattr(planner_connections, "_PAUSE_S", (0.01, 0.02))
    monkeypatch.setattr(planner_connections, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as silent, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        waiting = [socket.socket() for _ in range(4)]  # more than it has room for, so the next gets no answer
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(silent.getsockname())
        for listener, why in ((silent, "timed out"), (closed, "refused")):
            address = Address(*listener.getsockname())
            four = replica(address)
            leading, until_s = four.exchanges[0]._role, time.monotonic() + PATIENCE_S
            assert isinstance(leading, DecisionPublisher)
            # The first lines may name others that are late.
            leading._failed._allowed = leading._failed._most = 1000.0
            expected = ("cannot send its measurements", "no measurements of ranks 3")
            while 0 in (leading._kept or [0]) or not all(each in caplog.text for each in expected):
                assert time.monotonic() < until_s, "it is not said, or decisions that all have run stay in the store"
                assert four.run(4.0, published=False).number == 0
                time.sleep(0.04)
            assert four.iteration > MOST_AWAITED
            control = four.controls[-1]
            assert isinstance(control, Misled)
            assert control.misled, "the fault did not fire"
            lines = [record.getMessage() for record in caplog.records]
            (said,) = [line for line in lines if "cannot send its measurements" in line]
            assert "rank 3" in said
            assert f"127.0.0.1:{address.port} (" in said
            assert why in said
            assert "--adaptra-interface" in said
            assert any("no measurements of ranks 3" in line and "plan 0 stays" in line for line in lines)
            caplog.clear()
        for each in waiting:
            each.close()


def test_ranks_whose_leading_rank_has_died_leave_the_exchange(
    replica: Callable[..., Replica], caplog: pytest.LogCaptureFixture
) -> None:
    """What runs is kept, until those that live begin another exchange."""
    four = replica()
    while (latest := four.run(0.0)).number == 0:
        assert four.iteration < 10, "nothing is planned"
    process_id, address = four.planner.process_id, four.planner.address
    assert process_id is not None
    leading, *others = four.exchanges
    leading.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, PATIENCE_S)
    time.sleep(0.2)
    for exchange in others:
        exchange.leave()
        assert exchange.decision(four.iteration) == latest.kept()
        exchange.post(four.iteration, four.job.measure(0.0)[1])
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
