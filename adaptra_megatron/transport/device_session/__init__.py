# SPDX-License-Identifier: Apache-2.0
"""Sessions of the device path: communicators of two ranks over NCCL or gloo, made, watched and aborted."""
