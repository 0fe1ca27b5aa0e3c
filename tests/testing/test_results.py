# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.processes import compare_dumps

from testing.results import ResultsDifferError, TrainingResult, differences, save_result


def result(weight: torch.Tensor) -> TrainingResult:
    return TrainingResult(losses=[1.0], grad_norms=[2.0], parameters={"0.weight": weight})


def dump(directory: Path, *weights: torch.Tensor, world_size: int | None = None) -> Path:
    for rank, weight in enumerate(weights):
        save_result(result(weight), directory, rank=rank, world_size=world_size or len(weights))
    return directory


def test_equal_dumps_are_counted(tmp_path: Path) -> None:
    weights = (torch.randn(3, 4), torch.randn(3, 4))
    assert compare_dumps(dump(tmp_path / "a", *weights), dump(tmp_path / "b", *weights)) == 2 * (12 + 2)


def test_one_bit_is_found_and_named(tmp_path: Path) -> None:
    weight = torch.ones(3, 4)
    other = weight.clone()
    other[1, 2] = torch.nextafter(other[1, 2], torch.tensor(2.0))
    with pytest.raises(
        ResultsDifferError, match=r"rank 1: parameter 0.weight: 1 of 12 elements differ, by 1.192e-07 at most"
    ):
        compare_dumps(dump(tmp_path / "a", weight, weight), dump(tmp_path / "b", weight, other))


def test_missing_dumps_fail(tmp_path: Path) -> None:
    weight = torch.ones(1)
    full = dump(tmp_path / "full", weight, weight)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ResultsDifferError, match="holds no dumps"):
        compare_dumps(tmp_path / "empty", full)
    with pytest.raises(ResultsDifferError, match=r"holds 1 dumps of 2 ranks; missing: \['rank1.pt'\]"):
        compare_dumps(full, dump(tmp_path / "part", weight, world_size=2))
    with pytest.raises(ResultsDifferError, match="holds 2 ranks, .* holds 1"):
        compare_dumps(full, dump(tmp_path / "one", weight))


def test_empty_results_fail(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_result(TrainingResult(), tmp_path / name, rank=0, world_size=1)
    with pytest.raises(ResultsDifferError, match="is empty"):
        compare_dumps(tmp_path / "a", tmp_path / "b")


def test_bits_decide_not_values() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.zeros(1)
    assert differences({"x": nan}, {"x": nan.clone()}) == []
    assert differences({"x": zero}, {"x": -zero}) != []
    assert differences({"x": zero}, {"x": zero.double()}) == ["x is torch.float64 (1,), expected torch.float32 (1,)"]
    assert differences({"x": zero, "y": zero}, {"x": zero, "z": zero}) == ["y is missing", "z is not expected"]
