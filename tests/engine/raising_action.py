# SPDX-License-Identifier: Apache-2.0
"""A rank of a training in which one rank raises: `raising_action.py RANK ACTION TRAINING_ARGUMENTS...`.

The ACTIONth that RANK performs, from 0, raises; the log says when, by time.monotonic. Or ACTION is one of the script's
functions, "forward_step" or "loss", or its iterator, "data", which raises in the second iteration, as a connection of
its own would. The process ends as it ends; before that it cleans up, for CLEANS_UP_S seconds of the environment and,
where it is the one that raised, until the rank CLEANS_UP_UNTIL of the environment waits for its end.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testing.megatron.megatron_on_cpu import install

install(with_fused_weight_gradient=True)

import torch.distributed as dist  # noqa: E402  (Megatron on the CPU must be installed first)

from adaptra_megatron.elastic import job_abort  # noqa: E402
from adaptra_megatron.engine.execution import executor  # noqa: E402
from testing.training.train import Trainer, train  # noqa: E402
from testing.training.training_arguments import parse_arguments  # noqa: E402


def raise_in_action(rank: int, action: int) -> None:
    begin, begun = executor._begin, 0

    def raise_in_time(*arguments: Any) -> None:
        nonlocal begun
        begun += 1
        if dist.get_rank() == rank and begun == action + 1:
            sys.stdout.write(f"raised at {time.monotonic()}\n")
            raise ArithmeticError("as a model's own code would")
        begin(*arguments)

    executor._begin = raise_in_time


def raise_in_script(rank: int, function: str) -> None:
    forward_step, iterators = Trainer._forward_step, Trainer._iterators

    def refused(*_: Any) -> Any:
        raise dist.DistNetworkError("data server: connection refused, or timed out")

    def raising(self: Trainer, iterator: Any, chunk: Any) -> Any:
        if dist.get_rank() != rank or self.iteration != 1:
            return forward_step(self, iterator, chunk)
        return refused() if function == "forward_step" else (forward_step(self, iterator, chunk)[0], refused)

    def raising_data(self: Trainer, *given: Any) -> Iterator[Any]:
        for batch in iterators(self, *given):
            yield refused() if dist.get_rank() == rank and self.iteration == 1 else batch

    if function == "data":
        Trainer._iterators = raising_data  # type: ignore[method-assign]
    else:
        Trainer._forward_step = raising  # type: ignore[method-assign]


def note_waits(directory: Path) -> None:
    """Leave a file named by this rank in `directory` as it begins to wait for the end of a rank that has failed."""
    wait_for_end = job_abort.ErrorNotice.wait_for_end

    def noted(self: job_abort.ErrorNotice) -> None:
        (directory / f"rank {dist.get_rank()} waits").touch()
        wait_for_end(self)

    job_abort.ErrorNotice.wait_for_end = noted  # type: ignore[method-assign]


def clean_up(directory: Path | None) -> None:
    """Take as long as the environment says. Only a rank that has failed has a `directory`: there others' waits show."""
    time.sleep(float(os.environ.get("CLEANS_UP_S", "0")))
    until, deadline_s = os.environ.get("CLEANS_UP_UNTIL"), time.monotonic() + 60.0
    while directory and until and not (directory / f"rank {until} waits").exists() and time.monotonic() < deadline_s:
        time.sleep(0.05)


def main(rank: int, action: str, arguments: list[str]) -> None:
    if action.isdecimal():
        raise_in_action(rank, int(action))
    else:
        raise_in_script(rank, action)
    directory = Path.cwd()
    if "CLEANS_UP_UNTIL" in os.environ:
        note_waits(directory)
        job_abort._STORE_S = 20.0  # a rank whose request times out does not wait for the failed one
    try:
        train(parse_arguments(["--emulate-cpu", "--distributed-backend", "gloo", *arguments]))
    finally:
        clean_up(directory if dist.get_rank() == rank else None)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
