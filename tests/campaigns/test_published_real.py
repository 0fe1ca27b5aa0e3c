# SPDX-License-Identifier: Apache-2.0
"""A case like the published ones, but small, in real processes."""

from __future__ import annotations

from campaigns.published.cases import Case, Model, Published, StageTime
from campaigns.published.real import RealSystem, run_case
from testing.jobs.fork_server import ForkServer

NOTHING = Published(one_f_one_b_ms=None, zero_bubble_ms=None, host_path_ms=None, full_ms=None)


def test_all_systems_train_over_the_slow_link_with_stocks_numbers(fork_server: ForkServer) -> None:
    stage = StageTime(forward_ms=4.0, backward_input_ms=4.0, backward_weight_ms=2.0)
    case = Case(
        experiment="small",
        model=Model(name="two-stages", stages=(stage, stage), measured=True),
        links=((0, 1),),
        delay_ms=20.0,
        published=NOTHING,
        healthy=NOTHING,
    )
    real = run_case(case, fork_server)
    assert set(real.seconds) == set(real.pipeline_s) == {system.value for system in RealSystem}
    assert real.elements_compared > 0
    # 6 micro-batches, both ways: 3 systems for 4 iterations and 2 for 8.
    assert real.delayed_messages >= 6 * 2 * (2 * 4 + 4 + 2 * 8)
    assert 1.5 * real.healthy_bound_s < real.bound_s < real.seconds[RealSystem.FULL.value]
    assert real.most_in_flight[RealSystem.FULL.value] <= 4
    assert real.most_in_flight[RealSystem.FULL_LARGER.value] <= 6
