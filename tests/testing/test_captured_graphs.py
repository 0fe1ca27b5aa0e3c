# SPDX-License-Identifier: Apache-2.0
"""The stand-in of CUDA graphs is as strict as CUDA: about order, about memory, about what a capture may do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from testing.megatron.captured_graphs import EmulatedGraph, GraphedCallables, GraphedLayer, GraphPools

ORDER = [1, 1, -1, 1, -1, -1]
"""1F1B of a first stage of two, three micro-batches."""


@pytest.fixture
def layers() -> list[torch.nn.Module]:
    torch.manual_seed(1)
    return [_Layer() for _ in range(2)]


class _Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16).requires_grad_(False)

    def forward(self, given: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.tanh(self.linear(given)) + given,)


def captured(layers: list[torch.nn.Module], order: list[int]) -> list[list[GraphedLayer]]:
    """Return the layers of each micro-batch."""
    inputs = [(torch.ones(4, 16, requires_grad=True),) for _ in range(6)]
    found = GraphedCallables(GraphPools())(
        layers, inputs, sample_kwargs=[{}] * 6, _order=order, _num_layers_per_chunk=[2], num_warmup_iters=1
    )
    return [list(found[2 * each : 2 * each + 2]) for each in range(3)]


def gradients(
    micro_batches: Sequence[Sequence[Callable[..., Any]]], order: list[int], *, copied: bool = True
) -> list[torch.Tensor]:
    """Run forwards and backwards in `order`; return the gradients of the inputs, `copied` as soon as they are there."""
    inputs = [torch.full((4, 16), 0.1 * (1 + each), requires_grad=True) for each in range(3)]
    outputs: list[torch.Tensor] = []
    found: list[torch.Tensor] = []
    backwards: Iterator[int] = iter(range(3))
    for entry in order:
        if entry > 0:
            hidden = inputs[len(outputs)]
            for layer in micro_batches[len(outputs)]:
                (hidden,) = layer(hidden)
            outputs.append(hidden)
        else:
            number = next(backwards)
            outputs[number].sum().backward()
            found.append(
                torch.as_tensor(inputs[number].grad).clone() if copied else torch.as_tensor(inputs[number].grad)
            )
    return found


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def test_a_replay_in_the_order_of_the_capture_is_what_was_captured(layers: list[torch.nn.Module]) -> None:
    graphs = captured(layers, ORDER)
    for _iteration in range(2):
        assert same(gradients(graphs, ORDER), gradients([layers] * 3, ORDER))


@pytest.mark.parametrize(("early", "late"), [(ORDER, [1, 1, 1, -1, -1, -1]), ([1, -1, 1, -1, 1, -1], ORDER)])
def test_a_replay_in_another_order_overwrites_its_neighbours(
    layers: list[torch.nn.Module], early: list[int], late: list[int]
) -> None:
    """`late`: with more micro-batches in flight."""
    assert not same(gradients(captured(layers, early), late), gradients([layers] * 3, late))
    assert same(gradients(captured(layers, late), late), gradients([layers] * 3, late))


def test_gradients_that_are_kept_are_overwritten(layers: list[torch.nn.Module]) -> None:
    assert not same(gradients(captured(layers, ORDER), ORDER, copied=False), gradients([layers] * 3, ORDER))


def test_a_capture_computes_nothing(layers: list[torch.nn.Module]) -> None:
    pools, graph, total = GraphPools(), EmulatedGraph(), torch.zeros(3)
    with pools.graph(graph, pools.handle()):
        total.add_(1.0)
        result = total * 2.0
    assert torch.equal(total, torch.zeros(3))
    assert result.isnan().all()
    for replays in (1.0, 2.0):
        graph.replay()
        assert torch.equal(total, torch.full((3,), replays))
        assert torch.equal(result, 2.0 * total)


def test_what_cuda_refuses_is_refused() -> None:
    pools, pool = GraphPools(), (0, 7)
    graph, given = EmulatedGraph(), torch.ones(3)
    with pytest.raises(RuntimeError, match="without a preceding"):
        graph.replay()
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), pools.graph(graph, pool):
        float(given.sum())
    with pools.graph(graph, pool):
        given + 1.0
    del given
    with pytest.raises(RuntimeError, match="has been freed"):
        graph.replay()
    graph.reset()
    with pytest.raises(RuntimeError, match="use_count"), pools.graph(graph, pool):
        pass
