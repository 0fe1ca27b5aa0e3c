# SPDX-License-Identifier: Apache-2.0
"""Make Megatron's OpenTelemetry spans for messages and weight gradients, where Megatron's own functions do not run.

In stock, Megatron's p2p functions make spans of messages. From release 0.20 on it makes spans by the package nemo-lens.
Names and groups are its own, "microbatch" and "communication" (`--otel-span-groups`); each span has micro-batch and
chunk as attributes.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from adaptra_megatron.engine.iteration_hooks import IterationHooks
from adaptra_megatron.megatron.computation import StageComputation, SurroundedComputation
from adaptra_megatron.megatron.megatron_call import PipelineCall
from adaptra_megatron.transport.message_keys import Direction, MessageKey, Transport

if TYPE_CHECKING:
    from adaptra_megatron.engine.pipeline import Pipeline

# Named ranges around what a stage computes, sends, receives and waits for, for torch.profiler (Kineto, HTA) and, on
# GPUs, Nsight Systems.
# On a GPU the ranges of messages are those of the CPU that launches them; waits of the GPU itself are in its streams.


def ranged_computation(computation: StageComputation) -> StageComputation:
    """Return `computation` with a profiler range around each action, such as "adaptra F 3" or "adaptra I 3,
    chunk 1".
    """
    return SurroundedComputation(
        computation, lambda kind, chunk, micro_batch: _range(f"{kind} {micro_batch}{_of(chunk)}")
    )


class RangedTransport:
    """A Transport with profiler ranges around its calls.

    Examples: "adaptra send activation 3 to rank 1"; "adaptra receive gradient 3 from rank 1", when the receive is
    posted; "adaptra wait for gradient 3, chunk 1".
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.describe, self.can_poll, self.ready = transport.describe, transport.can_poll, transport.ready
        self.last_receive_path, self.take_times, self.close = (
            transport.last_receive_path,
            transport.take_times,
            transport.close,
        )

    def post_send(self, key: MessageKey, peer: int, tensor: torch.Tensor) -> None:
        with _range(f"send {_named(key)} to rank {peer}"):
            self._transport.post_send(key, peer, tensor)

    def post_receive(self, key: MessageKey, peer: int) -> None:
        with _range(f"receive {_named(key)} from rank {peer}"):
            self._transport.post_receive(key, peer)

    def wait_any(self, keys: Collection[MessageKey], until_s: float) -> bool:
        with _range(f"wait for {' or '.join(map(_named, keys))}"):
            return self._transport.wait_any(keys, until_s)

    def wait(self, key: MessageKey, deadline_s: float) -> torch.Tensor:
        with _range(f"wait for {_named(key)}"):
            return self._transport.wait(key, deadline_s)

    def flush(self, deadline_s: float) -> None:
        with _range("wait until all has been sent"):
            self._transport.flush(deadline_s)


def _of(chunk: int) -> str:
    return f", chunk {chunk}" if chunk else ""


def _named(key: MessageKey) -> str:
    return f"{key.direction.value} {key.micro_batch}{_of(key.chunk)}"


@contextlib.contextmanager
def _range(what: str) -> Iterator[None]:
    """Open a range in both kinds of profilers. torch's own ranges reach Nsight within emit_nvtx() alone."""
    name = f"adaptra {what}"
    with contextlib.ExitStack() as ranges:
        ranges.enter_context(torch.profiler.record_function(name))
        if torch.cuda.is_available():
            ranges.enter_context(torch.cuda.nvtx.range(name))
        yield


class ProfileRanges(IterationHooks):
    """Puts named profiler ranges around actions and messages."""

    def wrap_transport(self, transport: Transport) -> Transport:
        return RangedTransport(transport)

    def wrap_computation(self, call: PipelineCall, computation: StageComputation) -> StageComputation:
        return ranged_computation(computation)


Span = Callable[..., AbstractContextManager[Any]]
"""nemo-lens' managed_span(group, name, **attributes)."""

ACTIONS = {
    "F": "megatron.microbatch.forward",
    "B": "megatron.microbatch.backward",
    "I": "megatron.microbatch.backward",
    "W": "megatron.microbatch.backward_weight",
}
_MESSAGES = {Direction.ACTIVATION: "forward", Direction.GRADIENT: "backward"}
_GROUPS = ("microbatch", "communication")


def megatron_span() -> Span | None:
    """Return the function that makes spans; None without nemo-lens, or if neither group is selected."""
    try:
        state, helpers = (importlib.import_module(f"nemo.lens.{name}") for name in ("state", "helpers"))
    except ImportError:
        return None
    span: Span = helpers.managed_span
    return span if any(map(state.is_span_group_enabled, _GROUPS)) else None


def spanned_computation(computation: StageComputation, span: Span) -> StageComputation:
    """Return `computation` with a span around each action. Where Megatron's own functions make spans, only W
    gets one.
    """
    if importlib.util.find_spec("megatron.core.telemetry") is not None:
        return _WeightSpans(computation, span)
    return SurroundedComputation(computation, lambda *action: _action(span, *action))


class _WeightSpans(SurroundedComputation):
    """Computation with spans around one kind of action."""

    def __init__(self, computation: StageComputation, span: Span) -> None:
        super().__init__(computation, lambda *action: _action(span, *action))
        self.forward, self.backward = computation.forward, computation.backward  # type: ignore[method-assign]


class SpannedTransport:
    """A Transport with the spans that Megatron's own send and receive functions make in stock."""

    def __init__(self, transport: Transport, span: Span) -> None:
        self._transport, self._span = transport, span
        self.describe, self.post_receive, self.wait_any = transport.describe, transport.post_receive, transport.wait_any
        self.can_poll, self.ready, self.last_receive_path = (
            transport.can_poll,
            transport.ready,
            transport.last_receive_path,
        )
        self.take_times, self.flush, self.close = transport.take_times, transport.flush, transport.close

    def post_send(self, key: MessageKey, peer: int, tensor: torch.Tensor) -> None:
        with self._of(f"megatron.p2p.send_{_MESSAGES[key.direction]}", key):
            self._transport.post_send(key, peer, tensor)

    def wait(self, key: MessageKey, deadline_s: float) -> torch.Tensor:
        with self._of(f"megatron.p2p.recv_{_MESSAGES[key.direction]}", key):
            return self._transport.wait(key, deadline_s)

    def _of(self, name: str, key: MessageKey) -> AbstractContextManager[Any]:
        return self._span("communication", name, **_attributes(key.chunk, key.micro_batch))


class MegatronSpans(IterationHooks):
    """Makes Megatron's spans, if nemo-lens is installed and one of their groups is selected."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        self._span = megatron_span()

    def wrap_transport(self, transport: Transport) -> Transport:
        return transport if self._span is None else SpannedTransport(transport, self._span)

    def wrap_computation(self, call: PipelineCall, computation: StageComputation) -> StageComputation:
        return computation if self._span is None else spanned_computation(computation, self._span)


def _action(span: Span, kind: str, chunk: int, micro_batch: int) -> AbstractContextManager[Any]:
    return span("microbatch", ACTIONS[kind], **_attributes(chunk, micro_batch))


def _attributes(chunk: int, micro_batch: int) -> dict[str, int]:
    return {"adaptra.micro_batch": micro_batch, "adaptra.chunk": chunk}
