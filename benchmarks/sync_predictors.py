# SPDX-License-Identifier: Apache-2.0
"""Predictions of workers' next times: robust statistics and a small learned model, on recorded jobs.

    python benchmarks/sync_predictors.py TRACE.parquet... [--output benchmarks/results/sync_predictors.md]

A worker's time is that of all its forwards and backwards of a step. Each step from the ninth on is predicted from those
before it. A straggler takes more than 1.2 times as long as the fastest worker of the step, by its prediction and in
fact. TRACE: as `adaptra analyze` reads.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet
from numpy.typing import NDArray

from adaptra_megatron.gradsync.mode_decider import KEPT, predicted_s
from adaptra_megatron.gradsync.sync_modes import stragglers

FIRST, WINDOW = 8, 24
"""Steps that are not predicted, and those that autoregression learns from at most."""
Times = NDArray[np.float64]


def autoregressive(order: int) -> Callable[[Times], float]:
    """Least squares over the last `order` times, with a small ridge, learned anew from the window before each step."""

    def predict(history: Times) -> float:
        known = history[-WINDOW:]
        mean = float(known.mean())
        if len(known) < 2 * order + 2:
            return float(np.median(known))
        inputs = np.array([known[at : at + order] for at in range(len(known) - order)]) - mean
        inputs = np.hstack([inputs, np.ones((len(inputs), 1))])
        square = inputs.T @ inputs
        ridge = 1e-3 * np.trace(square) / len(square) * np.eye(len(square))
        weights = np.linalg.solve(square + ridge, inputs.T @ (known[order:] - mean))
        return mean + float(np.append(known[-order:] - mean, 1.0) @ weights)

    return predict


PREDICTORS: dict[str, Callable[[Times], float]] = {
    "last": lambda history: float(history[-1]),
    "median of 3": lambda history: float(np.median(history[-3:])),
    f"median of {KEPT} (shipped)": lambda history: predicted_s(history[-KEPT:].tolist()),
    "median of 9": lambda history: float(np.median(history[-9:])),
    "mean of 5": lambda history: float(history[-5:].mean()),
    **{f"autoregression, order {order}": autoregressive(order) for order in (1, 2, 3, 5)},
}


def times_of(trace: Path) -> Times:
    """Seconds by worker and step."""
    table = pyarrow.parquet.read_table(trace)
    ranks, steps, kinds, seconds = (
        table.column(name).to_numpy(zero_copy_only=False) for name in ("rank", "step", "optype", "duration")
    )
    computes = np.isin(kinds, ["forward-compute", "backward-compute"])
    (_, row), (_, column) = (np.unique(each[computes], return_inverse=True) for each in (ranks, steps))
    found = np.zeros((row.max() + 1, column.max() + 1))
    np.add.at(found, (row, column), seconds[computes])
    return found


def scores(times_s: Times, predict: Callable[[Times], float]) -> tuple[float, float, float]:
    """Mean and 95th percentile of relative errors, and the share of workers wrongly held for stragglers or for none."""
    errors, wrong, judged = [], 0, 0
    for step in range(FIRST, times_s.shape[1]):
        predicted = np.array([predict(history[:step]) for history in times_s])
        actual = times_s[:, step]
        errors.append(np.abs(predicted / actual - 1))
        wrong += len(stragglers(predicted.tolist()) ^ stragglers(actual.tolist()))
        judged += len(actual)
    every = np.concatenate(errors)
    return float(every.mean()), float(np.percentile(every, 95)), wrong / judged


def main() -> None:
    """Score all predictors on all traces."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("results") / "sync_predictors.md")
    options = parser.parse_args()
    lines = [
        "# Predictions of workers' times",
        "",
        "Written by `python benchmarks/sync_predictors.py trace-ST.parquet trace-AR.parquet trace-SE.parquet`, for the "
        "recorded jobs of the study of stragglers of OSDI '25. In AR one worker is slow; in ST the last stages are; in "
        "SE sequences differ in length, at random, so that nothing foretells who is slow.",
        "",
        "| job | workers | prediction | mean error | 95% below | stragglers wrong |",
        "|---|---|---|---|---|---|",
    ]
    for trace in options.traces:
        times_s = times_of(trace)
        for name, predict in PREDICTORS.items():
            mean, high, wrong = scores(times_s, predict)
            job = trace.stem.rpartition("-")[2]
            lines.append(f"| {job} | {len(times_s)} | {name} | {mean:.2%} | {high:.2%} | {wrong:.2%} |")
    text = "\n".join(lines) + "\n"
    options.output.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
