# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from testing.faults.network.link_faults import LinkFault, parse_link_fault
from testing.training.conditions import faults_of_pipeline
from testing.training.training_arguments import TrainingArgumentsError


def test_a_rank_delays_what_its_own_pipeline_sends() -> None:
    everywhere = LinkFault(source=0, target=1, latency_s=1.0)
    (second,) = parse_link_fault("2>3:latency_ms=60,pipeline=1")
    faults = [everywhere, second]
    assert faults_of_pipeline(faults, 0, stages=4, pipelines=2) == [everywhere]
    assert faults_of_pipeline(faults, 1, stages=4, pipelines=2) == faults


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("3>4:latency_ms=60", "link 3>4 is to be slow, but there are stages 0 to 3"),
        ("2>3:latency_ms=60,pipeline=2", "in pipeline 2; .* here 0 to 1"),
    ],
)
def test_a_link_that_is_not_there_is_refused(text: str, message: str) -> None:
    with pytest.raises(TrainingArgumentsError, match=message):
        faults_of_pipeline(parse_link_fault(text), 0, stages=4, pipelines=2)
