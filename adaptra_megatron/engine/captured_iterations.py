# SPDX-License-Identifier: Apache-2.0
"""Run iterations of which Megatron records the order of forwards and backwards, and then relies on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from adaptra_megatron.common.log import is_first_rank, logger_of
from adaptra_megatron.engine.iteration_hooks import Attempt, Attempted, IterationHooks
from adaptra_megatron.megatron.compat import captures_again
from adaptra_megatron.megatron.refusals import UnsupportedFeatureError, graphs_of
from adaptra_megatron.schedule.ir import Action, Schedule

if TYPE_CHECKING:
    from adaptra_megatron.engine.features import LayerCapture
    from adaptra_megatron.engine.iteration_work import Work
    from adaptra_megatron.engine.pipeline import Pipeline
    from adaptra_megatron.megatron.computation import StageComputation
    from adaptra_megatron.megatron.megatron_call import PipelineCall

logger = logger_of(__name__)

RECORDED = "another order recorded"
"""Name of the disturbance in the timings of such an iteration."""


class OrderRecorder(Protocol):
    """Interface of what is made of a recorded order: see CapturedLayers, OffloadedActivations."""

    seconds: float
    """Duration of the latest recording, beside the iterations that run."""

    def begin(self, actions: Sequence[Action], *, planned: bool, warm: bool) -> bool:
        """Prepare for an attempt at an iteration that runs `actions`; record anew if they are in another order. Return
        whether that was so.

        `actions`: none in an evaluation. `planned`: whether their order is the plan's. `warm`: False if what was
        dropped is not due yet.
        """

    def end(self) -> None:
        """Act on an attempt that has succeeded."""

    def resume(self) -> None:
        """Undo what `begin` changed for one iteration."""

    def drop(self) -> None:
        """Forget what was recorded: process groups in it end."""

    def decorate(self, computation: StageComputation) -> StageComputation:
        """Return the computation that a recorded order needs."""


class CapturedIterations(IterationHooks):
    """Iterations of one pipeline. Its order is the plan's, and no stage leaves it."""

    def __init__(self, pipeline: Pipeline, capture: LayerCapture) -> None:
        super().__init__(pipeline)
        self._capture = capture
        self._recorders: list[OrderRecorder] = []
        self._warm_from = 0
        """First training iteration in which graphs that have been dropped may be captured again."""

    def made(self, call: PipelineCall) -> None:
        """See IterationHooks. Raises UnsupportedFeatureError before megatron-core 0.16."""
        self.pipeline.dispatcher.fixed = True
        if graphs_of(call.config) != "none":
            if not captures_again():
                raise UnsupportedFeatureError(
                    "--adaptra does not run with --cuda-graph-impl transformer_engine on megatron-core before 0.16, "
                    "which cannot drop what it has captured, for another order. Drop one of the two, or use a later "
                    "release"
                )
            self._recorders.append(self._capture.layers)

    def drop(self) -> None:
        """Drop all graphs, as the process groups in them end."""
        for each in self._recorders:
            each.drop()

    def enter(self, call: PipelineCall) -> None:
        """Capture again in this generation, all ranks in the same iteration: a rank that has rejoined is warm then."""
        self._warm_from = self.pipeline.training_iterations + call.config.cuda_graph_warmup_steps

    def carry_out(self, attempt: Attempt, call: PipelineCall, number: int) -> Attempted:
        """See IterationHooks. Afterwards layers have their graphs again, if they ran without."""
        try:
            attempted = attempt(call, number)
            for each in self._recorders:
                each.end()
            return attempted
        finally:
            for each in self._recorders:
                each.resume()

    def choose_work(self, work: Callable[[], Work], call: PipelineCall, schedule: Schedule) -> Work:
        """See IterationHooks. Orders are recorded anew here.

        Routed iterations run without graphs. So do evaluations, and iterations between a change of live ranks and the
        next capture.
        """
        chosen = work()
        actions = [] if call.forward_only else [step.action for step in chosen.program.steps]
        planned = not self.pipeline.degraded and actions == list(schedule.orders[call.stage])
        warm = self.pipeline.training_iterations >= self._warm_from
        anew = [each.begin(actions, planned=planned, warm=warm) for each in self._recorders]
        if planned:
            seconds = sum(each.seconds for each in self._recorders)
            self.pipeline.switched(seconds, RECORDED if any(anew) else None)
            if any(anew) and seconds and is_first_rank():
                logger.info("CUDA graphs captured anew for plan %d, in %.1f s", self.pipeline.book.number, seconds)
        return chosen

    def wrap_computation(self, call: PipelineCall, computation: StageComputation) -> StageComputation:
        """See IterationHooks."""
        for each in self._recorders:
            computation = each.decorate(computation)
        return computation
