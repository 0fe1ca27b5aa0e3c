# SPDX-License-Identifier: Apache-2.0
"""Replay recorded steps of a job by their dependencies, with some durations changed."""
