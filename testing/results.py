# SPDX-License-Identifier: Apache-2.0
"""Save the exact results of a training on one rank, and compare the results of two trainings."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


class ResultsDifferError(AssertionError):
    """Two results differ bitwise or cannot be compared; the message names the first difference."""


@dataclass
class TrainingResult:
    """Results of a training on one rank.

    Losses are exact: float32 sums in float64. Their lists are empty on ranks that do not compute losses (all but the
    last stage). Gradient norms and tensors are there on every rank.
    """

    micro_batch_losses: list[list[float]] = field(default_factory=list)
    """Per iteration and micro-batch of this data-parallel rank, in order: mean loss of its tokens."""
    losses: list[float] = field(default_factory=list)
    """Per iteration: mean loss over the global batch."""
    grad_norms: list[float] = field(default_factory=list)
    iteration_seconds: list[float] = field(default_factory=list)
    forward_backward_s: list[tuple[float, float]] = field(default_factory=list)
    """Per iteration: time.monotonic() at entry and exit of forward_backward."""
    evaluation_losses: list[float] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    """Final parameters by `<chunk>.<name>`."""
    optimizer_state: dict[str, torch.Tensor] = field(default_factory=dict)
    """Final main parameters and moments by `<optimizer>.<group>.<parameter>.<what>`, this rank's shard of them."""
    links_struck: dict[str, int] = field(default_factory=dict)
    """Messages that each emulated slow link delayed, by `<source stage>><target stage>`."""
    pauses: int = 0
    """Number of scripted pauses of this rank."""
    iterations_slowed: int = 0
    """Number of iterations with an emulated slowdown of this rank's cell."""
    plans: list[tuple[int, str]] = field(default_factory=list)
    """Per iteration: the number of the plan, and a fingerprint of its schedule; empty without adaptra."""
    path_flaps: int = 0
    """Number of forced changes of preferred path of this rank's links."""
    compute: dict[str, float] = field(default_factory=dict)
    """`ComputeCounts` of the emulated compute; empty without it."""
    lateness_s: list[float] = field(default_factory=list)
    """Per iteration: worst lateness of an emulated operation; empty without emulation."""

    adaptra: dict[str, Any] = field(default_factory=dict)
    """`AdaptraRuntime.summary()` of the run; empty without it."""

    def figures(self) -> dict[str, Any]:
        """Return everything but the tensors, for JSON."""
        tensors = ("parameters", "optimizer_state")
        return {name: value for name, value in vars(self).items() if name not in tensors}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors that must be equal between trainings with the same numbers."""
        micro_batches = [torch.tensor(losses, dtype=torch.float64) for losses in self.micro_batch_losses]
        return {
            **{f"micro-batch losses of iteration {number}": losses for number, losses in enumerate(micro_batches)},
            "losses": torch.tensor(self.losses, dtype=torch.float64),
            "grad norms": torch.tensor(self.grad_norms, dtype=torch.float64),
            "evaluation losses": torch.tensor(self.evaluation_losses, dtype=torch.float64),
            **{f"parameter {name}": tensor for name, tensor in self.parameters.items()},
            **{f"optimizer state {name}": tensor for name, tensor in self.optimizer_state.items()},
        }


def differences(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> list[str]:
    """Return one line per tensor that is not bitwise equal (equal NaNs are; 0.0 and -0.0 are not); empty if all are.

    Raises ResultsDifferError if there is nothing to compare: an empty result proves nothing.
    """
    if not any(tensor.numel() for tensor in expected.values()):
        raise ResultsDifferError("the expected result is empty: there is nothing to compare with")
    found = [f"{name} is missing" for name in expected if name not in actual]
    found += [f"{name} is not expected" for name in actual if name not in expected]
    for name, left in expected.items():
        right = actual.get(name)
        if right is None:
            continue
        if left.shape != right.shape or left.dtype != right.dtype:
            found.append(f"{name} is {right.dtype} {tuple(right.shape)}, expected {left.dtype} {tuple(left.shape)}")
            continue
        unequal = (_bytes(left) != _bytes(right)).any(dim=-1)
        if unequal.any():
            distance = (left.double() - right.double()).abs().max().item()
            found.append(f"{name}: {int(unequal.sum())} of {left.numel()} elements differ, by {distance:.3e} at most")
    return found


def relative_distances(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the norm of all differences relative to the norm of all values, by kind (losses, grad norms, parameters).

    The norm of parameters is taken over all of them together, not one by one. A parameter whose gradient is only
    rounding error (the bias of attention's keys) is moved by Adam as far as any other, in the direction of the error.
    Raises ResultsDifferError if a tensor is missing, or has another shape.
    """
    pairs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for name, left in expected.items():
        sort = next((each for each in ("losses", "grad norms") if each in name), None)
        if name.startswith("parameter "):
            sort = "parameters"
        if sort is None or not left.numel():
            continue
        right = actual.get(name)
        if right is None or right.shape != left.shape:
            raise ResultsDifferError(f"{name} is missing, or of another shape")
        pairs.setdefault(sort, []).append((left.double().flatten(), right.double().flatten()))
    found = {}
    for sort, each in pairs.items():
        left, right = (torch.cat(side) for side in zip(*each, strict=True))
        found[sort] = float((left - right).norm() / left.norm())
    return found


