# SPDX-License-Identifier: Apache-2.0
"""What a detector says of one link and of stages, case by case; transfer times in milliseconds."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.made_up.links import MIB, SyntheticJob

from adaptra_megatron.control.detector.detector import Detector
from adaptra_megatron.control.detector.observations import (
    ChangeSettings,
    DetectorSettings,
    Finding,
    IterationSample,
    LinkId,
    LinkSample,
    MessageSample,
    StageId,
    StageSample,
    State,
)
from adaptra_megatron.control.detector.series import Batch, FlapDamper, Series

LINK = LinkId(0, 0, 1, "device")
COUNT = 32
H, S, D = "healthy", "slow", "dead"


def messages(transfer_ms: float, count: int = COUNT, slow: Sequence[int] = (), slow_ms: float = 500.0) -> LinkSample:
    """Sent 20 ms apart, with half a millisecond of ripple; those numbered `slow` take `slow_ms`."""
    taken_ms = [slow_ms if index in slow else transfer_ms + 0.1 * (index * 7 % 6) for index in range(count)]
    return LinkSample.of([MessageSample(MIB, 0.02 * i, 0.02 * i + ms / 1e3, 0.0) for i, ms in enumerate(taken_ms)])


BROKEN = LinkSample(broken="no route to host")
LOST = LinkSample.of([MessageSample(MIB, 0.02 * index, None) for index in range(COUNT)])
OK, SLOW = messages(2.0), messages(32.0)
CHECKPOINT = messages(2.0, slow=range(COUNT), slow_ms=80.0)


class Watched:
    """A detector of one link, and what it has said by iteration."""

    def __init__(self, settings: DetectorSettings | None = None) -> None:
        self.detector = Detector(settings)
        self.iteration = 0
        self.said: list[tuple[int, str]] = []
        self.findings: list[Finding] = []

    def see(self, *samples: LinkSample, disturbance: str | None = None) -> Watched:
        for sample in samples:
            found = self.detector.observe(IterationSample(self.iteration, {LINK: sample}, disturbance=disturbance))
            self.findings += found
            self.said += [(self.iteration, finding.state.value) for finding in found]
            self.iteration += 1
        return self

    @property
    def state(self) -> State:
        return self.detector.estimates().links[LINK].state


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([OK] * 20, []),
        ([OK] * 10 + [SLOW] * 5, [(10, S)]),
        ([OK] * 10 + [SLOW] * 5 + [OK] * 3, [(10, S), (15, H)]),
        ([OK] * 10 + [messages(2.0, slow=[5])] * 10, []),
        ([OK] * 10 + [messages(2.0, slow=range(0, COUNT, 4))] + [OK] * 10, []),
        ([OK] * 10 + [messages(2.0, slow=range(12, COUNT), slow_ms=32.0), SLOW, SLOW], [(11, S)]),
        ([OK] * 10 + [messages(2.0, slow=range(12, COUNT), slow_ms=32.0)] + [OK] * 9, []),
        ([OK] * 10 + [messages(32.0, 4), messages(32.0, 4)], [(11, S)]),
        ([OK] * 10 + [messages(32.0, 2)] * 9, []),
        ([OK] * 10 + [LinkSample()] * 9 + [OK], []),
        ([OK] * 10 + [messages(2.3)] * 9, []),
        ([OK] * 10 + [SLOW] * 4 + [messages(62.0)] * 4 + [OK] * 2, [(10, S), (14, S), (18, H)]),
        ([OK] * 10 + [BROKEN] * 3 + [OK] * 3, [(10, D), (14, H)]),
        ([OK] * 10 + [LOST] * 3 + [SLOW] * 3, [(10, D), (14, S)]),
        ([OK] * 10 + [BROKEN, OK, BROKEN, OK, OK, OK, OK, OK], [(10, D), (14, H)]),
        ([SLOW] * 10 + [OK] * 10, [(10, H)]),
        ([OK] * 10 + [SLOW] * 5 + [messages(2.4)] * 3, [(10, S), (15, H)]),
        ([OK] * 10 + [messages(4.0)] * 5 + [messages(2.4)] * 3, [(10, S), (15, S)]),
    ],
    ids=[
        "steady", "onset", "recovery", "one-message", "pause", "onset-half-way", "half-an-iteration-once",
        "few-messages", "too-few-messages", "silence", "immaterial", "worse", "broken", "lost",
        "broken-again", "better-than-ever", "nearly-as-before", "hovering",
    ],
)  # fmt: skip
def test_a_link(samples: list[LinkSample], said: list[tuple[int, str]]) -> None:
    assert Watched().see(*samples).said == said


def test_one_disturbed_iteration_changes_nothing() -> None:
    mixed = messages(2.0, slow=range(1, COUNT, 2), slow_ms=90.0)
    watched = Watched().see(*[OK] * 10, mixed, OK, OK, mixed, OK, OK)
    watched.see(CHECKPOINT, disturbance="checkpoint save").see(OK)
    assert watched.said == []
    assert watched.detector.estimates().links[LINK].transfer_s < 0.003
    assert watched.see(BROKEN, disturbance="evaluation").said == [(18, D)]


def test_each_relapse_makes_a_recovery_take_longer() -> None:
    watched = Watched().see(*[OK] * 10)
    lengths = []
    for _ in range(4):
        watched.see(SLOW, SLOW)
        assert watched.state is State.SLOW
        begin = watched.iteration
        while watched.state is not State.HEALTHY:
            watched.see(OK)
        lengths.append(watched.iteration - begin)
    assert lengths == [1, 4, 8, 16]
    watched.see(*[OK] * 60, SLOW, SLOW, OK)
    assert watched.state is State.HEALTHY, "relapses long ago are forgiven"


def test_a_link_that_is_slow_every_other_iteration_is_slow() -> None:
    watched = Watched().see(*[OK] * 10, *[messages(32.0, 5), messages(2.0, 5)] * 4)
    assert watched.said == [(16, S)]


def test_a_level_that_creeps_up_is_found() -> None:
    watched = Watched().see(*[OK] * 40, *[messages(2.0 + 0.02 * step) for step in range(200)])
    assert [state for _, state in watched.said] == [S]
    assert "risen slowly" in watched.findings[0].reason
    assert watched.see(*[OK] * 40).said[-1][1] == H


def test_a_finding_says_why_in_numbers_and_goes_into_a_log() -> None:
    (finding,) = Watched().see(*[OK] * 10, SLOW).findings
    assert str(finding) == (
        "link 0->1 of pipeline 0, device path: slow since iteration 10, a message of 1 MiB takes 32.2 ms, "
        "before 2.2 ms (baseline 2.2 ms, of 9 iterations up to 9); seen in nearly all messages of the iteration alike"
    )
    document = json.loads(json.dumps(finding.to_json()))
    assert document["subject"] == {"kind": "link", "pipeline": 0, "source": 0, "target": 1, "path": "device"}
    assert (document["before"], document["state"], document["since_iteration"]) == (H, S, 10)
    (dead,) = Watched().see(*[OK] * 10, BROKEN).findings
    assert "no route to host" in str(dead)


def test_what_was_first_measured_on_a_slow_link_is_not_called_before() -> None:
    """The host path's first messages come when the cable is slow already, and it gets slower."""
    host, back = LINK._replace(path="host"), LinkId(0, 1, 0, "host")
    device = [OK] * 10 + [SLOW] * 30
    paths = {host: [messages(30.0)] * 10 + [messages(60.0)] * 5, back: [OK] * 10 + [messages(60.0)] * 5}
    detector, said = Detector(), {}
    for iteration, sample in enumerate(device):
        later = {link: seen[iteration - 20] for link, seen in paths.items() if 0 <= iteration - 20 < len(seen)}
        for finding in detector.observe(IterationSample(iteration, {LINK: sample, **later})):
            said[finding.subject] = finding.reason
    assert re.match(r"a message of 1 MiB takes \S+ ms, before 2\S* ms \(baseline", said[LINK])
    for link, first in ((host, "30"), (back, "2")):
        reason = said[link]
        assert re.match(rf"\D+1 MiB takes 60\S* ms, {first}\S* ms when it was first measured, while the link", reason)
        assert "before" not in reason
        assert "baseline" not in reason


