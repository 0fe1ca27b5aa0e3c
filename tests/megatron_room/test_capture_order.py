# SPDX-License-Identifier: Apache-2.0
"""Which order graphs are captured in, and what is as before once they have been captured anew."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.transformer import cuda_graphs

from adaptra_megatron.megatron import captured_layers
from adaptra_megatron.megatron.captured_layers import CapturedLayers, Order, layers_in_order
from adaptra_megatron.megatron.gradients.linear_wgrad import WeightGradientQueue
from adaptra_megatron.schedule.classic import interleaved_combined
from adaptra_megatron.schedule.ir import chunks_in_order

STOCK = [1, 1, 2, 2, -2, -2, -1, -1]
PLANNED = (1, 2, 1, -2, 2, -1, -2, -1)


def alone(order: Sequence[int]) -> Order:
    return tuple((each,) for each in order)


class Chunk:
    """A chunk with hooks before its forwards."""

    def __init__(self) -> None:
        self.remove_forward_pre_hook_handles = {"module": "handle"}
        self.buffers, self.expert_parallel_buffers = [
            [SimpleNamespace(grad_data=torch.full((3,), value))] for value in (0.0, 2.0)
        ]

    def disable_forward_pre_hook(self, param_sync: bool) -> None:
        assert not param_sync
        self.remove_forward_pre_hook_handles.clear()

    def enable_forward_pre_hook(self) -> None:
        self.remove_forward_pre_hook_handles["module"] = "handle"


class Helper:
    """Megatron's helper, whose layers have one graph per micro-batch."""

    def __init__(self, layers: CapturedLayers, stock: list[int]) -> None:
        self.layer = SimpleNamespace(cuda_graphs=[], cuda_graph_manual_hooks=[])
        self.callables_per_chunk, self.model = [[self.layer]], [Chunk()]
        self.num_layers_per_chunk, self.num_model_chunks = [2], 1
        self.orders: list[list[int]] = []
        self._layers, self._stock, self._capture_finished = layers, stock, False

    def graphs_created(self) -> bool:
        return bool(self.layer.cuda_graphs)

    def create_cudagraphs(self) -> None:
        self._layers.capture(self, Helper._create)

    def _create(self) -> None:
        assert not self._capture_finished
        assert (self.num_layers_per_chunk, self.num_model_chunks) == ([2], 1)
        self.num_layers_per_chunk, self.num_model_chunks = [1, 1], 2  # as with combined 1F1B
        dist.barrier()  # there is no process group: raises unless it is kept away
        assert not any(chunk.remove_forward_pre_hook_handles for chunk in self.model)
        self.orders.append(self._layers.order_for(self._stock))
        self.layer.cuda_graphs = [lambda hidden: (2.0 * hidden,)]
        SUMS["experts", "loss"].zero_()
        for chunk in self.model:  # zero_grad_buffer
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffer.grad_data.zero_()
        self._capture_finished = True

    def delete_cuda_graphs(self) -> None:
        self.layer.cuda_graphs, self.layer.cuda_graph_manual_hooks = [], []

    def cuda_graph_set_manual_hooks(self) -> None:
        self.layer.cuda_graph_manual_hooks = ["hook"]


SUMS = {("experts", "loss"): torch.ones(2)}


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> CapturedLayers:
    monkeypatch.setattr(captured_layers, "logged_sums", lambda: SUMS)
    return CapturedLayers(WeightGradientQueue(SimpleNamespace()))  # type: ignore[arg-type]


