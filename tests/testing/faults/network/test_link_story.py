# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testing.faults.network.link_faults import LinkFault
from testing.faults.network.link_story import (
    FIRST_TURN,
    Direction,
    LinkFaultScenario,
    Turn,
    random_story,
    read_story,
)
from testing.faults.pauses import Pause, Pauses

stories = st.builds(
    random_story,
    st.integers(0, 1 << 32),
    iterations=st.integers(FIRST_TURN, 300),
    stages=st.integers(2, 8),
    micro_batches=st.integers(1, 16),
    action_s=st.floats(0.001, 0.1),
    pipelines=st.none() | st.lists(st.integers(0, 7), min_size=1, max_size=4, unique=True),
    host_share=st.floats(0.0, 1.0),
)


@given(stories)
def test_a_link_is_never_slow_twice_at_once(story: LinkFaultScenario) -> None:
    for direction in {turn.direction for turn in story.turns()}:
        spells = sorted(
            (spell.from_iteration, spell.until_iteration or story.iterations)
            for spell in story.faults
            if Direction(spell.source, spell.target, spell.pipeline) == direction
        )
        assert all(until <= begun for (_, until), (begun, _) in zip(spells[:-1], spells[1:], strict=True)), spells


@given(stories)
def test_turns_alternate_and_disturbances_keep_away_from_them(story: LinkFaultScenario) -> None:
    turns = story.turns()
    assert all(FIRST_TURN <= turn.iteration < story.iterations for turn in turns)
    for direction in {turn.direction for turn in turns}:
        slow = [turn.fault is not None for turn in turns if turn.direction == direction]
        assert slow == [index % 2 == 0 for index in range(len(slow))]
    assert not {turn.iteration + after for turn in turns for after in range(3)} & story.disturbed()


def test_a_long_story_has_everything(tmp_path: Path) -> None:
    story = random_story(1, iterations=400, stages=4, micro_batches=8, action_s=0.01, host_share=0.5)
    turns = story.turns()
    onsets = [turn.fault for turn in turns if turn.fault is not None]
    assert any(fault.latency_s for fault in onsets)
    assert any(fault.occupancy_s for fault in onsets)
    assert {len(fault.paths) for fault in onsets} == {1, 2}
    at = {
        turn.iteration: {other.fault is None for other in turns if other.iteration == turn.iteration} for turn in turns
    }
    assert {True, False} in at.values(), "a slow link moves"
    assert {True} in at.values()
    assert {False} in at.values()
    assert story.bursts
    assert {pause.micro_batch is None for pause in story.pauses} == {True, False}
    story.write(tmp_path / "story.json")
    assert read_story(tmp_path / "story.json") == story
    assert random_story(1, iterations=400, stages=4, micro_batches=8, action_s=0.01, host_share=0.5) == story


def test_turns_of_a_spell_that_another_follows() -> None:
    first = LinkFault(source=0, target=1, latency_s=1.0, from_iteration=10, until_iteration=20)
    second = LinkFault(source=0, target=1, latency_s=2.0, from_iteration=20, until_iteration=30)
    link = Direction(0, 1)
    assert LinkFaultScenario(iterations=40, spells=(second, first)).turns() == (
        Turn(10, link, first),
        Turn(20, link, second),
        Turn(30, link, None),
    )
    assert LinkFaultScenario(iterations=25, spells=(first, second)).turns()[-1] == Turn(20, link, second)


def test_a_stage_pauses_where_its_story_says(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("testing.faults.pauses.time", SimpleNamespace(sleep=slept.append))
    pauses = Pauses(
        [
            Pause(iteration=1, stage=0, seconds=1.0),
            Pause(iteration=1, stage=0, seconds=2.0, micro_batch=3),
            Pause(iteration=1, stage=1, seconds=4.0),
        ],
        stage=0,
    )
    for iteration in range(3):
        pauses.set_iteration(iteration)
        for micro_batch in range(5):
            pauses.forward(micro_batch)
    assert slept == [1.0, 2.0]
    assert pauses.made == 2
