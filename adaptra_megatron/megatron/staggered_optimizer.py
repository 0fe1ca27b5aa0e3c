# SPDX-License-Identifier: Apache-2.0
"""Take optimizer steps without waiting for the slowest stage (ReCycle, section on the staggered optimizer).

Stock's step begins with the norm of all gradients, a barrier over the job: a stage with ready gradients waits for the
last stage's gradients. Here each stage but the last takes its step at once, as if no gradient had to be clipped, and
continues with the next iteration's forwards while the norm is summed. Below --clip-grad stock does not scale gradients,
so such a step equals stock's bit for bit. If the norm turns out to be above --clip-grad, the iteration in progress runs
to its end, since its messages are in flight, and is discarded. Each stage undoes its step and repeats it with clipped
gradients. Then the iteration runs again with the same data and random numbers.

All ranks make the same decision, from the norms of all earlier iterations, which are equal everywhere.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import clip_grads
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from adaptra_megatron.common.log import logger_of
from adaptra_megatron.megatron.computation import StageComputation
from adaptra_megatron.megatron.feature_refusals import refuse_for_staggering
from adaptra_megatron.megatron.megatron_call import PipelineCall
from adaptra_megatron.megatron.refusals import UnsupportedFeatureError
from adaptra_megatron.megatron.state.attempt_state import forget_attempt
from adaptra_megatron.transport.gpu.training_device import current_stream

logger = logger_of(__name__)


class KnownNorm(float):
    """A norm that is equal on all ranks of the model."""


class PendingNorm:
    """A norm whose sum over the job is in progress. float(), comparisons and formatting wait for it.

    The wait ends once the other stages' gradients are ready. It is not collective: any rank may wait at any time.
    """

    def __init__(self, optimizer: Any) -> None:
        """Begin the sum. `optimizer`: Megatron's ChainedOptimizer, with gradients ready.

        Collective over the optimizer's group of gradient statistics. The other members take part by this or by stock's
        get_grad_norm_fp32, which has the same steps.
        """
        grads: list[torch.Tensor] = []
        for each in optimizer.chained_optimizers:
            grads += each.get_main_grads_for_grad_norm()
        if grads:
            overflow = torch.zeros(1, dtype=torch.int, device="cuda")
            norm, _ = clip_grads.multi_tensor_applier(clip_grads.l2_norm_impl, overflow, [grads], False)
        else:
            norm = torch.zeros(1, dtype=torch.float, device="cuda")
        self._total: torch.Tensor = norm**2.0
        group = optimizer.get_grad_stats_parallel_group()
        self._work: Any = dist.all_reduce(self._total, op=dist.ReduceOp.SUM, group=group, async_op=True)
        self._value: float | None = None

    @property
    def value(self) -> float:
        """Wait for the norm and return it. Raises torch.distributed's error if a rank of the group fails or is late."""
        if self._value is None:
            # On a stream of its own: what computes on the present one need not be over.
            stream = None if current_stream() is None else torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                self._work.wait()
                self._value = float(self._total.item() ** 0.5)
        return self._value

    def __float__(self) -> float:
        return self.value

    def __format__(self, how: str) -> str:
        return format(self.value, how)

    def __str__(self) -> str:
        return str(self.value)

    def __lt__(self, other: float) -> bool:
        return self.value < other

    def __le__(self, other: float) -> bool:
        return self.value <= other

    def __gt__(self, other: float) -> bool:
        return self.value > other

    def __ge__(self, other: float) -> bool:
        return self.value >= other


# Exact copies of what an optimizer step changes and of the gradients it takes, to go back by.


