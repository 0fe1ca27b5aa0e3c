# SPDX-License-Identifier: Apache-2.0
"""Define the errors that end a generation for a rank, and distinguish them from a rank's own errors.

Torch's backends raise plain RuntimeErrors, and so may a training script, with any text. So the origin of an
exception decides, which an attribute of it records: set on exceptions that leave torch's collectives, and on others
that leave the script's own functions.
"""

from __future__ import annotations

import enum
import logging
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch.distributed as dist

from adaptra_megatron.common.control_store import SilentStoreError
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.control.exchange import ExchangeError
from adaptra_megatron.transport.message_keys import AbortedError, TransportError

logger = logger_of(__name__)

_MARK = "_adaptra_comes_of"


class EpochEndedError(RuntimeError):
    """The set of live ranks has changed while this rank waited for another one."""


class LateRankError(RuntimeError):
    """Another rank did not do its part in time: it has failed, hangs, or cannot be reached."""


class UnrecoverableError(RuntimeError):
    """Live ranks no longer hold the whole model, or this rank cannot take part. States the reason and what to restart
    from.
    """


class JobLostError(UnrecoverableError):
    """Live ranks no longer hold the whole model, so no rank can continue and restarting ranks does not help."""


class UnsoundAttemptError(RuntimeError):
    """Gradients of an attempt do not contain each micro-batch exactly once; names the micro-batches. Raised if
    repeating the attempt does not help.
    """


class OtherRankError(RuntimeError):
    """Another rank has ended with an error of its own, not a fault of its machine: the job ends with it."""


class _Origin(enum.Enum):
    BACKEND = enum.auto()
    SCRIPT = enum.auto()


class _Marking:
    """Context that marks exceptions raised within; adds no frame to their tracebacks."""

    def __init__(self, origin: _Origin) -> None:
        self._origin = origin

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # The innermost mark counts: a script's function may call a collective, whose error passes through both
        # contexts.
        if isinstance(error, Exception) and not (self._origin is _Origin.SCRIPT and _is_of_ours(error)):
            vars(error).setdefault(_MARK, self._origin)  # which stays that of the innermost


def of_backend() -> _Marking:
    """Return a context for calls of torch's process groups: their errors may be caused by another rank's failure."""
    return _Marking(_Origin.BACKEND)


def of_script() -> _Marking:
    """Return a context for functions and iterators of the training script: their errors are this rank's own.

    Errors of the package's own waits within them stay errors of communication.
    """
    return _Marking(_Origin.SCRIPT)


def owned(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function of the training script in `of_script`."""

    def call(*given: Any, **keywords: Any) -> Any:
        with of_script():
            return function(*given, **keywords)

    return call


def is_communication(error: BaseException) -> bool:
    """Return whether another rank's failure may have caused `error`; any other error is this rank's own."""
    # These end the job by themselves. To wait for a change of live ranks would only delay their message.
    if isinstance(error, (UnrecoverableError, OtherRankError, SilentStoreError)) or is_of_script(error):
        return False
    return _is_of_ours(error) or isinstance(error, dist.DistError)


def is_of_script(error: BaseException) -> bool:
    """Return whether the training script itself raised `error`."""
    return vars(error).get(_MARK) is _Origin.SCRIPT


def _is_of_ours(error: BaseException) -> bool:
    """Return whether a wait for other ranks raised `error`, or an error during whose handling `error` was raised."""
    waits = EpochEndedError, LateRankError, TransportError, ExchangeError
    return any(isinstance(each, waits) or vars(each).get(_MARK) is _Origin.BACKEND for each in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Iterate over `error` and the errors that caused it, as a Python traceback shows them."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


class SwallowedErrors:
    """Log of errors that one rank has recovered from: each once by type and line."""

    def __init__(self) -> None:
        self._logged: set[tuple[type[BaseException], str]] = set()

    def log(self, error: BaseException) -> None:
        """Log the error with its traceback: it may be this rank's own, mistaken for another rank's failure."""
        frames = traceback.extract_tb(error.__traceback__)
        key = type(error), f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        if key in self._logged:
            return
        self._logged.add(key)
        # By these this package itself ends waits as ranks die: they say nothing that "lost rank ..." does not.
        expected = isinstance(error, (EpochEndedError, AbortedError))
        level = logging.DEBUG if expected else logging.WARNING
        logger.log(level, "recovered from this error, which another rank's failure may have caused", exc_info=error)
