# SPDX-License-Identifier: Apache-2.0
"""Micro-batches that pass a stage at another replica's cell: costs, plans, simulation and checks of a whole job."""
