# SPDX-License-Identifier: Apache-2.0
"""Take requests to a running job from files in its trace directory: to trace some iterations, or to change the policy.

A request for traces is an empty file `TRACE_DIR/requests/NAME`, NAME being one of `120`, `120-125`, `next`, `next-5`,
`last`, `last-5`. So `touch` is enough, on any host that shares the directory with the leader. The leader looks for
requests once per iteration, translates them into Megatron's iteration numbers, and sends them with the decision. Every
rank writes these iterations. It keeps the records of recent iterations in memory, so past ones can be requested, too.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.telemetry.action_records import ActionRecord, ArrivalRecord, Iterations
from adaptra_megatron.telemetry.background_writer import is_no_file
from adaptra_megatron.telemetry.trace import TraceWriter

logger = logger_of(__name__)


POLICIES = ("adapt", "observe", "off")
_MOST_NBYTES = 64


def policy_file(trace_directory: Path | str) -> Path:
    """Return the file that requests a policy: it holds one of POLICIES."""
    return Path(trace_directory) / "policy.request"


def ask_for_policy(trace_directory: Path | str, policy: str) -> Path:
    """Write a request for `policy`. Return its file, which the job removes once it has read it. Raises OSError."""
    file = policy_file(trace_directory)
    written = file.with_suffix(".new")
    written.write_text(f"{policy}\n")
    written.replace(file)  # so that no rank reads half of it
    return file


def take_policy(trace_directory: Path | str) -> str:
    """Return the requested policy and remove the request; "" if there is none. Never raises: invalid requests are
    logged."""
    file = policy_file(trace_directory)
    try:
        if is_no_file(file):
            return ""
        with file.open("rb") as opened:
            found = opened.read(_MOST_NBYTES).decode(errors="replace").strip()
        file.unlink()
    except FileNotFoundError:
        return ""
    except OSError as error:
        logger.warning("request for a policy: %s", error)
        return ""
    if found in POLICIES:
        return found
    logger.warning("%s asks for the policy %r, which is none of %s", file, found, ", ".join(POLICIES))
    return ""


KEPT_ITERATIONS = 32
"""Number of past iterations that can be requested; about 0.2 MB of records for 24 micro-batches."""
MOST_PER_REQUEST = 256
"""Maximum number of iterations of one request; more are dropped. To trace a whole run, use --adaptra-trace-dir
alone."""
_NAME = re.compile(r"(?:(?P<word>next|last)(?:-(?P<count>[0-9]{1,9}))?|(?P<first>[0-9]{1,9})(?:-(?P<end>[0-9]{1,9}))?)")


class RequestError(ValueError):
    """A request that names no iterations. Says what is valid."""


def request_directory(trace_directory: Path | str) -> Path:
    """Return the directory in which the leader looks for requests."""
    return Path(trace_directory) / "requests"


def parse_request(name: str, running: int) -> Iterations:
    """Return the iterations that `name` requests while iteration `running` (Megatron's number) runs. Raises
    RequestError.

    "next" begins two iterations later, when every rank knows of it. "last" ends with the iteration before `running`.
    """
    found = _NAME.fullmatch(name)
    if found is None:
        raise RequestError(f"{name!r} names no iterations: take next, next-5, last, last-5, 120 or 120-125")
    if found["word"] is not None:
        count = min(max(int(found["count"] or 1), 1), MOST_PER_REQUEST)
        if found["word"] == "next":
            return Iterations(running + 2, running + 1 + count)
        return Iterations(max(1, running - count), max(1, running - 1))
    first = int(found["first"])
    if first == 0:
        raise RequestError(f"{name!r}: Megatron counts iterations from 1")
    last = int(found["end"] or first)
    if last < first:
        raise RequestError(f"{name!r} ends before it begins: put the smaller number first")
    return Iterations(first, min(last, first + MOST_PER_REQUEST - 1))


class RequestBox:
    """The leader's reader of the request directory; it removes each request that it has read."""

    def __init__(self, trace_directory: Path | str) -> None:
        """Create the directory, so that one `touch` is enough. An OSError is logged, and there can be no requests
        then."""
        self._directory = request_directory(trace_directory)
        self._refused: set[str] = set()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            logger.warning("no traces on demand: %s; training goes on", error)

    def take(self, running: int) -> tuple[Iterations, ...]:
        """Return the new requests. Never raises: an invalid request is logged once and left in place."""
        found = []
        try:
            names = sorted(path.name for path in self._directory.iterdir())
        except OSError:
            return ()
        for name in names:
            if name in self._refused:
                continue
            try:
                found.append(parse_request(name, running))
                (self._directory / name).unlink()
            except (RequestError, OSError) as error:
                self._refused.add(name)
                logger.warning("request for a trace in %s: %s", self._directory, error)
        return tuple(found)


class RequestedTraces:
    """One rank's recent iterations; requested ones are written by `writer`. For the training thread alone."""

    def __init__(self, writer: TraceWriter, *, kept_iterations: int = KEPT_ITERATIONS) -> None:
        self._writer = writer
        self._kept = kept_iterations
        # By number in traces: also Megatron's number.
        self._recent: OrderedDict[int, tuple[int, Sequence[ActionRecord], Sequence[ArrivalRecord], float | None]] = (
            OrderedDict()
        )
        self._wanted: list[Iterations] = []

    def request(self, requests: Iterable[Iterations]) -> None:
        """Write the requested iterations: those in memory now, later ones once they are added."""
        for wanted in requests:
            for number in [
                number for number, (step, *_) in self._recent.items() if wanted.first <= step <= wanted.last
            ]:
                self._write(number)
            self._wanted.append(wanted)

    def add(
        self,
        iteration: int,
        step: int,
        records: Sequence[ActionRecord],
        arrivals: Sequence[ArrivalRecord] = (),
        clock_offset_s: float | None = None,
    ) -> None:
        """Add an iteration. It is written if it was requested, else dropped after `kept_iterations`. `step`:
        Megatron's number, which evaluations share with a training iteration."""
        self._wanted = [wanted for wanted in self._wanted if wanted.last >= step]
        self._recent[iteration] = step, records, arrivals, clock_offset_s
        if any(wanted.first <= step for wanted in self._wanted):
            self._write(iteration)
        while len(self._recent) > self._kept:
            self._recent.popitem(last=False)

    def close(self) -> None:
        self._writer.close()

    def _write(self, iteration: int) -> None:
        # Taken out, so that two requests for one iteration write it once.
        _step, records, arrivals, clock_offset_s = self._recent.pop(iteration)
        self._writer.write(iteration, records, arrivals, clock_offset_s)
