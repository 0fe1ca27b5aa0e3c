# SPDX-License-Identifier: Apache-2.0
"""Which path a link takes, and how often the other one is measured: pure decisions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptra_megatron.control.deciders.path_decider import GAIN_SHARE, PathDecider, Setting, choose, message_cost_s
from adaptra_megatron.control.decisions import LinkName
from adaptra_megatron.control.detector.observations import (
    Estimates,
    IterationSample,
    LinkEstimate,
    LinkId,
    LinkSample,
    State,
)
from adaptra_megatron.control.sidecar.planner_client import PathPolicy
from adaptra_megatron.schedule.costs import uniform_costs
from adaptra_megatron.transport.link_paths import Path, PathSettings

LINK = LinkName(0, 1, 2)
NBYTES = 1 << 20
MICRO_BATCHES = 24


def estimate(transfer_s: float, state: State = State.HEALTHY, bandwidth: float | None = None) -> LinkEstimate:
    return LinkEstimate(
        latency_s=transfer_s,
        bandwidth_bytes_per_s=bandwidth,
        transfer_s=transfer_s,
        nbytes=NBYTES,
        state=state,
        since_iteration=0,
        measured_iteration=0,
        reason="a test",
        clock_correction_s=0.0,
    )


def setting(preferred: Path = Path.DEVICE, *, device_blocks: bool = False, rendezvous: bool = False) -> Setting:
    return Setting(
        preferred=preferred,
        micro_batches=MICRO_BATCHES,
        action_s=0.01,
        period_s=0.03,
        device_blocks=device_blocks,
        rendezvous=rendezvous,
    )


estimates_strategy = st.builds(
    estimate,
    st.floats(0.0, 0.2),
    st.sampled_from(State),
    st.one_of(st.none(), st.floats(1e6, 1e11)),
)
both_strategy = st.dictionaries(st.sampled_from(Path), estimates_strategy)
path_strategy = st.sampled_from(Path)
setting_strategy = st.builds(setting, path_strategy, device_blocks=st.booleans(), rendezvous=st.booleans())


@given(path_strategy, both_strategy, setting_strategy)
def test_with_the_same_estimates_nothing_changes_twice(
    before: Path, estimates: Mapping[Path, LinkEstimate], setting: Setting
) -> None:
    choice = choose(LINK, before, estimates, setting)
    after = before if choice is None else choice.path
    assert choose(LINK, after, estimates, setting) is None


@given(path_strategy, both_strategy, setting_strategy)
def test_a_change_wins_or_goes_back_to_what_is_healthy(
    before: Path, estimates: Mapping[Path, LinkEstimate], setting: Setting
) -> None:
    choice = choose(LINK, before, estimates, setting)
    if choice is None:
        return
    assert choice.before is before
    assert choice.path is before.other
    costs_s = {path: message_cost_s(known, path, setting) for path, known in estimates.items()}
    assert choice.message_s == costs_s
    back = choice.path is setting.preferred and (
        estimates[choice.path].state is State.HEALTHY or costs_s.get(before, math.inf) == math.inf
    )
    assert back or costs_s[before] - costs_s[choice.path] >= GAIN_SHARE * costs_s[before]


@given(path_strategy, both_strategy, setting_strategy)
def test_no_link_goes_to_a_dead_path(before: Path, estimates: Mapping[Path, LinkEstimate], setting: Setting) -> None:
    choice = choose(LINK, before, estimates, setting)
    if choice is not None:
        assert estimates[choice.path].state is not State.DEAD


@given(estimates_strategy, st.floats(1.0, 10.0), setting_strategy)
def test_a_slower_other_path_is_no_more_attractive(device: LinkEstimate, factor: float, setting: Setting) -> None:
    """If a link stays where the other path takes some time, it stays where that takes longer."""
    preferred, other = setting.preferred, setting.preferred.other
    quick, slow = estimate(0.001), estimate(0.001 * factor)
    if choose(LINK, preferred, {preferred: device, other: quick}, setting) is None:
        assert choose(LINK, preferred, {preferred: device, other: slow}, setting) is None


def test_a_slow_path_is_left_and_taken_again_once_it_is_healthy() -> None:
    slow, quick = estimate(0.06, State.SLOW), estimate(0.002)
    choice = choose(LINK, Path.DEVICE, {Path.DEVICE: slow, Path.HOST: quick}, setting())
    assert choice is not None
    assert (choice.path, choice.gain_s) == (Path.HOST, pytest.approx(0.058))
    assert choice.reason == (
        "the device path is slow (a test); a message costs 60 ms on the device path, 2 ms on the host path"
    )
    healed = {Path.DEVICE: estimate(0.003), Path.HOST: quick}
    choice = choose(LINK, Path.HOST, healed, setting())
    assert choice is not None
    assert choice.path is Path.DEVICE, "though the other one is a little quicker"


@pytest.mark.parametrize(
    ("why", "device", "host"),
    [
        ("both are slow alike", estimate(0.06, State.SLOW), estimate(0.06, State.SLOW)),
        ("it gains too little", estimate(0.006, State.SLOW), estimate(0.0055)),
        ("nothing the schedule notices", estimate(0.0009, State.SLOW), estimate(0.0001)),
        ("it is not far worse", estimate(0.009), estimate(0.003)),
        ("far worse, of next to nothing", estimate(0.004), estimate(0.0002)),
        ("the other is dead", estimate(0.06, State.SLOW), estimate(0.001, State.DEAD)),
        ("both are dead", estimate(0.06, State.DEAD), estimate(0.001, State.DEAD)),
        ("the other is busier", estimate(0.02, State.SLOW), estimate(0.001, bandwidth=NBYTES / 0.05)),
    ],
)
def test_the_preferred_path_stays(why: str, device: LinkEstimate, host: LinkEstimate) -> None:
    assert choose(LINK, Path.DEVICE, {Path.DEVICE: device, Path.HOST: host}, setting()) is None, why


def test_what_is_unknown_is_not_taken() -> None:
    assert choose(LINK, Path.DEVICE, {Path.DEVICE: estimate(0.06, State.SLOW)}, setting()) is None
    assert choose(LINK, Path.DEVICE, {Path.HOST: estimate(0.001)}, setting()) is None


def test_what_was_never_better_is_left_if_it_is_far_worse() -> None:
    choice = choose(LINK, Path.DEVICE, {Path.DEVICE: estimate(0.06), Path.HOST: estimate(0.002)}, setting())
    assert choice is not None
    assert choice.path is Path.HOST


def test_a_lack_of_bandwidth_counts_for_every_message() -> None:
    """A link that is busy for longer than the slowest stage computes is behind by the difference with each message."""
    known = estimate(0.05, State.SLOW, bandwidth=NBYTES / 0.04)
    assert message_cost_s(known, Path.HOST, setting()) == pytest.approx(0.05 + MICRO_BATCHES * (0.04 - 0.03))


def test_a_message_in_front_of_computation_keeps_more_than_its_link_busy() -> None:
    blocked = setting(device_blocks=True)
    assert message_cost_s(estimate(0.05), Path.DEVICE, blocked) == pytest.approx(0.05 + MICRO_BATCHES * 0.04)
    assert message_cost_s(estimate(0.009), Path.DEVICE, blocked) == pytest.approx(0.009)
    assert message_cost_s(estimate(0.05), Path.HOST, blocked) == pytest.approx(0.05)
    estimates = {path: estimate(0.03, State.SLOW) for path in Path}
    assert choose(LINK, Path.DEVICE, estimates, setting()) is None
    assert getattr(choose(LINK, Path.DEVICE, estimates, blocked), "path", None) is Path.HOST


def test_a_path_that_carries_one_message_at_a_time_is_busy_for_as_long_as_each_takes() -> None:
    """The other one is on its way with several at once, unless it lacks bandwidth as much."""
    one = setting(rendezvous=True)
    assert message_cost_s(estimate(0.025), Path.DEVICE, one) == pytest.approx(0.025 + 0.015)
    assert message_cost_s(estimate(0.025), Path.HOST, one) == pytest.approx(0.025)
    assert message_cost_s(estimate(0.05), Path.DEVICE, one) == pytest.approx(0.05 + 0.04 + MICRO_BATCHES * 0.02)
    slow = {path: estimate(0.025, State.SLOW) for path in Path}
    assert getattr(choose(LINK, Path.DEVICE, slow, one), "path", None) is Path.HOST
    narrow = {path: estimate(0.025, State.SLOW, bandwidth=NBYTES / 0.025) for path in Path}
    assert choose(LINK, Path.DEVICE, narrow, one) is None


# How often the other path is measured.


def path_decider(preferred: Path = Path.DEVICE) -> PathDecider:
    untold: Any = None
    decider = PathDecider(PathPolicy(preferred=preferred), untold)
    decider.observe((), IterationSample(0, {LinkId(*LINK, preferred.value): LinkSample()}))
    return decider


def bursts(decider: PathDecider, known: Mapping[Path, LinkEstimate], iterations: int, iteration_s: float = 1.0) -> int:
    estimates = Estimates({LinkId(*LINK, path.value): one for path, one in known.items()}, {})
    return sum(len(decider.probed(estimates, MICRO_BATCHES, iteration_s)) for _ in range(iterations))


def test_while_all_is_well_few_messages_are_probes() -> None:
    known = {Path.DEVICE: estimate(0.001), Path.HOST: estimate(0.001)}
    decider = path_decider()
    share = bursts(decider, known, 1000) * PathSettings.measuring_probes / (1000 * MICRO_BATCHES)
    assert 0.002 <= share <= 0.0055
    quick = path_decider()
    assert bursts(quick, known, 1000, iteration_s=0.001) <= 4 + 1, "no more than one burst a second, but for the first"


def test_what_nothing_is_known_of_is_measured_at_once_but_not_for_ever() -> None:
    decider = path_decider()
    assert bursts(decider, {Path.DEVICE: estimate(0.001)}, 8) == 8
    assert bursts(decider, {Path.DEVICE: estimate(0.001)}, 24) == 0


def test_the_first_bursts_are_enough_to_judge_by() -> None:
    decider = path_decider()
    assert bursts(decider, {Path.DEVICE: estimate(0.001)}, 1) == 1
    assert bursts(decider, {Path.DEVICE: estimate(0.001), Path.HOST: estimate(0.001)}, 24) == 3


def test_what_is_to_heal_is_measured_in_every_iteration() -> None:
    decider = path_decider()
    known = {Path.DEVICE: estimate(0.06, State.SLOW), Path.HOST: estimate(0.001)}
    costs = uniform_costs(4, MICRO_BATCHES, forward_s=0.01, backward_input_s=0.01, backward_weight_s=0.01)
    estimates = Estimates({LinkId(*LINK, path.value): one for path, one in known.items()}, {})
    choices = decider.choices(estimates, costs)
    assert [choice.path for choice in choices] == [Path.HOST]
    assert decider.diverted == (), "not before it is decided"
    decider.take(choices, estimates)
    assert decider.diverted == (LINK,)
    assert decider.in_use({}, estimates) == {LINK: LinkId(*LINK, "host")}
    assert bursts(decider, known, 20) == 20


def test_while_both_are_slow_probes_are_few() -> None:
    decider = path_decider()
    known = {Path.DEVICE: estimate(0.06, State.SLOW), Path.HOST: estimate(0.06, State.SLOW)}
    bursts(decider, known, 4)
    share = bursts(decider, known, 200) * PathSettings.measuring_probes / (200 * MICRO_BATCHES)
    assert 0.02 <= share <= 0.055


def test_plans_are_made_for_what_carries_the_messages_where_a_path_is_dead_or_unknown() -> None:
    decider = path_decider()
    carried = {LINK: LinkId(*LINK, "host")}
    assert decider.in_use(carried, Estimates({}, {})) == carried
    dead = Estimates({LinkId(*LINK, "device"): estimate(0.001, State.DEAD)}, {})
    assert decider.in_use(carried, dead) == carried
