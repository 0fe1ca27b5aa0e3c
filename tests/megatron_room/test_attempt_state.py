# SPDX-License-Identifier: Apache-2.0
"""An attempt at an iteration begins with what the one before it began with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from megatron.core import rerun_state_machine
from megatron.core.rerun_state_machine import RerunMode, RerunState, RerunStateMachine
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from torch.distributed import HashStore

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.layout import Cell, JobLayout, Worker
from adaptra_megatron.megatron import compat
from adaptra_megatron.megatron.compat import logged_sums
from adaptra_megatron.megatron.state import attempt_state
from adaptra_megatron.megatron.state.attempt_state import AttemptState, MicroBatchRandom


class Router(torch.nn.Module):
    """Buffers of Megatron's TopKRouter, and what changes them."""

    local_tokens_per_expert: torch.Tensor
    expert_bias: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("local_tokens_per_expert", torch.zeros(4), persistent=False)
        self.register_buffer("expert_bias", torch.full((4,), 0.25, dtype=torch.bfloat16))

    def compute(self) -> None:
        """Count tokens as `_apply_expert_bias`; the bias is in new memory after `_maintain_float32_expert_bias`."""
        self.expert_bias.data = self.expert_bias.data.to(torch.float32)
        self.local_tokens_per_expert += torch.tensor([3.0, 1.0, 0.0, 4.0])

    def finish(self) -> None:
        """Move the bias as finalize_model_grads."""
        offset = self.local_tokens_per_expert.mean() - self.local_tokens_per_expert
        self.expert_bias.copy_(self.expert_bias + torch.sign(offset) * 1e-3)
        self.local_tokens_per_expert.zero_()


