# SPDX-License-Identifier: Apache-2.0
"""Why a replica comes last: by what its host shows and most others do not."""

from __future__ import annotations

from typing import Any

import pytest

from adaptra_megatron.control.detector.straggler_arrivals import HostFigures, Late
from adaptra_megatron.control.detector.straggler_causes import StragglerCauseKind, explain

LATE = Late(5, 2, 0.18, 18, 20, 130, 0.12, computes_s=0.0, data_s=0.0)
QUIET = HostFigures(others_cpu=0.02, own_cpu=0.5, stolen=0.0, queued=0.02, network=0.1, gpu_clock=0.95)


def kinds(own: dict[str, Any], others: dict[str, Any], late: Late = LATE) -> list[StragglerCauseKind]:
    return [cause.kind for cause in explain(late, HostFigures(**own), [HostFigures(**others)] * 3)]


def test_other_processes_on_the_cpus_are_named_with_what_to_do() -> None:
    (cause,) = explain(LATE, HostFigures(others_cpu=0.97), [QUIET] * 7)
    assert cause.text == "its host's CPUs are 97% busy with other processes"
    assert cause.kind.helped_by_pinning
    assert "CPUs of its own" in cause.remedy


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("others_cpu", 0.6, StragglerCauseKind.CPU),
        ("stolen", 0.2, StragglerCauseKind.CPU_STOLEN),
        ("throttled", 0.4, StragglerCauseKind.CPU_LIMIT),
        ("queued", 0.7, StragglerCauseKind.CPU_QUEUE),
        ("network", 0.97, StragglerCauseKind.NETWORK),
        ("network_errors_s", 400.0, StragglerCauseKind.NETWORK),
        ("memory_bytes_s", 3e11, StragglerCauseKind.MEMORY),
        ("gpu_slowed", "GPU 3 is slowed down for its temperature", StragglerCauseKind.GPU),
    ],
)
def test_each_figure_counts_where_it_is_other_than_elsewhere(field: str, value: Any, kind: StragglerCauseKind) -> None:
    assert kinds({field: value}, {}) == [kind]
    assert kinds({field: value}, {field: type(value)()}) == [kind]
    assert kinds({field: value}, {field: value}) == []
    assert kinds({field: type(value)()}, {}) == []


def test_a_gpu_with_a_lower_clock_than_others() -> None:
    assert kinds({"gpu_clock": 0.6}, {"gpu_clock": 0.95}) == [StragglerCauseKind.GPU]
    assert kinds({"gpu_clock": 0.6}, {"gpu_clock": 0.62}) == []
    assert kinds({"gpu_clock": 0.6}, {}) == []


def test_data_come_first_and_computing_last() -> None:
    late = LATE._replace(data_s=0.1, computes_s=0.15)
    assert kinds({"others_cpu": 0.9}, {}, late) == [
        StragglerCauseKind.DATA,
        StragglerCauseKind.CPU,
        StragglerCauseKind.COMPUTE,
    ]
    (cause,) = explain(LATE._replace(computes_s=0.15), None, [])
    assert cause.text == "its stage 2 computes 150 ms of an iteration longer than others'"
    assert explain(LATE, None, []) == []
