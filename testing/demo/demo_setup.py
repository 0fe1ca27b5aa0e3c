# SPDX-License-Identifier: Apache-2.0
"""Set up the demonstration: model, emulated machine, and a lower bound of its iteration time."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from adaptra_megatron.schedule.bounds import lower_bound
from adaptra_megatron.schedule.costs import LinkCost, uniform_costs

STOCK, ADAPTRA = "stock", "adaptra"


@dataclass(frozen=True, kw_only=True)
class DemoSetup:
    """A GPT on a pipeline whose link between two stages turns slow at iteration `slow_from` (counted from 0).

    Raises ValueError if one of the two halves would be empty.
    """

    iterations: int = 24
    micro_batches: int = 16
    stages: int = 4
    slow_stages: tuple[int, int] = (1, 2)
    latency_s: float = 0.060
    forward_s: float = 0.030
    backward_input_s: float = 0.030
    backward_weight_s: float = 0.030
    max_in_flight: int = 6
    """1.5 times the activations of stock's first stage."""

    def __post_init__(self) -> None:
        if self.iterations < 2:
            raise ValueError(f"{self.iterations} iterations have no half before and after the link turns slow: take 2")
        if self.micro_batches < 1:
            raise ValueError(f"{self.micro_batches} micro-batches are no batch: take at least 1")

    @property
    def slow_from(self) -> int:
        """Return the first slow iteration: the middle of the run."""
        return self.iterations // 2

    @property
    def link(self) -> str:
        return f"link {self.slow_stages[0]}-{self.slow_stages[1]}"

    @property
    def compute_ms(self) -> str:
        """Return times of F, B and W in the form of --emulate-compute-ms."""
        times_s = (self.forward_s, self.backward_input_s, self.backward_weight_s)
        return ",".join(f"{1e3 * time_s:g}" for time_s in times_s)

    def lower_bound_s(self, *, slow: bool) -> float:
        """Return a lower bound in seconds for one iteration, over all orders within the cap."""
        first, second = self.slow_stages
        cost = LinkCost(latency_s=self.latency_s if slow else 0.0)
        costs = uniform_costs(
            self.stages,
            self.micro_batches,
            forward_s=self.forward_s,
            backward_input_s=self.backward_input_s,
            backward_weight_s=self.backward_weight_s,
            links={(first, second): cost, (second, first): cost},
            max_in_flight=self.max_in_flight,
        )
        return lower_bound(costs).seconds

    def arguments(self, corpus: Path, trace_directory: Path) -> tuple[str, ...]:
        """Return arguments of scripts/train_gpt.py for stock Megatron. The other run also gets `adaptra_arguments`."""
        micro_batch_size = 2
        given = {
            "--pipeline-model-parallel-size": self.stages,
            "--num-layers": self.stages,
            "--hidden-size": 64,
            "--num-attention-heads": 4,
            "--seq-length": 128,
            "--micro-batch-size": micro_batch_size,
            "--global-batch-size": micro_batch_size * self.micro_batches,
            "--train-iters": self.iterations,
            "--lr": 3e-3,
            "--data-path": corpus,
            "--data-cache-path": corpus.parent / "index-cache",
            "--split": "100,0,0",
            "--emulate-compute-ms": self.compute_ms,
            "--emulate-slow-link": (
                f"{self.slow_stages[0]}-{self.slow_stages[1]}:latency_ms={1e3 * self.latency_s:g},"
                f"from={self.slow_from},path=both"
            ),
            "--adaptra-trace-dir": trace_directory,
        }
        return tuple(str(part) for pair in given.items() for part in pair)

    @property
    def adaptra_arguments(self) -> tuple[str, ...]:
        return ("--adaptra", "--adaptra-max-in-flight", str(self.max_in_flight))
