# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a job on this machine, and compares trainings."""
