# SPDX-License-Identifier: Apache-2.0
"""Create, watch and abort sessions of the device path: communicators of two ranks over NCCL or gloo."""
