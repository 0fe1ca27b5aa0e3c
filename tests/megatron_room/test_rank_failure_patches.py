# SPDX-License-Identifier: Apache-2.0
"""Start, log and checkpoints of Megatron-LM where ranks fail and are started again."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from adaptra_megatron.patches.rank_failure_patches import FAULT_TOLERANCE_PATCHES


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


def test_the_last_live_rank_of_the_last_stage_prints_losses() -> None:
    groups = SimpleNamespace(rank=2, last_live=None)
    for stock in (True, False):
        assert patched("last-rank", lambda stock=stock: stock, groups)() is stock, "before ranks may fail"
    for groups.last_live in (2, 3):
        assert patched("last-rank", lambda: False, groups)() is (groups.last_live == 2)
