# SPDX-License-Identifier: Apache-2.0
"""Define what cells report of their arrivals, and the reply: how it travels, and where it is in the store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from adaptra_megatron.common.backoff import Backoff
from adaptra_megatron.common.layout import Cell
from adaptra_megatron.common.typed_messages import Decoder, TaggedMessage
from adaptra_megatron.control.detector.straggler_arrivals import HostFigures, Row
from adaptra_megatron.control.sidecar.sidecar_process import Line, SidecarMessages

MOST_ROWS = 512
"""Iterations of one report, and iterations that the judge keeps open."""
_MOST_NBYTES = 1 << 22

PLACE = "stragglers"
"""In the job's store."""
ADDRESS_KEY, LATE_KEY, LAGS_KEY = "judge", "late", "lags"
"""Where the judge listens, empty once it has ended; the cells that are late; and lags of all cells."""


@dataclass(frozen=True, kw_only=True)
class CellReport:
    """A report of one cell, by its first rank; a later one replaces it."""

    rows: tuple[Row, ...] = ()
    """The latest iterations: reports overlap, so that none is missed."""
    host: HostFigures | None = None
    """Read only while a cell of the same stage is late."""
    missing: tuple[str, ...] = ()
    """Packages that are not installed on its host, and would say more."""


@dataclass(frozen=True, kw_only=True)
class LateCell:
    """A cell that its stage's others wait for."""

    cell: Cell
    cpu: str = ""
    """What its host's CPUs have to do with it, in words; "": nothing, as far as is known."""
    told: bool = True
    """False while its causes are looked for."""


Lags = tuple[tuple[float, ...], ...]
"""By stage and replica, in seconds."""


@dataclass(frozen=True, kw_only=True)
class StragglerVerdict:
    """Present findings."""

    late: tuple[LateCell, ...] = ()
    lags_s: Lags = ()


report_of: Decoder[CellReport] = Decoder(CellReport, _MOST_NBYTES)
late_of: Decoder[tuple[LateCell, ...]] = Decoder(tuple[LateCell, ...], _MOST_NBYTES)
lags_of: Decoder[Lags] = Decoder(Lags, _MOST_NBYTES)
Reports = Mapping[Cell, CellReport]


_ITERATIONS, _LONGEST_S = 4, 120.0
"""Iterations from one look to the next, unless causes are looked for, and the longest pause for that."""


@dataclass(frozen=True, kw_only=True)
class ReportPace:
    """Seconds between two looks: at first, and later, when they are half as long again each time."""

    first_s: float
    most_s: float

    def backoff(self) -> Backoff:
        """Pauses from the first on."""
        return Backoff(self.first_s, self.most_s, 1.5)

    def pause_s(self, pause_s: float, iteration_s: float, late: Iterable[LateCell]) -> float:
        """Return how long to wait instead of `pause_s` where iterations last `iteration_s` and these cells are late."""
        told = all(each.told for each in late)
        return max(pause_s, min(_LONGEST_S, _ITERATIONS * iteration_s)) if told else pause_s


class JudgeBegin(TaggedMessage, tag="begin", frozen=True, kw_only=True):
    """To the judge's process, first: the job."""

    secret: str
    """Hexadecimal."""
    place: str
    """Place of the reports in the job's store."""
    cells: tuple[tuple[Cell, int, str], ...]
    """All cells: the rank that reports for each, and its host."""
    pace: ReportPace
    log_level: int


class Finish(TaggedMessage, tag="finish", frozen=True, kw_only=True):
    """To the judge's process: look once more, and end."""


class StragglerServiceReply(TaggedMessage, tag="judged", frozen=True, kw_only=True):
    """From the judge's process: what is found now, and what there is to be said."""

    verdict: StragglerVerdict
    lines: tuple[Line, ...]
    events: tuple[str, ...]
    """Lines of an event log; their stamps are not used."""
    last: bool = False


TO_JUDGE: SidecarMessages[JudgeBegin | Finish] = SidecarMessages(JudgeBegin | Finish)
FROM_JUDGE: SidecarMessages[StragglerServiceReply] = SidecarMessages(StragglerServiceReply)
