# SPDX-License-Identifier: Apache-2.0
"""Create the features that a configuration asks for. Modules of other features are not imported."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adaptra_megatron.common.environment import START_VARIABLE
from adaptra_megatron.config import AdaptraConfig
from adaptra_megatron.engine.iteration_hooks import EngineFeature, IterationHooks, StockHooks
from adaptra_megatron.megatron.refusals import graphs_of, offloads

if TYPE_CHECKING:
    from adaptra_megatron.elastic.process_group_manager import FaultTolerantGroups
    from adaptra_megatron.engine.pipeline import Pipeline
    from adaptra_megatron.engine.training_job import Job
    from adaptra_megatron.megatron.captured_layers import CapturedLayers
    from adaptra_megatron.megatron.computation import StageComputation
    from adaptra_megatron.megatron.gradients.linear_wgrad import WeightGradientQueue
    from adaptra_megatron.megatron.megatron_call import PipelineCall
    from adaptra_megatron.megatron.offloaded_activations import OffloadedActivations
    from adaptra_megatron.telemetry.run_telemetry import RunTelemetry

Decorate = Callable[["StageComputation", int], "StageComputation"]
MakeHooks = Callable[["Pipeline"], IterationHooks]
"""Makes the hooks for a new pipeline; usually their class."""


class GuardedOrder(IterationHooks):
    """Refuses, in the first training iteration, collectives over ranks that may run another order."""

    def wrap_computation(self, call: PipelineCall, computation: StageComputation) -> StageComputation:
        """See IterationHooks. Actions raise UnsupportedFeatureError for such a collective."""
        if call.forward_only or self.pipeline.training_iterations or not self.pipeline.book.adapts:
            return computation
        from adaptra_megatron.megatron.order_guard import OrderGuard

        layout = self.pipeline.job.layout
        return OrderGuard(layout.cells[layout.cell], call.micro_batches).decorate(computation)


class Decorated(IterationHooks):
    """Wraps computation by a given function of the computation and the stage, for emulation and instrumentation."""

    def __init__(self, pipeline: Pipeline, decorate: Decorate) -> None:
        super().__init__(pipeline)
        self._decorate = decorate

    def wrap_computation(self, call: PipelineCall, computation: StageComputation) -> StageComputation:
        return self._decorate(computation, call.stage)


class StragglerMonitoring(EngineFeature):
    """Finds replicas that arrive last at gradient synchronisation."""

    def __init__(self, config: AdaptraConfig) -> None:
        from adaptra_megatron.engine.sync_arrivals import SyncWaits

        super().__init__()
        self._config, self.waits = config, SyncWaits()

    def hooks(self, pipeline: Pipeline) -> IterationHooks:
        if pipeline.job.layout.replicas < 2:
            return IterationHooks(pipeline)
        from adaptra_megatron.engine.sync_arrivals import MonitoredIterations, arrivals_of

        given = pipeline.job, self._config, pipeline.telemetry, self.waits, pipeline.planner, pipeline.transport
        return MonitoredIterations(pipeline, arrivals_of(*given))

    def stock_hooks(self, job: Job, telemetry: RunTelemetry) -> StockHooks:
        if job.layout.replicas < 2:
            return StockHooks()
        from adaptra_megatron.engine.sync_arrivals import MonitoredStock, arrivals_of

        return MonitoredStock(arrivals_of(job, self._config, telemetry, self.waits))


class EndedJob(IterationHooks):
    """Ends the job when an iteration of any rank fails."""

    def fail(self, cause: BaseException) -> None:
        """See IterationHooks. Logs the error, and publishes it to the peers."""
        from adaptra_megatron.elastic.job_abort import end_job

        self._ending = end_job(self.pipeline.job.control, self.pipeline.job.layout, cause)

    def failed(self) -> None:
        self._ending.wait()


class SplitEngineLayers(EngineFeature):
    """Makes the backwards of Transformer Engine's layers splittable, if it is installed."""

    def __init__(self, queue: WeightGradientQueue) -> None:
        super().__init__()
        self._queue = queue
        self._restores: list[Callable[[], None]] = []

    def hooks(self, pipeline: Pipeline) -> IterationHooks:
        if "transformer_engine" in sys.modules:
            from adaptra_megatron.megatron.gradients.te_wgrad import EngineLayers

            layers = EngineLayers(self._queue)
            self._restores.append(layers.restore)
            layers.split(pipeline.model_chunks, pipeline.model_config)
        return IterationHooks(pipeline)

    def close(self) -> None:
        for restore in self._restores:
            restore()
        self._restores.clear()