def test_messages_of_another_size_are_no_change_of_the_link() -> None:
    watched = Watched().see(*[OK] * 10)
    larger = LinkSample(SLOW.messages._replace(nbytes=np.full(COUNT, 8.0 * MIB)))
    assert watched.see(*[larger] * 10).said == []
    assert watched.detector.estimates().links[LINK].nbytes == 8 * MIB


def test_receives_posted_late_say_nothing() -> None:
    late = LinkSample(SLOW.messages._replace(posted_s=SLOW.messages.sent_s + 0.001))
    assert Watched().see(*[OK] * 10, *[late] * 5).said == []
    seen_anyhow = LinkSample(SLOW.messages._replace(posted_s=np.full(COUNT, np.nan)))
    assert Watched().see(*[OK] * 10, seen_anyhow).said == [(10, S)]


def test_clocks_that_drift_apart_are_not_a_slow_link() -> None:
    detector, back = Detector(), LinkId(0, 1, 0, "device")
    for iteration in range(60):
        drift_s = 0.001 * max(0, iteration - 20)
        forth = OK.messages._replace(arrived_s=OK.messages.arrived_s + drift_s)
        returning = OK.messages._replace(sent_s=OK.messages.sent_s + drift_s, posted_s=np.full(COUNT, -1.0))
        found = detector.observe(IterationSample(iteration, {LINK: LinkSample(forth), back: LinkSample(returning)}))
        assert [finding for finding in found if finding.level_s is not None and finding.level_s > 0.006] == []
    estimate = detector.estimates().links[LINK]
    assert estimate.transfer_s < 0.006
    assert estimate.clock_correction_s > 0.03


