# SPDX-License-Identifier: Apache-2.0
"""The state of a worker comes to another one as it is, or not at all."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from adaptra_megatron.megatron.state import training_state
from adaptra_megatron.megatron.state.training_state import (
    CHUNK_NBYTES,
    StateError,
    StateReceiver,
    StateSender,
    receive_optimizer,
    receive_tensors,
    send_optimizer,
    send_tensors,
)

KEY, IDENTITY = b"k" * 32, "job/3/hand-over/0-1"


class Messages:
    """In memory, from one end to the other."""

    def __init__(self) -> None:
        self.sent: deque[torch.Tensor] = deque()

    def send(self, tensor: torch.Tensor) -> None:
        self.sent.append(tensor.clone())

    def receive(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self.sent.popleft())


def ends(messages: Messages, key: bytes = KEY, identity: str = IDENTITY) -> tuple[StateSender, StateReceiver]:
    return StateSender(messages.send, KEY, IDENTITY), StateReceiver(messages.receive, key, identity)


def tensors() -> list[torch.Tensor]:
    """Of many shapes and types."""
    generator = torch.Generator().manual_seed(5)
    made = [torch.randn(shape, generator=generator) for shape in ((3, 50), (), (0,), (7, 4), (129,))]
    made[3] = torch.randn(4, 7, generator=generator).t()  # not contiguous
    return [*made, made[4].to(torch.bfloat16), torch.tensor([1, -2]), torch.tensor([True, False, True])]


@pytest.mark.parametrize("chunk", [1, 8, 100, CHUNK_NBYTES])
def test_what_is_sent_is_in_place_to_the_bit(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_state, "CHUNK_NBYTES", chunk)
    messages = Messages()
    sender, receiver = ends(messages)
    sent, found = tensors(), [torch.zeros_like(each) for each in tensors()]
    sender.values({"iteration": 7, "names": ["a", "b"]})
    send_tensors(sender, sent)
    sender.finish()
    assert all(message.nbytes <= max(8, chunk) for message in messages.sent)
    assert receiver.values() == {"iteration": 7, "names": ["a", "b"]}
    receive_tensors(receiver, found, "parameters")
    receiver.finish()
    assert not messages.sent
    assert all(torch.equal(*pair) for pair in zip(sent, found, strict=True))


def test_a_buffer_takes_on_the_type_that_was_sent_and_a_parameter_does_not() -> None:
    sent = torch.tensor([0.1, -0.2, 0.3])
    for found in (sent.to(torch.bfloat16), torch.nn.Parameter(sent.to(torch.bfloat16))):
        messages = Messages()
        sender, receiver = ends(messages)
        send_tensors(sender, [sent])
        sender.finish()
        if isinstance(found, torch.nn.Parameter):
            with pytest.raises(StateError, match="other shapes or types"):
                receive_tensors(receiver, [found], "parameters")
            continue
        receive_tensors(receiver, [found], "parameters")
        receiver.finish()
        assert torch.equal(found, sent)


def test_an_optimizer_comes_with_all_that_it_has() -> None:
    def made() -> tuple[torch.nn.Parameter, torch.optim.Optimizer]:
        parameter = torch.nn.Parameter(torch.ones(33))
        return parameter, torch.optim.Adam([parameter], lr=0.5)

    (parameter, optimizer), (other, empty) = made(), made()
    parameter.square().sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.125
    messages = Messages()
    sender, receiver = ends(messages)
    send_optimizer(sender, optimizer, [parameter])
    sender.finish()
    receive_optimizer(receiver, empty, [other])
    receiver.finish()
    assert torch.equal(parameter, other)
    assert empty.param_groups[0]["lr"] == 0.125
    for name, value in optimizer.state[parameter].items():
        assert torch.equal(value, empty.state[other][name]), name


def test_a_group_s_steps_are_those_of_a_sender_with_parameters_in_it() -> None:
    """FusedAdam counts no steps of a group of which a shard has no parameter: what was loaded stays there."""
    messages, target = Messages(), torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.5)
    for steps in (7, 1):
        source = torch.optim.SGD([torch.nn.Parameter(torch.ones(3))], lr=0.5)
        source.param_groups[0]["step"] = steps
        sender, receiver = ends(messages)
        send_optimizer(sender, source, [])
        sender.finish()
        receive_optimizer(receiver, target, [])
        receiver.finish()
    assert target.param_groups[0]["step"] == 7


def receive_all(receiver: StateReceiver, tensor: torch.Tensor) -> None:
    receiver.tensor(tensor)
    receiver.finish()


def test_each_byte_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In tensors and in what proves them; sizes of messages are looked at before."""
    monkeypatch.setattr(training_state, "CHUNK_NBYTES", 64)
    whole = Messages()
    sender, _ = ends(whole)
    sender.tensor(torch.arange(30.0))
    sender.finish()
    total = sum(message.nbytes for message in whole.sent)
    for place in range(total):
        messages = Messages()
        messages.sent.extend(message.clone() for message in whole.sent)
        for message in messages.sent:
            flat = message.view(torch.uint8)
            if place < flat.numel():
                flat[place] ^= 4
                break
            place -= flat.numel()
        _, receiver = ends(messages)
        with pytest.raises((StateError, RuntimeError)):
            receive_all(receiver, torch.empty(30))


@pytest.mark.parametrize(("key", "identity"), [(b"l" * 32, IDENTITY), (b"", IDENTITY), (KEY, "job/4/hand-over/0-1")])
def test_unauthenticated_values_and_those_of_another_hand_over_are_not_parsed(
    key: bytes, identity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parsed(*_given: Any, **_keywords: Any) -> None:
        raise AssertionError("parsed")

    messages = Messages()
    sender, receiver = ends(messages, key, identity)
    sender.values({"iteration": 7})
    sender.finish()
    monkeypatch.setattr(torch, "load", parsed)
    with pytest.raises(StateError, match="come from no rank of this job"):
        receiver.values()


@pytest.mark.parametrize("size", [-1, 0, (64 << 20) + 1, 1 << 62])
def test_sizes_are_looked_at_before_memory_is_allocated(size: int) -> None:
    messages = Messages()
    sender, receiver = ends(messages)
    sender._write(torch.tensor([size]).view(torch.uint8))
    sender.finish()
    with pytest.raises(StateError, match=f"a packet of plain values cannot have {size} bytes"):
        receiver.values()
    messages.sent.clear()
    messages.send(torch.tensor([size]))
    with pytest.raises(StateError, match=f"a message cannot have {size} bytes"):
        ends(messages)[1].values()


def test_the_digest_is_of_what_is_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes come as they were sent, but one is spoilt on its way to where it is to be."""
    messages = Messages()
    sender, receiver = ends(messages)
    sender.tensor(torch.ones(9))
    sender.finish()
    read = receiver._read
    place = torch.zeros(9)

    def spoiling(flat: torch.Tensor) -> None:
        read(flat)
        if flat.numel() == place.nbytes:
            place[4] = 1.0000001

    monkeypatch.setattr(receiver, "_read", spoiling)
    receiver.tensor(place)
    with pytest.raises(StateError, match="not in place as they were sent"):
        receiver.finish()
