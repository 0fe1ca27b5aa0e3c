# SPDX-License-Identifier: Apache-2.0
"""The way to find ranks that stand still: processes that are stopped, or hang in a driver, and whose hosts report.

The first rank that has waited for longer than the job's timeout, while the launcher knows of no death, calls the roll.
All that run interrupt what they wait in and answer; those that have not answered within the timeout stand still, and
the launcher ends them. From then on they are ranks that have died.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from adaptra_megatron.authentication.sealed_store import SealedStore
from adaptra_megatron.job.layout import JobLayout
from adaptra_megatron.job.membership import Stalled
from adaptra_megatron.log import logger_of

logger = logger_of(__name__)

_LOOKS_S = 0.1


def is_called(store: SealedStore) -> bool:
    """Return whether a rank has called the roll of the epoch that `store` is of."""
    return store.peek("called") is not None


def answer_roll(
    store: SealedStore,
    layout: JobLayout,
    live: frozenset[int],
    admitted: Mapping[int, int],
    timeout_s: float,
    check: Callable[[], bool],
) -> Stalled | None:
    """Call the roll, or answer to it, and wait for all others of the `live` ranks. `admitted`: see `Generation`.

    Returns those that have not answered within `timeout_s`, for the launcher; None where all have, where fewer than
    half have, or once `check` says that there is no need any more.
    """
    store.set("called", b"called")
    store.set(f"here/{layout.rank}", b"here")
    begun_s, answers = time.monotonic(), store.add("answers", 1)
    while answers < len(live):
        if check():
            return None
        if time.monotonic() - begun_s > timeout_s:
            break
        time.sleep(_LOOKS_S)
        answers = store.add("answers", 0)
    else:
        return None
    missing = tuple(rank for rank in sorted(live) if store.peek(f"here/{rank}") is None)
    if not missing or 2 * len(missing) > len(live):
        return None
    names = ", ".join(map(layout.name, missing))
    logger.warning(
        "%s: no answer for %.1f s, though nothing has ended there; the launcher ends what stands still, and the other "
        "%d ranks go on",
        names,
        2 * timeout_s,
        len(live) - len(missing),
    )
    why = f"stood still: {len(live) - len(missing)} other ranks waited for {2 * timeout_s:.1f} s"
    return Stalled(missing, why, admitted)
