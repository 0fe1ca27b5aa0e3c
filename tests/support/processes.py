# SPDX-License-Identifier: Apache-2.0
"""Multi-process tests: start ranks with a hard time limit, compare what they dumped.

    def test_something(start_ranks, tmp_path):
        start_ranks(4, [TRAIN_GPT, "--emulate-cpu", ..., "--dump-state", f"{tmp_path}/stock"], timeout_s=60)
        start_ranks(4, [TRAIN_GPT, "--emulate-cpu", ..., "--adaptra", "--dump-state", f"{tmp_path}/ours"], timeout_s=60)
        compare_dumps(tmp_path / "stock", tmp_path / "ours")

Several trainings in one set of processes: `testing.jobs.variants`.
"""

from __future__ import annotations

from pathlib import Path

from adaptra_megatron.tools.local_ranks.launch_ranks import LaunchError, RankResult, run_ranks

__all__ = ["REPOSITORY", "TRAIN_GPT", "LaunchError", "RankResult", "compare_dumps", "run_ranks"]

REPOSITORY = Path(__file__).parents[2]
TRAIN_GPT = str(REPOSITORY / "scripts" / "train_gpt.py")


def compare_dumps(expected: Path, actual: Path) -> int:
    """Bitwise comparison of the `--dump-state` directories of two runs. Returns the number of elements compared.

    Fails on missing dumps, empty content and any difference: the first differing tensor, its number of differing
    elements and the largest difference are named.
    """
    from testing.results import compare_directories

    return compare_directories(expected, actual)
