# SPDX-License-Identifier: Apache-2.0
"""A training process has a handful of Python threads, where it leads or has two neighbours too, and sends few calls
deep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from thread_ranks import FRAMES, THREADS

PROGRAM = str(Path(__file__).with_name("thread_ranks.py"))
IN_GLOO = "adaptra-device-receive-"
"""Threads in which gloo's waits block: one for each neighbour."""
FOR_A_WHILE = {"adaptra-connecting", "adaptra-meet", "adaptra-blocking", "adaptra-polls", "adaptra-storing"}
OF_LINKS = {"adaptra-connections", "adaptra-links-receive", "adaptra-links-send"}
"""For any number of peers: tests/transport/test_links_between_pipelines.py counts them with three."""
MOST = 5
"""The main thread included; besides those in gloo."""
MOST_FRAMES = 7


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("ranks", "stages", "iterations"), [(3, 3, 8), (4, 2, 24)], ids=["interior", "replicas"])
def test_ranks_have_few_threads_and_frames(
    ranks: int, stages: int, iterations: int, start_ranks: Callable[..., Any]
) -> None:
    """Leaders too, and where replicas are compared: the threads that do so look, and end."""
    arguments = (
        f"--pipeline-model-parallel-size {stages} --num-layers {stages} --global-batch-size {6 * ranks // stages} "
        "--mock-data --hidden-size 32 --no-gradient-accumulation-fusion --seq-length 16 "
        f"--train-iters {iterations}"
    )
    results = start_ranks(ranks, [PROGRAM, *arguments.split()], timeout_s=120.0)
    for rank, result in enumerate(results):
        output = result.output.splitlines()
        names, (frames,) = (
            next(each.removeprefix(what) for each in output if each.startswith(what)).split()
            for what in (THREADS, FRAMES)
        )
        assert int(frames) <= MOST_FRAMES
        standing = [name for name in names if not name.startswith(IN_GLOO) and name not in FOR_A_WHILE]
        assert set(standing) >= OF_LINKS
        assert ("adaptra-lead" in standing) == (rank < ranks // stages)
        assert len(["MainThread", *standing]) <= MOST, (rank, names)
