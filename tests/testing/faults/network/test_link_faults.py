# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptra_megatron.transport.link_paths import Path
from testing.faults.network.link_faults import LinkClock, LinkFault, LinkFaultError, parse_link_fault

times = st.floats(0, 10)
messages = st.lists(st.tuples(times, st.integers(0, 1000)), min_size=1, max_size=20).map(sorted)


@given(messages, times, times, times, st.integers(0, 5))
def test_messages_keep_their_order_and_their_distance(
    sent: list[tuple[float, int]], latency_s: float, occupancy_s: float, jitter_s: float, seed: int
) -> None:
    fault = LinkFault(source=0, target=1, latency_s=latency_s, occupancy_s=occupancy_s, jitter_s=jitter_s, seed=seed)
    clock = LinkClock(str(seed))
    free_s, last_s = 0.0, 0.0
    for now_s, nbytes in sent:
        arrival_s = clock.arrival_s(now_s, nbytes, fault)
        free_s = max(free_s, now_s) + occupancy_s
        assert arrival_s >= last_s
        assert arrival_s >= free_s + latency_s - 1e-9
        assert arrival_s <= max(free_s + latency_s + jitter_s, last_s) + 1e-9
        last_s = arrival_s


def test_bandwidth_is_shared_by_messages_in_turn() -> None:
    fault = LinkFault(source=0, target=1, latency_s=1.0, bandwidth_bytes_per_s=100.0)
    clock = LinkClock("")
    assert [clock.arrival_s(0.0, 50, fault) for _ in range(3)] == [1.5, 2.0, 2.5]
    assert clock.arrival_s(10.0, 100, fault) == 12.0


def test_message_without_fault_does_not_overtake() -> None:
    clock = LinkClock("")
    late_s = clock.arrival_s(0.0, 1, LinkFault(source=0, target=1, latency_s=5.0))
    assert clock.arrival_s(1.0, 1, None) == late_s
    assert clock.arrival_s(6.0, 1, None) == 6.0


def test_jitter_repeats_with_its_seed() -> None:
    fault = LinkFault(source=0, target=1, jitter_s=1.0)
    first, second, other = (
        [clock.arrival_s(float(now), 1, fault) for now in range(0, 20, 2)]
        for clock in (LinkClock("a"), LinkClock("a"), LinkClock("b"))
    )
    assert first == second != other


def test_parsing_both_ways() -> None:
    there, back = parse_link_fault("1-2:latency_ms=60,bandwidth_mbps=8,jitter_ms=5,from=10,until=20,seed=7")
    assert (there.source, there.target, back.source, back.target) == (1, 2, 2, 1)
    for fault in (there, back):
        assert fault.latency_s == pytest.approx(0.06)
        assert fault.jitter_s == pytest.approx(0.005)
        assert fault.message_occupancy_s(1_000_000) == pytest.approx(1.0)
        assert [fault.strikes(iteration) for iteration in (9, 10, 19, 20)] == [False, True, True, False]
        assert fault.seed == 7


def test_exponential_delays_have_their_mean_and_repeat_with_their_seed() -> None:
    fault = LinkFault(source=0, target=1, latency_s=1.0, exponential_s=0.5)
    first, second = (
        [clock.arrival_s(100.0 * number, 1, fault) - 100.0 * number for number in range(4000)]
        for clock in (LinkClock("a"), LinkClock("a"))
    )
    assert first == second
    assert min(first) >= 1.0
    assert statistics.fmean(first) == pytest.approx(1.5, abs=0.05)
    assert statistics.pstdev(first) == pytest.approx(0.5, rel=0.1)


def test_acknowledgements_take_the_latency_alone() -> None:
    fault = LinkFault(source=0, target=1, latency_s=1.0, occupancy_s=2.0, jitter_s=3.0, exponential_s=4.0)
    clock = LinkClock("a")
    assert clock.arrival_s(0.0, 0, fault.of_acknowledgements()) == 1.0


def test_paths_that_a_fault_strikes() -> None:
    struck = {
        text: parse_link_fault(f"0>1:latency_ms=1{text}")[0].paths
        for text in ("", ",path=device", ",path=host", ",path=both")
    }
    assert struck == {
        "": {Path.DEVICE},
        ",path=device": {Path.DEVICE},
        ",path=host": {Path.HOST},
        ",path=both": {Path.DEVICE, Path.HOST},
    }


def test_parsing_one_way() -> None:
    (fault,) = parse_link_fault("3>0:occupancy_ms=2")
    assert (fault.source, fault.target, fault.message_occupancy_s(1)) == (3, 0, 0.002)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1:latency_ms=1", "not written as"),
        ("1-2", "not written as"),
        ("1-1:latency_ms=1", "two different stages"),
        ("1-2:lateness_ms=1", "'lateness_ms' is none of"),
        ("1-2:latency_ms=fast", "'fast' is not a number"),
        ("1-2:latency_ms=-1", "must be 0 or more"),
        ("1-2:bandwidth_mbps=0", "must be above 0"),
        ("1-2:bandwidth_mbps=1,occupancy_ms=1", "not both"),
        ("1-2:from=5,until=5", "no iteration at all"),
        ("1-2:path=cable", "'cable' is not one of device, host, both"),
    ],
)
def test_wrong_text_is_refused(text: str, reason: str) -> None:
    with pytest.raises(LinkFaultError, match=reason):
        parse_link_fault(text)
