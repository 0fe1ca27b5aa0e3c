# SPDX-License-Identifier: Apache-2.0
"""A rank that is started again takes over, or is given up before it keeps the others."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from adaptra_megatron.common.layout import Cell, JobLayout, Worker
from adaptra_megatron.common.membership import Departure
from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.control.decisions import Decision
from adaptra_megatron.elastic.generation import Generation, GenerationId
from adaptra_megatron.elastic.process_group_manager import FaultTolerantGroups
from adaptra_megatron.engine.fault_tolerance import FaultTolerance
from adaptra_megatron.engine.rejoining import (
    Handing,
    HandOverLateError,
    Training,
    _follow,
    _Lateness,
    _receive_whole,
    _schedule,
    _send,
    handings,
)
from adaptra_megatron.megatron.state.training_state import StateError, StateReceiver, StateSender
from adaptra_megatron.tools.local_ranks.launch_ranks import RankResult
from testing.megatron.cuda_names import torch_names
from testing.replacing import Replaced

RANKS = str(Path(__file__).with_name("hand_over_ranks.py"))
MIB = 1 << 20


@pytest.mark.timeout(120)
def test_it_is_handed_over_or_given_up_in_time(start_ranks: Callable[..., list[RankResult]]) -> None:
    for result in start_ranks(2, [RANKS], timeout_s=100):
        assert "DONE" in result.output, result.output


def test_a_process_ends_once_its_groups_are_released() -> None:
    """Exit waits for the release thread: if it returned from C++ during finalization, the process would abort."""
    program = """
import ctypes, os
from adaptra_megatron.engine.rejoining import _Channel

class Group:
    def __del__(self):
        ctypes.CDLL(None).usleep(300_000)  # without the GIL, as a destructor of gloo waits
        os.write(1, b"released")

channel = object.__new__(_Channel)
channel._held = [Group()]
channel.leave()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120, check=True)
    assert done.stdout == b"released"


def test_a_process_rejoins_once() -> None:
    """A script may ask again, before other data are read."""
    feature = FaultTolerance(AdaptraConfig(reroute="failures"), FaultTolerantGroups(Departure(1, 1, "host", "", 0.0)))
    feature.training = Training([], None, None, dict)
    assert feature.rejoins
    feature.hooks(SimpleNamespace())  # type: ignore[arg-type]
    assert feature.rejoin() is None


def test_lateness_is_what_goes_beyond_the_fastest_message_and_adds_up() -> None:
    lateness = _Lateness(1.0)
    lateness.came(0.4, 0.4, 4 * MIB)  # as announced; 100 ms per MiB are the fastest so far
    for _ in range(9):
        lateness.came(1.2, 0.0, 4 * MIB)
    lateness.check(3, 2.19, 0.0, 4 * MIB)
    with pytest.raises(HandOverLateError, match=r"^ranks 3, started again, are 1\.1 s late"):
        lateness.check(3, 2.3, 0.0, 4 * MIB)
    lateness.came(0.04, 0.0, 4 * MIB)  # 10 ms per MiB
    lateness.came(0.62, 0.0, 4 * MIB)
    with pytest.raises(HandOverLateError):
        lateness.check(3, 0.63, 0.0, 4 * MIB)


def test_small_messages_say_nothing_of_large_ones() -> None:
    lateness = _Lateness(1.0)
    for _ in range(100):
        lateness.came(0.015, 0.0, 8)
    with pytest.raises(HandOverLateError):
        lateness.check(1, 1.1, 0.0, 4 * MIB)


def test_a_shard_comes_from_the_rank_with_its_copy_also_of_another_lane() -> None:
    """Rank 0 comes back, of two replicas of two lanes: its parameters from rank 2, its shard from rank 3, and from
    rank 1 the copy that it holds."""
    workers = {rank: Worker(Cell(rank // 2, 0), rank % 2, "host", "boot/net") for rank in range(4)}
    group = SimpleNamespace(ranks=(0, 1, 2, 3), holders=[3, 0, 1, 2], has_shards=False)
    optimizer = SimpleNamespace(optimizer=object(), shard_group=group)
    training = Training([], optimizer, None, dict)
    generation = Generation(GenerationId(1, 1), frozenset(range(4)), frozenset())
    found = handings(training, JobLayout(0, workers), generation, frozenset({1, 2, 3}))
    assert [(each.source, each.whole, each.shards) for each in found] == [
        (2, True, ()),
        (1, False, ((0, False),)),
        (3, False, ((0, True),)),
    ]


def test_the_schedule_is_that_of_the_others_and_other_rates_are_refused() -> None:
    """Theirs may come from a checkpoint, which a process that is started again does not load."""

    def training(max_lr: float) -> Training:
        inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(4))], lr=max_lr, weight_decay=0.5)
        weights = {"start_wd": max_lr / 8, "end_wd": max_lr / 4, "wd_incr_steps": 8, "wd_incr_style": "linear"}
        rates = {"lr_warmup_steps": 0, "lr_decay_steps": 8, "lr_decay_style": "linear"}
        scheduler = OptimizerParamScheduler(inner, init_lr=0.0, max_lr=max_lr, min_lr=0.0, **rates, **weights)
        return Training([], SimpleNamespace(optimizer=inner), scheduler, dict)

    here, there = training(1.0), training(2.0)
    here.scheduler.step(4)
    _follow(there, _schedule(here))
    (group,) = there.optimizer.optimizer.param_groups
    assert (group["lr"], there.scheduler.num_steps, there.scheduler.max_lr) == (0.5, 4, 1.0)
    assert group["weight_decay"] == here.optimizer.optimizer.param_groups[0]["weight_decay"]
    group["max_lr"] = 3.0  # of the group itself, as of --decoupled-lr
    with pytest.raises(StateError, match=r"'lr|rates"):
        _follow(there, _schedule(here))


class OnDevice(torch.Tensor):
    """A tensor of a GPU: only `cpu` makes one that another process can load, or compare with its own."""

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor)


class ScalerOnDevice(DynamicGradScaler):
    """Megatron's scaler of losses, with its scale on a GPU."""

    def state_dict(self) -> dict[str, object]:
        return {**super().state_dict(), "scale": self._scale.as_subclass(OnDevice)}


def test_a_loss_scale_comes_to_the_gpu_of_the_rank_that_receives_it() -> None:
    def training(scale: float) -> Training:
        scaler = ScalerOnDevice(scale, 1.0, 2.0, 0.5, 1000, 2)
        inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(4))])
        return Training([], SimpleNamespace(optimizer=inner, grad_scaler=scaler), None, dict)

    messages: list[torch.Tensor] = []
    with Replaced(torch_names()):
        here, there = training(2.0**16), training(2.0**20)
        here.optimizer.grad_scaler.update(found_inf=True)
        sender = StateSender(lambda message: messages.append(message.clone()))
        pipeline: Any = SimpleNamespace(counters=(3, 1), running=Decision(0))
        _send(sender, here, pipeline, Handing(0, 1, True, (), 0))
        sender.finish()
        receiver = StateReceiver(lambda message: message.copy_(messages.pop(0)))
        *_, schedule = _receive_whole(receiver, there)
        receiver.finish()
        _follow(there, schedule)
    assert there.optimizer.grad_scaler.state_dict() == here.optimizer.grad_scaler.state_dict()
    assert there.optimizer.grad_scaler.scale == 2.0**16
