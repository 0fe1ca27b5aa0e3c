# SPDX-License-Identifier: Apache-2.0
"""What carries the frames of a host link between delegates: shared memory, TCP, RDMA."""
