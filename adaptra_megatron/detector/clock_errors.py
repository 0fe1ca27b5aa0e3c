# SPDX-License-Identifier: Apache-2.0
"""Clocks that have drifted apart look like a slow link one way, and a link faster than light the other way."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from adaptra_megatron.detector.samples import LinkId, LinkSample

HostPair = tuple[int, int, int]
"""Pipeline, and the two stages in the order of the link."""


def clock_corrections(links: Mapping[LinkId, LinkSample], min_messages: int) -> dict[HostPair, float]:
    """Seconds to take off the one-way times of each pair's links, of whatever path.

    Only what must be wrong is corrected: by the amount by which the typical time of the other direction is negative.
    """
    impossible_s: dict[HostPair, float] = {}
    for link, sample in links.items():
        messages = sample.messages
        delays_s = (messages.arrived_s - messages.sent_s)[messages.arrived & messages.awaited]
        if len(delays_s) >= min_messages:
            pair = link.pipeline, link.source, link.target
            middle = len(delays_s) // 2
            impossible_s[pair] = max(impossible_s.get(pair, 0.0), -float(np.partition(delays_s, middle)[middle]))
    corrections: dict[HostPair, float] = {}
    for (pipeline, source, target), seconds in impossible_s.items():
        if seconds > 0.0:
            for pair, shift_s in (((pipeline, target, source), seconds), ((pipeline, source, target), -seconds)):
                corrections[pair] = corrections.get(pair, 0.0) + shift_s
    return corrections
