# SPDX-License-Identifier: Apache-2.0
"""Transports of a job whose links have one path: NCCL on GPUs, torch.distributed (gloo) on CPUs."""
