# SPDX-License-Identifier: Apache-2.0
"""Three steps of a production job, whose last stage is known to be too long (see production/README.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

from adaptra_megatron.tools.recordings.reading import read_recording
from adaptra_megatron.tools.replay.analysis import analyse
from adaptra_megatron.tools.replay.analysis_wording import headline

TRACE = Path(__file__).parent / "production" / "trace-ST-3-steps.parquet"
PUBLISHED_PROMPT_S = {34: 2.0583, 36: 2.0898, 259: 2.1687}
"""Steps without launch delays, as the authors of the trace replay them."""


def test_a_production_job_is_replayed_and_its_straggler_named() -> None:
    pytest.importorskip("pyarrow")
    analysis = analyse(read_recording(TRACE))
    found = analysis.stragglers
    assert max(map(abs, found.replay_errors)) < 0.001
    assert dict(zip(found.numbers, found.prompt_s, strict=True)) == pytest.approx(PUBLISHED_PROMPT_S, rel=0.002)
    assert headline(analysis).endswith("a long last stage")
    assert max(analysis.slowness.values()) < 1.05
    assert found.last_stage_share > 1.0
    assert "exchange" not in {remedy.key for remedy in analysis.remedies.rows}
