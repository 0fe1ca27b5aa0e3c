# SPDX-License-Identifier: Apache-2.0
"""Split backwards under tensor parallelism: which collectives run when, with collectives that only play their part.

Numbers over real ones: test_bitwise.py. Here a collective writes its result when it is waited for, and what is in its
place until then is not a number, so that a product which comes too early shows.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.tensor_parallel import layers
from megatron.core.utils import GlobalMemoryBuffer

from adaptra_megatron.megatron.gradients import linear_wgrad
from adaptra_megatron.megatron.gradients.linear_wgrad import (
    GATHER_BUFFERS,
    LinearWeightGradient,
    WeightGradientQueue,
)

LINEAR = layers.LinearWithGradAccumulationAndAsyncCommunication
SEQUENCE, BATCH, WIDTH, MICRO_BATCHES = 4, 2, 6, 3
COLUMN, ROW = "column", "row"
STACK = (COLUMN, ROW, COLUMN, ROW, COLUMN)
"""Attention, an MLP, and the output layer."""


class TwoRanks:
    """A process group of two, whose other rank has the same data."""

    def size(self) -> int:
        return 2


GROUP: Any = TwoRanks()


class Collectives:
    """Stand-ins of the collectives of layers.py, and of what runs right before the product of a weight gradient."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.memory = GlobalMemoryBuffer()
        self._launched = 0

    def all_gather(self, output: torch.Tensor, given: torch.Tensor, *, group: TwoRanks, async_op: bool = False) -> Any:
        return self._launch("gather", output, torch.cat([given, given]), async_op)

    def reduce_scatter(self, output: torch.Tensor, given: torch.Tensor, *, group: TwoRanks, async_op: bool) -> Any:
        return self._launch("reduce-scatter", output, 2 * given.chunk(2)[0], async_op)

    def all_reduce(self, tensor: torch.Tensor, *, group: TwoRanks, async_op: bool) -> Any:
        return self._launch("all-reduce", tensor, 2 * tensor, async_op)

    def prepare(self, grad_output: torch.Tensor, total_input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.events.append("product")
        assert total_input.isfinite().all(), "read before it was there"
        return grad_output.flatten(0, 1), total_input.flatten(0, 1)

    def _launch(self, what: str, output: torch.Tensor, result: torch.Tensor, async_op: bool) -> Any:
        self._launched += 1
        name = f"{what} {self._launched}"
        if not async_op:
            output.copy_(result)
            return None
        self.events.append(name)
        output.fill_(float("nan"))

        def wait() -> None:
            self.events.append(f"wait for {name}")
            output.copy_(result)

        return SimpleNamespace(wait=wait)

    def take(self) -> list[str]:
        """Events since the last call, collectives numbered from 1."""
        events, self.events, self._launched = self.events, [], 0
        return events


@pytest.fixture
def collectives(monkeypatch: pytest.MonkeyPatch) -> Collectives:
    made = Collectives()
    monkeypatch.setattr(layers, "dist_all_gather_func", made.all_gather)
    monkeypatch.setattr(layers, "dist_reduce_scatter_func", made.reduce_scatter)
    monkeypatch.setattr(torch.distributed, "all_reduce", made.all_reduce)
    monkeypatch.setattr(layers, "get_global_memory_buffer", lambda: made.memory)
    monkeypatch.setattr(layers, "prepare_input_tensors_for_wgrad_compute", made.prepare)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    return made


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> WeightGradientQueue:
    queue = WeightGradientQueue(layers)
    monkeypatch.setattr(LINEAR, "backward", staticmethod(queue.wrap(LINEAR.backward, LINEAR.forward)))
    return queue


class Model:
    """Column- and row-parallel layers; activations between them are scattered over the sequence, or reduced."""

    def __init__(self, *, sequence_parallel: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        self._sequence_parallel = sequence_parallel
        self.weights = [torch.nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator)) for _ in STACK]
        self.biases = [torch.nn.Parameter(torch.randn(WIDTH, generator=generator)) for _ in STACK]

    def loss(self, micro_batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Input and loss."""
        generator = torch.Generator().manual_seed(10 + micro_batch)
        given = hidden = torch.randn(SEQUENCE, BATCH, WIDTH, generator=generator, requires_grad=True)
        for kind, weight, bias in zip(STACK, self.weights, self.biases, strict=True):
            scattered = kind == COLUMN and self._sequence_parallel
            reduces = kind == COLUMN and not self._sequence_parallel
            hidden = LINEAR.apply(hidden.tanh(), weight, bias, False, reduces, scattered, None, 0, GROUP)
            if kind == ROW and self._sequence_parallel:
                hidden = sum(hidden.chunk(2))  # type: ignore[assignment]
        return given, hidden.square().sum()


def train(model: Model, queue: WeightGradientQueue, *, split: bool) -> list[torch.Tensor]:
    runs = [model.loss(micro_batch) for micro_batch in range(MICRO_BATCHES)]
    left = []
    for _given, loss in runs:
        if split:
            with queue.collect() as gradients:
                loss.backward()  # type: ignore[no-untyped-call]
            left.append(gradients)
        else:
            loss.backward()  # type: ignore[no-untyped-call]
    for gradients in left:
        queue.compute(gradients)
    found = [given.grad for given, _loss in runs] + [p.grad for p in (*model.weights, *model.biases)]
    return [gradient for gradient in found if gradient is not None]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_gradients_are_bitwise_those_of_the_whole_backward(
    collectives: Collectives, queue: WeightGradientQueue, sequence_parallel: bool
) -> None:
    expected = train(Model(sequence_parallel=sequence_parallel), queue, split=False)
    actual = train(Model(sequence_parallel=sequence_parallel), queue, split=True)
    assert queue.computed == len(STACK) * MICRO_BATCHES
    assert len(actual) == len(expected) == MICRO_BATCHES + 2 * len(STACK)
    assert all(torch.equal(one, other) for one, other in zip(expected, actual, strict=True))
    assert all(one.isfinite().all() and one.abs().sum() > 0 for one in actual)


def test_inputs_are_gathered_while_the_products_before_them_run(
    collectives: Collectives, queue: WeightGradientQueue
) -> None:
    _given, loss = Model(sequence_parallel=True).loss(0)
    collectives.take()
    with queue.collect() as left:
        loss.backward()  # type: ignore[no-untyped-call]
    scatters = [f"{then}reduce-scatter {number}" for number in (1, 2, 3) for then in ("", "wait for ")]
    assert collectives.take() == scatters, "nothing is gathered where no weight gradient is computed"
    queue.compute(left)
    assert collectives.take() == [
        *("gather 1", "gather 2", "wait for gather 1", "product"),  # the output layer
        "product",  # the MLP's second layer, which is row-parallel
        *("gather 3", "wait for gather 2", "product"),
        "product",
        *("wait for gather 3", "product"),
    ]
    assert {name for name, _dtype in collectives.memory.buffer} == set(GATHER_BUFFERS)


def test_without_sequence_parallelism_w_has_no_collectives(
    collectives: Collectives, queue: WeightGradientQueue
) -> None:
    _given, loss = Model(sequence_parallel=False).loss(0)
    with queue.collect() as left:
        loss.backward()  # type: ignore[no-untyped-call]
    assert [event.split()[0] for event in collectives.take()] == ["all-reduce", "wait"] * 3
    queue.compute(left)
    assert collectives.take() == ["product"] * len(STACK)


@given(st.lists(st.booleans(), max_size=12))
def test_at_most_two_inputs_are_there_and_none_is_overwritten(scattered: list[bool]) -> None:
    """Whichever layers have scattered inputs: each is gathered into a buffer that is free, before the product ahead."""
    in_use: dict[str, int] = {}
    launched: list[int] = []
    products: list[int] = []

    class Gradient(LinearWeightGradient):
        number: int

        def gather(self, buffer: str) -> None:
            assert buffer not in in_use, "its input is still to be used"
            in_use[buffer] = self.number
            launched.append(self.number)
            ahead = [number for number in range(self.number) if scattered[number]]
            assert set(ahead[:-1]) <= set(products), "more than one layer ahead"

        def compute(self) -> None:
            due = [number for number, scatters in enumerate(scattered) if scatters]
            following = [number for number in due if number > self.number][:1]
            assert {number for number in due if number <= self.number} | set(following) <= set(launched)
            products.append(self.number)
            for buffer in [name for name, number in in_use.items() if number == self.number]:
                del in_use[buffer]

    gradients: list[Any] = []
    for number, scatters in enumerate(scattered):
        nothing: Any = torch.empty(0)
        made = Gradient(layers, nothing, nothing, nothing, None, GROUP if scatters else None)
        made.number = number
        gradients.append(made)
    for gradient in linear_wgrad._gathering_ahead(gradients):
        gradient.compute()
    assert products == list(range(len(scattered)))
    assert launched == [number for number, scatters in enumerate(scattered) if scatters]
    assert not in_use


class Stream:
    """As much of torch.cuda.Stream as is used."""

    def __init__(self, events: list[str]) -> None:
        self._events = events

    def wait_stream(self, other: Stream) -> None:
        self._events.append("wait")


def test_streams_that_the_tensors_come_from_wait_for_the_weight_gradients(
    collectives: Collectives, queue: WeightGradientQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared experts run on a stream of their own, and what it frees it uses again at once."""
    main, side = Stream(collectives.events), Stream(collectives.events)
    now = [main, side, main, main, side]
    monkeypatch.setattr(linear_wgrad, "current_stream", lambda: now.pop() if now else main)
    _given, loss = Model(sequence_parallel=False).loss(0)
    with queue.collect() as left:
        loss.backward()  # type: ignore[no-untyped-call]
    collectives.events.clear()
    queue.compute(left)
    assert collectives.events == ["product"] * len(STACK) + ["wait"]
