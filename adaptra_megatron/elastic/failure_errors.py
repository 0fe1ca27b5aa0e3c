# SPDX-License-Identifier: Apache-2.0
"""Define the errors that end an epoch for a rank, and find those that another rank's failure may cause.

Torch's backends raise plain RuntimeErrors, and so may a training script, with any text. So errors are told apart by
where they pass: those that come out of torch's collectives are marked there, and those that leave the script's own
functions are marked there, unless they came out of a collective within them. Marked is the exception itself.
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
    """Another rank has not done its part in time: it has died, hangs, or cannot be reached."""


class UnrecoverableError(RuntimeError):
    """Live ranks no longer hold the whole model, or this rank has no part in it. Says why, and from
    where to go on."""


class JobLostError(UnrecoverableError):
    """Live ranks no longer hold the whole model: no rank can go on, and none that is started again can help."""


class UnsoundAttemptError(RuntimeError):
    """Gradients of an attempt are not those of all micro-batches; says which. It is repeated once, and then raised."""


class OtherRankError(RuntimeError):
    """Another rank has ended with an error of its own, which is no fault of a machine: the job ends with it."""


class _Origin(enum.Enum):
    BACKEND = enum.auto()
    SCRIPT = enum.auto()


class _Marking:
    """Marks what is raised within; adds no frame to its traceback."""

    def __init__(self, origin: _Origin) -> None:
        self._origin = origin

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, Exception) and not (self._origin is _Origin.SCRIPT and _is_of_ours(error)):
            vars(error).setdefault(_MARK, self._origin)  # which stays that of the innermost


def of_backend() -> _Marking:
    """A context around calls of torch's process groups: what these raise may come of another rank's death."""
    return _Marking(_Origin.BACKEND)


def of_script() -> _Marking:
    """A context around functions and iterators of the training script: what these raise is this rank's own error, but
    for what comes out of the package's own waits within."""
    return _Marking(_Origin.SCRIPT)


def owned(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the training script, with `of_script` around each call."""

    def call(*given: Any, **keywords: Any) -> Any:
        with of_script():
            return function(*given, **keywords)

    return call


def is_communication(error: BaseException) -> bool:
    """Return whether `error` may come of the death of another rank; any other is this rank's own."""
    if isinstance(error, (UnrecoverableError, OtherRankError, SilentStoreError)) or is_of_script(error):
        return False
    return _is_of_ours(error) or isinstance(error, dist.DistError)


def is_of_script(error: BaseException) -> bool:
    """Return whether `error` has left a function or an iterator of the training script, and began there."""
    return vars(error).get(_MARK) is _Origin.SCRIPT


def _is_of_ours(error: BaseException) -> bool:
    """Return whether `error` comes out of a wait for other ranks, or was raised as one that did was handled."""
    waits = EpochEndedError, LateRankError, TransportError, ExchangeError
    return any(isinstance(each, waits) or vars(each).get(_MARK) is _Origin.BACKEND for each in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """`error`, and what it came of, as Python prints them."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


class SwallowedErrors:
    """Errors that one rank has got over, for the log: each once by its type and the line that raised it."""

    def __init__(self) -> None:
        self._logged: set[tuple[type[BaseException], str]] = set()

    def log(self, error: BaseException) -> None:
        """Log the error with its traceback: it may be this rank's own, taken for another rank's failure."""
        frames = traceback.extract_tb(error.__traceback__)
        key = type(error), f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        if key in self._logged:
            return
        self._logged.add(key)
        # By these this package itself ends waits as ranks die: they say nothing that "lost rank ..." does not.
        expected = isinstance(error, (EpochEndedError, AbortedError))
        level = logging.DEBUG if expected else logging.WARNING
        logger.log(level, "got over this error, as one that came of the loss of a rank", exc_info=error)
