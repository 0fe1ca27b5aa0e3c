# SPDX-License-Identifier: Apache-2.0
"""Compute micro-batches of one replica at another replica's cells: their data, random numbers and losses."""
