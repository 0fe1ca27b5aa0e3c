# SPDX-License-Identifier: Apache-2.0
"""A cluster on one machine without a GPU: Megatron-core on CPU, emulated compute, faults, training, launching.

`megatron` (Megatron-core on a CPU-only torch), `training` (the training job, its text, what happens to it), `faults`
(compute that lasts a given time, cells that are slow, pause or die), `faults.network` (slow and dead links and host
paths), `jobs` (starts the processes of a job), `soak` (what a fault campaign runs in them), `demo` and
`transport_bench` (of `make demo` and `adaptra bench transport`).
"""
