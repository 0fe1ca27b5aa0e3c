# SPDX-License-Identifier: Apache-2.0
"""RDMA through libibverbs, striped over several devices."""
