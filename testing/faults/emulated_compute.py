# SPDX-License-Identifier: Apache-2.0
"""Emulate compute times: forward, input gradient and weight gradient last a given time on any machine.

The real operation runs, on tensors small enough to finish sooner, and the thread sleeps for the rest of the time. So
results stay bitwise those of the real model, and many stages can be timed on few cores.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from testing.faults.precise_sleep import sleep_until
from testing.replacing import Replaced, Replacement

if TYPE_CHECKING:
    import torch

    from adaptra_megatron.megatron.computation import BackwardPart, ForwardPart, Send, StageComputation

Function = TypeVar("Function", bound=Callable[..., Any])
SecondsOfCall = Callable[..., float]
_CHUNK_ATTRIBUTE = "emulated_compute_chunk"


class EmulationError(ValueError):
    """An emulation setting is invalid; the message names the valid settings."""


@dataclass
class ComputeCounts:
    """Counters of an `EmulatedCompute`: proof that it was active and that its times held."""

    calls: int = 0
    overruns: int = 0
    """Number of operations whose real work took longer than the emulated time."""
    worst_overrun_s: float = 0.0
    real_s: float = 0.0
    """Seconds of real work."""
    emulated_s: float = 0.0
    """Emulated seconds."""


class _Pace:
    """Keeps a late wake-up from delaying the next operation, since an emulated device needs no core of this machine."""

    _AT_ONCE_S = 0.0005
    """Pause between two operations above which the second one was waiting for something else."""

    def __init__(self) -> None:
        self._woke_s = float("-inf")
        self._late_s = 0.0
        self.worst_late_s = 0.0
        """Longest delay of any operation beyond its time."""

    def start(self, now_s: float) -> float:
        """Return the start of an operation entered at `now_s`. If it directly follows the previous one, its start is
        earlier by the lateness of that one's sleep.
        """
        return now_s - self._late_s if now_s - self._woke_s < self._AT_ONCE_S else now_s

    def end(self, due_s: float) -> None:
        """Record the end of an operation that was due at `due_s`."""
        self._woke_s = time.monotonic()
        self.worst_late_s = max(self.worst_late_s, self._woke_s - due_s)
        self._late_s = max(0.0, min(self._woke_s - due_s, 2 * self._AT_ONCE_S))


@dataclass(frozen=True, kw_only=True)
class EmulatedCompute:
    """Times of one stage's operations, per chunk; a single time applies to every chunk.

    Our executor's step calls Megatron's step, and both may be decorated. A call within another counts as part of the
    outer call, and only the outer call's time is emulated.
    """

    forward_s: tuple[float, ...]
    backward_input_s: tuple[float, ...]
    backward_weight_s: tuple[float, ...]
    combined_share: float = 1.0
    """Duration of a combined action as a fraction of its forward's and whole backward's together. With a split backward
    it saves as many seconds."""
    slow_down: Callable[[], float] = field(default=lambda: 1.0, compare=False, repr=False)
    """Returns the present factor on all times."""
    full_length: int | None = None
    """Tokens of a full sequence; shorter ones take proportionally less under --adaptra. None: all take the same
    time."""
    counts: ComputeCounts = field(default_factory=ComputeCounts, compare=False)
    _pace: _Pace = field(default_factory=lambda: _Pace(), compare=False, repr=False)
    _nesting: list[None] = field(default_factory=list, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_input_s", "backward_weight_s"):
            values = getattr(self, name)
            if not values or not all(0 <= value < float("inf") for value in values):
                raise EmulationError(f"{name} is {values}; it needs at least one time, none below 0")

    def forward_seconds(self, chunk: int = 0) -> float:
        """Return the duration of a forward of `chunk`."""
        return self.forward_s[min(chunk, len(self.forward_s) - 1)]

    def backward_seconds(self, chunk: int = 0, *, split: bool = False) -> float:
        """Return the duration of a backward of `chunk`; `split`: of the input gradient alone."""
        last = len(self.backward_input_s) - 1
        return self.backward_input_s[min(chunk, last)] + (0.0 if split else self.weight_seconds(chunk))

    def weight_seconds(self, chunk: int = 0) -> float:
        """Return the duration of a weight gradient of `chunk`."""
        return self.backward_weight_s[min(chunk, len(self.backward_weight_s) - 1)]

    def combined_seconds(self, forward_s: float, backward_s: float, whole_s: float) -> float:
        """Return the duration of a combined action. `whole_s`: what its backward would take whole."""
        saved_s = (1.0 - self.combined_share) * (forward_s + whole_s)
        return max(forward_s, backward_s, forward_s + backward_s - saved_s)

    def action_seconds(self, kind: str, chunk: int) -> float:
        """Return the present duration of an action of `chunk`; `kind`: letter of `schedule.ir.Kind`."""
        backward_s = self.backward_seconds(chunk, split=kind == "I")
        return self.slow_down() * {"F": self.forward_seconds(chunk), "W": self.weight_seconds(chunk)}.get(
            kind, backward_s
        )

    def lasting(self, function: Function, seconds_of_call: SecondsOfCall) -> Function:
        """Decorate `function`: a call lasts `seconds_of_call(*args, **keywords)`, or longer if it needs more time.

        The latter counts as an overrun. Results and exceptions pass through.
        """

        @functools.wraps(function)
        def decorated(*args: Any, **keywords: Any) -> Any:
            if self._nesting:
                return function(*args, **keywords)
            entered_s = time.monotonic()
            started_s = self._pace.start(entered_s)
            self._nesting.append(None)
            try:
                result = function(*args, **keywords)
            finally:
                self._nesting.pop()
            seconds = self.slow_down() * seconds_of_call(*args, **keywords)
            self._count(time.monotonic() - entered_s, seconds)
            sleep_until(started_s + seconds)
            self._pace.end(started_s + seconds)
            return result

        return cast(Function, decorated)

    def _count(self, real_s: float, emulated_s: float) -> None:
        counts = self.counts
        counts.calls += 1
        counts.real_s += real_s
        counts.emulated_s += emulated_s
        if real_s > emulated_s:
            counts.overruns += 1
            counts.worst_overrun_s = max(counts.worst_overrun_s, real_s - emulated_s)

    def take_lateness_s(self) -> float:
        """Return the worst lateness of an operation since the last call, caused by a busy machine."""
        worst_s, self._pace.worst_late_s = self._pace.worst_late_s, 0.0
        return worst_s

    def install_on_stock(self, schedules: ModuleType) -> Replaced:
        """Decorate `forward_step` and `backward_step` of Megatron's `schedules`, whose callers look them up there.

        A backward lasts as long as both gradients. Its chunk, which Megatron does not pass, is the one whose forward
        made the output.
        """
        stock_forward, stock_backward = schedules.forward_step, schedules.backward_step

        @functools.wraps(stock_forward)
        def forward_step(*args: Any, **keywords: Any) -> Any:
            result = stock_forward(*args, **keywords)
            for output in _as_list(result[0]):
                setattr(output, _CHUNK_ATTRIBUTE, forward_chunk(*args, **keywords))
            return result

        forward_chunk = _argument_getter(stock_forward, "vp_stage", 0)
        output_of_call = _argument_getter(stock_backward, "output_tensor", None)

        def backward_seconds(*args: Any, **keywords: Any) -> float:
            outputs = _as_list(output_of_call(*args, **keywords))
            return self.backward_seconds(getattr(outputs[0], _CHUNK_ATTRIBUTE, 0))

        reason = "emulated compute"
        return Replaced(
            [
                Replacement(
                    schedules,
                    "forward_step",
                    self.lasting(forward_step, lambda *a, **k: self.forward_seconds(forward_chunk(*a, **k))),
                    reason,
                ),
                Replacement(schedules, "backward_step", self.lasting(stock_backward, backward_seconds), reason),
            ]
        )

    def decorate(self, computation: StageComputation) -> StageComputation:
        """Return `computation` with emulated durations. A split backward lasts as long as an input gradient."""
        return _EmulatedComputation(computation, self)


class _EmulatedComputation:
    """StageComputation whose operations last the times of an EmulatedCompute."""

    def __init__(self, computation: StageComputation, compute: EmulatedCompute) -> None:
        self._forward, self._full_length = computation.forward, compute.full_length
        self._shares: dict[tuple[int, int], float] = {}
        """Length of each (chunk, micro-batch) as a fraction of a full sequence, if durations depend on it."""
        self.forward = compute.lasting(
            self._measured, lambda chunk, number, *_: compute.forward_seconds(chunk) * self._share(chunk, number)
        )
        self.backward = compute.lasting(
            computation.backward,
            lambda chunk, number, *_, split: compute.backward_seconds(chunk, split=split) * self._share(chunk, number),
        )
        self.weight_gradient = compute.lasting(
            computation.weight_gradient,
            lambda chunk, number: compute.weight_seconds(chunk) * self._share(chunk, number),
        )
        self._forward_backward = compute.lasting(
            self._combined(computation.forward_backward),
            lambda forward, backward, *_: compute.combined_seconds(
                compute.forward_seconds(forward.chunk) * self._share(*forward[:2]),
                *(
                    compute.backward_seconds(backward.chunk, split=split) * self._share(*backward[:2])
                    for split in (backward.split, False)
                ),
            ),
        )

    def forward_backward(
        self, forward: ForwardPart, backward: BackwardPart, send_output: Send, send_gradient: Send
    ) -> torch.Tensor:
        """See StageComputation. Both messages leave at the end."""
        made: list[tuple[Send, torch.Tensor]] = []
        output = self._forward_backward(
            forward,
            backward,
            lambda tensor: made.append((send_output, tensor)),
            lambda tensor: made.append((send_gradient, tensor)),
        )
        for send, tensor in made:
            send(tensor)
        return output

    def _measured(self, chunk: int, micro_batch: int, input_tensor: torch.Tensor | None) -> torch.Tensor:
        output = self._forward(chunk, micro_batch, input_tensor)
        self._measure(chunk, micro_batch, output if input_tensor is None else input_tensor)
        return output

    def _combined(self, compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def forward_backward(forward: ForwardPart, backward: BackwardPart, *sends: Any) -> torch.Tensor:
            output = compute(forward, backward, *sends)
            chunk, micro_batch, received = forward
            self._measure(chunk, micro_batch, output if received is None else received)
            return output

        return forward_backward

    def _measure(self, chunk: int, micro_batch: int, passed: torch.Tensor) -> None:
        """Keep the length of a micro-batch. `passed`: [sequence, micro-batch, hidden]."""
        if self._full_length is not None:
            self._shares[chunk, micro_batch] = passed.shape[0] / self._full_length

    def _share(self, chunk: int, micro_batch: int) -> float:
        return self._shares.get((chunk, micro_batch), 1.0)


def _as_list(outputs: Any) -> list[Any]:
    return outputs if isinstance(outputs, list) else [outputs]


def _argument_getter(function: Callable[..., Any], name: str, default: Any) -> Callable[..., Any]:
    """Return a function that gets the argument `name` of a call of `function`; None counts as `default`."""
    signature = inspect.signature(function)

    def get(*args: Any, **keywords: Any) -> Any:
        found = signature.bind(*args, **keywords).arguments.get(name)
        return default if found is None else found

    return get


def parse_compute(
    text: str, *, stage: int, stages: int, slow_down: Callable[[], float] = lambda: 1.0, full_length: int | None = None
) -> EmulatedCompute:
    """Return the times of `stage` in `--emulate-compute-ms`: "F,B,W" for all stages, or one triple per stage with
    semicolons.

    Times are milliseconds; a fourth number is the `combined_share`. `slow_down`, `full_length`: see EmulatedCompute.
    Raises EmulationError for anything else.
    """
    triples = [part.strip() for part in text.split(";")]
    if len(triples) not in (1, stages):
        raise EmulationError(
            f"--emulate-compute-ms {text!r} has {len(triples)} triples; give one for all or one for each of "
            f"{stages} stages"
        )
    triple = triples[stage if len(triples) > 1 else 0]
    try:
        forward, backward_input, backward_weight, *share = map(float, triple.split(","))
        (combined_share,) = share or [1.0]
    except ValueError:
        raise EmulationError(f"--emulate-compute-ms: {triple!r} is not F,B,W in milliseconds, as 20,20,10") from None
    return EmulatedCompute(
        forward_s=(forward / 1000,),
        backward_input_s=(backward_input / 1000,),
        backward_weight_s=(backward_weight / 1000,),
        combined_share=combined_share,
        slow_down=slow_down,
        full_length=full_length,
    )
