# SPDX-License-Identifier: Apache-2.0
"""Megatron's spans around messages and actions, by a stand-in of nemo-lens, which is on no index."""

from __future__ import annotations

import contextlib
import importlib.machinery
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from adaptra_megatron.engine.megatron_spans import SpannedTransport, megatron_span, spanned_computation
from adaptra_megatron.transport.message_keys import Direction, MessageKey, Transport, TransportError


class Lens:
    """What has been a span, as nemo-lens is called."""

    def __init__(self, *groups: str) -> None:
        self.groups, self.spans = groups, list[tuple[str, str, dict[str, Any]]]()

    @contextlib.contextmanager
    def managed_span(self, group: str, name: str, tracer: object = None, **attributes: Any) -> Iterator[None]:
        yield
        self.spans.append((group, name, attributes))

    def install(self, patched: pytest.MonkeyPatch) -> None:
        for name in ("nemo", "nemo.lens", "nemo.lens.state", "nemo.lens.helpers"):
            patched.setitem(sys.modules, name, ModuleType(name))
        sys.modules["nemo.lens.state"].is_span_group_enabled = self.groups.__contains__  # type: ignore[attr-defined]
        sys.modules["nemo.lens.helpers"].managed_span = self.managed_span  # type: ignore[attr-defined]


def test_without_nemo_lens_or_interest_there_are_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    assert megatron_span() is None
    Lens("per_step").install(monkeypatch)
    assert megatron_span() is None
    Lens("communication").install(monkeypatch)
    assert megatron_span() is not None


def test_messages_have_the_names_that_megatron_gives_them(monkeypatch: pytest.MonkeyPatch) -> None:
    lens = Lens("communication")
    lens.install(monkeypatch)
    span = megatron_span()
    assert span is not None
    transport = Mock(spec=Transport)
    transport.wait.side_effect = [torch.ones(2), torch.ones(2), TransportError("gone")]
    spanned = SpannedTransport(transport, span)
    keys = [MessageKey(7, direction, 1, 4) for direction in (Direction.ACTIVATION, Direction.GRADIENT)]
    one = torch.ones(2)
    for key in keys:
        spanned.post_send(key, 2, one)
        assert torch.equal(spanned.wait(key, 5.0), one)
    with pytest.raises(TransportError):
        spanned.wait(keys[0], 5.0)
    attributes = {"adaptra.micro_batch": 4, "adaptra.chunk": 1}
    assert lens.spans == [
        ("communication", f"megatron.p2p.{what}", attributes)
        for what in ("send_forward", "recv_forward", "send_backward", "recv_backward")
    ]
    transport.post_send.assert_called_with(keys[1], 2, one)
    for name in (name for name in vars(Transport) if not name.startswith("_")):
        own = vars(SpannedTransport).get(name)
        assert own is not None or getattr(spanned, name) is getattr(transport, name)


@pytest.mark.parametrize("has_own", [False, True])
def test_actions_are_spans_once(has_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From 0.20 on Megatron's forward_step and backward_step, which are called here too, make theirs."""
    found = importlib.machinery.ModuleSpec("megatron.core.telemetry", None) if has_own else None
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    lens, computation, one = Lens("microbatch"), Mock(), torch.ones(2)
    spanned = spanned_computation(computation, lens.managed_span)
    spanned.forward(0, 3, one)
    spanned.backward(0, 3, None, one, one, split=True)
    spanned.backward(0, 4, None, one, one, split=False)
    spanned.weight_gradient(1, 3)
    names = ["forward", "backward", "backward", "backward_weight"][3 * has_own :]
    assert [name for _group, name, _attributes in lens.spans] == [f"megatron.microbatch.{name}" for name in names]
    assert lens.spans[-1] == (
        "microbatch",
        "megatron.microbatch.backward_weight",
        {"adaptra.micro_batch": 3, "adaptra.chunk": 1},
    )
    computation.backward.assert_called_with(0, 4, None, one, one, split=False)
    computation.weight_gradient.assert_called_once_with(1, 3)
