# SPDX-License-Identifier: Apache-2.0
"""The table is applied all or nothing, once, and taken back to the very same objects."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import megatron.core
import pytest
import torch
from adaptra_megatron.patches import (
    CAPTURE_PATCHES,
    PATCHES,
    WATCHING_PATCHES,
    AppliedPatches,
    Patch,
    PatchError,
    application,
    check_versions,
    enable,
)
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import layers

from adaptra_megatron.config import AdaptraConfig

FIRST = PATCHES[0]


def in_place() -> list[Any]:
    """What stands where the table patches, staticmethods as such."""
    return [vars(owner)[attribute] for owner, attribute in (patch.owner() for patch in PATCHES)]


@pytest.fixture(autouse=True)
def stock() -> Iterator[list[Any]]:
    """What Megatron itself has there; every test ends with it, the very same objects."""
    before = in_place()
    yield before
    after = in_place()
    for patch, one, other in zip(PATCHES, before, after, strict=True):
        if one is not other:
            owner, attribute = patch.owner()
            setattr(owner, attribute, one)
    assert all(one is other for one, other in zip(before, after, strict=True)), "left patched"


@pytest.fixture
def enabled() -> Iterator[AppliedPatches]:
    applied = enable(AdaptraConfig())
    yield applied
    applied.undo()


def replace_table(monkeypatch: pytest.MonkeyPatch, *patches: Patch) -> None:
    monkeypatch.setattr(application, "PATCHES", patches)


class TestTable:
    @pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.identity)
    def test_every_target_is_there_with_the_parameters_that_are_used(self, patch: Patch) -> None:
        owner, attribute = patch.owner()
        assert set(patch.parameters) <= set(inspect.signature(getattr(owner, attribute)).parameters)
        assert patch.parameters
        assert len(patch.reason) > 20

    def test_identities_and_targets_are_unique(self) -> None:
        assert len({patch.identity for patch in PATCHES}) == len({patch.target for patch in PATCHES}) == len(PATCHES)

    def test_the_installed_version_is_in_every_window(self) -> None:
        check_versions(PATCHES)

    def test_every_schedule_that_megatron_chooses_from_is_patched(self) -> None:
        names = {patch.target.partition(":")[2] for patch in PATCHES}
        for pp_size, vp_size in ((1, None), (2, None), (2, 2)):
            assert schedules.get_forward_backward_func(pp_size, vp_size).__name__ in names

    @pytest.mark.parametrize(
        "target",
        [
            "megatron.core.no_such_module:x",
            "megatron.core.tensor_parallel.layers:NoSuchClass.backward",
            "torch:nothing",
        ],
    )
    def test_a_target_that_is_not_there(self, target: str) -> None:
        patch = dataclasses.replace(FIRST, target=target)
        with pytest.raises(PatchError, match=f"patch {FIRST.identity}: there is no {target}.*Install megatron-core"):
            patch.owner()


class TestEnabling:
    def test_all_targets_are_replaced_and_put_back(self, stock: list[Any]) -> None:
        applied = enable(AdaptraConfig())
        assert applied.identities == tuple(patch.identity for patch in (*PATCHES, *WATCHING_PATCHES, *CAPTURE_PATCHES))
        assert all(ours is not theirs for ours, theirs in zip(in_place(), stock, strict=True))
        assert isinstance(vars(layers.LinearWithGradAccumulationAndAsyncCommunication)["backward"], staticmethod)
        for pp_size, vp_size, theirs in ((2, None, stock[0]), (2, 2, stock[1]), (1, None, stock[2])):
            chosen = schedules.get_forward_backward_func(pp_size, vp_size)
            assert chosen is not theirs
            assert chosen.__wrapped__ is theirs
        applied.undo()
        assert all(back is theirs for back, theirs in zip(in_place(), stock, strict=True))
        applied.undo()

    def test_what_a_script_does_not_use_is_patched_where_it_does(self, monkeypatch: pytest.MonkeyPatch) -> None:
        training: Any = ModuleType("megatron.training.training")

        def save_checkpoint(iteration: int, model: Any, optimizer: Any, opt_param_scheduler: Any) -> tuple[int, Any]:
            return iteration, model

        training.save_checkpoint = save_checkpoint
        monkeypatch.setitem(sys.modules, training.__name__, training)
        applied = enable(AdaptraConfig())
        assert "save-checkpoint" in applied.identities
        assert training.save_checkpoint is not save_checkpoint
        assert training.save_checkpoint(7, "model", None, opt_param_scheduler=None) == (7, "model")
        applied.undo()
        assert training.save_checkpoint is save_checkpoint

    def test_modules_that_have_imported_a_schedule_by_its_name_get_ours(
        self, stock: list[Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        name = FIRST.target.partition(":")[2]
        train: Any = ModuleType("megatron.bridge.training.train")
        setattr(train, name, stock[0])
        monkeypatch.setitem(sys.modules, train.__name__, train)
        applied = enable(AdaptraConfig())
        assert getattr(train, name) is getattr(schedules, name) is not stock[0]
        assert applied.identities == tuple(patch.identity for patch in (*PATCHES, *WATCHING_PATCHES, *CAPTURE_PATCHES))
        applied.undo()
        assert getattr(train, name) is stock[0]

    def test_again_with_the_same_settings_is_the_same(self, enabled: AppliedPatches) -> None:
        ours = in_place()
        assert enable(AdaptraConfig()) is enabled
        assert all(one is other for one, other in zip(ours, in_place(), strict=True))

    def test_again_with_other_settings_is_refused(self, enabled: AppliedPatches) -> None:
        ours = in_place()
        with pytest.raises(PatchError, match="in force already with other settings"):
            enable(AdaptraConfig(policy="observe"))
        assert all(one is other for one, other in zip(ours, in_place(), strict=True))

    def test_after_undoing_other_settings_are_fine(self) -> None:
        enable(AdaptraConfig()).undo()
        other = enable(AdaptraConfig(policy="observe"))
        assert other.runtime is not None
        other.undo()

    def test_policy_off_touches_nothing(self, stock: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(megatron.core, "__version__", "0.1")
        applied = enable(AdaptraConfig(policy="off"))
        assert all(one is other for one, other in zip(stock, in_place(), strict=True))
        assert (applied.runtime, applied.identities) == (None, ())
        applied.undo()

    @pytest.mark.parametrize("version", ["0.13.1", "0.14.0rc0", "0.21.0", "0.21.0rc0", "1.0"])
    def test_versions_outside_the_window_are_refused(
        self, monkeypatch: pytest.MonkeyPatch, stock: list[Any], version: str
    ) -> None:
        monkeypatch.setattr(megatron.core, "__version__", version)
        with pytest.raises(PatchError, match=f"{FIRST.identity}.*>=0.14,<0.21, but {version} is installed"):
            enable(AdaptraConfig())
        assert all(one is other for one, other in zip(stock, in_place(), strict=True))

    @pytest.mark.parametrize(
        "version", ["0.14.0", "0.16.2rc1", "0.16.5+local", "0.17.0rc0", "0.19.2", "0.20.0+d98e8a6"]
    )
    def test_versions_inside_the_window_are_accepted(self, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
        """What is on by default is so in all of them."""
        monkeypatch.setattr(megatron.core, "__version__", version)
        check_versions((*PATCHES, *WATCHING_PATCHES))


class TestAllOrNothing:
    @pytest.mark.parametrize("position", range(len(PATCHES) + 1))
    def test_one_that_does_not_fit_takes_the_others_back(
        self, monkeypatch: pytest.MonkeyPatch, stock: list[Any], position: int
    ) -> None:
        bad = dataclasses.replace(FIRST, identity="unfit", target=f"{__name__}:with_other_parameters")
        replaced: list[str] = []
        table = [dataclasses.replace(patch, replace=_noting(patch, replaced)) for patch in PATCHES]
        replace_table(monkeypatch, *table[:position], bad, *table[position:])
        with pytest.raises(PatchError, match="patch unfit: .* has no parameter forward_step_func.*Nothing has been"):
            enable(AdaptraConfig())
        assert replaced == [patch.identity for patch in PATCHES[:position]], "the earlier ones were in force"
        assert all(one is other for one, other in zip(stock, in_place(), strict=True))

    def test_a_missing_target_is_seen_before_anything_is_replaced(
        self, monkeypatch: pytest.MonkeyPatch, stock: list[Any]
    ) -> None:
        replaced: list[str] = []
        table = [dataclasses.replace(patch, replace=_noting(patch, replaced)) for patch in PATCHES]
        missing = dataclasses.replace(FIRST, identity="gone", target="megatron.core.pipeline_parallel.schedules:gone")
        replace_table(monkeypatch, *table, missing)
        with pytest.raises(PatchError, match="patch gone: there is no"):
            enable(AdaptraConfig())
        assert replaced == []
        assert all(one is other for one, other in zip(stock, in_place(), strict=True))

    def test_any_error_of_a_replacement_takes_the_others_back(
        self, monkeypatch: pytest.MonkeyPatch, stock: list[Any]
    ) -> None:
        def fail(*_: Any) -> Any:
            raise ZeroDivisionError("a bug of ours")

        replace_table(monkeypatch, *PATCHES[:-1], dataclasses.replace(PATCHES[-1], replace=fail))
        with pytest.raises(ZeroDivisionError, match="a bug of ours"):
            enable(AdaptraConfig())
        assert all(one is other for one, other in zip(stock, in_place(), strict=True))


def with_other_parameters(nothing_that_is_expected: int) -> None:
    """A target that is not what a patch was written for."""


def _noting(patch: Patch, replaced: list[str]) -> Callable[..., Any]:
    def replace(original: Any, runtime: Any) -> Any:
        replaced.append(patch.identity)
        return patch.replace(original, runtime)

    return replace


class TestUndoing:
    def test_what_others_replaced_later_is_left_and_named(self, stock: list[Any]) -> None:
        applied = enable(AdaptraConfig())
        owner, attribute = FIRST.owner()
        ours = vars(owner)[attribute]
        setattr(owner, attribute, _overlay)
        try:
            with pytest.raises(PatchError, match=f"{FIRST.target} was replaced by other code after --adaptra"):
                applied.undo()
            assert vars(owner)[attribute] is _overlay, "their wrapper is not ours to remove"
            assert all(one is other for one, other in zip(stock[1:], in_place()[1:], strict=True))
            assert ours is not stock[0]
        finally:
            setattr(owner, attribute, stock[0])

    def test_the_runtime_is_closed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        applied = enable(AdaptraConfig())
        closed: list[bool] = []
        monkeypatch.setattr(applied.runtime, "close", lambda: closed.append(True))
        applied.undo()
        assert closed == [True]


def _overlay(**arguments: Any) -> None:
    """What another package puts in place of a schedule."""


class TestPatched:
    def test_the_schedule_of_a_single_stage_is_handed_to_the_runtime(
        self, enabled: AppliedPatches, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        handed: list[tuple[Any, Any]] = []

        def run_stock(stock: Any, arguments: Any) -> str:
            handed.append((stock, arguments))
            return "losses"

        monkeypatch.setattr(enabled.runtime, "run_stock", run_stock)
        assert schedules.get_forward_backward_func(1, None)(num_microbatches=1, seq_length=1) == "losses"
        ((stock, arguments),) = handed
        assert arguments == {"num_microbatches": 1, "seq_length": 1}
        assert stock.__name__ == "forward_backward_no_pipelining"
        assert not hasattr(stock, "__wrapped__"), "Megatron's own"

    @pytest.mark.parametrize(("vp_size", "interleaved"), [(None, False), (2, True)])
    def test_the_schedules_call_the_runtime_and_return_what_it_returns(
        self, enabled: AppliedPatches, monkeypatch: pytest.MonkeyPatch, vp_size: int | None, interleaved: bool
    ) -> None:
        calls: list[tuple[Any, bool]] = []

        def forward_backward(arguments: Any, *, interleaved: bool, stock: Any) -> str:
            calls.append((arguments, interleaved))
            return "losses"

        monkeypatch.setattr(enabled.runtime, "forward_backward", forward_backward)
        assert schedules.get_forward_backward_func(2, vp_size)(model="model", num_microbatches=3) == "losses"
        assert calls == [({"model": "model", "num_microbatches": 3}, interleaved)]

    def test_linear_layers_split_while_a_split_backward_runs_and_not_else(self, enabled: AppliedPatches) -> None:
        weight = torch.nn.Parameter(torch.ones(2, 2))

        def output() -> torch.Tensor:
            given = torch.ones(3, 1, 2, requires_grad=True)
            linear = layers.LinearWithGradAccumulationAndAsyncCommunication
            return linear.apply(given, weight, None, False, False, False, None, 0, None).sum()

        assert enabled.runtime is not None
        queue = enabled.runtime.weight_gradients
        with queue.collect() as left:
            output().backward()
        assert weight.grad is None
        queue.compute(left)
        assert weight.grad is not None
        split = weight.grad.clone()
        weight.grad = None
        output().backward()
        assert torch.equal(weight.grad, split)
        assert queue.computed == 1
