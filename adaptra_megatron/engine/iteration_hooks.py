# SPDX-License-Identifier: Apache-2.0
"""Define the form of a feature that takes part in iterations: the engine calls these methods and knows no feature."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from adaptra_megatron.engine.pipeline import Pipeline
    from adaptra_megatron.megatron.computation import StageComputation
    from adaptra_megatron.megatron.megatron_call import PipelineCall
    from adaptra_megatron.transport.message_keys import Transport


class IterationHooks:
    """One feature's part in the iterations of one pipeline, on one rank. Lives as long as the pipeline.

    Methods do nothing, or return what they are given, unless a feature overrides them. Features are called in the order
    of their list, so that the wrapper of the last one is outermost.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        """`pipeline`: the one that is being made, whose members are there but for its executor."""
        self.pipeline = pipeline

    def wrap_transport(self, transport: Transport) -> Transport:
        """Return the transport by which the pipeline's messages go."""
        return transport

    def wrap_computation(self, call: PipelineCall, computation: StageComputation) -> StageComputation:
        """Return the computation of an attempt at the iteration of `call`."""
        return computation


class EngineFeature:
    """One feature's part in a process, made when patches are applied. Lives as long as they do."""

    def __init__(self, hooks: Callable[[Pipeline], IterationHooks] = IterationHooks) -> None:
        """`hooks`: of a feature that is no more than these, their class."""
        self._hooks = hooks

    def hooks(self, pipeline: Pipeline) -> IterationHooks:
        """Return the feature's hooks for a new pipeline, of which a process has one per group of model chunks."""
        return self._hooks(pipeline)
