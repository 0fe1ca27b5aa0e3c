# SPDX-License-Identifier: Apache-2.0
"""What connections cost a planner process that many ranks report to, without joining and planning.

    python benchmarks/planner_connections.py [--ranks 128,2048]

The process takes reports in as a planner process does. All ranks that follow are sockets of this process, which connect
at once.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection

from control_plane import drain, resident_mb
from control_plane_rank import say

from adaptra_megatron.common.handshake import connect
from adaptra_megatron.control.sidecar.planner_connections import (
    CONNECT_S,
    HANDSHAKE_S,
    Gathering,
    ReportServer,
    framed,
    purpose_of,
)
from adaptra_megatron.transport.setup.host_placement import listen_tcp

SECRET, PLACE = b"s" * 32, "bench"
REPORT, DECISION = b"r" * 4096, b"d" * 3072
ITERATIONS = 6


def take_in(listener: socket.socket, ranks: int, said: Connection) -> None:
    """The process that the others report to; rank 0 is its own."""
    raise_limit()
    asyncio.run(_take_in(listener, ranks, said))


async def _take_in(listener: socket.socket, ranks: int, said: Connection) -> None:
    gathering, over, before_mb = Gathering(range(ranks)), asyncio.Event(), resident_mb(os.getpid())

    def add(rank: int, iteration: int, report: bytes) -> None:
        if gathering.add(rank, iteration, report):
            over.set()

    def figures(begun_s: float) -> dict[str, float]:
        files, memory_mb = len(os.listdir("/proc/self/fd")), resident_mb(os.getpid()) - before_mb
        return {"cpu_s": time.process_time() - begun_s, "files": files, "memory_mb": round(memory_mb, 1)}

    server, begun_s = ReportServer(SECRET, PLACE, range(ranks), add), time.process_time()
    server.listen(listener)
    for iteration in range(ITERATIONS):
        gathering.expect(iteration)
        add(0, iteration, REPORT)
        await over.wait()
        over.clear()
        assert not gathering.take()[0].lost
        found = figures(begun_s)
        begun_s = time.process_time()
        server.send_all(iteration, DECISION)
        said.send({**found, "sending_cpu_s": time.process_time() - begun_s})
        begun_s = time.process_time()


async def connected(
    address: tuple[str, int], ranks: int, secret: bytes = SECRET, place: str = PLACE
) -> list[socket.socket]:
    """All connections but rank 0's, made at once. Raises OSError or HandshakeError for one that fails."""
    loop = asyncio.get_running_loop()

    async def make(rank: int) -> socket.socket:
        link = socket.socket()
        link.setblocking(False)
        await asyncio.wait_for(loop.sock_connect(link, address), CONNECT_S)
        await connect(link, secret, purpose_of(place, rank, 0), HANDSHAKE_S)
        link.setblocking(True)
        return link

    return list(await asyncio.gather(*map(make, range(1, ranks))))


def raise_limit() -> None:
    """Open as many files as the host allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run(ranks: int) -> list[dict[str, float]]:
    """What each iteration took, the first with connecting."""
    listener, (host, port) = listen_tcp("127.0.0.1")
    listener.listen(ranks)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=take_in, args=(listener, ranks, theirs), daemon=True)
    process.start()
    links = asyncio.run(connected((str(host), int(port)), ranks))
    threading.Thread(target=drain, args=(links,), daemon=True).start()
    found = []
    for iteration in range(ITERATIONS):
        for link in links:
            link.sendall(framed(iteration, REPORT))
        found.append(ours.recv())
    process.join()
    return found


def main(argv: Sequence[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--ranks", default="128,2048")
    args = parser.parse_args(argv)
    raise_limit()
    say("| ranks | iteration | taking in, CPU | sending, CPU | files | memory |\n|" + "---|" * 6)
    for ranks in map(int, args.ranks.split(",")):
        for iteration, found in enumerate(run(ranks)):
            say(
                f"| {ranks:,} | {iteration} | {1e3 * found['cpu_s']:.1f} ms | {1e3 * found['sending_cpu_s']:.1f} ms | "
                f"{found['files']} | {found['memory_mb']} MB |"
            )


if __name__ == "__main__":
    main(sys.argv[1:])
