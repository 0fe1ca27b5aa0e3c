# SPDX-License-Identifier: Apache-2.0
"""Run iterations whose activations are offloaded: see megatron.offloaded_activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from adaptra_megatron.engine.iteration_hooks import Attempt, Attempted, IterationHooks
from adaptra_megatron.megatron.offloaded_activations import OffloadedActivations

if TYPE_CHECKING:
    from adaptra_megatron.engine.iteration_work import Work
    from adaptra_megatron.engine.pipeline import Pipeline
    from adaptra_megatron.megatron.megatron_call import PipelineCall
    from adaptra_megatron.schedule.ir import Schedule

RECORDED = "offloading recorded another order"
"""Name of the disturbance in the timings of such an iteration: backwards wait for what is reloaded late."""


class OffloadedIterations(IterationHooks):
    """Iterations of one pipeline. Its order is the plan's, or that of the routes, and no stage leaves it."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        pipeline.dispatcher.fixed = True
        self.activations = OffloadedActivations()

    def close(self) -> None:
        self.activations.close()

    def carry_out(self, attempt: Attempt, call: PipelineCall, number: int) -> Attempted:
        """See IterationHooks. Outside of training nothing is offloaded."""
        try:
            attempted = attempt(call, number)
            if not call.forward_only:
                self.activations.end()
            return attempted
        finally:
            self.activations.suspend()

    def choose_work(self, work: Callable[[], Work], call: PipelineCall, schedule: Schedule) -> Work:
        """See IterationHooks. If its order is another one than the last attempt's, this attempt is recorded."""
        chosen = work()
        if not call.forward_only and self.activations.begin([step.action for step in chosen.program.steps]):
            self.pipeline.disturbed(RECORDED)
        return chosen
