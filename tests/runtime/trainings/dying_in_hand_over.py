# SPDX-License-Identifier: Apache-2.0
"""`scripts/train_gpt.py` in which a rank dies as parameters are handed over: `source RANK` or `newcomer`, then its
arguments. Each dies once."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from adaptra_megatron.job.membership import START_VARIABLE
from adaptra_megatron.runtime import rejoining

TRAIN_GPT = str(Path(__file__).parents[3] / "scripts/train_gpt.py")


def dying(carry: Callable[..., Any]) -> Callable[..., Any]:
    """`carry`, before which this process dies."""

    def die(*_given: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    return die


if __name__ == "__main__":
    who, *arguments = sys.argv[1:]
    starts = int(os.environ.get(START_VARIABLE, "0"))
    if who == "newcomer":
        if starts == 1:
            rejoining._receive_whole = dying(rejoining._receive_whole)
    elif os.environ["RANK"] == who and not starts:
        rejoining._send = dying(rejoining._send)
    sys.argv = [TRAIN_GPT, *arguments]
    runpy.run_path(TRAIN_GPT, run_name="__main__")
