# SPDX-License-Identifier: Apache-2.0
"""Start, log and checkpoints of Megatron-LM where ranks fail and are started again."""

from __future__ import annotations

import itertools
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from adaptra_megatron.patches.rank_failure_patches import FAULT_TOLERANCE_PATCHES

from adaptra_megatron.common.membership import Departure, MembershipRecords
from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.elastic.process_group_manager import FaultTolerantGroups
from adaptra_megatron.engine.fault_tolerance import FaultTolerance


def patched(identity: str, stock: Any, groups: Any) -> Any:
    """Stock's function with one patch, in a job with these groups."""
    (patch,) = (each for each in FAULT_TOLERANCE_PATCHES if each.identity == identity)
    feature = SimpleNamespace(groups=groups, training=None)
    runtime: Any = SimpleNamespace(feature=lambda _kind: feature)
    return patch.replace(stock, runtime)


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = SimpleNamespace(load="saved", pretrained_checkpoint="first", no_save_rng=False)
    found.data_parallel_random_init, found.expert_model_parallel_size, found.ckpt_format = False, 1, "torch_dist"
    monkeypatch.setitem(sys.modules, "megatron.training", SimpleNamespace(get_args=lambda: found))
    return found


@pytest.mark.parametrize(("place", "loaded"), [(None, ["saved", "first"]), (3, [None, None])])
def test_a_process_that_is_started_again_loads_no_checkpoint(place: int | None, loaded: list[Any], args: Any) -> None:
    """All ranks would have to meet for it, and it receives all state."""
    seen = []

    def setup_model_and_optimizer() -> Any:
        seen.append([args.load, args.pretrained_checkpoint])
        return [], None, None

    patched("setup-model-and-optimizer", setup_model_and_optimizer, SimpleNamespace(place=place))()
    assert seen == [loaded]
    assert (args.load, args.pretrained_checkpoint) == ("saved", "first"), "they are compared, and saved"
    assert not hasattr(args, "moe_use_upcycling")


@pytest.mark.parametrize(
    "own", [{}, {"expert_model_parallel_size": 2}, {"data_parallel_random_init": True}, {"no_save_rng": True}]
)
def test_random_states_of_each_replica_are_saved_by_all_or_left_out(own: dict[str, Any], args: Any) -> None:
    vars(args).update(own)
    groups = SimpleNamespace(is_whole=True)
    get_rng_state = patched("random-states", lambda: "states", groups)
    asked, left_out = args.no_save_rng, []
    for groups.is_whole in (True, False, True):
        assert get_rng_state() == "states"
        left_out.append(args.no_save_rng)
    assert left_out == [asked, asked or bool(own), asked]


class Records:
    """The launcher's part of the job's store."""

    def __init__(self) -> None:
        self._written: dict[int, str] = {}

    def publish_groups(self, number: int, keys: str) -> None:
        self._written[number] = keys

    def groups(self, number: int) -> str:
        return self._written.get(number, "")


def test_a_process_that_is_started_again_has_the_groups_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also empty ones: optimizers of dense stages have groups of experts, where other stages have these."""
    records = Records()
    monkeypatch.setattr(MembershipRecords, "of_rank", lambda _timeout_s: records)
    (patch,) = (each for each in FAULT_TOLERANCE_PATCHES if each.identity == "parameter-groups")
    others = [[((("wd_mult", 0.0),), False), (None, True)], [(None, False)]]

    def groups_of(place: Departure | None, rank: int, gathered: list[Any]) -> list[Any]:
        made = FaultTolerantGroups(place)
        made.rank = rank
        feature = FaultTolerance(AdaptraConfig(reroute="failures"), made)
        runtime: Any = SimpleNamespace(feature=lambda _kind: feature)

        def stock() -> list[Any]:
            found = [None for _ in gathered]
            dist.all_gather_object(found, None)
            return list(dict.fromkeys(itertools.chain.from_iterable(found)))  # type: ignore[arg-type]

        def gather(found: list[Any], _own: Any) -> None:
            found[:] = gathered

        monkeypatch.setattr(dist, "all_gather_object", gather)
        result: list[Any] = patch.replace(stock, runtime)()
        assert dist.all_gather_object is gather
        return result

    whole = groups_of(None, 0, others)
    assert groups_of(None, 1, others) == whole
    own = [(None, False)]
    assert groups_of(Departure(1, 1, "host", "", 0.0), 1, [own, own]) == [*own, *whole[:2]]
    records.__init__()  # type: ignore[misc]
    assert groups_of(Departure(1, 1, "host", "", 0.0), 1, [own, own]) == own, "before the job's first iteration"


def test_the_last_live_rank_of_the_last_stage_prints_losses() -> None:
    groups = SimpleNamespace(rank=2, last_live=None)
    for stock in (True, False):
        assert patched("last-rank", lambda stock=stock: stock, groups)() is stock, "before ranks may fail"
    for groups.last_live in (2, 3):
        assert patched("last-rank", lambda: False, groups)() is (groups.last_live == 2)
