# SPDX-License-Identifier: Apache-2.0
"""Micro-batches are counted in the gradients that hold them, and parameters are distinguished by their digests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from adaptra_megatron.megatron.state import conservation
from adaptra_megatron.megatron.state.conservation import digest_of
from adaptra_megatron.tools.local_ranks.launch_ranks import RankResult

RANKS = str(Path(__file__).with_name("conservation_ranks.py"))


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("instances", "cases"), [(1, 6), (2, 1)])
def test_counts_are_right_change_no_bit_and_show_what_is_wrong(
    instances: int, cases: int, start_ranks: Callable[..., list[RankResult]]
) -> None:
    for result in start_ranks(4, [RANKS, str(instances)], timeout_s=120):
        assert result.output.count("CHECKED") == cases, result.output


class Model(torch.nn.Module):
    """Parameters of made-up sizes."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__()
        self.tensors = torch.nn.ParameterList([torch.nn.Parameter(each, requires_grad=False) for each in tensors])


def made(dtype: torch.dtype) -> Model:
    """More than one block, and sizes that are no whole number of words."""
    generator = torch.Generator().manual_seed(3)
    sizes = (5 * conservation._WORDS + 3, 7, 1, 0)
    return Model(*(torch.randn(size, generator=generator).to(dtype) for size in sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_bit_and_counter_is_in_the_digest(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conservation, "_WORDS", 64)
    model = made(dtype)
    digest = digest_of([model], 3, 24)
    assert digest == digest_of([made(dtype)], 3, 24)
    assert len({digest, digest_of([model], 4, 24), digest_of([model], 3, 25)}) == 3
    seen = {digest}
    for parameter in model.tensors:
        flat = parameter.view(torch.int32 if dtype == torch.float32 else torch.int16).view(-1)
        for place in range(flat.numel()):
            for bit in (0, 7, 8 * flat.element_size() - 1):
                before = int(flat[place])
                flat[place] ^= torch.tensor(1, dtype=flat.dtype) << bit
                seen.add(digest_of([model], 3, 24))
                flat[place] = before
    assert len(seen) == 1 + 3 * sum(each.numel() for each in model.tensors)
    assert digest_of([model], 3, 24) == digest


def test_order_shapes_and_blocks_are_in_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conservation, "_WORDS", 64)
    one, two = torch.arange(128.0), torch.arange(128.0, 256.0)
    models = (
        [Model(one, two)],
        [Model(two, one)],
        [Model(one), Model(two.flip(0))],
        [Model(torch.cat([one, two]))],
        [Model(one.view(2, 64), two)],
        [Model(torch.cat([one[64:], one[:64]]), two)],
        [Model(one.to(torch.float64), two)],
    )
    assert len({digest_of(model, 0, 0) for model in models}) == len(models)


def test_where_parameters_lie_is_not_in_the_digest() -> None:
    values = torch.randn(9).to(torch.bfloat16)
    digests = set()
    for first in (0, 1):
        for size in (4, 5):  # a whole number of words, or not
            buffer = torch.zeros(12, dtype=torch.bfloat16)
            buffer[first : first + size] = values[:size]
            digests.add((size, digest_of([Model(buffer[first : first + size])], 0, 0)))
    assert len(digests) == 2


def test_biases_of_routers_are_in_the_digest_and_other_buffers_are_not() -> None:
    def digest(bias: torch.Tensor, tokens: float = 0.0) -> bytes:
        model = Model(torch.arange(4.0))
        model.register_buffer("expert_bias", bias)
        model.register_buffer("local_tokens_per_expert", torch.full((4,), tokens))
        return digest_of([model], 0, 0)

    bias = torch.tensor([0.5, 0.0, -0.5, 0.25])
    moved = bias + torch.tensor([0.0, 1e-3, 0.0, 0.0])
    assert digest(bias) != digest(moved)
    assert digest(bias) == digest(bias, tokens=3.0)
    assert digest(bias) == digest(bias.to(torch.bfloat16)), "before the router's first forward"
