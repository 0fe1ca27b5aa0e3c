# SPDX-License-Identifier: Apache-2.0
"""T3: what products of a layer cost while blocks of NCCL's size stay on the GPU."""

from __future__ import annotations

import statistics

from gpu_check.findings import Report
from gpu_check.gpu import Gpu

TOKENS = 4096
SHAPES = {"qkv": (4096, 12288), "projection": (4096, 4096), "fc1": (4096, 11008), "fc2": (11008, 4096)}
"""Inner and outer size of a layer's four products in a model of 7B parameters."""
BLOCKS = (1, 2, 4, 8, 16, 32)
CLUSTER = 4
ROUNDS = 3
PENDING = 4
"""Blocks of two receives that wait, one from each neighbour, with links' default of two each."""
MOST = 1.1
"""How much longer the four products may take with them."""


def run(gpu: Gpu, report: Report) -> None:
    """All numbers of blocks, with and without clusters."""
    stream = gpu.link_streams(1)[0]
    report.begin("products without resident blocks are timed")
    alone = _layer_s(gpu)
    for cluster in (1, CLUSTER):
        for blocks in (blocks for blocks in BLOCKS if blocks % cluster == 0):
            where = f"with {blocks} resident blocks{f' in clusters of {cluster}' * (cluster > 1)}"
            may = f"take at most {MOST:g} times as long" if blocks <= PENDING else "end"
            promise = f"{where}, a layer's products {may}"
            report.begin(promise)
            standing = gpu.take_multiprocessors(stream, blocks, cluster)
            try:
                with_blocks = _layer_s(gpu)
            finally:
                standing.release()
                gpu.synchronize()
            ratio = sum(with_blocks.values()) / sum(alone.values())
            each = ", ".join(f"{name} {with_blocks[name] / alone[name]:.2f}" for name in SHAPES)
            report.show(promise, f"{ratio:.2f} times as long ({each})", blocks > PENDING or ratio <= MOST)


def _layer_s(gpu: Gpu) -> dict[str, float]:
    return {
        name: statistics.median(gpu.product_s(TOKENS, inner, outer) for _ in range(ROUNDS))
        for name, (inner, outer) in SHAPES.items()
    }
