# SPDX-License-Identifier: Apache-2.0
"""What all ranks measured in an iteration, put together for the detector: the two ends of each message joined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from adaptra_megatron.control.measurements import Messages, StageMeasurement, message_order
from adaptra_megatron.detector.samples import (
    Array,
    IterationSample,
    LinkId,
    LinkSample,
    MessageColumns,
    StageId,
    StageSample,
)
from adaptra_megatron.transport.paths import Path

BUFFERED_NBYTES = 16 << 20
"""More than NCCL may have sent of a message that is not awaited: twice its buffers (NCCL_BUFFSIZE, 4 MiB) of 2 CTAs."""


def iteration_sample(measurements: Sequence[StageMeasurement], *, rendezvous: bool = False) -> IterationSample:
    """One iteration of all ranks as the detector takes it in.

    A message that was sent on a path and did not arrive by it counts as lost there, if its receiver was heard.
    `rendezvous`: whether messages of the device path leave when their receives have been posted, as over NCCL.
    """
    received: dict[LinkId, _End] = {}
    for measurement in measurements:
        for source, path, end in _ends(measurement.received, measurement.span_s[0]):
            received[LinkId(measurement.pipeline, source, measurement.stage, path.value)] = end
    heard = {(measurement.pipeline, measurement.stage) for measurement in measurements}
    links = {}
    for measurement in measurements:
        for target, path, end in _ends(measurement.sent, measurement.span_s[0]):
            if (measurement.pipeline, target) in heard:
                link = LinkId(measurement.pipeline, measurement.stage, target, path.value)
                links[link] = LinkSample(_joined(end, received.get(link), path, rendezvous))
    _add_probes(links, measurements)
    stages = {
        StageId(measurement.pipeline, measurement.stage): StageSample(
            measurement.durations_s, sizes=measurement.sizes, work=measurement.work
        )
        for measurement in measurements
    }
    disturbances = (measurement.disturbance for measurement in measurements)
    disturbance = next((what for what in disturbances if what is not None), None)
    return IterationSample(measurements[0].iteration, links, stages, disturbance)


class _End(NamedTuple):
    """The messages of one path of one link at one of its ends, in order of their keys; moments on the common clock."""

    codes: npt.NDArray[np.int64]
    """Keys as numbers."""
    nbytes: Array
    posted_s: Array
    done_s: Array


def _ends(messages: Messages, start_s: float) -> Iterator[tuple[int, Path, _End]]:
    """By peer and path."""
    if not len(messages):
        return
    groups, codes = message_order(messages)
    begins = np.concatenate([[0], np.flatnonzero(groups[1:] != groups[:-1]) + 1, [len(groups)]])
    nbytes = messages["nbytes"].astype(np.float64)
    posted_s = messages["posted_s"] + np.float64(start_s)
    done_s = messages["done_s"] + np.float64(start_s)
    for begin, until in pairwise(begins.tolist()):
        group = int(groups[begin])
        path = Path.HOST if group & 1 else Path.DEVICE
        part = slice(begin, until)
        yield group >> 1, path, _End(codes[part], nbytes[part], posted_s[part], done_s[part])


def _joined(sent: _End, received: _End | None, path: Path, rendezvous: bool) -> MessageColumns:
    """The messages that were sent, each with its arrival."""
    nothing = np.full(len(sent.codes), np.nan)
    if received is None:
        return MessageColumns(sent.nbytes, sent.done_s, nothing, nothing)
    arrived_s, posted_s = received.done_s, received.posted_s
    if not np.array_equal(sent.codes, received.codes):
        places = np.searchsorted(received.codes, sent.codes)
        places[places == len(received.codes)] = 0
        here = received.codes[places] == sent.codes
        arrived_s, posted_s = (np.where(here, column[places], np.nan) for column in (arrived_s, posted_s))
    if path is Path.HOST:  # its arrivals are seen whether or not they are asked for
        return MessageColumns(sent.nbytes, sent.done_s, arrived_s, nothing)
    if not rendezvous:
        return MessageColumns(sent.nbytes, sent.done_s, arrived_s, posted_s)
    leaves = sent.nbytes > BUFFERED_NBYTES
    left_s = np.where(leaves, np.fmax(sent.done_s, posted_s), sent.done_s)
    return MessageColumns(sent.nbytes, left_s, arrived_s, np.where(leaves, np.nan, posted_s))


def _add_probes(links: dict[LinkId, LinkSample], measurements: Sequence[StageMeasurement]) -> None:
    """What is known of paths by other means than their messages."""
    offset_s = {(measurement.pipeline, measurement.stage): measurement.clock_offset_s for measurement in measurements}
    for measurement in measurements:
        pipeline, stage, own_offset_s = measurement.pipeline, measurement.stage, measurement.clock_offset_s
        for probe in measurement.probes:
            if (pipeline, probe.peer) in offset_s:
                link = LinkId(pipeline, stage, probe.peer, probe.path.value)
                arrived_s = probe.arrived_s + offset_s[pipeline, probe.peer]
                columns = probe.nbytes, probe.sent_s + own_offset_s, arrived_s, np.nan
                before = links.get(link, LinkSample())
                message = MessageColumns(*(np.array([value], dtype=np.float64) for value in columns))
                links[link] = replace(before, messages=before.messages.and_also(message))
        for peer, path, cause in measurement.broken:
            link = LinkId(pipeline, stage, peer, path.value)
            links[link] = replace(links.get(link, LinkSample()), broken=cause)