def test_a_link_that_was_slow_from_the_start_is_told_by_its_peers() -> None:
    job, detector = SyntheticJob(3), Detector()
    job.set_link(1, 2, latency_s=0.06)
    findings = [finding for _ in range(8) for finding in detector.observe(job.sample())]
    assert [(finding.subject, finding.state) for finding in findings] == [(LinkId(0, 1, 2, "device"), State.SLOW)]
    assert "5 others" in findings[0].reason
    job.links.clear()
    assert [finding.state for _ in range(2) for finding in detector.observe(job.sample())] == [State.HEALTHY]


PROBED = [LinkId(0, source, source + 1, "host") for source in range(4)]


def probe_path(probes_ms: Sequence[Sequence[float]]) -> list[tuple[int, State]]:
    """Return the findings, by iteration, about a path whose few probes take `probes_ms`, of others always 0.2 ms."""
    detector, found = Detector(), []
    for iteration, taken_ms in enumerate(probes_ms):
        of_each = [taken_ms, *[[0.2] * len(taken_ms)] * 3]
        links = {
            link: LinkSample.of([MessageSample(MIB, 0.02 * i, 0.02 * i + ms / 1e3, 0.0) for i, ms in enumerate(probes)])
            for link, probes in zip(PROBED, of_each, strict=True)
        }
        found += detector.observe(IterationSample(iteration, links, {}))
    assert {finding.subject for finding in found} <= {PROBED[0]}
    return [(finding.iteration, finding.state) for finding in found]


@pytest.mark.parametrize(
    ("probes_ms", "found"),
    [
        ([[3.2, 3.2, 3.3]] * 10, [(3, State.SLOW)]),
        ([[0.2] * 3, [3.2, 0.2, 3.3], [3.2, 3.3, 0.1], [3.2, 0.2, 0.2], *[[0.2, 0.1, 0.2]] * 9], []),
        ([[5.5, 2.5, 0.4], [5.5, 2.5, 0.4], [1.5, 1.7, 0.2], [1.6, 0.4, 0.1], *[[0.2, 0.1, 0.2]] * 9], []),
        ([[1.2, 1.7, 2.5]] * 10, [(5, State.SLOW)]),
    ],
    ids=["slow", "some-late", "measured", "slow-and-noisy"],
)
def test_probes_that_wait_for_a_core_make_no_path_slow_from_the_start(
    probes_ms: list[list[float]], found: list[tuple[int, State]]
) -> None:
    """On a busy host some of the few probes are late by milliseconds: by chance those of two iterations of three."""
    assert probe_path(probes_ms) == found


def test_a_level_of_nothing_may_be_slower_than_its_peers() -> None:
    """Clock correction can yield a message time of 0 s, and negative times on other links."""
    settings = DetectorSettings()
    series = Series(settings, settings.link, FlapDamper(settings))
    for iteration in range(settings.settling_iterations):
        series.observe(Batch(iteration, np.zeros(3)), 0.0)
    assert series.declare_slow(0.0, 3, "comparison").state is State.SLOW


def test_a_stage_that_was_slow_from_the_start_is_told_by_its_replicas() -> None:
    detector = Detector()
    samples = {
        StageId(pipeline, 1): StageSample({("F", 0): [0.014 if pipeline == 2 else 0.01]}) for pipeline in range(4)
    }
    findings = [finding for k in range(6) for finding in detector.observe(IterationSample(k, {}, samples))]
    assert [(finding.subject, finding.state) for finding in findings] == [(StageId(2, 1), State.SLOW)]


