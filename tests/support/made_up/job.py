# SPDX-License-Identifier: Apache-2.0
"""Layouts and rendezvous of jobs, made without a gather."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.common.handshake import SECRET_NBYTES
from adaptra_megatron.common.layout import Introduction, JobLayout, layout_of
from adaptra_megatron.transport.setup.rendezvous import Rendezvous

SECRET = b"s" * SECRET_NBYTES


class ControlOver(ControlStore):
    """The control of a job whose clients are all one store."""

    def __init__(self, store: Any) -> None:
        super().__init__(store, SECRET, "job")

    def unsealed(self, place: str, within_s: float | None = None) -> Any:
        return self._store


def layout(
    pipelines: Iterable[Sequence[int]],
    rank: int,
    *,
    joined: Iterable[Sequence[int]] = (),
    hosts: Sequence[str] | None = None,
    token: str = "job",
) -> JobLayout:
    """Layout of a job of pipelines, given as the ranks of each by stage. `joined`: groups that meet in collectives.
    `hosts`: by rank; None: one for all."""
    introductions = [
        Introduction(
            member,
            ranks[0],
            stage,
            [min(group) for group in joined if member in group],
            "a host",
            f"{'a host' if hosts is None else hosts[member]}/network",
            token,
        )
        for ranks in pipelines
        for stage, member in enumerate(ranks)
    ]
    return layout_of(sorted(introductions), rank)


def rendezvous(store: Any, ranks: Sequence[int], stage: int, timeout_s: float, token: str = "job") -> Rendezvous:
    """Rendezvous of a job that is one pipeline, in any store."""
    return Rendezvous(ControlStore(store, SECRET, token), layout([ranks], ranks[stage], token=token), timeout_s)
