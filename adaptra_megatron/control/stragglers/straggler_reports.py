# SPDX-License-Identifier: Apache-2.0
"""Define the reports of cells on their arrivals, the verdict on them, and their keys in the store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from adaptra_megatron.common.backoff import Backoff
from adaptra_megatron.common.layout import Cell
from adaptra_megatron.common.typed_messages import Decoder, TaggedMessage
from adaptra_megatron.control.detector.straggler_arrivals import HostFigures, Row
from adaptra_megatron.control.sidecar.planner_connections import Line, SidecarMessages

MOST_ROWS = 512
"""Maximum number of iterations of one report, and of incomplete iterations kept."""
_MOST_NBYTES = 1 << 22

PLACE = "stragglers"
"""Prefix of the keys in the job's store."""
ADDRESS_KEY, LATE_KEY, LAGS_KEY = "judge", "late", "lags"
"""Keys of the straggler service's address (empty once it has ended), of the late cells, and of all cells' lags."""


@dataclass(frozen=True, kw_only=True)
class CellReport:
    """A report of one cell, sent by its first rank; it replaces the cell's report before."""

    rows: tuple[Row, ...] = ()
    """The latest iterations. Reports overlap, so that a lost one loses nothing."""
    host: HostFigures | None = None
    """Read only while a cell of the same stage is late."""
    missing: tuple[str, ...] = ()
    """Packages that would give more figures, but are not installed on the cell's host."""


@dataclass(frozen=True, kw_only=True)
class LateCell:
    """A cell that the other cells of its stage wait for."""

    cell: Cell
    cpu: str = ""
    """How its host's CPUs make it late, as text; "" if they do not, or it is unknown."""
    logged: bool = True
    """Whether it has been logged; not while its causes are unknown."""


Lags = tuple[tuple[float, ...], ...]
"""Lags in seconds, by stage and replica."""


@dataclass(frozen=True, kw_only=True)
class StragglerVerdict:
    """Present late cells, and lags of all cells."""

    late: tuple[LateCell, ...] = ()
    lags_s: Lags = ()


report_of: Decoder[CellReport] = Decoder(CellReport, _MOST_NBYTES)
late_of: Decoder[tuple[LateCell, ...]] = Decoder(tuple[LateCell, ...], _MOST_NBYTES)
lags_of: Decoder[Lags] = Decoder(Lags, _MOST_NBYTES)
Reports = Mapping[Cell, CellReport]


_ITERATIONS, _LONGEST_S = 4, 120.0
"""Iterations between two polls once all late cells are logged, and the longest pause that this makes, in seconds."""


@dataclass(frozen=True, kw_only=True)
class ReportPace:
    """Seconds between two polls: the first pause and the longest; each is 1.5 times the one before."""

    first_s: float
    most_s: float

    def backoff(self) -> Backoff:
        """Return the pauses, from the first on."""
        return Backoff(self.first_s, self.most_s, 1.5)

    def pause_s(self, pause_s: float, iteration_s: float, late: Iterable[LateCell]) -> float:
        """Return the pause to make, at least `pause_s`: longer if iterations (of `iteration_s`) are long and all late
        cells are logged."""
        logged = all(each.logged for each in late)
        return max(pause_s, min(_LONGEST_S, _ITERATIONS * iteration_s)) if logged else pause_s


class JudgeBegin(TaggedMessage, tag="judge", frozen=True, kw_only=True):
    """First message to the straggler service: the job."""

    secret: str
    """Hexadecimal."""
    place: str
    """Prefix of the reports' keys in the job's store."""
    cells: tuple[tuple[Cell, int, str], ...]
    """All cells: the rank that reports for each, and its host."""
    pace: ReportPace
    log_level: int


class Finish(TaggedMessage, tag="finish", frozen=True, kw_only=True):
    """Message to the straggler service: judge once more, and end."""


class StragglerServiceReply(TaggedMessage, tag="judged", frozen=True, kw_only=True):
    """Message of the straggler service: the present verdict, log lines and events."""

    verdict: StragglerVerdict
    lines: tuple[Line, ...]
    events: tuple[str, ...]
    """Events, encoded as in an event log; their stamps are not used."""
    last: bool = False


TO_JUDGE: SidecarMessages[JudgeBegin | Finish] = SidecarMessages(JudgeBegin | Finish)
FROM_JUDGE: SidecarMessages[StragglerServiceReply] = SidecarMessages(StragglerServiceReply)
