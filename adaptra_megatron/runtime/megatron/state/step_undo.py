# SPDX-License-Identifier: Apache-2.0
"""Exact copies of what an optimizer step changes and of the gradients it takes, to go back by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch


class StepUndo:
    """What Megatron's optimizers hold before a step.

    Copied, and not inverted by arithmetic, which would give other bits. With Adam and main parameters in single
    precision that is 16 bytes for each parameter that is stepped here (all of the stage's, or this rank's shard of
    them): main parameter, two moments, gradient.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        """`optimizers`: Megatron's, with gradients ready (MegatronOptimizer.prepare_grads)."""
        self._inner = [each.optimizer for each in optimizers]
        self._kept = [(tensor, tensor.detach().clone()) for tensor in self._tensors()]
        self._gradients = [
            (parameter, None if parameter.grad is None else parameter.grad.clone()) for parameter in self._parameters()
        ]
        self._settings = [_settings(group) for group in self._groups()]

    @torch.no_grad()
    def go_back(self) -> list[dict[str, Any]]:
        """Put everything back. Returns the settings (learning rate and so on) that groups of parameters had now: those
        of the next step, for `go_on`."""
        for tensor, kept in self._kept:
            tensor.copy_(kept)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        later = [_settings(group) for group in self._groups()]
        self._set(self._settings)
        return later

    def go_on(self, settings: list[dict[str, Any]]) -> None:
        """Leave what a step has been taken with: the next one has gradients of its own."""
        for parameter in self._parameters():
            parameter.grad = None
        self._set(settings)

    def _groups(self) -> Iterator[dict[str, Any]]:
        for inner in self._inner:
            yield from inner.param_groups

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self._groups():
            yield from group["params"]

    def _tensors(self) -> Iterator[torch.Tensor]:
        for inner in self._inner:
            for group in inner.param_groups:
                for parameter in group["params"]:
                    yield parameter
                    yield from (each for each in inner.state[parameter].values() if isinstance(each, torch.Tensor))

    def _set(self, settings: list[dict[str, Any]]) -> None:
        for group, kept in zip(self._groups(), settings, strict=True):
            group.update(kept)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }
