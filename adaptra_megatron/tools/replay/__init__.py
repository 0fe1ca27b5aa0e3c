# SPDX-License-Identifier: Apache-2.0
"""Replays of recorded steps, with some durations changed."""
