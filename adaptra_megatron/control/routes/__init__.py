# SPDX-License-Identifier: Apache-2.0
"""Routes of micro-batches between replicas: the decisions on them, and the order that each cell runs."""
