# SPDX-License-Identifier: Apache-2.0
"""Ranges around actions and messages, as torch.profiler shows them."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from adaptra_megatron.engine.megatron_spans import RangedTransport, ranged_computation
from adaptra_megatron.megatron.computation import BackwardPart, ForwardPart, Send
from adaptra_megatron.transport.message_keys import Direction, MessageKey, Transport, TransportError


class Computation:
    """Doubles what it is given; the backward of micro-batch 9 fails."""

    def __init__(self) -> None:
        self.called: list[tuple[object, ...]] = []

    def forward(self, chunk: int, micro_batch: int, input_tensor: torch.Tensor | None) -> torch.Tensor:
        assert input_tensor is not None
        return 2 * input_tensor

    def backward(
        self,
        chunk: int,
        micro_batch: int,
        input_tensor: torch.Tensor | None,
        output_tensor: torch.Tensor,
        output_gradient: torch.Tensor | None,
        *,
        split: bool,
    ) -> torch.Tensor | None:
        if micro_batch == 9:
            raise RuntimeError("out of memory")
        self.called.append((chunk, micro_batch, input_tensor, output_tensor, output_gradient, split))
        return output_gradient

    def weight_gradient(self, chunk: int, micro_batch: int) -> None:
        self.called.append((chunk, micro_batch))

    def forward_backward(self, forward: ForwardPart, backward: BackwardPart, *sends: Send) -> torch.Tensor:
        return 2 * backward.output_tensor


def names_of(profile: torch.profiler.profile) -> list[str]:
    return [event.name for event in profile.events() if event.name.startswith("adaptra")]


def test_actions_are_ranges_and_do_what_they_did() -> None:
    computation = Computation()
    ranged = ranged_computation(computation)
    one = torch.ones(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert torch.equal(ranged.forward(0, 3, one), 2 * one)
        assert ranged.backward(1, 3, None, one, one, split=True) is one
        assert ranged.backward(0, 4, None, one, None, split=False) is None
        ranged.weight_gradient(1, 3)
        both = ForwardPart(0, 5, None), BackwardPart(1, 4, None, one, None, False)
        assert torch.equal(ranged.forward_backward(*both, lambda _: None, lambda _: None), 2 * one)
        with pytest.raises(RuntimeError, match="out of memory"):
            ranged.backward(0, 9, None, one, None, split=False)
    assert computation.called == [(1, 3, None, one, one, True), (0, 4, None, one, None, False), (1, 3)]
    assert names_of(profile) == [
        "adaptra F 3",
        "adaptra I 3, chunk 1",
        "adaptra B 4",
        "adaptra W 3, chunk 1",
        "adaptra F 5",
        "adaptra B 4, chunk 1",
        "adaptra B 9",
    ]


def test_messages_are_ranges_and_go_where_they_went() -> None:
    transport = Mock(spec=Transport)
    transport.wait.side_effect = [torch.ones(2), TransportError("rank 2 is gone")]
    transport.wait_any.return_value = True
    ranged = RangedTransport(transport)
    activation = MessageKey(7, Direction.ACTIVATION, 0, 3)
    gradient = MessageKey(7, Direction.GRADIENT, 1, 4)
    one = torch.ones(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ranged.post_send(activation, 2, one)
        ranged.post_receive(gradient, 2)
        assert ranged.wait_any([gradient, activation], 5.0)
        assert torch.equal(ranged.wait(gradient, 6.0), one)
        ranged.flush(7.0)
        with pytest.raises(TransportError, match="rank 2 is gone"):
            ranged.wait(activation, 8.0)
    assert names_of(profile) == [
        "adaptra send activation 3 to rank 2",
        "adaptra receive gradient 4, chunk 1 from rank 2",
        "adaptra wait for gradient 4, chunk 1 or activation 3",
        "adaptra wait for gradient 4, chunk 1",
        "adaptra wait until all has been sent",
        "adaptra wait for activation 3",
    ]
    transport.post_send.assert_called_once_with(activation, 2, one)
    transport.post_receive.assert_called_once_with(gradient, 2)
    transport.wait_any.assert_called_once_with([gradient, activation], 5.0)
    transport.flush.assert_called_once_with(7.0)


@pytest.mark.parametrize("name", [name for name in vars(Transport) if not name.startswith("_")])
def test_what_is_no_message_is_passed_on(name: str) -> None:
    transport = Mock(spec=Transport)
    own = vars(RangedTransport).get(name)
    assert own is not None or getattr(RangedTransport(transport), name) is getattr(transport, name)