class StepUndo:
    """State of Megatron's optimizers before a step, for undoing it.

    The state is copied, as inverting the arithmetic would give other bits. With Adam and main parameters in single
    precision the copy takes 16 bytes for each parameter that is stepped here (all parameters of the stage, or of this
    rank's shard): main parameter, two moments, gradient.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        """Copy the state. `optimizers`: Megatron's, with gradients ready (MegatronOptimizer.prepare_grads)."""
        self._inner = [each.optimizer for each in optimizers]
        self._kept = [(tensor, tensor.detach().clone()) for tensor in self._tensors()]
        self._gradients = [
            (parameter, None if parameter.grad is None else parameter.grad.clone()) for parameter in self._parameters()
        ]
        self._settings = [_settings(group) for group in self._groups()]

    @torch.no_grad()
    def go_back(self) -> list[dict[str, Any]]:
        """Restore the state; return the parameter groups' present settings (learning rate and so on), for `go_on`.

        These settings belong to the next step.
        """
        for tensor, kept in self._kept:
            tensor.copy_(kept)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        later = [_settings(group) for group in self._groups()]
        self._set(self._settings)
        return later

    def go_on(self, settings: list[dict[str, Any]]) -> None:
        """Apply `settings` and drop the gradients of the repeated step: the next step has its own."""
        for parameter in self._parameters():
            parameter.grad = None
        self._set(settings)

    def _groups(self) -> Iterator[dict[str, Any]]:
        for inner in self._inner:
            yield from inner.param_groups

    def _parameters(self) -> Iterator[torch.Tensor]:
        for group in self._groups():
            yield from group["params"]

    def _tensors(self) -> Iterator[torch.Tensor]:
        for inner in self._inner:
            for group in inner.param_groups:
                for parameter in group["params"]:
                    yield parameter
                    yield from (each for each in inner.state[parameter].values() if isinstance(each, torch.Tensor))

    def _set(self, settings: list[dict[str, Any]]) -> None:
        for group, kept in zip(self._groups(), settings, strict=True):
            group.update(kept)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in group.items()
        if name != "params"
    }


CALM_ITERATIONS = 10
"""Number of successive iterations without clipping that are required first: an iteration that runs twice costs more
than a barrier.
"""

Stepped = tuple[bool, Any, Any]
"""Result of MegatronOptimizer.step: success, norm of the gradients, number of zeros in them."""


class _Taken(NamedTuple):
    """A step that was taken before its norm was known."""

    optimizer: Any
    norm: PendingNorm
    undo: StepUndo | None
    """None if gradients are never clipped."""


class StaggeredOptimizer:
    """Staggered steps of one process."""

    def __init__(self) -> None:
        self.early_steps = 0
        """Number of iterations in which some stage took its step before the norm was known."""
        self.steps_taken_back = 0
        """Number of those whose gradients had to be clipped, so that their steps were undone."""
        self.unvalidated = False
        """True if stages may have continued from a step that must be undone. The same on all ranks between steps."""
        self._taken: _Taken | None = None
        self._mistaken = False
        self._calm: deque[bool] = deque(maxlen=CALM_ITERATIONS)
        self._looked_at = False

    def step(self, optimizer: Any, stock: Callable[[], Stepped]) -> Stepped:
        """Take one step of `optimizer` (a ChainedOptimizer), by `stock` or before the norm is known.

        Collective over the model, like stock's step. Raises UnsupportedFeatureError for optimizers whose steps cannot
        be undone.
        """
        if not self._looked_at:
            _refuse(optimizer)
            self._looked_at = True
        assert not self.unvalidated, "the forward_backward function settles the step before"
        self.unvalidated = len(self._calm) == CALM_ITERATIONS and all(self._calm) and _has_stages()
        self.early_steps += self.unvalidated
        if self.unvalidated and not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return self._step_early(optimizer)
        # The last stage's next forward comes after all others', so it may as well wait.
        successful, norm, zeros = stock()
        self._learn(optimizer, norm)
        return successful, KnownNorm(norm), zeros

    def validate(self) -> None:
        """Wait for the norm of the last step, if it is pending. Call it before the iteration's first backward.

        That backward needs the last stage's, so this delays nothing.
        """
        if self._taken is None or self._mistaken:
            return
        self._learn(self._taken.optimizer, self._taken.norm.value)
        if not self._mistaken:
            self._taken = None  # and the memory of its copies

    def settle(self) -> bool:
        """Make the last step equal stock's. Collective over the model.

        Returns True, on all ranks, if stages have repeated their steps: everything computed since must be computed
        again.
        """
        self.validate()
        mistaken = self.unvalidated and self._mistaken
        self.unvalidated = self._mistaken = False
        if mistaken:
            self.steps_taken_back += 1
            if self._taken is not None:
                _step_again(self._taken)
                self._taken = None
            # The last stage takes no step early. One of its ranks speaks for the job.
            elif torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
                logger.info(
                    "--adaptra-staggered-optimizer: gradients had to be clipped (norm above --clip-grad) after stages "
                    "had taken their steps, which they take again; what was computed since is computed again"
                )
        return mistaken

    def _step_early(self, optimizer: Any) -> Stepped:
        optimizer.prepare_grads()
        # The norm first: it is summed over the job while the state is copied and the step taken.
        norm = PendingNorm(optimizer)
        undo = StepUndo(optimizer.chained_optimizers) if optimizer.config.clip_grad > 0.0 else None
        self._taken = _Taken(optimizer, norm, undo)
        return optimizer.step_with_ready_grads(), norm, None

    def _learn(self, optimizer: Any, norm: float) -> None:
        clipped = _is_clipped(optimizer, norm)
        self._calm.append(not clipped)
        self._mistaken = self.unvalidated and clipped


