# SPDX-License-Identifier: Apache-2.0
"""The published cases: models with the times of their stages, slow links, delays, and the times that were measured."""

from __future__ import annotations

import csv
import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources

from adaptra_megatron.schedule.costs import Costs, LinkCost, PerChunk

MICRO_BATCHES_PER_STAGE = 3


class UnknownCaseError(ValueError):
    """A pattern that no case's name matches; the message lists what there is."""


@dataclass(frozen=True, kw_only=True)
class StageTime:
    """Milliseconds of one micro-batch on one stage."""

    forward_ms: float
    backward_input_ms: float
    backward_weight_ms: float


@dataclass(frozen=True, kw_only=True)
class Model:
    """A published model, cut into stages."""

    name: str
    stages: tuple[StageTime, ...]
    measured: bool
    """False where only the range over all stages was published, and each stage has its middle."""


@dataclass(frozen=True, kw_only=True)
class Published:
    """Milliseconds per iteration that were measured on GPUs; None: not measured."""

    one_f_one_b_ms: float | None
    zero_bubble_ms: float | None
    host_path_ms: float | None
    """The order of zero bubble, all messages by the host path."""
    full_ms: float | None
    """Re-planned, and slow links on the host path."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the published results."""

    experiment: str
    model: Model
    links: tuple[tuple[int, int], ...]
    """Slow links, each in both directions."""
    delay_ms: float
    """What every message on them takes longer."""
    published: Published
    healthy: Published
    """The same systems without any delay."""

    @property
    def name(self) -> str:
        """Such as single/7B/0-1/60ms."""
        links = "+".join(f"{source}-{target}" for source, target in self.links)
        return f"{self.experiment}/{self.model.name}/{links}/{self.delay_ms:g}ms"

    @property
    def stages(self) -> int:
        return len(self.model.stages)

    @property
    def micro_batches(self) -> int:
        return MICRO_BATCHES_PER_STAGE * self.stages

    def costs(self, *, cap: float | None = None, slow: bool = True, chunks: int = 1) -> Costs:
        """Seconds of this case. `chunks`: the work of a stage in so many equal parts; `cap`: activations per stage."""

        def table(milliseconds: Iterator[float]) -> PerChunk:
            return tuple((value / 1e3 / chunks,) * chunks for value in milliseconds)

        delay = LinkCost(self.delay_ms / 1e3)
        directions = [*self.links, *((target, source) for source, target in self.links)]
        return Costs(
            stages=self.stages,
            chunks=chunks,
            micro_batches=self.micro_batches,
            forward_s=table(stage.forward_ms for stage in self.model.stages),
            backward_input_s=table(stage.backward_input_ms for stage in self.model.stages),
            backward_weight_s=table(stage.backward_weight_ms for stage in self.model.stages),
            links=dict.fromkeys(directions, delay) if slow else {},
            max_in_flight=(cap,) * self.stages,
        )


def load_cases() -> tuple[Case, ...]:
    """All published cases, in the order of the published tables."""
    models = {model.name: model for model in _load_models()}
    return tuple(
        Case(
            experiment=row["experiment"],
            model=models[row["model"]],
            links=tuple(_link(text) for text in row["links"].split("+")),
            delay_ms=float(row["delay_ms"]),
            published=_published(row, ""),
            healthy=_published(row, "healthy_"),
        )
        for row in _rows("iteration_times.csv")
    )


def select_cases(cases: Sequence[Case], patterns: Sequence[str]) -> tuple[Case, ...]:
    """The cases whose names match any of the shell patterns, such as single/*/60ms.

    Raises UnknownCaseError for a pattern that matches none.
    """
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(case.name, pattern) for case in cases):
            raise UnknownCaseError(
                f"no published case is called {pattern!r}; there are, for example, "
                f"{', '.join(case.name for case in cases[-4:])}, and {len(cases) - 4} more"
            )
    return tuple(case for case in cases if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns))


def _load_models() -> list[Model]:
    stages: dict[str, list[StageTime]] = {}
    measured: dict[str, bool] = {}
    for row in _rows("stage_times.csv"):
        of_model = stages.setdefault(row["model"], [])
        assert len(of_model) == int(row["stage"]), "stage times are listed in the order of the stages"
        measured[row["model"]] = row["basis"] == "mean"
        of_model.append(
            StageTime(
                forward_ms=float(row["forward_ms"]),
                backward_input_ms=float(row["backward_input_ms"]),
                backward_weight_ms=float(row["backward_weight_ms"]),
            )
        )
    return [Model(name=name, stages=tuple(of_model), measured=measured[name]) for name, of_model in stages.items()]


def _rows(file: str) -> list[dict[str, str]]:
    text = resources.files(__package__).joinpath(file).read_text(encoding="utf-8")
    return list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))


def _link(text: str) -> tuple[int, int]:
    source, target = text.split("-")
    return int(source), int(target)


def _published(row: dict[str, str], prefix: str) -> Published:
    def milliseconds(system: str) -> float | None:
        text = row[f"{prefix}{system}_ms"]
        return float(text) if text else None

    return Published(
        one_f_one_b_ms=milliseconds("one_f_one_b"),
        zero_bubble_ms=milliseconds("zero_bubble"),
        host_path_ms=milliseconds("host_path"),
        full_ms=milliseconds("full"),
    )
