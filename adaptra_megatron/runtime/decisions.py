# SPDX-License-Identifier: Apache-2.0
"""What the leading rank tells all ranks to run: one decision per iteration, plan and paths together."""

from __future__ import annotations

from typing import NamedTuple

from adaptra_megatron.telemetry.scalars import JobFigures
from adaptra_megatron.telemetry.trace_requests import Iterations


class LinkName(NamedTuple):
    """A directed link of one of the job's parallel pipelines."""

    pipeline: int
    """First global rank of the pipeline."""
    source: int
    """Pipeline rank."""
    target: int

    def __str__(self) -> str:
        return f"link {self.source}->{self.target} of pipeline {self.pipeline}"


class Decision(NamedTuple):
    """What an iteration runs: plan `number`, which is an order of actions and a path for every link."""

    number: int
    csv: str | None
    """The order where it is new, else None."""
    requests: tuple[Iterations, ...] = ()
    """Which iterations every rank is to trace, new since the decision before."""
    job: JobFigures | None = None
    """What the leader has found, for the rank that has somewhere to show it."""
    predicted_s: float | None = None
    """Of an iteration with a new plan; `before_predicted_s` of one with what ran before, at the same costs."""
    before_predicted_s: float | None = None
    costs: str | None = None
    """What a new order was planned for, as the JSON text of `costs_to_json`: all ranks post receives by it."""
    caps: tuple[float | None, ...] = ()
    """Activations that each stage may hold under a new order; empty where there is none."""
    released_at_backward_input: tuple[float, ...] = ()
    """The fraction of an activation that the caps count as free after an input gradient."""
    diverted: tuple[LinkName, ...] = ()
    """All links whose messages take the other path than the preferred one."""
    probed: tuple[LinkName, ...] = ()
    """Links whose other path is to be measured in this iteration."""

    def kept(self) -> Decision:
        """What runs if there is nothing new after this."""
        return Decision(self.number, None, diverted=self.diverted)

    def then(self, later: Decision) -> Decision:
        """This and a later decision as one, where this one has not come into force before the later one was made."""
        older = later.number == self.number
        ordered = self if later.csv is None else later
        return later._replace(
            csv=ordered.csv,
            costs=ordered.costs,
            caps=ordered.caps,
            released_at_backward_input=ordered.released_at_backward_input,
            requests=self.requests + later.requests,
            predicted_s=self.predicted_s if older else later.predicted_s,
            before_predicted_s=later.before_predicted_s if self.before_predicted_s is None else self.before_predicted_s,
        )
