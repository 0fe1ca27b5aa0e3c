# SPDX-License-Identifier: Apache-2.0
"""A cluster on one machine without a GPU: Megatron-core on CPU, emulated compute, slow links, training, launching.

Modules: `megatron_on_cpu` (Megatron-core on a CPU-only torch), `compute` (operations that last a given time),
`links` (slow links), `corpus` (text to train on), `training` (the training job), `variants` (several trainings in one
set of processes, compared bitwise), `published` (the published cases, rerun), `launch` (starts the processes of a job).
"""
