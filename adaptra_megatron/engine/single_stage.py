# SPDX-License-Identifier: Apache-2.0
"""Run stock's schedule: for pipelines of one stage, and if a feature that is only observed needs its order."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.engine.iteration_hooks import EngineFeature
from adaptra_megatron.engine.measurement.reporting import make_telemetry
from adaptra_megatron.engine.training_job import join_job
from adaptra_megatron.megatron.compat import default_groups, groups_keyword
from adaptra_megatron.megatron.megatron_call import config_of, shared_groups
from adaptra_megatron.telemetry.figures.scalars import RankFigures

logger = logger_of(__name__)


ONE_STAGE = "pipelines have 1 stage (PP 1): there is nothing to adapt, stock's schedule runs"


class SingleStage:
    """Runs stock's iterations on one rank, and reports them to telemetry."""

    def __init__(
        self, arguments: Mapping[str, Any], config: AdaptraConfig, why: str, features: Sequence[EngineFeature]
    ) -> None:
        """Set up telemetry. Collective over the job's ranks, with the first call of each (`arguments`).

        `why`: reason for stock's schedule, for the log. Raises ExchangeError if ranks do not meet.
        """
        model, groups = arguments["model"], arguments.get(groups_keyword()) or default_groups()
        megatron = config_of(model[0] if isinstance(model, list) else model)
        self._job = join_job(groups.pp, shared_groups(megatron, groups), config)
        self._telemetry = make_telemetry(self._job, 1, config, goes_on=False)
        self._hooks = [feature.stock_hooks(self._job, self._telemetry) for feature in features]
        self.training_iterations = 0
        self._iterations = 0
        if self._job.layout.rank == min(self._job.layout.workers):
            logger.warning("%s", why)

    def run(self, stock: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
        """Run one call of `stock`, Megatron's own schedule; return its result."""
        begun_s = time.monotonic()
        self._telemetry.begin(self._iterations)
        self._telemetry.switch(0)
        results = stock(**arguments)
        self._iterations += 1
        if not arguments.get("forward_only"):
            self.training_iterations += 1
            seconds = time.monotonic() - begun_s
            for each in self._hooks:
                each.end(self._iterations - 1, seconds)
            self._telemetry.trained(RankFigures(iteration_s=seconds, peak_in_flight=1.0, plan_number=0))
        return results

    def close(self) -> None:
        """End threads and files."""
        self._job.clock.close()
        for each in self._hooks:
            each.close()
        self._telemetry.close()
