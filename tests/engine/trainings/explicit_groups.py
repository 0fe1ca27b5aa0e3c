# SPDX-License-Identifier: Apache-2.0
"""Ranks of `testing.jobs.variants` whose training loop hands its process groups over, as callers with groups of their
own do: `explicit_groups.py VARIANTS.json REPORT.json`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest

from testing.jobs import variants
from testing.megatron.megatron_on_cpu import install


def explicit_forward_backward(find: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    """What `get_forward_backward_func` finds, called with a communicator and a collection of process groups."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import get_model_config

    stock = find()

    @functools.wraps(stock)
    def forward_backward(**arguments: Any) -> Any:
        model = arguments["model"]
        groups = ProcessGroupCollection()
        groups.tp = parallel_state.get_tensor_model_parallel_group()
        groups.cp = parallel_state.get_context_parallel_group()
        groups.pp = parallel_state.get_pipeline_model_parallel_group()
        groups.embd = parallel_state.get_embedding_group(check_initialized=False)
        groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
        groups.dp_cp = parallel_state.get_data_parallel_group(with_context_parallel=True)
        config = get_model_config(model[0] if isinstance(model, list) else model)
        communicator = P2PCommunicator(pp_group=groups.pp, config=config)
        talk(communicator, groups.pp)
        given = {**arguments, "p2p_communicator": communicator, "pg_collection": groups}
        if isinstance(model, list) and len(model) > 1:
            refused_count(stock, given)
        losses = stock(**given)
        talk(communicator, groups.pp)
        return losses

    return forward_backward


def refused_count(stock: Callable[..., Any], given: dict[str, Any]) -> None:
    """A call whose last group of micro-batches is too small: it raises what stock's own check does, and no more."""
    with pytest.raises(RuntimeError, match="micro-batches"):
        stock(**{**given, "num_microbatches": 3})


def talk(communicator: Any, group: Any) -> None:
    """Stages that talk past the schedule, between iterations: every stage tells the next, and is answered."""
    import torch

    first, last = group.rank() == 0, group.rank() == group.size() - 1
    reported, answer = torch.full((3, 5), 1.0 + group.rank()), torch.full((3, 5), -1.0 - group.rank())
    if group.rank() % 2 == 0:
        communicator.send_forward(reported, last)
        answered = communicator.recv_backward(reported.shape, last)
    else:
        received = communicator.recv_forward(reported.shape, first)
        assert torch.equal(received, reported - 1.0), f"stage {group.rank()} received {received}"
        communicator.send_backward(answer, first)
        return
    assert last or torch.equal(answered, answer - 1.0), f"stage {group.rank()} was answered {answered}"


def main() -> None:
    install()
    from testing.training import train as training

    find = training.get_forward_backward_func
    training.get_forward_backward_func = lambda: explicit_forward_backward(find)
    variants._main(sys.argv[1:])


if __name__ == "__main__":
    main()
