# SPDX-License-Identifier: Apache-2.0
"""Emulate a cluster on one machine without a GPU: Megatron-core on CPU, compute times, faults, training, launching.

`megatron` (Megatron-core on a CPU-only torch), `training` (the training job, its text and its conditions), `faults`
(emulated compute times; slow, pausing or failing cells), `faults.network` (slow and failed links and host paths),
`jobs` (starts the processes of a job), `soak` (the part of a fault campaign inside ranks), `demo` (`make demo`).
"""
