# SPDX-License-Identifier: Apache-2.0
"""Carry the frames of a host link between delegates: shared memory, TCP, RDMA."""
