# SPDX-License-Identifier: Apache-2.0
"""What ranks do in test_fault_pairs.py: `pair_ranks.py {shm,tcp} STOP_S FAULT@RANK+FAULT@RANK...`, two at a time.

Messages change their path with every exchange, so that each fault has something to strike, and must arrive once and
with their content. A rank raises when something is wrong, or when a fault had no effect.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from dual_ranks import Swallowed, faulty_sends, no_delegate, on, other_store, paths
from host_ranks import ANY, all_agree, exchange
from transport_checks import host_transport

from adaptra_megatron.transport.dual_path.host_transport import HostTransport
from adaptra_megatron.transport.host_settings import HostSettings
from adaptra_megatron.transport.link_paths import Path, PathSettings
from testing.faults.network.corrupted_rings import corrupt
from testing.waiting import stop, until

STRUCK_S = 1.5
"""How long the faults last that are not over at once: longer than either path may be silent before it is left."""
AT_A_TIME = 5
"""Exchanges between two agreements of the ranks to go on: what strikes a rank is to strike those, not these."""
WITHIN_S = 30.0
"""In which a message arrives, beyond the time for which a rank is stopped."""


@dataclass
class Scene:
    """What there is to strike, seen from one rank."""

    transport: HostTransport
    store: int
    """Process that serves the store."""
    stop_s: float

    @property
    def most_s(self) -> float:
        """What anything may take, as the peer may be stopped."""
        return self.stop_s + WITHIN_S

    @property
    def delegate(self) -> int:
        until(lambda: self.transport.delegate_process_id, "there is no delegate")
        process = self.transport.delegate_process_id
        assert process is not None
        return process


@contextmanager
def ring_corrupted(scene: Scene) -> Iterator[None]:
    """A word of the ring to the peer changes: there must be another session."""
    link = scene.transport._links[1 - dist.get_rank()]
    session, sessions = link._state.session, link.sessions
    assert session is not None
    corrupt(session.outbound.fd, "released", 3)
    yield
    until(lambda: link.sessions > sessions, "the corrupted ring is still in use", scene.most_s)


@contextmanager
def delegate_killed(scene: Scene) -> Iterator[None]:
    victim = scene.delegate
    os.kill(victim, signal.SIGKILL)
    yield
    assert scene.delegate != victim, "nothing was killed"


@contextmanager
def host_dead(scene: Scene) -> Iterator[None]:
    assert scene.delegate
    with no_delegate(scene.transport):
        yield


@contextmanager
def device_dead(scene: Scene) -> Iterator[None]:
    with faulty_sends(Swallowed) as struck:
        yield
        until(lambda: struck, "nothing was sent on the device path", scene.most_s)


@contextmanager
def store_hung(scene: Scene) -> Iterator[None]:
    stop(scene.store)
    yield
    os.kill(scene.store, signal.SIGCONT)


@contextmanager
def store_dead(scene: Scene) -> Iterator[None]:
    stop(scene.store, signal.SIGKILL)
    yield


@contextmanager
def rank_stopped(scene: Scene) -> Iterator[None]:
    """This process, by another one, which sees that it is."""
    script = "sleep 0.1; kill -STOP $0; sleep $1; grep ^State: /proc/$0/status; kill -CONT $0"
    stopper = subprocess.Popen(["sh", "-c", script, str(os.getpid()), str(scene.stop_s)], stdout=subprocess.PIPE)
    yield
    said, _ = stopper.communicate()
    assert b"stopped" in said, f"this rank was not stopped: {said!r}"


FAULTS: dict[str, Callable[[Scene], AbstractContextManager[None]]] = {
    "ring-spoilt": ring_corrupted,
    "delegate-killed": delegate_killed,
    "host-dead": host_dead,
    "device-dead": device_dead,
    "store-hung": store_hung,
    "store-dead": store_dead,
    "rank-stopped": rank_stopped,
}
"""In the order in which a rank begins with those that strike it: each leaves the later ones something to strike."""


def play(faults: dict[str, set[int]], transport_name: str, stop_s: float) -> None:
    """`faults`: the ranks that each of them strikes."""
    settings = HostSettings(transport=transport_name, timeout_s=stop_s + WITHIN_S)
    hasty = PathSettings(first_rest_s=0.1, longest_rest_s=0.5, probe_pause_s=0.005)
    mine = {fault for fault, ranks in faults.items() if dist.get_rank() in ranks}
    with other_store() as (store, server):
        transport = host_transport(settings, hasty, store=store)
        transport.describe(ANY)
        on(transport, Path.DEVICE)
        scene = Scene(transport, server, stop_s)
        exchange(transport, 0)
        iteration = 1
        struck = ExitStack()
        for fault, strike in FAULTS.items():
            if fault in faults:
                dist.barrier()
            if fault in mine:
                struck.enter_context(strike(scene))
        with ThreadPoolExecutor() as aside:  # they end whatever becomes of the messages
            ended = aside.submit(_end, struck)
            iteration = _exchange_until(ended.done, scene, iteration)
            ended.result()
        for path in (Path.HOST,) if "store-dead" in faults else (Path.HOST, Path.DEVICE):
            iteration = _exchange_on(path, scene, iteration)
        dist.barrier()
        transport.close()


def _end(struck: ExitStack) -> None:
    with struck:
        time.sleep(STRUCK_S)


def _exchange_until(over: Callable[[], bool], scene: Scene, iteration: int, path: Path | None = None) -> int:
    """Until it is over at both ends, from the number `iteration` on. Returns the next one. `path`: None for both in
    turn."""
    transport, longest_s = scene.transport, 0.0
    while not all_agree(over()):
        for _ in range(AT_A_TIME):
            transport.prefer(1 - dist.get_rank(), path or list(Path)[iteration % 2])
            begun_s = time.monotonic()
            exchange(transport, iteration, within_s=scene.most_s)
            longest_s = max(longest_s, time.monotonic() - begun_s)
            iteration += 1
    sys.stdout.write(f"{iteration} exchanges, the longest of the latest took {longest_s:.2f} s\n")
    return iteration


def _exchange_on(path: Path, scene: Scene, iteration: int) -> int:
    """As above, until messages take this path."""
    deadline_s = time.monotonic() + WITHIN_S

    def there() -> bool:
        assert time.monotonic() < deadline_s, f"messages do not take the {path.value} path"
        return paths(scene.transport).path is path

    return _exchange_until(there, scene, iteration, path)


def main(transport_name: str, stop_s: float, names: list[str]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=stop_s + WITHIN_S))
    for name in names:
        sys.stdout.write(f"{name}\n")
        faults: dict[str, set[int]] = {}
        for part in name.split("+"):
            fault, _, rank = part.partition("@")
            faults.setdefault(fault, set()).add(int(rank))
        play(faults, transport_name, stop_s)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3:])
