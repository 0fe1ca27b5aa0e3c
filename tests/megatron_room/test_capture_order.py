# SPDX-License-Identifier: Apache-2.0
"""Which order graphs are captured in, and what is as before once they have been captured anew."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer import cuda_graphs

from adaptra_megatron.megatron import captured_layers
from adaptra_megatron.megatron.captured_layers import CapturedLayers
from adaptra_megatron.megatron.gradients.linear_wgrad import WeightGradientQueue

STOCK = [1, 1, 2, 2, -2, -2, -1, -1]
PLANNED = (1, 2, 1, -2, 2, -1, -2, -1)


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
        self.orders: list[list[int]] = []
        self._layers, self._stock, self._capture_finished = layers, stock, False

    def graphs_created(self) -> bool:
        return bool(self.layer.cuda_graphs)

    def create_cudagraphs(self) -> None:
        self._layers.capture(self, Helper._create)

    def _create(self) -> None:
        assert not self._capture_finished
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
    assert not layers.follow(PLANNED)
    assert layers.order_for(STOCK) == list(PLANNED)
    assert layers.order_for([*STOCK, *STOCK]) == [*STOCK, *STOCK], "another number of micro-batches"
    assert layers.order_for([1, 1, -1, -1]) == [1, 1, -1, -1], "an encoder before the first chunk"
    layers.follow((1, -1, 1, -1))
    assert layers.order_for([1, 1, -1, -1]) == [1, -1, 1, -1]


def test_all_is_as_before_once_captured_anew(layers: CapturedLayers, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = Helper(layers, STOCK)
    first_capture(helper, monkeypatch)
    chunk = helper.model[0]
    chunk.buffers[0].grad_data.fill_(5.0)  # accumulated by an earlier call; those of experts are zero
    assert not layers.follow(tuple(STOCK))
    assert layers.follow(PLANNED)
    assert torch.equal(chunk.buffers[0].grad_data, torch.full((3,), 5.0))
    assert not chunk.expert_parallel_buffers[0].grad_data.any()
    assert not layers.follow(PLANNED)
    assert helper.orders == [STOCK, list(PLANNED)]
    assert helper.model[0].remove_forward_pre_hook_handles
    assert helper.layer.cuda_graph_manual_hooks
    assert torch.equal(SUMS["experts", "loss"], torch.ones(2))
    assert layers.captures == 2
    helper.delete_cuda_graphs()
    assert not layers.follow(tuple(STOCK)), "the script has dropped them"


def test_where_ranks_may_fail_graphs_are_captured_by_the_iteration_that_needs_them(
    layers: CapturedLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers._deferred = True
    helper = Helper(layers, STOCK)
    first_capture(helper, monkeypatch)
    assert not helper.orders, "a rank that fails meanwhile would end the capture outside of all attempts"
    assert layers.follow(PLANNED)
    assert not layers.follow(PLANNED)
    layers.suspend()
    layers.drop()
    assert not helper.layer.cuda_graphs
    assert not layers.follow(PLANNED, warm=False), "others capture later"
    assert layers.follow(PLANNED)
    assert helper.orders == 2 * [list(PLANNED)]
    assert helper.layer.cuda_graph_manual_hooks
    helper.delete_cuda_graphs()
    layers.drop()
    assert not layers.follow(PLANNED), "the script has dropped them"


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
            layers.follow(PLANNED)
    assert kind.__call__ is len  # type: ignore[operator]
    assert not cuda_graphs.is_graph_capturing()
    assert helper.model[0].remove_forward_pre_hook_handles
    assert layers.follow(PLANNED)


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
    helper, given = Helper(layers, STOCK), torch.ones(3, requires_grad=True)
    first_capture(helper, monkeypatch)
    queue = layers._queue
    (result,) = helper.layer.cuda_graphs[0](given)
    assert queue.owned(result.view(3, 1)).data_ptr() != result.data_ptr()
    assert queue.owned(given) is given
    result.backward(torch.ones(3))
    assert given.grad is not None
    assert queue.owned(given.grad).data_ptr() != given.grad.data_ptr()