def first_capture(helper: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a training script does it."""
    with monkeypatch.context() as patches:
        patches.setattr(dist, "barrier", lambda: None)
        helper.model[0].disable_forward_pre_hook(param_sync=False)
        helper.create_cudagraphs()
        helper.model[0].enable_forward_pre_hook()
    SUMS["experts", "loss"].fill_(1.0)
    helper.cuda_graph_set_manual_hooks()


def test_the_order_is_the_plans_and_stocks_before_there_is_one(layers: CapturedLayers) -> None:
    assert layers.order_for(STOCK) == STOCK
    assert not layers.follow(alone(PLANNED))
    assert layers.order_for(STOCK) == list(PLANNED)
    assert layers.order_for([*STOCK, *STOCK]) == [*STOCK, *STOCK], "another number of micro-batches"
    assert layers.order_for([1, 1, -1, -1]) == [1, 1, -1, -1], "an encoder before the first chunk"
    layers.follow(alone((1, -1, 1, -1)))
    assert layers.order_for([1, 1, -1, -1]) == [1, -1, 1, -1]


def test_all_is_as_before_once_captured_anew(layers: CapturedLayers, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = Helper(layers, STOCK)
    first_capture(helper, monkeypatch)
    chunk = helper.model[0]
    chunk.buffers[0].grad_data.fill_(5.0)  # accumulated by an earlier call; those of experts are zero
    assert not layers.follow(alone(STOCK))
    assert layers.follow(alone(PLANNED))
    assert torch.equal(chunk.buffers[0].grad_data, torch.full((3,), 5.0))
    assert not chunk.expert_parallel_buffers[0].grad_data.any()
    assert not layers.follow(alone(PLANNED))
    assert helper.orders == [STOCK, list(PLANNED)]
    assert helper.model[0].remove_forward_pre_hook_handles
    assert helper.layer.cuda_graph_manual_hooks
    assert torch.equal(SUMS["experts", "loss"], torch.ones(2))
    assert layers.captures == 2
    helper.delete_cuda_graphs()
    assert not layers.follow(alone(STOCK)), "the script has dropped them"


def test_where_ranks_may_fail_graphs_are_captured_by_the_iteration_that_needs_them(
    layers: CapturedLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers._deferred = True
    helper = Helper(layers, STOCK)
    first_capture(helper, monkeypatch)
    assert not helper.orders, "a rank that fails meanwhile would end the capture outside of all attempts"
    assert layers.follow(alone(PLANNED))
    assert not layers.follow(alone(PLANNED))
    layers.suspend()
    layers.drop()
    assert not helper.layer.cuda_graphs
    assert not layers.follow(alone(PLANNED), warm=False), "others capture later"
    assert layers.follow(alone(PLANNED))
    assert helper.orders == 2 * [list(PLANNED)]
    assert helper.layer.cuda_graph_manual_hooks
    helper.delete_cuda_graphs()
    layers.drop()
    assert not layers.follow(alone(PLANNED)), "the script has dropped them"


def test_a_capture_that_is_interrupted_leaves_nothing_behind(
    layers: CapturedLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper, kind = Helper(layers, STOCK), type("Layer", (SimpleNamespace,), {"__call__": len})
    helper.layer = kind(cuda_graphs=[], cuda_graph_manual_hooks=[])
    helper.callables_per_chunk = [[helper.layer]]
    first_capture(helper, monkeypatch)

    def interrupted() -> None:
        kind.__call__ = repr  # type: ignore[operator]
        cuda_graphs._set_capture_start()
        raise InterruptedError

    with monkeypatch.context() as patches:
        patches.setattr(helper, "create_cudagraphs", interrupted)
        with pytest.raises(InterruptedError):
            layers.follow(alone(PLANNED))
    assert kind.__call__ is len  # type: ignore[operator]
    assert not cuda_graphs.is_graph_capturing()
    assert helper.model[0].remove_forward_pre_hook_handles
    assert layers.follow(alone(PLANNED))


def test_layers_run_without_graphs_while_suspended(layers: CapturedLayers, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = Helper(layers, STOCK)
    first_capture(helper, monkeypatch)
    graphs = helper.layer.cuda_graphs
    for _twice in range(2):
        layers.suspend()
        assert not helper.layer.cuda_graphs
    layers.resume()
    assert helper.layer.cuda_graphs is graphs


def test_results_and_gradients_in_graphs_memory_are_copied_to_be_kept(
    layers: CapturedLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    helper, hidden = Helper(layers, STOCK), torch.ones(3, requires_grad=True)
    first_capture(helper, monkeypatch)
    queue = layers._queue
    (result,) = helper.layer.cuda_graphs[0](hidden)
    assert queue.owned(result.view(3, 1)).data_ptr() != result.data_ptr()
    assert queue.owned(hidden) is hidden
    result.backward(torch.ones(3))
    assert hidden.grad is not None
    assert queue.owned(hidden.grad).data_ptr() != hidden.grad.data_ptr()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_layers_of_stocks_combined_order_come_in_stocks_order(data: st.DataObject) -> None:
    stages, chunks = data.draw(st.integers(2, 4)), data.draw(st.integers(2, 3))
    stage = data.draw(st.integers(0, stages - 1))
    micro_batches = stages * data.draw(st.integers(chunks, 4))
    counts = data.draw(st.lists(st.integers(1, 3), min_size=chunks, max_size=chunks))
    weights = data.draw(st.booleans())
    warm_up = 2 * (stages - stage - 1) + (chunks - 1) * stages
    table = get_schedule_table(micro_batches, chunks, stages)
    stock = cuda_graphs.convert_schedule_table_to_order(warm_up, chunks, table)
    expected = cuda_graphs.get_overlap_moe_expert_parallel_comm_order(stock, counts, weights)
    own = chunks_in_order(interleaved_combined(stages, micro_batches, chunks).orders[stage])
    assert layers_in_order(own, counts, weights) == expected


def test_layers_of_what_is_not_combined_do_not_alternate(layers: CapturedLayers) -> None:
    def stock() -> Any:
        raise AssertionError("the plan's order is known")

    order = (1,), (2,), (-2,), (1, -1), (2,), (-2,), (-1,)
    layers.follow(order)
    assert layers.order_for([1, 2, 1, -2, 2, -1, -2, -1]) == [1, 2, -2, 1, -1, 2, -2, -1]
    found, places = layers.layers_for(stock, [2, 1], False)
    assert found == [1, 2, 3, -3, 1, -2, 2, -1, 3, -3, -2, -1]
    assert places == [[0, 0], [0, 1], [1, 0], None, [0, 0], None, [0, 1], None, [1, 0], None, None, None]
    found, _places = layers.layers_for(stock, [2, 1], True)
    assert found == [1, 2, 3, -3, -3.5, 1, -2, -2.5, 2, -1, -1.5, 3, -3, -3.5, -2, -2.5, -1, -1.5]
    layers.order_for([1, 1, 1, -1, -1, -1])
    assert layers.layers_for(lambda: ([1.0], [None]), [1], False) == ([1.0], [None]), "stock's, of another number"
