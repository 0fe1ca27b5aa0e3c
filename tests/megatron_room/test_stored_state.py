# SPDX-License-Identifier: Apache-2.0
"""The state of Transformer Engine's FusedAdam reaches another rank bit by bit, with scales and low halves."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch

from adaptra_megatron.megatron.state import training_state
from adaptra_megatron.megatron.state.stored_state import stored_state
from adaptra_megatron.megatron.state.training_state import (
    StateError,
    StateReceiver,
    StateSender,
    receive_optimizer,
    send_optimizer,
)
from testing.megatron.fused_adam import FusedAdam

_MAIN = {"master_weights": True, "use_decoupled_grad": True}
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "low-halves": _MAIN | {"store_param_remainders": True},
    "fp16": {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
    "bf16": _MAIN
    | {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16, "store_param_remainders": True},
    "fp8": _MAIN
    | {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16, "master_weight_dtype": torch.float16},
}


class Rank:
    """One optimizer over a parameter of float32 and one of bfloat16."""

    def __init__(self, kind: str) -> None:
        generator = torch.Generator().manual_seed(3)
        self.parameters = [torch.randn(77, generator=generator).to(each) for each in (torch.float32, torch.bfloat16)]
        self.optimizer = FusedAdam([{"params": self.parameters}], lr=0.01, weight_decay=0.1, **KINDS[kind])

    def step(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for each in self.parameters:
            gradient = torch.randn(77, generator=generator)
            if self.optimizer.use_decoupled_grad:
                each.decoupled_grad = gradient  # type: ignore[attr-defined]
            else:
                each.grad = gradient.to(each.dtype)
        self.optimizer.step()

    @property
    def stored(self) -> list[dict[str, Any]]:
        """Parameters, and all that is stored for them."""
        return [{"parameter": each, **stored_state(self.optimizer, each)} for each in self.parameters]


def hand_over(source: Rank, target: Rank) -> None:
    messages: deque[torch.Tensor] = deque()
    sender = StateSender(lambda tensor: messages.append(tensor.clone()))
    receiver = StateReceiver(lambda tensor: tensor.copy_(messages.popleft()))
    send_optimizer(sender, source.optimizer, source.parameters)
    sender.finish()
    receive_optimizer(receiver, target.optimizer, target.parameters)
    receiver.finish()


def differing(left: Rank, right: Rank) -> set[str]:
    return {
        name
        for ours, theirs in zip(left.stored, right.stored, strict=True)
        for name in ours.keys() | theirs.keys()
        if name not in ours or name not in theirs or not torch.equal(ours[name], theirs[name])
    }


def stepped(kind: str) -> Rank:
    rank = Rank(kind)
    for seed in range(3):
        rank.step(seed)
    return rank


@pytest.mark.parametrize("loaded", [False, True], ids=["new", "loaded"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_comes_to_the_bit_and_steps_on_alike(kind: str, loaded: bool) -> None:
    source, target = stepped(kind), Rank(kind)
    if loaded:
        target.step(9)
    assert differing(source, target)
    hand_over(source, target)
    assert not differing(source, target)
    for rank in (source, target):
        rank.step(7)
    assert not differing(source, target)


@pytest.mark.parametrize(
    ("kind", "part"),
    [("low-halves", "master_param"), ("fp16", ".scale"), ("fp8", ".scale"), ("fp8", ".scale_inv"), ("fp8", ".data")],
)
def test_without_scales_or_low_halves_the_next_step_is_another(
    kind: str, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = stepped(kind), Rank(kind)

    def without(*given: Any) -> dict[str, Any]:
        return {name: value for name, value in stored_state(*given).items() if not name.endswith(part)}

    monkeypatch.setattr(training_state, "stored_state", without)
    hand_over(source, target)
    for rank in (source, target):
        rank.step(7)
    assert "parameter" in differing(source, target)


@pytest.mark.parametrize("kind", ["fp32", "fp8"])
def test_an_optimizer_that_stores_otherwise_is_refused(kind: str) -> None:
    with pytest.raises(StateError, match="start it with the same flags"):
        hand_over(stepped("fp16"), Rank(kind))


def test_fused_adam_takes_no_state_of_another_type() -> None:
    rank = stepped("low-halves")
    _, parameter = rank.parameters
    for name, dtype in (("master_param", torch.float32), ("exp_avg", torch.bfloat16)):
        with pytest.raises(AssertionError):
            rank.optimizer.set_scaled_state(parameter, name, torch.zeros(77, dtype=dtype))