@pytest.fixture(autouse=True)
def _no_sums(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", {})
    _forget_expert_sums()
    yield
    _forget_expert_sums()


def _forget_expert_sums() -> None:
    try:
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    except ImportError:
        moe_utils.get_moe_layer_wise_logging_tracker().clear()
    else:
        destroy_moe_metrics_tracker()


@pytest.mark.parametrize("interrupted", ["while it computes", "after the bias was moved"])
def test_routers_begin_as_the_attempt_before(interrupted: str) -> None:
    router = Router()
    expected_tokens, expected_bias = router.local_tokens_per_expert.clone(), router.expert_bias.float().clone()
    state = AttemptState([router])
    state.keep()
    router.compute()
    if interrupted != "while it computes":
        router.finish()
    bias = router.expert_bias
    state.restore()
    assert torch.equal(router.local_tokens_per_expert, expected_tokens)
    assert torch.equal(router.expert_bias, expected_bias)
    assert router.expert_bias is bias, "graphs and views know this memory"
    state.keep()
    router.compute()
    state.restore()
    assert torch.equal(router.local_tokens_per_expert, expected_tokens), "the next iteration"


def test_a_bias_is_the_same_where_routes_leave_a_router_without_a_forward() -> None:
    idle, others = Router(), Router()
    for router in (idle, others):
        AttemptState([router])
    others.compute()
    idle.local_tokens_per_expert.copy_(others.local_tokens_per_expert)  # as finalize_model_grads sums them up
    for router in (idle, others):
        router.finish()
    assert torch.equal(idle.expert_bias.float(), others.expert_bias)


def test_sums_for_the_log_hold_each_micro_batch_once() -> None:
    def compute() -> None:
        experts_save = cast(Any, moe_utils).save_to_aux_losses_tracker
        experts_save("load_balancing_loss", torch.tensor(2.0), 1, 3)
        MTPLossLoggingHelper.tracker.setdefault("values", torch.zeros(2))[1] += 5.0

    state = AttemptState([])
    state.keep()
    compute()
    state.restore()
    assert len(logged_sums()) == 2
    assert not any(each.any() for each in logged_sums().values()), "the first attempt made them"
    compute()
    state.keep()
    compute()
    state.restore()
    assert sorted(each.tolist() for each in logged_sums().values()) == [[0.0, 5.0], [2.0, 0.0, 0.0]]


def test_suspicious_results_of_an_attempt_that_is_given_up_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron would repeat the iteration for them, and end the job as its results differ."""
    machine = RerunStateMachine(mode=RerunMode.VALIDATE_RESULTS)
    machine.state, machine.first_iteration_complete = RerunState.INITIAL_RUN, True
    monkeypatch.setattr(rerun_state_machine, "_GLOBAL_RERUN_STATE_MACHINE", machine)
    before = dict(vars(machine), validation_counts={}, logged_sdc_enabled=True)

    def attempt(loss: float) -> None:
        machine.validate_result(torch.tensor(loss), torch.isnan, message="NaN", tolerance=0.0, fatal=True)

    machine.logged_sdc_enabled = True
    state = AttemptState([])
    state.keep()
    attempt(float("nan"))
    assert machine.rerun_requested
    for _ in range(2):
        state.restore()
        assert vars(machine) == before
        attempt(1.0)
    assert not machine.rerun_requested
    assert list(machine.validation_counts.values()) == [1]


@pytest.mark.parametrize("computes", [True, False])
def test_sums_of_redistributed_micro_batches_are_averaged_as_all_would(
    computes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of four data-parallel ranks live, with equal sums; one that has been started again may compute nothing."""
    sizes: list[int] = []

    def all_reduce(numbers: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM, group: object = None) -> None:
        if op == torch.distributed.ReduceOp.MAX:
            numbers.fill_(2)
        else:
            sizes.append(numbers.numel())
            numbers *= 2

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    state, sums = AttemptState([]), torch.tensor([1.0, 0.0])
    if computes:
        MTPLossLoggingHelper.tracker["values"] = sums
    state.keep()
    if computes:
        sums += torch.tensor([3.0, 4.0])
    waited: list[int] = []
    group: Any = SimpleNamespace(size=lambda: 4, members=(0, 2))
    state.average_sums(group, lambda: waited.append(len(sizes)))
    assert (sizes, waited) == ([2], [0]), "the device is waited for with checks before it is read from"
    assert sums.tolist() == ([1.0 + 2 * 3.0 / 4, 2 * 4.0 / 4] if computes else [1.0, 0.0])


def test_sums_that_are_averaged_are_not_averaged_again_by_those_that_computed_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cell without micro-batches knows no groups, and would leave its peers waiting in their reductions."""
    tracker: dict[str, Any] = {"values": torch.ones(1), "reduce_group": None, "avg_group": "all replicas"}
    experts: dict[str, Any] = {"load_balancing_loss": {"values": torch.ones(1), "reduce_group": "tensor-parallel"}}
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", tracker)
    monkeypatch.setattr(compat, "_has_metrics_tracker", lambda: False)
    monkeypatch.setattr(moe_utils, "get_moe_layer_wise_logging_tracker", lambda: experts)
    for size in (1, 2):
        lanes = SimpleNamespace(size=lambda size=size: size)
        compat.mark_averaged(SimpleNamespace(cp=lanes))
        assert tracker["avg_group"] is (lanes if size == 2 else None)
    assert experts["load_balancing_loss"]["reduce_group_has_dp"] is True


def test_a_cell_without_micro_batches_averages_losses_with_its_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron forgets the group with each log, and a forward says it again."""
    tracker: dict[str, Any] = {}
    monkeypatch.setattr(MTPLossLoggingHelper, "tracker", tracker)
    assert compat.average_group(None) is None
    assert tracker == {}, "another stage's"
    tracker |= {"values": torch.ones(1), "avg_group": "replicas"}
    known = compat.average_group(None)
    tracker["avg_group"] = None
    assert compat.average_group(known) == tracker["avg_group"] == "replicas"


def test_streams_that_are_equal_on_two_lanes_stay_so_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensor-parallel ranks draw from the default stream for activations that they hold all of, and from
    model-parallel-rng for their own part."""
    control, drawn = ControlStore(HashStore(), bytes(32), "job"), []
    tracker = SimpleNamespace(get_states=dict, fork=lambda _name: nullcontext())
    monkeypatch.setattr(attempt_state, "get_cuda_rng_tracker", lambda: tracker)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.zeros(16, dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: drawn.append(seed))
    workers = {each: Worker(Cell(0, 0), each, "host", "boot/net") for each in range(2)}
    for lane in workers:
        tracker.get_states = lambda lane=lane: {"model-parallel-rng": torch.full((16,), lane, dtype=torch.uint8)}
        torch.manual_seed(5)
        MicroBatchRandom.agreed(control, JobLayout(lane, workers), 5.0, says=True).begin(3, 0, 1, 0)
        drawn.append(int(torch.randint(1 << 62, ())))
    (gpu, own, cpu), (other_gpu, other_own, other_cpu) = drawn[:3], drawn[3:]
    assert (gpu, cpu) == (other_gpu, other_cpu)
    assert own != other_own
