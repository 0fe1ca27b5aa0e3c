# SPDX-License-Identifier: Apache-2.0
"""Publish that a rank ends the job, by an error of its own or at the end of training, and abort other ranks' waits.

Launchers, exit statuses and error files should name the rank that failed first. So that rank logs its traceback before
any other rank learns of the error, and the others wait for its process to end. A rank whose process serves the job's
store ends last: the others use the store until they end, and torch would log in each that the store is unreachable.
A rank whose own device has failed ends alone (`end_rank`).
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import select
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.layout import JobLayout, boot_identity
from adaptra_megatron.common.log import logger_of
from adaptra_megatron.common.sealed_store import SealedStore
from adaptra_megatron.common.typed_messages import packed, plain_text, unpacked
from adaptra_megatron.elastic.failure_errors import OtherRankError, UnrecoverableError, is_communication, is_of_script

logger = logger_of(__name__)

_ERROR, _END, _GOING = "last_word", "ended", "going"
_MOST_NBYTES = 1 << 14
_LOGGED = "_adaptra_logged"
_STORE_S = 2.0
"""Timeout of requests to the job's store while a job ends that does not survive rank failures."""
_GOES_S, _LOOKS_S = 5.0, 0.02
"""Longest wait for a failed rank's process to end, however long its clean-up takes; and poll interval."""
_LAST_S = _GOES_S + 1.0
"""Longest wait for all other processes to end, which in turn wait for the failed one."""


def process_identity(proc: Path = Path("/proc")) -> str:
    """Return a value that is equal for two processes exactly if they see each other's process ids.

    If the process's namespace is unknown, the value is unique.
    """
    try:
        return f"{boot_identity(proc)}/{os.stat(proc / 'self/ns/pid').st_ino}"
    except OSError:
        return f"unknown-{secrets.token_hex(16)}"


@dataclass(frozen=True)
class ErrorNotice:
    """Notice of a rank that ends with an error of its own."""

    rank: str
    """Name of the rank, for messages."""
    error: str
    process: int
    identity: str
    """See `process_identity`."""
    serves: bool = False
    """True if its process serves the job's store, and so ends last."""

    def __str__(self) -> str:
        return f"{self.rank}: {self.error}"

    def wait_for_end(self) -> None:
        """Wait until its process has ended and been reaped by its launcher, for a few seconds at most.

        Returns at once if that process waits for this one.
        """
        if self.serves:
            return
        # Process ids mean the same only in one pid namespace of one host; elsewhere the full time passes.
        deadline_s, visible = time.monotonic() + _GOES_S, self.identity == process_identity()
        while time.monotonic() < deadline_s:
            if visible:
                try:
                    os.kill(self.process, 0)  # finds it until its parent has taken its exit status
                except ProcessLookupError:
                    return
                except PermissionError:
                    pass  # it is there, and another user's
            time.sleep(_LOOKS_S)


@dataclass(frozen=True)
class EndingProcess:
    """A process that is about to end, in a job that ends with an error."""

    process: int
    identity: str

    def over(self, identity: str) -> bool:
        """Return whether the process has ended; False if a process of `identity` cannot observe it."""
        if self.identity != identity:
            return False
        try:
            seen = os.pidfd_open(self.process)
        except OSError as cause:
            return isinstance(cause, ProcessLookupError)
        try:
            ends = select.poll()
            ends.register(seen, select.POLLIN)
            return bool(ends.poll(0))
        finally:
            os.close(seen)


@dataclass(frozen=True)
class Ending:
    """End of this rank in a job that ends with an error."""

    control: ControlStore
    word: ErrorNotice | None
    """Error of another rank that ends the job; None: it is this rank's own."""
    others: int
    """Number of ranks that must end before this one, since its process serves their store; else 0."""

    def wait(self) -> None:
        """Wait until the ranks that must end first have ended, for a few seconds at most."""
        if self.word is not None:
            self.word.wait_for_end()
        if self.others:
            with suppress(RuntimeError), self.control.lent("last word", _STORE_S) as store:
                _outlast(store, self.others)


def _outlast(store: SealedStore, others: int) -> None:
    deadline_s, identity, ended = time.monotonic() + _LAST_S, process_identity(), 0
    while ended < others and time.monotonic() < deadline_s:
        found = store.peek(f"{_GOING}/{ended + 1}")
        if found is not None and unpacked(found, EndingProcess, _MOST_NBYTES).over(identity):
            ended += 1
        else:
            time.sleep(_LOOKS_S)


