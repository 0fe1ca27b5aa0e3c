# SPDX-License-Identifier: Apache-2.0
"""Transports whose links have one path: NCCL on GPUs, torch.distributed (gloo) on CPUs."""