@pytest.mark.parametrize(
    ("layers", "slow"),
    [
        (["2 layers"] * 5, [4]),
        (["2 layers"] * 4 + ["5 layers"], []),
        (["0 layers", "0 layers", "2 layers", "2 layers", "5 layers"], []),
        (["1 layers"] * 4 + ["1 layers, mtp"], []),
        (["0 layers, embedding", *["1 layers"] * 3, "0 layers, loss"], []),
        ([], [4]),
    ],
)
def test_stages_of_one_pipeline_are_compared_where_they_do_the_same_work(layers: list[str], slow: list[int]) -> None:
    """In uneven pipelines (layouts, multi-token prediction) some take longer, and are not slow."""
    detector = Detector()
    samples = {
        StageId(0, stage): StageSample({("B", 0): [0.025 if stage == 4 else 0.01]}, work=layers[stage : stage + 1])
        for stage in range(5)
    }
    findings = [finding for k in range(8) for finding in detector.observe(IterationSample(k, {}, samples))]
    assert [finding.subject for finding in findings] == [StageId(0, stage) for stage in slow]
    for finding in findings:
        assert "takes 25 ms, others 10 ms; seen in comparison with 4 others of its pipeline" in finding.reason


def test_a_stage_is_judged_by_medians_too_and_may_be_lost() -> None:
    detector, stage = Detector(), StageId(0, 0)
    said = []
    seen = [10.0, 10.2, 9.9, 10.1] * 5 + [30.0] + [10.0, 10.1] * 2 + [13.0] * 3 + [10.0] * 3
    for iteration, milliseconds in enumerate(seen):
        sample = StageSample({("F", 0): [milliseconds / 1e3], ("B", 0): []})
        said += detector.observe(IterationSample(iteration, {}, {stage: sample}))
    assert [(finding.iteration, finding.state) for finding in said] == [(26, State.SLOW), (29, State.HEALTHY)]
    (lost,) = detector.observe(IterationSample(99, {}, {stage: StageSample(lost="its process is gone")}))
    assert (lost.state, lost.reason) == (State.DEAD, "its process is gone")
    (back,) = detector.observe(IterationSample(100, {}, {stage: StageSample({("F", 0): [0.01]})}))
    assert back.state is State.HEALTHY


BASE_MS = {("F", 0): 3.3, ("I", 0): 4.0, ("W", 0): 2.0}


def watch_stage(factors: Sequence[Sequence[float]]) -> list[Finding]:
    """What is said of a stage whose F, I and W take `factors[iteration]` times their usual time."""
    detector, stage, said = Detector(), StageId(0, 1), []
    for iteration, of_kinds in enumerate(factors):
        ripple = 1.0 + 0.01 * (iteration % 3)
        durations = {
            key: [base_ms / 1e3 * factor * ripple] * 4
            for (key, base_ms), factor in zip(BASE_MS.items(), of_kinds, strict=True)
        }
        said += detector.observe(IterationSample(iteration, {}, {stage: StageSample(durations)}))
    return said


def test_a_stage_of_which_a_part_heals_is_told_by_what_is_still_slow() -> None:
    healthy, slow, rest = (1.0, 1.0, 1.0), (5.4, 1.0, 4.0), (1.0, 1.0, 4.0)
    began, still, healed = watch_stage([healthy] * 12 + [slow] * 8 + [rest] * 8 + [healthy] * 8)
    assert (began.state, began.since_iteration, began.state_since_iteration) == (State.SLOW, 12, 12)
    assert str(began).startswith("stage 1 of pipeline 0: slow since iteration 12, F of chunk 0 takes 18 ms, before 3.")
    assert (still.before, still.state) == (State.SLOW, State.SLOW)
    assert (still.since_iteration, still.state_since_iteration) == (20, 12)
    assert "1 of pipeline 0: still slow since iteration 12, W of chunk 0 takes 8.08 ms, before 2.02 ms (" in str(still)
    assert re.search(r"; F of chunk 0 takes 3\.3\d* ms again since iteration 20, before 18 ms \(", str(still))
    assert still.level_s is not None
    assert still.baseline_s is not None
    assert still.level_s / still.baseline_s == pytest.approx(4.0, rel=0.05), "W's, not F's"
    assert (healed.state, healed.since_iteration, healed.state_since_iteration) == (State.HEALTHY, 28, 28)
    assert "healthy since iteration 28, W of chunk 0 takes 2.04 ms again, before 8.08 ms" in str(healed)


def test_a_level_that_moves_while_slow_moves_no_since() -> None:
    watched = Watched().see(*[OK] * 10, *[SLOW] * 4, *[messages(62.0)] * 4)
    assert [finding.state_since_iteration for finding in watched.findings] == [10, 10]
    assert "still slow since iteration 10, a message of 1 MiB takes 62.2 ms since iteration 14, before 32.2 ms" in str(
        watched.findings[1]
    )


