# SPDX-License-Identifier: Apache-2.0
"""Micro-batches of one replica at another replica's cells: their data, random numbers and losses."""
