# SPDX-License-Identifier: Apache-2.0
"""Send a rank's training state to another rank: parameters, optimizer state, learning-rate schedule.

Tensors are sent one by one and received in place. Other state is sent before them, as plain values. The format is
unsuitable for checkpoints: the receiver must be a process of the same release with the same arguments, and have the
same tensors in the same order.

One digest covers everything (blake2b). The receiver computes it over its tensors once they are in place, rather than
over the messages. With a key, the two ends also prove to each other that they have it. Plain values are parsed only
after the digest so far was found equal, and tensors are used only after the final digest was.
"""

from __future__ import annotations

import hashlib
import hmac
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from adaptra_megatron.megatron.state.stored_state import allocate, allocates, flat_bytes, stored_state

Send = Callable[[torch.Tensor], None]
"""Sends a tensor on the CPU, which may be changed afterwards."""
Receive = Callable[[torch.Tensor], None]
"""Fills a tensor on the CPU."""

CHUNK_NBYTES = 4 << 20
"""Largest message. Small tensors share one."""
MOST_VALUES_NBYTES = 64 << 20
"""Largest packet of plain values."""
_DIGEST_NBYTES = 32


class StateError(RuntimeError):
    """A received state differs from the one that was sent, or does not fit this process; names the difference."""


class _Digest:
    """Digest of everything that one end has sent, or has in place, so far."""

    def __init__(self, key: bytes, identity: str) -> None:
        self._hash = hashlib.blake2b(identity.encode(), digest_size=_DIGEST_NBYTES, key=key)

    def add(self, tensor: torch.Tensor) -> None:
        """Add the next tensor, with its size."""
        self._hash.update(f"|{tensor.nbytes}|".encode())
        for piece in _pieces(flat_bytes(tensor)):
            self._hash.update(piece.cpu().numpy().data)

    @property
    def value(self) -> torch.Tensor:
        """Return the present digest."""
        return torch.frombuffer(bytearray(self._hash.digest()), dtype=torch.uint8)


class StateSender:
    """Sends tensors and values, in messages of CHUNK_NBYTES at most, each preceded by its size."""

    def __init__(self, send: Send, key: bytes = b"", identity: str = "") -> None:
        """`key`: secret of both ends, 64 bytes at most; empty: errors are detected, but peers are not authenticated.
        `identity`: unique to this transfer.
        """
        self._send, self._digest = send, _Digest(key, identity)
        self._chunk, self._filled = torch.empty(CHUNK_NBYTES, dtype=torch.uint8), 0

    def values(self, values: Any) -> None:
        """Send nested lists, tuples and dictionaries of numbers, texts and bytes. Raises StateError if they are too
        large.
        """
        buffer = io.BytesIO()
        torch.save(values, buffer)
        packet = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
        if packet.numel() > MOST_VALUES_NBYTES:
            raise StateError(f"{packet.numel() >> 20} MiB of plain values, more than {MOST_VALUES_NBYTES >> 20}")
        self._write(torch.tensor([packet.numel()]).view(torch.uint8))
        self.tensor(packet)
        self._write(self._digest.value)

    def tensor(self, tensor: torch.Tensor) -> None:
        """Send a tensor whose shape and type the receiver knows."""
        self._digest.add(tensor)
        self._write(flat_bytes(tensor))

    def finish(self) -> None:
        """End the transfer, and send its digest."""
        self._write(self._digest.value)
        if self._filled:
            self._flush()

    def _write(self, flat: torch.Tensor) -> None:
        while flat.numel():
            room = CHUNK_NBYTES - self._filled
            piece, flat = flat[:room], flat[room:]
            self._chunk[self._filled : self._filled + piece.numel()].copy_(piece)
            self._filled += piece.numel()
            if self._filled == CHUNK_NBYTES:
                self._flush()

    def _flush(self) -> None:
        filled, self._filled = self._filled, 0
        self._send(torch.tensor([filled]))
        self._send(self._chunk[:filled])