SPANS = st.tuples(st.tuples(*[st.sampled_from([1.0, 0.5, 1.05, 2.0, 5.4])] * 3), st.integers(1, 9))


@given(st.lists(SPANS, max_size=8))
@settings(max_examples=60)
def test_a_stages_findings_quote_the_values_that_they_are_about(spans: list[tuple[tuple[float, ...], int]]) -> None:
    said = watch_stage([(1.0,) * 3] * 8 + [factors for factors, length in spans for _ in range(length)])
    states = [State.HEALTHY, *(finding.state for finding in said)]
    assert [finding.before for finding in said] == states[:-1]
    since = 0
    for finding in said:
        assert finding.state_since_iteration <= finding.since_iteration <= finding.iteration
        assert finding.state_since_iteration == (finding.since_iteration if finding.before != finding.state else since)
        since = finding.state_since_iteration
        assert finding.level_s is not None
        assert finding.baseline_s is not None
        if finding.state is State.HEALTHY:
            assert finding.level_s < 1.1 * finding.baseline_s
            continue
        assert finding.level_s > 1.04 * finding.baseline_s
        (quoted,) = re.findall(r"takes ([\d.]+) ms.*?\(baseline ([\d.]+) ms", finding.reason.partition(";")[0])
        assert float(quoted[0]) > float(quoted[1]), "a slow stage is not judged by what healed"


@given(st.lists(st.sampled_from([OK, SLOW, BROKEN, LOST, CHECKPOINT, LinkSample()]), max_size=40))
@settings(max_examples=40)
def test_findings_are_a_chain_of_states_that_ends_in_the_estimate(samples: list[LinkSample]) -> None:
    watched = Watched().see(*[OK] * 5, *samples)
    states = [State.HEALTHY, *(finding.state for finding in watched.findings)]
    assert [finding.before for finding in watched.findings] == states[:-1]
    assert watched.state is states[-1]
    assert Watched().see(*[OK] * 5, *samples).findings == watched.findings
    for finding in watched.findings:
        assert finding.state_since_iteration <= finding.since_iteration <= finding.iteration
        json.dumps(finding.to_json())


@given(st.lists(st.floats(0.0, 10.0), min_size=1, max_size=COUNT), st.floats(-50.0, 50.0))
@settings(max_examples=40)
def test_any_times_are_survived(transfers_s: list[float], offset_s: float) -> None:
    sample = LinkSample.of([MessageSample(MIB, 0.02 * i, 0.02 * i + s + offset_s) for i, s in enumerate(transfers_s)])
    watched = Watched().see(*[OK] * 5, *[sample] * 3)
    assert watched.detector.estimates().links[LINK].latency_s >= 0.0


def test_iterations_only_go_up() -> None:
    watched = Watched().see(OK, OK)
    with pytest.raises(ValueError, match="iteration 1 was observed after iteration 1"):
        watched.detector.observe(IterationSample(1))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"confirm_iterations": 0}, "confirm_iterations must be at least 1, got 0"),
        ({"min_messages": 2.5}, "min_messages must be a whole number"),
        ({"planning_quantile": 1.0}, "planning_quantile must be between 0 and 1"),
        ({"recurrent_iterations": 9}, "must not exceed"),
    ],
)
def test_settings_are_checked(wrong: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        DetectorSettings(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="peer_factor must be at least 1"):
        ChangeSettings(
            relative_shift=0.1, min_shift_s=0.0, single_iteration=True, replica_factor=1.0, peer_factor=float("nan")
        )


def test_a_bandwidth_is_not_claimed_for_what_was_seen_once() -> None:
    """Pairs that arrive 25 ms apart, as over a slow link, but only in one iteration of many."""
    pairs = [(0.1 * pair + 0.001 * late, 0.1 * pair + 0.055 + 0.025 * late) for pair in range(16) for late in (0, 1)]
    spaced = LinkSample.of([MessageSample(MIB, sent_s, arrived_s, 0.0) for sent_s, arrived_s in pairs])
    watched = Watched().see(*[messages(62.0)] * 10, spaced)
    assert watched.said == []
    assert watched.detector.estimates().links[LINK].bandwidth_bytes_per_s is None
    watched.see(*[spaced] * 7)
    assert watched.detector.estimates().links[LINK].occupancy_s(MIB) == pytest.approx(0.025, rel=0.05)
