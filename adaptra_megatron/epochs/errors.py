# SPDX-License-Identifier: Apache-2.0
"""What ends an epoch for a rank, and which errors may come of another rank's death."""

from __future__ import annotations

import re

import torch.distributed as dist

from adaptra_megatron.control.control_loop import ExchangeError
from adaptra_megatron.job.punctual_store import SilentStoreError
from adaptra_megatron.transport.messages import TransportError

_OF_BACKENDS = re.compile(r"gloo|nccl|connection|socket|closed by peer|timed out|broken pipe|store", re.IGNORECASE)
"""In messages of torch's backends, which raise plain RuntimeErrors (torch/csrc/distributed/c10d)."""


class EpochEndedError(RuntimeError):
    """The set of live ranks has changed while this rank waited for another one."""


class UnrecoverableError(RuntimeError):
    """What lives does not hold the whole model any more, or this rank has no part in what does. Says why, and from
    where to go on."""


class JobLostError(UnrecoverableError):
    """What lives does not hold the whole model any more: no rank can go on, and none that is started again can help."""


class OtherRankError(RuntimeError):
    """Another rank has ended with an error of its own, which is no fault of a machine: the job ends with it."""


def is_communication(error: BaseException) -> bool:
    """Return whether `error` may come of the death of another rank; any other is this rank's own."""
    if isinstance(error, (UnrecoverableError, OtherRankError, SilentStoreError)):
        return False
    if isinstance(error, (EpochEndedError, TransportError, ExchangeError, dist.DistError, ConnectionError)):
        return True
    return isinstance(error, RuntimeError) and _OF_BACKENDS.search(str(error)) is not None
