# SPDX-License-Identifier: Apache-2.0
"""What a worker has that trains: parameters, optimizer state, learning-rate schedule; read from one, put into another.

Tensors go one by one and in place; what else there is goes before them, as plain values. No format of checkpoints: the
other end is a process of the same release with the same arguments, and has the same tensors in the same order.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

Send = Callable[[torch.Tensor], None]
"""Sends a tensor on the CPU."""
Receive = Callable[[torch.Tensor], None]
"""Fills a tensor on the CPU."""


class StateError(RuntimeError):
    """What came is not what was sent, or does not fit this process; says which."""


class StateSender:
    """Hands tensors and values over, and their checksum at the end."""

    def __init__(self, send: Send) -> None:
        self._send, self._digest = send, hashlib.blake2b(digest_size=32)

    def values(self, values: Any) -> None:
        """Anything of lists, tuples, dictionaries, numbers, texts and bytes."""
        buffer = io.BytesIO()
        torch.save(values, buffer)
        packet = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        self._send(torch.tensor([packet.numel()]))
        self.tensor(packet)

    def tensor(self, tensor: torch.Tensor) -> None:
        """One whose shape and type the other end knows."""
        flat = _bytes(tensor)
        self._digest.update(flat.numpy().data)
        self._send(flat)

    def finish(self) -> None:
        """All has been handed over."""
        self._send(torch.frombuffer(bytearray(self._digest.digest()), dtype=torch.uint8))


class StateReceiver:
    """The other end. Methods raise StateError for what is not as it was sent, or cannot be read."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._digest = receive, hashlib.blake2b(digest_size=32)

    def values(self) -> Any:
        """What the sender's `values` was given."""
        size = torch.zeros(1, dtype=torch.int64)
        self._receive(size)
        packet = torch.empty(int(size), dtype=torch.uint8)
        self.tensor(packet)
        return torch.load(io.BytesIO(packet.numpy().tobytes()), weights_only=True)

    def tensor(self, tensor: torch.Tensor) -> None:
        """Fill one."""
        flat = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8)
        if flat.numel():
            self._receive(flat)
            self._digest.update(flat.numpy().data)
            with torch.no_grad():
                tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))

    def finish(self) -> None:
        """All has come."""
        expected = torch.empty(32, dtype=torch.uint8)
        self._receive(expected)
        if expected.numpy().tobytes() != self._digest.digest():
            raise StateError("parameters and optimizer state do not come as they were sent: their checksums differ")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def model_tensors(model: Sequence[Any]) -> list[torch.Tensor]:
    """Parameters and buffers of all chunks, in their order."""
    found: list[torch.Tensor] = []
    for chunk in model:
        # Megatron's DistributedDataParallel has a list of its own in the place of torch's method.
        found += [*chunk.parameters(), *torch.nn.Module.buffers(chunk)]
    return found


def send_tensors(sender: StateSender, tensors: Sequence[torch.Tensor]) -> None:
    """Hand tensors over, their shapes first."""
    sender.values([list(each.shape) for each in tensors])
    for each in tensors:
        sender.tensor(each)


def receive_tensors(receiver: StateReceiver, tensors: Sequence[torch.Tensor], what: str) -> None:
    """Fill them. Raises StateError where the other end has others."""
    shapes = receiver.values()
    if shapes != [list(each.shape) for each in tensors]:
        raise StateError(
            f"{what} of this process have other shapes than those of the job: start it with the same flags"
        )
    for each in tensors:
        receiver.tensor(each)


def send_optimizer(sender: StateSender, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """Hand over what torch's optimizer has for some of its parameters, and its settings."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    states = [optimizer.state.get(each, {}) for each in parameters]
    sender.values(
        {
            "groups": [{name: value for name, value in group.items() if _is_plain(value)} for group in groups],
            "states": [{name: _described(value) for name, value in state.items()} for state in states],
        }
    )
    for parameter, state in zip(parameters, states, strict=True):
        sender.tensor(parameter)
        for tensor in _tensors(state):
            sender.tensor(tensor)


def receive_optimizer(
    receiver: StateReceiver, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
) -> None:
    """The other end of `send_optimizer`. Raises StateError where this process has other parameters."""
    said = receiver.values()
    if len(said["states"]) != len(parameters) or len(said["groups"]) != len(optimizer.param_groups):
        raise StateError(
            "the optimizer of this process has other parameters than the job's: start it with the same flags"
        )
    for group, values in zip(optimizer.param_groups, said["groups"], strict=True):
        group.update(values)
    for parameter, described in zip(parameters, said["states"], strict=True):
        receiver.tensor(parameter)
        state = optimizer.state[parameter] = {name: _made(value, parameter) for name, value in described.items()}
        for tensor in _tensors(state):
            receiver.tensor(tensor)


def _tensors(state: dict[str, Any]) -> Iterator[torch.Tensor]:
    return (value for value in state.values() if isinstance(value, torch.Tensor))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _described(value: Any) -> Any:
    """A value of an optimizer's state; of a tensor what it takes to make one."""
    if not isinstance(value, torch.Tensor):
        return {"value": value}
    return {
        "shape": list(value.shape),
        "dtype": str(value.dtype).removeprefix("torch."),
        "cpu": value.device.type == "cpu",
    }


def _made(described: dict[str, Any], parameter: torch.Tensor) -> Any:
    if "value" in described:
        return described["value"]
    device = "cpu" if described["cpu"] else parameter.device
    return torch.empty(described["shape"], dtype=getattr(torch, described["dtype"]), device=device)
