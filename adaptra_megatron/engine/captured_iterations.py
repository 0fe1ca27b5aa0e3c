# SPDX-License-Identifier: Apache-2.0
"""Run iterations whose layers are captured as CUDA graphs: see megatron.captured_layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from adaptra_megatron.common.log import is_first_rank, logger_of
from adaptra_megatron.engine.iteration_hooks import Attempt, Attempted, IterationHooks
from adaptra_megatron.megatron.compat import captures_again
from adaptra_megatron.megatron.refusals import UnsupportedFeatureError
from adaptra_megatron.schedule.ir import Schedule, chunks_in_order

if TYPE_CHECKING:
    from adaptra_megatron.engine.features import LayerCapture
    from adaptra_megatron.engine.iteration_work import Work
    from adaptra_megatron.engine.pipeline import Pipeline
    from adaptra_megatron.megatron.computation import StageComputation
    from adaptra_megatron.megatron.megatron_call import PipelineCall

logger = logger_of(__name__)

CAPTURED = "CUDA graphs captured just before, for another order"
"""Name of the disturbance in the timings of such an iteration."""


class CapturedIterations(IterationHooks):
    """Iterations of one pipeline. Its order is the plan's, and no stage leaves it."""

    def __init__(self, pipeline: Pipeline, capture: LayerCapture) -> None:
        """Raises UnsupportedFeatureError before megatron-core 0.16."""
        super().__init__(pipeline)
        if not captures_again():
            raise UnsupportedFeatureError(
                "--adaptra does not run with --cuda-graph-impl transformer_engine on megatron-core before 0.16, which "
                "cannot drop what it has captured, for another order. Drop one of the two, or use a later release"
            )
        pipeline.dispatcher.fixed = True
        self._layers = capture.layers
        self._warm_from = 0
        """First training iteration in which graphs that have been dropped may be captured again."""

    def drop(self) -> None:
        """Drop all graphs, as the process groups in them end."""
        self._layers.drop()

    def enter(self, call: PipelineCall) -> None:
        """Capture again in this generation, all ranks in the same iteration: a rank that has rejoined is warm then."""
        self._warm_from = self.pipeline.training_iterations + call.config.cuda_graph_warmup_steps

    def carry_out(self, attempt: Attempt, call: PipelineCall, number: int) -> Attempted:
        """See IterationHooks. Afterwards layers have their graphs again, if they ran without."""
        try:
            return attempt(call, number)
        finally:
            self._layers.resume()

    def choose_work(self, work: Callable[[], Work], call: PipelineCall, schedule: Schedule) -> Work:
        """See IterationHooks. Graphs are captured anew here if the order is not theirs.

        Routed iterations run without graphs. So do evaluations, by Megatron itself, and iterations between a change of
        live ranks and the next capture.
        """
        chosen = work()
        if call.forward_only:
            return chosen
        actions = [step.action for step in chosen.program.steps]
        if self.pipeline.degraded or actions != list(schedule.orders[call.stage]):
            self._layers.suspend()
        else:
            order = chunks_in_order(actions)
            anew = self._layers.follow(order, warm=self.pipeline.training_iterations >= self._warm_from)
            self.pipeline.switched(self._layers.seconds)
            if anew:
                self.pipeline.disturbed(CAPTURED)
                if is_first_rank():
                    text = "CUDA graphs captured anew for plan %d, in %.1f s"
                    logger.info(text, self.pipeline.book.number, self._layers.seconds)
        return chosen

    def wrap_computation(self, call: PipelineCall, computation: StageComputation) -> StageComputation:
        """See IterationHooks."""
        return self._layers.decorate(computation)
