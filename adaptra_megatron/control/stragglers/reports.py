# SPDX-License-Identifier: Apache-2.0
"""What cells report of their arrivals, and what the job's lowest rank makes of it, as it stands in the job's store."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from adaptra_megatron.control.wire_format import Decoder
from adaptra_megatron.detector.straggler_causes import HostFigures
from adaptra_megatron.detector.stragglers import Row
from adaptra_megatron.schedule.routing.costs import Cell

MOST_ROWS = 512
"""Iterations of one report, and iterations that the judge keeps open."""
_MOST_NBYTES = 1 << 22

PLACE = "stragglers"
"""In the job's store."""
VERDICT_KEY = "verdict"


@dataclass(frozen=True, kw_only=True)
class CellReport:
    """A report of one cell, by its first rank; a later one replaces it."""

    rows: tuple[Row, ...] = ()
    """The latest iterations: reports overlap, so that none is missed."""
    host: HostFigures | None = None
    missing: tuple[str, ...] = ()
    """Packages that are not installed on its host, and would say more."""


@dataclass(frozen=True, kw_only=True)
class LateCell:
    """A cell that its stage's others wait for."""

    cell: Cell
    cpu: str = ""
    """What its host's CPUs have to do with it, in words; "": nothing, as far as is known."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is found now."""

    late: tuple[LateCell, ...] = ()
    lags_s: tuple[tuple[float, ...], ...] = ()
    """By stage and replica."""


report_of: Decoder[CellReport] = Decoder(CellReport, _MOST_NBYTES)
verdict_of: Decoder[Verdict] = Decoder(Verdict, _MOST_NBYTES)
Reports = Mapping[Cell, CellReport]
