# SPDX-License-Identifier: Apache-2.0
"""Which stages dispatch online in which iteration, what their peers follow, and what is done without known arrivals."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from typing import Any

import pytest
import torch

from adaptra_megatron.config import AdaptraConfig, ConfigError
from adaptra_megatron.engine import dispatch
from adaptra_megatron.engine.dispatch import Dispatcher, count_moved
from adaptra_megatron.engine.execution.inbox import Addresses, Inbox
from adaptra_megatron.engine.execution.stage_program import Program, ProgramStep, compile_program
from adaptra_megatron.schedule.classic import split_backward, stock_order
from adaptra_megatron.schedule.ir import Kind
from adaptra_megatron.telemetry.action_records import ActionRecord, ArrivalRecord
from adaptra_megatron.transport.link_paths import Path
from adaptra_megatron.transport.message_keys import Direction, MessageKey, TransportError

STAGE, MICRO_BATCHES, CAP = 1, 4, 4
CPU = torch.device("cpu")


def program() -> Program:
    return compile_program(split_backward(stock_order(3, MICRO_BATCHES), 0), STAGE)


class Links:
    """A transport whose messages arrive when the test says so, or, while the rank waits, the next that is to come."""

    def __init__(self, *, last_receive_path: dict[int, Path] | None = None, blind: Collection[int] = ()) -> None:
        self.paths = last_receive_path or {}
        self.blind = set(blind)
        self.here: set[MessageKey] = set()
        self.to_come: deque[MessageKey] = deque()
        self.posted: list[MessageKey] = []
        self.waits: list[tuple[set[MessageKey], float]] = []
        """What was waited for, and for how long at most."""

    def can_poll(self, peer: int) -> bool:
        return peer not in self.blind

    def last_receive_path(self, peer: int) -> Path:
        return self.paths.get(peer, Path.DEVICE)

    def post_receive(self, key: MessageKey, peer: int) -> None:
        self.posted.append(key)

    def ready(self, key: MessageKey) -> bool:
        assert key in self.posted
        return key in self.here

    def wait_any(self, keys: Collection[MessageKey], until_s: float) -> bool:
        assert set(keys) <= set(self.posted)
        patience_s = until_s - time.monotonic()
        self.waits.append((set(keys), patience_s))
        if not self.here.isdisjoint(keys):
            return True
        if patience_s < 1.0:
            return False
        while self.to_come:
            self.here.add(self.to_come.popleft())
            if not self.here.isdisjoint(keys):
                return True
        return False

    def wait(self, key: MessageKey, deadline_s: float) -> torch.Tensor:
        if key not in self.here:
            raise TransportError(f"{key} never came")
        return torch.zeros(1)


class Team:
    """Both ends of a team of two."""

    def __init__(self, *, leads: bool, said: list[int] | None = None) -> None:
        self.leads = leads
        self.said = said or []
        self.settled = 0

    def publish(self, number: int) -> None:
        self.said.append(number)

    def follow(self) -> int:
        return self.said.pop(0)

    def settle(self) -> None:
        self.settled += 1


ADDRESSES = Addresses((0, 1, 2, 3), 0)


def key(name: str) -> MessageKey:
    """F2: the activation that the forward of micro-batch 2 needs; B2: the gradient."""
    direction = Direction.ACTIVATION if name[0] == "F" else Direction.GRADIENT
    return MessageKey(0, direction, 0, int(name[1:]))


def keys(text: str) -> list[MessageKey]:
    return [key(name) for name in text.split()]


def dispatcher(mode: str, links: Any, team: Any = None) -> Dispatcher:
    return Dispatcher(mode, links, team, CPU, timeout_s=20.0, ranks=ADDRESSES.ranks)


def run(made: Dispatcher, links: Any) -> list[ProgramStep]:
    inbox = Inbox(links, program(), ADDRESSES, timeout_s=20.0)
    return list(made.steps(program(), CAP, 0.0)(inbox))


def names(steps: list[ProgramStep]) -> str:
    letters = {Kind.BACKWARD_INPUT: "B"}
    return " ".join(f"{letters.get(step.action.kind, step.action.kind)}{step.action.micro_batch}" for step in steps)


PLAN = "F0 F1 B0 W0 F2 B1 W1 F3 B2 W2 B3 W3"
IN_PLANNED_ORDER = "F0 F1 B0 F2 B1 F3 B2 B3"
GRADIENTS_LATE = "F0 F1 F2 F3 B0 B1 B2 B3"


def links_with(order: str, **how: Any) -> Links:
    links = Links(**how)
    links.to_come.extend(keys(order))
    return links


HOST, DEVICE = Path.HOST, Path.DEVICE


@pytest.mark.parametrize(
    ("mode", "last_receive_path", "blind", "unsteady", "online"),
    [
        ("planned", {0: HOST, 2: HOST}, (), (0, 2), False),
        ("auto", {0: DEVICE, 2: DEVICE}, (), (0, 2), False),
        ("auto", {0: HOST, 2: DEVICE}, (), (0,), True),
        ("auto", {0: HOST, 2: DEVICE}, (), (2,), False),
        ("auto", {0: HOST, 2: HOST}, (), (), False),
        ("auto", {0: HOST, 2: DEVICE}, (2,), (0,), False),
        ("online", {0: DEVICE, 2: DEVICE}, (), (), True),
        ("online", {0: DEVICE, 2: DEVICE}, (0,), (), False),
    ],
)
def test_who_is_online(
    mode: str, last_receive_path: dict[int, Path], blind: tuple[int, ...], unsteady: tuple[int, ...], online: bool
) -> None:
    links = links_with(GRADIENTS_LATE, last_receive_path=last_receive_path, blind=blind)
    made = dispatcher(mode, links)
    for moment in range(4):
        arrivals = [
            ArrivalRecord(moment, source, STAGE, "F", 0, number, number + number * moment * (source in unsteady))
            for source in (0, 2)
            for number in range(MICRO_BATCHES)
        ]
        made.ran(program().steps, records(1.0), arrivals)
    assert names(run(made, links)) == ("F0 F1 F2 F3 B0 W0 B1 W1 B2 W2 B3 W3" if online else PLAN)
    assert made.online_iterations == online


def test_what_was_aborted_follows_the_plan_until_it_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    made_teams: list[Any] = []
    monkeypatch.setattr(dispatch, "StageTeam", lambda *_: made_teams.append(Team(leads=True)) or made_teams[-1])
    links = links_with(GRADIENTS_LATE)
    team: Any = Team(leads=True)
    team.abort = lambda: None
    made, anywhere = dispatcher("online", links, team), Any
    made.resume(anywhere, anywhere)
    assert not made_teams, "nothing had been given up"
    made.abort()
    assert names(run(made, links_with(""))) == PLAN
    made.resume(anywhere, anywhere)
    assert names(run(made, links)) == "F0 F1 F2 F3 B0 W0 B1 W1 B2 W2 B3 W3"
    assert made_teams[0].said, "the new team follows"


def test_the_log_says_when_a_stage_leaves_its_plan_and_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="adaptra_megatron")
    links = links_with("", last_receive_path={0: HOST, 2: HOST})
    made = dispatcher("auto", links)
    for moment in [0] * 2 + list(range(6)) + [0] * 6:
        made.steps(program(), CAP, 0.0)
        arrivals = [
            ArrivalRecord(moment, 2, STAGE, "B", 0, number, number * (1.0 + moment)) for number in range(MICRO_BATCHES)
        ]
        made.ran(program().steps, records(1.0), arrivals)
    reported = [record.getMessage() for record in caplog.records]
    assert reported == [
        "adaptra: stage 1: switching to online dispatch: messages of stage 2 arrive at irregular times",
        "adaptra: stage 1 runs its plan again",
    ]


def test_while_nothing_is_late_the_plan_runs() -> None:
    links = links_with(IN_PLANNED_ORDER)
    links.here.update(links.to_come)
    made = dispatcher("online", links)
    steps = run(made, links)
    assert names(steps) == PLAN
    assert count_moved(steps) == 0


def test_followers_run_what_the_leader_has_decided_and_the_plan_where_it_says_so() -> None:
    for mode, online in (("online", True), ("auto", False)):
        links, team = links_with(GRADIENTS_LATE), Team(leads=True)
        leader = dispatcher(mode, links, team)
        led = run(leader, links)
        assert len(team.said) == (1 + len(led) if online else 1)
        blind = Links(blind=(0, 2))
        follower = dispatcher(mode, blind, Team(leads=False, said=team.said))
        assert run(follower, blind) == led
        assert follower.online_iterations == leader.online_iterations == online
        for each in (leader, follower):
            each.ran(led, records(1.0), [])
        assert team.settled == 1
        assert follower.moved_actions == leader.moved_actions == count_moved(led)
        assert bool(leader.moved_actions) == online


def test_where_arrivals_become_invisible_the_plan_says_what_to_wait_for() -> None:
    links = links_with("F0")
    made = dispatcher("online", links)
    inbox = Inbox(links, program(), ADDRESSES, timeout_s=20.0)  # type: ignore[arg-type]
    steps = made.steps(program(), CAP, 0.0)(inbox)
    assert names([next(steps)]) == "F0"
    links.blind.update((0, 2))
    assert names([next(steps) for _ in range(3)]) == "F1 B0 W0", "each but W0 is waited for by the stage that runs it"
    assert not any(key("F2") in waited for waited, _ in links.waits)


def test_silence_is_an_error_that_names_the_message() -> None:
    links = links_with("")
    with pytest.raises(TransportError, match="activation of micro-batch 0 .* never came"):
        run(dispatcher("online", links), links)


def test_the_plan_is_left_only_after_a_part_of_an_action() -> None:
    links = links_with(GRADIENTS_LATE)
    made = dispatcher("online", links)
    made.ran(run(made, links), records(0.2), [])
    links = links_with(GRADIENTS_LATE)
    run(made, links)
    patience = [(waited, patience_s) for waited, patience_s in links.waits if patience_s < 1.0]
    assert ({key("B0")}, pytest.approx(0.05 * 0.2, abs=1e-3)) in patience
    assert all(len(waited) == 1 for waited, _ in patience)


def records(seconds: float) -> list[ActionRecord]:
    return [ActionRecord(0, STAGE, "F", 0, 0, 0.0, 0.0, seconds)]


class Gpu:
    """One action after the other takes some looks at it."""

    LOOKS = 3

    def __init__(self) -> None:
        self.given = self.done = 0
        self.looks = 0
        self.idle_looks = 0

    def event(self) -> Event:
        self.given += 1
        return Event(self, self.given)


class Event:
    def __init__(self, gpu: Gpu, number: int) -> None:
        self.gpu, self.number = gpu, number

    def record(self) -> None:
        pass

    def query(self) -> bool:
        gpu = self.gpu
        gpu.looks += 1
        if gpu.done < gpu.given and gpu.looks % gpu.LOOKS == 0:
            gpu.done += 1
        return gpu.done >= self.number


def test_a_gpu_is_given_one_action_more_than_it_runs_and_time_to_leave_no_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu, ahead = Gpu(), []
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    links = links_with(IN_PLANNED_ORDER)
    arrives_after = {key: looks for looks, key in enumerate(links.to_come)}

    def wait_any(keys: Collection[MessageKey], until_s: float) -> bool:
        """Messages come while the GPU computes: each just before it would be out of work."""
        links.here.update(key for key in keys if gpu.looks >= gpu.LOOKS * arrives_after[key])
        return not links.here.isdisjoint(keys)

    monkeypatch.setattr(links, "wait_any", wait_any)
    made = Dispatcher("online", links, None, torch.device("cuda"), timeout_s=20.0, ranks=ADDRESSES.ranks)  # type: ignore[arg-type]
    inbox = Inbox(links, program(), ADDRESSES, timeout_s=20.0)  # type: ignore[arg-type]
    steps = []
    for step in made.steps(program(), CAP, 0.0)(inbox):
        steps.append(step)
        ahead.append(gpu.given - gpu.done)
    assert names(steps) == PLAN
    assert max(ahead) == 1, "besides the action that is handed over"


def test_what_came_before_its_turn_is_counted() -> None:
    steps = list(program().steps)
    assert count_moved(steps) == 0
    assert count_moved([steps[1], steps[0], *steps[2:]]) == 1
    assert count_moved([steps[3], steps[2], steps[0], steps[1], *steps[4:]]) == 2
    assert count_moved([]) == 0


@pytest.mark.parametrize("policy", ["observe", "off"])
def test_who_keeps_stocks_order_cannot_dispatch_online(policy: str) -> None:
    with pytest.raises(ConfigError, match=f"--adaptra-dispatch online .* --adaptra-policy {policy}"):
        AdaptraConfig(policy=policy, dispatch="online")


def test_an_unknown_way_to_dispatch_is_refused() -> None:
    with pytest.raises(ConfigError, match="--adaptra-dispatch is 'never'; it must be one of planned, auto, online"):
        AdaptraConfig(dispatch="never")


def test_online_is_refused_where_arrivals_are_never_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "current_device", lambda: torch.device("cuda", 0))
    anything: Any = None
    config = AdaptraConfig(dispatch="online", host_transport="off")
    with pytest.raises(ConfigError, match="--adaptra-dispatch online needs to see messages arrive"):
        dispatch.make_dispatcher(anything, anything, config, anything, 1.0)
