# SPDX-License-Identifier: Apache-2.0
"""Megatron's own manager offloads activations in the order of a plan, whatever that is, and in no other."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptra_megatron.schedule.ir import Action, Kind
from testing.megatron.cuda_names import torch_names
from testing.megatron.megatron_on_cpu import offloading_names
from testing.replacing import Replaced
from tests.support.late_copies import late_copies

stock = pytest.importorskip("megatron.core.pipeline_parallel.fine_grained_activation_offload", reason="from 0.16 on")
from adaptra_megatron.megatron import offloaded_activations  # noqa: E402 (needs it)

OffloadedActivations = offloaded_activations.OffloadedActivations
LAYERS = ("core_attn", "attn_proj", "core_attn", "attn_proj")


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    with Replaced([*torch_names(), *offloading_names()]), Replaced(late_copies()):
        yield
    stock.PipelineOffloadManager.OFFLOAD_MGR = None


def run(actions: Sequence[Action], chunks: int, offloads: bool) -> list[torch.Tensor]:
    """Run chunks of four parts; return the gradients of inputs. What is offloaded leaves nothing on the device."""
    interface = stock.FineGrainedActivationOffloadingInterface
    outputs: dict[tuple[int, int], torch.Tensor] = {}
    inputs: dict[tuple[int, int], torch.Tensor] = {}
    for each in actions:
        key = each.chunk, each.micro_batch
        if each.kind is not Kind.FORWARD:
            outputs.pop(key).sum().backward()
            continue
        if offloads:
            interface.init_chunk_handler(chunks, each.chunk, 0)
        hidden = inputs[key] = torch.arange(1.0, 5.0).div(10 + 3 * each.chunk + each.micro_batch).requires_grad_()
        for name in LAYERS:
            with interface(offloads, 1.0 * hidden, name) as hidden:
                result = hidden * hidden
            hidden = interface.group_commit(result, name, [hidden]) if offloads else result
        outputs[key] = hidden
    return [tensor.grad for _key, tensor in sorted(inputs.items()) if tensor.grad is not None]


def order_of(seed: int, chunks: int, micro_batches: int) -> list[Action]:
    """Return any order in which each backward follows its forward, and forwards of a chunk come in order."""
    draw = random.Random(seed)
    left = {chunk: list(range(micro_batches)) for chunk in range(chunks)}
    waiting: list[tuple[int, int]] = []
    found: list[Action] = []
    while any(left.values()) or waiting:
        ready = [chunk for chunk, numbers in left.items() if numbers]
        if ready and (not waiting or draw.random() < 0.6):
            chunk = draw.choice(ready)
            waiting.append((chunk, left[chunk].pop(0)))
            found.append(Action(0, Kind.FORWARD, *waiting[-1]))
        else:
            chunk, number = waiting.pop(draw.randrange(len(waiting)))
            found.append(Action(0, Kind.BACKWARD, chunk, number))
    return found


def with_ours(orders: Sequence[list[Action]], chunks: int) -> Iterator[tuple[bool, list[torch.Tensor]]]:
    ours = OffloadedActivations()
    for order in orders:
        anew = ours.begin(order)
        gradients = run(order, chunks, offloads=True)
        ours.end()
        ours.suspend()
        yield anew, gradients
    assert ours.summary()["offloaded_bytes"] or len(orders[-1]) == 2, "of a single forward, all stays for its backward"


def equal(gradients: list[torch.Tensor], order: list[Action], chunks: int) -> bool:
    return all(map(torch.equal, gradients, run(order, chunks, offloads=False)))


@given(st.integers(0, 1 << 30), st.integers(1, 3), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_any_order_is_recorded_and_then_followed(seed: int, chunks: int, micro_batches: int) -> None:
    orders = [order_of(seed, chunks, micro_batches)] * 3 + [order_of(seed + 1, chunks, micro_batches)] * 2
    found = list(with_ours(orders, chunks))
    assert all(equal(gradients, order, chunks) for (_anew, gradients), order in zip(found, orders, strict=True))
    changed = orders[0] != orders[3]
    assert [anew for anew, _gradients in found] == [True, False, False, changed, False]


ONE_AHEAD = [
    *(Action(0, Kind.FORWARD, chunk, number) for chunk in (0, 1) for number in (0, 1)),
    *(Action(0, Kind.BACKWARD, chunk, number) for number in (0, 1) for chunk in (1, 0)),
]
"""Backwards of chunks alternate, where stock has all of chunk 1 first."""


def test_stocks_manager_does_not_follow_it() -> None:
    stock.PipelineOffloadManager.reset_instance()
    with pytest.raises(AssertionError, match="Chunk mismatch"):
        run(ONE_AHEAD, 2, offloads=True)
    assert [anew for anew, _gradients in with_ours([ONE_AHEAD] * 2, 2)] == [True, False]


def test_a_recording_iteration_waits_for_copies_that_nothing_reloads_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = [Action(0, kind, 0, number) for number in (0, 1) for kind in (Kind.FORWARD, Kind.BACKWARD)]
    assert all(equal(gradients, at_once, 1) for _anew, gradients in with_ours([at_once] * 2, 1))
    monkeypatch.delattr(offloaded_activations._OrderedManager, "pop_backward_chunk")
    assert [equal(gradients, at_once, 1) for _anew, gradients in with_ours([at_once] * 2, 1)] == [False, True]


def test_a_failed_attempt_is_recorded_anew_and_evaluations_leave_the_record() -> None:
    ours = OffloadedActivations()

    def attempt(*, fails: bool = False) -> bool:
        anew = ours.begin(ONE_AHEAD)
        gradients = run(ONE_AHEAD[:5] if fails else ONE_AHEAD, 2, offloads=True)
        if not fails:
            assert equal(gradients, ONE_AHEAD, 2)
            ours.end()
        ours.suspend()
        return anew

    def evaluate() -> None:
        with torch.no_grad():
            run(ONE_AHEAD[:4], 2, offloads=True)
        assert not stock.PipelineOffloadManager.get_instance()._cached_chunks_forward

    evaluate()
    assert attempt()
    assert not attempt()
    evaluate()
    assert not attempt(fails=True), "an evaluation leaves what was recorded"
    assert attempt(), "handlers have tensors of the attempt that failed"
    assert not attempt()
    ours.close()
    assert stock.PipelineOffloadManager.get_instance()._is_warmup, "stock records its own order"