def log_own(name: str, error: BaseException) -> None:
    """Log this rank's own error with its traceback, once, and flush its output: its launcher may kill it from
    now on.
    """
    if _LOGGED in vars(error):
        return
    vars(error)[_LOGGED] = True
    logger.error("%s: this error was raised here, and the job ends with it", name, exc_info=error)
    _flush()


def end_rank(name: str, error: BaseException, *, printed: bool) -> NoReturn:
    """End this process, whose device has failed or hangs, with status 1; log that and `error`, with a traceback unless
    Python has `printed` it.

    At once: neither a script that catches errors nor a destructor that waits for the device may hold up the others.
    """
    text = "%s: the device of this rank has failed or hangs, so it ends, and the other ranks go on without it"
    logger.error(text, name, exc_info=None if printed else error)
    logging.shutdown()
    _flush()
    os._exit(1)


def end_after_error() -> NoReturn:
    """End this process with status 1, as Python does after an uncaught error, but without the teardown of modules.

    A daemon thread may be inside torch meanwhile: in a request to the store, or making a group. As it comes back during
    a teardown, CPython ends it within a destructor (pybind11's gil_scoped_release), and that aborts the process.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    _flush()
    os._exit(1)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()


def publish_error(
    store: SealedStore, name: str, error: BaseException, *, printed: bool = False, serves: bool = False
) -> None:
    """Publish that the rank called `name` ends with an error of its own; only the job's first such error counts.

    Logs it, unless Python has `printed` it. `serves`: see `ErrorNotice`. Ignores a store that does not answer.
    """
    if not printed and not isinstance(error, UnrecoverableError):
        log_own(name, error)
    text = plain_text(f"{type(error).__name__}: {str(error)[:500]}")
    with suppress(RuntimeError):
        # The first error is the cause; errors that follow from it must not replace it.
        store.put_once(_ERROR, packed(ErrorNotice(name, text, os.getpid(), process_identity(), serves)))


def end_job(control: ControlStore, layout: JobLayout, error: BaseException) -> Ending:
    """Log and publish the error of a failed iteration, in a job that does not survive rank failures.

    Returns the end of this rank, to be waited for once none of its operations is pending. An error caused by another
    rank is not published.
    """
    name, word, own = layout.name(layout.rank), None, not is_communication(error)
    serves = layout.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # as torch's rendezvous
    with suppress(RuntimeError), control.lent("last word", _STORE_S) as store:
        word = _error_in(store)
        if own and word is None:
            publish_error(store, name, error, serves=serves)
        if not serves and (own or word is not None):
            number = store.add(_GOING, 1)
            store.set(f"{_GOING}/{number}", packed(EndingProcess(os.getpid(), process_identity())))
    others = len(layout.workers) - 1 if serves and (own or word is not None) else 0
    if is_of_script(error) or (own and word is None):
        log_own(name, error)
        return Ending(control, None, others)
    if word is not None:
        logger.error("%s: this job ends with an error of %s", name, word)
    return Ending(control, word, others)


def publish_finished(store: SealedStore) -> None:
    """Publish that a rank has reached the end of the training. Ignores a store that does not answer."""
    with suppress(RuntimeError):
        store.set(_END, b"ended")


def check_abort(store: SealedStore, name: str) -> None:
    """Raise an error if the job has ended. `name`: of this rank, which waits for others.

    Raises OtherRankError if a rank has ended with an error of its own, once its process has ended; UnrecoverableError
    if ranks have reached the end of the training.
    """
    if (word := _error_in(store)) is not None:
        word.wait_for_end()
        raise OtherRankError(f"this job ends with an error of {word}")
    if store.peek(_END) is not None:
        raise UnrecoverableError(
            f"{name} cannot finish the work that a rank failure interrupted: other ranks have finished the "
            "training and left; checkpoints that were written before are whole"
        )


def _error_in(store: SealedStore) -> ErrorNotice | None:
    found = store.peek(_ERROR)
    if found is None:
        return None
    word: ErrorNotice = unpacked(found, ErrorNotice, _MOST_NBYTES)
    return word
