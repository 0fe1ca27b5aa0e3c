# SPDX-License-Identifier: Apache-2.0
"""Recorded steps of a job run again, by what waits for what, with some durations changed."""
