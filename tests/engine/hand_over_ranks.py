# SPDX-License-Identifier: Apache-2.0
"""Rank 0 hands over to rank 1, which takes it, is slow, or does not come: `hand_over_ranks.py`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from adaptra_megatron.common.control_store import ControlStore
from adaptra_megatron.engine.rejoining import Handing, HandOverLateError, _Channel, _Lateness
from adaptra_megatron.megatron.state.training_state import StateError, StateReceiver, StateSender

PATIENCE_S, TIMEOUT_S, MIB = 1.0, 30.0, 24
SLOW_S = 0.5
"""Ten times as long as a message may take."""


def state() -> torch.Tensor:
    return torch.arange(MIB << 18, dtype=torch.int32)


def channel(generation: int, lateness: _Lateness | None = None, key: bytes | None = None) -> _Channel:
    control = ControlStore.of_job("job").in_generation(generation)
    if key is not None:
        control.secret = key
    return _Channel(Handing(0, 1, True, (), 0), dist.get_rank(), control, TIMEOUT_S, lateness=lateness)


def send(generation: int, patience_s: float = PATIENCE_S) -> _Channel:
    end = channel(generation, _Lateness(patience_s))
    end.await_target()
    sender = StateSender(end.carry, *end.proof)
    sender.values("all")
    sender.tensor(state())
    sender.finish()
    return end


def given_up(act: Callable[[], object]) -> None:
    """What is given up is given up in time, and says whom."""
    begun_s = time.monotonic()
    with pytest.raises(HandOverLateError) as raised:
        act()
    assert raised.value.ranks == (1,)
    assert PATIENCE_S <= raised.value.waited_s < 3 * PATIENCE_S
    assert time.monotonic() - begun_s < 5 * PATIENCE_S


def receive(end: _Channel, before: Callable[[torch.Tensor], None] = lambda tensor: None) -> None:
    def carry(tensor: torch.Tensor) -> None:
        before(tensor)
        end.carry(tensor)

    end.signal()
    receiver, found = StateReceiver(carry, *end.proof), torch.empty_like(state())
    assert receiver.values() == "all"
    receiver.tensor(found)
    receiver.finish()
    assert torch.equal(found, state())


def source() -> None:
    end = send(1, TIMEOUT_S)  # however slow this machine is
    end.await_target()
    end.leave()
    given_up(lambda: send(2))
    given_up(lambda: send(3))
    dist.barrier()
    with pytest.raises(RuntimeError):  # the other has gone
        send(4, TIMEOUT_S).await_target()


def target() -> None:
    end = channel(1)
    receive(end)
    end.signal()
    end.leave()
    with pytest.raises(RuntimeError):
        receive(channel(2), lambda tensor: time.sleep(SLOW_S))
    dist.barrier()  # it has not come to generation 3
    end = channel(4, key=b"of another job".ljust(32))
    with pytest.raises(StateError):
        receive(end)


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    (source if dist.get_rank() == 0 else target)()
    sys.stdout.write("DONE\n")


if __name__ == "__main__":
    main()