class LayerCapture(EngineFeature):
    """Layers that are captured as CUDA graphs."""

    def __init__(self, queue: WeightGradientQueue, *, deferred: bool = False) -> None:
        """`queue`, `deferred`: see CapturedLayers."""
        super().__init__()
        self._queue, self._deferred = queue, deferred

    @functools.cached_property
    def layers(self) -> CapturedLayers:
        """The layers, for a job that captures any."""
        from adaptra_megatron.megatron.captured_layers import CapturedLayers

        return CapturedLayers(self._queue, deferred=self._deferred)

    def hooks(self, pipeline: Pipeline) -> IterationHooks:
        if graphs_of(pipeline.model_config) == "none":
            return IterationHooks(pipeline)
        from adaptra_megatron.engine.captured_iterations import CapturedIterations

        return CapturedIterations(pipeline, self)

    def summary(self) -> Mapping[str, Any]:
        return {"graph_captures": self.layers.captures} if "layers" in vars(self) else {}


class Offloading(EngineFeature):
    """Activations that are offloaded (--fine-grained-activation-offloading)."""

    _activations: OffloadedActivations | None = None

    def hooks(self, pipeline: Pipeline) -> IterationHooks:
        if not offloads(pipeline.model_config):
            return IterationHooks(pipeline)
        from adaptra_megatron.engine.offloaded_iterations import OffloadedIterations

        iterations = OffloadedIterations(pipeline)
        self._activations = iterations.activations
        return iterations

    def summary(self) -> Mapping[str, Any]:
        return {} if self._activations is None else self._activations.summary()


def make_features(
    config: AdaptraConfig,
    queue: WeightGradientQueue,
    decorate: Decorate | None = None,
    groups: FaultTolerantGroups | None = None,
    hooks: Sequence[MakeHooks] = (),
) -> list[EngineFeature]:
    """Return the features that `config` asks for, followed by those of the user's own `hooks`.

    `decorate`: see `Decorated`. `groups`: see `FaultTolerance`. Raises UnrecoverableError in a restarted rank that
    cannot rejoin.
    """
    features: list[EngineFeature] = []
    if config.reroute != "off":
        from adaptra_megatron.engine.rerouting import ReroutedTraining

        features.append(ReroutedTraining(config))
    if config.is_fault_tolerant:
        from adaptra_megatron.engine.fault_tolerance import FaultTolerance

        features.append(FaultTolerance(config, groups))
    else:
        features.append(EngineFeature(EndedJob))
        if os.environ.get(START_VARIABLE):
            from adaptra_megatron.elastic.process_group_manager import refuse_restarted

            refuse_restarted(config.reroute)
    features += [
        SplitEngineLayers(queue),
        EngineFeature(GuardedOrder),
        LayerCapture(queue, deferred=config.is_fault_tolerant),
        Offloading(),
    ]
    if decorate is not None:
        features.append(EngineFeature(lambda pipeline: Decorated(pipeline, decorate)))
    if config.profile_ranges:
        from adaptra_megatron.engine.megatron_spans import ProfileRanges

        features.append(EngineFeature(ProfileRanges))
    if _has_nemo_lens():
        from adaptra_megatron.engine.megatron_spans import MegatronSpans

        features.append(EngineFeature(MegatronSpans))
    if config.watches_stragglers:
        features.append(StragglerMonitoring(config))
    if config.staggered_optimizer:
        from adaptra_megatron.engine.update_features import StaggeredSteps

        features.append(StaggeredSteps())
    if config.gradient_sync != "stock":
        from adaptra_megatron.engine.update_features import ReplicaReductions

        features.append(ReplicaReductions(config))
    if config.sync_mode != "ssgd":
        from adaptra_megatron.engine.update_features import PartialUpdates

        features.append(PartialUpdates(config))
    return [*features, *map(EngineFeature, hooks)]


def _has_nemo_lens() -> bool:
    try:
        return importlib.util.find_spec("nemo.lens") is not None
    except (ImportError, ValueError):
        return False
