# SPDX-License-Identifier: Apache-2.0
"""Words by which a rank has all others end: of an error of its own, and of the end of the training.

Who fails is to be seen first: its traceback is logged before any other rank is made aware of the error, and those that
are wait for its process to end, so that launchers, exit statuses and error files name the rank that failed.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

from adaptra_megatron.authentication.sealed_store import SealedStore
from adaptra_megatron.authentication.tagged_json import packed, unpacked
from adaptra_megatron.epochs.errors import OtherRankError, UnrecoverableError, is_communication, is_of_script
from adaptra_megatron.job.control_store import ControlStore
from adaptra_megatron.job.identity import process_identity
from adaptra_megatron.log import logger_of

logger = logger_of(__name__)

_ERROR, _END = "last_word", "ended"
_MOST_NBYTES = 1 << 14
_LOGGED = "_adaptra_logged"
_STORE_S = 2.0
"""For the job's store, as a job ends in which the death of a rank is not got over."""
_GOES_S, _LOOKS_S = 5.0, 0.02
"""For the process of a rank that has failed to end, however long it takes to clean up."""


@dataclass(frozen=True)
class LastWord:
    """What a rank says that ends with an error of its own."""

    rank: str
    """Its name in messages."""
    error: str
    process: int
    identity: str
    """See `process_identity`."""

    def __str__(self) -> str:
        return f"{self.rank}: {self.error}"

    def wait_for_end(self) -> None:
        """Wait until its process has ended and its launcher has seen that; for some seconds at most."""
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


def log_own(name: str, error: BaseException) -> None:
    """Log an error of this rank's own with its traceback, once, and let out what this process has printed: from now on
    its launcher may end it at any moment."""
    if _LOGGED in vars(error):
        return
    vars(error)[_LOGGED] = True
    logger.error("%s: this error was raised here, and the job ends with it", name, exc_info=error)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()


def say_error(store: SealedStore, name: str, error: BaseException, *, printed: bool = False) -> None:
    """The rank of this `name` ends with an error of its own; the first that says so is the one that counts. Logs it,
    unless Python has `printed` it. A store that does not answer is left alone."""
    if not printed and not isinstance(error, UnrecoverableError):
        log_own(name, error)
    text = f"{type(error).__name__}: {str(error)[:500]}"
    with suppress(RuntimeError):
        if store.peek(_ERROR) is None:
            store.set(_ERROR, packed(LastWord(name, text, os.getpid(), process_identity())))


def end_job(control: ControlStore, name: str, error: BaseException) -> LastWord | None:
    """An iteration of the rank of this `name` has failed where no death is got over. Logs and says `error` where it is
    its own; returns the word of another rank where `error` came of that one's, for this rank to wait for its end."""
    word, own = None, not is_communication(error)
    with suppress(RuntimeError), control.lent("last word", _STORE_S) as store:
        word = _error_in(store)
        if own and word is None:
            say_error(store, name, error)
    if is_of_script(error) or (own and word is None):
        log_own(name, error)
        return None
    if word is not None:
        logger.error("%s: this job ends with an error of %s", name, word)
    return word


def say_end(store: SealedStore) -> None:
    """A rank has come to the end of the training. A store that does not answer is left alone."""
    with suppress(RuntimeError):
        store.set(_END, b"ended")


def heed(store: SealedStore, name: str) -> None:
    """For a rank of this `name` that waits for others: raise OtherRankError where one has ended with an error of its
    own, once its process has ended; UnrecoverableError where they have come to the end of the training."""
    if (word := _error_in(store)) is not None:
        word.wait_for_end()
        raise OtherRankError(f"this job ends with an error of {word}")
    if store.peek(_END) is not None:
        raise UnrecoverableError(
            f"{name} cannot finish what was under way when a rank died, for others have come to the end of the "
            "training and left; checkpoints that were written before are whole"
        )


def _error_in(store: SealedStore) -> LastWord | None:
    found = store.peek(_ERROR)
    if found is None:
        return None
    word: LastWord = unpacked(found, LastWord, _MOST_NBYTES)
    return word