class StateReceiver:
    """Receives a state. Methods raise StateError if it was corrupted or cannot be read."""

    def __init__(self, receive: Receive, key: bytes = b"", identity: str = "") -> None:
        """`key`, `identity`: as at the sender."""
        self._receive, self._digest = receive, _Digest(key, identity)
        self._left = torch.empty(0, dtype=torch.uint8)
        """Unread rest of the latest message."""

    def values(self) -> Any:
        """Return the values that the sender's `values` was called with."""
        size = torch.zeros(1, dtype=torch.int64)
        self._read(size.view(torch.uint8))
        if not 0 < int(size) <= MOST_VALUES_NBYTES:
            raise StateError(f"a packet of plain values cannot have {int(size)} bytes: {_NOT_AS_SENT}")
        packet = torch.empty(int(size), dtype=torch.uint8)
        self.tensor(packet)
        self._compare()
        # After the comparison: before it, the bytes may come from anywhere.
        return torch.load(io.BytesIO(packet.numpy().tobytes()), weights_only=True)

    def tensor(self, tensor: torch.Tensor) -> None:
        """Receive into `tensor`."""
        flat = flat_bytes(tensor)
        self._read(flat)
        if not tensor.is_contiguous():  # then `flat` is a copy
            with torch.no_grad():
                tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
        self._digest.add(tensor)

    def finish(self) -> None:
        """End the transfer, and check its digest."""
        self._compare()

    def _compare(self) -> None:
        expected = torch.empty(_DIGEST_NBYTES, dtype=torch.uint8)
        self._read(expected)
        if not hmac.compare_digest(expected.numpy().tobytes(), self._digest.value.numpy().tobytes()):
            raise StateError(_NOT_AS_SENT)

    def _read(self, flat: torch.Tensor) -> None:
        while flat.numel():
            if not self._left.numel():
                size = torch.zeros(1, dtype=torch.int64)
                self._receive(size)
                if not 0 < int(size) <= CHUNK_NBYTES:
                    raise StateError(f"a message cannot have {int(size)} bytes: {_NOT_AS_SENT}")
                self._left = torch.empty(int(size), dtype=torch.uint8)
                self._receive(self._left)
            count = min(flat.numel(), self._left.numel())
            flat[:count].copy_(self._left[:count])
            flat, self._left = flat[count:], self._left[count:]


_NOT_AS_SENT = (
    "parameters and optimizer state are not in place as they were sent, or come from no rank of this job: their "
    "digests differ"
)


def _pieces(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    return (flat[first : first + CHUNK_NBYTES] for first in range(0, flat.numel(), CHUNK_NBYTES))


def model_tensors(model: Sequence[Any]) -> list[torch.Tensor]:
    """Return parameters and buffers of all chunks, in order."""
    found: list[torch.Tensor] = []
    for chunk in model:
        # Megatron's DistributedDataParallel has a list of its own in the place of torch's method.
        found += [*chunk.parameters(), *torch.nn.Module.buffers(chunk)]
    return found


def send_tensors(sender: StateSender, tensors: Sequence[torch.Tensor]) -> None:
    """Send tensors, preceded by their shapes and types."""
    sender.values([_described(each) for each in tensors])
    for each in tensors:
        sender.tensor(each)


def receive_tensors(receiver: StateReceiver, tensors: Sequence[torch.Tensor], what: str) -> None:
    """Receive into `tensors`; buffers take on the sender's types.

    Raises StateError if the sender's tensors have other shapes, or its parameters other types.
    """
    described = receiver.values()
    if len(described) != len(tensors) or not all(map(_fits, tensors, described)):
        raise StateError(
            f"{what} of this process have other shapes or types than those of the job: start it with the same flags"
        )
    for each, there in zip(tensors, described, strict=True):
        dtype = getattr(torch, there["dtype"])
        if each.dtype != dtype:
            # A router makes its bias float32 in its first forward, which this process has yet to run.
            each.data = torch.empty_like(each, dtype=dtype)
        receiver.tensor(each)


def _fits(tensor: torch.Tensor, described: dict[str, Any]) -> bool:
    same_type = _described(tensor)["dtype"] == described["dtype"]
    return list(tensor.shape) == described["shape"] and (same_type or not isinstance(tensor, torch.nn.Parameter))


def send_optimizer(sender: StateSender, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
    """Send the settings and the state of torch's optimizer for some of its parameters."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    states = [stored_state(optimizer, each) for each in parameters]
    sender.values(
        {
            "groups": [{name: value for name, value in group.items() if _is_plain(value)} for group in groups],
            "states": [{name: _described(value) for name, value in state.items()} for state in states],
        }
    )
    for parameter, state in zip(parameters, states, strict=True):
        sender.tensor(parameter)
        for tensor in filter(torch.is_tensor, state.values()):
            sender.tensor(tensor)


def receive_optimizer(
    receiver: StateReceiver, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]
) -> None:
    """Receive the state from `send_optimizer`. Raises StateError if this process has other parameters."""
    said = receiver.values()
    if len(said["states"]) != len(parameters) or len(said["groups"]) != len(optimizer.param_groups):
        raise StateError(
            "the optimizer of this process has other parameters than the job's: start it with the same flags"
        )
    for group, values in zip(optimizer.param_groups, said["groups"], strict=True):
        # Of a sender that has no parameter of a group in its shard, FusedAdam leaves the group's step behind.
        steps = {"step": max(group["step"], values["step"])} if "step" in group and "step" in values else {}
        group.update(values | steps)
    for parameter, described in zip(parameters, said["states"], strict=True):
        receiver.tensor(parameter)
        if allocates(optimizer):
            allocate(optimizer, parameter, described)
        else:
            optimizer.state[parameter] = {name: _made(value, parameter) for name, value in described.items()}
        state = stored_state(optimizer, parameter)
        if (own := {name: _described(value) for name, value in state.items()}) != described:
            raise StateError(
                f"of a parameter this process stores {own}, and the job {described}: start it with the same flags"
            )
        for tensor in filter(torch.is_tensor, map(state.get, described)):
            receiver.tensor(tensor)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


def _described(value: Any) -> Any:
    """Return a value of an optimizer's state; for a tensor, its shape and type."""
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