def fingerprint(tensors: dict[str, torch.Tensor]) -> str:
    """Return a digest of names and bits."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + _bytes(tensor).numpy().tobytes())
    return digest.hexdigest()[:16]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes, uint8 [elements, bytes per element]."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def model_tensors(model: list[Any]) -> dict[str, torch.Tensor]:
    """Return copies of all parameters and buffers (routers' biases) of model chunks wrapped by
    DistributedDataParallel."""
    return {
        f"{chunk_index}.{name}": tensor.detach().clone()
        for chunk_index, chunk in enumerate(model)
        for name, tensor in (*chunk.module.named_parameters(), *chunk.module.named_buffers())
    }


def optimizer_tensors(optimizer: Any) -> dict[str, torch.Tensor]:
    """Return copies of the main parameters and the per-parameter state of any Megatron optimizer."""
    found: dict[str, torch.Tensor] = {}
    for index, part in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        for group_index, group in enumerate(part.optimizer.param_groups):
            for parameter_index, parameter in enumerate(group["params"]):
                prefix = f"{index}.{group_index}.{parameter_index}"
                found[f"{prefix}.main"] = parameter.detach().clone()
                scales = getattr(part.optimizer, "_scales", {}).get(parameter, {})
                found |= {f"{prefix}.{name}_scale": scale.clone() for name, scale in scales.items()}
                for name, value in part.optimizer.state[parameter].items():
                    if hasattr(value, "_quantizer"):  # of Transformer Engine's FusedAdam, in 8 bits
                        found[f"{prefix}.{name}_factor"] = value._scale_inv.clone()
                        value = value._data
                    if isinstance(value, torch.Tensor):
                        found[f"{prefix}.{name}"] = value.detach().clone()
    return found


def save_result(result: TrainingResult, directory: str | Path, *, rank: int, world_size: int) -> Path:
    """Write `rank<N>.pt` into `directory`, for `compare_directories`."""
    path = Path(directory) / f"rank{rank}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    times = {"times": result.iteration_seconds, "spans": result.forward_backward_s}
    torch.save({"world_size": world_size, "tensors": result.tensors(), **times}, path)
    return path


def compare_directories(expected: str | Path, actual: str | Path) -> int:
    """Compare the dumps of two runs bitwise, rank by rank. Returns the number of elements that were compared.

    Raises ResultsDifferError if dumps are missing or empty, or naming the first difference.
    """
    left_dumps, right_dumps = _load_dumps(Path(expected)), _load_dumps(Path(actual))
    if len(left_dumps) != len(right_dumps):
        raise ResultsDifferError(f"{expected} holds {len(left_dumps)} ranks, {actual} holds {len(right_dumps)}")
    elements = 0
    for rank, (left, right) in enumerate(zip(left_dumps, right_dumps, strict=True)):
        found = differences(left, right)
        if found:
            raise ResultsDifferError(f"rank {rank}: {found[0]} ({len(found)} differences in all)")
        elements += sum(tensor.numel() for tensor in left.values())
    return elements


def _load_dumps(directory: Path) -> list[dict[str, torch.Tensor]]:
    paths = sorted(directory.glob("rank*.pt"))
    if not paths:
        raise ResultsDifferError(f"{directory} holds no dumps: the run that should have written them did not")
    dumps = {path.stem: torch.load(path, weights_only=True) for path in paths}
    world_size = next(iter(dumps.values()))["world_size"]
    missing = [f"rank{rank}.pt" for rank in range(world_size) if f"rank{rank}" not in dumps]
    if missing or len(dumps) != world_size:
        raise ResultsDifferError(f"{directory} holds {len(dumps)} dumps of {world_size} ranks; missing: {missing}")
    return [dumps[f"rank{rank}"]["tensors"] for rank in range(world_size)]
