# SPDX-License-Identifier: Apache-2.0
"""What a user sees who asks for something impossible: a clear error on every rank, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.processes import TRAIN_GPT, RankResult

from adaptra_megatron.schedule.classic import one_f_one_b, split_backward
from adaptra_megatron.schedule.csv_format import schedule_to_csv
from adaptra_megatron.schedule.ir import Action, Kind, Schedule

STAGES, MICRO_BATCHES = 2, 4


def train(start_ranks: Callable[..., list[RankResult]], *flags: str, stages: int = STAGES) -> list[RankResult]:
    arguments = (
        f"--emulate-cpu --mock-data --pipeline-model-parallel-size {stages} --num-layers 2 --train-iters 2 "
        f"--global-batch-size {MICRO_BATCHES} --no-gradient-accumulation-fusion --adaptra"
    )
    return start_ranks(
        stages, [TRAIN_GPT, *arguments.split(), *flags], timeout_s=60, check=False, stop_on_failure=False
    )


def swapped(schedule: Schedule, stage: int, first: Action, second: Action) -> Schedule:
    """The schedule with two actions of a stage exchanged."""
    exchange = {first: second, second: first}
    order = tuple(exchange.get(action, action) for action in schedule.orders[stage])
    return replace(schedule, orders=(*schedule.orders[:stage], order, *schedule.orders[stage + 1 :]))


def broken_plans() -> dict[str, tuple[Schedule, str]]:
    """By name: a plan that cannot run, and what its error must say."""
    good = one_f_one_b(STAGES, MICRO_BATCHES)
    split = split_backward(good, 1)
    without_last = replace(good, orders=(good.orders[0][:-1], good.orders[1]))
    early_weight = swapped(split, 1, Action(1, Kind.BACKWARD_INPUT, 0, 0), Action(1, Kind.BACKWARD_WEIGHT, 0, 0))
    # Stage 0 wants the gradient of micro-batch 0 before it sends micro-batch 1, on which stage 1 insists first.
    last_first = tuple(sorted(good.orders[1], key=lambda action: action.kind is not Kind.FORWARD))
    one_by_one = tuple(sorted(good.orders[0], key=lambda action: (action.micro_batch, action.kind.value == "B")))
    deadlock = replace(good, orders=(one_by_one, last_first))
    return {
        "missing": (without_last, "stage 0 B(micro-batch 3, chunk 0) is missing"),
        "w-before-b": (early_weight, "stage 1 W(micro-batch 0, chunk 0), at position"),
        "deadlock": (deadlock, "deadlock"),
    }


@pytest.mark.timeout(90)
@pytest.mark.parametrize("name", broken_plans())
def test_impossible_plan_is_refused_by_every_rank(
    name: str, tmp_path: Path, start_ranks: Callable[..., list[RankResult]]
) -> None:
    schedule, message = broken_plans()[name]
    path = tmp_path / "plan.csv"
    path.write_text(schedule_to_csv(schedule))
    refused(train(start_ranks, "--adaptra-plan-csv", str(path)), "ConfigError", message, str(path))


@pytest.mark.timeout(90)
def test_plan_that_passes_the_cap_is_refused(tmp_path: Path, start_ranks: Callable[..., list[RankResult]]) -> None:
    path = tmp_path / "plan.csv"
    path.write_text(schedule_to_csv(split_backward(one_f_one_b(STAGES, MICRO_BATCHES), None)))
    results = train(start_ranks, "--adaptra-plan-csv", str(path), "--adaptra-max-in-flight", "3")
    refused(results, "ConfigError", "stage 0 F(micro-batch 3, chunk 0)", "its cap is 3")


@pytest.mark.timeout(90)
def test_plan_for_other_micro_batches_is_refused(tmp_path: Path, start_ranks: Callable[..., list[RankResult]]) -> None:
    path = tmp_path / "plan.csv"
    path.write_text(schedule_to_csv(one_f_one_b(STAGES, 7)))
    refused(train(start_ranks, "--adaptra-plan-csv", str(path)), "PlanMismatchError", "7 micro-batches", "has 4")


@pytest.mark.timeout(90)
@pytest.mark.parametrize("transport", ["off", "shm"])
def test_a_timeout_that_is_too_short_is_named(
    transport: str, tmp_path: Path, start_ranks: Callable[..., list[RankResult]]
) -> None:
    path = tmp_path / "plan.csv"
    path.write_text(schedule_to_csv(one_f_one_b(STAGES, MICRO_BATCHES)))
    given = ("--adaptra-plan-csv", str(path), "--adaptra-host-transport", transport, "--adaptra-timeout-s", "0.0005")
    results = train(start_ranks, *given)
    refused(results, "TransportError", "0.0005 s (--adaptra-timeout-s)")


def refused(results: list[RankResult], error: str, *messages: str) -> None:
    for result in results:
        assert result.returncode == 1, result.output
        last = result.output.strip().splitlines()[-1]
        assert error in last
        for message in messages:
            assert message in last
        assert "elapsed time per iteration" not in result.output