class ValidatedComputation:
    """StageComputation whose first backward waits for the norm of the previous step."""

    def __init__(self, inner: StageComputation, staggered: StaggeredOptimizer) -> None:
        self._inner, self._staggered = inner, staggered
        self.forward, self.weight_gradient = inner.forward, inner.weight_gradient

    def backward(self, *given: Any, **keywords: Any) -> torch.Tensor | None:
        self._staggered.validate()
        return self._inner.backward(*given, **keywords)

    def forward_backward(self, *given: Any) -> torch.Tensor:
        self._staggered.validate()
        return self._inner.forward_backward(*given)


def _refuse(optimizer: Any) -> None:
    for each in optimizer.chained_optimizers:
        refuse_for_staggering(each.config)
        if each.is_stub_optimizer:
            raise UnsupportedFeatureError(
                f"--adaptra-staggered-optimizer: rank {torch.distributed.get_rank()} has no parameters that train, and "
                "Megatron then asks all stages how their steps went. Drop the flag"
            )
    if not optimizer.grads_states_parallel_group_is_shared():
        raise UnsupportedFeatureError(
            "--adaptra-staggered-optimizer: parts of the model sum up their norms in different groups, which is a "
            "barrier for each. Drop the flag"
        )


def _has_stages() -> bool:
    return bool(parallel_state.get_pipeline_model_parallel_world_size() > 1)


def _is_clipped(optimizer: Any, norm: float) -> bool:
    """Return whether stock scales gradients of this norm (clip_grads.py: clip_grad_by_total_norm_fp32)."""
    most = optimizer.config.clip_grad
    return bool(most > 0.0 and most / (norm + 1.0e-6) < 1.0)


@torch.no_grad()
def _step_again(taken: _Taken) -> None:
    """Do what stock's ChainedOptimizer.step does once the norm is known. Gathers parameters if they are sharded."""
    optimizer, norm, undo = taken
    assert undo is not None, "what is never clipped is never mistaken"
    later = undo.go_back()
    for each in optimizer.chained_optimizers:
        if parameters := each.get_parameters():
            clip_grads.clip_grad_by_total_norm_fp32(parameters, max_norm=each.config.clip_grad, total_norm=norm.value)
    optimizer.step_with_ready_grads()
    undo.go_on(later)
    for each in optimizer.chained_optimizers:
        # Otherwise the forwards would have gathered them as they came to them, and those are over.
        if getattr(each, "ddp_config", None) is not None and each.ddp_config.overlap_param_gather:
            for chunk in each.model_chunks:
                chunk.start_param_sync(force_sync=True)


class RepeatableIteration:
    """One call of Megatron's forward_backward function that can be repeated, with its data and its random numbers,
    because a step was taken back. Create it before anything is computed.

    Iterations are redone after a failure by `fault_tolerance.Recovery`.
    """

    def __init__(self, call: PipelineCall) -> None:
        self._given = call
        self._data = [None if each is None else _KeptData(each) for each in call.data_iterators]
        self._states = torch.get_rng_state(), torch.cuda.get_rng_state(), _tracked()
        self.call = replace(call, data_iterators=list[Iterator[Any] | None](self._data))
        """The call, with iterators that keep their data."""

    def rewind(self) -> None:
        """Prepare `call` to run again: zero gradients, and the same data and random numbers."""
        forget_attempt(self._given)
        for each in self._data:
            if each is not None:
                each.rewind()
        default, device, tracked = self._states
        torch.set_rng_state(default)
        torch.cuda.set_rng_state(device)
        get_cuda_rng_tracker().set_states(tracked)


def _tracked() -> dict[str, Any]:
    return {
        name: state.clone() if isinstance(state, torch.Tensor) else state.clone_state()
        for name, state in get_cuda_rng_tracker().get_states().items()
    }


class _KeptData(Iterator[Any]):
    """Iterator that keeps the data it yields, for a second pass."""

    def __init__(self, own: Iterator[Any]) -> None:
        self._own = own
        self._read: list[Any] = []
        self._again: Iterator[Any] = iter(())

    def __next__(self) -> Any:
        for item in self._again:
            return item
        self._read.append(next(self._own))
        return self._read[-1]

    def rewind(self) -> None:
        self._again = iter(self._read[:])
