# SPDX-License-Identifier: Apache-2.0
"""A hook of your own: log the slowest action of each training iteration, and what failed where.

from adaptra_megatron.patches import enable
enable(AdaptraConfig(), hooks=[SlowestAction])
"""

from __future__ import annotations

import logging

from adaptra_megatron.engine.iteration_hooks import IterationHooks
from adaptra_megatron.engine.measuring import EndedIteration

logger = logging.getLogger(__name__)


class SlowestAction(IterationHooks):
    """Logs by which action of this rank an iteration could become shorter."""

    def measured(self, ended: EndedIteration) -> None:
        """See IterationHooks. On a GPU the times are those of the device."""
        record = max(ended.report.records, key=lambda each: each.compute_s)
        share = record.compute_s / ended.seconds
        place = f"{record.kind} of micro-batch {record.micro_batch}, stage {record.stage}"
        logger.info("iteration %d: slowest is %s, %.0f%% of the iteration", ended.iteration, place, 100 * share)

    def fail(self, cause: BaseException) -> None:
        """See IterationHooks."""
        logger.error("iteration %d, rank %d: %s", self.pipeline.iterations, self.pipeline.job.layout.rank, cause)
