# SPDX-License-Identifier: Apache-2.0
"""A step that is taken back leaves nothing behind, and one that is taken again is as if it were the first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adaptra_megatron.megatron.staggered_optimizer import StepUndo

SETTINGS: dict[str, dict[str, Any]] = {"adam": {}, "fused": {"fused": True}, "in a tensor": {"lr": torch.tensor(0.1)}}


def _optimizer(settings: dict[str, Any]) -> Any:
    """One of Megatron's kind, after a first step: 3 parameters, one of which has never had a gradient."""
    torch.manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(5, 3)) for _ in range(3)]
    found = SimpleNamespace(optimizer=torch.optim.AdamW(parameters, **settings))
    _give_gradients(found)
    found.optimizer.step()
    return found


def _give_gradients(optimizer: Any, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(2)
    for parameter in optimizer.optimizer.param_groups[0]["params"][:2]:
        parameter.grad = factor * torch.randn(5, 3, generator=generator)


def _held(optimizer: Any) -> list[torch.Tensor]:
    inner = optimizer.optimizer
    found = []
    for parameter in inner.param_groups[0]["params"]:
        state = [each for each in inner.state.get(parameter, {}).values() if isinstance(each, torch.Tensor)]
        found += [each.detach().clone() for each in (parameter, *state)]
    return found


def _equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(torch.equal(*pair) for pair in zip(some, others, strict=True))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_step_is_taken_back_and_taken_again_by_other_gradients_and_settings(settings: dict[str, Any]) -> None:
    stepped, expected = _optimizer(settings), _optimizer(settings)
    _give_gradients(stepped)
    before = _held(stepped)
    undo = StepUndo([stepped])
    stepped.optimizer.step()
    assert not _equal(_held(stepped), before)
    group = stepped.optimizer.param_groups[0]
    group["lr"] = group["lr"] * 0.5  # as the schedule of the learning rate does for the next step
    for parameter in group["params"][:2]:
        parameter.grad.zero_()  # as the next iteration does

    later = undo.go_back()
    assert _equal(_held(stepped), before)
    _give_gradients(expected)
    for optimizer in (stepped, expected):
        for parameter in optimizer.optimizer.param_groups[0]["params"][:2]:
            parameter.grad.mul_(0.25)
        optimizer.optimizer.step()
    assert _equal(_held(stepped), _held(expected))
    undo.go_on(later)
    assert float(group["lr"]) == pytest.approx(0.5 * float(expected.optimizer.param_groups[0]["lr"]))
    assert all(parameter.grad is None for parameter in group["params"])
