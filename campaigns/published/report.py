# SPDX-License-Identifier: Apache-2.0
"""Simulated cases and the published figures: a table for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence

from campaigns.published.simulated import SimulatedCase, System, median_error, published_ms

_COMPARED = (System.ONE_F_ONE_B, System.ZB_H2, System.HOST_PATH_H2, System.FULL)
"""Systems with published times."""

_EXPLANATION = f"""\
Milliseconds per iteration, simulated (published in brackets); 3 micro-batches per stage, each link slow both ways.
Simulated is compute and the delay of each message. Not simulated: the optimizer, gradient reduction, what handing a
message to another process costs, noise; the published times contain them.

- 1F1B, interleaved ({System.INTERLEAVED.name.lower()} has two chunks): stock Megatron, whose sends and receives block.
- ZB-H1, ZB-H2: zero bubble on the device path, where all transfers of a stage wait behind each other. The published
  zero bubble behaves as ZB-H2 does.
- host path: the same order, messages wait for nothing but the one before them on their link.
- full: planned for these delays within 2 (3) activations per stage and stage; published plans hold up to 3.
- online: whatever is ready, within 2, without knowing any delay. bound: what no order within 2 can beat.

Ratios: ours, in brackets the published ones. The last is full over the time without delay: of the best order within 2
here, of zero bubble in the published figures; after it what the bound allows, and the same for 3.
"""
_HEADINGS = (
    "case",
    "1F1B",
    "interleaved",
    "ZB-H1",
    "ZB-H2",
    "host path, ZB-H1",
    "host path, ZB-H2",
    "full, 2 PP",
    "full, 3 PP",
    "online, 2 PP",
    "bound, 2 PP",
    "1F1B / full",
    "ZB-H2 / full",
    "full / healthy",
    "bound / healthy",
    "full / healthy, 3 PP",
)


def markdown(simulated: Sequence[SimulatedCase]) -> str:
    """The simulated cases as a GitHub table, with what is modelled before it and how well it fits after it."""
    lines = [_EXPLANATION, _row(_HEADINGS), "|---|" + "---:|" * (len(_HEADINGS) - 1)]
    lines += [_row(_cells(each)) for each in simulated]
    if any(not each.case.model.measured for each in simulated):
        lines += ["", "\\* Stage times of this model were published as ranges only: each stage has their middle."]
    return "\n".join([*lines, "", *_fit(simulated)]) + "\n"


def _cells(each: SimulatedCase) -> list[str]:
    case, full_s = each.case, each.slow_s[System.FULL]
    healthy_s = each.healthy_s[System.FULL]
    published = case.published
    cells = [case.name if case.model.measured else f"{case.name} \\*"]
    for system in System:
        cells.append(_compared(1e3 * each.slow_s[system], published_ms(system, case), "{:.0f}"))
    cells.append(f"{1e3 * each.bound_s:.0f}")
    for system, theirs in ((System.ONE_F_ONE_B, published.one_f_one_b_ms), (System.ZB_H2, published.zero_bubble_ms)):
        cells.append(_compared(each.slow_s[system] / full_s, _quotient(theirs, published.full_ms), "{:.2f}"))
    base_ms = case.healthy.zero_bubble_ms or case.healthy.host_path_ms
    cells.append(_compared(full_s / healthy_s, _quotient(published.full_ms, base_ms), "{:.2f}"))
    cells.append(f"{each.bound_s / healthy_s:.2f}")
    cells.append(f"{each.slow_s[System.FULL_LARGER] / healthy_s:.2f}")
    return cells


def _fit(simulated: Sequence[SimulatedCase]) -> list[str]:
    """How far simulated slowdowns are from published ones."""
    errors = [(system, median_error(simulated, system)) for system in _COMPARED]
    parts = [f"{system.value} {error:.0%}" for system, error in errors if error is not None]
    if not parts:
        return []
    return [f"Slowdowns by the delay, simulated against published, median of the differences: {', '.join(parts)}."]


def _compared(ours: float, theirs: float | None, form: str) -> str:
    return form.format(ours) if theirs is None else f"{form.format(ours)} ({form.format(theirs)})"


def _quotient(numerator: float | None, denominator: float | None) -> float | None:
    return None if numerator is None or denominator is None else numerator / denominator


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
